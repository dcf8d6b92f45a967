// Matrix product as a ladder: C = A B, row-major, A [M, K], B [K, N]. Each rung changes one thing about the one below.
// 2 M N K FLOPs; at M = N = K = 4096 in float32 that is 137 GFLOP on 201 MB: 2.7 ms at the 51 TFLOP/s that cuBLAS
// reaches, 0.05 ms for the bytes if each were moved once. Everything below is about how often each byte is moved, and
// from where.
// Figures: one H200, 4096 x 4096 x 4096 (the ladder's rows in benchmarks/results/h200/ops.json).

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <mma.h>

// Rung 1, naive: one thread for each element of C, and the threads of a warp go down a column. Predicted: a warp's 32
// loads of A lie K elements apart, 32 memory sectors for 128 useful bytes; bound by the cache's transactions.
// Measured: 1.0 TFLOP/s.
__global__ void __launch_bounds__(256) naive(const float* A, const float* B, float* C, int M, int N, int K) {
  const int row = blockIdx.x * 16 + threadIdx.x, column = blockIdx.y * 16 + threadIdx.y;
  if (row >= M || column >= N) return;
  float sum = 0;
  for (int k = 0; k < K; k++) sum += A[(size_t)row * K + k] * B[(size_t)k * N + column];
  C[(size_t)row * N + column] = sum;
}

// Rung 2, coalesced: the same, but neighbouring threads take neighbouring columns. Predicted: a warp's loads of B are
// one access of 128 bytes and its load of A a broadcast: 8 to 16 times fewer transactions. Still two loads for each
// multiply-add. Measured: 5.9 TFLOP/s, 6 times the naive one.
__global__ void __launch_bounds__(256) coalesced(const float* A, const float* B, float* C, int M, int N, int K) {
  const int column = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 8 + threadIdx.y;
  if (row >= M || column >= N) return;
  float sum = 0;
  for (int k = 0; k < K; k++) sum += A[(size_t)row * K + k] * B[(size_t)k * N + column];
  C[(size_t)row * N + column] = sum;
}

// Rung 3, shared-memory tiles: a block loads a 32 x 32 tile of A and of B once and uses each element 32 times from
// shared memory. Predicted: 32 times fewer reads of global memory, but still two shared-memory loads for each
// multiply-add, so bound by shared memory: 32 lanes x 4 bytes a cycle where a multiply-add needs 8 (one of them a
// broadcast).
// Measured: 8.4 TFLOP/s; the L1 cache had already saved rung 2 most of those reads.
__global__ void __launch_bounds__(1024) shared_tiles(const float* A, const float* B, float* C, int M, int N, int K) {
  __shared__ float a[32][32], b[32][32];
  const int row = blockIdx.y * 32 + threadIdx.y, column = blockIdx.x * 32 + threadIdx.x;
  float sum = 0;
  for (int start = 0; start < K; start += 32) {
    const int ka = start + threadIdx.x, kb = start + threadIdx.y;
    a[threadIdx.y][threadIdx.x] = row < M && ka < K ? A[(size_t)row * K + ka] : 0.0f;
    b[threadIdx.y][threadIdx.x] = kb < K && column < N ? B[(size_t)kb * N + column] : 0.0f;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 32; k++) sum += a[threadIdx.y][k] * b[k][threadIdx.x];
    __syncthreads();
  }
  if (row < M && column < N) C[(size_t)row * N + column] = sum;
}

