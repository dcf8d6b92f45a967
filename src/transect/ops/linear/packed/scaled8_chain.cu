// The four products between the attention of a layer and that of the next, of one row and weights in fp8 (e4m3) with a
// scale for each row, in one launch on Hopper. See scaled8_chain.py for the arithmetic.
//
// * One block of 8 warps on every multiprocessor. A product's rows of W are dealt out to the blocks in sixteens (or,
//   with the gate, in pairs of them), its k to the warps of a block in chunks of 128. What a warp reads in one step is an
//   item: 32 rows by 128 k, 4 KiB, fetched by the bulk copy engine into the warp's own ring.
// * A warp's items of all four products stand in one row, and it asks for them as soon as its ring has room: weights wait
//   for no result. So memory is busy while the blocks meet between two products, and while the kernel before ends.
// * Codes become float16 (all fp8 numbers are float16 numbers) by the hardware's conversion. x becomes float16 too: a
//   warp scales its part by the power of two that brings the largest below 2^15, so digits below 2^-39 of that are lost.
// * Blocks meet at a counter in memory (``meet``). All blocks must run at once: there is one on each multiprocessor and
//   no more.

#include <cuda.h>
#include <cuda_fp16.h>

#include "../../lang/few_rows.cuh"
#include "../../lang/hopper.cuh"
#include "../../lang/meeting.cuh"

using namespace few_rows;
using namespace hopper;

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kProducts = 4, kMostStages = 5;
constexpr int kChunk = 128, kBox = 16 * kChunk, kItem = 2 * kBox;
constexpr int kMostSteps = 16;                                                 // chunks of a warp in a row of W
constexpr int kPart = kMostSteps * kChunk * 2, kSums = 2 * kWarps * 32 * 4;  // bytes: a warp's part of x; sums

enum Step { ATTENDED = 0, GATE_UP = 1, DOWN = 2, QKV = 3 };

struct Weights {
  CUtensorMap map[kProducts];
  const float* scale[kProducts];
  int n[kProducts], k[kProducts];
};

// All bfloat16 unless said. ``stream``, ``scaled`` [D] and ``squares`` float32 [D / 16] once for each of the two places
// where the residual stream is added to; ``norm`` [D] and ``eps`` are those of the norm that comes after it.
struct Data {
  const __nv_bfloat16 *attended, *residual, *norm[2], *bias;
  __nv_bfloat16 *stream[2], *scaled[2], *gated, *out;
  float *squares[2], eps[2];
  unsigned* meetings;  // [3], 32 apart
};

__device__ __forceinline__ void fetch_box(uint32_t to, const CUtensorMap* map, int row, int chunk, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(to),
      "l"(map), "r"(chunk * kChunk), "r"(row), "r"(barrier), "l"(kReadOnce)
      : "memory");
}

// Codes 0, 1 and 2, 3 of a word as float16.
__device__ __forceinline__ uint2 halves_of(uint32_t codes) {
  uint2 v;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(v.x), "=r"(v.y)
      : "r"(codes));
  return v;
}

// As ``few_rows::multiply``, of float16.
__device__ __forceinline__ void multiply_halves(float (&c)[4], uint2 first, uint2 second, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(first.x), "r"(second.x), "r"(first.y), "r"(second.y), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float times) {
  const __half2 v = __floats2half2_rn(__uint_as_float(pair << 16) * times, __uint_as_float(pair & 0xffff0000u) * times);
  return *(const uint32_t*)&v;
}

// The bits of the larger of two bfloat16 without their signs, as float32: of such numbers the larger has the larger bits.
__device__ __forceinline__ uint32_t largest(uint32_t pair) { return max(pair << 16 & 0x7fff0000u, pair & 0x7fff0000u); }

// The rows of a weight that are this block's, in sixteens (of the gate: in pairs of them), and how it goes through them.
struct Share {
  int first, end, groups, steps;
  __device__ __forceinline__ Share(const Weights& weights, int p) {
    const long long units = weights.n[p] / (p == GATE_UP ? 32 : 16);
    first = (int)(units * blockIdx.x / gridDim.x), end = (int)(units * (blockIdx.x + 1) / gridDim.x);
    groups = p == GATE_UP ? end - first : (end - first + 1) / 2;
    steps = (weights.k[p] / kChunk + kWarps - 1) / kWarps;
  }
};

