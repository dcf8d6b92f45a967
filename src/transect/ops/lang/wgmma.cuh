// What kernels with Hopper's own products (wgmma) share: tiles of 64 k of bfloat16 matrices that the bulk copy engine
// swizzles into shared memory, how wgmma finds them there, and its fences. Sums are asked for by macros that name
// registers: N0 N1 ... are places of sixteen sums in an instruction, R8 to R64 the operands of an asm statement, OF8 to
// OF64 the same of any kind of register.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "tensor_map.cuh"

namespace hopper {

template <typename Number>
constexpr int kChunkOf = 128 / sizeof(Number);     // k in a chunk: 128 bytes, the width of the swizzle
constexpr int kChunk = kChunkOf<__nv_bfloat16>;

// As ``barrier_wait``, with a loop that the compiler sees.
__device__ __forceinline__ void barrier_poll(uint32_t barrier, int parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

__device__ __forceinline__ void fetch(uint32_t to, const CUtensorMap* map, int k, int row, uint32_t barrier,
                                      uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3}], [%4], "
      "%5;" ::"r"(to),
      "l"(map), "r"(k), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// The same for all blocks of the cluster whose bits ``blocks`` has: to the same place of each, counted by the same barrier
// of each.
__device__ __forceinline__ void fetch_for_all(uint32_t to, const CUtensorMap* map, int k, int row, uint32_t barrier,
                                              uint16_t blocks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], "
      "[%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(map), "r"(k), "r"(row), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}

// How wgmma finds rows of 128 swizzled bytes in shared memory: groups of 8 rows are 1024 bytes apart. ``place`` is the half
// that an address makes; one b bytes further on is b / 16 more.
__device__ __forceinline__ uint32_t place(uint32_t address) { return (address & 0x3FFFF) >> 4 | 1 << 16; }
__device__ __forceinline__ uint64_t matrix_at(uint32_t place) { return (uint64_t)(64 | 1 << 30) << 32 | place; }
__device__ __forceinline__ uint64_t matrix(uint32_t address) { return matrix_at(place(address)); }

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// No use of the sums moves across this place.
template <int RM, int COUNT>
__device__ __forceinline__ void hold(float (&c)[RM][COUNT]) {
#pragma unroll
  for (int r = 0; r < RM; r++)
#pragma unroll
    for (int e = 0; e < COUNT; e++) asm volatile("" : "+f"(c[r][e])::"memory");
}
template <int RM, int COUNT>
__device__ __forceinline__ void hold(int (&c)[RM][COUNT]) {
#pragma unroll
  for (int r = 0; r < RM; r++)
#pragma unroll
    for (int e = 0; e < COUNT; e++) asm volatile("" : "+r"(c[r][e])::"memory");
}

#define OF4(KIND, c, i) KIND(c[i]), KIND(c[i + 1]), KIND(c[i + 2]), KIND(c[i + 3])
#define OF8(KIND, c, i) OF4(KIND, c, i), OF4(KIND, c, i + 4)
#define OF16(KIND, c, i) OF8(KIND, c, i), OF8(KIND, c, i + 8)
#define OF32(KIND, c, i) OF16(KIND, c, i), OF16(KIND, c, i + 16)
#define OF64(KIND, c, i) OF32(KIND, c, i), OF32(KIND, c, i + 32)
#define R4(c, i) OF4("+f", c, i)
#define R8(c, i) OF8("+f", c, i)
#define R16(c, i) OF16("+f", c, i)
#define R32(c, i) OF32("+f", c, i)
#define R64(c, i) OF64("+f", c, i)
#define N00 "%0, %1, %2, %3"
#define N0H "%0, %1, %2, %3, %4, %5, %6, %7"
#define N0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define N1 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define N1H ", %16, %17, %18, %19, %20, %21, %22, %23"
#define N3H ", %48, %49, %50, %51, %52, %53, %54, %55"
#define N6H ", %96, %97, %98, %99, %100, %101, %102, %103"
#define N2 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define N3 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define N4 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define N5 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define N6 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define N7 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Rows of ``columns`` numbers, bfloat16 or of one byte, in pieces of ``box`` rows by a chunk. ``both``: the rows are half
// a gate's and half the other factor's, and a piece has eight of one and eight of the other in turn.
template <typename Number = __nv_bfloat16>
inline int describe(CUtensorMap* map, const void* address, int rows, int columns, long long stride, int box,
                    bool both = false) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return 1;
  const cuuint64_t row = (cuuint64_t)stride * sizeof(Number), width = (cuuint64_t)columns;
  const cuuint64_t plain[2] = {width, (cuuint64_t)rows}, plain_strides[1] = {row};
  const cuuint64_t paired[4] = {width, 8, 2, (cuuint64_t)rows / 16}, paired_strides[3] = {row, rows / 2 * row, 8 * row};
  const cuuint32_t plain_box[2] = {kChunkOf<Number>, (cuuint32_t)box}, paired_box[4] = {kChunkOf<Number>, 8, 2, (cuuint32_t)box / 16};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type = sizeof(Number) == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return (int)encode(map, type, both ? 4 : 2, (void*)address, both ? paired : plain,
                     both ? paired_strides : plain_strides, both ? paired_box : plain_box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace hopper
