// Y = X W^T + b for up to 256 rows of X on Hopper, with float32 sums and Y in bfloat16: W streamed once by the bulk copy
// engine, multiplied by wgmma. X and W are both bfloat16, or both of one byte: fp8 (e4m3) or whole numbers, a row of
// either times its scale, or fp8 with a scale for 128 k of a row of X and for each block of 128 rows by 128 k of W. See
// few_rows/hopper.py for the arithmetic.
//
// * A tile of a block is AR = 64 RM WGS rows of the left operand by NB of the right. With SWAP the left one is W and
//   all rows of X are the right one; else the left one is X. One warp fetches chunks of both, 128 bytes of k, into a
//   ring in shared memory, as far ahead as it has room; WGS warpgroups multiply, 64 RM rows of the left operand each.
// * PAIR blocks of a cluster have different rows on the left and the same on the right: each fetches a part of those
//   and sends it to both.
// * Work is cut in one of three ways. ranks = 0: the chunks of all tiles stand in one row, and every cluster takes an
//   equal stretch of it. What it has of a tile that begins before its stretch it leaves in memory; whoever has the
//   tile's first k comes to it last, and adds what the others left, in the order of k. ranks > 0: the k of a tile are
//   dealt out to the ranks of a cluster, which add their sums over each other's shared memory. ranks < 0: to as many
//   clusters, which add over memory. Both add in the order of the ranks, every rank a part of the tile.
//   With ranks = 1 some kernels can add in the same order as ``order`` ranks would, all parts in one block. With ranks = 0
//   and order = 0 stretches are of whole tiles.
// * GATE: half of a tile's rows of W are rows n of the gate, half rows N + n; Y is silu(one) times the other. With SWAP
//   eight rows of one follow eight of the other, so that a thread holds both sums of an element.
// * The first chunks of W may be asked for before the kernel that makes X has ended (``ahead``).
// * The L2 cache drops W before all else, unless told to ``keep`` it as other data.
// * Scales of rows come while the chunks do. A block multiplies its sums by them before it adds or stores any.
// * Scales of blocks: a chunk is as long as a block, so its products are summed apart and added times their scales. X is
//   the left operand then: a thread has the scales of two rows of X, and of the few blocks that its columns are of.

#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "../../lang/few_rows.cuh"
#include "../../lang/hopper.cuh"
#include "../../lang/parts.cuh"
#include "../../lang/wgmma.cuh"

using namespace few_rows;
using namespace hopper;

namespace {

constexpr int kMostStages = 16;

// fp8 (e4m3) with scales of blocks; other kinds are named as CUDA does: whole numbers of 8 bits are ``signed char``.
struct Fp8Blocks {
  __nv_fp8_e4m3 code;
};
constexpr int kBlock = 128;  // rows of W, and k, that share a scale

template <typename Number>
constexpr bool kBlocked = std::is_same_v<Number, Fp8Blocks>;
template <typename Number>
constexpr bool kWhole = std::is_same_v<Number, signed char>;
template <typename Number>
using Sum = std::conditional_t<kWhole<Number>, int, float>;

template <int ROWS>
constexpr int kBox = ROWS % 128 ? 64 : 128;  // rows of the left operand in one copy

// Of W with a gate: a box of eight rows of the gate and eight of the other factor in turn, by a chunk.
__device__ __forceinline__ void fetch_both(uint32_t to, const CUtensorMap* map, int k, int eights, uint32_t barrier,
                                           uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, "
      "%3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(k), "r"(0), "r"(eights), "r"(barrier), "l"(policy)
      : "memory");
}

#define SUMS32(KIND) OF16(KIND, c, 0)
#define SUMS48(KIND) OF16(KIND, c, 0), OF8(KIND, c, 16)
#define SUMS64(KIND) OF32(KIND, c, 0)
#define SUMS96(KIND) OF32(KIND, c, 0), OF16(KIND, c, 32)
#define SUMS112(KIND) OF32(KIND, c, 0), OF16(KIND, c, 32), OF8(KIND, c, 48)
#define SUMS128(KIND) OF64(KIND, c, 0)
#define SUMS160(KIND) OF64(KIND, c, 0), OF16(KIND, c, 64)
#define SUMS192(KIND) OF64(KIND, c, 0), OF32(KIND, c, 64)
#define SUMS208(KIND) OF64(KIND, c, 0), OF32(KIND, c, 64), OF8(KIND, c, 96)
#define SUMS224(KIND) OF64(KIND, c, 0), OF32(KIND, c, 64), OF16(KIND, c, 96)
#define SUMS256(KIND) OF64(KIND, c, 0), OF64(KIND, c, 64)
#define PRODUCT_OF(n, numbers, a, b, keep, type, signs, KIND)                                             \
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, " keep ", 1;\nwgmma.mma_async.sync.aligned.m64n" #n type \
               " {" numbers "}, " a ", " b ", p" signs ";\n}"                                             \
               : SUMS##n(KIND)                                                                            \
               : "l"(left), "l"(right), "n"(KEEP))
