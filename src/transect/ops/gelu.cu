// GELU forward and backward in bfloat16 (exact and tanh form; the math is in gelu.py). Bound by bytes: 4 for each
// element forward, 6 backward. A thread takes 8 elements, 16 bytes, from each input at a time and computes in float32.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

// Eight elements as one value of 16 bytes: copied as a uint4, because a struct of pairs is copied pair by pair.
union Eight {
  uint4 bits;
  __nv_bfloat162 pair[4];
  __device__ Eight() {}
};

__device__ float probability(float x, bool tanh_form) {
  if (!tanh_form) return 0.5f * (1.0f + erff(x * 0.7071067811865476f));
  return 0.5f * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

__device__ float slope(float x, bool tanh_form) {
  const float p = probability(x, tanh_form);
  if (!tanh_form) return p + x * 0.3989422804014327f * expf(-0.5f * x * x);
  return p + 2.0f * x * p * (1.0f - p) * 0.7978845608028654f * (1.0f + 0.134145f * x * x);
}

template <bool kBackward>
__device__ float one(float x, float g, bool tanh_form) {
  return kBackward ? g * slope(x, tanh_form) : x * probability(x, tanh_form);
}

template <bool kBackward>
__global__ void __launch_bounds__(256)
    gelu_kernel(const __nv_bfloat16* __restrict__ x, const __nv_bfloat16* __restrict__ g,
                __nv_bfloat16* __restrict__ y, long long n, bool tanh_form) {
  const long long stride = (long long)gridDim.x * blockDim.x;
  const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (long long i = first; i < n / 8; i += stride) {
    Eight in, up, out;
    in.bits = reinterpret_cast<const uint4*>(x)[i];
    if (kBackward) up.bits = reinterpret_cast<const uint4*>(g)[i];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 a = __bfloat1622float2(in.pair[j]);
      const float2 b = kBackward ? __bfloat1622float2(up.pair[j]) : a;
      out.pair[j] = __floats2bfloat162_rn(one<kBackward>(a.x, b.x, tanh_form), one<kBackward>(a.y, b.y, tanh_form));
    }
    reinterpret_cast<uint4*>(y)[i] = out.bits;
  }
  for (long long i = n / 8 * 8 + first; i < n; i += stride)
    y[i] = __float2bfloat16(
        one<kBackward>(__bfloat162float(x[i]), kBackward ? __bfloat162float(g[i]) : 0.0f, tanh_form));
}

static int blocks_for(long long n) {
  const long long blocks = (n / 8 + 255) / 256;
  return (int)(blocks < 1 ? 1 : blocks > 132 * 16 ? 132 * 16 : blocks);
}

// y = gelu(x); all pointers at multiples of 16 bytes.
extern "C" int transect_gelu(const void* x, void* y, long long n, int tanh_form, void* stream) {
  if (n == 0) return 0;
  gelu_kernel<false><<<blocks_for(n), 256, 0, (cudaStream_t)stream>>>(
      (const __nv_bfloat16*)x, nullptr, (__nv_bfloat16*)y, n, tanh_form != 0);
  return (int)cudaGetLastError();
}

// dx = g * gelu'(x).
extern "C" int transect_gelu_gradient(const void* g, const void* x, void* dx, long long n, int tanh_form,
                                      void* stream) {
  if (n == 0) return 0;
  gelu_kernel<true><<<blocks_for(n), 256, 0, (cudaStream_t)stream>>>(
      (const __nv_bfloat16*)x, (const __nv_bfloat16*)g, (__nv_bfloat16*)dx, n, tanh_form != 0);
  return (int)cudaGetLastError();
}
