// Paged attention for a ragged batch: every query row of every sequence against the K and V that its block table names.
//
// Cache. K of a (block, kv head) is stored [head_dim][block_size], positions innermost, so that a vector holds one
// component of LANES positions and a score needs no sum across lanes; V is [block_size][head_dim]. Both float32, bf16 or fp8.
//
// Method. The positions of a sequence are cut into tiles of TILE at absolute multiples of TILE. A tile gives each query
// row a partial result (max m, sum l of exp(s - m), o = sum exp(s - m) V); partial results merge in the order of their
// tiles (the online softmax of Milakov and Gimelshein, 2018, as in FlashAttention, Dao et al., 2022). Tiles may run on
// different threads or one after another: the arithmetic of a row, and so its bits, are the same, and do not depend on
// the other rows of the batch or on how its prompt was cut into chunks.
#pragma once
#include <algorithm>
#include <limits>
#include "pool.h"
#include "simd.h"

namespace transect {

constexpr int TILE = 128;
constexpr int MAX_ROWS = LANES == 16 ? 12 : 6;  // query rows (queries x heads of one kv head) that share a pass over K and V
constexpr int ACCUMULATORS = LANES == 16 ? 24 : 12;  // registers for sums; the rest hold keys, values and one query
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// The ragged batch: row b has queries query_starts[b] .. query_starts[b+1]-1, the last positions of its seq_lens[b].
struct Batch {
  int rows;
  const int32_t* query_starts;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  int64_t table_stride;
};

template <class E>
struct Cache {  // of one layer
  E *k, *v;
  int kv_heads, head_dim, block_size;
  int64_t offset(int64_t block, int head) const { return (block * kv_heads + head) * int64_t(head_dim) * block_size; }
};

enum KV : int32_t { KV_F32 = 0, KV_BF16 = 1, KV_FP8 = 2 };  // in what K and V are cached

template <class F>
void with_kv(int kv, F f) {
  if (kv == KV_BF16) f.template operator()<bf16>();
  else if (kv == KV_FP8) f.template operator()<fp8>();
  else f.template operator()<float>();
}

struct Partial {  // m, l and then head_dim floats of o, for one query row
  static int floats(int head_dim) { return head_dim + LANES; }
  float* at;
  float& m() { return at[0]; }
  float& l() { return at[1]; }
  float* o() { return at + LANES; }
};

struct Partials {  // of neighbouring query rows
  float* at;
  int floats;
  Partial operator[](int row) const { return {at + int64_t(row) * floats}; }
  Partials from(int row) const { return {at + int64_t(row) * floats, floats}; }
};

inline void merge(Partial into, Partial tile, int head_dim) {
  if (tile.m() == MINUS_INFINITY) return;
  const float m = std::max(into.m(), tile.m());
  const float keep = exp(splat(into.m() - m))[0], add = exp(splat(tile.m() - m))[0];
  for (int d = 0; d < head_dim; d += LANES)
    store(into.o() + d, fma(load(into.o() + d), splat(keep), load(tile.o() + d) * splat(add)));
  into.l() = into.l() * keep + tile.l() * add;
  into.m() = m;
}

// scores[r][p ...] = q_r . k for NP vectors of LANES positions; several vectors at once keep the multiply-adds busy
template <class E, int R, int NP>
inline void score_vectors(const float* q, int p, const int32_t* table, const Cache<E>& cache, int head, float* scores) {
  const E* k[NP];
  for (int n = 0; n < NP; n++) {
    const int at = p + n * LANES;
    k[n] = cache.k + cache.offset(table[at / cache.block_size], head) + at % cache.block_size;
  }
  vf acc[NP][R] = {};
  for (int d = 0; d < cache.head_dim; d++) {
    vf key[NP];
    for (int n = 0; n < NP; n++) key[n] = load(k[n] + d * cache.block_size);
    for (int r = 0; r < R; r++) {
      const vf query = splat(q[r * cache.head_dim + d]);
      for (int n = 0; n < NP; n++) acc[n][r] = fma(key[n], query, acc[n][r]);
    }
  }
  for (int n = 0; n < NP; n++)
    for (int r = 0; r < R; r++) store(scores + r * TILE + p + n * LANES, acc[n][r]);
}

// out_r[d ...] = sum over positions first..last of p_r V, for NV vectors of head components
template <class E, int R, int NV>
inline void weigh_values(const float* p, int first, int last, const int32_t* table, const Cache<E>& cache, int head,
                         int d, Partials out) {
  vf acc[R][NV] = {};
  for (int i = first; i <= last; i++) {
    const E* value = cache.v + cache.offset(table[i / cache.block_size], head) + int64_t(i % cache.block_size) * cache.head_dim + d;
    vf v[NV];
    for (int n = 0; n < NV; n++) v[n] = load(value + n * LANES);
    for (int r = 0; r < R; r++) {
      const vf weight = splat(p[r * TILE + i]);
      for (int n = 0; n < NV; n++) acc[r][n] = fma(v[n], weight, acc[r][n]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < NV; n++) store(out[r].o() + d + n * LANES, acc[r][n]);
}

// R query rows against one tile. `first` and `last` bound, per row, the positions that it sees, relative to the tile;
// `table` is the block table from the tile's first block on.
template <class E, int R>
void attend_tile(const float* q, const int* first, const int* last, const int32_t* table, const Cache<E>& cache,
                 int head, Partials out) {
  alignas(64) float scores[R * TILE];
  int low = TILE, high = -1;
  for (int r = 0; r < R; r++) {
    low = std::min(low, std::max(first[r], 0));
    high = std::max(high, std::min(last[r], TILE - 1));
  }
  constexpr int NP = std::min(4, ACCUMULATORS / R), NV = std::min(4, ACCUMULATORS / R);
  const int begin = low / LANES * LANES;
  int p = begin;
  for (; p + (NP - 1) * LANES <= high; p += NP * LANES) score_vectors<E, R, NP>(q, p, table, cache, head, scores);
  for (; p <= high; p += LANES) score_vectors<E, R, 1>(q, p, table, cache, head, scores);
  vi lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  for (int r = 0; r < R; r++) {
    float* row = scores + r * TILE;
    vf top = splat(MINUS_INFINITY);
    for (int p = begin; p <= high; p += LANES) {
      const vi at = lane + p;
      const vf s = select((at >= first[r]) & (at <= last[r]), load(row + p), splat(MINUS_INFINITY));
      store(row + p, s);
      top = max(s, top);
    }
    const float m = max(top);
    out[r].m() = m;
    vf total = {};
    for (int p = begin; p <= high; p += LANES) {
      const vf e = m == MINUS_INFINITY ? vf{} : exp(load(row + p) - splat(m));
      store(row + p, e);
      total += e;
    }
    out[r].l() = sum(total);
  }
  int d = 0;
  for (; d + NV * LANES <= cache.head_dim; d += NV * LANES) weigh_values<E, R, NV>(scores, low, high, table, cache, head, d, out);
  for (; d < cache.head_dim; d += LANES) weigh_values<E, R, 1>(scores, low, high, table, cache, head, d, out);
}

// Any number of rows, in passes of the sizes that are compiled.
template <class E>
void attend_rows(int rows, const float* q, const int* first, const int* last, const int32_t* table,
                 const Cache<E>& cache, int head, Partials out) {
  auto passes = [&]<int R>() {
    for (; rows >= R; rows -= R, q += R * cache.head_dim, first += R, last += R, out = out.from(R))
      attend_tile<E, R>(q, first, last, table, cache, head, out);
  };
  if constexpr (MAX_ROWS >= 12) {
    passes.template operator()<12>();
    passes.template operator()<8>();
  }
  passes.template operator()<6>();
  passes.template operator()<4>();
  passes.template operator()<3>();
  passes.template operator()<2>();
  passes.template operator()<1>();
}

// All of `out` [T][heads][head_dim] from `q` of the same shape, already rotated, after this step's K and V were written.
// Called by every thread of the team; `partials` holds what `attention_floats` says.
template <class E>
struct Attention {
  Batch batch;
  Cache<E> cache;
  int heads;
  float scale;
  int window;  // a query sees itself and the window - 1 positions before it; 0 is no window
  const float* q;
  float* out;
  float* partials;
  std::atomic<int>* finished;  // [kv_heads], zeros before and after: tiles of the only query that are done
  const float* sinks = nullptr;  // [heads], a further score of each query that has no value; or null

  int group() const { return heads / cache.kv_heads; }
  int queries_per_task() const { return std::max(1, MAX_ROWS / group()); }
  int tiles(int b) const { return (batch.seq_lens[b] + TILE - 1) / TILE; }

  // The work items: for each row, blocks of its queries, times kv heads.
  int tasks() const {
    int count = 0;
    for (int b = 0; b < batch.rows; b++) count += query_blocks(b);
    return count * cache.kv_heads;
  }
  int query_blocks(int b) const {
    const int queries = batch.query_starts[b + 1] - batch.query_starts[b];
    return (queries + queries_per_task() - 1) / queries_per_task();
  }
  // With a single query and few tasks the tiles of a row are shared out too.
  bool split(int threads) const { return batch.query_starts[batch.rows] == 1 && tasks() < 4 * threads; }
  static int64_t partial_floats(int head_dim, int heads, int longest) {
    return int64_t((longest + TILE - 1) / TILE) * heads * Partial::floats(head_dim);
  }

  void run(Pool& pool) {
    if (split(pool.threads())) return run_split(pool);
    pool.share(tasks(), [&](int task) {
      const int head = task % cache.kv_heads;
      int block = task / cache.kv_heads, b = 0;
      while (block >= query_blocks(b)) block -= query_blocks(b++);
      const int begin = block * queries_per_task();
      const int queries = std::min(queries_per_task(), batch.query_starts[b + 1] - batch.query_starts[b] - begin);
      run_queries(b, head, begin, queries);
    });
  }

 private:
  int position(int b, int query) const {
    return batch.seq_lens[b] - (batch.query_starts[b + 1] - batch.query_starts[b]) + query;
  }
  const int32_t* table(int b, int tile) const {
    return batch.block_tables + b * batch.table_stride + int64_t(tile) * (TILE / cache.block_size);
  }
  int first_tile(int position) const { return window ? std::max(0, position - window + 1) / TILE : 0; }

  // One tile for some rows of (b, head); a group wider than MAX_ROWS goes in several passes.
  void one_tile(int b, int tile, int head, int begin, int rows, const float* scaled, Partials result) {
    for (int r0 = 0; r0 < rows; r0 += MAX_ROWS) {
      const int n = std::min(MAX_ROWS, rows - r0);
      int first[MAX_ROWS], last[MAX_ROWS];
      for (int r = 0; r < n; r++) {
        const int at = position(b, begin + (r0 + r) / group()) - tile * TILE;
        last[r] = at;
        first[r] = window ? at - window + 1 : -tile * TILE;
      }
      attend_rows<E>(n, scaled + r0 * cache.head_dim, first, last, table(b, tile), cache, head, result.from(r0));
    }
  }

  void scale_queries(int b, int head, int begin, int rows, float* scaled) const {
    const int D = cache.head_dim;
    for (int r = 0; r < rows; r++) {
      const float* from = q + (int64_t(batch.query_starts[b] + begin + r / group()) * heads + head * group() + r % group()) * D;
      for (int d = 0; d < D; d++) scaled[r * D + d] = from[d] * scale;
    }
  }

  void write(int b, int head, int begin, int r, Partial done) {
    const int D = cache.head_dim;
    float* to = out + (int64_t(batch.query_starts[b] + begin + r / group()) * heads + head * group() + r % group()) * D;
    const float inverse = 1.f / (done.l() + (sinks ? std::exp(sinks[head * group() + r % group()] - done.m()) : 0.f));
    for (int d = 0; d < D; d++) to[d] = done.o()[d] * inverse;
  }

  struct Rows {  // query rows and two sets of partial results, for one task
    std::vector<float> memory;
    float* scaled;
    Partials running, tile;
    Rows(int rows, int head_dim) : memory(size_t(rows) * (head_dim + 2 * Partial::floats(head_dim))), scaled(memory.data()) {
      running = {scaled + size_t(rows) * head_dim, Partial::floats(head_dim)};
      tile = running.from(rows);
      for (int r = 0; r < rows; r++) running[r].m() = MINUS_INFINITY;
    }
  };

  void run_queries(int b, int head, int begin, int queries) {
    const int rows = queries * group();
    Rows state(rows, cache.head_dim);
    scale_queries(b, head, begin, rows, state.scaled);
    const int last = position(b, begin + queries - 1) / TILE;
    for (int t = first_tile(position(b, begin)); t <= last; t++) {
      one_tile(b, t, head, begin, rows, state.scaled, state.tile);
      for (int r = 0; r < rows; r++) merge(state.running[r], state.tile[r], cache.head_dim);
    }
    for (int r = 0; r < rows; r++) write(b, head, begin, r, state.running[r]);
  }

  // One query: tiles in parallel into `partials`; whoever does the last one of a head merges them in order.
  void run_split(Pool& pool) {
    const int rows = group(), floats = Partial::floats(cache.head_dim), skip = first_tile(position(0, 0)), count = tiles(0) - skip;
    auto partial = [&](int tile, int head) { return partials + (int64_t(tile) * heads + head * rows) * floats; };
    pool.share(count * cache.kv_heads, [&](int item) {
      const int head = item % cache.kv_heads, t = skip + item / cache.kv_heads;
      Rows state(rows, cache.head_dim);
      scale_queries(0, head, 0, rows, state.scaled);
      one_tile(0, t, head, 0, rows, state.scaled, {partial(t, head), floats});
      if (finished[head].fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
      finished[head].store(0, std::memory_order_relaxed);
      for (int tile = skip; tile < tiles(0); tile++)
        for (int r = 0; r < rows; r++) merge(state.running[r], Partial{partial(tile, head) + r * floats}, cache.head_dim);
      for (int r = 0; r < rows; r++) write(0, head, 0, r, state.running[r]);
    });
  }
};

// One token's K, and its V, of one head into their slot.
template <class E>
inline void write_key(const Cache<E>& cache, int64_t block, int slot, int head, const float* k) {
  E* key = cache.k + cache.offset(block, head) + slot;
  for (int d = 0; d < cache.head_dim; d += LANES) {
    alignas(64) E converted[LANES];
    store(converted, load(k + d));
    for (int i = 0; i < LANES; i++) key[int64_t(d + i) * cache.block_size] = converted[i];
  }
}
template <class E>
inline void write_value(const Cache<E>& cache, int64_t block, int slot, int head, const float* v) {
  E* value = cache.v + cache.offset(block, head) + int64_t(slot) * cache.head_dim;
  for (int d = 0; d < cache.head_dim; d += LANES) store(value + d, load(v + d));
}

}  // namespace transect
