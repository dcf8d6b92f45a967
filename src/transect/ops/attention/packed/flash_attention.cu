// Flash attention forward in bfloat16, written to be read; the math is in flash_attention.py. Documents packed one
// behind the other, causal, full or windowed, query heads sharing key heads, heads of 64 or 128.
//
// A block of 4 warps holds 64 queries of one head, a warp 16 of them, and walks over tiles of 64 keys. What makes it
// flash attention is what a thread keeps in registers from tile to tile: for two of the queries the largest score so
// far (m), the sum of powers (l), and a part of the output not yet divided by it (o). A score never leaves the
// registers:
//
//   s = q k'      tensor cores, m16n8k16: a warp multiplies its 16 queries by 8 keys, 16 columns of the head at a time
//   p = 2^(s-m)   the registers that hold s as a *result* hold p as the *left operand* of the next product: the same
//   o += p v      threads, the same rows, so nothing is moved between them
//
// While one tile is multiplied the next comes in by asynchronous copies (two buffers). Rows in shared memory are 16
// bytes longer than they need to be, so that the 8 rows which ldmatrix reads at once lie in different banks.
//
// Bound by: arithmetic, 4 d FLOPs for each visible pair (d = 128, 4096 tokens: about 1000 FLOPs a byte). Predicted:
// mma.sync reaches about 60% of what Hopper's own instructions (wgmma) do, and here a warp waits for its scores, then
// for its exponentials, then for its output, with only 8 warps on a multiprocessor to fill the gaps: 40% of cuDNN, 200
// to 250 TFLOP/s. Unfused attention writes the scores, masks them, reads them for the softmax, writes p and reads it
// again: at 64 heads of 4096 tokens 10 to 13 GB, at least 3 ms, where this kernel needs none of it.
// Measured on one H200, 64 heads of 4096 tokens, causal: 1.2 ms at d = 128, 230 TFLOP/s, 0.40 of cuDNN; 0.65 ms at d =
// 64, 0.51 of it. Unfused in torch: 8.6 ms, for its softmax and mask run far under the bandwidth. Full: 240 TFLOP/s,
// 0.37.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

typedef __nv_bfloat16 half_t;
constexpr int kQueries = 64, kKeys = 64, kThreads = 128;

struct Problem {
  const half_t *q, *k, *v;
  half_t* out;                     // [T, H, d], dense
  float* lse;                      // [H, T]: log2 of the sum of 2^s
  const int* starts;               // [documents + 1]
  int documents, tokens, heads, group;
  long long q_token, q_head, k_token, k_head, v_token, v_head;  // strides in elements
  float scale2;                    // scale * log2(e)
  int causal, window;              // window 0: none
};

// ------------------------------------------------------------------------------------------------ single instructions

__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// 16 bytes to shared memory without passing through registers; zeros where `inside` is false.
__device__ void copy16(void* to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(inside ? 16 : 0));
}
__device__ void end_of_copies() { asm volatile("cp.async.commit_group;"); }
template <int kInFlight>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kInFlight));
}

