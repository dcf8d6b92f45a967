// Y = X W^T + b for a few rows of X, up to 32 at a time, and a weight of 4-bit codes in groups, W = scale code + zero.
// bfloat16 in and out, float32 sums. Hopper. See int4_matmul.py for the arithmetic, and for when int4_matmul_hopper.cu
// is quicker.
//
// * The weight is arranged once (``arrange`` in int4_packing.py): of every 128 k, for every 16 rows, 1024 bytes of
//   codes in the order in which the tensor cores take them, then the scales and zeros. So all that a block needs of 128
//   k is one piece of memory, and one bulk copy brings it into a ring of stages in shared memory; X comes beside it, 16
//   bytes a copy.
// * One warp asks for W and X, one adds X up over every group of k (a product with ones), the others multiply. A stage
//   has three barriers: it has landed, its sums are there, all have read it.
// * With ``whole`` the warp that adds up also makes X whole numbers, in its place, and codes are multiplied as bytes
//   (int4_whole.cuh): fewer instructions of those that multiply. For 8 rows of X at a time: of 16 it was slower.
// * A warp has rows of W of its own and goes along the k of its team, so its sums stay in registers to the end. Teams
//   of warps, and the blocks of a cluster, share K; their sums are added at the end in an order that is always the
//   same. A stage is always of the same team: who waits for its next filling has seen the one before, so a bit tells
//   them apart.
// * A shift and one logic operation of three inputs make two bfloat16 of two codes: 0x4300 | c is 128 + c. Codes enter
//   the product as they are; the scale multiplies its sum once for a group, and 128 scale - zero times the sum of x is
//   taken off.
//   So there is no multiplication for a weight, and no weight is ever rounded. These 7 instructions for 8 codes of 16
//   rows and the products are what bounds the kernel where memory does not; products of two sixteens of rows take
//   turns, because one waits 33 cycles for the one before.
// * With 16 rows of X, 5 instructions do: a code is a subnormal bfloat16 as it stands, c 2^-133, and one four bits up
//   is 16 c 2^-133; tensor cores multiply both exactly. X is taken 2^64 times, so that sums are normal numbers: what is
//   below 2^-57 loses digits, what reaches 2^64 is infinite.
// * Few registers and less than half of the shared memory leave room for the block of the next launch beside this one.
//   It is let in (``late``) when what remains to be asked for here is little: then it fills its ring while this one
//   ends, where its copies would else have delayed the ones that this one waits for.

#include "../../../lang/few_rows.cuh"
#include "../../../lang/hopper.cuh"
#include "int4_codes.cuh"
#include "int4_whole.cuh"

using namespace few_rows;
using namespace hopper;

// One lane of a warp arrives at a barrier for all of them. The sanitizer's racecheck does not follow that: for it, all
// may.
#ifdef TRANSECT_EVERY_LANE
constexpr int kArrivals = 32;
#else
constexpr int kArrivals = 1;
#endif

__device__ __forceinline__ void warp_arrives(uint32_t barrier, int lane) {
  __syncwarp();
  if (lane < kArrivals) barrier_arrive(barrier);
}

// Whether codes are multiplied as subnormal numbers.
template <int NT>
constexpr bool kSubnormal = NT == 2;
constexpr float kUnscaled = 0x1p69f, kUnscaled8 = 0x1p65f;  // 2^133 / 2^64, and of rows whose codes stand four bits up
// Whether a stage has room for rows of X past the last one: their places then follow from the first one's.
template <int NT, bool WHOLE>
constexpr bool kAllRows = NT == 2 || WHOLE;
// Whether there is a gate in the epilogue: where registers are to spare.
template <int THREADS, int NT, int RB>
constexpr bool kGates = NT == 1 && RB == 2 && THREADS <= 320;
// Blocks of a multiprocessor that the registers are shared out for.
template <int NT>
constexpr int kBlocks = NT <= 2 ? 2 : 1;

