// Y = X W^T + b on Hopper's own tensor-core products (wgmma), bfloat16 in and out, float32 sums, and a weight in a block
// type of GGUF files as gguf_layout.py arranges it: decoded in registers for as many rows of X as a tile has.
//
// * A tile of a block is 64 WGS rows of W, the left operand, by NB rows of X. One warp fetches units of W into a ring in
//   shared memory, each in one piece; another fetches 64 k of X at a time into a ring of its own. WGS warpgroups decode
//   64 rows of W each, a warp sixteen of them, and multiply them from registers: the products of 32 k run while the codes
//   of the next 32 are taken apart.
// * A weight is rounded to bfloat16 before it is multiplied: a code is a bfloat16 c 2^-133 as it stands (gguf_codes.cuh),
//   and one fused multiplication and addition of two at a time makes (S c + Z) 2^-53 of it. S and Z are the scale, and
//   minimum or minus the offset times the scale, rounded to bfloat16 themselves.
// * The units of all tiles stand in one row, and every block takes an equal stretch of it. What it has of a tile that
//   begins before its stretch it leaves in memory; whoever has the tile's first k comes to it last, and adds what the
//   others left, in the order of k. Tiles of more rows of X than NB follow one another, for the same rows of W.
// * The first units of W may be asked for before the kernel that makes X has ended (``ahead``).

#include "../../lang/few_rows.cuh"
#include "../../lang/hopper.cuh"
#include "../../lang/parts.cuh"
#include "../../lang/wgmma.cuh"
#include "gguf_codes.cuh"

#define TRANSECT_PARTS 12

using namespace few_rows;
using namespace gguf;
using namespace hopper;

namespace {

constexpr int kMostStages = 16;
constexpr float kScaleUp = 0x1p80f, kDown = 0x1p-53f, kUp = 0x1p53f;  // 2^80 2^-133 = 2^-53

__device__ __forceinline__ uint32_t fused(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t v;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}

__device__ __forceinline__ uint32_t twice(float v) { return pack(v, v); }

// What stands behind a unit's scales, for rows g and g + 8: S = scale up, Z = minimum or scale times zero.
template <Type F>
struct Behind {
  float up[2], zero[2];

  __device__ __forceinline__ void begin(uint32_t unit, int g) {
    if constexpr (byte_scales(F)) {
      float2 d, less;
      read_behind<F>(d, less, unit, g);
      up[0] = d.x * kScaleUp, up[1] = d.y * kScaleUp;
      zero[0] = has_minimum(F) ? -less.x * kDown : d.x * (-offset_of(F) * kDown);
      zero[1] = has_minimum(F) ? -less.y * kDown : d.y * (-offset_of(F) * kDown);
    } else {
      up[0] = up[1] = kScaleUp;
      zero[0] = zero[1] = has_minimum(F) ? kDown : -offset_of(F) * kDown;
    }
  }
};

// The weights of 32 columns, 2^-53 times: of the two products of 16 columns each the left operand.
template <Type F>
__device__ __forceinline__ void weights(uint32_t (&a)[2][4], const Codes<F>& codes, const Behind<F>& behind,
                                        uint32_t unit, int lane, int j) {
  constexpr int GROUPS = groups_of_32(F);
  float scale[GROUPS][2], minimum[GROUPS][2];
  read_scales<F>(scale, minimum, unit, lane / 4, j);
  uint32_t S[GROUPS][2], Z[GROUPS][2];
#pragma unroll
  for (int s = 0; s < GROUPS; s++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      S[s][h] = twice(scale[s][h] * behind.up[h]);
      Z[s][h] = twice((has_minimum(F) ? minimum[s][h] : scale[s][h]) * behind.zero[h]);
    }
  codes.get(a, unit, lane, j);
#pragma unroll
  for (int q = 0; q < 2; q++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t scaled = S[q * GROUPS / 2][h], zero = Z[q * GROUPS / 2][h];
      uint32_t above = scaled;
      if (left_up(F)) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(above) : "r"(scaled), "r"(0x3D803D80u));  // a sixteenth
      a[q][h] = fused(a[q][h], scaled, zero);
      a[q][2 + h] = fused(a[q][2 + h], above, zero);
    }
}

