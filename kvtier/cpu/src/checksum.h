// A checksum of a block: a word of 64 bits that differs wherever one word of the block does.
//
// The words of a chunk are summed up with odd weights, and the sums of the chunks are the digits of a number to an odd
// base, all modulo 2^64. To multiply by an odd number loses nothing, so a change of one word, whatever it is, changes the
// result; any other change goes unnoticed with a chance of about 2^-64. Whoever has torch alone can compute it too.
#pragma once

#include <array>
#include <cstdint>

namespace KVTIER_ISA {

constexpr int CHECKSUM_CHUNK = 512;
constexpr uint64_t CHECKSUM_BASE = 0x9E3779B97F4A7C15u;

constexpr std::array<uint64_t, CHECKSUM_CHUNK> checksum_weights() {
  std::array<uint64_t, CHECKSUM_CHUNK> found{};
  uint64_t state = 0;
  for (auto& weight : found) {  // splitmix64
    state += CHECKSUM_BASE;
    uint64_t x = state;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    weight = (x ^ (x >> 31)) | 1;
  }
  return found;
}

inline uint64_t checksum(const uint64_t* words, int64_t count, uint64_t seed) {
  static constexpr auto weights = checksum_weights();
  uint64_t result = seed;
  for (int64_t begin = 0; begin < count; begin += CHECKSUM_CHUNK) {
    const int64_t n = count - begin < CHECKSUM_CHUNK ? count - begin : CHECKSUM_CHUNK;
    uint64_t sums[8] = {};  // as many as a vector has
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
      for (int j = 0; j < 8; j++) sums[j] += words[begin + i + j] * weights[static_cast<size_t>(i + j)];
    for (; i < n; i++) sums[0] += words[begin + i] * weights[static_cast<size_t>(i)];
    uint64_t sum = 0;
    for (const uint64_t each : sums) sum += each;
    result = (result + sum) * CHECKSUM_BASE;
  }
  return result;
}

}  // namespace KVTIER_ISA
