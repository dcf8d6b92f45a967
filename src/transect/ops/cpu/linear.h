// y = x W^T (+ bias) with W packed, for any number of rows of x, in float32 arithmetic.
//
// Layout. The N output rows of W are taken 16 at a time, a *row group*. Lane r of every 64-byte word belongs to output
// row r of the group, so one load feeds 16 outputs and no sum ever crosses lanes. Along K a row group is a run of
// *panels* of G inputs: the codes of the panel, then (for quantized kinds) 16 scales and 16 zeros. A row group is one
// contiguous stream, read once from start to end.
//
//   4-bit: a word holds 8 consecutive k of each row, 4 bits each     weight = scale * code + zero, one rounding
//   8-bit: a word holds 4 consecutive k of each row, 8 bits each
//   bf16:  a word holds 2;  f32: a word holds 1
//
// Order of summation. Each output is one chain of fused multiply-adds over k = 0 .. K-1, whatever the number of rows
// and whichever of the two loops below runs: a row's result is the same to the bit alone and in any batch.
#pragma once
#include <algorithm>
#include <array>
#include <utility>
#include "pool.h"
#include "simd.h"

namespace transect {

constexpr int GROUP_ROWS = 16;
constexpr int SLICES = GROUP_ROWS / LANES;  // vectors per row group: 1 with AVX-512, 2 with AVX2, 4 plain

enum Kind : int32_t { Q4_HALF = 0, Q4_FLOAT = 1, Q8_HALF = 2, Q8_FLOAT = 3, Q8_FLOAT_G16 = 4, BF16 = 5, F32 = 6 };

// How one kind is stored and decoded. `Decoded` gives the 8, 4, 2 or 1 weights vectors of a word.
template <int BITS, int PANEL_K, bool HALF_SCALES>
struct Affine {
  static constexpr int PANEL = PANEL_K, PER_WORD = 32 / BITS;
  static constexpr int SCALE_BYTES = GROUP_ROWS * (HALF_SCALES ? 2 : 4);
  static constexpr int PANEL_BYTES = PANEL / PER_WORD * 64 + 2 * SCALE_BYTES;
  vf scale, zero;
  explicit Affine(const uint8_t* panel, int slice) {
    const uint8_t* p = panel + PANEL / PER_WORD * 64 + slice * LANES * (HALF_SCALES ? 2 : 4);
    if constexpr (HALF_SCALES) {
      scale = load_f16((const f16*)p);
      zero = load_f16((const f16*)(p + SCALE_BYTES));
    } else {
      scale = load((const float*)p);
      zero = load((const float*)(p + SCALE_BYTES));
    }
  }
  template <int I>
  vf weight(vi word) const {
    vf code;
#if defined(__AVX512F__)
    if constexpr (BITS == 4 && LANES == 16) {  // a table look-up takes the low 4 bits: no mask, no conversion
      const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      code = (vf)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)word, 4 * I), table);
      return fma(code, scale, zero);
    }
#endif
    code = __builtin_convertvector((word >> (BITS * I)) & ((1 << BITS) - 1), vf);
    return fma(code, scale, zero);
  }
};
struct DenseBf16 {
  static constexpr int PANEL = 2, PER_WORD = 2, PANEL_BYTES = 64;
  explicit DenseBf16(const uint8_t*, int) {}
  template <int I>
  vf weight(vi word) const { return as_float(I == 0 ? word << 16 : word & int32_t(0xffff0000)); }
};
struct DenseF32 {
  static constexpr int PANEL = 1, PER_WORD = 1, PANEL_BYTES = 64;
  explicit DenseF32(const uint8_t*, int) {}
  template <int I>
  vf weight(vi word) const { return as_float(word); }
};

struct Packed {
  int32_t kind = F32, n = 0, k = 0;  // k is a multiple of the panel
  const uint8_t* data = nullptr;
  const float* bias = nullptr;  // n floats, or null
  int groups() const { return (n + GROUP_ROWS - 1) / GROUP_ROWS; }
};

template <class F>
auto with_kind(int kind, F f) {
  switch (kind) {
    case Q4_HALF: return f.template operator()<Affine<4, 32, true>>();
    case Q4_FLOAT: return f.template operator()<Affine<4, 32, false>>();
    case Q8_HALF: return f.template operator()<Affine<8, 32, true>>();
    case Q8_FLOAT: return f.template operator()<Affine<8, 32, false>>();
    case Q8_FLOAT_G16: return f.template operator()<Affine<8, 16, false>>();
    case BF16: return f.template operator()<DenseBf16>();
    default: return f.template operator()<DenseF32>();
  }
}

inline int64_t group_bytes(int kind, int k) {
  return with_kind(kind, [&]<class W>() { return int64_t(k / W::PANEL) * W::PANEL_BYTES; });
}

