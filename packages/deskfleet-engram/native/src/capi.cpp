// The C interface: handles, checks of what crosses it, and nothing else.
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "cache.h"
#include "crc32c.h"
#include "decode.h"
#include "deskfleet_engram.h"
#include "failure.h"
#include "format.h"
#include "hash.h"
#include "store.h"

using namespace engram;

namespace {

// Counts forks, so that a child sees that its parent's I/O threads are not its own.
std::atomic<uint32_t> g_forks{0};

void count_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { g_forks.fetch_add(1); });
  (void)registered;
}

// A caller built against an older header passes a shorter struct: what it lacks keeps its default.
template <typename T>
bool take_struct(const T* from, T* to) {
  if (!from || from->struct_bytes < sizeof(uint32_t)) return false;
  std::memcpy(to, from, from->struct_bytes < sizeof(T) ? from->struct_bytes : sizeof(T));
  return true;
}

// The same, outward.
template <typename T>
void give_struct(const T& from, T* to) {
  constexpr size_t kHead = sizeof(uint32_t);
  const size_t bytes = to->struct_bytes < sizeof(T) ? to->struct_bytes : sizeof(T);
  if (bytes > kHead)
    std::memcpy(reinterpret_cast<uint8_t*>(to) + kHead, reinterpret_cast<const uint8_t*>(&from) + kHead, bytes - kHead);
}

int32_t refuse(es_error* error, int32_t result, const char* message) {
  set_error(error, result == ES_E_ARGUMENT ? ES_KIND_ARGUMENT : ES_KIND_CANCELLED, 0, "%s", message);
  return result;
}

// No exception crosses the interface; all that the library throws is for want of memory.
template <typename F>
int32_t guarded(es_error* error, F&& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return refuse(error, ES_E_MEMORY, "out of memory");
  }
}

// Tickets by handle. A handle goes stale when its ticket is released; memory is used again once nobody waits on it.
class TicketTable {
 public:
  struct Entry {
    Ticket ticket;
    uint32_t index = 0, generation = 1, users = 0;
    bool released = true;
  };

  // A ticket with one user, the caller.
  Entry* take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (spare_.empty()) {
      entries_.push_back(std::make_unique<Entry>());
      entries_.back()->index = static_cast<uint32_t>(entries_.size() - 1);
      spare_.reserve(entries_.size());
      spare_.push_back(entries_.back().get());
    }
    Entry* entry = spare_.back();
    spare_.pop_back();
    entry->released = false;
    entry->users = 1;
    return entry;
  }

  static es_ticket handle(const Entry& entry) {
    return static_cast<uint64_t>(entry.generation) << 32 | (entry.index + 1);
  }

  Entry* find(es_ticket handle, bool release = false) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t index = (handle & UINT32_MAX) - 1;
    if (index >= entries_.size()) return nullptr;
    Entry* entry = entries_[index].get();
    if (entry->released || entry->generation != handle >> 32) return nullptr;
    ++entry->users;
    entry->released = release;
    return entry;
  }

  void drop(Entry* entry, bool release = false) {
    const std::lock_guard<std::mutex> lock(mutex_);
    entry->released = entry->released || release;
    if (--entry->users || !entry->released) return;
    entry->ticket.trim();
    if (++entry->generation == 0) entry->generation = 1;
    spare_.push_back(entry);
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Entry>> entries_;
  std::vector<Entry*> spare_;
};

}  // namespace

struct es_cache {
  std::shared_ptr<RowCache> cache;
};

struct es_store {
  explicit es_store(Options options) : store(std::move(options)) {}
  bool is_foreign() const { return forks != g_forks.load(std::memory_order_relaxed); }

  uint32_t forks = g_forks.load();
  TicketTable tickets;
  Store store;  // last: its thread ends before the tickets go
};

struct es_work {
  es_store* store = nullptr;
  es_request request = {};
  const uint32_t* num_ids = nullptr;
  uint32_t max_ids = 0;
  int32_t* status = nullptr;
  Ticket ticket;
  bool is_out = false;
  int32_t result = ES_OK;
  es_error error = {};
  std::atomic<uint64_t> failures{0};
};

