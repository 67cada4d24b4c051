// Products of groups of rows and a part of a block of weights, in tile registers.
#pragma once

#include "tiles.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int64_t kWeightStride = 4 * kBlock;                // bytes from one group of inputs to the next
constexpr int64_t kStepWeights = kTileRows * kWeightStride;  // bytes that one step reads of a block
constexpr int64_t kGroup = 2 * kTileRows;                    // rows at a time
constexpr int64_t kGroupSums = kGroup * kBlock;
constexpr int64_t kAheadBytes = 4096;

// A range of inputs of one of a task's blocks, in bytes of a row, and the next range.
struct Part {
  int64_t block, begin, num_bytes;
  int64_t next_block, next_begin;
};

// Bytes of a block for `row_bytes` bytes of a row.
constexpr int64_t packed_bytes(int64_t row_bytes) {
  return (row_bytes + 3) / 4 * kWeightStride;
}

// A part of one block's weights. The last step reads `last`: a copy, padded with zeros if the inputs end within the
// step.
struct Weights {
  const char* data;
  int64_t num_steps;
  const char* last;
  const char* next;   // the next part, which is prefetched
  int64_t next_step;  // bytes of it to prefetch in each step

  const char* at(int64_t step) const { return step + 1 < num_steps ? data + step * kStepWeights : last; }
};

// Rows of x, from the first input of the weights on: in place, or copied in the order in which tiles read them.
struct Rows {
  const char* data;
  int64_t stride;  // bytes between two rows of a group,
  int64_t step;    // between the data of two steps,
  int64_t group;   // and between two groups

  Rows behind(int64_t bytes) const { return {data + bytes, stride, step, group}; }
};

// Up to kGroup rows.
struct Group {
  Rows x;
  int64_t num_rows;
  float* sums;        // [kGroupSums], as tiles
  bool are_begun;     // whether `sums` has the sums of earlier inputs; else it is uninitialised
  int64_t first_row;  // row of the call
  int64_t number, num_groups;

  // The memory to prefetch in each step.
  struct Ahead {
    const char* from;
    int64_t begin, end, step;
    bool alone;
  };

  // The groups of rows divide this work, so that memory is busy all the time. Several groups prefetch into L2, because
  // L1 is full.
  Ahead ahead(const Weights& weights) const {
    const int64_t step = weights.next_step;
    return {weights.next, number * step / num_groups, (number + 1) * step / num_groups, step, num_groups == 1};
  }
};

// Trap: GCC removes calls that only prefetch, if it has not inlined them before.
VLLM_LITE_INLINE void prefetch(const Group::Ahead& ahead, int64_t step) {
  const char* at = ahead.from + step * ahead.step;
  if (ahead.alone) {
    for (int64_t i = ahead.begin; i < ahead.end; i += 64) __builtin_prefetch(at + i);
  } else {
    for (int64_t i = ahead.begin; i < ahead.end; i += 64) __builtin_prefetch(at + i, 0, 2);
  }
}

// ---- tiles 0 to 3: sums, those of the first rows in 0 and 1; 4 and 5: rows; 6 and 7: weights

void shape_for(int64_t num_rows) {
  TileShapes shapes;
  const int64_t first = num_rows < kTileRows ? num_rows : kTileRows, second = num_rows - first;
  shapes.set(0, first);
  shapes.set(1, first);
  shapes.set(2, second);
  shapes.set(3, second);
  shapes.set(4, first);
  shapes.set(5, second);
  shapes.set(6, kTileRows);
  shapes.set(7, kTileRows);
  TILES_FENCE();
  TILES_SHAPE(&shapes);
}

template <bool kTwo>
VLLM_LITE_INLINE void load_step(const char* x, int64_t stride, const char* weights) {
  TILE_LOAD(4, x, stride);
  TILE_LOAD(6, weights, kWeightStride);
  TILE_LOAD(7, weights + kTileRowBytes, kWeightStride);
  if constexpr (kTwo) TILE_LOAD(5, x + kTileRows * stride, stride);
}

// ---- groups of rows times a part of a block

// sums += x, rows of the group, times the weights of one step.
template <bool kTwo, class Product>
VLLM_LITE_INLINE void add_step(const Rows& rows, const Weights& weights, int64_t step) {
  const char *x = rows.data + step * rows.step, *from = weights.at(step);
  TILE_LOAD_ONCE(4, x, rows.stride);
  TILE_LOAD(6, from, kWeightStride);
  Product::add00();
  TILE_LOAD(7, from + kTileRowBytes, kWeightStride);
  Product::add01();
  if constexpr (kTwo) {
    TILE_LOAD_ONCE(5, x + kTileRows * rows.stride, rows.stride);
    Product::add10();
    Product::add11();
  }
}

}  // namespace
}  // namespace VLLM_LITE_ISA
