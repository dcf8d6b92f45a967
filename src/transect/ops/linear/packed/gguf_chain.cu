// Products of one row, one after the other, with weights in block types of GGUF files, in one launch on Hopper: the four
// between the attention of a layer and that of the next, or any one. See gguf_chain.py for the arithmetic.
//
// * One block of warps on every multiprocessor. A product's rows of W are dealt out to the blocks by their bytes, in
//   sixteens (with a gate: in pairs of them, which are in turns); the units of a block (gguf_layout.py) evenly to its
//   warps, each a stretch of them. A matrix may be made of up to three, of a type each.
// * A warp's units of all products stand in one row, and the bulk copy engine fetches each in one piece into the warp's
//   ring as soon as it has room: weights wait for no result. So memory is busy while the blocks meet between two
//   products, and while the kernel before ends.
// * The warps of a block turn x into whole numbers together, which meet the codes in products of bytes
//   (gguf_bytes.cuh).
// * What a warp has of a sixteen it leaves in shared memory; when all are through, the parts are added in the order of k.
// * Blocks meet at a counter in memory (``meet``). With more than one product all blocks must run at once.

#include "../../lang/few_rows.cuh"
#include "../../lang/hopper.cuh"
#include "../../lang/meeting.cuh"
#include "gguf_bytes.cuh"

using namespace few_rows;
using namespace gguf;
using namespace hopper;

namespace {

constexpr int kMostThreads = 512, kMostStages = 8, kMostProducts = 4, kMostParts = 3;
constexpr int kSpansAtOnce = 4;  // spans of x whose reads a warp has under way

struct Part {
  const unsigned char* units;
  int type, sixteens;
};

// y = x W^T. With ``x_squares``, sums of squares of sixteens, x is divided by its root of (their sum / k + eps). Then
// with ``gate`` silu(one) times the other; with ``residual`` that is added, and the stream, its product with ``norm`` and
// the squares of its sixteens are written; else ``bias`` is added, if there is one. All are bfloat16 but squares.
struct Product {
  Part part[kMostParts];
  const __nv_bfloat16 *x, *residual, *norm, *bias;
  const float* x_squares;
  __nv_bfloat16 *out, *scaled;
  float* squares;
  int k, gate;
  float eps;
};

struct Products {
  Product product[kMostProducts];
  int count;
};

// The sixteens of rows before block b: an even share of the bytes.
__device__ __forceinline__ int before(const Product& p, int b) {
  const int together = p.gate ? 2 : 1;
  int total = 0;
#pragma unroll
  for (int i = 0; i < kMostParts; i++) total += p.part[i].sixteens * (unit_bytes((Type)p.part[i].type) / 16);
  int left = (int)((long long)total * b / gridDim.x), found = 0;
#pragma unroll
  for (int i = 0; i < kMostParts; i++) {
    const int each = unit_bytes((Type)p.part[i].type) / 16 * together, own = p.part[i].sixteens / together;
    const int here = min(own, left / each);
    found += here * together;
    if (here < own) break;
    left -= own * each;
  }
  return found;
}

// A block's sixteens of a product, and a warp's stretch of their units, which are numbered along K and then down.
struct Share {
  int first, end, across, begin, stop;

  __device__ __forceinline__ Share(const Product& p, int warp, int warps) {
    first = before(p, blockIdx.x), end = before(p, blockIdx.x + 1), across = p.k / kUnitK;
    const int units = (end - first) * across;
    begin = first * across + units * warp / warps, stop = first * across + units * (warp + 1) / warps;
  }
};

// The row of a warp's units: which is asked for next, and into which slot.
struct Ahead {
  const Products* products;
  uint32_t ring, full;
  int stages, slot_bytes, product, part, slot, left, bytes;
  const unsigned char* from;

  // On to the next part of a matrix of which the warp has some; false: there is none.
  __device__ __forceinline__ bool go_on() {
    while (true) {
      if (++part >= kMostParts) part = 0, product++;
      if (product == products->count) return false;
      const Product& p = products->product[product];
      const Share share(p, threadIdx.x / 32, blockDim.x / 32);
      int start = 0;
      for (int i = 0; i < part; i++) start += p.part[i].sixteens * share.across;
      const int first = max(share.begin, start), last = min(share.stop, start + p.part[part].sixteens * share.across);
      if (first >= last) continue;
      bytes = unit_bytes((Type)p.part[part].type), left = last - first;
      from = p.part[part].units + (size_t)(first - start) * bytes;
      return true;
    }
  }

