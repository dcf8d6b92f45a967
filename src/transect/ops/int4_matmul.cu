// Y = X W^T + b for up to 16 rows of X at a time and a weight of 4-bit codes in groups, W = scale code + zero. bfloat16 in
// and out, float32 sums. See int4_matmul.py for the arithmetic; small_matmul.cu for how rows and k are dealt out.
//
// * The weight is packed once (``repack`` in int4_matmul.py) so that the word a thread loads is its part of the left operand
//   of a product: a tile of 16 rows x 128 k is 1024 neighbouring bytes, two accesses of a warp.
// * A shift and one logic operation of three inputs make two bfloat16 of two codes: 0x4300 | c is 128 + c. Codes enter the
//   product as they are; the scale multiplies its sum once for a group, and 128 scale - zero times the sum of x is taken off.
//   So there is no multiplication for a weight, and no weight is ever rounded.
//   These 1.75 instructions for two codes are what bounds the kernel where memory does not (57% of the logic unit at one row);
//   shifts written as products with 2^28, for the multipliers to do, took 10% longer.
// * X is kept in shared memory, of each warp the part of K that it works on; blocks of a cluster share K where it is long.

#include "few_rows.cuh"

using namespace few_rows;

constexpr int kChunk = 128;        // k in a tile
constexpr int kTileBytes = 1024;   // of codes

// (word & mask) | bits in one instruction.
__device__ __forceinline__ uint32_t as_pair(uint32_t word) {
  uint32_t pair;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(pair) : "r"(word), "r"(0x000f000fu), "r"(0x43004300u));
  return pair;
}

