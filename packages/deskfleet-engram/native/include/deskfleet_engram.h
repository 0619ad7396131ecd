/* deskfleet_engram.h: rows of Engram tables from disk, as a C interface.
 *
 * A store owns open files, one I/O thread and (unless given one) a row cache. Callers ask for rows by their id in a
 * layer's whole table and own every buffer; a ticket stands for one request.
 *
 *   es_options options;  es_options_init(&options);
 *   es_store *store = NULL;  es_error error = {0};
 *   es_create(&options, &store, &error);
 *   es_add_table(store, &table, NULL, &error);       one per layer, each with an optional second source
 *   es_start(store, &error);                          checks every file, starts the I/O thread
 *   es_submit(store, &request, &ticket, &error);  ...  es_wait(store, ticket, -1, &error);  es_release(store, ticket);
 *   es_close(store);
 *
 * Threads. After es_start every function may be called from any thread at any time; es_close must be the last call
 * and must not overlap another one on the same store. A store does not survive fork(): in the child every call
 * answers ES_E_FORKED.
 *
 * Ownership. Strings and arrays of options, tables and requests are copied before a function returns, except `out`
 * and `out_scales`: those belong to the ticket until it is finished (es_wait or es_poll say ES_OK or ES_FAILED) or
 * released. Releasing an unfinished ticket is allowed: it returns once no thread will write to the buffers any more,
 * without waiting for the disk. Ids are read during es_submit only.
 *
 * Cost. es_submit sorts, removes repeats and copies what the cache holds in the calling thread (about 50 ns per id),
 * so the I/O thread stays free for the device. A request that the cache answers whole never wakes another thread.
 *
 * Failure. A failed read is tried again into other memory, then from the second source; when that fails too, the
 * ticket is ES_FAILED, es_error names file, block and row, and the output rows that could not be had are filled with
 * poison: bytes 0x7f (RAW, SPLIT: NaN codes, and for NVFP4 NaN scales) or 0x7fc0 words (BF16). Rows that exist are
 * never answered with zeros.
 *
 * Every struct that crosses the interface opens with `struct_bytes`, which the caller sets to sizeof: later versions
 * append fields and accept the shorter struct.
 */
#ifndef DESKFLEET_ENGRAM_H
#define DESKFLEET_ENGRAM_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#error "Linux only"
#endif
#define ES_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

#define ES_ABI_VERSION 1

typedef struct es_store es_store;
typedef struct es_cache es_cache;
typedef struct es_work es_work;
typedef uint64_t es_ticket; /* 0 is never a ticket */

/* What a function answers. Negative: the call itself was refused and nothing was written to the outputs. */
enum es_result {
  ES_OK = 0,
  ES_PENDING = 1,
  ES_FAILED = 2, /* some rows could not be had; they hold poison */
  ES_E_ARGUMENT = -1,
  ES_E_RANGE = -2, /* a row id outside the table, or of a column that is not held */
  ES_E_OPEN = -3,  /* a file is missing, or not what it should be */
  ES_E_BACKEND = -4,
  ES_E_MEMORY = -5,
  ES_E_CLOSED = -6,
  ES_E_TICKET = -7,
  ES_E_FORKED = -8,
};

/* What went wrong with a file or a row: es_error.kind, and the index into es_counters.errors. */
enum es_kind {
  ES_KIND_NONE = 0,
  ES_KIND_ARGUMENT = 1,
  ES_KIND_RANGE = 2,
  ES_KIND_OPEN = 3,       /* missing, or refused by the system */
  ES_KIND_SIZE = 4,       /* file shorter or longer than its table */
  ES_KIND_HOLE = 5,       /* bytes never written: a hole, or a block of zeros */
  ES_KIND_SUPERBLOCK = 6, /* not a pack file, unknown version, or damaged */
  ES_KIND_IDENTITY = 7,   /* a pack file of another checkpoint, layer, column or format */
  ES_KIND_IO = 8,         /* the system reported an error; see sys_errno */
  ES_KIND_SHORT_READ = 9,
  ES_KIND_CHECKSUM = 10,
  ES_KIND_MISPLACED = 11, /* an intact block that belongs elsewhere */
  ES_KIND_DEADLINE = 12,  /* the device did not answer in time */
  ES_KIND_CANCELLED = 13,
  ES_KIND_BACKEND = 14,
  ES_KIND_MISSING = 15,   /* a column that is not held */
  ES_NUM_KINDS = 16,
};

