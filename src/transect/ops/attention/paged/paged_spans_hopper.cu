// Attention of decode rows (one query each) over a paged cache on Hopper, with the bits of decode_spans.py: every key
// and value streamed once, bfloat16 in and out, float32 sums. See paged/decode_spans.py for the order of the sums, and
// for the launcher.
//
// * A span is 256 positions of a row for one key head, an item a row with a key head.
//   Even cut (ranks = 0): the spans of all items are numbered, item after item. Every warp takes equally many consecutive
//   spans. Each block sums up the lengths for itself, while the kernel before this one still runs. There is one block for
//   each multiprocessor, too large for two, so that all have as many warps.
//   By clusters (ranks > 0): the warps of a cluster's blocks take one span each of an item, or the warps of a block share
//   one span after another (``paged_spans_together``). They send their sums to the block that adds those of a head, in its
//   shared memory.
// * A warp streams its tiles of 32 positions through its own ring of S buffers in shared memory, each of a tile's keys or
//   of its values. The maximum changes from tile to tile, as in the Triton kernels. Products have keys, then the dimensions
//   of a head, on the left: neither this nor the instruction changes bits. Sums of weights, products, multiply-adds and
//   exponentials are those that Triton's compiler makes of ``tile.py``, in its order: a quad's thread adds columns 2 c,
//   2 c + 1, 2 c + 8, ...
// * Of an even cut, spans of an item that its first warp has are added in registers. It leaves the sum in memory, as the
//   other warps leave each of their spans. The warp that arrives last adds them in order.

#include "../../lang/few_rows.cuh"
#include "../../lang/hopper.cuh"
#include "../../lang/parts.cuh"

#define TRANSECT_PARTS 3

using namespace few_rows;
using namespace hopper;

namespace {

constexpr int kBlock = 16, kTile = 32, kSpan = 256;  // positions of a cache block, of a tile, of a span
constexpr int kTiles = kSpan / kTile;
constexpr int kMostRows = 1024;
constexpr int kMostWarps = 4;
constexpr int kAtOnce = 4;  // parts of an item that are asked for before the first is added
constexpr int kPitch = 20;  // of 16 dimensions of a head
constexpr float kInfinity = INFINITY;

__device__ __forceinline__ float exponential(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float divided(float x, float by) {
  float y;
  asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(by));
  return y;
}

__device__ __forceinline__ float shift_of(float m) { return m == -kInfinity ? 0 : m; }

// The factors by which the sums so far and those of the next positions, with maxima m and own, enter a sum of both.
__device__ __forceinline__ void join(float& m, float own, float& fade, float& weight) {
  const float top = fmaxf(m, own), shift = shift_of(top);
  fade = exponential(m - shift), weight = exponential(own - shift), m = top;
}

__device__ __forceinline__ float joined(float sum, float fade, float own, float weight) {
  return __fmaf_rn(own, weight, __fmul_rn(sum, fade));
}

// A tile of 32 positions in shared memory: two pieces of 16 keys, two of 16 values, each as columns of 128 bytes of its 16
// rows; the eighths of row r at place ^ (r % 8): no bank is met twice.
//
// Of lane 4 g + c: scores of keys g, g + 8 (of either half of a tile) with query heads 2 c, 2 c + 1; of o dimensions g,
// g + 8 of every 16, the same heads; the sum of weights of head 2 c + g % 2.

template <int D>
constexpr int kPiece = kBlock * D * 2;

// s += a tile's scores.
template <int D, int NT>
__device__ __forceinline__ void add_scores(float (&s)[NT][2][4], uint32_t from, int lane,
                                           const uint32_t (&query)[NT][D / 16][2]) {
  const uint32_t key_at = lane % 16 * 128 + ((lane / 16) ^ (lane % 8)) * 16;
#pragma unroll
  for (int t = 0; t < D / 16; t++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t a[4];
      read_matrices(a, (from + half * kPiece<D> + key_at + t / 4 * 2048) ^ (t % 4 * 32));
#pragma unroll
      for (int n = 0; n < NT; n++) multiply(s[n][half], a, query[n][t][0], query[n][t][1]);
    }
}

// o[to] += a tile half's weights times dimensions 16 t to 16 t + 15 of its values.
template <int D, int NT, int COUNT>
__device__ __forceinline__ void add_values(float (&o)[NT][COUNT][4], int to, int t, uint32_t from, int half, int lane,
                                           const uint32_t (&p)[NT][2][2]) {
  const uint32_t value_at = (lane % 8 + lane / 16 * 8) * 128 + ((lane / 8 % 2) ^ (lane % 8)) * 16;
  uint32_t a[4];
  read_transposed(a, (from + half * kPiece<D> + value_at + t / 4 * 2048) ^ (t % 4 * 32));
#pragma unroll
  for (int n = 0; n < NT; n++) multiply(o[n][to], a, p[n][half][0], p[n][half][1]);
}

// The scaled maximum of a tile's scores of head 2 c + h. Positions from ``left`` + 8 j on count as -infinity.
__device__ __forceinline__ float top_of(float (&s)[2][4], int h, int left, float scale2) {
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (j * 8 >= left) s[j / 2][j % 2 * 2 + h] = -kInfinity;
  float top = fmaxf(fmaxf(s[0][h], s[0][2 + h]), fmaxf(s[1][h], s[1][2 + h]));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
  return __fmul_rn(top, scale2);
}

// Scores of head 2 c + h become weights.
__device__ __forceinline__ void weigh(float (&s)[2][4], int h, float scale2, float shift) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float& e = s[j / 2][j % 2 * 2 + h];
    e = exponential(__fmaf_rn(e, scale2, -shift));
  }
}

