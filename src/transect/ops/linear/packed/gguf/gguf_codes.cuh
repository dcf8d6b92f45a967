// Block types of GGUF files as gguf_layout.py arranges them: how many bytes a unit of 16 rows by 256 k has, and how a
// lane takes its codes apart. For gguf_rows.cu and block_tiles.cuh.
//
// Codes become bfloat16 without arithmetic: a whole number c below 256 is the bits of c 2^-133, below the normal range.

#pragma once

#include <cuda_fp16.h>

#include "../../../lang/few_rows.cuh"
#include "../../../lang/hopper.cuh"

namespace gguf {

using few_rows::read16;
using hopper::read8;

// The last three are no types of GGUF files, but 4 bits in groups of 128, 64 and 32 in the order of int4_packing.py;
// int4_tiles.cu alone takes them.
enum Type { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kMXFP4, kInt4, kInt4_64, kInt4_32 };

constexpr int kUnitK = 256;

__host__ __device__ constexpr int int4_group(Type t) { return t == kInt4 ? 128 : t == kInt4_64 ? 64 : t == kInt4_32 ? 32 : 0; }
__host__ __device__ constexpr int int4_chunk(Type t) { return 1024 + 64 * 128 / int4_group(t); }  // bytes of 16 rows by 128 k

// As of ``BlockFormat``.
__host__ __device__ constexpr int low_bits(Type t) { return t == kQ8_0 ? 8 : t == kQ2_K || t == kQ3_K ? 2 : 4; }
__host__ __device__ constexpr int high_bits(Type t) { return t == kQ5_0 || t == kQ5_1 || t == kQ5_K || t == kQ3_K ? 1 : t == kQ6_K ? 2 : 0; }
__host__ __device__ constexpr int groups_of_32(Type t) { return t == kQ2_K || t == kQ3_K || t == kQ6_K ? 2 : 1; }
__host__ __device__ constexpr bool byte_scales(Type t) { return t == kQ2_K || t == kQ3_K || t == kQ4_K || t == kQ5_K || t == kQ6_K; }
__host__ __device__ constexpr int scale_bias(Type t) { return t == kQ6_K ? 128 : t == kQ3_K ? 32 : 0; }
__host__ __device__ constexpr bool has_minimum(Type t) { return t == kQ4_1 || t == kQ5_1 || t == kQ2_K || t == kQ4_K || t == kQ5_K; }
__host__ __device__ constexpr bool is_chosen(Type t) { return t == kIQ4_NL || t == kMXFP4; }
__host__ __device__ constexpr int offset_of(Type t) {
  return t == kQ4_0 ? 8 : t == kQ5_0 ? 16 : t == kQ3_K ? 4 : t == kQ6_K ? 32 : t == kQ8_0 || is_chosen(t) ? 128 : 0;
}
__host__ __device__ constexpr int code_bytes(Type t) { return 512 * (low_bits(t) + high_bits(t)); }
__host__ __device__ constexpr int scale_bytes(Type t) {
  return 128 * groups_of_32(t) * (has_minimum(t) ? 2 : 1) * (byte_scales(t) ? 1 : 2);
}
__host__ __device__ constexpr int unit_bytes(Type t) {
  return int4_group(t) ? 2 * int4_chunk(t) : code_bytes(t) + scale_bytes(t) + (byte_scales(t) ? (has_minimum(t) ? 64 : 32) : 0);
}

__device__ __forceinline__ uint32_t read4(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
  return v;
}

// Two halves of a word as floats: float16, or bfloat16.
template <bool BRAIN>
__device__ __forceinline__ float2 two_floats(uint32_t word) {
  if (BRAIN) return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
  return __half22float2(*(const __half2*)&word);
}

// Byte number k of a word as a float, ``bias`` less: 2^23 + byte is a float whose last bits are the byte.
template <int K>
__device__ __forceinline__ float byte_float(uint32_t word, int bias) {
  return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540 | K)) - (8388608.f + bias);
}

// The bytes that the lower four codes of 4 bits of a word stand for, 128 more than the number.
template <Type F>
__device__ __forceinline__ uint32_t chosen(uint32_t four) {
  constexpr bool NL = F == kIQ4_NL;
  // -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113; or 0 1 2 3, 4 6 8 12 and the same below 0
  const uint32_t t0 = NL ? 0x3F2D1801u : 0x83828180u, t1 = NL ? 0x766A5D4Fu : 0x8C888684u;
  const uint32_t t2 = NL ? 0xA6998D81u : 0x7D7E7F80u, t3 = NL ? 0xF1D9C5B5u : 0x74787A7Cu;
  const uint32_t low = __byte_perm(t0, t1, four & 0x7777u), high = __byte_perm(t2, t3, four & 0x7777u);
  return __byte_perm(low, high, 0x3210u | (four >> 1 & 0x4444u));
}

