// Packs weights that are quantized already: their codes, scales and minima into the cells of linear.h.
#include "grouped.h"

#include <cstring>

#include "common.h"
#include "pack.h"
#include "thread_pool.h"

namespace {

// Packs the lower 4 bits of one output's codes, a byte each, into the words of linear.h: `count` inputs, padded with
// zeros.
void pack_nibbles(const uint8_t* codes, int64_t count, char* to) {
  constexpr uint32_t kLower = 0x0f0f0f0f;
  for (; count > 0; count -= 8, codes += 8, to += 4) {
    uint32_t halves[2] = {};
    std::memcpy(halves, codes, static_cast<size_t>(count < 8 ? count : 8));
    const uint32_t both = (halves[0] & kLower) | (halves[1] & kLower) << 4;
    std::memcpy(to, &both, 4);
  }
}

// Packs the fifth bits of one output's codes, all `count` of a cell, into `to`, which must be zero before the first
// output.
void pack_fifth_bits(const uint8_t* codes, int64_t count, int64_t output, char* to) {
  const int64_t shift = 4 * (output % 2);
  for (int64_t i = 0; i < count; i += 8, to += kBlock) {
    uint64_t eight = 0;
    std::memcpy(&eight, codes + i, static_cast<size_t>(count - i < 8 ? count - i : 8));
    // Gathers one bit of each byte.
    const uint64_t bits = (eight >> 4 & 0x0101010101010101) * 0x0102040810204080 >> 56;
    to[output / 2] = static_cast<char>(to[output / 2] | (bits & 15) << shift);
    to[(kBlock + output) / 2] = static_cast<char>(to[(kBlock + output) / 2] | bits >> 4 << shift);
  }
}

// Packs the scales (or minima) that `count` outputs have for one group, side by side.
void pack_scales(const float* scales, int64_t stride, int64_t count, int32_t type, char* to) {
  float side_by_side[kBlock] = {};
  for (int64_t i = 0; i < count; ++i) side_by_side[i] = scales[i * stride];
  if (type == kShifts || type == kIntegers) {
    for (int64_t i = 0; i < kBlock; ++i) to[i] = static_cast<char>(static_cast<int32_t>(side_by_side[i]));
    return;
  }
  VLLM_LITE_DISPATCH(convert)(side_by_side, kFloat32, to, type, kBlock);
}

}  // namespace

void pack_cells(const PackedWeight& weight, const GroupedRows& rows, int64_t block, char* cell) {
  const auto pack_words = VLLM_LITE_DISPATCH(pack_words);
  const CellLayout layout = CellLayout::of(weight);
  const int64_t num_groups = layout.groups(weight.num_inputs), first = block * kBlock;
  const int64_t left = weight.num_outputs - first, count = left < kBlock ? left : kBlock;
  const int64_t row_bytes = layout.group_size / (weight.type == kGrouped8 ? 1 : 2);
  char words[kBlock * kQuantGroup];
  for (int64_t group = 0; group < num_groups; ++group, cell += layout.bytes()) {
    const int64_t input = group * layout.group_size, rest = weight.num_inputs - input;
    const int64_t width = rest < layout.group_size ? rest : layout.group_size;
    pack_scales(rows.scales + first * num_groups + group, num_groups, count, layout.scale_type, cell);
    if (rows.minima != nullptr) {
      pack_scales(rows.minima + first * num_groups + group, num_groups, count, layout.minima_type,
                  cell + layout.scale_bytes);
    }
    if (width < layout.group_size) std::memset(words, 0, sizeof words);
    for (int64_t row = 0; row < count; ++row) {
      const uint8_t* codes = rows.codes + (first + row) * rows.stride + input;
      for (int64_t i = 0; i < width; i += 64) __builtin_prefetch(codes + width + i);  // the next group's
      char* to = words + row * row_bytes;
      if (weight.type == kGrouped8) {
        std::memcpy(to, codes, static_cast<size_t>(width));
      } else {
        pack_nibbles(codes, width, to);
      }
      if (weight.type == kGrouped5) pack_fifth_bits(codes, width, row, cell + layout.fifth_bits());
    }
    pack_words(words, row_bytes, count, row_bytes, 4, cell + layout.codes());
  }
}

// Bytes of a grouped weight.
VLLM_LITE_API int64_t vllm_lite_grouped_size(const PackedWeight* weight) {
  const CellLayout layout = CellLayout::of(*weight);
  return (weight->num_outputs + kBlock - 1) / kBlock * layout.groups(weight->num_inputs) * layout.bytes();
}

// Packs codes [num_outputs][num_inputs], scales and minima [num_outputs][groups] into weight->data, which must be zero.
// Minima are nullptr if weight->minima_type is kNoMinima, whole numbers up to 255 if it is kShifts; scales and minima
// of type kIntegers are whole numbers from -128 to 127.
VLLM_LITE_API void vllm_lite_pack_grouped(const PackedWeight* weight, const uint8_t* codes, int64_t stride,
                                          const float* scales, const float* minima) {
  const GroupedRows rows = {codes, stride, scales, minima};
  const CellLayout layout = CellLayout::of(*weight);
  const int64_t block_bytes = layout.groups(weight->num_inputs) * layout.bytes();
  char* data = static_cast<char*>(const_cast<void*>(weight->data));
  vllm_lite::parallel_for((weight->num_outputs + kBlock - 1) / kBlock,
                          [&](int64_t block) { pack_cells(*weight, rows, block, data + block * block_bytes); });
}
