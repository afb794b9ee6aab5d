// What the threads and the kernels share: a problem cut into tasks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"

// A run of one sequence's blocks. Where a sequence is cut depends on its size alone, never on how many threads there
// are or which was faster: results are the same, bit for bit, each time.
struct Task {
  int32_t sequence;
  int64_t first, last;  // [first, last) in problem.blocks
};

// What has been seen so far, for every row (head, query) of a sequence: out = values / sum.
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
  // Floats of one partial and bytes of scratch for this problem.
  size_t (*partial_floats)(const kvtier_problem&);
  size_t (*scratch_bytes)(const kvtier_problem&, int64_t max_blocks);
  Partial (*partial_at)(const kvtier_problem&, float* memory);
  void (*attend)(const kvtier_problem&, const Task&, char* scratch, Partial);
  // Merge a sequence's partials into `out` and `lse`. Overwrites parts[0].
  void (*finish)(const kvtier_problem&, int32_t sequence, const Partial* parts, size_t count);
};

const Kernel* portable_kernel();
#if defined(__x86_64__)
const Kernel* avx2_kernel();
const Kernel* avx512_kernel();
const Kernel* avx512_bf16_kernel();
#endif
