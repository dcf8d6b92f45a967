// Attention of decode rows (one query each) over a paged cache on Hopper: every key and value streamed once, at the
// width of memory, however long the rows are. bfloat16 in and out, float32 sums; a cache in bfloat16, or in fp8 (e4m3).
// See paged/decode_hopper.py for the arithmetic.
//
// * A unit is the 16 positions of a cache block for one key head: D x 16 keys and as many values, two contiguous
//   pieces. An item is a row with a key head. The units of all items stand in one line, item after item.
// * Even cut (ranks = 0): every block takes an equal stretch of that line, every warp of it an equal stretch of the
//   block's. Where the cuts fall follows from the lengths, which only the device knows: each block, or warp, sums them
//   up for itself.
//   By clusters (ranks > 0): the blocks of a cluster share one item, whose units are dealt out to all their warps in
//   turn.
// * A warp streams its own units through its own ring of S buffers in shared memory, so nobody waits for anybody until
//   the end.
//   Products have the keys (then the dimensions of a head) as the tall side, so that up to 8 NT query heads fill the
//   short one.
// * A cache in fp8 is decoded to bfloat16 in registers, by the shifts of small_rows.cuh: as numbers 2^120 times smaller,
//   so queries and weights of positions are taken 2^64 times, and 2^56 is made up for where sums are. Neighbours in a row
//   then belong to other places of a product than in bfloat16: which dimensions meet there is free.
// * What a warp has of an item it does not hold whole (m, l, o) it leaves in shared memory. Then a warp for each 128
//   numbers of each item puts them together; what still is not the whole item goes through memory to the block that
//   holds the item's end, or to the block of the cluster that adds those numbers up. Always in the same order, so the
//   bits are the same in every run.
// * Units without a row's last position are asked for before the kernel that writes it has ended (``ahead``). The next
//   kernel may begin at once, or (``late``) when the one before has ended: then it need not wait for this one to use
//   what that one left.

#include "../../lang/few_rows.cuh"
#include "../../lang/hopper.cuh"
#include "../../lang/parts.cuh"

#define TRANSECT_PARTS 3

using namespace few_rows;
using namespace hopper;

