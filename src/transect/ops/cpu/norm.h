// RMSNorm and LayerNorm of one row, and rotary embedding of one head, in float32.
#pragma once
#include "simd.h"

namespace transect {

inline float dot(const float* a, const float* b, int n) {
  vf acc = {};
  int i = 0;
  for (; i + LANES <= n; i += LANES) acc = fma(load(a + i), load(b + i), acc);
  float total = sum(acc);
  for (; i < n; i++) total += a[i] * b[i];
  return total;
}

// y = x / rms(x) * weight, rms(x) = sqrt(mean(x^2) + eps)
inline void rms_norm(const float* x, const float* weight, float eps, int n, float* y) {
  const float scale = 1.f / std::sqrt(dot(x, x, n) / n + eps);
  for (int i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

// y = (x - mean) / sqrt(var + eps) * weight + bias
inline void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* y) {
  float mean = 0.f, square = 0.f;
  for (int i = 0; i < n; i++) mean += x[i];
  mean /= n;
  for (int i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean);
  const float scale = 1.f / std::sqrt(square / n + eps);
  for (int i = 0; i < n; i++) y[i] = (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0.f);
}

// Rotates the pairs (x[i], x[i + half]) by the angle whose cosine and sine are given for i < half.
inline void rotate(float* x, const float* cosine, const float* sine, int half) {
  for (int i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i] + a * sine[i];
  }
}

}  // namespace transect
