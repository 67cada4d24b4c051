// The interface of Mamba-2 layers.
#include "mamba.h"

#include "common.h"
#include "program.h"
#include "thread_pool.h"

VLLM_LITE_API void vllm_lite_mamba(int32_t dtype, int64_t num_seqs, int64_t num_heads, int64_t num_groups,
                                   int64_t head_size, int64_t state_size, float dt_min, float dt_max,
                                   const float* mixed, const void* z, const void* dt, int64_t projected_stride,
                                   const float* decay, const float* dt_bias, const float* skip, float* states,
                                   int64_t slot_stride, const int32_t* firsts, const int32_t* rows,
                                   const int32_t* sources, const int32_t* targets, void* out, int64_t out_stride) {
  const Mamba op = {dtype,
                    num_heads,
                    num_groups,
                    head_size,
                    state_size,
                    dt_min,
                    dt_max,
                    mixed,
                    z,
                    dt,
                    projected_stride,
                    decay,
                    dt_bias,
                    skip,
                    states,
                    slot_stride,
                    {firsts, rows, sources, targets},
                    out,
                    out_stride};
  const auto kernel = VLLM_LITE_DISPATCH(mamba);
  vllm_lite::parallel_for(num_seqs * num_heads, [&](int64_t task) { kernel(op, task, task + 1); });
}
VLLM_LITE_RECORDABLE(vllm_lite_mamba)
