// Where rows lie: open files, and for each layer's table the columns or ranges in them. Everything that can be known
// without reading rows is checked here, before a store starts. Rows are not read here.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache.h"
#include "decode.h"
#include "deskfleet_engram.h"
#include "format.h"

namespace engram {

constexpr uint64_t kMaxRows = uint64_t{1} << 40;

struct File {
  std::string path;
  int fd = -1;
  uint64_t num_bytes = 0;
  bool direct = false;
};

class Files {
 public:
  Files(uint32_t direct_mode, bool allow_holes) : direct_mode_(direct_mode), allow_holes_(allow_holes) {}
  ~Files();
  Files(const Files&) = delete;

  // Position of the file, opened at most once; -1 with `error` set.
  int open(const std::string& path, es_error* error);
  // Do bytes [begin, end) exist and hold data? False with `error` set.
  bool check_range(int file, uint64_t begin, uint64_t end, es_error* error) const;
  bool read_block(int file, uint64_t offset, uint8_t* block, es_error* error) const;

  const File& operator[](size_t file) const { return files_[file]; }
  size_t size() const { return files_.size(); }
  size_t num_direct() const;
  const std::string& why_buffered() const { return why_buffered_; }

 private:
  uint32_t direct_mode_;
  bool allow_holes_;
  std::vector<File> files_;
  std::string why_buffered_;
};

struct Column {
  uint64_t first_row = 0, num_rows = 0;
  uint32_t column = 0;
  uint32_t seed_state = 0;  // CRC register after the constant part of every row's seed
  int file = -1;            // -1: not held here
  bool elsewhere = false;   // then another rank holds it
};

struct Source {
  bool is_pack = false;
  uint64_t pack_id = 0;
  std::vector<Column> columns;
  int weight_file = -1, scale_file = -1;
  uint64_t weight_offset = 0, scale_offset = 0;

  const Column& column_of(uint64_t row) const;  // pack only
};

struct Table {
  uint32_t layer = 0, row_format = 0, weight_bytes = 0, scale_bytes = 0, row_bytes = 0, rpb = 0;
  uint64_t num_rows = 0;
  Source first, second;
  bool has_second = false;
  bool is_whole = true;  // no column is missing, but for those of other ranks
  std::unique_ptr<RowDecoder> decoder;
  RowCache::Identity identity = {};
  uint32_t cache_table = 0;

  es_identity identity_of(const Source& source, uint32_t column) const {
    return {source.pack_id, layer, column, row_format, row_bytes};
  }
};

// Open and check a table with its optional second source. ES_OK, or a negative es_result with `error` set.
int32_t open_table(const es_table& described, const es_table* second, Files* files, Table* table, es_error* error);

}  // namespace engram
