// What the kernels for few rows share (small_matmul.cu, int4_matmul.cu): copies into shared memory, the tensor-core
// product of mma.sync, dependent launch, and the sum over the warps of a block and the blocks of a cluster.

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

// c += a b: a is 16 rows of the weight by 16 k, b 16 k by 8 rows of x, bfloat16; c float32: of lane l, rows l / 4 (c[0], c[1])
// and l / 4 + 8 of the weight, rows 2 (l % 4) and 2 (l % 4) + 1 of x. The weight is the left operand because that is the wide
// one: few rows of x would leave most of it empty.
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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

// The float at the same place of shared memory in block RANK of the cluster.
__device__ __forceinline__ float read_of_rank(const float* pointer, int rank) {
#if __CUDA_ARCH__ >= 900
  uint32_t at;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(pointer)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
  return value;
#else
  return *pointer;
#endif
}

// The sums of a warp's tile of Y, COLUMNS rows of the weight by ROWS of x: a float for each, x's rows PITCH apart (4 more than
// they need: then a warp meets no bank twice).
template <int COLUMNS>
constexpr int kPitch = COLUMNS + 4;

template <int RB, int NT>
__device__ __forceinline__ void leave_sums(float* sums, float (&acc)[RB][NT][4], int lane) {
#pragma unroll
  for (int b = 0; b < RB; b++)
#pragma unroll
    for (int tile = 0; tile < NT; tile++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        sums[(tile * 8 + lane % 4 * 2 + j % 2) * kPitch<RB * 16> + b * 16 + j / 2 * 8 + lane / 4] = acc[b][tile][j];
        acc[b][tile][j] = 0;
      }
}

// Of a tile of Y of up to ROWS x COLUMNS every warp holds a part: they are added in the order of the warps. ``sums`` is
// [warps][ROWS][PITCH], filled by the caller, and may be written again after the next barrier of the block. The sum goes to
// ``part``, rows ``part_pitch`` apart, or, where that is null, with the bias to Y.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void add_warps(const float* sums, float* part, int part_pitch, const __nv_bfloat16* bias,
                                          __nv_bfloat16* out, int m0, int n0, int M, int N, int n_end, int warps) {
  __syncthreads();
  const int count = min(ROWS, M - m0) * COLUMNS;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int m = i / COLUMNS, c = i % COLUMNS;
    const float* from = sums + m * kPitch<COLUMNS> + c;
    float sum = 0;
    for (int w = 0; w < warps; w += 4) {  // four loads at a time
      float four[4];
#pragma unroll
      for (int j = 0; j < 4; j++) four[j] = from[(w + j) * ROWS * kPitch<COLUMNS>];
#pragma unroll
      for (int j = 0; j < 4; j++) sum += four[j];
    }
    if (part) {
      part[m * part_pitch + c] = sum;
    } else if (n0 + c < n_end) {
      if (bias) sum += __bfloat162float(bias[n0 + c]);
      out[(size_t)(m0 + m) * N + n0 + c] = __float2bfloat16(sum);
    }
  }
}

// The blocks of a cluster hold parts of the same ``rows`` x ``columns`` of Y: they are added in the order of the ranks. All
// threads of all blocks take part.
__device__ __forceinline__ void add_ranks(const float* part, int part_pitch, const __nv_bfloat16* bias, __nv_bfloat16* out,
                                          int m0, int n0, int rows, int columns, int N, int rank, int ranks) {
  cluster_barrier();
  for (int i = rank * blockDim.x + threadIdx.x; i < rows * columns; i += ranks * blockDim.x) {
    const int m = i / columns, c = i % columns;
    float of_rank[8], sum = 0;
#pragma unroll
    for (int r = 0; r < 8; r++) of_rank[r] = r < ranks ? read_of_rank(part + m * part_pitch + c, r) : 0;
#pragma unroll
    for (int r = 0; r < 8; r++) sum += of_rank[r];
    if (bias) sum += __bfloat162float(bias[n0 + c]);
    out[(size_t)(m0 + m) * N + n0 + c] = __float2bfloat16(sum);
  }
  cluster_barrier();  // nobody leaves while others read its part
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
    error = cudaFuncGetAttributes(&found, kernel);
    if (error == cudaSuccess)
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kMostShared - (int)found.sharedSizeBytes);
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
