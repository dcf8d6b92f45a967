// A product of one row with a weight in block types of GGUF files on Hopper. See gguf_row.py for the arithmetic.
//
// * One block of warps on every multiprocessor. The rows of W are dealt out to the blocks by their bytes, in sixteens
//   (with a gate: in pairs of them, which are in turns); the units of a block (gguf_layout.py) evenly to its warps, each
//   a stretch of them. A matrix may be made of up to three, of a type each.
// * The bulk copy engine fetches each unit of a warp in one piece into the warp's ring as soon as it has room, also while
//   the kernel before ends.
// * The warps of a block turn x into whole numbers together, which meet the codes in products of bytes
//   (gguf_bytes.cuh).
// * What a warp has of a sixteen it leaves in shared memory; when all are through, the parts are added in the order of k.

#include "../../../lang/few_rows.cuh"
#include "../../../lang/hopper.cuh"
#include "gguf_bytes.cuh"

using namespace few_rows;
using namespace gguf;
using namespace hopper;

namespace {

constexpr int kWarps = 8, kMostStages = 8, kMostParts = 3, kMostBlocks = 160;
constexpr int kSpansAtOnce = 4;  // spans of x whose reads a warp has under way

struct Part {
  const unsigned char* units;
  int type, sixteens;
};

// y = x W^T. With ``x_squares``, sums of squares of sixteens, x is divided by its root of (their sum / k + eps). Then
// with ``gate`` silu(one) times the other; with ``residual`` that is added, and the stream, its product with ``norm`` and
// the squares of its sixteens are written; else ``bias`` is added, if there is one. All are bfloat16 but squares.
// ``before``: the sixteens of rows before block b. That costs divisions: the host does them.
struct Product {
  Part part[kMostParts];
  const __nv_bfloat16 *x, *residual, *norm, *bias;
  const float* x_squares;
  __nv_bfloat16 *out, *scaled;
  float* squares;
  int k, gate;
  float eps;
  unsigned short before[kMostBlocks + 1];
};

// The sixteens of rows before block b of ``blocks``: an even share of the bytes.
int sixteens_before(const Product& p, int b, int blocks) {
  const int together = p.gate ? 2 : 1;
  long long total = 0;
  for (const Part& part : p.part) total += part.sixteens * unit_bytes((Type)part.type);
  long long left = total * b / blocks;
  int found = 0;
  for (const Part& part : p.part) {
    const int each = unit_bytes((Type)part.type) * together, own = part.sixteens / together;
    const int here = left / each < own ? (int)(left / each) : own;
    found += here * together;
    if (here < own) break;
    left -= (long long)own * each;
  }
  return found;
}

__device__ __forceinline__ float number_of(unsigned short bits) { return __uint_as_float((uint32_t)bits << 16); }

// A block's sixteens of the product, and a warp's stretch of their units, which are numbered along K and then down.
struct Share {
  int first, end, across, begin, stop;

  __device__ __forceinline__ Share(const Product& product, int warp) {
    first = product.before[blockIdx.x], end = product.before[blockIdx.x + 1];
    across = product.k / kUnitK;
    const int units = (end - first) * across;
    begin = first * across + units * warp / kWarps, stop = first * across + units * (warp + 1) / kWarps;
  }

  // Its units of part ``i``, which begins with unit ``start``: from the first up to the last, which is not among them.
  __device__ __forceinline__ int2 within(const Part& part, int start) const {
    return make_int2(max(begin, start), min(stop, start + part.sixteens * across));
  }
};

// Units of a warp that lie one after the other.
struct __align__(16) Stretch {
  const unsigned char* from;
  int bytes, left;
};

// A warp's stretches of all parts, in turn, and one with nothing left. A lane finds each.
__device__ __forceinline__ void find_stretches(Stretch* stretches, const Product& p, int lane, int warp) {
  Stretch own = {nullptr, 0, 0};
  if (lane < kMostParts) {
    const Share share(p, warp);
    int start = 0;
#pragma unroll
    for (int i = 0; i < kMostParts - 1; i++)
      if (i < lane) start += p.part[i].sixteens * share.across;
    const int2 units = share.within(p.part[lane], start);
    own.bytes = unit_bytes((Type)p.part[lane].type), own.left = max(0, units.y - units.x);
    own.from = p.part[lane].units + (size_t)(units.x - start) * own.bytes;
  }
  const unsigned some = __ballot_sync(0xFFFFFFFFu, own.left > 0);
  if (own.left > 0) stretches[__popc(some & ((1u << lane) - 1))] = own;
  if (lane == 31) stretches[__popc(some)] = own;
  __syncwarp();
}

// A warp's ring: how far it has read it, and what it asks for next, whenever a slot is free. That is always the slot that
// it has read last: all are asked for at first.
struct Ring {
  uint32_t at, full;
  int stages, slot_bytes, slot, parity;
  const Stretch* next;
  Stretch own;

