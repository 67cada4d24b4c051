// Linear layers: out = x W^T + bias, with W packed once.
//
// Packed weight: blocks of kBlock outputs (the last one filled up with zeros), each [inputs / 2][kBlock][2] for
// bfloat16 and int8, [inputs][kBlock] for float32 and float16, inputs filled up to an even number. A block is read from
// its first byte to its last, so memory delivers at full speed, and a vector holds one input's weights for several
// outputs: no sum over a vector's elements at the end.
//
// Every output is one chain of additions over its inputs in their order, however many rows there are: a row's results
// do not depend on the rows beside it nor on the number of threads, bit for bit. They do depend on the instruction set.
#pragma once

#include <cstdint>

#include "isa.h"

constexpr int64_t kBlock = 32;        // outputs
constexpr int64_t kMaxRows = 96;      // of one task
constexpr int64_t kMaxBlocks = 8;     // of one task
constexpr int32_t kInt8Weight = 100;  // beside the DTypes; a weight is its integer times its output's scale

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
};

// Part of the output: at most kMaxRows and kMaxBlocks.
struct LinearTask {
  int64_t first_row;
  int64_t num_rows;
  int64_t first_block;
  int64_t num_blocks;
};

VLLM_LITE_DECLARE(void linear(const LinearCall& call, const LinearTask& task))
VLLM_LITE_DECLARE(int64_t read_all(const char* data, int64_t num_bytes))
