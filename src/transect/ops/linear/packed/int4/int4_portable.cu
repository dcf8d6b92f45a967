// Y = X W^T + b for a few rows of X, bfloat16 in and out, float32 sums, and W in 4-bit codes with a scale and a zero for
// each group, as int4_packing.py arranges it: pieces of 16 rows by 128 k, streamed once and decoded in registers. It runs
// on compute capability 8.0 and later, with 99 KiB of shared memory; on Hopper int4_matmul.cu is quicker.
//
// * Blocks take an even share of the sixteens of rows each, in groups of RB, and each group all along K. The warps of a
//   block take every so-many-th span of 128 k. A warp streams its own spans of W and X through its own ring of buffers in
//   shared memory by asynchronous copies; the parts of sums are added up when a group ends, always in the same order.
// * A code c enters the product as 128 + c, whose bits are those of 128 with the code in the lowest places. What that
//   adds, 128 times the sum of x, is taken off together with the zero: the sum of x is a product with ones.
// * GATE: sixteens of a gate's rows and of the other factor's are in turn; Y [M, N / 2] is silu(one) times the other.

#include "../../../lang/few_rows.cuh"
#include "../../../lang/parts.cuh"
#include "int4_codes.cuh"

#define TRANSECT_PARTS 3

using namespace few_rows;

