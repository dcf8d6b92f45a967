// Blocks of a launch that wait for each other at a counter in memory. All of them must run at once.

#pragma once

#include <stdint.h>

constexpr int kPolls = 1 << 23;  // some seconds: then a block is missing, and an error is better than to hang

// A counter before this block has come to meet there. Its highest bit changes when the last one has come.
__device__ __forceinline__ unsigned phase_of(const unsigned* counter) {
  unsigned now;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}

// All blocks of the launch have come here, and what they wrote before can be read. In all they add 2^31 to the counter,
// so nobody resets it. ``phase``: thread 0 has that of the counter from before, so that it need not wait for it now.
__device__ __forceinline__ void meet(unsigned* counter, unsigned phase) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned own = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(own) : "memory");
    unsigned now;
    int polls = 0;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
      if (++polls == kPolls) __trap();
    } while (!((now ^ phase) & 0x80000000u));
  }
  __syncthreads();
}
