// Units of GGUF blocks times one row of X in whole numbers, by products of bytes, for gguf_row.cu
// and gguf_chain.cu.
//
// * Of a span of 256 k of X, q = round(x / unit) for the power of two ``unit`` that brings the largest below 2^14. q is
//   256 times a byte and another byte, both with signs. What is lost is at most half a unit, 2^-14 of the span's
//   largest; bfloat16 has 8 bits, so what is within 2^6 of the largest loses nothing.
// * A code is a byte as it stands, so a few instructions make four of them ready.
// * A product has 8 columns, and one row of X needs two. So the 8 columns are four groups of k, those that have a scale
//   of their own, with both bytes of each: a column has zeros for the k of the other groups. Sums of 128 k (of 64, where
//   groups have 16) then stand beside each other, exact in 32 bits, and each lane scales those of one group.

#pragma once

#include "gguf_codes.cuh"

namespace gguf {

// What a row of X leaves for a span of 256 k in shared memory: bytes [j][high, low][lane % 4][8], float32 sums of q over
// [j][16 k], and the unit. Of the 32 k number j a word has, for c = lane % 4, k 2c, 2c + 16, 2c + 1 and 2c + 17, and the
// next word those 8 further on: the order of ``ByteCodes``.
constexpr int kSpanSums = 512, kSpanUnit = kSpanSums + 64, kSpan = kSpanUnit + 16;

// The words that lane l needs for that, four pairs of bfloat16: k 32 (l / 4) + 2 (l % 4) and what is 8, 16, 24 further.
__device__ __forceinline__ void read_span(uint32_t (&v)[4], const __nv_bfloat16* x, int lane) {
#pragma unroll
  for (int s = 0; s < 4; s++) v[s] = __ldcg((const unsigned*)(x + lane / 4 * 32 + lane % 4 * 2 + s * 8));
}

// A warp leaves N spans, each at its ``to``: one's instructions stand between the other's, or each would wait for the
// one before. An infinity or NaN makes the unit NaN.
template <int N>
__device__ __forceinline__ void write_spans(const uint32_t (&to)[N], const uint32_t (&v)[N][4], int lane) {
  const int j = lane / 4, c = lane % 4;
  uint32_t most[N];
#pragma unroll
  for (int n = 0; n < N; n++) {
    uint32_t both = v[n][0] & 0x7FFF7FFFu;
#pragma unroll
    for (int s = 1; s < 4; s++) asm("max.u16x2 %0, %1, %2;" : "=r"(both) : "r"(both), "r"(v[n][s] & 0x7FFF7FFFu));
    most[n] = max(both & 0xFFFFu, both >> 16);
  }
#pragma unroll
  for (int n = 0; n < N; n++) most[n] = __reduce_max_sync(0xFFFFFFFFu, most[n]);
  float unit[N];
  uint2 low[N], high[N];  // 256 high + low = q, with low from -128 on: so high is that of q + 128
  int sum[N][2];
#pragma unroll
  for (int n = 0; n < N; n++) {
    const int exponent = most[n] >> 7, kept = max(exponent, 16);  // unit and 1 / unit are then normal numbers
    const float times = __uint_as_float((267 - kept) << 23);      // 2^(13 - (kept - 127))
    unit[n] = __uint_as_float(exponent == 255 ? 0x7FC00000u : (kept - 13) << 23);
    uint32_t q[4][2];  // q + 128 in the lower 16 bits: so has 1.5 2^23 + 128 + q
    sum[n][0] = sum[n][1] = 0;
#pragma unroll
    for (int s = 0; s < 4; s++) {
      q[s][0] = __float_as_uint(fmaf(__uint_as_float(v[n][s] << 16), times, 12583040.f));
      q[s][1] = __float_as_uint(fmaf(__uint_as_float(v[n][s] & 0xFFFF0000u), times, 12583040.f));
      sum[n][s / 2] += (int)(q[s][0] + q[s][1] - 2 * 0x4B400080u);
    }
    auto bytes = [&](int s, uint32_t which) {
      return __byte_perm(__byte_perm(q[s][0], q[s + 2][0], which), __byte_perm(q[s][1], q[s + 2][1], which), 0x5410);
    };
    low[n] = make_uint2(bytes(0, 0x0040) ^ 0x80808080u, bytes(1, 0x0040) ^ 0x80808080u);
    high[n] = make_uint2(bytes(0, 0x0051), bytes(1, 0x0051));
  }
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int s = 0; s < 2; s++) sum[n][s] += __shfl_xor_sync(0xFFFFFFFFu, sum[n][s], lanes);
#pragma unroll
  for (int n = 0; n < N; n++) {
    const uint32_t at = to[n] + (j * 8 + c) * 8;
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(high[n].x), "r"(high[n].y) : "memory");
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at + 32), "r"(low[n].x), "r"(low[n].y) : "memory");
    if (c == 0)
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to[n] + kSpanSums + j * 8), "f"((float)sum[n][0]),
                   "f"((float)sum[n][1])
                   : "memory");
    if (lane == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(to[n] + kSpanUnit), "f"(unit[n]) : "memory");
  }
}

