// The feed-forward half of a layer that is a mixture of experts: x <- x + sum over a token's experts of w * expert(norm(x)).
//
// Scores, choice and weights are those of ops/moe/gating.py. The pairs of a token and one of its experts are sorted by
// expert, each expert multiplies its rows, and a token's outputs are added up in the order of its choices. Shared experts
// are one more expert, with all tokens.
//
// A token's scores, the rows of its products and the order of its sum do not depend on the other tokens: its result has
// the same bits alone and in any batch.
#pragma once
#include <limits>
#include <vector>
#include "packed.h"
#include "pool.h"

namespace transect {

struct Experts {  // of one layer; mirrored field by field in stack.py
  int32_t count, used, sigmoid, renormalize, groups, groups_kept;
  float scale, clamp;  // clamp > 0: of gpt-oss's activation
  const float* score_bias;                                             // [count], for the choice alone; or null
  const Packed *router, *gate, *up, *down;                             // the matrices of all experts are concatenated along rows
  const Packed *shared_router, *shared_gate, *shared_up, *shared_down;  // null where there are none
  int width() const { return gate->n / count; }
  int shared_width() const { return shared_up ? shared_up->n : 0; }
};

// silu(gate) * up, or with a clamp (up + 1) gate sigmoid(1.702 gate)
inline vf gated(vf gate, vf up, float clamp) {
  if (!clamp) return silu(gate) * up;
  const vf most = splat(clamp);
  gate = select(gate > most, most, gate);
  up = select(up > most, most, max(up, -most));
  return (up + 1.f) * gate * sigmoid(gate * 1.702f);
}

inline float gate_of(float logit) { return 1.f / (1.f + std::exp(-std::max(logit, -80.f))); }

// Sets the worth of experts outside of the best groups to -inf; a group's worth is the sum of its two best.
inline void keep_best_groups(const Experts& e, float* worth) {
  constexpr float NONE = -std::numeric_limits<float>::infinity();
  const int size = e.count / e.groups;
  std::vector<float> groups(e.groups);
  for (int g = 0; g < e.groups; g++) {
    float first = NONE, second = NONE;
    for (int i = g * size; i < (g + 1) * size; i++) {
      if (worth[i] > first) second = first, first = worth[i];
      else second = std::max(second, worth[i]);
    }
    groups[g] = size > 1 ? first + second : first;
  }
  std::vector<bool> kept(e.groups);
  for (int n = 0; n < e.groups_kept; n++) {
    int best = -1;
    for (int g = 0; g < e.groups; g++)
      if (!kept[g] && (best < 0 || groups[g] > groups[best])) best = g;
    kept[best] = true;
  }
  for (int i = 0; i < e.count; i++)
    if (!kept[i / size]) worth[i] = NONE;
}

// The experts of a token, best first, and their weights. The logits become scores; `worth` is room for `count` numbers.
inline void choose(const Experts& e, float* logits, float* worth, int32_t* chosen, float* weights) {
  float* scores = logits;
  if (e.sigmoid) {
    for (int i = 0; i < e.count; i++) scores[i] = gate_of(logits[i]);
  } else {
    float highest = logits[0], total = 0.f;
    for (int i = 1; i < e.count; i++) highest = std::max(highest, logits[i]);
    for (int i = 0; i < e.count; i++) total += scores[i] = std::exp(logits[i] - highest);
    for (int i = 0; i < e.count; i++) scores[i] /= total;
  }
  for (int i = 0; i < e.count; i++) worth[i] = scores[i] + (e.score_bias ? e.score_bias[i] : 0.f);
  if (e.groups > 1) keep_best_groups(e, worth);
  float sum = e.sigmoid ? 1e-20f : 0.f;
  for (int j = 0; j < e.used; j++) {
    int best = 0;
    for (int i = 1; i < e.count; i++)
      if (worth[i] > worth[best]) best = i;
    worth[best] = -std::numeric_limits<float>::infinity();
    chosen[j] = best;
    weights[j] = scores[best];
    sum += scores[best];
  }
  for (int j = 0; j < e.used; j++) weights[j] = (e.renormalize ? weights[j] / sum : weights[j]) * e.scale;
}

// The mixtures of a stack, with their scratch memory; all layers share it.
class Mixture {
 public:
  Mixture(Pool& pool, int dim, bool bfloat16) : pool_(pool), dim_(dim), bfloat16_(bfloat16) {}

  void reserve(const Experts& e, int tokens) {
    auto grow = [](auto& v, size_t n) { if (v.size() < n) v.resize(n); };
    const size_t pairs = size_t(tokens) * e.used, shared = e.shared_up ? tokens : 0;
    for (auto* each : {&logits_, &worth_}) grow(*each, size_t(tokens) * e.count);
    for (auto* each : {&chosen_, &places_, &token_of_}) grow(*each, pairs);
    grow(weights_, pairs);
    grow(gates_, tokens);
    for (auto* each : {&hidden_, &gate_}) grow(*each, pairs * e.width() + shared * e.shared_width());
    grow(rows_, (pairs + shared) * dim_);
    grow(starts_, e.count + 1);
    for (const Packed* w : {e.gate, e.up, e.shared_gate, e.shared_up}) words_ = std::max(words_, words_of(w));
    for (const Packed* w : {e.down, e.shared_down}) hidden_words_ = std::max(hidden_words_, words_of(w));
    for (auto* each : {&for_gate_, &for_up_}) grow(*each, (pairs + shared) * words_);
    grow(for_down_, (pairs + shared) * hidden_words_);
  }

