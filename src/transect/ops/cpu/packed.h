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

constexpr int ASKED_COLUMNS = 32;  // columns of a product between two calls of ``Prefetches::some``
constexpr int FEW = 32;  // rows of x: up to here weights are decoded in registers
constexpr int TILE_VECTORS = 2;
constexpr int TILE_GROUPS = TILE_VECTORS > SLICES ? TILE_VECTORS / SLICES : 1;  // row groups decoded together
constexpr int TILE_COLUMNS = TILE_GROUPS * GROUP_ROWS;
constexpr int CHUNK_GROUPS = LANES == 16 ? 8 : 4;  // row groups in one work item at one row

// Memory that is read after a product and prefetched while the product is computed: a few lines of each range at a time,
// because a core has only some tens of lines on their way. The processor's own prefetch does not follow short ranges.
class Prefetches {
 public:
  // Begins a product in which `some` is called about `calls` times.
  void begin(int calls) { count_ = 0, at_ = longest_ = 0, calls_ = std::max(1, calls); }
  void add(const uint8_t* from, int64_t bytes) {
    if (count_ == MOST) return;
    from_[count_] = from, bytes_[count_++] = bytes;
    longest_ = std::max(longest_, bytes);
    share_ = (longest_ + 64 * calls_ - 1) / (64 * calls_) * 64;
  }
  __attribute__((always_inline)) void some() {  // in the loop of a product, whose sums are in registers
    for (const int64_t end = std::min(longest_, at_ + share_); at_ < end; at_ += 64)
      for (int i = 0; i < count_; i++)
        if (at_ < bytes_[i]) __builtin_prefetch(from_[i] + at_, 0, 2);
  }
  void all() {
    while (at_ < longest_) some();
  }

 private:
  static constexpr int MOST = 64;
  const uint8_t* from_[MOST];
  int64_t bytes_[MOST], at_ = 0, longest_ = 0, share_ = 64;
  int count_ = 0, calls_ = 1;
};

// Row groups group .. group+count-1 of y = x W^T for all rows of x; `scratch` holds k x TILE_COLUMNS floats.
template <class W>
void linear_span_of(const Packed& w, int group, int count, const float* x, int64_t ldx, float* y, int64_t ldy, int rows,
                    Epilogue epilogue, float* scratch, Prefetches* ahead);

inline void linear_span(const Packed& w, int group, int count, const float* x, int64_t ldx, float* y, int64_t ldy,
                        int rows, Epilogue epilogue, float* scratch, Prefetches* ahead = nullptr) {
  with_kind(w.kind, [&]<class W>() { linear_span_of<W>(w, group, count, x, ldx, y, ldy, rows, epilogue, scratch, ahead); });
}

// Rows of inputs in float32 and, for products that round their inputs, in bfloat16 (pairs.h).
struct Inputs {
  const float* x;
  int64_t ldx;
  const int32_t* rounded = nullptr;  // as ``round_row`` makes them, in the order of the weight's kind
  int64_t ldr = 0;
  Inputs from(int row) const { return {x + row * ldx, ldx, rounded + row * ldr, ldr}; }
};

template <class W>
void rounded_span_of(const Packed& w, int group, int count, const Inputs& x, float* y, int64_t ldy, int rows, Epilogue epilogue);

inline void linear_span(const Packed& w, int group, int count, const Inputs& x, float* y, int64_t ldy, int rows,
                        Epilogue epilogue, float* scratch, Prefetches* ahead = nullptr) {
  if (!x.rounded) return linear_span(w, group, count, x.x, x.ldx, y, ldy, rows, epilogue, scratch, ahead);
  if (ahead) ahead->all();
  with_kind(w.kind, [&]<class W>() {
    if constexpr (PAIRS && W::PAIRED) rounded_span_of<W>(w, group, count, x, y, ldy, rows, epilogue);
  });
}

// Words of a rounded row of inputs; 0: products with this weight do not round.
inline int64_t rounded_words(const Packed& w) {
  return with_kind(w.kind, [&]<class W>() { return PAIRS && W::PAIRED ? rounded_words<W::SUMMED>(w.k) : 0; });
}
inline void round_row(const Packed& w, const float* x, int32_t* to) {
  with_kind(w.kind, [&]<class W>() {
    if constexpr (PAIRS && W::PAIRED) round_inputs<W::PER_WORD, W::SUMMED>(x, w.k, to);
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
    for (int k0 = 0; k0 < w.k; k0 += W::PANEL, panel += W::PANEL_BYTES)
      each_weight<W>(panel, slice, [&](vf weight) { *out++ = weight[lane]; });
  });
}

}  // namespace transect
