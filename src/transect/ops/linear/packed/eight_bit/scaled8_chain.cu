// The four products between two attentions of one row and weights of 8 bits (chain.cuh): fp8 (e4m3) or whole numbers with
// a scale for each row, or fp8 with one for each block of 128 rows by 128 k. Codes become float16, which has all numbers
// of both: of fp8 by the hardware's conversion; a whole number is the low byte of a float16 from 1024 on. x becomes float16
// too: a warp scales its part by the power of two that brings the largest below 2^15, so digits below 2^-39 of that are
// lost. A chunk is as long as a block: its sums are multiplied by the block's scale before they are added.

#include <cuda_fp16.h>

#include "../../../lang/parts.cuh"
#include "../chain.cuh"

#if TRANSECT_BULK
#include "../../../lang/tensor_map.cuh"
#endif

#define TRANSECT_PARTS 3

using namespace chain;

namespace {

constexpr int kSpan = Chunks128::kSpan, kBox = 16 * kSpan;

#if TRANSECT_BULK
__device__ __forceinline__ void fetch_box(uint32_t to, const CUtensorMap* map, int row, int chunk, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(to),
      "l"(map), "r"(chunk * kSpan), "r"(row), "r"(barrier), "l"(kReadOnce)
      : "memory");
}
#else
// The same box by the lanes of a warp: 16 bytes of row r lie at piece ^ (r % 8).
__device__ __forceinline__ void copy_box(uint32_t to, const unsigned char* from, int k) {
  const int row = threadIdx.x % 32 / 8, piece = threadIdx.x % 8;
  from += (size_t)row * k + piece * 16;
#pragma unroll
  for (int j = 0; j < 4; j++)
    copy16(to + (j * 4 + row) * kSpan + (piece ^ (j % 2 * 4 + row)) * 16, from + (size_t)j * 4 * k, true);
}
#endif

// Codes 0, 1 and 2, 3 of a word as float16.
__device__ __forceinline__ uint2 halves_of(uint32_t codes) {
  uint2 v;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  // Shifted by 7 the bits are those of a float16 that is 256 times smaller, also below the normal range.
  const uint32_t first = __byte_perm(codes, 0, 0x1404), second = __byte_perm(codes, 0, 0x3424);
  const __half2 times = __half2half2(__ushort_as_half(0x5c00));
  const auto half = [&](uint32_t w) {
    const uint32_t bits = (w & 0x80008000u) | (w >> 1 & 0x3F803F80u);
    const __half2 value = __hmul2(*(const __half2*)&bits, times);
    return *(const uint32_t*)&value;
  };
  v = {half(first), half(second)};
#else
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(v.x), "=r"(v.y)
      : "r"(codes));
#endif
  return v;
}

// The same of whole numbers.
__device__ __forceinline__ uint2 halves_of_whole(uint32_t codes) {
  const uint32_t above = codes ^ 0x80808080u;  // 128 more
  const __half2 offset = __half2half2(__ushort_as_half(0x6480));  // 1152
  const uint32_t low = __byte_perm(above, 0x64646464u, 0x4140), high = __byte_perm(above, 0x64646464u, 0x4342);
  const __half2 first = __hsub2(*(const __half2*)&low, offset), second = __hsub2(*(const __half2*)&high, offset);
  return {*(const uint32_t*)&first, *(const uint32_t*)&second};
}

// As ``few_rows::multiply``, of float16.
__device__ __forceinline__ void multiply_halves(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float times) {
  const __half2 v = __floats2half2_rn(low_of(pair) * times, high_of(pair) * times);
  return *(const uint32_t*)&v;
}

// The bits of the larger of two bfloat16 without their signs, as float32: of those the larger has the larger bits.
__device__ __forceinline__ uint32_t largest(uint32_t pair) { return max(pair << 16 & 0x7fff0000u, pair & 0x7fff0000u); }

enum Format { kFp8 = 1, kInt8 = 2, kFp8Blocks = 3 };

template <Format FORMAT>
struct Codes8 : Chunks128 {
  static constexpr int kItem = 2 * kBox, kKnown = 0;
#if TRANSECT_BULK
  struct Matrix {
    CUtensorMap map;
    const float* scale;
  };

  // Where a warp's items lie, one step after the other.
  struct Cursor {
    const CUtensorMap* map;
    int row, below, chunk;
    bool both;

