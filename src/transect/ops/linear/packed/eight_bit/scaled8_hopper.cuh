// For the launchers of 8-bit products of up to 256 rows on Hopper, by the kernels of hopper_rows.cuh. Before it is
// included, a source defines TRANSECT_NUMBERS, the type of its numbers and scales. Its launcher ends in a line
// TRANSECT_CUT(...) for each kernel, whose arguments are the fields of a tiling.

#pragma once

#include "../../few_rows/hopper_rows.cuh"

// Launch a kernel, if its tiling is the one that the launcher's arguments name.
#define TRANSECT_CUT(SWAP, GATE, NB, WGS, RM, PAIR, BLOCKS)                                            \
  if (swap == SWAP && gate == GATE && right == NB && groups == WGS && repeats == RM && pair == PAIR && \
      blocks == BLOCKS)                                                                                \
    return TRANSECT_HERE(start<TRANSECT_NUMBERS, SWAP, GATE, NB, WGS, RM, PAIR, BLOCKS>(               \
        x, weight, x_scale, scale, bias, out, parts, flags, M, N, K, K, K, ranks, clusters, 1, stages, dependent, 0, stream));

// True for sizes that the kernels take; bulk copies move 16 bytes at a time.
static bool takes_sizes(int M, int N, int K) { return M >= 1 && N >= 8 && N % 8 == 0 && K >= 16 && K % 16 == 0; }
