// The four products between two attentions of one row and weights of 4-bit codes in groups (chain.cuh), as ``arrange``
// of int4_packing.py gives them: of every 128 k, for every 16 rows, codes in the order in which the tensor cores take
// them, then scales and zeros. The two sixteens of an item lie side by side, so one copy brings them. Gate and up are in
// turns of 16 rows.
//
// * x becomes whole numbers: of a chunk of 128 k, q = round(x / unit) for the power of two ``unit`` that brings the
//   largest below 2^15; what is lost is at most 2^-15 of the largest. q is 256 times a byte with a sign plus another.
//   A product of tensor cores has eight columns for one row of x: even ones have the high bytes, odd ones the low ones.
//   Its sums are exact.
// * A byte of the weight holds two codes of the same k, c of row r and 16 d of row r + 8. So four instructions make 16
//   codes of a lane ready, and one product takes 32 k.
// * Scale and zero leave the sum of a group. The sums of x that the zero needs are made once for a product.

#define TRANSECT_CHAIN_WARPS 16
#include "../chain.cuh"
#include "int4_codes.cuh"

using namespace chain;

namespace {

template <int GROUP>
struct Int4 : Chunks128 {
  static constexpr bool kApart = !kBulk;
  static constexpr int kAtOnce = kApart ? 1 : 2, kItem = kAtOnce * kTile<GROUP>;  // sixteens of an item
  static constexpr int kGroups = kChunk / GROUP, kKnown = kMostSteps * kGroups * 8;
  struct Matrix {
    const unsigned char* tiles;
  };

  // Where a warp's items lie, one step after the other.
  struct Cursor {
    const unsigned char *from, *below;
    long long stride;
    int bytes;

    __device__ __forceinline__ void begin(const Matrix& matrix, int n, int unit, bool gate, bool both) {
      const long long chunk = (long long)(n / 16) * kTile<GROUP>;
      from = matrix.tiles + threadIdx.x / 32 * chunk + (long long)(gate ? 2 * unit : unit) * kTile<GROUP>;
      below = from + kTile<GROUP>;
      stride = kWarps * chunk, bytes = both ? kItem : kTile<GROUP>;
    }
    __device__ __forceinline__ void next() { from += stride; }
    __device__ __forceinline__ void begin_lower() { from = below; }
    __device__ __forceinline__ void fetch(uint32_t to, uint32_t barrier) const {
#if TRANSECT_BULK
      barrier_expect(barrier, bytes);
      copy_once(to, from, bytes, barrier);
#else
#pragma unroll
      for (int piece = 0; piece < kItem; piece += 512) {
        const int own = piece + threadIdx.x % 32 * 16;
        if (own < kItem) copy16(to + own, from + own, true);
      }
#endif
    }
  };

  static __device__ __forceinline__ float row_scale(const Matrix&, int) { return 1; }

  // A warp's part of x as bytes: of each chunk [64 k][high or low][4][2][2 words]. A word of place t holds k 2t, 2t + 8,
  // 2t + 1 and 2t + 9 of 16 k: the order of the weight's bytes. ``known``: of each group the unit, and the sum of x.
  static __device__ __forceinline__ float keep(uint32_t part, uint32_t known, const uint4 (&v)[kMostSteps / 2], int steps, int lane) {
    const int i = lane % 16, q = i / 2;  // this lane has 8 k of 16 k q
    const bool right = i % 2;            // it stores the low bytes, its neighbour the high ones
#pragma unroll
    for (int j = 0; j < kMostSteps / 2; j++) {
      if (2 * j >= steps) break;
      const uint32_t pairs[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
      uint32_t most = 0;
#pragma unroll
      for (int t = 0; t < 4; t++) most = max(most, max(pairs[t] & 0x7fffu, pairs[t] >> 16 & 0x7fffu));
#pragma unroll
      for (int lanes = 8; lanes; lanes /= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, lanes));
      const int exponent = most >> 7, kept = max(exponent, 15);  // unit and 1 / unit are then normal numbers
      const float times = __uint_as_float((268 - kept) << 23);   // 2^(14 - (kept - 127))
      const float unit = __uint_as_float(exponent == 255 ? 0x7fc00000u : (kept - 14) << 23);
      constexpr float kWhole = 12582912.f;  // 1.5 * 2^23: a float32 of this size has a whole number in its lowest bits
      constexpr float kMost = kWhole + 32639;  // its high byte is 127
      float sum = 0;
      uint32_t high[4], low[4];
#pragma unroll
      for (int t = 0; t < 4; t++) {
        const float a = fminf(fmaf(low_of(pairs[t]), times, kWhole), kMost);
        const float b = fminf(fmaf(high_of(pairs[t]), times, kWhole), kMost);
        sum += a - kWhole + (b - kWhole);
        low[t] = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040);
        high[t] = __byte_perm(__float_as_uint(a + 128), __float_as_uint(b + 128), 0x0051);
      }
#pragma unroll
      for (int t = 0; t < 4; t += 2) {
        const uint32_t highs = __byte_perm(high[t], high[t + 1], 0x5410), lows = __byte_perm(low[t], low[t + 1], 0x5410);
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, right ? highs : lows, 1);
        const uint32_t first = right ? other : highs, second = right ? lows : other;  // k 2t and 2t + 1, and 8 further
        const uint32_t to = part + (2 * j + lane / 16) * 256 + q / 4 * 128 + (right * 4 + t) * 16 + q % 4 * 4;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(__byte_perm(first, second, 0x5140)) : "memory");
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + 16), "r"(__byte_perm(first, second, 0x7362)) : "memory");
      }