#define PRODUCT(n, numbers, a, b, keep)                                                              \
  if constexpr (NB == n && sizeof(Number) == 2)                                                      \
    PRODUCT_OF(n, numbers, a, b, keep, "k16.f32.bf16.bf16", ", 1, 1, 0, 0", "+f");                   \
  else if constexpr (NB == n && kWhole<Number>)                                                      \
    PRODUCT_OF(n, numbers, a, b, keep, "k32.s32.s8.s8", "", "+r");                                   \
  else if constexpr (NB == n)                                                                        \
    PRODUCT_OF(n, numbers, a, b, keep, "k32.f32.e4m3.e4m3", ", 1, 1", "+f");

// c += 64 rows at ``left`` times NB rows at ``right``, 32 bytes of k; with KEEP 0 what c was is dropped. Of warp w of the
// warpgroup, lane l: c[4 j], c[4 j + 1] are row 16 w + l / 4 on the left and rows 8 j + 2 (l % 4), + 1 on the right;
// c[4 j + 2], c[4 j + 3] the same 8 rows further down.
template <typename Number, int NB, int KEEP>
__device__ __forceinline__ void multiply(Sum<Number> (&c)[NB / 2], uint64_t left, uint64_t right) {
#ifdef TRANSECT_HOPPER
  PRODUCT(32, N0, "%16", "%17", "%18");
  PRODUCT(48, N0 N1H, "%24", "%25", "%26");
  PRODUCT(64, N0 N1, "%32", "%33", "%34");
  PRODUCT(96, N0 N1 N2, "%48", "%49", "%50");
  PRODUCT(112, N0 N1 N2 N3H, "%56", "%57", "%58");
  PRODUCT(128, N0 N1 N2 N3, "%64", "%65", "%66");
  PRODUCT(160, N0 N1 N2 N3 N4, "%80", "%81", "%82");
  PRODUCT(192, N0 N1 N2 N3 N4 N5, "%96", "%97", "%98");
  PRODUCT(208, N0 N1 N2 N3 N4 N5 N6H, "%104", "%105", "%106");
  PRODUCT(224, N0 N1 N2 N3 N4 N5 N6, "%112", "%113", "%114");
  PRODUCT(256, N0 N1 N2 N3 N4 N5 N6 N7, "%128", "%129", "%130");
#endif
}

// Scales of blocks for one warp's rows of X (the left operand) and the columns of a tile. A lane reads every fourth chunk's
// of its row, four chunks at a time, and has the others' by shuffles; those of W come one chunk ahead.
template <int RM, int NB, bool GATE>
struct BlockScales {
  static constexpr int SPAN = GATE ? NB / 2 : NB;
  static constexpr int STEP = (SPAN & -SPAN) < kBlock ? SPAN & -SPAN : kBlock;  // tiles begin at multiples of it
  static constexpr int MANY = (SPAN + kBlock - STEP - 1) / kBlock + 1;          // blocks of columns; of a gate twice
  const float *x, *w;
  int chunks, first;                             // of a row; of the columns, within their block
  float now[RM][2], next[RM][2], blocks[(GATE ? 2 : 1) * MANY];
  const float* at[(GATE ? 2 : 1) * MANY];

