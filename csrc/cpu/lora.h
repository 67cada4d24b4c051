// Low-rank adapters (LoRA): out += (x A^T) B^T for the rows of each adapter, which lie in slots.
//
// A ("down") is blocks of kLoraRanks ranks, those of a layer's matrices one after another, each [inputs / kLoraInputs]
// [kLoraRanks][kLoraInputs]; ranks and inputs are filled up with zeros. B ("up") is, for each projection of
// the layer, blocks of kLoraBlock outputs, the last one filled up, each [rank][kLoraBlock]: a block is read from its
// first byte to its last. What scales an adapter is in B already.
//
// An adapter with a gain (DoRA) multiplies each output by it behind the sum, and adds a shift.
//
// The sums are in float32, and one rounding follows the last of them. A row's result depends on nothing but the row,
// its adapter and the instruction set.
#pragma once

#include <cstdint>

#include "isa.h"

constexpr int64_t kLoraBlock = 32;   // outputs
constexpr int64_t kLoraRanks = 4;    // of a block of A
constexpr int64_t kLoraInputs = 32;  // that lie together in it
constexpr int32_t kMaxParts = 6;     // projections of one layer: a recurrent one has so many

// The same record as `_Slot` in vllm_lite/kernels/cpu/weights/lora.py: one adapter's part of one layer.
struct LoraSlot {
  const void* down;
  const void* up;
  int32_t ranks[kMaxParts];  // of each matrix, 0: it is not adapted
  int32_t num_ranks;         // their sum
  const float* gain;         // of each output of the layer; null: none
  const float* shift;        // likewise
};

// The same record as `_Layer` there. Several projections may lie in one matrix, whose A they share.
struct LoraLayer {
  const LoraSlot* slots;
  int64_t num_inputs;
  int64_t sizes[kMaxParts];   // outputs of each projection
  int32_t matrix[kMaxParts];  // in which each lies
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
  const int32_t* rows;  // [num_rows], of x and out
  int64_t num_rows;
  float* hidden;  // [num_rows][lora_hidden(*slot)]
};

inline int64_t lora_rank_blocks(const LoraSlot& slot) {
  return (slot.num_ranks + kLoraRanks - 1) / kLoraRanks;
}
inline int64_t lora_hidden(const LoraSlot& slot) {
  return lora_rank_blocks(slot) * kLoraRanks;
}

// hidden = x A^T, of blocks [first, last) of ranks.
VLLM_LITE_DECLARE(void lora_shrink(const LoraCall& call, int64_t first, int64_t last))
// out += hidden B^T, of blocks [first, last), counted over all projections.
VLLM_LITE_DECLARE(void lora_expand(const LoraCall& call, int64_t first, int64_t last))
