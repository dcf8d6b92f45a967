// The four products between two attentions of one row and weights in block types of GGUF files (chain.cuh). An item is a
// unit (gguf_layout.py): 16 rows by 256 k. A matrix may be made of up to three parts, of a type each. Gate and up are in
// turns of 16 rows. A warp turns its part of x into whole numbers, which meet the codes in products of bytes
// (gguf_bytes.cuh).

#include "../chain.cuh"
#include "gguf_bytes.cuh"

using namespace chain;
using namespace gguf;

namespace {

constexpr int kMostParts = 3;

// Of types that files of Q4_K_M do not have: a call, or the loop would be too long for the instruction cache.
__device__ __noinline__ float2 sum_of_unit(int type, uint32_t unit, uint32_t x, int lane) {
  float sums[2] = {};
#define TRANSECT_ADD(F) \
  case F: add_unit<F>(sums, unit, x, lane); break;
  switch ((Type)type) {
    TRANSECT_ADD(kQ4_0)
    TRANSECT_ADD(kQ4_1)
    TRANSECT_ADD(kQ5_0)
    TRANSECT_ADD(kQ5_1)
    TRANSECT_ADD(kQ8_0)
    TRANSECT_ADD(kQ2_K)
    TRANSECT_ADD(kQ3_K)
    TRANSECT_ADD(kQ5_K)
    TRANSECT_ADD(kIQ4_NL)
    TRANSECT_ADD(kMXFP4)
  }
  return make_float2(sums[0], sums[1]);
}

struct Blocks {
  static constexpr int kSpan = kUnitK, kMostSteps = 8, kKept = gguf::kSpan, kItem = 0, kKnown = 0;
  static constexpr bool kApart = true, kPortable = false;

  struct Rows {
    const unsigned char* units;
    int type, sixteens, bytes;
  };
  struct Matrix {
    Rows rows[kMostParts];
    int across;

    // A warp's first unit of a sixteen, and how many bytes one has.
    __device__ __forceinline__ const unsigned char* find(int sixteen, int& bytes, int& type) const {
      int part = 0;
      while (part + 1 < kMostParts && sixteen >= rows[part].sixteens) sixteen -= rows[part++].sixteens;
      bytes = rows[part].bytes, type = rows[part].type;
      return rows[part].units + ((size_t)sixteen * across + threadIdx.x / 32) * bytes;
    }
  };

  // Where a warp's units lie, one step after the other, and those of the sixteen below.
  struct Cursor {
    const unsigned char *from, *below;
    int bytes, bytes_below;

    __device__ __forceinline__ void begin(const Matrix& matrix, int, int unit, bool gate, bool) {
      int type;
      from = matrix.find(gate ? 2 * unit : unit, bytes, type);
      below = matrix.find((gate ? 2 * unit : unit) + 1, bytes_below, type);
    }
    __device__ __forceinline__ void next() { from += kWarps * bytes; }
    __device__ __forceinline__ void begin_lower() { from = below, bytes = bytes_below; }
    __device__ __forceinline__ void fetch(uint32_t to, uint32_t barrier) const {
      barrier_expect(barrier, bytes);
      copy_once(to, from, bytes, barrier);
    }
  };

  static __device__ __forceinline__ float row_scale(const Matrix&, int) { return 1; }

  // Each chunk passes through its place in shared memory, because other lanes take its numbers.
  static __device__ __forceinline__ float keep(uint32_t part, uint32_t, const uint4 (&v)[kMostSteps], int steps,
                                               int lane) {
#pragma unroll
    for (int j = 0; j < kMostSteps; j += 2) {
      if (j >= steps) break;
      if (j + 1 == steps) keep_some<1>(part + j * kKept, v + j, lane);
      else keep_some<2>(part + j * kKept, v + j, lane);
    }
    return 1;
  }

  template <int N>
  static __device__ __forceinline__ void keep_some(uint32_t part, const uint4* v, int lane) {
    uint32_t to[N], words[N][4];
#pragma unroll
    for (int n = 0; n < N; n++) {
      to[n] = part + n * kKept;
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to[n] + lane * 16), "r"(v[n].x), "r"(v[n].y),
                   "r"(v[n].z), "r"(v[n].w)
                   : "memory");
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int s = 0; s < 4; s++) words[n][s] = read4(to[n] + lane / 4 * 64 + lane % 4 * 4 + s * 16);
    __syncwarp();
    write_spans(to, words, lane);
  }

  struct Sums {
    float sums[2] = {}, total[2][2] = {};  // rows lane / 4 and those 8 below: of this sixteen, of both
    int type, type_below;

    __device__ __forceinline__ float of(int r, int half) const { return total[r][half]; }

    __device__ __forceinline__ void begin(const Matrix& matrix, int, int, int unit, bool gate, int) {
      int bytes;
      matrix.find(gate ? 2 * unit : unit, bytes, type);
      matrix.find((gate ? 2 * unit : unit) + 1, bytes, type_below);
    }

    __device__ __forceinline__ void add(uint32_t from, uint32_t x_at, uint32_t, int, int lane) {
      if (type == kQ4_K) {
        add_unit<kQ4_K>(sums, from, x_at, lane);
      } else if (type == kQ6_K) {
        add_unit<kQ6_K>(sums, from, x_at, lane);
      } else {
        const float2 more = sum_of_unit(type, from, x_at, lane);
        sums[0] += more.x, sums[1] += more.y;
      }
    }

    __device__ __forceinline__ void end(int sixteen) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        sums[h] += __shfl_xor_sync(0xFFFFFFFFu, sums[h], 1);
        sums[h] += __shfl_xor_sync(0xFFFFFFFFu, sums[h], 2);
        if (sixteen) total[1][h] = sums[h];
        else total[0][h] = sums[h];
        sums[h] = 0;
      }
      type = type_below;
    }
  };
};

}  // namespace

// units: of each product three parts (null where there are fewer), ``rows``: their types and sixteens of rows in turns,
// of o, gate and up in turns of 16 rows (one part), down, and q, k, v of the next layer; their sizes n and k must follow
// each other, n multiples of 16, k of 256, up to 32768. The rest as of ``chain::start``; ``dependent`` as of
// transect_small_matmul.
extern "C" int transect_gguf_chain(const void* const* units, const int* rows, const int* sizes,
                                   const void* const* tensors, float eps0, float eps1, int stages, int blocks,
                                   int dependent, void* stream) {
  Weights<Blocks> weights = {};
  int most_k = 0;
  for (int p = 0; p < kProducts; p++) {
    for (int i = 0; i < kMostParts; i++, units++, rows += 2) {
      if (rows[0] < 0 || rows[0] > kMXFP4 || rows[1] < 0) return -1;
      const int bytes = unit_bytes((Type)rows[0]);
      weights.matrix[p].rows[i] = {(const unsigned char*)*units, rows[0], rows[1], bytes};
      if (rows[1] && bytes > weights.item) weights.item = bytes;
    }
    if (sizes[2 * p + 1] > most_k) most_k = sizes[2 * p + 1];
    weights.matrix[p].across = sizes[2 * p + 1] / kUnitK;
  }
  const int steps = (most_k / kUnitK + kWarps - 1) / kWarps;
  weights.part = steps * Blocks::kKept;
  return start(weights, sizes, tensors, eps0, eps1, stages, blocks, dependent, stream);
}
