// Y = X W^T + b for 9 to 64 rows of X at a time on GPUs since Ampere, bfloat16 in and out, float32 sums, by tiles of 256 rows
// of a packed W: what does not depend on how weights are held. ``Codes`` says that (int4_portable.cu, scaled8_portable.cu).
//
// * A block has NT eights of rows of X, which all its warps share, and each of 8 warps two sixteens of rows of W, which it
//   decodes to bfloat16 once. Spans of kSpan k of both come into one ring.
// * Blocks may share K: each leaves its part of the sums in ``parts``, as its threads hold them, and the last to arrive at
//   a tile adds all of them, in the order of the parts.
// * With a gate, the two sixteens of a warp are a gate's and the other factor's; Y [M, N / 2] is silu(one) times the other.

#pragma once

#include "../../lang/few_rows.cuh"

namespace portable_tiles {

using namespace few_rows;

constexpr int kWarps = 8, kThreads = kWarps * 32, kSixteens = 2 * kWarps;  // sixteens of rows of W in a tile

__device__ __forceinline__ uint32_t fused(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t v;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}

__device__ __forceinline__ uint32_t twice(float v) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(v, v);
  return *(const uint32_t*)&both;
}

__device__ __forceinline__ void wait_for_stage(int stages) {
  if (stages <= 2) wait_groups<0>();
  else if (stages == 3) wait_groups<1>();
  else wait_groups<2>();
}

template <class Codes, int NT>
constexpr int kStage = Codes::kBytes + NT * 8 * Codes::kSpan * 2;

template <class Codes, int NT>
__global__ void __launch_bounds__(kThreads, 1)
    run(const __nv_bfloat16* x, Codes weight, const __nv_bfloat16* bias, __nv_bfloat16* out, float4* parts,
        unsigned* counters, int M, int N, int K, long long x_stride, int row_tiles, int split, int stages, int gate) {
  constexpr int ROWS = NT * 8, SPAN = Codes::kSpan, STAGE = kStage<Codes, NT>;
  constexpr int PIECES = SPAN / 8, AT_ONCE = kThreads / PIECES;  // of a row of X; rows that the threads bring at once
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sixteens = (N + 15) / 16, tiles = (sixteens + kSixteens - 1) / kSixteens;
  const int tile_n = blockIdx.x % tiles, tile_m = blockIdx.x / tiles % row_tiles, part = blockIdx.x / (tiles * row_tiles);
  unsigned* counter = counters + tile_m * tiles + tile_n;
  const int m0 = tile_m * ROWS, rows = min(ROWS, M - m0), first = tile_n * kSixteens;
  const int spans = K / SPAN, begin = (int)((long long)spans * part / split);
  const int total = (int)((long long)spans * (part + 1) / split) - begin;
  const uint32_t ring = shared_address(memory);

  let_next_begin();
  wait_for_previous();
  // Each thread brings the same pieces of every span. Rows past the end are left as they are: their sums are not stored.
  const int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
  typename Codes::Source source(weight, N, K, first, begin, gate);
  const __nv_bfloat16* x_from = x + (m0 + row) * x_stride + (size_t)begin * SPAN + piece * 8;
  const long long rows_on = AT_ONCE * x_stride;
  const uint32_t x_to = ring + Codes::kBytes + row * SPAN * 2 + Codes::place(row, piece) * 16;
  auto fetch = [&](int slot) {
    source.fetch(ring + slot * STAGE);
#pragma unroll
    for (int i = 0; i * AT_ONCE < ROWS; i++)
      if (i * AT_ONCE + row < rows) copy16(x_to + slot * STAGE + i * AT_ONCE * SPAN * 2, x_from + i * rows_on, true);
    x_from += SPAN;
  };
  for (int s = 0; s < stages - 1; s++) {
    if (s < total) fetch(s);
    end_group();
  }
  float acc[2][NT][4] = {};
  int slot = 0;
  for (int step = 0; step < total; step++) {
    wait_for_stage(stages);
    __syncthreads();  // all copies of this span have landed, and the slot that is filled again has been read
    const uint32_t from = ring + slot * STAGE;
    typename Codes::Values values;
#pragma unroll
    for (int at = 0; at < SPAN / 32; at++) {
      uint32_t a[2][2][4];  // of both sixteens, of 16 k each
      values.decode(a, from, warp, at, lane);
#pragma unroll
      for (int tile = 0; tile < NT; tile++) {
        uint32_t b[4];
        Codes::read_x(b, from + Codes::kBytes + tile * 8 * SPAN * 2, at, lane);
#pragma unroll
        for (int r = 0; r < 2; r++) multiply(acc[r][tile], a[r][0], b[0], b[1]);
#pragma unroll
        for (int r = 0; r < 2; r++) multiply(acc[r][tile], a[r][1], b[2], b[3]);
      }
      if (at == 0) {  // beside products, which need no instructions for a while
        if (step + stages - 1 < total) fetch(slot == 0 ? stages - 1 : slot - 1);
        end_group();
      }
    }
    slot = slot + 1 == stages ? 0 : slot + 1;
  }
  if (split > 1) {
    constexpr int EACH_PART = 2 * NT * kThreads, AT_A_TIME = NT > 2 ? 1 : 2;
    float4* tile_parts = parts + (size_t)(tile_m * tiles + tile_n) * split * EACH_PART + threadIdx.x;
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) {
      const float* v = acc[i / NT][i % NT];
      __stcg(tile_parts + (size_t)part * EACH_PART + i * kThreads, make_float4(v[0], v[1], v[2], v[3]));
    }
    unsigned* arrived = (unsigned*)memory;
    __threadfence();
    __syncthreads();  // also: the ring has been read
    if (threadIdx.x == 0) *arrived = atomicAdd(counter, 1u);
    __syncthreads();
    if (*arrived != (unsigned)split - 1) return;
    if (threadIdx.x == 0) *counter = 0;  // ready for the next launch
    __threadfence();
#pragma unroll
    for (int i = 0; i < 8 * NT; i++) acc[i / 4 / NT][i / 4 % NT][i % 4] = 0;
    for (int p = 0; p < split; p += AT_A_TIME) {
      float4 v[AT_A_TIME][2 * NT];
#pragma unroll
      for (int j = 0; j < AT_A_TIME; j++)
#pragma unroll
        for (int i = 0; i < 2 * NT; i++)
          v[j][i] = p + j < split ? __ldcg(tile_parts + (size_t)(p + j) * EACH_PART + i * kThreads) : make_float4(0, 0, 0, 0);
#pragma unroll
      for (int j = 0; j < AT_A_TIME; j++)
#pragma unroll
        for (int i = 0; i < 2 * NT; i++) {
          float* sum = acc[i / NT][i % NT];
          sum[0] += v[j][i].x, sum[1] += v[j][i].y, sum[2] += v[j][i].z, sum[3] += v[j][i].w;
        }
    }
  }
  // Element c of a tile: row of X m0 + 8 tile + 2 (lane % 4) + c % 2, row lane / 4 + 8 (c / 2) of a sixteen of W.
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int own = half * 8 + lane / 4;
    if (gate) {
      const int n = (tile_n * kWarps + warp) * 16 + own;
      if (n >= N / 2) continue;
      const float factor = weight.factor(n, N, gate, 0), other = weight.factor(n, N, gate, 1);
#pragma unroll
      for (int i = 0; i < 2 * NT; i++) {
        const int m = m0 + i / 2 * 8 + lane % 4 * 2 + i % 2;
        const float one = acc[0][i / 2][half * 2 + i % 2] * factor, two = acc[1][i / 2][half * 2 + i % 2] * other;
        if (m < M) out[(size_t)m * (N / 2) + n] = __float2bfloat16(one / (1 + __expf(-one)) * two);
      }
      continue;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int n = (first + warp * 2 + r) * 16 + own;
      if (n >= N) continue;
      const float factor = weight.factor(n, N, gate, r), more = bias ? __bfloat162float(bias[n]) : 0.f;
#pragma unroll
      for (int i = 0; i < 2 * NT; i++) {
        const int m = m0 + i / 2 * 8 + lane % 4 * 2 + i % 2;
        if (m < M) out[(size_t)m * N + n] = __float2bfloat16(acc[r][i / 2][half * 2 + i % 2] * factor + more);
      }
    }
  }
}

