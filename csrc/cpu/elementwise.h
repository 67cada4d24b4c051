// Activations, sums and products on rows of elements; vllm_lite/kernels/ops.py says what each computes. All strides are
// in elements. Sizes need not be multiples of a vector. `dtype` is a DType.
#pragma once

#include <cstdint>

#include "isa.h"

// kSwigluOai is for gated activations only.
enum Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGelu = 2, kRelu = 3, kSwigluOai = 4, kRelu2 = 5 };

struct Activate {
  int32_t dtype, activation;
  int64_t size;
  void* x;
  int64_t stride;
};

struct GatedActivation {
  int32_t dtype, activation;
  int64_t size;  // of the gate; `up` follows it
  const void* gate_up;
  void* out;
  int64_t in_stride, out_stride;
};

// Adds row positions[i] of `added` to row i of x, or row i if there are no positions.
struct AddRows {
  int32_t dtype;
  int64_t size;
  void* x;
  const void* added;
  const int64_t* positions;
  int64_t x_stride, added_stride;
};

// Row (i, j) begins at x + i * x_outer + j * x_inner; its factor is table[positions[i]], or `factor` without a table.
struct ScaleRows {
  int32_t dtype;
  float factor;
  const float* table;
  const int64_t* positions;
  int64_t num_inner, size;
  void* x;
  int64_t x_outer, x_inner;
};

// x *= sigmoid(gate), element by element.
struct SigmoidGate {
  int32_t dtype;
  int64_t size;
  void* x;
  const void* gate;
  int64_t x_stride, gate_stride;
};

// Head (i, j) begins at x + i * x_stride + j * head_size, and is multiplied by the sigmoid of gate[i, j].
struct GateHeads {
  int32_t dtype;
  int64_t num_heads, head_size;
  void* x;
  const void* gate;
  int64_t x_stride, gate_stride;
};

// factors: a, c, beta and eps. x becomes a x^2 + beta x above 0, else c (e^min(x, eps) - 1 - x) + beta x.
struct Xielu {
  int32_t dtype;
  int64_t size;
  void* x;
  int64_t stride;
  const float* factors;
};

// Limits every element of x to [-limit, limit]. NaN stays NaN.
struct Clamp {
  int32_t dtype;
  float limit;
  int64_t size;
  void* x;
  int64_t stride;
};

struct ScaleAndCap {
  float factor, cap;
  int64_t size;
  float* logits;
  int64_t stride;
};

// Each computes rows [first, last) of its first axis.
VLLM_LITE_DECLARE(void activate(const Activate& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void gated_activation(const GatedActivation& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void add_rows(const AddRows& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void scale_rows(const ScaleRows& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void sigmoid_gate(const SigmoidGate& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void gate_heads(const GateHeads& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void xielu(const Xielu& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void clamp(const Clamp& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void scale_and_cap(const ScaleAndCap& op, int64_t first, int64_t last))
