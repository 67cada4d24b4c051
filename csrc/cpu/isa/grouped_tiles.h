// Grouped weights with a scale for each kQuantGroup inputs, by tiles: codes become bytes once for all rows of a task.
// Sums are added up as in linear_grouped.cpp, bit for bit.
//
// Both planes of 16 rows meet a step's weights: tiles 0 and 1 are the sums of the upper plane, 2 and 3 those of the
// lower one. For each scale they are exact integers, which vectors make a part of the sums while tiles multiply what
// follows.
#pragma once

#include "byte_products.h"
#include "grouped_codes.h"
#include "tile_groups.h"

namespace VLLM_LITE_ISA {
namespace {

void shape_planes(int64_t num_rows) {
  TileShapes shapes;
  for (int tile = 0; tile < 6; ++tile) shapes.set(tile, num_rows);
  shapes.set(6, kTileRows);
  shapes.set(7, kTileRows);
  TILES_FENCE();
  TILES_SHAPE(&shapes);
}

// Both planes of some rows times the weights of one step.
VLLM_LITE_INLINE void add_planes(const Rows& rows, const char* x, const char* weights) {
  TILE_LOAD_ONCE(4, x, rows.stride);
  TILE_LOAD(6, weights, kWeightStride);
  TILE_DOT_INT8(0, 4, 6);
  TILE_LOAD(7, weights + kTileRowBytes, kWeightStride);
  TILE_DOT_INT8(1, 4, 7);
  TILE_LOAD_ONCE(5, x + rows.lower_plane, rows.stride);
  TILE_DOT_INT8(2, 5, 6);
  TILE_DOT_INT8(3, 5, 7);
}

// What kQuantGroup inputs, which share a scale, give for some rows.
struct alignas(64) Totals {
  int32_t planes[4 * kTileSums];  // two tiles of each
  int64_t first_row, num_rows;    // of the group's
  int64_t number;                 // of the inputs' scale in the part
};

struct GroupedProduct {
  static constexpr int64_t kPlanes = 2;
  static constexpr int64_t kMaxSteps = 8;  // of a part, whose sums and totals are in L1, too
  const QuantizedRows& rows;
  const LinearCall& call;
  const CellLayout layout;
  const char* cells = nullptr;  // of the part, the first of which is for the scale `first`
  int64_t block = 0, first = 0;
  alignas(64) char bytes[kMaxSteps * kStepWeights];

  explicit GroupedProduct(const LinearCall& of) : rows(*of.quantized), call(of), layout(CellLayout::of(*of.weight)) {}

  Weights part(const LinearTask& task, const Part& part) {
    const int64_t count = part.num_bytes / kQuantGroup;
    block = task.first_block + part.block;
    first = part.begin / kQuantGroup;
    cells = cell(block, first);
    widen(count);
    const int64_t num_steps = count * kQuantSteps;
    const char* next = cell(task.first_block + part.next_block, part.next_begin / kQuantGroup);
    return {bytes, num_steps, bytes + (num_steps - 1) * kStepWeights, next, layout.bytes() / kQuantSteps};
  }

  const char* cell(int64_t of_block, int64_t number) const {
    return static_cast<const char*>(call.weight->data) + (of_block * rows.layout.num_groups + number) * layout.bytes();
  }

  void shape(int64_t) const {}  // of a group: add() does it