__device__ __forceinline__ float read_float(uint32_t from) { return __uint_as_float(read4(from)); }

// Codes as bytes, of which a lane has the same as in ``Codes``.
template <Type F>
struct ByteCodes : Codes<F> {
  uint4 four;

  // The bits of a code at ``from`` in each half of a word, at ``to``.
  template <int BITS>
  static __device__ __forceinline__ uint32_t moved(uint32_t word, int from, int to) {
    constexpr uint32_t kMask = ((1u << BITS) - 1) * 0x00010001u;
    return (to >= from ? word << (to - from) : word >> (from - to)) & kMask << to;
  }

  // Pairs s of row g + 8 h whose bits stand together at ``first`` in each half of a word: those of k 2c (s = 0) and
  // 2c + 16 (s = 2), and those 8 further on (s = 1 and 3), each at bit ``to`` of a byte of its own.
  template <int BITS>
  static __device__ __forceinline__ uint2 apart(uint32_t word, int first, int to) {
    return make_uint2(moved<BITS>(word, first, to) | moved<BITS>(word, first + 2 * BITS, to + 8),
                      moved<BITS>(word, first + BITS, to) | moved<BITS>(word, first + 3 * BITS, to + 8));
  }

  // The left operand of a product of bytes for the 32 columns number j; to be called for j = 0, 1, ... in turn.
  __device__ __forceinline__ void bytes(uint32_t (&a)[4], uint32_t unit, int lane, int j) {
    constexpr int LOW = low_bits(F), HIGH = high_bits(F), J = LOW == 8 ? 1 : 8 / LOW;  // of how many j 16 bytes are
    if (j % J == 0) four = read16(unit + (j / J * 32 + lane) * 16);
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      uint2 v;
      if constexpr (LOW == 8) {
        v = make_uint2(__byte_perm(words[2 * h], words[2 * h + 1], 0x6240),
                       __byte_perm(words[2 * h], words[2 * h + 1], 0x7351));
      } else if constexpr (is_chosen(F)) {
        const uint32_t word = words[j % 2 * 2 + h], even = chosen<F>(word), odd = chosen<F>(word >> 16);
        v = make_uint2(__byte_perm(even, odd, 0x6420), __byte_perm(even, odd, 0x7531));
      } else if constexpr (LOW == 4) {
        const uint32_t word = words[j % 2 * 2 + h];
        v = make_uint2(word & 0x0F0F0F0Fu, word >> 4 & 0x0F0F0F0Fu);
      } else {
        v = apart<2>(words[j % 4], 8 * h, 0);
      }
      if constexpr (HIGH > 0) {
        const uint2 up = HIGH == 1 ? apart<1>(this->high[j / 2], 8 * (j % 2) + 4 * h, LOW)
                                   : apart<2>(this->high[j], 8 * h, LOW);
        v.x |= up.x, v.y |= up.y;
      }
      a[h] = v.x, a[2 + h] = v.y;
    }
  }
};

