// The four products between the attention of a layer and that of the next, of one row, in one launch on Hopper: what
// does not depend on how weights are held. ``Codes`` says that (scaled8_chain.cu, int4_chain.cu, gguf_chain.cu).
//
// * One block on every multiprocessor. A product's rows of W are dealt out to the blocks in sixteens (or, with the
//   gate, in pairs of them), its k to the warps of a block in chunks of 128. What a warp reads in one step is an item:
//   two sixteens of rows by 128 k, fetched by the bulk copy engine into the warp's own ring.
// * A warp's items of all four products stand in one row, and it asks for them as soon as its ring has room: weights
//   wait for no result. So memory is busy while results go from block to block, and while the kernel before ends.
// * Who needs a result of other blocks reads it until it is there: until its bits are not all set, which no result has.
//   So no block waits for all others, and nothing waits for memory to be in order: a fence would wait for the weights
//   that were asked for. Results have two places, one launch's and the next one's, where each sets all bits again for
//   the other. A block counts launches for itself, in memory.
// * All blocks must run at once: there is one on each multiprocessor and no more.

#pragma once

#include "../../lang/few_rows.cuh"
#include "../../lang/hopper.cuh"

namespace chain {

using namespace few_rows;
using namespace hopper;

constexpr int kWarps = 16, kThreads = 32 * kWarps, kProducts = 4, kMostStages = 12;
constexpr int kSums = 2 * kWarps * 32 * 4, kShares = kProducts * 16;  // bytes: sums; a warp's shares
constexpr int kPolls = 1 << 23;  // some seconds: then a block is missing, and an error is better than to hang

enum Step { ATTENDED = 0, GATE_UP = 1, DOWN = 2, QKV = 3 };

// k of a chunk, chunks of a warp at most, bytes of a chunk of x; if not apart, both sixteens of a chunk are one item.
struct Chunks128 {
  static constexpr int kSpan = 128, kMostSteps = 128 / kWarps, kKept = 2 * kSpan;
  static constexpr bool kApart = false;
};

// ``item``: bytes of one; ``part``: of a warp's part of x, as it is kept.
template <class Codes>
struct Weights {
  typename Codes::Matrix matrix[kProducts];
  int n[kProducts], k[kProducts], item, part;
};

// All bfloat16 unless said. ``total`` [D] is the residual stream after the first product, ``norm`` [D] and ``eps`` those
// of the norms after the first and the third. Between blocks go ``scaled`` [D], the stream times ``norm``, ``squares``
// [D / 16] float32, and ``gated``; the other launch's lie ``apart`` bytes behind. ``launches``: of each block.
struct Data {
  const __nv_bfloat16 *attended, *residual, *norm[2], *bias;
  __nv_bfloat16 *total, *stream, *out, *scaled[2], *gated;
  float* squares[2];
  unsigned* launches;
  float eps[2];
  int apart;
};

// A bulk copy of what a step reads once: the L2 cache drops it before all else.
__device__ __forceinline__ void copy_once(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(kReadOnce)
      : "memory");
}

__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ uint4 read_words(const uint32_t* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

// Results between blocks: a launch's lie ``own`` bytes behind; those at ``other`` are made ready for the next one.
struct Results {
  int own, other;

  template <typename T>
  __device__ __forceinline__ const uint32_t* of(const T* first) const {
    return (const uint32_t*)((const char*)first + own);
  }

  __device__ __forceinline__ void leave(__nv_bfloat16* first, int n, __nv_bfloat16 v) const {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"((char*)(first + n) + own), "h"(__bfloat16_as_ushort(v))
                 : "memory");
    *(unsigned short*)((char*)(first + n) + other) = 0xFFFFu;
  }

  __device__ __forceinline__ void leave(float* first, int n, float v) const {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"((char*)(first + n) + own), "r"(__float_as_uint(v))
                 : "memory");
    *(uint32_t*)((char*)(first + n) + other) = 0xFFFFFFFFu;
  }
};

// Whether one of eight bfloat16, or of four float32, has all bits set.
__device__ __forceinline__ bool lacks_half(const uint4& v) {
  const auto lacks = [](uint32_t word) { return word >= 0xFFFF0000u || (uint16_t)word == 0xFFFFu; };
  return lacks(v.x) || lacks(v.y) || lacks(v.z) || lacks(v.w);
}
__device__ __forceinline__ bool lacks_float(const uint4& v) {
  return v.x == ~0u || v.y == ~0u || v.z == ~0u || v.w == ~0u;
}

// Sums of codes that need no more than a scale of each row, which ``row_scale`` gives.
struct Unscaled {
  __device__ __forceinline__ void end(int) {}
  template <typename Matrix>
  __device__ __forceinline__ void begin(const Matrix&, int, int, int, bool, int) {}
};