  __device__ __forceinline__ void ask(int slot) {
    if (own.left == 0) {
      own = *next;
      if (own.left == 0) return;
      next++;
    }
    if (threadIdx.x % 32 == 0) {
      barrier_expect(full + slot * 8, own.bytes);
      copy_bulk(at + slot * slot_bytes, own.from, own.bytes, full + slot * 8);
    }
    own.from += own.bytes;
    own.left--;
  }
};

// Units ``first`` to ``last`` - 1 of a part. The sums of a sixteen go to ``pieces`` [sixteen of the block + warp][16].
template <Type F>
__device__ __noinline__ void through(Ring& all_ring, uint32_t spans, float* pieces, int first, int last, int across,
                                     int before_block) {
  const int lane = threadIdx.x % 32;
  Ring ring = all_ring;  // in registers
  int sixteen = first / across, u = first - sixteen * across;
  float* to = pieces + (sixteen - before_block + threadIdx.x / 32) * 16;
  float sums[2] = {};
  for (int i = first; i < last; i++) {
    barrier_wait(ring.full + ring.slot * 8, ring.parity);
    add_unit<F>(sums, ring.at + ring.slot * ring.slot_bytes, spans + u * kSpan, lane);
    __syncwarp();  // all lanes have read the slot
    ring.ask(ring.slot);
    if (++ring.slot == ring.stages) ring.slot = 0, ring.parity ^= 1;
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
  all_ring = ring;
}

__global__ void __launch_bounds__(kWarps * 32, 2)
    gguf_row(const __grid_constant__ Product p, int stages, int slot_bytes) {
#ifdef TRANSECT_HOPPER
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) uint64_t barriers[kWarps * kMostStages];
  __shared__ Stretch stretches[kWarps][kMostParts + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t spans = shared_address(memory) + kWarps * stages * slot_bytes;
  float* pieces = (float*)(memory + kWarps * stages * slot_bytes + p.k / kUnitK * kSpan);
  Ring ring = {shared_address(memory) + warp * stages * slot_bytes, shared_address(barriers + warp * kMostStages), stages,
               slot_bytes, 0, 0, stretches[warp], {nullptr, 0, 0}};
  if (lane < stages) {
    barrier_init(ring.full + 8 * lane, 1);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  find_stretches(stretches[warp], p, lane, warp);
#pragma unroll 1
  for (int s = 0; s < stages; s++) ring.ask(s);

  const Share share(p, warp);
  const int across = share.across, rows = (share.end - share.first) * 16, row0 = share.first * 16;
  wait_for_previous();
  let_next_begin();

  // What the first of this thread's results needs comes while the units are multiplied: nothing waits for it before.
  unsigned short added = 0, norm = 0;
  auto ask_beside = [&](int row) {
    if (p.residual) {
      added = __ldcg((const unsigned short*)p.residual + row0 + row);
      norm = __ldcg((const unsigned short*)p.norm + row0 + row);
    } else if (p.bias) {
      added = __ldcg((const unsigned short*)p.bias + row0 + row);
    }
  };
  if (threadIdx.x < rows) ask_beside(threadIdx.x);
  // Blocks begin at different spans, or all would ask for the same lines of x at the same time.
  const int rotation = blockIdx.x % across;
  float sum_of_squares = 0;
#pragma unroll 1
  for (int span = warp; span == warp || span < across; span += kWarps * kSpansAtOnce) {
    uint32_t v[kSpansAtOnce / 2][2][4];
    int at[kSpansAtOnce / 2][2];
#pragma unroll
    for (int s = 0; s < kSpansAtOnce; s++) {
      const int even = span + (s & ~1) * kWarps, own = span + s * kWarps < across ? span + s * kWarps : even;
      at[s / 2][s % 2] = own + rotation < across ? own + rotation : own + rotation - across;
      if (even < across) read_span(v[s / 2][s % 2], p.x + at[s / 2][s % 2] * kUnitK, lane);
    }
    if (p.x_squares && span == warp)  // on the way together with x
      for (int i = lane; i < p.k / 64; i += 128) {
        float4 four[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
          four[j] = i + 32 * j < p.k / 64 ? __ldcg((const float4*)p.x_squares + i + 32 * j) : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < 4; j++) sum_of_squares += four[j].x + four[j].y + (four[j].z + four[j].w);
      }
#pragma unroll
    for (int s = 0; s < kSpansAtOnce / 2; s++) {
      if (span + 2 * s * kWarps >= across) break;
      const uint32_t to[2] = {spans + at[s][0] * kSpan, spans + at[s][1] * kSpan};
      write_spans(to, v[s], lane);
    }
  }
  float inverse = 1;
  if (p.x_squares) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) sum_of_squares += __shfl_xor_sync(0xFFFFFFFFu, sum_of_squares, lanes);
    inverse = rsqrtf(__fdividef(sum_of_squares, p.k) + p.eps);
  }
  __syncthreads();

  int start = 0;
#pragma unroll 1
  for (int i = 0; i < kMostParts; i++) {
    const int2 units = share.within(p.part[i], start);
    start += p.part[i].sixteens * across;
    if (units.x >= units.y) continue;
#define TRANSECT_THROUGH(F) \
  case F: through<F>(ring, spans, pieces, units.x, units.y, across, share.first); break;
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
    const int at = row / 16 * across;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      const int begin = units * w / kWarps, stop = units * (w + 1) / kWarps;
      if (max(begin, at) < min(stop, at + across)) sum += pieces[(row / 16 + w) * 16 + row % 16];
    }
    return sum * inverse;
  };
  if (p.gate) {
    for (int row = threadIdx.x; row < rows / 2; row += blockDim.x) {
      const int own = row / 16 * 32 + row % 16;
      const float one = sum_of(own), other = sum_of(own + 16);
      p.out[row0 / 2 + row] = __float2bfloat16(__fdividef(one, 1 + __expf(-one)) * other);
    }
  } else {
    for (int row = threadIdx.x; row - lane < rows; row += blockDim.x) {  // whole warps
      if (row >= blockDim.x && row < rows) ask_beside(row);
      float t = 0;
      if (row < rows) {
        const __nv_bfloat16 total = __float2bfloat16(sum_of(row) + number_of(added));
        p.out[row0 + row] = total, t = __bfloat162float(total);
      }
      if (!p.residual) continue;
      if (row < rows) p.scaled[row0 + row] = __float2bfloat16(t * number_of(norm));
      float square = t * t;
#pragma unroll
      for (int lanes = 8; lanes; lanes /= 2) square += __shfl_xor_sync(0xFFFFFFFFu, square, lanes);
      if (row < rows && lane % 16 == 0) p.squares[(row0 + row) / 16] = square;
    }
  }
#endif
}

}  // namespace

