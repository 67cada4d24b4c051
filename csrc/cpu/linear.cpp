// Packs weights and cuts a linear layer into tasks; the arithmetic is in isa/linear.cpp, the layout in linear.h.
#include "linear.h"

#include <atomic>
#include <cstring>

#include "common.h"
#include "program.h"
#include "thread_pool.h"

namespace {

// A task shorter than this is not worth handing out, in weights times rows; about 5 us.
constexpr int64_t kMinTask = 64 << 10;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

bool paired(int32_t type) {
  return type == kBFloat16 || type == kInt8Weight;
}

// Element (input, output) of a packed weight.
int64_t position(int64_t num_inputs, bool pairs, int64_t input, int64_t output) {
  const int64_t padded = (num_inputs + 1) & ~int64_t{1};
  const int64_t block = output / kBlock * kBlock * padded, column = output % kBlock;
  return block + (pairs ? (input / 2 * kBlock + column) * 2 + input % 2 : input * kBlock + column);
}

template <class T>
void pack(const T* from, int64_t stride, int64_t first, int64_t count, int64_t num_inputs, bool pairs, T* to) {
  vllm_lite::parallel_for(ceil_div(count, kBlock), [=](int64_t part) {
    const int64_t begin = part * kBlock, end = begin + kBlock < count ? begin + kBlock : count;
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t input = 0; input < num_inputs; ++input) {
        to[position(num_inputs, pairs, input, first + i)] = from[i * stride + input];
      }
    }
  });
}

template <class T>
void unpack(const T* from, const int64_t* outputs, int64_t count, int64_t num_inputs, bool pairs, T* to,
            int64_t stride) {
  vllm_lite::parallel_for(count, [=](int64_t i) {
    for (int64_t input = 0; input < num_inputs; ++input) {
      to[i * stride + input] = from[position(num_inputs, pairs, input, outputs[i])];
    }
  });
}

}  // namespace

// Elements that a packed weight has.
VLLM_LITE_API int64_t vllm_lite_packed_size(int64_t num_outputs, int64_t num_inputs) {
  return ceil_div(num_outputs, kBlock) * kBlock * ((num_inputs + 1) & ~int64_t{1});
}

// Rows [first, first + count) of a weight into their places; `packed` must be zero where nothing is written.
VLLM_LITE_API void vllm_lite_pack(const void* rows, int64_t stride, int64_t first, int64_t count, int64_t num_inputs,
                                  int32_t type, void* packed) {
  const bool pairs = paired(type);
  if (type == kInt8Weight) {
    pack(static_cast<const uint8_t*>(rows), stride, first, count, num_inputs, pairs, static_cast<uint8_t*>(packed));
  } else if (type == kFloat32) {
    pack(static_cast<const uint32_t*>(rows), stride, first, count, num_inputs, pairs, static_cast<uint32_t*>(packed));
  } else {
    pack(static_cast<const uint16_t*>(rows), stride, first, count, num_inputs, pairs, static_cast<uint16_t*>(packed));
  }
}

// The weight's rows `outputs` [count] into `rows`: an embedding from a packed LM head. Not for int8. Returns -1; or the
// index of the first output that does not exist, and nothing is written.
VLLM_LITE_API int64_t vllm_lite_unpack(const PackedWeight* weight, const int64_t* outputs, int64_t count, void* rows,
                                       int64_t stride) {
  for (int64_t i = 0; i < count; ++i) {
    if (outputs[i] < 0 || outputs[i] >= weight->num_outputs) return i;
  }
  const bool pairs = paired(weight->type);
  if (weight->type == kFloat32) {
    unpack(static_cast<const uint32_t*>(weight->data), outputs, count, weight->num_inputs, pairs,
           static_cast<uint32_t*>(rows), stride);
  } else {
    unpack(static_cast<const uint16_t*>(weight->data), outputs, count, weight->num_inputs, pairs,
           static_cast<uint16_t*>(rows), stride);
  }
  return -1;
}
VLLM_LITE_RECORDABLE(vllm_lite_unpack)

// x_type is a DType up to kFloat16; out_type is the same or kFloat32.
VLLM_LITE_API void vllm_lite_linear(const PackedWeight* weight, const void* x, int64_t x_stride, int32_t x_type,
                                    void* out, int64_t out_stride, int32_t out_type, int64_t num_rows) {
  if (num_rows <= 0) return;
  const LinearCall call = {weight, x, x_stride, out, out_stride, num_rows, x_type, out_type};
  const auto linear = VLLM_LITE_DISPATCH(linear);
  const int64_t num_blocks = ceil_div(weight->num_outputs, kBlock), row_parts = ceil_div(num_rows, kMaxRows);
  // Wide tasks read x once for many blocks; several for each thread, so that all finish at about the same time.
  const int64_t wanted = vllm_lite::num_threads() == 1 ? 1 : 8 * vllm_lite::num_threads();
  const int64_t least = ceil_div(kMinTask, kBlock * weight->num_inputs * ceil_div(num_rows, row_parts));
  int64_t width = num_blocks * row_parts / wanted;
  width = width < least ? least : width;
  width = width < 1 ? 1 : width > kMaxBlocks ? kMaxBlocks : width;
  const int64_t column_parts = ceil_div(num_blocks, width);
  // Rows change fastest: the weights of one part of the columns are in the cache for all of them.
  vllm_lite::parallel_for(column_parts * row_parts, [&](int64_t number) {
    const int64_t part = number / row_parts, rows = number % row_parts;
    const int64_t first_row = rows * num_rows / row_parts, end_row = (rows + 1) * num_rows / row_parts;
    const int64_t first = part * num_blocks / column_parts, end = (part + 1) * num_blocks / column_parts;
    linear(call, {first_row, end_row - first_row, first, end - first});
  });
}
VLLM_LITE_RECORDABLE(vllm_lite_linear)

// Reads num_bytes with all threads, for measuring memory bandwidth. The result depends on what was read.
VLLM_LITE_API int64_t vllm_lite_read(const void* data, int64_t num_bytes) {
  constexpr int64_t kPart = 1 << 20;
  const auto read_all = VLLM_LITE_DISPATCH(read_all);
  std::atomic<int64_t> total{0};
  vllm_lite::parallel_for(ceil_div(num_bytes, kPart), [&](int64_t part) {
    const int64_t start = part * kPart, left = num_bytes - start;
    total ^= read_all(static_cast<const char*>(data) + start, left < kPart ? left : kPart);
  });
  return total;
}