enum es_backend { ES_BACKEND_AUTO = 0, ES_BACKEND_IO_URING = 1, ES_BACKEND_AIO = 2, ES_BACKEND_POOL = 3 };
enum es_direct { ES_DIRECT_AUTO = 0, ES_DIRECT_REQUIRE = 1, ES_DIRECT_NEVER = 2 };
enum es_source { ES_SOURCE_PACK = 0, ES_SOURCE_SHARD = 1 };
enum es_row_format { ES_ROW_FP8 = 1, ES_ROW_NVFP4 = 2 };
enum es_class { ES_CLASS_DECODE = 0, ES_CLASS_PREFETCH = 1 };
enum es_format { ES_FORMAT_RAW = 0, ES_FORMAT_SPLIT = 1, ES_FORMAT_BF16 = 2 };

enum es_flags {
  ES_ALLOW_HOLES = 1, /* do not refuse files with holes; blocks of zeros still fail their checksum */
  ES_NO_REGISTER = 2, /* do not register buffers and files with io_uring */
};

typedef struct es_error {
  int32_t kind; /* enum es_kind */
  int32_t sys_errno;
  uint32_t layer;
  uint32_t column;   /* UINT32_MAX: none */
  uint64_t row;        /* id in the layer's table; UINT64_MAX: none */
  uint64_t column_row; /* the same row within its column */
  uint64_t block;      /* PACK: block of rows, the superblock not counted; SHARD: 4 KiB of the file; UINT64_MAX: none */
  uint64_t num_rows; /* rows of the ticket that failed */
  char file[512];
  char message[512]; /* a sentence with all of the above */
} es_error;

typedef struct es_options {
  uint32_t struct_bytes;
  uint32_t backend;        /* enum es_backend; AUTO: io_uring, then Linux AIO, then a thread pool */
  uint32_t direct;         /* enum es_direct: O_DIRECT if the file system has it */
  uint32_t depth;          /* reads at the device at once: 256, at most 4096 */
  uint32_t prefetch_depth; /* of these for PREFETCH while decode is live: 16 */
  uint32_t decode_hold_ms; /* decode counts as live this long after its last request: 200 */
  uint32_t deadline_ms;    /* a read unanswered for so long has failed: 2000 */
  uint32_t retries;        /* further attempts before the second source: 2 */
  uint32_t pool_threads;   /* of the thread pool backend: 32 */
  uint32_t flags;          /* enum es_flags */
  uint64_t cache_bytes;    /* of a cache of the store's own, 0 none: 64 MiB; ignored when `cache` is given */
  es_cache *cache;         /* shared cache; the store keeps a reference of its own */
  const char *faults;      /* for tests, NULL or "seed=1,eio=0.01,short=0.01,flip=0.01,delay=0.01:2000,hang=0.001" */
} es_options;

typedef struct es_column {
  const char *path; /* NULL: not held here */
  uint32_t column;
  uint32_t elsewhere; /* of a column that is not held: 1: another rank's, its ids give zeros as -1 does; 0: an error */
  uint64_t first_row; /* id of its first row in the layer's table */
  uint64_t num_rows;
} es_column;

/* One layer's table, in one of two forms. PACK: one self-checking file per hash column (FORMAT.md). SHARD: the
 * published safetensors file, weights and scales in two ranges of it; nothing there can be checked. */
typedef struct es_table {
  uint32_t struct_bytes;
  uint32_t layer;
  uint32_t source;     /* enum es_source */
  uint32_t row_format; /* enum es_row_format */
  uint32_t weight_bytes;
  uint32_t scale_bytes; /* a row is its weight bytes, then its scale bytes */
  float global_scale;   /* NVFP4: factor of the whole table; FP8 ignores it */
  uint32_t num_columns;
  uint64_t num_rows;
  uint64_t pack_id;
  const uint8_t *manifest_sha256; /* 32 bytes, or NULL to accept any */
  const es_column *columns;       /* ascending, without gaps, covering num_rows */
  const char *weight_path;
  const char *scale_path; /* NULL: the same file */
  uint64_t weight_offset;
  uint64_t scale_offset;
} es_table;