// The sum of a tile's weights: those of keys 2 g' and 2 g' + 1 of every 8 meet in lanes g = 2 g' (the even head's sum)
// and 2 g' + 1 (``odd``).
__device__ __forceinline__ float sum_of(const float (&s)[2][4], bool odd) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float e0 = s[j / 2][j % 2 * 2], e1 = s[j / 2][j % 2 * 2 + 1];
    const float other = __shfl_xor_sync(~0u, odd ? e0 : e1, 4), own = odd ? e1 : e0;
    const float low = odd ? other : own, high = odd ? own : other;
    sum = j == 0 ? __fadd_rn(low, high) : __fadd_rn(__fadd_rn(sum, low), high);
  }
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 16));
  return __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 8));
}

// Weights as the right operand of a product with values.
__device__ __forceinline__ void turn(uint32_t (&p)[2][2], const float (&s)[2][4]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    p[half][0] = transposed(pack(s[half][0], s[half][1]));
    p[half][1] = transposed(pack(s[half][2], s[half][3]));
  }
}

struct Batch {
  const int *tables, *starts, *lengths;  // starts: null where token t is row t's
  int rows, columns, table_stride;
  __device__ __forceinline__ bool decodes(int row) const {
    return !starts || __ldcg(starts + row + 1) - __ldcg(starts + row) == 1;
  }
};

// What was sent to this block of a cluster: the sums of heads rank, rank + ranks, ... of every span, [spans][heads_here]
// [D + 4]. Each warp adds those of a head in order. ``out``: of the item.
template <int D>
__device__ __forceinline__ void add_of_cluster(__nv_bfloat16* out, const float* gathered, int spans, int heads_here,
                                               int rank, int ranks) {
  constexpr int SENT = D + 4;
  const int lane = threadIdx.x % 32;
  for (int here = threadIdx.x / 32; here < heads_here; here += blockDim.x / 32) {
    const float* from = gathered + here * SENT;
    float4 sum = *(const float4*)(from + lane * 4 % D);
    float sum_m = from[D], sum_l = from[D + 1];
    for (int span = 1; span < spans; span++) {
      from += heads_here * SENT;
      const float4 own = *(const float4*)(from + lane * 4 % D);
      float fade, weight;
      join(sum_m, from[D], fade, weight);
      sum_l = joined(sum_l, fade, from[D + 1], weight);
      sum.x = joined(sum.x, fade, own.x, weight), sum.y = joined(sum.y, fade, own.y, weight);
      sum.z = joined(sum.z, fade, own.z, weight), sum.w = joined(sum.w, fade, own.w, weight);
    }
    __nv_bfloat16* to = out + (rank + here * ranks) * D + lane * 4;
    if (lane * 4 < D)
      *(uint2*)to = make_uint2(pack(divided(sum.x, sum_l), divided(sum.y, sum_l)),
                               pack(divided(sum.z, sum_l), divided(sum.w, sum_l)));
  }
}

// The place in a block's ``gathered`` for a span's sums of a head, and the block.
struct Sent {
  int G, ranks;
  __device__ __forceinline__ int block_of(int head) const { return head % ranks; }
  __device__ __forceinline__ int place_of(int span, int head) const {
    return span * ((G - head % ranks + ranks - 1) / ranks) + head / ranks;
  }
};

struct Parts {  // of an item, from ``begin`` before ``end``; ``heads``: heads before it in the output
  int heads, begin, end;
};

struct Place {  // of a span
  int row, head, span, spans, length;
};

