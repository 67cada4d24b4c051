// What every kernel file needs. Kernels see raw pointers and strides only: no Python, no torch.
#pragma once

#include <cstdint>  // also defines __GLIBC__, for the test below

#define VLLM_LITE_API extern "C" __attribute__((visibility("default")))

// One function, compiled for several instruction sets; the loader picks one when the library is opened. It serves loops
// that the compiler vectorises by itself. What it calls must be inlined, to be compiled for the same set. Kernels that
// are written with vectors stand in isa/ instead.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VLLM_LITE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VLLM_LITE_CLONES
#endif
#define VLLM_LITE_INLINE static inline __attribute__((always_inline))

// Element types; the same numbers as DTYPES in vllm_lite/kernels/cpu/dtypes.py.
enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFp8E4M3 = 3, kFp8E5M2 = 4 };
