// How many cycles of a scheduler a product on the tensor cores takes on Hopper, alone and with other instructions
// beside it:
// bfloat16, float32 sums, operands in registers (``wgmma``: the right one in shared memory). See issue_rates.py.

#include <cuda_runtime.h>
#include <stdint.h>

#include <cstdio>

enum Other { kNone, kLogic, kFloat, kPair, kInteger };

__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %8}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}

template <Other OTHER>
__device__ __forceinline__ void other(uint32_t& w, uint32_t v) {
  if (OTHER == kLogic) asm volatile("lop3.b32 %0, %0, 0xF0FF0F0F, %1, 0xEA;" : "+r"(w) : "r"(v));
  if (OTHER == kPair) asm volatile("fma.rn.bf16x2 %0, %0, %1, %1;" : "+r"(w) : "r"(v));
  if (OTHER == kInteger) asm volatile("mad.lo.u32 %0, %0, %1, %1;" : "+r"(w) : "r"(v));
  if (OTHER == kFloat) {
    float f = __uint_as_float(w);
    asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(f) : "f"(__uint_as_float(v)));
    w = __float_as_uint(f);
  }
}

constexpr int kRounds = 32, kProducts = 16, kSums = 8;  // a round is so many products, on so many sums by turns

// ``MORE`` other instructions after each product; the cycles of each warp of the first block.
template <Other OTHER, int MORE, bool PRODUCTS>
__global__ void beside(float* out, unsigned* cycles, uint32_t seed) {
  float c[kSums][4] = {};
  uint32_t a[4], w[16];
  for (int e = 0; e < 4; e++) a[e] = seed * (threadIdx.x * 7 + e) & 0x000f000fu;
  for (int e = 0; e < 16; e++) w[e] = seed * (threadIdx.x + e);
  const uint32_t v = seed ^ threadIdx.x;
  __syncthreads();
  const unsigned begin = clock();
#pragma unroll 1
  for (int i = 0; i < kRounds; i++)
#pragma unroll
    for (int j = 0; j < kProducts; j++) {
      if (PRODUCTS) multiply(c[j % kSums], a, v);
#pragma unroll
      for (int n = 0; n < MORE; n++) other<OTHER>(w[(j * MORE + n) % 16], v);
    }
  const unsigned end = clock();
  float sum = 0;
  for (int j = 0; j < kSums; j++)
    for (int e = 0; e < 4; e++) sum += c[j][e];
  for (int e = 0; e < 16; e++) sum += __uint_as_float(w[e]);
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
  if (threadIdx.x % 32 == 0 && blockIdx.x == 0) cycles[threadIdx.x / 32] = end - begin;
}

// Batches of 8 products of 64 x 16 x 16, each on the sum of the one before, every batch waited for.
__global__ void by_groups(float* out, unsigned* cycles, uint32_t seed) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ __align__(1024) unsigned char memory[8192];
  for (int i = threadIdx.x; i < 2048; i += blockDim.x) ((uint32_t*)memory)[i] = 0x3f803f80u;
  asm volatile("fence.proxy.async;" ::: "memory");
  // Eight rows of 16 bytes are one piece; pieces along k follow each other, the next eight rows are 2048 bytes on.
  const uint64_t described = (__cvta_generic_to_shared(memory) & 0x3ffff) >> 4 | 128ull >> 4 << 16 | 2048ull >> 4 << 32;
  float d[8] = {};
  uint32_t a[4];
  for (int e = 0; e < 4; e++) a[e] = seed * (threadIdx.x * 7 + e) & 0x000f000fu;
  __syncthreads();
  const unsigned begin = clock();
#pragma unroll 1
  for (int i = 0; i < kRounds * kProducts / 8; i++) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int q = 0; q < 8; q++)
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, "
          "%12, 1, 1, "
          "1, 0;"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(described + q * 16));
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  const unsigned end = clock();
  float sum = 0;
  for (int e = 0; e < 8; e++) sum += d[e];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
  if (threadIdx.x % 32 == 0 && blockIdx.x == 0) cycles[threadIdx.x / 32] = end - begin;
#endif
}

static float* out;
static unsigned* cycles;

// Prints: name, other instructions a product, warps a scheduler, cycles of a scheduler for a product (and those
// others).
template <typename Kernel>
static void run(const char* name, int more, Kernel kernel) {
  for (int warps = 1; warps <= 3; warps++) {
    unsigned found[12], longest = 0;
    for (int repeat = 0; repeat < 3; repeat++) kernel<<<132, warps * 128>>>(out, cycles, 0x9e3779b9u);
    if (cudaMemcpy(found, cycles, warps * 16, cudaMemcpyDeviceToHost) != cudaSuccess) {
      fprintf(stderr, "%s: %s\n", name, cudaGetErrorString(cudaGetLastError()));
      continue;
    }
    for (int i = 0; i < warps * 4; i++) longest = found[i] > longest ? found[i] : longest;
    printf("%s,%d,%d,%.2f\n", name, more, warps, longest / (double)(kRounds * kProducts) / warps);
  }
}

template <Other OTHER>
static void with(const char* name) {
  run(name, 1, beside<OTHER, 1, true>);
  run(name, 2, beside<OTHER, 2, true>);
  run(name, 4, beside<OTHER, 4, true>);
  run(name, 6, beside<OTHER, 6, true>);
}

int main() {
  cudaMalloc(&out, 132 * 384 * 4);
  cudaMalloc(&cycles, 64);
  run("mma.sync", 0, beside<kNone, 0, true>);
  with<kLogic>("lop3");
  with<kFloat>("fma.f32");
  with<kPair>("fma.bf16x2");
  with<kInteger>("mad.u32");
  run("lop3 alone", 6, beside<kLogic, 6, false>);
  run("fma.f32 alone", 6, beside<kFloat, 6, false>);
  run("wgmma 64 x 16 x 16", 0, by_groups);
  return cudaDeviceSynchronize();
}
