// Y = X W^T + b for 1 to 32 rows of X at a time, bfloat16 in and out, float32 sums: a weight streamed once at the width
// of memory. See small_matmul.py for the arithmetic.
//
// * Rows of W are dealt out to the blocks evenly in sixteens, so that 4096, 6144 or 28672 of them make 128 equal
//   shares.
//   A block takes its share in groups of 16 RB rows, and each group all along K.
// * The warps of a block (and the blocks of a cluster) take every so-many-th chunk of 64 k. A warp streams its own
//   chunks of W and X through its own ring of STAGES buffers in shared memory by asynchronous copies, so nobody waits
//   for anybody until a group ends: then the parts are added up in shared memory, always in the same order. (Ordinary
//   loads of X beside the copies would come back behind all copies asked for before them, and take the depth of the
//   ring away.)
// * What a row of Y gets does not depend on the other rows, nor on how many there are: the order of its sum is fixed by
//   the number of warps and of blocks in a cluster, and by which share of W it is.
// * GATE: W is a gate's rows and then those of the other factor, N / 2 each; Y [M, N / 2] is silu(one) times the other.
//   A sixteen is then eight rows of the gate and the eight that belong to them.
// * A norm may stand on either side, see ``Norm``.
// * The first STAGES - 1 chunks of W may be asked for before the kernel that makes X has ended (``ahead``).

#include "../../lang/few_rows.cuh"
#include "../../lang/parts.cuh"

#define TRANSECT_PARTS 2

using namespace few_rows;

constexpr int kChunk = 64;  // k in a chunk: 128 bytes of a row

// What becomes of a sum in a product beside a norm (see ``Norm``), ``before`` being the stream there and ``scale`` the
// norm's weight. Lanes 0 to 15 of a warp, or 16 to 31, are at sixteen neighbouring columns of one row.
__device__ __forceinline__ void add_to_stream(const Norm& norm, float sum, float before, float scale,
                                              __nv_bfloat16* out, size_t at) {
  const __nv_bfloat16 total = __float2bfloat16(sum + before);
  const float t = __bfloat162float(total);
  out[at] = total;
  norm.scaled[at] = __float2bfloat16(t * scale);
  float square = t * t;
  const uint32_t half = 0xFFFFu << (threadIdx.x & 16);
#pragma unroll
  for (int lanes = 8; lanes; lanes /= 2) square += __shfl_xor_sync(half, square, lanes);
  if (threadIdx.x % 16 == 0) norm.squares[at / 16] = square;
}

// The sums of a warp's tile of Y, COLUMNS rows of the weight by ROWS of x: a float for each, x's rows PITCH apart (4
// more than they need: then a warp meets no bank twice).
template <int COLUMNS>
constexpr int kPitch = COLUMNS + 4;

template <int RB, int NT>
__device__ __forceinline__ void leave_sums(float* sums, float (&acc)[RB][NT][4], int lane) {
#pragma unroll
  for (int b = 0; b < RB; b++)
#pragma unroll
    for (int tile = 0; tile < NT; tile++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        sums[(tile * 8 + lane % 4 * 2 + j % 2) * kPitch<RB * 16> + b * 16 + j / 2 * 8 + lane / 4] = acc[b][tile][j];
        acc[b][tile][j] = 0;
      }
}

// Of a tile of Y of up to ROWS x COLUMNS every warp holds a part: they are added in the order of the warps. ``sums`` is
// [warps][ROWS][PITCH], filled by the caller, and may be written again after the next barrier of the block. The sum
// goes to ``finish`` with its place in Y.
template <int ROWS, int COLUMNS, typename Finish>
__device__ __forceinline__ void add_warps(const float* sums, int m0, int n0, int M, int n_end, int warps,
                                          Finish finish) {
  __syncthreads();
  const int count = min(ROWS, M - m0) * COLUMNS;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int m = i / COLUMNS, c = i % COLUMNS;
    const float* from = sums + m * kPitch<COLUMNS> + c;
    float sum = 0;
    for (int w = 0; w < warps; w += 4) {  // four loads at a time
      float four[4];
#pragma unroll
      for (int j = 0; j < 4; j++) four[j] = from[(w + j) * ROWS * kPitch<COLUMNS>];
#pragma unroll
      for (int j = 0; j < 4; j++) sum += four[j];
    }
    if (n0 + c < n_end) finish(m0 + m, n0 + c, sum);
  }
}

