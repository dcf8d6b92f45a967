// Products of 9 to 64 rows with a weight in fp8 (e4m3) with a scale for each row, on GPUs since Ampere (portable_tiles.cuh).
// X stays bfloat16. Codes become bfloat16 by shifts and logic, as numbers that are smaller by 2^120, also below the normal
// range, and one multiplication makes all of them what they are.

#include "../portable_tiles.cuh"

using namespace portable_tiles;

namespace {

struct Fp8 {
  const unsigned char* codes;
  const float* scale;
  static constexpr int kSpan = 64, kBytes = kSixteens * 16 * kSpan;

  // Sixteen bytes of a row of X; lanes read four of two rows at a time.
  static __device__ __forceinline__ int place(int row, int piece) { return piece ^ (row % 2 * 4); }

  // Four pieces of a row of W; lanes read two of four rows at a time.
  struct Source {
    static constexpr int kAtOnce = kThreads / 4;  // rows
    const unsigned char* from;
    long long rows_on;
    uint32_t to;
    int left, step;  // rows that are there, from this thread's first on

    __device__ __forceinline__ void aim(const Fp8& weight, int N, int K, int first, int begin, int gate) {
      // With a gate a warp has a sixteen of each half of the rows.
      const int row = threadIdx.x / 4, piece = threadIdx.x % 4;
      const int own = gate ? first * 8 + row / 32 * 16 + row % 16 : first * 16 + row;
      from = weight.codes + (size_t)(gate && row / 16 % 2 ? N / 2 + own : own) * K + (size_t)begin * kSpan + piece * 16;
      to = row * kSpan + (piece ^ (row / 2 % 2 * 2)) * 16;
      step = gate ? kAtOnce / 2 : kAtOnce, rows_on = (long long)step * K;
      left = (gate ? N / 2 : N) - own;
    }
    __device__ __forceinline__ void fetch(uint32_t slot) {
#pragma unroll
      for (int i = 0; i * kAtOnce < kSixteens * 16; i++)
        if (i * step < left) copy16(slot + to + i * kAtOnce * kSpan, from + i * rows_on, true);
      from += kSpan;
    }
  };

  struct Values {
    // Lane l has k 8 (l % 4) to 8 (l % 4) + 7 of 32, of rows l / 4 and l / 4 + 8.
    __device__ __forceinline__ void decode(uint32_t (&a)[2][2][4], uint32_t from, int warp, int at, int lane) const {
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = (warp * 2 + r) * 16 + half * 8 + lane / 4;
          const uint32_t place = from + row * kSpan + ((at * 32 + lane % 4 * 8) ^ lane / 8 % 2 * 32);
          uint32_t w[2];
          asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(place));
#pragma unroll
          for (int i = 0; i < 2; i++) {
            a[r][i][half] = value(__byte_perm(w[i], 0, 0x1404));
            a[r][i][half + 2] = value(__byte_perm(w[i], 0, 0x3424));
          }
        }
    }
    // Two codes, each in the upper byte of half a word.
    static __device__ __forceinline__ uint32_t value(uint32_t codes) {
      return fused((codes & 0x80008000u) | (codes >> 4 & 0x07F007F0u), 0x7B807B80u, 0x80008000u);  // 2^120, -0
    }
  };

  static __device__ __forceinline__ void read_x(uint32_t (&b)[4], uint32_t from, int at, int lane) {
    const int row = lane / 4;
    const uint4 v = read16(from + row * kSpan * 2 + ((at * 64 + lane % 4 * 16) ^ row % 2 * 64));
    b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
  }

  __device__ __forceinline__ float factor(int n, int N, int gate, int r) const {
    return scale[gate && r ? N / 2 + n : n];
  }
};

}  // namespace

// x [M, K] bfloat16 with x_stride elements between rows, on 16 bytes, x_stride a multiple of 8. codes [N, K] contiguous on 16
// bytes, K a multiple of 64; scale [N]; bias [N] or null; out [M, N], with a gate [M, N / 2]. tiles: eights of rows of X at a
// time, 1, 2, 4 or 8; blocks: no more than spans of all tiles. parts: float32 for two tiles of each block; counters: one for
// each tile, zeros, and left as zeros. stages 2 to 4. ``gate``: N is a multiple of 32,
// the rows of the gate come first, and there is no bias. ``dependent``: 0 an ordinary launch, 1 a dependent one. Returns a
// cudaError_t, or -1 for what it does not take.
extern "C" int transect_scaled8_portable(const void* x, const void* codes, const void* scale, const void* bias, void* out,
                                         void* parts, void* counters, int M, int N, int K, long long x_stride, int tiles,
                                         int blocks, int stages, int gate, int dependent, void* stream) {
  const Fp8 weight = {(const unsigned char*)codes, (const float*)scale};
  return start_tiles(weight, tiles, x, bias, out, parts, counters, M, N, K, x_stride, blocks, stages, gate, dependent,
                     stream);
}