template <int I, int N, class F>
inline void unrolled(F&& f) {
  if constexpr (I < N) {
    f.template operator()<I>();
    unrolled<I + 1, N>(f);
  }
}

enum Epilogue { STORE, ADD };  // y = result, or y += result (the residual stream)

template <int MR>
inline void finish(const vf* acc, const Packed& w, int row, float* y, int64_t ldy, Epilogue epilogue) {
  const bool whole = row + LANES <= w.n;
  for (int r = 0; r < MR; r++) {
    vf v = acc[r];
    float* out = y + r * ldy + row;
    if (whole) {
      if (w.bias) v += load(w.bias + row);
      store(out, epilogue == ADD ? load(out) + v : v);
    } else {
      for (int i = 0; row + i < w.n; i++) {
        float value = v[i] + (w.bias ? w.bias[row + i] : 0.f);
        out[i] = epilogue == ADD ? out[i] + value : value;
      }
    }
  }
}

template <class W, int... G>
inline std::array<W, sizeof...(G)> decoders(const uint8_t* base, int64_t stride, int slice, std::integer_sequence<int, G...>) {
  return {W(base + G * stride, slice)...};
}

// Few rows: NG row groups and MR rows of x at once, weights decoded in registers. NG x MR independent chains hide the
// latency of the multiply-add.
template <class W, int NG, int MR>
void few_rows(const Packed& w, int group, const float* x, int64_t ldx, float* y, int64_t ldy, Epilogue epilogue) {
  const int64_t stride = int64_t(w.k / W::PANEL) * W::PANEL_BYTES;
  for (int slice = 0; slice < SLICES; slice++) {
    const uint8_t* base = w.data + group * stride;
    vf acc[NG][MR] = {};
    for (int k0 = 0; k0 < w.k; k0 += W::PANEL, base += W::PANEL_BYTES) {
      const auto decode = decoders<W>(base, stride, slice, std::make_integer_sequence<int, NG>{});
      for (int j = 0; j < W::PANEL / W::PER_WORD; j++) {
        const float* xk = x + k0 + j * W::PER_WORD;
        vi word[NG];
        for (int g = 0; g < NG; g++) word[g] = load_words(base + g * stride + 64 * j + 4 * LANES * slice);
        unrolled<0, W::PER_WORD>([&]<int I>() {
          vf weight[NG];
          for (int g = 0; g < NG; g++) weight[g] = decode[g].template weight<I>(word[g]);
          for (int r = 0; r < MR; r++) {
            const vf input = splat(xk[r * ldx + I]);
            for (int g = 0; g < NG; g++) acc[g][r] = fma(weight[g], input, acc[g][r]);
          }
        });
      }
    }
    for (int g = 0; g < NG; g++) finish<MR>(acc[g], w, (group + g) * GROUP_ROWS + slice * LANES, y, ldy, epilogue);
  }
}

// Many rows: decode one row group to float32 once, then run blocks of rows over it.
constexpr int TILE_VECTORS = 2;
constexpr int TILE_ROWS = LANES == 16 ? 8 : LANES == 8 ? 5 : 4;
constexpr int TILE_GROUPS = TILE_VECTORS > SLICES ? TILE_VECTORS / SLICES : 1;  // row groups decoded together
constexpr int TILE_COLUMNS = TILE_GROUPS * GROUP_ROWS;

template <class W>
void decode_panel(const Packed& w, int group, int count, float* out) {  // out[k][TILE_COLUMNS]
  const int64_t stride = int64_t(w.k / W::PANEL) * W::PANEL_BYTES;
  for (int g = 0; g < count; g++)
    for (int slice = 0; slice < SLICES; slice++) {
      const uint8_t* panel = w.data + (group + g) * stride;
      float* to = out + g * GROUP_ROWS + slice * LANES;
      for (int k0 = 0; k0 < w.k; k0 += W::PANEL, panel += W::PANEL_BYTES) {
        const W decode(panel, slice);
        for (int j = 0; j < W::PANEL / W::PER_WORD; j++) {
          const vi word = load_words(panel + 64 * j + 4 * LANES * slice);
          unrolled<0, W::PER_WORD>([&]<int I>() {
            store(to, decode.template weight<I>(word));
            to += TILE_COLUMNS;
          });
        }
      }
    }
}

template <int NV, int MR>
inline void tile(const Packed& w, const float* panel, int row, const float* x, int64_t ldx, float* y, int64_t ldy,
                 Epilogue epilogue) {
  vf acc[NV][MR] = {};
  for (int k = 0; k < w.k; k++) {
    vf weight[NV];
    for (int v = 0; v < NV; v++) weight[v] = load(panel + int64_t(k) * TILE_COLUMNS + v * LANES);
    for (int r = 0; r < MR; r++) {
      const vf input = splat(x[r * ldx + k]);
      for (int v = 0; v < NV; v++) acc[v][r] = fma(weight[v], input, acc[v][r]);
    }
  }
  for (int v = 0; v < NV; v++) finish<MR>(acc[v], w, row + v * LANES, y, ldy, epilogue);
}