typedef struct es_request {
  uint32_t struct_bytes;
  uint32_t layer;
  const void *ids; /* -1: a row of another rank, answered with zero codes and scales that stand for one */
  uint64_t num_ids; /* at most 2^24 */
  uint32_t id_bytes; /* 4 (int32) or 8 (int64) */
  uint32_t io_class;
  uint32_t format;
  uint32_t deadline_ms; /* 0: the store's */
  void *out;            /* RAW: rows; SPLIT: weight bytes; BF16: decoded values, 2-byte aligned */
  void *out_scales;     /* SPLIT only */
  uint64_t out_stride_bytes; /* 0: rows lie densely */
  uint64_t scales_stride_bytes;
} es_request;

typedef struct es_counters {
  uint32_t struct_bytes;
  uint32_t reserved;
  uint64_t num_tickets;
  uint64_t num_rows;       /* asked for, -1 left out */
  uint64_t num_unique;     /* after removing repeats within a request = the next five together, once finished */
  uint64_t num_cache_hits;
  uint64_t num_read_rows;  /* delivered from this request's own reads */
  uint64_t num_shared_rows; /* delivered from a read that another request had in flight */
  uint64_t num_fallback_rows;
  uint64_t num_failed_rows;
  uint64_t num_reads;
  uint64_t read_bytes;
  uint64_t num_retries;
  uint64_t num_decode_reads; /* of num_reads */
  uint64_t max_prefetch_depth; /* most PREFETCH reads at the device when one was sent while decode was live */
  uint64_t errors[ES_NUM_KINDS]; /* every event, also those that a retry repaired */
  uint64_t wait_us[32];    /* tickets by time from submit to finish: bucket i holds [2^(i-1), 2^i) us, 0 below 1 us */
  uint64_t num_decode_tickets; /* those of class DECODE that are finished: lookups that somebody waits for */
  uint64_t decode_us;          /* their time from submit to finish, summed; rounded down, each */
} es_counters;

typedef struct es_cache_counters {
  uint32_t struct_bytes;
  uint32_t row_bytes;
  uint64_t capacity_rows;
  uint64_t num_rows;
  uint64_t small_rows;
  uint64_t main_rows;
  uint64_t memory_bytes; /* all of it, index included */
  uint64_t hits;
  uint64_t misses;
  uint64_t inserts;
  uint64_t evictions;
} es_cache_counters;

ES_API uint32_t es_abi_version(void);
ES_API const char *es_cpu_features(void); /* e.g. "crc=sse4.2 decode=avx512"; static */

ES_API void es_options_init(es_options *options);
ES_API int32_t es_create(const es_options *options, es_store **store, es_error *error);
ES_API int32_t es_add_table(es_store *store, const es_table *table, const es_table *second_source, es_error *error);
ES_API int32_t es_start(es_store *store, es_error *error);
ES_API void es_close(es_store *store); /* NULL is allowed; unfinished tickets fail as cancelled */

/* What is in use and why, as "key=value" lines. Returns the length without the final NUL. */
ES_API size_t es_report(es_store *store, char *text, size_t capacity);
ES_API void es_get_counters(es_store *store, es_counters *counters);

ES_API int32_t es_submit(es_store *store, const es_request *request, es_ticket *ticket, es_error *error);
ES_API int32_t es_poll(es_store *store, es_ticket ticket, es_error *error);
ES_API int32_t es_wait(es_store *store, es_ticket ticket, int64_t timeout_us, es_error *error); /* < 0: no limit */
ES_API int32_t es_release(es_store *store, es_ticket ticket);
ES_API int32_t es_gather(es_store *store, const es_request *request, es_error *error);

/* Requests that a CUDA host node repeats: every pointer is fixed, all memory is allocated here. The es_hostfn
 * functions have the signature of cudaHostFn_t; they call neither CUDA nor Python and allocate nothing. One work must
 * not run twice at the same time. `num_ids` (NULL: always request->num_ids) is read at each run and may be at most
 * request->num_ids; `status` (may be NULL) receives the result. Whenever that result is not ES_OK, the rows in
 * question, or all of them when the call itself was refused, hold poison. */
