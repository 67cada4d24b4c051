// Quantization of dense weights to grouped ones (linear.h), with a search for the scale of each group of inputs.
#pragma once

#include <cstdint>

#include "isa.h"
#include "linear.h"
#include "pack.h"

// kGrouped4, 5 and 8: integers of so many bits times a scale, less a minimum; kFloats8: E4M3 times a scale.
constexpr int32_t kFloats8 = 105;

// Finds the scale and minimum of x [count], count <= kQuantGroup: x ~ integer * scale - minimum, with integers from 0
// to `most`, 15 or 31. Of the candidates, the pair with the least squared error is taken. If a number is not finite,
// here and below, the results make the whole group NaN.
VLLM_LITE_DECLARE(void search_line(const float* x, int64_t count, float most, float* scale, float* minimum))
// The same with a scale and minimum that are integers up to 127 times `units`: of those near *scale and *minimum, takes
// the pair with the least squared error. count <= kOnePlane.
VLLM_LITE_DECLARE(void refine_line(const float* x, int64_t count, const float (&units)[2], float most, float* scale,
                                   float* minimum))
// The smallest and the largest of x [count].
VLLM_LITE_DECLARE(void find_range(const float* x, int64_t count, float* least, float* most))

// x ~ code * scale - minimum, with codes from 0 to `most`.
struct CodeLine {
  float scale, minimum, most;
};

// The nearest codes for x [count].
VLLM_LITE_DECLARE(void encode_group(const float* x, int64_t count, const CodeLine& line, uint8_t* codes))
// Quantizes to integers from -8 to 7, stored plus 8; the scale may be negative. For formats of checkpoints without
// minima.
VLLM_LITE_DECLARE(void quantize_symmetric4(const float* x, int64_t count, uint8_t* codes, float* scale))
// Quantizes to the bits of E4M3; the largest magnitude becomes 448.
VLLM_LITE_DECLARE(void quantize_group_fp8(const float* x, int64_t count, uint8_t* codes, float* scale))

// The record of a quantized dense weight, without memory, bias and values. `type` is one of those above.
PackedWeight quantized_weight(int32_t type, int64_t num_outputs, int64_t num_inputs, int64_t group_size);

// Number of floats in PackedWeight::supers for each block of such a weight; 0 for most types.
int64_t num_supers(const PackedWeight& weight);

// Packs the rows of one block as cells into `block`, which must be zero, and num_supers floats into `supers`.
void pack_quantized(const RowsToPack& rows, int32_t type, int64_t group_size, char* block, float* supers);

// Bytes of one block of such a weight.
int64_t quantized_block_bytes(const PackedWeight& weight);
