// Runs a CUDA C++ kernel, unchanged, on the CPU: for tests, not for speed. csrc/cuda/common.cuh includes this file
// where the compiler is not CUDA's; a kernel never does.
//
// A CUDA thread is a fiber with its own stack (fibers.h). The 32 fibers of a warp run one after another, each up to the
// next warp-wide operation; blocks run one after another. On top of what a GPU computes, this finds:
//   - a barrier or a warp-wide operation which not every thread reaches, or which threads reach at different lines;
//   - shared memory read before it is written (it holds NaN) or written past the size given at the launch;
//   - results that depend on the order of warps, lanes or blocks (`order_seed` of the launch shuffles them);
//   - vector accesses through load_as / store_as / load_stream that are not aligned;
//   - arguments whose types differ from the kernel's parameters (the signature is exported beside each kernel).
// What it cannot show is listed in docs/kernels-inside.md.
#pragma once
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(n) alignas(n)
#define __constant__ const
// Static shared memory would escape the poison and the size check.
#define __shared__ static_shared_memory_is_not_emulated_use_DYNAMIC_SHARED

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline int2 make_int2(int x, int y) {
  return {x, y};
}
inline int4 make_int4(int x, int y, int z, int w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}

#include "fibers.h"
#include "intrinsics.h"
#include "shared_memory.h"

#define threadIdx (cpu::self->thread)
#define blockIdx cpu::block_index
#define blockDim cpu::block_dim
#define gridDim cpu::grid_dim
#define warpSize 32
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(cpu::shared_bytes)

#define EMULATOR_API extern "C" __attribute__((visibility("default")))

// Exports one instantiation of a kernel as run_<id>, with the types of its parameters as signature_<id>. The names of
// the functions' own parameters must not hide a kernel's.
#define EMULATED_KERNEL(id, ...)                                                                                   \
  EMULATOR_API int run_##id(const unsigned* emulator_grid, const unsigned* emulator_block, size_t emulator_shared, \
                            void** emulator_args, unsigned emulator_seed, void* emulator_stacks) {                 \
    return cpu::launch(__VA_ARGS__, emulator_grid, emulator_block, emulator_shared, emulator_args, emulator_seed,  \
                       emulator_stacks);                                                                           \
  }                                                                                                                \
  EMULATOR_API void signature_##id(void (*emulator_report)(const char*)) {                                         \
    cpu::signature(__VA_ARGS__, emulator_report);                                                                  \
  }

// The stacks of a launch, or null; owned by the caller.
EMULATOR_API __attribute__((used)) inline void* emulator_make_stacks() {
  return cpu::make_stacks();
}

// Writes the prefetched addresses, at most `room`, to `to`, and clears the list. Returns their number.
EMULATOR_API __attribute__((used)) inline size_t emulator_prefetched(const void** to, size_t room) {
  const size_t count = cpu::prefetched.size();
  for (size_t i = 0; i < count && i < room; ++i) to[i] = cpu::prefetched[i];
  cpu::prefetched.clear();
  return count;
}

EMULATOR_API __attribute__((used)) inline const char* emulator_error() {
  return cpu::error;
}
