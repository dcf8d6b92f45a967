// Y = X W^T + b on Hopper's own tensor-core products (wgmma), bfloat16 in and out, float32 sums, and a weight in a
// block type of GGUF files as gguf_layout.py arranges it, or of 4 bits in groups as int4_packing.py does: decoded in
// registers for as many rows of X as a tile has.
//
// * A tile of a block is 64 WGS rows of W, the left operand, by NB rows of X. One warp fetches units of W into a ring
//   in shared memory, each in one piece; another fetches 64 k of X at a time into a ring of its own. WGS warpgroups
//   decode 64 rows of W each, a warp sixteen of them, and multiply them from registers: the products of 32 k run while
//   the codes of the next 32 are taken apart.
// * A weight is rounded to bfloat16 before it is multiplied: a code is a bfloat16 c 2^-133 as it stands
//   (gguf_codes.cuh), and one fused multiplication and addition of two at a time makes (S c + Z) 2^-53 of it. S and Z
//   are the scale, and minimum or minus the offset times the scale, rounded to bfloat16 themselves.
// * The units of all tiles stand in one row, and every block takes an equal stretch of it. Tiles of more rows of X than
//   NB follow one another, for the same rows of W. What a block has of a tile that is not all its own is added in the
//   order of k, in one of two ways. A block leaves what it has of a tile that begins before its stretch in memory;
//   whoever has the tile's first k comes to it last, and adds what the others left. Or (``together``, where many blocks
//   share a tile) all of them leave what they have, meet at a counter when their stretches are done, and add a share of
//   the tile's columns each.
// * Where tiles have 256 rows of X, a team of 2 blocks, a cluster, takes tiles side by side in W and a stretch in
//   common: each of them fetches half of the rows of X, for both.
// * ``gated``: sixteens of rows of W are a gate's and the other factor's in turn, so two warps have both; Y [M, N / 2]
//   is silu(one) times the other.
// * The first units of W may be asked for before the kernel that makes X has ended (``ahead``).

#pragma once

#include "../../lang/few_rows.cuh"
#include "../../lang/hopper.cuh"
#include "../../lang/meeting.cuh"
#include "../../lang/parts.cuh"
#include "../../lang/wgmma.cuh"
#include "gguf/gguf_codes.cuh"

using namespace few_rows;
using namespace gguf;
using namespace hopper;

namespace {

constexpr int kMostStages = 16, kMostBlocks = 4096;
constexpr float kScaleUp = 0x1p80f, kDown = 0x1p-53f, kUp = 0x1p53f;  // 2^80 2^-133 = 2^-53

__device__ __forceinline__ uint32_t fused(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t v;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}

__device__ __forceinline__ uint32_t twice(float v) { return pack(v, v); }

// What stands behind a unit's scales, for rows g and g + 8: S = scale up, Z = minimum or scale times zero.
template <Type F>
struct Behind {
  float up[2], zero[2];
  uint32_t S[2], Z[2];  // of 4 bits in groups

