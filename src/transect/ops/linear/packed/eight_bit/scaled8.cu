// Y = X W^T + b for 1 to 16 rows of X at a time and a weight of 8 bits, fp8 (e4m3) or whole numbers, with a scale for
// each row or, of fp8, for each block of 128 rows by 128 k: launches the kernels of small_rows.cuh.

#include "../../../lang/parts.cuh"
#include "../../few_rows/small_rows.cuh"

#define TRANSECT_PARTS 6

// x [M, K] bfloat16 and weight [N, K] bytes with the given strides between rows (of x in elements), scale float32 [N] or
// [N / 128, K / 128] rounded up, out [M, N] contiguous, bias [N] or null; K and w_stride multiples of 16, x_stride of 8,
// x and weight on 16 bytes. ``format``: 1 fp8, 2 whole numbers, 3 fp8 with scales of blocks. columns to stream: as of
// transect_small_matmul. With a gate and scales of blocks N is a multiple of 256. Returns a cudaError_t, or -1 for what
// it does not take.
extern "C" int transect_scaled8(const void* x, const void* weight, const void* scale, const void* bias, void* out,
                                int M, int N, int K, long long x_stride, long long w_stride, int format, int columns,
                                int stages, int warps, int per, int ranks, int gate, const void* residual,
                                const void* norm_scale, void* scaled, void* squares, const void* x_squares, float eps,
                                int dependent, void* stream) {
  if (M < 1 || N < 1 || K < 16 || K % 16 || x_stride % 8 || w_stride % 16 || per < 1 || ranks < 1 || ranks > 8 ||
      (warps != 4 && warps != 8) || !scale)
    return -1;
  const Norm norm = {(const __nv_bfloat16*)residual, (const __nv_bfloat16*)norm_scale,
                     (__nv_bfloat16*)scaled,         (float*)squares,
                     (const float*)x_squares,        eps};
  if (gate && (N % 16 || ranks > 1 || bias || residual)) return -1;
  if ((residual && (N % 16 || !norm_scale || !scaled || !squares)) || (x_squares && K % 64)) return -1;
#define TRANSECT_START(F, RB, STAGES, NT)                                                                          \
  return TRANSECT_HERE(start<F, RB, STAGES, NT>(x, weight, scale, bias, out, M, N, K, x_stride, w_stride, per, warps, \
                                                ranks, gate, norm, dependent, stream))
#define TRANSECT_ROWS(F, RB, STAGES)                    \
  if (format == F && columns == RB && stages == STAGES) { \
    if (M <= 8) TRANSECT_START(F, RB, STAGES, 1);       \
    TRANSECT_START(F, RB, STAGES, 2);                   \
  }
  TRANSECT_ROWS(kFp8, 1, 3)
  TRANSECT_ROWS(kFp8, 1, 4)
  TRANSECT_ROWS(kFp8, 1, 8)
  TRANSECT_ROWS(kFp8, 2, 3)
  TRANSECT_ROWS(kFp8, 2, 4)
  TRANSECT_ROWS(kFp8, 2, 6)
  TRANSECT_ROWS(kFp8, 3, 3)
  TRANSECT_ROWS(kFp8, 3, 4)
  TRANSECT_ROWS(kFp8, 2, 2)
  TRANSECT_ROWS(kFp8, 3, 2)
  TRANSECT_ROWS(kInt8, 1, 3)
  TRANSECT_ROWS(kInt8, 1, 4)
  TRANSECT_ROWS(kInt8, 1, 8)
  TRANSECT_ROWS(kInt8, 2, 3)
  TRANSECT_ROWS(kInt8, 2, 4)
  TRANSECT_ROWS(kInt8, 2, 6)
  TRANSECT_ROWS(kInt8, 3, 3)
  TRANSECT_ROWS(kInt8, 3, 4)
  TRANSECT_ROWS(kInt8, 2, 2)
  TRANSECT_ROWS(kInt8, 3, 2)
  TRANSECT_ROWS(kFp8Blocks, 1, 3)
  TRANSECT_ROWS(kFp8Blocks, 1, 4)
  TRANSECT_ROWS(kFp8Blocks, 1, 8)
  TRANSECT_ROWS(kFp8Blocks, 2, 3)
  TRANSECT_ROWS(kFp8Blocks, 2, 4)
  TRANSECT_ROWS(kFp8Blocks, 2, 6)
  TRANSECT_ROWS(kFp8Blocks, 3, 3)
  TRANSECT_ROWS(kFp8Blocks, 3, 4)
  TRANSECT_ROWS(kFp8Blocks, 2, 2)
  TRANSECT_ROWS(kFp8Blocks, 3, 2)
  return -1;
}
