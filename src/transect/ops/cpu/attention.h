// Paged attention for a ragged batch: every query row of every sequence against the K and V that its block table names.
//
// Cache. K of a (block, kv head) is stored [head_dim][block_size], positions innermost, so that a vector holds one
// component of LANES positions and a score needs no sum across lanes; V is [block_size][head_dim]. Both float32, bf16 or fp8.
//
// Method. The positions of a sequence are cut into tiles of TILE at absolute multiples of TILE. A tile gives each query
// row a partial result (max m, sum l of exp(s - m), o = sum exp(s - m) V); partial results merge in the order of their
// tiles (the online softmax of Milakov and Gimelshein, 2018, as in FlashAttention, Dao et al., 2022). Tiles may run on
// different threads or one after another: the arithmetic of a row, and so its bits, are the same, and do not depend on
// the other rows of the batch or on how its prompt was cut into chunks. ``Pieces`` shares the tiles out.
#pragma once
#include <algorithm>
#include <deque>
#include <limits>
#include "pool.h"
#include "simd.h"

namespace transect {

constexpr int TILE = 128;
constexpr int MAX_ROWS = LANES == 16 ? 12 : 6;  // query rows (queries x heads of one kv head) that share a pass over K and V
constexpr int ACCUMULATORS = LANES == 16 ? 24 : 12;  // registers for sums; the rest hold keys, values and one query
constexpr int CACHE_LINE = 64;
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
  const float m = std::max(into.m(), tile.m()), less = exp(splat(std::min(into.m(), tile.m()) - m))[0];
  const float keep = into.m() < m ? less : 1.f, add = tile.m() < m ? less : 1.f;
  for (int d = 0; d < head_dim; d += LANES)
    store(into.o() + d, fma(load(into.o() + d), splat(keep), load(tile.o() + d) * splat(add)));
  into.l() = into.l() * keep + tile.l() * add;
  into.m() = m;
}

// A tile's part of a block table. For each entry the entry ``ahead`` further on, in the next tile, is prefetched, up to
// entry ``last``; 0 to prefetch nothing.
struct TileBlocks {
  const int32_t* table;
  int ahead = 0, last = 0;
  int32_t operator[](int i) const { return table[i]; }
  int32_t next(int i) const { return table[ahead ? std::min(i + ahead, last) : i]; }
};

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }  // into the second-level cache