template <class Codes, int NT>
int start(const Codes& weight, const void* x, const void* bias, void* out, void* parts, void* counters, int M, int N, int K,
          long long x_stride, int split, int stages, int gate, int dependent, void* stream) {
  constexpr int ROWS = NT * 8;
  const int tiles = ((N + 15) / 16 + kSixteens - 1) / kSixteens, row_tiles = (M + ROWS - 1) / ROWS;
  const int shared = stages * kStage<Codes, NT>;
  if (shared > kMostShared) return -1;
  return (int)launch(run<Codes, NT>, tiles * row_tiles * split, kThreads, shared, 1, dependent > 0, stream,
                     (const __nv_bfloat16*)x, weight, (const __nv_bfloat16*)bias, (__nv_bfloat16*)out, (float4*)parts,
                     (unsigned*)counters, M, N, K, x_stride, row_tiles, split, stages, gate);
}

// By tiles of ``tiles`` eights of rows of X, 1, 2, 4 or 8.
template <class Codes>
int start_tiles(const Codes& weight, int tiles, const void* x, const void* bias, void* out, void* parts,
                void* counters, int M, int N, int K, long long x_stride, int split, int stages, int gate, int dependent,
                void* stream) {
  if (M < 1 || N < 1 || K < Codes::kSpan || K % Codes::kSpan || x_stride % 8 || stages < 2 || stages > 4 || split < 1 ||
      split > K / Codes::kSpan || (split > 1 && (!parts || !counters)) || (gate && (N % 32 || bias)))
    return -1;
#define TRANSECT_TILES(NT)                                                                                            \
  if (tiles == NT)                                                                                                    \
    return start<Codes, NT>(weight, x, bias, out, parts, counters, M, N, K, x_stride, split, stages, gate, dependent, \
                            stream);
  TRANSECT_TILES(1)
  TRANSECT_TILES(2)
  TRANSECT_TILES(4)
  TRANSECT_TILES(8)
#undef TRANSECT_TILES
  return -1;
}

}  // namespace portable_tiles
