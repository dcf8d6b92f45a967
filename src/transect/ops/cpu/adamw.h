// AdamW over a stretch of numbers, and gradients taken into host memory: one pass over memory each.
//
//   m <- m + (1 - b1) (s g - m)      v <- b2 v + (1 - b2) (s g)^2
//   w <- (1 - lr decay) w - lr / c1 * m / (sqrt(v) / c2 + eps)        out <- w, rounded to the nearest bfloat16
//
// An element costs a root, a division and 28 bytes (g and out in bfloat16; w, m and v are read and written), so a few
// cores wait for memory. Every element goes through the same instructions wherever a stretch begins: results do not
// depend on how numbers are cut into stretches, nor on the number of threads.
#pragma once
#include <vector>
#include "training.h"

namespace transect {

struct AdamWStep {
  float keep;    // 1 - lr decay
  float rate;    // lr / c1
  float beta1, beta2;
  float root;    // 1 / c2
  float eps;
  float scale;   // of the gradient
};

template <class T>
inline vf load_part(const T* p, int64_t count) {
  T some[LANES] = {};
  std::memcpy(some, p, size_t(count) * sizeof(T));
  return load(some);
}
template <class T>
inline void store_part(T* p, vf v, int64_t count) {
  T some[LANES];
  store(some, v);
  std::memcpy(p, some, size_t(count) * sizeof(T));
}

// Whole vectors, n a multiple of LANES. Not inlined: the compiler must not fuse the last vector's operations otherwise.
template <class G, class O>
__attribute__((noinline)) void adamw_vectors(int64_t n, const G* g, float* w, float* m, float* v, O* out, const AdamWStep& s) {
  const vf share1 = splat(1.f - s.beta1), share2 = splat(1.f - s.beta2), beta2 = splat(s.beta2), scale = splat(s.scale);
  const vf root = splat(s.root), eps = splat(s.eps), rate = splat(-s.rate), keep = splat(s.keep);
  for (int64_t i = 0; i < n; i += LANES) {
    const vf x = load(g + i) * scale, old = load(m + i);
    const vf first = fma(share1, x - old, old), second = fma(x * share2, x, load(v + i) * beta2);
    const vf next = fma(rate, first / fma(sqrt(second), root, eps), load(w + i) * keep);
    store(m + i, first), store(v + i, second), store(w + i, next);
    if (out) store(out + i, next);
  }
}

// G and O are float or bf16; out may be null.
template <class G, class O>
inline void adamw(Pool& pool, int64_t n, const G* g, float* w, float* m, float* v, O* out, const AdamWStep& s) {
  share_elements(pool, n, [&](int64_t at, int64_t count) {
    const int64_t whole = count / LANES * LANES, rest = count - whole, i = at + whole;
    adamw_vectors(whole, g + at, w + at, m + at, v + at, out ? out + at : nullptr, s);
    if (!rest) return;
    G last_g[LANES] = {};
    float last[3][LANES] = {};
    O last_out[LANES];
    float* const parts[] = {w + i, m + i, v + i};
    std::memcpy(last_g, g + i, size_t(rest) * sizeof(G));
    for (int j = 0; j < 3; j++) std::memcpy(last[j], parts[j], size_t(rest) * 4);
    adamw_vectors(LANES, last_g, last[0], last[1], last[2], last_out, s);
    for (int j = 0; j < 3; j++) std::memcpy(parts[j], last[j], size_t(rest) * 4);
    if (out) std::memcpy(out + i, last_out, size_t(rest) * sizeof(O));
  });
}

// into = from, or into += from; returns the sum of the squares before rounding, the same for any team.
template <class F, class T>
inline double take_in(Pool& pool, int64_t n, const F* from, T* into, bool add) {
  std::vector<double> squares(size_t((n + ELEMENTS_AT_ONCE - 1) / ELEMENTS_AT_ONCE));
  share_elements(pool, n, [&](int64_t at, int64_t count) {
    double total = 0;
    int64_t i = at;
    const int64_t end = at + count;
    const auto one = [&](vf x, vf old) { return add ? x + old : x; };
    while (i + LANES <= end) {
      vf some{};
      for (int j = 0; j < 64 && i + LANES <= end; j++, i += LANES) {
        const vf x = one(load(from + i), add ? load(into + i) : vf{});
        store(into + i, x);
        some += x * x;
      }
      total += double(sum(some));
    }
    if (const int64_t rest = end - i; rest > 0) {
      const vf x = one(load_part(from + i, rest), add ? load_part(into + i, rest) : vf{});
      store_part(into + i, x, rest);
      total += double(sum(x * x));
    }
    squares[size_t(at / ELEMENTS_AT_ONCE)] = total;
  });
  double found = 0;
  for (double part : squares) found += part;
  return found;
}

}  // namespace transect
