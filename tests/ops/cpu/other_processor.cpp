// Runs kernels of native.cpp on inputs from standard input and writes results to standard output, so that a test can
// compile it for another processor and run it under an emulator. Numbers are those of a little-endian machine.
//
// Requests follow one another, each an int32 of its kind:
//   0  the name of the instruction set: int32 length, characters
//   1  a product: kind, n, k, rows; packed bytes; x [rows][k] -> y [rows][n]
//   2  one decoder layer of float32 weights over a paged cache of one row: fields below -> x, and the layer's K and V
#include <cstdio>
#include <cstdlib>
#include <vector>
#include "native.cpp"

template <class T>
std::vector<T> take(size_t count) {
  std::vector<T> values(count);
  if (std::fread(values.data(), sizeof(T), count, stdin) != count) std::exit(3);
  return values;
}
template <class T>
void give(const std::vector<T>& values) { std::fwrite(values.data(), sizeof(T), values.size(), stdout); }

void product(Pool* pool) {
  const auto head = take<int32_t>(4);
  const int kind = head[0], n = head[1], k = head[2], rows = head[3];
  const auto packed = take<uint8_t>(transect_packed_bytes(kind, n, k));
  const auto x = take<float>(size_t(rows) * k);
  std::vector<float> y(size_t(rows) * n);
  const Packed weight{kind, n, k, packed.data(), nullptr};
  transect_linear(pool, &weight, x.data(), rows, y.data(), false);
  give(y);
}

void layer(Pool* pool) {  // dim, heads, kv_heads, head_dim, ffn, kv, new tokens, tokens in all; then arrays
  const auto s = take<int32_t>(8);
  const int dim = s[0], heads = s[1], kv_heads = s[2], head = s[3], ffn = s[4], kv = s[5], fresh = s[6], length = s[7];
  constexpr int BLOCK = 16, SIZES[] = {4, 2, 1};
  const int blocks = (length + BLOCK - 1) / BLOCK, shapes[7][2] = {{heads * head, dim}, {kv_heads * head, dim},
    {kv_heads * head, dim}, {dim, heads * head}, {ffn, dim}, {ffn, dim}, {dim, ffn}};
  std::vector<std::vector<uint8_t>> bytes;
  std::vector<Packed> weights;
  for (const auto& shape : shapes) {
    bytes.push_back(take<uint8_t>(transect_packed_bytes(F32, shape[0], shape[1])));
    weights.push_back({F32, shape[0], shape[1], bytes.back().data(), nullptr});
  }
  const auto norm = take<float>(dim), between = take<float>(dim);
  const auto cosine = take<float>(size_t(length) * head / 2), sine = take<float>(size_t(length) * head / 2);
  auto x = take<float>(size_t(fresh) * dim);
  const size_t cache = size_t(blocks) * kv_heads * head * BLOCK * SIZES[kv];
  auto k = take<uint8_t>(cache), v = take<uint8_t>(cache);
  const StackConfig config{.layers = 1, .dim = dim, .heads = heads, .kv_heads = kv_heads, .head_dim = head, .ffn = ffn,
                           .block_size = BLOCK, .gated = 1, .activation = SILU, .rotary_half = head / 2, .kv = kv,
                           .norm_eps = 1e-5f, .scale = 1.f / std::sqrt(float(head))};
  const Layer one{.attention_norm = norm.data(), .mlp_norm = between.data(), .q = &weights[0], .k = &weights[1],
                  .v = &weights[2], .o = &weights[3], .gate = &weights[4], .up = &weights[5], .down = &weights[6]};
  std::vector<int64_t> positions(fresh);
  for (int i = 0; i < fresh; i++) positions[i] = length - fresh + i;
  std::vector<int32_t> table(blocks + 8), starts{0, fresh}, lengths{length};
  for (int i = 0; i < blocks; i++) table[i] = i;
  Stack stack(config, &one, pool);
  const Batch batch{1, starts.data(), lengths.data(), table.data(), int64_t(table.size())};
  stack.run(x.data(), fresh, positions.data(), batch, {cosine.data(), sine.data()}, k.data(), v.data(), blocks, nullptr, nullptr, {0, nullptr, nullptr}, false);
  give(x);
  give(k);
  give(v);
}

int main() {
  Pool* pool = transect_pool_new(2);
  for (int32_t request; std::fread(&request, 4, 1, stdin) == 1;) {
    if (request == 1) product(pool);
    else if (request == 2) layer(pool);
    else {
      const std::vector<char> name(TRANSECT_ISA, TRANSECT_ISA + std::strlen(TRANSECT_ISA));
      give(std::vector<int32_t>{int32_t(name.size())});
      give(name);
    }
  }
  transect_pool_free(pool);
}
