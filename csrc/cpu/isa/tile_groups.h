// Groups of rows times a part of a block of weights in tile registers.
#pragma once

#include "tiles.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int64_t kWeightStride = 4 * kBlock;                // bytes from one group of inputs to the next
constexpr int64_t kStepWeights = kTileRows * kWeightStride;  // of a block
constexpr int64_t kGroup = 2 * kTileRows;                    // rows at a time
constexpr int64_t kGroupSums = kGroup * kBlock;
constexpr int64_t kAheadBytes = 4096;

// Some inputs of one of a task's blocks, in bytes of a row, and what comes next.
struct Part {
  int64_t block, begin, num_bytes;
  int64_t next_block, next_begin;
};

// Bytes of a block for so many of a row.
constexpr int64_t packed_bytes(int64_t row_bytes) {
  return (row_bytes + 3) / 4 * kWeightStride;
}

// A part of one block's weights. The last step's lie at `last`: a copy with zeros where the inputs end within it.
struct Weights {
  const char* data;
  int64_t num_steps;
  const char* last;
  const char* next;   // needed next, asked for meanwhile:
  int64_t next_step;  // bytes of it for each step

  const char* at(int64_t step) const { return step + 1 < num_steps ? data + step * kStepWeights : last; }
};

// Rows of x, from the first input of the weights on: where they lie, or copied in the order in which tiles take them.
struct Rows {
  const char* data;
  int64_t stride;  // bytes from one row of a group to the next,
  int64_t step;    // from what one step takes of it to the next,
  int64_t group;   // and from one group to the next

  Rows behind(int64_t bytes) const { return {data + bytes, stride, step, group}; }
};

// Up to kGroup rows.
struct Group {
  Rows x;
  int64_t num_rows;
  float* sums;        // [kGroupSums], as tiles
  bool are_begun;     // whether sums are those of the inputs before, or anything
  int64_t first_row;  // of the call's
  int64_t number, num_groups;

  // What the weights ask for in each step.
  struct Ahead {
    const char* from;
    int64_t begin, end, step;
    bool alone;
  };

  // Groups share the work, so that memory is kept busy all the time and not by the first one only: into L2 then, as L1
  // is full of what is used now.
  Ahead ahead(const Weights& weights) const {
    const int64_t step = weights.next_step;
    return {weights.next, number * step / num_groups, (number + 1) * step / num_groups, step, num_groups == 1};
  }
};

// Trap: GCC takes calls out of what only asks for memory, if it is not inlined before it looks.
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
