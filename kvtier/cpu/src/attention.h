// Decode attention over blocks of keys and values in host memory. Plain C: no torch, no Python.
//
// A block is `block_size` tokens of one layer in one run of bytes: keys [kv_heads, block_size, k_dim], then values
// [kv_heads, block_size, v_dim], both of one dtype. A sequence is a list of block addresses.
#pragma once

#include <stdint.h>

#define KVTIER_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum { KVTIER_F32 = 0, KVTIER_BF16 = 1, KVTIER_F16 = 2, KVTIER_BOOL = 3, KVTIER_NONE = -1 };

// One call: every sequence of a batch, every head of a layer.
typedef struct kvtier_problem {
  int32_t dtype;      // of queries, keys and values: F32, BF16 or F16
  int32_t out_dtype;  // of `out`: F32, BF16 or F16
  int32_t sequences;
  int32_t heads;     // of the queries; a multiple of kv_heads, head h reads kv head h / (heads / kv_heads)
  int32_t kv_heads;
  int32_t queries;  // per sequence, the last of its tokens
  int32_t k_dim;
  int32_t v_dim;
  int32_t block_size;
  int32_t causal;      // query i sees positions <= length - queries + i
  int32_t window;      // query at position p sees positions > p - window; 0: all
  int32_t mask_dtype;  // NONE, BOOL (one byte, nonzero: seen), F32, BF16 or F16 (added to the scaled scores)
  float scale;         // of the scores
  float softcap;       // scores become cap * tanh(score / cap); 0: none
  const void* query;   // [sequences, heads, queries, k_dim], dim contiguous
  int64_t query_strides[3];  // in elements
  void* out;                 // [sequences, heads, queries, v_dim], dim contiguous; zeros where nothing is seen
  int64_t out_strides[3];
  float* lse;              // [sequences, heads, queries] or NULL: natural log of the sum of exp; -inf: nothing seen
  const int64_t* blocks;   // addresses of all sequences' blocks
  const int32_t* indices;  // of each block within its sequence, rising; NULL: 0, 1, 2, ...
  const int64_t* begins;   // [sequences + 1] into `blocks`
  const int64_t* lengths;  // [sequences] tokens of the whole sequence; what lies behind is never read
  const int64_t* first_valid;   // [sequences] first position seen (left padding), or NULL
  const void* mask;        // [sequences, heads, queries, >= length], tokens contiguous
  int64_t mask_strides[3];  // in elements; 0 broadcasts
  const float* sinks;       // [heads] a logit that only adds to the sum, or NULL
  const float* slopes;      // [heads] ALiBi: slope * (position of the key - position of the query), or NULL
} kvtier_problem;

typedef struct kvtier_job kvtier_job;

// What went wrong; 0 is success. CLOSED: submitted before a fork, which this process came out of without the threads.
enum { KVTIER_OK = 0, KVTIER_INVALID = 1, KVTIER_MEMORY = 2, KVTIER_CLOSED = 3 };

KVTIER_API const char* kvtier_source(void);  // a digest of the source that this was compiled from
KVTIER_API const char* kvtier_instruction_set(void);   // the one in use: "avx512_bf16", "avx512", "avx2" or "portable"
KVTIER_API int kvtier_use_instruction_set(const char* name);  // 0, or KVTIER_INVALID where this CPU lacks it

// Attend now, with up to `threads` threads, the caller's among them.
KVTIER_API int kvtier_attend(const kvtier_problem* problem, int32_t threads);

// Attend later on the pool's threads. What `problem` points to must live until the job is done; `problem` itself is
// copied. The job is written to and cleared at `*job` from here, so that no signal between a call and what the caller
// does with its result can lose it; `*job` may be NULL when it is waited for.
KVTIER_API int kvtier_submit(const kvtier_problem* problem, int32_t threads, kvtier_job** job);
KVTIER_API int kvtier_done(const kvtier_job* job);  // 1 when finished
KVTIER_API int kvtier_wait(kvtier_job** job);       // waits, helps with what is left, frees the job

KVTIER_API int32_t kvtier_threads(void);  // alive in the pool
KVTIER_API void kvtier_shutdown(void);    // join them; the next submit starts anew

// Let `kvtier_attend` run on the team of a GNU OpenMP runtime (the address of its GOMP_parallel), so that it shares the
// threads of whoever called, instead of fighting them for the cores. NULL: the pool; so it is in a forked child.
KVTIER_API void kvtier_use_team(void* entry);

#ifdef __cplusplus
}
#endif
