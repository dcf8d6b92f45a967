// The PTX instructions that the sources use, each a function of its operands in turn; ``cuda_host`` writes the calls.
// A function's name is the instruction's, with _ for each of its dots and colons.

#pragma once

#include <tuple>
#include <utility>

#include "machine.h"
#include "numbers.h"

namespace ptx {

using machine::shared;

// Memory.

template <typename T>
void ld_shared_u32(T& to, uint32_t from) { to = *(uint32_t*)shared(from, 4, 4); }
template <typename T>
void ld_shared_u16(T& to, uint32_t from) { to = *(uint16_t*)shared(from, 2, 2); }
template <typename T>
void ld_shared_v2_u32(T& a, T& b, uint32_t from) {
  const uint32_t* at = (const uint32_t*)shared(from, 8, 8);
  a = at[0], b = at[1];
}
template <typename T>
void ld_shared_v4_u32(T& a, T& b, T& c, T& d, uint32_t from) {
  const uint32_t* at = (const uint32_t*)shared(from, 16, 16);
  a = at[0], b = at[1], c = at[2], d = at[3];
}
template <typename T>
void ld_shared_f32(T& to, uint32_t from) { to = *(float*)shared(from, 4, 4); }
inline void max_u16x2(uint32_t& to, uint32_t a, uint32_t b) {
  to = std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xFFFF, b & 0xFFFF);
}
inline void st_shared_f32(uint32_t to, float v) { *(float*)shared(to, 4, 4) = v; }
inline void st_shared_u32(uint32_t to, uint32_t v) { *(uint32_t*)shared(to, 4, 4) = v; }
inline void st_shared_b32(uint32_t to, uint32_t v) { st_shared_u32(to, v); }
inline void st_shared_v2_f32(uint32_t to, float a, float b) {
  float* at = (float*)shared(to, 8, 8);
  at[0] = a, at[1] = b;
}
inline void st_shared_v2_u32(uint32_t to, uint32_t a, uint32_t b) {
  uint32_t* at = (uint32_t*)shared(to, 8, 8);
  at[0] = a, at[1] = b;
}
inline void st_shared_v4_f32(uint32_t to, float a, float b, float c, float d) {
  float* at = (float*)shared(to, 16, 16);
  at[0] = a, at[1] = b, at[2] = c, at[3] = d;
}
inline void st_shared_v4_u32(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  uint32_t* at = (uint32_t*)shared(to, 16, 16);
  at[0] = a, at[1] = b, at[2] = c, at[3] = d;
}
template <typename T>
void ld_acquire_gpu_global_u32(T& to, const unsigned* from) {
  machine::spin();
  to = *from;
  machine::acquire((void*)from);
}

template <typename T>
void ld_acquire_gpu_global_s32(T& to, const int* from) { ld_acquire_gpu_global_u32(to, (const unsigned*)from); }
template <typename T>
void ld_acquire_gpu_global_u32(T& to, const int* from) { ld_acquire_gpu_global_u32(to, (const unsigned*)from); }
template <typename T>
void ld_relaxed_gpu_global_u32(T& to, const unsigned* from) { to = *from; }
inline void red_release_gpu_global_add_u32(unsigned* at, unsigned v) {
  machine::release(at);
  *at += v;
}
inline void red_release_gpu_global_add_s32(int* at, int v) { red_release_gpu_global_add_u32((unsigned*)at, v); }
inline void st_release_gpu_global_s32(int* to, int v) {
  machine::release(to);
  *to = v;
}

// Words that one thread writes and others read until they are there.
template <typename T>
void ld_relaxed_gpu_global_v4_u32(T& a, T& b, T& c, T& d, const uint32_t* from) {
  machine::spin();
  machine::acquire((void*)from);
  a = from[0], b = from[1], c = from[2], d = from[3];
}
inline void st_relaxed_gpu_global_u16(char* to, uint16_t v) { *(uint16_t*)to = v; }
inline void st_relaxed_gpu_global_u32(char* to, uint32_t v) { *(uint32_t*)to = v; }

template <typename Any>
void elect_sync(Any& chosen, uint32_t lanes) {
  if (lanes != 0xFFFFFFFF) machine::fail("a lane of some lanes");
  chosen = machine::lane() == 0;
}

// Barriers of threads, barriers that count, and the copy engine.

inline void bar_sync(int number, int threads) { machine::come(machine::now->block->named[number], threads); }