  __device__ __forceinline__ void begin(uint32_t unit, int g) {
    if constexpr (int4_group(F)) return;
    if constexpr (byte_scales(F)) {
      float2 d, less;
      read_behind<F>(d, less, unit, g);
      up[0] = d.x * kScaleUp, up[1] = d.y * kScaleUp;
      zero[0] = has_minimum(F) ? -less.x * kDown : d.x * (-offset_of(F) * kDown);
      zero[1] = has_minimum(F) ? -less.y * kDown : d.y * (-offset_of(F) * kDown);
    } else {
      up[0] = up[1] = kScaleUp;
      zero[0] = zero[1] = has_minimum(F) ? kDown : -offset_of(F) * kDown;
    }
  }
};

// The weights of 32 columns, 2^-53 times: of the two products of 16 columns each the left operand.
template <Type F>
__device__ __forceinline__ void weights(uint32_t (&a)[2][4], const Codes<F>& codes, Behind<F>& behind, uint32_t unit,
                                        int lane, int j) {
  if constexpr (int4_group(F)) {  // of each 16 k a word: rows g, and 4 bits up g + 8; in its upper bytes 8 k further
    constexpr int SPANS = int4_group(F) / 32;  // of 32 columns, with a scale in common
    const uint32_t chunk = unit + j / 4 * int4_chunk(F);
    if (j % SPANS == 0) {  // of either row the scale below, the zero above
      const uint2 both = read8(chunk + 1024 + j % 4 / SPANS * 64 + lane / 4 * 8);
      behind.S[0] = twice(__uint_as_float(both.x << 16) * kScaleUp);
      behind.S[1] = twice(__uint_as_float(both.y << 16) * (kScaleUp / 16));
      behind.Z[0] = twice(__uint_as_float(both.x & 0xFFFF0000u) * kDown);
      behind.Z[1] = twice(__uint_as_float(both.y & 0xFFFF0000u) * kDown);
    }
    const uint2 two = read8(chunk + j % 4 / 2 * 512 + lane * 16 + j % 2 * 8);
#pragma unroll
    for (int q = 0; q < 2; q++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        a[q][e] = fused((q ? two.y : two.x) >> (e / 2 * 8) & (e % 2 ? 0x00F000F0u : 0x000F000Fu), behind.S[e % 2],
                        behind.Z[e % 2]);
    return;
  }
  constexpr int GROUPS = groups_of_32(F);
  float scale[GROUPS][2], minimum[GROUPS][2];
  read_scales<F>(scale, minimum, unit, lane / 4, j);
  uint32_t S[GROUPS][2], Z[GROUPS][2];
#pragma unroll
  for (int s = 0; s < GROUPS; s++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      S[s][h] = twice(scale[s][h] * behind.up[h]);
      Z[s][h] = twice((has_minimum(F) ? minimum[s][h] : scale[s][h]) * behind.zero[h]);
    }
  codes.get(a, unit, lane, j);
#pragma unroll
  for (int q = 0; q < 2; q++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t scaled = S[q * GROUPS / 2][h], zero = Z[q * GROUPS / 2][h];
      uint32_t above = scaled;
      if (left_up(F)) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(above) : "r"(scaled), "r"(0x3D803D80u));  // a sixteenth
      a[q][h] = fused(a[q][h], scaled, zero);
      a[q][2 + h] = fused(a[q][2 + h], above, zero);
    }
}

#define PRODUCT(n, numbers, places, b, ...)                                                                      \
  if constexpr (NB == n)                                                                                         \
  asm volatile(                                                                                                  \
      "{\n.reg .pred p;\n.reg .b64 d;\nsetp.eq.u32 p, 0, 0;\nmov.b64 d, {" b ", 0x40000040};\n"                  \
      "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" numbers "}, {" places "}, d, p, 1, 1, 0;\n}" \
      : __VA_ARGS__                                                                                              \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(right))

// c += 64 rows by 16 k from the registers of a warpgroup, as in ``few_rows::multiply``, times NB rows at ``right``,
// which is the lower half of a ``matrix``: the upper half is always the same. Of warp w, lane l: c[4 j], c[4 j + 1] are
// row 16 w + l / 4 on the left and rows 8 j + 2 (l % 4), + 1 on the right; c[4 j + 2], c[4 j + 3] the same 8 rows
// further down.
template <int NB>
__device__ __forceinline__ void multiply(float (&c)[NB / 2], const uint32_t (&a)[4], uint32_t right) {
#ifdef TRANSECT_HOPPER
  PRODUCT(8, N00, "%4, %5, %6, %7", "%8", R4(c, 0));
  PRODUCT(16, N0H, "%8, %9, %10, %11", "%12", R8(c, 0));
  PRODUCT(32, N0, "%16, %17, %18, %19", "%20", R16(c, 0));
  PRODUCT(64, N0 N1, "%32, %33, %34, %35", "%36", R32(c, 0));
  PRODUCT(128, N0 N1 N2 N3, "%64, %65, %66, %67", "%68", R64(c, 0));
  PRODUCT(256, N0 N1 N2 N3 N4 N5 N6 N7, "%128, %129, %130, %131", "%132", R64(c, 0), R64(c, 64));
#endif
}

__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1 + __expf(-v)); }

