// A checksum of a block: a word of 64 bits that differs wherever one word of the block does.
//
// Each word is multiplied with an odd weight of its place. The words of a chunk are summed up, and the sums of the chunks
// are the digits of a number to an odd base, all modulo 2^64. To multiply by an odd number loses nothing, so a change of
// one word, whatever it is, changes the result. A product carries upwards only: without more, changes of high bits (the
// signs of two numbers, say) would often cancel. So before and after it the upper half is folded onto the lower one, which
// loses nothing either, and several changes cancel by chance alone. Whoever has torch can compute it too.
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

inline uint64_t folded(uint64_t x) { return x ^ (x >> 32); }

inline uint64_t checksum(const uint64_t* words, int64_t count, uint64_t seed) {
  static constexpr auto weights = checksum_weights();
  uint64_t result = seed;
  for (int64_t begin = 0; begin < count; begin += CHECKSUM_CHUNK) {
    const int64_t n = count - begin < CHECKSUM_CHUNK ? count - begin : CHECKSUM_CHUNK;
    uint64_t sums[8] = {};  // as many as a vector has
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
      for (int j = 0; j < 8; j++) sums[j] += folded(folded(words[begin + i + j]) * weights[static_cast<size_t>(i + j)]);
    for (; i < n; i++) sums[0] += folded(folded(words[begin + i]) * weights[static_cast<size_t>(i)]);
    uint64_t sum = 0;
    for (const uint64_t each : sums) sum += each;
    result = (result + sum) * CHECKSUM_BASE;
  }
  return result;
}

}  // namespace KVTIER_ISA
