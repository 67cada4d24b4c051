// The interface of norms, rotary embedding and the look-up of token vectors.
#include "fused.h"

#include <cstring>
#include <vector>

#include "common.h"
#include "program.h"
#include "rows.h"

using vllm_lite::first_outside;
using vllm_lite::over_rows;

namespace {

constexpr int64_t kLookUpBytes = 256 << 10;  // of a task: 20 us or so
constexpr size_t kKeptBytes = 4 << 20;       // scratch memory that a thread keeps

}  // namespace

// x, out: [num_outer, num_inner, size], each with the strides of its two outer axes; weight: [size].
VLLM_LITE_API void vllm_lite_rms_norm(int32_t dtype, int64_t num_outer, int64_t num_inner, int64_t size, float eps,
                                      const void* x, int64_t x_outer, int64_t x_inner, const void* weight, void* out,
                                      int64_t out_outer, int64_t out_inner) {
  const RmsNorm op = {dtype, eps, num_inner, size, x, weight, out, x_outer, x_inner, out_outer, out_inner};
  over_rows(num_outer, num_inner * size, VLLM_LITE_DISPATCH(rms_norm), op);
}
VLLM_LITE_RECORDABLE(vllm_lite_rms_norm)

// residual, x, out: [num_rows, size].
VLLM_LITE_API void vllm_lite_add_rms_norm(int32_t dtype, int64_t num_rows, int64_t size, float eps, void* residual,
                                          int64_t residual_stride, const void* x, int64_t x_stride, const void* weight,
                                          void* out, int64_t out_stride) {
  const AddRmsNorm op = {dtype, eps, size, x, weight, residual, out, residual_stride, x_stride, out_stride};
  over_rows(num_rows, size, VLLM_LITE_DISPATCH(add_rms_norm), op);
}
VLLM_LITE_RECORDABLE(vllm_lite_add_rms_norm)

// x, out: [num_outer, num_inner, size], each with the strides of its two outer axes; weight and bias: [size], for inner
// row j at weight + j * weight_inner; bias may be null.
VLLM_LITE_API void vllm_lite_wide_norm(int32_t dtype, int32_t centered, int64_t num_outer, int64_t num_inner,
                                       int64_t size, float eps, const void* x, int64_t x_outer, int64_t x_inner,
                                       const float* weight, const float* bias, int64_t weight_inner, void* out,
                                       int64_t out_outer, int64_t out_inner) {
  const WideWeights norm = {centered, eps, weight, bias};
  const WideNorm op = {dtype, norm, weight_inner, num_inner, size, x, out, x_outer, x_inner, out_outer, out_inner};
  over_rows(num_outer, num_inner * size, VLLM_LITE_DISPATCH(wide_norm), op);
}
VLLM_LITE_RECORDABLE(vllm_lite_wide_norm)

// residual, x, out: [num_rows, size].
VLLM_LITE_API void vllm_lite_add_wide_norm(int32_t dtype, int32_t centered, int64_t num_rows, int64_t size, float eps,
                                           void* residual, int64_t residual_stride, const void* x, int64_t x_stride,
                                           const float* weight, const float* bias, void* out, int64_t out_stride) {
  const WideWeights norm = {centered, eps, weight, bias};
  const AddWideNorm op = {dtype, norm, size, x, residual, out, residual_stride, x_stride, out_stride};
  over_rows(num_rows, size, VLLM_LITE_DISPATCH(add_wide_norm), op);
}
VLLM_LITE_RECORDABLE(vllm_lite_add_wide_norm)

// heads, out: [num_tokens, num_heads, head_size], possibly the same memory; cos, sin: [num_tokens, head_size], with one
// stride.
VLLM_LITE_API void vllm_lite_rotate(int32_t dtype, int64_t num_tokens, int64_t num_heads, int64_t head_size,
                                    const void* heads, int64_t token_stride, int64_t head_stride, void* out,
                                    int64_t out_token_stride, int64_t out_head_stride, const void* cos, const void* sin,
                                    int64_t rotation_stride) {
  const Rotate op = {dtype, num_heads,        head_size,       heads, token_stride, head_stride,
                     out,   out_token_stride, out_head_stride, cos,   sin,          rotation_stride};
  over_rows(num_tokens, num_heads * head_size, VLLM_LITE_DISPATCH(rotate), op);
}
VLLM_LITE_RECORDABLE(vllm_lite_rotate)

// Returns the index of the first position outside of [0, max_position), and then changes nothing; otherwise -1.
VLLM_LITE_API int64_t vllm_lite_select_rotation(int32_t dtype, int64_t num_tokens, int64_t half, const float* table,
                                                int64_t max_position, const int64_t* positions, void* cos, void* sin,
                                                int64_t stride) {
  const int64_t bad = first_outside(positions, num_tokens, max_position);
  if (bad >= 0) return bad;
  const SelectRotation op = {dtype, half, table, positions, cos, sin, stride};
  over_rows(num_tokens, 4 * half, VLLM_LITE_DISPATCH(select_rotation), op);
  return -1;
}
VLLM_LITE_RECORDABLE(vllm_lite_select_rotation)

// An embedding: copies the rows of ids [count] to `out`, whose rows are `out_stride` bytes apart. `table`
// [num_rows][row_bytes] has the rows of the ids from first_id on; valid ids without a row there get zeros. Ids are in
// [0, num_ids). Returns -1; or the index of the first invalid id, and writes nothing.
VLLM_LITE_API int64_t vllm_lite_look_up(const char* table, int64_t first_id, int64_t num_rows, int64_t num_ids,
                                        int64_t row_bytes, const int64_t* ids, int64_t count, char* out,
                                        int64_t out_stride) {
  const int64_t bad = first_outside(ids, count, num_ids);
  if (bad >= 0) return bad;
  const int64_t at_once = row_bytes < kLookUpBytes ? kLookUpBytes / row_bytes : 1;
  vllm_lite::parallel_for((count + at_once - 1) / at_once, [&](int64_t task) {
    for (int64_t i = task * at_once; i < count && i < (task + 1) * at_once; ++i) {
      const int64_t row = ids[i] - first_id;
      if (row < 0 || row >= num_rows) {
        std::memset(out + i * out_stride, 0, static_cast<size_t>(row_bytes));
      } else {
        std::memcpy(out + i * out_stride, table + row * row_bytes, static_cast<size_t>(row_bytes));
      }
    }
  });
  return -1;
}
VLLM_LITE_RECORDABLE(vllm_lite_look_up)

// Copies the rows ids [count] of x [num_rows][row_bytes] to `out`, which may overlap x. Strides are in bytes. Returns
// -1; or the index of the first id that is not in [0, num_rows), and writes nothing.
VLLM_LITE_API int64_t vllm_lite_take_rows(const char* x, int64_t x_stride, int64_t num_rows, int64_t row_bytes,
                                          const int64_t* ids, int64_t count, char* out, int64_t out_stride) {
  const int64_t bad = first_outside(ids, count, num_rows);
  if (bad >= 0) return bad;
  thread_local std::vector<char> taken;
  taken.resize(static_cast<size_t>(count * row_bytes));
  const auto size = static_cast<size_t>(row_bytes);
  for (int64_t i = 0; i < count; ++i) std::memcpy(taken.data() + i * row_bytes, x + ids[i] * x_stride, size);
  for (int64_t i = 0; i < count; ++i) std::memcpy(out + i * out_stride, taken.data() + i * row_bytes, size);
  if (taken.size() > kKeptBytes) std::vector<char>().swap(taken);
  return -1;
}
VLLM_LITE_RECORDABLE(vllm_lite_take_rows)
