// The small operations between matrix products, on rows of elements; vllm_lite/kernels/ops.py says what each computes.
// All strides are in elements. Sizes need not be multiples of a vector.
#pragma once

#include <cstdint>

#include "isa.h"

// Row (i, j) begins at x + i * x_outer + j * x_inner. `dtype` is a DType, as everywhere below.
struct RmsNorm {
  int32_t dtype;
  float eps;
  int64_t num_inner, size;
  const void *x, *weight;
  void* out;
  int64_t x_outer, x_inner, out_outer, out_inner;
};

struct AddRmsNorm {
  int32_t dtype;
  float eps;
  int64_t size;
  const void *x, *weight;
  void *residual, *out;
  int64_t residual_stride, x_stride, out_stride;
};

enum Activation : int32_t { kSilu = 0, kGelu = 1 };

struct GatedActivation {
  int32_t dtype, activation;
  int64_t size;  // of the gate, behind which lies `up`
  const void* gate_up;
  void* out;
  int64_t in_stride, out_stride;
};

struct Rotate {
  int32_t dtype;
  int64_t num_heads, head_size;
  void* heads;
  const void *cos, *sin;
  int64_t token_stride, head_stride, rotation_stride;
};

// table: float32 [max_position, 2, half]; cos, sin: [num_tokens, 2 * half], with the first half of sin negated.
struct SelectRotation {
  int32_t dtype;
  int64_t half;
  const float* table;
  const int64_t* positions;
  void *cos, *sin;
  int64_t stride;
};

// Each does rows or tokens [first, last) of its first axis.
VLLM_LITE_DECLARE(void rms_norm(const RmsNorm& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void add_rms_norm(const AddRmsNorm& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void gated_activation(const GatedActivation& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void rotate(const Rotate& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void select_rotation(const SelectRotation& op, int64_t first, int64_t last))
