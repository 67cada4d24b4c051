// Linear layers: out = x W^T + bias, with W packed once.
//
// Packed weight: blocks of kBlock outputs (the last one filled up), each [inputs / group][kBlock][group] with groups of
// 4 inputs for int8, 2 for bfloat16, 1 for float32 and float16; inputs are filled up to whole groups. A block is read
// from its first byte to its last, so memory delivers at full speed, and a vector holds one group's weights for several
// outputs: no sum over a vector's elements at the end.
//
// int8 weights are stored plus 128, as bytes. Where the machine multiplies bytes (VNNI), rows are quantized, too, each
// kQuantGroup inputs by themselves: x ~ integer * scale. A byte times an integer is exact, and what the 128 add up to
// is known from the row alone. Elsewhere rows stay as they are.
//
// Every output is one chain of additions over its inputs in their order, however many rows there are: a row's results
// do not depend on the rows beside it nor on the number of threads, bit for bit. They do depend on the instruction set.
#pragma once

#include <cstdint>

#include "isa.h"

constexpr int64_t kBlock = 32;        // outputs
constexpr int64_t kMaxRows = 96;      // of one task
constexpr int64_t kMaxBlocks = 8;     // of one task
constexpr int64_t kQuantGroup = 128;  // inputs of a row that share a scale
constexpr int32_t kInt8Weight = 100;  // beside the DTypes; a weight is its integer times its output's scale

// Inputs of a packed weight: whole groups.
inline int64_t padded_inputs(int64_t num_inputs, int32_t type) {
  const int64_t group = type == kInt8Weight ? 4 : 2;
  return (num_inputs + group - 1) / group * group;
}

// The same record as PackedWeight in vllm_lite/kernels/cpu/linear.py.
struct PackedWeight {
  const void* data;     // aligned to 64 bytes
  const float* scales;  // [num_outputs], nullptr for all types but int8
  const float* bias;    // [num_outputs] or nullptr
  int64_t num_inputs;
  int64_t num_outputs;
  int32_t type;
  int32_t unused;
};

// Rows as integers, one panel for the rows of each task: [inputs / 4][rows of the panel][4], with inputs filled up with
// zeros, so that what is multiplied by one group of weights lies together. The panel of the rows from `first` on begins
// at values + first * padded inputs.
struct QuantizedRows {
  int8_t* values;
  float* scales;    // [num_rows][num_groups], like biases
  int32_t* biases;  // -128 times the sum of a group's integers: what the 128 in the weights add, taken back
  int64_t num_groups;
};

// Strides count elements; a row's elements lie side by side.
struct LinearCall {
  const PackedWeight* weight;
  const void* x;  // [num_rows][num_inputs]
  int64_t x_stride;
  void* out;  // [num_rows][num_outputs]
  int64_t out_stride;
  int64_t num_rows;
  int32_t x_type;
  int32_t out_type;
  const QuantizedRows* quantized;  // of x, or nullptr
};

// Part of the output: at most kMaxRows and kMaxBlocks.
struct LinearTask {
  int64_t first_row;
  int64_t num_rows;
  int64_t first_block;
  int64_t num_blocks;
};

// Rows of one panel, and some of their groups of kQuantGroup inputs.
struct QuantizeTask {
  int64_t first_row;
  int64_t num_rows;
  int64_t first_group;
  int64_t num_groups;
};

VLLM_LITE_DECLARE(void linear(const LinearCall& call, const LinearTask& task))
// The same on call.quantized, for int8 weights; only where multiplies_bytes().
VLLM_LITE_DECLARE(void linear_int8(const LinearCall& call, const LinearTask& task))
VLLM_LITE_DECLARE(bool multiplies_bytes())
VLLM_LITE_DECLARE(void quantize_rows(const LinearCall& call, const QuantizeTask& task))
// x [count] of DType `type` as integers in [-127, 127] times *scale.
VLLM_LITE_DECLARE(void quantize(const void* x, int32_t type, int64_t count, int8_t* to, float* scale))
VLLM_LITE_DECLARE(int64_t read_all(const char* data, int64_t num_bytes))