  // Adds the mixture's output for normed [tokens][dim] to x. Every thread of the team calls it.
  void add(const Experts& e, const float* normed, int tokens, float* x, float* scratch) {
    const int routers = e.router->groups();
    pool_.share(routers + (e.shared_router ? 1 : 0), [&](int item) {
      const bool routes = item < routers;
      const Packed& w = routes ? *e.router : *e.shared_router;
      linear_span(w, routes ? item : 0, 1, normed, dim_, routes ? logits_.data() : gates_.data(), w.n, tokens, STORE, scratch);
    });
    pool_.share(tokens, [&](int t) {
      const int64_t at = int64_t(t) * e.count, pair = int64_t(t) * e.used;
      choose(e, &logits_[at], &worth_[at], &chosen_[pair], &weights_[pair]);
    });
    pool_.share(1, [&](int) { sort(e, normed, tokens); });
    const int rows = tokens * (e.used + (e.shared_up ? 1 : 0));
    if (words_) pool_.share(rows, [&](int place) { round_input(e, place, normed, tokens); });
    if (tokens > 1 && !(words_of(e.gate) && words_of(e.up)))
      pool_.share(int(jobs_.size()), [&](int i) { gather(jobs_[i], normed); });
    pool_.share(hidden_items_, [&](int item) { hidden(job_of(item, &Job::first_hidden), item, e.clamp, scratch); });
    if (hidden_words_) pool_.share(rows, [&](int place) { round_hidden(e, place, tokens); });
    pool_.share(out_items_, [&](int item) {
      const Job& job = job_of(item, &Job::first_out);
      const int first = (item - job.first_out) * out_chunk_, count = std::min(out_chunk_, job.down.groups() - first);
      linear_span(job.down, first, count, job.for_down, job.out, dim_, job.rows, STORE, scratch);
    });
    const int parts = (dim_ + COLUMNS - 1) / COLUMNS;
    pool_.share(tokens * parts, [&](int item) { combine(e, item / parts, item % parts * COLUMNS, tokens, x); });
  }

 private:
  static constexpr int COLUMNS = 512;  // of a token's sum in one item

  struct Job {  // an expert and its rows
    Packed gate, up, down;
    int first, rows;  // of the sorted pairs; first = -1: all tokens, as they are
    Inputs for_gate, for_up, for_down;
    float *hidden, *gated, *out;
    int first_hidden, first_out;  // items
  };

  // The matrix of one expert, `rows` of the concatenated ones.
  static Packed part_of(const Packed& all, int expert, int rows) {
    const int64_t group = int64_t(expert) * (rows / GROUP_ROWS);
    Packed own = all;
    own.n = rows;
    own.data += group * group_bytes(all.kind, all.k);
    if (own.bias) own.bias += int64_t(expert) * rows;
    return own;
  }

  // `place`: of its first row among all; `at`: of its hidden values.
  Job job(const Packed& gate, const Packed& up, const Packed& down, int first, int rows, const float* x, int64_t place, int64_t at) {
    auto inputs = [&](const Packed& w, const float* x, std::vector<int32_t>& rounded, int64_t words) {
      return Inputs{x, w.k, words_of(&w) ? &rounded[place * words] : nullptr, words};
    };
    return {gate, up, down, first, rows, inputs(gate, x, gate.kind == up.kind ? for_up_ : for_gate_, words_), inputs(up, x, for_up_, words_),
            inputs(down, &hidden_[at], for_down_, hidden_words_), &hidden_[at], &gate_[at], &rows_[place * dim_], 0, 0};
  }

  int64_t words_of(const Packed* w) const { return w && bfloat16_ ? rounded_words(*w) : 0; }

  void round_input(const Experts& e, int place, const float* normed, int tokens) {
    const int pairs = tokens * e.used;
    const bool routed = place < pairs;
    const float* x = normed + int64_t(routed ? token_of_[place] : place - pairs) * dim_;
    auto round = [&](const Packed* w, std::vector<int32_t>& to) { if (words_of(w)) round_row(*w, x, &to[place * words_]); };
    const Packed *gate = routed ? e.gate : e.shared_gate, *up = routed ? e.up : e.shared_up;
    round(up, for_up_);
    if (gate->kind != up->kind) round(gate, for_gate_);
  }

  void round_hidden(const Experts& e, int place, int tokens) {
    const int pairs = tokens * e.used;
    const Packed* w = place < pairs ? e.down : e.shared_down;
    const int64_t at = place < pairs ? int64_t(place) * e.width() : int64_t(pairs) * e.width() + int64_t(place - pairs) * w->k;
    if (words_of(w)) round_row(*w, &hidden_[at], &for_down_[place * hidden_words_]);
  }

