// The paged cache's operations other than attention: writes of new tokens, copies of whole blocks.
#include "cache_ops.h"

#include <algorithm>
#include <cstring>

#include "attention.h"
#include "common.h"
#include "program.h"
#include "thread_pool.h"

using namespace vllm_lite;

namespace {

constexpr int64_t kTaskBytes = 128 << 10;  // bytes moved by a task: about 10 us

}  // namespace

// Rotates Q and K in place by cos and sin, unless these are null, and stores K and V at their slots; tokens with a
// negative slot are not stored. Strides are in elements; kv_strides [4] are those of the first axes of `kv`, and
// kv_strides[1] is 0 if V is a part of K.
VLLM_LITE_API void vllm_lite_write_kv(const AttentionShape* shape, void* query, int64_t query_stride, void* key,
                                      int64_t key_stride, const void* value, int64_t value_stride, const void* cos,
                                      const void* sin, int64_t rotation_stride, const int64_t* slots,
                                      int64_t num_tokens, void* kv, const int64_t* kv_strides) {
  const CacheWrite write = {shape->num_heads,
                            shape->num_kv_heads,
                            shape->head_size,
                            shape->block_size,
                            shape->dtype,
                            shape->kv_dtype,
                            shape->k_scale,
                            shape->v_scale,
                            query,
                            key,
                            value,
                            query_stride,
                            key_stride,
                            value_stride,
                            cos,
                            sin,
                            rotation_stride,
                            slots,
                            kv,
                            kv_strides[0],
                            kv_strides[1],
                            kv_strides[2],
                            kv_strides[3]};
  const int64_t token_bytes = (shape->num_heads + 4 * shape->num_kv_heads) * shape->head_size * 4;
  const int64_t tokens = std::max<int64_t>(1, kTaskBytes / token_bytes);
  const auto run = VLLM_LITE_DISPATCH(write_tokens);
  if (num_tokens <= 2 * tokens) return run(write, 0, num_tokens);
  parallel_for((num_tokens + tokens - 1) / tokens,
               [&](int64_t task) { run(write, task * tokens, std::min(num_tokens, (task + 1) * tokens)); });
}
VLLM_LITE_RECORDABLE(vllm_lite_write_kv)

// Copies block pairs[i][0] of `source` to block pairs[i][1] of `destination` for all i, in any order: a block that is
// written must not be another pair's source or destination. Both pools may be the same.
VLLM_LITE_API void vllm_lite_copy_blocks(const char* source, char* destination, int64_t block_bytes,
                                         const int64_t* pairs, int64_t num_pairs) {
  const auto copy = [&](int64_t pair, int64_t from, int64_t to) {
    std::memcpy(destination + pairs[2 * pair + 1] * block_bytes + from, source + pairs[2 * pair] * block_bytes + from,
                static_cast<size_t>(to - from));
  };
  const int64_t pieces = (block_bytes + kTaskBytes - 1) / kTaskBytes;                           // of a large block
  const int64_t blocks = std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, block_bytes));  // small ones together
  if (pieces > 1) {
    parallel_for(num_pairs * pieces, [&](int64_t task) {
      const int64_t from = task % pieces * kTaskBytes;
      copy(task / pieces, from, std::min(block_bytes, from + kTaskBytes));
    });
    return;
  }
  const auto copy_several = [&](int64_t task) {
    for (int64_t i = task * blocks; i < std::min(num_pairs, (task + 1) * blocks); ++i) copy(i, 0, block_bytes);
  };
  if (num_pairs <= 2 * blocks) {
    copy_several(0);
    if (num_pairs > blocks) copy_several(1);
    return;
  }
  parallel_for((num_pairs + blocks - 1) / blocks, copy_several);
}