  // The slot must be free.
  __device__ __forceinline__ void ask_next() {
    if (left == 0 && (product == products->count || !go_on())) return;
    if (threadIdx.x % 32 == 0) {
      barrier_expect(full + slot * 8, bytes);
      copy_bulk(ring + slot * slot_bytes, from, bytes, full + slot * 8);
    }
    from += bytes;
    left--;
    if (++slot == stages) slot = 0;
  }
};

// A warp's ring, as far as it has read it.
struct Ring {
  uint32_t at, full;
  int stages, slot_bytes, slot, parity;
};

// Units ``first`` to ``last`` - 1 of a part. The sums of a sixteen go to ``pieces`` [sixteen of the block + warp][16].
template <Type F>
__device__ __noinline__ void through(Ring& ring, Ahead& all_ahead, uint32_t spans, float* pieces, int first, int last,
                                     int across, int before_block) {
  const int lane = threadIdx.x % 32;
  Ring own = ring;  // both in registers
  Ahead ahead = all_ahead;
  int u = first % across;
  float* to = pieces + (first / across - before_block + threadIdx.x / 32) * 16;
  float sums[2] = {};
  for (int i = first; i < last; i++) {
    barrier_wait(own.full + own.slot * 8, own.parity);
    add_unit<F>(sums, own.at + own.slot * own.slot_bytes, spans + u * kSpan, lane);
    __syncwarp();  // all lanes have read the slot
    ahead.ask_next();
    if (++own.slot == own.stages) own.slot = 0, own.parity ^= 1;
    if (++u < across && i + 1 < last) continue;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sums[h] += __shfl_xor_sync(0xFFFFFFFFu, sums[h], 1);
      sums[h] += __shfl_xor_sync(0xFFFFFFFFu, sums[h], 2);
      if (lane % 4 == 0) to[h * 8 + lane / 4] = sums[h];
      sums[h] = 0;
    }
    u = 0, to += 16;
  }
  ring = own, all_ahead = ahead;
}

__global__ void __launch_bounds__(kMostThreads, 1)
    gguf_chain(const __grid_constant__ Products products, unsigned* meetings, int stages, int slot_bytes, int most_k) {
#ifdef TRANSECT_HOPPER
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) uint64_t barriers[kMostThreads / 32 * kMostStages];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const uint32_t spans = shared_address(memory) + warps * stages * slot_bytes;
  float* pieces = (float*)(memory + warps * stages * slot_bytes + most_k / kUnitK * kSpan);
  Ring ring = {shared_address(memory) + warp * stages * slot_bytes, shared_address(barriers + warp * kMostStages), stages,
               slot_bytes, 0, 0};
  Ahead ahead = {&products, ring.at, ring.full, stages, slot_bytes, 0, -1, 0, 0, 0, nullptr};
  if (lane == 0) {
    for (int s = 0; s < stages; s++) barrier_init(ring.full + 8 * s, 1);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();
  for (int s = 0; s < stages; s++) ahead.ask_next();

  for (int number = 0; number < products.count; number++) {
    const Product& p = products.product[number];
    const Share share(p, warp, warps);
    const int across = share.across, rows = (share.end - share.first) * 16, row0 = share.first * 16;
    if (number == 0) wait_for_previous();
    else meet(meetings + 32 * (number - 1));
    if (number + 1 == products.count) let_next_begin();

    for (int span = warp; span < across; span += warps * kSpansAtOnce) {
      uint32_t v[kSpansAtOnce][4];
#pragma unroll
      for (int s = 0; s < kSpansAtOnce; s++)
        if (span + s * warps < across) read_span(v[s], p.x + (span + s * warps) * kUnitK, lane);
#pragma unroll
      for (int s = 0; s < kSpansAtOnce; s++)
        if (span + s * warps < across) write_span(spans + (span + s * warps) * kSpan, v[s], lane);
    }
    float inverse = 1;
    if (p.x_squares) {
      float sum = 0;
      for (int i = lane; i < p.k / 64; i += 32) {
        const float4 four = __ldcg((const float4*)p.x_squares + i);
        sum += four.x + four.y + (four.z + four.w);
      }
#pragma unroll
      for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
      inverse = rsqrtf(sum / p.k + p.eps);
    }
    // What the first of this thread's results needs comes meanwhile.
    float added = 0, norm = 0;
    auto ask_beside = [&](int row) {
      if (p.residual) {
        added = __bfloat162float(__ushort_as_bfloat16(__ldcg((const unsigned short*)p.residual + row0 + row)));
        norm = __bfloat162float(p.norm[row0 + row]);
      } else if (p.bias) {
        added = __bfloat162float(p.bias[row0 + row]);
      }
    };
    if (threadIdx.x < rows) ask_beside(threadIdx.x);
    __syncthreads();

    int start = 0;
    for (int i = 0; i < kMostParts; i++) {
      const int first = max(share.begin, start), last = min(share.stop, start + p.part[i].sixteens * across);
      start += p.part[i].sixteens * across;
      if (first >= last) continue;
#define TRANSECT_THROUGH(F) \
  case F: through<F>(ring, ahead, spans, pieces, first, last, across, share.first); break;
      switch ((Type)p.part[i].type) {
        TRANSECT_THROUGH(kQ4_0)
        TRANSECT_THROUGH(kQ4_1)
        TRANSECT_THROUGH(kQ5_0)
        TRANSECT_THROUGH(kQ5_1)
        TRANSECT_THROUGH(kQ8_0)
        TRANSECT_THROUGH(kQ2_K)
        TRANSECT_THROUGH(kQ3_K)
        TRANSECT_THROUGH(kQ4_K)
        TRANSECT_THROUGH(kQ5_K)
        TRANSECT_THROUGH(kQ6_K)
        TRANSECT_THROUGH(kIQ4_NL)
        TRANSECT_THROUGH(kMXFP4)
      }
    }
    __syncthreads();

    // The sum of a row: of the pieces of the warps that shared its sixteen.
    const int units = (share.end - share.first) * across;
    auto sum_of = [&](int row) {
      const int at = row / 16 * across, last = ((at + across) * warps - 1) / units;
      float sum = 0;
      for (int w = ((at + 1) * warps - 1) / units; w <= last; w++)
        if (units * w / warps < units * (w + 1) / warps) sum += pieces[(row / 16 + w) * 16 + row % 16];
      return sum * inverse;
    };
    if (p.gate) {
      for (int row = threadIdx.x; row < rows / 2; row += blockDim.x) {
        const int own = row / 16 * 32 + row % 16;
        const float one = sum_of(own), other = sum_of(own + 16);
        p.out[row0 / 2 + row] = __float2bfloat16(__fdividef(one, 1 + __expf(-one)) * other);
      }
    } else {
      for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        if (row >= blockDim.x) ask_beside(row);
        const __nv_bfloat16 total = __float2bfloat16(sum_of(row) + added);
        p.out[row0 + row] = total;
        if (!p.residual) continue;
        const float t = __bfloat162float(total);
        p.scaled[row0 + row] = __float2bfloat16(t * norm);
        float square = t * t;
        const uint32_t half = 0xFFFFu << (lane & 16);
#pragma unroll
        for (int lanes = 8; lanes; lanes /= 2) square += __shfl_xor_sync(half, square, lanes);
        if (lane % 16 == 0) p.squares[(row0 + row) / 16] = square;
      }
    }
  }