// A warp's 16 columns of Y from ``left`` on by 8 rows from ``right`` on. N is a multiple of 8.
__device__ __forceinline__ void store(__nv_bfloat16* out, const __nv_bfloat16* bias, int left, int right, float4 v,
                                      int M, int N, int lane) {
  const int row = left + lane / 4;
  const float b = bias && row < N ? __bfloat162float(bias[row]) : 0;
  const float b8 = bias && row + 8 < N ? __bfloat162float(bias[row + 8]) : 0;
  const uint32_t low = transposed(pack(v.x + b, v.y + b)), high = transposed(pack(v.z + b8, v.w + b8));
  // Of a row lanes 0 to 3 have two numbers each of the first eight columns and of the others: two lanes exchange.
  const bool odd = lane % 2;
  const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, odd ? low : high, 1);
  const int m = right + lane / 4, n = left + odd * 8 + lane % 4 / 2 * 4;
  if (m < M && n < N) *(uint2*)(out + (size_t)m * N + n) = odd ? make_uint2(got, high) : make_uint2(low, got);
}

// Sums of 256 rows of X need more registers than each thread of a block has: those that fetch give theirs away, which
// whole warpgroups do alone.
__host__ __device__ constexpr int team(int NB) { return NB == 256 ? 2 : 1; }
__host__ __device__ constexpr int threads(int NB, int WGS) { return WGS * 128 + (NB == 256 ? 128 : 64); }

