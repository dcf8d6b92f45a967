// Y = X W^T + b for 1 to 32 rows of X at a time, bfloat16 in and out, float32 sums: a weight streamed once at the width
// of memory, in bfloat16 (small_matmul.cu) or in bytes (scaled8.cu). See small_matmul.py for the arithmetic.
//
// * Rows of W are dealt out to the blocks evenly in sixteens, so that 4096, 6144 or 28672 of them make 128 equal
//   shares.
//   A block takes its share in groups of 16 RB rows, and each group all along K.
// * The warps of a block (and the blocks of a cluster) take every so-many-th chunk of 64 k. A warp streams its own
//   chunks of W and X through its own ring of STAGES buffers in shared memory by asynchronous copies, so nobody waits
//   for anybody until a group ends: then the parts are added up in shared memory, always in the same order. (Ordinary
//   loads of X beside the copies would come back behind all copies asked for before them, and take the depth of the
//   ring away.)
// * ``parts``: K is cut into as many consecutive parts instead, each added in the order of k by one warp, as the blocks of
//   hopper_rows.cuh with as many ranks do: the sums have the same bits. Where a block has more warps than parts they take
//   several groups at a time. Such a warp may ask for WIDE chunks at a time, side by side in a row: with one each row gives
//   128 bytes at a time, where the warps that take every so-many-th chunk ask for a KiB of it together.
// * What a row of Y gets does not depend on the other rows, nor on how many there are: the order of its sum is fixed by
//   the number of warps and of blocks in a cluster, and by which share of W it is.
// * GATE: W is a gate's rows and then those of the other factor, N / 2 each; Y [M, N / 2] is silu(one) times the other.
//   A sixteen is then eight rows of the gate and the eight that belong to them.
// * A norm may stand on either side, see ``Norm``.
// * The first STAGES - 1 chunks of W may be asked for before the kernel that makes X has ended (``ahead``).

#pragma once

#include "../../lang/few_rows.cuh"

using namespace few_rows;

// How W lies in memory: bfloat16; or a byte for each number, fp8 (e4m3) or whole, with a scale for each row, of fp8 also
// one for each block of 128 rows by 128 k.
enum Format { kBf16, kFp8, kInt8, kFp8Blocks };

template <Format F>
constexpr bool kBytes = F != kBf16;
template <Format F>
constexpr int kChunk = kBytes<F> ? 128 : 64;  // k in a chunk: 128 bytes of a row of W
template <Format F>
constexpr int kXBytes = 2 * kChunk<F>;  // bytes of a chunk of a row of X

// Bytes become bfloat16 by shifts and logic, as numbers that are smaller by a power of two, also below the normal range
// (tensor cores multiply those exactly). X is taken 2^64 times, so that sums are normal numbers. A whole number c from
// -128 to 127 enters as c + 128, and a product of X with -128 everywhere, ``kLess``, takes off what that is too much.
constexpr uint32_t kLess = 0x80808080u;
template <Format F>
constexpr float kUnscaled = F == kBf16 ? 1.f : F == kInt8 ? 0x1p69f : 0x1p56f;  // 2^133 / 2^64, 2^120 / 2^64

__device__ __forceinline__ uint32_t times_2_64(uint32_t pair) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(pair), "r"(0x5f805f80u), "r"(0x80008000u));
  return product;
}

// Codes 0 and 2, and 1 and 3, of a word, each in half a word.
template <Format F>
__device__ __forceinline__ uint32_t even_codes(uint32_t w) {
  if (F == kInt8) return (w ^ kLess) & 0x00FF00FFu;
  return ((w << 8) & 0x80008000u) | ((w << 4) & 0x07F007F0u);
}

template <Format F>
__device__ __forceinline__ uint32_t odd_codes(uint32_t w) {
  if (F == kInt8) return ((w ^ kLess) >> 8) & 0x00FF00FFu;
  return (w & 0x80008000u) | ((w >> 4) & 0x07F007F0u);
}

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

