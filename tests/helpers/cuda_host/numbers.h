// float16, bfloat16 and e4m3 from and to float, rounded to the nearest, ties to even.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace numbers {

inline float of_bits(uint32_t bits) {
  float v;
  memcpy(&v, &bits, 4);
  return v;
}
inline uint32_t bits_of(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return bits;
}

inline float of_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, digits = bits & 1023;
  const float v = exponent == 31 ? (digits ? NAN : INFINITY)
                                 : ldexpf(exponent ? 1024 + digits : digits, (exponent ? exponent : 1) - 25);
  return bits >> 15 ? -v : v;
}
inline uint16_t half_bits(float v) {
  const uint16_t sign = bits_of(v) >> 16 & 0x8000;
  if (isnan(v)) return 0x7FFF;
  float size = fabsf(v);
  int exponent;
  frexpf(size, &exponent);
  const int unit = fmaxf(exponent - 11, -24);
  size = isinf(size) ? size : ldexpf(nearbyintf(ldexpf(size, -unit)), unit);
  if (size >= 65520) return sign | 0x7C00;
  if (size < 0x1p-14f) return sign | (uint16_t)(size * 0x1p24f);
  frexpf(size, &exponent);
  return sign | (exponent + 14) << 10 | ((uint16_t)ldexpf(size, 11 - exponent) & 1023);
}

inline float of_brain(uint16_t bits) { return of_bits((uint32_t)bits << 16); }
inline uint16_t brain_bits(float v) {
  const uint32_t bits = bits_of(v);
  if (isnan(v)) return 0x7FFF;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

inline float of_e4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, digits = bits & 7;
  if ((bits & 127) == 127) return NAN;
  const float v = ldexpf(exponent ? 8 + digits : digits, (exponent ? exponent : 1) - 10);
  return bits >> 7 ? -v : v;
}

}  // namespace numbers
