// Weights as integers of 4 bits, with a scale for each group of inputs.
#pragma once

#include <cstdint>

#include "isa.h"

// x [count] of DType `type`, up to kQuantGroup of them, as codes, which are integers from -8 to 7 plus 8: x ~ integer *
// *scale, which is a bfloat16. The scale is the one of some that leaves the least squared error.
VLLM_LITE_DECLARE(void quantize_group4(const void* x, int32_t type, int64_t count, uint8_t* codes, float* scale))