template <int D, int NT, int S>
__global__ void __launch_bounds__(kMostWarps * 32, 1)
    paged_spans(const __nv_bfloat16* q, const unsigned char* keys, const unsigned char* values, Batch batch,
                __nv_bfloat16* out, float* parts, float* parts_ml, int* arrivals, int K, int G, float scale2,
                long long q_t, int q_h, int pieces, int ranks, int whole_items, int ahead, int late) {
#ifdef TRANSECT_HOPPER
  constexpr int T = D / 16, PIECE = kBlock * D * 2, BUFFER = 2 * PIECE;
  extern __shared__ __align__(1024) unsigned char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  unsigned char* own_ring = memory + warp * S * BUFFER;
  const uint32_t ring = shared_address(own_ring);
  int* prefix = (int*)(memory + warps * S * BUFFER);  // [rows + 1] spans before a row, and [rows] lengths; even cut
  int* row_lengths = prefix + batch.rows + 1;
  // [spans of an item][heads that this block adds][D + 4]: sums, m and l; of clusters
  constexpr int SENT = D + 4;
  float* gathered = (float*)(memory + warps * S * BUFFER);
  __shared__ __align__(8) uint64_t sent[1];
  const int rank = ranks ? blockIdx.x % ranks : 0, heads_here = ranks ? (G - rank + ranks - 1) / ranks : 0;
  const Sent to_cluster = {G, ranks};

  if (!late) let_next_begin();
  bool waited = false;
  if (!ahead) {
    wait_for_previous();
    waited = true;
  }
  int total = 0, takers = 0, begin = 0, end = 0;
  Place at = {0, 0, 0, 0, 0};
  auto cut = [&](int taker) { return (int)((long long)total * taker / takers); };  // the first span of a taker
  auto taker_of = [&](int span) { return (int)(((span + 1) * (long long)takers - 1) / total); };
  auto zeros = [&](int row, int first, int count) {  // for rows without a position (unused ones of a graph's buffers)
    if (!waited) wait_for_previous();
    waited = true;
    __nv_bfloat16* to = out + (long long)(batch.starts ? __ldcg(batch.starts + row) : row) * K * G * D + first;
    for (int e = lane * 8; e < count; e += 256) *(uint4*)(to + e) = make_uint4(0, 0, 0, 0);
  };
  auto set_row = [&](Place& p) { p.length = row_lengths[p.row], p.spans = prefix[p.row + 1] - prefix[p.row]; };
  auto advance = [&](Place& p) {
    if (++p.span < p.spans) return;
    p.span = 0;
    if (++p.head < K) return;
    p.head = 0;
    do p.row++;
    while (p.row < batch.rows && prefix[p.row + 1] == prefix[p.row]);
    if (p.row < batch.rows) set_row(p);
  };
  auto find = [&](int span) {
    int low = 0, high = batch.rows;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (prefix[middle] * K <= span) low = middle;
      else high = middle;
    }
    Place p;
    p.row = low;
    set_row(p);
    const int rest = span - prefix[low] * K;
    p.head = rest / p.spans, p.span = rest % p.spans;
    return p;
  };
  if (ranks) {
    const int item = blockIdx.x / ranks;
    at.row = item / K, at.head = item % K, at.span = begin = rank + ranks * warp;
    at.length = batch.decodes(at.row) ? __ldcg(batch.lengths + at.row) : 0;
    at.spans = (max(at.length, 0) + kSpan - 1) / kSpan;
    end = begin + (begin < at.spans);
    if (threadIdx.x == 0) expect_sent(shared_address(sent), at.spans * heads_here * (D + 2) * 4);
    __syncwarp();
    arrive_in_cluster();
    if (at.spans == 0 && rank == 0 && warp == 0 && batch.decodes(at.row)) zeros(at.row, at.head * G * D, G * D);
  } else {
    __shared__ int sums[kMostWarps];
    const int each = (batch.rows + blockDim.x - 1) / blockDim.x, from = threadIdx.x * each;
    const int to = min(batch.rows, from + each);
    auto spans_of = [](int length) { return (max(length, 0) + kSpan - 1) / kSpan; };
    int mine = 0;
    for (int row = from; row < to; row++) {
      row_lengths[row] = batch.decodes(row) ? __ldcg(batch.lengths + row) : 0;
      mine += spans_of(row_lengths[row]);
    }
    int before = mine;
#pragma unroll
    for (int far = 1; far < 32; far *= 2) {
      const int other = __shfl_up_sync(~0u, before, far);
      if (lane >= far) before += other;
    }
    if (lane == 31) sums[warp] = before;
    before -= mine;
    __syncthreads();
    for (int i = 0; i < warps; i++) {
      if (i < warp) before += sums[i];
      total += sums[i];
    }
    for (int row = from; row < to; row++) {
      prefix[row] = before;
      before += spans_of(row_lengths[row]);
    }
    if (threadIdx.x == 0) prefix[batch.rows] = total;
    __syncthreads();
    total *= K;
    // Up to a 32nd of the blocks stay out where every warp of the others then has as many spans: cuts of rows of one length
    // then mostly fall between items.
    const bool even = lane * 32 <= gridDim.x && total % ((gridDim.x - lane) * warps) == 0;
    const int fewer = max(__ffs(__ballot_sync(~0u, even)) - 1, 0), taker = blockIdx.x * warps + warp;
    takers = min((int)(gridDim.x - fewer) * warps, total);
    for (int row = taker; row < batch.rows; row += gridDim.x * warps)
      if (prefix[row + 1] == prefix[row] && batch.decodes(row)) zeros(row, 0, K * G * D);
    if (taker < takers) {
      begin = cut(taker), end = cut(taker + 1);
      at = find(begin);
      if (whole_items) {  // an item is its first span's taker's
        if (at.span) begin += at.spans - at.span;
        if (end < total) {
          const Place next = find(end);
          if (next.span) end += next.spans - next.span;
        }
        if (begin < end) at = find(begin);
      }
    }
  }
  if (begin >= end && !ranks) {
    if (!waited) wait_for_previous();
    return;
  }

  auto look_up = [&](const Place& p) {  // the cache blocks of a span, one in each of 16 lanes
    const int column = p.span * (kSpan / kBlock) + lane % 16;
    const bool inside = p.row < batch.rows && column < batch.columns;
    return inside ? __ldcg(batch.tables + (long long)p.row * batch.table_stride + column) : 0;
  };

  // What is asked for next.
  constexpr int PER_ROW = D * 2 / 16, ROWS = 32 / PER_ROW;  // copies of 16 bytes for a row; rows that 32 lanes copy
  const int copy_row = lane / PER_ROW, copy_place = lane % PER_ROW;
  const uint32_t copy_first = copy_place / 8 * 2048 + copy_row * 128 + (((copy_place % 8) ^ copy_row) * 16);
  Place in = at, then = at;
  if (!ranks) advance(then);
  int blocks = look_up(in), coming = ranks ? 0 : look_up(then), in_tile = 0, in_left = end - begin, in_slot = 0;
  auto fetch = [&](bool of_values) {  // keys of a tile, then its values
    if (in_left > 0) {
      const int rest = in.length - in.span * kSpan - in_tile * kTile;
      if (!waited && rest <= kTile) {
        wait_for_previous();
        waited = true;
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int block = __shfl_sync(~0u, blocks, in_tile * 2 + half);
        const unsigned char* from =
            (of_values ? values : keys) + (size_t)(block * pieces + in.head) * PIECE + lane * 16;
        const uint32_t to = ring + in_slot * BUFFER + half * PIECE;
#pragma unroll
        for (int j = 0; j < kBlock / ROWS; j++)
          copy16_once(to + ((copy_first + j * ROWS * 128) ^ (j * ROWS % 8 * 16)), from + j * 512,
                      copy_row + j * ROWS < rest - half * kBlock);
      }
      if (of_values && (++in_tile == kTiles || rest <= kTile)) {
        in_tile = 0, in_left--;
        in = then, blocks = coming;
        if (in_left > 1) {
          advance(then);
          coming = look_up(then);
        }
      }
    }
    in_slot = in_slot + 1 == S ? 0 : in_slot + 1;
    end_group();
  };