template <int NV>
void many_rows(const Packed& w, const float* panel, int row, const float* x, int64_t ldx, float* y, int64_t ldy,
               int rows, Epilogue epilogue) {
  int r = 0;
  for (; r + TILE_ROWS <= rows; r += TILE_ROWS) tile<NV, TILE_ROWS>(w, panel, row, x + r * ldx, ldx, y + r * ldy, ldy, epilogue);
  for (; r + 4 <= rows; r += 4) tile<NV, 4>(w, panel, row, x + r * ldx, ldx, y + r * ldy, ldy, epilogue);
  for (; r < rows; r++) tile<NV, 1>(w, panel, row, x + r * ldx, ldx, y + r * ldy, ldy, epilogue);
}

constexpr int FEW = 32;         // up to here weights are decoded in registers
constexpr int CHUNK_GROUPS = LANES == 16 ? 6 : 2;  // row groups in one work item at one row

template <class W, int MR>
void few_rows_span(const Packed& w, int group, int count, const float* x, int64_t ldx, float* y, int64_t ldy, Epilogue e) {
  constexpr int NG = LANES < 16 ? 1 : MR == 1 ? 6 : MR == 2 ? 6 : MR == 4 ? 3 : 2;
  for (; count >= NG; group += NG, count -= NG) few_rows<W, NG, MR>(w, group, x, ldx, y, ldy, e);
  if constexpr (NG > 1)
    for (; count > 0; group++, count--) few_rows<W, 1, MR>(w, group, x, ldx, y, ldy, e);
}

// Row groups group .. group+count-1 of y = x W^T for all rows of x; `scratch` holds k x TILE_COLUMNS floats.
inline void linear_span(const Packed& w, int group, int count, const float* x, int64_t ldx, float* y, int64_t ldy,
                        int rows, Epilogue epilogue, float* scratch) {
  with_kind(w.kind, [&]<class W>() {
    if (rows > FEW) {
      for (int g = 0; g < count; g += TILE_GROUPS) {
        const int n = std::min(TILE_GROUPS, count - g);
        decode_panel<W>(w, group + g, n, scratch);
        for (int v = 0; v < n * SLICES; v += TILE_VECTORS) {
          const int row = (group + g) * GROUP_ROWS + v * LANES;
          if (n * SLICES - v >= TILE_VECTORS) many_rows<TILE_VECTORS>(w, scratch + v * LANES, row, x, ldx, y, ldy, rows, epilogue);
          else many_rows<1>(w, scratch + v * LANES, row, x, ldx, y, ldy, rows, epilogue);
        }
      }
      return;
    }
    int r = 0;
    for (; r + 8 <= rows; r += 8) few_rows_span<W, 8>(w, group, count, x + r * ldx, ldx, y + r * ldy, ldy, epilogue);
    if (r + 4 <= rows) { few_rows_span<W, 4>(w, group, count, x + r * ldx, ldx, y + r * ldy, ldy, epilogue); r += 4; }
    if (r + 2 <= rows) { few_rows_span<W, 2>(w, group, count, x + r * ldx, ldx, y + r * ldy, ldy, epilogue); r += 2; }
    if (r < rows) few_rows_span<W, 1>(w, group, count, x + r * ldx, ldx, y + r * ldy, ldy, epilogue);
  });
}

// How many row groups one work item takes: large enough for CHUNK_GROUPS chains, small enough that all threads are busy.
inline int chunk_groups(int groups, int threads) {
  int chunk = CHUNK_GROUPS;
  while (chunk > 1 && (groups + chunk - 1) / chunk < 2 * threads) chunk = (chunk + 1) / 2;
  return chunk;
}

// One row of W as float32: the gather of an embedding table.
inline void decode_row(const Packed& w, int row, float* out) {
  with_kind(w.kind, [&]<class W>() {
    const int slice = row % GROUP_ROWS / LANES, lane = row % LANES;
    const uint8_t* panel = w.data + int64_t(row / GROUP_ROWS) * (w.k / W::PANEL) * W::PANEL_BYTES;
    for (int k0 = 0; k0 < w.k; k0 += W::PANEL, panel += W::PANEL_BYTES) {
      const W decode(panel, slice);
      for (int j = 0; j < W::PANEL / W::PER_WORD; j++) {
        const vi word = load_words(panel + 64 * j + 4 * LANES * slice);
        unrolled<0, W::PER_WORD>([&]<int I>() { *out++ = decode.template weight<I>(word)[lane]; });
      }
    }
  });
}

}  // namespace transect
