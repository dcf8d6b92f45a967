// Low-rank adapters beside the matrices of a stack, another one for each run of tokens: y += s (x A^T) B^T.
//
// A place is a product of a layer with up to three parts that share an input (q, k and v). Its A's are one packed
// matrix, concatenated along their rows, so that one product makes the low-rank values of all parts; each part has its
// own B. An output is summed in one order, whatever else is in the batch: a token's result has the same bits alone and in
// any batch.
#pragma once
#include <vector>
#include "packed.h"

namespace transect {

constexpr int PLACES = 4, PARTS = 3, RUN_TOKENS = 16;  // most tokens of a run
constexpr int BLOCK_GROUPS = 4;  // row groups of a product, and of the B's beside it that are prefetched meanwhile
enum Place { QKV = 0, O = 1, GATE_UP = 2, DOWN = 3 };

struct LowRank {  // mirrored field by field in stack.py
  Packed a;              // [sum of ranks][inputs]; n = 0: no adapter here
  const float* scale;    // for each row of a
  Packed b[PARTS];       // [outputs][rank]; n = 0: this part has none
  int32_t first[PARTS];  // the first row of a that belongs to the part
};

struct Run {  // neighbouring tokens with one adapter
  const LowRank* places;  // [layers][PLACES], or null: none
  int first, count;
};

// The tokens of a step as runs; slots [tokens]: number of each one's adapter in `table`, or -1.
inline std::vector<Run> runs_of(int tokens, const int32_t* slots, const LowRank* const* table) {
  std::vector<Run> runs;
  for (int t = 0; t < tokens; t++) {
    if (!runs.empty() && runs.back().count < RUN_TOKENS && slots[t] == slots[t - 1]) runs.back().count++;
    else runs.push_back({slots[t] < 0 ? nullptr : table[slots[t]], t, 1});
  }
  return runs;
}

// The rows of s A x: few outputs, so the inputs are shared out among CHAINS words to hide the latency of the multiply-add.
template <bool HALF>
inline void shrink_row(const Packed& a, const float* x, const float* scale, float* low) {
  using W = Dense<HALF>;
  constexpr int CHAINS = 4;
  const int panels = a.k / W::PANEL;
  for (int part = 0; part < a.groups() * SLICES; part++) {
    const int row = part * LANES, slice = part % SLICES;
    const uint8_t* base = a.data + int64_t(part / SLICES) * panels * W::PANEL_BYTES;
    vf acc[CHAINS][W::PANEL] = {};
    auto multiply = [&](int panel, vf* sums) {
      const W head(base, slice);
      const auto word = W::word(base + int64_t(panel) * W::PANEL_BYTES, 0, 0, slice);
      unrolled<0, W::PANEL>([&]<int I>() {
        sums[I] = fma(head.template weight<I>(word), splat(x[panel * W::PANEL + I]), sums[I]);
      });
    };
    int panel = 0;
    for (; panel + CHAINS <= panels; panel += CHAINS)
      unrolled<0, CHAINS>([&]<int C>() { multiply(panel + C, acc[C]); });
    for (; panel < panels; panel++) multiply(panel, acc[0]);
    vf total = {};
    for (int i = 0; i < W::PANEL; i++) total += (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]);
    for (int r = 0; r < LANES && row + r < a.n; r++) low[row + r] = scale[row + r] * total[r];
  }
}

// low [tokens][stride] = scale * (x A^T), for one token of a run.
inline void shrink(const Run& run, int token, int place, const float* x, int64_t ldx, float* low, int64_t stride) {
  if (!run.places || !run.places[place].a.n) return;
  const LowRank& own = run.places[place];
  if (own.a.kind == BF16) shrink_row<true>(own.a, x + token * ldx, own.scale, low + token * stride);
  else shrink_row<false>(own.a, x + token * ldx, own.scale, low + token * stride);
}

// Adds what ``expand`` will read.
inline void prefetch_b(const std::vector<Run>& runs, int place, int part, int group, int count, Prefetches& ahead) {
  const LowRank* before = nullptr;
  for (const Run& run : runs) {
    if (!run.places || run.places == before || !run.places[place].b[part].n) continue;
    before = run.places;
    const Packed& b = run.places[place].b[part];
    const int64_t stride = group_bytes(b.kind, b.k);
    ahead.add(b.data + group * stride, count * stride);
  }
}

// y += low B^T in NG row groups for one token, in the order of linear.h.
template <bool HALF, int NG>
inline void expand_row(const Packed& b, int group, const float* low, float* y) {
  using W = Dense<HALF>;
  const int64_t stride = int64_t(b.k / W::PANEL) * W::PANEL_BYTES;
  for (int slice = 0; slice < SLICES; slice++) {
    const uint8_t* base = b.data + group * stride;
    vf acc[NG] = {};
    for (int k = 0; k < b.k; k += W::PANEL, base += W::PANEL_BYTES) {
      const W head(base, slice);
      unrolled<0, W::PANEL>([&]<int I>() {
        const vf input = splat(low[k + I]);
        for (int g = 0; g < NG; g++)
          acc[g] = fma(head.template weight<I>(W::word(base + g * stride, 0, 0, slice)), input, acc[g]);
      });
    }
    for (int g = 0; g < NG; g++) {
      const int row = (group + g) * GROUP_ROWS + slice * LANES;
      if (row + LANES <= b.n) store(y + row, load(y + row) + acc[g]);
      else
        for (int i = 0; row + i < b.n; i++) y[row + i] += acc[g][i];
    }
  }
}

template <bool HALF>
inline void expand_span(const Packed& b, int group, int count, const float* low, float* y) {
  for (; count >= BLOCK_GROUPS; group += BLOCK_GROUPS, count -= BLOCK_GROUPS) expand_row<HALF, BLOCK_GROUPS>(b, group, low, y);
  for (; count > 0; group++, count--) expand_row<HALF, 1>(b, group, low, y);
}

// y += low B^T in some row groups of a part's outputs, for all runs.
inline void expand(const std::vector<Run>& runs, int place, int part, int group, int count, const float* low, int64_t stride,
                   float* y, int64_t ldy) {
  for (const Run& run : runs) {
    if (!run.places || !run.places[place].b[part].n) continue;
    const Packed& b = run.places[place].b[part];
    const float* from = low + run.first * stride + run.places[place].first[part];
    float* to = y + run.first * ldy;
    if (run.count > 1) linear_span(b, group, count, from, stride, to, ldy, run.count, ADD, nullptr);
    else if (b.kind == BF16) expand_span<true>(b, group, count, from, to);
    else expand_span<false>(b, group, count, from, to);
  }
}

}  // namespace transect