// A warp's part of x: the chunks of its steps, one after the other, of each 16 bytes a lane.
template <class Codes>
struct PartOf {
  static constexpr int kCount = Codes::kMostSteps * Codes::kSpan / 256;
  uint4 v[kCount];
};

template <class Codes>
__device__ __forceinline__ int place_in_x(int j, int lane, int warp) {
  constexpr int kLanes = Codes::kSpan / 8, kAtOnce = 32 / kLanes;
  return ((kAtOnce * j + lane / kLanes) * kWarps + warp) * Codes::kSpan + lane % kLanes * 8;
}

// A lane's sums of squares, of which it asks for four, 32 lanes apart, at a time; those from ``at`` on are to come.
struct Squares {
  static constexpr int kAtOnce = 2;
  const uint32_t* from;
  int at, count;
  float sum;

  __device__ __forceinline__ void ask(uint4 (&v)[kAtOnce]) const {
#pragma unroll
    for (int e = 0; e < kAtOnce; e++)
      v[e] = at + 128 * e < count ? read_words(from + at + 128 * e) : make_uint4(0, 0, 0, 0);
  }

  __device__ __forceinline__ void take(const uint4 (&v)[kAtOnce]) {
#pragma unroll
    for (int e = 0; e < kAtOnce; e++)
      if (lacks_float(v[e])) return;
#pragma unroll
    for (int e = 0; e < kAtOnce; e++)
      sum += __uint_as_float(v[e].x) + __uint_as_float(v[e].y) + (__uint_as_float(v[e].z) + __uint_as_float(v[e].w));
    at += 128 * kAtOnce;
  }

  // 1 / rms, once all are there; ``asked``: what it has asked for before.
  __device__ __forceinline__ float inverse(uint4 (&asked)[kAtOnce], int K, float eps) {
    take(asked);
    for (int polls = 0; at < count; polls++) {
      if (polls == kPolls) __trap();
      ask(asked);
      take(asked);
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
    return rsqrtf(__fdividef(sum, K) + eps);
  }
};

// Reads until all of the part of x is there.
template <class Codes>
__device__ __forceinline__ void await(PartOf<Codes>& part, const uint32_t* x, int K, int lane, int warp) {
  constexpr int kCount = PartOf<Codes>::kCount;
  auto& v = part.v;
  uint32_t missing = 0;
#pragma unroll
  for (int j = 0; j < kCount; j++) {
    v[j] = make_uint4(0, 0, 0, 0);
    if (place_in_x<Codes>(j, lane, warp) < K) missing |= 1u << j;
  }
  for (int polls = 0; missing; polls++) {
    if (polls == kPolls) __trap();
#pragma unroll
    for (int j = 0; j < kCount; j++)
      if (missing >> j & 1) v[j] = read_words(x + place_in_x<Codes>(j, lane, warp) / 2);
#pragma unroll
    for (int j = 0; j < kCount; j++)
      if (!lacks_half(v[j])) missing &= ~(1u << j);
  }
}

// The rows of a weight that are this block's, in sixteens (of the gate: in pairs of them), and how a warp goes through
// them.
struct alignas(16) Share {
  int first, end, groups, steps;
};

template <class Codes>
__device__ __forceinline__ Share share_of(const Weights<Codes>& weights, int p, int warp) {
  const unsigned units = weights.n[p] / (p == GATE_UP ? 32 : 16);
  const int first = units * blockIdx.x / gridDim.x, end = units * (blockIdx.x + 1) / gridDim.x;
  return {first, end, p == GATE_UP ? end - first : (end - first + 1) / 2,
          (weights.k[p] / Codes::kSpan - warp + kWarps - 1) / kWarps};
}

// The row of a warp's items: which is asked for next, and into which slot.
template <class Codes>
struct Ahead {
  const Weights<Codes>& weights;
  const Share* shares;
  uint32_t ring, full;
  int stages, bytes, product = -1, group = -1, step = 0, slot = 0, first = 0, end = 0, groups = 0, steps = 0, items = 0;
  typename Codes::Cursor cursor;

