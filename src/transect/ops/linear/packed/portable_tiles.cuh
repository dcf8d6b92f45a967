// Y = X W^T + b for 9 to 64 rows of X at a time on GPUs since Ampere, bfloat16 in and out, float32 sums, by tiles of 256 rows
// of a packed W: what does not depend on how weights are held. ``Codes`` says that (int4_portable.cu, scaled8_portable.cu).
//
// * A block has NT eights of rows of X, which all its warps share, and each of 8 warps two sixteens of rows of W, which it
//   decodes to bfloat16 once. Spans of kSpan k of both come into one ring.
// * The spans of all tiles stand in one row, of which each block takes an even share. Of a tile that several share, each
//   leaves its part of the sums in ``parts``, as its threads hold them, and the last to arrive there adds all of them, in
//   the order of the blocks. Meanwhile the spans of a block's next tile come.
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

// Element c of acc[r][t]: row of X 8 t + 2 (lane % 4) + c % 2, row lane / 4 + 8 (c / 2) of sixteen r of a warp's.
template <int NT, class Codes>
__device__ __forceinline__ void write_tile(const float (&acc)[2][NT][4], const Codes& weight, const __nv_bfloat16* bias,
                                           __nv_bfloat16* out, int tile_n, int m0, int M, int N, int gate, int warp,
                                           int lane) {
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
      const int n = (tile_n * kSixteens + warp * 2 + r) * 16 + own;
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
__global__ void __launch_bounds__(kThreads, 1)
    run(const __nv_bfloat16* x, Codes weight, const __nv_bfloat16* bias, __nv_bfloat16* out, float4* parts,
        unsigned* counters, int M, int N, int K, long long x_stride, int row_tiles, int stages, int gate) {
  constexpr int ROWS = NT * 8, SPAN = Codes::kSpan, STAGE = kStage<Codes, NT>, EACH_PART = 2 * NT * kThreads;
  constexpr int PIECES = SPAN / 8, AT_ONCE = kThreads / PIECES;  // of a row of X; rows that the threads bring at once
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tiles = (N + kSixteens * 16 - 1) / (kSixteens * 16), spans = K / SPAN;
  const unsigned units = tiles * row_tiles * spans;  // blocks are so few that the product fits
  auto begin_of = [&](int block) { return (int)(units * block / gridDim.x); };
  const int begin = begin_of(blockIdx.x), total = begin_of(blockIdx.x + 1) - begin;
  const uint32_t ring = shared_address(memory);

  let_next_begin();
  wait_for_previous();
  // Each thread brings the same pieces of every span. Rows past the end are left as they are: their sums are not stored.
  const int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
  const long long rows_on = AT_ONCE * x_stride;
  const uint32_t x_to = ring + Codes::kBytes + row * SPAN * 2 + Codes::place(row, piece) * 16;
  typename Codes::Source source;
  const __nv_bfloat16* x_from;
  int rows, load_tile = begin / spans, load_span = begin % spans;
  auto aim = [&] {
    const int m = load_tile / tiles * ROWS;
    rows = min(ROWS, M - m) - row;
    x_from = x + (m + row) * x_stride + (size_t)load_span * SPAN + piece * 8;
    source.aim(weight, N, K, load_tile % tiles * kSixteens, load_span, gate);
  };
  auto fetch = [&](int slot) {
    if (load_span == spans) load_tile++, load_span = 0, aim();
    source.fetch(ring + slot * STAGE);
#pragma unroll
    for (int i = 0; i * AT_ONCE < ROWS; i++)
      if (i * AT_ONCE < rows) copy16(x_to + slot * STAGE + i * AT_ONCE * SPAN * 2, x_from + i * rows_on, true);
    x_from += SPAN, load_span++;
  };
  aim();
  for (int s = 0; s < stages - 1; s++) {
    if (s < total) fetch(s);
    end_group();
  }
  float acc[2][NT][4] = {};
  int slot = 0, tile = begin / spans, span = begin % spans;
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
      for (int t = 0; t < NT; t++) {
        uint32_t b[4];
        Codes::read_x(b, from + Codes::kBytes + t * 8 * SPAN * 2, at, lane);
#pragma unroll
        for (int r = 0; r < 2; r++) multiply(acc[r][t], a[r][0], b[0], b[1]);
#pragma unroll
        for (int r = 0; r < 2; r++) multiply(acc[r][t], a[r][1], b[2], b[3]);
      }
      if (at == 0) {  // beside products, which need no instructions for a while
        if (step + stages - 1 < total) fetch(slot == 0 ? stages - 1 : slot - 1);
        end_group();
      }
    }
    const int own = slot;
    slot = slot + 1 == stages ? 0 : slot + 1;
    if (++span < spans && step + 1 < total) continue;

    const bool whole = span == spans && step + 1 >= spans;
    bool last = true;
    if (!whole) {
      // A block leaves at most two parts: of the tile at which its share begins, and of another one.
      auto part_of = [&](int block) {
        return parts + (size_t)(2 * block + (begin_of(block) < tile * spans)) * EACH_PART + threadIdx.x;
      };
      int first_block = blockIdx.x, last_block = blockIdx.x;
      while (begin_of(first_block) > tile * spans) first_block--;
      while (begin_of(last_block + 1) < (tile + 1) * spans) last_block++;
#pragma unroll
      for (int i = 0; i < 2 * NT; i++) {
        const float* v = acc[i / NT][i % NT];
        __stcg(part_of(blockIdx.x) + i * kThreads, make_float4(v[0], v[1], v[2], v[3]));
      }
      unsigned* arrived = (unsigned*)(memory + own * STAGE);
      __threadfence();
      __syncthreads();  // also: the slot has been read
      if (threadIdx.x == 0) *arrived = atomicAdd(counters + tile, 1u);
      __syncthreads();
      last = *arrived == (unsigned)(last_block - first_block);
      if (last) {
        if (threadIdx.x == 0) counters[tile] = 0;  // ready for the next launch
        __threadfence();
#pragma unroll
        for (int i = 0; i < 8 * NT; i++) acc[i / 4 / NT][i / 4 % NT][i % 4] = 0;
        for (int block = first_block; block <= last_block; block++) {
          const float4* from_part = part_of(block);
          float4 v[2 * NT];
#pragma unroll
          for (int i = 0; i < 2 * NT; i++) v[i] = __ldcg(from_part + i * kThreads);
#pragma unroll
          for (int i = 0; i < 2 * NT; i++) {
            float* sum = acc[i / NT][i % NT];
            sum[0] += v[i].x, sum[1] += v[i].y, sum[2] += v[i].z, sum[3] += v[i].w;
          }
        }
      }
    }
    if (last) write_tile<NT>(acc, weight, bias, out, tile % tiles, tile / tiles * ROWS, M, N, gate, warp, lane);
#pragma unroll
    for (int i = 0; i < 8 * NT; i++) acc[i / 4 / NT][i / 4 % NT][i % 4] = 0;
    tile++, span = 0;
  }
}