// scores[r][p ...] = q_r . k for NP vectors of LANES positions; several vectors at once keep the multiply-adds busy
template <class E, int R, int NP>
inline void score_vectors(const float* q, int p, TileBlocks blocks, const Cache<E>& cache, int head, float* scores) {
  const E *k[NP], *next[NP];
  for (int n = 0; n < NP; n++) {
    const int block = (p + n * LANES) / cache.block_size, slot = (p + n * LANES) % cache.block_size;
    k[n] = cache.k + cache.offset(blocks[block], head) + slot;
    next[n] = cache.k + cache.offset(blocks.next(block), head) + slot;
  }
  vf acc[NP][R] = {};
  constexpr int OF_A_LINE = std::max(1, int(CACHE_LINE / (16 * sizeof(E))));  // components of a block of 16 positions
  for (int d = 0; d < cache.head_dim; d++) {
    if (d % OF_A_LINE == 0)
      for (int n = 0; n < NP; n++) prefetch(next[n] + d * cache.block_size);
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
inline void weigh_values(const float* p, int first, int last, TileBlocks blocks, const Cache<E>& cache, int head, int d,
                         Partials out) {
  vf acc[R][NV] = {};
  for (int i = first; i <= last;) {
    const int block = i / cache.block_size, end = std::min(last + 1, (block + 1) * cache.block_size);
    const int64_t slot = int64_t(i % cache.block_size) * cache.head_dim + d;
    const E* value = cache.v + cache.offset(blocks[block], head) + slot;
    const E* next = cache.v + cache.offset(blocks.next(block), head) + slot;
    for (; i < end; i++, value += cache.head_dim, next += cache.head_dim) {
      vf v[NV];
      for (int n = 0; n < NV; n++) v[n] = load(value + n * LANES);
      for (int n = 0; n < NV; n += std::max(1, int(CACHE_LINE / (LANES * sizeof(E))))) prefetch(next + n * LANES);
      for (int r = 0; r < R; r++) {
        const vf weight = splat(p[r * TILE + i]);
        for (int n = 0; n < NV; n++) acc[r][n] = fma(v[n], weight, acc[r][n]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < NV; n++) store(out[r].o() + d + n * LANES, acc[r][n]);
}

// R query rows against one tile. `first` and `last` bound, per row, the positions that it sees, relative to the tile;
// `blocks` begin with the tile's first block.
template <class E, int R>
void attend_tile(const float* q, const int* first, const int* last, TileBlocks blocks, const Cache<E>& cache, int head,
                 Partials out) {
  alignas(64) float scores[R * TILE];
  int low = TILE, high = -1;
  for (int r = 0; r < R; r++) {
    low = std::min(low, std::max(first[r], 0));
    high = std::max(high, std::min(last[r], TILE - 1));
  }
  constexpr int NP = std::min(4, ACCUMULATORS / R), NV = std::min(4, ACCUMULATORS / R);
  const int begin = low / LANES * LANES;
  int p = begin;
  for (; p + (NP - 1) * LANES <= high; p += NP * LANES) score_vectors<E, R, NP>(q, p, blocks, cache, head, scores);
  for (; p <= high; p += LANES) score_vectors<E, R, 1>(q, p, blocks, cache, head, scores);
  vi lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  for (int r = 0; r < R; r++) {
    float* row = scores + r * TILE;
    vf top = splat(MINUS_INFINITY);
    if (first[r] > begin || last[r] < high / LANES * LANES + LANES - 1)  // some of these positions are not seen
      for (int p = begin; p <= high; p += LANES) {
        const vi at = lane + p;
        store(row + p, select((at >= first[r]) & (at <= last[r]), load(row + p), splat(MINUS_INFINITY)));
      }
    for (int p = begin; p <= high; p += LANES) top = max(load(row + p), top);
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
  for (; d + NV * LANES <= cache.head_dim; d += NV * LANES) weigh_values<E, R, NV>(scores, low, high, blocks, cache, head, d, out);
  for (; d < cache.head_dim; d += LANES) weigh_values<E, R, 1>(scores, low, high, blocks, cache, head, d, out);
}

// Any number of rows, in passes of the sizes that are compiled.
template <class E>
void attend_rows(int rows, const float* q, const int* first, const int* last, TileBlocks blocks, const Cache<E>& cache,
                 int head, Partials out) {
  auto passes = [&]<int R>() {
    for (; rows >= R; rows -= R, q += R * cache.head_dim, first += R, last += R, out = out.from(R))
      attend_tile<E, R>(q, first, last, blocks, cache, head, out);
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

// A unit of work: neighbouring tiles of neighbouring queries of one kv head. If the tiles of a group of queries are cut
// into several pieces, the thread that finishes the last piece merges the results.
struct Piece {
  int b, head, query, queries, first, end;  // tiles first .. end-1
  int cut = -1;                             // number among the cuts, or -1: it has all tiles
};
struct Cut {
  int first, end, pieces;
  int64_t partials;  // place of its first tile's results
  std::atomic<int> finished{0};
};

// The work of a step's attention, for all layers with the same window, as pieces that a team of threads shares. Queries
// deep in a context take up to hundreds of times as long as those at its beginning, and a step may have few of them. So
// no piece is larger than a fraction of a thread's share of the work.
struct Pieces {
  std::vector<Piece> all;
  std::deque<Cut> cuts;
  int64_t floats = 0;  // of the results of all tiles that have been cut apart

  static constexpr int OF_A_SHARE = 8, PASSES = 4;  // least pieces of a thread's share; most passes over a tile in a piece

  Pieces(const Batch& batch, int heads, int kv_heads, int head_dim, int window, int threads) {
    const int group = heads / kv_heads, least = std::max(1, MAX_ROWS / group);
    auto queries_of = [&](int b) { return batch.query_starts[b + 1] - batch.query_starts[b]; };
    auto first_tile = [&](int position) { return window ? std::max(0, position - window + 1) / TILE : 0; };
    int64_t passes = 0;  // over a tile
    for (int b = 0; b < batch.rows; b++) {
      const int tiles = (batch.seq_lens[b] - 1) / TILE + 1 - first_tile(batch.seq_lens[b] - queries_of(b));
      passes += int64_t((queries_of(b) + least - 1) / least) * kv_heads * tiles;
    }
    const int most = least * int(std::clamp<int64_t>(passes / (OF_A_SHARE * threads), 1, PASSES));
    int64_t work = 0;  // tiles times rows
    for (int b = 0; b < batch.rows; b++)
      for (int head = 0; head < kv_heads; head++)
        for (int query = 0; query < queries_of(b); query += most) {
          const int queries = std::min(most, queries_of(b) - query), at = batch.seq_lens[b] - queries_of(b) + query;
          const int first = first_tile(at), end = (at + queries - 1) / TILE + 1;
          all.push_back({b, head, query, queries, first, end});
          work += int64_t(end - first) * queries;
        }
    const int64_t share = work / (OF_A_SHARE * threads) + 1;
    if (threads == 1) return;
    std::vector<Piece> whole;
    whole.swap(all);
    for (Piece each : whole) {
      const int tiles = each.end - each.first, count = std::min<int64_t>(tiles, (tiles * each.queries + share - 1) / share);
      if (count > 1) {
        Cut& cut = cuts.emplace_back();
        cut.first = each.first, cut.end = each.end, cut.pieces = count, cut.partials = floats;
        floats += int64_t(tiles) * each.queries * group * Partial::floats(head_dim);
        each.cut = int(cuts.size()) - 1;
      }
      const int begin = each.first;
      for (int n = 0; n < count; n++) {
        each.first = begin + tiles * n / count, each.end = begin + tiles * (n + 1) / count;
        all.push_back(each);
      }
    }
  }
};

// All of `out` [T][heads][head_dim] from `q` of the same shape, already rotated, after this step's K and V were written.
// Called by every thread of the team.
template <class E>
struct Attention {
  Batch batch;
  Cache<E> cache;
  int heads;
  float scale;
  int window;  // a query sees itself and the window - 1 positions before it; 0 is no window
  const float* q;
  float* out;
  Pieces& pieces;
  float* partials;               // `pieces.floats`
  const float* sinks = nullptr;  // [heads], a further score of each query that has no value; or null

  void run(Pool& pool) {
    pool.share(int(pieces.all.size()), [&](int item) { run_piece(pieces.all[item]); });
  }

 private:
  int group() const { return heads / cache.kv_heads; }
  int position(int b, int query) const {
    return batch.seq_lens[b] - (batch.query_starts[b + 1] - batch.query_starts[b]) + query;
  }

  // One tile for some rows of a piece; those beyond MAX_ROWS go in further passes, which find the tile in a cache.
  void one_tile(const Piece& piece, int tile, int rows, const float* scaled, Partials result) {
    const int of_tile = TILE / cache.block_size;
    const int32_t* table = batch.block_tables + piece.b * batch.table_stride + int64_t(tile) * of_tile;
    TileBlocks blocks{table, tile + 1 < piece.end ? of_tile : 0, (batch.seq_lens[piece.b] - 1) / cache.block_size - tile * of_tile};
    for (int r0 = 0; r0 < rows; r0 += MAX_ROWS, blocks.ahead = 0) {
      const int n = std::min(MAX_ROWS, rows - r0);
      int first[MAX_ROWS], last[MAX_ROWS];
      for (int r = 0; r < n; r++) {
        const int at = position(piece.b, piece.query + (r0 + r) / group()) - tile * TILE;
        last[r] = at;
        first[r] = window ? at - window + 1 : -tile * TILE;
      }
      attend_rows<E>(n, scaled + r0 * cache.head_dim, first, last, blocks, cache, piece.head, result.from(r0));
    }
  }

  // The place of a piece's row in `q` and `out`.
  int64_t place(const Piece& piece, int r) const {
    const int64_t token = batch.query_starts[piece.b] + piece.query + r / group();
    return (token * heads + piece.head * group() + r % group()) * cache.head_dim;
  }

  void write(const Piece& piece, int r, Partial done) {
    const float sink = sinks ? std::exp(sinks[piece.head * group() + r % group()] - done.m()) : 0.f;
    const float inverse = 1.f / (done.l() + sink);
    for (int d = 0; d < cache.head_dim; d++) out[place(piece, r) + d] = done.o()[d] * inverse;
  }

  void run_piece(const Piece& piece) {
    const int rows = piece.queries * group(), D = cache.head_dim, floats = Partial::floats(D);
    std::vector<float> memory(size_t(rows) * (D + 2 * floats));
    float* scaled = memory.data();
    const Partials running{scaled + size_t(rows) * D, floats}, tile = running.from(rows);
    for (int r = 0; r < rows; r++) {
      running[r].m() = MINUS_INFINITY;
      for (int d = 0; d < D; d++) scaled[r * D + d] = q[place(piece, r) + d] * scale;
    }
    auto merge_tile = [&](Partials from) {
      for (int r = 0; r < rows; r++) merge(running[r], from[r], D);
    };
    if (piece.cut < 0) {
      for (int t = piece.first; t < piece.end; t++) {
        one_tile(piece, t, rows, scaled, tile);
        merge_tile(tile);
      }
    } else {
      Cut& cut = pieces.cuts[piece.cut];
      auto of_tile = [&](int t) { return Partials{partials + cut.partials, floats}.from((t - cut.first) * rows); };
      for (int t = piece.first; t < piece.end; t++) one_tile(piece, t, rows, scaled, of_tile(t));
      if (cut.finished.fetch_add(1, std::memory_order_acq_rel) + 1 < cut.pieces) return;
      cut.finished.store(0, std::memory_order_relaxed);  // for the next layer
      for (int t = cut.first; t < cut.end; t++) merge_tile(of_tile(t));
    }
    for (int r = 0; r < rows; r++) write(piece, r, running[r]);
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
