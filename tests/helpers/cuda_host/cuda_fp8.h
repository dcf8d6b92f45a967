#pragma once

#include "cuda_runtime.h"

struct __nv_fp8_e4m3 {
  uint8_t bits;
};