template <class Codes, int NT>
int start(const Codes& weight, const void* x, const void* bias, void* out, void* parts, void* counters, int M, int N, int K,
          long long x_stride, int blocks, int stages, int gate, int dependent, void* stream) {
  constexpr int ROWS = NT * 8, COLUMNS = kSixteens * 16;
  const int shared = stages * kStage<Codes, NT>, row_tiles = (M + ROWS - 1) / ROWS;
  if (shared > kMostShared || blocks > (N + COLUMNS - 1) / COLUMNS * row_tiles * (K / Codes::kSpan)) return -1;
  return (int)launch(run<Codes, NT>, blocks, kThreads, shared, 1, dependent > 0, stream, (const __nv_bfloat16*)x, weight,
                     (const __nv_bfloat16*)bias, (__nv_bfloat16*)out, (float4*)parts, (unsigned*)counters, M, N, K,
                     x_stride, row_tiles, stages, gate);
}

// By tiles of ``tiles`` eights of rows of X, 1, 2, 4 or 8.
template <class Codes>
int start_tiles(const Codes& weight, int tiles, const void* x, const void* bias, void* out, void* parts, void* counters,
                int M, int N, int K, long long x_stride, int blocks, int stages, int gate, int dependent, void* stream) {
  if (M < 1 || N < 1 || K < Codes::kSpan || K % Codes::kSpan || x_stride % 8 || stages < 2 || stages > 4 || blocks < 1 ||
      !parts || !counters || (gate && (N % 32 || bias)))
    return -1;
#define TRANSECT_TILES(NT)                                                                                             \
  if (tiles == NT)                                                                                                     \
    return start<Codes, NT>(weight, x, bias, out, parts, counters, M, N, K, x_stride, blocks, stages, gate, dependent, \
                            stream);
  TRANSECT_TILES(1)
  TRANSECT_TILES(2)
  TRANSECT_TILES(4)
  TRANSECT_TILES(8)
#undef TRANSECT_TILES
  return -1;
}

}  // namespace portable_tiles