namespace {

template <int COLUMNS>
constexpr int kPitch = COLUMNS + 4;  // floats between the rows of X in a warp's sums

template <int PENDING>
__device__ __forceinline__ void wait_for_stage(int stages) {
  if (stages <= 2) wait_groups<0>();
  else if (stages == 3) wait_groups<1>();
  else wait_groups<PENDING>();
}

template <int GROUP, int RB, int NT>
__global__ void __launch_bounds__(256, 1)
    int4_portable(const __nv_bfloat16* x, const unsigned char* weight, const __nv_bfloat16* bias, __nv_bfloat16* out,
                  int M, int N, int K, long long x_stride, int per, int row_tiles, int stages, int gate, int ahead) {
  constexpr int TILE = kTile<GROUP>, ROWS = NT * 8, COLUMNS = RB * 16, GROUPS = kChunk / GROUP, EACH = GROUP / 32;
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int row_tile = blockIdx.x % row_tiles, share = blockIdx.x / row_tiles;
  const int m0 = row_tile * ROWS, rows = min(ROWS, M - m0);
  const int chunks = K / kChunk, sixteens = (N + 15) / 16, first = share * per, last = min(sixteens, first + per);
  const int groups = (last - first + RB - 1) / RB, steps = (chunks + warps - 1) / warps, total = groups * steps;
  const int stage_bytes = RB * TILE + rows * kXPitch;
  float* sums = (float*)(memory + warps * stages * stage_bytes);
  const uint32_t ring = shared_address(memory) + warp * stages * stage_bytes;

  let_next_begin();
  if (!ahead) wait_for_previous();

  // Blocks begin at different spans, or all would ask for the same lines of X at the same time.
  const int rotation = share % steps;
  auto chunk_of = [&](int step) {
    const int rotated = step + rotation;
    return (rotated < steps ? rotated : rotated - steps) * warps + warp;
  };
  auto fetch_w = [&](int slot, int group, int step) {
    const int chunk = chunk_of(step), sixteen = first + group * RB;
    const int pieces = chunk < chunks ? min(RB, last - sixteen) * (TILE / 16) : 0;
    const unsigned char* from = weight + ((size_t)min(chunk, chunks - 1) * sixteens + sixteen) * TILE;
    const uint32_t to = ring + slot * stage_bytes;
#pragma unroll
    for (int i = 0; i < (RB * TILE / 16 + 31) / 32; i++) {
      const int piece = i * 32 + lane;
      if (piece < RB * TILE / 16) copy16_once(to + piece * 16, piece < pieces ? from + piece * 16 : weight, piece < pieces);
    }
  };
  // Two rows of X at a time, 16 lanes each.
  auto fetch_x = [&](int slot, int step) {
    const int chunk = chunk_of(step), k = chunk * kChunk + lane % 16 * 8;
    for (int row = lane / 16; row < rows; row += 2)
      copy16(ring + slot * stage_bytes + RB * TILE + row * kXPitch + lane % 16 * 16,
             x + (m0 + row) * x_stride + (chunk < chunks ? k : 0), chunk < chunks);
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

  uint32_t x_at[NT];  // rows past the end read the last one: what they give is not stored
#pragma unroll
  for (int tile = 0; tile < NT; tile++)
    x_at[tile] = RB * TILE + min(tile * 8 + lane % 8, rows - 1) * kXPitch + lane / 8 * 16;
  constexpr uint32_t ones[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
  float acc[RB][NT][4] = {};
  int slot = 0, step = 0, group = 0;
  for (int i = 0; i < total; i++) {
    wait_for_stage<2>(stages);
    __syncwarp();  // the copies of all lanes have landed, and all lanes have read the slot that is filled again now
    if (load_group < groups) {
      const int free = slot == 0 ? stages - 1 : slot - 1;
      fetch_w(free, load_group, load_step);
      fetch_x(free, load_step);
    }
    end_group();
    advance();
    const uint32_t from = ring + slot * stage_bytes;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      float dot[RB][NT][4] = {}, sum[NT][4] = {};
#pragma unroll
      for (int e = 0; e < EACH; e++) {  // 32 k
        const int at = g * EACH + e;
        uint32_t b[NT][4];
#pragma unroll
        for (int tile = 0; tile < NT; tile++) {
          read_matrices(b[tile], from + x_at[tile] + at * 64);
          multiply(sum[tile], ones, b[tile][0], b[tile][1]);
          multiply(sum[tile], ones, b[tile][2], b[tile][3]);
        }
#pragma unroll
        for (int r = 0; r < RB; r++) {
          uint2 w;
          asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                       : "=r"(w.x), "=r"(w.y)
                       : "r"(from + r * TILE + at / 2 * 512 + lane * 16 + at % 2 * 8));
          const uint32_t a[4] = {as_pair(w.x), as_pair(w.x >> 4), as_pair(w.x >> 8), as_pair(w.x >> 12)};
          const uint32_t c[4] = {as_pair(w.y), as_pair(w.y >> 4), as_pair(w.y >> 8), as_pair(w.y >> 12)};
#pragma unroll
          for (int tile = 0; tile < NT; tile++) {
            multiply(dot[r][tile], a, b[tile][0], b[tile][1]);
            multiply(dot[r][tile], c, b[tile][2], b[tile][3]);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < RB; r++) {
        uint2 both;  // of rows lane / 4 and 8 below: scale in the low half, zero in the high one
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(both.x), "=r"(both.y)
                     : "r"(from + r * TILE + 1024 + g * 64 + lane / 4 * 8));
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const uint32_t word = c < 2 ? both.x : both.y;
          const float scale = __uint_as_float(word << 16), zero = __uint_as_float(word & 0xFFFF0000u);
          const float less = fmaf(-128.f, scale, zero);
#pragma unroll
          for (int tile = 0; tile < NT; tile++)
            acc[r][tile][c] = fmaf(scale, dot[r][tile][c], fmaf(less, sum[tile][c], acc[r][tile][c]));
        }
      }
    }
    slot = slot + 1 == stages ? 0 : slot + 1;
    if (++step < steps) continue;
    float* mine = sums + warp * ROWS * kPitch<COLUMNS>;
#pragma unroll
    for (int r = 0; r < RB; r++)
#pragma unroll
      for (int tile = 0; tile < NT; tile++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
          mine[(tile * 8 + lane % 4 * 2 + c % 2) * kPitch<COLUMNS> + r * 16 + c / 2 * 8 + lane / 4] = acc[r][tile][c];
          acc[r][tile][c] = 0;
        }
    __syncthreads();
    const int n0 = (first + group * RB) * 16;
    auto added = [&](int m, int column) {
      const float* at = sums + m * kPitch<COLUMNS> + column;
      float whole = 0;
#pragma unroll 4
      for (int w = 0; w < warps; w++) whole += at[w * ROWS * kPitch<COLUMNS>];
      return whole;
    };
    if (gate) {
      for (int e = threadIdx.x; e < rows * COLUMNS / 2; e += blockDim.x) {
        const int m = e / (COLUMNS / 2), n = e % (COLUMNS / 2);
        if (n0 / 2 + n >= last * 8) continue;
        const float one = added(m, n / 16 * 32 + n % 16), other = added(m, n / 16 * 32 + 16 + n % 16);
        out[(size_t)(m0 + m) * (N / 2) + n0 / 2 + n] = __float2bfloat16(one / (1 + __expf(-one)) * other);
      }
    } else {
      for (int e = threadIdx.x; e < rows * COLUMNS; e += blockDim.x) {
        const int m = e / COLUMNS, n = e % COLUMNS;
        if (n0 + n >= min(N, last * 16)) continue;
        const float v = added(m, n) + (bias ? __bfloat162float(bias[n0 + n]) : 0.f);
        out[(size_t)(m0 + m) * N + n0 + n] = __float2bfloat16(v);
      }
    }
    __syncthreads();
    step = 0;
    group++;
  }
}

template <int GROUP, int RB, int NT>
int start_portable(const void* x, const void* weight, const void* bias, void* out, int M, int N, int K,
                   long long x_stride, int per, int warps, int stages, int gate, int dependent, void* stream) {
  constexpr int ROWS = NT * 8, COLUMNS = RB * 16;
  const int shares = ((N + 15) / 16 + per - 1) / per, row_tiles = (M + ROWS - 1) / ROWS, rows = M < ROWS ? M : ROWS;
  const int shared =
      warps * (stages * (RB * kTile<GROUP> + rows * kXPitch) + ROWS * kPitch<COLUMNS> * (int)sizeof(float));
  if (shared > kMostShared) return -1;
  return (int)launch(int4_portable<GROUP, RB, NT>, shares * row_tiles, warps * 32, shared, 1, dependent > 0, stream,
                     (const __nv_bfloat16*)x, (const unsigned char*)weight, (const __nv_bfloat16*)bias,
                     (__nv_bfloat16*)out, M, N, K, x_stride, per, row_tiles, stages, gate, (int)(dependent > 1));
}

// More rows of X: NT eights of them at a time, which all warps of a block share, and for each warp its own two sixteens
// of rows of W. A weight is rounded to bfloat16, as in block_tiles.cuh: a code is a bfloat16 c 2^-133 as it stands, and one
// fused multiplication and addition of two at a time makes (scale c + zero) 2^-53 of it. A block brings spans of 128 k of
// W and X into one ring. (Its copies have no cache hint: nvcc 13.0 compiles
// some that have one wrongly, see docs/lab-notes/int4.md.) Blocks may share K: each leaves its part of the sums in
// ``parts``, as its threads hold them, and the last to arrive at a tile adds all of them, in the order of the parts.
constexpr int kWarps = 8, kThreads = kWarps * 32, kSixteens = 2 * kWarps;  // of rows of W in a tile

__device__ __forceinline__ uint32_t fused(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t v;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}

__device__ __forceinline__ uint32_t twice(float v) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(v, v);
  return *(const uint32_t*)&both;
}

