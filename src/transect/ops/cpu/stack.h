// The whole stack of decoder layers in one call: x <- x + attention(norm(x)); x <- x + mlp(norm(x)), layer after layer,
// for every token of a ragged batch. One team of threads runs all layers; see pool.h for why.
#pragma once
#include <map>
#include <memory>
#include "attention.h"
#include "experts.h"
#include "low_rank.h"
#include "norm.h"
#include "packed.h"
#include "pool.h"

namespace transect {

enum Activation : int32_t { SILU = 0, GELU_TANH = 1, GELU_EXACT = 2 };

struct StackConfig {  // mirrored field by field in stack.py
  int32_t layers, dim, heads, kv_heads, head_dim, ffn, block_size;
  int32_t layer_norm, gated, activation, rotary_half, kv, bfloat16;  // bfloat16: products round their inputs to it
  float norm_eps, scale;
  const float *norm, *norm_bias;  // after the layers
  int32_t qk_norm_whole;          // q and k are normalised over all heads together
};

struct Rotation {  // cosines and sines [positions][rotary_half], or null where positions are learned
  const float *cosine, *sine;
};

struct Layer {  // mirrored field by field in stack.py
  const float *attention_norm, *attention_norm_bias, *mlp_norm, *mlp_norm_bias, *q_norm, *k_norm;
  const Packed *q, *k, *v, *o, *gate, *up, *down;
  int64_t window;
  const float *k_scale, *v_scale;  // [kv_heads], what keys and values are divided by; or null
  const Experts* experts;  // instead of gate, up and down; or null
  const float* sinks;      // of the attention; or null
};

struct Taps {  // x in front of `layers`, which ascend, is copied to `states` [count][tokens][dim]
  int count;
  const int32_t* layers;
  float* states;
};

class Stack {
 public:
  Stack(const StackConfig& config, const Layer* layers, Pool* pool)
      : c_(config), layers_(layers, layers + config.layers), pool_(*pool), mixture_(*pool, config.dim, config.bfloat16) {
    widest_ = std::max({c_.dim, c_.heads * c_.head_dim, c_.ffn});
    for (const Layer& layer : layers_)
      if (const Experts* e = layer.experts) widest_ = std::max({widest_, e->width(), e->shared_width()});
    ahead_.resize(pool_.threads());
    scratch_.resize(size_t(pool_.threads()) * widest_ * TILE_COLUMNS + 64);
    for (const Layer& each : layers_)
      for (auto place : {std::array{each.q, each.k, each.v}, {each.o}, {each.gate, each.up}, {each.down}}) {
        int64_t words = 0;
        for (const Packed* w : place) words += w && c_.bfloat16 ? rounded_words(*w) : 0;
        rounded_words_ = std::max(rounded_words_, words);
      }
  }

  // x [tokens][dim] float32 in and out; caches [layers][blocks][kv_heads][head_dim x block_size]; `slots` as in low_rank.h,
  // or null: no token has an adapter. With `finish` the norm after the layers is applied too.
  void run(float* x, int tokens, const int64_t* positions, const Batch& batch, Rotation rotation, void* k_cache, void* v_cache,
           int64_t blocks, const int32_t* slots, const LowRank* const* table, Taps taps, bool finish) {
    runs_ = slots ? runs_of(tokens, slots, table) : std::vector<Run>();
    run_of_.clear();
    for (const Run& run : runs_) run_of_.insert(run_of_.end(), run.count, &run);
    reserve(tokens, batch);
    rotation_ = rotation;
    with_kv(c_.kv, [&]<class E>() { run_layers<E>(x, tokens, positions, batch, (E*)k_cache, (E*)v_cache, blocks, taps, finish); });
  }

 private:
  struct Part { const Packed* weight; float* y; };

