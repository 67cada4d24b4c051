// Operations on the rows of experts other than their matrix products, which are in linear.h.
#pragma once

#include <cstdint>

#include "isa.h"

// sum += weight * row; both float32 [size].
VLLM_LITE_DECLARE(void add_weighted(float* sum, const float* row, float weight, int64_t size))

// row += sigmoid(gates[i]) * added, in float32 and rounded once; strides are in elements.
struct AddGated {
  int32_t dtype;
  int64_t size;
  void* x;
  const void* added;
  const float* gates;
  int64_t x_stride, added_stride, gate_stride;
};

// Computes rows [first, last).
VLLM_LITE_DECLARE(void add_gated(const AddGated& op, int64_t first, int64_t last))
