// Sum of n floats in two levels: every block leaves one partial sum, a second launch of one block adds those up. No
// atomics, so the order of the additions, and with it every bit of the result, is the same in every run.
//
// Four bytes and one addition for each element: bound by bytes. Within a block threads first add what they read, then
// the 32 lanes of a warp by shuffles (no memory at all), then the warps through shared memory.

#include <cuda_runtime.h>

constexpr int kThreads = 512;

__device__ float block_sum(float value) {
  __shared__ float warps[kThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x < kThreads / 32 ? warps[threadIdx.x] : 0.0f;
  if (threadIdx.x < 32)
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
  return value;
}

__global__ void __launch_bounds__(kThreads)
    sum_kernel(const float* __restrict__ x, float* __restrict__ out, long long n) {
  const long long stride = (long long)gridDim.x * kThreads;
  const long long first = (long long)blockIdx.x * kThreads + threadIdx.x;
  const long long quads = n / 4;
  // Four chains of additions a thread: one would wait for each addition to end before the next.
  float4 total = make_float4(0, 0, 0, 0);
  for (long long i = first; i < quads; i += stride) {
    const float4 v = reinterpret_cast<const float4*>(x)[i];
    total.x += v.x;
    total.y += v.y;
    total.z += v.z;
    total.w += v.w;
  }
  float value = (total.x + total.y) + (total.z + total.w);
  for (long long i = quads * 4 + first; i < n; i += stride) value += x[i];
  value = block_sum(value);
  if (threadIdx.x == 0) out[blockIdx.x] = value;
}

// x holds n floats and begins at a multiple of 16 bytes; parts has room for `blocks` floats; the sum goes to out[0].
extern "C" int transect_sum(const float* x, float* parts, float* out, long long n, int blocks, void* stream) {
  sum_kernel<<<blocks, kThreads, 0, (cudaStream_t)stream>>>(x, parts, n);
  sum_kernel<<<1, kThreads, 0, (cudaStream_t)stream>>>(parts, out, blocks);
  return (int)cudaGetLastError();
}
