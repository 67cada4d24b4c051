// Decode attention of splits that several rows share, as they are in the same blocks.
//
// Sequences with a common prefix share its blocks, and the rows of a draft share nearly all. A shared split is read
// once for as many rows as there are columns of the matrix instruction, instead of once for each row (Hydragen,
// Juravsky et al. 2024; the cascade of FlashInfer and vLLM). The splits of a row follow from its own length, so rows
// share splits only if their contexts are split alike, and a column's bits do not depend on other columns: every row
// gets the same bits as from decode_attention. That kernel is launched after this one, for all remaining splits and at
// least the last one of each row, and adds up the parts of both.
#pragma once
#include "decode_attention.cuh"

// Grid (any number of blocks to share the work, num_kv_heads); shared memory as for decode_attention.
//
// The work is a list of (sequence whose table is read, split, tokens seen by the first row, 16 * first row + rows - 1):
// splits without a window, whose tokens are all seen by all rows. Up to 8 * HEAD_TILES / (num_heads / num_kv_heads)
// rows, at most 16. No ALiBi, as distances differ.
template <class T, class Cache, int HEAD, int HEAD_TILES, bool SMALL_BLOCKS, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, (decode_blocks<Cache, HEAD, HEAD_TILES, SMALL_BLOCKS>()))
    cascade_attention(float* __restrict__ part_out,          // [splits of all rows, num_heads, HEAD]
                      float* __restrict__ part_lse,          // [splits of all rows, num_heads], base 2
                      int* __restrict__ arrived,             // [splits of all rows, num_kv_heads]
                      const T* __restrict__ query,           // [num_tokens, num_heads, HEAD], rows query_stride apart
                      const Cache* __restrict__ k_cache,     // as decode_attention has it
                      const Cache* __restrict__ v_cache,     // alike
                      const int* __restrict__ block_tables,  // [num_seqs, table_stride]
                      const int* __restrict__ work,    // decode_attention's list: its second number is the length of
                      const int* __restrict__ shared,  // the list
                      const int* __restrict__ rows,    // [rows, 2]: token, index of the row's first split
                      int64 query_stride, int64 table_stride, int64 block_stride, int64 head_stride, int token_stride,
                      int num_heads, int num_kv_heads, int block_shift, int split_tiles, float factor, float cap,
                      float v_scale) {
  using S = DecodeShape<T, Cache, HEAD>;
  constexpr int COLUMNS = 8 * HEAD_TILES;
  const int warp = threadIdx.x / 32, kv_head = blockIdx.y;
  const int group = num_heads / num_kv_heads, head = kv_head * group;
  DYNAMIC_SHARED(float, states);  // [WARPS][COLUMNS][PITCH]
  for (int at = blockIdx.x; at < work[1]; at += gridDim.x) {
    const Work entry = work_at(shared, at - 1);
    const Pages<T, Cache, HEAD, SMALL_BLOCKS> pages = {block_tables + entry.a * table_stride,
                                                       k_cache + kv_head * head_stride,
                                                       v_cache + kv_head * head_stride,
                                                       block_stride,
                                                       token_stride,
                                                       block_shift,
                                                       cut_of(entry.c, 0, split_tiles)};
    const int begin = entry.b * pages.cut.split_tiles;
    const auto column = [&](int i) {
      const int row = i / group;
      if (row > entry.d % 16) return static_cast<const T*>(nullptr);
      const int token = rows[2 * (entry.d / 16 + row)];
      return query + token * query_stride + (head + i % group) * HEAD;
    };
    float o[HEAD_TILES][S::SETS][S::PAIRS][4] = {};
    Softmax<HEAD_TILES> softmax;
    float* const mine = states + warp * COLUMNS * S::PITCH;
    attend_tiles<T, Cache, HEAD, HEAD_TILES, SMALL_BLOCKS, WARPS, false>(
        o, softmax, mine, pages, begin + warp, begin + pages.cut.split_tiles, column, Scoring{cap, nullptr, 0}, factor);
    share<S, HEAD>(mine, o, softmax);
    __syncthreads();
    const Work own = work_again(shared, at - 1);
    const int columns = (own.d % 16 + 1) * group;
    const int* const places = rows + 2 * (own.d / 16) + 1;
    for (int i = threadIdx.x; i < columns * (HEAD / 2); i += WARPS * 32) {
      const int c = i / (HEAD / 2), d = i % (HEAD / 2) * 2;
      float lse;
      float2 value = merge_warps<HEAD, WARPS>(states + c * S::PITCH, COLUMNS * S::PITCH, d, -INFINITY, lse);
      value.x *= v_scale;
      value.y *= v_scale;
      const int64 part = int64(places[2 * (c / group)] + own.b) * num_heads + head + c % group;
      store_as(part_out + part * HEAD + d, value);
      if (d == 0) part_lse[part] = lse;
    }
    // The counters are read only by the next launch.
    if (threadIdx.x <= own.d % 16) atomicAdd(arrived + int64(places[2 * threadIdx.x]) * num_kv_heads + kv_head, 1);
    __syncthreads();
  }
}