// sums += the lane's part of rows lane / 4 and lane / 4 + 8 of a unit times the span at ``x``: those of four lanes, whose
// numbers differ in the last two bits, make up the product.
template <Type F>
__device__ __forceinline__ void add_unit(float (&sums)[2], uint32_t unit, uint32_t x, int lane) {
  constexpr int GROUPS = groups_of_32(F), TOGETHER = 4 / GROUPS;  // 32 columns at a time whose sums stand together
  constexpr bool BYTES = byte_scales(F), MINIMUM = has_minimum(F);
  constexpr int EACH = 2 * (1 + MINIMUM) * (BYTES ? 1 : 2);  // bytes of the scales of two rows in a group
  const int g = lane / 4, c = lane % 4;
  ByteCodes<F> codes;
  codes.begin(unit, lane);
  float scaled[2] = {}, least[2] = {};
#pragma unroll
  for (int i = 0; i < 8 / TOGETHER; i++) {
    // On the right lane l has column g: of group g / 2 the byte g % 2.
    uint2 b = hopper::read8(x + ((i * TOGETHER + g / 2 / GROUPS) * 8 + g % 2 * 4 + c) * 8);
    if (GROUPS == 2) {
      const uint32_t own = g / 2 % 2 ? 0xFF00FF00u : 0x00FF00FFu;  // k 2c + 16, or 2c
      b.x &= own, b.y &= own;
    }
    int dot[4] = {};
#pragma unroll
    for (int t = 0; t < TOGETHER; t++) {
      uint32_t a[4];
      codes.bytes(a, unit, lane, i * TOGETHER + t);
      const bool here = g / 2 / GROUPS == t;
      few_rows::multiply_bytes<true>(dot, a, here ? b.x : 0, here ? b.y : 0);
    }
    // Of the result it has the two columns of group c.
    const int j = i * TOGETHER + c / GROUPS, q = c % GROUPS;
    const uint32_t at = unit + code_bytes(F) + ((j * 8 + g) * GROUPS + q) * EACH;
    float scale[2], minimum[2] = {};
    if constexpr (BYTES) {
      uint32_t word;
      if constexpr (MINIMUM) word = read4(at);
      else asm volatile("{\n.reg .u16 two;\nld.shared.u16 two, [%1];\ncvt.u32.u16 %0, two;\n}" : "=r"(word) : "r"(at));
      scale[0] = (float)((int)(word & 255) - scale_bias(F)), scale[1] = (float)((int)(word >> 8 & 255) - scale_bias(F));
      if (MINIMUM) minimum[0] = (float)(word >> 16 & 255), minimum[1] = (float)(word >> 24);
    } else {
      const float2 two = two_floats<F == kMXFP4>(read4(at));
      scale[0] = two.x, scale[1] = two.y;
      if constexpr (MINIMUM) {
        const float2 below = two_floats<false>(read4(at + 4));
        minimum[0] = below.x, minimum[1] = below.y;
      }
    }
    float sum;
    if constexpr (GROUPS == 2) {
      sum = read_float(x + kSpanSums + (j * 2 + q) * 4);
    } else {
      const uint2 two = hopper::read8(x + kSpanSums + j * 8);
      sum = __uint_as_float(two.x) + __uint_as_float(two.y);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float whole = (float)(dot[2 * h] * 256 + dot[2 * h + 1]);
      scaled[h] += scale[h] * (MINIMUM ? whole : whole - offset_of(F) * sum);
      if (MINIMUM) least[h] += minimum[h] * sum;
    }
  }
  const float times = read_float(x + kSpanUnit);
  if constexpr (BYTES) {
    float2 d, less;
    read_behind<F>(d, less, unit, g);
    sums[0] += times * (d.x * scaled[0] - less.x * least[0]);
    sums[1] += times * (d.y * scaled[1] - less.y * least[1]);
  } else {
    sums[0] += times * (scaled[0] + least[0]);
    sums[1] += times * (scaled[1] + least[1]);
  }
}

}  // namespace gguf
