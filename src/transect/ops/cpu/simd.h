// One vector type for each instruction set: AVX-512 (16 lanes), AVX2 with FMA (8), SVE of a length that is known at
// compile time (as many as fit, up to 16), NEON (4), and plain x86-64 or any other machine that GCC or Clang vectorises
// for (4). Everything above this file is written once, in terms of `vf`.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__ARM_FEATURE_SVE)
#include <arm_sve.h>
#endif
#endif

namespace transect {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int LANES = 16;
#define TRANSECT_ISA "AVX-512"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
constexpr int LANES = 8;
#define TRANSECT_ISA "AVX2"
#elif defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS >= 256  // -msve-vector-bits
constexpr int LANES = __ARM_FEATURE_SVE_BITS >= 512 ? 16 : 8;
#define TRANSECT_ISA "SVE"
#define TRANSECT_SVE
#elif defined(__aarch64__)
constexpr int LANES = 4;
#define TRANSECT_ISA "NEON"
#define TRANSECT_NEON
#else
constexpr int LANES = 4;
#define TRANSECT_ISA "plain"
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

inline vf load(const float* p) { vf v; std::memcpy(&v, p, sizeof v); return v; }
inline vi load_words(const void* p) { vi v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline vf splat(float x) { return x - vf{}; }
inline vf as_float(vi v) { return (vf)v; }

// a * b + c, rounded once where the machine can.
inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  if constexpr (LANES == 16) return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  if constexpr (LANES == 8) return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(TRANSECT_NEON)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(TRANSECT_SVE)
  typedef svfloat32_t sv __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)));
  return (vf)(sv)svmla_f32_x(svptrue_b32(), (sv)c, (sv)a, (sv)b);
#endif
  return a * b + c;
}

inline vf sqrt(vf x) {
#if defined(__AVX512F__)
  if constexpr (LANES == 16) return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  if constexpr (LANES == 8) return (vf)_mm256_sqrt_ps((__m256)x);
#endif
  for (int i = 0; i < LANES; i++) x[i] = std::sqrt(x[i]);
  return x;
}

inline vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
inline vf max(vf a, vf b) { return select(a > b, a, b); }

inline float sum(vf v) {  // a fixed tree, the same on every call
#if defined(__AVX512F__)
  if constexpr (LANES == 16) return _mm512_reduce_add_ps((__m512)v);
#endif
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) v[i] += v[i + half];
  return v[0];
}
inline float max(vf v) {
#if defined(__AVX512F__)
  if constexpr (LANES == 16) return _mm512_reduce_max_ps((__m512)v);
#endif
  float m = v[0];
  for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
  return m;
}

// ---- number formats -------------------------------------------------------------------------------------------------

typedef uint16_t bf16;  // the upper half of a float32
typedef uint16_t f16;   // IEEE half precision
#if defined(__aarch64__)
typedef __fp16 Half;  // the number itself; GCC 12 has no _Float16 there
#else
typedef _Float16 Half;
#endif

inline float from_bf16(bf16 h) { uint32_t u = uint32_t(h) << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline bf16 to_bf16(float f) {  // round to nearest, ties to even; NaN stays NaN
  uint32_t u; std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16((u >> 16) | 0x40);
  return bf16((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

inline vf load(const bf16* p) {
#if defined(__AVX512F__)
  if constexpr (LANES == 16)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  if constexpr (LANES == 8) return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#endif
  vi v;
  for (int i = 0; i < LANES; i++) v[i] = int32_t(uint32_t(p[i]) << 16);
  return (vf)v;
}

inline void store(bf16* p, vf v) {  // to_bf16 on every lane
  typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
  typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
  const vu u = (vu)v;
  const vu rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16, nan = (u >> 16) | 0x40;
  const vu is_nan = (vu)((u & 0x7fffffffu) > 0x7f800000u);
  const vh h = __builtin_convertvector((is_nan & nan) | (~is_nan & rounded), vh);
  std::memcpy(p, &h, sizeof h);
}

// A number of 8 bits, e4m3. Sign, exponent and digits, put where a float16 has its own, make one 2^8 times too small, and
// where a float has them one 2^120 times too small. That is below float's normal range for small numbers, which some
// processors multiply a hundred times as slowly, so float16 comes first. 0x7F, of either sign, is NaN.
struct fp8 { uint8_t bits; };

inline vf load(const fp8* p) {
#if defined(__AVX512F__) && defined(__AVX2__)
  if constexpr (LANES == 16) {
    const __m256i most = _mm256_set1_epi16(0x3F80), wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(int16_t(0xBF80)));
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, most), most);
    return (vf)_mm512_cvtph_ps(_mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7E00)))) * 0x1p8f;
  }
#elif defined(__AVX2__) && defined(__F16C__)
  if constexpr (LANES == 8) {
    const __m128i most = _mm_set1_epi16(0x3F80), wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(int16_t(0xBF80)));
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(half, most), most);
    return (vf)_mm256_cvtph_ps(_mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7E00)))) * 0x1p8f;
  }
#endif
  vi v;
  for (int i = 0; i < LANES; i++) v[i] = p[i].bits;
  const vi code = v & 0x7F;
  const vf number = (vf)((v & 0x80) << 24 | code << 20) * 0x1p120f;
  return (vf)((vi)number | ((code == 0x7F) & 0x7FC00000));
}

