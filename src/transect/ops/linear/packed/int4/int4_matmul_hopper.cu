// Y = X W^T + b for up to 64 rows of X at a time and a weight of 4-bit codes in groups, W = scale code + zero. bfloat16
// in and out, float32 sums. Hopper. See int4_matmul.py for the arithmetic, and for when int4_matmul.cu is quicker.
//
// * The weight is arranged once (``arrange`` in int4_packing.py): of every 128 k, for every 16 rows, 1024 bytes of
//   codes in the order in which the tensor cores take them, then the scales and zeros. So all that a block needs of 128
//   k is one piece of memory, and one bulk copy brings it into a ring of stages in shared memory; X comes beside it, 16
//   bytes a copy.
// * Who is the last to have read a stage has it filled again; a barrier of each stage says that it has landed. A stage
//   is always of the same team, which has seen the filling before the one that it waits for: so a bit tells them apart.
// * A warp has rows of W of its own and goes along the k of its team, so its sums stay in registers to the end. Teams
//   of warps, and the blocks of a cluster, share K; their sums are added at the end in an order that is always the
//   same.
// * A shift and one logic operation of three inputs make two bfloat16 of two codes: 0x4300 | c is 128 + c. Codes enter
//   the product as they are; the scale multiplies its sum once for a group, and 128 scale - zero times the sum of x (a
//   product with ones) is taken off. So there is no multiplication for a weight, and no weight is ever rounded.
// * With less than half of the shared memory, the block of the next launch fits beside this one, and with ``ahead`` has
//   its ring full of weights when this one ends.

#include "../../../lang/few_rows.cuh"
#include "../../../lang/hopper.cuh"
#include "../../../lang/parts.cuh"
#include "int4_codes.cuh"

#define TRANSECT_PARTS 3

using namespace few_rows;
using namespace hopper;


// How many have counted before.
__device__ __forceinline__ int count_reader(uint32_t counter) {
  int before;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;" : "=r"(before) : "r"(counter) : "memory");
  return before;
}

__device__ __forceinline__ float read4(uint32_t from) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from));
  return v;
}

__device__ __forceinline__ void send(uint32_t to, float a, float b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
#endif
}

