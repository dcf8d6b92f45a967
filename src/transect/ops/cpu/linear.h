// y = x W^T (+ bias) with W packed (kinds.h), for any number of rows of x, in float32 arithmetic or with x rounded to
// bfloat16.
//
// Order of summation. In float32 each output is one chain of fused multiply-adds over k = 0 .. K-1, for any number of rows
// and in both loops below. So a row's result has the same bits alone and in any batch. The same holds for rounded inputs,
// where the columns that share a scale are summed first.
#pragma once
#include <algorithm>
#include <array>
#include <utility>
#include "packed.h"

namespace transect {

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

// The same panel of neighbouring row groups, and the same group of each of these panels.
template <class W, int... G>
inline std::array<W, sizeof...(G)> panels_of(const uint8_t* base, int64_t stride, int slice, std::integer_sequence<int, G...>) {
  return {W(base + G * stride, slice)...};
}
template <class W, size_t N, int... G>
inline auto groups_of(const std::array<W, N>& panels, const uint8_t* base, int64_t stride, int p, int slice,
                      std::integer_sequence<int, G...>) {
  using Group = std::decay_t<decltype(panels[0].group(base, p, slice))>;
  return std::array<Group, N>{panels[G].group(base + G * stride, p, slice)...};
}

// Prefetches the weights of NG row groups that are read side by side, AHEAD bytes beyond ``done``; past the end of a row
// group, those of the row group NG further on. The hardware prefetcher follows few streams, and does not jump between them.
constexpr int AHEAD = 2048;
template <int NG, int BYTES>
inline void ask_ahead(const uint8_t* start, int64_t stride, int64_t done) {
  const int64_t at = done + AHEAD;
  const uint8_t* from = start + at + (at >= stride ? (NG - 1) * stride : 0);
  for (int g = 0; g < NG; g++)
    for (int b = 0; b < BYTES; b += 64) __builtin_prefetch(from + g * stride + b);
}

// Few rows: NG row groups and MR rows of x at once, weights decoded in registers. NG x MR independent chains hide the
// latency of the multiply-add.
template <class W, int NG, int MR>
void few_rows(const Packed& w, int group, const float* x, int64_t ldx, float* y, int64_t ldy, Epilogue epilogue,
              Prefetches* ahead) {
  const int64_t stride = int64_t(w.k / W::PANEL) * W::PANEL_BYTES;
  for (int slice = 0; slice < SLICES; slice++) {
    const uint8_t* base = w.data + group * stride;
    vf acc[NG][MR] = {};
    const float* xk = x;
    for (int k0 = 0; k0 < w.k; k0 += W::PANEL, base += W::PANEL_BYTES) {
      if (ahead && k0 % ASKED_COLUMNS == 0) ahead->some();
      const auto panels = panels_of<W>(base, stride, slice, std::make_integer_sequence<int, NG>{});
      for (int p = 0; p < W::GROUPS; p++) {
        if (slice == 0) {
          constexpr int BYTES = W::PANEL_BYTES / W::GROUPS;
          ask_ahead<NG, BYTES>(w.data + group * stride, stride, base - w.data - group * stride + p * BYTES);
        }
        const auto groups = groups_of(panels, base, stride, p, slice, std::make_integer_sequence<int, NG>{});
        each_word<W>([&](auto j) {
          decltype(W::word(base, p, j, slice)) word[NG];
          for (int g = 0; g < NG; g++) word[g] = W::word(base + g * stride, p, j, slice);
          unrolled<0, W::PER_WORD>([&]<int I>() {
            vf weight[NG];
            for (int g = 0; g < NG; g++) weight[g] = groups[g].template weight<I>(word[g]);
            for (int r = 0; r < MR; r++) {
              const vf input = splat(xk[r * ldx + I]);
              for (int g = 0; g < NG; g++) acc[g][r] = fma(weight[g], input, acc[g][r]);
            }
          });
          xk += W::PER_WORD;
        });
      }
    }
    for (int g = 0; g < NG; g++) finish<MR>(acc[g], w, (group + g) * GROUP_ROWS + slice * LANES, y, ldy, epilogue);
  }
}

// Many rows: decode one row group to float32 once, then run blocks of rows over it.
constexpr int TILE_ROWS = LANES == 16 ? 8 : LANES == 8 ? 5 : 4;

template <class W>
void decode_panel(const Packed& w, int group, int count, float* out) {  // out[k][TILE_COLUMNS]
  const int64_t stride = int64_t(w.k / W::PANEL) * W::PANEL_BYTES;
  for (int g = 0; g < count; g++)
    for (int slice = 0; slice < SLICES; slice++) {
      const uint8_t* panel = w.data + (group + g) * stride;
      float* to = out + g * GROUP_ROWS + slice * LANES;
      for (int k0 = 0; k0 < w.k; k0 += W::PANEL, panel += W::PANEL_BYTES)
        each_weight<W>(panel, slice, [&](vf weight) {
          store(to, weight);
          to += TILE_COLUMNS;
        });
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

template <class W, int MR>
void few_rows_span(const Packed& w, int group, int count, const float* x, int64_t ldx, float* y, int64_t ldy, Epilogue e,
                   Prefetches* ahead) {
  constexpr int NG = LANES == 4 ? 1 : LANES == 8 ? (MR == 1 ? 4 : MR == 2 ? 2 : 1) : MR <= 2 ? 4 : 2;
  for (; count >= NG; group += NG, count -= NG) few_rows<W, NG, MR>(w, group, x, ldx, y, ldy, e, ahead);
  if constexpr (NG > 1)
    for (; count > 0; group++, count--) few_rows<W, 1, MR>(w, group, x, ldx, y, ldy, e, ahead);
}

template <class W>
void linear_span_of(const Packed& w, int group, int count, const float* x, int64_t ldx, float* y, int64_t ldy, int rows,
                    Epilogue epilogue, float* scratch, Prefetches* ahead) {
  if (rows > FEW) {
    if (ahead) ahead->all();
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
  for (; r + 8 <= rows; r += 8) few_rows_span<W, 8>(w, group, count, x + r * ldx, ldx, y + r * ldy, ldy, epilogue, ahead);
  if (r + 4 <= rows) { few_rows_span<W, 4>(w, group, count, x + r * ldx, ldx, y + r * ldy, ldy, epilogue, ahead); r += 4; }
  if (r + 2 <= rows) { few_rows_span<W, 2>(w, group, count, x + r * ldx, ldx, y + r * ldy, ldy, epilogue, ahead); r += 2; }
  if (r < rows) few_rows_span<W, 1>(w, group, count, x + r * ldx, ldx, y + r * ldy, ldy, epilogue, ahead);
}

// Inputs in bfloat16: NG row groups and MR rows of x at once. Pairs of weights without their scale are decoded in
// registers, at half an instruction for each column of 16 outputs, so that many rows need no loop of their own.
template <class W, int NG, int MR>
void rounded_rows(const Packed& w, int group, const Inputs& x, float* y, int64_t ldy, Epilogue epilogue) {
  constexpr int HALF = W::PER_WORD / 2;
  constexpr auto NUMBERS = std::make_integer_sequence<int, NG>{};
  const int64_t stride = int64_t(w.k / W::PANEL) * W::PANEL_BYTES;
  const uint8_t* start = w.data + group * stride;
  const int32_t* pairs = x.rounded;
  const float* sums = (const float*)(x.rounded + rounded_words<0>(w.k));
  vf acc[NG][MR] = {};
  for (const uint8_t* base = start; base != start + stride; base += W::PANEL_BYTES) {
    const auto panels = panels_of<W>(base, stride, 0, NUMBERS);
    for (int p = 0; p < W::GROUPS; p++) {
      constexpr int BYTES = W::PANEL_BYTES / W::GROUPS;
      ask_ahead<NG, BYTES>(start, stride, base - start + p * BYTES);
      const auto groups = groups_of(panels, base, stride, p, 0, NUMBERS);
      vf own[NG][MR] = {};
      vf(&part)[NG][MR] = W::SCALED ? own : acc;
      each_word<W>([&](auto j) {
        decltype(W::word(base, p, j, 0)) word[NG];
        for (int g = 0; g < NG; g++) word[g] = W::word(base + g * stride, p, j, 0);
        unrolled<0, HALF>([&]<int I>() {
          vi weight[NG];
          for (int g = 0; g < NG; g++) weight[g] = groups[g].template pair<I>(word[g]);
          for (int r = 0; r < MR; r++) {
            const vi input = pairs[r * x.ldr + I] - vi{};
            for (int g = 0; g < NG; g++) part[g][r] = dot(weight[g], input, part[g][r]);
          }
        });
        pairs += HALF;
      });
      for (int g = 0; W::SCALED && g < NG; g++)
        for (int r = 0; r < MR; r++) {
          if constexpr (W::SCALED) acc[g][r] = fma(part[g][r], groups[g].scale, acc[g][r]);
          if constexpr (W::SUMMED > 0) acc[g][r] = fma(splat(sums[r * x.ldr]), groups[g].pair_zero(), acc[g][r]);
        }
      sums++;
    }
  }
  for (int g = 0; g < NG; g++) finish<MR>(acc[g], w, (group + g) * GROUP_ROWS, y, ldy, epilogue);
}

template <class W, int MR>
void rounded_rows_span(const Packed& w, int group, int count, const Inputs& x, float* y, int64_t ldy, Epilogue epilogue) {
  constexpr int NG = MR <= 2 ? 4 : 2;
  for (; count >= NG; group += NG, count -= NG) rounded_rows<W, NG, MR>(w, group, x, y, ldy, epilogue);
  for (; count > 0; group++, count--) rounded_rows<W, 1, MR>(w, group, x, y, ldy, epilogue);
}

template <class W>
void rounded_span_of(const Packed& w, int group, int count, const Inputs& x, float* y, int64_t ldy, int rows, Epilogue epilogue) {
  int r = 0;
  auto run = [&]<int MR>() {
    for (; r + MR <= rows; r += MR) rounded_rows_span<W, MR>(w, group, count, x.from(r), y + r * ldy, ldy, epilogue);
  };
  run.template operator()<8>();
  run.template operator()<4>();
  run.template operator()<2>();
  run.template operator()<1>();
}

}  // namespace transect