// Rung 4, register tiles and vector accesses: a block of 256 threads computes 128 x 128, each thread 8 x 8 in
// registers: 16 loaded values feed 64 multiply-adds, so shared memory gives four times what is needed. Loads are 16
// bytes wide, and the next tile of 8 k comes from global memory into registers while this one is multiplied (two
// buffers in shared memory, one barrier a step). A thread's 8 rows and columns are two runs of 4, 64 apart, so that a
// warp's reads meet no bank twice.
// K and N must be multiples of 4. Predicted: 70 to 80% of what cuBLAS reaches. Measured: 40.4 TFLOP/s, 79% of
// cuBLAS's 51.4.
__global__ void __launch_bounds__(256, 2) register_tiles(const float* __restrict__ A, const float* __restrict__ B,
                                                         float* __restrict__ C, int M, int N, int K) {
  constexpr int BK = 8;
  __shared__ float a[2][BK][128 + 4], b[2][BK][128];
  const int t = threadIdx.x;
  const int row0 = blockIdx.y * 128, column0 = blockIdx.x * 128;
  const int a_row = t / 2, a_k = t % 2 * 4;      // this thread's 4 elements of A's tile
  const int b_k = t / 32, b_column = t % 32 * 4;  // and of B's
  const int ty = t / 16 * 4, tx = t % 16 * 4;
  const float4 zero = make_float4(0, 0, 0, 0);
  const bool a_inside = row0 + a_row < M, b_inside = column0 + b_column < N;
  const float* a_at = A + (size_t)(a_inside ? row0 + a_row : 0) * K + a_k;
  const float* b_at = B + (size_t)b_k * N + (b_inside ? column0 + b_column : 0);
  float sum[8][8] = {};
  float4 next_a = a_inside && a_k < K ? *(const float4*)a_at : zero;
  float4 next_b = b_inside && b_k < K ? *(const float4*)b_at : zero;
  for (int start = 0, buffer = 0; start < K; start += BK, buffer ^= 1) {
    a[buffer][a_k][a_row] = next_a.x;
    a[buffer][a_k + 1][a_row] = next_a.y;
    a[buffer][a_k + 2][a_row] = next_a.z;
    a[buffer][a_k + 3][a_row] = next_a.w;
    *(float4*)&b[buffer][b_k][b_column] = next_b;
    __syncthreads();
    const int ahead = start + BK;
    next_a = a_inside && ahead + a_k < K ? *(const float4*)(a_at + ahead) : zero;
    next_b = b_inside && ahead + b_k < K ? *(const float4*)(b_at + (size_t)ahead * N) : zero;
#pragma unroll
    for (int k = 0; k < BK; k++) {
      float x[8], y[8];
      *(float4*)&x[0] = *(const float4*)&a[buffer][k][ty];
      *(float4*)&x[4] = *(const float4*)&a[buffer][k][ty + 64];
      *(float4*)&y[0] = *(const float4*)&b[buffer][k][tx];
      *(float4*)&y[4] = *(const float4*)&b[buffer][k][tx + 64];
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) sum[i][j] += x[i] * y[j];
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int row = row0 + ty + i % 4 + i / 4 * 64;
    if (row >= M) continue;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int column = column0 + tx + half * 64;
      if (column < N)
        *(float4*)&C[(size_t)row * N + column] =
            make_float4(sum[i][half * 4], sum[i][half * 4 + 1], sum[i][half * 4 + 2], sum[i][half * 4 + 3]);
    }
  }
}

// Rung 5, tensor cores: bfloat16 in, float32 sums. 8 warps share a 128 x 128 tile; each multiplies 64 x 32 of it in 16
// x 16 fragments, an instruction for each 16 x 16 x 16. Tiles of 32 k come in by asynchronous copies, three stages
// deep, so that no thread waits for memory with its registers. M, N multiples of 128 and K of 32. Predicted: these are
// the instructions of the generation before Hopper's, which reach about 60% of its peak at best; the Triton kernels use
// Hopper's own. Measured: 170 TFLOP/s of cuBLAS's 724: fragments come from shared memory with bank conflicts and one at
// a time.
constexpr int kTileK = 32, kStages = 3, kPadA = kTileK + 8, kPadB = 128 + 8;
constexpr int kStage = 128 * kPadA + kTileK * kPadB;

__device__ void copy16(void* to, const void* from) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from));
}