  void reserve(int tokens, const Batch& batch) {
    auto grow = [](auto& v, size_t n) { if (v.size() < n) v.resize(n); };
    grow(rounded_, size_t(tokens) * rounded_words_);
    grow(normed_, size_t(std::max(tokens, pool_.threads())) * c_.dim);
    grow(q_, size_t(tokens) * c_.heads * c_.head_dim);
    grow(k_, size_t(tokens) * c_.kv_heads * c_.head_dim);
    grow(v_, size_t(tokens) * c_.kv_heads * c_.head_dim);
    grow(attended_, size_t(tokens) * c_.heads * c_.head_dim);
    grow(hidden_, size_t(tokens) * c_.ffn);
    if (c_.gated) grow(gate_, size_t(tokens) * c_.ffn);
    for (const Layer& layer : layers_)
      if (layer.experts) mixture_.reserve(*layer.experts, tokens);
    pieces_.clear();
    for (const Layer& layer : layers_) {
      const int window = int(layer.window);
      const auto& made = pieces_.try_emplace(window, batch, c_.heads, c_.kv_heads, c_.head_dim, window, pool_.threads());
      grow(partials_, made.first->second.floats);
    }
    low_stride_ = 0;
    for (const Run& run : runs_)
      for (int i = 0; run.places && i < c_.layers * PLACES; i++) low_stride_ = std::max(low_stride_, run.places[i].a.n);
    grow(low_, size_t(tokens) * low_stride_);
  }

  template <class E>
  void run_layers(float* x, int tokens, const int64_t* positions, const Batch& batch, E* k_cache, E* v_cache, int64_t blocks,
                  Taps taps, bool finish) {
    const int64_t layer_size = blocks * c_.kv_heads * c_.head_dim * c_.block_size;
    std::vector<int32_t> row_of(tokens);
    for (int b = 0; b < batch.rows; b++)
      for (int t = batch.query_starts[b]; t < batch.query_starts[b + 1]; t++) row_of[t] = b;
    pool_.run([&](int thread) {
      float* scratch = scratch_.data() + size_t(thread) * widest_ * TILE_COLUMNS;
      int tap = 0;
      for (int i = 0; i < c_.layers; i++) {
        if (tap < taps.count && taps.layers[tap] == i) {
          float* to = taps.states + int64_t(tap++) * tokens * c_.dim;
          pool_.share(tokens, [&](int t) { std::memcpy(to + int64_t(t) * c_.dim, x + int64_t(t) * c_.dim, c_.dim * sizeof(float)); });
        }
        const Layer& layer = layers_[i];
        const Cache<E> cache{k_cache + i * layer_size, v_cache + i * layer_size, c_.kv_heads, c_.head_dim, c_.block_size};
        const int places = i * PLACES;
        const float* normed = normalize(x, tokens, layer.attention_norm, layer.attention_norm_bias, places + QKV, thread);
        project({{layer.q, q_.data()}, {layer.k, k_.data()}, {layer.v, v_.data()}}, normed, tokens, STORE, scratch,
                places + QKV, thread, c_.head_dim / GROUP_ROWS, [&](int part, int first, int count) {
                  if (c_.qk_norm_whole) return;
                  for (int h = first; h < first + count; h++)
                    for (int t = 0; t < tokens; t++) place(layer, part, h, t, positions[t], row_of[t], batch, cache);
                });
        if (c_.qk_norm_whole) pool_.share(tokens * 3, [&](int item) {
          const int part = item % 3, t = item / 3, heads = part ? c_.kv_heads : c_.heads, width = heads * c_.head_dim;
          float* whole = (part ? k_ : q_).data() + int64_t(t) * width;
          if (part < 2) rms_norm(whole, part ? layer.k_norm : layer.q_norm, c_.norm_eps, width, whole);
          for (int h = 0; h < heads; h++) place(layer, part, h, t, positions[t], row_of[t], batch, cache);
        });
        Attention<E>{batch, cache, c_.heads, c_.scale, int(layer.window), q_.data(), attended_.data(),
                     pieces_.at(int(layer.window)), partials_.data(), layer.sinks}.run(pool_);
        if (layer.v_scale) pool_.share(tokens, [&](int t) { multiply_heads(attended_.data(), t, layer.v_scale); });
        shrink_all(places + O, attended_.data(), layer.o->k);
        project({{layer.o, x}}, attended_.data(), tokens, ADD, scratch, places + O, thread);
        normed = normalize(x, tokens, layer.mlp_norm, layer.mlp_norm_bias, places + GATE_UP, thread);
        if (layer.experts) {
          mixture_.add(*layer.experts, normed, tokens, x, scratch);
          continue;
        }
        feed_forward(layer, normed, tokens, scratch, places + GATE_UP, thread);
        shrink_all(places + DOWN, hidden_.data(), layer.down->k);
        project({{layer.down, x}}, hidden_.data(), tokens, ADD, scratch, places + DOWN, thread);
      }
      if (finish) pool_.share(tokens, [&](int t) { normalize_one(x + int64_t(t) * c_.dim, c_.norm, c_.norm_bias, x + int64_t(t) * c_.dim); });
    });
  }

