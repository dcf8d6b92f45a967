// Low-rank adapters beside the matrices of a stack, another one for each run of tokens: y += s (x A^T) B^T.
//
// A place is a product of a layer with up to three parts that share an input (q, k and v). Its A's are one packed
// matrix, concatenated along their rows, so that one product makes the low-rank values of all parts; each part has its
// own B. Both products are those of linear.h: an output is one chain of multiply-adds over k, whatever else is in the
// batch, so a token's result has the same bits alone and in any batch.
#pragma once
#include "packed.h"

namespace transect {

constexpr int PLACES = 4, PARTS = 3, RUN_TOKENS = 16;  // most tokens of a run: one item of work
enum Place { QKV = 0, O = 1, GATE_UP = 2, DOWN = 3 };

struct LowRank {  // mirrored field by field in library.py
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

// low [tokens][stride] = scale * (x A^T), for the tokens of a run.
inline void shrink(const Run& run, int place, const float* x, int64_t ldx, float* low, int64_t stride) {
  if (!run.places || !run.places[place].a.n) return;
  const LowRank& own = run.places[place];
  low += run.first * stride;
  linear_span(own.a, 0, own.a.groups(), x + run.first * ldx, ldx, low, stride, run.count, STORE, nullptr);
  for (int t = 0; t < run.count; t++, low += stride)
    for (int r = 0; r < own.a.n; r++) low[r] *= own.scale[r];
}

// y += low B^T in some row groups of a part's outputs, for all runs.
inline void expand(const std::vector<Run>& runs, int place, int part, int group, int count, const float* low, int64_t stride,
                   float* y, int64_t ldy) {
  for (const Run& run : runs) {
    if (!run.places || !run.places[place].b[part].n) continue;
    const LowRank& own = run.places[place];
    linear_span(own.b[part], group, count, low + run.first * stride + own.first[part], stride, y + run.first * ldy, ldy,
                run.count, ADD, nullptr);
  }
}

}  // namespace transect
