// Y = X W^T + b for 1 to 32 rows of X at a time, bfloat16 in and out, float32 sums: a weight streamed once at the width of
// memory. See small_matmul.py for the arithmetic.
//
// * Rows of W are dealt out to the blocks evenly in sixteens, so that 4096, 6144 or 28672 of them make 128 equal shares.
//   A block takes its share in groups of 16 RB rows, and each group all along K.
// * The warps of a block (and the blocks of a cluster) take every so-many-th chunk of 64 k. A warp streams its own chunks
//   of W and X through its own ring of STAGES buffers in shared memory by asynchronous copies, so nobody waits for anybody
//   until a group ends: then the parts are added up in shared memory, always in the same order. (Ordinary loads of X beside
//   the copies would come back behind all copies asked for before them, and take the depth of the ring away.)
// * What a row of Y gets does not depend on the other rows, nor on how many there are: the order of its sum is fixed by
//   the number of warps and of blocks in a cluster, and by which share of W it is.
// * The first STAGES - 1 chunks of W may be asked for before the kernel that makes X has ended (``ahead``).

#include "few_rows.cuh"

using namespace few_rows;

constexpr int kChunk = 64;  // k in a chunk: 128 bytes of a row

template <int RB, int STAGES, int NT>
__global__ void __launch_bounds__(256, 1)
    small_rows(const __nv_bfloat16* x, const __nv_bfloat16* weight, const __nv_bfloat16* bias, __nv_bfloat16* out, int M,
               int N, int K, long long x_stride, long long w_stride, int per, int row_tiles, int ranks, int ahead) {
  constexpr int ROWS = NT * 8, COLUMNS = RB * 16, W_BYTES = COLUMNS * 128;
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int rank = blockIdx.x % ranks, row_tile = blockIdx.x / ranks % row_tiles, share = blockIdx.x / ranks / row_tiles;
  const int m0 = row_tile * ROWS, rows = min(ROWS, M - m0);
  const int stage_bytes = W_BYTES + min(ROWS, M) * 128;
  const int n_first = share * per * 16, n_end = min(N, n_first + per * 16);
  const int groups = (n_end - n_first + COLUMNS - 1) / COLUMNS;
  const int takers = warps * ranks, self = rank * warps + warp;
  const int steps = ((K + kChunk - 1) / kChunk + takers - 1) / takers;
  const int total = groups * steps;
  float* sums = (float*)(memory + warps * STAGES * stage_bytes);
  float* part = sums + warps * ROWS * kPitch<COLUMNS>;  // of clusters: [rows][all columns of the share]
  const int part_pitch = (per + RB) * 16;
  const uint32_t ring = shared_address(memory) + warp * STAGES * stage_bytes;

  let_next_begin();
  if (!ahead) wait_for_previous();

  // A copy moves 4 rows x 128 bytes a warp. The eight 16-byte pieces of row r lie at piece ^ (r % 8): no bank is met twice.
  // Blocks begin at different chunks, or all would ask for the same lines of X at the same time.
  const int copy_row = lane / 8, copy_piece = lane % 8;
  const int rotation = share % steps;
  auto place = [&](int row, int piece) { return row * 128 + ((piece ^ (row % 8)) * 16); };
  auto chunk_of = [&](int step) {
    const int rotated = step + rotation;
    return ((rotated < steps ? rotated : rotated - steps) * takers + self) * kChunk;
  };
  auto fetch_w = [&](int slot, int group, int step) {
    const int k = chunk_of(step) + copy_piece * 8;
    const int row = n_first + group * COLUMNS + copy_row;
    const __nv_bfloat16* from = weight + row * w_stride + k;
    const uint32_t even = ring + slot * stage_bytes + place(copy_row, copy_piece);
    const uint32_t odd = ring + slot * stage_bytes + place(copy_row + 4, copy_piece);
#pragma unroll
    for (int j = 0; j < 4 * RB; j++)
      copy16((j % 2 ? odd : even) + j / 2 * 1024, from + 4 * j * w_stride, row + 4 * j < n_end && k < K);
  };
  auto fetch_x = [&](int slot, int step) {
    const int k = chunk_of(step) + copy_piece * 8;
    for (int row = copy_row; row < rows; row += 4)
      copy16(ring + slot * stage_bytes + W_BYTES + place(row, copy_piece), x + (m0 + row) * x_stride + k, k < K);
  };
  int load_group = 0, load_step = 0;
  auto advance = [&] {
    if (++load_step == steps) load_step = 0, load_group++;
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (load_group < groups) fetch_w(s, load_group, load_step);
    advance();
  }
  if (ahead) wait_for_previous();
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < total) fetch_x(s, s % steps);
    end_group();
  }

  // Where this lane reads its row of the matrices: pieces 2 s and 2 s + 1 of W for the s-th 16 k, 4 h to 4 h + 3 of X.
  const uint32_t w_at = place(lane % 16, lane / 16);
  uint32_t x_at[NT];  // rows past the end read the last one: what they give is not stored
