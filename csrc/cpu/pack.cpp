// One block of a packed weight from its rows; the layout is in linear.h.
#include "pack.h"

#include "common.h"
#include "linear.h"

int64_t element_size(int32_t type) {
  return type == kInt8Weight ? 1 : type == kFloat32 ? 4 : 2;
}

int64_t packed_block_bytes(int64_t num_inputs, int32_t type) {
  return kBlock * padded_inputs(num_inputs, type) * element_size(type);
}

void pack_rows(const RowsToPack& rows, int32_t type, char* block, float* scales) {
  const auto pack_words = VLLM_LITE_DISPATCH(pack_words);
  const int64_t row_size = element_size(rows.row_type), stride = rows.stride * row_size, count = rows.num_inputs;
  const char* from = static_cast<const char*>(rows.rows);
  if (type != kInt8Weight) {
    return pack_words(from, stride, rows.num_rows, count * row_size, type == kFloat16 ? 2 : 4, block);
  }
  const auto quantize = VLLM_LITE_DISPATCH(quantize);
  static thread_local Scratch scratch;
  char* integers = scratch.get(kBlock * count);
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    int8_t* to = reinterpret_cast<int8_t*>(integers + row * count);
    quantize(from + row * stride, rows.row_type, count, to, scales + row);
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int8_t>(to[i] ^ -128);
  }
  pack_words(integers, count, rows.num_rows, count, 4, block);
}
