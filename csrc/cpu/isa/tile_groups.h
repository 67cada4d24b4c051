// Groups of rows times a part of a block of weights in tile registers, and their sums as outputs.
#pragma once

#include "byte_products.h"
#include "linear_task.h"
#include "tiles.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int64_t kWeightStride = 4 * kBlock;                // bytes from one group of inputs to the next
constexpr int64_t kStepWeights = kTileRows * kWeightStride;  // of a block
constexpr int64_t kSteps = 16;                               // their weights stay in L1 for all rows
constexpr int64_t kGroup = 2 * kTileRows;                    // rows at a time
constexpr int64_t kGroupSums = kGroup * kBlock;
constexpr int64_t kQuantSteps = kQuantGroup / kTileRowBytes;  // of a plane that share a row's scale
constexpr int64_t kAheadBytes = 4096;

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

// Rows of x, from the first input of the weights on. What belongs to the last step may lie elsewhere, as weights' do.
struct Rows {
  const char* data;
  int64_t stride;
  const char* last;
  int64_t last_stride;

  Rows from(int64_t row) const { return {data + row * stride, stride, last + row * last_stride, last_stride}; }
  Rows behind(int64_t bytes) const { return {data + bytes, stride, last + bytes, last_stride}; }
};

// Up to kGroup rows.
struct Group {
  Rows x;
  int64_t num_rows;
  float* sums;        // [kGroup][kBlock]
  bool are_begun;     // whether sums are those of the inputs before, or anything
  int64_t first_row;  // of the call's
  int64_t number, num_groups;

  // What the weights ask for in each step.
  struct Ahead {
    const char* from;
    int64_t begin, end, step;
    bool alone;

    void prefetch(int64_t number) const {
      const char* at = from + number * step;
      if (alone) {
        for (int64_t i = begin; i < end; i += 64) __builtin_prefetch(at + i);
      } else {
        for (int64_t i = begin; i < end; i += 64) __builtin_prefetch(at + i, 0, 2);
      }
    }
  };

  // Groups share the work, so that memory is kept busy all the time and not by the first one only: into L2 then, as L1
  // is full of what is used now.
  Ahead ahead(const Weights& weights) const {
    const int64_t step = weights.next_step;
    return {weights.next, number * step / num_groups, (number + 1) * step / num_groups, step, num_groups == 1};
  }
};

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
  const bool is_last = step + 1 == weights.num_steps;
  const char* x = is_last ? rows.last : rows.data + step * kTileRowBytes;
  const int64_t stride = is_last ? rows.last_stride : rows.stride;
  const char* from = weights.at(step);
  TILE_LOAD(4, x, stride);
  TILE_LOAD(6, from, kWeightStride);
  Product::add00();
  TILE_LOAD(7, from + kTileRowBytes, kWeightStride);
  Product::add01();
  if constexpr (kTwo) {
    TILE_LOAD(5, x + kTileRows * stride, stride);
    Product::add10();
    Product::add11();
  }
}

// Integers times bytes: they are added up exactly for each scale of a row, plane by plane.
struct IntegerProduct {
  static constexpr bool kRowsAreFull = true;  // no row ends within a step
  const QuantizedRows& rows;

  // Of a group of inputs, what each plane of the rows gives.
  struct alignas(64) Totals {
    int32_t upper[kGroupSums], lower[kGroupSums];

    VLLM_LITE_INLINE Ints both(const Totals& totals, int64_t at) {
      return both_planes(load_ints(totals.upper + at), load_ints(totals.lower + at));
    }
  };

  VLLM_LITE_INLINE void add00() { TILE_DOT_INT8(0, 4, 6); }
  VLLM_LITE_INLINE void add01() { TILE_DOT_INT8(1, 4, 7); }
  VLLM_LITE_INLINE void add10() { TILE_DOT_INT8(2, 5, 6); }
  VLLM_LITE_INLINE void add11() { TILE_DOT_INT8(3, 5, 7); }