#pragma unroll
  for (int tile = 0; tile < NT; tile++) x_at[tile] = W_BYTES + place(min(tile * 8 + lane % 8, rows - 1), lane / 8);
  float acc[RB][NT][4] = {};
  int slot = 0, step = 0, group = 0;
  for (int i = 0; i < total; i++) {
    wait_groups<STAGES - 2>();
    __syncwarp();  // the copies of all lanes have landed, and all lanes have read the slot that is filled again now
    if (load_group < groups) {
      const int free = slot == 0 ? STAGES - 1 : slot - 1;
      fetch_w(free, load_group, load_step);
      fetch_x(free, load_step);
    }
    end_group();
    advance();
    const uint32_t from = ring + slot * stage_bytes;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      uint32_t b[NT][4];
#pragma unroll
      for (int tile = 0; tile < NT; tile++) read_matrices(b[tile], from + (x_at[tile] ^ (h * 64)));
#pragma unroll
      for (int q = 0; q < 2; q++) {
        uint32_t a[RB][4];
#pragma unroll
        for (int r = 0; r < RB; r++) read_matrices(a[r], from + r * 2048 + (w_at ^ ((h * 2 + q) * 32)));
#pragma unroll
        for (int tile = 0; tile < NT; tile++)
#pragma unroll
          for (int r = 0; r < RB; r++) multiply(acc[r][tile], a[r], b[tile][q * 2], b[tile][q * 2 + 1]);
      }
    }
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    if (++step < steps) continue;
    leave_sums(sums + warp * ROWS * kPitch<COLUMNS>, acc, lane);
    add_warps<ROWS, COLUMNS>(sums, ranks > 1 ? part + group * COLUMNS : nullptr, part_pitch, bias, out, m0,
                             n_first + group * COLUMNS, M, N, n_end, warps);
    __syncthreads();
    step = 0;
    group++;
  }
  if (ranks > 1) add_ranks(part, part_pitch, bias, out, m0, n_first, rows, n_end - n_first, N, rank, ranks);
}

template <int RB, int STAGES, int NT>
static int start(const void* x, const void* weight, const void* bias, void* out, int M, int N, int K, long long x_stride,
                 long long w_stride, int per, int warps, int ranks, int dependent, void* stream) {
  constexpr int ROWS = NT * 8, COLUMNS = RB * 16;
  const int shares = ((N + 15) / 16 + per - 1) / per, row_tiles = (M + ROWS - 1) / ROWS;
  const int shared = warps * STAGES * (COLUMNS + (M < ROWS ? M : ROWS)) * 128 +
                     (warps * ROWS * kPitch<COLUMNS> + (ranks > 1) * (M < ROWS ? M : ROWS) * (per + RB) * 16) * 4;
  if (shared > kMostShared) return -1;
  return (int)launch(small_rows<RB, STAGES, NT>, shares * row_tiles * ranks, warps * 32, shared, ranks, dependent > 0,
                     stream, (const __nv_bfloat16*)x, (const __nv_bfloat16*)weight, (const __nv_bfloat16*)bias,
                     (__nv_bfloat16*)out, M, N, K, x_stride, w_stride, per, row_tiles, ranks, (int)(dependent > 1));
}

// x [M, K] and weight [N, K] with the given strides between rows, out [M, N] contiguous, bias [N] or null; K and both strides
// multiples of 8, x and weight on 16 bytes. ``columns``: sixteens of rows of W in a group, ``stages``: buffers of a ring (the
// pairs listed below); ``per``: sixteens for a block; ``ranks``: blocks that share K (at most 8). ``dependent``: 0 an ordinary
// launch, 1 a dependent one, 2 one that asks for W before the kernel before has ended (which must not write W). Returns a
// cudaError_t, or -1 for what it does not take.
extern "C" int transect_small_matmul(const void* x, const void* weight, const void* bias, void* out, int M, int N, int K,
                                     long long x_stride, long long w_stride, int columns, int stages, int warps, int per,
                                     int ranks, int dependent, void* stream) {
  if (M < 1 || N < 1 || K < 8 || K % 8 || x_stride % 8 || w_stride % 8 || per < 1 || ranks < 1 || ranks > 8 ||
      (warps != 4 && warps != 8))
    return -1;
#define TRANSECT_ROWS(RB, STAGES)                                                                                       \
  if (columns == RB && stages == STAGES) {                                                                              \
    if (M <= 8)                                                                                                         \
      return start<RB, STAGES, 1>(x, weight, bias, out, M, N, K, x_stride, w_stride, per, warps, ranks, dependent,      \
                                  stream);                                                                              \
    if (M <= 16)                                                                                                        \
      return start<RB, STAGES, 2>(x, weight, bias, out, M, N, K, x_stride, w_stride, per, warps, ranks, dependent,      \
                                  stream);                                                                              \
    return start<RB, STAGES, 4>(x, weight, bias, out, M, N, K, x_stride, w_stride, per, warps, ranks, dependent, stream); \
  }
#ifdef TRANSECT_TRY
  TRANSECT_TRY
#else
  TRANSECT_ROWS(1, 4)
  TRANSECT_ROWS(1, 8)
  TRANSECT_ROWS(2, 2)
  TRANSECT_ROWS(2, 4)
  TRANSECT_ROWS(2, 6)
  TRANSECT_ROWS(3, 2)
  TRANSECT_ROWS(3, 3)
  TRANSECT_ROWS(3, 4)
#endif
  return -1;
}
