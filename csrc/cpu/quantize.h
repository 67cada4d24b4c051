// Weights as integers of 4 bits (kGrouped4) or floats of 8 (kGrouped8: E4M3), with a scale for each group of inputs.
#pragma once

#include <cstdint>

#include "isa.h"
#include "pack.h"

// x [count] of DType `type`, up to kQuantGroup of them, as codes, which are integers from -8 to 7 plus 8: x ~ integer *
// *scale, which is a bfloat16. The scale is the one of some that leaves the least squared error.
VLLM_LITE_DECLARE(void quantize_group4(const void* x, int32_t type, int64_t count, uint8_t* codes, float* scale))

// The same as the bits of E4M3, with the largest at 448.
VLLM_LITE_DECLARE(void quantize_group_fp8(const void* x, int32_t type, int64_t count, uint8_t* codes, float* scale))

// The bytes of one block of a weight that has become codes of `type`: its scales are bfloat16, there are no minima.
int64_t quantized_block_bytes(int32_t type, int64_t num_inputs, int64_t group_size);

// Up to kBlock rows into such a block, which must be zero.
void pack_quantized(const RowsToPack& rows, int32_t type, int64_t group_size, char* block);
