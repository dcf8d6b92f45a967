// Blocks of a launch that wait for each other at a counter in memory. All of them must run at once.

#pragma once

#include <stdint.h>

constexpr int kPolls = 1 << 23;  // some seconds: then a block is missing, and an error is better than to hang

// All blocks of the launch have come here, and what they wrote before can be read. In all they add 2^31 to the counter,
// so its highest bit changes when the last one has come, and nobody resets it.
__device__ __forceinline__ void meet(unsigned* counter) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const unsigned found = atomicAdd(counter, blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u);
    unsigned now;
    int polls = 0;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
      if (++polls == kPolls) __trap();
    } while (!((now ^ found) & 0x80000000u));
    __threadfence();
  }
  __syncthreads();
}
