// How the numbers of a weight W [n][k] lie in memory for the products of linear.h, and how they become float32.
//
// The n rows are taken 16 at a time, a *row group*. Lane r of every 64-byte word belongs to row r of the group, so one
// load feeds 16 outputs and no sum ever crosses lanes. Along k a row group is a run of *panels* of PANEL columns, read
// once from start to end. A panel has GROUPS groups of columns with a scale (and perhaps a minimum) for each row.
//
//   Affine   words of codes of 8 or 4 bits (4 or 8 columns of each row), then 16 scales and 16 zeros
//   Blocks   the block types of GGUF files in nearly their own bits: 16 float16 scales (and minima) of the panel; then,
//            for each group, its whole-number steps where the type has them, words of codes of 8 or 4 bits, and a word
//            with the upper 1 or 2 bits of all of them
//   Fp8      words of codes in e4m3 (4 columns of each row), then 16 scales
//   Dense    words of 2 bfloat16 or 1 float32
//
// Interface of a kind W: W(panel, slice) holds the data of a whole panel; w.group(panel, g, slice) is the panel's g-th
// group, whose ``weight<I>(word)`` decodes column I of a word; W::word(panel, g, j, slice) is the j-th word of that group.
//
// For inputs in bfloat16 (pairs.h) the groups of a PAIRED kind have ``pair<I>(word)``: columns I and I + PER_WORD / 2,
// without their scale. In SCALED kinds a weight is scale * pair, plus pair_zero() if SUMMED (the number of columns that
// share a zero) is not 0.
#pragma once
#include <algorithm>
#include <type_traits>
#include "pairs.h"

namespace transect {

constexpr int GROUP_ROWS = 16;
constexpr int SLICES = GROUP_ROWS / LANES;  // vectors per row group: 1 with AVX-512, 2 with AVX2, 4 plain

enum Kind : int32_t {
  Q4_HALF = 0, Q4_FLOAT = 1, Q8_HALF = 2, Q8_FLOAT = 3, Q8_FLOAT_G16 = 4, BF16 = 5, F32 = 6,
  Q4_0 = 7, Q5_0 = 8, Q5_1 = 9, Q8_0 = 10, Q4_K = 11, Q5_K = 12, Q6_K = 13,
  FP8 = 14,
};
constexpr int KINDS = 15;

template <int I, int N, class F>
inline void unrolled(F&& f) {
  if constexpr (I < N) {
    f.template operator()<I>();
    unrolled<I + 1, N>(f);
  }
}

template <int BITS, int PANEL_K, bool HALF_SCALES>
struct Affine {
  static constexpr int PANEL = PANEL_K, GROUPS = 1, PER_WORD = 32 / BITS, WORDS = PANEL / PER_WORD;
  static constexpr bool BY_PLACE = false;
  static constexpr int SCALE_BYTES = GROUP_ROWS * (HALF_SCALES ? 2 : 4), SCALES = 2;
  static constexpr int PANEL_BYTES = WORDS * 64 + SCALES * SCALE_BYTES, SUMMED = PANEL;
  static constexpr bool PAIRED = true, SCALED = true;
  vf scale, zero;
  explicit Affine(const uint8_t* panel, int slice) {
    const uint8_t* p = panel + WORDS * 64 + slice * LANES * (HALF_SCALES ? 2 : 4);
    if constexpr (HALF_SCALES) {
      scale = load_f16((const f16*)p);
      zero = load_f16((const f16*)(p + SCALE_BYTES));
    } else {
      scale = load((const float*)p);
      zero = load((const float*)(p + SCALE_BYTES));
    }
  }
  const Affine& group(const uint8_t*, int, int) const { return *this; }
  static vi word(const uint8_t* panel, int, int j, int slice) { return load_words(panel + 64 * j + 4 * LANES * slice); }
  template <int I>
  vf weight(vi word) const {
    if constexpr (BITS == 4 && LANES == 16) return fma(low_bits<0>(word, 4 * I), scale, zero);
    if constexpr (BITS == 8 && FUSED) return fma(biased_byte<I>(word) - BIAS, scale, zero);
    return fma(__builtin_convertvector((word >> (BITS * I)) & ((1 << BITS) - 1), vf), scale, zero);
  }
  template <int I>
  vi pair(vi word) const { return BITS == 4 ? pairs_of_codes<4, 0>(word, 4 * I) : pairs_of_bytes<I, true>(word); }
  vf pair_zero() const { return BITS == 4 ? zero : fma(splat(CENTER), scale, zero); }
};

// LOW + HIGH bits of a code; GROUP columns share a scale, GROUPS of these a panel. STEPS: a group's scale (and minimum)
// is the panel's times a whole number, which has a sign where there is no minimum. Without a minimum a number is
// scale * (code - OFFSET).
template <int LOW, int HIGH, int GROUP, int GROUPS_, bool STEPS, bool MINIMUM, int OFFSET>
struct Blocks {
  static constexpr int GROUPS = GROUPS_, PANEL = GROUP * GROUPS, PER_WORD = 32 / LOW, WORDS = GROUP / PER_WORD;
  static constexpr int PARTS = 1 + MINIMUM, HALVES_BYTES = PARTS * GROUP_ROWS * 2;
  static constexpr int STEP_BYTES = STEPS ? PARTS * GROUP_ROWS : 0;
  static constexpr int GROUP_BYTES = STEP_BYTES + (WORDS + (HIGH > 0)) * 64;
  static constexpr int PANEL_BYTES = HALVES_BYTES + GROUPS * GROUP_BYTES;
  static constexpr bool BY_PLACE = HIGH > 0, PAIRED = true, SCALED = true;
  static constexpr int SUMMED = MINIMUM || LOW == 8 ? GROUP : 0;
  static_assert(HIGH == 0 || (LOW == 4 && GROUP * HIGH == 32));
  static constexpr bool TABLE = LOW == 4 && HIGH == 0 && LANES == 16;  // one look-up instead of shuffles
  // A float16 times BIAS + OFFSET is exact, so the offset costs nothing.
  static constexpr bool OFFSET_IN_ZERO = FUSED && !TABLE && !STEPS && !MINIMUM;

