#include "table.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "crc32c.h"
#include "failure.h"

namespace engram {
namespace {

struct AlignedBlock {
  alignas(kBlockBytes) uint8_t bytes[kBlockBytes];
};

unsigned long long wide(uint64_t value) { return value; }

int32_t check_shape(const es_table& d, es_error* error) {
  if (d.row_format != ES_ROW_FP8 && d.row_format != ES_ROW_NVFP4) {
    set_error(error, ES_KIND_ARGUMENT, 0, "layer %u: row format %u is unknown", d.layer, d.row_format);
    return ES_E_ARGUMENT;
  }
  const bool fits =
      d.weight_bytes && d.scale_bytes && d.weight_bytes <= kBlockBytes && d.scale_bytes <= kBlockBytes &&
      d.weight_bytes + d.scale_bytes <= kBlockBytes - kHeaderBytes - 4 &&
      (d.row_format == ES_ROW_FP8 ? d.weight_bytes % d.scale_bytes == 0 : d.weight_bytes == 8 * d.scale_bytes);
  if (!fits) {
    set_error(error, ES_KIND_ARGUMENT, 0, "layer %u: %u weight and %u scale bytes make no row of format %u", d.layer,
              d.weight_bytes, d.scale_bytes, d.row_format);
    return ES_E_ARGUMENT;
  }
  if (d.num_rows == 0 || d.num_rows > kMaxRows) {
    set_error(error, ES_KIND_ARGUMENT, 0, "layer %u: %llu rows; a table has 1 to 2^40", d.layer, wide(d.num_rows));
    return ES_E_ARGUMENT;
  }
  return ES_OK;
}

int32_t check_columns(const es_table& d, es_error* error) {
  uint64_t next = 0;
  for (uint32_t i = 0; i < d.num_columns; ++i) {
    const es_column& column = d.columns[i];
    if (column.first_row != next || column.num_rows == 0 || column.num_rows > d.num_rows - next) {
      set_error(error, ES_KIND_ARGUMENT, 0, "layer %u: column %u has rows %llu to %llu, but %llu were covered of %llu",
                d.layer, column.column, wide(column.first_row), wide(column.first_row + column.num_rows), wide(next),
                wide(d.num_rows));
      return ES_E_ARGUMENT;
    }
    next += column.num_rows;
  }
  if (next != d.num_rows) {
    set_error(error, ES_KIND_ARGUMENT, 0, "layer %u: columns cover %llu of %llu rows", d.layer, wide(next),
              wide(d.num_rows));
    return ES_E_ARGUMENT;
  }
  return ES_OK;
}

int32_t check_superblock(const es_table& d, const es_column& c, const Superblock& s, const char* path,
                         es_error* error) {
  const uint32_t row_bytes = d.weight_bytes + d.scale_bytes;
  const struct {
    const char* name;
    uint64_t found, wanted;
  } fields[] = {{"pack id", s.pack_id, d.pack_id},
                {"layer", s.layer, d.layer},
                {"column", s.column, c.column},
                {"row format", s.row_format, d.row_format},
                {"bytes per row", s.row_bytes, row_bytes},
                {"rows", s.num_rows, c.num_rows},
                {"prime", s.prime, c.num_rows}};
  for (const auto& field : fields) {
    if (field.found == field.wanted) continue;
    set_error(error, ES_KIND_IDENTITY, 0,
              std::strcmp(field.name, "pack id") == 0 ? "%s: has %s %016llx; wanted is %016llx"
                                                      : "%s: has %s %llu; wanted is %llu",
              path, field.name, wide(field.found), wide(field.wanted));
    return ES_E_OPEN;
  }
  if (d.manifest_sha256 && std::memcmp(d.manifest_sha256, s.manifest_sha256, 32) != 0) {
    set_error(error, ES_KIND_IDENTITY, 0, "%s: belongs to another manifest of the same pack id %016llx", path,
              wide(d.pack_id));
    return ES_E_OPEN;
  }
  return ES_OK;
}

int32_t open_column(const es_table& d, const es_column& c, Files* files, Column* out, es_error* error) {
  *out = {c.first_row, c.num_rows, c.column, identity_state(d.pack_id, d.layer, c.column), -1, c.elsewhere != 0};
  if (!c.path) return ES_OK;
  if (error) error->column = c.column;
  const int file = files->open(c.path, error);
  if (file < 0) return ES_E_OPEN;
  AlignedBlock block;
  Superblock superblock;
  std::string why;
  const uint64_t num_bytes = (*files)[static_cast<size_t>(file)].num_bytes;
  if (num_bytes < kBlockBytes) {
    set_error(error, ES_KIND_SIZE, 0, "%s: %llu bytes are no packed column", c.path, wide(num_bytes));
    return ES_E_OPEN;
  }
  if (!files->read_block(file, 0, block.bytes, error)) return ES_E_OPEN;
  const int32_t kind = decode_superblock(block.bytes, &superblock, &why);
  if (kind != ES_KIND_NONE) {
    set_error(error, kind, 0, "%s: %s", c.path, why.c_str());
    return ES_E_OPEN;
  }
  const int32_t result = check_superblock(d, c, superblock, c.path, error);
  if (result != ES_OK) return result;
  const uint64_t wanted = (superblock.num_blocks + 1) * kBlockBytes;
  if (num_bytes != wanted) {
    set_error(error, ES_KIND_SIZE, 0, "%s: has %llu bytes; its %llu blocks make %llu", c.path, wide(num_bytes),
              wide(superblock.num_blocks), wide(wanted));
    return ES_E_OPEN;
  }
  if (!files->check_range(file, 0, wanted, error)) return ES_E_OPEN;
  out->file = file;
  return ES_OK;
}

int32_t open_shard(const es_table& d, Files* files, Source* out, es_error* error) {
  if (!d.weight_path) {
    set_error(error, ES_KIND_ARGUMENT, 0, "layer %u: a shard needs weight_path", d.layer);
    return ES_E_ARGUMENT;
  }
  const struct {
    const char* path;
    uint64_t offset;
    uint32_t width;
    int* file;
  } parts[] = {{d.weight_path, d.weight_offset, d.weight_bytes, &out->weight_file},
               {d.scale_path ? d.scale_path : d.weight_path, d.scale_offset, d.scale_bytes, &out->scale_file}};
  for (const auto& part : parts) {
    if (part.offset > uint64_t{1} << 62) {
      set_error(error, ES_KIND_ARGUMENT, 0, "layer %u: offset %llu is no place in a file", d.layer, wide(part.offset));
      return ES_E_ARGUMENT;
    }
    *part.file = files->open(part.path, error);
    if (*part.file < 0) return ES_E_OPEN;
    if (!files->check_range(*part.file, part.offset, part.offset + d.num_rows * part.width, error)) return ES_E_OPEN;
  }
  out->weight_offset = d.weight_offset;
  out->scale_offset = d.scale_offset;
  return ES_OK;
}

int32_t open_source(const es_table& d, Files* files, Source* out, es_error* error) {
  int32_t result = check_shape(d, error);
  if (result != ES_OK) return result;
  if (d.source == ES_SOURCE_SHARD) return open_shard(d, files, out, error);
  if (d.source != ES_SOURCE_PACK || !d.columns) {
    set_error(error, ES_KIND_ARGUMENT, 0, "layer %u: source %u without columns", d.layer, d.source);
    return ES_E_ARGUMENT;
  }
  result = check_columns(d, error);
  out->is_pack = true;
  out->pack_id = d.pack_id;
  out->columns.resize(d.num_columns);
  for (uint32_t i = 0; result == ES_OK && i < d.num_columns; ++i)
    result = open_column(d, d.columns[i], files, &out->columns[i], error);
  return result;
}

RowCache::Identity cache_identity(const es_table& d) {
  RowCache::Identity identity = {};
  const uint32_t words[4] = {d.layer, d.row_format, d.weight_bytes, d.scale_bytes};
  std::memcpy(identity.data(), &d.pack_id, 8);
  std::memcpy(identity.data() + 8, words, 16);
  if (d.manifest_sha256) std::memcpy(identity.data() + 24, d.manifest_sha256, 32);
  return identity;
}

}  // namespace

Files::~Files() {
  for (const File& file : files_)
    if (file.fd >= 0) close(file.fd);
}

int Files::open(const std::string& path, es_error* error) {
  set_file(error, path);
  for (size_t i = 0; i < files_.size(); ++i)
    if (files_[i].path == path) return static_cast<int>(i);
  File file;
  file.path = path;
  int refused = 0;
  if (direct_mode_ != ES_DIRECT_NEVER) {
    file.fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    file.direct = file.fd >= 0;
    if (file.direct) {
      // Some file systems accept the flag and then refuse every read.
      AlignedBlock block;
      if (pread(file.fd, block.bytes, kBlockBytes, 0) < 0) {
        refused = errno;
        close(file.fd);
        file.fd = -1;
        file.direct = false;
      }
    } else {
      refused = errno;
    }
    if (refused && (refused != EINVAL || direct_mode_ == ES_DIRECT_REQUIRE)) {
      set_error(error, ES_KIND_OPEN, refused, "%s: cannot open%s: %s", path.c_str(),
                refused == EINVAL ? " for direct reads" : "", std::strerror(refused));
      return -1;
    }
  }
  if (file.fd < 0) file.fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat status;
  if (file.fd < 0 || fstat(file.fd, &status) < 0 || !S_ISREG(status.st_mode)) {
    const int why = file.fd < 0 ? errno : EINVAL;
    if (file.fd >= 0) close(file.fd);
    set_error(error, ES_KIND_OPEN, why, "%s: cannot open: %s", path.c_str(),
              why == EINVAL ? "no regular file" : std::strerror(why));
    return -1;
  }
  if (!file.direct) why_buffered_ = direct_mode_ == ES_DIRECT_NEVER ? "as asked" : path + ": " + std::strerror(refused);
  file.num_bytes = static_cast<uint64_t>(status.st_size);
  files_.push_back(std::move(file));
  return static_cast<int>(files_.size()) - 1;
}

bool Files::check_range(int index, uint64_t begin, uint64_t end, es_error* error) const {
  const File& file = files_[static_cast<size_t>(index)];
  if (end > file.num_bytes) {
    set_error(error, ES_KIND_SIZE, 0, "%s: has %llu bytes; the table ends at byte %llu", file.path.c_str(),
              wide(file.num_bytes), wide(end));
    return false;
  }
  if (allow_holes_) return true;
  const off_t hole = lseek(file.fd, static_cast<off_t>(begin), SEEK_HOLE);
  // A file system that does not know holes reports the end of the file.
  if (hole < 0 || static_cast<uint64_t>(hole) >= end) return true;
  set_error(error, ES_KIND_HOLE, 0, "%s: never written from byte %llu on; the table spans %llu to %llu",
            file.path.c_str(), wide(static_cast<uint64_t>(hole)), wide(begin), wide(end));
  return false;
}

bool Files::read_block(int index, uint64_t offset, uint8_t* block, es_error* error) const {
  const File& file = files_[static_cast<size_t>(index)];
  const ssize_t got = pread(file.fd, block, kBlockBytes, static_cast<off_t>(offset));
  if (got == static_cast<ssize_t>(kBlockBytes)) return true;
  set_error(error, got < 0 ? ES_KIND_IO : ES_KIND_SHORT_READ, got < 0 ? errno : 0, "%s: reading the superblock: %s",
            file.path.c_str(), got < 0 ? std::strerror(errno) : "the file ends inside");
  return false;
}

size_t Files::num_direct() const {
  return static_cast<size_t>(std::count_if(files_.begin(), files_.end(), [](const File& f) { return f.direct; }));
}

const Column& Source::column_of(uint64_t row) const {
  const auto after = std::upper_bound(columns.begin(), columns.end(), row,
                                      [](uint64_t value, const Column& column) { return value < column.first_row; });
  return *(after - 1);
}

int32_t open_table(const es_table& d, const es_table* second, Files* files, Table* table, es_error* error) {
  if (error) error->layer = d.layer;
  int32_t result = open_source(d, files, &table->first, error);
  if (result != ES_OK) return result;
  table->layer = d.layer;
  table->row_format = d.row_format;
  table->weight_bytes = d.weight_bytes;
  table->scale_bytes = d.scale_bytes;
  table->row_bytes = d.weight_bytes + d.scale_bytes;
  table->rpb = rows_per_block(table->row_bytes);
  table->num_rows = d.num_rows;
  table->decoder =
      std::make_unique<RowDecoder>(d.row_format, d.weight_bytes, d.scale_bytes, d.global_scale, Isa::kBest);
  table->identity = cache_identity(d);
  for (const Column& column : table->first.columns) table->is_whole &= column.file >= 0 || column.elsewhere;
  if (second) {
    if (second->layer != d.layer || second->row_format != d.row_format || second->weight_bytes != d.weight_bytes ||
        second->scale_bytes != d.scale_bytes || second->num_rows != d.num_rows) {
      set_error(error, ES_KIND_ARGUMENT, 0, "layer %u: its second source describes another table", d.layer);
      return ES_E_ARGUMENT;
    }
    result = open_source(*second, files, &table->second, error);
    if (result != ES_OK) return result;
    table->has_second = true;
  }
  clear_error(error);
  return ES_OK;
}

}  // namespace engram