#pragma unroll
      for (int lanes = GROUP / 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
      if (lane % (GROUP / 8) == 0)
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(known + (j * 2 * kGroups + lane / (GROUP / 8)) * 8),
                     "f"(unit), "f"(sum * unit)
                     : "memory");
    }
    return 1;
  }

  struct Sums : Unscaled {
    // Of the sixteens of an item, rows lane / 4 and those 8 below; of both sixteens, if items have one.
    float total[kAtOnce][2] = {}, ended[2][2];

    __device__ __forceinline__ void end(int sixteen) {
      for (int half = 0; kApart && half < 2; half++) {
        if (sixteen) ended[1][half] = total[0][half];
        else ended[0][half] = total[0][half];
        total[0][half] = 0;
      }
    }
    __device__ __forceinline__ float of(int r, int half) const {
      return kApart ? ended[r][half] : total[r % kAtOnce][half];
    }

    __device__ __forceinline__ void add(uint32_t from, uint32_t x_at, uint32_t known, int step, int lane) {
      uint4 w[2][kAtOnce], b[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int r = 0; r < kAtOnce; r++) w[h][r] = read16(from + r * kTile<GROUP> + h * 512 + lane * 16);
        b[h] = read16(x_at + h * 128 + (lane / 4 % 2 * 4 + lane % 4) * 16);
      }
      int acc[kGroups][kAtOnce][4] = {};
#pragma unroll
      for (int s = 0; s < 4; s++)  // 32 k
#pragma unroll
        for (int r = 0; r < kAtOnce; r++) {
          const uint4 words = w[s / 2][r], x = b[s / 2];
          const uint32_t one = s % 2 ? words.z : words.x, two = s % 2 ? words.w : words.y;
          const uint32_t a[4] = {one & 0x0f0f0f0fu, one & 0xf0f0f0f0u, two & 0x0f0f0f0fu, two & 0xf0f0f0f0u};
          multiply_bytes<true>(acc[s * 32 / GROUP][r], a, s % 2 ? x.z : x.x, s % 2 ? x.w : x.y);
        }
#pragma unroll
      for (int g = 0; g < kGroups; g++) {
        const uint2 about = read8(known + (step * kGroups + g) * 8);
        const float unit = __uint_as_float(about.x), unit16 = unit * 0.0625f, x = __uint_as_float(about.y);
#pragma unroll
        for (int r = 0; r < kAtOnce; r++) {
          // Zero, scale: bfloat16 is the upper half of float32. Codes of the rows 8 below were multiplied as 16 c.
          const uint2 both = read8(from + r * kTile<GROUP> + 1024 + g * 64 + lane / 4 * 8);
          const int(&c)[4] = acc[g][r];
          total[r][0] = fmaf(high_of(both.x), x, total[r][0]), total[r][1] = fmaf(high_of(both.y), x, total[r][1]);
          total[r][0] = fmaf(low_of(both.x) * unit, (float)(c[0] * 256 + c[1]), total[r][0]);
          total[r][1] = fmaf(low_of(both.y) * unit16, (float)(c[2] * 256 + c[3]), total[r][1]);
        }
      }
    }
  };
};

template <int GROUP>
int start_of(const void* const* tiles, const int* sizes, const void* const* tensors, float eps0, float eps1, int stages,
             int blocks, int dependent, void* stream) {
  Weights<Int4<GROUP>> weights;
  for (int p = 0; p < kProducts; p++) weights.matrix[p].tiles = (const unsigned char*)tiles[p];
  return start<Int4<GROUP>>(weights, sizes, tensors, eps0, eps1, stages, blocks, dependent, stream);
}

}  // namespace

// tiles: what ``arrange`` gives for o, gate and up in turns of 16 rows, down, and q, k, v of the next layer, in groups of
// ``group`` (32, 64 or 128); their sizes n and k must follow each other, n multiples of 16, k of 128, up to 16384. The
// rest as of ``chain::start``; ``dependent`` as of transect_small_matmul.
extern "C" int transect_int4_chain(const void* const* tiles, int group, const int* sizes, const void* const* tensors,
                                   float eps0, float eps1, int stages, int blocks, int dependent, void* stream) {
  const auto start_with = group == 128  ? start_of<128>
                          : group == 64 ? start_of<64>
                          : group == 32 ? start_of<32>
                                        : nullptr;
  if (!start_with) return -1;
  return start_with(tiles, sizes, tensors, eps0, eps1, stages, blocks, dependent, stream);
}