  void normalize_one(const float* from, const float* weight, const float* bias, float* to) const {
    if (c_.layer_norm) layer_norm(from, weight, bias, c_.norm_eps, c_.dim, to);
    else rms_norm(from, weight, c_.norm_eps, c_.dim, to);
  }

  // Computes the norm, and the adapters' low-rank values for the product after it. Returns the address of the normed rows
  // for this thread: with one token each thread computes its own copy, which is faster than a barrier.
  const float* normalize(const float* x, int tokens, const float* weight, const float* bias, int place, int thread) {
    const bool own = tokens == 1 && runs_.empty();
    float* normed = normed_.data() + (own ? int64_t(thread) * c_.dim : 0);
    auto one = [&](int t) { normalize_one(x + int64_t(t) * c_.dim, weight, bias, normed + int64_t(t) * c_.dim); };
    if (own) return one(0), normed;
    if (runs_.empty()) return pool_.share(tokens, one), normed;
    pool_.share(tokens, [&](int t) {
      one(t);
      shrink(*run_of_[t], t, place, normed, c_.dim, low_.data(), low_stride_);
    });
    return normed;
  }

  void shrink_all(int place, const float* x, int64_t ldx) {
    if (low_stride_)
      pool_.share(int(run_of_.size()), [&](int t) { shrink(*run_of_[t], t, place, x, ldx, low_.data(), low_stride_); });
  }

  // Queues a prefetch: the next piece of the adapters' A matrices for this thread's share of the tokens (Pool::share).
  void prefetch_a(int place, int thread) {
    Ahead& ahead = ahead_[thread];
    const int piece = ahead.done++;
    if (place >= c_.layers * PLACES || piece >= ahead.blocks) return;
    const LowRank* before = nullptr;
    const int tokens = int(run_of_.size()), threads = pool_.threads();
    for (int t = tokens * thread / threads; t < tokens * (thread + 1) / threads; t++) {
      const LowRank* own = run_of_[t]->places;
      if (!own || own == before) continue;
      before = own;
      const Packed& a = own[place].a;
      const int64_t bytes = a.n ? a.groups() * group_bytes(a.kind, a.k) : 0, from = bytes * piece / ahead.blocks;
      ahead.lines.add(a.data + from, bytes * (piece + 1) / ahead.blocks - from);
    }
  }

  // Begins a phase that multiplies by `groups` row groups.
  void begin(int groups, int thread) {
    ahead_[thread].done = 0;
    ahead_[thread].blocks = std::max(1, groups / BLOCK_GROUPS / pool_.threads());
  }

  void project(std::initializer_list<Part> parts, const float* x, int tokens, Epilogue epilogue, float* scratch, int place,
               int thread) {
    project(parts, x, tokens, epilogue, scratch, place, thread, 1, [](int, int, int) {});
  }