template <int GROUP, int RB, int NT>
__global__ void __launch_bounds__(NT <= 2 ? 512 : 256, 1)
    int4_hopper(const __nv_bfloat16* x, const unsigned char* weight, const __nv_bfloat16* bias, __nv_bfloat16* out,
                int M, int N, int K, long long x_stride, int per, int row_tiles, int ranks, int teams, int stages,
                int ahead) {
#if __CUDA_ARCH__ >= 900
  constexpr int ROWS = NT * 8, TILE = kTile<GROUP>, GROUPS = kChunk / GROUP, PITCH = ROWS + 2;
  constexpr bool SHARED_SUMS = NT > 2;  // of few rows every warp adds X up for itself
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32 / teams, warp = threadIdx.x / 32 % warps;
  const int team = threadIdx.x / 32 / warps;
  const int rank = blockIdx.x % ranks, row_tile = blockIdx.x / ranks % row_tiles,
            share = blockIdx.x / ranks / row_tiles;
  const int m0 = row_tile * ROWS, rows = min(ROWS, M - m0);
  const int sixteens = (N + 15) / 16, first = share * per, count = min(per, sixteens - first);
  const int passes = (per + warps * RB - 1) / (warps * RB), wide = (per + passes - 1) / passes;
  const int chunks = K / kChunk, chunk_first = chunks * rank / ranks, steps = chunks * (rank + 1) / ranks - chunk_first;
  const int total = passes * steps;
  // A stage: the tiles of W, X, and the sums of X over each group.
  const int x_at_stage = wide * TILE, sums_at_stage = x_at_stage + (NT == 1 ? min(ROWS, M) : ROWS) * kXPitch;
  const int stage_bytes = sums_at_stage + GROUPS * ROWS * 4;
  const uint32_t full = shared_address(memory), summed = full + stages * 8, readers = full + stages * 16;
  const uint32_t ring = full + (stages * 24 + 127) / 128 * 128;

  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; s++) {
      barrier_init(full + s * 8, 33);
      barrier_init(summed + s * 8, 1);
      asm volatile("st.shared.u32 [%0], 0;" ::"r"(readers + s * 8) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_begin();
  if (!ahead) wait_for_previous();

  auto load_w = [&](int i, int slot) {
    if (lane == 0) {
      const int pass = i / steps, tiles = max(0, min(wide, count - pass * wide));
      barrier_expect(full + slot * 8, tiles * TILE);
      const size_t tile = (size_t)(chunk_first + i - pass * steps) * sixteens + first + pass * wide;
      if (tiles) copy_bulk(ring + slot * stage_bytes, weight + tile * TILE, tiles * TILE, full + slot * 8);
    }
    __syncwarp();
  };
  auto load_x = [&](int i, int slot) {
    const __nv_bfloat16* from = x + m0 * x_stride + (chunk_first + i % steps) * kChunk + lane % 16 * 8;
    const uint32_t to = ring + slot * stage_bytes + x_at_stage + lane % 16 * 16;
    for (int row = lane / 16; row < rows; row += 2) copy16(to + row * kXPitch, from + row * x_stride, true);
    copies_arrive(full + slot * 8);
  };
  if (threadIdx.x < 32)
    for (int i = 0; i < min(stages, total); i++) load_w(i, i);
  if (ahead) wait_for_previous();
  for (int i = threadIdx.x / 32; i < min(stages, total); i += warps * teams) load_x(i, i);

  // Of one tile of X, rows past the end read the last one: what they give is not stored, nor is what rows never filled
  // give.
  const uint32_t x_at = x_at_stage + (NT == 1 ? min(lane % 8, rows - 1) : lane % 8) * kXPitch + lane / 8 * 16;
  const int my_tile = min(warp * RB, wide - RB);  // where there are too few, two warps do the same
  const uint32_t w_at = my_tile * TILE;
  const uint32_t ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  float y[RB][NT][4] = {};
  int slot = team, parity = 0, to_sum = warp;
  for (int pass = 0; pass < passes; pass++) {
    for (int step = team; step < steps; step += teams) {
      barrier_wait(full + slot * 8, parity);
      const uint32_t from = ring + slot * stage_bytes;
      // The warps of a team take turns at adding up X over every group of k, as a product with ones.
      if (SHARED_SUMS && to_sum-- == 0) {
        to_sum = warps - 1;
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
          for (int tile = 0; tile < NT; tile++) {
            float sum[2][4] = {};
#pragma unroll
            for (int h = 0; h < GROUP / 32; h++) {
              uint32_t b[4];
              read_matrices(b, from + x_at + tile * 8 * kXPitch + g * GROUP * 2 + h * 64);
              multiply(sum[0], ones, b[0], b[1]);
              multiply(sum[1], ones, b[2], b[3]);
            }
            if (lane < 4)
              asm volatile(
                  "st.shared.v2.f32 [%0], {%1, %2};" ::"r"(from + sums_at_stage + (g * ROWS + tile * 8 + lane * 2) * 4),
                  "f"(sum[0][0] + sum[1][0]), "f"(sum[0][1] + sum[1][1])
                  : "memory");
          }
        __syncwarp();
        if (lane == 0) barrier_arrive(summed + slot * 8);
      }
      float dot[RB][NT][4] = {}, sum[NT][4] = {};
      uint4 w[RB];
#pragma unroll
      for (int h = 0; h < 4; h++) {  // 32 k
        if (h % 2 == 0) {
#pragma unroll
          for (int r = 0; r < RB; r++) w[r] = read16(from + w_at + r * TILE + h * 256 + lane * 16);
        }
        uint32_t b[NT][4];
#pragma unroll
        for (int tile = 0; tile < NT; tile++) read_matrices(b[tile], from + x_at + tile * 8 * kXPitch + h * 64);
#pragma unroll
        for (int q = 0; q < 2; q++) {
          if (!SHARED_SUMS)
#pragma unroll
            for (int tile = 0; tile < NT; tile++) multiply(sum[tile], ones, b[tile][q * 2], b[tile][q * 2 + 1]);
#pragma unroll
          for (int r = 0; r < RB; r++) {
            const uint32_t word = h % 2 ? (q ? w[r].w : w[r].z) : (q ? w[r].y : w[r].x);
            const uint32_t a[4] = {as_pair(word), as_pair(word >> 4), as_pair(word >> 8), as_pair(word >> 12)};
#pragma unroll
            for (int tile = 0; tile < NT; tile++) multiply(dot[r][tile], a, b[tile][q * 2], b[tile][q * 2 + 1]);
          }
        }
        if ((h + 1) * 32 % GROUP == 0 && !SHARED_SUMS) {
#pragma unroll
          for (int r = 0; r < RB; r++) {
            const uint2 both = read8(from + w_at + r * TILE + 1024 + h * 32 / GROUP * 64 + lane / 4 * 8);
            const float s0 = __uint_as_float(both.x << 16), s1 = __uint_as_float(both.y << 16);
            const float z0 = fmaf(-128.f, s0, __uint_as_float(both.x & 0xffff0000u));
            const float z1 = fmaf(-128.f, s1, __uint_as_float(both.y & 0xffff0000u));
#pragma unroll
            for (int tile = 0; tile < NT; tile++)
#pragma unroll
              for (int c = 0; c < 4; c++) {
                y[r][tile][c] =
                    fmaf(c < 2 ? s0 : s1, dot[r][tile][c], fmaf(c < 2 ? z0 : z1, sum[tile][c], y[r][tile][c]));
                dot[r][tile][c] = 0;
              }
          }
#pragma unroll
          for (int tile = 0; tile < NT; tile++)
#pragma unroll
            for (int c = 0; c < 4; c++) sum[tile][c] = 0;
        }
        if ((h + 1) * 32 % GROUP == 0 && GROUPS > 1 && SHARED_SUMS) {
#pragma unroll
          for (int r = 0; r < RB; r++) {
            const uint2 both = read8(from + w_at + r * TILE + 1024 + h * 32 / GROUP * 64 + lane / 4 * 8);
            const float s0 = __uint_as_float(both.x << 16), s1 = __uint_as_float(both.y << 16);
#pragma unroll
            for (int tile = 0; tile < NT; tile++)
#pragma unroll
              for (int c = 0; c < 4; c++) {
                y[r][tile][c] = fmaf(c < 2 ? s0 : s1, dot[r][tile][c], y[r][tile][c]);
                dot[r][tile][c] = 0;
              }
          }
        }
      }
      if (SHARED_SUMS) barrier_wait(summed + slot * 8, parity);
#pragma unroll
      for (int g = 0; g < (SHARED_SUMS ? GROUPS : 0); g++) {
        float2 sum[NT];
#pragma unroll
        for (int tile = 0; tile < NT; tile++) {
          const uint2 v = read8(from + sums_at_stage + (g * ROWS + tile * 8 + lane % 4 * 2) * 4);
          sum[tile] = make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
        }
#pragma unroll
        for (int r = 0; r < RB; r++) {
          // Scale and zero of this lane's rows, lane / 4 and 8 below: bfloat16 is the upper half of float32.
          const uint2 both = read8(from + w_at + r * TILE + 1024 + g * 64 + lane / 4 * 8);
          const float s0 = __uint_as_float(both.x << 16), s1 = __uint_as_float(both.y << 16);
          const float z0 = fmaf(-128.f, s0, __uint_as_float(both.x & 0xffff0000u));
          const float z1 = fmaf(-128.f, s1, __uint_as_float(both.y & 0xffff0000u));
#pragma unroll
          for (int tile = 0; tile < NT; tile++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
              const float rest = fmaf(c < 2 ? z0 : z1, c % 2 ? sum[tile].y : sum[tile].x, y[r][tile][c]);
              y[r][tile][c] = GROUPS > 1 ? rest : fmaf(c < 2 ? s0 : s1, dot[r][tile][c], rest);
            }
        }
      }
      // Whoever is the last to have read a slot has it filled again.
      __syncwarp();
      int before = 0;
      if (lane == 0) before = count_reader(readers + slot * 8);
      const int next = pass * steps + step + stages;
      if (__shfl_sync(0xffffffffu, before, 0) == warps - 1 && next < total) {
        if (lane == 0) asm volatile("st.shared.u32 [%0], 0;" ::"r"(readers + slot * 8) : "memory");
        load_w(next, slot);
        load_x(next, slot);
      }
      slot += teams;
      if (slot >= stages) slot -= stages, parity ^= 1;
    }
    if (ranks * teams == 1) {
      const int tiles = min(wide, count - pass * wide);
#pragma unroll
      for (int r = 0; r < RB; r++)
#pragma unroll
        for (int tile = 0; tile < NT; tile++)
#pragma unroll
          for (int c = 0; c < 4; c++) {
            const int t = my_tile + r, n = (first + pass * wide + t) * 16 + c / 2 * 8 + lane / 4;
            const int m = tile * 8 + lane % 4 * 2 + c % 2;
            if (t < tiles && n < N && m < rows)
              out[(size_t)(m0 + m) * N + n] =
                  __float2bfloat16(y[r][tile][c] + (bias ? __bfloat162float(bias[n]) : 0.f));
            y[r][tile][c] = 0;
          }
    }
  }
  if (ranks * teams > 1) {
    // Tile t belongs to rank t % ranks: every team sends its sums there, in the place of the ring,
    // [team][tile][16][PITCH], where they are added in order.
    const int own = (wide + ranks - 1) / ranks, sources = ranks * teams;
    auto barrier = [&] {
      if (ranks > 1) {
        __syncwarp();
        cluster_barrier();
      } else {
        __syncthreads();
      }
    };
    barrier();
#pragma unroll
    for (int r = 0; r < RB; r++) {
      const int t = my_tile + r;
      const uint32_t here =
          ring + (((rank * teams + team) * own + t / ranks) * 16 + lane / 4) * PITCH * 4 + lane % 4 * 8;
      const uint32_t to = ranks > 1 ? of_rank(here, t % ranks) : here;
#pragma unroll
      for (int tile = 0; tile < NT; tile++)
#pragma unroll
        for (int below = 0; below < 2; below++)
          send(to + (below * 8 * PITCH + tile * 8) * 4, y[r][tile][below * 2], y[r][tile][below * 2 + 1]);
    }
    barrier();
    for (int e = threadIdx.x; e < own * rows * 16; e += blockDim.x) {
      const int t = e / 16 / rows, m = e / 16 % rows, column = e % 16, n = (first + t * ranks + rank) * 16 + column;
      if (t * ranks + rank >= count || n >= N) continue;
      float sum = 0;
      for (int s = 0; s < sources; s += 4) {
        float of[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
          of[j] = s + j < sources ? read4(ring + ((((s + j) * own + t) * 16 + column) * PITCH + m) * 4) : 0;
#pragma unroll
        for (int j = 0; j < 4; j++) sum += of[j];
      }
      if (bias) sum += __bfloat162float(bias[n]);
      out[(size_t)(m0 + m) * N + n] = __float2bfloat16(sum);
    }
  }
#endif
}

template <int GROUP, int RB, int NT>
static int start(const void* x, const void* weight, const void* bias, void* out, int M, int N, int K,
                 long long x_stride, int warps, int teams, int stages, int per, int ranks, int dependent,
                 void* stream) {
  constexpr int ROWS = NT * 8;
  const int shares = ((N + 15) / 16 + per - 1) / per, row_tiles = (M + ROWS - 1) / ROWS;
  const int passes = (per + warps * RB - 1) / (warps * RB), wide = (per + passes - 1) / passes;
  const int stage_bytes = wide * kTile<GROUP> + (NT == 1 && M < ROWS ? M : ROWS) * kXPitch + kChunk / GROUP * ROWS * 4;
  const int parts = (wide + ranks - 1) / ranks * ranks * teams * 16 * (ROWS + 2) * 4;
  const int ring = stages * stage_bytes, needed = ranks * teams > 1 && parts > ring ? parts : ring;
  const int shared = (stages * 24 + 127) / 128 * 128 + needed;
  if (shared > kMostShared || (ranks * teams > 1 && passes > 1) || warps * teams * 32 > (NT <= 2 ? 512 : 256) ||
      stages % teams || wide < RB)
    return -1;
  return (int)launch(int4_hopper<GROUP, RB, NT>, shares * row_tiles * ranks, warps * teams * 32, shared, ranks,
                     dependent > 0, stream, (const __nv_bfloat16*)x, (const unsigned char*)weight,
                     (const __nv_bfloat16*)bias, (__nv_bfloat16*)out, M, N, K, x_stride, per, row_tiles, ranks, teams,
                     stages, (int)(dependent > 1));
}

// x [M, K] with x_stride between rows, a multiple of 8; weight as ``arrange`` makes it for N rows and groups of GROUP
// (32, 64 or 128) k; out [M, N] contiguous; bias [N] or null; K a multiple of 128. ``rows``: of X at a time (8, 16, 32
// or 64); ``columns``: sixteens of rows of W for a warp at a time; ``warps`` of a team; ``teams`` that share K;
// ``stages`` of the ring, a multiple of ``teams``; ``per``: sixteens for a block; ``ranks``: blocks that share K (at
// most 8). ``dependent``: 0 an ordinary launch, 1 a dependent one, 2 one that asks for W before the kernel before has
// ended (which must not write W). Returns a cudaError_t, or -1 for what it does not take.
extern "C" int transect_int4_hopper(const void* x, const void* weight, const void* bias, void* out, int M, int N, int K,
                                    int group, long long x_stride, int rows, int columns, int warps, int teams,
                                    int stages, int per, int ranks, int dependent, void* stream) {
  if (M < 1 || N < 1 || K < kChunk || K % kChunk || x_stride % 8 || per < 1 || ranks < 1 || ranks > 8 || warps < 1 ||
      stages < 1 || teams < 1 || K / kChunk < ranks)
    return -1;
#define TRANSECT_INT4(GROUP, RB, NT)                                                                                  \
  if (group == GROUP && rows == NT * 8 && columns == RB)                                                              \
    return TRANSECT_HERE(start<GROUP, RB, NT>(x, weight, bias, out, M, N, K, x_stride, warps, teams, stages, per,     \
                                              ranks, dependent, stream));
#ifdef TRANSECT_TRY
  TRANSECT_TRY
#else
#define TRANSECT_GROUP(GROUP)                                                                   \
  TRANSECT_INT4(GROUP, 1, 1)                                                                    \
  TRANSECT_INT4(GROUP, 2, 1)                                                                    \
  TRANSECT_INT4(GROUP, 4, 1)                                                                    \
  TRANSECT_INT4(GROUP, 1, 2)                                                                    \
  TRANSECT_INT4(GROUP, 2, 2)                                                                    \
  TRANSECT_INT4(GROUP, 1, 4)                                                                    \
  TRANSECT_INT4(GROUP, 2, 4)
  TRANSECT_GROUP(128)
  TRANSECT_GROUP(64)
  TRANSECT_GROUP(32)
  TRANSECT_INT4(128, 4, 2)  // narrower groups would spill registers
  TRANSECT_INT4(128, 1, 8)
  TRANSECT_INT4(128, 2, 8)
#endif
  return -1;
}
