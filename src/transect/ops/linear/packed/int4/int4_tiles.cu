// The launcher of block_tiles.cuh for 4 bits in groups.

#include "../block_tiles.cuh"

#define TRANSECT_PARTS 6

// As gguf_tiles.cu says, but weight: what ``arrange`` of int4_packing.py gives; type: 0, 1, 2 for groups of 128, 64,
// 32; K a multiple of 128.
extern "C" int transect_int4_tiles(const void* x, const void* weight, const void* bias, void* out, void* parts,
                                   void* flags, int M, int N, int K, long long x_stride, int type, int rows, int groups,
                                   int resident, int blocks, int w_stages, int x_stages, int together,
                                   int gated, int dependent, void* stream) {
  if (tiles_refused(M, N, K, x_stride, blocks, w_stages, x_stages) || K % 128) return -1;
  type += kInt4;
  TRANSECT_CUT(kInt4, 16, 2, 2)
  TRANSECT_CUT(kInt4, 32, 2, 2)
  TRANSECT_CUT(kInt4, 64, 2, 2)
  TRANSECT_CUT(kInt4, 128, 2, 1)
  TRANSECT_CUT(kInt4, 128, 3, 1)
  TRANSECT_CUT(kInt4, 256, 2, 1)
  TRANSECT_CUT(kInt4_64, 16, 2, 2)
  TRANSECT_CUT(kInt4_64, 32, 2, 2)
  TRANSECT_CUT(kInt4_64, 64, 2, 2)
  TRANSECT_CUT(kInt4_64, 128, 2, 1)
  TRANSECT_CUT(kInt4_64, 128, 3, 1)
  TRANSECT_CUT(kInt4_64, 256, 2, 1)
  TRANSECT_CUT(kInt4_32, 16, 2, 2)
  TRANSECT_CUT(kInt4_32, 32, 2, 2)
  TRANSECT_CUT(kInt4_32, 64, 2, 2)
  TRANSECT_CUT(kInt4_32, 128, 2, 1)
  TRANSECT_CUT(kInt4_32, 128, 3, 1)
  TRANSECT_CUT(kInt4_32, 256, 2, 1)
  return -1;
}
