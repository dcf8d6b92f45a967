// Y = X W^T + b for up to 256 rows of X on Hopper, X and W whole numbers of 8 bits with a scale for each row of both:
// launches the kernels of hopper_rows.cuh, whose sums are exact.

#define TRANSECT_NUMBERS signed char
#define TRANSECT_PARTS 4

#include "scaled8_hopper.cuh"

// Arguments as of transect_scaled8_hopper.
extern "C" int transect_scaled8_hopper_int8(const void* x, const void* weight, const void* x_scale, const void* scale,
                                            const void* bias, void* out, void* parts, void* flags, int M, int N,
                                            int K, int swap, int gate, int right, int groups, int repeats, int pair,
                                            int blocks, int ranks, int clusters, int stages, int dependent,
                                            void* stream) {
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