  // Converts rows of x to the inputs of the products with these weights. With one token each thread rounds its own copy
  // into `scratch`, which products of one row do not use.
  std::array<Inputs, PARTS> inputs(const std::array<const Packed*, PARTS>& weights, const float* x, int tokens, float* scratch) {
    std::array<Inputs, PARTS> rows{};
    int32_t* to = tokens == 1 ? (int32_t*)scratch : rounded_.data();
    for (int i = 0; i < PARTS && weights[i]; i++) {
      const Packed& w = *weights[i];
      const int64_t words = c_.bfloat16 ? rounded_words(w) : 0;
      rows[i] = {x, w.k};
      if (i && w.kind == weights[i - 1]->kind) rows[i] = rows[i - 1];
      else if (words) {
        rows[i] = {x, w.k, to, words};
        auto one = [&](int t) { round_row(w, x + int64_t(t) * w.k, to + t * words); };
        if (tokens == 1) one(0);
        else pool_.share(tokens, one);
        to += tokens * words;
      }
    }
    return rows;
  }

  // Computes several products of the same rows, with their adapters; the threads share all row groups as one list. An item
  // has whole units of `unit` row groups; `after(part, first unit, units)` is called when an item is complete.
  template <class After>
  void project(std::initializer_list<Part> parts, const float* x, int tokens, Epilogue epilogue, float* scratch, int place,
               int thread, int unit, After after) {
    int total = 0, items = 0;
    for (const Part& part : parts) total += part.weight->groups();
    begin(total, thread);
    const int chunk = std::max(1, chunk_groups(total, pool_.threads()) / unit) * unit;
    for (const Part& part : parts) items += (part.weight->groups() + chunk - 1) / chunk;
    std::array<const Packed*, PARTS> weights{};
    std::transform(parts.begin(), parts.end(), weights.begin(), [](const Part& part) { return part.weight; });
    const auto rows = inputs(weights, x, tokens, scratch);
    pool_.share(items, [&](int item) {
      int index = 0;
      for (const Part& part : parts) {
        const int here = (part.weight->groups() + chunk - 1) / chunk;
        if (item < here) {
          const Packed& w = *part.weight;
          const int first = item * chunk, count = std::min(chunk, w.groups() - first);
          project_groups(w, place, index, first, count, rows[index], part.y, w.n, tokens, epilogue, scratch, thread);
          after(index, first / unit, count / unit);
          return;
        }
        item -= here;
        index++;
      }
    });
  }

  // Computes some row groups of one product with its adapters, a few at a time; the rows of B for these are prefetched
  // meanwhile.
  void project_groups(const Packed& w, int place, int part, int first, int count, const Inputs& x, float* y, int64_t ldy,
                      int tokens, Epilogue epilogue, float* scratch, int thread) {
    if (runs_.empty()) return linear_span(w, first, count, x, y, ldy, tokens, epilogue, scratch);
    for (int at = first; at < first + count; at += BLOCK_GROUPS) {
      const int here = std::min(BLOCK_GROUPS, first + count - at);
      Prefetches& ahead = ahead_[thread].lines;
      ahead.begin(w.k / ASKED_COLUMNS * here / 2);
      prefetch_b(runs_, place, part, at, here, ahead);
      prefetch_a(place + 1, thread);
      linear_span(w, at, here, x, y, ldy, tokens, epilogue, scratch, &ahead);
      ahead.all();
      expand(runs_, place, part, at, here, low_.data(), low_stride_, y, ldy);
    }
  }