#define PRODUCT(n, numbers, places, b, ...)                                                                        \
  if constexpr (NB == n)                                                                                           \
  asm volatile(                                                                                                    \
      "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"                                                                   \
      "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" numbers "}, {" places "}, " b ", p, 1, 1, 0;\n}" \
      : __VA_ARGS__                                                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right))

// c += 64 rows by 16 k from the registers of a warpgroup, as in ``few_rows::multiply``, times NB rows at ``right``. Of
// warp w, lane l: c[4 j], c[4 j + 1] are row 16 w + l / 4 on the left and rows 8 j + 2 (l % 4), + 1 on the right;
// c[4 j + 2], c[4 j + 3] the same 8 rows further down.
template <int NB>
__device__ __forceinline__ void multiply(float (&c)[NB / 2], const uint32_t (&a)[4], uint64_t right) {
#ifdef TRANSECT_HOPPER
  PRODUCT(8, N00, "%4, %5, %6, %7", "%8", R4(c, 0));
  PRODUCT(16, N0H, "%8, %9, %10, %11", "%12", R8(c, 0));
  PRODUCT(32, N0, "%16, %17, %18, %19", "%20", R16(c, 0));
  PRODUCT(64, N0 N1, "%32, %33, %34, %35", "%36", R32(c, 0));
  PRODUCT(128, N0 N1 N2 N3, "%64, %65, %66, %67", "%68", R64(c, 0));
  PRODUCT(256, N0 N1 N2 N3 N4 N5 N6 N7, "%128, %129, %130, %131", "%132", R64(c, 0), R64(c, 64));
#endif
}

// A warp's 16 columns of Y from ``left`` on by 8 rows from ``right`` on. N is a multiple of 8.
__device__ __forceinline__ void store(__nv_bfloat16* out, const __nv_bfloat16* bias, int left, int right, float4 v,
                                      int M, int N, int lane) {
  const int row = left + lane / 4;
  const float b = bias && row < N ? __bfloat162float(bias[row]) : 0;
  const float b8 = bias && row + 8 < N ? __bfloat162float(bias[row + 8]) : 0;
  const uint32_t low = transposed(pack(v.x * kUp + b, v.y * kUp + b)),
                 high = transposed(pack(v.z * kUp + b8, v.w * kUp + b8));
  const int m = right + lane / 4, n = left + lane % 4 * 2;
  if (m < M && n < N) *(uint32_t*)(out + (size_t)m * N + n) = low;
  if (m < M && n + 8 < N) *(uint32_t*)(out + (size_t)m * N + n + 8) = high;
}

