// What the engine and the kernels share: a problem cut into tasks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "contest.h"

// Queries of one sequence that follow each other, in KV heads that do: one result, which tasks over blocks add up to. A
// sequence has one or several; see `Job::add`. Copied, so that the caller may change its own as soon as the call was taken.
struct Share {
  int32_t row;                // of the sequence in the problem: of the mask
  int32_t kv_head, kv_heads;  // the first, and how many
  int32_t query_heads;        // of all these KV heads
  int32_t first_query;        // within the sequence
  int32_t queries;            // at least 1
  int64_t position;           // of the first query
  int64_t length;             // behind the last token that any query sees
  int64_t first_seen;         // first position that is no padding
  int64_t lowest;             // first position that any query sees
  int64_t query, out, lse;    // of the first query, in elements
  size_t first_task, task_count;

  int group_rows() const { return query_heads / kv_heads * queries; }  // of each KV head
  int rows() const { return query_heads * queries; }
};

// Some blocks of one share. Where a sequence is cut depends on its size alone, never on the number of threads, on
// their timing, or on how its blocks are grouped in runs: results are the same, bit for bit, each time.
struct Task {
  int32_t share;
  const kvtier_run* run;  // the first
  int64_t skip;           // blocks of the first run that earlier tasks have, or that no query sees
  int64_t blocks;         // of this run and those behind it
};

// What has been seen so far, for every row (head, query) of a share: out = values / sum.
struct Partial {
  float* highest;  // [rows] highest score
  float* sum;      // [rows] of exp(score - highest)
  float* values;   // [rows, v_pad] sum of exp(score - highest) * value
};

// Memory of one thread, grown when needed.
struct Scratch {
  std::unique_ptr<char[]> memory;
  size_t size = 0;
  // 64-byte aligned; nullptr where the machine has no more
  char* take(size_t bytes);
};

struct Kernel {
  const char* name;
  // Floats of one partial and bytes of scratch, for one share.
  size_t (*partial_floats)(const kvtier_problem&, const Share&);
  size_t (*scratch_bytes)(const kvtier_problem&, const Share&);
  Partial (*partial_at)(const kvtier_problem&, const Share&, float* memory);
  // Returns the tokens that were attended to. The way they are prefetched changes no bit.
  int64_t (*attend)(const kvtier_problem&, const Share&, const Task&, Prefetch, char* scratch, Partial);
  // Combine a share's partials into `out` and `lse`. Overwrites parts[0].
  void (*finish)(const kvtier_problem&, const Share&, const Partial* parts, size_t count);
  void (*merge)(const kvtier_merge_problem&);
  uint64_t (*checksum)(const uint64_t* words, int64_t count, uint64_t seed);

  mutable Contest contests[CONTESTS] = {};  // see `contest_of`
};

const Kernel* portable_kernel();
#if defined(__x86_64__)
const Kernel* avx2_kernel();
const Kernel* avx512_kernel();
const Kernel* avx512_bf16_kernel();
const Kernel* amx_bf16_kernel();  // null where the compiler did not know it
#elif defined(__aarch64__)
const Kernel* neon_kernel();
#endif
