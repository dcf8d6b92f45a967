// Y = X W^T + b for up to 256 rows of X on Hopper, bfloat16 in and out: launches the kernels of hopper_rows.cuh.

#include "hopper_rows.cuh"

#define TRANSECT_PARTS 4

#define TRANSECT_CUT(SWAP, GATE, NB, WGS, RM, PAIR, BLOCKS)                                            \
  if (swap == SWAP && gate == GATE && right == NB && groups == WGS && repeats == RM && pair == PAIR && \
      blocks == BLOCKS)                                                                                \
    return TRANSECT_HERE(start<__nv_bfloat16, SWAP, GATE, NB, WGS, RM, PAIR, BLOCKS>(                  \
        x, weight, nullptr, nullptr, bias, out, parts, flags, M, N, K, x_stride, w_stride, ranks, clusters,  \
        order, stages, dependent, keep, stream));

// x [M, K] and weight [N, K] (with ``gate`` [2 N, K]) with the given strides between rows, out [M, N] contiguous, bias
// [N] or null; N, K and both strides multiples of 8, x and weight on 16 bytes. parts: float32 for every tile of every
// block, where blocks add over memory; flags: int32 zeros for every block, zeros again afterwards. swap to blocks: one
// of the cuts listed below; ranks, clusters (with ranks = 0), order, stages: see hopper_rows.cuh. ``dependent``: 0 an ordinary launch, 1
// a dependent one, 2 one that asks for W before the kernel before has ended (which must not write W). ``keep``: see
// hopper_rows.cuh. Returns a
// cudaError_t, or -1 for what it does not take, -2 where the tensors cannot be described to the copy engine.
extern "C" int transect_small_matmul_hopper(const void* x, const void* weight, const void* bias, void* out, void* parts,
                                            void* flags, int M, int N, int K, long long x_stride, long long w_stride,
                                            int swap, int gate, int right, int groups, int repeats, int pair,
                                            int blocks, int ranks, int clusters, int order, int stages, int dependent,
                                            int keep, void* stream) {
  if (M < 1 || N < 8 || N % 8 || K < 8 || K % 8 || x_stride % 8 || w_stride % 8) return -1;
  TRANSECT_CUT(1, 0, 32, 2, 1, 1, 2)
  TRANSECT_CUT(1, 0, 32, 1, 1, 1, 2)
  TRANSECT_CUT(1, 0, 32, 3, 1, 1, 1)
  TRANSECT_CUT(1, 0, 64, 1, 1, 1, 2)
  TRANSECT_CUT(1, 0, 64, 3, 1, 1, 1)
  TRANSECT_CUT(1, 0, 96, 1, 1, 1, 2)
  TRANSECT_CUT(1, 0, 128, 2, 1, 1, 1)
  TRANSECT_CUT(1, 0, 128, 3, 1, 1, 1)
  TRANSECT_CUT(1, 0, 128, 1, 2, 1, 1)
  TRANSECT_CUT(1, 0, 128, 1, 1, 1, 2)
  TRANSECT_CUT(1, 0, 192, 2, 1, 1, 1)
  TRANSECT_CUT(1, 0, 192, 1, 1, 1, 2)
  TRANSECT_CUT(1, 0, 160, 2, 1, 1, 1)
  TRANSECT_CUT(1, 0, 208, 2, 1, 2, 1)
  TRANSECT_CUT(0, 0, 96, 1, 1, 1, 2)
  TRANSECT_CUT(0, 0, 112, 1, 1, 1, 2)
  TRANSECT_CUT(0, 0, 128, 1, 1, 1, 2)
  TRANSECT_CUT(0, 0, 224, 2, 1, 1, 1)
  TRANSECT_CUT(0, 0, 224, 2, 1, 2, 1)
  TRANSECT_CUT(1, 1, 64, 1, 1, 1, 2)
  TRANSECT_CUT(1, 1, 128, 2, 1, 1, 1)
  TRANSECT_CUT(1, 1, 160, 2, 1, 1, 1)
  TRANSECT_CUT(1, 1, 208, 2, 1, 2, 1)
  TRANSECT_CUT(1, 1, 256, 2, 1, 2, 1)
  TRANSECT_CUT(0, 1, 48, 1, 1, 1, 2)
  TRANSECT_CUT(0, 1, 112, 1, 1, 1, 2)
  TRANSECT_CUT(0, 1, 128, 1, 1, 1, 2)
  TRANSECT_CUT(0, 1, 192, 1, 1, 1, 2)
  TRANSECT_CUT(0, 1, 224, 1, 1, 1, 2)
  TRANSECT_CUT(0, 1, 128, 2, 1, 1, 1)
  TRANSECT_CUT(0, 1, 192, 2, 1, 1, 1)
  TRANSECT_CUT(0, 1, 224, 2, 1, 1, 1)
  TRANSECT_CUT(0, 1, 224, 2, 1, 2, 1)
  TRANSECT_CUT(0, 0, 32, 1, 1, 1, 2)
  TRANSECT_CUT(0, 0, 48, 1, 1, 1, 2)
  TRANSECT_CUT(0, 0, 64, 1, 1, 1, 2)
  TRANSECT_CUT(0, 0, 64, 2, 1, 1, 2)
  TRANSECT_CUT(0, 0, 64, 2, 1, 2, 2)
  TRANSECT_CUT(0, 0, 64, 2, 1, 2, 1)
  TRANSECT_CUT(0, 0, 96, 2, 1, 2, 1)
  TRANSECT_CUT(0, 0, 128, 2, 1, 2, 1)
  TRANSECT_CUT(0, 0, 192, 2, 1, 2, 1)
  TRANSECT_CUT(1, 0, 256, 2, 1, 2, 1)
  return -1;
}
