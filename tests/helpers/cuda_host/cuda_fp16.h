#pragma once

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};
inline __half2 __floats2half2_rn(float x, float y) { return {{numbers::half_bits(x)}, {numbers::half_bits(y)}}; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline __half2 __half2half2(__half v) { return {v, v}; }
inline __half2 __hsub2(__half2 a, __half2 b) {
  return __floats2half2_rn(numbers::of_half(a.x.bits) - numbers::of_half(b.x.bits),
                           numbers::of_half(a.y.bits) - numbers::of_half(b.y.bits));
}
inline float2 __half22float2(__half2 v) { return {numbers::of_half(v.x.bits), numbers::of_half(v.y.bits)}; }
