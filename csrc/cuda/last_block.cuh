// Blocks that cooperate without waiting for each other: the last one to arrive continues with the results of all.
#pragma once
#include "common.cuh"

#ifdef __CUDACC__
// Loads data that other blocks of the launch have written, after `comes_last`: bypasses the multiprocessor's L1, which
// may have an older line. p is a multiple of the size.
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
#else  // for the emulator
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

// Whether this block is the last of `count` that call this with the same `arrived`, which is 0 before the first call.
// The last one can read, with load_fresh, everything that the others wrote before; it waits for nobody, so blocks may
// run in any order and one after another. All threads must call it; `flag` is shared memory that is not used meanwhile.
//
// Proof: each thread's writes are before its fence, the barrier orders them before the single addition of its block,
// and additions to one address are ordered. The last block's addition sees those of all others, and its own barrier and
// fence order its reads after that. The counter is 0 again before the kernel ends, and no other block of this launch
// reads it: the next launch, and every replay of a graph, finds it as the first one did.
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
