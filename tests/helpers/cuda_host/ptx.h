// The PTX instructions that the sources use, each a function of its operands in turn; ``cuda_host`` writes the calls.
// A function's name is the instruction's, with _ for each of its dots and colons.

#pragma once

#include "machine.h"
#include "numbers.h"

namespace ptx {

using machine::shared;

struct Tag {};  // an operand that is thrown away

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
inline void st_shared_f32(uint32_t to, float v) { *(float*)shared(to, 4, 4) = v; }
inline void st_shared_v2_f32(uint32_t to, float a, float b) {
  float* at = (float*)shared(to, 8, 8);
  at[0] = a, at[1] = b;
}
inline void st_shared_v2_u32(uint32_t to, uint32_t a, uint32_t b) {
  uint32_t* at = (uint32_t*)shared(to, 8, 8);
  at[0] = a, at[1] = b;
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

// Barriers that count, and the copy engine.

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
inline void mbarrier_try_wait_parity_shared__cta_b64(bool& done, uint32_t barrier, int parity) {
  machine::Barrier* b = (machine::Barrier*)shared(barrier, 8, 8);
  done = b->phase != (unsigned)parity;
  if (done) return machine::acquire(b);
  machine::now->block->at_barrier[barrier].push_back(machine::now);
  machine::leave();
}

inline void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(uint32_t to, const void* from, int bytes,
                                                                             uint32_t barrier) {
  if (bytes <= 0 || bytes % 16 || (uintptr_t)from % 16) machine::fail("a bulk copy that is not of whole 16 bytes");
  machine::readable(from, bytes);
  memset(shared(to, bytes, 16), machine::kSpoilt, bytes);
  shared(barrier, 8, 8);
  machine::launch->copies.push_back({machine::now->block, to, barrier, (const unsigned char*)from, {}, bytes});
}

// A tensor map describes rows of bytes; the only swizzle is that of 128 bytes, of boxes as wide.
struct TensorMap {
  const unsigned char* from;
  uint64_t sizes[2], stride;
  uint32_t box[2];
};

inline void cp_async_bulk_tensor_2d_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(
    uint32_t to, const void* map, int x, int y, uint32_t barrier, uint64_t) {
  const TensorMap& m = *(const TensorMap*)map;
  std::vector<unsigned char> bytes(m.box[0] * m.box[1]);
  if (m.box[0] != 128) machine::fail("a box that is not 128 bytes wide");
  for (uint32_t r = 0; r < m.box[1]; r++)
    for (uint32_t i = 0; i < 128; i++) {
      const uint64_t column = x + i, row = y + r;
      const uint32_t address = to + r * 128 + i, swizzled = address ^ (address >> 7 & 7) << 4;
      const bool inside = column < m.sizes[0] && row < m.sizes[1];  // below 0 is above all sizes
      bytes[swizzled - to] = inside ? m.from[row * m.stride + column] : 0;
    }
  memset(shared(to, bytes.size(), 1024), machine::kSpoilt, bytes.size());
  shared(barrier, 8, 8);
  const int count = bytes.size();
  machine::launch->copies.push_back({machine::now->block, to, barrier, nullptr, std::move(bytes), count});
}

// Launches that depend on each other: here the launch before has ended.

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

// Numbers.

inline void mov_b32(uint16_t& low, uint16_t& high, uint32_t both) { low = both, high = both >> 16; }
template <typename T>
void mov_b32(T& to, uint32_t from) { to = from; }
template <typename T>
void cvt_u32_u16(T& to, uint16_t from) { to = from; }
template <typename T>
void cvt_rn_f16x2_e4m3x2(T& to, uint16_t from) {
  to = numbers::half_bits(numbers::of_e4m3(from & 255)) | (uint32_t)numbers::half_bits(numbers::of_e4m3(from >> 8)) << 16;
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
inline float brain_of(uint32_t word, int i) { return numbers::of_bits((i ? word : word << 16) & 0xFFFF0000u); }

#define TRANSECT_MMA(NAME, C, EACH, LEFT, RIGHT)                                                                     \
  inline void NAME(C& c0, C& c1, C& c2, C& c3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,      \
                   uint32_t b1, C, C, C, C) {                                                                        \
    multiply<EACH>(c0, c1, c2, c3, {{a0, a1, a2, a3}, {b0, b1}}, LEFT, RIGHT);                                       \
  }
TRANSECT_MMA(mma_sync_aligned_m16n8k32_row_col_s32_u8_s8_s32, int, 4, byte_of, signed_byte_of)
TRANSECT_MMA(mma_sync_aligned_m16n8k32_row_col_s32_u8_u8_s32, int, 4, byte_of, byte_of)
TRANSECT_MMA(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, float, 2, half_of, half_of)
TRANSECT_MMA(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, float, 2, brain_of, brain_of)

}  // namespace ptx
