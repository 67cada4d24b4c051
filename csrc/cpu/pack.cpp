// Packs the rows of one block of a weight; linear.h describes the layout.
#include "pack.h"

#include "common.h"
#include "linear.h"

int64_t element_size(int32_t type) {
  return type == kFloat32 ? 4 : 2;
}

int64_t packed_block_bytes(int64_t num_inputs, int32_t type) {
  return kBlock * padded_inputs(num_inputs) * element_size(type);
}

void pack_rows(const RowsToPack& rows, char* block) {
  const auto pack_words = VLLM_LITE_DISPATCH(pack_words);
  const int64_t size = element_size(rows.row_type), row_bytes = rows.num_inputs * size;
  const int64_t word_bytes = rows.row_type == kFloat16 ? 2 : 4;
  pack_words(static_cast<const char*>(rows.rows), rows.stride * size, rows.num_rows, row_bytes, word_bytes, block);
}