__device__ __forceinline__ void write16(uint32_t to, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}

__device__ __forceinline__ void add16(float (&v)[4], uint32_t from) {
  float a, b, c, d;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "r"(from) : "memory");
  v[0] += a, v[1] += b, v[2] += c, v[3] += d;
}

__device__ __forceinline__ uint32_t times_2_64(uint32_t pair) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(0x5f805f80u));
  return product;
}

// RB: sixteens of rows of W for a warp at a time.
template <int GROUP, int THREADS, int NT, int RB, bool WHOLE>
__global__ void __launch_bounds__(THREADS, kBlocks<NT>)
    int4_rows(const __nv_bfloat16* x, const unsigned char* weight, const __nv_bfloat16* bias, __nv_bfloat16* out, int M,
              int N, int K, long long x_stride, int per, int row_tiles, int ranks, int warps, int teams, int passes,
              int wide, int stages, int ahead, int late, int gated, Norm norm) {
#if __CUDA_ARCH__ >= 900
  constexpr int ROWS = NT * 8, TILE = kTile<GROUP>, GROUPS = kChunk / GROUP;
  constexpr bool ALL_ROWS = kAllRows<NT, WHOLE>, SUBNORMAL = kSubnormal<NT>;
  static_assert(!WHOLE || NT == 1);
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x % 32, self = threadIdx.x / 32, takers = warps * teams;
  const int shift = __ffs(ranks) - 1, rank = blockIdx.x & (ranks - 1), tile_of = blockIdx.x >> shift;
  const int share = row_tiles == 1 ? tile_of : tile_of / row_tiles, row_tile = tile_of - share * row_tiles;
  const int m0 = row_tile * ROWS, rows = min(ROWS, M - m0);
  const int sixteens = (N + 15) / 16, first = share * per, count = min(per, sixteens - first);
  const int chunks = K / kChunk, chunk_first = chunks * rank >> shift,
            steps = (chunks * (rank + 1) >> shift) - chunk_first;
  const int total = passes * steps;
  // A stage: the tiles of W, X, and what is known of X in each group: the sum, of whole numbers the unit too.
  const int x_place = wide * TILE, sums_at = x_place + (ALL_ROWS ? ROWS : min(ROWS, M)) * kXPitch;
  const int stage_bytes = sums_at + GROUPS * ROWS * (WHOLE ? 8 : 4);
  const int own = (wide + ranks - 1) >> shift;  // tiles that a rank adds up, at most
  uint32_t full = shared_address(memory);
  asm volatile("" : "+r"(full));  // not to be made anew in every step
  const uint32_t empty = full + stages * 8, summed = full + stages * 16, added = full + stages * 24;
  float* inverse = (float*)(memory + stages * 24 + 8);  // 1 / rms of up to 8 rows of X
  const uint32_t parts = full + (stages * 24 + 40 + 127) / 128 * 128;  // [own tiles][ranks][NT][32 lanes][4]
  uint32_t ring = parts + (ranks > 1 ? own * ranks * NT * 512 : 0);
  asm volatile("" : "+r"(ring));  // not to be made anew in every step
  const int trigger = late < 0 ? 0 : total - late;  // the step at which the next launch is let in

  auto pass_of = [&](int i) { return passes == 1 ? 0 : i / steps; };
  auto load_w = [&](int pass, int step, int slot) {
    const int tiles = max(0, min(wide, count - pass * wide));
    const size_t tile = (size_t)(chunk_first + step) * sixteens + first + pass * wide;
    barrier_expect(full + slot * 8, tiles * TILE);
    if (tiles) copy_bulk(ring + slot * stage_bytes, weight + tile * TILE, tiles * TILE, full + slot * 8);
  };
  if (self == takers) {
    // The weights of the first stages are asked for before anything else.
    for (int s = lane; s < stages; s += 32) {
      barrier_init(full + s * 8, 33);
      barrier_init(summed + s * 8, WHOLE ? kArrivals : 4);
      barrier_init(empty + s * 8, (warps + 1) * kArrivals);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (lane == 0 && ranks > 1) expect_sent(added, ((wide - rank + ranks - 1) >> shift) * ranks * NT * 512);
    __syncwarp();
    if (trigger < stages) let_next_begin();
    if (!ahead) wait_for_previous();
    for (int i = lane; i < min(stages, total); i += 32) {
      const int pass = pass_of(i);
      load_w(pass, i - pass * steps, i);
    }
    __syncwarp();
  }
  __syncthreads();
  if (ranks > 1) arrive_in_cluster();

  if (self == takers) {
    // This warp's steps are the pace of all: no more here than has to be. A lane copies 16 bytes of every other row of
    // X.
    const unsigned char* x_from =
        (const unsigned char*)(x + (m0 + lane / 16) * x_stride + (long long)chunk_first * kChunk + lane % 16 * 8);
    long long two_rows = x_stride * 4;
    asm volatile("" : "+l"(two_rows));  // not to be made anew in every step
    const int copies = (rows - lane / 16 + 1) / 2;
    const uint32_t x_to = ring + x_place + lane / 16 * kXPitch + lane % 16 * 16;
    int slot = 0, parity = 1, x_step = 0, w_pass = pass_of(stages), w_step = stages - w_pass * steps;
    if (ahead) wait_for_previous();
#pragma unroll 1
    for (int i = 0; i < total; i++) {
      if (i >= stages) {
        barrier_wait(empty + slot * 8, parity);
        if (lane == 0) load_w(w_pass, w_step, slot);
        __syncwarp();
        if (++w_step == steps) w_step = 0, w_pass++;
      }
      const unsigned char* from = x_from;
#pragma unroll
      for (int j = 0; j < NT * 4; j++, from += two_rows)
        if (j < copies) copy16(x_to + slot * stage_bytes + j * 2 * kXPitch, from, true);
      copies_arrive(full + slot * 8);
      x_from += kChunk * 2;
      if (++x_step == steps) x_step = 0, x_from -= steps * kChunk * 2;
      if (i == trigger && i >= stages) let_next_begin();
      if (++slot == stages) slot = 0, parity ^= 1;
    }
    __syncwarp();
    if (ranks > 1) wait_for_cluster();
    return;
  }

  uint32_t x_at[NT];  // rows past the end are the last one again, or were never filled: what they give is not stored
#pragma unroll
  for (int tile = 0; tile < NT; tile++)
    x_at[tile] =
        x_place + (ALL_ROWS ? tile * 8 + lane % 8 : min(tile * 8 + lane % 8, rows - 1)) * kXPitch + lane / 8 * 16;
  const uint32_t ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  if (self == takers + 1) {
    // X as whole numbers; or its sum over every group of k, as a product with ones.
    for (int i = 0, slot = 0, parity = 0; i < total; i++) {
      barrier_wait(full + slot * 8, parity);
      const uint32_t from = ring + slot * stage_bytes;
      if constexpr (WHOLE) {
        make_whole<GROUP>(from + x_place, from + sums_at, lane);
        warp_arrives(summed + slot * 8, lane);
      } else {
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
          for (int tile = 0; tile < NT; tile++) {
            float sum[2][4] = {};
#pragma unroll
            for (int h = 0; h < GROUP / 32; h++) {
              uint32_t b[4];
              read_matrices(b, from + x_at[tile] + g * GROUP * 2 + h * 64);
              multiply(sum[0], ones, b[0], b[1]);
              multiply(sum[1], ones, b[2], b[3]);
            }
            if (lane < 4)
              asm volatile(
                  "st.shared.v2.f32 [%0], {%1, %2};" ::"r"(from + sums_at + (g * ROWS + tile * 8 + lane * 2) * 4),
                  "f"(sum[0][0] + sum[1][0]), "f"(sum[0][1] + sum[1][1])
                  : "memory");
          }
        if (lane < 4) barrier_arrive(summed + slot * 8);  // those that wrote
      }
      warp_arrives(empty + slot * 8, lane);
      if (++slot == stages) slot = 0, parity ^= 1;
    }
    __syncwarp();
    if (ranks > 1) wait_for_cluster();
    return;
  }

  constexpr bool NORMS = NT == 1;
  auto all_takers = [&] { asm volatile("bar.sync 1, %0;" ::"r"(takers * 32) : "memory"); };
  if (NORMS && (norm.x_squares || norm.residual)) {
    wait_for_previous();
    if (norm.x_squares && self == 0) inverse_rms(inverse, norm.x_squares, norm.eps, m0, rows, K, lane, 32);
    all_takers();
  }
  const int warp = self % warps, team = self / warps;
  const int my_tile = min(warp * RB, wide - RB);  // where there are too few, two warps do the same
  float y[RB][NT][4] = {};
  auto divided = [&](float sum, int m) { return NORMS && norm.x_squares ? sum * inverse[m] : sum; };
  // To the residual stream: the sum and the stream there, that times the next norm's weight, and its square.
  auto add_to_stream = [&](const float (&v)[4], int t) {
    float square[2] = {};
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int n = (first + t) * 16 + c / 2 * 8 + lane / 4, m = lane % 4 * 2 + c % 2;
      if (m >= rows) continue;
      const size_t at = (size_t)(m0 + m) * N + n;
      const __nv_bfloat16 total = __float2bfloat16(v[c] + __bfloat162float(norm.residual[at]));
      const float x = __bfloat162float(total);
      out[at] = total;
      norm.scaled[at] = __float2bfloat16(x * __bfloat162float(norm.scale[n]));
      square[c % 2] += x * x;
    }
#pragma unroll
    for (int c = 0; c < 2; c++) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) square[c] += __shfl_xor_sync(0xffffffffu, square[c], lanes);
      const int m = lane % 4 * 2 + c;
      if (lane < 4 && m < rows) norm.squares[(size_t)(m0 + m) * (N / 16) + first + t] = square[c];
    }
  };
  auto store = [&](const float (&v)[4], int t, int tile, int n_tiles) {
    if (t >= n_tiles) return;
    if (NORMS && norm.residual) {
      add_to_stream(v, t);
      return;
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int n = (first + t) * 16 + c / 2 * 8 + lane / 4, m = tile * 8 + lane % 4 * 2 + c % 2;
      if (n < N && m < rows)
        out[(size_t)(m0 + m) * N + n] = __float2bfloat16(divided(v[c], m) + (bias ? __bfloat162float(bias[n]) : 0.f));
    }
  };
  // Sixteens of rows of W alternate between gate and up, so a warp with two of them holds both of an output.
  auto store_gated = [&](const float (&gate)[4], const float (&up)[4], int t, int tile, int n_tiles) {
    if (t >= n_tiles) return;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int n = (first + t) / 2 * 16 + c / 2 * 8 + lane / 4, m = tile * 8 + lane % 4 * 2 + c % 2;
      if (n >= N / 2 || m >= rows) continue;
      const float g = divided(gate[c], m), u = divided(up[c], m);
      out[(size_t)(m0 + m) * (N / 2) + n] = __float2bfloat16(g / (1 + __expf(-g)) * u);
    }
  };
  // Where a lane reads in a stage; with registers to spare not to be made anew in every step.
  const uint32_t tiles_at = ring + my_tile * TILE;
  uint32_t w_here = tiles_at + lane * 16, scale_here = tiles_at + 1024 + lane / 4 * 8;
  uint32_t x_here = ring + (WHOLE ? x_place + lane * 16 : x_at[0]),
           sums_here = ring + sums_at + lane % 4 * (WHOLE ? 16 : 8);
  if (NT <= 2) asm volatile("" : "+r"(w_here), "+r"(scale_here), "+r"(x_here), "+r"(sums_here));
  int slot = team, parity = 0;
  for (int pass = 0; pass < passes; pass++) {
    for (int step = team; step < steps; step += teams) {
      barrier_wait(full + slot * 8, parity);
      const uint32_t stage = slot * stage_bytes;
      if constexpr (WHOLE) {
        int high[RB][4] = {}, low[RB][4] = {};
        auto end_group = [&](int g) {
          const uint4 about = read16(sums_here + stage + g * 64);  // unit and sum of two rows of X
#pragma unroll
          for (int r = 0; r < RB; r++) {
            const uint2 both = read8(scale_here + stage + r * TILE + g * 64);
#pragma unroll
            for (int c = 0; c < 4; c++) {
              // Zero, scale: bfloat16 is the upper half of float32. Codes of the rows 8 below were multiplied as 16 c.
              const uint32_t word = c < 2 ? both.x : both.y;
              const float scale = __uint_as_float(word << 16) * (c < 2 ? 1 : 0.0625f);
              const float unit = __uint_as_float(c % 2 ? about.z : about.x),
                          sum = __uint_as_float(c % 2 ? about.w : about.y);
              const float dot = (float)(high[r][c] * 256 + low[r][c]);
              const float rest = fmaf(__uint_as_float(word & 0xffff0000u), sum, y[r][0][c]);
              y[r][0][c] = fmaf(scale * unit, dot, rest);
              high[r][c] = low[r][c] = 0;
            }
          }
        };
#pragma unroll
        for (int half = 0; half < 2; half++) {  // 64 k
          uint4 w[RB];
#pragma unroll
          for (int r = 0; r < RB; r++) w[r] = read16(w_here + stage + r * TILE + half * 512);
          if (half == 0) barrier_wait(summed + slot * 8, parity);
          const uint4 above = read16(x_here + stage + half * 512);         // high bytes of X
          const uint4 below = read16(x_here + stage + half * 512 + 1024);  // low ones
#pragma unroll
          for (int q = 0; q < 2; q++) {  // 32 k
#pragma unroll
            for (int r = 0; r < RB; r++) {
              const uint32_t w0 = q ? w[r].z : w[r].x, w1 = q ? w[r].w : w[r].y;
              const uint32_t a[4] = {w0 & 0x0f0f0f0fu, w0 & 0xf0f0f0f0u, w1 & 0x0f0f0f0fu, w1 & 0xf0f0f0f0u};
              multiply_bytes<true>(high[r], a, q ? above.z : above.x, q ? above.w : above.y);
              multiply_bytes<false>(low[r], a, q ? below.z : below.x, q ? below.w : below.y);
            }
            const int done = half * 64 + q * 32 + 32;
            if (done % GROUP == 0) end_group(done / GROUP - 1);
          }
        }
      } else {
        float dot[RB][NT][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {  // 64 k
          uint4 w[RB];
#pragma unroll
          for (int r = 0; r < RB; r++) w[r] = read16(w_here + stage + r * TILE + half * 512);
          uint32_t b[NT][2][4];
#pragma unroll
          for (int h = 0; h < 2; h++)
#pragma unroll
            for (int tile = 0; tile < NT; tile++) {
              const uint32_t here = ALL_ROWS || tile == 0 ? x_here + tile * 8 * kXPitch : ring + x_at[tile];
              read_matrices(b[tile][h], here + stage + half * 128 + h * 64);
#pragma unroll
              for (int e = 0; e < 4; e++)
                if (SUBNORMAL) b[tile][h][e] = times_2_64(b[tile][h][e]);
            }
#pragma unroll
          for (int q = 0; q < 4; q++) {
#pragma unroll
            for (int r = 0; r < RB; r++) {
              const uint32_t word = q == 0 ? w[r].x : q == 1 ? w[r].y : q == 2 ? w[r].z : w[r].w;
              uint32_t a[4];
              if constexpr (SUBNORMAL) {
                const uint32_t rest = word >> 8;
                a[0] = word & 0x000f000fu, a[1] = word & 0x00f000f0u, a[2] = rest & 0x000f000fu,
                a[3] = rest & 0x00f000f0u;
              } else {
                a[0] = as_pair(word), a[1] = as_pair(word >> 4), a[2] = as_pair(word >> 8), a[3] = as_pair(word >> 12);
              }
#pragma unroll
              for (int tile = 0; tile < NT; tile++)
                multiply(dot[r][tile], a, b[tile][q / 2][q % 2 * 2], b[tile][q / 2][q % 2 * 2 + 1]);
            }
            const int done = half * 64 + q * 16 + 16, g = done / GROUP - 1;
            if (done % GROUP == 0) {
              if (g == 0) barrier_wait(summed + slot * 8, parity);
              float2 sum[NT];
#pragma unroll
              for (int tile = 0; tile < NT; tile++) {
                const uint2 v = read8(sums_here + stage + (g * ROWS + tile * 8) * 4);
                sum[tile] = make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
              }
#pragma unroll
              for (int r = 0; r < RB; r++) {
                // Scale and zero of this lane's rows, lane / 4 and 8 below: bfloat16 is the upper half of float32.
                const uint2 both = read8(scale_here + stage + r * TILE + g * 64);
                float s0 = __uint_as_float(both.x << 16), s1 = __uint_as_float(both.y << 16);
                float z0 = __uint_as_float(both.x & 0xffff0000u), z1 = __uint_as_float(both.y & 0xffff0000u);
                if (SUBNORMAL) s0 *= kUnscaled, s1 *= kUnscaled8;
                else z0 = fmaf(-128.f, s0, z0), z1 = fmaf(-128.f, s1, z1);
#pragma unroll
                for (int tile = 0; tile < NT; tile++)
#pragma unroll
                  for (int c = 0; c < 4; c++) {
                    const float rest = fmaf(c < 2 ? z0 : z1, c % 2 ? sum[tile].y : sum[tile].x, y[r][tile][c]);
                    y[r][tile][c] = fmaf(c < 2 ? s0 : s1, dot[r][tile][c], rest);
                    dot[r][tile][c] = 0;
                  }
              }
            }
          }
        }
      }
      warp_arrives(empty + slot * 8, lane);
      slot += teams;
      if (slot >= stages) slot -= stages, parity ^= 1;
    }
    if (teams > 1) {
      // The other teams leave their sums in the place of the ring; the first one adds them in order.
      const uint32_t left = ring + warp * RB * NT * 512 + lane * 16;
      all_takers();
      if (team > 0) {
#pragma unroll
        for (int r = 0; r < RB; r++)
#pragma unroll
          for (int tile = 0; tile < NT; tile++)
            write16(left + (((team - 1) * warps * RB + r) * NT + tile) * 512, y[r][tile]);
      }
      all_takers();
      if (team == 0) {
#pragma unroll 1
        for (int t = 0; t < teams - 1; t++)
#pragma unroll
          for (int r = 0; r < RB; r++)
#pragma unroll
            for (int tile = 0; tile < NT; tile++) add16(y[r][tile], left + ((t * warps * RB + r) * NT + tile) * 512);
      }
    }
    if (ranks == 1) {
      if (team == 0) {
        const int t = pass * wide + my_tile, n_tiles = min(count, (pass + 1) * wide);
        if (kGates<THREADS, NT, RB> && gated) {
#pragma unroll
          for (int tile = 0; tile < NT; tile++) store_gated(y[0][tile], y[RB - 1][tile], t, tile, n_tiles);
        } else {
#pragma unroll
          for (int r = 0; r < RB; r++)
#pragma unroll
            for (int tile = 0; tile < NT; tile++) store(y[r][tile], t + r, tile, n_tiles);
        }
      }
#pragma unroll
      for (int r = 0; r < RB; r++)
#pragma unroll
        for (int tile = 0; tile < NT; tile++)
#pragma unroll
          for (int c = 0; c < 4; c++) y[r][tile][c] = 0;
    }
  }
  if (ranks > 1) {
    // Tile t belongs to rank t % ranks: every block sends its sums there, where they are added in order.
    wait_for_cluster();
    if (team == 0) {
#pragma unroll
      for (int r = 0; r < RB; r++) {
        const int t = my_tile + r, owner = t & (ranks - 1);
        if (t < warp * RB) continue;  // the warp before sends it
        const uint32_t to = parts + ((t & -ranks) + rank) * NT * 512 + lane * 16;
#pragma unroll
        for (int tile = 0; tile < NT; tile++) {
          const float(&v)[4] = y[r][tile];
          send(to + tile * 512, make_float4(v[0], v[1], v[2], v[3]), added, owner);
        }
      }
    }
    const int mine = (wide - rank + ranks - 1) >> shift;
    if (mine > 0) wait_for_sent(added);
#pragma unroll 1
    for (int e = self; e < mine * NT; e += takers) {
      float v[4] = {};
#pragma unroll 4
      for (int s = 0; s < ranks; s++) add16(v, parts + ((e / NT * ranks + s) * NT + e % NT) * 512 + lane * 16);
      store(v, e / NT * ranks + rank, e % NT, count);
    }
  }
#endif
}

