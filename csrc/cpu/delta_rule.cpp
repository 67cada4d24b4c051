// The interface of recurrent layers of the gated delta rule.
#include "delta_rule.h"

#include "common.h"
#include "program.h"
#include "thread_pool.h"

VLLM_LITE_API void vllm_lite_short_conv(int32_t dtype, int64_t num_seqs, int64_t channels, int64_t conv_size,
                                        const void* x, const void* gate, const void* out_gate, int64_t x_stride,
                                        const float* weight, const float* bias, float* states, int64_t slot_stride,
                                        const int32_t* firsts, const int32_t* rows, const int32_t* sources,
                                        const int32_t* targets, void* out, int64_t out_stride) {
  const ShortConv op = {dtype,    channels,  conv_size, x,      gate,        out_gate,
                        x_stride, weight,    bias,      states, slot_stride, {firsts, rows, sources, targets},
                        out,      out_stride};
  const auto kernel = VLLM_LITE_DISPATCH(short_conv);
  const int64_t parts = (channels + kConvChannels - 1) / kConvChannels;
  vllm_lite::parallel_for(num_seqs * parts, [&](int64_t task) { kernel(op, task, task + 1); });
}
VLLM_LITE_RECORDABLE(vllm_lite_short_conv)

VLLM_LITE_API void vllm_lite_delta_rule(int32_t dtype, int64_t num_seqs, int64_t num_key_heads, int64_t num_value_heads,
                                        int64_t key_size, int64_t value_size, float eps, const float* mixed,
                                        const void* z, const void* b, const void* a, int64_t projected_stride,
                                        const float* decay, const float* dt_bias, const float* norm, float* states,
                                        int64_t slot_stride, const int32_t* firsts, const int32_t* rows,
                                        const int32_t* sources, const int32_t* targets, void* out, int64_t out_stride) {
  const DeltaRule op = {dtype,
                        eps,
                        num_key_heads,
                        num_value_heads,
                        key_size,
                        value_size,
                        mixed,
                        z,
                        b,
                        a,
                        projected_stride,
                        decay,
                        dt_bias,
                        norm,
                        states,
                        slot_stride,
                        {firsts, rows, sources, targets},
                        out,
                        out_stride};
  const auto kernel = VLLM_LITE_DISPATCH(delta_rule);
  vllm_lite::parallel_for(num_seqs * num_value_heads, [&](int64_t task) { kernel(op, task, task + 1); });
}
VLLM_LITE_RECORDABLE(vllm_lite_delta_rule)
