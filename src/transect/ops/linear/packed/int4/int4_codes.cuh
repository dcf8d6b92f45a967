// What both kernels for 4-bit weights know of the weight's order (``arrange`` of int4_packing.py) and of a stage's.

#pragma once

#include <stdint.h>

constexpr int kChunk = 128;        // k in a stage
constexpr int kXPitch = 256 + 16;  // bytes of a row of X in a stage: the 8 rows of a matrix meet no bank twice
template <int GROUP>
constexpr int kTile =
    1024 + kChunk / GROUP * 64;  // bytes of 16 rows and 128 k: codes; [group][8][rows r and r + 8][scale, zero]

// (word & mask) | bits in one instruction.
__device__ __forceinline__ uint32_t as_pair(uint32_t word) {
  uint32_t pair;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(pair) : "r"(word), "r"(0x000f000fu), "r"(0x43004300u));
  return pair;
}
