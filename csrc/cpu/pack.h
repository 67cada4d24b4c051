// Converts rows of weights to the packed layout of linear.h.
#pragma once

#include <cstdint>
#include <memory>

#include "isa.h"

// Memory of one thread, which grows to the size of its largest call and is kept for the next one.
class Scratch {
 public:
  char* get(int64_t num_bytes) {
    if (num_bytes > size_) {
      data_.reset(new char[static_cast<size_t>(num_bytes)]);
      size_ = num_bytes;
    }
    return data_.get();
  }

 private:
  std::unique_ptr<char[]> data_;
  int64_t size_ = 0;
};

// Up to kBlock rows of a weight, `stride` elements of DType `row_type` apart.
struct RowsToPack {
  const void* rows;
  int64_t stride;
  int64_t num_rows;
  int64_t num_inputs;
  int32_t row_type;
};

// Bytes of an element of DType `type`, up to kFloat16.
int64_t element_size(int32_t type);

// Bytes of one block of a packed weight that is not grouped.
int64_t packed_block_bytes(int64_t num_inputs, int32_t type);

// Packs the rows into `block`, which must be zero.
void pack_rows(const RowsToPack& rows, char* block);

// Copies rows [num_rows][row_bytes] into the columns of a block, word by word of 2 or 4 bytes; a row's last word may be
// incomplete. `stride` is in bytes.
VLLM_LITE_DECLARE(void pack_words(const char* rows, int64_t stride, int64_t num_rows, int64_t row_bytes,
                                  int64_t word_bytes, char* block))
// Converts `count` elements from one DType up to kFloat16 to another. Rounds to nearest, ties to even, denormals as
// well.
VLLM_LITE_DECLARE(void convert(const void* from, int32_t from_type, void* to, int32_t to_type, int64_t count))