  // Codes as bytes: columns 0, 2, 4, 6 and 1, 3, 5, 7. Of 8 bits columns 0 to 3, and for TABLE all, in ``even``.
  struct Word { vi even, odd; };
  struct Group {
    vf scale, zero;
    template <int I>
    vf weight(const Word& w) const {
      constexpr int BYTE = LOW == 8 ? I : I / 2;
      const vi bytes = LOW == 8 || I % 2 == 0 ? w.even : w.odd;
      if constexpr (OFFSET_IN_ZERO) return fma(biased_byte<BYTE>(bytes), scale, zero);
      vf code;
      if constexpr (TABLE) code = low_bits<OFFSET>(w.even, 4 * I);
      else if constexpr (FUSED) code = biased_byte<BYTE>(bytes) - (BIAS + OFFSET);
      else code = __builtin_convertvector((bytes >> (8 * BYTE)) & 255, vf) - float(OFFSET);
      return MINIMUM ? fma(code, scale, zero) : code * scale;
    }
    template <int I>
    vi pair(const Word& w) const {
      if constexpr (LOW == 8) return pairs_of_bytes<I, true>(w.even);
      else if constexpr (TABLE) return pairs_of_codes<4, OFFSET>(w.even, 4 * I);
      else return pairs_of_codes<LOW + HIGH, OFFSET>(I % 2 ? w.odd : w.even, 8 * (I / 2));
    }
    vf pair_zero() const { return LOW == 8 ? scale * (CENTER - OFFSET) : zero; }
  };