// The scales and minima of rows g and g + 8 in the groups of columns 32 j to 32 j + 31; where they are bytes, as whole
// numbers.
template <Type F>
__device__ __forceinline__ void read_scales(float (&scale)[groups_of_32(F)][2], float (&minimum)[groups_of_32(F)][2],
                                            uint32_t unit, int g, int j) {
  constexpr int GROUPS = groups_of_32(F);
  constexpr bool MINIMUM = has_minimum(F);
  const uint32_t at = unit + code_bytes(F) + (j * 8 + g) * (scale_bytes(F) / 64);
  if constexpr (byte_scales(F)) {
    const uint2 two = GROUPS * (1 + MINIMUM) == 4 ? read8(at) : make_uint2(read4(at), 0);
    const uint32_t words[2] = {two.x, two.y};
#pragma unroll
    for (int s = 0; s < GROUPS; s++) {
      const uint32_t word = MINIMUM ? words[s] : s ? two.x >> 16 : two.x;
      scale[s][0] = byte_float<0>(word, scale_bias(F)), scale[s][1] = byte_float<1>(word, scale_bias(F));
      if (MINIMUM) minimum[s][0] = byte_float<2>(word, 0), minimum[s][1] = byte_float<3>(word, 0);
    }
  } else if constexpr (MINIMUM) {
    const uint2 v = read8(at);
    const float2 s = two_floats<false>(v.x), m = two_floats<false>(v.y);
    scale[0][0] = s.x, scale[0][1] = s.y, minimum[0][0] = m.x, minimum[0][1] = m.y;
  } else {
    const float2 s = two_floats<F == kMXFP4>(read4(at));
    scale[0][0] = s.x, scale[0][1] = s.y;
  }
}

// What those bytes are multiplied by, of rows g and g + 8; minima are taken off.
template <Type F>
__device__ __forceinline__ void read_behind(float2& scale, float2& minimum, uint32_t unit, int g) {
  const uint32_t at = unit + code_bytes(F) + scale_bytes(F) + g * (has_minimum(F) ? 8 : 4);
  scale = two_floats<false>(read4(at));
  minimum = has_minimum(F) ? two_floats<false>(read4(at + 4)) : make_float2(0, 0);
}

// Whether codes of the upper eight of sixteen columns are left four bits up, where they stand for 16 c: a shift less
// for every other pair.
__host__ __device__ constexpr bool left_up(Type t) { return low_bits(t) == 4 && high_bits(t) == 0 && !is_chosen(t); }

// What a lane holds of a unit: its codes of 32 columns as pairs of bfloat16.
template <Type F>
struct Codes {
  uint32_t high[high_bits(F) ? 4 * high_bits(F) : 1];

  __device__ __forceinline__ void begin(uint32_t unit, int lane) {
    if constexpr (high_bits(F) > 0) {
#pragma unroll
      for (int t = 0; t < high_bits(F); t++) {
        const uint4 v = read16(unit + 512 * low_bits(F) + (t * 32 + lane) * 16);
        high[t * 4] = v.x, high[t * 4 + 1] = v.y, high[t * 4 + 2] = v.z, high[t * 4 + 3] = v.w;
      }
    }
  }

  // The upper bits of pair s of row g + 8 h, at their place.
  __device__ __forceinline__ uint32_t upper(int j, int h, int s) const {
    constexpr int WIDTH = high_bits(F), TO = low_bits(F);
    const int p = WIDTH == 1 ? 8 * (j % 2) + 4 * h + s : 2 * (4 * h + s);
    const uint32_t word = high[WIDTH == 1 ? j / 2 : j], mask = ((1u << WIDTH) - 1) * 0x00010001u << TO;
    return (p >= TO ? word >> (p - TO) : word << (TO - p)) & mask;
  }

  // a[q]: of the two products of 16 columns each the left operand; see ``left_up``.
  __device__ __forceinline__ void get(uint32_t (&a)[2][4], uint32_t unit, int lane, int j) const {
    uint32_t pairs[2][4];
    if constexpr (low_bits(F) == 8) {
      const uint4 v = read16(unit + (j * 32 + lane) * 16);
      const uint32_t words[2][2] = {{v.x, v.y}, {v.z, v.w}};
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int s = 0; s < 4; s++) pairs[h][s] = (s % 2 ? words[h][s / 2] >> 8 : words[h][s / 2]) & 0x00FF00FFu;
    } else if constexpr (low_bits(F) == 4) {
      const uint2 v = read8(unit + (j / 2 * 32 + lane) * 16 + j % 2 * 8);
      const uint32_t words[2] = {v.x, v.y};
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if constexpr (is_chosen(F)) {
          const uint32_t even = chosen<F>(words[h]), odd = chosen<F>(words[h] >> 16);
#pragma unroll
          for (int s = 0; s < 4; s++) pairs[h][s] = __byte_perm(even, odd, s | (4 + s) << 8) & 0x00FF00FFu;
        } else if constexpr (left_up(F)) {
#pragma unroll
          for (int s = 0; s < 4; s++) pairs[h][s] = words[h] >> (s / 2 * 8) & (s % 2 ? 0x00F000F0u : 0x000F000Fu);
        } else {
#pragma unroll
          for (int s = 0; s < 4; s++) pairs[h][s] = words[h] >> (4 * s) & 0x000F000Fu;
        }
      }
    } else {
      const uint32_t word = read4(unit + (j / 4 * 32 + lane) * 16 + j % 4 * 4);
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int s = 0; s < 4; s++) pairs[h][s] = word >> (2 * (4 * h + s)) & 0x00030003u;
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int s = 0; s < 4; s++) {
        if constexpr (high_bits(F) > 0) pairs[h][s] |= upper(j, h, s);
        a[s / 2][s % 2 * 2 + h] = pairs[h][s];
      }
  }
};

}  // namespace gguf