template <Type F, int NB, int WGS, int BLOCKS>
__global__ void __launch_bounds__(WGS * 128 + 64, BLOCKS)
    gguf_tiles(const __grid_constant__ CUtensorMap x_map, const unsigned char* weight, const __nv_bfloat16* bias,
               __nv_bfloat16* out, float4* parts, int* flags, int M, int N, int K, int row_tiles, int box, int w_stages,
               int x_stages, int ahead) {
#ifdef TRANSECT_HOPPER
  constexpr int UNIT = unit_bytes(F), SIXTEENS = WGS * 4, W_STAGE = SIXTEENS * UNIT, X_STAGE = NB * 128, J = NB / 8;
  constexpr int WORKERS = WGS * 128;
  extern __shared__ unsigned char memory[];
  __shared__ __align__(8) uint64_t barriers[4 * kMostStages];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t x_ring = (shared_address(memory) + 1023) & ~1023u, w_ring = x_ring + x_stages * X_STAGE;
  const uint32_t w_full = shared_address(barriers), w_empty = w_full + 8 * kMostStages;
  const uint32_t x_full = w_empty + 8 * kMostStages, x_empty = x_full + 8 * kMostStages;
  const int chunks = (K + kUnitK - 1) / kUnitK, sixteens = (N + 15) / 16;
  const long long all = (long long)((sixteens + SIXTEENS - 1) / SIXTEENS) * row_tiles * chunks;
  auto begin_of = [&](int block) { return (int)(all * block / gridDim.x); };
  const int first = begin_of(blockIdx.x), last = begin_of(blockIdx.x + 1);

  let_next_begin();
  if (threadIdx.x == WORKERS + 32) asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
  if (!ahead) wait_for_previous();
  if (threadIdx.x < kMostStages) {
    barrier_init(w_full + 8 * threadIdx.x, 1);
    barrier_init(x_full + 8 * threadIdx.x, 1);
    barrier_init(w_empty + 8 * threadIdx.x, SIXTEENS);
    barrier_init(x_empty + 8 * threadIdx.x, SIXTEENS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp == SIXTEENS) {
    for (int i = first, slot = 0, parity = 1; i < last; i++) {
      if (i - first >= w_stages) barrier_poll(w_empty + 8 * slot, parity);
      const int tile = i / chunks, from = tile / row_tiles * SIXTEENS, count = min(SIXTEENS, sixteens - from);
      if (lane == 0) barrier_expect(w_full + 8 * slot, count * UNIT);
      __syncwarp();
      if (lane < count)
        copy_bulk(w_ring + slot * W_STAGE + lane * UNIT,
                  weight + ((size_t)(from + lane) * chunks + i - tile * chunks) * UNIT, UNIT, w_full + 8 * slot);
      if (++slot == w_stages) slot = 0, parity ^= 1;
    }
    __syncwarp();
    return;
  }
  if (warp == SIXTEENS + 1) {
    if (lane == 0) {
      if (ahead) wait_for_previous();
      const int count = (last - first) * 4;
      for (int i = 0, slot = 0, parity = 1; i < count; i++) {
        if (i >= x_stages) barrier_poll(x_empty + 8 * slot, parity);
        const int at = first + i / 4, tile = at / chunks;
        barrier_expect(x_full + 8 * slot, box * 128);
        fetch(x_ring + slot * X_STAGE, &x_map, (at - tile * chunks) * kUnitK + i % 4 * 64, tile % row_tiles * NB,
              x_full + 8 * slot, kReadOften);
        if (++slot == x_stages) slot = 0, parity ^= 1;
      }
    }
    __syncwarp();
    return;
  }

  float c[1][NB / 2];
  uint32_t a[2][2][4];  // for products of 32 k: one is read by them while the other is made
  int w_slot = 0, w_parity = 0, x_slot = 0, x_parity = 0, release = -1;
  const int t = threadIdx.x;
  auto let_go = [&](uint32_t barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  };
  for (int i = first; i < last;) {
    const int tile = i / chunks, end = min(last, (tile + 1) * chunks);
    const bool begins = i == tile * chunks;
#pragma unroll
    for (int e = 0; e < NB / 2; e++) c[0][e] = 0;
    hold(c);
    for (; i < end; i++) {
      barrier_poll(w_full + 8 * w_slot, w_parity);
      const uint32_t unit = w_ring + w_slot * W_STAGE + warp * UNIT;
      Codes<F> codes;
      Behind<F> behind;
      codes.begin(unit, lane);
      behind.begin(unit, lane / 4);
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const uint32_t at = x_ring + x_slot * X_STAGE;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          weights<F>(a[half], codes, behind, unit, lane, 2 * q + half);
          if (half == 0) barrier_poll(x_full + 8 * x_slot, x_parity);
#pragma unroll
          for (int e = 0; e < 8; e++) asm volatile("" : "+r"(a[half][e / 4][e % 4])::"memory");  // now, and not later
          products_wait<0>();
          if (half == 0 && release >= 0) let_go(x_empty + 8 * release);
          products_begin();
          multiply<NB>(c[0], a[half][0], matrix(at + half * 64));
          multiply<NB>(c[0], a[half][1], matrix(at + half * 64 + 32));
          products_end();
        }
        release = x_slot;
        if (++x_slot == x_stages) x_slot = 0, x_parity ^= 1;
      }
      let_go(w_empty + 8 * w_slot);
      if (++w_slot == w_stages) w_slot = 0, w_parity ^= 1;
    }
    products_wait<0>();
    hold(c);
    let_go(x_empty + 8 * release);
    release = -1;
    if (!begins) {  // leave it for the block that has the tile's first k
      float4* to = parts + (size_t)blockIdx.x * (J * WORKERS) + t;
#pragma unroll
      for (int j = 0; j < J; j++)
        __stcg(to + j * WORKERS, make_float4(c[0][4 * j], c[0][4 * j + 1], c[0][4 * j + 2], c[0][4 * j + 3]));
      asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
      if (t == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flags + blockIdx.x) : "memory");
      continue;
    }
    if (end < (tile + 1) * chunks) {
      for (int other = blockIdx.x + 1; other < gridDim.x && begin_of(other) < (tile + 1) * chunks; other++) {
        if (t == 0) {
          int there = 0;
          while (!there) {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(flags + other) : "memory");
          }
          flags[other] = 0;  // ready for the next launch
        }
        asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
        const float4* from = parts + (size_t)other * (J * WORKERS) + t;
#pragma unroll
        for (int j = 0; j < J; j++) {
          const float4 v = __ldcg(from + j * WORKERS);
          c[0][4 * j] += v.x, c[0][4 * j + 1] += v.y, c[0][4 * j + 2] += v.z, c[0][4 * j + 3] += v.w;
        }
      }
    }
    const int left = (tile / row_tiles * SIXTEENS + warp) * 16, right = tile % row_tiles * NB;
