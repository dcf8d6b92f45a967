// As much of CUDA's own names as the sources use, for ``machine.h``.

#pragma once

#include <algorithm>
#include <utility>

#include "ptx.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

using std::max;
using std::min;
// Of mixed signs CUDA takes both as unsigned.
inline unsigned max(unsigned a, int b) { return a > (unsigned)b ? a : (unsigned)b; }
inline unsigned max(int a, unsigned b) { return max(b, a); }

#define TRANSECT_VECTOR(T, NAME)                                                       \
  struct alignas(2 * sizeof(T)) NAME##2 { T x, y; };                                   \
  struct alignas(4 * sizeof(T)) NAME##4 { T x, y, z, w; };                             \
  inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                           \
  inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
TRANSECT_VECTOR(unsigned, uint)
TRANSECT_VECTOR(int, int)
TRANSECT_VECTOR(float, float)

inline uint32_t __float_as_uint(float v) { return numbers::bits_of(v); }
inline float __uint_as_float(uint32_t bits) { return numbers::of_bits(bits); }
inline float __fdividef(float a, float b) { return a / b; }
#define __expf expf  // a name that libraries of C know too
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float rsqrtf(float v) { return 1 / sqrtf(v); }

inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = (uint64_t)y << 32 | x;
  uint32_t v = 0;
  for (int i = 0; i < 4; i++) v |= (uint32_t)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return v;
}

template <typename T>
T __ldcg(const T* from) {
  machine::readable(from, sizeof(T));
  if ((uintptr_t)from % sizeof(T)) machine::fail("a read that is not at a multiple of its size");
  return *from;
}

template <typename T>
T __ldg(const T* from) { return __ldcg(from); }

template <typename T>
void __stcg(T* to, const T& v) {
  *to = v;
}

inline size_t __cvta_generic_to_shared(const void* pointer) {
  return (const unsigned char*)pointer - machine::now->block->memory;
}

inline void __syncthreads() { machine::all_threads(); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { machine::exchanged(mask, 0); }
template <typename T>
T __shfl_sync(unsigned mask, T v, int from) { return machine::exchanged(mask, v)[from]; }
template <typename T>
T __shfl_xor_sync(unsigned mask, T v, int lanes) {
  const T* all = machine::exchanged(mask, v);
  return all[machine::lane() ^ lanes];
}
template <typename T>
T __shfl_up_sync(unsigned mask, T v, int lanes) {
  const T* all = machine::exchanged(mask, v);
  return machine::lane() >= lanes ? all[machine::lane() - lanes] : v;
}
template <typename T>
T __shfl_down_sync(unsigned mask, T v, int lanes) {
  const T* all = machine::exchanged(mask, v);
  return machine::lane() + lanes < 32 ? all[machine::lane() + lanes] : v;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) {
  const unsigned* all = machine::exchanged(mask, v);
  for (int l = 0; l < 32; l++)
    if (mask >> l & 1) v = max(v, all[l]);
  return v;
}

inline unsigned __ballot_sync(unsigned mask, bool v) {
  const bool* all = machine::exchanged(mask, v);
  unsigned found = 0;
  for (int l = 0; l < 32; l++) found |= (mask >> l & 1 && all[l]) ? 1u << l : 0;
  return found;
}
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline int __ffs(unsigned v) { return __builtin_ffs(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }

inline void __threadfence() {}
[[noreturn]] inline void __trap() { machine::fail("a trap"); }
template <typename T>
T atomicAdd(T* at, std::type_identity_t<T> v) {
  machine::release(at);
  machine::acquire(at);
  return std::exchange(*at, *at + v);
}

// Launches.

typedef int cudaError_t;
typedef void* cudaStream_t;
enum { cudaSuccess, cudaErrorLaunchFailure = 719 };
enum { cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaFuncAttributeMaxDynamicSharedMemorySize,
       cudaFuncAttributePreferredSharedMemoryCarveout };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  int numAttrs;
};
struct cudaFuncAttributes {
  int sharedSizeBytes;
};
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
template <typename F>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, F) { return found->sharedSizeBytes = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* found, int, int) { return *found = machine::kMost, cudaSuccess; }
template <typename F>
cudaError_t cudaFuncSetAttribute(F, int, int) { return cudaSuccess; }
template <typename F>
cudaError_t cudaOccupancyMaxActiveClusters(int* found, F, const cudaLaunchConfig_t*) { return *found = 0, cudaSuccess; }

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  unsigned cluster = 1;
  for (int i = 0; i < config->numAttrs; i++)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = config->attrs[i].val.clusterDim.x;
  const bool done = machine::run(config->gridDim, config->blockDim, config->dynamicSmemBytes, cluster,
                                 [=] { kernel(arguments...); });
  return done ? cudaSuccess : cudaErrorLaunchFailure;
}

// What the caller of a library says and is told. ``used``: so that they are there although nothing calls them.
extern "C" {
[[gnu::used]] inline const char* transect_said() { return machine::said.c_str(); }
[[gnu::used]] inline void transect_draw(uint64_t seed) { machine::seed = seed * 0x9E3779B97F4A7C15ull | 1; }
[[gnu::used]] inline void transect_forget() { machine::readable_places.clear(), machine::late.clear(); }
[[gnu::used]] inline void transect_late(const unsigned char* place, const unsigned char* old, uint64_t bytes) {
  machine::late.push_back({place, old, bytes});
}
[[gnu::used]] inline void transect_allow(uintptr_t from, uint64_t bytes) { machine::readable_places[from] = bytes; }
}