#pragma unroll
  for (int s = 0; s < S - 1; s++) fetch(s % 2);
  if (!waited) wait_for_previous();
  waited = true;
  if (late) let_next_begin();

  const int g = lane / 4, c = lane % 4;
  const bool odd = g % 2;
  uint32_t query[NT][T][2];
  float whole[NT][T][4], whole_m[NT][2], whole_l[NT];  // the spans so far of an item that this warp began, or one
  Parts joining = {0, 0, 0}, joining_too = {0, 0, 0};
  int slot = 0;
  auto next_buffer = [&](bool fetches_values) {
    wait_groups<S - 2>();
    __syncwarp();  // the copies of all lanes have landed, and all lanes have read the buffer that is filled again now
    fetch(fetches_values);
    const uint32_t from = ring + slot * BUFFER;
    slot = slot + 1 == S ? 0 : slot + 1;
    return from;
  };
  for (int span = begin; span < end; span++) {
    if (span == begin || at.span == 0) {
      const int token = batch.starts ? __ldcg(batch.starts + at.row) : at.row;
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const __nv_bfloat16* from = q + token * q_t + (long long)(at.head * G + n * 8 + g) * q_h + c * 2;
        const bool there = n * 8 + g < G;
#pragma unroll
        for (int t = 0; t < T; t++) {
          query[n][t][0] = there ? *(const uint32_t*)(from + t * 16) : 0;
          query[n][t][1] = there ? *(const uint32_t*)(from + t * 16 + 8) : 0;
        }
      }
    }
    float o[NT][T][4] = {}, m[NT][2], l[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) m[n][0] = m[n][1] = -kInfinity, l[n] = 0;
    const int positions = min(kSpan, at.length - at.span * kSpan);
    for (int first = 0; first < positions; first += kTile) {
      const uint32_t its_keys = next_buffer(S % 2 == 0);
      float s[NT][2][4] = {};
      add_scores<D, NT>(s, its_keys, lane, query);
      uint32_t p[NT][2][2];
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float fade[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float top = fmaxf(m[n][h], top_of(s[n], h, positions - first - g, scale2)), shift = shift_of(top);
          fade[h] = exponential(m[n][h] - shift);
          m[n][h] = top;
          weigh(s[n], h, scale2, shift);
        }
        l[n] = __fmaf_rn(l[n], odd ? fade[1] : fade[0], sum_of(s[n], odd));
        turn(p[n], s[n]);
#pragma unroll
        for (int t = 0; t < T; t++)
#pragma unroll
          for (int j = 0; j < 4; j++) o[n][t][j] *= fade[j % 2];
      }
      const uint32_t its_values = next_buffer(S % 2);
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int t = 0; t < T; t++) add_values<D, NT>(o, t, t, its_values, half, lane, p);
    }
    if (ranks) {
      __syncwarp();  // the sums go where the ring was
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int head = n * 8 + 2 * c + h;
          if (head >= G) continue;
          float* to = (float*)own_ring + head * SENT;
          if (g == h) to[D] = m[n][h], to[D + 1] = l[n];
#pragma unroll
          for (int t = 0; t < T; t++) to[t * 16 + g] = o[n][t][h], to[t * 16 + g + 8] = o[n][t][2 + h];
        }
      __syncwarp();
      wait_for_cluster();
      for (int head = 0; head < G; head++) {
        const float* from = (float*)own_ring + head * SENT;
        const int there = to_cluster.block_of(head);
        const uint32_t to = shared_address(gathered + to_cluster.place_of(span, head) * SENT);
        if (lane * 4 < D) send(to + lane * 16, *(const float4*)(from + lane * 4), shared_address(sent), there);
        if (lane < 2) send(to + (D + lane) * 4, from[D + lane], shared_address(sent), there);
      }
      break;
    }
    const bool begun = at.span <= span - begin, last = at.span == at.spans - 1;  // the item began in this warp
