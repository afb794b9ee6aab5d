// CRC-32, as zlib computes it, by carry-less multiplication: several times as fast as zlib's own.
//
// A CRC is the remainder of the message, a polynomial over one bit, modulo another one. Sixteen bytes that stand D bits
// before the end are congruent to their product with x^D mod P, which has 32 bits, so they can be added to what stands D
// bits behind them ("folded"; Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel 2009).
// Four registers of 16 bytes are folded onto the next four at a time, then onto each other, and what is left, 16 bytes
// and the end of the message, goes through a table.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <array>
#include <cstdint>
#include <cstring>

namespace crc32 {

constexpr uint32_t POLYNOMIAL = 0xEDB88320u;  // x^0 is its highest bit

constexpr uint32_t times_x(uint32_t value) { return value >> 1 ^ (value & 1 ? POLYNOMIAL : 0); }

constexpr std::array<uint32_t, 256> table() {
  std::array<uint32_t, 256> found{};
  for (uint32_t byte = 0; byte < 256; byte++) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; bit++) value = times_x(value);
    found[byte] = value;
  }
  return found;
}

// What is left of a CRC register behind some bytes.
inline uint32_t through_table(uint32_t crc, const unsigned char* at, int64_t nbytes) {
  static constexpr auto of = table();
  for (int64_t i = 0; i < nbytes; i++) crc = crc >> 8 ^ of[(crc ^ at[i]) & 0xFF];
  return crc;
}

#if defined(__x86_64__)

// x^bits mod P, as a factor of 64 bits: a product of reflected polynomials is one bit short.
constexpr uint64_t power(int bits) {
  uint32_t value = 0x80000000u;
  for (int i = 0; i < bits; i++) value = times_x(value);
  return static_cast<uint64_t>(value) << 1;
}

inline bool available() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

__attribute__((target("pclmul,sse4.1"))) inline __m128i loaded(const unsigned char* at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

// The first 8 bytes of a register stand 64 bits further from the end than the last 8.
__attribute__((target("pclmul,sse4.1"))) inline __m128i folded(__m128i value, __m128i by, __m128i onto) {
  const __m128i first = _mm_clmulepi64_si128(value, by, 0x00), last = _mm_clmulepi64_si128(value, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(first, last), onto);
}

// `crc` is the register, not its complement. At least 64 bytes.
__attribute__((target("pclmul,sse4.1"))) inline uint32_t by_folding(uint32_t crc, const unsigned char* at,
                                                                    int64_t nbytes) {
  constexpr int D = 4 * 128;
  const __m128i by_four = _mm_set_epi64x(static_cast<int64_t>(power(D - 32)), static_cast<int64_t>(power(D + 32)));
  const __m128i by_one = _mm_set_epi64x(static_cast<int64_t>(power(96)), static_cast<int64_t>(power(160)));
  __m128i a = _mm_xor_si128(loaded(at), _mm_cvtsi32_si128(static_cast<int32_t>(crc)));
  __m128i b = loaded(at + 16), c = loaded(at + 32), d = loaded(at + 48);
  for (at += 64, nbytes -= 64; nbytes >= 64; at += 64, nbytes -= 64) {
    a = folded(a, by_four, loaded(at));
    b = folded(b, by_four, loaded(at + 16));
    c = folded(c, by_four, loaded(at + 32));
    d = folded(d, by_four, loaded(at + 48));
  }
  a = folded(folded(folded(a, by_one, b), by_one, c), by_one, d);
  for (; nbytes >= 16; at += 16, nbytes -= 16) a = folded(a, by_one, loaded(at));
  unsigned char rest[16];
  std::memcpy(rest, &a, 16);
  return through_table(through_table(0, rest, 16), at, nbytes);
}

inline uint32_t update(uint32_t crc, const unsigned char* at, int64_t nbytes) {
  return ~(nbytes < 64 ? through_table(~crc, at, nbytes) : by_folding(~crc, at, nbytes));
}

#else

// Elsewhere zlib is as good.
inline bool available() { return false; }
inline uint32_t update(uint32_t crc, const unsigned char* at, int64_t nbytes) {
  return ~through_table(~crc, at, nbytes);
}

#endif

}  // namespace crc32
