// Writing new K and V into the paged cache.
#pragma once

#include <cstdint>

#include "isa.h"

namespace vllm_lite {

// The new tokens of one layer. Strides are in elements; the heads of a token are adjacent, and the elements of a head
// dense.
struct CacheWrite {
  int32_t num_heads, num_kv_heads, head_size, block_size;
  int32_t dtype, kv_dtype;  // DType
  float k_scale, v_scale;   // divisors of K and V before they are stored as float8; unused for other types
  void* query;              // [num_tokens, num_heads, head_size]
  void* key;                // [num_tokens, num_kv_heads, head_size]
  const void* value;
  int64_t query_stride, key_stride, value_stride;
  const void* cos;  // [num_tokens, head_size], of `dtype`; null: no rotation
  const void* sin;  // with a negated first half
  int64_t rotation_stride;
  const int64_t* slots;  // [num_tokens]; negative: the token is not stored
  void* kv;              // [num_blocks, 2, num_kv_heads, block_size, head_size]
  int64_t block_stride;
  int64_t value_offset;  // from K to V; 0: V is a part of K, and is not stored separately
  int64_t head_stride, token_stride;
};

}  // namespace vllm_lite

// Rotates and stores the tokens [first, end).
VLLM_LITE_DECLARE(void write_tokens(const vllm_lite::CacheWrite& write, int64_t first, int64_t end))