#pragma unroll
    for (int n = 0; n < NT; n++) {
      if (!begun || at.span == 0) {
        whole_l[n] = l[n];
#pragma unroll
        for (int h = 0; h < 2; h++) whole_m[n][h] = m[n][h];
#pragma unroll
        for (int t = 0; t < T; t++)
#pragma unroll
          for (int j = 0; j < 4; j++) whole[n][t][j] = o[n][t][j];
        continue;
      }
      float fade[2], weight[2];
#pragma unroll
      for (int h = 0; h < 2; h++) join(whole_m[n][h], m[n][h], fade[h], weight[h]);
      whole_l[n] = joined(whole_l[n], odd ? fade[1] : fade[0], l[n], odd ? weight[1] : weight[0]);
#pragma unroll
      for (int t = 0; t < T; t++)
#pragma unroll
        for (int j = 0; j < 4; j++) whole[n][t][j] = joined(whole[n][t][j], fade[j % 2], o[n][t][j], weight[j % 2]);
    }
    const int token = batch.starts ? __ldcg(batch.starts + at.row) : at.row;
    __nv_bfloat16* to_out = out + ((long long)token * K * G + at.head * G) * D;
    if (begun && last) {
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const float other = __shfl_xor_sync(~0u, whole_l[n], 4);
        const float sums[2] = {odd ? other : whole_l[n], odd ? whole_l[n] : other};
        __nv_bfloat16* to = to_out + (n * 8 + g) * D + c * 2;
#pragma unroll
        for (int t = 0; t < T; t++) {
          const float* o4 = whole[n][t];
          const uint32_t low8 = transposed(pack(divided(o4[0], sums[0]), divided(o4[1], sums[1])));
          const uint32_t high8 = transposed(pack(divided(o4[2], sums[0]), divided(o4[3], sums[1])));
          if (n * 8 + g < G) {
            *(uint32_t*)(to + t * 16) = low8;
            *(uint32_t*)(to + t * 16 + 8) = high8;
          }
        }
      }
    } else if (!begun || span == end - 1) {
      float* to = parts + (size_t)span * G * D;
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int head = n * 8 + 2 * c + h;
          if (head >= G) continue;
          if (g == h) {
            parts_ml[((size_t)span * G + head) * 2] = whole_m[n][h];
            parts_ml[((size_t)span * G + head) * 2 + 1] = whole_l[n];
          }
#pragma unroll
          for (int t = 0; t < T; t++) {
            to[head * D + t * 16 + g] = whole[n][t][h];
            to[head * D + t * 16 + g + 8] = whole[n][t][2 + h];
          }
        }
      if (last || span == end - 1) {  // this warp has left all it has of the item
        const int first = span - at.span, before = taker_of(first);
        const int sharers = taker_of(first + at.spans - 1) - before + 1;
        int arrived = 0;
        __threadfence();
        __syncwarp();
        int* counter = arrivals + at.row * K + at.head;
        if (lane == 0) arrived = atomicAdd(counter, 1) + 1;
        if (__shfl_sync(~0u, arrived, 0) == sharers) {
          if (lane == 0) *counter = 0;
          // From the part of the warp that began the item.
          (last ? joining : joining_too) = Parts{token * K * G + at.head * G, cut(before + 1) - 1, first + at.spans};
        }
      }
    }
    advance(at);
  }
  if (ranks) {
    if (begin >= end) wait_for_cluster();
    if (at.spans == 0 || warp >= heads_here) return;
    wait_for_sent(shared_address(sent));
    const int token = batch.starts ? __ldcg(batch.starts + at.row) : at.row;
    add_of_cluster<D>(out + ((long long)token * K * G + at.head * G) * D, gathered, at.spans, heads_here, rank, ranks);
    return;
  }
  // Items whose other parts have arrived before this warp's: one that it ended, and one that another warp ends.
  for (const Parts& item : {joining, joining_too}) {
    if (item.begin >= item.end) continue;
    __threadfence();
    __nv_bfloat16* to = out + (long long)item.heads * D;
    for (int e0 = lane * 4; e0 < G * D; e0 += 512) {
      float4 sum[4];
      float sum_m[4], sum_l[4];
      for (int part = item.begin; part < item.end; part += kAtOnce) {
        float4 its[kAtOnce][4];
        float2 ml[kAtOnce][4];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++)
#pragma unroll
          for (int k = 0; k < 4; k++) {
            const int e = e0 + k * 128;
            if (part + i >= item.end || e >= G * D) continue;
            its[i][k] = __ldcg((const float4*)(parts + (size_t)(part + i) * G * D + e));
            ml[i][k] = __ldcg((const float2*)(parts_ml + ((size_t)(part + i) * G + e / D) * 2));
          }
#pragma unroll
        for (int i = 0; i < kAtOnce; i++)
#pragma unroll
          for (int k = 0; k < 4; k++) {
            if (part + i >= item.end || e0 + k * 128 >= G * D) continue;
            if (part + i == item.begin) {
              sum[k] = its[i][k], sum_m[k] = ml[i][k].x, sum_l[k] = ml[i][k].y;
              continue;
            }
            float fade, weight;
            join(sum_m[k], ml[i][k].x, fade, weight);
            sum_l[k] = joined(sum_l[k], fade, ml[i][k].y, weight);
            sum[k].x = joined(sum[k].x, fade, its[i][k].x, weight);
            sum[k].y = joined(sum[k].y, fade, its[i][k].y, weight);
            sum[k].z = joined(sum[k].z, fade, its[i][k].z, weight);
            sum[k].w = joined(sum[k].w, fade, its[i][k].w, weight);
          }
      }
#pragma unroll
      for (int k = 0; k < 4; k++)
        if (e0 + k * 128 < G * D)
          *(uint2*)(to + e0 + k * 128) =
              make_uint2(pack(divided(sum[k].x, sum_l[k]), divided(sum[k].y, sum_l[k])),
                         pack(divided(sum[k].z, sum_l[k]), divided(sum[k].w, sum_l[k])));
    }
  }
