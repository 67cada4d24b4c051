// The scan of Mamba-2 layers: one matrix of state for each head. vllm_lite/kernels/mamba.py defines the results.
#pragma once

#include "delta_rule.h"

constexpr int64_t kMaxStateSize = 256;

// mixed: output of the convolution, [num_rows][x | b of each group | c of each group], where the heads of a group are
// adjacent; z, dt: columns of rows that are `projected_stride` apart; states: [num_slots][num_heads, state_size,
// head_size]. Task i computes head i % num_heads of sequence i / num_heads. state_size is at most kMaxStateSize.
struct Mamba {
  int32_t dtype;
  int64_t num_heads, num_groups, head_size, state_size;
  float dt_min, dt_max;
  const float* mixed;
  const void *z, *dt;
  int64_t projected_stride;
  const float *decay, *dt_bias, *skip;
  float* states;
  int64_t slot_stride;
  Segments segments;
  void* out;
  int64_t out_stride;
};

VLLM_LITE_DECLARE(void mamba(const Mamba& op, int64_t first, int64_t last))
