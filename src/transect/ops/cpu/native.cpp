// The C interface of the CPU kernels: raw pointers and plain structs, so that any compiler builds it and ctypes calls it.
#include "adamw.h"
#include "document_attention.h"
#include "products.h"
#include "rounding.h"
#include "stack.h"
#include "training.h"

using namespace transect;

extern "C" {

const char* transect_isa() { return TRANSECT_ISA; }
int transect_bfloat16() { return PAIRS; }

Pool* transect_pool_new(int threads) { return new Pool(threads); }
void transect_pool_free(Pool* pool) { delete pool; }

int64_t transect_packed_bytes(int kind, int n, int k) { return group_bytes(kind, k) * ((n + GROUP_ROWS - 1) / GROUP_ROWS); }

// codes [n][k] uint8, scale and, where the kind has it, zero [n][k / group] float32, into the layout of kinds.h.
void transect_pack_affine(int kind, int n, int k, const uint8_t* codes, const float* scale, const float* zero, uint8_t* out) {
  with_kind(kind, [&]<class W>() {
    if constexpr (requires { W::SCALE_BYTES; }) {
      constexpr int G = W::PANEL, BITS = 32 / W::PER_WORD;
      const int panels = k / G, groups = (n + GROUP_ROWS - 1) / GROUP_ROWS;
      for (int64_t panel = 0; panel < int64_t(groups) * panels; panel++) {
        uint8_t* to = out + panel * W::PANEL_BYTES;
        std::memset(to, 0, W::PANEL_BYTES);
        const int64_t first = panel / panels * GROUP_ROWS, g = panel % panels;
        for (int r = 0; r < GROUP_ROWS && first + r < n; r++) {
          const uint8_t* from = codes + (first + r) * k + g * G;
          for (int j = 0; j < G / W::PER_WORD; j++) {
            uint32_t word = 0;
            for (int i = 0; i < W::PER_WORD; i++) word |= uint32_t(from[j * W::PER_WORD + i]) << (BITS * i);
            std::memcpy(to + 64 * j + 4 * r, &word, 4);
          }
          for (int s = 0; s < W::SCALES; s++) {
            const float number = (s ? zero : scale)[(first + r) * panels + g];
            uint8_t* at = to + G / W::PER_WORD * 64 + s * W::SCALE_BYTES;
            if (W::SCALE_BYTES == 2 * GROUP_ROWS) {
              const Half half = Half(number);
              std::memcpy(at + 2 * r, &half, 2);
            } else {
              std::memcpy(at + 4 * r, &number, 4);
            }
          }
        }
      }
    }
  });
}

// The block types of GGUF files: codes [n][k], float16 scales (and minima) [n][panels][PARTS], whole-number steps
// [n][panels][GROUPS][PARTS] where the kind has them.
void transect_pack_blocks(int kind, int n, int k, const uint8_t* codes, const uint16_t* halves, const uint8_t* steps, uint8_t* out) {
  with_kind(kind, [&]<class W>() {
    if constexpr (requires { W::STEP_BYTES; }) {
      constexpr int GROUP = W::PANEL / W::GROUPS;
      const int panels = k / W::PANEL, groups = (n + GROUP_ROWS - 1) / GROUP_ROWS;
      std::memset(out, 0, size_t(groups) * panels * W::PANEL_BYTES);
      for (int64_t row = 0; row < n; row++)
        for (int p = 0; p < panels; p++) {
          uint8_t* panel = out + (row / GROUP_ROWS * panels + p) * W::PANEL_BYTES;
          const int64_t at = row * panels + p;
          for (int part = 0; part < W::PARTS; part++)
            std::memcpy(panel + (part * GROUP_ROWS + row % GROUP_ROWS) * 2, halves + at * W::PARTS + part, 2);
          for (int g = 0; g < W::GROUPS; g++)
            W::pack(panel, g, row % GROUP_ROWS, codes + row * k + p * W::PANEL + g * GROUP, steps + (at * W::GROUPS + g) * W::PARTS);
        }
    }
  });
}

// Dense rows [n][k], bf16 (k even) or float32, into the layout of kinds.h.
void transect_pack_dense(int kind, int n, int k, const uint8_t* rows, uint8_t* out) {
  const int per_word = kind == BF16 ? 2 : 1, words = k / per_word, groups = (n + GROUP_ROWS - 1) / GROUP_ROWS;
  std::memset(out, 0, size_t(groups) * words * 64);
  for (int64_t row = 0; row < n; row++)
    for (int64_t j = 0; j < words; j++)
      std::memcpy(out + ((row / GROUP_ROWS * words + j) * GROUP_ROWS + row % GROUP_ROWS) * 4, rows + (row * words + j) * 4, 4);
}

// y [rows][n] = x [rows][k] W^T + bias; bfloat16: with x rounded to it, if the processor can and the weight's kind has pairs
void transect_linear(Pool* pool, const Packed* w, const float* x, int rows, float* y, int bfloat16) {
  const int64_t words = bfloat16 ? rounded_words(*w) : 0;
  std::vector<int32_t> rounded(rows * words);
  const Inputs inputs{x, w->k, words ? rounded.data() : nullptr, words};
  std::vector<float> scratch(rows > FEW ? size_t(pool->threads()) * w->k * TILE_COLUMNS + 64 : 0);
  const int chunk = chunk_groups(w->groups(), pool->threads());
  pool->run([&](int thread) {
    float* mine = scratch.data() + (rows > FEW ? size_t(thread) * w->k * TILE_COLUMNS : 0);
    if (words) pool->share(rows, [&](int r) { round_row(*w, x + int64_t(r) * w->k, rounded.data() + r * words); });
    pool->share((w->groups() + chunk - 1) / chunk, [&](int item) {
      linear_span(*w, item * chunk, std::min(chunk, w->groups() - item * chunk), inputs, y, w->n, rows, STORE, mine);
    });
  });
}

// out [count][k] = the rows of W with these numbers
void transect_rows(const Packed* w, const int64_t* rows, int count, float* out) {
  for (int i = 0; i < count; i++) decode_row(*w, int(rows[i]), out + int64_t(i) * w->k);
}

// out [T][heads][head_dim] = attention of q over K and V already in the cache (see attention.h)
void transect_paged_attention(Pool* pool, int kv, const float* q, float* out, int heads, int kv_heads, int head_dim,
                              int block_size, void* k, void* v, int rows, const int32_t* query_starts,
                              const int32_t* seq_lens, const int32_t* block_tables, int64_t table_stride, float scale,
                              int window) {
  const Batch batch{rows, query_starts, seq_lens, block_tables, table_stride};
  Pieces pieces(batch, heads, kv_heads, head_dim, window, pool->threads());
  std::vector<float> partials(pieces.floats);
  pool->run([&](int) {
    with_kv(kv, [&]<class E>() {
      Attention<E>{batch, {(E*)k, (E*)v, kv_heads, head_dim, block_size}, heads, scale, window, q, out, pieces, partials.data()}
          .run(*pool);
    });
  });
}

// Multiply-adds on registers alone, on the whole team; returns how many float operations were done.
double transect_fma_probe(Pool* pool, int64_t rounds) {
  constexpr int CHAINS = 16;
  std::atomic<float> keep{0};
  pool->run([&](int thread) {
    vf acc[CHAINS];
    for (int i = 0; i < CHAINS; i++) acc[i] = splat(float(thread + i));
    const vf a = splat(0.999f), b = splat(0.001f);
    for (int64_t round = 0; round < rounds; round++)
      for (int i = 0; i < CHAINS; i++) acc[i] = fma(acc[i], a, b);
    float total = 0;
    for (int i = 0; i < CHAINS; i++) total += sum(acc[i]);
    keep.store(total);
  });
  return 2.0 * LANES * CHAINS * double(rounds) * pool->threads();
}

// C [rows][n] = sum of the products (+ C if add); see products.h
void transect_products(Pool* pool, const Product* list, int number, int64_t rows, int64_t n, float* c, int add) {
  products(*pool, list, number, rows, n, c, n, add != 0);
}

// The rest of training: see training.h for what each computes and the shapes.
void transect_swiglu(Pool* pool, int64_t n, const float* gate, const float* up, float* y) { swiglu(*pool, n, gate, up, y); }
void transect_swiglu_backward(Pool* pool, int64_t n, const float* g, const float* gate, const float* up, float* dgate,
                              float* dup) {
  swiglu_backward(*pool, n, g, gate, up, dgate, dup);
}
void transect_rms_norm(Pool* pool, int64_t rows, int64_t width, const float* x, const float* w, float eps, float* y,
                       float* r) {
  rms_norm(*pool, rows, width, x, w, eps, y, r);
}
void transect_rms_norm_backward(Pool* pool, int64_t rows, int64_t width, const float* g, const float* x, const float* w,
                                const float* r, float* dx) {
  rms_norm_backward(*pool, rows, width, g, x, w, r, dx);
}
void transect_rotate(Pool* pool, int64_t tokens, int64_t heads, int64_t half, const float* x, int64_t token_stride,
                     const float* cosine, const float* sine, float sign, float* y) {
  rotate(*pool, tokens, heads, half, x, token_stride, cosine, sine, sign, y);
}
void transect_cross_entropy(Pool* pool, int64_t rows, int64_t n, float* logits, const int64_t* labels, float scale,
                            float* loss) {
  cross_entropy(*pool, rows, n, logits, labels, scale, loss);
}

void transect_round_by_chance(Pool* pool, int64_t n, const float* x, bf16* y, int64_t first, uint64_t seed, uint32_t step,
                              uint32_t tensor, int shift) {
  round_by_chance(*pool, n, x, y, first, seed, step, tensor, shift);
}

// AdamW on a stretch, see adamw.h; gradient and out are bfloat16 where the flags say so, else float32.
void transect_adamw(Pool* pool, int64_t n, const void* g, int g_bf16, float* w, float* m, float* v, void* out, int out_bf16,
                    const AdamWStep* step) {
  if (g_bf16 && out_bf16) adamw(*pool, n, (const bf16*)g, w, m, v, (bf16*)out, *step);
  else if (g_bf16) adamw(*pool, n, (const bf16*)g, w, m, v, (float*)out, *step);
  else if (out_bf16) adamw(*pool, n, (const float*)g, w, m, v, (bf16*)out, *step);
  else adamw(*pool, n, (const float*)g, w, m, v, (float*)out, *step);
}
double transect_take_in(Pool* pool, int64_t n, const void* from, int from_bf16, void* into, int into_bf16, int add) {
  if (from_bf16 && into_bf16) return take_in(*pool, n, (const bf16*)from, (bf16*)into, add != 0);
  if (from_bf16) return take_in(*pool, n, (const bf16*)from, (float*)into, add != 0);
  if (into_bf16) return take_in(*pool, n, (const float*)from, (bf16*)into, add != 0);
  return take_in(*pool, n, (const float*)from, (float*)into, add != 0);
}

void transect_attention_forward(Pool* pool, const DocumentAttention* a, float* out, float* lse) {
  attention_forward(*pool, *a, out, lse);
}
void transect_attention_backward(Pool* pool, const DocumentAttention* a, const float* grad, const float* out,
                                 const float* lse, float* dq, float* dk, float* dv) {
  attention_backward(*pool, *a, grad, out, lse, dq, dk, dv);
}

Stack* transect_stack_new(const StackConfig* config, const Layer* layers, Pool* pool) { return new Stack(*config, layers, pool); }
void transect_stack_free(Stack* stack) { delete stack; }
void transect_stack_run(Stack* stack, float* x, int tokens, const int64_t* positions, int rows, const int32_t* query_starts,
                        const int32_t* seq_lens, const int32_t* block_tables, int64_t table_stride, const float* cosine,
                        const float* sine, void* k, void* v, int64_t blocks, const int32_t* slots,
                        const LowRank* const* table, int tap_count, const int32_t* tap_layers, float* tapped,
                        int finish) {
  const Batch batch{rows, query_starts, seq_lens, block_tables, table_stride};
  stack->run(x, tokens, positions, batch, Rotation{cosine, sine}, k, v, blocks, slots, table, {tap_count, tap_layers, tapped},
             finish != 0);
}

}  // extern "C"
