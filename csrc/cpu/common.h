// Definitions that all kernel files share. Kernels see raw pointers and strides only: no Python, no torch.
#pragma once

#include <cstdint>

#define VLLM_LITE_API extern "C" __attribute__((visibility("default")))
#define VLLM_LITE_INLINE static inline __attribute__((always_inline))

// Element types; the same numbers as DTYPES in vllm_lite/kernels/cpu/dtypes.py.
enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFp8E4M3 = 3, kFp8E5M2 = 4, kInt8 = 5 };
