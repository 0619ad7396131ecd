// The I/O thread of a store: starts reads in order of class, checks what arrives, hands rows to all who wait, and
// deals with everything that goes wrong on the way.
#include <pthread.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "failure.h"
#include "futex.h"
#include "store.h"

namespace engram {
namespace {

constexpr int64_t kMs = 1000000;
constexpr int64_t kScanNs = 10 * kMs;  // how exactly deadlines are kept

void add(std::atomic<uint64_t>* counter, uint64_t value) { counter->fetch_add(value, std::memory_order_relaxed); }

const Source& source_of(const Piece& piece) {
  return piece.second ? piece.ticket->table->second : piece.ticket->table->first;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------- the loop

void Store::serve() {
  pthread_setname_np(pthread_self(), "engram-io");
  const bool ready = choose_backend();
  start_result_ = ready ? ES_OK : ES_E_BACKEND;
  if (!ready) start_why_ = backend_reason_;
  start_word_.store(1);
  futex_wake_all(&start_word_);
  if (!ready) return;
  int64_t stop_by = 0;
  for (;;) {
    now_ = now_ns();
    take_cancelled();
    take_arrivals();
    if (stopping_.load()) {
      if (!stop_by) stop_by = now_ + int64_t{options_.deadline_ms} * kMs;
      abandon_all();
      if (at_device_ == 0 || now_ > stop_by) return;
    }
    issue();
    settle();
    sleeping_.store(true);
    const bool more = arrivals_.load() || cancellations_.load() || (stopping_.load() && !stop_by);
    const int64_t timeout = more ? 0 : at_device_ ? kScanNs : -1;
    const size_t count = io_->run(done_.data(), done_.size(), more ? 0 : least_done(), timeout);
    sleeping_.store(false);
    now_ = now_ns();
    if (count) last_answer_ns_ = now_;
    complete(count);
    if (now_ - last_scan_ns_ > kScanNs) scan_deadlines();
    settle();
  }
}

bool Store::choose_backend() {
  IoSetup setup;
  setup.depth = options_.depth;
  for (size_t i = 0; i < files_.size(); ++i) setup.files.push_back(files_[i].fd);
  setup.arena = arena_;
  setup.arena_bytes = arena_bytes_;
  setup.all_direct = files_.num_direct() == files_.size();
  setup.may_register = !(options_.flags & ES_NO_REGISTER);
  setup.pool_threads = options_.pool_threads;
  const struct {
    uint32_t id;
    const char* name;
    std::unique_ptr<Io> (*make)(const IoSetup&, std::string*);
  } backends[] = {{ES_BACKEND_IO_URING, "io_uring", make_uring},
                  {ES_BACKEND_AIO, "aio", make_aio},
                  {ES_BACKEND_POOL, "pool", make_pool}};
  std::string refused;
  for (const auto& backend : backends) {
    if (options_.backend != ES_BACKEND_AUTO && options_.backend != backend.id) continue;
    std::string why;
    if (options_.backend == ES_BACKEND_AUTO && backend.id == ES_BACKEND_AIO && !setup.all_direct) {
      why = "not all files are direct, and buffered AIO blocks";
    } else if ((io_ = backend.make(setup, &why))) {
      break;
    }
    refused += (refused.empty() ? "" : "; ") + std::string(backend.name) + " unavailable: " + why;
  }
  if (!io_) {
    backend_reason_ = refused.empty() ? "unknown backend " + std::to_string(options_.backend) : refused;
    return false;
  }
  backend_reason_ = options_.backend != ES_BACKEND_AUTO ? "as asked" : refused.empty() ? "first choice" : refused;
  if (options_.inject_faults) io_ = make_faulty(std::move(io_), options_.faults);
  backend_name_ = io_->name();
  backend_detail_ = io_->detail();
  reads_.resize(options_.depth);
  for (size_t i = 0; i < reads_.size(); ++i) {
    reads_[i].buffer = arena_ + i * kMaxReadBytes;
    free_.push_back(&reads_[i]);
  }
  size_t size = 16;
  while (size < 2 * reads_.size()) size *= 2;
  buckets_.assign(size, nullptr);
  done_.resize(options_.depth);
  batch_.reserve(options_.depth);
  return true;
}

// Tickets come off the stack newest first.
void Store::take_arrivals() {
  Ticket* ticket = arrivals_.exchange(nullptr);
  Ticket* oldest_first = nullptr;
  while (ticket) {
    Ticket* next = ticket->arrival_next;
    ticket->arrival_next = oldest_first;
    oldest_first = ticket;
    ticket = next;
  }
  for (ticket = oldest_first; ticket; ticket = ticket->arrival_next) {
    const bool is_decode = ticket->io_class == ES_CLASS_DECODE;
    if (is_decode) ++decode_tickets_;
    TicketList* list = is_decode ? &decode_ : &prefetch_;
    ticket->probe_again = cache_->enabled() && (list->head || free_.empty() || at_device_ > reads_.size() / 2);
    list->append(ticket);
  }
}

void Store::take_cancelled() {
  // A ticket is pushed as an arrival before it can be cancelled, so take arrivals first.
  Ticket* ticket = cancellations_.exchange(nullptr);
  if (ticket) take_arrivals();
  while (ticket) {
    Ticket* next = ticket->cancel_next;
    abandon(ticket, ES_KIND_CANCELLED, "released before it was finished");
    std::atomic<uint32_t>* word = &ticket->cancel_word;
    word->store(Ticket::kCancelTaken, std::memory_order_release);
    futex_wake_all(word);
    ticket = next;
  }
}

void Store::TicketList::append(Ticket* ticket) {
  ticket->listed = true;
  ticket->next = nullptr;
  ticket->previous = tail;
  (tail ? tail->next : head) = ticket;
  tail = ticket;
}

void Store::TicketList::remove(Ticket* ticket) {
  (ticket->previous ? ticket->previous->next : head) = ticket->next;
  (ticket->next ? ticket->next->previous : tail) = ticket->previous;
  ticket->listed = false;
}

// ------------------------------------------------------------------------------------------------ starting reads

void Store::issue() {
  while (!retries_.empty()) {
    Read* failed = retries_.front();
    retries_.pop_front();
    if (failed->waiters && free_.empty()) {
      send(failed);  // into its own buffer: when all of them hold reads that failed, no other comes free
      continue;
    }
    if (failed->waiters) {
      Read* fresh = free_.front();
      free_.pop_front();
      move_read(failed, fresh);
      send(fresh);
    }
    free_read(failed);
  }
  while (!salvages_.empty() && !free_.empty()) {
    Piece* piece = salvages_.front();
    salvages_.pop_front();
    issue_piece(piece);
  }
  decode_is_live_ = decode_tickets_ ||
                    now_ - last_decode_ns_.load(std::memory_order_relaxed) < int64_t{options_.decode_hold_ms} * kMs;
  while (decode_.head && !free_.empty()) issue_next(&decode_);
  const size_t most = most_prefetch();
  while (prefetch_.head && !free_.empty() && prefetch_at_device_ < most) issue_next(&prefetch_);
}

size_t Store::most_prefetch() const {
  // Some buffers stay free, so that a decode that comes back need not wait for one.
  return decode_is_live_ ? options_.prefetch_depth : std::max<size_t>(1, reads_.size() - reads_.size() / 4);
}

void Store::issue_next(TicketList* list) {
  Ticket* ticket = list->head;
  Piece* piece = &ticket->pieces[ticket->next_piece++];
  if (ticket->next_piece == ticket->pieces.size()) list->remove(ticket);
  if (!ticket->probe_again || !probe_again(piece)) issue_piece(piece);
}

void Store::issue_piece(Piece* piece) {
  if (Read* read = find_read(piece->file, piece->offset, piece->num_bytes)) {
    piece->shared = read->waiters->ticket != piece->ticket;
    attach(read, piece);
    return;
  }
  Read* read = free_.front();
  free_.pop_front();
  read->file = piece->file;
  read->offset = piece->offset;
  read->num_bytes = piece->num_bytes;
  read->attempts = 0;
  read->io_class = piece->ticket->io_class;
  attach(read, piece);
  list_read(read);
  send(read);
}

// The cache may have learned rows while their ticket queued. True when nothing is left to read.
bool Store::probe_again(Piece* piece) {
  Ticket* ticket = piece->ticket;
  const std::lock_guard<std::mutex> lock(cache_->mutex());
  bool left = false;
  for (uint32_t miss = piece->first; miss < piece->first + piece->count; ++miss) {
    if (!wants(*piece, miss)) continue;
    const uint64_t key = RowCache::key(ticket->table->cache_table, ticket->missed_row(miss));
    if (const uint8_t* bytes = cache_->find(key, ticket->io_class == ES_CLASS_DECODE)) {
      resolve(ticket, miss, bytes);
      add(&counters_.num_cache_hits, 1);
    } else {
      left = true;
    }
  }
  return !left;
}

void Store::send(Read* read) {
  read->at_device = true;
  read->sent_ns = now_;
  ++at_device_;
  if (read->io_class == ES_CLASS_PREFETCH) {
    ++prefetch_at_device_;
    std::atomic<uint64_t>* most = &counters_.max_prefetch_depth;
    if (decode_is_live_ && prefetch_at_device_ > most->load(std::memory_order_relaxed))
      most->store(prefetch_at_device_);
  }
  add(&counters_.num_reads, 1);
  add(&counters_.read_bytes, read->num_bytes);
  if (read->io_class == ES_CLASS_DECODE) add(&counters_.num_decode_reads, 1);
  io_->start({read->file, read->num_bytes, read->offset, read->buffer, static_cast<uint32_t>(read - reads_.data())});
}

size_t Store::least_done() const {
  // Waiting for a few answers at a time saves system calls; decode's last row must not wait for others.
  if (decode_tickets_ || at_device_ < 32) return 1;
  return std::min<size_t>(at_device_ / 8, 32);
}

// ------------------------------------------------------------------------------------------------ what arrives

void Store::complete(size_t count) {
  batch_.clear();
  arrived_.clear();
  for (size_t i = 0; i < count; ++i) {
    Read* read = &reads_[done_[i].tag];
    read->at_device = false;
    --at_device_;
    if (read->io_class == ES_CLASS_PREFETCH) --prefetch_at_device_;
    if (!read->waiters) {  // all of them gave up on it
      free_read(read);
      continue;
    }
    Answer answer = {read, ES_KIND_NONE, 0};
    examine(done_[i].result, &answer);
    if (answer.kind == ES_KIND_NONE) collect(read);
    batch_.push_back(answer);
  }
  check_arrived();
  hand_out();
  for (const Answer& answer : batch_) after_read(answer);
}

void Store::examine(int32_t result, Answer* answer) const {
  const Read& read = *answer->read;
  const uint64_t file_bytes = files_[read.file].num_bytes;
  const uint64_t expected = std::min<uint64_t>(read.num_bytes, file_bytes - read.offset);
  if (result < 0) {
    answer->kind = ES_KIND_IO;
    answer->sys_errno = -result;
  } else if (static_cast<uint64_t>(result) < expected) {
    answer->kind = ES_KIND_SHORT_READ;
  }
}

// Note the rows that a read brought. Parts that come apart wait in the ticket for each other.
void Store::collect(Read* read) {
  for (Piece* piece = read->waiters; piece; piece = piece->next) {
    Ticket* ticket = piece->ticket;
    const Table& table = *ticket->table;
    const Source& source = source_of(*piece);
    for (uint32_t miss = piece->first; miss < piece->first + piece->count; ++miss) {
      if (!wants(*piece, miss)) continue;
      const uint64_t row = ticket->missed_row(miss);
      if (piece->part == Part::kPacked) {
        const Column& column = source.column_of(row);
        const uint64_t number = row - column.first_row;
        const auto slot = static_cast<uint32_t>(number % table.rpb);
        arrived_.push_back({read->buffer + static_cast<size_t>(slot) * table.row_bytes, piece, miss,
                            stored_crc(read->buffer, table.rpb, table.row_bytes, slot),
                            crc_update_u64(column.seed_state, number), true, false});
        continue;
      }
      const bool weights = piece->part == Part::kWeights;
      const uint32_t width = weights ? table.weight_bytes : table.scale_bytes;
      const uint64_t begin = (weights ? source.weight_offset : source.scale_offset) + row * width;
      Salvage* salvage = piece->second ? &ticket->salvage.at(miss) : nullptr;
      uint8_t* whole = salvage ? salvage->bytes.data() : ticket->staged(miss);
      std::memcpy(whole + (weights ? 0 : table.weight_bytes), read->buffer + (begin - read->offset), width);
      uint8_t* parts = salvage ? &salvage->parts : &ticket->state[miss];
      *parts |= part_bit(piece->part);
      if ((*parts & (Ticket::kHasWeights | Ticket::kHasScales)) != (Ticket::kHasWeights | Ticket::kHasScales)) continue;
      Arrived row_whole = {whole, piece, miss, 0, 0, false, true};
      if (salvage && salvage->has_crc) {
        const Column& column = table.first.column_of(row);
        row_whole.stored_crc = salvage->crc;
        row_whole.seed_state = crc_update_u64(column.seed_state, row - column.first_row);
        row_whole.checked = true;
      }
      arrived_.push_back(row_whole);
    }
  }
}

void Store::check_arrived() {
  for (size_t begin = 0; begin < arrived_.size();) {
    const uint32_t row_bytes = arrived_[begin].piece->ticket->table->row_bytes;
    size_t end = begin;
    crc_jobs_.clear();
    for (; end < arrived_.size() && arrived_[end].piece->ticket->table->row_bytes == row_bytes; ++end)
      if (arrived_[end].checked) crc_jobs_.push_back({arrived_[end].bytes, arrived_[end].seed_state});
    crc_update_many(crc_jobs_.data(), crc_jobs_.size(), row_bytes);
    size_t job = 0;
    for (size_t i = begin; i < end; ++i)
      if (arrived_[i].checked) arrived_[i].good = crc_end(crc_jobs_[job++].state) == arrived_[i].stored_crc;
    begin = end;
  }
}

void Store::hand_out() {
  uint64_t read_rows = 0, shared_rows = 0, fallback_rows = 0;
  for (const Arrived& row : arrived_) {
    if (!row.good) {
      // Its parts came apart, so there is no one read to try again.
      if (row.piece->part != Part::kPacked)
        lose_row(*row.piece->read, row.piece, row.miss,
                 {ES_KIND_CHECKSUM, 0, false, "the row does not match the first source's checksum"});
      continue;
    }
    resolve(row.piece->ticket, row.miss, row.bytes);
    ++(row.piece->second ? fallback_rows : row.piece->shared ? shared_rows : read_rows);
  }
  if (read_rows) add(&counters_.num_read_rows, read_rows);
  if (shared_rows) add(&counters_.num_shared_rows, shared_rows);
  if (fallback_rows) add(&counters_.num_fallback_rows, fallback_rows);
  if (!cache_->enabled()) return;
  const std::lock_guard<std::mutex> lock(cache_->mutex());
  for (const Arrived& row : arrived_) {
    const Ticket& ticket = *row.piece->ticket;
    // What a checksum vouches for may be shared under the pack's name; other bytes only in a table without any.
    if (!row.good || (!row.checked && (row.piece->second || ticket.table->first.is_pack))) continue;
    cache_->insert(RowCache::key(ticket.table->cache_table, ticket.missed_row(row.miss)), row.bytes,
                   ticket.table->row_bytes, ticket.io_class != ES_CLASS_DECODE);
  }
}

void Store::resolve(Ticket* ticket, uint32_t miss, const uint8_t* bytes) {
  ticket->deliver(ticket->unique_of(miss), bytes);
  ticket->state[miss] |= Ticket::kResolved;
  --ticket->misses_left;
  touch(ticket);
}

// Let go of everyone who is served; try again, or give up, for the rest.
void Store::after_read(const Answer& answer) {
  Read* read = answer.read;
  for (Piece** link = &read->waiters; *link;) {
    Piece* piece = *link;
    bool waits = false;
    for (uint32_t i = 0; i < piece->count && !waits; ++i) waits = wants(*piece, piece->first + i);
    if (waits) {
      link = &piece->next;
    } else {
      *link = piece->next;
      piece->read = nullptr;
      --piece->ticket->pieces_waiting;
    }
  }
  if (!read->waiters) {
    free_read(read);
    return;
  }
  Problem problem = {answer.kind, answer.sys_errno, false, {}};
  if (problem.kind == ES_KIND_NONE) {
    problem = classify(*read);
  } else if (problem.kind == ES_KIND_IO) {
    problem.why = std::strerror(problem.sys_errno);
  } else {
    problem.why = "the file ends inside the block";
  }
  add(&counters_.errors[static_cast<size_t>(problem.kind)], 1);
  if (read->attempts < options_.retries) {
    ++read->attempts;
    add(&counters_.num_retries, 1);
    retries_.push_back(read);
    return;
  }
  while (Piece* piece = read->waiters) {
    detach(piece);
    for (uint32_t i = 0; i < piece->count; ++i)
      if (wants(*piece, piece->first + i)) lose_row(*read, piece, piece->first + i, problem);
  }
  free_read(read);
}

}  // namespace engram
