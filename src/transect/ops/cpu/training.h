// Operators of training other than products, forward and backward, in float32: one pass over memory each.
#pragma once
#include <cmath>
#include "pool.h"
#include "simd.h"

namespace transect {

constexpr int64_t ELEMENTS_AT_ONCE = 16384;

// Calls f(index, count) for pieces of 0 .. n-1.
template <class F>
inline void share_elements(Pool& pool, int64_t n, F f) {
  const int64_t pieces = (n + ELEMENTS_AT_ONCE - 1) / ELEMENTS_AT_ONCE;
  pool.run([&](int) {
    pool.share(int(pieces), [&](int i) {
      f(i * ELEMENTS_AT_ONCE, std::min(ELEMENTS_AT_ONCE, n - i * ELEMENTS_AT_ONCE));
    });
  });
}

// The first `count` of LANES floats; the rest of a vector is 0.
inline vf load_some(const float* p, int64_t count) {
  vf v{};
  std::memcpy(&v, p, size_t(std::min<int64_t>(count, LANES)) * 4);
  return v;
}
inline void store_some(float* p, vf v, int64_t count) { std::memcpy(p, &v, size_t(std::min<int64_t>(count, LANES)) * 4); }

// Calls f(i, load, store) for every vector of a piece; the two know how much of the last vector is there.
template <class F>
inline void each_vector(int64_t count, F f) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    f(i, [](const float* p) { return load(p); }, [](float* p, vf v) { store(p, v); });
  if (i < count)
    f(i, [=](const float* p) { return load_some(p, count - i); }, [=](float* p, vf v) { store_some(p, v, count - i); });
}

// y = silu(gate) * up
inline void swiglu(Pool& pool, int64_t n, const float* gate, const float* up, float* y) {
  share_elements(pool, n, [&](int64_t at, int64_t count) {
    each_vector(count, [&](int64_t i, auto get, auto put) { put(y + at + i, silu(get(gate + at + i)) * get(up + at + i)); });
  });
}

inline void swiglu_backward(Pool& pool, int64_t n, const float* g, const float* gate, const float* up, float* dgate, float* dup) {
  share_elements(pool, n, [&](int64_t at, int64_t count) {
    each_vector(count, [&](int64_t i, auto get, auto put) {
      const vf a = get(gate + at + i), dy = get(g + at + i), s = sigmoid(a);
      put(dup + at + i, dy * a * s);
      put(dgate + at + i, dy * get(up + at + i) * s * (splat(1.f) + a * (splat(1.f) - s)));
    });
  });
}

// y = x r w with r = (mean(x^2) + eps)^(-1/2), which is kept for the backward pass
inline void rms_norm(Pool& pool, int64_t rows, int64_t width, const float* x, const float* w, float eps, float* y, float* r) {
  pool.run([&](int) {
    pool.share(int(rows), [&](int row) {
      const float* in = x + row * width;
      vf squares{};
      each_vector(width, [&](int64_t i, auto get, auto) { const vf v = get(in + i); squares = fma(v, v, squares); });
      r[row] = 1.f / std::sqrt(sum(squares) / float(width) + eps);
      const vf scale = splat(r[row]);
      each_vector(width, [&](int64_t i, auto get, auto put) { put(y + row * width + i, get(in + i) * scale * get(w + i)); });
    });
  });
}

// dx = r (g w - x r mean(g w x r))
inline void rms_norm_backward(Pool& pool, int64_t rows, int64_t width, const float* g, const float* x, const float* w,
                              const float* r, float* dx) {
  pool.run([&](int) {
    pool.share(int(rows), [&](int row) {
      const int64_t at = row * width;
      vf dots{};
      each_vector(width, [&](int64_t i, auto get, auto) { dots = fma(get(g + at + i) * get(w + i), get(x + at + i), dots); });
      const float scale = r[row];
      const vf outer = splat(scale), inner = splat(scale * scale * sum(dots) / float(width));
      each_vector(width, [&](int64_t i, auto get, auto put) {
        put(dx + at + i, outer * (get(g + at + i) * get(w + i) - get(x + at + i) * inner));
      });
    });
  });
}

// y[t][head] = x[t][head] turned by the angles of its token; sign -1 turns back. x is [tokens][heads][2 * half] with
// `token_stride` between tokens, y is contiguous, cos and sin are [tokens][half].
inline void rotate(Pool& pool, int64_t tokens, int64_t heads, int64_t half, const float* x, int64_t token_stride,
                   const float* cosine, const float* sine, float sign, float* y) {
  pool.run([&](int) {
    pool.share(int(tokens), [&](int t) {
      for (int64_t h = 0; h < heads; h++) {
        const float* in = x + t * token_stride + h * 2 * half;
        float* out = y + (t * heads + h) * 2 * half;
        each_vector(half, [&](int64_t i, auto get, auto put) {
          const vf a = get(in + i), b = get(in + half + i), c = get(cosine + t * half + i), s = get(sine + t * half + i) * sign;
          put(out + i, a * c - b * s);
          put(out + half + i, b * c + a * s);
        });
      }
    });
  });
}

// In place: logits [rows][n] become (softmax - one at the label) * scale; loss[row] = log of the sum - the label's logit.
inline void cross_entropy(Pool& pool, int64_t rows, int64_t n, float* logits, const int64_t* labels, float scale, float* loss) {
  pool.run([&](int) {
    pool.share(int(rows), [&](int row) {
      float* z = logits + row * n;
      const float label = z[labels[row]];
      float top = z[0];
      vf tops = splat(top);
      const int64_t whole = n / LANES * LANES;
      for (int64_t i = 0; i < whole; i += LANES) tops = max(load(z + i), tops);
      top = max(tops);
      for (int64_t i = whole; i < n; i++) top = std::max(top, z[i]);
      double total = 0;  // of pieces: 50000 small numbers in one float would lose digits
      for (int64_t from = 0; from < n; from += ELEMENTS_AT_ONCE / 16) {
        const int64_t count = std::min(ELEMENTS_AT_ONCE / 16, n - from);
        vf sums{};
        each_vector(count, [&](int64_t i, auto get, auto put) {
          vf e = exp(get(z + from + i) - splat(top));
          if (i + LANES > count) for (int64_t j = count - i; j < LANES; j++) e[j] = 0.f;
          sums += e;
          put(z + from + i, e);
        });
        total += double(sum(sums));
      }
      loss[row] = float(std::log(total) + double(top) - double(label));
      const vf share = splat(float(double(scale) / total));
      each_vector(n, [&](int64_t i, auto get, auto put) { put(z + i, get(z + i) * share); });
      z[labels[row]] -= scale;
    });
  });
}

}  // namespace transect