__global__ void __launch_bounds__(256)
    tensor_cores(const __nv_bfloat16* A, const __nv_bfloat16* B, float* C, int M, int N, int K) {
  using namespace nvcuda::wmma;
  extern __shared__ __align__(16) __nv_bfloat16 tiles[];
  const int t = threadIdx.x, warp = t / 32;
  const int row0 = blockIdx.y * 128, column0 = blockIdx.x * 128;
  const int warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
  fragment<accumulator, 16, 16, 16, float> sum[4][2];
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 2; j++) fill_fragment(sum[i][j], 0.0f);
  const int steps = K / kTileK;
  auto fetch = [&](int step) {
    if (step < steps) {
      __nv_bfloat16* a = tiles + step % kStages * kStage;
      __nv_bfloat16* b = a + 128 * kPadA;
#pragma unroll
      for (int part = 0; part < 2; part++) {
        const int i = t + part * 256;
        copy16(a + i / 4 * kPadA + i % 4 * 8, A + (size_t)(row0 + i / 4) * K + step * kTileK + i % 4 * 8);
        copy16(b + i / 16 * kPadB + i % 16 * 8, B + (size_t)(step * kTileK + i / 16) * N + column0 + i % 16 * 8);
      }
    }
    asm volatile("cp.async.commit_group;");
  };
  fetch(0);
  fetch(1);
  for (int step = 0; step < steps; step++) {
    asm volatile("cp.async.wait_group 1;");
    __syncthreads();
    fetch(step + 2);
    const __nv_bfloat16* a = tiles + step % kStages * kStage;
    const __nv_bfloat16* b = a + 128 * kPadA;
#pragma unroll
    for (int k = 0; k < kTileK; k += 16) {
      fragment<matrix_a, 16, 16, 16, __nv_bfloat16, row_major> x[4];
      fragment<matrix_b, 16, 16, 16, __nv_bfloat16, row_major> y[2];
#pragma unroll
      for (int i = 0; i < 4; i++) load_matrix_sync(x[i], a + (warp_row + i * 16) * kPadA + k, kPadA);
#pragma unroll
      for (int j = 0; j < 2; j++) load_matrix_sync(y[j], b + k * kPadB + warp_column + j * 16, kPadB);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) mma_sync(sum[i][j], x[i], y[j], sum[i][j]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 2; j++)
      store_matrix_sync(C + (size_t)(row0 + warp_row + i * 16) * N + column0 + warp_column + j * 16, sum[i][j], N,
                        mem_row_major);
}

static int up(int a, int b) { return (a + b - 1) / b; }

// Rungs 1 to 4, float32. Returns cudaGetLastError(), or -1 for a rung or a shape it does not take.
extern "C" int transect_matmul_float(int rung, const float* A, const float* B, float* C, int M, int N, int K,
                                     void* stream) {
  cudaStream_t s = (cudaStream_t)stream;
  if (M == 0 || N == 0) return 0;
  if (rung == 1) naive<<<dim3(up(M, 16), up(N, 16)), dim3(16, 16), 0, s>>>(A, B, C, M, N, K);
  else if (rung == 2) coalesced<<<dim3(up(N, 32), up(M, 8)), dim3(32, 8), 0, s>>>(A, B, C, M, N, K);
  else if (rung == 3) shared_tiles<<<dim3(up(N, 32), up(M, 32)), dim3(32, 32), 0, s>>>(A, B, C, M, N, K);
  else if (rung == 4 && K % 4 == 0 && N % 4 == 0)
    register_tiles<<<dim3(up(N, 128), up(M, 128)), 256, 0, s>>>(A, B, C, M, N, K);
  else return -1;
  return (int)cudaGetLastError();
}

// Rung 5: A and B bfloat16, C float32.
extern "C" int transect_matmul_bfloat16(const void* A, const void* B, float* C, int M, int N, int K, void* stream) {
  if (M % 128 || N % 128 || K % 32) return -1;
  const int bytes = kStages * kStage * (int)sizeof(__nv_bfloat16);
  const cudaError_t error = cudaFuncSetAttribute(tensor_cores, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return (int)error;
  tensor_cores<<<dim3(N / 128, M / 128), 256, bytes, (cudaStream_t)stream>>>(
      (const __nv_bfloat16*)A, (const __nv_bfloat16*)B, C, M, N, K);
  return (int)cudaGetLastError();
}