namespace {

constexpr int kUnit = 16;       // positions of a unit: a block of the cache
constexpr int kMostWarps = 12;
constexpr int kMostRows = 1024;
constexpr int kAlone = 32;      // rows whose lengths each warp adds up for itself, and waits for no other
constexpr int kHeads = 16;      // query heads of a key head at the most
constexpr int kSlice = 128;     // numbers of an item that a warp puts together
constexpr int kAtOnce = 4;      // blocks whose parts of an item it asks for before it adds them up

// What a warp knows of a unit: bits of Unit::what.
constexpr int kHigh = 31, kLowShift = 5, kFirst = 1 << 9, kLast = 1 << 10, kItemShift = 11;

// Numbers on their way to another block: written over a pattern that no sum is (arithmetic makes no such NaN), so that
// the reader sees which ones are there, and leaves the pattern behind.
constexpr uint32_t kNothing = 0xFFFFFFFF;

__device__ __forceinline__ void leave(float* to, float4 v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

__device__ __forceinline__ float4 look(const float* from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ bool is_there(float4 v) {
  return __float_as_uint(v.x) != kNothing && __float_as_uint(v.y) != kNothing && __float_as_uint(v.z) != kNothing &&
         __float_as_uint(v.w) != kNothing;
}

__device__ __forceinline__ float smaller_first(float m) { return m == -INFINITY ? 0 : m; }

// Parts of one item, added up in the order given.
struct Sum {
  float m = -INFINITY, l = 0;
  float4 o = make_float4(0, 0, 0, 0);
  __device__ __forceinline__ void add(float m2, float l2, float4 o2) {
    const float top = fmaxf(m, m2), shift = smaller_first(top);
    const float a = exp2f(m - shift), b = exp2f(m2 - shift);
    m = top;
    l = l * a + l2 * b;
    o = make_float4(o.x * a + o2.x * b, o.y * a + o2.y * b, o.z * a + o2.z * b, o.w * a + o2.w * b);
  }
  __device__ __forceinline__ void store(__nv_bfloat16* to) const {
    const float scale = l == 0 ? 1 : 1 / l;
    *(uint2*)to = make_uint2(pack(o.x * scale, o.y * scale), pack(o.z * scale, o.w * scale));
  }
};

struct Unit {
  int piece;  // of the cache: 16 D keys, and values
  // How many of its positions count: from bits 5 to 8 on, up to bits 0 to 4; first, last of its item; the item.
  int what;
};

struct Batch {
  const int *tables, *starts, *lengths;  // starts: null where token t is row t's
  int rows, columns, table_stride, window;
  __device__ __forceinline__ int length(int row) const {
    const int n = lengths[row];
    return starts && starts[row + 1] - starts[row] != 1 ? 0 : n;
  }
  __device__ __forceinline__ int low(int length) const { return window ? max(0, length - window) : 0; }
  __device__ __forceinline__ int units(int length) const {
    return length > 0 ? (length + kUnit - 1) / kUnit - low(length) / kUnit : 0;
  }
};

// A pair of bfloat16 times 2^64, and the bytes 0 and 2, or 1 and 3, of a word as fp8: pairs of bfloat16 times 2^-120.
__device__ __forceinline__ uint32_t times_2_64(uint32_t pair) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(pair), "r"(0x5f805f80u), "r"(0x80008000u));
  return product;
}

__device__ __forceinline__ uint32_t even_bytes(uint32_t w) { return ((w << 8) & 0x80008000u) | ((w << 4) & 0x07F007F0u); }

__device__ __forceinline__ uint32_t odd_bytes(uint32_t w) { return (w & 0x80008000u) | ((w >> 4) & 0x07F007F0u); }

// FP8: the cache is a byte for each number. SINKS: a score for each head takes part in the softmax and has no value; it is
// added where an item is whole.
template <int D, int NT, int S, bool FP8, bool SINKS>
__global__ void __launch_bounds__(kMostWarps * 32, 1)
    paged_decode(const __nv_bfloat16* q, const unsigned char* keys, const unsigned char* values, Batch batch,
                 __nv_bfloat16* out, float* parts, int K, int G, float scale2, long long q_t, int q_h, int pieces,
                 int ranks, int ahead, int late, const __nv_bfloat16* sinks) {
#ifdef TRANSECT_HOPPER
  constexpr int ELEMENT = FP8 ? 1 : 2, PIECE = kUnit * D * ELEMENT, UNIT = 2 * PIECE, T = D / 16;
  constexpr float SMALLER = FP8 ? 0x1p56f : 1.f;
  auto sink = [&](int head) { return __bfloat162float(sinks[head]) * 1.4426950408889634f; };
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ int part_what[2 * kMostWarps];
  __shared__ int sums[kMostWarps];
  __shared__ __align__(8) uint64_t sent;  // of clusters: the others' parts of what this block puts together
  __shared__ float sent_ml[8][kHeads][2];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int numbers = G * D, slices = (numbers + kSlice - 1) / kSlice;
  // [warps][G D], what a warp finishes before its last item; or, of clusters, [ranks][G D], what the blocks send.
  float* first_parts = (float*)(memory + warps * S * UNIT);
  Unit(*units)[64] = (Unit(*)[64])(first_parts + max(warps, ranks) * numbers);
  float2(*part_ml)[kHeads] = (float2(*)[kHeads])(units + warps);  // [2 warps] m and l of the parts
  const bool alone = batch.rows <= kAlone;
  // [rows + 1] units before a row, and [rows] lengths; even cut only. Of few rows each warp has its own.
  int* prefix = (int*)(part_ml + 2 * warps) + (alone ? warp * (2 * batch.rows + 1) : 0);
  int* row_lengths = prefix + batch.rows + 1;
  const uint32_t ring = shared_address(memory) + warp * S * UNIT;

  if (!late) let_next_begin();
  bool waited = false;
  if (!ahead) {
    wait_for_previous();
    waited = true;
  }
  if (lane < 2) part_what[2 * warp + lane] = -1;
  const int rank = ranks ? blockIdx.x % ranks : 0;
  if (ranks > 1) {
    if (threadIdx.x == 0) {
      int mine = 0;  // numbers, and m and l of each head
      for (int slice = rank; slice < slices; slice += ranks) mine += min(kSlice, numbers - slice * kSlice);
      expect_sent(shared_address(&sent), ranks * (mine + mine / D * 2) * 4);
    }
    __syncwarp();
    arrive_in_cluster();
  }

  // Where this warp's units are: number i is ``begin`` + i ``step``, before ``end``.
  int begin, end, step = 1, total = 0, takers = 0;
  int own = 0, own_length = 0, own_block = 0;
  if (ranks) {
    own = blockIdx.x / ranks;
    begin = rank * warps + warp, step = ranks * warps;
    // Not to wait for the length before it, the table is read as if the row were as long as that.
    if (!batch.window && begin + lane * step < batch.columns)
      own_block = batch.tables[(long long)(own / K) * batch.table_stride + begin + lane * step];
    own_length = batch.length(own / K);
    end = batch.units(own_length);
  } else {
    const int member = alone ? lane : threadIdx.x;
    const int each = batch.rows <= blockDim.x ? 1 : (batch.rows + blockDim.x - 1) / blockDim.x, from = member * each;
    int mine = 0;
    for (int row = from; row < min(batch.rows, from + each); row++) {
      const int length = batch.length(row);
      row_lengths[row] = length;
      mine += batch.units(length);
    }
    int upto = mine;
#pragma unroll
    for (int far = 1; far < 32; far *= 2) {
      const int other = __shfl_up_sync(~0u, upto, far);
      if (lane >= far) upto += other;
    }
    int before = upto - mine;
    if (alone) {
      total = __shfl_sync(~0u, upto, 31);
    } else {
      if (lane == 31) sums[warp] = upto;
      __syncthreads();
      const int sum = lane < warps ? sums[lane] : 0;
      total = __reduce_add_sync(~0u, sum);
      before += __reduce_add_sync(~0u, lane < warp ? sum : 0);
    }
    for (int row = from; row < min(batch.rows, from + each); row++) {
      prefix[row] = before;
      before += batch.units(row_lengths[row]);
    }
    if (member == 0) prefix[batch.rows] = total;
    if (alone) __syncwarp();
    else __syncthreads();
    total *= K;
    // Up to a 32nd of the blocks stay out where every warp then has as many units as every other. Where rows are of one
    // length cuts then mostly fall between items, and nobody waits for parts.
    const bool even = lane * 32 <= gridDim.x && total % ((gridDim.x - lane) * warps) == 0;
    const int fewer = max(__ffs(__ballot_sync(~0u, even)) - 1, 0);
    takers = min((int)gridDim.x - fewer, total) * warps;  // every block that takes part has a unit
    const int taker = blockIdx.x * warps + warp;
    begin = end = 0;
    if (taker < takers) {  // the cut before taker n is at total * n / takers
      const unsigned share = (unsigned)total / takers, rest = (unsigned)total % takers;
      begin = share * taker + rest * taker / takers;
      end = share * (taker + 1) + rest * (taker + 1) / takers;
    }
  }
  const int count = begin < end ? (end - begin + step - 1) / step : 0;

  auto look_up = [&](int i, int known) {  // unit i; ``known``: its block in the cache, or -1
    Unit unit = {0, 0};
    if (i < count) {
      const int u = begin + i * step;
      int row, head, n, b, length;
      if (ranks) {
        row = own / K, head = own % K, n = end, b = u, length = own_length;
      } else {
        int low = 0, high = batch.rows;
        while (high - low > 1) {
          const int middle = (low + high) / 2;
          if (prefix[middle] * K <= u) low = middle;
          else high = middle;
        }
        row = low, n = prefix[low + 1] - prefix[low], length = row_lengths[low];
        const int rest = u - prefix[low] * K;
        head = rest / n, b = rest % n;
      }
      const int low = batch.low(length), block = low / kUnit + b;
      if (known < 0) known = batch.tables[(long long)row * batch.table_stride + block];
      unit.piece = known * pieces + head;
      unit.what = min(kUnit, length - block * kUnit) | max(0, low - block * kUnit) << kLowShift |
                  (b == 0 ? kFirst : 0) | (b == n - 1 ? kLast : 0) | (row * K + head) << kItemShift;
    }
    return unit;
  };
  Unit coming = ranks && !batch.window ? look_up(lane, own_block) : look_up(lane, -1);
  // A piece lies in a buffer as columns of 128 bytes of its 16 rows; the eighths of row r at place ^ (r % 8): no bank
  // is met twice. In fp8 as its 16 rows; the 16 bytes of row r at place ^ what ``turned`` says: no bank is met twice by
  // eight lanes of two neighbouring rows (keys), nor by one place of eight rows (values).
  constexpr int ROW = D * ELEMENT, PER_ROW = ROW / 16;  // bytes of a row, copies of 16 bytes for it
  constexpr int ROWS = 32 / PER_ROW;                    // that 32 lanes copy
  auto turned = [](int row) { return (D == 128 ? row % 2 * 4 : 0) ^ row / 2 % 4; };
  const int copy_row = lane / PER_ROW, copy_place = lane % PER_ROW;
  auto copy_to = [&](int j) -> uint32_t {
    if (FP8) return (copy_row + j * ROWS) * ROW + (copy_place ^ turned(copy_row + j * ROWS)) * 16;
    const uint32_t first = copy_place / 8 * 2048 + copy_row * 128 + (((copy_place % 8) ^ copy_row) * 16);
    return (first + j * ROWS * 128) ^ (j * ROWS % 8 * 16);
  };
  auto fetch = [&](int i) {
    if (i < count) {
      if (i % 32 == 0) {
        units[warp][i % 64 + lane] = coming;
        __syncwarp();
      }
      const Unit unit = units[warp][i % 64];
      if (!waited && (unit.what & kLast)) {
        wait_for_previous();
        waited = true;
      }
      const uint32_t to = ring + i % S * UNIT;
      const int high = unit.what & kHigh, low = unit.what >> kLowShift & 15;
      const size_t from = (size_t)unit.piece * PIECE + lane * 16;
#pragma unroll
      for (int j = 0; j < kUnit / ROWS; j++) {
        const int row = copy_row + j * ROWS;
        copy16_once(to + copy_to(j), keys + from + j * 512, row >= low && row < high);
      }
#pragma unroll
      for (int j = 0; j < kUnit / ROWS; j++) {
        const int row = copy_row + j * ROWS;
        copy16_once(to + PIECE + copy_to(j), values + from + j * 512, row >= low && row < high);
      }
      if (i % 32 == 0) coming = look_up(i + 32 + lane, -1);
    }
    end_group();
  };
  for (int s = 0; s < S - 1; s++) fetch(s);
  if (!waited) wait_for_previous();
  waited = true;
  if (late) let_next_begin();

  // Of lane l = 4 g + c: scores of keys g, g + 8 with query heads 2 c, 2 c + 1; of o dimensions g, g + 8 (in fp8 2 g,
  // 2 g + 1) of every 16, the same heads.
  const int g = lane / 4, c = lane % 4;
  const uint32_t key_at = lane % 16 * 128 + ((lane / 16) ^ (lane % 8)) * 16;
  const uint32_t value_at = PIECE + (lane % 8 + lane / 16 * 8) * 128 + ((lane / 8 % 2) ^ (lane % 8)) * 16;
  uint32_t query[NT][T][2];
  float o[NT][T][4], m[NT][2], l[NT][2];
  int item = -1, begins = 0;
  for (int i = 0; i < count; i++) {
    const int what = units[warp][i % 64].what;
    if (what >> kItemShift != item) {
      item = what >> kItemShift, begins = what & kFirst;
      const int row = item / K, token = batch.starts ? batch.starts[row] : row;
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const __nv_bfloat16* from = q + token * q_t + (long long)(item % K * G + n * 8 + g) * q_h;
        const bool there = n * 8 + g < G;
#pragma unroll
        for (int t = 0; t < T; t++) {
          if (FP8) {  // the four that this lane's t-th word of a key meets
            const uint32_t* four = (const uint32_t*)(from + t / 4 * 64 + c * 16 + t % 4 * 4);
            const uint32_t low = there ? four[0] : 0, high = there ? four[1] : 0;
            query[n][t][0] = times_2_64(__byte_perm(low, high, 0x5410));
            query[n][t][1] = times_2_64(__byte_perm(low, high, 0x7632));
          } else {
            query[n][t][0] = there ? *(const uint32_t*)(from + c * 2 + t * 16) : 0;
            query[n][t][1] = there ? *(const uint32_t*)(from + c * 2 + t * 16 + 8) : 0;
          }
#pragma unroll
          for (int e = 0; e < 4; e++) o[n][t][e] = 0;
        }
        m[n][0] = m[n][1] = -INFINITY, l[n][0] = l[n][1] = 0;
      }
    }
    wait_groups<S - 2>();
    __syncwarp();  // the copies of all lanes have landed, and all lanes have read the buffer that is filled again now
    fetch(i + S - 1);
    const uint32_t from = ring + i % S * UNIT;
    float s[NT][2][4] = {};
    if constexpr (FP8) {
#pragma unroll
      for (int half = 0; half < T / 4; half++) {  // 64 dimensions
        const int place = (c + half * 4) ^ turned(g);  // as of row g + 8
        const uint4 one = read16(from + g * ROW + place * 16), other = read16(from + (g + 8) * ROW + place * 16);
        const uint32_t words[2][4] = {{one.x, one.y, one.z, one.w}, {other.x, other.y, other.z, other.w}};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int t = half * 4 + j;
          const uint32_t a[4] = {even_bytes(words[0][j]), even_bytes(words[1][j]), odd_bytes(words[0][j]),
                                 odd_bytes(words[1][j])};
#pragma unroll
          for (int n = 0; n < NT; n++) multiply(s[n][t % 2], a, query[n][t][0], query[n][t][1]);
        }
      }
    } else {
#pragma unroll
      for (int t = 0; t < T; t++) {
        uint32_t a[4];
        read_matrices(a, (from + key_at + t / 4 * 2048) ^ (t % 4 * 32));
#pragma unroll
        for (int n = 0; n < NT; n++) multiply(s[n][t % 2], a, query[n][t][0], query[n][t][1]);
      }
    }
    const int high = what & kHigh, low = what >> kLowShift & 15;
    const bool seen = g >= low && g < high, seen8 = g + 8 >= low && g + 8 < high;
    uint32_t p[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) {
      float fade[2], e[4];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        e[h] = seen ? (s[n][0][h] + s[n][1][h]) * (scale2 * SMALLER) : -INFINITY;
        e[2 + h] = seen8 ? (s[n][0][2 + h] + s[n][1][2 + h]) * (scale2 * SMALLER) : -INFINITY;
        float top = fmaxf(e[h], e[2 + h]);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
        top = fmaxf(top, m[n][h]);
        const float shift = smaller_first(top);
        fade[h] = exp2f(m[n][h] - shift);
        m[n][h] = top;
        e[h] = exp2f(e[h] - shift), e[2 + h] = exp2f(e[2 + h] - shift);
        l[n][h] = l[n][h] * fade[h] + (e[h] + e[2 + h]);
      }
      p[n][0] = transposed(pack(e[0], e[1])), p[n][1] = transposed(pack(e[2], e[3]));
      if (FP8) p[n][0] = times_2_64(p[n][0]), p[n][1] = times_2_64(p[n][1]);
#pragma unroll
      for (int t = 0; t < T; t++)
#pragma unroll
        for (int j = 0; j < 4; j++) o[n][t][j] *= fade[j % 2];
    }
    if constexpr (FP8) {
#pragma unroll
      for (int t = 0; t < T; t += 2) {  // pairs of bytes change places: keys 0 to 7 and 8 to 15, of 16 dimensions and 16 more
        const int row = lane % 16;
        uint32_t pairs[4];
        read_transposed(pairs, from + PIECE + row * ROW + ((t + lane / 16) ^ turned(row)) * 16);
#pragma unroll
        for (int two = 0; two < 2; two++) {
          const uint32_t first = pairs[2 * two], last = pairs[2 * two + 1];
          const uint32_t a[4] = {even_bytes(first), odd_bytes(first), even_bytes(last), odd_bytes(last)};
#pragma unroll
          for (int n = 0; n < NT; n++) multiply(o[n][t + two], a, p[n][0], p[n][1]);
        }
      }
    } else {
#pragma unroll
      for (int t = 0; t < T; t++) {
        uint32_t a[4];
        read_transposed(a, (from + value_at + t / 4 * 2048) ^ (t % 4 * 32));
#pragma unroll
        for (int n = 0; n < NT; n++) multiply(o[n][t], a, p[n][0], p[n][1]);
      }
    }
    const bool ends = i == count - 1;
    if (!ends && units[warp][(i + 1) % 64].what >> kItemShift == item) continue;
    // The item ends here, or this warp's share of it.
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        l[n][h] += __shfl_xor_sync(~0u, l[n][h], 4);
        l[n][h] += __shfl_xor_sync(~0u, l[n][h], 8);
        l[n][h] += __shfl_xor_sync(~0u, l[n][h], 16);
      }
    if (!ranks && begins && (what & kLast)) {
      const int row = item / K, token = batch.starts ? batch.starts[row] : row;
#pragma unroll
      for (int n = 0; n < NT; n++) {
        __nv_bfloat16* to = out + ((long long)token * K * G + item % K * G + n * 8 + g) * D + c * (FP8 ? 4 : 2);
        if (SINKS) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int head = n * 8 + 2 * c + h;
            if (head < G) l[n][h] += exp2f(sink(item % K * G + head) - m[n][h]);
          }
        }
        const float scale[2] = {SMALLER / l[n][0], SMALLER / l[n][1]};