// The blocks of a cluster hold parts of the same rows x columns of Y. Each element is sent to the block that adds it
// up: element e is that of thread e % blockDim.x of block e / blockDim.x % ranks.
struct Ranks {
  float* parts;  // [elements / (ranks blockDim.x)][ranks][blockDim.x]
  uint32_t barrier;
  int rank, ranks, count;  // elements

  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) {
      const int block = blockDim.x, round = block * ranks, left = count % round - rank * block;
      expect_sent(barrier, (count / round * block + max(0, min(left, block))) * ranks * 4);
    }
    __syncwarp();
    arrive_in_cluster();
  }

  __device__ __forceinline__ void send_part(int e, float part) const {
    const int block = e >> (31 - __clz(blockDim.x)), to = block % ranks;  // blockDim.x is 128 or 256
    send(shared_address(parts + (block - to + rank) * blockDim.x + (e & (blockDim.x - 1))), part, barrier, to);
  }

  // Adds what was sent here in the order of the ranks; ``finish`` gets an element's number and its sum.
  template <typename Finish>
  __device__ __forceinline__ void add(Finish finish) const {
    wait_for_sent(barrier);
    const float* from = parts + threadIdx.x;
    for (int e = rank * blockDim.x + threadIdx.x; e < count; e += ranks * blockDim.x, from += ranks * blockDim.x) {
      float of_rank[8], sum = 0;
#pragma unroll
      for (int r = 0; r < 8; r++) of_rank[r] = r < ranks ? from[r * blockDim.x] : 0;
#pragma unroll
      for (int r = 0; r < 8; r++) sum += of_rank[r];
      finish(e, sum);
    }
  }
};

// As ``add_warps``, of sixteens that are eight columns of a gate and eight of the other factor.
template <int ROWS, int COLUMNS, typename Finish>
__device__ __forceinline__ void add_gated(const float* sums, int m0, int n0, int M, int n_end, int warps,
                                          Finish finish) {
  __syncthreads();
  for (int i = threadIdx.x; i < min(ROWS, M - m0) * COLUMNS / 2; i += blockDim.x) {
    const int m = i / (COLUMNS / 2), c = i % (COLUMNS / 2);
    const float* from = sums + m * kPitch<COLUMNS> + c / 8 * 16 + c % 8;
    float gate = 0, up = 0;
#pragma unroll 4
    for (int w = 0; w < warps; w++) {
      gate += from[w * ROWS * kPitch<COLUMNS>];
      up += from[w * ROWS * kPitch<COLUMNS> + 8];
    }
    if (n0 / 2 + c < n_end / 2) finish(m0 + m, n0 / 2 + c, gate, up);
  }
}

