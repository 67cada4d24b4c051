// Blocks that work together without waiting for each other: the one that comes last goes on with what all have written.
#pragma once
#include "common.cuh"

#ifdef __CUDACC__
// What other blocks of the launch have written, behind `comes_last`: past the cache that is a multiprocessor's own, so
// that no older line of it can be met. p is a multiple of the size.
__device__ __forceinline__ float load_fresh(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ float2 load_fresh2(const float* p) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 load_fresh4(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
#else  // the emulator's twins
inline float load_fresh(const float* p) {
  return *p;
}
inline float2 load_fresh2(const float* p, int line = __builtin_LINE()) {
  return load_as<float2>(p, line);
}
inline uint4 load_fresh4(const void* p, int line = __builtin_LINE()) {
  return load_as<uint4>(p, line);
}
#endif

// Whether this block is the last of `count` that come here with the same `arrived`, which is 0 before the first comes.
// The last one can read, by load_fresh, all that the others wrote before; it waits for nobody, so blocks may run in any
// order and one after another. All threads must take part; `flag` is shared memory that they do not use meanwhile.
//
// Why that holds: each thread's writes come before its fence, the barrier puts them before the one addition of its
// block, and additions to one address stand in an order. The last block's addition sees those of all others, its own
// barrier and fence put its reads behind that. The counter is 0 again before the kernel ends, and nobody else of this
// launch looks at it: the next launch, and every replay of a graph, finds it as the first one did.
__device__ __forceinline__ bool comes_last(int* arrived, int count, int* flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool last = atomicAdd(arrived, 1) == count - 1;
    if (last) *arrived = 0;
    *flag = last;
  }
  __syncthreads();
  const bool last = *flag != 0;
  __syncthreads();
  __threadfence();
  return last;
}
