// The driver's function that describes a matrix for the bulk copy engine. It is found at run time, so that a library needs
// no link to the driver.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace hopper {

typedef CUresult (*EncodeTiled)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// cuTensorMapEncodeTiled; null if the driver has none.
inline EncodeTiled encode_tiled() {
  static void* found = nullptr;
  if (!found) {
    cudaDriverEntryPointQueryResult status;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &status);
#endif
  }
  return (EncodeTiled)found;
}

}  // namespace hopper