#pragma unroll
    for (int j = 0; j < J; j++)
      if (right + j * 8 < M)
        store(out, bias, left, right + j * 8,
              make_float4(c[0][4 * j], c[0][4 * j + 1], c[0][4 * j + 2], c[0][4 * j + 3]), M, N, lane);
  }
#endif
}

template <Type F, int NB, int WGS, int BLOCKS>
int start(const void* x, const void* weight, const void* bias, void* out, void* parts, void* flags, int M, int N, int K,
          long long x_stride, int blocks, int w_stages, int x_stages, int dependent, void* stream) {
  const int shared = x_stages * NB * 128 + w_stages * WGS * 4 * unit_bytes(F) + 1024, row_tiles = (M + NB - 1) / NB;
  const int tiles = ((N + 15) / 16 + WGS * 4 - 1) / (WGS * 4) * row_tiles, box = M < NB ? M : NB;
  if (shared > kMostShared - 1024 || blocks > (long long)tiles * ((K + kUnitK - 1) / kUnitK)) return -1;
  CUtensorMap x_map;
  if (describe(&x_map, x, M, K, x_stride, box)) return -2;
  return (int)launch(gguf_tiles<F, NB, WGS, BLOCKS>, blocks, WGS * 128 + 64, shared, 1, dependent > 0, stream, x_map,
                     (const unsigned char*)weight, (const __nv_bfloat16*)bias, (__nv_bfloat16*)out, (float4*)parts,
                     (int*)flags, M, N, K, row_tiles, box, w_stages, x_stages, (int)(dependent > 1));
}

}  // namespace

#define TRANSECT_CUT(F, NB, WGS, BLOCKS)                                                                             \
  if (type == F && rows == NB && groups == WGS && resident == BLOCKS)                                                \
    return TRANSECT_HERE(start<F, NB, WGS, BLOCKS>(x, weight, bias, out, parts, flags, M, N, K, x_stride, blocks,    \
                                                   w_stages, x_stages, dependent, stream));

