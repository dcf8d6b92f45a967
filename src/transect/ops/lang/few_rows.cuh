// What the kernels of a decode step share (products of few rows, paged decode): copies into shared memory, the
// tensor-core product of mma.sync, reading another block's shared memory, dependent launch.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace few_rows {

constexpr int kMostShared = 227 * 1024;  // bytes of shared memory that a block may have on Hopper

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

// 16 bytes, not through L1; zeros where not inside (the address is then not touched).
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}

// L2 evict first, evict last, and neither.
constexpr uint64_t kReadOnce = 0x12F0000000000000ull, kReadOften = 0x14F0000000000000ull,
                   kReadAsUsual = 0x1000000000000000ull;

// As ``copy16``, of what a step reads once: the L2 cache drops it before all else.
__device__ __forceinline__ void copy16_once(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
               "r"(inside ? 16 : 0), "l"(kReadOnce)
               : "memory");
}

__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ uint4 read16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
  return v;
}

// Four 8 x 8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8, and receives elements
// 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each.
__device__ __forceinline__ void read_matrices(uint32_t (&v)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(from));
}

// As ``read_matrices``, of the transposed matrices.
__device__ __forceinline__ void read_transposed(uint32_t (&v)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(from));
}

// c += a b: a is 16 rows of the weight by 16 k, b 16 k by 8 rows of x, bfloat16; c float32: of lane l, rows l / 4
// (c[0], c[1]) and l / 4 + 8 of the weight, rows 2 (l % 4) and 2 (l % 4) + 1 of x. The weight is the left operand
// because that is the wide one: few rows of x would leave most of it empty.
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a b: a is 16 rows of the weight by 32 k, one byte each, b 32 k by 8 rows of x, one byte each; lanes as in
// ``multiply``.
template <bool SIGNED>
__device__ __forceinline__ void multiply_bytes(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (SIGNED)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A norm on either side of a product: RMSNorm(X) and residual add + the next RMSNorm, as far as they need no second
// kernel.
// Of a stream of rows t the norm is t s / rms(t): the product before it adds to the stream, and leaves t s and the sums
// of squares of sixteens of t; the product after it multiplies t s by the weight and divides its sums by rms(t).
struct Norm {
  const __nv_bfloat16* residual;  // [M, N] or null: Y is X W^T + residual, and what follows is written too
  const __nv_bfloat16* scale;     // [N]: the next norm's weight
  __nv_bfloat16* scaled;          // [M, N]: Y times scale
  float* squares;                 // [M, N / 16]: sums of squares of Y
  const float* x_squares;         // [M, K / 16] or null: squares that the product that made X left
  float eps;
};

// 1 / rms of ``rows`` rows of K elements from m0 on, by ``threads`` threads (whole warps), the ``thread``-th of them.
// Eight reads at a time, or each would wait for the one before.
__device__ __forceinline__ void inverse_rms(float* to, const float* squares, float eps, int m0, int rows, int K,
                                            int thread, int threads) {
  const int sixteenth = thread % 16, count = K / 64, group = threads / 16;  // of four sums of squares; rows at a time
  for (int row0 = thread / 16; row0 - thread / 16 < rows; row0 += 4 * group) {
    float sum[4] = {};
    for (int i = sixteenth; i < count; i += 32) {
      float4 v[4][2];
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int j = 0; j < 2; j++)
          v[r][j] = row0 + r * group < rows && i + 16 * j < count
                        ? __ldcg((const float4*)(squares + (size_t)(m0 + row0 + r * group) * (K / 16)) + i + 16 * j)
                        : make_float4(0, 0, 0, 0);
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int j = 0; j < 2; j++) sum[r] += v[r][j].x + v[r][j].y + (v[r][j].z + v[r][j].w);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
      for (int lanes = 8; lanes; lanes /= 2) sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], lanes);
      if (sixteenth == 0 && row0 + r * group < rows) to[row0 + r * group] = rsqrtf(sum[r] / K + eps);
    }
  }
}

// silu(gate) up, by the instructions of many_rows/triton.py, so that both give the same bits.
__device__ __forceinline__ float gated(float gate, float up) {
  float power, root;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(-(1.4426950408889634f * gate)));
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(1 + power));
  return up * gate * (root * root);
}

// Dependent launch (Hopper): the next kernel on the stream may begin; everything before this one is done and visible.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Blocks of a cluster that wait until all have begun, or until all have read what they want of each other's shared
// memory. Not for what was written: an arrival that is to order memory waits until all the block's stores are in the L2
// cache and copies that were asked for before have come.
__device__ __forceinline__ void arrive_in_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_meet() {
  arrive_in_cluster();
  wait_for_cluster();
}

// Numbers that blocks of a cluster send to each other's shared memory, where a barrier counts their bytes: so nobody
// waits for memory to be in order, and nobody need stay for others to read from it. One thread expects; then all arrive
// in the cluster, and wait for it before they send.
__device__ __forceinline__ void expect_sent(uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier)
               : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

// To this place in block RANK, counted by its barrier.
__device__ __forceinline__ void send(uint32_t place, float v, uint32_t barrier, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 there, counts;\nmapa.shared::cluster.u32 there, %0, %3;\nmapa.shared::cluster.u32 counts, %1, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %2, [counts];\n}" ::"r"(place),
      "r"(barrier), "f"(v), "r"(rank)
      : "memory");
#endif
}

__device__ __forceinline__ void send(uint32_t place, float4 v, uint32_t barrier, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 there, counts;\nmapa.shared::cluster.u32 there, %0, %6;\nmapa.shared::cluster.u32 counts, %1, %6;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%2, %3, %4, %5}, [counts];\n}" ::"r"(
          place),
      "r"(barrier), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(rank)
      : "memory");
#endif
}

__device__ __forceinline__ void wait_for_sent(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n}" ::"r"(barrier) : "memory");
#endif
}

// Launch on a stream in clusters of ``cluster`` blocks. ``dependent``: begin while the kernel before still ends.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int blocks, int threads, int shared, int cluster, bool dependent,
                   void* stream, Arguments... arguments) {
  static thread_local const void* prepared[64][64];  // of each device, a few kernels whose limit is raised already
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const size_t slot = ((size_t)kernel >> 4) % 64;
  if (device >= 64 || prepared[device][slot] != (const void*)kernel) {
    cudaFuncAttributes found;
    int most;
    error = cudaFuncGetAttributes(&found, kernel);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess)
      error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most - (int)found.sharedSizeBytes);
    if (error == cudaSuccess)
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
    if (error != cudaSuccess) return error;
    if (device < 64) prepared[device][slot] = (const void*)kernel;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = (cudaStream_t)stream;
  cudaLaunchAttribute attributes[2];
  int used = 0;
  if (dependent) {
    attributes[used].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[used++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[used].id = cudaLaunchAttributeClusterDimension;
    attributes[used].val.clusterDim.x = cluster;
    attributes[used].val.clusterDim.y = 1;
    attributes[used++].val.clusterDim.z = 1;
  }
  config.attrs = attributes;
  config.numAttrs = used;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// How many clusters of ``size`` blocks of a kernel the device runs at once, if a block takes all the shared memory of a
// multiprocessor; 0 if it cannot say.
template <typename... Parameters>
int clusters_at_once(void (*kernel)(Parameters...), int size, int threads) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(size * 64);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = kMostShared - 1024;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = size;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int found = 0;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)config.dynamicSmemBytes) !=
          cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&found, kernel, &config) != cudaSuccess)
    return 0;
  return found;
}

}  // namespace few_rows
