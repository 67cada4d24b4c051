// Writes into the KV cache and copies of its blocks.
//
// The engine's layout is [num_blocks, 2, num_kv_heads, block_size, head_size] by strides, K first. Token t of a step is
// stored in slot `slots[t]` = block * block_size + offset; a negative slot is not written. Offsets into the cache are
// int64, as it may have more than 2^31 elements. T is float, __half or __nv_bfloat16; Cache is T, or an fp8 type that
// stores K / k_scale and V / v_scale, saturated. N elements are moved at a time (see fused.cuh).
#pragma once
#include "common.cuh"
#include "fused.cuh"

// Stores `values`, which T represents exactly.
template <class T, class Cache, int N>
__device__ __forceinline__ void store_cached(Cache* to, float (&values)[N], float scale) {
  static_assert(kSame<T, Cache> || kIsFp8<Cache>, "a cache is of the model's type or fp8");
  if constexpr (kIsFp8<Cache>) {
#pragma unroll
    for (int j = 0; j < N; ++j) values[j] /= scale;
  }
  store_floats(to, values);
}

// Copies a dense row of K or V, [num_kv_heads, head_size], to its slot; `to` is that of head 0.
template <class T, class Cache, int N>
__device__ __forceinline__ void store_row(const T* row, Cache* to, int num_kv_heads, int head_size, int64 head_stride,
                                          float scale) {
  const int steps = head_size / N;
  for (int item = threadIdx.x; item < num_kv_heads * steps; item += blockDim.x) {
    float values[N];
    load_floats(row + item * N, values);
    store_cached<T>(to + item / steps * head_stride + item % steps * N, values, scale);
  }
}

// key, value: [num_tokens, num_kv_heads, head_size], the heads of a token side by side. Grid: num_tokens.
template <class T, class Cache, int N>
__global__ void reshape_and_cache(const T* key, const T* value, Cache* cache, const int64* slots, int num_kv_heads,
                                  int head_size, int block_size, int64 key_stride, int64 value_stride,
                                  int64 block_stride, int64 kv_stride, int64 head_stride, int64 token_stride,
                                  float k_scale, float v_scale) {
  const int64 token = blockIdx.x, slot = slots[token];
  if (slot < 0) return;
  Cache* to = cache + slot / block_size * block_stride + slot % block_size * token_stride;
  store_row<T, Cache, N>(key + token * key_stride, to, num_kv_heads, head_size, head_stride, k_scale);
  store_row<T, Cache, N>(value + token * value_stride, to + kv_stride, num_kv_heads, head_size, head_stride, v_scale);
}

// rotate() of query and key, then reshape_and_cache() of key and value, with the same bits, in one pass. Rows with a
// negative slot are rotated, too. cos, sin: [num_tokens, head_size]. Grid: num_tokens.
template <class T, class Cache, int N>
__global__ void rope_and_cache(T* query, T* key, const T* value, const T* cos, const T* sin, Cache* cache,
                               const int64* slots, int num_heads, int num_kv_heads, int head_size, int block_size,
                               int64 query_stride, int64 key_stride, int64 value_stride, int64 cos_stride,
                               int64 sin_stride, int64 block_stride, int64 kv_stride, int64 head_stride,
                               int64 token_stride, float k_scale, float v_scale) {
  const int64 token = blockIdx.x, slot = slots[token];
  Cache* to = slot < 0 ? nullptr : cache + slot / block_size * block_stride + slot % block_size * token_stride;
  const int half = head_size / 2, steps = half / N;
  for (int item = threadIdx.x; item < (num_heads + num_kv_heads) * steps; item += blockDim.x) {
    const int head = item / steps, i = item % steps * N, kv_head = head - num_heads;
    float low[N], high[N];
    T* row =
        kv_head < 0 ? query + token * query_stride + head * head_size : key + token * key_stride + kv_head * head_size;
    turn<T, N>(row, cos + token * cos_stride, sin + token * sin_stride, half, i, low, high);
    if (kv_head >= 0 && to) {
      store_cached<T>(to + kv_head * head_stride + i, low, k_scale);
      store_cached<T>(to + kv_head * head_stride + half + i, high, k_scale);
    }
  }
  if (to)
    store_row<T, Cache, N>(value + token * value_stride, to + kv_stride, num_kv_heads, head_size, head_stride, v_scale);
}