#endif
}

// Few items: the warps of a block share a span, a tile each. Scores of all tiles come at once; from their maxima every
// warp knows the maximum before and after its tile, so weights come at once too; then each warp adds 16 dimensions of all
// tiles, in order. Blocks of a cluster take spans of an item in turn.
template <int D, int NT>
__global__ void __launch_bounds__(kTiles * 32, 1)
    paged_spans_together(const __nv_bfloat16* q, const unsigned char* keys, const unsigned char* values, Batch batch,
                         __nv_bfloat16* out, int K, int G, float scale2, long long q_t, int q_h, int pieces, int ranks,
                         int ahead, int late) {
#ifdef TRANSECT_HOPPER
  constexpr int T = D / 16, PIECE = kPiece<D>, TILE = 4 * PIECE, SENT = D + 4, HEADS = NT * 8;
  extern __shared__ __align__(1024) unsigned char memory[];
  // Behind the tiles: of each tile weights, 16 dimensions of each head, maxima and sums of weights; what a cluster sends.
  auto weights = (uint4(*)[NT][32])(memory + kTiles * TILE);
  auto leaving = (float(*)[HEADS * kPitch])(weights + kTiles);
  auto tops = (float(*)[HEADS])(leaving + kTiles), sums = tops + kTiles;
  float* gathered = (float*)(sums + kTiles);
  __shared__ __align__(8) uint64_t sent[1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  const bool odd = g % 2;
  const int item = blockIdx.x / ranks, rank = blockIdx.x % ranks, row = item / K, head = item % K;
  const int heads_here = (G - rank + ranks - 1) / ranks;
  const Sent to_cluster = {G, ranks};
  const uint32_t own_tile = shared_address(memory) + warp * TILE;

  if (!late) let_next_begin();
  if (!ahead) wait_for_previous();
  bool waited = !ahead;
  auto look_up = [&](int span) {  // the cache blocks of this warp's tile, in lanes 0 and 1
    const int column = (span * kTiles + warp) * 2 + lane % 2;
    return column < batch.columns ? __ldcg(batch.tables + (long long)row * batch.table_stride + column) : 0;
  };
  int blocks = look_up(rank);
  const bool decodes = batch.decodes(row);
  const int length = decodes ? max(__ldcg(batch.lengths + row), 0) : 0, spans = (length + kSpan - 1) / kSpan;
  if (threadIdx.x == 0) expect_sent(shared_address(sent), spans * heads_here * (D + 2) * 4);
  __syncwarp();
  arrive_in_cluster();

  constexpr int PER_ROW = D * 2 / 16, ROWS = 32 / PER_ROW;  // as above
  const int copy_row = lane / PER_ROW, copy_place = lane % PER_ROW;
  const uint32_t copy_first = copy_place / 8 * 2048 + copy_row * 128 + (((copy_place % 8) ^ copy_row) * 16);
  auto fetch = [&](int span, const unsigned char* from, uint32_t to) {
    const int rest = length - span * kSpan - warp * kTile;
    if (rest > 0) {
      if (!waited && rest <= kTile) {
        wait_for_previous();
        waited = true;
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int block = __shfl_sync(~0u, blocks, half);
        const unsigned char* piece = from + (size_t)(block * pieces + head) * PIECE + lane * 16;
#pragma unroll
        for (int j = 0; j < kBlock / ROWS; j++)
          copy16_once(to + half * PIECE + ((copy_first + j * ROWS * 128) ^ (j * ROWS % 8 * 16)), piece + j * 512,
                      copy_row + j * ROWS < rest - half * kBlock);
      }
    }
    end_group();
  };
  fetch(rank, keys, own_tile);
  fetch(rank, values, own_tile + 2 * PIECE);
  if (!waited) wait_for_previous();
  if (late) let_next_begin();
  const int token = batch.starts ? __ldcg(batch.starts + row) : row;
  __nv_bfloat16* to_out = out + ((long long)token * K * G + head * G) * D;
  if (spans == 0 && rank == 0 && decodes)
    for (int e = threadIdx.x * 8; e < G * D; e += blockDim.x * 8) *(uint4*)(to_out + e) = make_uint4(0, 0, 0, 0);
  uint32_t query[NT][T][2];
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const __nv_bfloat16* from = q + token * q_t + (long long)(head * G + n * 8 + g) * q_h + c * 2;
    const bool there = rank < spans && n * 8 + g < G;
#pragma unroll
    for (int t = 0; t < T; t++) {
      query[n][t][0] = there ? *(const uint32_t*)(from + t * 16) : 0;
      query[n][t][1] = there ? *(const uint32_t*)(from + t * 16 + 8) : 0;
    }
  }
  if (rank >= spans) wait_for_cluster();
  for (int span = rank; span < spans; span += ranks) {
    const int positions = min(kSpan, length - span * kSpan), tiles = (positions + kTile - 1) / kTile;
    const int next = span + ranks;
    if (next < spans) blocks = look_up(next);
    wait_groups<1>();
    __syncwarp();
    float s[NT][2][4] = {};
    if (warp < tiles) {
      add_scores<D, NT>(s, own_tile, lane, query);
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float top = top_of(s[n], h, positions - warp * kTile - g, scale2);
          if (g == h) tops[warp][n * 8 + 2 * c + h] = top;
        }
    }
    __syncwarp();  // all lanes have read the keys
    if (next < spans) fetch(next, keys, own_tile);
    else end_group();
    __syncthreads();
    if (warp < tiles) {
#pragma unroll
      for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float top = tops[0][n * 8 + 2 * c + h];
          for (int tile = 1; tile <= warp; tile++) top = fmaxf(top, tops[tile][n * 8 + 2 * c + h]);
          weigh(s[n], h, scale2, shift_of(top));
        }
        const float sum = sum_of(s[n], odd);
        if (g < 2) sums[warp][n * 8 + 2 * c + g] = sum;
        uint32_t p[2][2];
        turn(p, s[n]);
        weights[warp][n][lane] = make_uint4(p[0][0], p[0][1], p[1][0], p[1][1]);
      }
    }
    wait_groups<1>();
    __syncthreads();  // all warps' values, weights, and sums of weights are there
    if (warp < T) {
      float o[NT][1][4] = {}, m[NT][2];
#pragma unroll
      for (int n = 0; n < NT; n++) m[n][0] = m[n][1] = -kInfinity;
      for (int tile = 0; tile < tiles; tile++) {
        uint32_t p[NT][2][2];
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const uint4 v = weights[tile][n][lane];
          p[n][0][0] = v.x, p[n][0][1] = v.y, p[n][1][0] = v.z, p[n][1][1] = v.w;
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const float top = fmaxf(m[n][h], tops[tile][n * 8 + 2 * c + h]), fade = exponential(m[n][h] - shift_of(top));
            o[n][0][h] *= fade, o[n][0][2 + h] *= fade, m[n][h] = top;
          }
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
          add_values<D, NT>(o, 0, warp, shared_address(memory) + tile * TILE + 2 * PIECE, half, lane, p);
      }
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float* to = leaving[warp] + (n * 8 + 2 * c + h) * kPitch + g;
          to[0] = o[n][0][h], to[8] = o[n][0][2 + h];
        }
      __syncwarp();
    }
    if (span == rank) wait_for_cluster();
    if (warp < T)
      for (int e = lane; e < G * 4; e += 32) {
        const uint32_t to = shared_address(gathered + to_cluster.place_of(span, e / 4) * SENT + warp * 16 + e % 4 * 4);
        send(to, *(const float4*)(leaving[warp] + e / 4 * kPitch + e % 4 * 4), shared_address(sent),
             to_cluster.block_of(e / 4));
      }
    if (warp == kTiles - 1 && lane < G) {
      float m = -kInfinity, l = 0;
      for (int tile = 0; tile < tiles; tile++) {
        const float top = fmaxf(m, tops[tile][lane]);
        l = __fmaf_rn(l, exponential(m - shift_of(top)), sums[tile][lane]), m = top;
      }
      const uint32_t to = shared_address(gathered + to_cluster.place_of(span, lane) * SENT + D);
      send(to, m, shared_address(sent), to_cluster.block_of(lane));
      send(to + 4, l, shared_address(sent), to_cluster.block_of(lane));
    }
    if (next < spans) {
      __syncthreads();  // all warps have read values, weights, maxima and sums
      fetch(next, values, own_tile + 2 * PIECE);
    }
  }
  if (spans == 0 || warp >= heads_here) return;
  wait_for_sent(shared_address(sent));
  add_of_cluster<D>(to_out, gathered, spans, heads_here, rank, ranks);
