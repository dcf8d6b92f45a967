// GELU forward and backward in bfloat16 (exact and tanh form; the math is in gelu.py). Bound by bytes: 4 for each
// element forward, 6 backward. A thread takes twice 8 elements, 16 bytes, from each input and computes in float32.
// There is a thread for all of them: a loop over fewer threads waits for each load. At 4.3 TB/s a multiprocessor has
// time for 27 instructions an element forward: (1 + tanh u) / 2 is taken as 1 / (1 + e^-2u), and erf as a polynomial of
// degree 5 times an exponential, which is far more exact than bfloat16 shows.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

// Eight elements as one value of 16 bytes: copied as a uint4, because a struct of pairs is copied pair by pair.
union Eight {
  uint4 bits;
  __nv_bfloat162 pair[4];
  __device__ Eight() {}
};

// P(x), and for the exact form also exp(-x^2 / 2), which its derivative needs again.
template <bool kTanh>
__device__ float probability(float x, float* bell) {
  if (kTanh) return __fdividef(1.0f, 1.0f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
  *bell = __expf(-0.5f * x * x);
  const float t = __fdividef(1.0f, 1.0f + 0.23164189f * fabsf(x));  // Abramowitz & Stegun 7.1.26, off by 1.5e-7 at most
  const float p =
      t * (0.127414796f + t * (-0.142248368f + t * (0.7107068705f + t * (-0.7265760135f + t * 0.5307027145f))));
  const float tail = p * *bell;
  return x < 0.0f ? tail : 1.0f - tail;
}

template <bool kTanh>
__device__ float slope(float x) {
  float bell;
  const float p = probability<kTanh>(x, &bell);
  if (!kTanh) return p + x * 0.3989422804014327f * bell;
  return p + 2.0f * x * p * (1.0f - p) * 0.7978845608028654f * (1.0f + 0.134145f * x * x);
}

template <bool kBackward, bool kTanh>
__device__ float one(float x, float g) {
  float bell;
  return kBackward ? g * slope<kTanh>(x) : x * probability<kTanh>(x, &bell);
}

constexpr int kThreads = 128;
constexpr int kLoads = 2;  // of 16 bytes a thread, all on their way before the first is used

template <bool kBackward, bool kTanh>
__global__ void __launch_bounds__(kThreads)
    gelu_kernel(const __nv_bfloat16* __restrict__ x, const __nv_bfloat16* __restrict__ g,
                __nv_bfloat16* __restrict__ y, long long n) {
  const long long first = (long long)blockIdx.x * (kThreads * kLoads) + threadIdx.x;
  Eight in[kLoads], up[kLoads], out;
#pragma unroll
  for (int l = 0; l < kLoads; l++) {
    const long long i = first + l * kThreads;
    if (i < n / 8) in[l].bits = reinterpret_cast<const uint4*>(x)[i];
    if (kBackward && i < n / 8) up[l].bits = reinterpret_cast<const uint4*>(g)[i];
  }
#pragma unroll
  for (int l = 0; l < kLoads; l++) {
    const long long i = first + l * kThreads;
    if (i >= n / 8) break;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 a = __bfloat1622float2(in[l].pair[j]);
      const float2 b = kBackward ? __bfloat1622float2(up[l].pair[j]) : a;
      out.pair[j] = __floats2bfloat162_rn(one<kBackward, kTanh>(a.x, b.x), one<kBackward, kTanh>(a.y, b.y));
    }
    reinterpret_cast<uint4*>(y)[i] = out.bits;
  }
  const long long last = n / 8 * 8 + threadIdx.x;  // the up to 7 that fill no 16 bytes
  if (blockIdx.x == 0 && last < n)
    y[last] = __float2bfloat16(
        one<kBackward, kTanh>(__bfloat162float(x[last]), kBackward ? __bfloat162float(g[last]) : 0.0f));
}

template <bool kBackward, bool kTanh>
static int launch(const void* x, const void* g, void* y, long long n, void* stream) {
  if (n == 0) return 0;
  const long long each = 8 * kThreads * kLoads, blocks = (n + each - 1) / each;
  gelu_kernel<kBackward, kTanh><<<(unsigned)blocks, kThreads, 0, (cudaStream_t)stream>>>(
      (const __nv_bfloat16*)x, (const __nv_bfloat16*)g, (__nv_bfloat16*)y, n);
  return (int)cudaGetLastError();
}

// y = gelu(x); all pointers at multiples of 16 bytes.
extern "C" int transect_gelu(const void* x, void* y, long long n, int tanh_form, void* stream) {
  return tanh_form ? launch<false, true>(x, nullptr, y, n, stream) : launch<false, false>(x, nullptr, y, n, stream);
}

// dx = g * gelu'(x).
extern "C" int transect_gelu_gradient(const void* g, const void* x, void* dx, long long n, int tanh_form,
                                      void* stream) {
  return tanh_form ? launch<true, true>(x, g, dx, n, stream) : launch<true, false>(x, g, dx, n, stream);
}
