// float32 to bfloat16 by chance: up with the probability of the share that is cut off. The bits are Philox-4x32-10 of
// (seed; element, step, tensor), those of ops/lang/philox.py.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include "training.h"

namespace transect {

constexpr int QUARTERS = 32;  // Philox counters that are worked on side by side, each for four elements
constexpr uint32_t ROUND_STREAM = 2;

// words[4 q + lane] for the counters from + q
inline void philox_words(uint32_t from, uint64_t seed, uint32_t step, uint32_t tensor, uint32_t* words) {
  uint32_t c0[QUARTERS], c1[QUARTERS], c2[QUARTERS], c3[QUARTERS];
  for (int q = 0; q < QUARTERS; q++) c0[q] = from + uint32_t(q), c1[q] = step, c2[q] = tensor, c3[q] = ROUND_STREAM;
  uint32_t low = uint32_t(seed), high = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    for (int q = 0; q < QUARTERS; q++) {
      const uint64_t a = uint64_t(c0[q]) * 0xD2511F53u, b = uint64_t(c2[q]) * 0xCD9E8D57u;
      c0[q] = uint32_t(b >> 32) ^ c1[q] ^ low;
      c2[q] = uint32_t(a >> 32) ^ c3[q] ^ high;
      c1[q] = uint32_t(b);
      c3[q] = uint32_t(a);
    }
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  for (int q = 0; q < QUARTERS; q++)
    words[4 * q] = c0[q], words[4 * q + 1] = c1[q], words[4 * q + 2] = c2[q], words[4 * q + 3] = c3[q];
}

// y[i] = x[i] rounded by 16 bits, those from `shift` on, of the word of element first + i; first is a multiple of 4.
inline void round_by_chance(Pool& pool, int64_t n, const float* x, bf16* y, int64_t first, uint64_t seed, uint32_t step,
                            uint32_t tensor, int shift) {
  share_elements(pool, n, [&](int64_t at, int64_t count) {
    uint32_t words[4 * QUARTERS];
    for (int64_t i = 0; i < count; i += 4 * QUARTERS) {
      philox_words(uint32_t((first + at + i) >> 2), seed, step, tensor, words);
      const int64_t some = std::min<int64_t>(4 * QUARTERS, count - i);
      for (int64_t j = 0; j < some; j++) {
        uint32_t u;
        std::memcpy(&u, x + at + i + j, 4);
        const bool finite = (u & 0x7f800000u) != 0x7f800000u;
        const uint32_t up = finite ? (words[j] >> shift) & 0xffffu : 0u;
        const uint32_t nan = (u & 0x7fffffffu) > 0x7f800000u ? 0x40u : 0u;
        y[at + i + j] = bf16(((u + up) >> 16) | nan);
      }
    }
  });
}

}  // namespace transect
