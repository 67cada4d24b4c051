// Norms and rotary embedding on rows of elements; vllm_lite/kernels/ops.py defines the results. All strides are in
// elements. Sizes need not be multiples of a vector.
#pragma once

#include <cstdint>

#include "isa.h"

// Row (i, j) begins at x + i * x_outer + j * x_inner. `dtype` is a DType, here and below.
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

// bias: [size], or null.
struct WideWeights {
  int32_t centered;
  float eps;
  const float *weight, *bias;
};

// The weights of inner row j begin at weight + j * weight_inner.
struct WideNorm {
  int32_t dtype;
  WideWeights norm;
  int64_t weight_inner, num_inner, size;
  const void* x;
  void* out;
  int64_t x_outer, x_inner, out_outer, out_inner;
};

struct AddWideNorm {
  int32_t dtype;
  WideWeights norm;
  int64_t size;
  const void* x;
  void *residual, *out;
  int64_t residual_stride, x_stride, out_stride;
};

struct Rotate {
  int32_t dtype;
  int64_t num_heads, head_size;
  const void* heads;
  int64_t token_stride, head_stride;
  void* out;  // may be `heads`
  int64_t out_token_stride, out_head_stride;
  const void *cos, *sin;
  int64_t rotation_stride;
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

// Each computes rows or tokens [first, last) of its first axis.
VLLM_LITE_DECLARE(void rms_norm(const RmsNorm& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void add_rms_norm(const AddRmsNorm& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void wide_norm(const WideNorm& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void add_wide_norm(const AddWideNorm& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void rotate(const Rotate& op, int64_t first, int64_t last))
VLLM_LITE_DECLARE(void select_rotation(const SelectRotation& op, int64_t first, int64_t last))