template <int GROUP, int RB, int STAGES, int NT>
__global__ void __launch_bounds__(512, 1)
    int4_rows(const __nv_bfloat16* x, const unsigned char* codes, const unsigned char* scales, const __nv_bfloat16* bias,
              __nv_bfloat16* out, int M, int N, int K, long long x_stride, int per, int row_tiles, int ranks, int ahead) {
  constexpr int ROWS = NT * 8, COLUMNS = RB * 16;
  constexpr int PER_CHUNK = kChunk / GROUP;        // groups in a chunk
  constexpr int SCALE_BYTES = PER_CHUNK * 16 * 4;  // of a tile: [groups][8][rows r and r + 8][scale, zero]
  constexpr int STAGE_BYTES = RB * (kTileBytes + SCALE_BYTES);
  constexpr int PIECES = SCALE_BYTES / 16;
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int rank = blockIdx.x % ranks, row_tile = blockIdx.x / ranks % row_tiles, share = blockIdx.x / ranks / row_tiles;
  const int m0 = row_tile * ROWS, rows = min(ROWS, M - m0);
  const int block_first = share * per, block_end = min((N + 15) / 16, block_first + per);
  const int n_end = min(N, block_end * 16);
  const int groups = (block_end - block_first + RB - 1) / RB;
  const int chunks = K / kChunk;
  const int takers = warps * ranks, self = rank * warps + warp;
  const int steps = (chunks + takers - 1) / takers;
  const int total = groups * steps;
  float* sums = (float*)(memory + warps * STAGES * STAGE_BYTES);
  const int buffer = groups > 1 ? warps * ROWS * kPitch<COLUMNS> : 0;  // two of them: a group need not wait for the last
  float* part = sums + warps * ROWS * kPitch<COLUMNS> + buffer;  // of clusters: [rows][all columns of the share]
  const int part_pitch = (per + RB) * 16, part_size = ranks > 1 ? min(ROWS, M) * part_pitch : 0;
  float* x_sums = part + part_size + warp * steps * PER_CHUNK * ROWS;
  const uint32_t ring = shared_address(memory) + warp * STAGES * STAGE_BYTES;
  const int pitch = steps * kChunk * 2 + 16;  // of a row of X: the 8 rows of a matrix meet no bank twice
  const uint32_t my_x = shared_address(part + part_size + warps * steps * PER_CHUNK * ROWS) +
                        warp * min(ROWS, M) * pitch;

  let_next_begin();
  if (!ahead) wait_for_previous();

  int load_group = 0, load_step = 0;
  auto fetch = [&](int slot) {
    if (load_group < groups) {
      const int chunk = load_step * takers + self, block = block_first + load_group * RB;
      const int inside = chunk < chunks ? min(RB, block_end - block) : 0;
      const uint32_t to = ring + slot * STAGE_BYTES + lane * 16;
      const size_t tile = (size_t)block * chunks + chunk;
      const unsigned char* from = codes + tile * kTileBytes + lane * 16;
#pragma unroll
      for (int b = 0; b < RB; b++) {
        copy16(to + b * kTileBytes, from, b < inside);
        copy16(to + b * kTileBytes + 512, from + 512, b < inside);
        from += (size_t)chunks * kTileBytes;
      }
#pragma unroll
      for (int p = 0; p < RB * PIECES; p += 32) {
        const int b = (p + lane) / PIECES;
        if (b < RB)
          copy16(to + RB * kTileBytes + p * 16,
                 scales + (tile + (size_t)b * chunks) * SCALE_BYTES + (p + lane) % PIECES * 16, b < inside);
      }
    }
    end_group();
    if (++load_step == steps) load_step = 0, load_group++;
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) fetch(s);
  if (ahead) wait_for_previous();

  // X: 256 bytes a row and chunk, two rows at a time. Blocks begin at different chunks, or all would ask for the same lines.
  for (int i = 0, step = share % steps; i < steps; i++, step = step + 1 == steps ? 0 : step + 1) {
    const int k = (step * takers + self) * kChunk + lane % 16 * 8;
    for (int row = lane / 16; row < rows; row += 2)
      copy16(my_x + row * pitch + step * kChunk * 2 + lane % 16 * 16, x + (m0 + row) * x_stride + k, k < K);
  }
  end_group();
  wait_groups<0>();
  __syncwarp();

  uint32_t x_at[NT];  // rows past the end read the last one: what they give is not stored
#pragma unroll
  for (int tile = 0; tile < NT; tile++)
    x_at[tile] = my_x + min(tile * 8 + lane % 8, rows - 1) * pitch + lane / 8 * 16;
  // The sum of X over every group of k, as a product with ones: row 2 (l % 4) and the next in lane l.
  const uint32_t ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
#pragma unroll 2
  for (int i = 0; i < steps * PER_CHUNK; i++)
#pragma unroll
    for (int tile = 0; tile < NT; tile++) {
      float sum[GROUP / 32][4] = {};
#pragma unroll
      for (int h = 0; h < GROUP / 32; h++) {
        uint32_t b[4];
        read_matrices(b, x_at[tile] + i * GROUP * 2 + h * 64);
        multiply(sum[h], ones, b[0], b[1]);
        multiply(sum[h], ones, b[2], b[3]);
      }
#pragma unroll
      for (int h = 1; h < GROUP / 32; h++) sum[0][0] += sum[h][0], sum[0][1] += sum[h][1];
      if (lane < 4) *(float2*)(x_sums + i * ROWS + tile * 8 + lane * 2) = make_float2(sum[0][0], sum[0][1]);
    }
  __syncwarp();

  float y[RB][NT][4] = {};
  int slot = 0, step = 0, group = 0;
  for (int i = 0; i < total; i++) {
    wait_groups<STAGES - 2>();
    __syncwarp();
    fetch(slot == 0 ? STAGES - 1 : slot - 1);
    const uint32_t from = ring + slot * STAGE_BYTES;
#pragma unroll
    for (int in_chunk = 0; in_chunk < PER_CHUNK; in_chunk++) {
      float dot[RB][NT][4] = {};
#pragma unroll
      for (int j = 0; j < GROUP / 32; j++) {
        const int h = in_chunk * (GROUP / 32) + j;  // the h-th 32 k: words 2 h and 2 h + 1
        uint32_t b[NT][4];
#pragma unroll
        for (int tile = 0; tile < NT; tile++) read_matrices(b[tile], x_at[tile] + step * kChunk * 2 + h * 64);
        uint2 w[RB];
#pragma unroll
        for (int r = 0; r < RB; r++)
          asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                       : "=r"(w[r].x), "=r"(w[r].y)
                       : "r"(from + r * kTileBytes + h * 256 + lane * 8));
#pragma unroll
        for (int q = 0; q < 2; q++) {
#pragma unroll
          for (int r = 0; r < RB; r++) {
            const uint32_t word = q ? w[r].y : w[r].x;
            const uint32_t a[4] = {as_pair(word), as_pair(word >> 4), as_pair(word >> 8), as_pair(word >> 12)};
#pragma unroll
            for (int tile = 0; tile < NT; tile++) multiply(dot[r][tile], a, b[tile][q * 2], b[tile][q * 2 + 1]);
          }
        }
      }
      float2 sum[NT];
#pragma unroll
      for (int tile = 0; tile < NT; tile++)
        sum[tile] = *(const float2*)(x_sums + (step * PER_CHUNK + in_chunk) * ROWS + tile * 8 + lane % 4 * 2);
      // Scale and zero of this lane's rows, lane / 4 and 8 below: bfloat16 is the upper half of float32.
#pragma unroll
      for (int r = 0; r < RB; r++) {
        uint32_t above, below;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(above), "=r"(below)
                     : "r"(from + RB * kTileBytes + r * SCALE_BYTES + in_chunk * 64 + lane / 4 * 8));
        const float s0 = __uint_as_float(above << 16), s1 = __uint_as_float(below << 16);
        const float z0 = __uint_as_float(above & 0xffff0000u) - 128 * s0;
        const float z1 = __uint_as_float(below & 0xffff0000u) - 128 * s1;
#pragma unroll
        for (int tile = 0; tile < NT; tile++)
#pragma unroll
          for (int c = 0; c < 4; c++)
            y[r][tile][c] = fmaf(c < 2 ? s0 : s1, dot[r][tile][c],
                                 fmaf(c < 2 ? z0 : z1, c % 2 ? sum[tile].y : sum[tile].x, y[r][tile][c]));
      }
    }
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    if (++step < steps) continue;
    float* mine = sums + group % 2 * buffer;
    leave_sums(mine + warp * ROWS * kPitch<COLUMNS>, y, lane);
    add_warps<ROWS, COLUMNS>(mine, ranks > 1 ? part + group * COLUMNS : nullptr, part_pitch, bias, out, m0,
                             (block_first + group * RB) * 16, M, N, n_end, warps);
    step = 0;
    group++;
  }
  if (ranks > 1) {
    const int n_first = block_first * 16;
    add_ranks(part, part_pitch, bias, out, m0, n_first, rows, n_end - n_first, N, rank, ranks);
  }
}