#endif
}

}  // namespace

#define TRANSECT_TOGETHER(DIM, TILES)                                                                                  \
  if (together && d == DIM && (G <= 8) == (TILES == 1)) {                                                              \
    const int sums = ranks * together * ((G + (ranks ? ranks : 1) - 1) / (ranks ? ranks : 1)) * (DIM + 4);             \
    const int shared = kTiles * (4 * kPiece<DIM> + TILES * (512 + 8 * kPitch * 4 + 64)) + sums * 4;                    \
    if (!ranks || shared > kMostShared - 1024) return -1;                                                              \
    return TRANSECT_HERE((int)launch(paged_spans_together<DIM, TILES>, rows * K * ranks, kTiles * 32, shared, ranks,   \
                       dependent > 0, stream, (const __nv_bfloat16*)q, (const unsigned char*)keys,                     \
                       (const unsigned char*)values, batch, (__nv_bfloat16*)out, K, G, scale2, q_t, q_h, pieces,       \
                       ranks, (int)(dependent > 1), late));                                                            \
  }

#define TRANSECT_SPANS(DIM, TILES, BUFFERS)                                                                            \
  if (d == DIM && (G <= 8) == (TILES == 1) && buffers == BUFFERS) {                                                    \
    const int sums = ranks * warps * ((G + ranks - 1) / (ranks ? ranks : 1)) * (DIM + 4);                              \
    const int shared = warps * BUFFERS * DIM * kTile * 2 + (ranks ? sums : 2 * rows + 1) * 4;                          \
    if (shared > kMostShared) return -1;                                                                               \
    return TRANSECT_HERE((int)launch(paged_spans<DIM, TILES, BUFFERS>,                                                 \
                       ranks ? rows * K * ranks : blocks, warps * 32, shared,                                          \
                       ranks ? ranks : 1, dependent > 0, stream,                                                       \
                       (const __nv_bfloat16*)q, (const unsigned char*)keys, (const unsigned char*)values, batch,       \
                       (__nv_bfloat16*)out, (float*)parts, (float*)parts_ml, (int*)arrivals, K, G, scale2, q_t, q_h,   \
                       pieces, ranks, whole_items, (int)(dependent > 1), late));                                       \
  }

