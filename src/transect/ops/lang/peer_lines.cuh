// Lines of 16 bytes that ranks write into each other's memory, as comm/all_reduce.cu says, which takes them again.

#pragma once

#include <stdint.h>

namespace peer_lines {

constexpr int kMostRanks = 8;
constexpr int kStateBytes = 256;  // before the lines: how many calls have ended, and what else a rank keeps
constexpr uint32_t kEmpty = 0xFFFFFFFF, kOtherNaN = 0x7FFF7FFF;

__device__ __forceinline__ void store(uint4* to, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint32_t full(uint32_t word) { return word == kEmpty ? kOtherNaN : word; }

__device__ __forceinline__ void put(uint4* to, uint4 v) {
  store(to, make_uint4(full(v.x), full(v.y), full(v.z), full(v.w)));
}

// What a kernel needs to give its result to the other ranks for the sum behind it, in one shot.
struct Push {
  char* memory[kMostRanks];  // of each rank, by addresses of this GPU
  int ranks, rank;           // ranks 0: nobody is given anything
  long long lines;           // of a region
};

// The number of the call that comes next. The sum before must have ended.
__device__ __forceinline__ uint32_t next_call(const Push& push) {
  return *(const volatile uint32_t*)push.memory[push.rank] + 1;
}

// Line i of the ``count`` that this rank gives for that call.
__device__ __forceinline__ void give(const Push& push, uint32_t call, long long count, long long i, uint4 v) {
  for (int r = 0; r < push.ranks; r++)
    if (r != push.rank)
      put((uint4*)(push.memory[r] + kStateBytes) + (call & 1) * push.lines + push.rank * count + i, v);
}

}  // namespace peer_lines