  __device__ __forceinline__ void read_rows(int chunk, int row0, int M, int lane) {
#pragma unroll
    for (int r = 0; r < RM; r++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        next[r][h] = __ldcg(x + (size_t)min(row0 + r * 64 + h * 8 + lane / 4, M - 1) * chunks +
                            min((chunk & ~3) + lane % 4, chunks - 1));
  }
  __device__ __forceinline__ void read_blocks(int chunk) {
#pragma unroll
    for (int b = 0; b < (GATE ? 2 : 1) * MANY; b++) blocks[b] = __ldg(at[b] + min(chunk, chunks - 1));
  }
  // Columns from n0 on; N is that of Y. Blocks that reach past the end are those before.
  __device__ __forceinline__ void begin(int chunk, int row0, int n0, int M, int N, int lane) {
    first = n0 % kBlock;
#pragma unroll
    for (int b = 0; b < MANY; b++) {
      const int block = min(n0 / kBlock + b, (N - 1) / kBlock);
      at[b] = w + (size_t)block * chunks;
      if (GATE) at[MANY + b] = w + (size_t)(N / kBlock + block) * chunks;
    }
    read_rows(chunk, row0, M, lane);
    read_blocks(chunk);
    turn(chunk, row0, M, lane);
  }
  __device__ __forceinline__ void turn(int chunk, int row0, int M, int lane) {
#pragma unroll
    for (int r = 0; r < RM; r++) now[r][0] = next[r][0], now[r][1] = next[r][1];
    read_rows(chunk + 4, row0, M, lane);
  }
  // c += sums, each times its scales.
  __device__ __forceinline__ void add(float (&c)[RM][NB / 2], const float (&sums)[RM][NB / 2], int chunk, int lane) const {
#pragma unroll
    for (int r = 0; r < RM; r++) {
      const int from = (lane & ~3) + (chunk & 3);
      const float low = __shfl_sync(0xFFFFFFFFu, now[r][0], from), high = __shfl_sync(0xFFFFFFFFu, now[r][1], from);
#pragma unroll
      for (int j = 0; j < NB / 8; j++) {
        const int half = GATE && j >= NB / 16, column = j * 8 - half * SPAN;
        float own = blocks[half * MANY];
#pragma unroll
        for (int b = 1; b < MANY; b++)
          if (first + column >= b * kBlock) own = blocks[half * MANY + b];
        const float both = low * own, both8 = high * own;
        c[r][4 * j] = fmaf(sums[r][4 * j], both, c[r][4 * j]);
        c[r][4 * j + 1] = fmaf(sums[r][4 * j + 1], both, c[r][4 * j + 1]);
        c[r][4 * j + 2] = fmaf(sums[r][4 * j + 2], both8, c[r][4 * j + 2]);
        c[r][4 * j + 3] = fmaf(sums[r][4 * j + 3], both8, c[r][4 * j + 3]);
      }
    }
  }
};

// Scales of rows of a block's tile in shared memory: of the rows of the left operand, then of the right.
template <typename Number, int AR, int NB>
constexpr int kScales = sizeof(Number) == 1 && !kBlocked<Number> ? AR + NB : 0;

// Kernels whose blocks can add the parts of K in the order in which ranks would: ``order`` parts, one after another.
template <typename Number, bool SWAP, bool GATE, int NB, int WGS, int BLOCKS>
constexpr bool kOrdered = sizeof(Number) == 2 && !SWAP && !GATE && (WGS == 1 ? NB <= 64 : BLOCKS == 1 && NB <= 96);

template <bool FIRST, typename One, typename Other>
__device__ __forceinline__ auto& pick(One& one, Other& other) {
  if constexpr (FIRST) return one;
  else return other;
}

template <bool VALUE>
struct Bool {
  static constexpr bool value = VALUE;
};

// Where a block's results go: to Y in pieces of 4 bytes, or (STAGED) first to shared memory, from where they go in
// pieces of 16. bias [N] or null.
struct Out {
  __nv_bfloat16* y;
  const __nv_bfloat16* bias;
  int M, N;
  // A warp's 16 rows of the left operand from ``left`` on by 8 rows of the right from ``right`` on; v as in
  // ``multiply``.
  template <bool SWAP, bool STAGED>
  __device__ __forceinline__ void store(int left, int right, float4 v, int lane, uint32_t staged = 0, int pitch = 0,
                                        int m0 = 0, int n0 = 0) const {
    uint32_t low, high;
    int m, n, m8, n8;
    if (SWAP) {
      const int row = left + lane / 4;
      const float b = bias && row < N ? __bfloat162float(bias[row]) : 0;
      const float b8 = bias && row + 8 < N ? __bfloat162float(bias[row + 8]) : 0;
      low = transposed(pack(v.x + b, v.y + b)), high = transposed(pack(v.z + b8, v.w + b8));
      m = m8 = right + lane / 4, n = left + lane % 4 * 2, n8 = n + 8;
    } else {
      m = left + lane / 4, m8 = m + 8, n = n8 = right + lane % 4 * 2;
      const float b = bias && n < N ? __bfloat162float(bias[n]) : 0,
                  b1 = bias && n < N ? __bfloat162float(bias[n + 1]) : 0;
      low = pack(v.x + b, v.y + b1), high = pack(v.z + b, v.w + b1);
    }
    if (STAGED) {
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(staged + (m - m0) * pitch + (n - n0) * 2), "r"(low) : "memory");
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(staged + (m8 - m0) * pitch + (n8 - n0) * 2), "r"(high) : "memory");
    } else {
      if (m < M && n < N) *(uint32_t*)(y + (size_t)m * N + n) = low;
      if (m8 < M && n8 < N) *(uint32_t*)(y + (size_t)m8 * N + n8) = high;
    }
  }
  // With a gate and W on the left: a warp's 8 columns of Y from ``left`` on by 8 rows from ``right`` on.
  template <bool STAGED>
  __device__ __forceinline__ void store_gated(int left, int right, float v, float next, int lane, uint32_t staged,
                                              int pitch, int n0) const {
    const uint32_t both = transposed(pack(v, next));
    const int m = right + lane / 4, n = left + lane % 4 * 2;
    if (STAGED) asm volatile("st.shared.b32 [%0], %1;" ::"r"(staged + m * pitch + (n - n0) * 2), "r"(both) : "memory");
    else if (m < M && n < N) *(uint32_t*)(y + (size_t)m * N + n) = both;
  }
};