template <int REGISTERS, bool MORE>
__device__ __forceinline__ void registers() {
#ifdef TRANSECT_HOPPER
  if constexpr (MORE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}

template <Type F, int NB, int WGS, int BLOCKS>
__global__ void __launch_bounds__(threads(NB, WGS), BLOCKS)
    block_tiles(const __grid_constant__ CUtensorMap x_map, const unsigned char* weight, const __nv_bfloat16* bias,
               __nv_bfloat16* out, float4* parts, int* flags, int M, int N, int K, int row_tiles, int box, int w_stages,
               int x_stages, int ahead, int together, int gated) {
#ifdef TRANSECT_HOPPER
  constexpr int UNIT = unit_bytes(F), SIXTEENS = WGS * 4, W_STAGE = SIXTEENS * UNIT, X_STAGE = NB * 128, J = NB / 8;
  constexpr int WORKERS = WGS * 128;
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) uint64_t barriers[4 * kMostStages];
  __shared__ uint2 factors[SIXTEENS / 2][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t x_ring = (shared_address(memory) + 1023) & ~1023u, w_ring = x_ring + x_stages * X_STAGE;
  uint32_t w_full = shared_address(barriers);
  asm volatile("" : "+r"(w_full));  // or the compiler makes it again for every chunk, from a slow register
  const uint32_t w_empty = w_full + 8 * kMostStages;
  const uint32_t x_full = w_empty + 8 * kMostStages, x_empty = x_full + 8 * kMostStages;
  const int chunks = (K + kUnitK - 1) / kUnitK, sixteens = (N + 15) / 16;
  constexpr int TEAM = team(NB), high = SIXTEENS * TEAM;
  const int rank = blockIdx.x % TEAM, own = blockIdx.x / TEAM, teams = gridDim.x / TEAM;
  const unsigned all = (sixteens + high - 1) / high * row_tiles * chunks;
  auto begin_of = [&](int other) { return (int)(all * other / teams); };
  const int first = begin_of(own), last = begin_of(own + 1);

  let_next_begin();
  if (threadIdx.x == WORKERS + 32) asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
  if (!ahead) wait_for_previous();
  if (threadIdx.x < kMostStages) {
    barrier_init(w_full + 8 * threadIdx.x, 1);
    barrier_init(x_full + 8 * threadIdx.x, 1);
    barrier_init(w_empty + 8 * threadIdx.x, SIXTEENS);
    barrier_init(x_empty + 8 * threadIdx.x, high);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  auto meet = [&] {  // before others reach into its shared memory, and before it is given up
    if (TEAM > 1) cluster_meet();
  };
  meet();

  if (NB == 256 && warp >= SIXTEENS) registers<40, false>();
  if (warp == SIXTEENS) {
    // A division for each chunk would take longer than some tiles' products.
    for (int i = first, slot = 0, parity = 1, tile = first / chunks, at = first % chunks; i < last; i++) {
      if (i - first >= w_stages) barrier_poll(w_empty + 8 * slot, parity);
      const int from = (tile / row_tiles * TEAM + rank) * SIXTEENS;
      const int count = max(min(SIXTEENS, sixteens - from), 0);
      if (lane == 0) barrier_expect(w_full + 8 * slot, count * UNIT);
      __syncwarp();
      if constexpr (int4_group(F)) {  // chunks of 128 k, of all rows one after the other; after the last again the last
        constexpr int CHUNK = int4_chunk(F);
        const int chunk = min(at * 2 + lane % 2, K / 128 - 1);
        if (lane < 2 * count)
          copy_bulk(w_ring + slot * W_STAGE + lane / 2 * UNIT + lane % 2 * CHUNK,
                    weight + ((size_t)chunk * sixteens + from + lane / 2) * CHUNK, CHUNK, w_full + 8 * slot);
      } else if (lane < count)
        copy_bulk(w_ring + slot * W_STAGE + lane * UNIT,
                  weight + ((size_t)(from + lane) * chunks + at) * UNIT, UNIT, w_full + 8 * slot);
      if (++slot == w_stages) slot = 0, parity ^= 1;
      if (++at == chunks) at = 0, tile++;
    }
    __syncwarp();
    return meet();
  }
  if (warp > SIXTEENS + 1) return meet();
  if (warp == SIXTEENS + 1) {
    if (one_lane()) {
      if (ahead) wait_for_previous();
      const int count = (last - first) * 4;
      int k = first % chunks * kUnitK, row_tile = first / chunks % row_tiles;
      for (int i = 0, slot = 0, parity = 1; i < count; i++) {
        if (i >= x_stages) barrier_poll(x_empty + 8 * slot, parity);
        const uint32_t to = x_ring + slot * X_STAGE + rank * box * 128, full = x_full + 8 * slot;
        barrier_expect(full, TEAM * box * 128);
        if (TEAM == 1) fetch(to, &x_map, k, row_tile * NB, full, kReadOften);
        else fetch_for_all(to, &x_map, k, row_tile * NB + rank * box, full, (1 << TEAM) - 1, kReadOften);
        if (++slot == x_stages) slot = 0, parity ^= 1;
        if ((k += 64) == chunks * kUnitK) k = 0, row_tile = row_tile + 1 == row_tiles ? 0 : row_tile + 1;
      }
    }
    __syncwarp();
    return meet();
  }

  if (NB == 256) registers<232, true>();
  float c[1][NB / 2];
  uint32_t a[2][2][4];  // for products of 32 k: one is read by them while the other is made
  int w_slot = 0, w_parity = 0, x_slot = 0, x_parity = 0, release = -1;
  const int t = threadIdx.x;
  auto let_go = [&](uint32_t barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  };
  auto let_go_x = [&](int slot) {  // none: -1. Without branches: see the loop
    __syncwarp();
    if (TEAM == 1 && lane == 0 && slot >= 0) barrier_arrive(x_empty + 8 * slot);
    if (TEAM > 1 && lane < TEAM && slot >= 0) barrier_arrive_of(x_empty + 8 * slot, lane);
  };
  // 16 columns of the product from ``left`` on by 8 rows from ``right`` on, of a warp.
  auto finish = [&](int left, int right, float4 v) {
    v = make_float4(v.x * kUp, v.y * kUp, v.z * kUp, v.w * kUp);
    if (!gated) return store(out, bias, left, right, v, M, N, lane);
    if (warp % 2) factors[warp / 2][lane] = make_uint2(pack(v.x, v.y), pack(v.z, v.w));
    asm volatile("bar.sync %0, 64;" ::"r"(2 + warp / 2) : "memory");
    const uint2 factor = factors[warp / 2][lane];
    asm volatile("bar.sync %0, 64;" ::"r"(2 + warp / 2) : "memory");  // read before it is written again
    if (warp % 2) return;
    const float2 a = two_floats<true>(factor.x), b = two_floats<true>(factor.y);
    v = make_float4(silu(v.x) * a.x, silu(v.y) * a.y, silu(v.z) * b.x, silu(v.w) * b.y);
    store(out, bias, left / 2, right, v, M, N / 2, lane);
  };
  for (int i = first; i < last;) {
    const int tile = i / chunks, end = min(last, (tile + 1) * chunks);
    const bool begins = i == tile * chunks;
#pragma unroll
    for (int e = 0; e < NB / 2; e++) c[0][e] = 0;
    hold(c);
    for (; i < end; i++) {
      barrier_poll(w_full + 8 * w_slot, w_parity);
      const uint32_t unit = w_ring + w_slot * W_STAGE + warp * UNIT;
      Codes<F> codes;
      Behind<F> behind;
      codes.begin(unit, lane);
      behind.begin(unit, lane / 4);
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const uint32_t right = (uint32_t)matrix(x_ring) + x_slot * (X_STAGE / 16);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          if (half == 0) barrier_poll(x_full + 8 * x_slot, x_parity);
          weights<F>(a[half], codes, behind, unit, lane, 2 * q + half);
#pragma unroll
          for (int e = 0; e < 8; e++) asm volatile("" : "+r"(a[half][e / 4][e % 4])::"memory");  // now, and not later
          products_begin();
          multiply<NB>(c[0], a[half][0], right + half * 4);
          multiply<NB>(c[0], a[half][1], right + half * 4 + 2);
          products_end();
          products_wait<1>();
          if (half == 0) let_go_x(release);
        }
        release = x_slot;
        if (++x_slot == x_stages) x_slot = 0, x_parity ^= 1;
      }
      let_go(w_empty + 8 * w_slot);
      if (++w_slot == w_stages) w_slot = 0, w_parity ^= 1;
    }
    products_wait<0>();
    hold(c);
    let_go_x(release);
    release = -1;
    const bool ends = end == (tile + 1) * chunks;
    if (!begins || (together && !ends)) {  // others have the rest
      float4* to = parts + (size_t)(together ? 2 * blockIdx.x + begins : blockIdx.x) * (J * WORKERS) + t;
#pragma unroll
      for (int j = 0; j < J; j++)
        __stcg(to + j * WORKERS, make_float4(c[0][4 * j], c[0][4 * j + 1], c[0][4 * j + 2], c[0][4 * j + 3]));
      if (together) continue;
      asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
      if (t == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flags + blockIdx.x) : "memory");
      continue;
    }
    if (!ends) {
      for (int other = own + 1; other < teams && begin_of(other) < (tile + 1) * chunks; other++) {
        const int block = other * TEAM + rank;
        if (t == 0) {
          int there = 0;
          for (int polls = 0; !there; polls++) {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(flags + block) : "memory");
            if (polls == kPolls) __trap();
          }
          flags[block] = 0;  // ready for the next launch
        }
        asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
        const float4* from = parts + (size_t)block * (J * WORKERS) + t;
#pragma unroll
        for (int j = 0; j < J; j++) {
          const float4 v = __ldcg(from + j * WORKERS);
          c[0][4 * j] += v.x, c[0][4 * j + 1] += v.y, c[0][4 * j + 2] += v.z, c[0][4 * j + 3] += v.w;
        }
      }
    }
    const int left = ((tile / row_tiles * TEAM + rank) * SIXTEENS + warp) * 16, right = tile % row_tiles * NB;