// The row of a warp's items: which is asked for next, and into which slot.
struct Ahead {
  const Weights& weights;
  uint32_t ring, full;
  int stages, product, group, step, slot, first, end, groups, steps;

  // The slot must be free.
  __device__ __forceinline__ void ask_next() {
    while (product < kProducts && group >= groups) {
      product++, group = 0;
      if (product == kProducts) break;
      const Share share(weights, product);
      first = share.first, end = share.end, groups = share.groups, steps = share.steps;
    }
    if (product == kProducts) return;
    if (threadIdx.x % 32 == 0) {
      const bool gate = product == GATE_UP;
      const int chunk = step * kWarps + threadIdx.x / 32, unit = first + (gate ? group : 2 * group);
      const uint32_t to = ring + slot * kItem, barrier = full + slot * 8;
      const bool both = gate || unit + 1 < end;
      const int row = unit * 16, next = gate ? weights.n[product] / 2 + row : row + 16;
      barrier_expect(barrier, both ? kItem : kBox);
      fetch_box(to, &weights.map[product], row, chunk, barrier);
      if (both) fetch_box(to + kBox, &weights.map[product], next, chunk, barrier);
    }
    if (++step == steps) step = 0, group++;
    if (++slot == stages) slot = 0;
  }
};

__global__ void __launch_bounds__(kThreads, 1)
    chain(const __grid_constant__ Weights weights, const __grid_constant__ Data data, int stages) {
#ifdef TRANSECT_HOPPER
  extern __shared__ unsigned char unaligned[];
  unsigned char* memory = unaligned + (-shared_address(unaligned) & 1023);  // as the pieces' order wants it
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t ring = shared_address(memory) + warp * stages * kItem;
  const uint32_t part = shared_address(memory) + kWarps * stages * kItem + warp * kPart;
  float* sums = (float*)(memory + kWarps * (stages * kItem + kPart));
  const uint32_t full = shared_address(sums) + kSums + warp * kMostStages * 8;

  Ahead ahead = {weights, ring, full, stages, -1, 0, 0, 0, 0, 0, 0, 0};
  if (lane == 0) {
    for (int s = 0; s < stages; s++) barrier_init(full + 8 * s, 1);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();
  for (int s = 0; s < stages; s++) ahead.ask_next();

  int slot = 0, parity = 0, turn = 0;
  for (int p = 0; p < kProducts; p++) {
    const Share share(weights, p);
    const int K = weights.k[p], steps = share.steps, groups = share.groups, first = share.first, end = share.end;
    const bool gate = p == GATE_UP;
    if (p == 0) wait_for_previous();
    else meet(data.meetings + 32 * (p - 1));
    if (p == QKV) let_next_begin();

    // This warp's part of x: the chunks of its steps, one after the other.
    const __nv_bfloat16* x = p == ATTENDED ? data.attended : p == DOWN ? data.gated : data.scaled[p == QKV];
    uint4 v[kMostSteps / 2];
#pragma unroll
    for (int j = 0; j < kMostSteps / 2; j++) {
      const int at = ((2 * j + lane / 16) * kWarps + warp) * kChunk + lane % 16 * 8;
      v[j] = at < K ? __ldcg((const uint4*)(x + at)) : make_uint4(0, 0, 0, 0);
    }
    float inverse = 1;
    if (p == GATE_UP || p == QKV) {
      const float* squares = data.squares[p == QKV];
      float sum = 0;
      for (int i = lane; i < K / 64; i += 32) {
        const float4 four = __ldcg((const float4*)squares + i);
        sum += four.x + four.y + (four.z + four.w);
      }
#pragma unroll
      for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
      inverse = rsqrtf(sum / K + data.eps[p == QKV]);
    }
    uint32_t most = 0;
#pragma unroll
    for (int j = 0; j < kMostSteps / 2; j++)
      most = max(max(most, largest(v[j].x)), max(largest(v[j].y), max(largest(v[j].z), largest(v[j].w))));
    most = __reduce_max_sync(0xFFFFFFFFu, most);
    const int exponent = max((int)(most >> 23), 15);
    const float times = __uint_as_float((268 - exponent) << 23), back = __uint_as_float((exponent - 14) << 23);
    __syncwarp();  // all lanes have read the part of the product before
#pragma unroll
    for (int j = 0; j < kMostSteps / 2; j++)
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(part + j * 512 + lane * 16),
                   "r"(scaled_pair(v[j].x, times)), "r"(scaled_pair(v[j].y, times)), "r"(scaled_pair(v[j].z, times)),
                   "r"(scaled_pair(v[j].w, times))
                   : "memory");
    __syncwarp();

    // A lane reads pieces 2 (lane % 4) and, in the second half, the one after it, of rows lane / 4 of the eights of an
    // item: of sixteen r its first eight and the other. So eight lanes at a time meet no bank twice.
    const uint32_t row_at = lane / 4 * 128 + ((lane % 4 * 2) ^ (lane / 4)) * 16;
    const uint32_t next_sixteen = gate ? kBox / 2 : kBox, next_eight = gate ? kBox : kBox / 2;
    for (int group = 0; group < groups; group++) {
      // One warp ends a group, lane l row l of its 32. What it needs for that comes meanwhile.
      const bool ends = group % kWarps == warp;
      const int unit = first + (gate ? group : 2 * group + lane / 16);
      const int n = gate ? unit * 16 + lane / 16 * 8 + lane % 8 : unit * 16 + lane % 16;
      const bool mine = ends && unit < end;
      float row_scale = 0, before = 0, norm_scale = 0;
      if (mine) {
        row_scale = weights.scale[p][gate && lane % 16 >= 8 ? weights.n[p] / 2 + n : n];
        if (p == ATTENDED || p == DOWN) {
          const __nv_bfloat16* from = p == DOWN ? data.stream[0] : data.residual;
          before = __bfloat162float(__ushort_as_bfloat16(__ldcg((const unsigned short*)from + n)));
          norm_scale = __bfloat162float(data.norm[p == DOWN][n]);
        } else if (p == QKV && data.bias) before = __bfloat162float(data.bias[n]);
      }
      float acc[2][2][4] = {};  // of both halves of a chunk's k, of both sixteens
      for (int step = 0; step < steps; step++) {
        barrier_wait(full + slot * 8, parity);
        const uint32_t from = ring + slot * kItem + row_at, x_at = part + step * 256 + lane % 4 * 64;
        uint4 w[2][2][2], b[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          b[h][0] = read16(x_at + h * 32), b[h][1] = read16(x_at + h * 32 + 16);
#pragma unroll
          for (int r = 0; r < 2; r++) {
            w[h][r][0] = read16((from ^ (h * 16)) + r * next_sixteen);
            w[h][r][1] = read16((from ^ (h * 16)) + r * next_sixteen + next_eight);
          }
        }
#pragma unroll
        for (int q = 0; q < 4; q++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const uint4 pairs = b[h][q / 2];
            const uint32_t b0 = q % 2 ? pairs.z : pairs.x, b1 = q % 2 ? pairs.w : pairs.y;
#pragma unroll
            for (int r = 0; r < 2; r++) {
              const uint4 a = w[h][r][0], c = w[h][r][1];
              const uint32_t low[4] = {a.x, a.y, a.z, a.w}, high[4] = {c.x, c.y, c.z, c.w};
              multiply_halves(acc[h][r], halves_of(low[q]), halves_of(high[q]), b0, b1);
            }
          }
        __syncwarp();  // all lanes have read the slot
        ahead.ask_next();
        if (++slot == stages) slot = 0, parity ^= 1;
      }
      float* own = sums + turn * kWarps * 32;
      if (lane % 4 == 0)  // these lanes have the first column, which is the row of x: all columns are the same here
#pragma unroll
        for (int r = 0; r < 2; r++) {
          own[warp * 32 + r * 16 + lane / 4] = (acc[0][r][0] + acc[1][r][0]) * back;
          own[warp * 32 + r * 16 + 8 + lane / 4] = (acc[0][r][2] + acc[1][r][2]) * back;
        }
      turn ^= 1;
      __syncthreads();
      if (ends) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kWarps; w++) sum += own[w * 32 + lane];
        sum *= row_scale * inverse;
        if (gate) {
          const float up = __shfl_down_sync(0xFFFFFFFFu, sum, 8);
          if (lane % 16 < 8) data.gated[n] = __float2bfloat16(__fdividef(sum, 1 + __expf(-sum)) * up);
        } else if (mine && p == QKV) {
          data.out[n] = __float2bfloat16(sum + before);
        } else if (mine) {
          const int place = p == DOWN;
          const __nv_bfloat16 total = __float2bfloat16(sum + before);
          const float t = __bfloat162float(total);
          data.stream[place][n] = total;
          data.scaled[place][n] = __float2bfloat16(t * norm_scale);
          float square = t * t;
          const uint32_t half = 0xFFFFu << (lane & 16);
#pragma unroll
          for (int lanes = 8; lanes; lanes /= 2) square += __shfl_xor_sync(half, square, lanes);
          if (lane % 16 == 0) data.squares[place][n / 16] = square;
        }
      }
    }
  }