inline void mbarrier_init_shared__cta_b64(uint32_t barrier, int count) {
  machine::Barrier* b = (machine::Barrier*)shared(barrier, 8, 8);
  *b = {0, (uint64_t)count, (uint64_t)count, 0, 0};
}
inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async_shared__cta() {}
inline void mbarrier_arrive_expect_tx_shared__cta_b64(uint32_t barrier, int bytes) {
  machine::Barrier* b = (machine::Barrier*)shared(barrier, 8, 8);
  if (!b->missing) machine::fail("more arrivals than a barrier counts");
  b->bytes += bytes, b->missing--;
  machine::turn_if_complete(*machine::now->block, barrier);
}
inline void mbarrier_arrive_shared__cta_b64(uint32_t barrier) { mbarrier_arrive_expect_tx_shared__cta_b64(barrier, 0); }

// Places in another block of the cluster: its rank stands above the address.
template <typename T>
void mapa_shared__cluster_u32(T& to, uint32_t address, int rank) { to = address | (uint32_t)rank << 24; }
inline void mbarrier_arrive_shared__cluster_b64(uint32_t at) {
  const uint32_t barrier = at & 0xFFFFFF;
  shared(barrier, 8, 8);
  machine::Block& block = machine::of_cluster(at >> 24);
  machine::Barrier* b = machine::barrier_at(block, barrier);
  if (!b->missing) machine::fail("more arrivals than a barrier counts");
  b->missing--;
  machine::turn_if_complete(block, barrier);
}

template <typename T>
void ld_shared__cluster_v4_f32(T& a, T& b, T& c, T& d, uint32_t at) {
  const float* from = (const float*)(machine::of_cluster(at >> 24).memory + (at & 0xFFFFFF));
  if (at % 16) machine::fail("a read of 16 bytes of another block that is no multiple of 16");
  a = from[0], b = from[1], c = from[2], d = from[3];
}

inline void st_async_to_cluster(uint32_t at, const void* from, int bytes, uint32_t counts) {
  if (machine::launch->cluster == 1) machine::fail("illegal instruction: st.async in a launch without clusters");
  if (at % bytes) machine::fail("a number sent to a place that is no multiple of its size");
  const unsigned char* v = (const unsigned char*)from;
  machine::launch->copies.push_back(
      {&machine::of_cluster(at >> 24), at & 0xFFFFFF, counts & 0xFFFFFF, nullptr, {v, v + bytes}, bytes});
}
inline void st_async_shared__cluster_mbarrier__complete_tx__bytes_f32(uint32_t at, float v, uint32_t counts) {
  st_async_to_cluster(at, &v, 4, counts);
}
inline void st_async_shared__cluster_mbarrier__complete_tx__bytes_v4_f32(uint32_t at, float x, float y, float z, float w,
                                                                         uint32_t counts) {
  const float v[4] = {x, y, z, w};
  st_async_to_cluster(at, v, 16, counts);
}

// All threads of a cluster meet where they wait: none does anything between its arrival and that.
inline void barrier_cluster_arrive_relaxed_aligned() {}
inline void barrier_cluster_arrive_aligned() {}
inline void barrier_cluster_wait_aligned() { machine::all_threads_of_cluster(); }

inline void mbarrier_try_wait_parity_shared__cta_b64(bool& done, uint32_t barrier, int parity) {
  machine::Barrier* b = (machine::Barrier*)shared(barrier, 8, 8);
  done = b->phase != (unsigned)parity;
  if (done) return machine::acquire(b);
  machine::now->block->at_barrier[barrier].push_back(machine::now);
  machine::leave();
}

inline void mbarrier_try_wait_parity_acquire_cluster_shared__cta_b64(bool& done, uint32_t barrier, int parity) {
  mbarrier_try_wait_parity_shared__cta_b64(done, barrier, parity);
}

inline void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(uint32_t to, const void* from, int bytes,
                                                                             uint32_t barrier) {
  if (bytes <= 0 || bytes % 16 || (uintptr_t)from % 16) machine::fail("a bulk copy that is not of whole 16 bytes");
  machine::readable(from, bytes);
  memset(shared(to, bytes, 16), machine::kSpoilt, bytes);
  shared(barrier, 8, 8);
  machine::launch->copies.push_back({machine::now->block, to, barrier, (const unsigned char*)from, {}, bytes});
}

