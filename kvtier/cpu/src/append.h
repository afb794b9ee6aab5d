// New keys and values into blocks.
#pragma once

#include <cstring>

#include "attention.h"

namespace append {

inline bool fits(const kvtier_append_problem& p, const kvtier_span& span) {
  const auto within = [](int64_t first, int64_t count, int64_t size) {
    return first >= 0 && count >= 0 && first <= size && count <= size - first;
  };
  return within(span.row, 1, p.rows) && within(span.token, span.count, p.tokens) &&
         within(span.offset, span.count, p.block_size);
}

// `count` rows of `bytes`, from `from` with a stride, to contiguous rows.
inline void copy_rows(char* to, const char* from, int64_t count, int64_t stride, int64_t bytes) {
  if (stride == bytes) {
    std::memcpy(to, from, static_cast<size_t>(count * bytes));
    return;
  }
  for (int64_t i = 0; i < count; i++, to += bytes, from += stride) std::memcpy(to, from, static_cast<size_t>(bytes));
}

inline void copy_heads(char* to, const void* source, const int64_t* strides, int64_t heads, int64_t bytes,
                       int64_t block_size, const kvtier_span& span) {
  const char* from = static_cast<const char*>(source) + span.row * strides[0] + span.token * strides[2];
  for (int64_t h = 0; h < heads; h++)
    copy_rows(to + (h * block_size + span.offset) * bytes, from + h * strides[1], span.count, strides[2], bytes);
}

inline void copy(const kvtier_append_problem& p, const kvtier_span& span) {
  char* block = reinterpret_cast<char*>(span.block);
  copy_heads(block, p.keys, p.key_strides, p.k_heads, p.k_bytes, p.block_size, span);
  copy_heads(block + p.values_offset, p.values, p.value_strides, p.v_heads, p.v_bytes, p.block_size, span);
}

}  // namespace append
