// Vector add: c = a + b in float32. Twelve bytes and one addition for each element, so bound by bytes.
//
// Each thread moves 16 bytes at a time: a warp then asks for 512 neighbouring bytes in one instruction, the widest access
// there is. A grid of a few blocks for each multiprocessor walks over the arrays (grid-stride), so that launching costs
// the same for any length.

#include <cuda_runtime.h>

__global__ void __launch_bounds__(256)
    vector_add_kernel(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, long long n) {
  const long long stride = (long long)gridDim.x * blockDim.x;
  const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const long long quads = n / 4;
  for (long long i = first; i < quads; i += stride) {
    const float4 x = reinterpret_cast<const float4*>(a)[i];
    const float4 y = reinterpret_cast<const float4*>(b)[i];
    reinterpret_cast<float4*>(c)[i] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
  }
  for (long long i = quads * 4 + first; i < n; i += stride) c[i] = a[i] + b[i];
}

// a, b and c hold n floats and begin at multiples of 16 bytes. Returns cudaGetLastError().
extern "C" int transect_vector_add(const float* a, const float* b, float* c, long long n, void* stream) {
  if (n == 0) return 0;
  long long blocks = (n / 4 + 255) / 256;
  if (blocks < 1) blocks = 1;
  if (blocks > 132 * 16) blocks = 132 * 16;
  vector_add_kernel<<<(int)blocks, 256, 0, (cudaStream_t)stream>>>(a, b, c, n);
  return (int)cudaGetLastError();
}