namespace {

const char kForked[] = "the store belongs to the parent process; open one after the fork";

int32_t check_store(es_store* store, es_error* error) {
  clear_error(error);
  if (!store) return refuse(error, ES_E_ARGUMENT, "store is null");
  if (store->is_foreign()) return refuse(error, ES_E_FORKED, kForked);
  return ES_OK;
}

int32_t take_request(const es_request* from, es_request* to, es_error* error) {
  *to = {};
  return take_struct(from, to) ? ES_OK : refuse(error, ES_E_ARGUMENT, "request is null or has no struct_bytes");
}

void give_failure(const Ticket& ticket, int32_t result, es_error* error) {
  if (error && result == ES_FAILED) *error = ticket.failure;
}

void end_work(es_work* work, int32_t result) {
  work->result = result;
  work->is_out = false;
  if (result == ES_FAILED) work->error = work->ticket.failure;
  if (result != ES_OK) work->failures.fetch_add(1, std::memory_order_relaxed);
  if (work->status) __atomic_store_n(work->status, result, __ATOMIC_RELEASE);
}

}  // namespace

extern "C" {

uint32_t es_abi_version(void) { return ES_ABI_VERSION; }

const char* es_cpu_features(void) {
  static const std::string text = std::string("crc=") + crc_name() + " decode=" + isa_name(best_isa());
  return text.c_str();
}

void es_options_init(es_options* options) {
  const Options defaults;
  *options = {};
  options->struct_bytes = sizeof *options;
  options->depth = defaults.depth;
  options->prefetch_depth = defaults.prefetch_depth;
  options->decode_hold_ms = defaults.decode_hold_ms;
  options->deadline_ms = defaults.deadline_ms;
  options->retries = defaults.retries;
  options->pool_threads = defaults.pool_threads;
  options->cache_bytes = uint64_t{64} << 20;
}

int32_t es_create(const es_options* given, es_store** store, es_error* error) {
  clear_error(error);
  es_options o;
  es_options_init(&o);
  if (!store || (given && !take_struct(given, &o)))
    return refuse(error, ES_E_ARGUMENT, "store or struct_bytes missing");
  if (o.depth == 0 || o.depth > 4096 || o.prefetch_depth == 0 || o.pool_threads == 0 || o.deadline_ms == 0)
    return refuse(error, ES_E_ARGUMENT, "depth must be 1 to 4096; prefetch_depth, pool_threads, deadline_ms positive");
  if (o.backend > ES_BACKEND_POOL || o.direct > ES_DIRECT_NEVER)
    return refuse(error, ES_E_ARGUMENT, "backend or direct is unknown");
  return guarded(error, [&]() -> int32_t {
    Options options;
    options.backend = o.backend;
    options.direct = o.direct;
    options.depth = o.depth;
    options.prefetch_depth = o.prefetch_depth;
    options.decode_hold_ms = o.decode_hold_ms;
    options.deadline_ms = o.deadline_ms;
    options.retries = o.retries;
    options.pool_threads = o.pool_threads;
    options.flags = o.flags;
    options.cache_bytes = o.cache_bytes;
    if (o.cache) options.cache = o.cache->cache;
    if (o.faults) {
      std::string why;
      if (!parse_faults(o.faults, &options.faults, &why)) return refuse(error, ES_E_ARGUMENT, why.c_str());
      options.inject_faults = true;
    }
    count_forks();
    *store = new es_store(std::move(options));
    return ES_OK;
  });
}

int32_t es_add_table(es_store* store, const es_table* table, const es_table* second, es_error* error) {
  const int32_t result = check_store(store, error);
  if (result != ES_OK) return result;
  es_table first = {}, other = {};
  if (!take_struct(table, &first) || (second && !take_struct(second, &other)))
    return refuse(error, ES_E_ARGUMENT, "table is null or has no struct_bytes");
  return guarded(error, [&] { return store->store.add_table(first, second ? &other : nullptr, error); });
}

int32_t es_start(es_store* store, es_error* error) {
  const int32_t result = check_store(store, error);
  return result != ES_OK ? result : guarded(error, [&] { return store->store.start(error); });
}

void es_close(es_store* store) {
  // In a forked child the thread to join does not exist: its copy of the store is left alone.
  if (store && !store->is_foreign()) delete store;
}

size_t es_report(es_store* store, char* text, size_t capacity) {
  const std::string report = store->store.report();
  if (capacity) {
    const size_t count = report.size() < capacity - 1 ? report.size() : capacity - 1;
    std::memcpy(text, report.data(), count);
    text[count] = 0;
  }
  return report.size();
}

void es_get_counters(es_store* store, es_counters* counters) {
  es_counters all = {};
  store->store.get_counters(&all);
  give_struct(all, counters);
}

int32_t es_submit(es_store* store, const es_request* request, es_ticket* ticket, es_error* error) {
  int32_t result = check_store(store, error);
  es_request asked;
  if (result == ES_OK) result = take_request(request, &asked, error);
  if (result != ES_OK) return result;
  if (!ticket) return refuse(error, ES_E_ARGUMENT, "ticket is null");
  return guarded(error, [&] {
    TicketTable::Entry* entry = store->tickets.take();
    const es_ticket handle = TicketTable::handle(*entry);
    const int32_t answer = store->store.submit(&entry->ticket, asked, error);
    store->tickets.drop(entry, answer != ES_OK);
    if (answer == ES_OK) *ticket = handle;
    return answer;
  });
}

int32_t es_poll(es_store* store, es_ticket ticket, es_error* error) { return es_wait(store, ticket, 0, error); }

int32_t es_wait(es_store* store, es_ticket ticket, int64_t timeout_us, es_error* error) {
  const int32_t result = check_store(store, error);
  if (result != ES_OK) return result;
  TicketTable::Entry* entry = store->tickets.find(ticket);
  if (!entry) return refuse(error, ES_E_TICKET, "no such ticket, or it was released");
  const int32_t answer = Store::wait(&entry->ticket, timeout_us);
  give_failure(entry->ticket, answer, error);
  store->tickets.drop(entry);
  return answer;
}

int32_t es_release(es_store* store, es_ticket ticket) {
  if (!store) return ES_E_ARGUMENT;
  if (store->is_foreign()) return ES_E_FORKED;
  TicketTable::Entry* entry = store->tickets.find(ticket, true);
  if (!entry) return ES_E_TICKET;
  store->store.retire(&entry->ticket);
  store->tickets.drop(entry);
  return ES_OK;
}

int32_t es_gather(es_store* store, const es_request* request, es_error* error) {
  int32_t result = check_store(store, error);
  es_request asked;
  if (result == ES_OK) result = take_request(request, &asked, error);
  if (result != ES_OK) return result;
  return guarded(error, [&] {
    TicketTable::Entry* entry = store->tickets.take();
    int32_t answer = store->store.submit(&entry->ticket, asked, error);
    if (answer == ES_OK) {
      answer = Store::wait(&entry->ticket, -1);
      give_failure(entry->ticket, answer, error);
    }
    store->tickets.drop(entry, true);
    return answer;
  });
}

int32_t es_work_create(es_store* store, const es_request* request, const uint32_t* num_ids, int32_t* status,
                       es_work** work, es_error* error) {
  int32_t result = check_store(store, error);
  es_request asked;
  if (result == ES_OK) result = take_request(request, &asked, error);
  if (result != ES_OK) return result;
  const Table* table = store->store.find_table(asked.layer);
  if (!work || !table || !store->store.started())
    return refuse(error, ES_E_ARGUMENT, "work is null, or no started store has this layer");
  return guarded(error, [&]() -> int32_t {
    auto made = std::make_unique<es_work>();
    const int32_t valid = made->ticket.check(*table, asked, error);
    if (valid != ES_OK) return valid;
    made->ticket.reserve(*table, asked.num_ids);
    made->store = store;
    made->request = asked;
    made->num_ids = num_ids;
    made->max_ids = static_cast<uint32_t>(asked.num_ids);
    made->status = status;
    clear_error(&made->error);
    *work = made.release();
    return ES_OK;
  });
}

void es_hostfn_submit(void* pointer) {
  auto* work = static_cast<es_work*>(pointer);
  uint32_t count = work->num_ids ? __atomic_load_n(work->num_ids, __ATOMIC_ACQUIRE) : work->max_ids;
  int32_t result = check_store(work->store, &work->error);
  if (result == ES_OK && count > work->max_ids) {
    result = refuse(&work->error, ES_E_ARGUMENT, "more ids than the work was created for");
    count = work->max_ids;
  }
  work->request.num_ids = count;
  if (result == ES_OK) result = work->store->store.submit(&work->ticket, work->request, &work->error);
  work->is_out = result == ES_OK;
  if (work->is_out) return;
  Ticket::poison_all(*work->store->store.find_table(work->request.layer), work->request, count);
  end_work(work, result);
}

void es_hostfn_wait(void* pointer) {
  auto* work = static_cast<es_work*>(pointer);
  if (work->is_out) end_work(work, Store::wait(&work->ticket, -1));
}

void es_hostfn(void* pointer) {
  es_hostfn_submit(pointer);
  es_hostfn_wait(pointer);
}

int32_t es_work_result(es_work* work, es_error* error) {
  if (error) *error = work->error;
  return work->result;
}

uint64_t es_work_failures(es_work* work) { return work->failures.load(std::memory_order_relaxed); }

void es_work_destroy(es_work* work) {
  if (!work) return;
  if (work->is_out && !work->store->is_foreign()) work->store->store.retire(&work->ticket);
  delete work;
}

int32_t es_cache_create(uint64_t bytes, uint32_t row_bytes, es_cache** cache) {
  if (!cache || row_bytes == 0) return ES_E_ARGUMENT;
  return guarded(nullptr, [&] {
    *cache = new es_cache{std::make_shared<RowCache>(bytes, row_bytes)};
    return ES_OK;
  });
}

void es_cache_release(es_cache* cache) { delete cache; }

void es_cache_get_counters(es_cache* cache, es_cache_counters* counters) {
  es_cache_counters all = {};
  cache->cache->counters(&all);
  give_struct(all, counters);
}

void es_cache_clear(es_cache* cache) {
  const std::lock_guard<std::mutex> lock(cache->cache->mutex());
  cache->cache->clear();
}

int32_t es_hash(const es_hash_plan* given, const int64_t* ids, uint64_t total, uint64_t start, void* out,
                uint64_t* bad_index) {
  es_hash_plan plan = {};
  if (!take_struct(given, &plan) || start > total || !bad_index || (total && !ids) || (total > start && !out) ||
      plan.max_ngram_size < 2 || (plan.id_bytes != 4 && plan.id_bytes != 8) || !plan.multipliers || !plan.primes ||
      !plan.offsets)
    return ES_E_ARGUMENT;
  const uint64_t columns = uint64_t{plan.num_layers} * (plan.max_ngram_size - 1) * plan.num_heads;
  for (uint64_t c = 0; c < columns; ++c)
    if (plan.primes[c] < 1 || (plan.id_bytes == 4 && plan.offsets[c] + plan.primes[c] > INT64_C(1) << 31))
      return ES_E_ARGUMENT;
  return guarded(nullptr, [&] { return hash_prompt(plan, ids, total, start, out, bad_index); });
}

uint32_t es_crc32c(uint32_t crc, const void* data, size_t num_bytes) {
  return crc_end(crc_update(~crc, data, num_bytes));
}

uint32_t es_row_crc(const es_identity* identity, uint64_t row, const void* bytes) {
  const uint32_t seed = identity_state(identity->pack_id, identity->layer, identity->column);
  return crc_end(crc_update(crc_update_u64(seed, row), bytes, identity->row_bytes));
}

uint64_t es_encode_blocks(const es_identity* identity, uint64_t first_row, uint64_t num_rows, const void* weights,
                          uint32_t weight_bytes, const void* scales, uint32_t scale_bytes, void* blocks) {
  const bool fits = identity->row_bytes && identity->row_bytes <= kBlockBytes - kHeaderBytes - 4 &&
                    identity->row_bytes == weight_bytes + scale_bytes &&
                    first_row % rows_per_block(identity->row_bytes) == 0;
  if (!fits) return 0;
  return encode_blocks(*identity, first_row, num_rows, static_cast<const uint8_t*>(weights), weight_bytes,
                       static_cast<const uint8_t*>(scales), scale_bytes, static_cast<uint8_t*>(blocks));
}

uint64_t es_check_blocks(const es_identity* identity, uint64_t block_no, uint64_t num_blocks, uint64_t num_rows,
                         const void* blocks, int32_t* kind, uint64_t* row) {
  *kind = ES_KIND_ARGUMENT;
  *row = kNone;
  if (!identity->row_bytes || identity->row_bytes > kBlockBytes - kHeaderBytes - 4) return 0;
  *kind = ES_KIND_NONE;
  const auto* block = static_cast<const uint8_t*>(blocks);
  for (uint64_t i = 0; i < num_blocks; ++i, block += kBlockBytes) {
    *kind = check_block(*identity, block_no + i, num_rows, block, row);
    if (*kind != ES_KIND_NONE) return i;
  }
  return num_blocks;
}

int32_t es_decode_bf16(uint32_t isa, uint32_t row_format, uint32_t weight_bytes, uint32_t scale_bytes,
                       float global_scale, const void* rows, uint64_t num_rows, uint16_t* out) {
  const bool fits = isa <= static_cast<uint32_t>(Isa::kNeon) && isa_available(static_cast<Isa>(isa)) && scale_bytes &&
                    (row_format == ES_ROW_FP8 ? weight_bytes && weight_bytes % scale_bytes == 0
                                              : row_format == ES_ROW_NVFP4 && weight_bytes == 8 * scale_bytes);
  if (!fits) return ES_E_ARGUMENT;
  return guarded(nullptr, [&] {
    const RowDecoder decoder(row_format, weight_bytes, scale_bytes, global_scale, static_cast<Isa>(isa));
    const auto* row = static_cast<const uint8_t*>(rows);
    for (uint64_t i = 0; i < num_rows; ++i, row += weight_bytes + scale_bytes, out += decoder.num_values())
      decoder.decode(row, row + weight_bytes, out);
    return ES_OK;
  });
}

}  // extern "C"