__device__ __forceinline__ float4 add(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Of the J blocks of 8 columns every ``sharers``-th is this rank's: the sum of what all left of it, in the order of the
// ranks. Sixteen reads at a time, or each would wait for the one before.
template <int J, typename Read, typename Store>
__device__ __forceinline__ void add_shares(int rank, int sharers, Read read, Store store) {
  for (int j0 = rank; j0 < J; j0 += 4 * sharers) {
    float4 sum[4];
#pragma unroll
    for (int q = 0; q < 4; q++) sum[q] = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int other = 0; other < sharers; other++) {
      float4 v[4];
#pragma unroll
      for (int q = 0; q < 4; q++) v[q] = read(min(j0 + q * sharers, J - 1), other);
#pragma unroll
      for (int q = 0; q < 4; q++) sum[q] = add(sum[q], v[q]);
    }
#pragma unroll
    for (int q = 0; q < 4; q++)
      if (j0 + q * sharers < J) store(j0 + q * sharers, sum[q]);
  }
}

template <typename Number, bool SWAP, bool GATE, int NB, int WGS, int RM, int PAIR, int BLOCKS>
__global__ void __launch_bounds__(WGS * 128 + 32, BLOCKS)
    many_rows(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
              const float* x_scale, const float* scale, const __nv_bfloat16* bias, __nv_bfloat16* out, float4* parts,
              int* flags, int M, int N, int K, int ranks, int order, int stages, int box, int ahead, int keep) {
#ifdef TRANSECT_HOPPER
  constexpr int AR = 64 * RM * WGS, A_BYTES = AR * 128, B_BYTES = NB * 128, STAGE = A_BYTES + B_BYTES, J = NB / 8;
  constexpr int WORKERS = WGS * 128, CHUNK = kChunkOf<Number>, SCALES = kScales<Number, AR, NB>;
  constexpr bool BLOCKED = kBlocked<Number>, APART = BLOCKED || kWhole<Number>;
  constexpr bool WIDE = sizeof(Number) == 2;  // ``keep`` and ``order`` are of bfloat16
  static_assert(!BLOCKED || !SWAP);
  constexpr bool ORDERED = kOrdered<Number, SWAP, GATE, NB, WGS, BLOCKS>;
  constexpr bool GRID = !GATE && WGS * NB >= 512;  // there are registers for no way but to share a tile over memory
  constexpr bool EARLY = WGS * NB < 512;  // else there are no registers for scales that come while the chunks do
  constexpr int COLUMNS = (SWAP ? AR * PAIR : NB) / (GATE ? 2 : 1);
  constexpr int WIDTH = SWAP ? COLUMNS / PAIR : COLUMNS, PITCH = WIDTH * 2 + 16;  // of a block's results in shared memory
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) uint64_t barriers[2 * kMostStages];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Rows of the right operand that a block fetches: whole eights of the rows of X, or its part of the rows of W.
  const int share = !SWAP ? NB / PAIR : PAIR == 1 ? min(M, NB) : (M + 8 * PAIR - 1) / (8 * PAIR) * 8;
  const uint32_t ring = (shared_address(memory) + 1023) & ~1023u;
  uint32_t full = shared_address(barriers);
  asm volatile("" : "+r"(full));  // or the compiler makes it again for every chunk, from a slow register
  const uint32_t empty = full + 8 * kMostStages;
  const int blocks = PAIR * max(ranks, 1), spread = ranks < 0 ? -ranks : 1;  // of a cluster; clusters of a tile
  const int block = blockIdx.x % blocks, half = block % PAIR, local = block / PAIR;
  const int cluster = blockIdx.x / blocks, clusters = gridDim.x / blocks;
  const int own = cluster / spread, rank = ranks < 0 ? cluster % spread : local, sharers = ranks < 0 ? spread : ranks;
  const int chunks = (K + CHUNK - 1) / CHUNK, tiles = (N + COLUMNS - 1) / COLUMNS;
  // This block's stretch of the row of all chunks.
  const int first = ranks ? own * chunks + (int)((long long)chunks * rank / sharers)
                    : order || !WIDE ? (int)((long long)tiles * chunks * cluster / clusters)
                            : (int)((long long)tiles * cluster / clusters) * chunks;
  const int last = ranks ? own * chunks + (int)((long long)chunks * (rank + 1) / sharers)
                   : order || !WIDE ? (int)((long long)tiles * chunks * (cluster + 1) / clusters)
                           : (int)((long long)tiles * (cluster + 1) / clusters) * chunks;
  auto left_of = [&](int tile) { return SWAP ? (tile * PAIR + half) * AR : half * AR; };
  auto right_of = [&](int tile) { return SWAP ? 0 : tile * COLUMNS; };

  let_next_begin();
  if (threadIdx.x == WGS * 128) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&a_map) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&b_map) : "memory");
  }
  if (!ahead) wait_for_previous();
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, WGS * PAIR);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (PAIR > 1) cluster_meet();

  if (warp == WGS * 4) {
    if (one_lane()) {
      // Copies end with the rows of X: what reaches past them is slow.
      const int left_rows = SWAP ? AR : max(0, min(AR, M - half * AR));
      const int bytes = (left_rows + box - 1) / box * box * 128 + (SWAP ? PAIR * share * 128 : B_BYTES);
      // A division a chunk would take longer than the products of a narrow tile.
      int tile = first / chunks, chunk = first - tile * chunks;
      auto next = [&] {
        if (++chunk == chunks) chunk = 0, tile++;
      };
      const uint64_t of_weight = WIDE && keep ? kReadAsUsual : kReadOnce;
      auto fetch_a = [&](int slot) {
        const int k = chunk * CHUNK, row0 = left_of(tile);
        for (int row = 0; row < left_rows; row += box) {
          const uint32_t to = ring + slot * STAGE + row * 128;
          if (SWAP && GATE) fetch_both(to, &a_map, k, (row0 + row) / 16, full + 8 * slot, of_weight);
          else fetch(to, &a_map, k, row0 + row, full + 8 * slot, SWAP ? of_weight : kReadOften);
        }
      };
      auto fetch_b = [&](int slot) {
        const int k = chunk * CHUNK, row = right_of(tile) + half * (GATE && !SWAP ? N : share);
        const uint32_t to = ring + slot * STAGE + A_BYTES + half * share * 128;
        if (PAIR > 1)
          fetch_for_all(to, &b_map, k, row, full + 8 * slot, ((1 << PAIR) - 1) << (local * PAIR),
                        SWAP ? kReadOften : of_weight);
        else
          fetch(to, &b_map, k, row, full + 8 * slot, SWAP ? kReadOften : of_weight);
        if (GATE && !SWAP && PAIR == 1) fetch(to + B_BYTES / 2, &b_map, k, row + N, full + 8 * slot, of_weight);
      };
      const int begun = min(stages, last - first), tile0 = tile, chunk0 = chunk;
      for (int i = 0; i < begun; i++, next()) {
        barrier_expect(full + 8 * i, bytes);
        if (SWAP) fetch_a(i);
        else fetch_b(i);
      }
      if (ahead) wait_for_previous();
      tile = tile0, chunk = chunk0;
      for (int i = 0; i < begun; i++, next())
        if (SWAP) fetch_b(i);
        else fetch_a(i);
      int slot = 0, parity = 0;
      for (int i = first + begun; i < last; i++, next()) {
        barrier_poll(empty + 8 * slot, parity);
        barrier_expect(full + 8 * slot, bytes);
        fetch_a(slot);
        fetch_b(slot);
        if (++slot == stages) slot = 0, parity ^= 1;
      }
    }
    __syncwarp();
  } else {
    const Out y = {out, bias, M, N};
    const int group = warp / 4, t = threadIdx.x;
    float* scales = (float*)(memory + (ring - shared_address(memory)) + stages * STAGE);
    // The scale of row p of the left operand, or p - AR of the right one.
    auto scale_of = [&](int tile, int p) {
      const int row = p < AR ? left_of(tile) + p : right_of(tile) + p - AR;
      if (SWAP != (p < AR)) return x_scale + min(row, M - 1);
      int of = row;
      if (GATE && SWAP) of = row / 16 * 8 + row % 8 + (row % 16 < 8 ? 0 : N);
      if (GATE && !SWAP && p - AR >= NB / 2) of = row - NB / 2 + N;
      return scale + min(of, (GATE ? 2 * N : N) - 1);
    };
    if (SCALES || BLOCKED) wait_for_previous();
    float c[RM][NB / 2];
    // Products are summed in ``sums``: c itself, or whole numbers or a chunk apart.
    Sum<Number> apart[APART ? RM : 1][APART ? NB / 2 : 1];
    auto& sums = pick<APART>(apart, c);
    const int row0 = half * AR + group * (RM * 64) + warp % 4 * 16;  // of X on the left
    BlockScales<BLOCKED ? RM : 1, BLOCKED ? NB : 32, BLOCKED && GATE> held = {x_scale, scale, chunks};
    const uint32_t a_first = place(ring + group * (RM * 8192)), b_first = place(ring + A_BYTES);
    int slot = 0, parity = 0, release = -1;
    auto let_go = [&](int s) {
      if (PAIR == 1 && t % 128 == 0) barrier_arrive(empty + 8 * s);
      if (PAIR > 1 && t % 128 < PAIR) barrier_arrive_of(empty + 8 * s, local * PAIR + t % 128);
    };
    for (int i = first; i < last;) {
      const int tile = i / chunks, end = min(last, (tile + 1) * chunks), begun = i;
      const bool begins = i == tile * chunks;
      float own[(SCALES + WORKERS - 1) / WORKERS + 1];
#pragma unroll
      for (int p = 0; p < SCALES; p += WORKERS)
        if (EARLY && p + t < SCALES) own[p / WORKERS] = __ldcg(scale_of(tile, p + t));
      if constexpr (BLOCKED) held.begin(i % chunks, row0, right_of(tile), M, N, lane);
      float total[ORDERED ? RM : 1][ORDERED ? NB / 2 : 1] = {};
      for (int part = 1; part <= (ORDERED ? max(order, 1) : 1); part++) {
#pragma unroll
        for (int r = 0; r < RM; r++)
#pragma unroll
          for (int e = 0; e < NB / 2; e++) {
            c[r][e] = 0;
            if (APART) sums[r][e] = 0;
          }
        hold(sums);
        const int stop = ORDERED && order > 1 ? tile * chunks + (int)((long long)chunks * part / order) : end;
        for (; i < stop; i++) {
          barrier_poll(full + 8 * slot, parity);
          // Counted on, or made again where registers are too few for that.
          const uint32_t stage = place(ring + slot * STAGE);
          const uint32_t a_at = WIDE ? a_first + slot * (STAGE / 16) : stage + group * (RM * 512);
          const uint32_t b_at = WIDE ? b_first + slot * (STAGE / 16) : stage + A_BYTES / 16;
          products_begin();
#pragma unroll
          for (int r = 0; r < RM; r++)
            multiply<Number, NB, !BLOCKED>(sums[r], matrix_at(a_at + r * 512), matrix_at(b_at));
#pragma unroll
          for (int k = 1; k < 4; k++)
#pragma unroll
            for (int r = 0; r < RM; r++)
              multiply<Number, NB, 1>(sums[r], matrix_at(a_at + r * 512 + k * 2), matrix_at(b_at + k * 2));
          products_end();
          if constexpr (BLOCKED) {
            const int chunk = i - tile * chunks;
            if (chunk % 4 == 0 && i > begun) held.turn(chunk, row0, M, lane);
            products_wait<0>();
            hold(sums);
            let_go(slot);
            held.add(c, sums, chunk, lane);
            held.read_blocks(chunk + 1);
          } else {
            products_wait<1>();
            if (release >= 0) let_go(release);
            release = slot;
          }
          if (++slot == stages) slot = 0, parity ^= 1;
        }
        if constexpr (!BLOCKED) {
          products_wait<0>();
          hold(sums);
          let_go(release);
          release = -1;
        }
        if constexpr (kWhole<Number>)
#pragma unroll
          for (int r = 0; r < RM; r++)
#pragma unroll
            for (int e = 0; e < NB / 2; e++) c[r][e] = sums[r][e];
        if constexpr (ORDERED) {
          if (order > 1)
#pragma unroll
            for (int r = 0; r < RM; r++)
#pragma unroll
              for (int e = 0; e < NB / 2; e++) total[r][e] += c[r][e], c[r][e] = total[r][e];
        }
      }
      if (SCALES) {
        asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");  // nobody reads those of the tile before
#pragma unroll
        for (int p = 0; p < SCALES; p += WORKERS)
          if (p + t < SCALES) scales[p + t] = EARLY ? own[p / WORKERS] : __ldcg(scale_of(tile, p + t));
        asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
#pragma unroll
        for (int r = 0; r < RM; r++) {
          const float* left = scales + (group * RM + r) * 64 + warp % 4 * 16 + lane / 4;
          const float low = left[0], high = left[8];
#pragma unroll
          for (int j = 0; j < J; j++) {
            const float2 right = *(const float2*)(scales + AR + j * 8 + lane % 4 * 2);
            // Not fused with the bias, so that every kernel of fp8 rounds alike.
            c[r][4 * j] = __fmul_rn(c[r][4 * j], low * right.x), c[r][4 * j + 1] = __fmul_rn(c[r][4 * j + 1], low * right.y);
            c[r][4 * j + 2] = __fmul_rn(c[r][4 * j + 2], high * right.x);
            c[r][4 * j + 3] = __fmul_rn(c[r][4 * j + 3], high * right.y);
          }
        }
      }
      if (GRID || (!GATE && sharers > 1)) break;
      if (!begins) {  // leave it for the block that has the tile's first k
        float4* to = parts + (size_t)blockIdx.x * (RM * J * WORKERS) + t;
#pragma unroll
        for (int r = 0; r < RM; r++)
#pragma unroll
          for (int j = 0; j < J; j++)
            __stcg(to + (r * J + j) * WORKERS,
                   make_float4(c[r][4 * j], c[r][4 * j + 1], c[r][4 * j + 2], c[r][4 * j + 3]));
        asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
        if (t == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flags + blockIdx.x) : "memory");
        continue;
      }
      if (end < (tile + 1) * chunks) {
        for (int other = cluster + 1; other < clusters; other++) {
          if ((long long)tiles * chunks * other / clusters >= (tile + 1) * chunks) break;
          const int from_block = other * PAIR + half;
          if (t == 0) {
            int there = 0;
            while (!there) {
              asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(flags + from_block) : "memory");
            }
            flags[from_block] = 0;  // ready for the next launch
          }
          asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
          const float4* from = parts + (size_t)from_block * (RM * J * WORKERS) + t;
#pragma unroll
          for (int r = 0; r < RM; r++)
#pragma unroll
            for (int j = 0; j < J; j++) {
              const float4 v = __ldcg(from + (r * J + j) * WORKERS);
              c[r][4 * j] += v.x, c[r][4 * j + 1] += v.y, c[r][4 * j + 2] += v.z, c[r][4 * j + 3] += v.w;
            }
        }
      }
      // The sums to Y; those of the last tile by way of the ring, which is free then.
      const int m0 = SWAP ? 0 : left_of(tile), n0 = SWAP ? left_of(tile) / (GATE ? 2 : 1) : right_of(tile);
      auto store_all = [&](auto staged) {
#pragma unroll
        for (int r = 0; r < RM; r++) {
          const int left = left_of(tile) + (group * RM + r) * 64 + warp % 4 * 16, right = right_of(tile);
          if constexpr (GATE && SWAP) {
#pragma unroll
            for (int j = 0; j < J; j++) {
              const float* sums = c[r] + 4 * j;
              y.store_gated<decltype(staged)::value>(left / 2, j * 8, gated(sums[0], sums[2]), gated(sums[1], sums[3]),
                                                     lane, ring, PITCH, n0);
            }
          } else if constexpr (GATE) {
#pragma unroll
            for (int j = 0; j < J / 2; j++) {
              const float *g = c[r] + 4 * j, *u = c[r] + 4 * (j + J / 2);
              const float4 v = make_float4(gated(g[0], u[0]), gated(g[1], u[1]), gated(g[2], u[2]), gated(g[3], u[3]));
              y.store<SWAP, decltype(staged)::value>(left, right + j * 8, v, lane, ring, PITCH, m0, n0);
            }
          } else {
#pragma unroll
            for (int j = 0; j < J; j++) {
              const float4 v = make_float4(c[r][4 * j], c[r][4 * j + 1], c[r][4 * j + 2], c[r][4 * j + 3]);
              y.store<SWAP, decltype(staged)::value>(left, right + j * 8, v, lane, ring, PITCH, m0, n0);
            }
          }
        }
      };
      if (i < last) {
        store_all(Bool<false>());
      } else {
        asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
        store_all(Bool<true>());
        asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
        const int rows = min(M - m0, SWAP ? NB : AR);
        for (int p = t; p < rows * (WIDTH / 8); p += WORKERS) {
          const int m = p / (WIDTH / 8), n = p % (WIDTH / 8) * 8;
          const uint4 v = read16(ring + m * PITCH + n * 2);
          if (n0 + n < N) *(uint4*)(out + (size_t)(m0 + m) * N + n0 + n) = v;
        }
      }
    }
    if (!GATE && ranks < 0) {
      float4* to = parts + (size_t)blockIdx.x * (RM * J * WORKERS) + t;
#pragma unroll
      for (int r = 0; r < RM; r++)
#pragma unroll
        for (int j = 0; j < J; j++)
          __stcg(to + (r * J + j) * WORKERS,
                 make_float4(c[r][4 * j], c[r][4 * j + 1], c[r][4 * j + 2], c[r][4 * j + 3]));
      asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
      int* counter = flags + own * PAIR + half;
      if (t == 0) {
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
        int arrived = 0;
        while ((arrived & 0xFFFF) < sharers) {
          asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
        }
      }
      asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
#pragma unroll
      for (int r = 0; r < RM; r++) {
        const int left = left_of(own) + (group * RM + r) * 64 + warp % 4 * 16;
        const float4* from = parts + ((size_t)(own * sharers) * PAIR + half) * (RM * J * WORKERS) + r * J * WORKERS + t;
        add_shares<J>(
            rank, sharers,
            [&](int j, int other) { return __ldcg(from + ((size_t)other * PAIR * RM * J + j) * WORKERS); },
            [&](int j, float4 sum) { y.store<SWAP, false>(left, right_of(own) + j * 8, sum, lane); });
      }
      asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
      if (t == 0 && atomicAdd(counter, 1 << 16) >> 16 == sharers - 1) *counter = 0;  // ready for the next launch
    }
    if (!GATE && !GRID && ranks > 1) {  // nobody reads the ring any more: the sums take its place
      asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
#pragma unroll
      for (int r = 0; r < RM; r++)
#pragma unroll
        for (int j = 0; j < J; j++)
          asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(ring + ((r * J + j) * WORKERS + t) * 16),
                       "f"(c[r][4 * j]), "f"(c[r][4 * j + 1]), "f"(c[r][4 * j + 2]), "f"(c[r][4 * j + 3])
                       : "memory");
    }
  }
  if (!GATE && !GRID && ranks > 1) {
    __syncwarp();
    cluster_barrier();
    if (warp < WGS * 4) {
      const Out y = {out, bias, M, N};
      const int group = warp / 4;
#pragma unroll
      for (int r = 0; r < RM; r++) {
        const int left = left_of(own) + (group * RM + r) * 64 + warp % 4 * 16;
        add_shares<J>(rank, ranks,
                      [&](int j, int other) {
                        return read4_of_rank(ring + ((r * J + j) * WORKERS + threadIdx.x) * 16, other * PAIR + half);
                      },
                      [&](int j, float4 sum) { y.store<SWAP, false>(left, right_of(own) + j * 8, sum, lane); });
      }
    }
    __syncwarp();
  }
  if (blocks > 1) cluster_meet();  // nobody leaves while others reach into its shared memory