template <int GROUP, int NT>
__global__ void __launch_bounds__(kThreads, 1)
    int4_portable_tiles(const __nv_bfloat16* x, const unsigned char* weight, const __nv_bfloat16* bias,
                        __nv_bfloat16* out, float4* parts, unsigned* counters, int M, int N, int K,
                        long long x_stride, int row_tiles, int split, int stages, int gate) {
  constexpr int TILE = kTile<GROUP>, ROWS = NT * 8, EACH = GROUP / 32;
  constexpr int W_BYTES = kSixteens * TILE, STAGE = W_BYTES + ROWS * kXPitch;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ unsigned arrived[1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sixteens = (N + 15) / 16, tiles = (sixteens + kSixteens - 1) / kSixteens;
  const int tile_n = blockIdx.x % tiles, tile_m = blockIdx.x / tiles % row_tiles, part = blockIdx.x / (tiles * row_tiles);
  unsigned* counter = counters + tile_m * tiles + tile_n;
  const int m0 = tile_m * ROWS, rows = min(ROWS, M - m0), first = tile_n * kSixteens;
  const int chunks = K / kChunk, begin = (int)((long long)chunks * part / split);
  const int total = (int)((long long)chunks * (part + 1) / split) - begin;
  const uint32_t ring = shared_address(memory);

  let_next_begin();
  wait_for_previous();
  // Each thread brings the same pieces of every span. Rows past the end are left as they are: their sums are not stored.
  const int pieces = min(kSixteens, sixteens - first) * (TILE / 16), row = threadIdx.x / 16;
  const size_t span = (size_t)sixteens * TILE, rows_on = kThreads / 16 * x_stride;
  const unsigned char* w_from = weight + begin * span + (size_t)first * TILE + threadIdx.x * 16;
  const __nv_bfloat16* x_from = x + (m0 + row) * x_stride + (size_t)begin * kChunk + threadIdx.x % 16 * 8;
  const uint32_t w_to = ring + threadIdx.x * 16, x_to = ring + W_BYTES + row * kXPitch + threadIdx.x % 16 * 16;
  auto fetch = [&](int slot) {
#pragma unroll
    for (int i = 0; i * kThreads < W_BYTES / 16; i++)
      if (i * kThreads + (int)threadIdx.x < pieces) copy16(w_to + slot * STAGE + i * kThreads * 16, w_from + i * kThreads * 16, true);
#pragma unroll
    for (int i = 0; i * kThreads < ROWS * 16; i++)
      if (i * (kThreads / 16) + row < rows)
        copy16(x_to + slot * STAGE + i * (kThreads / 16) * kXPitch, x_from + i * rows_on, true);
    w_from += span, x_from += kChunk;
  };
  for (int s = 0; s < stages - 1; s++) {
    if (s < total) fetch(s);
    end_group();
  }
  const uint32_t x_at = W_BYTES + lane % 8 * kXPitch + lane / 8 * 16;
  float acc[2][NT][4] = {};
  int slot = 0;
  for (int step = 0; step < total; step++) {
    wait_for_stage<2>(stages);
    __syncthreads();  // all copies of this span have landed, and the slot that is filled again has been read
    if (step + stages - 1 < total) fetch(slot == 0 ? stages - 1 : slot - 1);
    end_group();
    const uint32_t from = ring + slot * STAGE;
    uint4 codes[2];                    // of 64 k: 16 bytes of a lane at a time meet no bank twice
    uint32_t scale[2][2], zero[2][2];  // of rows lane / 4 and, with codes four bits up, lane / 4 + 8
#pragma unroll
    for (int at = 0; at < 4; at++) {  // 32 k
      if (at % EACH == 0) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          uint2 both;  // scale in the low half, zero in the high one
          asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                       : "=r"(both.x), "=r"(both.y)
                       : "r"(from + (warp * 2 + r) * TILE + 1024 + at / EACH * 64 + lane / 4 * 8));
          scale[r][0] = twice(__uint_as_float(both.x << 16) * 0x1p80f);
          scale[r][1] = twice(__uint_as_float(both.y << 16) * 0x1p76f);
          zero[r][0] = twice(__uint_as_float(both.x & 0xFFFF0000u) * 0x1p-53f);
          zero[r][1] = twice(__uint_as_float(both.y & 0xFFFF0000u) * 0x1p-53f);
        }
      }
      uint32_t a[2][2][4];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        if (at % 2 == 0) codes[r] = read16(from + (warp * 2 + r) * TILE + at / 2 * 512 + lane * 16);
        const uint32_t one = at % 2 ? codes[r].z : codes[r].x, other = at % 2 ? codes[r].w : codes[r].y;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint32_t mask = i % 2 ? 0x00F000F0u : 0x000F000Fu;
          a[r][0][i] = fused(one >> (i / 2 * 8) & mask, scale[r][i % 2], zero[r][i % 2]);
          a[r][1][i] = fused(other >> (i / 2 * 8) & mask, scale[r][i % 2], zero[r][i % 2]);
        }
      }
