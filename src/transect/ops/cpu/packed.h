// A packed weight, and what is done with it: products, and rows of it as numbers.
//
// The loops of a product are in linear.h, and linear.cpp compiles them: once for each list of kinds, so that several
// compilers share the work. Here they are only declared.
#pragma once
#include <algorithm>
#include "kinds.h"

namespace transect {

struct Packed {
  int32_t kind = F32, n = 0, k = 0;  // k is a multiple of the panel
  const uint8_t* data = nullptr;
  const float* bias = nullptr;  // n floats, or null
  int groups() const { return (n + GROUP_ROWS - 1) / GROUP_ROWS; }
};

enum Epilogue { STORE, ADD };  // y = result, or y += result (the residual stream)

constexpr int FEW = 32;  // rows of x: up to here weights are decoded in registers
constexpr int TILE_VECTORS = 2;
constexpr int TILE_GROUPS = TILE_VECTORS > SLICES ? TILE_VECTORS / SLICES : 1;  // row groups decoded together
constexpr int TILE_COLUMNS = TILE_GROUPS * GROUP_ROWS;
constexpr int CHUNK_GROUPS = LANES == 16 ? 8 : 4;  // row groups in one work item at one row

// Row groups group .. group+count-1 of y = x W^T for all rows of x; `scratch` holds k x TILE_COLUMNS floats.
template <class W>
void linear_span_of(const Packed& w, int group, int count, const float* x, int64_t ldx, float* y, int64_t ldy, int rows,
                    Epilogue epilogue, float* scratch);

inline void linear_span(const Packed& w, int group, int count, const float* x, int64_t ldx, float* y, int64_t ldy,
                        int rows, Epilogue epilogue, float* scratch) {
  with_kind(w.kind, [&]<class W>() { linear_span_of<W>(w, group, count, x, ldx, y, ldy, rows, epilogue, scratch); });
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
    for (int k0 = 0; k0 < w.k; k0 += W::PANEL, panel += W::PANEL_BYTES)
      each_weight<W>(panel, slice, [&](vf weight) { *out++ = weight[lane]; });
  });
}

}  // namespace transect
