// Recurrent layers of the gated delta rule: a short convolution over a sequence's tokens, and one matrix of state for
// each head. vllm_lite/kernels/delta_rule.py defines the results.
//
// A sequence's rows are divided into segments. A segment reads the state in slot `source` and writes its own to slot
// `target`; source 0 is the state before the first token, and target 0 discards the result. A segment without rows
// copies a state. One thread computes the segments of a sequence in order, because a segment may begin with the state
// that the previous one has written.
#pragma once

#include <cstdint>

#include "isa.h"

struct Segments {
  const int32_t* firsts;  // [num_seqs + 1]: index of each sequence's first segment
  const int32_t* rows;    // [num_segments + 1]: first row of each segment
  const int32_t *sources, *targets;
};

// x, gate, out_gate: columns of rows of `dtype` that are `x_stride` apart; weight: [conv_size, channels]; bias:
// [channels] or nullptr; states: [num_slots][conv_size - 1, channels], the latest input last. out: [num_rows,
// channels], rows `out_stride` apart: SiLU of the convolution of x, float32; with gates, out_gate times the convolution
// of gate times x, of `dtype`. Task i computes channels [i % parts * kConvChannels, ...) of sequence i / parts.
struct ShortConv {
  int32_t dtype;
  int64_t channels, conv_size;
  const void *x, *gate, *out_gate;  // the gates: both, or nullptr
  int64_t x_stride;
  const float *weight, *bias;
  float* states;
  int64_t slot_stride;
  Segments segments;
  void* out;
  int64_t out_stride;
};

constexpr int64_t kConvChannels = 512;
constexpr int64_t kMaxHeadSize = 256;

// mixed: output of the convolution, [num_rows][q | k | v]; z, b, a: columns of rows that are `projected_stride` apart;
// states: [num_slots][num_value_heads, key_size, value_size]. Task i computes value head i % num_value_heads of
// sequence i / num_value_heads. Heads have at most kMaxHeadSize elements.
struct DeltaRule {
  int32_t dtype;
  float eps;
  int64_t num_key_heads, num_value_heads, key_size, value_size;
  const float* mixed;
  const void *z, *b, *a;
  int64_t projected_stride;
  const float *decay, *dt_bias, *norm;
  float* states;
  int64_t slot_stride;
  Segments segments;
  void* out;
  int64_t out_stride;
};

VLLM_LITE_DECLARE(void short_conv(const ShortConv& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void delta_rule(const DeltaRule& op, int64_t first, int64_t last))
