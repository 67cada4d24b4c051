// Copies the K and V of sequences from their pages into contiguous rows, for attention without pages.
#pragma once
#include "common.cuh"

namespace gather {
constexpr int TOKENS = 32, THREADS = 128;  // of a block
}

// Grid: (ceil(maximum rows of a sequence / gather::TOKENS), sequences), block: gather::THREADS. Sequence i fills the
// rows kv_start_loc[i] .. kv_start_loc[i + 1] with the last of its seq_lens[i] tokens; without rows it is skipped. T:
// __half or __nv_bfloat16; C: T or a float8, which is widened and multiplied by its scale. 8 elements are moved at a
// time: addresses are multiples of 8 elements.
template <class T, class C>
__global__ void __launch_bounds__(gather::THREADS)
    gather_kv(T* __restrict__ keys, T* __restrict__ values,  // [total_tokens, kv_heads, head_size]
              const C* __restrict__ kv,              // [num_blocks, 2, kv_heads, block_size, head_size], any strides
              const int* __restrict__ block_tables,  // [num_seqs, max_blocks]
              const int* __restrict__ kv_start_loc,  // [num_seqs + 1]
              const int* __restrict__ seq_lens,      // [num_seqs]
              int64 block_stride, int64 value_stride, int64 head_stride, int64 token_stride, int table_stride,
              int kv_heads, int head_size, int block_size, float k_scale, float v_scale) {
  const int sequence = blockIdx.y, first_row = kv_start_loc[sequence], rows = kv_start_loc[sequence + 1] - first_row;
  const int first = int(blockIdx.x) * gather::TOKENS, chunks = head_size / 8, per_token = kv_heads * chunks;
  const int before = seq_lens[sequence] - rows;  // skipped tokens of the sequence
  const int* table = block_tables + int64(sequence) * table_stride;
  for (int i = threadIdx.x; i < min(gather::TOKENS, rows - first) * per_token; i += gather::THREADS) {
    const int row = first + i / per_token, head = i % per_token / chunks, chunk = i % chunks, position = before + row;
    const C* from = kv + table[position / block_size] * block_stride + position % block_size * token_stride +
                    head * head_stride + 8 * chunk;
    const int64 to = (int64(first_row + row) * kv_heads + head) * head_size + 8 * chunk;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      T* const target = (side ? values : keys) + to;
      const C* const source = from + (side ? value_stride : 0);
      if constexpr (kIsFp8<C>) {
        const auto raw = load_as<Vec<C, 8>>(source);
        const float scale = side ? v_scale : k_scale;
        unsigned wide[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          wide[j] = pack2<T>(to_float(raw.at[2 * j]) * scale, to_float(raw.at[2 * j + 1]) * scale);
        store_as(target, make_uint4(wide[0], wide[1], wide[2], wide[3]));
      } else {
        store_as(target, load_stream(source));
      }
    }
  }
}
