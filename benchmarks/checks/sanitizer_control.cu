// What racecheck says of rings that are right by construction: a warp fills two slots again and again, another reads
// each as soon as it is there. By bulk copies or by copies of 16 bytes, by CUDA's own library or by the helpers of our
// kernels. With ``early`` a slot is given back before it is read, which is a true race. With ``one`` a single lane
// gives it back for its warp, after __syncwarp, as our kernels do.

#include <cuda/barrier>

#include "../../src/transect/ops/lang/few_rows.cuh"
#include "../../src/transect/ops/lang/hopper.cuh"

namespace {

constexpr int kSlots = 2, kNumbers = 128;  // 16 bytes for each lane

template <bool BULK>
__global__ void ring_of_the_library(const int* in, int* out, int rounds, int one) {
  using Barrier = cuda::barrier<cuda::thread_scope_block>;
  __shared__ alignas(128) int slots[kSlots][kNumbers];
#pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ Barrier full[kSlots], empty[kSlots];
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; slot++) init(&full[slot], BULK ? 1 : 32), init(&empty[slot], one ? 1 : 32);
    cuda::device::experimental::fence_proxy_async_shared_cta();
  }
  __syncthreads();
  for (int round = 0; round < rounds; round++) {
    const int slot = round % kSlots, turn = round / kSlots;
    if (threadIdx.x < 32) {
      if (round >= kSlots) empty[slot].wait_parity((turn - 1) % 2);
      const int* from = in + round * kNumbers;
      if (!BULK) {
        cuda::memcpy_async(slots[slot] + lane * 4, from + lane * 4, cuda::aligned_size_t<16>(16), full[slot]);
        (void)full[slot].arrive();
      } else if (lane == 0) {
        cuda::device::memcpy_async_tx(slots[slot], from, cuda::aligned_size_t<16>(sizeof(slots[0])), full[slot]);
        (void)cuda::device::barrier_arrive_tx(full[slot], 1, sizeof(slots[0]));
      }
    } else {
      full[slot].wait_parity(turn % 2);
      for (int i = lane; i < kNumbers; i += 32) out[round * kNumbers + i] = slots[slot][i];
      __syncwarp();
      if (!one || lane == 0) (void)empty[slot].arrive();
    }
  }
}

template <bool BULK>
__global__ void ring_of_instructions(const int* in, int* out, int rounds, int one, int early) {
  using namespace hopper;
  __shared__ alignas(128) int slots[kSlots][kNumbers];
  __shared__ alignas(8) uint64_t barriers[2 * kSlots];
  const uint32_t full = few_rows::shared_address(barriers), empty = full + 8 * kSlots;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kSlots; slot++) {
      barrier_init(full + slot * 8, BULK ? 1 : 32);
      barrier_init(empty + slot * 8, one ? 1 : 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  for (int round = 0; round < rounds; round++) {
    const int slot = round % kSlots, turn = round / kSlots;
    if (threadIdx.x < 32) {
      if (round >= kSlots) barrier_wait(empty + slot * 8, (turn - 1) % 2);
      const uint32_t to = few_rows::shared_address(slots[slot]);
      const int* from = in + round * kNumbers;
      if (!BULK) {
        few_rows::copy16(to + lane * 16, from + lane * 4, true);
        copies_arrive(full + slot * 8);
      } else if (lane == 0) {
        barrier_expect(full + slot * 8, sizeof(slots[0]));
        copy_bulk(to, from, sizeof(slots[0]), full + slot * 8);
      }
    } else {
      barrier_wait(full + slot * 8, turn % 2);
      if (early && (!one || lane == 0)) barrier_arrive(empty + slot * 8);
      for (int i = lane; i < kNumbers; i += 32) out[round * kNumbers + i] = slots[slot][i];
      __syncwarp();
      if (!early && (!one || lane == 0)) barrier_arrive(empty + slot * 8);
    }
  }
}

}  // namespace

// in, out: [rounds, 128] int32. Returns a cudaError_t.
extern "C" int transect_ring_control(const void* in, void* out, int rounds, int library, int bulk, int one, int early,
                                     void* stream) {
  const int* from = (const int*)in;
  int* to = (int*)out;
  cudaStream_t on = (cudaStream_t)stream;
  if (library && bulk) ring_of_the_library<true><<<1, 64, 0, on>>>(from, to, rounds, one);
  else if (library) ring_of_the_library<false><<<1, 64, 0, on>>>(from, to, rounds, one);
  else if (bulk) ring_of_instructions<true><<<1, 64, 0, on>>>(from, to, rounds, one, early);
  else ring_of_instructions<false><<<1, 64, 0, on>>>(from, to, rounds, one, early);
  return (int)cudaGetLastError();
}
