// What racecheck says of a ring that is right by construction: a producer fills two slots again and again by bulk copies, a
// warp reads each as soon as it is there. Once by the barriers and copies of CUDA's own library alone, once by the helpers of
// our kernels. Both check what they read; ``gap`` leaves out the wait for an empty slot, which is a true race.

#include <cuda/barrier>

#include "../src/transect/ops/few_rows.cuh"
#include "../src/transect/ops/hopper.cuh"

constexpr int kSlots = 2, kNumbers = 256;

__global__ void ring_of_the_library(const int* in, int* out, int rounds) {
  using Barrier = cuda::barrier<cuda::thread_scope_block>;
  __shared__ alignas(128) int slots[kSlots][kNumbers];
#pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ Barrier full[kSlots], empty[kSlots];
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; slot++) init(&full[slot], 1), init(&empty[slot], 32);
    cuda::device::experimental::fence_proxy_async_shared_cta();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int round = 0; round < rounds; round++) {
      const int slot = round % kSlots;
      if (round >= kSlots) empty[slot].wait_parity((round / kSlots - 1) % 2);
      cuda::device::memcpy_async_tx(slots[slot], in + round * kNumbers, cuda::aligned_size_t<16>(sizeof(slots[0])), full[slot]);
      (void)cuda::device::barrier_arrive_tx(full[slot], 1, sizeof(slots[0]));
    }
  } else if (threadIdx.x >= 32) {
    for (int round = 0; round < rounds; round++) {
      const int slot = round % kSlots;
      full[slot].wait_parity(round / kSlots % 2);
      for (int i = threadIdx.x - 32; i < kNumbers; i += 32) out[round * kNumbers + i] = slots[slot][i];
      (void)empty[slot].arrive();
    }
  }
}

__global__ void ring_of_instructions(const int* in, int* out, int rounds, int gap) {
  using namespace hopper;
  __shared__ alignas(128) int slots[kSlots][kNumbers];
  __shared__ alignas(8) uint64_t full[kSlots], empty[kSlots];
  const uint32_t full_at = few_rows::shared_address(full), empty_at = few_rows::shared_address(empty);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; slot++) barrier_init(full_at + slot * 8, 1), barrier_init(empty_at + slot * 8, 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int round = 0; round < rounds; round++) {
      const int slot = round % kSlots;
      if (round >= kSlots && !gap) barrier_wait(empty_at + slot * 8, (round / kSlots - 1) % 2);
      barrier_expect(full_at + slot * 8, sizeof(slots[0]));
      copy_bulk(few_rows::shared_address(slots[slot]), in + round * kNumbers, sizeof(slots[0]), full_at + slot * 8);
    }
  } else if (threadIdx.x >= 32) {
    for (int round = 0; round < rounds; round++) {
      const int slot = round % kSlots;
      barrier_wait(full_at + slot * 8, round / kSlots % 2);
      for (int i = threadIdx.x - 32; i < kNumbers; i += 32) out[round * kNumbers + i] = slots[slot][i];
      barrier_arrive(empty_at + slot * 8);
    }
  }
}

// in, out: [rounds, 256] int32. kind: 0 the library's ring, 1 the one of instructions, 2 that one with the race.
extern "C" int transect_ring_control(const void* in, void* out, int rounds, int kind, void* stream) {
  if (kind == 0) ring_of_the_library<<<1, 64, 0, (cudaStream_t)stream>>>((const int*)in, (int*)out, rounds);
  else ring_of_instructions<<<1, 64, 0, (cudaStream_t)stream>>>((const int*)in, (int*)out, rounds, kind == 2);
  return (int)cudaGetLastError();
}