inline void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(
    uint32_t to, const void* from, int bytes, uint32_t barrier, uint64_t) {
  cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(to, from, bytes, barrier);
}
inline void cp_async_bulk_prefetch_L2_global(const void* from, int bytes) {
  if (bytes <= 0 || bytes % 16 || (uintptr_t)from % 16) machine::fail("a bulk prefetch that is not of whole 16 bytes");
  machine::readable(from, bytes);
}

// A tensor map describes rows of bytes; the only swizzle is that of 128 bytes, of boxes as wide.
struct TensorMap {
  const unsigned char* from;
  uint64_t sizes[2], stride;  // in bytes, rows; bytes
  uint32_t box[2];
  int each;  // bytes of a number
};

inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
inline void prefetch_tensormap(const void*) {}

// To the same place in those blocks of the cluster whose bits ``blocks`` has.
inline void cp_async_bulk_tensor_2d_shared__cluster_global_mbarrier__complete_tx__bytes_multicast__cluster_L2__cache_hint(
    uint32_t to, const void* map, int x, int y, uint32_t barrier, uint16_t blocks, uint64_t) {
  const TensorMap& m = *(const TensorMap*)map;
  std::vector<unsigned char> bytes(m.box[0] * m.box[1]);
  if (m.box[0] != 128) machine::fail("a box that is not 128 bytes wide");
  for (uint32_t r = 0; r < m.box[1]; r++)
    for (uint32_t i = 0; i < 128; i++) {
      const uint64_t column = x * m.each + i, row = y + r;
      const bool inside = column < m.sizes[0] && row < m.sizes[1];  // below 0 is above all sizes
      bytes[swizzled(to + r * 128 + i) - to] = inside ? m.from[row * m.stride + column] : 0;
    }
  shared(to, bytes.size(), 1024), shared(barrier, 8, 8);
  const int count = bytes.size();
  for (int rank = 0; blocks >> rank; rank++) {
    if (!(blocks >> rank & 1)) continue;
    machine::Block& block = machine::of_cluster(rank);
    memset(block.memory + to, machine::kSpoilt, count);
    machine::launch->copies.push_back({&block, to, barrier, nullptr, bytes, count});
  }
}

inline void cp_async_bulk_tensor_2d_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(
    uint32_t to, const void* map, int x, int y, uint32_t barrier, uint64_t policy) {
  const int rank = machine::now->block->index.x % machine::launch->cluster;
  cp_async_bulk_tensor_2d_shared__cluster_global_mbarrier__complete_tx__bytes_multicast__cluster_L2__cache_hint(
      to, map, x, y, barrier, 1 << rank, policy);
}

// A thread's own copies: what they will overwrite is spoilt at once, and they land when the thread waits for them.

inline void cp_async_cg_shared_global_L2__128B(uint32_t to, const void* from, int whole, int bytes) {
  if ((uintptr_t)from % 16) machine::fail("a copy from an address that is no multiple of 16");
  if (bytes) machine::readable(from, bytes);
  unsigned char* place = shared(to, whole, 16);
  memset(place, machine::kSpoilt, whole);
  if (!machine::now->waited)
    for (const machine::Late& each : machine::late)
      if (const uintptr_t at = (uintptr_t)from - (uintptr_t)each.place; at < each.bytes) from = each.old + at;
  machine::now->asked.push_back({place, from, bytes});
}
inline void cp_async_cg_shared_global_L2__cache_hint_L2__128B(uint32_t to, const void* from, int whole, int bytes,
                                                              uint64_t policy) {
  cp_async_cg_shared_global_L2__128B(to, from, whole, bytes);
}
inline void cp_async_commit_group() {
  machine::now->on_their_way.push_back(std::move(machine::now->asked));
  machine::now->asked.clear();
}
inline void cp_async_wait_group(int pending) {
  auto& groups = machine::now->on_their_way;
  for (; (int)groups.size() > pending; groups.pop_front())
    for (const machine::Piece& piece : groups.front()) {
      memset(piece.to, 0, 16);
      memcpy(piece.to, piece.from, piece.bytes);
    }
}

// Launches that depend on each other: here the launch before has ended, but for what is ``late``.

inline void griddepcontrol_wait() { machine::now->waited = true; }
inline void griddepcontrol_launch_dependents() {}

// Numbers.

