// Paged attention without tensor cores: any type, any head size up to 256, any mixture of decodes and prefills. It is
// for float32 models, and the simplest of the kernels; it is not optimized.
#pragma once
#include "merge_splits.cuh"

constexpr int kSimpleWarps = 4, kSimpleDims = 256 / 32;  // dims of a lane: lane, lane + 32, ...

// Grid (num_tokens, num_heads), kSimpleWarps warps, shared memory for kSimpleWarps * (head_size + 2) floats. A block
// computes one head of one row, and each warp every fourth token of the row's context. Rows of sequences of length 0
// and rows after the last sequence become 0.
template <class T, class Cache>
__global__ void __launch_bounds__(kSimpleWarps * 32)
    attention_simple(T* __restrict__ out,                   // [num_tokens, num_heads, head_size], rows out_stride apart
                     const T* __restrict__ query,           // as out, query_stride
                     const Cache* __restrict__ k_cache,     // [num_blocks, num_kv_heads, block_size, head_size]
                     const Cache* __restrict__ v_cache,     // alike, the same strides
                     const int* __restrict__ block_tables,  // [num_seqs, table_stride]
                     const int* __restrict__ seq_lens,      // [num_seqs]
                     const int* __restrict__ query_start_loc,  // [num_seqs + 1], or null: row i is sequence i's
                     const float* __restrict__ alibi_slopes,   // [num_heads] or null
                     const float* __restrict__ sinks,          // [num_heads] or null
                     int64 out_stride, int64 query_stride, int64 table_stride, int64 block_stride, int64 head_stride,
                     int64 token_stride, int num_seqs, int num_kv_heads, int head_size, int block_shift, int window,
                     float factor, float cap, float v_scale) {  // as in decode_attention
  DYNAMIC_SHARED(float, shared);
  const int row = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int kv_head = head / (gridDim.y / num_kv_heads);
  int seq = row, position = 0;
  if (query_start_loc) {  // the last sequence that starts at or before the row; empty ones come before it
    int past = num_seqs;
    for (seq = 0; past - seq > 1;) {
      const int middle = (seq + past) / 2;
      (query_start_loc[middle] <= row ? seq : past) = middle;
    }
  }
  const bool used = query_start_loc ? row < query_start_loc[num_seqs] : row < num_seqs;
  const int seq_len = used ? seq_lens[seq] : 0;
  position = query_start_loc && used ? seq_len - query_start_loc[seq + 1] + row : seq_len - 1;
  const int past = seq_len > 0 ? position + 1 : 0, begin = window > 0 && past > window ? past - window : 0;

  float q[kSimpleDims], sum[kSimpleDims] = {}, top = -INFINITY, total = 0.f;
#pragma unroll
  for (int i = 0; i < kSimpleDims; ++i) {
    const int d = lane + 32 * i;
    q[i] = d < head_size && past > 0 ? to_float(query[row * query_stride + head * head_size + d]) : 0.f;
  }
  for (int token = begin + warp; token < past; token += kSimpleWarps) {
    const int64 block = block_tables[seq * table_stride + (token >> block_shift)];
    const int64 at = block * block_stride + kv_head * head_stride + (token & ((1 << block_shift) - 1)) * token_stride;
    float score = 0.f;
#pragma unroll
    for (int i = 0; i < kSimpleDims; ++i) {
      const int d = lane + 32 * i;
      if (d < head_size) score += q[i] * to_float(k_cache[at + d]);
    }
    score = warp_sum(score) * factor;
    if (cap > 0.f) score = cap * tanhf(score);
    if (alibi_slopes) score += kLog2e * alibi_slopes[head] * (token - position);
    const float now = fmaxf(top, score), fix = exp2_fast(top - now), p = exp2_fast(score - now);
    top = now;
    total = total * fix + p;
#pragma unroll
    for (int i = 0; i < kSimpleDims; ++i) {
      const int d = lane + 32 * i;
      if (d < head_size) sum[i] = sum[i] * fix + p * to_float(v_cache[at + d]);
    }
  }
  float* mine = shared + warp * (head_size + 2);
#pragma unroll
  for (int i = 0; i < kSimpleDims; ++i)
    if (lane + 32 * i < head_size) mine[lane + 32 * i] = sum[i];
  if (lane == 0) mine[head_size] = top, mine[head_size + 1] = total;
  __syncthreads();
  for (int d = threadIdx.x; d < head_size; d += kSimpleWarps * 32) {
    const float sink = sinks ? kLog2e * sinks[head] : -INFINITY;
    float all = sink, value = 0.f;
    for (int w = 0; w < kSimpleWarps; ++w) all = fmaxf(all, shared[w * (head_size + 2) + head_size]);
    float weights = exp2_fast(sink - all);
    for (int w = 0; w < kSimpleWarps && past > 0; ++w) {
      const float* from = shared + w * (head_size + 2);
      const float weight = exp2_fast(from[head_size] - all);
      weights += weight * from[head_size + 1];
      value += weight * from[d];
    }
    out[row * out_stride + head * head_size + d] = from_float<T>(past > 0 ? value * v_scale / weights : 0.f);
  }
}