  // What a row has for a scale.
  struct RowScales {
    const float* scale;
    const int32_t* bias;
    const float* sum;
    int64_t num_groups;

    void next() {
      scale += num_groups;
      bias += num_groups;
      sum += num_groups;
    }
  };

  RowScales row_scales(const Group& group, int64_t number) const {
    const int64_t at = group.first_row * rows.layout.num_groups + number;
    return {rows.scales + at, rows.biases + at, rows.sums + at, rows.layout.num_groups};
  }
};

// Group after group of kQuantGroup inputs: product.add_scaled() makes their totals a part of the sums.
template <bool kTwo, class Product>
VLLM_LITE_INLINE void add_integers(const Product& product, const Group& group, const Weights& weights) {
  IntegerProduct::Totals totals;
  const Group::Ahead ahead = group.ahead(weights);
  const Rows upper = group.x, lower = upper.behind(product.rows.layout.width());
  TILES_FENCE();
  for (int64_t begin = 0; begin < weights.num_steps; begin += kQuantSteps) {
    const int64_t left = weights.num_steps - begin, end = begin + (left < kQuantSteps ? left : kQuantSteps);
    zero_sums<kTwo>();
    for (int64_t step = begin; step < end; ++step) {
      ahead.prefetch(step);
      add_step<kTwo, Product>(upper, weights, step);
    }
    store_sums<kTwo>(totals.upper, kBlock);
    zero_sums<kTwo>();
    for (int64_t step = begin; step < end; ++step) add_step<kTwo, Product>(lower, weights, step);
    store_sums<kTwo>(totals.lower, kBlock);
    TILES_FENCE();
    if (group.are_begun || begin > 0) {
      product.template add_scaled<true>(group, totals, begin / kQuantSteps);
    } else {
      product.template add_scaled<false>(group, totals, 0);
    }
  }
}

// Where a group's sums go: outputs of one block.
struct Outputs {
  const LinearCall& call;
  int64_t first_row, num_rows;  // of the call's
  int64_t block;

  void* at(int64_t row, int64_t size) const {
    return static_cast<char*>(call.out) + ((first_row + row) * call.out_stride + block * kBlock) * size;
  }

  // Their lines, one of each row, are asked for while the sums are made: they lie far from each other.
  void prefetch() const {
    const int64_t size = call.out_type == kFloat32 ? 4 : 2;
    for (int64_t row = 0; row < num_rows; ++row) __builtin_prefetch(at(row, size), 1, 3);
  }

  void write(const float* sums) const {
    if (call.weight->num_outputs - block * kBlock < kBlock) {
      return call.out_type == kFloat32 ? write_part<float>(sums) : write_part_as_x(sums);
    }
    if (call.out_type == kFloat32) return write_all<float>(sums);
    if (call.x_type == kFloat16) return write_all<Float16>(sums);
    write_all<BFloat16>(sums);
  }

 private:
  template <class Out>
  void write_part(const float* sums) const {
    VLLM_LITE_ISA::write<Out>(call, {first_row, num_rows, block, 1}, sums, kBlock);
  }
  void write_part_as_x(const float* sums) const {
    call.x_type == kFloat16 ? write_part<Float16>(sums) : write_part<BFloat16>(sums);
  }

  template <class Out>
  void write_all(const float* sums) const {
    const float* biases = call.weight->bias;
    Vec bias[2] = {splat(-0.0f), splat(-0.0f)};  // which changes nothing, not even -0
    if (biases != nullptr) {
      bias[0] = load(biases + block * kBlock);
      bias[1] = load(biases + block * kBlock + kWidth);
    }
    for (int64_t row = 0; row < num_rows; ++row, sums += kBlock) {
      Out* out = static_cast<Out*>(at(row, sizeof(Out)));
      for (int v = 0; v < 2; ++v) store(out + v * kWidth, load(sums + v * kWidth) + bias[v]);
    }
  }
};

}  // namespace
}  // namespace VLLM_LITE_ISA
