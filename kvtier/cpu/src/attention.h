// Attention over blocks of keys and values in host memory. Plain C: no torch, no Python.
//
// A block holds `block_size` tokens of one layer in contiguous bytes: keys [kv_heads, block_size, k_dim], then values
// [kv_heads, block_size, v_dim], both of one dtype. A sequence is a list of runs of neighbouring blocks.
#pragma once

#include <stdint.h>

#define KVTIER_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum { KVTIER_F32 = 0, KVTIER_BF16 = 1, KVTIER_F16 = 2, KVTIER_BOOL = 3, KVTIER_NONE = -1 };

// Error codes; 0 is success. CLOSED: the job was submitted before a fork, and this process is the child, which has no
// copy of the threads. ABSENT: bytes of a file that are not in memory.
enum { KVTIER_OK = 0, KVTIER_INVALID = 1, KVTIER_MEMORY = 2, KVTIER_CLOSED = 3, KVTIER_ABSENT = 4 };

// ------------------------------------------------------------------------------------- attention

// Neighbouring blocks of one sequence: block index + i begins at address + i * block_stride, for i in [0, count).
typedef struct kvtier_run {
  int64_t address;
  int32_t index;
  int32_t count;
} kvtier_run;

// The stored tokens of one sequence. Blocks may be missing: then the result is the part over those that are listed.
typedef struct kvtier_sequence {
  const kvtier_run* runs;  // rising by index, not overlapping
  int64_t run_count;
  int64_t length;  // tokens of the whole sequence, the new ones included; memory behind it is never read
} kvtier_sequence;

// The new tokens of one sequence in one call. Query i of n stands at position length - n + i.
typedef struct kvtier_queries {
  int64_t count;            // 0: nothing is written for this sequence
  int64_t query, out, lse;  // of the first one, in elements from the base pointers
} kvtier_queries;

// One call: every sequence of a batch, every head of a layer. Sequences may differ in length and in queries.
typedef struct kvtier_problem {
  int32_t dtype;      // of queries, keys and values: F32, BF16 or F16
  int32_t out_dtype;  // of `out`: F32, BF16 or F16
  int32_t sequence_count;
  int32_t heads;     // of the queries; a multiple of kv_heads, head h reads KV head h / (heads / kv_heads)
  int32_t kv_heads;
  int32_t k_dim;
  int32_t v_dim;
  int32_t block_size;
  int32_t causal;      // a query sees positions up to its own
  int32_t window;      // a query at position p sees positions > p - window; 0: all
  int32_t mask_dtype;  // NONE, BOOL (one byte, nonzero: seen), F32, BF16 or F16 (added to the scaled scores)
  float scale;         // of the scores
  float softcap;       // scores become cap * tanh(score / cap); 0: none
  int64_t block_stride;              // bytes from one block of a run to the next
  const kvtier_sequence* sequences;  // [sequence_count]
  const kvtier_queries* queries;     // [sequence_count]
  const void* query;                 // rows of k_dim contiguous elements
  int64_t query_strides[2];          // in elements: head, query
  void* out;                         // rows of v_dim contiguous elements; zeros where nothing is seen
  int64_t out_strides[2];            // in elements: head, query
  float* lse;  // or NULL: natural log of the sum of exp; -inf where nothing is seen
  int64_t lse_strides[2];       // in elements: head, query
  const int64_t* first_valid;   // [sequence_count] first position seen (left padding), or NULL
  const void* mask;             // rows of at least `length` contiguous elements
  int64_t mask_strides[3];      // in elements: sequence, head, query; 0 broadcasts
  const float* sinks;           // [heads] a logit that only adds to the sum, or NULL
  const float* slopes;          // [heads] ALiBi: slope * (position of the key - position of the query), or NULL
} kvtier_problem;

typedef struct kvtier_job kvtier_job;

KVTIER_API const char* kvtier_source(void);  // a digest of the sources that this library was compiled from
// The one in use: "amx_bf16", "avx512_bf16", "avx512", "avx2", "neon" or "portable".
KVTIER_API const char* kvtier_instruction_set(void);
KVTIER_API int kvtier_use_instruction_set(const char* name);  // 0, or KVTIER_INVALID where this CPU lacks it

// How keys and values get into the caches, for tests and benchmarks: "software", by instructions of the kernel; "hardware",
// without; "learned", as from the start, in the way that tasks are found to be faster. The results are the same, bit for
// bit. 0, or KVTIER_INVALID for another name.
KVTIER_API int kvtier_use_prefetch(const char* name);

// Attend now, with up to `threads` threads, the caller's among them.
KVTIER_API int kvtier_attend(const kvtier_problem* problem, int32_t threads);