template <int RB, int STAGES, int NT>
__global__ void __launch_bounds__(256, 1)
    small_rows(const __nv_bfloat16* x, const __nv_bfloat16* weight, const __nv_bfloat16* bias, __nv_bfloat16* out,
               int M, int N, int K, long long x_stride, long long w_stride, int per, int row_tiles, int ranks, int gate,
               Norm norm, int ahead) {
  constexpr int ROWS = NT * 8, COLUMNS = RB * 16, W_BYTES = COLUMNS * 128;
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int rank = blockIdx.x % ranks, row_tile = blockIdx.x / ranks % row_tiles,
            share = blockIdx.x / ranks / row_tiles;
  const int m0 = row_tile * ROWS, rows = min(ROWS, M - m0);
  const int stage_bytes = W_BYTES + min(ROWS, M) * 128;
  const int n_first = share * per * 16, n_end = min(N, n_first + per * 16);
  const int groups = (n_end - n_first + COLUMNS - 1) / COLUMNS;
  const int takers = warps * ranks, self = rank * warps + warp;
  const int steps = ((K + kChunk - 1) / kChunk + takers - 1) / takers;
  const int total = groups * steps;
  float* sums = (float*)(memory + warps * STAGES * stage_bytes);
  __shared__ __align__(8) uint64_t sent;
  const int columns = n_end - n_first;
  const Ranks cluster = {sums + warps * ROWS * kPitch<COLUMNS>, shared_address(&sent), rank, ranks, rows * columns};
  const uint32_t ring = shared_address(memory) + warp * STAGES * stage_bytes;

  let_next_begin();
  if (!ahead) wait_for_previous();
  if (ranks > 1) cluster.begin();

  // A copy moves 4 rows x 128 bytes a warp. The eight 16-byte pieces of row r lie at piece ^ (r % 8): no bank is met
  // twice.
  // Blocks begin at different chunks, or all would ask for the same lines of X at the same time.
  const int copy_row = lane / 8, copy_piece = lane % 8;
  const int rotation = share % steps;
  auto place = [&](int row, int piece) { return row * 128 + ((piece ^ (row % 8)) * 16); };
  auto chunk_of = [&](int step) {
    const int rotated = step + rotation;
    return ((rotated < steps ? rotated : rotated - steps) * takers + self) * kChunk;
  };
  // From four rows of a sixteen to the next: 0, 4 rows on, then ``half_step`` on and both.
  const long long half_step = (gate ? N / 2 : 8) * w_stride, block_step = (gate ? 8 : 16) * w_stride;
  auto fetch_w = [&](int slot, int group, int step) {
    const int k = chunk_of(step) + copy_piece * 8;
    const int row = n_first + group * COLUMNS + copy_row;
    const __nv_bfloat16* from = weight + (gate ? (row - copy_row) / 2 + copy_row : row) * w_stride + k;
    const uint32_t even = ring + slot * stage_bytes + place(copy_row, copy_piece);
    const uint32_t odd = ring + slot * stage_bytes + place(copy_row + 4, copy_piece);
#pragma unroll
    for (int j = 0; j < 4 * RB; j++)
      copy16_once((j % 2 ? odd : even) + j / 2 * 1024,
                  from + j % 2 * 4 * w_stride + j / 2 % 2 * half_step + j / 4 * block_step,
                  row + 4 * j < n_end && k < K);
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
  // Beside a norm: what divides the sums, and the stream at the place of this thread's first result, which would be
  // waited for at the end otherwise.
  __shared__ float inverse[ROWS];
  if (norm.x_squares) inverse_rms(inverse, norm.x_squares, norm.eps, m0, rows, K, threadIdx.x, blockDim.x);
  size_t first_at = 0;
  float first_before = 0, first_scale = 0;
  if (norm.residual) {
    const int across = ranks > 1 ? columns : COLUMNS, i = ranks > 1 ? rank * blockDim.x + threadIdx.x : threadIdx.x;
    const int m = m0 + min(i / across, rows - 1), n = min(n_first + i % across, n_end - 1);
    first_at = (size_t)m * N + n;
    first_before = __bfloat162float(norm.residual[first_at]), first_scale = __bfloat162float(norm.scale[n]);
  }
  auto finish = [&](int m, int n, float sum) {
    const size_t at = (size_t)m * N + n;
    if (norm.x_squares) sum *= inverse[m - m0];
    if (bias) sum += __bfloat162float(bias[n]);
    if (!norm.residual) {
      out[at] = __float2bfloat16(sum);
      return;
    }
    const float before = at == first_at ? first_before : __bfloat162float(norm.residual[at]);
    add_to_stream(norm, sum, before, at == first_at ? first_scale : __bfloat162float(norm.scale[n]), out, at);
  };
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
    if (gate)
      add_gated<ROWS, COLUMNS>(sums, m0, n_first + group * COLUMNS, M, n_end, warps,
                               [&](int m, int n, float g, float u) {
                                 if (norm.x_squares) g *= inverse[m - m0], u *= inverse[m - m0];
                                 out[(size_t)m * (N / 2) + n] = __float2bfloat16(__fdividef(g, 1 + __expf(-g)) * u);
                               });
    else if (ranks == 1)
      add_warps<ROWS, COLUMNS>(sums, m0, n_first + group * COLUMNS, M, n_end, warps, finish);
    else {
      if (group == 0) wait_for_cluster();
      add_warps<ROWS, COLUMNS>(sums, m0, n_first + group * COLUMNS, M, n_end, warps, [&](int m, int n, float part) {
        cluster.send_part((m - m0) * columns + n - n_first, part);
      });
    }
    __syncthreads();
    step = 0;
    group++;
  }
  if (ranks > 1) cluster.add([&](int e, float sum) { finish(m0 + e / columns, n_first + e % columns, sum); });
}

