// Unpacks or packs the rows of GGUF tensors on all threads; isa/gguf.cpp knows the formats of blocks.
#include "gguf.h"

#include "common.h"
#include "grouped.h"
#include "pack.h"
#include "thread_pool.h"

namespace {

float* behind(float* all, int64_t count) {
  return all == nullptr ? nullptr : all + count;  // nullptr: the type has none
}

// The record for rows [first, first + count).
GgufRows some(const GgufRows& all, int64_t first, int64_t count, int64_t num_inputs, int64_t num_groups) {
  GgufRows part = all;
  part.rows += first * all.stride;
  part.num_rows = count;
  part.codes += first * num_inputs;
  part.scales += first * num_groups;
  part.minima = behind(all.minima, first * num_groups);
  part.scale_supers = behind(all.scale_supers, first * all.blocks_per_row);
  part.minima_supers = behind(all.minima_supers, first * all.blocks_per_row);
  return part;
}

// Copies [kBlock][blocks_per_row] to every second line of a block's [blocks_per_row][2][kBlock].
void place_supers(const float* from, int64_t num_rows, int64_t blocks_per_row, float* to) {
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t i = 0; i < blocks_per_row; ++i) to[2 * kBlock * i + row] = from[row * blocks_per_row + i];
  }
}

}  // namespace

// Unpacks rows of `num_inputs` inputs in `num_groups` groups to the memory in the record. Returns 0 and writes nothing
// if the type is unknown.
VLLM_LITE_API int32_t vllm_lite_take_apart(const GgufRows* rows, int64_t num_inputs, int64_t num_groups) {
  constexpr int64_t kTaskBytes = 16 << 10;  // about 5 us
  const auto take_apart = VLLM_LITE_DISPATCH(take_apart);
  if (!take_apart(some(*rows, 0, 0, num_inputs, num_groups))) return 0;
  const int64_t at_once = rows->stride < kTaskBytes ? kTaskBytes / rows->stride : 1;
  vllm_lite::parallel_for((rows->num_rows + at_once - 1) / at_once, [&](int64_t task) {
    const int64_t first = task * at_once, left = rows->num_rows - first;
    take_apart(some(*rows, first, left < at_once ? left : at_once, num_inputs, num_groups));
  });
  return 1;
}

// Packs rows into weight->data and weight->supers, which must be zero. Scales are multiplied by `unit`, and `less` is
// subtracted from codes. Only the input fields of `rows` are used. The weight has the groups of the type, and scales of
// type kIntegers if it has supers. Returns 0 and writes nothing if the type is unknown.
VLLM_LITE_API int32_t vllm_lite_pack_blocks(const PackedWeight* weight, const GgufRows* rows, float unit,
                                            int32_t less) {
  const auto take_apart = VLLM_LITE_DISPATCH(take_apart);
  const CellLayout layout = CellLayout::of(*weight);
  const int64_t num_inputs = weight->num_inputs, num_groups = layout.groups(num_inputs);
  const int64_t per_row = rows->blocks_per_row, block_bytes = num_groups * layout.bytes();
  if (!take_apart(some(*rows, 0, 0, num_inputs, num_groups))) return 0;
  const bool has_minima = weight->minima_type != kNoMinima;
  vllm_lite::parallel_for((weight->num_outputs + kBlock - 1) / kBlock, [&](int64_t block) {
    static thread_local Scratch scratch;
    GgufRows part = *rows;
    part.scales = reinterpret_cast<float*>(scratch.get(kBlock * (8 * num_groups + 8 * per_row + num_inputs)));
    part.minima = part.scales + kBlock * num_groups;
    part.scale_supers = part.minima + kBlock * num_groups;
    part.minima_supers = part.scale_supers + kBlock * per_row;
    part.codes = reinterpret_cast<uint8_t*>(part.minima_supers + kBlock * per_row);
    part.as_integers = weight->scale_type == kIntegers;
    const int64_t first = block * kBlock, left = rows->num_rows - first;
    part.num_rows = left < kBlock ? left : kBlock;
    part.rows += first * rows->stride;
    take_apart(part);
    for (int64_t i = 0; unit != 1 && i < part.num_rows * num_groups; ++i) part.scales[i] *= unit;
    for (int64_t i = 0; less != 0 && i < part.num_rows * num_inputs; ++i) {
      part.codes[i] = static_cast<uint8_t>(part.codes[i] - less);
    }
    PackedWeight own = *weight;
    own.num_outputs = part.num_rows;
    pack_cells(own, {part.codes, num_inputs, part.scales, has_minima ? part.minima : nullptr}, 0,
               static_cast<char*>(const_cast<void*>(weight->data)) + block * block_bytes);
    if (weight->supers == nullptr) return;
    float* supers = const_cast<float*>(weight->supers) + block * per_row * 2 * kBlock;
    place_supers(part.scale_supers, part.num_rows, per_row, supers);
    if (has_minima) place_supers(part.minima_supers, part.num_rows, per_row, supers + kBlock);
  });
  return 1;
}