// Attend later on the pool's threads. `problem`, its sequences, their runs and its queries are copied; all other memory
// that it points to must stay valid until the job is done. The handle is written to `*job` and cleared there by
// `kvtier_wait`, so that no signal between a call and the use of its result can lose it. `*job` may be NULL in
// `kvtier_wait`. `seconds`, if not NULL, receives the time from the start of the first task to the end of the last.
KVTIER_API int kvtier_submit(const kvtier_problem* problem, int32_t threads, kvtier_job** job);
KVTIER_API int kvtier_done(const kvtier_job* job);                   // 1 when finished
KVTIER_API int kvtier_wait(kvtier_job** job, double* seconds);  // waits, helps with what is left, frees the job

KVTIER_API int32_t kvtier_threads(void);  // alive in the pool
KVTIER_API void kvtier_shutdown(void);    // end them after the work that is queued; the next submit starts new ones

// Wait until the pool has finished every submitted job; from then on `kvtier_submit` attends at once on the caller's
// thread. For the exit of a process, before it frees the memory that jobs read.
KVTIER_API void kvtier_drain(void);

// Let `kvtier_attend` run on the team of an OpenMP runtime (the address of its GOMP_parallel), so that it shares the
// threads of its caller instead of competing with them for the cores. NULL: the pool, as in a forked child.
KVTIER_API void kvtier_use_team(void* entry);

// ------------------------------------------------------------------------------------- appending

// `count` tokens of source row `row`, from `token` on, for the tokens of a block from `offset` on.
typedef struct kvtier_span {
  int64_t block;  // address
  int64_t offset;
  int64_t row;
  int64_t token;
  int64_t count;
} kvtier_span;

// New keys [rows, k_heads, tokens, ...] and values [rows, v_heads, tokens, ...], how they are stored in a block, and
// where. Sizes and strides are in bytes: any dtype.
typedef struct kvtier_append_problem {
  const void* keys;
  const void* values;
  const kvtier_span* spans;
  int64_t span_count;
  int64_t rows, tokens;
  int64_t key_strides[3];    // row, head, token
  int64_t value_strides[3];
  int64_t k_heads, v_heads;
  int64_t k_bytes, v_bytes;  // of one token in one head
  int64_t block_size;        // tokens
  int64_t values_offset;     // from the beginning of a block to its values
} kvtier_append_problem;

// Copy new keys and values into blocks. INVALID, and nothing written, where a span exceeds its block or its source.
KVTIER_API int kvtier_append(const kvtier_append_problem* problem);

// ------------------------------------------------------------------------------------- merging

// One part of an attention result. Strides are in elements; rows of `dim` contiguous elements.
typedef struct kvtier_part {
  const float* out;
  const float* lse;
  int64_t out_strides[3];
  int64_t lse_strides[3];
} kvtier_part;

typedef struct kvtier_merge_problem {
  int32_t out_dtype;  // F32, BF16 or F16
  int32_t dim;
  int64_t shape[3];  // rows
  void* out;         // may be the memory of a part
  int64_t out_strides[3];
  float* lse;  // or NULL
  int64_t lse_strides[3];
  const kvtier_part* parts;
  int64_t part_count;  // at least 1
} kvtier_merge_problem;

// Merge parts over disjoint tokens by log-sum-exp. Zeros and -inf where no part saw anything.
KVTIER_API int kvtier_merge(const kvtier_merge_problem* problem);

// ------------------------------------------------------------------------------------- checksums

// A checksum of each of `blocks` neighbouring blocks of `nbytes` bytes, a multiple of 8; see checksum.h.
KVTIER_API int kvtier_checksums(const void* data, int64_t blocks, int64_t nbytes, uint64_t seed, uint64_t* sums);

// The CRC-32 of bytes behind others whose CRC-32 is `crc`, as zlib has it; see crc32.h. KVTIER_INVALID, where this CPU has
// no instruction that makes it faster than zlib's.
KVTIER_API int kvtier_crc32(const void* data, int64_t nbytes, uint32_t* crc);

// Where bytes of one head go. Those of head h go h * head_stride bytes behind them.
typedef struct kvtier_piece {
  void* address;
  int64_t nbytes;
} kvtier_piece;

// The bytes of a file from `offset` on: those of all pieces for the first head, then for the next one, and so on.
typedef struct kvtier_cached {
  int32_t file;
  int32_t heads;
  int64_t offset;
  int64_t head_stride;
  int64_t segment;  // bytes of the file that have a checksum of their own
  const kvtier_piece* pieces;
  int64_t piece_count;
  uint32_t* crc;   // of the segment so far; begins again at its end
  uint32_t* sums;  // gets the CRC-32 of every segment that ends
} kvtier_cached;

// Read what is in the page cache, see cached.h. KVTIER_ABSENT where a byte is not, or cannot be read: some pieces may have
// been written. KVTIER_INVALID where this system or CPU cannot do it.
KVTIER_API int kvtier_read_cached(const kvtier_cached* from);

#ifdef __cplusplus
}
#endif