#pragma unroll
    for (int j = 0; j < J; j++)
      if (right + j * 8 < M)
        finish(left, right + j * 8, make_float4(c[0][4 * j], c[0][4 * j + 1], c[0][4 * j + 2], c[0][4 * j + 3]));
  }
  if (!together) return meet();

  // Tiles whose parts are added together: the counter is that of the block with the first k, ``of``; ``to`` is the
  // last. In all they add 2^31, so the highest bit changes when the last has come, and nobody resets it.
  // A block shares one with those before it, one with those after it, or neither.
  const int tiles[2] = {first % chunks ? first / chunks : -1,
                        last % chunks && last / chunks * chunks >= first ? last / chunks : -1};
  int of[2], to[2];
  unsigned found[2];
  asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
  if (t == 0) __threadfence();
#pragma unroll
  for (int s = 0; s < 2; s++) {
    of[s] = to[s] = own;
    if (tiles[s] < 0) continue;
    while (begin_of(of[s]) > tiles[s] * chunks) of[s]--;
    while (begin_of(to[s] + 1) < (tiles[s] + 1) * chunks) to[s]++;
    unsigned* counter = (unsigned*)flags + kMostBlocks + of[s] * TEAM + rank;
    if (t == 0) found[s] = atomicAdd(counter, of[s] == own ? 0x80000000u - (to[s] - of[s]) : 1u);
  }
