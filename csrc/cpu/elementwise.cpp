// The interface of activations, sums and products on rows of elements.
#include "elementwise.h"

#include "common.h"
#include "program.h"
#include "rows.h"

using vllm_lite::first_outside;
using vllm_lite::over_rows;

// x: [num_rows, size], in place.
VLLM_LITE_API void vllm_lite_activate(int32_t dtype, int32_t activation, int64_t num_rows, int64_t size, void* x,
                                      int64_t stride) {
  const Activate op = {dtype, activation, size, x, stride};
  over_rows(num_rows, size, VLLM_LITE_DISPATCH(activate), op);
}
VLLM_LITE_RECORDABLE(vllm_lite_activate)

// gate_up: [num_rows, 2 * size], out: [num_rows, size].
VLLM_LITE_API void vllm_lite_gated_activation(int32_t dtype, int32_t activation, int64_t num_rows, int64_t size,
                                              const void* gate_up, int64_t in_stride, void* out, int64_t out_stride) {
  const GatedActivation op = {dtype, activation, size, gate_up, out, in_stride, out_stride};
  over_rows(num_rows, 2 * size, VLLM_LITE_DISPATCH(gated_activation), op);
}
VLLM_LITE_RECORDABLE(vllm_lite_gated_activation)

// x += added; both [num_rows, size].
VLLM_LITE_API void vllm_lite_add(int32_t dtype, int64_t num_rows, int64_t size, void* x, int64_t x_stride,
                                 const void* added, int64_t added_stride) {
  const AddRows op = {dtype, size, x, added, nullptr, x_stride, added_stride};
  over_rows(num_rows, size, VLLM_LITE_DISPATCH(add_rows), op);
}
VLLM_LITE_RECORDABLE(vllm_lite_add)

// x: [num_rows, size], table: [max_position, size]. Returns the index of the first position outside of [0,
// max_position), and then changes nothing; otherwise -1.
VLLM_LITE_API int64_t vllm_lite_add_rows(int32_t dtype, int64_t num_rows, int64_t size, void* x, int64_t x_stride,
                                         const void* table, int64_t table_stride, int64_t max_position,
                                         const int64_t* positions) {
  const int64_t bad = first_outside(positions, num_rows, max_position);
  if (bad >= 0) return bad;
  const AddRows op = {dtype, size, x, table, positions, x_stride, table_stride};
  over_rows(num_rows, size, VLLM_LITE_DISPATCH(add_rows), op);
  return -1;
}
VLLM_LITE_RECORDABLE(vllm_lite_add_rows)

// x: [num_rows, size].
VLLM_LITE_API void vllm_lite_scale(int32_t dtype, int64_t num_rows, int64_t size, void* x, int64_t stride,
                                   float factor) {
  const ScaleRows op = {dtype, factor, nullptr, nullptr, 1, size, x, stride, 0};
  over_rows(num_rows, size, VLLM_LITE_DISPATCH(scale_rows), op);
}
VLLM_LITE_RECORDABLE(vllm_lite_scale)

// heads: [num_tokens, num_heads, head_size], table: [max_position]. Returns as vllm_lite_add_rows.
VLLM_LITE_API int64_t vllm_lite_scale_rows(int32_t dtype, int64_t num_tokens, int64_t num_heads, int64_t head_size,
                                           void* heads, int64_t token_stride, int64_t head_stride, const float* table,
                                           int64_t max_position, const int64_t* positions) {
  const int64_t bad = first_outside(positions, num_tokens, max_position);
  if (bad >= 0) return bad;
  const ScaleRows op = {dtype, 1, table, positions, num_heads, head_size, heads, token_stride, head_stride};
  over_rows(num_tokens, num_heads * head_size, VLLM_LITE_DISPATCH(scale_rows), op);
  return -1;
}
VLLM_LITE_RECORDABLE(vllm_lite_scale_rows)

// x: [num_rows, size].
VLLM_LITE_API void vllm_lite_clamp(int32_t dtype, int64_t num_rows, int64_t size, void* x, int64_t stride,
                                   float limit) {
  const Clamp op = {dtype, limit, size, x, stride};
  over_rows(num_rows, size, VLLM_LITE_DISPATCH(clamp), op);
}
VLLM_LITE_RECORDABLE(vllm_lite_clamp)

// logits: float32 [num_rows, size], in place; cap 0: no cap.
VLLM_LITE_API void vllm_lite_scale_and_cap(int64_t num_rows, int64_t size, float* logits, int64_t stride, float factor,
                                           float cap) {
  const ScaleAndCap op = {factor, cap, size, logits, stride};
  over_rows(num_rows, size, VLLM_LITE_DISPATCH(scale_and_cap), op);
}
VLLM_LITE_RECORDABLE(vllm_lite_scale_and_cap)

// x *= sigmoid(gate); both [num_rows, size].
VLLM_LITE_API void vllm_lite_sigmoid_gate(int32_t dtype, int64_t num_rows, int64_t size, void* x, int64_t x_stride,
                                          const void* gate, int64_t gate_stride) {
  const SigmoidGate op = {dtype, size, x, gate, x_stride, gate_stride};
  over_rows(num_rows, 2 * size, VLLM_LITE_DISPATCH(sigmoid_gate), op);
}
VLLM_LITE_RECORDABLE(vllm_lite_sigmoid_gate)

// x: [num_rows, num_heads, head_size], in place; gate: [num_rows, num_heads].
VLLM_LITE_API void vllm_lite_gate_heads(int32_t dtype, int64_t num_rows, int64_t num_heads, int64_t head_size, void* x,
                                        int64_t x_stride, const void* gate, int64_t gate_stride) {
  const GateHeads op = {dtype, num_heads, head_size, x, gate, x_stride, gate_stride};
  over_rows(num_rows, num_heads * head_size, VLLM_LITE_DISPATCH(gate_heads), op);
}
VLLM_LITE_RECORDABLE(vllm_lite_gate_heads)

// x: [num_rows, size], in place; factors: [4].
VLLM_LITE_API void vllm_lite_xielu(int32_t dtype, int64_t num_rows, int64_t size, void* x, int64_t stride,
                                   const float* factors) {
  const Xielu op = {dtype, size, x, stride, factors};
  over_rows(num_rows, 2 * size, VLLM_LITE_DISPATCH(xielu), op);
}
VLLM_LITE_RECORDABLE(vllm_lite_xielu)