  // The slot must be free.
  __device__ __forceinline__ void ask_next() {
    if (product == kProducts) return;
    if (step == items) {
      step = 0, group++;
      while (group >= groups) {
        if (++product == kProducts) return;
        const Share share = shares[product];
        first = share.first, end = share.end, steps = share.steps, groups = steps > 0 ? share.groups : 0, group = 0;
      }
      const bool gate = product == GATE_UP;
      const int unit = first + (gate ? group : 2 * group);
      const bool both = gate || unit + 1 < end;
      cursor.begin(weights.matrix[product], weights.n[product], unit, gate, both);
      items = Codes::kApart && both ? 2 * steps : steps;
    }
    if (threadIdx.x % 32 == 0) cursor.fetch(ring + slot * bytes, full + slot * 8);
    step++;
    if constexpr (Codes::kApart) {
      if (step == steps) cursor.begin_lower();
      else cursor.next();
    } else {
      cursor.next();
    }
    if (++slot == stages) slot = 0;
  }
};

template <class Codes>
int shared_bytes(const Weights<Codes>& weights, int stages) {
  return 1024 + kWarps * (stages * weights.item + weights.part + Codes::kKnown) + kSums +
         kWarps * (kMostStages * 8 + kShares);
}

template <class Codes>
__global__ void __launch_bounds__(kThreads, 1)
    run(const __grid_constant__ Weights<Codes> weights, const __grid_constant__ Data data, int stages) {
#ifdef TRANSECT_HOPPER
  extern __shared__ unsigned char unaligned[];
  unsigned char* memory = unaligned + (-shared_address(unaligned) & 1023);  // as tensor maps want it
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int item_bytes = Codes::kApart ? weights.item : Codes::kItem;
  const int part_bytes = Codes::kApart ? weights.part : Codes::kMostSteps * Codes::kKept;
  const uint32_t ring = shared_address(memory) + warp * stages * item_bytes;
  const uint32_t part = shared_address(memory) + kWarps * stages * item_bytes + warp * part_bytes;
  const uint32_t known = shared_address(memory) + kWarps * (stages * item_bytes + part_bytes) + warp * Codes::kKnown;
  float* sums = (float*)(memory + kWarps * (stages * item_bytes + part_bytes + Codes::kKnown));
  const uint32_t full = shared_address(sums) + kSums + warp * kMostStages * 8;

  Share* shares = (Share*)((unsigned char*)sums + kSums + kWarps * kMostStages * 8) + warp * kProducts;

  Ahead<Codes> ahead = {weights, shares, ring, full, stages, item_bytes};
  if (lane < kProducts) shares[lane] = share_of(weights, lane, warp);
  if (lane < stages) barrier_init(full + 8 * lane, 1);
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  for (int s = 0; s < stages; s++) ahead.ask_next();
  wait_for_previous();
  const unsigned launches = __ldcg(data.launches + blockIdx.x);
  const Results results = {launches % 2 ? data.apart : 0, launches % 2 ? 0 : data.apart};

  int slot = 0, parity = 0, turn = 0;
  for (int p = 0; p < kProducts; p++) {
    const Share share = shares[p];
    const int K = weights.k[p], steps = share.steps, groups = share.groups, first = share.first, end = share.end;
    const bool gate = p == GATE_UP;
    if (p == QKV) let_next_begin();

    PartOf<Codes> v;
    const bool normed = p == GATE_UP || p == QKV;
    if (p == ATTENDED) {
#pragma unroll
      for (int j = 0; j < PartOf<Codes>::kCount; j++) {
        const int at = place_in_x<Codes>(j, lane, warp);
        v.v[j] = at < K ? __ldcg((const uint4*)(data.attended + at)) : make_uint4(0, 0, 0, 0);
      }
    } else {
      await<Codes>(v, results.of(normed ? data.scaled[p == QKV] : data.gated), K, lane, warp);
    }
    __syncwarp();  // all lanes have read the part of the product before
    const float back = Codes::keep(part, known, v.v, steps, lane);
    __syncwarp();

    for (int group = 0; group < groups; group++) {
      // One warp ends a group, lane l row l of its 32. What it needs for that comes meanwhile.
      const bool ends = group % kWarps == warp;
      const int unit = first + (gate ? group : 2 * group + lane / 16);
      const int n = gate ? unit * 16 + lane / 16 * 8 + lane % 8 : unit * 16 + lane % 16;
      const bool mine = ends && unit < end;
      float row_scale = 0, before = 0, norm_scale = 0;
      if (mine) {
        row_scale = Codes::row_scale(weights.matrix[p], gate && lane % 16 >= 8 ? weights.n[p] / 2 + n : n);
        if (p == ATTENDED || p == DOWN) {
          const __nv_bfloat16* from = p == DOWN ? data.total : data.residual;
          before = __bfloat162float(__ushort_as_bfloat16(__ldcg((const unsigned short*)from + n)));
          norm_scale = __bfloat162float(data.norm[p == DOWN][n]);
        } else if (p == QKV && data.bias) before = __bfloat162float(data.bias[n]);
      }
      Squares squares = {results.of(data.squares[p == QKV]), lane * 4, normed ? K / 16 : 0, 0};
      uint4 asked[Squares::kAtOnce];
      if (ends && normed) squares.ask(asked);
      typename Codes::Sums acc;
      acc.begin(weights.matrix[p], weights.n[p], K, first + (gate ? group : 2 * group), gate, warp);
      const int sixteens = Codes::kApart && (gate || first + 2 * group + 1 < end) ? 2 : 1;
      for (int sixteen = 0; sixteen < sixteens; sixteen++) {
        for (int step = 0; step < steps; step++) {
          barrier_wait(full + slot * 8, parity);
          acc.add(ring + slot * item_bytes, part + step * Codes::kKept, known, step, lane);
          __syncwarp();  // all lanes have read the slot
          ahead.ask_next();
          if (++slot == stages) slot = 0, parity ^= 1;
        }
        acc.end(sixteen);
      }
      // Rows of an item's sixteens; of gate and up, eights of both in turn.
      float* own = sums + turn * kWarps * 32;
      if (lane % 4 == 0)  // four lanes have the same sums: a product has eight columns, and x is one row
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            own[warp * 32 + (gate ? half * 16 + r * 8 : r * 16 + half * 8) + lane / 4] = acc.of(r, half) * back;
      turn ^= 1;
      __syncthreads();
      if (ends) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kWarps; w++) sum += own[w * 32 + lane];
        sum *= normed ? row_scale * squares.inverse(asked, K, data.eps[p == QKV]) : row_scale;
        if (gate) {
          const float up = __shfl_down_sync(0xFFFFFFFFu, sum, 8);
          if (lane % 16 < 8)
            results.leave(data.gated, n, __float2bfloat16(__fdividef(sum, 1 + __expf(-sum)) * up));
        } else if (mine && p == QKV) {
          data.out[n] = __float2bfloat16(sum + before);
        } else if (mine) {
          const int place = p == DOWN;
          const __nv_bfloat16 total = __float2bfloat16(sum + before);
          const float t = __bfloat162float(total);
          results.leave(data.scaled[place], n, __float2bfloat16(t * norm_scale));
          float square = t * t;
          const uint32_t half = 0xFFFFu << (lane & 16);
#pragma unroll
          for (int lanes = 8; lanes; lanes /= 2) square += __shfl_xor_sync(half, square, lanes);
          if (lane % 16 == 0) results.leave(data.squares[place], n / 16, square);
          (place ? data.stream : data.total)[n] = total;
        }
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) data.launches[blockIdx.x] = launches + 1;
#endif
}

// Launches it. tensors: attended, residual, the two norms, bias or null, total, stream, out, scaled, scaled, gated,
// squares, squares, launches. Returns a cudaError_t, or -1 for what it does not take.
template <class Codes>
int start(Weights<Codes>& weights, const int* sizes, const void* const* tensors, float eps0, float eps1, int stages,
          int blocks, int dependent, void* stream) {
  if (stages < 2 || stages > kMostStages || blocks < 1) return -1;
  for (int p = 0; p < kProducts; p++) {
    const int n = weights.n[p] = sizes[2 * p], k = weights.k[p] = sizes[2 * p + 1];
    constexpr int kSpan = Codes::kSpan, kMostK = Codes::kMostSteps * kWarps * kSpan;
    if (n < 16 || n % (p == GATE_UP ? 32 : 16) || k < kSpan || k % kSpan || k > kMostK) return -1;
  }
  if (sizes[0] != sizes[3] || sizes[2] != 2 * sizes[5] || sizes[0] != sizes[4] || sizes[4] != sizes[7]) return -1;
  typedef __nv_bfloat16 T;
  const Data data = {(const T*)tensors[0], (const T*)tensors[1],
                     {(const T*)tensors[2], (const T*)tensors[3]},
                     (const T*)tensors[4],
                     (T*)tensors[5], (T*)tensors[6], (T*)tensors[7],
                     {(T*)tensors[8], (T*)tensors[9]},
                     (T*)tensors[10],
                     {(float*)tensors[11], (float*)tensors[12]},
                     (unsigned*)tensors[13],
                     {eps0, eps1},
                     2 * (2 * sizes[0] + sizes[5]) + 4 * 2 * (sizes[0] / 16)};
  if (!Codes::kApart) weights.item = Codes::kItem, weights.part = Codes::kMostSteps * Codes::kKept;
  const int shared = shared_bytes(weights, stages);
  if (shared > kMostShared) return -1;
  return (int)launch(run<Codes>, blocks, kThreads, shared, 1, dependent > 0, stream, weights, data, stages);
}

}  // namespace chain