// A product with the numbers of ``Product`` in arrays: ``tensors`` [11]: units of three parts (null where there are
// fewer), x, residual, norm, bias, x_squares, out, scaled, squares, null where it has none; ``sizes`` [8]: the types and
// sixteens of rows of three parts in turns, k (a multiple of 256), gate (1 with one part of an even number of sixteens).
// Addresses on 16 bytes. ``stages`` 1 to 8 of ``slot_bytes``, which hold a unit of any type that is in it;
// ``most_sixteens``: of a block's share. ``blocks`` up to 160. ``dependent``: 0 an ordinary launch, 1 one that reads
// weights before the kernel before has ended. Returns a cudaError_t, or -1 for what it does not take.
extern "C" int transect_gguf_row(const void* const* tensors, const int* sizes, float eps, int most_sixteens,
                                 int slot_bytes, int blocks, int stages, int dependent, void* stream) {
  if (stages < 1 || stages > kMostStages || blocks < 1 || blocks > kMostBlocks || slot_bytes % 16) return -1;
  typedef __nv_bfloat16 T;
  Product p = {};
  for (int j = 0; j < kMostParts; j++) {
    p.part[j] = {(const unsigned char*)tensors[j], sizes[2 * j], sizes[2 * j + 1]};
    if (sizes[2 * j] < 0 || sizes[2 * j] > kMXFP4 || (sizes[2 * j + 1] && unit_bytes((Type)sizes[2 * j]) > slot_bytes))
      return -1;
  }
  p.x = (const T*)tensors[3], p.residual = (const T*)tensors[4], p.norm = (const T*)tensors[5];
  p.bias = (const T*)tensors[6], p.x_squares = (const float*)tensors[7];
  p.out = (T*)tensors[8], p.scaled = (T*)tensors[9], p.squares = (float*)tensors[10];
  p.k = sizes[6], p.gate = sizes[7], p.eps = eps;
  if (p.k < kUnitK || p.k % kUnitK || p.part[0].sixteens < 1 ||
      (p.gate && (p.part[0].sixteens % 2 || p.part[1].sixteens || p.part[2].sixteens || p.residual || p.bias)))
    return -1;
  if (p.part[0].sixteens + p.part[1].sixteens + p.part[2].sixteens > 0xFFFF) return -1;
  for (int b = 0; b <= blocks; b++) {
    p.before[b] = (unsigned short)sixteens_before(p, b, blocks);
    if (b && p.before[b] - p.before[b - 1] > most_sixteens) return -1;
  }
  const int shared = kWarps * stages * slot_bytes + p.k / kUnitK * kSpan + (most_sixteens + kWarps) * 64;
  if (shared > kMostShared - 4096) return -1;
  return (int)launch(gguf_row, blocks, kWarps * 32, shared, 1, dependent > 0, stream, p, stages, slot_bytes);
}