// Of a tile of Y of up to ROWS x COLUMNS ``warps`` warps hold a part each: they are added in the order of the warps.
// ``across``: tiles beside each other, each of the next warps. ``sums`` is [across][warps][ROWS][PITCH], filled by the
// caller, and may be written again after the next barrier of the block. The sum goes to ``finish`` with its place in Y.
template <int ROWS, int COLUMNS, typename Finish>
__device__ __forceinline__ void add_warps(const float* sums, int m0, int n0, int M, int n_end, int warps, int across,
                                          Finish finish) {
  __syncthreads();
  const int count = min(ROWS, M - m0) * COLUMNS * across;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int m = i / COLUMNS / across, c = i % (COLUMNS * across);
    const float* from = sums + c / COLUMNS * warps * (ROWS * kPitch<COLUMNS>) + m * kPitch<COLUMNS> + c % COLUMNS;
    float sum = 0;
    for (int w = 0; w < warps; w += 4) {  // four loads at a time
      float four[4];
#pragma unroll
      for (int j = 0; j < 4; j++) four[j] = w + j < warps ? from[(w + j) * ROWS * kPitch<COLUMNS>] : 0;
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
__device__ __forceinline__ void add_gated(const float* sums, int m0, int n0, int M, int n_end, int warps, int across,
                                          Finish finish) {
  constexpr int HALF = COLUMNS / 2;
  __syncthreads();
  for (int i = threadIdx.x; i < min(ROWS, M - m0) * HALF * across; i += blockDim.x) {
    const int m = i / HALF / across, c = i % (HALF * across), own = c % HALF;
    const float* from =
        sums + c / HALF * warps * (ROWS * kPitch<COLUMNS>) + m * kPitch<COLUMNS> + own / 8 * 16 + own % 8;
    float gate = 0, up = 0;
#pragma unroll 4
    for (int w = 0; w < warps; w++) {
      gate += from[w * ROWS * kPitch<COLUMNS>];
      up += from[w * ROWS * kPitch<COLUMNS> + 8];
    }
    if (n0 / 2 + c < n_end / 2) finish(m0 + m, n0 / 2 + c, gate, up);
  }
}

// w_stride in bytes. scale: [N], or of blocks [N / 128, K / 128] rounded up; null for bfloat16.
template <Format F, int RB, int STAGES, int NT, int WIDE>
__global__ void __launch_bounds__(256, 1)
    small_rows(const __nv_bfloat16* x, const unsigned char* weight, const float* scale, const __nv_bfloat16* bias,
               __nv_bfloat16* out, int M, int N, int K, long long x_stride, long long w_stride, int per, int row_tiles,
               int ranks, int parts, int gate, Norm norm, int ahead) {
  constexpr bool BYTES = kBytes<F>;
  constexpr int CHUNK = kChunk<F>, X_BYTES = kXBytes<F>, ELEMENT = BYTES ? 1 : 2;
  constexpr int ROWS = NT * 8, COLUMNS = RB * 16, W_BYTES = COLUMNS * 128;
  static_assert(STAGES % WIDE == 0 && STAGES > WIDE && (WIDE == 1 || !BYTES));
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int rank = blockIdx.x % ranks, row_tile = blockIdx.x / ranks % row_tiles,
            share = blockIdx.x / ranks / row_tiles;
  const int m0 = row_tile * ROWS, rows = min(ROWS, M - m0);
  const int stage_bytes = W_BYTES + min(ROWS, M) * X_BYTES;
  const int n_first = share * per * 16, n_end = min(N, n_first + per * 16);
  const int groups = (n_end - n_first + COLUMNS - 1) / COLUMNS;
  const int takers = parts ? parts : warps * ranks, self = parts ? warp % parts : rank * warps + warp;
  const int across = parts ? warps / parts : 1;  // groups that the block takes at a time
  const int steps = ((K + CHUNK - 1) / CHUNK + takers - 1) / takers;
  const int total = (groups + across - 1) / across * steps;
  float* sums = (float*)(memory + warps * STAGES * stage_bytes);
  __shared__ __align__(8) uint64_t sent[1];
  const int columns = n_end - n_first;
  const Ranks cluster = {sums + warps * ROWS * kPitch<COLUMNS>, shared_address(sent), rank, ranks, rows * columns};
  const uint32_t ring = shared_address(memory) + warp * STAGES * stage_bytes;

  let_next_begin();
  if (!ahead) wait_for_previous();
  if (ranks > 1) cluster.begin();

  // A copy moves 4 rows x 128 bytes a warp. The eight 16-byte pieces of row r lie at piece ^ (r % 8): no bank is met
  // twice. Bytes are read otherwise, four pieces of two rows at a time: those of odd rows change places with the other
  // four, and neighbours in X do.
  // Blocks begin at different chunks, or all would ask for the same lines of X at the same time.
  const int copy_row = lane / 8, copy_piece = lane % 8;
  const int rotation = parts ? 0 : share % steps;
  auto place = [&](int row, int piece) {
    return row * 128 + ((BYTES ? piece ^ (row % 2 * 4) : piece ^ (row % 8)) * 16);
  };
  auto place_x = [&](int row, int piece) {
    return BYTES ? row * X_BYTES + ((piece ^ (row % 2)) * 16) : place(row, piece);
  };
  auto chunk_of = [&](int step) {
    const int rotated = step + rotation;
    if (parts) return (self * steps + step) * CHUNK;
    return ((rotated < steps ? rotated : rotated - steps) * takers + self) * CHUNK;
  };
  // From four rows of a sixteen to the next: 0, 4 rows on, then ``half_step`` on and both.
  const long long half_step = (gate ? N / 2 : 8) * w_stride, block_step = (gate ? 8 : 16) * w_stride;
  auto fetch_w = [&](int slot, int group, int step) {
    const int k = chunk_of(step) + copy_piece * (16 / ELEMENT);
    const int row = n_first + group * COLUMNS + copy_row;
    const unsigned char* from = weight + (gate ? (row - copy_row) / 2 + copy_row : row) * w_stride + k * ELEMENT;
    const uint32_t even = ring + slot * stage_bytes + place(copy_row, copy_piece);
    const uint32_t odd = ring + slot * stage_bytes + place(copy_row + 4, copy_piece);
#pragma unroll
    for (int j = 0; j < 4 * RB; j++)
      copy16_once((j % 2 ? odd : even) + j / 2 * 1024,
                  from + j % 2 * 4 * w_stride + j / 2 % 2 * half_step + j / 4 * block_step,
                  row + 4 * j < n_end && k < K);
  };
  auto fetch_x = [&](int slot, int step) {
    constexpr int PIECES = X_BYTES / 16 * WIDE;
    const int place = lane % PIECES, piece = WIDE > 1 ? place % 8 : place, k = chunk_of(step) + place * 8;
    for (int row = lane / PIECES; row < rows; row += 32 / PIECES)
      copy16(ring + (slot + (WIDE > 1 ? place / 8 : 0)) * stage_bytes + W_BYTES + place_x(row, piece),
             x + (m0 + row) * x_stride + k, k < K);
  };
  // WIDE chunks from ``step`` on, to buffers from ``slot`` on: 4 / WIDE rows a copy.
  auto fetch_wide = [&](int slot, int group, int step) {
    constexpr int AT_ONCE = 4 / WIDE;
    const int own_row = lane / (8 * WIDE), chunk = lane / 8 % WIDE;
    const int first = n_first + group * COLUMNS;
    const unsigned char* from =
        weight + ((gate ? first / 2 : first) + own_row) * w_stride + (chunk_of(step) + lane % (8 * WIDE) * 8) * 2;
    const uint32_t to = ring + (slot + chunk) * stage_bytes + own_row * 128;
#pragma unroll
    for (int row = 0; row < COLUMNS; row += AT_ONCE)
      copy16_once(to + row * 128 + (lane % 8 ^ (row % 8 + own_row)) * 16,
                  from + row % 8 * w_stride + row / 8 % 2 * half_step + row / 16 * block_step,
                  first + row + own_row < n_end);
  };
  int load_group = parts ? warp / parts : 0, load_step = 0;
  auto fetch_weight = [&](int slot) {
    if constexpr (WIDE > 1) fetch_wide(slot, load_group, load_step);
    else fetch_w(slot, load_group, load_step);
  };
  auto advance = [&] {
    if ((load_step += WIDE) == steps) load_step = 0, load_group += across;
  };
#pragma unroll
  for (int s = 0; s < STAGES - WIDE; s += WIDE) {
    if (load_group < groups) fetch_weight(s);
    advance();
  }
  if (ahead) wait_for_previous();
#pragma unroll
  for (int s = 0; s < STAGES - WIDE; s += WIDE) {
    if (s < total) fetch_x(s, s % steps);
    end_group();
  }

  // Where this lane reads its row of the matrices: pieces 2 s and 2 s + 1 of W for the s-th 16 k, 4 h to 4 h + 3 of X.
  // Of bytes a lane reads 16 neighbours of row lane / 4 of each eight, and those of X: which k meet in a product is free,
  // as long as both sides agree.
  const uint32_t w_at = BYTES ? place(lane / 4, lane % 4) : place(lane % 16, lane / 16);
  uint32_t x_at[NT];  // rows past the end read the last one: what they give is not stored
#pragma unroll
  for (int tile = 0; tile < NT; tile++)
    x_at[tile] = W_BYTES + (BYTES ? place_x(min(tile * 8 + lane / 4, rows - 1), lane % 4 * 2)
                                  : place(min(tile * 8 + lane % 8, rows - 1), lane / 8));
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
  auto unscaled = [&](float sum, int n) {
    if (!BYTES) return sum;
    return sum * (F == kFp8Blocks ? kUnscaled<F> : kUnscaled<F> * scale[n]);
  };
  auto finish = [&](int m, int n, float sum) {
    const size_t at = (size_t)m * N + n;
    sum = unscaled(sum, n);
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
  [[maybe_unused]] float less[NT][4] = {};  // sums of -128 x
  // The scales of this lane's rows, 0 to 7 and 8 to 15 of each sixteen, in the chunk that comes next.
  [[maybe_unused]] float block_scale[RB][2];
  auto fetch_scales = [&](int group, int step) {
    const int block = min(chunk_of(step) / 128, (K - 1) / 128);
#pragma unroll
    for (int r = 0; r < RB; r++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int sixteen = n_first + group * COLUMNS + r * 16;
        const int row = gate ? sixteen / 2 + half * (N / 2) + lane / 4 : sixteen + half * 8 + lane / 4;
        block_scale[r][half] = scale[(size_t)(min(row, N - 1) / 128) * ((K + 127) / 128) + block];
      }
  };
  if constexpr (F == kFp8Blocks)
    if (total > 0) fetch_scales(0, 0);
  int slot = 0, step = 0, group = 0;
  for (int i = 0; i < total; i++) {
    if (WIDE == 1 || i % WIDE == 0) {
      wait_groups<STAGES / WIDE - 2>();
      __syncwarp();  // the copies of all lanes have landed, and all lanes have read the slots that are filled again now
      if (load_group < groups) {
        const int free = slot == 0 ? STAGES - WIDE : slot - WIDE;
        fetch_weight(free);
        fetch_x(free, load_step);
      }
      end_group();
      advance();
    }
    const uint32_t from = ring + slot * stage_bytes;
    if constexpr (BYTES) {
      float own[RB][NT][4] = {};  // of this chunk, where it has a scale of its own
      auto& to = F == kFp8Blocks ? own : acc;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint32_t b[NT][4][2];
#pragma unroll
        for (int tile = 0; tile < NT; tile++) {
          const uint4 v = read16(from + (x_at[tile] ^ (h * 128))), w = read16(from + (x_at[tile] ^ (h * 128) ^ 16));
          const uint32_t pairs[8] = {v.x, v.y, v.z, v.w, w.x, w.y, w.z, w.w};
#pragma unroll
          for (int q = 0; q < 4; q++) {
            b[tile][q][0] = times_2_64(__byte_perm(pairs[2 * q], pairs[2 * q + 1], 0x5410));
            b[tile][q][1] = times_2_64(__byte_perm(pairs[2 * q], pairs[2 * q + 1], 0x7632));
          }
        }
        if constexpr (F == kInt8) {
          const uint32_t minus[4] = {kLess, kLess, kLess, kLess};
#pragma unroll
          for (int q = 0; q < 4; q++)
#pragma unroll
            for (int tile = 0; tile < NT; tile++) multiply(less[tile], minus, b[tile][q][0], b[tile][q][1]);
        }
#pragma unroll
        for (int r = 0; r < RB; r++) {
          const uint4 v = read16(from + r * 2048 + (w_at ^ (h * 64)));
          const uint4 w = read16(from + r * 2048 + 1024 + (w_at ^ (h * 64)));
          const uint32_t first[4] = {v.x, v.y, v.z, v.w}, second[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
          for (int q = 0; q < 4; q++) {
            const uint32_t a[4] = {even_codes<F>(first[q]), even_codes<F>(second[q]), odd_codes<F>(first[q]),
                                   odd_codes<F>(second[q])};
#pragma unroll
            for (int tile = 0; tile < NT; tile++) multiply(to[r][tile], a, b[tile][q][0], b[tile][q][1]);
          }
        }
      }
      if constexpr (F == kFp8Blocks) {
#pragma unroll
        for (int r = 0; r < RB; r++)
#pragma unroll
          for (int tile = 0; tile < NT; tile++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc[r][tile][j] += block_scale[r][j / 2] * own[r][tile][j];
        if (i + 1 < total) fetch_scales(step + 1 == steps ? group + 1 : group, step + 1 == steps ? 0 : step + 1);
      }
    } else {
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
    }
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    if (++step < steps) continue;
    if constexpr (F == kInt8) {
#pragma unroll
      for (int r = 0; r < RB; r++)
#pragma unroll
        for (int tile = 0; tile < NT; tile++)
#pragma unroll
          for (int j = 0; j < 4; j++) acc[r][tile][j] += less[tile][j];
#pragma unroll
      for (int tile = 0; tile < NT; tile++)
#pragma unroll
        for (int j = 0; j < 4; j++) less[tile][j] = 0;
    }
    leave_sums(sums + warp * ROWS * kPitch<COLUMNS>, acc, lane);
    if (gate)
      add_gated<ROWS, COLUMNS>(sums, m0, n_first + group * COLUMNS, M, n_end, warps / across, across,
                               [&](int m, int n, float g, float u) {
                                 g = unscaled(g, n), u = unscaled(u, n + N / 2);
                                 if (norm.x_squares) g *= inverse[m - m0], u *= inverse[m - m0];
                                 out[(size_t)m * (N / 2) + n] = __float2bfloat16(gated(g, u));
                               });
    else if (ranks == 1)
      add_warps<ROWS, COLUMNS>(sums, m0, n_first + group * COLUMNS, M, n_end, warps / across, across, finish);
    else {
      if (group == 0) wait_for_cluster();
      add_warps<ROWS, COLUMNS>(sums, m0, n_first + group * COLUMNS, M, n_end, warps, 1, [&](int m, int n, float part) {
        cluster.send_part((m - m0) * columns + n - n_first, part);
      });
    }
    __syncthreads();
    step = 0;
    group += across;
  }
  if (ranks > 1) cluster.add([&](int e, float sum) { finish(m0 + e / columns, n_first + e % columns, sum); });
}

template <Format F, int RB, int STAGES, int NT, int WIDE = 1>
static int start(const void* x, const void* weight, const void* scale, const void* bias, void* out, int M, int N, int K,
                 long long x_stride, long long w_stride, int per, int warps, int ranks, int gate, const Norm& norm,
                 int dependent, void* stream) {
  constexpr int ROWS = NT * 8, COLUMNS = RB * 16;
  const int shares = ((N + 15) / 16 + per - 1) / per, row_tiles = (M + ROWS - 1) / ROWS;
  const int parts = ranks < 0 ? -ranks : 0;
  if (parts) ranks = 1;
  if (WIDE > 1 && (!parts || K % (64 * parts * WIDE))) return -1;
  const int rows = M < ROWS ? M : ROWS, round = warps * 32 * ranks,
            sent = (rows * per * 16 + round - 1) / round * round;
  const int shared =
      warps * STAGES * (COLUMNS * 128 + rows * kXBytes<F>) + (warps * ROWS * kPitch<COLUMNS> + (ranks > 1) * sent) * 4;
  if (shared + 4 * ROWS + 8 > kMostShared) return -1;
  return (int)launch(small_rows<F, RB, STAGES, NT, WIDE>, shares * row_tiles * ranks, warps * 32, shared, ranks, dependent > 0,
                     stream, (const __nv_bfloat16*)x, (const unsigned char*)weight, (const float*)scale,
                     (const __nv_bfloat16*)bias, (__nv_bfloat16*)out, M, N, K, x_stride, w_stride, per, row_tiles,
                     ranks, parts, gate, norm, (int)(dependent > 1));
}
