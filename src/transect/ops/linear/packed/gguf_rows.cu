// Y = X W^T + b for a few rows of X, bfloat16 in and out, float32 sums, and a weight in a block type of GGUF files as
// gguf_layout.py arranges it: units of 16 rows by 256 k, each in one piece, streamed once and decoded in registers.
//
// * Blocks take an even share of the sixteens of rows each, in groups of RB, and each group all along K. The warps of a
//   block take every so-many-th unit. A warp streams its own units and what belongs to them of X through its own ring of
//   buffers in shared memory; its parts of sums are added up when a group ends, always in the same order.
// * Codes become bfloat16 without arithmetic: a whole number c below 256 is the bits of c 2^-133, below the normal range,
//   and tensor cores multiply those exactly. X is taken 2^64 times, so sums are normal numbers.
// * Each group of columns that share a scale has a sum of its own, which begins at -offset times the sum of x: that is a
//   product too, with -offset everywhere. A minimum is multiplied by the sum of x, a product with 1 everywhere.
// * GATE: sixteens of a gate's rows and of the other factor's are in turn; Y [M, N / 2] is silu(one) times the other.
// * The first units may be asked for before the kernel that makes X has ended (``ahead``).

#include <cuda_fp16.h>

#include "../../lang/parts.cuh"
#include "../few_rows/small_rows.cuh"

#define TRANSECT_PARTS 8

namespace {

enum Type { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kMXFP4 };

constexpr int kUnitK = 256;
constexpr int kXPitch = 2 * kUnitK + 32;  // bytes of a row of X in a buffer: 16 lanes meet no bank twice

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
  return code_bytes(t) + scale_bytes(t) + (byte_scales(t) ? (has_minimum(t) ? 64 : 32) : 0);
}

__device__ __forceinline__ uint32_t read4(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
  return v;
}

__device__ __forceinline__ uint2 read8(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from));
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

  // a[q]: of the two products of 16 columns each the left operand.
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

// The copies of all but the last ``stages`` - 2 groups have come.
__device__ __forceinline__ void wait_stage(int stages) {
  if (stages == 2) wait_groups<0>();
  else if (stages == 3) wait_groups<1>();
  else wait_groups<2>();
}