#endif
}

}  // namespace

// ``count`` products, each with the numbers of ``Product`` in arrays: ``tensors`` [11]: units of three parts (null where
// there are fewer), x, residual, norm, bias, x_squares, out, scaled, squares, null where it has none; ``sizes`` [8]: the
// types and sixteens of rows of three parts in turns, k (a multiple of 256), gate (1 with one part of an even number of
// sixteens); ``eps``. Addresses on 16 bytes. meetings: uint32 [96], zeros at first. ``warps`` 1 to 16, ``stages`` 1 to 8
// of ``slot_bytes``, which hold a unit of any type that is in it; ``most_k`` and ``most_sixteens``: of a product, and of a
// block's share of one. ``dependent``: 0 an ordinary launch, 1 one that reads weights before the kernel before has ended.
// Returns a cudaError_t, or -1 for what it does not take.
extern "C" int transect_gguf_chain(const void* const* tensors, const int* sizes, const float* eps, void* meetings,
                                   int count, int most_k, int most_sixteens, int slot_bytes, int blocks, int warps,
                                   int stages, int dependent, void* stream) {
  if (count < 1 || count > kMostProducts || warps < 1 || warps * 32 > kMostThreads || stages < 1 ||
      stages > kMostStages || blocks < 1 || slot_bytes % 16)
    return -1;
  Products products = {};
  products.count = count;
  typedef __nv_bfloat16 T;
  for (int i = 0; i < count; i++, tensors += 11, sizes += 8) {
    Product& p = products.product[i];
    for (int j = 0; j < kMostParts; j++) {
      p.part[j] = {(const unsigned char*)tensors[j], sizes[2 * j], sizes[2 * j + 1]};
      if (sizes[2 * j] < 0 || sizes[2 * j] > kMXFP4 || (sizes[2 * j + 1] && unit_bytes((Type)sizes[2 * j]) > slot_bytes))
        return -1;
    }
    p.x = (const T*)tensors[3], p.residual = (const T*)tensors[4], p.norm = (const T*)tensors[5];
    p.bias = (const T*)tensors[6], p.x_squares = (const float*)tensors[7];
    p.out = (T*)tensors[8], p.scaled = (T*)tensors[9], p.squares = (float*)tensors[10];
    p.k = sizes[6], p.gate = sizes[7], p.eps = eps[i];
    if (p.k < kUnitK || p.k % kUnitK || p.k > most_k || p.part[0].sixteens < 1 ||
        (p.gate && (p.part[0].sixteens % 2 || p.part[1].sixteens || p.part[2].sixteens || p.residual || p.bias)))
      return -1;
  }
  const int shared = warps * stages * slot_bytes + most_k / kUnitK * kSpan + (most_sixteens + warps) * 64;
  if (shared > kMostShared - 2048) return -1;
  return (int)launch(gguf_chain, blocks, warps * 32, shared, 1, dependent > 0, stream, products, (unsigned*)meetings,
                     stages, slot_bytes, most_k);
}