template <int RB, int STAGES, int NT>
static int start(const void* x, const void* weight, const void* bias, void* out, int M, int N, int K,
                 long long x_stride, long long w_stride, int per, int warps, int ranks, int gate, const Norm& norm,
                 int dependent, void* stream) {
  constexpr int ROWS = NT * 8, COLUMNS = RB * 16;
  const int shares = ((N + 15) / 16 + per - 1) / per, row_tiles = (M + ROWS - 1) / ROWS;
  const int rows = M < ROWS ? M : ROWS, round = warps * 32 * ranks,
            sent = (rows * per * 16 + round - 1) / round * round;
  const int shared =
      warps * STAGES * (COLUMNS + rows) * 128 + (warps * ROWS * kPitch<COLUMNS> + (ranks > 1) * sent) * 4;
  if (shared + 4 * ROWS + 8 > kMostShared) return -1;
  return (int)launch(small_rows<RB, STAGES, NT>, shares * row_tiles * ranks, warps * 32, shared, ranks, dependent > 0,
                     stream, (const __nv_bfloat16*)x, (const __nv_bfloat16*)weight, (const __nv_bfloat16*)bias,
                     (__nv_bfloat16*)out, M, N, K, x_stride, w_stride, per, row_tiles, ranks, gate, norm,
                     (int)(dependent > 1));
}

// x [M, K] and weight [N, K] with the given strides between rows, out [M, N] contiguous, bias [N] or null; K and both
// strides multiples of 8, x and weight on 16 bytes. ``columns``: sixteens of rows of W in a group, ``stages``: buffers
// of a ring (the pairs listed below); ``per``: sixteens for a block; ``ranks``: blocks that share K (at most 8).
// ``gate``: see above; N is then a multiple of 16, bias null and ranks 1. residual to eps: as in ``Norm``, null for
// none. ``dependent``: 0 an ordinary launch, 1 a dependent one, 2 one that asks for W before the kernel before has
// ended (which must not write W). Returns a cudaError_t, or -1 for what it does not take.
extern "C" int transect_small_matmul(const void* x, const void* weight, const void* bias, void* out, int M, int N,
                                     int K, long long x_stride, long long w_stride, int columns, int stages, int warps,
                                     int per, int ranks, int gate, const void* residual, const void* scale,
                                     void* scaled, void* squares, const void* x_squares, float eps, int dependent,
                                     void* stream) {
  if (M < 1 || N < 1 || K < 8 || K % 8 || x_stride % 8 || w_stride % 8 || per < 1 || ranks < 1 || ranks > 8 ||
      (warps != 4 && warps != 8))
    return -1;
  const Norm norm = {(const __nv_bfloat16*)residual, (const __nv_bfloat16*)scale,
                     (__nv_bfloat16*)scaled,         (float*)squares,
                     (const float*)x_squares,        eps};
  if (gate && (N % 16 || ranks > 1 || bias || residual)) return -1;
  if ((residual && (N % 16 || !scale || !scaled || !squares)) || (x_squares && K % 64)) return -1;
#define TRANSECT_START(RB, STAGES, NT)                                                                             \
  return TRANSECT_HERE(start<RB, STAGES, NT>(x, weight, bias, out, M, N, K, x_stride, w_stride, per, warps, ranks, \
                                             gate, norm, dependent, stream))
#define TRANSECT_ROWS(RB, STAGES)                 \
  if (columns == RB && stages == STAGES) {        \
    if (M <= 8) TRANSECT_START(RB, STAGES, 1);    \
    if (M <= 16) TRANSECT_START(RB, STAGES, 2);   \
    TRANSECT_START(RB, STAGES, 4);                \
  }
  TRANSECT_ROWS(1, 4)
  TRANSECT_ROWS(1, 8)
  TRANSECT_ROWS(2, 2)
  TRANSECT_ROWS(2, 3)
  TRANSECT_ROWS(2, 4)
  TRANSECT_ROWS(2, 6)
  TRANSECT_ROWS(3, 2)
  TRANSECT_ROWS(3, 3)
  TRANSECT_ROWS(3, 4)
  return -1;
}