#pragma unroll
      for (int tile = 0; tile < NT; tile++) {
        uint32_t b[4];
        read_matrices(b, from + x_at + tile * 8 * kXPitch + at * 64);
#pragma unroll
        for (int r = 0; r < 2; r++) multiply(acc[r][tile], a[r][0], b[0], b[1]);
#pragma unroll
        for (int r = 0; r < 2; r++) multiply(acc[r][tile], a[r][1], b[2], b[3]);
      }
    }
    slot = slot + 1 == stages ? 0 : slot + 1;
  }
  // Element c of a tile: row of X m0 + 8 tile + 2 (lane % 4) + c % 2, row of W 16 sixteen + 8 (c / 2) + lane / 4.
  auto row_of = [&](int tile, int c) { return m0 + tile * 8 + lane % 4 * 2 + c % 2; };
  auto column_of = [&](int r, int c) { return (first + warp * 2 + r) * 16 + c / 2 * 8 + lane / 4; };
  if (split > 1) {
    constexpr int EACH_PART = 2 * NT * kThreads, AT_ONCE = NT > 4 ? 1 : NT > 2 ? 2 : 4;
    float4* tile_parts = parts + (size_t)(tile_m * tiles + tile_n) * split * EACH_PART + threadIdx.x;
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) {
      const float* v = acc[i / NT][i % NT];
      __stcg(tile_parts + (size_t)part * EACH_PART + i * kThreads, make_float4(v[0], v[1], v[2], v[3]));
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) arrived[0] = atomicAdd(counter, 1u);
    __syncthreads();
    if (arrived[0] != (unsigned)split - 1) return;
    if (threadIdx.x == 0) *counter = 0;  // ready for the next launch
    __threadfence();
