// Writing new K and V into the paged cache.
#pragma once

#include <cstdint>

#include "isa.h"

namespace vllm_lite {

// One layer's new tokens. Strides in elements; a row's heads stand side by side, the elements of a head are dense.
struct CacheWrite {
  int32_t num_heads, num_kv_heads, head_size, block_size;
  int32_t dtype, kv_dtype;  // DType
  float k_scale, v_scale;   // what is stored is divided by it, in float8 only
  void* query;              // [num_tokens, num_heads, head_size]
  void* key;                // [num_tokens, num_kv_heads, head_size]
  const void* value;
  int64_t query_stride, key_stride, value_stride;
  const void* cos;  // [num_tokens, head_size], of `dtype`; null = nothing is turned
  const void* sin;  // its first half is negated
  int64_t rotation_stride;
  const int64_t* slots;  // [num_tokens]; negative = not stored
  void* kv;              // [num_blocks, 2, num_kv_heads, block_size, head_size]
  int64_t block_stride;
  int64_t value_offset;  // from K to V; 0 = V is a part of K, and is not stored
  int64_t head_stride, token_stride;
};

}  // namespace vllm_lite

// Tokens [first, end).
VLLM_LITE_DECLARE(void write_tokens(const vllm_lite::CacheWrite& write, int64_t first, int64_t end))
