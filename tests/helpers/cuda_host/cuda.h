// Tensor maps, as ``ptx.h`` reads them.

#pragma once

#include "cuda_runtime.h"

#define CUDART_VERSION 13000
typedef int CUresult;
typedef uint64_t cuuint64_t;
typedef uint32_t cuuint32_t;
typedef ptx::TensorMap CUtensorMap;
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT8 = 1, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 2 };  // bytes of one
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };

inline CUresult describe_tensor(CUtensorMap* map, CUtensorMapDataType each, cuuint32_t rank, void* from,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (rank != 2 || (uintptr_t)from % 16 || strides[0] % 16 || swizzle != CU_TENSOR_MAP_SWIZZLE_128B) return 1;
  *map = {(const unsigned char*)from, {sizes[0] * each, sizes[1]}, strides[0], {box[0] * each, box[1]}, each};
  return 0;
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned, int,
                                                    cudaDriverEntryPointQueryResult*) {
  return *found = (void*)describe_tensor, cudaSuccess;
}