  // Sorts the pairs by expert, those of an expert by token, and lists the jobs and their items.
  void sort(const Experts& e, const float* normed, int tokens) {
    const int pairs = tokens * e.used;
    std::fill(starts_.begin(), starts_.end(), 0);
    for (int i = 0; i < pairs; i++) starts_[chosen_[i] + 1]++;
    for (int i = 0; i < e.count; i++) starts_[i + 1] += starts_[i];
    for (int i = 0; i < pairs; i++) {
      const int place = starts_[chosen_[i]]++;  // afterwards the start of the next expert
      places_[i] = place;
      token_of_[place] = i / e.used;
    }
    jobs_.clear();
    if (e.shared_up) {
      const int64_t at = int64_t(pairs) * e.width();
      jobs_.push_back(job(*e.shared_gate, *e.shared_up, *e.shared_down, -1, tokens, normed, pairs, at));
    }
    for (int i = 0, first = 0; i < e.count; first = starts_[i++]) {
      const int rows = starts_[i] - first;
      if (!rows) continue;
      const float* x = rows == 1 ? normed + int64_t(token_of_[first]) * dim_ : &rows_[int64_t(first) * dim_];
      jobs_.push_back(job(part_of(*e.gate, i, e.width()), part_of(*e.up, i, e.width()), part_of(*e.down, i, dim_), first, rows,
                          x, first, int64_t(first) * e.width()));
    }
    int up = 0, down = 0;
    for (const Job& job : jobs_) up += job.up.groups(), down += job.down.groups();
    hidden_chunk_ = chunk_groups(up, pool_.threads());
    out_chunk_ = chunk_groups(down, pool_.threads());
    hidden_items_ = out_items_ = 0;
    for (Job& job : jobs_) {
      job.first_hidden = hidden_items_;
      job.first_out = out_items_;
      hidden_items_ += (job.up.groups() + hidden_chunk_ - 1) / hidden_chunk_;
      out_items_ += (job.down.groups() + out_chunk_ - 1) / out_chunk_;
    }
  }

  const Job& job_of(int item, int Job::*first) const {
    auto after = std::upper_bound(jobs_.begin(), jobs_.end(), item, [&](int value, const Job& job) { return value < job.*first; });
    return *(after - 1);
  }

  // Copies an expert's rows next to each other; products write over them. One row alone is read where it is.
  void gather(const Job& job, const float* normed) {
    if (job.first < 0 || job.rows == 1) return;
    for (int r = 0; r < job.rows; r++)
      std::memcpy(job.out + int64_t(r) * dim_, normed + int64_t(token_of_[job.first + r]) * dim_, dim_ * sizeof(float));
  }

  // The hidden values of some row groups.
  void hidden(const Job& job, int item, float clamp, float* scratch) {
    const int width = job.up.n, first = (item - job.first_hidden) * hidden_chunk_;
    const int count = std::min(hidden_chunk_, job.up.groups() - first);
    linear_span(job.up, first, count, job.for_up, job.hidden, width, job.rows, STORE, scratch);
    linear_span(job.gate, first, count, job.for_gate, job.gated, width, job.rows, STORE, scratch);
    for (int r = 0; r < job.rows; r++) {
      float *h = job.hidden + int64_t(r) * width, *g = job.gated + int64_t(r) * width;
      for (int n = first * GROUP_ROWS; n < (first + count) * GROUP_ROWS; n += LANES)
        store(h + n, gated(load(g + n), load(h + n), job.first < 0 ? 0.f : clamp));
    }
  }

  void combine(const Experts& e, int t, int first, int tokens, float* x) {
    const int count = std::min(COLUMNS, dim_ - first);
    float sum[COLUMNS] = {};
    auto take = [&](float weight, int64_t row) {
      const float* y = &rows_[row * dim_ + first];
      for (int n = 0; n < count; n++) sum[n] += weight * y[n];
    };
    for (int64_t pair = int64_t(t) * e.used; pair < int64_t(t + 1) * e.used; pair++) take(weights_[pair], places_[pair]);
    if (e.shared_up) take(e.shared_router ? gate_of(gates_[t]) : 1.f, int64_t(tokens) * e.used + t);
    float* to = x + int64_t(t) * dim_ + first;
    for (int n = 0; n < count; n++) to[n] += sum[n];
  }

  Pool& pool_;
  const int dim_;
  const bool bfloat16_;  // products round their inputs
  int64_t words_ = 0, hidden_words_ = 0;  // of a rounded row, see round_row
  int hidden_chunk_ = 1, out_chunk_ = 1, hidden_items_ = 0, out_items_ = 0;
  std::vector<Job> jobs_;
  std::vector<int32_t> chosen_, places_, token_of_, starts_;
  std::vector<int32_t> for_gate_, for_up_, for_down_;  // rounded inputs of each row's products
  std::vector<float> logits_, worth_, weights_, gates_, hidden_, gate_, rows_;
};

}  // namespace transect