#endif
}

// x_scale [M] and scale [N] (with GATE [2 N]) are of numbers of one byte; of Fp8Blocks [M, K / 128] and [N / 128, K / 128]
// (with GATE [2 N / 128, K / 128], N a multiple of 128), rounded up. The rest is as of transect_small_matmul_hopper.
template <typename Number, bool SWAP, bool GATE, int NB, int WGS, int RM, int PAIR, int BLOCKS>
int start(const void* x, const void* weight, const void* x_scale, const void* scale, const void* bias, void* out,
          void* parts, void* flags, int M, int N, int K, long long x_stride, long long w_stride, int ranks, int clusters,
          int order, int stages, int dependent, int keep, void* stream) {
  constexpr int AR = 64 * RM * WGS, STAGE = (AR + NB) * 128, COLUMNS = (SWAP ? AR * PAIR : NB) / (GATE ? 2 : 1);
  constexpr int CHUNK = kChunkOf<Number>;
  const int tiles = (N + COLUMNS - 1) / COLUMNS, chunks = (K + CHUNK - 1) / CHUNK;
  const int shared = stages * STAGE + 1024 + kScales<Number, AR, NB> * 4;
  if (M > (SWAP ? NB : AR * PAIR) || stages < 2 || stages > kMostStages || shared > kMostShared - 1024) return -1;
  if (ranks > 1 && (AR * NB * 4 > stages * STAGE || ranks * PAIR > 8 || ranks > chunks)) return -1;
  if (ranks < 0 && (ranks < -8 || -ranks > chunks)) return -1;
  if (order > 1 && (!kOrdered<Number, SWAP, GATE, NB, WGS, BLOCKS> || ranks != 1 || order > chunks)) return -1;
  if (!ranks && clusters > (order ? (long long)tiles * chunks : tiles)) return -1;
  if (GATE && (bias || ranks < 0 || ranks > 1 || (kBlocked<Number> && N % kBlock))) return -1;
  int box = kBox<AR>;  // rows of the left operand in a copy
  if (!SWAP && M <= box) box = M;
  else if (!SWAP)
    while (box > 8 && M % box) box /= 2;
  const int rows = GATE ? 2 * N : N, share = PAIR == 1 ? (M < NB ? M : NB) : (M + 8 * PAIR - 1) / (8 * PAIR) * 8;
  if (SWAP && PAIR * share > NB) return -1;
  CUtensorMap a_map, b_map;
  if (describe<Number>(&a_map, SWAP ? weight : x, SWAP ? rows : M, K, SWAP ? w_stride : x_stride, box, SWAP && GATE) ||
      describe<Number>(&b_map, SWAP ? x : weight, SWAP ? M : rows, K, SWAP ? x_stride : w_stride,
               SWAP ? share : GATE ? NB / 2 : NB / PAIR))
    return -2;
  const int blocks = PAIR * (ranks > 0 ? ranks : 1);
  const int grid = (ranks > 0 ? tiles : ranks < 0 ? tiles * -ranks : clusters) * blocks;
  return (int)launch(many_rows<Number, SWAP, GATE, NB, WGS, RM, PAIR, BLOCKS>, grid, WGS * 128 + 32, shared, blocks,
                     dependent > 0, stream, a_map, b_map, (const float*)x_scale, (const float*)scale,
                     (const __nv_bfloat16*)bias, (__nv_bfloat16*)out, (float4*)parts, (int*)flags, M, N, K, ranks, order, stages, box, (int)(dependent > 1), keep);
}

}  // namespace

