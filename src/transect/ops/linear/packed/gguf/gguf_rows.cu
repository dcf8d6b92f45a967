// Y = X W^T + b for a few rows of X, bfloat16 in and out, float32 sums, and a weight in a block type of GGUF files as
// gguf_layout.py arranges it: units of 16 rows by 256 k, each in one piece, streamed once and decoded in registers.
//
// * Blocks take an even share of the sixteens of rows each, in groups of RB for each of their ``teams`` of warps, and
//   each group all along K. The warps of a team take every so-many-th unit. A warp streams its own units and what belongs
//   to them of X through its own ring of buffers in shared memory; its parts of sums are added up when a group ends,
//   always in the same order. So the more teams there are, the fewer ends of groups, at which all warps wait.
// * Codes enter the products as they are (gguf_codes.cuh), c 2^-133: tensor cores multiply those exactly. X is taken 2^64
//   times, so sums are normal numbers.
// * Each group of columns that share a scale has a sum of its own, which begins at -offset times the sum of x: that is a
//   product too, with -offset everywhere. A minimum is multiplied by the sum of x, a product with 1 everywhere. Where
//   minima are bytes of groups of 32, one product does that for the eight groups of a unit at once, with their sums in two
//   bfloat16 each.
// * GATE: sixteens of a gate's rows and of the other factor's are in turn; Y [M, N / 2] is silu(one) times the other.
// * The first units may be asked for before the kernel that makes X has ended (``ahead``).

#include "../../../lang/parts.cuh"
#include "../../few_rows/small_rows.cuh"
#include "gguf_codes.cuh"

#define TRANSECT_PARTS 8

using namespace gguf;

namespace {

constexpr int kXPitch = 2 * kUnitK + 16;  // bytes of a row of X in a buffer: the 8 rows of a matrix meet no bank twice

// Two bfloat16 times a power of two, given in its bits.
template <uint32_t POWER>
__device__ __forceinline__ uint32_t times(uint32_t pair) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(pair), "r"(POWER * 0x00010001u), "r"(0x80008000u));
  return product;
}

// The copies of all but the last ``stages`` - 2 groups have come.
__device__ __forceinline__ void wait_stage(int stages) {
  if (stages == 2) wait_groups<0>();
  else if (stages == 3) wait_groups<1>();
  else wait_groups<2>();
}

