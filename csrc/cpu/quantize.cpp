// Rows of a dense weight into codes and scales; the arithmetic is in isa/quantize.cpp.
#include "quantize.h"

#include "common.h"
#include "grouped.h"
#include "thread_pool.h"

namespace {

using QuantizeGroup = void (*)(const void* x, int32_t type, int64_t count, uint8_t* codes, float* scale);

// One row into codes [num_inputs] and scales [groups].
void quantize_row(QuantizeGroup quantize_group, const char* row, int32_t type, int64_t num_inputs, int64_t group_size,
                  uint8_t* codes, float* scales) {
  const int64_t size = element_size(type);
  for (int64_t first = 0; first < num_inputs; first += group_size) {
    const int64_t left = num_inputs - first;
    quantize_group(row + first * size, type, left < group_size ? left : group_size, codes + first, scales++);
  }
}

PackedWeight quantized(int32_t type, int64_t num_inputs, int64_t num_outputs, int64_t group_size) {
  PackedWeight weight = {};
  weight.num_inputs = num_inputs;
  weight.num_outputs = num_outputs;
  weight.type = type;
  weight.group_size = static_cast<int32_t>(group_size);
  weight.scale_type = kBFloat16;
  weight.minima_type = kNoMinima;
  return weight;
}

}  // namespace

int64_t quantized_block_bytes(int32_t type, int64_t num_inputs, int64_t group_size) {
  const CellLayout layout = CellLayout::of(quantized(type, num_inputs, kBlock, group_size));
  return layout.groups(num_inputs) * layout.bytes();
}

void pack_quantized(const RowsToPack& rows, int32_t type, int64_t group_size, char* block) {
  const auto quantize_group =
      type == kGrouped4 ? VLLM_LITE_DISPATCH(quantize_group4) : VLLM_LITE_DISPATCH(quantize_group_fp8);
  static thread_local Scratch scratch;
  const int64_t num_inputs = rows.num_inputs, num_groups = (num_inputs + group_size - 1) / group_size;
  float* scales = reinterpret_cast<float*>(scratch.get(rows.num_rows * (4 * num_groups + num_inputs)));
  uint8_t* codes = reinterpret_cast<uint8_t*>(scales + rows.num_rows * num_groups);
  const char* from = static_cast<const char*>(rows.rows);
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    quantize_row(quantize_group, from + row * rows.stride * element_size(rows.row_type), rows.row_type, num_inputs,
                 group_size, codes + row * num_inputs, scales + row * num_groups);
  }
  pack_cells(quantized(type, num_inputs, rows.num_rows, group_size), {codes, num_inputs, scales, nullptr}, 0, block);
}

// rows [num_outputs][num_inputs] of DType `type` into codes [num_outputs][num_inputs] and scales [num_outputs][groups]:
// groups of `group_size` inputs, which is at most kQuantGroup; the last one may be cut off.
VLLM_LITE_API void vllm_lite_quantize4(const void* rows, int64_t stride, int32_t type, int64_t num_outputs,
                                       int64_t num_inputs, int64_t group_size, uint8_t* codes, float* scales) {
  const int64_t num_groups = (num_inputs + group_size - 1) / group_size, row_bytes = stride * element_size(type);
  const auto quantize_group = VLLM_LITE_DISPATCH(quantize_group4);
  vllm_lite::parallel_for(num_outputs, [&](int64_t output) {
    quantize_row(quantize_group, static_cast<const char*>(rows) + output * row_bytes, type, num_inputs, group_size,
                 codes + output * num_inputs, scales + output * num_groups);
  });
}

// Bytes of a weight that pack_quantized packs.
VLLM_LITE_API int64_t vllm_lite_quantized_size(int64_t num_outputs, int64_t num_inputs, int32_t type,
                                               int64_t group_size) {
  return (num_outputs + kBlock - 1) / kBlock * quantized_block_bytes(type, num_inputs, group_size);
}
