// Causal attention over packed documents, forward and backward, in float32: see ops/attention/packed/attention.py for the math.
//
// A work item is one query head of one document. Queries go in blocks of QUERY_ROWS against all keys that any of them
// sees, so the scores of a block, [QUERY_ROWS][keys], are the most that exists at a time; nothing is computed past the
// block's last query. The backward pass computes the scores again from the kept log of each query's softmax sum.
// Gradients of keys and values are made for every query head, [T][heads][size], and added up over a group by the caller.
#pragma once
#include <cmath>
#include "products.h"

namespace transect {

constexpr int64_t QUERY_ROWS = 72;  // a multiple of BLOCK_ROWS

// q, g, o and their gradients are [tokens][heads][size]; k and v [tokens][kv_heads][size]; all with unit stride inside a
// head and `*_stride` between tokens, heads side by side. lse is [heads][tokens].
struct DocumentAttention {
  int64_t tokens, heads, kv_heads, size, documents, window;  // window 0: none
  int64_t q_stride, k_stride, v_stride;
  const int32_t* bounds;  // [documents + 1]
  const float *q, *k, *v;
  float scale;
};

struct AttentionScratch {
  std::vector<float> panel, scores, slopes, k_turned, v_turned;
  int64_t row;  // floats from one query's scores to the next: not a power of two, which would collide in the cache
  AttentionScratch(int64_t longest, int64_t size, bool backward)
      : panel(DEPTH * COLUMNS + LANES), row((longest + 15) / 16 * 16 + 16) {
    scores.resize(QUERY_ROWS * row);
    k_turned.resize(size * row);
    if (backward) slopes.resize(QUERY_ROWS * row), v_turned.resize(size * row);
  }
};

// [n][size] with `stride` between rows -> [size][row]
inline void turn(const float* x, int64_t stride, int64_t n, int64_t size, float* out, int64_t row) {
  for (int64_t from = 0; from < n; from += 16)
    for (int64_t d = 0; d < size; d++)
      for (int64_t t = from; t < std::min(n, from + 16); t++) out[d * row + t] = x[t * stride + d];
}

// c [rows][n] = (c +) scale * A(rows, k) B(k, n), on this thread alone
inline void multiply(const float* a, int64_t a_row, int64_t a_k, const float* b, int64_t b_k, int64_t k, float scale,
                     int64_t rows, int64_t n, float* c, int64_t ldc, bool add, float* panel) {
  const Product product{a, b, a_row, a_k, b_k, 1, k, scale};
  for (int64_t first = 0; first < n; first += COLUMNS)
    product_panel<COLUMN_VECTORS>(&product, 1, 0, rows, first, int(std::min<int64_t>(COLUMNS, n - first)), c, ldc, add, panel);
}

// For each query of a block: f(query, its scores from the first key it sees, how many it sees); all others become 0.
template <class F>
inline void each_query(const DocumentAttention& a, int64_t first_key, int64_t from, int64_t to, float* scores, int64_t row,
                       F f) {
  for (int64_t i = from; i < to; i++) {
    float* s = scores + (i - from) * row;
    const int64_t begin = a.window && i + 1 - a.window > first_key ? i + 1 - a.window - first_key : 0;
    const int64_t end = i + 1 - first_key;
    std::fill(s, s + begin, 0.f);
    std::fill(s + end, s + (to - first_key), 0.f);
    f(i, s + begin, end - begin);
  }
}

inline int64_t first_key_of(const DocumentAttention& a, int64_t from) {
  return a.window && from + 1 > a.window ? from + 1 - a.window : 0;
}

// Sums, maxima and exponentials over a run of floats.
template <class F>
inline void over(float* p, int64_t n, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(p + i, LANES);
  if (i < n) f(p + i, int(n - i));
}
inline vf first_of(const float* p, int count) {
  if (count == LANES) return load(p);
  vf v{};
  std::memcpy(&v, p, size_t(count) * 4);
  return v;
}
inline void first_to(float* p, vf v, int count) { std::memcpy(p, &v, size_t(count) * 4); }

template <class F>
void each_head(Pool& pool, const DocumentAttention& a, bool backward, F f) {
  int64_t longest = 0;
  for (int64_t d = 0; d < a.documents; d++) longest = std::max<int64_t>(longest, a.bounds[d + 1] - a.bounds[d]);
  pool.run([&](int) {
    AttentionScratch scratch(longest, a.size, backward);
    pool.share(int(a.documents * a.heads), [&](int item) {
      const int64_t document = item / a.heads, head = item % a.heads;
      const int64_t start = a.bounds[document], n = a.bounds[document + 1] - start;
      const int64_t kv = head / (a.heads / a.kv_heads);
      const float* k = a.k + start * a.k_stride + kv * a.size;
      turn(k, a.k_stride, n, a.size, scratch.k_turned.data(), scratch.row);
      f(start, n, head, a.q + start * a.q_stride + head * a.size, k, a.v + start * a.v_stride + kv * a.size, scratch);
    });
  });
}

inline void attention_forward(Pool& pool, const DocumentAttention& a, float* out, float* lse) {
  const int64_t width = a.heads * a.size;
  each_head(pool, a, false, [&](int64_t start, int64_t n, int64_t head, const float* q, const float*, const float* v, AttentionScratch& s) {
    float *o = out + start * width + head * a.size, *panel = s.panel.data(), *scores = s.scores.data();
    for (int64_t from = 0; from < n; from += QUERY_ROWS) {
      const int64_t to = std::min(n, from + QUERY_ROWS), key = first_key_of(a, from), keys = to - key;
      multiply(q + from * a.q_stride, a.q_stride, 1, s.k_turned.data() + key, s.row, a.size, a.scale, to - from, keys,
               scores, s.row, false, panel);
      each_query(a, key, from, to, scores, s.row, [&](int64_t i, float* p, int64_t count) {
        float top = p[0];
        vf tops = splat(top);
        int64_t j = 0;
        for (; j + LANES <= count; j += LANES) tops = max(load(p + j), tops);
        top = max(tops);
        for (; j < count; j++) top = std::max(top, p[j]);
        float total = 0;
        vf sums{};
        over(p, count, [&](float* at, int many) {
          vf e = exp(first_of(at, many) - splat(top));
          first_to(at, e, many);
          if (many == LANES) sums += e;
          else for (int l = 0; l < many; l++) total += e[l];
        });
        total += sum(sums);
        lse[head * a.tokens + start + i] = top + std::log(total);
        const vf share = splat(1.f / total);
        over(p, count, [&](float* at, int many) { first_to(at, first_of(at, many) * share, many); });
      });
      multiply(scores, s.row, 1, v + key * a.v_stride, a.v_stride, keys, 1.f, to - from, a.size, o + from * width, width,
               false, panel);
    }
  });
}

// dq, dk and dv are [tokens][heads][size]; g and o are contiguous.
inline void attention_backward(Pool& pool, const DocumentAttention& a, const float* grad, const float* out, const float* lse,
                               float* dq, float* dk, float* dv) {
  const int64_t width = a.heads * a.size;
  each_head(pool, a, true, [&](int64_t start, int64_t n, int64_t head, const float* q, const float* k, const float* v, AttentionScratch& s) {
    const int64_t here = start * width + head * a.size;
    const float *g = grad + here, *o = out + here;
    float *panel = s.panel.data(), *p = s.scores.data(), *ds = s.slopes.data();
    turn(v, a.v_stride, n, a.size, s.v_turned.data(), s.row);
    for (int64_t i = 0; i < n; i++) {
      std::fill(dk + here + i * width, dk + here + i * width + a.size, 0.f);
      std::fill(dv + here + i * width, dv + here + i * width + a.size, 0.f);
    }
    for (int64_t from = 0; from < n; from += QUERY_ROWS) {
      const int64_t to = std::min(n, from + QUERY_ROWS), rows = to - from, key = first_key_of(a, from), keys = to - key;
      const float *q_block = q + from * a.q_stride, *g_block = g + from * width;
      multiply(q_block, a.q_stride, 1, s.k_turned.data() + key, s.row, a.size, a.scale, rows, keys, p, s.row, false, panel);
      multiply(g_block, width, 1, s.v_turned.data() + key, s.row, a.size, 1.f, rows, keys, ds, s.row, false, panel);
      each_query(a, key, from, to, p, s.row, [&](int64_t i, float* at, int64_t count) {
        const vf log_sum = splat(lse[head * a.tokens + start + i]);
        over(at, count, [&](float* x, int many) { first_to(x, exp(first_of(x, many) - log_sum), many); });
      });
      each_query(a, key, from, to, ds, s.row, [&](int64_t i, float* at, int64_t count) {
        float dot = 0;  // g . o
        for (int64_t d = 0; d < a.size; d++) dot += g[i * width + d] * o[i * width + d];
        const float* share = p + (at - ds);
        int64_t j = 0;
        over(at, count, [&](float* x, int many) {
          first_to(x, first_of(share + j, many) * (first_of(x, many) - splat(dot)) * a.scale, many);
          j += many;
        });
      });
      multiply(ds, s.row, 1, k + key * a.k_stride, a.k_stride, keys, 1.f, rows, a.size, dq + here + from * width, width,
               false, panel);
      multiply(ds, 1, s.row, q_block, a.q_stride, rows, 1.f, keys, a.size, dk + here + key * width, width, true, panel);
      multiply(p, 1, s.row, g_block, width, rows, 1.f, keys, a.size, dv + here + key * width, width, true, panel);
    }
  });
}

}  // namespace transect