template <int GROUP, int THREADS, int NT, int RB, bool WHOLE>
static int start(const void* x, const void* weight, const void* bias, void* out, int M, int N, int K,
                 long long x_stride, int warps, int teams, int stages, int per, int ranks, int late, int gated,
                 Norm norm, int dependent, void* stream) {
  constexpr int ROWS = NT * 8;
  const int shares = ((N + 15) / 16 + per - 1) / per, row_tiles = (M + ROWS - 1) / ROWS;
  const int passes = (per + warps * RB - 1) / (warps * RB), wide = (per + passes - 1) / passes;
  const int held = kAllRows<NT, WHOLE> || M > ROWS ? ROWS : M;
  const int stage_bytes = wide * kTile<GROUP> + held * kXPitch + kChunk / GROUP * ROWS * (WHOLE ? 8 : 4);
  const int parts = ranks > 1 ? (wide + ranks - 1) / ranks * ranks * NT * 512 : 0;
  const int ring = stages * stage_bytes, left = (teams - 1) * warps * RB * NT * 512;
  const int shared = (stages * 24 + 40 + 127) / 128 * 128 + parts + (left > ring ? left : ring);
  if (shared > kMostShared || (ranks * teams > 1 && passes > 1) || (warps * teams + 2) * 32 > THREADS ||
      stages % teams || wide < RB)
    return -1;
  if ((norm.residual || norm.x_squares) && NT > 1) return -1;
  if (norm.residual && (N % 16 || bias || gated || !norm.scale || !norm.scaled || !norm.squares)) return -1;
  if (gated && (!kGates<THREADS, NT, RB> || ranks > 1 || per % 2 || wide % 2 || N % 32 || bias)) return -1;
  return (int)launch(int4_rows<GROUP, THREADS, NT, RB, WHOLE>, shares * row_tiles * ranks, (warps * teams + 2) * 32,
                     shared, ranks, dependent > 0, stream, (const __nv_bfloat16*)x, (const unsigned char*)weight,
                     (const __nv_bfloat16*)bias, (__nv_bfloat16*)out, M, N, K, x_stride, per, row_tiles, ranks, warps,
                     teams, passes, wide, stages, (int)(dependent > 1), late, gated, norm);
}

