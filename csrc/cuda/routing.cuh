// Routing of tokens to experts, as defined in vllm_lite/checkpoint/layer_specs/experts.py (RoutingSpec); the reference
// is vllm_lite/kernels/routing.py. Arithmetic is in float32, including subnormals: two scores that differ are never a
// tie.
#pragma once
#include "common.cuh"

namespace routing {

// A 32-bit number for each float, in the same order, never 0. All NaN are the largest, as in torch's sort; -0, which no
// score is, would be below 0.
__device__ __forceinline__ uint32 order_of(float x) {
  const uint32 bits = __float_as_uint(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return ~0u;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The index of the largest of `keys`, the first of equal ones; every lane gets it, and its key becomes 0. At least one
// key is not 0. Called by a whole warp.
__device__ __forceinline__ int take_largest(uint32* keys, int count) {
  uint64 best = 0;
  for (int i = threadIdx.x; i < count; i += 32) best = max(best, uint64(keys[i]) << 32 | uint32(~i));
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) best = max(best, uint64(__shfl_xor_sync(~0u, best, lanes)));
  const int found = int(~uint32(best));
  __syncwarp();
  if (threadIdx.x == 0) keys[found] = 0;
  __syncwarp();
  return found;
}

// The larger one; NaN if one is.
__device__ __forceinline__ float larger(float a, float b) {
  return order_of(a) >= order_of(b) ? a : b;
}

// scores = softmax(logits), or the sigmoid of each. Called by a whole warp.
__device__ __forceinline__ void score(const float* logits, float* scores, int count, bool sigmoid) {
  float top = -INFINITY, sum = 0.f;
  if (!sigmoid) {
    for (int i = threadIdx.x; i < count; i += 32) top = larger(top, logits[i]);
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) top = larger(top, __shfl_xor_sync(~0u, top, lanes));
    for (int i = threadIdx.x; i < count; i += 32) sum += scores[i] = expf(logits[i] - top);
    sum = warp_sum(sum);
  }
  for (int i = threadIdx.x; i < count; i += 32)
    scores[i] = sigmoid ? divide_exact(1.f, 1.f + expf(-logits[i])) : divide_exact(scores[i], sum);
  __syncwarp();
}

// The largest of a group's `ranked`, or the sum of the two largest.
__device__ __forceinline__ float group_score(const float* ranked, int size, bool top_two) {
  float first = ranked[0], second = -INFINITY;
  for (int i = 1; i < size; ++i) {
    const bool wins = order_of(ranked[i]) > order_of(first);
    second = wins ? first : larger(second, ranked[i]);
    first = wins ? ranked[i] : first;
  }
  return top_two ? first + second : first;
}

}  // namespace routing

// Grid: tokens; block: one warp. Shared memory: 3 * experts + groups words. Every number in `chosen` is a valid expert,
// whatever the logits are.
__global__ void __launch_bounds__(32) route(const float* __restrict__ logits,   // [num_tokens, experts], rows strided
                                            const float* __restrict__ bias,     // [experts] or null
                                            const float* __restrict__ factors,  // [experts] or null
                                            int* __restrict__ chosen,           // [num_tokens, top]
                                            float* __restrict__ weights,        // [num_tokens, top]
                                            int64 logits_stride, int experts, int top, int groups, int groups_of_token,
                                            int sigmoid, int top_two, int renormalize, float epsilon, float scale) {
  using namespace routing;
  DYNAMIC_SHARED(float, scores);
  float* const ranked = scores + experts;
  uint32* const keys = reinterpret_cast<uint32*>(ranked + experts);
  uint32* const group_keys = keys + experts;
  const int lane = threadIdx.x, size = experts / groups;

  score(logits + blockIdx.x * logits_stride, scores, experts, sigmoid);
  for (int i = lane; i < experts; i += 32) ranked[i] = bias ? scores[i] + bias[i] : scores[i];
  __syncwarp();
  if (groups > 1) {
    for (int g = lane; g < groups; g += 32) group_keys[g] = order_of(group_score(ranked + g * size, size, top_two));
    __syncwarp();
    for (int i = 0; i < groups_of_token; ++i) take_largest(group_keys, groups);
  }
  for (int i = lane; i < experts; i += 32)
    keys[i] = order_of(groups > 1 && group_keys[i / size] ? -INFINITY : ranked[i]);
  __syncwarp();

  chosen += int64(blockIdx.x) * top;
  weights += int64(blockIdx.x) * top;
  float sum = 0.f;
  for (int place = 0; place < top; ++place) {
    const int expert = take_largest(keys, experts);
    sum += scores[expert];
    if (lane == 0) {
      chosen[place] = expert;
      ranked[place] = scores[expert];  // the old value is not needed
    }
  }
  __syncwarp();
  for (int place = lane; place < top; place += 32) {
    const float weight = renormalize ? divide_exact(ranked[place], sum + epsilon) : ranked[place];
    weights[place] = weight * (factors ? factors[chosen[place]] : 1.f) * scale;
  }
}
