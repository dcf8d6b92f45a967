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

#include "../portable_tiles.cuh"
#include "int4_codes.cuh"

using namespace few_rows;
using portable_tiles::fused;
using portable_tiles::twice;

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

// More rows of X by tiles. A weight is rounded to bfloat16, as in block_tiles.cuh: a code is a bfloat16 c 2^-133 as it
// stands, and one fused multiplication and addition of two at a time makes (scale c + zero) 2^-53 of it. (Copies have no
// cache hint: nvcc 13.0 compiles some that have one wrongly, see docs/lab-notes/int4.md.)
template <int GROUP>
struct Int4 {
  const unsigned char* tiles;
  static constexpr int kSpan = kChunk, kBytes = portable_tiles::kSixteens * kTile<GROUP>;

  static __device__ __forceinline__ int place(int row, int piece) { return piece ^ row % 8; }

  struct Source {
    const unsigned char* from;
    long long span;
    int left;  // bytes of a span, from this thread's first piece on

    __device__ __forceinline__ void aim(const Int4& weight, int N, int, int first, int begin, int) {
      const int sixteens = (N + 15) / 16, own = threadIdx.x * 16;
      span = (long long)sixteens * kTile<GROUP>;
      from = weight.tiles + begin * span + (size_t)first * kTile<GROUP> + own;
      left = min(kBytes, (sixteens - first) * kTile<GROUP>) - own;
    }
    __device__ __forceinline__ void fetch(uint32_t slot) {
#pragma unroll
      for (int i = 0; i < (kBytes / 16 + portable_tiles::kThreads - 1) / portable_tiles::kThreads; i++) {
        const int on = i * portable_tiles::kThreads * 16;
        if (on < left) copy16(slot + threadIdx.x * 16 + on, from + on, true);
      }
      from += span;
    }
  };

  struct Values {
    uint32_t scale[2][2], zero[2][2];  // of rows lane / 4 and, with codes four bits up, lane / 4 + 8

    __device__ __forceinline__ void decode(uint32_t (&a)[2][2][4], uint32_t from, int warp, int at, int lane) {
      constexpr int EACH = GROUP / 32;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const uint32_t tile = from + (warp * 2 + r) * kTile<GROUP>;
        if (at % EACH == 0) {
          uint2 both;  // scale in the low half, zero in the high one
          asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                       : "=r"(both.x), "=r"(both.y)
                       : "r"(tile + 1024 + at / EACH * 64 + lane / 4 * 8));
          scale[r][0] = twice(__uint_as_float(both.x << 16) * 0x1p80f);
          scale[r][1] = twice(__uint_as_float(both.y << 16) * 0x1p76f);
          zero[r][0] = twice(__uint_as_float(both.x & 0xFFFF0000u) * 0x1p-53f);
          zero[r][1] = twice(__uint_as_float(both.y & 0xFFFF0000u) * 0x1p-53f);
        }
        uint2 w;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(w.x), "=r"(w.y)
                     : "r"(tile + at / 2 * 512 + lane * 16 + at % 2 * 8));
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint32_t mask = i % 2 ? 0x00F000F0u : 0x000F000Fu;
          a[r][0][i] = fused(w.x >> (i / 2 * 8) & mask, scale[r][i % 2], zero[r][i % 2]);
          a[r][1][i] = fused(w.y >> (i / 2 * 8) & mask, scale[r][i % 2], zero[r][i % 2]);
        }
      }
    }
  };

  static __device__ __forceinline__ void read_x(uint32_t (&b)[4], uint32_t from, int at, int lane) {
    const int row = lane % 8;
    read_matrices(b, from + row * kSpan * 2 + (((lane / 8 ^ row) * 16) ^ at * 64));
  }

  __device__ __forceinline__ float factor(int, int, int, int) const { return 0x1p53f; }
};

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
    return start_portable<GROUP, RB, NT>(x, weight, bias, out, M, N, K, x_stride, per, warps, stages, gate,       \
                                         dependent, stream);
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

// The same by tiles of ``tiles`` eights of rows of X, 1, 2, 4 or 8 (portable_tiles.cuh). ``blocks``: no more than spans of
// all tiles. parts: float32 for two tiles of each block; counters: one for each tile, zeros, and left as zeros. stages 2 to 4.
// ``gate`` as above.
extern "C" int transect_int4_portable_tiles(const void* x, const void* weight, const void* bias, void* out, void* parts,
                                            void* counters, int M, int N, int K, int group, long long x_stride,
                                            int tiles, int blocks, int stages, int gate, int dependent, void* stream) {
#define TRANSECT_TILES(GROUP)                                                                                       \
  if (group == GROUP)                                                                                             \
    return portable_tiles::start_tiles(Int4<GROUP>{(const unsigned char*)weight}, tiles, x, bias, out, parts,     \
                                        counters, M, N, K, x_stride, blocks, stages, gate, dependent, stream);
  TRANSECT_TILES(128)
  TRANSECT_TILES(64)
  TRANSECT_TILES(32)
  return -1;
}