    __device__ __forceinline__ void begin(const Matrix& matrix, int n, int unit, bool gate, bool has_both) {
      map = &matrix.map, row = unit * 16, below = gate ? n / 2 + row : row + 16, both = has_both;
      chunk = threadIdx.x / 32;
    }
    __device__ __forceinline__ void next() { chunk += kWarps; }
    __device__ __forceinline__ void fetch(uint32_t to, uint32_t barrier) const {
      barrier_expect(barrier, both ? kItem : kBox);
      fetch_box(to, map, row, chunk, barrier);
      if (both) fetch_box(to + kBox, map, below, chunk, barrier);
    }
  };
#else
  struct Matrix {
    const unsigned char* codes;
    const float* scale;
    int k;
  };

  struct Cursor {
    const unsigned char *from, *below;
    int k;
    bool both;

    __device__ __forceinline__ void begin(const Matrix& matrix, int n, int unit, bool gate, bool has_both) {
      const int row = unit * 16;
      k = matrix.k, both = has_both;
      from = matrix.codes + (size_t)row * k + threadIdx.x / 32 * kSpan;
      below = from + (size_t)(gate ? n / 2 : 16) * k;
    }
    __device__ __forceinline__ void next() { from += kWarps * kSpan, below += kWarps * kSpan; }
    __device__ __forceinline__ void fetch(uint32_t to, uint32_t) const {
      copy_box(to, from, k);
      if (both) copy_box(to + kBox, below, k);
    }
  };
#endif

  static __device__ __forceinline__ float row_scale(const Matrix& matrix, int row) {
    return FORMAT == kFp8Blocks ? 1 : matrix.scale[row];
  }

  // A warp's part of x as float16; gives what brings its sums back.
  static __device__ __forceinline__ float keep(uint32_t part, uint32_t, const uint4 (&v)[kMostSteps / 2], int steps,
                                               int lane) {
    uint32_t most = 0;
#pragma unroll
    for (int j = 0; j < kMostSteps / 2; j++)
      most = max(max(most, largest(v[j].x)), max(largest(v[j].y), max(largest(v[j].z), largest(v[j].w))));
    most = __reduce_max_sync(0xFFFFFFFFu, most);
    const int exponent = max((int)(most >> 23), 15);
    const float times = __uint_as_float((268 - exponent) << 23);
#pragma unroll
    for (int j = 0; j < kMostSteps / 2; j++) {
      if (2 * j >= steps) break;
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(part + j * 512 + lane * 16),
                   "r"(scaled_pair(v[j].x, times)), "r"(scaled_pair(v[j].y, times)), "r"(scaled_pair(v[j].z, times)),
                   "r"(scaled_pair(v[j].w, times))
                   : "memory");
    }
    return __uint_as_float((exponent - 14) << 23);
  }

  // A lane reads pieces 2 (lane % 4) and, in the second half, the one after it, of rows lane / 4 of the eights of an
  // item. So eight lanes at a time meet no bank twice.
  struct Sums {
    float acc[2][2][4] = {};  // of both halves of a chunk's k, of both sixteens
    // With scales of blocks: of chunks before this one; where the scales of the next chunk are, and this one's.
    float total[2][2] = {}, scale[2];
    const float* from[2];

    __device__ __forceinline__ void end(int) {}
    __device__ __forceinline__ float of(int r, int half) const {
      return FORMAT == kFp8Blocks ? total[r][half] : acc[0][r][half * 2] + acc[1][r][half * 2];
    }

    // Of sixteen ``unit`` and that after it, with ``gate`` of the gate and of the other factor.
    __device__ __forceinline__ void begin(const Matrix& matrix, int n, int k, int unit, bool gate, int warp) {
      if (FORMAT != kFp8Blocks) return;
      const int below = gate ? n / 2 + unit * 16 : min(unit * 16 + 16, n - 16);
      from[0] = matrix.scale + (size_t)(unit * 16 / kSpan) * (k / kSpan) + warp;
      from[1] = matrix.scale + (size_t)(below / kSpan) * (k / kSpan) + warp;
      left = (k / kSpan - warp + kWarps - 1) / kWarps;
      read_scales();
    }
    int left = 0;  // chunks whose scales are to be read
    __device__ __forceinline__ void read_scales() {
      if (left-- <= 0) return;
#pragma unroll
      for (int r = 0; r < 2; r++) scale[r] = __ldg(from[r]), from[r] += kWarps;
    }

    __device__ __forceinline__ void add(uint32_t item, uint32_t x_at, uint32_t, int, int lane) {
      const uint32_t from = item + lane / 4 * 128 + ((lane % 4 * 2) ^ (lane / 4)) * 16;
      uint4 w[2][2][2], b[2][2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        b[h][0] = read16(x_at + lane % 4 * 64 + h * 32), b[h][1] = read16(x_at + lane % 4 * 64 + h * 32 + 16);
#pragma unroll
        for (int r = 0; r < 2; r++) {
          w[h][r][0] = read16((from ^ (h * 16)) + r * kBox);
          w[h][r][1] = read16((from ^ (h * 16)) + r * kBox + kBox / 2);
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
            const uint4 upper = w[h][r][0], lower = w[h][r][1];
            const uint32_t above[4] = {upper.x, upper.y, upper.z, upper.w};
            const uint32_t below[4] = {lower.x, lower.y, lower.z, lower.w};
            const uint2 first = FORMAT == kInt8 ? halves_of_whole(above[q]) : halves_of(above[q]);
            const uint2 second = FORMAT == kInt8 ? halves_of_whole(below[q]) : halves_of(below[q]);
            const uint32_t a[4] = {first.x, second.x, first.y, second.y};
            multiply_halves(acc[h][r], a, b0, b1);
          }
        }
      if (FORMAT == kFp8Blocks) {
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            total[r][half] = fmaf(acc[0][r][half * 2] + acc[1][r][half * 2], scale[r], total[r][half]);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int r = 0; r < 2; r++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[h][r][e] = 0;
        read_scales();
      }
    }
  };
};