#pragma unroll
        for (int t = 0; t < T; t++) {
          const uint32_t low8 = transposed(pack(o[n][t][0] * scale[0], o[n][t][1] * scale[1]));
          const uint32_t high8 = transposed(pack(o[n][t][2] * scale[0], o[n][t][3] * scale[1]));
          if (n * 8 + g < G) {
            if (FP8) {
              *(uint2*)(to + t * 16) = make_uint2(__byte_perm(low8, high8, 0x5410), __byte_perm(low8, high8, 0x7632));
            } else {
              *(uint32_t*)(to + t * 16) = low8;
              *(uint32_t*)(to + t * 16 + 8) = high8;
            }
          }
        }
      }
    } else {
      __syncwarp();  // the last part goes where the ring was
      float* to = ends ? (float*)(memory + warp * S * UNIT) : first_parts + warp * numbers;
      const int place = 2 * warp + ends;
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int head = n * 8 + 2 * c + h;
          if (head >= G) continue;
          if (g == 0) part_ml[place][head] = make_float2(m[n][h], l[n][h]);
#pragma unroll
          for (int t = 0; t < T; t++) {
            to[head * D + t * 16 + (FP8 ? 2 * g : g)] = o[n][t][h] * SMALLER;
            to[head * D + t * 16 + (FP8 ? 2 * g + 1 : g + 8)] = o[n][t][2 + h] * SMALLER;
          }
        }
      if (lane == 0) part_what[place] = item << 2 | (begins ? 2 : 0) | (what & kLast ? 1 : 0);
    }
  }
  __syncthreads();

  // Parts of one item stand behind each other: a warp for each slice of each item.
  const int mine = lane < 2 * warps ? part_what[lane] : -1;
  const uint32_t there = __ballot_sync(~0u, mine >= 0);
  const int before = (there & ((1u << lane) - 1)) ? 31 - __clz(there & ((1u << lane) - 1)) : lane;
  const int item_before = __shfl_sync(~0u, mine, before) >> 2;
  const uint32_t firsts = __ballot_sync(~0u, mine >= 0 && (before == lane || item_before != mine >> 2));
  auto part_at = [&](int place) {
    return place % 2 ? (float*)(memory + place / 2 * S * UNIT) : first_parts + place / 2 * numbers;
  };
  auto members_sum = [&](uint32_t members, int e) {
    Sum sum;
    while (members) {
      const int place = __ffs(members) - 1;
      members &= members - 1;
      const float2 ml = part_ml[place][e / D];
      sum.add(ml.x, ml.y, *(const float4*)(part_at(place) + e));
    }
    return sum;
  };
  if (ranks) {
    const int row = own / K;
    const bool decodes = !batch.starts || batch.starts[row + 1] - batch.starts[row] == 1;
    __nv_bfloat16* to = out + ((long long)(batch.starts ? batch.starts[row] : row) * K * G + own % K * G) * D;
    const uint32_t arrived = shared_address(&sent);
    if (ranks > 1) {
      __syncwarp();
      wait_for_cluster();
    }
    for (int slice = warp; slice < slices; slice += warps) {
      const int e = slice * kSlice + lane * 4;
      if (e >= numbers) continue;
      Sum sum = members_sum(there, e);
      if (ranks == 1) {
        if (SINKS) sum.add(sink(own % K * G + e / D), 1, make_float4(0, 0, 0, 0));
        if (decodes) sum.store(to + e);
        continue;
      }
      send(shared_address(first_parts + rank * numbers + e), sum.o, arrived, slice % ranks);
      if (e % D) continue;
      send(shared_address(&sent_ml[rank][e / D][0]), sum.m, arrived, slice % ranks);
      send(shared_address(&sent_ml[rank][e / D][1]), sum.l, arrived, slice % ranks);
    }
    if (ranks == 1 || warp * ranks + rank >= slices) return;
    wait_for_sent(arrived);
    for (int slice = warp * ranks + rank; slice < slices; slice += warps * ranks) {
      const int e = slice * kSlice + lane * 4;
      if (e >= numbers) continue;
      Sum sum;
      for (int other = 0; other < ranks; other++) {
        const float* ml = sent_ml[other][e / D];
        sum.add(ml[0], ml[1], *(const float4*)(first_parts + other * numbers + e));
      }
      if (SINKS) sum.add(sink(own % K * G + e / D), 1, make_float4(0, 0, 0, 0));
      if (decodes) sum.store(to + e);
    }
    return;
  }
  // The last item first: what is not its end goes to the block that holds the end, which is one of the next.
  float* all_ml = parts + (size_t)gridDim.x * numbers;
  const float4 nothing = make_float4(__uint_as_float(kNothing), __uint_as_float(kNothing), __uint_as_float(kNothing),
                                     __uint_as_float(kNothing));
  const int groups = __popc(firsts);
  for (int task = warp; task < groups * slices; task += warps) {
    uint32_t heads = firsts;
    for (int skip = groups - 1 - task / slices; skip > 0; skip--) heads &= heads - 1;
    const int at = __ffs(heads) - 1;
    heads &= heads - 1;
    const uint32_t members = there & (~0u << at) & (heads ? (1u << (__ffs(heads) - 1)) - 1 : ~0u);
    const int e = task % slices * kSlice + lane * 4;
    const int first = part_what[at], item = first >> 2, row = item / K, head = item % K;
    const bool has_first = first & 2, has_last = part_what[31 - __clz(members)] & 1;
    const bool inside = e < numbers;
    Sum sum;
    if (inside) sum = members_sum(members, e);
    if (!has_last) {
      if (inside) leave(parts + (size_t)blockIdx.x * numbers + e, sum.o);
      if (inside && e % D == 0) leave(all_ml + (blockIdx.x * G + e / D) * 4, make_float4(sum.m, sum.l, 0, 0));
      continue;
    }
    if (!has_first) {
      const int start = prefix[row] * K + head * (prefix[row + 1] - prefix[row]);
      const int taker = (int)(((start + 1) * (long long)takers - 1) / total);  // whose unit ``start`` is
      Sum whole;
      for (int from = taker / warps; from < blockIdx.x; from += kAtOnce) {
        float4 its_o[kAtOnce], its_ml[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; j++)
          if (inside && from + j < blockIdx.x) {
            its_ml[j] = look(all_ml + ((from + j) * G + e / D) * 4);
            its_o[j] = look(parts + (size_t)(from + j) * numbers + e);
          }
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) {
          if (from + j >= blockIdx.x) break;
          float* o = parts + (size_t)(from + j) * numbers + e;
          float* ml = all_ml + ((from + j) * G + e / D) * 4;
          while (inside && !(is_there(its_ml[j]) && is_there(its_o[j]))) its_ml[j] = look(ml), its_o[j] = look(o);
          __syncwarp();
          if (inside) leave(o, nothing);
          if (inside && e % D == 0) leave(ml, nothing);
          if (inside) whole.add(its_ml[j].x, its_ml[j].y, its_o[j]);
        }
      }
      if (inside) whole.add(sum.m, sum.l, sum.o);
      sum = whole;
    }
    const int token = batch.starts ? batch.starts[row] : row;
    if (SINKS && inside) sum.add(sink(head * G + e / D), 1, make_float4(0, 0, 0, 0));
    if (inside) sum.store(out + ((long long)token * K * G + head * G) * D + e);
  }
  // Rows without a position (what is left over in a graph's buffers) give zeros.
  for (int row = blockIdx.x; row < batch.rows; row += gridDim.x)
    if (prefix[row + 1] == prefix[row] && (!batch.starts || batch.starts[row + 1] - batch.starts[row] == 1)) {
      __nv_bfloat16* to = out + (long long)(batch.starts ? batch.starts[row] : row) * K * numbers;
      for (int e = threadIdx.x * 8; e < K * numbers; e += blockDim.x * 8) *(uint4*)(to + e) = make_uint4(0, 0, 0, 0);
    }
