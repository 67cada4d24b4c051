// Rows of a dense weight into codes and scales; the arithmetic is in isa/quantize.cpp.
#include "quantize.h"

#include "common.h"
#include "pack.h"
#include "thread_pool.h"

// rows [num_outputs][num_inputs] of DType `type` into codes [num_outputs][num_inputs] and scales [num_outputs][groups]:
// groups of `group_size` inputs, which is at most kQuantGroup; the last one may be cut off.
VLLM_LITE_API void vllm_lite_quantize4(const void* rows, int64_t stride, int32_t type, int64_t num_outputs,
                                       int64_t num_inputs, int64_t group_size, uint8_t* codes, float* scales) {
  const auto quantize_group4 = VLLM_LITE_DISPATCH(quantize_group4);
  const int64_t num_groups = (num_inputs + group_size - 1) / group_size, size = element_size(type);
  vllm_lite::parallel_for(num_outputs, [&](int64_t output) {
    const char* row = static_cast<const char*>(rows) + output * stride * size;
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t first = group * group_size, left = num_inputs - first;
      quantize_group4(row + first * size, type, left < group_size ? left : group_size,
                      codes + output * num_inputs + first, scales + output * num_groups + group);
    }
  });
}