#pragma unroll
    for (int i = 0; i < 2 * NT; i++)
#pragma unroll
      for (int c = 0; c < 4; c++) acc[i / NT][i % NT][c] = 0;
    for (int p = 0; p < split; p += AT_ONCE) {
      float4 v[AT_ONCE][2 * NT];
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
        for (int i = 0; i < 2 * NT; i++)
          v[j][i] = p + j < split ? __ldcg(tile_parts + (size_t)(p + j) * EACH_PART + i * kThreads)
                                  : make_float4(0, 0, 0, 0);
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
        for (int i = 0; i < 2 * NT; i++) {
          float* sum = acc[i / NT][i % NT];
          sum[0] += v[j][i].x, sum[1] += v[j][i].y, sum[2] += v[j][i].z, sum[3] += v[j][i].w;
        }
    }
  }
#pragma unroll
  for (int tile = 0; tile < NT; tile++)
#pragma unroll
    for (int c = 0; c < 4; c++) {
      acc[0][tile][c] *= 0x1p53f, acc[1][tile][c] *= 0x1p53f;
      const int m = row_of(tile, c);
      if (m >= M) continue;
      if (gate) {
        const int n = (first / 2 + warp) * 16 + c / 2 * 8 + lane / 4;
        const float one = acc[0][tile][c], other = acc[1][tile][c];
        if (n < N / 2) out[(size_t)m * (N / 2) + n] = __float2bfloat16(one / (1 + __expf(-one)) * other);
        continue;
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int n = column_of(r, c);
        if (n < N) out[(size_t)m * N + n] = __float2bfloat16(acc[r][tile][c] + (bias ? __bfloat162float(bias[n]) : 0.f));
      }
    }
}

template <int GROUP, int NT>
int start_tiles(const void* x, const void* weight, const void* bias, void* out, void* parts, void* counters, int M,
                int N, int K, long long x_stride, int split, int stages, int gate, int dependent, void* stream) {
  constexpr int ROWS = NT * 8;
  const int tiles = ((N + 15) / 16 + kSixteens - 1) / kSixteens, row_tiles = (M + ROWS - 1) / ROWS;
  const int shared = stages * (kSixteens * kTile<GROUP> + ROWS * kXPitch);
  if (shared > kMostShared) return -1;
  return (int)launch(int4_portable_tiles<GROUP, NT>, tiles * row_tiles * split, kThreads, shared, 1, dependent > 0,
                     stream, (const __nv_bfloat16*)x, (const unsigned char*)weight, (const __nv_bfloat16*)bias,
                     (__nv_bfloat16*)out, (float4*)parts, (unsigned*)counters, M, N, K, x_stride, row_tiles, split,
                     stages, gate);
}

}  // namespace