// q [T, K G, d] with strides q_t and q_h, keys and values [blocks, K, 16, d] bfloat16: block b of key head h begins at
// piece b ``pieces`` + h of 16 d. tables [rows, columns] int32; starts [rows + 1], or null where token t is row t's: rows
// of several tokens are left alone; lengths [rows]. out [T, K G, d]. parts, parts_ml: of an even cut G d and 2 G numbers
// for each span. arrivals: zeros for each row and key head, and again afterwards. scale2: of the scores, times log2(e).
// blocks: of an even cut. ranks: blocks of a cluster, at least 2 (a launch without clusters knows no instructions for
// them). warps of a block: of clusters, whose ranks times warps are as many as the longest row's spans or more. buffers
// of a warp: a number that is compiled. together: 0, or of clusters, the most spans of a block, whose 8 warps share each.
// whole_items: an even cut falls between items only, and parts are not used.
// ``dependent``: 0 an ordinary launch, 1 a dependent one, 2 one that reads the batch and old keys and values before the
// kernel before has ended. ``late``: the next kernel begins when the one before has ended. Returns a cudaError_t, or -1
// for what it does not take.
extern "C" int transect_paged_spans(const void* q, const void* keys, const void* values, const void* tables,
                                    const void* starts, const void* lengths, void* out, void* parts, void* parts_ml,
                                    void* arrivals, int rows, int columns, int table_stride, int K, int G, int d,
                                    long long q_t, int q_h, int pieces, float scale2, int blocks, int warps,
                                    int buffers, int ranks, int together, int whole_items, int dependent, int late,
                                    void* stream) {
  if (rows < 1 || rows > kMostRows || G < 1 || G > 16 || blocks < 1 || ranks < 0 || ranks == 1 || ranks > 8 ||
      warps < 1 || warps > kMostWarps || together < 0)
    return -1;
  const Batch batch = {(const int*)tables, (const int*)starts, (const int*)lengths, rows, columns, table_stride};
  TRANSECT_TOGETHER(128, 1)
  TRANSECT_TOGETHER(128, 2)
  TRANSECT_TOGETHER(64, 1)
  TRANSECT_TOGETHER(64, 2)
  TRANSECT_SPANS(128, 1, 4)
  TRANSECT_SPANS(128, 2, 4)
  TRANSECT_SPANS(128, 1, 6)
  TRANSECT_SPANS(128, 2, 6)
  TRANSECT_SPANS(128, 1, 16)
  TRANSECT_SPANS(128, 2, 16)
  TRANSECT_SPANS(64, 1, 8)
  TRANSECT_SPANS(64, 2, 8)
  TRANSECT_SPANS(64, 1, 12)
  TRANSECT_SPANS(64, 2, 12)
  return -1;
}
