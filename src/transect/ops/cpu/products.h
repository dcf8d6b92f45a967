// C = sum over i of A_i B_i (+ C): the dense float32 products of training, nothing packed beforehand.
//
// One call takes several products that end in the same place: x W^T + h B^T of a linear layer with an adapter is one
// pass over the result. Either factor may be read transposed, so that a weight W [n, k] serves the forward pass (W^T)
// and the gradient of its input (W) from one copy.
//
// A work item is a panel of COLUMNS columns of C and a run of its rows. The item copies the panel's share of every B
// next to each other, [k][COLUMNS], up to DEPTH of k at a time (96 KiB with AVX-512: it stays in the second cache), then
// runs blocks of rows over it with all sums in registers.
//
// Order of summation. An element of C is the sum, over parts of DEPTH of the concatenated k, of one chain of fused
// multiply-adds each: it depends neither on the number of rows nor on the threads.
#pragma once
#include <algorithm>
#include <vector>
#include "pool.h"
#include "simd.h"

namespace transect {

constexpr int COLUMN_VECTORS = 2;
constexpr int COLUMNS = COLUMN_VECTORS * LANES;
constexpr int BLOCK_ROWS = LANES == 16 ? 12 : 6;  // 24 of 32, or 12 of 16 registers hold sums; a multiple of 3
constexpr int DEPTH = 768;
constexpr int TRANSPOSED_AT_ONCE = 64;

// A(r, k) = a[r * a_row + k * a_k], B(k, n) = scale * b[k * b_k + n * b_n]
struct Product {
  const float *a, *b;
  int64_t a_row, a_k, b_k, b_n, k;
  float scale;
};

// Columns first .. first+count-1 of B, k at a time, to panel[k][VECTORS * LANES]; the rest of a row is 0.
template <int VECTORS>
inline void copy_columns(const Product& p, int64_t k0, int64_t depth, int64_t first, int count, float* panel) {
  constexpr int WIDTH = VECTORS * LANES;
  const float* b = p.b + k0 * p.b_k + first * p.b_n;
  if (p.b_n == 1 && count == WIDTH) {
    for (int64_t k = 0; k < depth; k++)
      for (int v = 0; v < VECTORS; v++) store(panel + k * WIDTH + v * LANES, load(b + k * p.b_k + v * LANES) * p.scale);
    return;
  }
  if (count < WIDTH) std::fill(panel, panel + depth * WIDTH, 0.f);
  for (int64_t from = 0; from < depth; from += TRANSPOSED_AT_ONCE) {
    const int64_t end = std::min(depth, from + TRANSPOSED_AT_ONCE);
    for (int n = 0; n < count; n++)
      for (int64_t k = from; k < end; k++) panel[k * WIDTH + n] = p.scale * b[k * p.b_k + n * p.b_n];
  }
}

// A part of one product, its share of B in the panel.
struct Part {
  const float* a;
  int64_t a_row, a_k, depth;
};

template <int VECTORS, int ROWS>  // ROWS is 1 or a multiple of 3
inline void product_block(const std::vector<Part>& parts, const float* panel, int64_t row, float* c, int64_t ldc,
                          int count, bool add) {
  constexpr int WIDTH = VECTORS * LANES, THREES = (ROWS + 2) / 3;
  vf acc[ROWS][VECTORS] = {};
  for (const Part& part : parts) {
    const int64_t stride = part.a_row, step = part.a_k;
    const float* at[THREES];  // every third row: the two after it are one and two strides away
    for (int i = 0; i < THREES; i++) at[i] = part.a + (row + 3 * i) * stride;
    for (int64_t k = 0; k < part.depth; k++, panel += WIDTH) {
      vf b[VECTORS];
      for (int v = 0; v < VECTORS; v++) b[v] = load(panel + v * LANES);
      for (int r = 0; r < ROWS; r++) {
        const vf a = splat(at[r / 3][r % 3 * stride]);
        for (int v = 0; v < VECTORS; v++) acc[r][v] = fma(a, b[v], acc[r][v]);
      }
      for (int i = 0; i < THREES; i++) at[i] += step;
    }
  }
  for (int r = 0; r < ROWS; r++, c += ldc) {
    if (count == WIDTH) {
      for (int v = 0; v < VECTORS; v++) store(c + v * LANES, add ? load(c + v * LANES) + acc[r][v] : acc[r][v]);
    } else {
      for (int n = 0; n < count; n++) c[n] = (add ? c[n] : 0.f) + acc[r][n / LANES][n % LANES];
    }
  }
}

template <int VECTORS>
void product_panel(const Product* products, int number, int64_t row0, int64_t rows, int64_t first, int count, float* c,
                   int64_t ldc, bool add, float* scratch) {
  std::vector<Part> parts;
  parts.reserve(number);
  c += row0 * ldc + first;
  int which = 0;
  int64_t done = 0;  // of products[which]
  while (which < number) {
    parts.clear();
    int64_t held = 0;
    while (which < number && held < DEPTH) {
      const Product& p = products[which];
      const int64_t depth = std::min<int64_t>(p.k - done, DEPTH - held);
      copy_columns<VECTORS>(p, done, depth, first, count, scratch + held * VECTORS * LANES);
      parts.push_back({p.a + done * p.a_k, p.a_row, p.a_k, depth});
      held += depth;
      done += depth;
      if (done == p.k) which++, done = 0;
    }
    int64_t r = 0;
    for (; r + BLOCK_ROWS <= rows; r += BLOCK_ROWS)
      product_block<VECTORS, BLOCK_ROWS>(parts, scratch, row0 + r, c + r * ldc, ldc, count, add);
    for (; r + 3 <= rows; r += 3) product_block<VECTORS, 3>(parts, scratch, row0 + r, c + r * ldc, ldc, count, add);
    for (; r < rows; r++) product_block<VECTORS, 1>(parts, scratch, row0 + r, c + r * ldc, ldc, count, add);
    add = true;
  }
}

inline void products(Pool& pool, const Product* list, int number, int64_t rows, int64_t n, float* c, int64_t ldc,
                     bool add) {
  const int width = n <= LANES ? LANES : COLUMNS;
  const int64_t panels = (n + width - 1) / width;
  // Few panels are also cut along the rows, so that every thread has something to do until the end.
  const int64_t wanted = pool.threads() == 1 ? 1 : (4 * pool.threads() + panels - 1) / panels;
  const int64_t most = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  const int64_t cuts = std::max<int64_t>(1, std::min(wanted, most));
  const int64_t run = (most + cuts - 1) / cuts * BLOCK_ROWS;
  std::vector<float> scratch(size_t(pool.threads()) * DEPTH * COLUMNS + LANES);
  float* aligned = scratch.data() + (LANES - uintptr_t(scratch.data()) / 4 % LANES) % LANES;
  pool.run([&](int thread) {
    float* mine = aligned + size_t(thread) * DEPTH * COLUMNS;
    pool.share(int(panels * cuts), [&](int item) {
      const int64_t first = item / cuts * width, row = item % cuts * run;
      if (row >= rows) return;
      const int count = int(std::min<int64_t>(width, n - first));
      const int64_t here = std::min(run, rows - row);
      if (width == LANES) product_panel<1>(list, number, row, here, first, count, c, ldc, add, mine);
      else product_panel<COLUMN_VECTORS>(list, number, row, here, first, count, c, ldc, add, mine);
    });
  });
}

}  // namespace transect