// How many clusters of ``size`` blocks, one on a multiprocessor, the device runs at once.
extern "C" int transect_int4_clusters(int size) {
  return clusters_at_once(int4_rows<128, 320, 1, 2, false>, size, 320);
}

// x [M, K] with x_stride between rows, a multiple of 8; weight as ``arrange`` makes it for N rows and groups of
// ``group`` (32, 64 or 128) k; out [M, N] contiguous; bias [N] or null; K a multiple of 128. ``rows``: of X at a time
// (8, 16 or 32); ``warps`` of a team, ``teams`` that share K (12 warps in all, 6 with narrower groups or 3
// ``columns``); ``columns``: sixteens of rows of W for a warp at a time, 2, or 3 with 16 ``rows`` and groups of 128;
// ``stages`` of the ring, a multiple of ``teams``; ``per``: sixteens of rows of W for a block, 2 or more; ``ranks``:
// blocks that share K (1, 2, 4 or 8). ``late``: the next launch may begin when so many stages or fewer remain to be
// asked for; negative: at once. ``whole``: 1 for X as whole numbers, with 8 ``rows``. ``gated``: 1 where the sixteens
// of rows of W are gate, up, gate, up ...: out is silu(gate) up [M, N / 2]; with up to 8 rows, 1 rank, 2 columns, at
// most 8 warps and no bias. ``residual`` [M, N], ``scale`` [N], ``scaled`` [M, N], ``squares`` [M, N / 16],
// ``x_squares`` [M, K / 16], ``eps``: see ``Norm``; null for none, with up to 8 rows. ``dependent``: 0 an ordinary
// launch, 1 a dependent one, 2 one that asks for W before the kernel before has ended (which must not write W). Returns
// a cudaError_t, or -1 for what it does not take.
extern "C" int transect_int4_matmul(const void* x, const void* weight, const void* bias, void* out, int M, int N, int K,
                                    int group, long long x_stride, int rows, int warps, int teams, int stages, int per,
                                    int ranks, int late, int whole, int columns, int gated, const void* residual,
                                    const void* scale, void* scaled, void* squares, const void* x_squares, float eps,
                                    int dependent, void* stream) {
  const Norm norm = {(const __nv_bfloat16*)residual, (const __nv_bfloat16*)scale,
                     (__nv_bfloat16*)scaled,         (float*)squares,
                     (const float*)x_squares,        eps};
  if (M < 1 || N < 1 || K < kChunk || K % kChunk || x_stride % 8 || per < 1 || ranks < 1 || ranks > 8 ||
      (ranks & (ranks - 1)) || warps < 1 || stages < 1 || teams < 1 || K / kChunk < ranks * teams)
    return -1;
  const int takers = warps * teams;
  const int threads = group < 128 || columns > 2 ? 256 : takers <= 8 ? 320 : whole && takers <= 10 ? 384 : 448;
#define TRANSECT_INT4(GROUP, THREADS, NT, RB, WHOLE)                                                                \
  if (group == GROUP && threads == THREADS && rows == NT * 8 && columns == RB && (whole != 0) == WHOLE)             \
    return start<GROUP, THREADS, NT, RB, WHOLE>(x, weight, bias, out, M, N, K, x_stride, warps, teams, stages, per, \
                                                ranks, late, gated, norm, dependent, stream);
#define TRANSECT_WARPS(GROUP, THREADS)       \
  TRANSECT_INT4(GROUP, THREADS, 1, 2, true)  \
  TRANSECT_INT4(GROUP, THREADS, 1, 2, false) \
  TRANSECT_INT4(GROUP, THREADS, 2, 2, false) \
  TRANSECT_INT4(GROUP, THREADS, 4, 2, false)
  TRANSECT_WARPS(128, 320)
  TRANSECT_WARPS(128, 448)
  TRANSECT_INT4(128, 384, 1, 2, true)  // with 448 it would spill a register
  TRANSECT_INT4(128, 256, 2, 3, false)
  TRANSECT_WARPS(64, 256)
  TRANSECT_WARPS(32, 256)
  return -1;
}