inline void mov_b32(uint16_t& low, uint16_t& high, uint32_t both) { low = both, high = both >> 16; }
inline void mov_b64(uint64_t& both, uint32_t low, uint32_t high) { both = (uint64_t)high << 32 | low; }
template <typename T>
void mov_b32(T& to, uint32_t from) { to = from; }
template <typename T>
void cvt_u32_u16(T& to, uint16_t from) { to = from; }
template <typename T>
void cvt_rn_f16x2_e4m3x2(T& to, uint16_t from) {
  to = numbers::half_bits(numbers::of_e4m3(from & 255)) | (uint32_t)numbers::half_bits(numbers::of_e4m3(from >> 8)) << 16;
}

template <typename T>
void ex2_approx_f32(T& to, float v) { to = exp2f(v); }
template <typename T>
void ex2_approx_ftz_f32(T& to, float v) { to = exp2f(v); }
template <typename T>
void div_full_f32(T& to, float a, float b) { to = a / b; }
template <typename T>
void rsqrt_approx_f32(T& to, float v) { to = 1 / sqrtf(v); }
template <typename T>
void lop3_b32(T& to, uint32_t a, uint32_t b, uint32_t c, int table) {
  if (table != 0xEA) machine::fail("lop3 with another table than (a & b) | c");
  to = (a & b) | c;
}
inline void setp_eq_u32(bool& p, unsigned a, unsigned b) { p = a == b; }
template <typename T>
void selp_u32(T& to, unsigned a, unsigned b, bool p) { to = p ? a : b; }

// Of both halves of a word; rounded once.
template <typename T, typename F>
void of_brains(T& to, F number) {
  uint32_t both = 0;
  for (int i = 0; i < 2; i++) both |= (uint32_t)numbers::brain_bits(number(i)) << 16 * i;
  to = both;
}
inline float brain_of(uint32_t word, int i) { return numbers::of_brain(word >> 16 * i); }
template <typename T>
void fma_rn_bf16x2(T& to, uint32_t a, uint32_t b, uint32_t c) {
  of_brains(to, [=](int i) { return (float)((double)brain_of(a, i) * brain_of(b, i) + brain_of(c, i)); });
}
template <typename T>
void mul_rn_bf16x2(T& to, uint32_t a, uint32_t b) {
  of_brains(to, [=](int i) { return brain_of(a, i) * brain_of(b, i); });
}
template <typename T>
void ldmatrix_sync_aligned_m8n8_x4_shared_b16(T& a, T& b, T& c, T& d, uint32_t from) {
  const uint32_t* rows = machine::exchanged(0xFFFFFFFFu, from);
  T* to[4] = {&a, &b, &c, &d};
  for (int i = 0; i < 4; i++)
    *to[i] = ((const uint32_t*)shared(rows[i * 8 + machine::lane() / 4], 16, 16))[machine::lane() % 4];
}
template <typename T>
void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(T& a, T& b, T& c, T& d, uint32_t from) {
  const uint32_t* rows = machine::exchanged(0xFFFFFFFFu, from);
  T* to[4] = {&a, &b, &c, &d};
  for (int i = 0; i < 4; i++) {
    const int row = i * 8 + machine::lane() % 4 * 2, column = machine::lane() / 4;
    const uint16_t low = ((const uint16_t*)shared(rows[row], 16, 16))[column];
    *to[i] = low | (uint32_t)((const uint16_t*)shared(rows[row + 1], 16, 16))[column] << 16;
  }
}
template <typename T>
void movmatrix_sync_aligned_m8n8_trans_b16(T& to, uint32_t v) {
  const uint32_t* all = machine::exchanged(0xFFFFFFFFu, v);
  const int row = machine::lane() / 4, column = machine::lane() % 4 * 2;
  uint32_t both = 0;
  for (int i = 0; i < 2; i++) both |= (all[(column + i) * 4 + row / 2] >> row % 2 * 16 & 0xFFFF) << 16 * i;
  to = both;
}

// Products of tensor cores: a lane's letters are its parts of the two operands.

struct Operands {
  uint32_t a[4], b[2];
};

