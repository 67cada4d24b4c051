// Low-rank adapters (LoRA): out += (x A^T) B^T for the rows of each adapter. Adapters are in slots.
//
// A ("down") has blocks of kLoraRanks ranks, for the layer's matrices in order, each [inputs / kLoraInputs][kLoraRanks]
// [kLoraInputs]; ranks and inputs are padded with zeros. B ("up") has, for each projection of the layer, blocks of
// kLoraBlock outputs, the last one padded, each [rank][kLoraBlock]. Blocks are read sequentially. The adapter's scale
// is already multiplied into B.
//
// An adapter with a gain (DoRA) multiplies each output by it after the sum, and adds a shift.
//
// Sums are in float32 and rounded once at the end. The result of a row depends only on the row, its adapter and the
// instruction set.
#pragma once

#include <cstdint>

#include "isa.h"

constexpr int64_t kLoraBlock = 32;   // outputs of a block of B
constexpr int64_t kLoraRanks = 4;    // ranks of a block of A
constexpr int64_t kLoraInputs = 32;  // inputs of a block of A
constexpr int32_t kMaxParts = 6;     // maximum projections of one layer; recurrent layers have six

// The same record as `_Slot` in vllm_lite/kernels/cpu/weights/lora.py: one adapter's part of one layer.
struct LoraSlot {
  const void* down;
  const void* up;
  int32_t ranks[kMaxParts];  // rank of each matrix; 0: it is not adapted
  int32_t num_ranks;         // their sum
  const float* gain;         // of each output of the layer; null: none
  const float* shift;        // likewise
};

// The same record as `_Layer` in vllm_lite/kernels/cpu/weights/lora.py. Several projections may share one matrix A.
struct LoraLayer {
  const LoraSlot* slots;
  int64_t num_inputs;
  int64_t sizes[kMaxParts];   // outputs of each projection
  int32_t matrix[kMaxParts];  // index of each projection's matrix A
  int32_t num_projections;
};

// Rows of one adapter; strides are in elements.
struct LoraCall {
  const LoraLayer* layer;
  const LoraSlot* slot;
  const void* x;
  int64_t x_stride;
  void* out;
  int64_t out_stride;
  int32_t type;
  int32_t out_type;
  const int32_t* rows;  // [num_rows], indexes of rows of x and out
  int64_t num_rows;
  float* hidden;  // [num_rows][lora_hidden(*slot)]
};

inline int64_t lora_rank_blocks(const LoraSlot& slot) {
  return (slot.num_ranks + kLoraRanks - 1) / kLoraRanks;
}
inline int64_t lora_hidden(const LoraSlot& slot) {
  return lora_rank_blocks(slot) * kLoraRanks;
}

// Computes hidden = x A^T for blocks [first, last) of ranks.
VLLM_LITE_DECLARE(void lora_shrink(const LoraCall& call, int64_t first, int64_t last))
// Computes out += hidden B^T for blocks [first, last), counted over all projections.
VLLM_LITE_DECLARE(void lora_expand(const LoraCall& call, int64_t first, int64_t last))
