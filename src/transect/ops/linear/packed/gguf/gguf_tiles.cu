// The launcher of block_tiles.cuh for the block types of GGUF files.

#include "../block_tiles.cuh"

#define TRANSECT_PARTS 12

// x [M, K] bfloat16 with x_stride elements between rows, on 16 bytes, K and x_stride multiples of 8. weight: the units
// of a type (its number in ``FORMATS``), N / 16 down by K / 256 across, both rounded up. bias [N] or null, out [M, N],
// N a multiple of 8. parts: rows * groups * 64 float32 for every block, with ``together`` twice as many; flags:
// kMostBlocks int32 zeros, zeros again afterwards, and as many counters that begin with any value. rows, groups,
// resident: one of the cuts listed below; blocks: of the launch, all of which must run at once, an even number with 256
// rows; stages of the rings 2 to 16. gated: N a multiple of 32, no bias, out [M, N / 2]. ``dependent``: 0 an ordinary
// launch, 1 a dependent one, 2 one that asks for the weight before the kernel before has ended. Returns a cudaError_t,
// or -1 for what it does not take, -2 where X cannot be described to the copy engine.
extern "C" int transect_gguf_tiles(const void* x, const void* weight, const void* bias, void* out, void* parts,
                                   void* flags, int M, int N, int K, long long x_stride, int type, int rows, int groups,
                                   int resident, int blocks, int w_stages, int x_stages, int together,
                                   int gated, int dependent, void* stream) {
  if (tiles_refused(M, N, K, x_stride, blocks, w_stages, x_stages)) return -1;
  TRANSECT_CUT(kQ4_0, 16, 2, 2)
  TRANSECT_CUT(kQ4_0, 32, 2, 2)
  TRANSECT_CUT(kQ4_0, 64, 2, 2)
  TRANSECT_CUT(kQ4_0, 128, 2, 1)
  TRANSECT_CUT(kQ4_0, 128, 3, 1)
  TRANSECT_CUT(kQ4_0, 256, 2, 1)
  TRANSECT_CUT(kQ4_1, 16, 2, 2)
  TRANSECT_CUT(kQ4_1, 32, 2, 2)
  TRANSECT_CUT(kQ4_1, 64, 2, 2)
  TRANSECT_CUT(kQ4_1, 128, 2, 1)
  TRANSECT_CUT(kQ4_1, 128, 3, 1)
  TRANSECT_CUT(kQ4_1, 256, 2, 1)
  TRANSECT_CUT(kQ5_0, 16, 2, 2)
  TRANSECT_CUT(kQ5_0, 32, 2, 2)
  TRANSECT_CUT(kQ5_0, 64, 2, 2)
  TRANSECT_CUT(kQ5_0, 128, 2, 1)
  TRANSECT_CUT(kQ5_0, 128, 3, 1)
  TRANSECT_CUT(kQ5_0, 256, 2, 1)
  TRANSECT_CUT(kQ5_1, 16, 2, 2)
  TRANSECT_CUT(kQ5_1, 32, 2, 2)
  TRANSECT_CUT(kQ5_1, 64, 2, 2)
  TRANSECT_CUT(kQ5_1, 128, 2, 1)
  TRANSECT_CUT(kQ5_1, 128, 3, 1)
  TRANSECT_CUT(kQ5_1, 256, 2, 1)
  TRANSECT_CUT(kQ8_0, 16, 2, 2)
  TRANSECT_CUT(kQ8_0, 32, 2, 2)
  TRANSECT_CUT(kQ8_0, 64, 2, 2)
  TRANSECT_CUT(kQ8_0, 128, 2, 1)
  TRANSECT_CUT(kQ8_0, 128, 3, 1)
  TRANSECT_CUT(kQ8_0, 256, 2, 1)
  TRANSECT_CUT(kQ2_K, 16, 2, 2)
  TRANSECT_CUT(kQ2_K, 32, 2, 2)
  TRANSECT_CUT(kQ2_K, 64, 2, 2)
  TRANSECT_CUT(kQ2_K, 128, 2, 1)
  TRANSECT_CUT(kQ2_K, 128, 3, 1)
  TRANSECT_CUT(kQ2_K, 256, 2, 1)
  TRANSECT_CUT(kQ3_K, 16, 2, 2)
  TRANSECT_CUT(kQ3_K, 32, 2, 2)
  TRANSECT_CUT(kQ3_K, 64, 2, 2)
  TRANSECT_CUT(kQ3_K, 128, 2, 1)
  TRANSECT_CUT(kQ3_K, 128, 3, 1)
  TRANSECT_CUT(kQ3_K, 256, 2, 1)
  TRANSECT_CUT(kQ4_K, 16, 2, 2)
  TRANSECT_CUT(kQ4_K, 32, 2, 2)
  TRANSECT_CUT(kQ4_K, 64, 2, 2)
  TRANSECT_CUT(kQ4_K, 128, 2, 1)
  TRANSECT_CUT(kQ4_K, 128, 3, 1)
  TRANSECT_CUT(kQ4_K, 256, 2, 1)
  TRANSECT_CUT(kQ5_K, 16, 2, 2)
  TRANSECT_CUT(kQ5_K, 32, 2, 2)
  TRANSECT_CUT(kQ5_K, 64, 2, 2)
  TRANSECT_CUT(kQ5_K, 128, 2, 1)
  TRANSECT_CUT(kQ5_K, 128, 3, 1)
  TRANSECT_CUT(kQ5_K, 256, 2, 1)
  TRANSECT_CUT(kQ6_K, 16, 2, 2)
  TRANSECT_CUT(kQ6_K, 32, 2, 2)
  TRANSECT_CUT(kQ6_K, 64, 2, 2)
  TRANSECT_CUT(kQ6_K, 128, 2, 1)
  TRANSECT_CUT(kQ6_K, 128, 3, 1)
  TRANSECT_CUT(kQ6_K, 256, 2, 1)
  TRANSECT_CUT(kIQ4_NL, 16, 2, 2)
  TRANSECT_CUT(kIQ4_NL, 32, 2, 2)
  TRANSECT_CUT(kIQ4_NL, 64, 2, 2)
  TRANSECT_CUT(kIQ4_NL, 128, 2, 1)
  TRANSECT_CUT(kIQ4_NL, 128, 3, 1)
  TRANSECT_CUT(kIQ4_NL, 256, 2, 1)
  TRANSECT_CUT(kMXFP4, 16, 2, 2)
  TRANSECT_CUT(kMXFP4, 32, 2, 2)
  TRANSECT_CUT(kMXFP4, 64, 2, 2)
  TRANSECT_CUT(kMXFP4, 128, 2, 1)
  TRANSECT_CUT(kMXFP4, 128, 3, 1)
  TRANSECT_CUT(kMXFP4, 256, 2, 1)
  return -1;
}
