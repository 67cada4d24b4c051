// Sums over the ranks' inputs.
#pragma once

#include <cstdint>

#include "isa.h"

// out[i] = the sum of inputs[rank][i], in float32, in the order of the ranks, rounded once. `out` may be an input.
struct RankSum {
  int32_t dtype;  // a DType: float32, bfloat16, float16
  int32_t world;
  const void* const* inputs;  // [world]
  void* out;
};

// Computes elements [first, last).
VLLM_LITE_DECLARE(void sum_over_ranks(const RankSum& op, int64_t first, int64_t last))