  vf scale, minimum;
  explicit Blocks(const uint8_t* panel, int slice) {
    const f16* halves = (const f16*)panel + slice * LANES;
    scale = load_f16(halves);
    minimum = MINIMUM ? load_f16(halves + GROUP_ROWS) : vf{};
  }
  Group group(const uint8_t* panel, int g, int slice) const {
    if constexpr (!STEPS) return {scale, OFFSET_IN_ZERO ? scale * -(BIAS + OFFSET) : minimum};
    const uint8_t* steps = panel + HALVES_BYTES + g * GROUP_BYTES + slice * LANES;
    if constexpr (MINIMUM) return {scale * load_bytes(steps), -(minimum * load_bytes(steps + GROUP_ROWS))};
    return {scale * load_bytes((const int8_t*)steps), vf{}};
  }
  static Word word(const uint8_t* panel, int g, int j, int slice) {
    const uint8_t* words = panel + HALVES_BYTES + g * GROUP_BYTES + STEP_BYTES + 4 * LANES * slice;
    const vi low = load_words(words + 64 * j);
    if constexpr (LOW == 8 || TABLE) return {low, vi{}};
    Word w = {low & 0x0F0F0F0F, (low >> 4) & 0x0F0F0F0F};
    if constexpr (HIGH > 0) {  // of byte b the (2 j)-th HIGH bits belong to byte b of ``even``, the next to ``odd``
      constexpr int MASK = HIGH == 1 ? 0x10101010 : 0x30303030;
      const vi high = load_words(words + 64 * WORDS);
      w.even |= shifted(high, 4 - HIGH * 2 * j) & MASK;
      w.odd |= shifted(high, 4 - HIGH * (2 * j + 1)) & MASK;
    }
    return w;
  }