#endif
}

}  // namespace

#define TRANSECT_PAGED(DIM, TILES, STAGES, FP8) TRANSECT_PAGED_SINKS(DIM, TILES, STAGES, FP8, false)
#define TRANSECT_PAGED_SINKS(DIM, TILES, STAGES, FP8, SINKS)                                                           \
  if (d == DIM && (G <= 8) == (TILES == 1) && stages == STAGES && (bool)fp8 == FP8 && (sinks != nullptr) == SINKS) {   \
    const int counts = ranks ? 0 : (rows > kAlone ? 1 : warps) * (2 * rows + 1) * 4;                                   \
    const int ring = STAGES * DIM * (FP8 ? 32 : 64);                                                                   \
    const int shared = warps * (ring + 768) + (warps > ranks ? warps : ranks) * G * DIM * 4 + counts;                  \
    if (shared > kMostShared - 2048) return -1;                                                                        \
    return TRANSECT_HERE((int)launch(paged_decode<DIM, TILES, STAGES, FP8, SINKS>,                                     \
                       ranks ? rows * K * ranks : blocks, warps * 32, shared,                                          \
                       ranks ? ranks : 1, dependent > 0, stream, (const __nv_bfloat16*)q, (const unsigned char*)keys,  \
                       (const unsigned char*)values, batch, (__nv_bfloat16*)out, (float*)parts, K, G, scale2, q_t,     \
                       q_h, pieces, ranks, (int)(dependent > 1), late, (const __nv_bfloat16*)sinks));                  \
  }