inline void store(fp8* p, vf v) {  // to the nearest, of two as near to the even one; beyond 448 to 448, NaN stays NaN
  typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
  typedef uint8_t vb __attribute__((vector_size(LANES)));
  const vi magnitude = (vi)v & INT32_MAX, most = (vi)splat(448.f);
  const vi within = (magnitude < most & magnitude) | (magnitude >= most & most);
  const vu small = (vu)((vf)within * 0x1p-120f);
  const vu code = (small + 0x7FFFFu + ((small >> 20) & 1)) >> 20;
  const vu is_nan = (vu)(magnitude > 0x7f800000);
  const vb b = __builtin_convertvector((is_nan & 0x7Fu) | (~is_nan & code) | ((vu)v >> 24 & 0x80u), vb);
  std::memcpy(p, &b, sizeof b);
}

inline float from_f16(f16 h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#elif defined(__aarch64__)
  Half half; std::memcpy(&half, &h, 2); return half;
#else
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, u;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact in float32
    float f = float(mantissa) * 5.9604644775390625e-8f;
    return sign ? -f : f;
  }
  u = exponent == 31 ? sign | 0x7f800000u | (mantissa << 13) : sign | ((exponent + 112) << 23) | (mantissa << 13);
  float f; std::memcpy(&f, &u, 4); return f;
#endif
}
inline vf load_f16(const f16* p) {
#if defined(__AVX512F__)
  if constexpr (LANES == 16) return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  if constexpr (LANES == 8) return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(TRANSECT_NEON)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#endif
  vf v;
  for (int i = 0; i < LANES; i++) v[i] = from_f16(p[i]);
  return v;
}

// Lanes of whole numbers of 8 bits.
inline vf load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  if constexpr (LANES == 16) return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  if constexpr (LANES == 8) return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#endif
  vf v;
  for (int i = 0; i < LANES; i++) v[i] = p[i];
  return v;
}
inline vf load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  if constexpr (LANES == 16) return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  if constexpr (LANES == 8) return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#endif
  vf v;
  for (int i = 0; i < LANES; i++) v[i] = p[i];
  return v;
}

inline vi shifted(vi v, int left) { return left >= 0 ? v << left : v >> -left; }

#if defined(__aarch64__)
constexpr bool FUSED = true;  // ``fma`` rounds once
#else
constexpr bool FUSED = LANES > 4;
#endif
constexpr float BIAS = 32768;

// BIAS + byte BYTE of each lane, exactly, without a conversion: as the second byte of a float that has 8 bits of
// fraction. Only for ``FUSED``.
template <int BYTE>
inline vf biased_byte(vi v) {
  const vi at = shifted(v, 8 - 8 * BYTE);
#if defined(__AVX512F__)
  if constexpr (LANES == 16)
    return (vf)_mm512_ternarylogic_epi32((__m512i)at, _mm512_set1_epi32(0xFF00), _mm512_set1_epi32(0x47000000), 0xEA);
#endif
  return (vf)((at & 0xFF00) | 0x47000000);
}

// The 4 bits of each lane from bit ``at`` on, less OFFSET: a look-up that takes the low 4 bits needs neither a mask nor a
// conversion. Only for 16 lanes.
template <int OFFSET>
inline vf low_bits(vi v, int at) {
#if defined(__AVX512F__)
  const __m512 table = _mm512_sub_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_ps(OFFSET));
  if constexpr (LANES == 16) return (vf)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)v, at), table);
#endif
  return __builtin_convertvector((v >> at) & 15, vf) - float(OFFSET);
}

// ---- transcendental functions ---------------------------------------------------------------------------------------

// e^x within 2 ulp: x = n ln2 + r with |r| <= ln2 / 2, then a degree-6 Taylor-like polynomial of e^r, then 2^n by the
// exponent bits. -inf gives 0; above 88.7 it saturates near the largest float; NaN stays NaN.
inline vf exp(vf x) {
  const vf low = splat(-87.33654f), high = splat(88.72283f);
  vf clamped = select(x < low, low, select(x > high, high, x));
  vf shifted = fma(clamped, splat(1.44269504088896341f), splat(12582912.f));  // 1.5 * 2^23: rounds to an integer
  vi n = (vi)shifted - (vi)splat(12582912.f);
  vf rounded = shifted - splat(12582912.f);
  vf r = fma(rounded, splat(-0.693359375f), clamped);
  r = fma(rounded, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.f);
#if defined(__AVX512F__)
  if constexpr (LANES == 16) return select(x < low, vf{}, (vf)_mm512_scalef_ps((__m512)p, (__m512)rounded));
#endif
  vi half = n >> 1;  // in two steps, so that n = 128 does not overflow the exponent field
  vf y = p * (vf)((half + 127) << 23) * (vf)((n - half + 127) << 23);
  return select(x < low, vf{}, y);
}

inline vf sigmoid(vf x) { return splat(1.f) / (splat(1.f) + exp(-x)); }
inline vf silu(vf x) { return x * sigmoid(x); }
inline vf gelu_tanh(vf x) {  // x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
  vf u = x * fma(x * x, splat(0.044715f * 0.7978845608f), splat(0.7978845608f));
  return x * sigmoid(u + u);
}
inline vf gelu_exact(vf x) {
  vf y;
  for (int i = 0; i < LANES; i++) y[i] = 0.5f * x[i] * (1.f + std::erf(x[i] * 0.70710678118654752f));
  return y;
}

}  // namespace transect