  // One group of row r: codes [GROUP], steps [PARTS] where there are any, into a panel of zeros.
  static void pack(uint8_t* panel, int g, int r, const uint8_t* codes, const uint8_t* steps) {
    uint8_t* to = panel + HALVES_BYTES + g * GROUP_BYTES;
    for (int part = 0; STEPS && part < PARTS; part++) to[part * GROUP_ROWS + r] = steps[part];
    uint32_t high = 0;
    for (int j = 0; j < WORDS; j++) {
      uint32_t word = 0;
      for (int i = 0; i < PER_WORD; i++) {
        const uint32_t code = codes[j * PER_WORD + i];
        word |= (code & ((1u << LOW) - 1)) << (LOW * i);
        if (HIGH) high |= (code >> LOW) << (8 * (i / 2) + HIGH * (2 * j + i % 2));
      }
      std::memcpy(to + STEP_BYTES + 64 * j + 4 * r, &word, 4);
    }
    if (HIGH) std::memcpy(to + STEP_BYTES + 64 * WORDS + 4 * r, &high, 4);
  }
};

struct Fp8 {
  static constexpr int PANEL = 32, GROUPS = 1, PER_WORD = 4, WORDS = PANEL / PER_WORD;
  static constexpr bool BY_PLACE = false;
  static constexpr int SCALE_BYTES = GROUP_ROWS * 4, SCALES = 1;
  static constexpr int PANEL_BYTES = WORDS * 64 + SCALES * SCALE_BYTES, SUMMED = 0;
  static constexpr bool PAIRED = true, SCALED = true;
  vf scale;
  explicit Fp8(const uint8_t* panel, int slice) : scale(load((const float*)(panel + WORDS * 64) + slice * LANES)) {}
  const Fp8& group(const uint8_t*, int, int) const { return *this; }
  static vi word(const uint8_t* panel, int, int j, int slice) { return load_words(panel + 64 * j + 4 * LANES * slice); }
  template <int I>
  vf weight(vi word) const {
    // Sign, exponent and digits of a code, put where a float has its own, make a number that is 2^120 times too small.
    const vi high = word << (24 - 8 * I);
    return as_float((high & INT32_MIN) | ((high >> 4) & 0x07F00000)) * (scale * 0x1p120f);
  }
  template <int I>
  vi pair(vi word) const { return pairs_of_bytes<I, false>(word); }
};

template <bool HALF>
struct Dense {
  static constexpr int PANEL = HALF ? 2 : 1, GROUPS = 1, PER_WORD = PANEL, WORDS = 1, PANEL_BYTES = 64, SUMMED = 0;
  static constexpr bool BY_PLACE = false, PAIRED = HALF, SCALED = false;
  explicit Dense(const uint8_t*, int) {}
  const Dense& group(const uint8_t*, int, int) const { return *this; }
  static vi word(const uint8_t* panel, int, int, int slice) { return load_words(panel + 4 * LANES * slice); }
  template <int I>
  vf weight(vi word) const { return as_float(!HALF ? word : I == 0 ? word << 16 : word & int32_t(0xffff0000)); }
  template <int I>
  vi pair(vi word) const { return word; }
};

template <class W>
struct Is { using Weights = W; };
template <int KIND>
constexpr auto kind() {
  if constexpr (KIND == Q4_HALF) return Is<Affine<4, 32, true>>();
  else if constexpr (KIND == Q4_FLOAT) return Is<Affine<4, 32, false>>();
  else if constexpr (KIND == Q8_HALF) return Is<Affine<8, 32, true>>();
  else if constexpr (KIND == Q8_FLOAT) return Is<Affine<8, 32, false>>();
  else if constexpr (KIND == Q8_FLOAT_G16) return Is<Affine<8, 16, false>>();
  else if constexpr (KIND == BF16) return Is<Dense<true>>();
  else if constexpr (KIND == F32) return Is<Dense<false>>();
  else if constexpr (KIND == Q4_0) return Is<Blocks<4, 0, 32, 1, false, false, 8>>();
  else if constexpr (KIND == Q5_0) return Is<Blocks<4, 1, 32, 1, false, false, 16>>();
  else if constexpr (KIND == Q5_1) return Is<Blocks<4, 1, 32, 1, false, true, 0>>();
  else if constexpr (KIND == Q8_0) return Is<Blocks<8, 0, 32, 1, false, false, 128>>();
  else if constexpr (KIND == Q4_K) return Is<Blocks<4, 0, 32, 8, true, true, 0>>();
  else if constexpr (KIND == Q5_K) return Is<Blocks<4, 1, 32, 8, true, true, 0>>();
  else if constexpr (KIND == FP8) return Is<Fp8>();
  else return Is<Blocks<4, 2, 16, 16, true, false, 32>>();
}
template <int KIND>
using Weights = typename decltype(kind<KIND>())::Weights;

// ``f`` with the type of a kind.
template <int KIND = 0, class F>
auto with_kind(int kind, F f) {
  if constexpr (KIND + 1 < KINDS) {
    if (kind != KIND) return with_kind<KIND + 1>(kind, f);
  }
  return f.template operator()<Weights<KIND>>();
}

inline int64_t group_bytes(int kind, int k) {
  return with_kind(kind, [&]<class W>() { return int64_t(k / W::PANEL) * W::PANEL_BYTES; });
}

// ``f`` with the numbers of the words of a group, known to the compiler where a word's place decides how it is read.
template <class W, class F>
inline void each_word(F&& f) {
  if constexpr (W::BY_PLACE) unrolled<0, W::WORDS>([&]<int J>() { f(std::integral_constant<int, J>{}); });
  else
    for (int j = 0; j < W::WORDS; j++) f(j);
}

// ``f`` with the numbers of a panel, in the order of k.
template <class W, class F>
inline void each_weight(const uint8_t* panel, int slice, F&& f) {
  const W head(panel, slice);
  for (int p = 0; p < W::GROUPS; p++) {
    const auto group = head.group(panel, p, slice);
    each_word<W>([&](auto j) {
      const auto word = W::word(panel, p, j, slice);
      unrolled<0, W::PER_WORD>([&]<int I>() { f(group.template weight<I>(word)); });
    });
  }
}

}  // namespace transect