#if TRANSECT_BULK
// Rows of ``k`` codes in boxes of 16 rows by 128 k. In shared memory 16 bytes of row r lie at piece ^ (r % 8).
int describe(CUtensorMap* map, const void* codes, int n, int k) {
  const hopper::EncodeTiled encode = hopper::encode_tiled();
  if (!encode) return 1;
  const cuuint64_t sizes[2] = {(cuuint64_t)k, (cuuint64_t)n}, strides[1] = {(cuuint64_t)k};
  const cuuint32_t box[2] = {kSpan, 16}, steps[2] = {1, 1};
  return (int)encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, (void*)codes, sizes, strides, box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
#endif

template <Format FORMAT>
int start_of(const void* const* codes, const void* const* scales, const int* sizes, const void* const* tensors,
             float eps0, float eps1, int stages, int blocks, int dependent, void* stream) {
  Weights<Codes8<FORMAT>> weights;
  for (int p = 0; p < kProducts; p++) {
    if (sizes[2 * p] % 128) return -1;
    weights.matrix[p].scale = (const float*)scales[p];
#if TRANSECT_BULK
    if (describe(&weights.matrix[p].map, codes[p], sizes[2 * p], sizes[2 * p + 1])) return -2;
#else
    weights.matrix[p].codes = (const unsigned char*)codes[p], weights.matrix[p].k = sizes[2 * p + 1];
#endif
  }
  return start<Codes8<FORMAT>>(weights, sizes, tensors, eps0, eps1, stages, blocks, dependent, stream);
}

}  // namespace

// Codes [n, k] contiguous on 16 bytes and scales float32 of the four products: o, gate over up, down, and q, k, v of the
// next layer; their sizes n and k must follow each other, multiples of 128 up to 16384 (n of gate over up twice that).
// ``format``: 1 fp8, 2 whole numbers, each with scales [n]; 3 fp8 with scales [n / 128, k / 128]. The rest as of
// ``chain::start``; ``dependent`` as of transect_small_matmul. Returns -2 where the codes cannot be described to the copy
// engine.
extern "C" int transect_scaled8_chain(const void* const* codes, const void* const* scales, int format, const int* sizes,
                                      const void* const* tensors, float eps0, float eps1, int stages,
                                      int blocks, int dependent, void* stream) {
#define TRANSECT_FORMAT(F)                                                                                     \
  if (format == F)                                                                                             \
    return TRANSECT_HERE(                                                                                      \
        start_of<F>(codes, scales, sizes, tensors, eps0, eps1, stages, blocks, dependent, stream));
  TRANSECT_FORMAT(kFp8)
  TRANSECT_FORMAT(kInt8)
  TRANSECT_FORMAT(kFp8Blocks)
  return -1;
}
