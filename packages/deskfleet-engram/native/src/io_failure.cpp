// The I/O thread of a store, continued: rows that could not be had, the second source, deadlines, cancelling.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "failure.h"
#include "futex.h"
#include "store.h"

namespace engram {
namespace {

void add(std::atomic<uint64_t>* counter, uint64_t value) { counter->fetch_add(value, std::memory_order_relaxed); }

}  // namespace

// A block came whole, but a row in it failed its checksum: what is wrong with it?
Store::Problem Store::classify(const Read& read) const {
  Problem problem = {ES_KIND_CHECKSUM, 0, false, "the row's bytes do not match its checksum"};
  const Piece& piece = *read.waiters;
  if (piece.part != Part::kPacked) return problem;
  const Table& table = *piece.ticket->table;
  const Source& source = piece.second ? table.second : table.first;
  const Column& column = source.column_of(piece.ticket->missed_row(piece.first));
  problem.kind = classify_block(table.identity_of(source, column.column), read.offset / kBlockBytes - 1, read.buffer,
                                &problem.trusted, &problem.why);
  return problem;
}

void Store::describe(const Read& read, const Piece& piece, uint32_t miss, const Problem& problem, es_error* out) const {
  const Ticket& ticket = *piece.ticket;
  const Table& table = *ticket.table;
  const Source& source = piece.second ? table.second : table.first;
  clear_error(out);
  const std::string& path = files_[piece.file].path;
  set_file(out, path);
  out->layer = table.layer;
  out->row = ticket.missed_row(miss);
  out->num_rows = 1;
  const std::string tries = read.attempts ? " (" + std::to_string(read.attempts + 1) + " attempts)" : "";
  if (piece.part == Part::kPacked) {
    const Column& column = source.column_of(out->row);
    out->column = column.column;
    out->column_row = out->row - column.first_row;
    out->block = piece.offset / kBlockBytes - 1;
    set_error(out, problem.kind, problem.sys_errno,
              "%s: block %" PRIu64 ", row %" PRIu64 " of layer %u column %u: %s: %s%s", path.c_str(), out->block,
              out->column_row, out->layer, out->column, kind_name(problem.kind), problem.why.c_str(), tries.c_str());
  } else {
    out->block = piece.offset / kPageBytes;
    set_error(out, problem.kind, problem.sys_errno,
              "%s: 4 KiB block %" PRIu64 ", %s of row %" PRIu64 " of layer %u: %s: %s%s", path.c_str(), out->block,
              piece.part == Part::kWeights ? "weights" : "scales", out->row, out->layer, kind_name(problem.kind),
              problem.why.c_str(), tries.c_str());
  }
}

void Store::lose_row(const Read& read, Piece* piece, uint32_t miss, const Problem& problem) {
  Ticket* ticket = piece->ticket;
  es_error error;
  describe(read, *piece, miss, problem, &error);
  if (piece->second) {
    // The first source's failure is the news; the second one's is a remark.
    es_error first = ticket->salvage.at(miss).first_failure;
    const std::string both = std::string(first.message) + "; second source: " + error.message;
    set_error(&first, first.kind, first.sys_errno, "%s", both.c_str());
    fail_row(ticket, miss, first);
    return;
  }
  const Table& table = *ticket->table;
  if (!table.has_second) {
    fail_row(ticket, miss, error);
    return;
  }
  Salvage& salvage = ticket->salvage[miss];
  salvage.first_failure = error;
  salvage.bytes.resize(table.row_bytes);
  if (problem.trusted) {
    const auto slot = static_cast<uint32_t>(error.column_row % table.rpb);
    salvage.has_crc = true;
    salvage.crc = stored_crc(read.buffer, table.rpb, table.row_bytes, slot);
  }
  if (!start_salvage(ticket, miss)) fail_row(ticket, miss, error);
}

bool Store::start_salvage(Ticket* ticket, uint32_t miss) {
  const Table& table = *ticket->table;
  const Source& source = table.second;
  const uint64_t row = ticket->missed_row(miss);
  const auto add_piece = [&](int file, uint64_t begin, uint64_t end, Part part) {
    Piece& piece = ticket->salvage_pieces.emplace_back();
    piece.ticket = ticket;
    piece.file = static_cast<uint32_t>(file);
    piece.offset = page_floor(begin);
    piece.num_bytes = static_cast<uint32_t>(page_ceil(end) - piece.offset);
    piece.first = miss;
    piece.count = 1;
    piece.part = part;
    piece.second = true;
    salvages_.push_back(&piece);
  };
  if (source.is_pack) {
    const Column& column = source.column_of(row);
    if (column.file < 0) return false;
    const uint64_t begin = (1 + (row - column.first_row) / table.rpb) * kBlockBytes;
    add_piece(column.file, begin, begin + kBlockBytes, Part::kPacked);
  } else {
    const uint64_t weights = source.weight_offset + row * table.weight_bytes;
    const uint64_t scales = source.scale_offset + row * table.scale_bytes;
    add_piece(source.weight_file, weights, weights + table.weight_bytes, Part::kWeights);
    add_piece(source.scale_file, scales, scales + table.scale_bytes, Part::kScales);
  }
  ticket->state[miss] |= Ticket::kSalvaged;
  return true;
}

void Store::fail_row(Ticket* ticket, uint32_t miss, const es_error& error) {
  ticket->poison(ticket->unique_of(miss));
  ticket->state[miss] |= Ticket::kResolved;
  --ticket->misses_left;
  const uint64_t failed_before = ticket->failure.num_rows;
  if (failed_before == 0) ticket->failure = error;
  ticket->failure.num_rows = failed_before + 1;
  add(&counters_.num_failed_rows, 1);
  touch(ticket);
}

// -------------------------------------------------------------------------------------- deadlines and cancelling

void Store::scan_deadlines() {
  last_scan_ns_ = now_;
  for (Read& read : reads_)
    if (read.waiters) expire_waiters(&read);
  // Nothing can be sent while the device keeps every buffer: then those who queue fail too.
  for (TicketList* list : {&decode_, &prefetch_}) {
    for (Ticket *ticket = list->head, *next; ticket; ticket = next) {
      next = ticket->next;
      if (free_.empty() && now_ - std::max(ticket->submitted_ns, last_answer_ns_) > ticket->deadline_ns)
        abandon(ticket, ES_KIND_DEADLINE, "the device holds every buffer and answers nothing");
    }
  }
  while (!salvages_.empty() && free_.empty()) {
    Ticket* ticket = salvages_.front()->ticket;
    if (now_ - std::max(ticket->submitted_ns, last_answer_ns_) <= ticket->deadline_ns) break;
    abandon(ticket, ES_KIND_DEADLINE, "the device holds every buffer and answers nothing");
  }
}

void Store::expire_waiters(Read* read) {
  Piece* expired = nullptr;
  for (Piece* piece = read->waiters; piece;) {
    Piece* next = piece->next;
    if (now_ - read->sent_ns > piece->ticket->deadline_ns) {
      detach(piece);
      piece->next = expired;
      expired = piece;
    }
    piece = next;
  }
  if (!expired) return;
  // Later requests must not join a read that hangs; its buffer stays out of use until the answer comes.
  if (!read->waiters) unlist_read(read);
  add(&counters_.errors[ES_KIND_DEADLINE], 1);
  char why[64];
  while (Piece* piece = expired) {
    expired = piece->next;
    std::snprintf(why, sizeof why, "no answer in %" PRId64 " ms", piece->ticket->deadline_ns / 1000000);
    const Problem problem = {ES_KIND_DEADLINE, 0, false, why};
    for (uint32_t i = 0; i < piece->count; ++i)
      if (wants(*piece, piece->first + i)) lose_row(*read, piece, piece->first + i, problem);
  }
}

// Every row that is still missing fails.
void Store::abandon(Ticket* ticket, int32_t kind, const char* why) {
  if (poll(ticket) != ES_PENDING) return;
  if (ticket->misses_left) add(&counters_.errors[static_cast<size_t>(kind)], 1);
  es_error error;
  clear_error(&error);
  error.layer = ticket->table->layer;
  for (uint32_t miss = 0; miss < ticket->state.size(); ++miss) {
    if (ticket->state[miss] & Ticket::kResolved) continue;
    error.row = ticket->missed_row(miss);
    if (ticket->failure.num_rows == 0)
      set_error(&error, kind, 0, "row %" PRIu64 " of layer %u: %s: %s", error.row, error.layer, kind_name(kind), why);
    fail_row(ticket, miss, error);
  }
  finish(ticket);
}

void Store::abandon_all() {
  const char* why = "the store was closed";
  while (decode_.head) abandon(decode_.head, ES_KIND_CANCELLED, why);
  while (prefetch_.head) abandon(prefetch_.head, ES_KIND_CANCELLED, why);
  while (!salvages_.empty()) abandon(salvages_.front()->ticket, ES_KIND_CANCELLED, why);
  for (Read& read : reads_)
    while (read.waiters) abandon(read.waiters->ticket, ES_KIND_CANCELLED, why);
}

void Store::touch(Ticket* ticket) {
  if (ticket->touched) return;
  ticket->touched = true;
  touched_.push_back(ticket);
}

// Finish what became complete. Only here, so that no row of the running batch outlives its ticket.
void Store::settle() {
  for (size_t i = 0; i < touched_.size(); ++i) {
    Ticket* ticket = touched_[i];
    ticket->touched = false;
    if (ticket->misses_left == 0) finish(ticket);
  }
  touched_.clear();
}

void Store::finish(Ticket* ticket) {
  if (ticket->touched) touched_.erase(std::find(touched_.begin(), touched_.end(), ticket));
  ticket->touched = false;
  const bool is_decode = ticket->io_class == ES_CLASS_DECODE;
  if (ticket->listed) (is_decode ? decode_ : prefetch_).remove(ticket);
  if (ticket->pieces_waiting) {
    // A row failed of which the other part is still out.
    for (Piece& piece : ticket->pieces) let_go(&piece);
    for (Piece& piece : ticket->salvage_pieces) let_go(&piece);
  }
  if (!ticket->salvage_pieces.empty())
    salvages_.erase(std::remove_if(salvages_.begin(), salvages_.end(),
                                   [ticket](const Piece* piece) { return piece->ticket == ticket; }),
                    salvages_.end());
  if (is_decode) {
    --decode_tickets_;
    last_decode_ns_.store(now_, std::memory_order_relaxed);
  }
  record_finish(*ticket);
  const uint32_t state = ticket->failure.num_rows ? Ticket::kFailed : Ticket::kDone;
  // From here on the ticket is its owner's; only its address is used, to wake who sleeps there.
  std::atomic<uint32_t>* word = &ticket->word;
  if (word->exchange(state, std::memory_order_acq_rel) & Ticket::kWaited) futex_wake_all(word);
}

// ------------------------------------------------------------------------------------------------ reads and waiters

size_t Store::bucket_of(uint32_t file, uint64_t offset) const {
  uint64_t hash = (offset / kPageBytes + (uint64_t{file} << 40)) * 0x9E3779B97F4A7C15u;
  return (hash >> 40) & (buckets_.size() - 1);
}

Read* Store::find_read(uint32_t file, uint64_t offset, uint32_t num_bytes) {
  for (Read* read = buckets_[bucket_of(file, offset)]; read; read = read->chain)
    if (read->file == file && read->offset == offset && read->num_bytes >= num_bytes && read->waiters) return read;
  return nullptr;
}

void Store::list_read(Read* read) {
  Read** bucket = &buckets_[bucket_of(read->file, read->offset)];
  read->chain = *bucket;
  *bucket = read;
  read->listed = true;
}

void Store::unlist_read(Read* read) {
  if (!read->listed) return;
  Read** link = &buckets_[bucket_of(read->file, read->offset)];
  while (*link != read) link = &(*link)->chain;
  *link = read->chain;
  read->listed = false;
}

void Store::attach(Read* read, Piece* piece) {
  piece->read = read;
  piece->next = read->waiters;
  read->waiters = piece;
  ++piece->ticket->pieces_waiting;
}

void Store::detach(Piece* piece) {
  Piece** link = &piece->read->waiters;
  while (*link != piece) link = &(*link)->next;
  *link = piece->next;
  piece->read = nullptr;
  --piece->ticket->pieces_waiting;
}

void Store::let_go(Piece* piece) {
  Read* read = piece->read;
  if (!read) return;
  detach(piece);
  if (!read->waiters) unlist_read(read);
}

void Store::move_read(Read* from, Read* to) {
  to->file = from->file;
  to->offset = from->offset;
  to->num_bytes = from->num_bytes;
  to->attempts = from->attempts;
  to->io_class = from->io_class;
  to->waiters = from->waiters;
  from->waiters = nullptr;
  for (Piece* piece = to->waiters; piece; piece = piece->next) piece->read = to;
  unlist_read(from);
  list_read(to);
}

void Store::free_read(Read* read) {
  unlist_read(read);
  read->waiters = nullptr;
  free_.push_back(read);
}

}  // namespace engram