template <Type F, int RB, int NT>
__global__ void __launch_bounds__(256, 1)
    gguf_rows(const __nv_bfloat16* x, const unsigned char* weight, const __nv_bfloat16* bias, __nv_bfloat16* out, int M,
              int N, int K, long long x_stride, int per, int row_tiles, int stages, int gate, int ahead) {
  constexpr int UNIT = unit_bytes(F), ROWS = NT * 8, COLUMNS = RB * 16, GROUPS = groups_of_32(F);
  constexpr bool BYTES = byte_scales(F), MINIMUM = has_minimum(F);
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int row_tile = blockIdx.x % row_tiles, share = blockIdx.x / row_tiles;
  const int m0 = row_tile * ROWS, rows = min(ROWS, M - m0);
  const int units = (K + kUnitK - 1) / kUnitK, sixteens = (N + 15) / 16;
  const int first = share * per, last = min(sixteens, first + per);
  const int groups = (last - first + RB - 1) / RB, steps = (units + warps - 1) / warps, total = groups * steps;
  const int stage_bytes = RB * UNIT + rows * kXPitch;
  float* sums = (float*)(memory + warps * stages * stage_bytes);
  const uint32_t ring = shared_address(memory) + warp * stages * stage_bytes;

  let_next_begin();
  if (!ahead) wait_for_previous();

  // Blocks begin at different units, or all would ask for the same lines of X at the same time.
  const int rotation = share % steps;
  auto unit_of = [&](int step) {
    const int rotated = step + rotation;
    return (rotated < steps ? rotated : rotated - steps) * warps + warp;
  };
  auto fetch_w = [&](int slot, int group, int step) {
    const int u = unit_of(step);
#pragma unroll
    for (int r = 0; r < RB; r++) {
      const int sixteen = first + group * RB + r;
      const bool inside = sixteen < last && u < units;
      const unsigned char* from = weight + ((size_t)min(sixteen, sixteens - 1) * units + min(u, units - 1)) * UNIT;
      const uint32_t to = ring + slot * stage_bytes + r * UNIT;
#pragma unroll
      for (int i = 0; i < (UNIT / 16 + 31) / 32; i++) {
        const int piece = i * 32 + lane;
        if (piece < UNIT / 16) copy16_once(to + piece * 16, from + piece * 16, inside);
      }
    }
  };
  auto fetch_x = [&](int slot, int step) {
    const int k = unit_of(step) * kUnitK + lane * 8;
    for (int row = 0; row < rows; row++)
      copy16(ring + slot * stage_bytes + RB * UNIT + row * kXPitch + lane * 16, x + (m0 + row) * x_stride + k, k < K);
  };
  int load_group = 0, load_step = 0;
  auto advance = [&] {
    if (++load_step == steps) load_step = 0, load_group++;
  };
  for (int s = 0; s < stages - 1; s++) {
    if (load_group < groups) fetch_w(s, load_group, load_step);
    advance();
  }
  if (ahead) wait_for_previous();
  for (int s = 0; s < stages - 1; s++) {
    if (s < total) fetch_x(s, s % steps);
    end_group();
  }

  const int g = lane / 4, c = lane % 4;
  uint32_t x_at[NT];  // rows past the end read the last one: what they give is not stored
#pragma unroll
  for (int tile = 0; tile < NT; tile++) x_at[tile] = RB * UNIT + min(tile * 8 + g, rows - 1) * kXPitch + c * 8;
  // The left operand that takes -offset times the sum of x, or 1 times.
  constexpr uint32_t EVERYWHERE = offset_of(F) ? (0x8000u | offset_of(F)) * 0x00010001u : 0x00010001u;
  const uint32_t everywhere[4] = {EVERYWHERE, EVERYWHERE, EVERYWHERE, EVERYWHERE};
  float acc[RB][NT][4] = {};
  int slot = 0, step = 0, group = 0;
  for (int i = 0; i < total; i++) {
    wait_stage(stages);
    __syncwarp();  // the copies of all lanes have landed, and all lanes have read the slot that is filled again now
    if (load_group < groups) {
      const int free = slot == 0 ? stages - 1 : slot - 1;
      fetch_w(free, load_group, load_step);
      fetch_x(free, load_step);
    }
    end_group();
    advance();
    const uint32_t from = ring + slot * stage_bytes;
    Codes<F> codes[RB];
    float own[RB][NT][4] = {}, below[RB][NT][4] = {};  // of this unit, where scales are bytes
#pragma unroll
    for (int r = 0; r < RB; r++) codes[r].begin(from + r * UNIT, lane);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      uint32_t b[NT][2][2];
      float sum[NT][GROUPS][4] = {};
#pragma unroll
      for (int tile = 0; tile < NT; tile++)
#pragma unroll
        for (int q = 0; q < 2; q++) {
          const uint2 v = read8(from + x_at[tile] + j * 64 + q * 32);
          b[tile][q][0] = times_2_64(v.x), b[tile][q][1] = times_2_64(v.y);
          if (offset_of(F) || MINIMUM) multiply(sum[tile][q * GROUPS / 2], everywhere, b[tile][q][0], b[tile][q][1]);
        }
#pragma unroll
      for (int r = 0; r < RB; r++) {
        const uint32_t unit = from + r * UNIT;
        uint32_t a[2][4];
        codes[r].get(a, unit, lane, j);
        float scale[GROUPS][2], minimum[GROUPS][2];
        const uint32_t at = unit + code_bytes(F) + (j * 8 + g) * (scale_bytes(F) / 64);
        if constexpr (BYTES) {
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
        auto& to = BYTES ? own : acc;
        auto& to_below = BYTES ? below : acc;
#pragma unroll
        for (int tile = 0; tile < NT; tile++)
#pragma unroll
          for (int s = 0; s < GROUPS; s++) {
            float t[4] = {};
            if (offset_of(F)) {
#pragma unroll
              for (int e = 0; e < 4; e++) t[e] = sum[tile][s][e];
            }
#pragma unroll
            for (int q = s * 2 / GROUPS; q < (s + 1) * 2 / GROUPS; q++)
              multiply(t, a[q], b[tile][q][0], b[tile][q][1]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
              to[r][tile][e] += scale[s][e / 2] * t[e];
              if (MINIMUM) to_below[r][tile][e] += minimum[s][e / 2] * sum[tile][s][e];
            }
          }
      }
    }
    if constexpr (BYTES) {
#pragma unroll
      for (int r = 0; r < RB; r++) {
        const uint32_t at = from + r * UNIT + code_bytes(F) + scale_bytes(F) + g * (MINIMUM ? 8 : 4);
        const float2 d = two_floats<false>(read4(at));
        const float2 less = MINIMUM ? two_floats<false>(read4(at + 4)) : make_float2(0, 0);
#pragma unroll
        for (int tile = 0; tile < NT; tile++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            acc[r][tile][e] += (e / 2 ? d.y : d.x) * own[r][tile][e];
            if (MINIMUM) acc[r][tile][e] -= (e / 2 ? less.y : less.x) * below[r][tile][e];
          }
      }
    }
    slot = slot + 1 == stages ? 0 : slot + 1;
    if (++step < steps) continue;
    leave_sums(sums + warp * ROWS * kPitch<COLUMNS>, acc, lane);
    const int n0 = (first + group * RB) * 16;
    if (gate) {
      __syncthreads();
      for (int n = threadIdx.x; n < rows * COLUMNS / 2; n += blockDim.x) {
        const int m = n / (COLUMNS / 2), column = n % (COLUMNS / 2);
        const float* at = sums + m * kPitch<COLUMNS> + column / 16 * 32 + column % 16;
        float one = 0, other = 0;
        for (int w = 0; w < warps; w++) {
          one += at[w * ROWS * kPitch<COLUMNS>];
          other += at[w * ROWS * kPitch<COLUMNS> + 16];
        }
        one *= 0x1p69f, other *= 0x1p69f;
        if (n0 / 2 + column < last * 8)
          out[(size_t)(m0 + m) * (N / 2) + n0 / 2 + column] = __float2bfloat16(__fdividef(one, 1 + __expf(-one)) * other);
      }
    } else {
      add_warps<ROWS, COLUMNS>(sums, m0, n0, M, min(N, last * 16), warps, [&](int m, int n, float v) {
        v *= 0x1p69f;
        if (bias) v += __bfloat162float(bias[n]);
        out[(size_t)m * N + n] = __float2bfloat16(v);
      });
    }
    __syncthreads();
    step = 0;
    group++;
  }
}