// c += a b for 16 rows by K columns by 8, where a word has ``EACH`` numbers of either operand.
template <int EACH, typename C, typename Left, typename Right>
void multiply(C& c0, C& c1, C& c2, C& c3, const Operands& own, Left left, Right right) {
  const Operands* all = machine::exchanged(0xFFFFFFFFu, own);
  const int g = machine::lane() / 4, c = machine::lane() % 4;
  C* sums[2][2] = {{&c0, &c1}, {&c2, &c3}};
  for (int h = 0; h < 2; h++)
    for (int n = 0; n < 2; n++)
      for (int part = 0; part < 2; part++)
        for (int i = 0; i < 4; i++)
          for (int e = 0; e < EACH; e++)
            *sums[h][n] += left(all[g * 4 + i].a[part * 2 + h], e) * right(all[(2 * c + n) * 4 + i].b[part], e);
}

inline int byte_of(uint32_t word, int i) { return word >> 8 * i & 255; }
inline int signed_byte_of(uint32_t word, int i) { return (int8_t)(word >> 8 * i); }
inline float half_of(uint32_t word, int i) { return numbers::of_half(word >> 16 * i); }

#define TRANSECT_MMA(NAME, C, EACH, LEFT, RIGHT)                                                                     \
  inline void NAME(C& c0, C& c1, C& c2, C& c3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,      \
                   uint32_t b1, C, C, C, C) {                                                                        \
    multiply<EACH>(c0, c1, c2, c3, {{a0, a1, a2, a3}, {b0, b1}}, LEFT, RIGHT);                                       \
  }
TRANSECT_MMA(mma_sync_aligned_m16n8k32_row_col_s32_u8_s8_s32, int, 4, byte_of, signed_byte_of)
TRANSECT_MMA(mma_sync_aligned_m16n8k32_row_col_s32_u8_u8_s32, int, 4, byte_of, byte_of)
TRANSECT_MMA(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, float, 2, half_of, half_of)
TRANSECT_MMA(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, float, 2, brain_of, brain_of)

// Products of a warpgroup: 64 rows by 16 k in registers, times N rows of swizzled lines of 128 bytes in shared memory.
// Here they are done at once.

template <typename T>
void setmaxnreg_inc_sync_aligned_u32(T) {}
template <typename T>
void setmaxnreg_dec_sync_aligned_u32(T) {}

inline void wgmma_fence_sync_aligned() {}
inline void wgmma_commit_group_sync_aligned() {}
inline void wgmma_wait_group_sync_aligned(int) {}

struct Left {
  uint32_t a[4];
};

template <int N>
void multiply_group(float* const (&c)[N / 2], const Left& own, uint64_t right) {
  const Left* all = machine::exchanged_in_group(own);
  const int first = machine::now->index.x % 128 / 32 * 32, g = machine::lane() / 4, q = machine::lane() % 4;
  const uint32_t at = (right & 0x3FFF) << 4;
  if ((right >> 32 & 0x3FFF) != 64 || right >> 62 != 1) machine::fail("rows of another order than eights of 128 bytes");
  for (int n = 0; n < N; n++) {
    if (n / 2 % 4 != q) continue;
    float k[16];
    for (int piece = 0; piece < 2; piece++) {
      const uint32_t from = swizzled(at + n * 128 + piece * 16);
      for (int e = 0; e < 8; e++) k[piece * 8 + e] = numbers::of_brain(((const uint16_t*)shared(from, 16, 16))[e]);
    }
    for (int h = 0; h < 2; h++) {
      float sum = 0;
      for (int i = 0; i < 16; i++) sum += brain_of(all[first + g * 4 + i % 8 / 2].a[i / 8 * 2 + h], i % 2) * k[i];
      *c[n / 8 * 4 + h * 2 + n % 2] += sum;
    }
  }
}

template <int N, typename... Rest, size_t... I>
void multiply_group(std::index_sequence<I...>, std::tuple<Rest...> all) {
  float* const c[] = {&std::get<I>(all)...};
  const Left own = {{(uint32_t)std::get<N / 2>(all), (uint32_t)std::get<N / 2 + 1>(all),
                     (uint32_t)std::get<N / 2 + 2>(all), (uint32_t)std::get<N / 2 + 3>(all)}};
  multiply_group<N>(c, own, std::get<N / 2 + 4>(all));
}

#define TRANSECT_WGMMA(NAME, N)                                                                            \
  template <typename... All>                                                                               \
  void NAME(All&&... all) {                                                                                \
    multiply_group<N>(std::make_index_sequence<N / 2>(), std::tuple<All&&...>(std::forward<All>(all)...)); \
  }