template <Type F, int RB, int NT>
__global__ void __launch_bounds__(512, 1)
    gguf_rows(const __nv_bfloat16* x, const unsigned char* weight, const __nv_bfloat16* bias, __nv_bfloat16* out, int M,
              int N, int K, long long x_stride, int per, int row_tiles, int teams, int stages, int gate, int ahead) {
  constexpr int UNIT = unit_bytes(F), ROWS = NT * 8, COLUMNS = RB * 16, GROUPS = groups_of_32(F);
  constexpr bool BYTES = byte_scales(F), MINIMUM = has_minimum(F), AT_ONCE = BYTES && MINIMUM && GROUPS == 1;
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int row_tile = blockIdx.x % row_tiles, share = blockIdx.x / row_tiles;
  const int m0 = row_tile * ROWS, rows = min(ROWS, M - m0);
  const int units = (K + kUnitK - 1) / kUnitK, sixteens = (N + 15) / 16;
  const int first = share * per, last = min(sixteens, first + per);
  const int team = warp % teams, taker = warp / teams, takers = warps / teams, wide = teams * RB;  // sixteens of a group
  const int groups = (last - first + wide - 1) / wide, steps = (units + takers - 1) / takers, total = groups * steps;
  const int stage_bytes = RB * UNIT + rows * kXPitch;
  float* sums = (float*)(memory + warps * stages * stage_bytes);
  const uint32_t ring = shared_address(memory) + warp * stages * stage_bytes;

  let_next_begin();
  if (!ahead) wait_for_previous();

  // Blocks begin at different units, or all would ask for the same lines of X at the same time.
  const int rotation = share % steps;
  auto unit_of = [&](int step) {
    const int rotated = step + rotation;
    return (rotated < steps ? rotated : rotated - steps) * takers + taker;
  };
  auto fetch_w = [&](int slot, int group, int step) {
    const int u = unit_of(step);
#pragma unroll
    for (int r = 0; r < RB; r++) {
      const int sixteen = first + group * wide + team * RB + r;
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
  for (int tile = 0; tile < NT; tile++) x_at[tile] = RB * UNIT + min(tile * 8 + lane % 8, rows - 1) * kXPitch + lane / 8 * 16;
  // The left operand that takes -offset times the sum of x, or 1 times.
  constexpr uint32_t EVERYWHERE = offset_of(F) ? (0x8000u | offset_of(F)) * 0x00010001u : 0x00010001u;
  constexpr uint32_t ABOVE = left_up(F) ? (EVERYWHERE & 0x80008000u) | (EVERYWHERE & 0x00FF00FFu) << 4 : EVERYWHERE;
  const uint32_t everywhere[4] = {EVERYWHERE, EVERYWHERE, ABOVE, ABOVE};
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
    float sums_of_x[NT][2][4] = {};                    // AT_ONCE: row j is of columns 32 j on
#pragma unroll
    for (int r = 0; r < RB; r++) codes[r].begin(from + r * UNIT, lane);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      uint32_t b[NT][2][2];
      float sum[NT][GROUPS][4] = {};
#pragma unroll
      for (int tile = 0; tile < NT; tile++) {
        uint32_t v[4];
        read_matrices(v, from + x_at[tile] + j * 64);
#pragma unroll
        for (int q = 0; q < 2; q++) {
          b[tile][q][0] = times<0x5F80u>(v[2 * q]);
          b[tile][q][1] = times<left_up(F) ? 0x5D80u : 0x5F80u>(v[2 * q + 1]);  // 2^60, where codes stand for 16 c
          if constexpr (AT_ONCE) {
            const uint32_t in_row[4] = {g == j ? EVERYWHERE : 0, 0, g == j ? ABOVE : 0, 0};
            multiply(sums_of_x[tile][q], in_row, b[tile][q][0], b[tile][q][1]);
          } else if (offset_of(F) || MINIMUM) {
            multiply(sum[tile][q * GROUPS / 2], everywhere, b[tile][q][0], b[tile][q][1]);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < RB; r++) {
        const uint32_t unit = from + r * UNIT;
        uint32_t a[2][4];
        codes[r].get(a, unit, lane, j);
        float scale[GROUPS][2], minimum[GROUPS][2];
        read_scales<F>(scale, minimum, unit, g, j);
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
              if (MINIMUM && !AT_ONCE) to_below[r][tile][e] += minimum[s][e / 2] * sum[tile][s][e];
            }
          }
      }
    }
    if constexpr (AT_ONCE) {
      uint32_t high[NT], low[NT];  // 2^51 times the sums, and what rounding takes off: groups as k, rows of X as columns
#pragma unroll
      for (int tile = 0; tile < NT; tile++) {
        const float(&v)[2][4] = sums_of_x[tile];
        const float one = (v[0][0] + v[1][0]) * 0x1p120f, other = (v[0][1] + v[1][1]) * 0x1p120f;
        const uint32_t rounded = hopper::pack(one, other);
        high[tile] = hopper::transposed(rounded);
        low[tile] = hopper::transposed(
            hopper::pack(one - __uint_as_float(rounded << 16), other - __uint_as_float(rounded & 0xFFFF0000u)));
      }
#pragma unroll
      for (int r = 0; r < RB; r++) {
        const uint32_t at = from + r * UNIT + code_bytes(F) + (2 * c * 8 + g) * 4;  // of groups 2 c and 2 c + 1
        const uint32_t minima = __byte_perm(read4(at), read4(at + 32), 0x7632);
        const uint32_t a[4] = {minima & 0x00FF00FFu, minima >> 8 & 0x00FF00FFu, minima & 0x00FF00FFu,
                               minima >> 8 & 0x00FF00FFu};
#pragma unroll
        for (int tile = 0; tile < NT; tile++) multiply(below[r][tile], a, high[tile], low[tile]);
      }
    }
    if constexpr (BYTES) {
#pragma unroll
      for (int r = 0; r < RB; r++) {
        float2 d, less;
        read_behind<F>(d, less, from + r * UNIT, g);
        if (AT_ONCE) less.x *= 0x1p13f, less.y *= 0x1p13f;  // 2^-69 of all sums, 2^-133 2^51 of these
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
    __syncthreads();
    // A sixteen of the group, one of its rows, and a row of X: the parts of the warps that shared its K.
    const int n0 = (first + group * wide) * 16, across = wide * 16;
    auto added = [&](int m, int sixteen, int row) {
      const float* at = sums + (sixteen / RB * ROWS + m) * kPitch<COLUMNS> + sixteen % RB * 16 + row;
      float sum = 0;
#pragma unroll 4
      for (int w = 0; w < takers; w++) sum += at[w * teams * ROWS * kPitch<COLUMNS>];
      return sum * 0x1p69f;
    };
    if (gate) {
      for (int i = threadIdx.x; i < rows * across / 2; i += blockDim.x) {
        const int m = i / (across / 2), n = i % (across / 2);
        if (n0 / 2 + n >= last * 8) continue;
        const float one = added(m, n / 16 * 2, n % 16), other = added(m, n / 16 * 2 + 1, n % 16);
        out[(size_t)(m0 + m) * (N / 2) + n0 / 2 + n] = __float2bfloat16(__fdividef(one, 1 + __expf(-one)) * other);
      }
    } else {
      for (int i = threadIdx.x; i < rows * across; i += blockDim.x) {
        const int m = i / across, n = i % across;
        if (n0 + n >= min(N, last * 16)) continue;
        float v = added(m, n / 16, n % 16);
        if (bias) v += __bfloat162float(bias[n0 + n]);
        out[(size_t)(m0 + m) * N + n0 + n] = __float2bfloat16(v);
      }
    }
    __syncthreads();
    step = 0;
    group++;
  }
}

template <Type F, int RB, int NT>
int start_rows(const void* x, const void* weight, const void* bias, void* out, int M, int N, int K, long long x_stride,
               int per, int warps, int teams, int stages, int gate, int dependent, void* stream) {
  constexpr int ROWS = NT * 8, COLUMNS = RB * 16;
  const int shares = ((N + 15) / 16 + per - 1) / per, row_tiles = (M + ROWS - 1) / ROWS, rows = M < ROWS ? M : ROWS;
  const int shared =
      warps * (stages * (RB * unit_bytes(F) + rows * kXPitch) + ROWS * kPitch<COLUMNS> * (int)sizeof(float));
  if (shared > kMostShared) return -1;
  return (int)launch(gguf_rows<F, RB, NT>, shares * row_tiles, warps * 32, shared, 1, dependent > 0, stream,
                     (const __nv_bfloat16*)x, (const unsigned char*)weight, (const __nv_bfloat16*)bias,
                     (__nv_bfloat16*)out, M, N, K, x_stride, per, row_tiles, teams, stages, gate, (int)(dependent > 1));
}

}  // namespace

// x [M, K] bfloat16 with x_stride elements between rows, on 16 bytes, K and x_stride multiples of 8. weight: the units of
// a type (its number in ``FORMATS``), N / 16 down by K / 256 across, both rounded up. bias [N] or null, out [M, N], with a
// gate [M, N / 2]. rb: sixteens of a warp, 1 or 2; per: in a block. warps: 4, 8, 12 or 16, in ``teams`` of equal size;
// stages 2 to 4. ``gate``: N is a multiple of 32, per and rb teams are even, and there is no bias. ``dependent``: 0 an ordinary launch, 1 a dependent one, 2
// one that reads the weight before the kernel before has ended. Returns a cudaError_t, or -1 for what it does not take.
extern "C" int transect_gguf_rows(const void* x, const void* weight, const void* bias, void* out, int M, int N, int K,
                                  long long x_stride, int type, int rb, int per, int warps, int teams, int stages, int gate,
                                  int dependent, void* stream) {
  if (M < 1 || N < 1 || K < 8 || K % 8 || x_stride % 8 || rb < 1 || rb > 2 || per < 1 || stages < 2 || stages > 4 ||
      warps < 4 || warps > 16 || warps % 4 || teams < 1 || warps % teams ||
      (gate && (N % 32 || rb * teams % 2 || per % 2 || bias)))
    return -1;
#define TRANSECT_START(F, RB)                                                                                       \
  if (type == F && rb == RB)                                                                                        \
    return TRANSECT_HERE(start_rows<F, RB, 1>(x, weight, bias, out, M, N, K, x_stride, per, warps, teams, stages,  \
                                               gate, dependent, stream));
  TRANSECT_START(kQ4_0, 1)
  TRANSECT_START(kQ4_0, 2)
  TRANSECT_START(kQ4_1, 1)
  TRANSECT_START(kQ4_1, 2)
  TRANSECT_START(kQ5_0, 1)
  TRANSECT_START(kQ5_0, 2)
  TRANSECT_START(kQ5_1, 1)
  TRANSECT_START(kQ5_1, 2)
  TRANSECT_START(kQ8_0, 1)
  TRANSECT_START(kQ8_0, 2)
  TRANSECT_START(kQ2_K, 1)
  TRANSECT_START(kQ2_K, 2)
  TRANSECT_START(kQ3_K, 1)
  TRANSECT_START(kQ3_K, 2)
  TRANSECT_START(kQ4_K, 1)
  TRANSECT_START(kQ4_K, 2)
  TRANSECT_START(kQ5_K, 1)
  TRANSECT_START(kQ5_K, 2)
  TRANSECT_START(kQ6_K, 1)
  TRANSECT_START(kQ6_K, 2)
  TRANSECT_START(kIQ4_NL, 1)
  TRANSECT_START(kIQ4_NL, 2)
  TRANSECT_START(kMXFP4, 1)
  TRANSECT_START(kMXFP4, 2)
  return -1;
}
