// Small linear layers, one for each head, in one call: their weights are separate, their rows adjacent.
#include <algorithm>

#include "common.h"
#include "linear.h"
#include "program.h"
#include "thread_pool.h"

namespace {

// Minimum size of a task, in weights times rows; about 5 us.
constexpr int64_t kMinTask = 64 << 10;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

char* moved(const void* from, int64_t elements, int32_t dtype) {
  return static_cast<char*>(const_cast<void*>(from)) + elements * (dtype == kFloat32 ? 4 : 2);
}

}  // namespace

// out[:, head] = x[:, head] W[head]^T + bias[head]; x: [num_rows, num_heads, inputs], out: [num_rows, num_heads,
// outputs], of DType `dtype` up to kFloat16. Strides are in elements; the elements of a head are dense. All weights
// have one shape and type. Rows are not quantized, even with grouped weights.
VLLM_LITE_API void vllm_lite_head_linear(const PackedWeight* const* weights, int64_t num_heads, int32_t dtype,
                                         const void* x, int64_t x_stride, int64_t x_head_stride, void* out,
                                         int64_t out_stride, int64_t out_head_stride, int64_t num_rows) {
  if (num_rows <= 0 || num_heads <= 0) return;
  const auto linear = VLLM_LITE_DISPATCH_TILES(linear);
  const int64_t row_parts = ceil_div(num_rows, kMaxRows), num_blocks = ceil_div(weights[0]->num_outputs, kBlock);
  const int64_t work = kBlock * num_blocks * weights[0]->num_inputs * ceil_div(num_rows, row_parts);
  const int64_t at_once = std::min(num_heads, ceil_div(kMinTask, work));
  vllm_lite::parallel_for(ceil_div(num_heads, at_once) * row_parts, [&](int64_t number) {
    const int64_t part = number % row_parts, first_head = number / row_parts * at_once;
    const int64_t first = part * num_rows / row_parts, end = (part + 1) * num_rows / row_parts;
    for (int64_t head = first_head; head < std::min(num_heads, first_head + at_once); ++head) {
      const LinearCall call = {weights[head], moved(x, head * x_head_stride, dtype),
                               x_stride,      moved(out, head * out_head_stride, dtype),
                               out_stride,    num_rows,
                               dtype,         dtype,
                               nullptr};
      for (int64_t block = 0; block < num_blocks; block += kMaxBlocks) {
        linear(call, {first, end - first, block, std::min(kMaxBlocks, num_blocks - block)});
      }
    }
  });
}
VLLM_LITE_RECORDABLE(vllm_lite_head_linear)
