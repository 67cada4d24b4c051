// Grammars' masks on logits, as defined by TokenMasks in vllm_lite/worker/sampling/masks.py, the reference: minus
// infinity is added to forbidden tokens, so that a model's NaN stays visible.
#pragma once
#include "common.cuh"

// For each i of the grid's rows: masks the tokens of row samples[i] of logits [.., vocab], with rows `stride` floats
// apart, that bitmasks [.., words] do not allow. Token t has bit t % 32 of word t / 32, 1 = allowed. N divides vocab
// and 32. Grid: (number of samples, chunks of a row).
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
