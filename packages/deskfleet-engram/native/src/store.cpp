// The callers' side of a store: tables, starting and stopping, handing tickets over, waiting for them.
#include "store.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <system_error>

#include "failure.h"
#include "futex.h"

namespace engram {
namespace {

constexpr uint32_t kMaxDepth = 4096;

void add(std::atomic<uint64_t>* counter, uint64_t value) { counter->fetch_add(value, std::memory_order_relaxed); }

uint64_t get(const std::atomic<uint64_t>& counter) { return counter.load(std::memory_order_relaxed); }

// Reachable, so that a leak checker does not report what is kept on purpose.
void keep_for_ever(Io* io) {
  static std::mutex mutex;
  static auto* kept = new std::vector<Io*>;
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(io);
}

}  // namespace

Store::Store(Options options)
    : options_(std::move(options)),
      files_(options_.direct, (options_.flags & ES_ALLOW_HOLES) != 0),
      cache_(options_.cache),
      last_decode_ns_(INT64_MIN / 2) {
  options_.depth = std::clamp(options_.depth, 1u, kMaxDepth);
  options_.prefetch_depth = std::clamp(options_.prefetch_depth, 1u, options_.depth);
}

Store::~Store() {
  if (thread_.joinable()) {
    stopping_.store(true);
    wake();
    thread_.join();
  }
  // Reads that the device still owes write into the arena: then neither may go.
  if (at_device_) {
    keep_for_ever(io_.release());
  } else {
    io_.reset();
    if (arena_) munmap(arena_, arena_bytes_);
  }
}

int32_t Store::add_table(const es_table& described, const es_table* second, es_error* error) {
  if (started_ || find_table(described.layer)) {
    set_error(error, ES_KIND_ARGUMENT, 0,
              started_ ? "layer %u: tables come before the start" : "layer %u has a table already", described.layer);
    return ES_E_ARGUMENT;
  }
  auto table = std::make_unique<Table>();
  const int32_t result = open_table(described, second, &files_, table.get(), error);
  if (result == ES_OK) tables_.push_back(std::move(table));
  return result;
}

const Table* Store::find_table(uint32_t layer) const {
  for (const auto& table : tables_)
    if (table->layer == layer) return table.get();
  return nullptr;
}

int32_t Store::start(es_error* error) {
  if (started_ || tables_.empty() || start_word_.load()) {
    set_error(error, ES_KIND_ARGUMENT, 0,
              started_          ? "the store runs already"
              : tables_.empty() ? "the store has no table"
                                : "the store could not start; make another");
    return ES_E_ARGUMENT;
  }
  if (!cache_) {
    uint32_t row_bytes = 0;
    for (const auto& table : tables_) row_bytes = std::max(row_bytes, table->row_bytes);
    cache_ = std::make_shared<RowCache>(options_.cache_bytes, row_bytes);
  }
  for (auto& table : tables_)
    // Only checksums make sure that equal identities mean equal bytes.
    table->cache_table = cache_->table_number(table->first.is_pack ? &table->identity : nullptr);
  arena_bytes_ = static_cast<size_t>(options_.depth) * kMaxReadBytes;
  void* arena = mmap(nullptr, arena_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (arena == MAP_FAILED) {
    set_error(error, ES_KIND_BACKEND, errno, "no memory for %u reads: %s", options_.depth, std::strerror(errno));
    return ES_E_MEMORY;
  }
  arena_ = static_cast<uint8_t*>(arena);
  // Signals belong to the threads of the host program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error& failure) {
    start_result_ = ES_E_MEMORY;
    start_why_ = failure.what();
    start_word_.store(1);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  while (start_word_.load() == 0) futex_wait(&start_word_, 0, -1);
  if (start_result_ != ES_OK) {
    if (thread_.joinable()) thread_.join();
    set_error(error, ES_KIND_BACKEND, 0, "%s", start_why_.c_str());
    return start_result_;
  }
  started_ = true;
  return ES_OK;
}

int32_t Store::submit(Ticket* ticket, const es_request& request, es_error* error) {
  if (!started_ || stopping_.load(std::memory_order_relaxed)) {
    set_error(error, ES_KIND_CANCELLED, 0, "the store is not running");
    return ES_E_CLOSED;
  }
  const Table* table = find_table(request.layer);
  if (!table) {
    set_error(error, ES_KIND_ARGUMENT, 0, "there is no table of layer %u", request.layer);
    return ES_E_ARGUMENT;
  }
  const int64_t now = now_ns();
  const int32_t result = ticket->begin_plan(*table, request, error);
  if (result != ES_OK) {
    const int32_t kind = result == ES_E_ARGUMENT ? ES_KIND_ARGUMENT : error ? error->kind : ES_KIND_RANGE;
    add(&counters_.errors[static_cast<size_t>(kind)], 1);
    return result;
  }
  ticket->submitted_ns = now;
  ticket->deadline_ns = int64_t{1000000} * (request.deadline_ms ? request.deadline_ms : options_.deadline_ms);
  // Before the cache is asked: prefetch steps back while decode plans.
  if (ticket->io_class == ES_CLASS_DECODE) last_decode_ns_.store(now, std::memory_order_relaxed);
  const Ticket::Found found = ticket->finish_plan(cache_.get());
  add(&counters_.num_tickets, 1);
  add(&counters_.num_rows, found.num_rows);
  add(&counters_.num_unique, found.num_unique);
  add(&counters_.num_cache_hits, found.num_hits);
  if (ticket->misses_left == 0) {
    record_finish(*ticket);
    ticket->word.store(Ticket::kDone, std::memory_order_release);
    return ES_OK;
  }
  ticket->word.store(Ticket::kPending, std::memory_order_relaxed);
  Ticket* head = arrivals_.load(std::memory_order_relaxed);
  do {
    ticket->arrival_next = head;
  } while (!arrivals_.compare_exchange_weak(head, ticket));
  if (sleeping_.load() && sleeping_.exchange(false)) wake();
  return ES_OK;
}

void Store::wake() {
  if (io_) io_->wake();
}

void Store::record_finish(const Ticket& ticket) {
  const auto us = static_cast<uint64_t>((now_ns() - ticket.submitted_ns) / 1000);
  const size_t bucket = us == 0 ? 0 : std::min<size_t>(64 - static_cast<size_t>(__builtin_clzll(us)), 31);
  add(&counters_.wait_us[bucket], 1);
  if (ticket.io_class != ES_CLASS_DECODE) return;
  add(&counters_.num_decode_tickets, 1);
  add(&counters_.decode_us, us);
}

int32_t Store::poll(const Ticket* ticket) {
  switch (ticket->word.load(std::memory_order_acquire) & Ticket::kStateMask) {
    case Ticket::kPending:
      return ES_PENDING;
    case Ticket::kDone:
      return ES_OK;
    default:
      return ES_FAILED;
  }
}

int32_t Store::wait(Ticket* ticket, int64_t timeout_us) {
  const int64_t until = timeout_us < 0 ? -1 : now_ns() + timeout_us * 1000;
  for (;;) {
    const int32_t result = poll(ticket);
    if (result != ES_PENDING) return result;
    const int64_t left = until < 0 ? -1 : until - now_ns();
    if (until >= 0 && left <= 0) return ES_PENDING;
    uint32_t expected = Ticket::kPending;
    const uint32_t waited = Ticket::kPending | Ticket::kWaited;
    if (ticket->word.compare_exchange_strong(expected, waited) || expected == waited)
      futex_wait(&ticket->word, waited, left);
  }
}

void Store::retire(Ticket* ticket) {
  if (poll(ticket) != ES_PENDING) return;
  ticket->cancel_word.store(Ticket::kCancelAsked);
  Ticket* head = cancellations_.load(std::memory_order_relaxed);
  do {
    ticket->cancel_next = head;
  } while (!cancellations_.compare_exchange_weak(head, ticket));
  if (sleeping_.load() && sleeping_.exchange(false)) wake();
  while (ticket->cancel_word.load(std::memory_order_acquire) == Ticket::kCancelAsked)
    futex_wait(&ticket->cancel_word, Ticket::kCancelAsked, -1);
}

std::string Store::report() const {
  std::string text =
      "backend=" + backend_name_ + "\nbackend_detail=" + backend_detail_ + "\nbackend_reason=" + backend_reason_;
  const size_t direct = files_.num_direct();
  text += "\ndirect=" + std::to_string(direct) + " of " + std::to_string(files_.size()) + " files";
  if (direct < files_.size()) text += "; buffered: " + files_.why_buffered();
  text += "\ndepth=" + std::to_string(options_.depth) + "\nprefetch_depth=" + std::to_string(options_.prefetch_depth);
  for (const auto& table : tables_) {
    text += "\nlayer." + std::to_string(table->layer) + "=";
    const auto describe = [&](const Source& source) -> std::string {
      if (!source.is_pack) return "shard, unchecked";
      const auto held = std::count_if(source.columns.begin(), source.columns.end(),
                                      [](const Column& column) { return column.file >= 0; });
      return "pack, checked, " + std::to_string(held) + " of " + std::to_string(source.columns.size()) + " columns";
    };
    text += describe(table->first);
    if (table->has_second) text += "; second source: " + describe(table->second);
  }
  es_cache_counters cache = {};
  if (cache_) cache_->counters(&cache);
  text += "\ncache=" + (cache.capacity_rows
                            ? std::to_string(cache.capacity_rows) + " rows of " + std::to_string(cache.row_bytes) +
                                  " bytes, " + std::to_string(cache.memory_bytes) + " bytes in all"
                            : std::string("off"));
  for (const auto& table : tables_)
    if (cache.capacity_rows && table->row_bytes > cache.row_bytes)
      text += "; rows of layer " + std::to_string(table->layer) + " are too long for it";
  text += std::string("\ncpu=crc ") + crc_name() + ", decode " + isa_name(best_isa());
  if (options_.inject_faults) text += "\nfaults=injected";
  return text;
}

void Store::get_counters(es_counters* out) const {
  out->num_tickets = get(counters_.num_tickets);
  out->num_rows = get(counters_.num_rows);
  out->num_unique = get(counters_.num_unique);
  out->num_cache_hits = get(counters_.num_cache_hits);
  out->num_read_rows = get(counters_.num_read_rows);
  out->num_shared_rows = get(counters_.num_shared_rows);
  out->num_fallback_rows = get(counters_.num_fallback_rows);
  out->num_failed_rows = get(counters_.num_failed_rows);
  out->num_reads = get(counters_.num_reads);
  out->read_bytes = get(counters_.read_bytes);
  out->num_retries = get(counters_.num_retries);
  out->num_decode_reads = get(counters_.num_decode_reads);
  out->max_prefetch_depth = get(counters_.max_prefetch_depth);
  for (size_t i = 0; i < ES_NUM_KINDS; ++i) out->errors[i] = get(counters_.errors[i]);
  for (size_t i = 0; i < 32; ++i) out->wait_us[i] = get(counters_.wait_us[i]);
  out->num_decode_tickets = get(counters_.num_decode_tickets);
  out->decode_us = get(counters_.decode_us);
}

}  // namespace engram