// q [T, K G, d] with strides q_t and q_h, keys and values [blocks, K, 16, d],
// bfloat16 or, with ``fp8``, e4m3: block b of key head h begins at piece b ``pieces`` + h of 16 d. tables [rows, columns] int32; starts [rows + 1], or null where token t is row t's: rows of
// several tokens are left alone; lengths [rows]. out [T, K G, d]. parts: G (d + 4) numbers for each block of threads,
// all bits set, and again afterwards. window: 0 for none. scale2: of the scores, times log2(e). blocks, warps, stages
// (one of those compiled), ranks: see above. ``dependent``: 0 an ordinary launch, 1 a dependent one, 2 one that reads
// the batch and old keys and values before the kernel before has ended. ``late``: see above. sinks: [K G] bfloat16, or
// null. Returns a cudaError_t, or
// -1 for what it does not take.
extern "C" int transect_paged_decode(const void* q, const void* keys, const void* values, const void* tables,
                                     const void* starts, const void* lengths, void* out, void* parts, int rows,
                                     int columns, int table_stride, int window, int K, int G, int d, long long q_t,
                                     int q_h, int pieces, float scale2, int blocks, int warps, int stages, int ranks,
                                     int dependent, int late, int fp8, const void* sinks, void* stream) {
  if (rows < 1 || rows > kMostRows || G < 1 || G > kHeads || warps < 1 || warps > kMostWarps || ranks < 0 || ranks > 8)
    return -1;
  const Batch batch = {
      (const int*)tables, (const int*)starts, (const int*)lengths, rows, columns, table_stride, window};
  TRANSECT_PAGED(128, 1, 2, false)
  TRANSECT_PAGED(128, 2, 2, false)
  TRANSECT_PAGED(64, 1, 3, false)
  TRANSECT_PAGED(64, 2, 3, false)
  TRANSECT_PAGED(128, 1, 4, true)
  TRANSECT_PAGED(128, 2, 4, true)
  TRANSECT_PAGED(64, 1, 6, true)
  TRANSECT_PAGED(64, 2, 6, true)
  TRANSECT_PAGED_SINKS(64, 1, 3, false, true)
  TRANSECT_PAGED_SINKS(64, 1, 6, true, true)
  return -1;
}