#endif
}

// Rows of ``k`` codes in boxes of 16 rows by 128 k. In shared memory 16 bytes of row r lie at piece ^ (r % 8).
int describe(CUtensorMap* map, const void* codes, int n, int k) {
  typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                             const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static Encode encode = nullptr;
  if (!encode) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &status);
#endif
    if (!found) return 1;
    encode = (Encode)found;
  }
  const cuuint64_t sizes[2] = {(cuuint64_t)k, (cuuint64_t)n}, strides[1] = {(cuuint64_t)k};
  const cuuint32_t box[2] = {kChunk, 16}, steps[2] = {1, 1};
  return (int)encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, (void*)codes, sizes, strides, box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace

// Codes [n, k] contiguous on 16 bytes and scales float32 [n] of the four products: o, gate over up, down, and q, k, v of
// the next layer; their sizes n and k must follow each other, multiples of 128 up to 16384 (n of gate over up twice
// that). tensors: the addresses of ``Data`` in its order, ``bias`` or null; meetings: uint32 [96], zeros at first.
// ``dependent`` as of transect_small_matmul. Returns a cudaError_t, or -1 for what it does not take, -2 where the codes
// cannot be described to the copy engine.
extern "C" int transect_scaled8_chain(const void* const* codes, const void* const* scales, const int* sizes,
                                      const void* const* tensors, float eps0, float eps1, int stages, int blocks,
                                      int dependent, void* stream) {
  if (stages < 2 || stages > kMostStages || blocks < 1) return -1;
  Weights weights;
  for (int p = 0; p < kProducts; p++) {
    const int n = weights.n[p] = sizes[2 * p], k = weights.k[p] = sizes[2 * p + 1];
    if (n < 128 || n % 128 || k < 128 || k % 128 || k > kMostSteps * kWarps * kChunk) return -1;
    weights.scale[p] = (const float*)scales[p];
    if (describe(&weights.map[p], codes[p], n, k)) return -2;
  }
  if (sizes[0] != sizes[3] || sizes[2] != 2 * sizes[5] || sizes[0] != sizes[4] || sizes[4] != sizes[7]) return -1;
  typedef __nv_bfloat16 T;
  const Data data = {(const T*)tensors[0],
                     (const T*)tensors[1],
                     {(const T*)tensors[2], (const T*)tensors[3]},
                     (const T*)tensors[4],
                     {(T*)tensors[5], (T*)tensors[6]},
                     {(T*)tensors[7], (T*)tensors[8]},
                     (T*)tensors[9],
                     (T*)tensors[10],
                     {(float*)tensors[11], (float*)tensors[12]},
                     {eps0, eps1},
                     (unsigned*)tensors[13]};
  const int shared = 1024 + kWarps * (stages * kItem + kPart) + kSums + kWarps * kMostStages * 8;
  if (shared > kMostShared) return -1;
  return (int)launch(chain, blocks, kThreads, shared, 1, dependent > 0, stream, weights, data, stages);
}
