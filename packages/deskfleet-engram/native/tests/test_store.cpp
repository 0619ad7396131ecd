// Tests of a whole store over files written here: every backend, source, format and fault.
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "deskfleet_engram.h"
#include "format.h"

using namespace engram;

namespace {

thread_local uint64_t t_allocations = 0;

}  // namespace

__attribute__((noinline)) void* operator new(size_t count) {
  ++t_allocations;
  if (void* memory = std::malloc(count ? count : 1)) return memory;
  std::abort();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

constexpr uint32_t kColumns = 3;
constexpr uint64_t kRows[kColumns] = {1009, 1013, 1019};
constexpr uint64_t kTotal = 1009 + 1013 + 1019;

struct Shape {
  uint32_t row_format, weight_bytes, scale_bytes;
  uint32_t row_bytes() const { return weight_bytes + scale_bytes; }
};
constexpr Shape kFp8 = {ES_ROW_FP8, 256, 8}, kFp4 = {ES_ROW_NVFP4, 128, 16};

struct Files {
  std::string directory;
  std::vector<std::string> names;
  ~Files() {
    for (const std::string& name : names) unlink(name.c_str());
    rmdir(directory.c_str());
  }
};

void write_file(Files* files, const std::string& name, const std::vector<uint8_t>& bytes) {
  const std::string path = files->directory + "/" + name;
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  CHECK(fd >= 0);
  CHECK_EQ(write(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  CHECK(fsync(fd) == 0 && close(fd) == 0);
  files->names.push_back(path);
}

// One table, packed and as a shard.
struct World {
  Shape shape;
  uint32_t layer;
  Files files;
  std::vector<uint8_t> rows;  // kTotal rows, packed
  std::vector<es_column> columns;
  std::vector<std::string> paths;
  std::string shard;

  const uint8_t* row(uint64_t id) const { return rows.data() + id * shape.row_bytes(); }

  World(const Shape& of, uint32_t number) : shape(of), layer(number) {
    char name[] = "/var/tmp/engram-test-XXXXXX";
    CHECK(mkdtemp(name));
    files.directory = name;
    Random random(number + of.row_format);
    std::vector<uint8_t> weights(kTotal * shape.weight_bytes), scales(kTotal * shape.scale_bytes);
    random.fill(weights.data(), weights.size());
    random.fill(scales.data(), scales.size());
    rows.resize(kTotal * shape.row_bytes());
    for (uint64_t i = 0; i < kTotal; ++i) {
      std::memcpy(&rows[i * shape.row_bytes()], &weights[i * shape.weight_bytes], shape.weight_bytes);
      std::memcpy(&rows[i * shape.row_bytes() + shape.weight_bytes], &scales[i * shape.scale_bytes], shape.scale_bytes);
    }
    uint64_t first = 0;
    const uint32_t rpb = rows_per_block(shape.row_bytes());
    for (uint32_t c = 0; c < kColumns; ++c) {
      Superblock super;
      super.row_format = static_cast<uint16_t>(shape.row_format);
      super.row_bytes = static_cast<uint16_t>(shape.row_bytes());
      super.rpb = rpb;
      super.pack_id = 0xABCD;
      super.layer = layer, super.column = c;
      super.num_rows = super.prime = kRows[c];
      super.num_blocks = (kRows[c] + rpb - 1) / rpb;
      std::vector<uint8_t> bytes((super.num_blocks + 1) * kBlockBytes);
      encode_superblock(super, bytes.data());
      const es_identity identity = {0xABCD, layer, c, shape.row_format, shape.row_bytes()};
      CHECK_EQ(es_encode_blocks(&identity, 0, kRows[c], &weights[first * shape.weight_bytes], shape.weight_bytes,
                                &scales[first * shape.scale_bytes], shape.scale_bytes, bytes.data() + kBlockBytes),
               super.num_blocks);
      write_file(&files, "c" + std::to_string(c), bytes);
      first += kRows[c];
    }
    paths.assign(files.names.begin(), files.names.end());
    first = 0;
    for (uint32_t c = 0; c < kColumns; first += kRows[c], ++c)
      columns.push_back({paths[c].c_str(), c, 0, first, kRows[c]});
    std::vector<uint8_t> bytes(123);
    bytes.insert(bytes.end(), weights.begin(), weights.end());
    bytes.insert(bytes.end(), scales.begin(), scales.end());
    write_file(&files, "shard", bytes);
    shard = files.names.back();
  }

  es_table pack() const {
    es_table table = {};
    table.struct_bytes = sizeof table;
    table.layer = layer;
    table.source = ES_SOURCE_PACK;
    table.row_format = shape.row_format;
    table.weight_bytes = shape.weight_bytes, table.scale_bytes = shape.scale_bytes;
    table.global_scale = 0.5f;
    table.num_columns = kColumns;
    table.num_rows = kTotal;
    table.pack_id = 0xABCD;
    table.columns = columns.data();
    return table;
  }
  es_table in_place() const {
    es_table table = pack();
    table.source = ES_SOURCE_SHARD;
    table.weight_path = shard.c_str();
    table.weight_offset = 123;
    table.scale_offset = 123 + kTotal * shape.weight_bytes;
    return table;
  }
};

struct Opened {
  es_store* store = nullptr;
  explicit Opened(const std::vector<es_table>& tables, const es_options& options, const es_table* second = nullptr) {
    es_error error;
    CHECK_EQ(es_create(&options, &store, &error), ES_OK);
    for (const es_table& table : tables) {
      const int32_t result = es_add_table(store, &table, second, &error);
      if (result != ES_OK) std::fprintf(stderr, "%s\n", error.message);
      CHECK_EQ(result, ES_OK);
    }
    const int32_t result = es_start(store, &error);
    if (result != ES_OK) std::fprintf(stderr, "%s\n", error.message);
    CHECK_EQ(result, ES_OK);
  }
  ~Opened() { es_close(store); }
};

es_options options_for(uint32_t backend, uint64_t cache_bytes) {
  es_options options;
  es_options_init(&options);
  options.backend = backend;
  options.cache_bytes = cache_bytes;
  options.depth = 32;
  options.pool_threads = 4;
  return options;
}

std::vector<int64_t> some_ids(Random* random, size_t count) {
  std::vector<int64_t> ids(count);
  const uint64_t range = random->below(2) ? kTotal : 40;
  for (int64_t& id : ids) id = random->below(10) == 0 ? -1 : static_cast<int64_t>(random->below(range));
  if (count > 3) ids[0] = kTotal - 1, ids[1] = 0, ids[2] = 1008, ids[3] = 1009;
  return ids;
}

es_request request_for(const World& world, const std::vector<int64_t>& ids, uint32_t format, uint8_t* out,
                       uint8_t* scales, uint32_t io_class) {
  es_request request = {};
  request.struct_bytes = sizeof request;
  request.layer = world.layer;
  request.ids = ids.data();
  request.num_ids = ids.size();
  request.id_bytes = 8;
  request.io_class = io_class;
  request.format = format;
  request.out = out;
  request.out_scales = scales;
  return request;
}

// One buffer for every format: row bytes, then values.
struct Output {
  std::vector<uint8_t> out, scales;
  Output(const World& world, size_t count) : out(count * 512, 0xEE), scales(count * world.shape.scale_bytes, 0xEE) {}
};

void expect_row(const World& world, int64_t id, uint32_t format, const Output& output, size_t i) {
  const Shape& s = world.shape;
  std::vector<uint8_t> wanted(s.row_bytes());
  std::memset(wanted.data() + s.weight_bytes, s.row_format == ES_ROW_FP8 ? 127 : 0x38, s.scale_bytes);
  if (id >= 0) std::memcpy(wanted.data(), world.row(static_cast<uint64_t>(id)), s.row_bytes());
  if (format == ES_FORMAT_RAW) {
    CHECK(std::memcmp(&output.out[i * s.row_bytes()], wanted.data(), s.row_bytes()) == 0);
  } else if (format == ES_FORMAT_SPLIT) {
    CHECK(std::memcmp(&output.out[i * s.weight_bytes], wanted.data(), s.weight_bytes) == 0);
    CHECK(std::memcmp(&output.scales[i * s.scale_bytes], wanted.data() + s.weight_bytes, s.scale_bytes) == 0);
  } else {
    uint16_t values[256];
    CHECK_EQ(es_decode_bf16(1, s.row_format, s.weight_bytes, s.scale_bytes, 0.5f, wanted.data(), 1, values), ES_OK);
    CHECK(std::memcmp(&output.out[i * 512], values, 512) == 0);
  }
}

void expect_poison(const World& world, uint32_t format, const Output& output, size_t i) {
  const Shape& s = world.shape;
  if (format == ES_FORMAT_BF16) {
    for (size_t k = 0; k < 512; k += 2) CHECK(output.out[i * 512 + k] == 0xC0 && output.out[i * 512 + k + 1] == 0x7F);
    return;
  }
  const size_t width = format == ES_FORMAT_RAW ? s.row_bytes() : s.weight_bytes;
  for (size_t k = 0; k < width; ++k) CHECK_EQ(output.out[i * width + k], 0x7F);
  if (format == ES_FORMAT_SPLIT)
    for (size_t k = 0; k < s.scale_bytes; ++k) CHECK_EQ(output.scales[i * s.scale_bytes + k], 0x7F);
}

bool is_poison(const World& world, uint32_t format, const Output& output, size_t i) {
  if (format == ES_FORMAT_BF16) {
    static const uint8_t nan[2] = {0xC0, 0x7F};
    for (size_t k = 0; k < 512; k += 2)
      if (std::memcmp(&output.out[i * 512 + k], nan, 2) != 0) return false;
    return true;
  }
  const size_t width = format == ES_FORMAT_RAW ? world.shape.row_bytes() : world.shape.weight_bytes;
  for (size_t k = 0; k < width; ++k)
    if (output.out[i * width + k] != 0x7F) return false;
  return true;
}

es_counters counters_of(es_store* store) {
  es_counters counters = {};
  counters.struct_bytes = sizeof counters;
  es_get_counters(store, &counters);
  return counters;
}

void expect_sums(es_store* store) {
  const es_counters c = counters_of(store);
  CHECK_EQ(c.num_unique,
           c.num_cache_hits + c.num_read_rows + c.num_shared_rows + c.num_fallback_rows + c.num_failed_rows);
  uint64_t finished = 0;
  for (const uint64_t bucket : c.wait_us) finished += bucket;
  CHECK_EQ(finished, c.num_tickets);
  CHECK(c.num_decode_tickets <= c.num_tickets);
}

void test_bytes(const World& world) {
  Random random(5);
  for (uint32_t backend = ES_BACKEND_IO_URING; backend <= ES_BACKEND_POOL; ++backend)
    for (const uint64_t cache : {uint64_t{0}, uint64_t{1} << 16, uint64_t{1} << 22})
      for (const bool packed : {true, false})
        for (const uint32_t direct : {ES_DIRECT_AUTO, ES_DIRECT_NEVER}) {
          es_options options = options_for(backend, cache);
          options.direct = direct;
          Opened opened({packed ? world.pack() : world.in_place()}, options);
          uint64_t asked = 0;
          for (int round = 0; round < 12; ++round) {
            const size_t count = round == 0 ? 0 : round == 11 ? 5000 : 1 + random.below(100);
            const std::vector<int64_t> ids = some_ids(&random, count);
            const auto format = static_cast<uint32_t>(round % 3);
            Output output(world, count);
            const es_request request =
                request_for(world, ids, format, output.out.data(), output.scales.data(), round & 1);
            es_error error;
            CHECK_EQ(es_gather(opened.store, &request, &error), ES_OK);
            for (size_t i = 0; i < count; ++i) expect_row(world, ids[i], format, output, i), asked += ids[i] >= 0;
          }
          const es_counters c = counters_of(opened.store);
          CHECK_EQ(c.num_rows, asked);
          CHECK_EQ(c.num_failed_rows, 0u);
          expect_sums(opened.store);
        }
}

void test_strides_and_narrow_ids(const World& world) {
  Opened opened({world.pack()}, options_for(ES_BACKEND_AUTO, 0));
  const int32_t ids[3] = {7, -1, 3000};
  std::vector<uint8_t> out(3 * 1000, 0xEE), scales(3 * 100, 0xEE);
  es_request request = {};
  request.struct_bytes = sizeof request;
  request.layer = world.layer;
  request.ids = ids;
  request.num_ids = 3;
  request.id_bytes = 4;
  request.format = ES_FORMAT_SPLIT;
  request.out = out.data(), request.out_scales = scales.data();
  request.out_stride_bytes = 1000, request.scales_stride_bytes = 100;
  es_error error;
  CHECK_EQ(es_gather(opened.store, &request, &error), ES_OK);
  CHECK(std::memcmp(out.data(), world.row(7), world.shape.weight_bytes) == 0);
  CHECK(std::memcmp(out.data() + 2000, world.row(3000), world.shape.weight_bytes) == 0);
  CHECK_EQ(out[world.shape.weight_bytes], 0xEE);
  CHECK(std::memcmp(scales.data() + 200, world.row(3000) + world.shape.weight_bytes, world.shape.scale_bytes) == 0);
  request.out_stride_bytes = 5;
  CHECK_EQ(es_gather(opened.store, &request, &error), ES_E_ARGUMENT);
}

void test_refusals(const World& world) {
  es_store* store = nullptr;
  es_error error;
  es_options options = options_for(ES_BACKEND_AUTO, 0);
  CHECK_EQ(es_create(&options, &store, &error), ES_OK);
  const auto refused = [&](es_table table, int32_t result, int32_t kind) {
    CHECK_EQ(es_add_table(store, &table, nullptr, &error), result);
    CHECK_EQ(error.kind, kind);
    CHECK(error.message[0] != 0);
  };
  es_table table = world.pack();
  table.pack_id ^= 1;
  refused(table, ES_E_OPEN, ES_KIND_IDENTITY);
  table = world.pack();
  table.layer ^= 1;
  refused(table, ES_E_OPEN, ES_KIND_IDENTITY);
  table = world.pack();
  std::vector<es_column> columns = world.columns;
  table.columns = columns.data();
  std::swap(columns[0].path, columns[1].path);
  refused(table, ES_E_OPEN, ES_KIND_IDENTITY);
  columns = world.columns;
  columns[2].path = "/nonexistent/c02.egp";
  refused(table, ES_E_OPEN, ES_KIND_OPEN);
  columns[2].path = world.shard.c_str();
  refused(table, ES_E_OPEN, ES_KIND_SUPERBLOCK);
  columns = world.columns;
  columns[1].first_row += 1;
  refused(table, ES_E_ARGUMENT, ES_KIND_ARGUMENT);
  table = world.in_place();
  table.scale_offset += 1;
  refused(table, ES_E_OPEN, ES_KIND_SIZE);
  table.row_format = 9;
  refused(table, ES_E_ARGUMENT, ES_KIND_ARGUMENT);
  CHECK_EQ(es_start(store, &error), ES_E_ARGUMENT);
  es_close(store);
  options.backend = 9;
  CHECK_EQ(es_create(&options, &store, &error), ES_E_ARGUMENT);
  options.backend = 0, options.faults = "eio=7";
  CHECK_EQ(es_create(&options, &store, &error), ES_E_ARGUMENT);

  Opened opened({world.pack()}, options_for(ES_BACKEND_AUTO, 0));
  for (const int64_t bad : {int64_t{-2}, static_cast<int64_t>(kTotal), INT64_MIN, INT64_MAX}) {
    const std::vector<int64_t> ids = {1, bad, 2};
    Output output(world, 3);
    const es_request request = request_for(world, ids, ES_FORMAT_RAW, output.out.data(), nullptr, 0);
    CHECK_EQ(es_gather(opened.store, &request, &error), ES_E_RANGE);
    CHECK_EQ(static_cast<int64_t>(error.row), bad);
    for (const uint8_t byte : output.out) CHECK_EQ(byte, 0xEE);
  }
  es_ticket ticket = 0;
  es_request request = {};
  CHECK_EQ(es_submit(opened.store, &request, &ticket, &error), ES_E_ARGUMENT);
  CHECK_EQ(es_wait(opened.store, 12345, 0, &error), ES_E_TICKET);
  CHECK_EQ(es_release(opened.store, 0), ES_E_TICKET);
}

void test_elsewhere(const World& world) {
  es_table table = world.pack();
  std::vector<es_column> columns = world.columns;
  columns[1].path = nullptr;
  table.columns = columns.data();
  {
    Opened opened({table}, options_for(ES_BACKEND_AUTO, 0));
    const std::vector<int64_t> ids = {-1, 1009};
    Output output(world, ids.size());
    es_error error;
    const es_request request = request_for(world, ids, ES_FORMAT_RAW, output.out.data(), nullptr, 0);
    CHECK_EQ(es_gather(opened.store, &request, &error), ES_E_RANGE);
    CHECK_EQ(error.kind, ES_KIND_MISSING);
    CHECK(error.column == 1 && error.column_row == 0);
    for (const uint8_t byte : output.out) CHECK_EQ(byte, 0xEE);
  }
  columns[1].elsewhere = 1;
  Opened opened({table}, options_for(ES_BACKEND_AUTO, 0));
  const std::vector<int64_t> ids = {1008, 1009, 2021, 2022, 1009};
  Output output(world, ids.size());
  es_error error;
  const es_request request = request_for(world, ids, ES_FORMAT_SPLIT, output.out.data(), output.scales.data(), 0);
  CHECK_EQ(es_gather(opened.store, &request, &error), ES_OK);
  for (size_t i = 0; i < ids.size(); ++i)
    expect_row(world, ids[i] >= 1009 && ids[i] < 2022 ? -1 : ids[i], ES_FORMAT_SPLIT, output, i);
  CHECK_EQ(counters_of(opened.store).num_rows, 2u);
}

// What a lookup under faults has answered: every row is the right one, or poison with a report; nothing in between.
void expect_answer(const World& world, const std::vector<int64_t>& ids, uint32_t format, const Output& output,
                   int32_t result, const es_error& error) {
  CHECK(result == ES_OK || result == ES_FAILED);
  uint64_t poisoned = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (result == ES_FAILED && is_poison(world, format, output, i)) {
      expect_poison(world, format, output, i);
      ++poisoned;
    } else {
      expect_row(world, ids[i], format, output, i);
    }
  }
  if (result == ES_OK) return;
  CHECK(poisoned >= error.num_rows && error.num_rows > 0);
  CHECK(error.kind == ES_KIND_IO || error.kind == ES_KIND_SHORT_READ || error.kind == ES_KIND_CHECKSUM ||
        error.kind == ES_KIND_DEADLINE);
  CHECK(error.row < kTotal && std::strstr(error.message, "row "));
  if (error.file[0]) CHECK(error.block != UINT64_MAX && std::strstr(error.message, error.file));
}

// Random faults, one lookup at a time; nothing hangs.
void test_faults(const World& world, const char* faults, bool packed, bool has_second, uint64_t seed = 0) {
  for (uint32_t backend = ES_BACKEND_IO_URING; backend <= ES_BACKEND_POOL; ++backend) {
    es_options options = options_for(backend, 1 << 16);
    options.faults = faults;
    options.deadline_ms = 200;
    options.retries = 1;
    const es_table second = packed ? world.in_place() : world.pack();
    Opened opened({packed ? world.pack() : world.in_place()}, options, has_second ? &second : nullptr);
    Random random(seed + backend);
    uint64_t failed = 0;
    for (int round = 0; round < 60; ++round) {
      const std::vector<int64_t> ids = some_ids(&random, 1 + random.below(60));
      const auto format = static_cast<uint32_t>(round % 3);
      Output output(world, ids.size());
      const es_request request = request_for(world, ids, format, output.out.data(), output.scales.data(), round & 1);
      es_error error;
      const int32_t result = es_gather(opened.store, &request, &error);
      expect_answer(world, ids, format, output, result, error);
      failed += result == ES_FAILED;
    }
    expect_sums(opened.store);
    const es_counters c = counters_of(opened.store);
    CHECK(c.num_retries > 0 || std::strstr(faults, "hang"));
    if (has_second) CHECK(c.num_fallback_rows > 0 || failed == 0);
    if (!has_second && std::strstr(faults, "eio=0.5")) CHECK(failed > 0);
  }
}

void test_damage(const Shape& shape) {
  // What lies on the disk is wrong: a flipped bit, a hole, a foreign block, a truncated file.
  for (const char* damage : {"bit", "hole", "swap", "truncate"}) {
    for (const bool has_second : {false, true}) {
      World world(shape, 1);
      const es_table second = world.in_place();
      Opened opened({world.pack()}, options_for(ES_BACKEND_AUTO, 1 << 16), has_second ? &second : nullptr);
      const uint32_t rpb = rows_per_block(shape.row_bytes());
      const int fd = open(world.paths[1].c_str(), O_RDWR);
      CHECK(fd >= 0);
      uint8_t block[kBlockBytes], other[kBlockBytes];
      CHECK_EQ(pread(fd, block, kBlockBytes, 3 * kBlockBytes), static_cast<ssize_t>(kBlockBytes));
      CHECK_EQ(pread(fd, other, kBlockBytes, 5 * kBlockBytes), static_cast<ssize_t>(kBlockBytes));
      int32_t kind = ES_KIND_CHECKSUM;
      if (std::strcmp(damage, "bit") == 0) {
        block[5] ^= 4;
      } else if (std::strcmp(damage, "hole") == 0) {
        std::memset(block, 0, kBlockBytes);
        kind = ES_KIND_HOLE;
      } else if (std::strcmp(damage, "swap") == 0) {
        std::memcpy(block, other, kBlockBytes);
        kind = ES_KIND_MISPLACED;
      } else {
        CHECK(ftruncate(fd, 3 * kBlockBytes + 700) == 0);
        kind = ES_KIND_SHORT_READ;
      }
      if (kind != ES_KIND_SHORT_READ)
        CHECK_EQ(pwrite(fd, block, kBlockBytes, 3 * kBlockBytes), static_cast<ssize_t>(kBlockBytes));
      CHECK(fsync(fd) == 0 && close(fd) == 0);
      const std::vector<int64_t> ids = {static_cast<int64_t>(1009 + 2 * rpb), 4, 1009};
      Output output(world, 3);
      es_error error;
      const es_request request = request_for(world, ids, ES_FORMAT_SPLIT, output.out.data(), output.scales.data(), 0);
      const int32_t result = es_gather(opened.store, &request, &error);
      for (size_t i = has_second ? 0 : 1; i < 3; ++i) expect_row(world, ids[i], ES_FORMAT_SPLIT, output, i);
      const es_counters c = counters_of(opened.store);
      CHECK_EQ(c.errors[kind], 3u);
      if (has_second) {
        CHECK_EQ(result, ES_OK);
        CHECK_EQ(c.num_fallback_rows, 1u);
      } else {
        CHECK_EQ(result, ES_FAILED);
        CHECK_EQ(error.kind, kind);
        CHECK_EQ(error.block, 2u);
        CHECK_EQ(error.column, 1u);
        CHECK_EQ(error.column_row, 2u * rpb);
        CHECK_EQ(error.row, static_cast<uint64_t>(ids[0]));
        CHECK_EQ(error.num_rows, 1u);
        CHECK(std::strstr(error.message, world.paths[1].c_str()));
        expect_poison(world, ES_FORMAT_SPLIT, output, 0);
      }
    }
  }
}

void test_second_source_is_checked() {
  // The pack's row is damaged but its checksum is known, and the second source holds other bytes: no row at all.
  World world(kFp8, 1), other(kFp4, 2);
  std::vector<uint8_t> wrong(123 + kTotal * 264, 0x11);
  write_file(&world.files, "wrong", wrong);
  const int fd = open(world.paths[0].c_str(), O_RDWR);
  const uint8_t byte = static_cast<uint8_t>(world.row(0)[0] ^ 1);
  CHECK(pwrite(fd, &byte, 1, kBlockBytes) == 1 && fsync(fd) == 0 && close(fd) == 0);
  es_table second = world.in_place();
  second.weight_path = world.files.names.back().c_str();
  Opened opened({world.pack()}, options_for(ES_BACKEND_AUTO, 0), &second);
  const std::vector<int64_t> ids = {0, 1};
  Output output(world, 2);
  es_error error;
  const es_request request = request_for(world, ids, ES_FORMAT_RAW, output.out.data(), nullptr, 0);
  CHECK_EQ(es_gather(opened.store, &request, &error), ES_FAILED);
  expect_poison(world, ES_FORMAT_RAW, output, 0);
  expect_row(world, 1, ES_FORMAT_RAW, output, 1);
  CHECK(std::strstr(error.message, "second source"));
  expect_sums(opened.store);
}

// Six threads on one store of two tables, with tickets that are waited for, polled or given up.
void test_concurrency(const World& one, const World& two, bool two_packed = false, const char* faults = nullptr,
                      uint64_t seed = 0) {
  for (uint32_t backend = ES_BACKEND_IO_URING; backend <= ES_BACKEND_POOL; ++backend) {
    es_options options = options_for(backend, 1 << 17);
    options.faults = faults;
    options.retries = 1;
    Opened opened({one.pack(), two_packed ? two.pack() : two.in_place()}, options);
    std::vector<std::thread> threads;
    for (int t = 0; t < 6; ++t) {
      threads.emplace_back([&, t] {
        Random random(seed + static_cast<uint64_t>(t) + 100);
        for (int round = 0; round < 40; ++round) {
          const World& world = random.below(2) ? one : two;
          const size_t count = t == 0 ? 3000 : 1 + random.below(50);
          const std::vector<int64_t> ids = some_ids(&random, count);
          const auto format = static_cast<uint32_t>(random.below(3));
          Output output(world, count);
          const es_request request = request_for(world, ids, format, output.out.data(), output.scales.data(), t == 0);
          es_ticket ticket = 0;
          es_error error;
          CHECK_EQ(es_submit(opened.store, &request, &ticket, &error), ES_OK);
          if (random.below(8) == 0) {
            CHECK_EQ(es_release(opened.store, ticket), ES_OK);
            std::memset(output.out.data(), 0, output.out.size());
            CHECK_EQ(es_poll(opened.store, ticket, &error), ES_E_TICKET);
            for (const uint8_t byte : output.out) CHECK_EQ(byte, 0);
            continue;
          }
          if (random.below(2)) es_poll(opened.store, ticket, &error);
          const int32_t result = es_wait(opened.store, ticket, 20000000, &error);
          CHECK(result == ES_OK || faults);
          expect_answer(world, ids, format, output, result, error);
          CHECK_EQ(es_release(opened.store, ticket), ES_OK);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    expect_sums(opened.store);
  }
}

// A read that hangs fails its own ticket in time, and no other; closing works with it still out.
void test_hang(const World& world) {
  es_options options = options_for(ES_BACKEND_POOL, 0);
  options.faults = "hang=1";
  options.deadline_ms = 100;
  options.depth = 4;
  auto opened = std::make_unique<Opened>(std::vector<es_table>{world.pack()}, options);
  std::vector<int64_t> ids(200);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(15 * i);
  Output output(world, ids.size());
  es_request request = request_for(world, ids, ES_FORMAT_RAW, output.out.data(), nullptr, 0);
  es_ticket ticket = 0;
  es_error error;
  CHECK_EQ(es_submit(opened->store, &request, &ticket, &error), ES_OK);
  CHECK_EQ(es_wait(opened->store, ticket, 1000, &error), ES_PENDING);
  CHECK_EQ(es_wait(opened->store, ticket, 5000000, &error), ES_FAILED);
  CHECK_EQ(error.kind, ES_KIND_DEADLINE);
  CHECK_EQ(error.num_rows, 200u);
  for (size_t i = 0; i < ids.size(); ++i) expect_poison(world, ES_FORMAT_RAW, output, i);
  expect_sums(opened->store);
}

void test_close_with_tickets_out(const World& world) {
  for (int round = 0; round < 20; ++round) {
    Random random(static_cast<uint64_t>(round));
    const std::vector<int64_t> ids = some_ids(&random, 2000);
    Output output(world, ids.size());
    Opened opened({world.pack()}, options_for(ES_BACKEND_AUTO, 0));
    const es_request request = request_for(world, ids, ES_FORMAT_BF16, output.out.data(), nullptr, 1);
    es_ticket ticket = 0;
    es_error error;
    CHECK_EQ(es_submit(opened.store, &request, &ticket, &error), ES_OK);
  }
}

void test_work(const World& world, bool packed, size_t most) {
  Opened opened({packed ? world.pack() : world.in_place()}, options_for(ES_BACKEND_AUTO, 1 << 16));
  std::vector<int64_t> ids(most);
  Output output(world, ids.size());
  uint32_t count = 0;
  int32_t status = 99;
  es_work* work = nullptr;
  es_error error;
  const es_request request = request_for(world, ids, ES_FORMAT_BF16, output.out.data(), nullptr, 0);
  CHECK_EQ(es_work_create(opened.store, &request, &count, &status, &work, &error), ES_OK);
  Random random(9);
  for (int round = 0; round < 50; ++round) {
    count = static_cast<uint32_t>(random.below(most + 1));
    for (uint32_t i = 0; i < count; ++i) ids[i] = static_cast<int64_t>(random.below(kTotal + 1)) - 1;
    status = 99;
    const uint64_t before = t_allocations;
    if (round & 1) {
      es_hostfn(work);
    } else {
      es_hostfn_submit(work);
      es_hostfn_wait(work);
    }
    CHECK_EQ(t_allocations, before);  // a callback of a graph must not allocate
    CHECK_EQ(status, ES_OK);
    for (uint32_t i = 0; i < count; ++i) expect_row(world, ids[i], ES_FORMAT_BF16, output, i);
  }
  CHECK_EQ(es_work_failures(work), 0u);
  ids[1] = static_cast<int64_t>(kTotal), count = 3;
  es_hostfn(work);
  CHECK_EQ(status, ES_E_RANGE);
  CHECK_EQ(es_work_result(work, &error), ES_E_RANGE);
  for (uint32_t i = 0; i < 3; ++i) expect_poison(world, ES_FORMAT_BF16, output, i);
  count = static_cast<uint32_t>(most + 1);
  es_hostfn(work);
  CHECK_EQ(status, ES_E_ARGUMENT);
  CHECK_EQ(es_work_failures(work), 2u);
  ids[1] = 1, count = 3;
  es_hostfn_submit(work);
  es_work_destroy(work);
}

void test_fork(const World& world) {
  Opened opened({world.pack()}, options_for(ES_BACKEND_AUTO, 0));
  const pid_t child = fork();
  if (child == 0) {
    es_request request = {};
    request.struct_bytes = sizeof request;
    es_error error;
    const bool right = es_gather(opened.store, &request, &error) == ES_E_FORKED;
    es_close(opened.store);
    _exit(right ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void test_shared_cache(const World& world) {
  es_cache* cache = nullptr;
  CHECK_EQ(es_cache_create(1 << 20, 264, &cache), ES_OK);
  es_options options = options_for(ES_BACKEND_AUTO, 0);
  options.cache = cache;
  const std::vector<int64_t> ids = {5, 500, 2500};
  Output output(world, 3);
  es_error error;
  const es_request request = request_for(world, ids, ES_FORMAT_RAW, output.out.data(), nullptr, 0);
  for (int round = 0; round < 2; ++round) {
    Opened opened({world.pack()}, options);  // the second store finds what the first one read
    CHECK_EQ(es_gather(opened.store, &request, &error), ES_OK);
    CHECK_EQ(counters_of(opened.store).num_reads, round ? 0u : 3u);
  }
  for (int round = 0; round < 2; ++round) {
    Opened opened({world.in_place()}, options);  // nothing vouches for these bytes, so they are not shared
    CHECK_EQ(es_gather(opened.store, &request, &error), ES_OK);
    CHECK(counters_of(opened.store).num_reads > 0);
  }
  es_cache_counters counters = {};
  counters.struct_bytes = sizeof counters;
  es_cache_get_counters(cache, &counters);
  CHECK_EQ(counters.num_rows, 9u);
  es_cache_release(cache);
}

void test_prefetch_is_capped(const World& world) {
  es_options options = options_for(ES_BACKEND_AUTO, 0);
  options.prefetch_depth = 3;
  options.decode_hold_ms = 60000;
  options.faults = "delay=0.3:300";
  Opened opened({world.pack()}, options);
  std::vector<int64_t> all(kTotal);
  for (size_t i = 0; i < kTotal; ++i) all[i] = static_cast<int64_t>(i);
  Output big(world, kTotal), small(world, 20);
  const std::vector<int64_t> few(all.begin() + 100, all.begin() + 120);
  const es_request decode = request_for(world, few, ES_FORMAT_RAW, small.out.data(), nullptr, ES_CLASS_DECODE);
  const es_request prefetch = request_for(world, all, ES_FORMAT_RAW, big.out.data(), nullptr, ES_CLASS_PREFETCH);
  es_error error;
  es_ticket ticket = 0;
  CHECK_EQ(es_gather(opened.store, &decode, &error), ES_OK);
  CHECK_EQ(es_submit(opened.store, &prefetch, &ticket, &error), ES_OK);
  for (int round = 0; round < 10; ++round) CHECK_EQ(es_gather(opened.store, &decode, &error), ES_OK);
  CHECK_EQ(es_wait(opened.store, ticket, -1, &error), ES_OK);
  for (size_t i = 0; i < kTotal; ++i) expect_row(world, all[i], ES_FORMAT_RAW, big, i);
  const es_counters c = counters_of(opened.store);
  CHECK_EQ(c.max_prefetch_depth, 3u);
  CHECK(c.num_decode_reads > 0 && c.num_decode_reads < c.num_reads);
  expect_sums(opened.store);
}

// Everything random, for as long as asked: ids, sources, backends, faults, threads.
// `may_hang`: a store that is closed while the device still owes it answers keeps its buffers for good, on purpose.
void soak(const World& fp8, const World& fp4, long seconds, bool may_hang) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  Random random(static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count()));
  for (uint64_t round = 1; std::chrono::steady_clock::now() < until; ++round) {
    const bool packed = random.below(2) != 0, has_second = random.below(2) != 0, both_packed = random.below(2) != 0;
    const uint64_t percent = 1 + random.below(20), seed = random.below(1u << 30);
    std::string faults = "seed=" + std::to_string(seed);
    for (const char* kind : {",eio=0.", ",short=0.", ",delay=0."})
      faults += kind + std::string(percent < 10 ? "0" : "") + std::to_string(percent);
    const std::string flips = faults + ",flip=0.2";  // only where every byte meets a checksum
    std::string alone = packed && !has_second ? flips : faults;
    if (may_hang && random.below(4) == 0) alone += ",hang=0.0005";
    std::printf("round %llu: %s %s %s; then threads on %s %s\n", static_cast<unsigned long long>(round),
                packed ? "pack" : "shard", has_second ? "with second source" : "alone", alone.c_str(),
                both_packed ? "packs" : "pack and shard", both_packed ? flips.c_str() : faults.c_str());
    std::fflush(stdout);
    test_faults(random.below(2) ? fp8 : fp4, alone.c_str(), packed, has_second, seed);
    test_concurrency(fp8, fp4, both_packed, both_packed ? flips.c_str() : faults.c_str(), seed);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2 && std::strcmp(argv[1], "--soak") == 0) {
    const World fp8(kFp8, 1), fp4(kFp4, 14);
    soak(fp8, fp4, std::atol(argv[2]), argc > 3 && std::strcmp(argv[3], "--hang") == 0);
    std::printf("soak: ok\n");
    return 0;
  }
  const bool only_portable = argc > 1 && std::strcmp(argv[1], "--no-kernel-aio") == 0;
  const World fp8(kFp8, 1), fp4(kFp4, 14);
  if (only_portable) {  // an emulator without io_uring and AIO
    Opened opened({fp8.pack(), fp4.in_place()}, options_for(ES_BACKEND_AUTO, 0));
    char report[2000];
    es_report(opened.store, report, sizeof report);
    std::printf("%s\n", report);
  } else {
    test_bytes(fp8);
    test_bytes(fp4);
    for (const bool packed : {true, false})
      for (const bool has_second : {false, true}) {
        test_faults(fp8, "seed=3,eio=0.05,short=0.05,delay=0.1:500", packed, has_second);
        test_faults(fp4, "seed=4,eio=0.5", packed, has_second);
        test_faults(fp8, "seed=5,hang=0.002", packed, has_second);
      }
    test_faults(fp8, "seed=6,flip=0.3,eio=0.02", true, false);
    test_faults(fp4, "seed=7,flip=0.3", true, false);
    test_concurrency(fp8, fp4);
    test_concurrency(fp8, fp4, true, "seed=8,eio=0.1,short=0.1,flip=0.2,delay=0.1:500");
  }
  test_strides_and_narrow_ids(fp8);
  test_refusals(fp8);
  test_elsewhere(fp4);
  test_damage(kFp8);
  test_damage(kFp4);
  test_second_source_is_checked();
  test_hang(fp8);
  test_close_with_tickets_out(fp8);
  test_work(fp8, true, 50);
  test_work(fp8, false, 50);
  test_work(fp8, true, 3000);  // sorted by counting
  test_fork(fp8);
  test_shared_cache(fp8);
  test_prefetch_is_capped(fp8);
  std::printf("store: ok\n");
}
