#pragma once

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};
inline __half2 __floats2half2_rn(float x, float y) { return {{numbers::half_bits(x)}, {numbers::half_bits(y)}}; }
inline float2 __half22float2(__half2 v) { return {numbers::of_half(v.x.bits), numbers::of_half(v.y.bits)}; }