template <Type F, int RB, int NT>
int start_rows(const void* x, const void* weight, const void* bias, void* out, int M, int N, int K, long long x_stride,
               int per, int warps, int stages, int gate, int dependent, void* stream) {
  constexpr int ROWS = NT * 8, COLUMNS = RB * 16;
  const int shares = ((N + 15) / 16 + per - 1) / per, row_tiles = (M + ROWS - 1) / ROWS, rows = M < ROWS ? M : ROWS;
  const int shared =
      warps * (stages * (RB * unit_bytes(F) + rows * kXPitch) + ROWS * kPitch<COLUMNS> * (int)sizeof(float));
  if (shared > kMostShared) return -1;
  return (int)launch(gguf_rows<F, RB, NT>, shares * row_tiles, warps * 32, shared, 1, dependent > 0, stream,
                     (const __nv_bfloat16*)x, (const unsigned char*)weight, (const __nv_bfloat16*)bias,
                     (__nv_bfloat16*)out, M, N, K, x_stride, per, row_tiles, stages, gate, (int)(dependent > 1));
}

}  // namespace

// x [M, K] bfloat16 with x_stride elements between rows, on 16 bytes, K and x_stride multiples of 8. weight: the units of
// a type (its number in ``FORMATS``), N / 16 down by K / 256 across, both rounded up. bias [N] or null, out [M, N], with a
// gate [M, N / 2]. rb: sixteens in a group, 1 or 2; per: in a block, of whole groups. warps 4 or 8; stages 2 to 4.
// ``gate``: N is a multiple of 32, rb 2, and there is no bias. ``dependent``: 0 an ordinary launch, 1 a dependent one, 2
// one that reads the weight before the kernel before has ended. Returns a cudaError_t, or -1 for what it does not take.
extern "C" int transect_gguf_rows(const void* x, const void* weight, const void* bias, void* out, int M, int N, int K,
                                  long long x_stride, int type, int rb, int per, int warps, int stages, int gate,
                                  int dependent, void* stream) {
  if (M < 1 || N < 1 || K < 8 || K % 8 || x_stride % 8 || rb < 1 || rb > 2 || per < rb || per % rb || stages < 2 ||
      stages > 4 || (warps != 4 && warps != 8) || (gate && (N % 32 || rb != 2 || bias)))
    return -1;
#define TRANSECT_START(F, RB, NT)                                                                                   \
  if (type == F && rb == RB && (M <= 8) == (NT == 1))                                                               \
    return TRANSECT_HERE(start_rows<F, RB, NT>(x, weight, bias, out, M, N, K, x_stride, per, warps, stages, gate, \
                                               dependent, stream));
  TRANSECT_START(kQ4_0, 1, 1)
  TRANSECT_START(kQ4_0, 1, 2)
  TRANSECT_START(kQ4_0, 2, 1)
  TRANSECT_START(kQ4_0, 2, 2)
  TRANSECT_START(kQ4_1, 1, 1)
  TRANSECT_START(kQ4_1, 1, 2)
  TRANSECT_START(kQ4_1, 2, 1)
  TRANSECT_START(kQ4_1, 2, 2)
  TRANSECT_START(kQ5_0, 1, 1)
  TRANSECT_START(kQ5_0, 1, 2)
  TRANSECT_START(kQ5_0, 2, 1)
  TRANSECT_START(kQ5_0, 2, 2)
  TRANSECT_START(kQ5_1, 1, 1)
  TRANSECT_START(kQ5_1, 1, 2)
  TRANSECT_START(kQ5_1, 2, 1)
  TRANSECT_START(kQ5_1, 2, 2)
  TRANSECT_START(kQ8_0, 1, 1)
  TRANSECT_START(kQ8_0, 1, 2)
  TRANSECT_START(kQ8_0, 2, 1)
  TRANSECT_START(kQ8_0, 2, 2)
  TRANSECT_START(kQ2_K, 1, 1)
  TRANSECT_START(kQ2_K, 1, 2)
  TRANSECT_START(kQ2_K, 2, 1)
  TRANSECT_START(kQ2_K, 2, 2)
  TRANSECT_START(kQ3_K, 1, 1)
  TRANSECT_START(kQ3_K, 1, 2)
  TRANSECT_START(kQ3_K, 2, 1)
  TRANSECT_START(kQ3_K, 2, 2)
  TRANSECT_START(kQ4_K, 1, 1)
  TRANSECT_START(kQ4_K, 1, 2)
  TRANSECT_START(kQ4_K, 2, 1)
  TRANSECT_START(kQ4_K, 2, 2)
  TRANSECT_START(kQ5_K, 1, 1)
  TRANSECT_START(kQ5_K, 1, 2)
  TRANSECT_START(kQ5_K, 2, 1)
  TRANSECT_START(kQ5_K, 2, 2)
  TRANSECT_START(kQ6_K, 1, 1)
  TRANSECT_START(kQ6_K, 1, 2)
  TRANSECT_START(kQ6_K, 2, 1)
  TRANSECT_START(kQ6_K, 2, 2)
  TRANSECT_START(kIQ4_NL, 1, 1)
  TRANSECT_START(kIQ4_NL, 1, 2)
  TRANSECT_START(kIQ4_NL, 2, 1)
  TRANSECT_START(kIQ4_NL, 2, 2)
  TRANSECT_START(kMXFP4, 1, 1)
  TRANSECT_START(kMXFP4, 1, 2)
  TRANSECT_START(kMXFP4, 2, 1)
  TRANSECT_START(kMXFP4, 2, 2)
  return -1;
}
