// Y = X W^T + b for up to 256 rows of X on Hopper, X and W in fp8 (e4m3), X with a scale for each 128 k of a row, W for
// each block of 128 rows by 128 k: launches the kernels of hopper_rows.cuh.

#define TRANSECT_NUMBERS Fp8Blocks
#define TRANSECT_PARTS 4

#include "scaled8_hopper.cuh"

// x_scale [M, K / 128] and scale [N / 128, K / 128] (with ``gate`` [2 N / 128, K / 128]) float32, rounded up; with
// ``gate`` N is a multiple of 128. The rest is as of transect_scaled8_hopper.
extern "C" int transect_scaled8_hopper_blocks(const void* x, const void* weight, const void* x_scale,
                                              const void* scale, const void* bias, void* out, void* parts,
                                              void* flags, int M, int N, int K, int swap, int gate, int right,
                                              int groups, int repeats, int pair, int blocks, int ranks, int clusters,
                                              int stages, int dependent, void* stream) {
  if (!takes_sizes(M, N, K) || !x_scale || !scale) return -1;
  TRANSECT_CUT(0, 0, 64, 1, 1, 1, 2)
  TRANSECT_CUT(0, 0, 96, 1, 1, 1, 2)
  TRANSECT_CUT(0, 0, 112, 1, 1, 1, 2)
  TRANSECT_CUT(0, 0, 128, 1, 1, 1, 2)
  TRANSECT_CUT(0, 0, 64, 2, 1, 1, 1)
  TRANSECT_CUT(0, 0, 96, 2, 1, 1, 1)
  TRANSECT_CUT(0, 0, 112, 2, 1, 1, 1)
  TRANSECT_CUT(0, 0, 128, 2, 1, 1, 1)
  TRANSECT_CUT(0, 0, 128, 1, 1, 2, 2)
  TRANSECT_CUT(0, 0, 64, 2, 1, 2, 1)
  TRANSECT_CUT(0, 0, 96, 2, 1, 2, 1)
  TRANSECT_CUT(0, 0, 128, 2, 1, 2, 1)
  TRANSECT_CUT(0, 1, 64, 1, 1, 1, 2)
  TRANSECT_CUT(0, 1, 112, 1, 1, 1, 2)
  TRANSECT_CUT(0, 1, 128, 1, 1, 1, 2)
  TRANSECT_CUT(0, 1, 112, 2, 1, 1, 1)
  TRANSECT_CUT(0, 1, 128, 2, 1, 1, 1)
  return -1;
}
