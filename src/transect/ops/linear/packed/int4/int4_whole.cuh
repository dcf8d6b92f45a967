// 8 rows of X as whole numbers, for int4_matmul.cu: of a span of 128 k of a row, q = round(x / unit) for the power of
// two ``unit`` that brings the largest below 2^15, so q has 16 bits: a high byte with a sign and a low one without.
// Products of codes with either, summed over the span, are exact in 32 bits.
//
// * What is lost is at most half a unit, 2^-15 of the span's largest. bfloat16 has 8 bits, so what is within 2^7 of the
//   largest loses nothing.
// * A byte of the weight holds two codes of the same k, c of row r and 16 d of row r + 8. So two instructions make 8
//   codes ready, where bfloat16 takes 7 or 5.

#pragma once

#include "../../../lang/few_rows.cuh"
#include "int4_codes.cuh"

using few_rows::multiply_bytes;

// The larger of each half; NaN if either is.
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
  uint32_t v;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}

__device__ __forceinline__ void write_words(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// A warp turns 8 rows of 128 k at ``x_at`` (kXPitch bytes apart) into whole numbers, in their place: high bytes, then
// low ones, of each [64 k][lane][4 words, one for each 16 k]. A word of lane l is row l / 4 and, for t = l % 4, k 2t,
// 2t + 8, 2t + 1 and 2t + 9: the order of the weight's bytes. At ``about``: [group][row][unit, sum of the group],
// float32. A row with an infinity or NaN has the unit NaN. Rows that were never filled give what is never stored.
template <int GROUP>
__device__ __forceinline__ void make_whole(uint32_t x_at, uint32_t about, int lane) {
  constexpr int GROUPS = kChunk / GROUP;
  uint32_t v[4][4];
#pragma unroll
  for (int h = 0; h < 4; h++) few_rows::read_matrices(v[h], x_at + lane % 8 * kXPitch + lane / 8 * 16 + h * 64);
  uint32_t most = 0;
#pragma unroll
  for (int h = 0; h < 4; h++)
#pragma unroll
    for (int q = 0; q < 4; q++) most = larger(most, v[h][q] & 0x7fff7fffu);
  most = larger(most, most >> 16);
  most = larger(most, __shfl_xor_sync(0xffffffffu, most, 1));
  most = larger(most, __shfl_xor_sync(0xffffffffu, most, 2));
  const int exponent = (most >> 7) & 255, kept = max(exponent, 16);  // unit and 1 / unit are then normal numbers
  const float times = __uint_as_float((268 - kept) << 23);           // 2^(14 - (kept - 127))
  const float unit = __uint_as_float(exponent == 255 ? 0x7fc00000u : (kept - 14) << 23);
  uint32_t high[8], low[8];
  int sum_high[GROUPS] = {};
  uint32_t sum_low[GROUPS] = {};
#pragma unroll
  for (int s = 0; s < 8; s++) {
    const uint32_t a = v[s / 2][s % 2 * 2], b = v[s / 2][s % 2 * 2 + 1];
    // 1.5 * 2^23 + q has q in its lowest bits.
    const uint32_t f0 = __float_as_uint(fmaf(__uint_as_float(a << 16), times, 12582912.f));
    const uint32_t f1 = __float_as_uint(fmaf(__uint_as_float(b << 16), times, 12582912.f));
    const uint32_t f2 = __float_as_uint(fmaf(__uint_as_float(a & 0xffff0000u), times, 12582912.f));
    const uint32_t f3 = __float_as_uint(fmaf(__uint_as_float(b & 0xffff0000u), times, 12582912.f));
    const uint32_t even = __byte_perm(f0, f1, 0x5410), odd = __byte_perm(f2, f3, 0x5410);
    high[s] = __byte_perm(even, odd, 0x7531);
    low[s] = __byte_perm(even, odd, 0x6420);
    const int g = s * 16 / GROUP;
    sum_high[g] = __dp4a((int)high[s], 0x01010101, sum_high[g]);
    sum_low[g] = __dp4a(low[s], 0x01010101u, sum_low[g]);
  }
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint32_t to = x_at + half * 512 + lane * 16;
    write_words(to, high[half * 4], high[half * 4 + 1], high[half * 4 + 2], high[half * 4 + 3]);
    write_words(to + 1024, low[half * 4], low[half * 4 + 1], low[half * 4 + 2], low[half * 4 + 3]);
  }
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    int sum = sum_high[g] * 256 + (int)sum_low[g];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (lane % 4 == 0)
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(about + g * 64 + lane * 2), "f"(unit),
                   "f"((float)sum * unit)
                   : "memory");
  }
}