// x [M, K] bfloat16 with x_stride elements between rows, on 16 bytes, x_stride a multiple of 8. weight: the order of
// int4_packing.py for groups of 32, 64 or 128 and K a multiple of 128. bias [N] or null, out [M, N], with a gate
// [M, N / 2]. columns: sixteens of a warp, 1 to 4; per: in a block; tiles: eights of rows of X at a time, 1 or 2; warps 1
// to 8, stages 2 to 4. ``gate``: N is a multiple of 32, per and columns are even, and there is no bias. ``dependent``: 0
// an ordinary launch, 1 a dependent one, 2 one that reads the weight before the kernel before has ended. Returns a
// cudaError_t, or -1 for what it does not take.
extern "C" int transect_int4_portable(const void* x, const void* weight, const void* bias, void* out, int M, int N,
                                      int K, int group, long long x_stride, int columns, int tiles, int per, int warps,
                                      int stages, int gate, int dependent, void* stream) {
  if (M < 1 || N < 1 || K < 128 || K % 128 || x_stride % 8 || per < 1 || stages < 2 || stages > 4 || warps < 1 ||
      warps > 8 || (gate && (N % 32 || columns % 2 || per % 2 || bias)))
    return -1;
#define TRANSECT_START(GROUP, RB, NT)                                                                             \
  if (group == GROUP && columns == RB && tiles == NT)                                                             \
    return TRANSECT_HERE(start_portable<GROUP, RB, NT>(x, weight, bias, out, M, N, K, x_stride, per, warps,       \
                                                       stages, gate, dependent, stream));
#define TRANSECT_SIZES(GROUP)   \
  TRANSECT_START(GROUP, 1, 1)   \
  TRANSECT_START(GROUP, 2, 1)   \
  TRANSECT_START(GROUP, 3, 1)   \
  TRANSECT_START(GROUP, 4, 1)   \
  TRANSECT_START(GROUP, 1, 2)   \
  TRANSECT_START(GROUP, 2, 2)   \
  TRANSECT_START(GROUP, 3, 2)   \
  TRANSECT_START(GROUP, 4, 2)
  TRANSECT_SIZES(128)
  TRANSECT_SIZES(64)
  TRANSECT_SIZES(32)
  return -1;
}

// The same by tiles of ``tiles`` eights of rows of X, 1, 2, 4 or 8, by 256 rows of W. split:
// blocks that share K, at most K / 128; with several parts: float32 for every tile and block, and counters, one for each
// tile: zeros, and left as zeros. stages 2 to 4. ``gate`` as above, with any split.
extern "C" int transect_int4_portable_tiles(const void* x, const void* weight, const void* bias, void* out, void* parts,
                                            void* counters, int M, int N, int K, int group, long long x_stride,
                                            int tiles, int split, int stages, int gate, int dependent, void* stream) {
  if (M < 1 || N < 1 || K < 128 || K % 128 || x_stride % 8 || stages < 2 || stages > 4 || split < 1 ||
      split > K / 128 || (split > 1 && (!parts || !counters)) || (gate && (N % 32 || bias)))
    return -1;
#define TRANSECT_TILES(GROUP, NT)                                                                                  \
  if (group == GROUP && tiles == NT)                                                                               \
    return TRANSECT_HERE(start_tiles<GROUP, NT>(x, weight, bias, out, parts, counters, M, N, K, x_stride, split,   \
                                                stages, gate, dependent, stream));
#define TRANSECT_ROWS(GROUP) \
  TRANSECT_TILES(GROUP, 1)   \
  TRANSECT_TILES(GROUP, 2)   \
  TRANSECT_TILES(GROUP, 4)   \
  TRANSECT_TILES(GROUP, 8)
  TRANSECT_ROWS(128)
  TRANSECT_ROWS(64)
  TRANSECT_ROWS(32)
  return -1;
}