TRANSECT_WGMMA(wgmma_mma_async_sync_aligned_m64n16k16_f32_bf16_bf16, 16)
TRANSECT_WGMMA(wgmma_mma_async_sync_aligned_m64n32k16_f32_bf16_bf16, 32)
TRANSECT_WGMMA(wgmma_mma_async_sync_aligned_m64n64k16_f32_bf16_bf16, 64)
TRANSECT_WGMMA(wgmma_mma_async_sync_aligned_m64n128k16_f32_bf16_bf16, 128)
TRANSECT_WGMMA(wgmma_mma_async_sync_aligned_m64n256k16_f32_bf16_bf16, 256)

// The same with both operands in shared memory: 64 rows by 32 bytes of k, of numbers that ``number`` reads.
template <int N, int EACH, typename C, typename Number>
void multiply_shared(C* const (&c)[N / 2], uint64_t left, uint64_t right, bool keep, Number number) {
  const int row = machine::now->index.x % 128 / 32 * 16 + machine::lane() / 4, q = machine::lane() % 4;
  auto all = [&](uint64_t matrix, int r, C (&k)[32 / EACH]) {
    if ((matrix >> 32 & 0x3FFF) != 64 || matrix >> 62 != 1) machine::fail("rows of another order than eights of 128 bytes");
    for (int piece = 0; piece < 2; piece++) {
      const unsigned char* bytes = shared(swizzled(((matrix & 0x3FFF) << 4) + r * 128 + piece * 16), 16, 16);
      for (int e = 0; e < 16 / EACH; e++) k[piece * 16 / EACH + e] = number(bytes + e * EACH);
    }
  };
  C a[2][32 / EACH], b[32 / EACH];
  all(left, row, a[0]), all(left, row + 8, a[1]);
  for (int n = 0; n < N; n++) {
    if (n / 2 % 4 != q) continue;
    all(right, n, b);
    for (int h = 0; h < 2; h++) {
      C sum = 0, &to = *c[n / 8 * 4 + h * 2 + n % 2];
      for (int i = 0; i < 32 / EACH; i++) sum += a[h][i] * b[i];
      to = keep ? to + sum : sum;
    }
  }
  machine::exchanged_in_group(0);  // all four warps have read the operands
}
template <int N, int EACH, typename C, typename Number, typename... Rest, size_t... I>
void multiply_shared(std::index_sequence<I...>, Number number, std::tuple<Rest...> all) {
  C* const c[] = {&std::get<I>(all)...};
  multiply_shared<N, EACH>(c, std::get<N / 2>(all), std::get<N / 2 + 1>(all), std::get<N / 2 + 2>(all), number);
}

inline float e4m3_at(const unsigned char* from) { return numbers::of_e4m3(*from); }
inline int whole_at(const unsigned char* from) { return (signed char)*from; }

#define TRANSECT_WGMMA_SHARED(NAME, N, EACH, C, NUMBER)                                                   \
  template <typename... All>                                                                               \
  void NAME(All&&... all) {                                                                                \
    multiply_shared<N, EACH, C>(std::make_index_sequence<N / 2>(), NUMBER,                                \
                                std::tuple<All&&...>(std::forward<All>(all)...));                          \
  }
TRANSECT_WGMMA_SHARED(wgmma_mma_async_sync_aligned_m64n32k32_f32_e4m3_e4m3, 32, 1, float, e4m3_at)
TRANSECT_WGMMA_SHARED(wgmma_mma_async_sync_aligned_m64n64k32_f32_e4m3_e4m3, 64, 1, float, e4m3_at)
TRANSECT_WGMMA_SHARED(wgmma_mma_async_sync_aligned_m64n96k32_f32_e4m3_e4m3, 96, 1, float, e4m3_at)
TRANSECT_WGMMA_SHARED(wgmma_mma_async_sync_aligned_m64n112k32_f32_e4m3_e4m3, 112, 1, float, e4m3_at)
TRANSECT_WGMMA_SHARED(wgmma_mma_async_sync_aligned_m64n128k32_f32_e4m3_e4m3, 128, 1, float, e4m3_at)
TRANSECT_WGMMA_SHARED(wgmma_mma_async_sync_aligned_m64n32k32_s32_s8_s8, 32, 1, int, whole_at)
TRANSECT_WGMMA_SHARED(wgmma_mma_async_sync_aligned_m64n96k32_s32_s8_s8, 96, 1, int, whole_at)

}  // namespace ptx