ES_API int32_t es_work_create(es_store *store, const es_request *request, const uint32_t *num_ids, int32_t *status,
                              es_work **work, es_error *error);
ES_API void es_hostfn(void *work);        /* submit and wait */
ES_API void es_hostfn_submit(void *work); /* as soon as ids are known */
ES_API void es_hostfn_wait(void *work);   /* just before the layer */
ES_API int32_t es_work_result(es_work *work, es_error *error); /* of the last finished run */
ES_API uint64_t es_work_failures(es_work *work);               /* runs that were not ES_OK, since creation */
ES_API void es_work_destroy(es_work *work);                    /* before es_close */

/* A row cache for several stores. Rows of at most row_bytes; reference counted. */
ES_API int32_t es_cache_create(uint64_t bytes, uint32_t row_bytes, es_cache **cache);
ES_API void es_cache_release(es_cache *cache);
ES_API void es_cache_get_counters(es_cache *cache, es_cache_counters *counters);
ES_API void es_cache_clear(es_cache *cache);

/* Row ids of whole prompts: out[(i - start) * num_layers * num_columns + ...] for i in start..total. Column order is
 * n-gram size, then head. Compressed ids are -1 at image positions. Answers ES_E_RANGE, with the index in `bad_index`,
 * for an id outside 0..vocab-1. Preconditions that a caller must check: 0 <= pad_id < vocab_size, products fit in 63
 * bits, and history as the Python twin demands. */
typedef struct es_hash_plan {
  uint32_t struct_bytes;
  uint32_t num_layers;
  uint32_t max_ngram_size;
  uint32_t num_heads;
  uint32_t id_bytes; /* of `out`: 8 (int64), or 4 (int32) for tables of less than 2^31 rows */
  uint32_t reserved;
  int64_t vocab_size;
  int64_t pad_id;
  const int64_t *multipliers; /* [num_layers][max_ngram_size] */
  const int64_t *primes;      /* [num_layers][max_ngram_size - 1][num_heads] */
  const int64_t *offsets;     /* [num_layers][(max_ngram_size - 1) * num_heads] */
} es_hash_plan;
ES_API int32_t es_hash(const es_hash_plan *plan, const int64_t *ids, uint64_t total, uint64_t start, void *out,
                       uint64_t *bad_index);

/* Pack format: checksums and blocks, for the packer and for verification. */
typedef struct es_identity {
  uint64_t pack_id;
  uint32_t layer;
  uint32_t column;
  uint32_t row_format;
  uint32_t row_bytes;
} es_identity;
ES_API uint32_t es_crc32c(uint32_t crc, const void *data, size_t num_bytes); /* crc 0 begins; chains */
ES_API uint32_t es_row_crc(const es_identity *identity, uint64_t row, const void *bytes);
/* Encode rows first_row.. into whole 4 KiB blocks; first_row must begin a block. Returns the blocks written. */
ES_API uint64_t es_encode_blocks(const es_identity *identity, uint64_t first_row, uint64_t num_rows,
                                 const void *weights, uint32_t weight_bytes, const void *scales, uint32_t scale_bytes,
                                 void *blocks);
/* Check num_blocks blocks from block_no on, of a column of num_rows rows: header, place, checksum table, every row,
 * and that unused bytes are zero. Returns the number of sound blocks before the first that is not; of that one, `kind`
 * receives the fault and `row` (UINT64_MAX: none) the first bad row of the column. */
ES_API uint64_t es_check_blocks(const es_identity *identity, uint64_t block_no, uint64_t num_blocks,
                                uint64_t num_rows, const void *blocks, int32_t *kind, uint64_t *row);

/* Decode packed rows to bf16, as the store does. `isa`: 0 best, 1 scalar, 2 AVX2, 3 AVX-512, 4 NEON; ES_E_ARGUMENT
 * when this machine lacks it. */
ES_API int32_t es_decode_bf16(uint32_t isa, uint32_t row_format, uint32_t weight_bytes, uint32_t scale_bytes,
                              float global_scale, const void *rows, uint64_t num_rows, uint16_t *out);

#ifdef __cplusplus
}
#endif
#endif
