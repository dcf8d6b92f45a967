// Y = X W^T + b for 1 to 32 rows of X at a time and a weight in bfloat16: launches the kernels of small_rows.cuh.

#include "../../lang/parts.cuh"
#include "small_rows.cuh"

#define TRANSECT_PARTS 4

// x [M, K] and weight [N, K] with the given strides between rows, out [M, N] contiguous, bias [N] or null; K and both
// strides multiples of 8, x and weight on 16 bytes. ``columns``: sixteens of rows of W in a group, ``stages``: buffers
// of a ring, ``wide``: chunks that are asked for at a time (the triples listed below); ``per``: sixteens for a block;
// ``ranks``: blocks that share K (at most 8); -p: one, which adds p consecutive parts of K in order (a multiple of
// 64 ``wide`` for each; p divides ``warps``). Only such a block asks for more than one chunk at a time.
// ``gate``: see above; N is then a multiple of 16, bias null and ranks 1. residual to eps: as in ``Norm``, null for
// none. ``dependent``: 0 an ordinary launch, 1 a dependent one, 2 one that asks for W before the kernel before has ended
// (which must not write W). Returns a cudaError_t, or -1 for what it does not take.
extern "C" int transect_small_matmul(const void* x, const void* weight, const void* bias, void* out, int M, int N,
                                     int K, long long x_stride, long long w_stride, int columns, int stages, int wide,
                                     int warps, int per, int ranks, int gate, const void* residual, const void* scale,
                                     void* scaled, void* squares, const void* x_squares, float eps,
                                     int dependent, void* stream) {
  if (M < 1 || N < 1 || K < 8 || K % 8 || x_stride % 8 || w_stride % 8 || per < 1 || ranks > 8 || !ranks ||
      (ranks < 0 ? warps < 1 || warps > 8 || warps % -ranks || K % (-64 * ranks) : warps != 4 && warps != 8))
    return -1;
  const Norm norm = {(const __nv_bfloat16*)residual, (const __nv_bfloat16*)scale,
                     (__nv_bfloat16*)scaled,         (float*)squares,
                     (const float*)x_squares,        eps};
  if (gate && (N % 16 || ranks > 1 || bias || residual)) return -1;
  if ((residual && (N % 16 || !scale || !scaled || !squares)) || (x_squares && K % 64)) return -1;
#define TRANSECT_START(RB, STAGES, NT, WIDE)                                                                       \
  return TRANSECT_HERE(start<kBf16, RB, STAGES, NT, WIDE>(x, weight, nullptr, bias, out, M, N, K, x_stride, w_stride * 2, \
                                                    per, warps, ranks, gate, norm, dependent, stream))
#define TRANSECT_ROWS(RB, STAGES, WIDE)                             \
  if (columns == RB && stages == STAGES && wide == WIDE) {          \
    if (M <= 8) TRANSECT_START(RB, STAGES, 1, WIDE);                \
    if (M <= 16) TRANSECT_START(RB, STAGES, 2, WIDE);               \
    TRANSECT_START(RB, STAGES, 4, WIDE);                            \
  }
  TRANSECT_ROWS(1, 4, 1)
  TRANSECT_ROWS(1, 8, 1)
  TRANSECT_ROWS(2, 2, 1)
  TRANSECT_ROWS(2, 3, 1)
  TRANSECT_ROWS(2, 4, 1)
  TRANSECT_ROWS(2, 6, 1)
  TRANSECT_ROWS(2, 12, 1)
  TRANSECT_ROWS(3, 2, 1)
  TRANSECT_ROWS(3, 3, 1)
  TRANSECT_ROWS(3, 4, 1)
  TRANSECT_ROWS(3, 8, 1)
  TRANSECT_ROWS(1, 12, 4)
  TRANSECT_ROWS(2, 4, 2)
  TRANSECT_ROWS(2, 6, 2)
  return -1;
}
