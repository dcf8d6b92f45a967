// Pairs of bfloat16 numbers in 32-bit lanes, for ``vdpbf16ps``: two multiply-adds a lane and instruction, summed in
// float32. Processors with AVX512-BF16 have it (Zen 4, Sapphire Rapids and later). On others nothing here is defined.
//
// A word of PER_WORD columns (kinds.h) gives PER_WORD / 2 pairs: columns i and i + PER_WORD / 2, in which order the
// inputs lie too. Codes of up to 8 bits are exact in bfloat16: each becomes one by a look-up.
#pragma once
#include <array>
#include <bit>
#include "simd.h"

namespace transect {

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif

// Both products of a lane's pairs and the sum so far, in float32.
inline vf dot(vi a, vi b, vf sum);

// The codes of BITS bits in both halves of a lane, from bit ``at`` of each half on, less OFFSET. BITS is 4, 5 or 6.
template <int BITS, int OFFSET>
inline vi pairs_of_codes(vi v, int at);

// Pair I, of 2, of the bytes of a lane: CENTERED whole numbers less CENTER, else numbers in e4m3.
template <int I, bool CENTERED>
inline vi pairs_of_bytes(vi v);
constexpr float CENTER = 127.5f;

// k inputs rounded to bfloat16, in pairs of the order of words of PER_WORD columns; then, if SUMMED is not 0, the sum of
// each SUMMED of them. ``to`` has ``rounded_words`` words.
template <int SUMMED>
constexpr int64_t rounded_words(int64_t k) {
  const int64_t pairs = (k / 2 + 15) / 16 * 16;
  if constexpr (SUMMED == 0) return pairs;
  else return pairs + (k / SUMMED + 15) / 16 * 16;
}
template <int PER_WORD, int SUMMED>
inline void round_inputs(const float* x, int64_t k, int32_t* to);

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

inline vf dot(vi a, vi b, vf sum) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }

constexpr bf16 exact_bf16(float number) { return bf16(std::bit_cast<uint32_t>(number) >> 16); }

template <int BITS, int OFFSET>
struct alignas(64) CodeTable {
  bf16 entries[64];
  constexpr CodeTable() : entries() {
    for (int i = 0; i < 64; i++) entries[i] = exact_bf16(float(i % (1 << BITS) - OFFSET));
  }
};

template <int BITS, int OFFSET>
inline vi pairs_of_codes(vi v, int at) {
  static constexpr CodeTable<BITS, OFFSET> table;
  const __m512i index = _mm512_srli_epi16((__m512i)v, at), low = _mm512_load_si512(table.entries);
  if constexpr (BITS <= 5) return (vi)_mm512_permutexvar_epi16(index, low);
  return (vi)_mm512_permutex2var_epi16(low, index, _mm512_load_si512(table.entries + 32));
}

// Of each number without sign the two bytes of its bfloat16: i + 0.5, or i as the bits of e4m3.
template <bool CENTERED>
struct alignas(64) ByteTable {
  uint8_t low[128], high[128];
  constexpr ByteTable() : low(), high() {
    for (int i = 0; i < 128; i++) {
      const float tiny = float(i % 8) / 512, normal = std::bit_cast<float>(uint32_t(i << 20) + (120u << 23));
      const bf16 number = i == 127 && !CENTERED ? 0x7FC0 : exact_bf16(CENTERED ? float(i) + 0.5f : i < 8 ? tiny : normal);
      low[i] = number & 255, high[i] = number >> 8;
    }
  }
};

// A code of 8 bits less 127.5 is its lower 7 bits plus 0.5; where the highest bit is 0, minus their complement plus 0.5.
template <int I, bool CENTERED>
inline vi pairs_of_bytes(vi v) {
  static constexpr ByteTable<CENTERED> table;
  const __m512i codes = (__m512i)v, signs = _mm512_set1_epi8(-128), all = _mm512_set1_epi8(-1);
  const __m512i index = CENTERED ? _mm512_mask_sub_epi8(codes, ~_mm512_movepi8_mask(codes), all, codes) : codes;
  auto look_up = [&](const uint8_t* bytes) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(bytes), index, _mm512_load_si512(bytes + 64));
  };
  const __m512i negative = CENTERED ? _mm512_andnot_si512(codes, signs) : _mm512_and_si512(codes, signs);
  const __m512i low = look_up(table.low), high = _mm512_or_si512(look_up(table.high), negative);
  const __m512i odd = _mm512_set1_epi16(-256);
  if constexpr (I == 0) return (vi)_mm512_ternarylogic_epi32(odd, _mm512_slli_epi16(high, 8), low, 0xCA);
  return (vi)_mm512_ternarylogic_epi32(odd, high, _mm512_srli_epi16(low, 8), 0xCA);
}

template <int PER_WORD>
struct alignas(64) PairOrder {
  uint16_t columns[32];
  constexpr PairOrder() : columns() {
    for (int i = 0; i < 32; i++) {
      const int pair = i / 2, half = PER_WORD / 2;
      columns[i] = uint16_t(pair / half * PER_WORD + pair % half + i % 2 * half);
    }
  }
};

template <int PER_WORD, int SUMMED>
inline void round_inputs(const float* x, int64_t k, int32_t* to) {
  static constexpr PairOrder<PER_WORD> order;
  const __m512i one = _mm512_set1_epi16(short(exact_bf16(1.f)));
  float* sums = (float*)to + rounded_words<0>(k);
  for (int64_t i = 0; i < k; i += 32, to += 16) {
    const uint32_t there = k - i >= 32 ? ~0u : (1u << (k - i)) - 1;
    const __m512 first = _mm512_maskz_loadu_ps(__mmask16(there), x + i), last = _mm512_maskz_loadu_ps(__mmask16(there >> 16), x + i + 16);
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(last, first);
    const __m512i pairs = _mm512_permutexvar_epi16(_mm512_load_si512(order.columns), rounded);
    _mm512_storeu_si512(to, pairs);
    if constexpr (SUMMED == 32) *sums++ = sum(dot((vi)pairs, (vi)one, vf{}));
    if constexpr (SUMMED == 16) {
      const __m512 each = (__m512)dot((vi)pairs, (vi)one, vf{});
      sums[0] = sum((vf)_mm512_maskz_mov_ps(0x00FF, each));
      if (k - i > 16) sums[1] = sum((vf)_mm512_maskz_mov_ps(0xFF00, each));
      sums += 2;
    }
  }
}

#endif

}  // namespace transect