// Four 8 x 8 matrices of 16-bit elements; thread t gives the address of row t % 8 of matrix t / 8.
__device__ void load_matrices(unsigned (&r)[4], const half_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
__device__ void load_matrices_transposed(unsigned (&r)[4], const half_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

// c [16, 8] += a [16, 16] b [16, 8]. Thread t holds of c rows t / 4 and t / 4 + 8, columns t % 4 * 2 and the one after.
__device__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ unsigned pair(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&both);
}

// 2^x by the hardware's instruction; results under 2^-126 are 0.
__device__ float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Over the 4 threads that share a row.
__device__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// --------------------------------------------------------------------------------------------------------- the kernel

// 64 tokens of one head, from `token` on, to rows of D + 8 elements; rows from `end` on are zeros.
template <int D>
__device__ void fetch(half_t* tile, const half_t* from, long long stride, int token, int end) {
  constexpr int kChunks = D / 8;
#pragma unroll
  for (int n = threadIdx.x; n < 64 * kChunks; n += kThreads) {
    const int row = n / kChunks, column = n % kChunks * 8;
    const bool inside = token + row < end;
    copy16(tile + row * (D + 8) + column, from + (inside ? (token + row) * stride : 0) + column, inside);
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads, 2) flash_forward(Problem a) {
  constexpr int kRow = D + 8, kTile = 64 * kRow;
  extern __shared__ __align__(16) half_t tiles[];
  half_t *const q_tile = tiles, *const k_tiles = tiles + kTile, *const v_tiles = tiles + 3 * kTile;

  // Document i was given the tiles from starts[i] / 64 + i on: enough, and some at its end may be empty. The last tile
  // of a document comes first, because with a causal mask it takes longest.
  const int tile = gridDim.x - 1 - blockIdx.x;
  int document = 0, above = a.documents;
  while (above - document > 1) {
    const int middle = (document + above) / 2;
    if (a.starts[middle] / kQueries + middle <= tile) document = middle;
    else above = middle;
  }
  const int begin = a.starts[document], end = a.starts[document + 1];
  const int first = begin + (tile - begin / kQueries - document) * kQueries;
  if (first >= end) return;
  const int head = blockIdx.y, kv_head = head / a.group;
  const half_t* const keys = a.k + kv_head * a.k_head;
  const half_t* const values = a.v + kv_head * a.v_head;

  // Keys that some query of the tile sees.
  int low = begin, high = end;
  if (a.causal) high = min(end, first + kQueries);
  if (a.window) {
    low = max(begin, first - a.window + 1);
    if (!a.causal) high = min(end, first + kQueries + a.window - 1);
  }
  low = begin + (low - begin) / kKeys * kKeys;

  fetch<D>(q_tile, a.q + head * a.q_head, a.q_token, first, end);
  fetch<D>(k_tiles, keys, a.k_token, low, end);
  fetch<D>(v_tiles, values, a.v_token, low, end);
  end_of_copies();
  wait_for_copies<0>();
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int i0 = first + warp * 16 + lane / 4, i1 = i0 + 8;  // this thread's two queries
  unsigned q[D / 16][4];
#pragma unroll
  for (int c = 0; c < D / 16; c++)
    load_matrices(q[c], q_tile + (warp * 16 + lane % 16) * kRow + c * 16 + lane / 16 * 8);

  float o[D / 8][4] = {};
  float m0 = -INFINITY, m1 = -INFINITY, l0 = 0, l1 = 0;  // l: of this thread's columns only, until the end
  for (int start = low, buffer = 0; start < high; start += kKeys, buffer ^= 1) {
    const half_t *const k_tile = k_tiles + buffer * kTile, *const v_tile = v_tiles + buffer * kTile;
    if (start + kKeys < high) {
      fetch<D>(k_tiles + (buffer ^ 1) * kTile, keys, a.k_token, start + kKeys, end);
      fetch<D>(v_tiles + (buffer ^ 1) * kTile, values, a.v_token, start + kKeys, end);
    }
    end_of_copies();

    float s[kKeys / 8][4] = {};
#pragma unroll
    for (int c = 0; c < D / 16; c++)
#pragma unroll
      for (int j = 0; j < kKeys / 16; j++) {
        unsigned b[4];
        load_matrices(b, k_tile + (j * 16 + lane / 16 * 8 + lane % 8) * kRow + c * 16 + lane / 8 % 2 * 8);
        multiply(s[2 * j], q[c], b[0], b[1]);
        multiply(s[2 * j + 1], q[c], b[2], b[3]);
      }

    // Only tiles at an edge need a mask: the same question for the whole block, so no warp takes both ways.
    const bool edge = start + kKeys > end || (a.causal && start + kKeys > first + 1) ||
                      (a.window && (first + kQueries - start > a.window || start + kKeys - first > a.window));
    if (edge) {
#pragma unroll
      for (int j = 0; j < kKeys / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int i = e < 2 ? i0 : i1, key = start + j * 8 + lane % 4 * 2 + e % 2;
          const bool seen = key < end && !(a.causal && key > i) && !(a.window && abs(i - key) >= a.window);
          if (!seen) s[j][e] = -INFINITY;
        }
    }

    float top0 = s[0][0], top1 = s[0][2];
#pragma unroll
    for (int j = 0; j < kKeys / 8; j++) {
      top0 = fmaxf(top0, fmaxf(s[j][0], s[j][1]));
      top1 = fmaxf(top1, fmaxf(s[j][2], s[j][3]));
    }
    top0 = fmaxf(m0, row_max(top0) * a.scale2);
    top1 = fmaxf(m1, row_max(top1) * a.scale2);
    const float shift0 = top0 == -INFINITY ? 0 : top0, shift1 = top1 == -INFINITY ? 0 : top1;  // nothing seen yet
    const float fade0 = power(m0 - shift0), fade1 = power(m1 - shift1);
    m0 = top0;
    m1 = top1;
    l0 *= fade0;
    l1 *= fade1;
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
      o[j][0] *= fade0;
      o[j][1] *= fade0;
      o[j][2] *= fade1;
      o[j][3] *= fade1;
    }
#pragma unroll
    for (int j = 0; j < kKeys / 8; j++) {
      s[j][0] = power(s[j][0] * a.scale2 - shift0);
      s[j][1] = power(s[j][1] * a.scale2 - shift0);
      s[j][2] = power(s[j][2] * a.scale2 - shift1);
      s[j][3] = power(s[j][3] * a.scale2 - shift1);
      l0 += s[j][0] + s[j][1];
      l1 += s[j][2] + s[j][3];
    }

#pragma unroll
    for (int c = 0; c < kKeys / 16; c++) {
      const unsigned p[4] = {pair(s[2 * c][0], s[2 * c][1]), pair(s[2 * c][2], s[2 * c][3]),
                             pair(s[2 * c + 1][0], s[2 * c + 1][1]), pair(s[2 * c + 1][2], s[2 * c + 1][3])};
#pragma unroll
      for (int j = 0; j < D / 16; j++) {
        unsigned b[4];
        load_matrices_transposed(b, v_tile + (c * 16 + lane % 16) * kRow + j * 16 + lane / 16 * 8);
        multiply(o[2 * j], p, b[0], b[1]);
        multiply(o[2 * j + 1], p, b[2], b[3]);
      }
    }
    wait_for_copies<0>();
    __syncthreads();
  }

  l0 = row_sum(l0);
  l1 = row_sum(l1);
  const float divided0 = 1 / l0, divided1 = 1 / l1;
#pragma unroll
  for (int j = 0; j < D / 8; j++) {
    const int column = head * D + j * 8 + lane % 4 * 2;
    if (i0 < end)
      *(unsigned*)(a.out + (long long)i0 * a.heads * D + column) = pair(o[j][0] * divided0, o[j][1] * divided0);
    if (i1 < end)
      *(unsigned*)(a.out + (long long)i1 * a.heads * D + column) = pair(o[j][2] * divided1, o[j][3] * divided1);
  }
  if (lane % 4 == 0) {
    if (i0 < end) a.lse[(long long)head * a.tokens + i0] = m0 + log2f(l0);
    if (i1 < end) a.lse[(long long)head * a.tokens + i1] = m1 + log2f(l1);
  }
}

template <int D>
static int launch(const Problem& a, cudaStream_t stream) {
  const int bytes = 5 * 64 * (D + 8) * (int)sizeof(half_t);
  const cudaError_t error = cudaFuncSetAttribute(flash_forward<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return (int)error;
  flash_forward<D><<<dim3(a.tokens / kQueries + a.documents, a.heads), kThreads, bytes, stream>>>(a);
  return (int)cudaGetLastError();
}

// q [T, H, d], k and v [T, H / group, d] bfloat16 with the given strides (in elements, multiples of 8; the last is 1)
// from multiples of 16 bytes on; out [T, H, d] dense; lse [H, T] float32; starts [documents + 1] int32. window 0 means
// none.
// Returns cudaGetLastError(), or -1 for heads that are not 64 or 128.
extern "C" int transect_flash_attention(const void* q, const void* k, const void* v, void* out, float* lse,
                                        const int* starts, int documents, int tokens, int heads, int group, int d,
                                        long long q_token, long long q_head, long long k_token, long long k_head,
                                        long long v_token, long long v_head, double scale2, int causal, int window,
                                        void* stream) {
  if (tokens == 0 || heads == 0) return 0;
  const Problem a = {(const half_t*)q, (const half_t*)k, (const half_t*)v, (half_t*)out, lse, starts, documents, tokens,
                     heads, group, q_token, q_head, k_token, k_head, v_token, v_head, (float)scale2, causal, window};
  if (d == 64) return launch<64>(a, (cudaStream_t)stream);
  if (d == 128) return launch<128>(a, (cudaStream_t)stream);
  return -1;
}
