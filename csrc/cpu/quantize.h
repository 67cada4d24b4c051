// Dense weights on their way into grouped ones (linear.h), each group of inputs with a scale that is searched for.
#pragma once

#include <cstdint>

#include "isa.h"
#include "linear.h"
#include "pack.h"

// kGrouped4, 5 and 8: integers of so many bits times a scale, less a minimum; kFloats8: E4M3 times a scale.
constexpr int32_t kFloats8 = 105;

// Scale and minimum of x [count], up to kQuantGroup of them: x ~ integer * scale - minimum, with integers from 0 to
// `most`, 15 or 31. Of several they are the two that leave the least squared error. Where a number is not finite, here
// and below, what is found makes all of the group NaN.
VLLM_LITE_DECLARE(void search_line(const float* x, int64_t count, float most, float* scale, float* minimum))
// The same where they are integers up to 127 times `units`: those near *scale and *minimum that leave the least squared
// error, for up to kOnePlane of x.
VLLM_LITE_DECLARE(void refine_line(const float* x, int64_t count, const float (&units)[2], float most, float* scale,
                                   float* minimum))
// The least and the largest of x [count].
VLLM_LITE_DECLARE(void find_range(const float* x, int64_t count, float* least, float* most))

// x ~ code * scale - minimum, with codes from 0 to `most`.
struct CodeLine {
  float scale, minimum, most;
};

// The codes that are nearest to x [count].
VLLM_LITE_DECLARE(void encode_group(const float* x, int64_t count, const CodeLine& line, uint8_t* codes))
// As integers from -8 to 7 plus 8; the scale may be negative. For checkpoints, whose formats know no such minima.
VLLM_LITE_DECLARE(void quantize_symmetric4(const float* x, int64_t count, uint8_t* codes, float* scale))
// The same as the bits of E4M3, with the largest at 448.
VLLM_LITE_DECLARE(void quantize_group_fp8(const float* x, int64_t count, uint8_t* codes, float* scale))

// What a dense weight becomes: everything of its record but memory, bias and values. `type` is one of those above.
PackedWeight quantized_weight(int32_t type, int64_t num_outputs, int64_t num_inputs, int64_t group_size);

// Floats that a block of such a weight has as PackedWeight::supers; 0 for most.
int64_t num_supers(const PackedWeight& weight);

// Rows of one block, as cells into `block`, which must be zero, and num_supers floats into `supers`.
void pack_quantized(const RowsToPack& rows, int32_t type, int64_t group_size, char* block, float* supers);

// The bytes of one block of such a weight.
int64_t quantized_block_bytes(const PackedWeight& weight);
