// Y = X W^T + b for up to 256 rows of X on Hopper, X and W in fp8 (e4m3) with a scale for each row of both: launches the
// kernels of hopper_rows.cuh.

#define TRANSECT_NUMBERS __nv_fp8_e4m3
#define TRANSECT_PARTS 4

#include "scaled8_hopper.cuh"

// x [M, K] and weight [N, K] (with ``gate`` [2 N, K]) contiguous, x_scale [M] and scale [N] (with ``gate`` [2 N])
// float32; K a multiple of 16. The rest is as of transect_small_matmul_hopper.
extern "C" int transect_scaled8_hopper(const void* x, const void* weight, const void* x_scale, const void* scale,
                                       const void* bias, void* out, void* parts, void* flags, int M, int N, int K,
                                       int swap, int gate, int right, int groups, int repeats, int pair, int blocks,
                                       int ranks, int clusters, int stages, int dependent, void* stream) {
  if (!takes_sizes(M, N, K) || !x_scale || !scale) return -1;
  TRANSECT_CUT(1, 0, 32, 1, 1, 1, 2)
  TRANSECT_CUT(1, 0, 64, 1, 1, 1, 2)
  TRANSECT_CUT(1, 0, 96, 1, 1, 1, 2)
  TRANSECT_CUT(1, 0, 128, 1, 1, 1, 2)
  TRANSECT_CUT(1, 0, 128, 2, 1, 1, 1)
  TRANSECT_CUT(1, 0, 160, 2, 1, 1, 1)
  TRANSECT_CUT(1, 0, 192, 1, 1, 1, 2)
  TRANSECT_CUT(1, 0, 192, 2, 1, 1, 1)
  TRANSECT_CUT(1, 0, 224, 1, 1, 1, 1)
  TRANSECT_CUT(1, 0, 256, 1, 1, 1, 1)
  TRANSECT_CUT(0, 0, 96, 1, 1, 1, 2)
  TRANSECT_CUT(0, 0, 112, 1, 1, 1, 2)
  TRANSECT_CUT(0, 0, 128, 1, 1, 1, 2)
  TRANSECT_CUT(0, 0, 192, 2, 1, 2, 1)
  TRANSECT_CUT(0, 0, 224, 2, 1, 1, 1)
  TRANSECT_CUT(1, 1, 64, 1, 1, 1, 2)
  TRANSECT_CUT(1, 1, 128, 2, 1, 1, 1)
  TRANSECT_CUT(1, 1, 160, 2, 1, 1, 1)
  TRANSECT_CUT(1, 1, 208, 2, 1, 2, 1)
  TRANSECT_CUT(1, 1, 256, 2, 1, 2, 1)
  TRANSECT_CUT(0, 1, 112, 1, 1, 1, 2)
  TRANSECT_CUT(0, 1, 224, 2, 1, 1, 1)
  TRANSECT_CUT(0, 1, 224, 2, 1, 2, 1)
  return -1;
}