  // One head of a token's q, k or v (part 0, 1 or 2): its norm, rotation and scale, and of k and v the way into their slot.
  template <class E>
  void place(const Layer& layer, int part, int h, int t, int64_t position, int row, const Batch& batch, const Cache<E>& cache) {
    const int D = c_.head_dim, heads = part ? c_.kv_heads : c_.heads;
    float* head = (part == 0 ? q_ : part == 1 ? k_ : v_).data() + (int64_t(t) * heads + h) * D;
    if (part < 2) {
      const float* norm = part ? layer.k_norm : layer.q_norm;
      if (norm && !c_.qk_norm_whole) rms_norm(head, norm, c_.norm_eps, D, head);
      const int64_t at = position * c_.rotary_half;
      if (rotation_.cosine) rotate(head, rotation_.cosine + at, rotation_.sine + at, c_.rotary_half);
    }
    if (part == 0) {
      if (layer.k_scale) multiply(head, layer.k_scale[h * c_.kv_heads / heads]);
      return;
    }
    if (const float* scale = part == 1 ? layer.k_scale : layer.v_scale) multiply(head, 1.f / scale[h]);
    const int64_t block = batch.block_tables[row * batch.table_stride + position / c_.block_size];
    if (part == 1) write_key(cache, block, int(position % c_.block_size), h, head);
    else write_value(cache, block, int(position % c_.block_size), h, head);
  }

  void multiply(float* head, float factor) const {
    for (int d = 0; d < c_.head_dim; d++) head[d] *= factor;
  }

  // The heads of one token's output times the scale of their key head.
  void multiply_heads(float* all, int t, const float* scale) const {
    for (int h = 0; h < c_.heads; h++) multiply(all + (int64_t(t) * c_.heads + h) * c_.head_dim, scale[h * c_.kv_heads / c_.heads]);
  }

  // hidden = act(gate) * up, or act(up): the same columns of gate and up go to the same thread, so no barrier between.
  void feed_forward(const Layer& layer, const float* normed, int tokens, float* scratch, int place, int thread) {
    const Packed& up = *layer.up;
    const int chunk = chunk_groups(up.groups(), pool_.threads());
    begin((1 + c_.gated) * up.groups(), thread);
    const auto rows = inputs({layer.up, layer.gate}, normed, tokens, scratch);
    pool_.share((up.groups() + chunk - 1) / chunk, [&](int item) {
      const int first = item * chunk, count = std::min(chunk, up.groups() - first);
      project_groups(up, place, 1, first, count, rows[0], hidden_.data(), c_.ffn, tokens, STORE, scratch, thread);
      if (c_.gated) project_groups(*layer.gate, place, 0, first, count, rows[1], gate_.data(), c_.ffn, tokens, STORE, scratch, thread);
      const int begin = first * GROUP_ROWS, end = std::min(c_.ffn, (first + count) * GROUP_ROWS);
      for (int t = 0; t < tokens; t++) {
        float* h = hidden_.data() + int64_t(t) * c_.ffn;
        const float* g = gate_.data() + int64_t(t) * c_.ffn;
        int n = begin;
        for (; n + LANES <= end; n += LANES)
          store(h + n, c_.gated ? activate(load(g + n)) * load(h + n) : activate(load(h + n)));
        for (; n < end; n++) h[n] = c_.gated ? activate(splat(g[n]))[0] * h[n] : activate(splat(h[n]))[0];
      }
    });
  }

  vf activate(vf x) const { return c_.activation == SILU ? silu(x) : c_.activation == GELU_TANH ? gelu_tanh(x) : gelu_exact(x); }

  const StackConfig c_;
  const std::vector<Layer> layers_;
  Pool& pool_;
  Mixture mixture_;
  int widest_;
  Rotation rotation_{};
  int64_t rounded_words_ = 0;  // of a token, for the products of any one place
  std::vector<int32_t> rounded_;
  std::vector<float> scratch_, normed_, q_, k_, v_, attended_, hidden_, gate_, partials_, low_;
  std::map<int, Pieces> pieces_;  // of the attention of a step, by its window
  std::vector<Run> runs_;  // of this step; empty: no token has an adapter
  std::vector<const Run*> run_of_;  // of each token
  struct Ahead { Prefetches lines; int done = 0, blocks = 1; };
  std::vector<Ahead> ahead_;  // of each thread: factors that it reads next, and its blocks of this phase
  int low_stride_ = 0;
};

}  // namespace transect
