// Grouped weights with a scale for each kQuantGroup inputs, by tiles: codes become bytes once for all rows of a task.
// Sums are added up as in linear_grouped.cpp, bit for bit.
#pragma once

#include "grouped_codes.h"
#include "tile_groups.h"

namespace VLLM_LITE_ISA {
namespace {

struct GroupedProduct : IntegerProduct {
  const LinearCall& call;
  const CellLayout layout;
  const char* cells = nullptr;  // of the part, the first of which is for the scale `first`
  int64_t block = 0, first = 0;
  alignas(64) char bytes[kMaxSteps * kStepWeights];

  explicit GroupedProduct(const LinearCall& of)
      : IntegerProduct{*of.quantized}, call(of), layout(CellLayout::of(*of.weight)) {}

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

  template <bool kTwo, class Meanwhile>
  void add(const Group& group, const Weights& weights, const Meanwhile& meanwhile) const {
    for (int64_t step = 0; step < weights.num_steps; ++step) meanwhile(step);
    add_integers<kTwo>(*this, group, weights);
  }

  template <bool kAdd>
  void add_scaled(const Group& group, const Totals& totals, int64_t number) const {
    const char* cell = cells + number * layout.bytes();
    const float* supers = call.weight->supers_of(block, first + number);
    const Scales scales[2] = {{cell, layout, supers, 0}, {cell, layout, supers, kWidth}};
    RowScales of = row_scales(group, first + number);
    for (int64_t row = 0; row < group.num_rows; ++row, of.next()) {
      for (int64_t v = 0; v < 2; ++v) {
        const int64_t at = row * kBlock + v * kWidth;
        const Vec value = to_floats(_mm512_add_epi32(Totals::both(totals, at), all_ints(*of.bias)));
        const Vec part = scales[v].less_minima(value * scales[v].scale, *of.sum);
        store(group.sums + at, multiply_add(part, splat(*of.scale), kAdd ? load(group.sums + at) : splat(0)));
      }
    }
  }

 private:
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