// rms_norm() of every head of query and key, then rope_and_cache(), with the same bits, in one pass. A warp processes a
// head of at most 32 * N elements, N per lane. The weights: [head_size]. Grid: num_tokens.
template <class T, class Cache, int N>
__global__ void norm_rope_and_cache(T* query, T* key, const T* value, const T* query_weight, const T* key_weight,
                                    const T* cos, const T* sin, Cache* cache, const int64* slots, int num_heads,
                                    int num_kv_heads, int head_size, int block_size, int64 query_stride,
                                    int64 key_stride, int64 value_stride, int64 cos_stride, int64 sin_stride,
                                    int64 block_stride, int64 kv_stride, int64 head_stride, int64 token_stride,
                                    float k_scale, float v_scale, float eps) {
  const int64 token = blockIdx.x, slot = slots[token];
  Cache* to = slot < 0 ? nullptr : cache + slot / block_size * block_stride + slot % block_size * token_stride;
  const int lane = threadIdx.x % 32, i = lane * N, half = head_size / 2;
  for (int head = threadIdx.x / 32; head < num_heads + num_kv_heads; head += blockDim.x / 32) {
    const int kv_head = head - num_heads;
    T* row =
        kv_head < 0 ? query + token * query_stride + head * head_size : key + token * key_stride + kv_head * head_size;
    const T* weight = kv_head < 0 ? query_weight : key_weight;
    float low[N], high[N], sum = 0.f;
    if (i < head_size) {
      load_floats(row + i, low);
#pragma unroll
      for (int j = 0; j < N; ++j) sum = fmaf(low[j], low[j], sum);
    }
    const float scale = rsqrtf(warp_sum(sum) / head_size + eps);  // all have read when this returns
    if (i < half) {
      load_normed<T, N>(row + i, weight + i, scale, low);
      load_normed<T, N>(row + half + i, weight + half + i, scale, high);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        low[j] = to_float(from_float<T>(low[j]));
        high[j] = to_float(from_float<T>(high[j]));
      }
      turn_values<T, N>(row, cos + token * cos_stride, sin + token * sin_stride, half, i, low, high);
      if (kv_head >= 0 && to) {
        store_cached<T>(to + kv_head * head_stride + i, low, k_scale);
        store_cached<T>(to + kv_head * head_stride + half + i, high, k_scale);
      }
    }
  }
  if (to)
    store_row<T, Cache, N>(value + token * value_stride, to + kv_stride, num_kv_heads, head_size, head_stride, v_scale);
}

// The same for the layout of paged_attention_v1 and v2: K split into vectors of x = 16 / sizeof(Cache) elements,
// [num_blocks, num_kv_heads, head_size / x, block_size, x], and V transposed, [num_blocks, num_kv_heads, head_size,
// block_size]. Blocks and heads may have the same gaps in both. A token's V is written element by element to head_size
// places, which is the cost of this layout. Grid: num_tokens.
template <class T, class Cache>
__global__ void reshape_and_cache_x(const T* key, const T* value, Cache* key_cache, Cache* value_cache,
                                    const int64* slots, int num_kv_heads, int head_size, int block_size,
                                    int64 key_stride, int64 value_stride, int64 block_stride, int64 head_stride,
                                    float k_scale, float v_scale) {
  constexpr int x = 16 / sizeof(Cache);
  const int64 token = blockIdx.x, slot = slots[token];
  if (slot < 0) return;
  const int64 block = slot / block_size, offset = slot % block_size;
  for (int item = threadIdx.x; item < num_kv_heads * head_size; item += blockDim.x) {
    const int64 head = block * block_stride + item / head_size * head_stride;
    const int i = item % head_size;
    float k[1] = {to_float(key[token * key_stride + item])}, v[1] = {to_float(value[token * value_stride + item])};
    store_cached<T>(key_cache + head + (i / x * block_size + offset) * x + i % x, k, k_scale);
    store_cached<T>(value_cache + head + i * block_size + offset, v, v_scale);
  }
}

// Copies a whole block of `block_units` V's within `pool` for each (source, destination) of `pairs` [num_pairs, 2]. No
// pair may write a block that another pair reads or writes. Grid: (num_pairs, chunks of a block).
template <class V>
__global__ void copy_blocks(void* pool, const int64* pairs, int64 block_units) {
  const V* from = static_cast<const V*>(pool) + pairs[2 * int64(blockIdx.x)] * block_units;
  V* to = static_cast<V*>(pool) + pairs[2 * int64(blockIdx.x) + 1] * block_units;
  const int64 step = int64(gridDim.y) * blockDim.x;
  for (int64 i = int64(blockIdx.y) * blockDim.x + threadIdx.x; i < block_units; i += step)
    store_as(to + i, load_as<V>(from + i));
}