template <int GROUP, int RB, int STAGES, int NT>
static int start(const void* x, const void* codes, const void* scales, const void* bias, void* out, int M, int N, int K,
                 long long x_stride, int per, int warps, int ranks, int dependent, void* stream) {
  constexpr int ROWS = NT * 8, COLUMNS = RB * 16;
  const int shares = ((N + 15) / 16 + per - 1) / per, row_tiles = (M + ROWS - 1) / ROWS;
  const int steps = (K / kChunk + warps * ranks - 1) / (warps * ranks);
  const int shared = warps * STAGES * RB * (kTileBytes + kChunk / GROUP * 64) +
                     (warps * ROWS * kPitch<COLUMNS> * (1 + (per > RB)) + (ranks > 1) * (M < ROWS ? M : ROWS) * (per + RB) * 16 +
                      warps * steps * (kChunk / GROUP) * ROWS) * 4 +
                     warps * (M < ROWS ? M : ROWS) * (steps * kChunk * 2 + 16);
  if (shared > kMostShared) return -1;
  return (int)launch(int4_rows<GROUP, RB, STAGES, NT>, shares * row_tiles * ranks, warps * 32, shared, ranks,
                     dependent > 0, stream, (const __nv_bfloat16*)x, (const unsigned char*)codes,
                     (const unsigned char*)scales, (const __nv_bfloat16*)bias, (__nv_bfloat16*)out, M, N, K, x_stride, per,
                     row_tiles, ranks, (int)(dependent > 1));
}

template <int GROUP>
static int pick(int rows, int columns, int stages, const void* x, const void* codes, const void* scales, const void* bias,
                void* out, int M, int N, int K, long long x_stride, int per, int warps, int ranks, int dependent,
                void* stream) {
#define TRANSECT_INT4(RB, STAGES, NT)                                                                                  \
  if (rows == NT * 8 && columns == RB && stages == STAGES)                                                             \
    return start<GROUP, RB, STAGES, NT>(x, codes, scales, bias, out, M, N, K, x_stride, per, warps, ranks, dependent, stream);
#ifdef TRANSECT_TRY
  TRANSECT_TRY
#else
  TRANSECT_INT4(1, 3, 1)
  TRANSECT_INT4(2, 2, 1)
  TRANSECT_INT4(2, 3, 1)
  TRANSECT_INT4(4, 2, 1)
  TRANSECT_INT4(4, 3, 1)
  TRANSECT_INT4(1, 3, 2)
  TRANSECT_INT4(2, 2, 2)
  TRANSECT_INT4(2, 3, 2)
#endif
  return -1;
}

// How many clusters of ``size`` blocks that leave room for no second one on a multiprocessor the device runs at once.
extern "C" int transect_int4_clusters(int size) {
  return clusters_at_once(int4_rows<128, 2, 2, 1>, size, 512);
}

// x [M, K] with x_stride between rows, a multiple of 8; codes and scales as ``repack`` makes them for N rows and groups of
// GROUP (32, 64 or 128) k; out [M, N] contiguous; bias [N] or null; K a multiple of 128. ``rows``: rows of X at a time (8 or
// 16). The rest as in small_matmul.cu. Returns a cudaError_t, or -1 for what it does not take.
extern "C" int transect_int4_matmul(const void* x, const void* codes, const void* scales, const void* bias, void* out, int M,
                                    int N, int K, int group, long long x_stride, int rows, int columns, int stages, int warps,
                                    int per, int ranks, int dependent, void* stream) {
  if (M < 1 || N < 1 || K < kChunk || K % kChunk || x_stride % 8 || per < 1 || ranks < 1 || ranks > 8 ||
      (warps != 4 && warps != 8 && warps != 16))
    return -1;
#define TRANSECT_GROUP(GROUP)                                                                                           \
  if (group == GROUP)                                                                                                   \
    return pick<GROUP>(rows, columns, stages, x, codes, scales, bias, out, M, N, K, x_stride, per, warps, ranks, dependent, \
                       stream);
  TRANSECT_GROUP(128)
  TRANSECT_GROUP(64)
  TRANSECT_GROUP(32)
  return -1;
}