#pragma unroll
  for (int s = 0; s < 2; s++) {
    if (tiles[s] < 0) continue;
    if (t == 0) {
      unsigned now = found[s];
      for (int polls = 0; !((now ^ found[s]) & 0x80000000u); polls++) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                     : "=r"(now)
                     : "l"(flags + kMostBlocks + of[s] * TEAM + rank)
                     : "memory");
        if (polls == kPolls) __trap();
      }
      __threadfence();
    }
    asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
    const int left = ((tiles[s] / row_tiles * TEAM + rank) * SIXTEENS + warp) * 16, right = tiles[s] % row_tiles * NB;
    for (int j = own - of[s]; j < J && right + j * 8 < M; j += to[s] - of[s] + 1) {
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int other = of[s]; other <= to[s]; other++) {
        const int part = 2 * (other * TEAM + rank) + (other == of[s]);
        const float4 v = __ldcg(parts + (size_t)part * (J * WORKERS) + j * WORKERS + t);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      finish(left, right + j * 8, sum);
    }
  }
  meet();
#endif
}

template <Type F, int NB, int WGS, int BLOCKS>
int start(const void* x, const void* weight, const void* bias, void* out, void* parts, void* flags, int M, int N, int K,
          long long x_stride, int blocks, int w_stages, int x_stages, int together, int gated,
          int dependent, void* stream) {
  const int shared = x_stages * NB * 128 + w_stages * WGS * 4 * unit_bytes(F) + 1024, row_tiles = (M + NB - 1) / NB;
  constexpr int TEAM = team(NB), high = WGS * 4 * TEAM;
  const int box = TEAM > 1 ? NB / TEAM : M < NB ? M : NB;
  const long long units = (long long)(((N + 15) / 16 + high - 1) / high) * row_tiles * ((K + kUnitK - 1) / kUnitK);
  if (shared > kMostShared - 1024 || blocks > kMostBlocks || blocks % TEAM || blocks / TEAM > units ||
      units * (blocks + 1) >= 1ll << 31 || (gated && (N % 32 || bias)))
    return -1;
  CUtensorMap x_map;
  if (describe(&x_map, x, M, K, x_stride, box)) return -2;
  return (int)launch(block_tiles<F, NB, WGS, BLOCKS>, blocks, threads(NB, WGS), shared, TEAM, dependent > 0, stream,
                     x_map, (const unsigned char*)weight, (const __nv_bfloat16*)bias, (__nv_bfloat16*)out,
                     (float4*)parts, (int*)flags, M, N, K, row_tiles, box, w_stages, x_stages, (int)(dependent > 1),
                     together, gated);
}

}  // namespace

#define TRANSECT_CUT(F, NB, WGS, BLOCKS)                                                                             \
  if (type == F && rows == NB && groups == WGS && resident == BLOCKS)                                                \
    return TRANSECT_HERE(start<F, NB, WGS, BLOCKS>(x, weight, bias, out, parts, flags, M, N, K, x_stride, blocks,    \
                                                   w_stages, x_stages, together, gated, dependent, stream));

// What launchers ask before.
inline bool tiles_refused(int M, int N, int K, long long x_stride, int blocks, int w_stages, int x_stages) {
  return M < 1 || N < 8 || N % 8 || K < 8 || K % 8 || x_stride % 8 || blocks < 1 || w_stages < 2 || x_stages < 2 ||
         w_stages > kMostStages || x_stages > kMostStages;
}
