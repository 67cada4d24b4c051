// Grammars' masks on logits. TokenMasks in vllm_lite/worker/sampling/masks.py defines what is computed, and is its
// plain twin: minus infinity is added to what is ruled out, so that a NaN of the model stays visible.
#pragma once
#include "common.cuh"

// For each i of the grid's rows: rules out what bitmasks [.., words] does not allow from row samples[i] of logits
// [.., vocab], whose rows are `stride` floats apart. Token t has bit t % 32 of word t / 32, 1 = allowed. N divides
// vocab and 32. Grid: (number of samples, chunks of a row).
template <int N>
__global__ void rule_out(float* logits, int64 stride, int vocab, const int64* samples, const uint32* bitmasks,
                         int words) {
  float* row = logits + samples[blockIdx.x] * stride;
  const uint32* bitmask = bitmasks + int64(blockIdx.x) * words;
  const int step = gridDim.y * blockDim.x * N;
  for (int i = (blockIdx.y * blockDim.x + threadIdx.x) * N; i < vocab; i += step) {
    const uint32 ruled = ~bitmask[i / 32] >> (i % 32) & ((1u << N) - 1);
    if (ruled == 0) continue;
    auto values = load_as<Vec<float, N>>(row + i);
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (ruled >> j & 1) values.at[j] += -INFINITY;
    store_as(row + i, values);
  }
}
