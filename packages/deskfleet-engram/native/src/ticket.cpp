#include "ticket.h"

#include <algorithm>
#include <cstring>

#include "failure.h"

namespace engram {
namespace {

constexpr uint64_t kSmallSort = 2048;  // below, comparing beats counting
constexpr uint32_t kProbeBatch = 128;  // rows looked up per lock of the cache
constexpr size_t kKeptIds = 1u << 16;  // a ticket that was larger gives its memory back
constexpr uint32_t kRadixBits = 10;

struct Widths {
  uint64_t out, scales;
};

Widths widths(const Table& table, uint32_t format) {
  switch (format) {
    case ES_FORMAT_RAW:
      return {table.row_bytes, 0};
    case ES_FORMAT_SPLIT:
      return {table.weight_bytes, table.scale_bytes};
    default:
      return {uint64_t{2} * table.decoder->num_values(), 0};
  }
}

int64_t load_id(const es_request& request, uint64_t position) {
  if (request.id_bytes == 4) {
    int32_t id;
    std::memcpy(&id, static_cast<const uint8_t*>(request.ids) + position * 4, 4);
    return id;
  }
  int64_t id;
  std::memcpy(&id, static_cast<const uint8_t*>(request.ids) + position * 8, 8);
  return id;
}

void fill_words(uint8_t* out, uint16_t word, uint64_t num_bytes) {
  for (uint64_t i = 0; i < num_bytes; i += 2) std::memcpy(out + i, &word, 2);
}

void poison_row(const Table& table, uint32_t format, uint8_t* out, uint8_t* scales) {
  const Widths width = widths(table, format);
  if (format == ES_FORMAT_BF16) {
    fill_words(out, kBf16Nan, width.out);
  } else {
    std::memset(out, kPoisonByte, width.out);
    if (width.scales) std::memset(scales, kPoisonByte, width.scales);
  }
}

// Least significant digits first. Positions ascend already and every pass keeps order, so only id bits need sorting.
void radix_sort(std::vector<uint64_t>* values, std::vector<uint64_t>* scratch, uint64_t num_rows) {
  scratch->resize(values->size());
  for (uint32_t shift = Ticket::kPositionBits;
       shift == Ticket::kPositionBits || num_rows >> (shift - Ticket::kPositionBits); shift += kRadixBits) {
    uint32_t starts[1u << kRadixBits] = {};
    const auto digit = [shift](uint64_t value) { return (value >> shift) & ((1u << kRadixBits) - 1); };
    for (const uint64_t value : *values) ++starts[digit(value)];
    uint32_t sum = 0;
    for (uint32_t& start : starts) {
      const uint32_t count = start;
      start = sum;
      sum += count;
    }
    for (const uint64_t value : *values) (*scratch)[starts[digit(value)]++] = value;
    values->swap(*scratch);
  }
}

}  // namespace

void Ticket::reserve(const Table& of, uint64_t num_ids) {
  order_.reserve(num_ids);
  if (num_ids > kSmallSort) scratch_.reserve(num_ids);
  begin_.reserve(num_ids + 1);
  misses_.reserve(num_ids);
  state.reserve(num_ids);
  pieces.reserve(of.first.is_pack ? num_ids : 2 * num_ids);
  if (!of.first.is_pack) staging_.reserve(num_ids * of.row_bytes);
}

void Ticket::trim() {
  if (order_.capacity() <= kKeptIds) return;
  for (auto* list : {&order_, &scratch_}) std::vector<uint64_t>().swap(*list);
  for (auto* list : {&begin_, &misses_}) std::vector<uint32_t>().swap(*list);
  for (auto* list : {&state, &staging_}) std::vector<uint8_t>().swap(*list);
  std::vector<Piece>().swap(pieces);
}

int32_t Ticket::check(const Table& table, const es_request& r, es_error* error) {
  const Widths width = widths(table, r.format);
  const char* fault = nullptr;
  if (r.format > ES_FORMAT_BF16)
    fault = "format is unknown";
  else if (r.io_class > ES_CLASS_PREFETCH)
    fault = "io_class is unknown";
  else if (r.id_bytes != 4 && r.id_bytes != 8)
    fault = "id_bytes must be 4 or 8";
  else if (r.num_ids > Ticket::kMaxIds)
    fault = "num_ids is above 2^24";
  else if (r.num_ids && (!r.ids || !r.out))
    fault = "ids or out is null";
  else if (r.num_ids && r.format == ES_FORMAT_SPLIT && !r.out_scales)
    fault = "out_scales is null";
  else if (r.out_stride_bytes && r.out_stride_bytes < width.out)
    fault = "out_stride_bytes is below a row";
  else if (r.scales_stride_bytes && r.scales_stride_bytes < width.scales)
    fault = "scales_stride_bytes is below a row";
  else if (r.format == ES_FORMAT_BF16 && ((reinterpret_cast<uintptr_t>(r.out) | r.out_stride_bytes) & 1))
    fault = "out is not aligned to 2 bytes";
  if (!fault) return ES_OK;
  set_error(error, ES_KIND_ARGUMENT, 0, "layer %u: %s", table.layer, fault);
  return ES_E_ARGUMENT;
}

int32_t Ticket::begin_plan(const Table& of, const es_request& request, es_error* error) {
  const int32_t result = check(of, request, error);
  if (result != ES_OK) return result;
  for (uint64_t i = 0; i < request.num_ids; ++i) {
    const int64_t id = load_id(request, i);
    if (id >= -1 && (id < 0 || static_cast<uint64_t>(id) < of.num_rows)) {
      if (of.is_whole || id < 0) continue;
      const Column& column = of.first.column_of(static_cast<uint64_t>(id));
      if (column.file >= 0 || column.elsewhere) continue;
      set_error(error, ES_KIND_MISSING, 0, "layer %u: row %lld is in column %u, which is not open here", of.layer,
                static_cast<long long>(id), column.column);
      if (error) {
        error->layer = of.layer;
        error->column = column.column;
        error->row = static_cast<uint64_t>(id);
        error->column_row = error->row - column.first_row;
      }
      return ES_E_RANGE;
    }
    set_error(error, ES_KIND_RANGE, 0, "layer %u: row %lld at position %llu is outside 0..%llu", of.layer,
              static_cast<long long>(id), static_cast<unsigned long long>(i),
              static_cast<unsigned long long>(of.num_rows - 1));
    if (error) error->row = static_cast<uint64_t>(id);
    return ES_E_RANGE;
  }
  table = &of;
  io_class = request.io_class;
  format = request.format;
  num_ids_ = request.num_ids;
  out_ = static_cast<uint8_t*>(request.out);
  out_scales_ = static_cast<uint8_t*>(request.out_scales);
  const Widths width = widths(of, format);
  out_stride_ = request.out_stride_bytes ? request.out_stride_bytes : width.out;
  scales_stride_ = request.scales_stride_bytes && width.scales ? request.scales_stride_bytes : width.scales;
  clear_error(&failure);
  cancel_word.store(kNotCancelled, std::memory_order_relaxed);
  next_piece = 0;
  misses_left = pieces_waiting = 0;
  probe_again = listed = touched = false;
  order_.clear();
  for (uint64_t i = 0; i < num_ids_; ++i) {
    const int64_t id = load_id(request, i);
    // A caller that changes ids during the call must not make this read past the table.
    if (id < 0 || static_cast<uint64_t>(id) >= of.num_rows) {
      neutral(i);
    } else {
      order_.push_back(static_cast<uint64_t>(id) << kPositionBits | i);
    }
  }
  sort_ids();
  return ES_OK;
}

void Ticket::sort_ids() {
  if (order_.size() > kSmallSort) {
    radix_sort(&order_, &scratch_, table->num_rows - 1);
  } else {
    std::sort(order_.begin(), order_.end());
  }
  begin_.clear();
  uint64_t last = UINT64_MAX;
  for (size_t i = 0; i < order_.size(); ++i) {
    const uint64_t row = order_[i] >> kPositionBits;
    if (row != last) begin_.push_back(static_cast<uint32_t>(i));
    last = row;
  }
  begin_.push_back(static_cast<uint32_t>(order_.size()));
}

Ticket::Found Ticket::finish_plan(RowCache* cache) {
  misses_.clear();
  pieces.clear();
  salvage_pieces.clear();
  salvage.clear();
  const auto num_unique = static_cast<uint32_t>(begin_.size() - 1);
  Found found = {order_.size(), num_unique, 0};
  const Column* column = table->first.is_pack ? table->first.columns.data() : nullptr;
  const bool promote = io_class == ES_CLASS_DECODE;
  std::unique_lock<std::mutex> lock(cache->mutex(), std::defer_lock);
  for (uint32_t unique = 0; unique < num_unique; ++unique) {
    const uint64_t row = row_of(unique);
    if (column) {
      while (row - column->first_row >= column->num_rows) ++column;
      if (column->file < 0) {
        // An id of a missing column can only be here if it changed since it was checked.
        if (!column->elsewhere) poison(unique);
        for (uint32_t i = begin_[unique]; column->elsewhere && i < begin_[unique + 1]; ++i)
          neutral(order_[i] & (kMaxIds - 1));
        --found.num_unique;
        found.num_rows -= begin_[unique + 1] - begin_[unique];
        continue;
      }
    }
    if (cache->enabled()) {
      if (unique % kProbeBatch == 0 && lock.owns_lock()) lock.unlock();
      if (!lock.owns_lock()) lock.lock();
      if (const uint8_t* bytes = cache->find(RowCache::key(table->cache_table, row), promote)) {
        deliver(unique, bytes);
        ++found.num_hits;
        continue;
      }
    }
    misses_.push_back(unique);
  }
  if (lock.owns_lock()) lock.unlock();
  misses_left = static_cast<uint32_t>(misses_.size());
  state.assign(misses_.size(), 0);
  if (table->first.is_pack) {
    column = table->first.columns.data();
    for (uint32_t miss = 0; miss < misses_left; ++miss) {
      const uint64_t row = missed_row(miss);
      while (row - column->first_row >= column->num_rows) ++column;
      add_piece(miss, row - column->first_row, column);
    }
    return found;
  }
  staging_.resize(misses_.size() * table->row_bytes);
  const Source& source = table->first;
  for (uint32_t miss = 0; miss < misses_left; ++miss)
    add_part(miss, source.weight_offset + missed_row(miss) * table->weight_bytes, table->weight_bytes,
             source.weight_file, Part::kWeights, 0);
  const size_t weights = pieces.size();
  for (uint32_t miss = 0; miss < misses_left; ++miss)
    add_part(miss, source.scale_offset + missed_row(miss) * table->scale_bytes, table->scale_bytes, source.scale_file,
             Part::kScales, weights);
  return found;
}

void Ticket::add_piece(uint32_t miss, uint64_t row, const Column* column) {
  const auto file = static_cast<uint32_t>(column->file);
  const uint64_t offset = (1 + row / table->rpb) * kBlockBytes;
  if (!pieces.empty() && pieces.back().offset == offset && pieces.back().file == file) {
    ++pieces.back().count;
    return;
  }
  Piece& piece = pieces.emplace_back();
  piece.ticket = this;
  piece.offset = offset;
  piece.file = file;
  piece.first = miss;
  piece.count = 1;
  piece.num_bytes = kBlockBytes;
}

void Ticket::add_part(uint32_t miss, uint64_t begin, uint32_t width, int file, Part part, size_t from) {
  if (pieces.size() > from) {
    Piece& last = pieces.back();
    const uint64_t end = page_ceil(begin + width);
    // Neighbours join as long as this makes the read no longer than one row may need.
    if (end - last.offset <= last.num_bytes ||
        (begin < last.offset + last.num_bytes && end - last.offset <= kMaxReadBytes)) {
      last.num_bytes = static_cast<uint32_t>(std::max<uint64_t>(last.num_bytes, end - last.offset));
      ++last.count;
      return;
    }
  }
  Piece& piece = pieces.emplace_back();
  piece.ticket = this;
  piece.offset = page_floor(begin);
  piece.num_bytes = static_cast<uint32_t>(page_ceil(begin + width) - piece.offset);
  piece.file = static_cast<uint32_t>(file);
  piece.first = miss;
  piece.count = 1;
  piece.part = part;
}

void Ticket::deliver(uint32_t unique, const uint8_t* row) const {
  const Table& t = *table;
  const uint32_t end = begin_[unique + 1];
  const auto at = [this](uint32_t i) { return out_ + (order_[i] & (kMaxIds - 1)) * out_stride_; };
  uint32_t i = begin_[unique];
  if (format == ES_FORMAT_RAW) {
    for (; i < end; ++i) std::memcpy(at(i), row, t.row_bytes);
  } else if (format == ES_FORMAT_SPLIT) {
    for (; i < end; ++i) {
      std::memcpy(at(i), row, t.weight_bytes);
      std::memcpy(out_scales_ + (order_[i] & (kMaxIds - 1)) * scales_stride_, row + t.weight_bytes, t.scale_bytes);
    }
  } else {
    uint8_t* decoded = at(i);
    t.decoder->decode(row, row + t.weight_bytes, reinterpret_cast<uint16_t*>(decoded));
    while (++i < end) std::memcpy(at(i), decoded, size_t{2} * t.decoder->num_values());
  }
}

void Ticket::poison(uint32_t unique) const {
  for (uint32_t i = begin_[unique]; i < begin_[unique + 1]; ++i) {
    const uint64_t position = order_[i] & (kMaxIds - 1);
    poison_row(*table, format, out_ + position * out_stride_, out_scales_ + position * scales_stride_);
  }
}

void Ticket::poison_all(const Table& table, const es_request& request, uint64_t num_ids) {
  const Widths width = widths(table, request.format);
  const uint64_t out_stride = request.out_stride_bytes ? request.out_stride_bytes : width.out;
  const uint64_t scales_stride =
      request.scales_stride_bytes && width.scales ? request.scales_stride_bytes : width.scales;
  for (uint64_t i = 0; i < num_ids; ++i)
    poison_row(table, request.format, static_cast<uint8_t*>(request.out) + i * out_stride,
               static_cast<uint8_t*>(request.out_scales) + i * scales_stride);
}

void Ticket::neutral(uint64_t position) const {
  const Table& t = *table;
  uint8_t* out = out_ + position * out_stride_;
  std::memset(out, 0, widths(t, format).out);
  if (format == ES_FORMAT_RAW) std::memset(out + t.weight_bytes, neutral_scale(t.row_format), t.scale_bytes);
  if (format == ES_FORMAT_SPLIT)
    std::memset(out_scales_ + position * scales_stride_, neutral_scale(t.row_format), t.scale_bytes);
}

uint8_t part_bit(Part part) {
  return part == Part::kWeights ? Ticket::kHasWeights : part == Part::kScales ? Ticket::kHasScales : 0;
}

bool wants(const Piece& piece, uint32_t miss) {
  const uint8_t state = piece.ticket->state[miss];
  if (state & Ticket::kResolved) return false;
  const uint8_t bit = part_bit(piece.part);
  if (piece.second) return !bit || !(piece.ticket->salvage.at(miss).parts & bit);
  return !(state & Ticket::kSalvaged) && !(state & bit);
}

}  // namespace engram