  template <class Meanwhile>
  void add(const Group& group, const Weights& weights, const Meanwhile& meanwhile) const {
    Totals totals[2];
    const Totals* last = nullptr;
    int slot = 0;
    const Group::Ahead ahead = group.ahead(weights);
    const int64_t at = group.first_row * rows.layout.num_groups + first;
    const RowScales of_rows = {rows.scales + at, rows.biases + at, rows.sums + at, rows.layout.num_groups};
    if (group.num_groups == 1) {  // whose sums are those that wait
      for (int64_t step = 0; step < weights.num_steps; ++step) meanwhile(step);
    }
    for (int64_t row = 0; row < group.num_rows; row += kTileRows) {
      const int64_t left = group.num_rows - row, count = left < kTileRows ? left : kTileRows;
      const char* x = group.x.data + row * group.x.stride;
      if (row == 0 || count != kTileRows) shape_planes(count);
      for (int64_t step = 0; step < weights.num_steps; slot = 1 - slot) {
        zero_sums<true>();
        Totals& own = totals[slot];
        for (int64_t half = 0; half < kQuantSteps; ++half, ++step) {
          if (row == 0) prefetch(ahead, step);
          if (row == 0 && group.num_groups > 1) meanwhile(step);
          add_planes(group.x, x + step * group.x.step, weights.data + step * kStepWeights);
          if (last != nullptr) add_scaled(group, of_rows, *last, half * kTileRows / kQuantSteps);
        }
        store_tile_sums<true>(own.planes);
        TILES_FENCE();
        own.first_row = row;
        own.num_rows = count;
        own.number = step / kQuantSteps - 1;
        last = &own;
      }
    }
    for (int64_t half = 0; half < kQuantSteps; ++half)
      add_scaled(group, of_rows, *last, half * kTileRows / kQuantSteps);
  }

 private:
  // What rows have for the first scale of a part.
  struct RowScales {
    const float* scales;
    const int32_t* biases;
    const float* sums;
    int64_t stride;
  };

  // A part of the rows, from `begin` on.
  void add_scaled(const Group& group, const RowScales& of_rows, const Totals& totals, int64_t begin) const {
    const char* cell = cells + totals.number * layout.bytes();
    const float* supers = call.weight->supers_of(block, first + totals.number);
    const Scales scales[2] = {{cell, layout, supers, 0}, {cell, layout, supers, kWidth}};
    const int64_t most = begin + kTileRows / kQuantSteps, end = most < totals.num_rows ? most : totals.num_rows;
    const bool is_begun = group.are_begun || totals.number > 0;
    float* sums = group.sums + sums_at(totals.first_row + begin, 0);
    const int32_t* upper = totals.planes + begin * kTileRows;
    int64_t of = (totals.first_row + begin) * of_rows.stride + totals.number;
    for (int64_t row = begin; row < end; ++row, of += of_rows.stride, sums += kTileRows, upper += kTileRows) {
      for (int64_t v = 0; v < 2; ++v) {
        const int64_t at = v * kTileSums;
        const Ints both = both_planes(load_ints(upper + at), load_ints(upper + 2 * kTileSums + at));
        const Vec value = to_floats(_mm512_add_epi32(both, all_ints(of_rows.biases[of])));
        const Vec part = scales[v].less_minima(value * scales[v].scale, of_rows.sums[of]);
        const Vec before = is_begun ? load(sums + at) : splat(0);
        store(sums + at, multiply_add(part, splat(of_rows.scales[of]), before));
      }
    }
  }

  void widen(int64_t count) {
    const PackedWeight& weight = *call.weight;
    if (weight.type == kGrouped8) return widen_as<Bytes>(count);
    if (layout.minima_type == kShifts) return widen_as<Shifted>(count);
    weight.bytes == nullptr ? widen_as<Nibbles>(count) : widen_as<Looked>(count);
  }

  template <template <int> class Codes>
  void widen_as(int64_t count) {
    Codes<2> codes(call.weight->bytes);
    char* to = bytes;
    for (int64_t number = 0; number < count; ++number) {
      const char* cell = cells + number * layout.bytes();
      codes.enter(cell, layout, 0);
      const char* from = cell + layout.codes();
      for (int64_t octet = 0; octet < kQuantGroup / 8; ++octet, from += Codes<2>::kBytes, to += 2 * kOctetBytes) {
        for (int v = 0; v < 2; ++v) {
          const Octet both = codes.load(from, v);
          _mm512_store_si512(to + v * kTileRowBytes, both.first);
          _mm512_store_si512(to + kOctetBytes + v * kTileRowBytes, both.second);
        }
      }
    }
  }
};

}  // namespace
}  // namespace VLLM_LITE_ISA