// x [M, K] bfloat16 with x_stride elements between rows, on 16 bytes, K and x_stride multiples of 8. weight: the units of
// a type (its number in ``FORMATS``), N / 16 down by K / 256 across, both rounded up. bias [N] or null, out [M, N], N a
// multiple of 8. parts: rows * groups * 64 float32 for every block; flags: int32 zeros for every block, zeros again
// afterwards. rows, groups, resident: one of the cuts listed below; blocks: of the launch, all of which must run at once;
// stages of the rings 2 to 16. ``dependent``: 0 an ordinary launch, 1 a dependent one, 2 one that asks for the weight
// before the kernel before has ended. Returns a cudaError_t, or -1 for what it does not take, -2 where X cannot be
// described to the copy engine.
extern "C" int transect_gguf_tiles(const void* x, const void* weight, const void* bias, void* out, void* parts,
                                   void* flags, int M, int N, int K, long long x_stride, int type, int rows, int groups,
                                   int resident, int blocks, int w_stages, int x_stages, int dependent, void* stream) {
  if (M < 1 || N < 8 || N % 8 || K < 8 || K % 8 || x_stride % 8 || blocks < 1 || w_stages < 2 || x_stages < 2 ||
      w_stages > kMostStages || x_stages > kMostStages)
    return -1;
  TRANSECT_CUT(kQ4_0, 16, 2, 2)
  TRANSECT_CUT(kQ4_0, 32, 2, 2)
  TRANSECT_CUT(kQ4_0, 64, 2, 2)
  TRANSECT_CUT(kQ4_0, 128, 2, 1)
  TRANSECT_CUT(kQ4_0, 128, 3, 1)
  TRANSECT_CUT(kQ4_1, 16, 2, 2)
  TRANSECT_CUT(kQ4_1, 32, 2, 2)
  TRANSECT_CUT(kQ4_1, 64, 2, 2)
  TRANSECT_CUT(kQ4_1, 128, 2, 1)
  TRANSECT_CUT(kQ4_1, 128, 3, 1)
  TRANSECT_CUT(kQ5_0, 16, 2, 2)
  TRANSECT_CUT(kQ5_0, 32, 2, 2)
  TRANSECT_CUT(kQ5_0, 64, 2, 2)
  TRANSECT_CUT(kQ5_0, 128, 2, 1)
  TRANSECT_CUT(kQ5_0, 128, 3, 1)
  TRANSECT_CUT(kQ5_1, 16, 2, 2)
  TRANSECT_CUT(kQ5_1, 32, 2, 2)
  TRANSECT_CUT(kQ5_1, 64, 2, 2)
  TRANSECT_CUT(kQ5_1, 128, 2, 1)
  TRANSECT_CUT(kQ5_1, 128, 3, 1)
  TRANSECT_CUT(kQ8_0, 16, 2, 2)
  TRANSECT_CUT(kQ8_0, 32, 2, 2)
  TRANSECT_CUT(kQ8_0, 64, 2, 2)
  TRANSECT_CUT(kQ8_0, 128, 2, 1)
  TRANSECT_CUT(kQ8_0, 128, 3, 1)
  TRANSECT_CUT(kQ2_K, 16, 2, 2)
  TRANSECT_CUT(kQ2_K, 32, 2, 2)
  TRANSECT_CUT(kQ2_K, 64, 2, 2)
  TRANSECT_CUT(kQ2_K, 128, 2, 1)
  TRANSECT_CUT(kQ2_K, 128, 3, 1)
  TRANSECT_CUT(kQ3_K, 16, 2, 2)
  TRANSECT_CUT(kQ3_K, 32, 2, 2)
  TRANSECT_CUT(kQ3_K, 64, 2, 2)
  TRANSECT_CUT(kQ3_K, 128, 2, 1)
  TRANSECT_CUT(kQ3_K, 128, 3, 1)
  TRANSECT_CUT(kQ4_K, 16, 2, 2)
  TRANSECT_CUT(kQ4_K, 32, 2, 2)
  TRANSECT_CUT(kQ4_K, 64, 2, 2)
  TRANSECT_CUT(kQ4_K, 128, 2, 1)
  TRANSECT_CUT(kQ4_K, 128, 3, 1)
  TRANSECT_CUT(kQ5_K, 16, 2, 2)
  TRANSECT_CUT(kQ5_K, 32, 2, 2)
  TRANSECT_CUT(kQ5_K, 64, 2, 2)
  TRANSECT_CUT(kQ5_K, 128, 2, 1)
  TRANSECT_CUT(kQ5_K, 128, 3, 1)
  TRANSECT_CUT(kQ6_K, 16, 2, 2)
  TRANSECT_CUT(kQ6_K, 32, 2, 2)
  TRANSECT_CUT(kQ6_K, 64, 2, 2)
  TRANSECT_CUT(kQ6_K, 128, 2, 1)
  TRANSECT_CUT(kQ6_K, 128, 3, 1)
  TRANSECT_CUT(kIQ4_NL, 16, 2, 2)
  TRANSECT_CUT(kIQ4_NL, 32, 2, 2)
  TRANSECT_CUT(kIQ4_NL, 64, 2, 2)
  TRANSECT_CUT(kIQ4_NL, 128, 2, 1)
  TRANSECT_CUT(kIQ4_NL, 128, 3, 1)
  TRANSECT_CUT(kMXFP4, 16, 2, 2)
  TRANSECT_CUT(kMXFP4, 32, 2, 2)
  TRANSECT_CUT(kMXFP4, 64, 2, 2)
  TRANSECT_CUT(kMXFP4, 128, 2, 1)
  TRANSECT_CUT(kMXFP4, 128, 3, 1)
  return -1;
}
