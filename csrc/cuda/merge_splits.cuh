// How the cached tokens of a sequence are cut into splits, and the kernel that puts the splits together again.
//
// Long sequences are attended to by several blocks at once (Flash-Decoding, Dao et al. 2023). Where a sequence is cut
// depends on its length, the window and the size of a split, never on the batch or the grid, and splits are merged in
// their order: equal inputs give equal bits in any company.
#pragma once
#include "common.cuh"

constexpr int kTile = 16;  // tokens that a warp takes at once
constexpr float kLog2e = 1.4426950408889634f;

// What the last token of a sequence sees, in tokens and in tiles; a split is `split_tiles` tiles, the last one fewer.
struct Cut {
  int begin, end;   // tokens [begin, end)
  int first, past;  // tiles [first, past), of which the first and the last may be seen in part
  int splits;       // 0 for an empty sequence
};

__device__ __forceinline__ Cut cut_of(int seq_len, int window, int split_tiles) {  // window 0: all
  const int begin = window > 0 && seq_len > window ? seq_len - window : 0;
  const int first = begin / kTile, past = ceil_div(seq_len, kTile);
  return {begin, seq_len, first, past, ceil_div(past - first, split_tiles)};
}

// out = the sum of the splits' outputs, each weighted by its share 2^lse of the whole softmax, a head's sink included.
// Sequences of one split have been written to `out` already, and those that are no decodes (not 1 query row) are not
// this kernel's.
//
// Grid (num_heads, num_seqs), HEAD / 2 threads, rounded up to whole warps.
template <class T, int HEAD>
__global__ void merge_splits(T* __restrict__ out,                      // [num_tokens, num_heads, HEAD]
                             const float* __restrict__ part_out,       // [num_seqs, num_heads, max_splits, HEAD]
                             const float* __restrict__ part_lse,       // [num_seqs, num_heads, max_splits], base 2
                             const int* __restrict__ seq_lens,         // [num_seqs]
                             const int* __restrict__ query_start_loc,  // [num_seqs + 1], or null: row i is sequence i's
                             const float* __restrict__ sinks,          // [num_heads] or null
                             int64 out_stride, int max_splits, int window, int split_tiles) {
  const int head = blockIdx.x, seq = blockIdx.y, d = 2 * threadIdx.x;
  const int row = query_start_loc ? query_start_loc[seq] : seq;
  const int rows = query_start_loc ? query_start_loc[seq + 1] - row : 1;
  const int splits = cut_of(seq_lens[seq], window, split_tiles).splits;
  if (rows != 1 || splits < 2 || d >= HEAD) return;
  const int64 first = (int64(seq) * gridDim.x + head) * max_splits;
  const float* lse = part_lse + first;
  const float sink = sinks ? kLog2e * sinks[head] : -INFINITY;
  float top = sink;
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll 4
  for (int s = 0; s < splits; ++s) top = fmaxf(top, lse[s]);
  float total = exp2_fast(sink - top);
#pragma unroll 4
  for (int s = 0; s < splits; ++s) {
    const float weight = exp2_fast(lse[s] - top);
    const float2 part = load_as<float2>(part_out + (first + s) * HEAD + d);
    total += weight;
    sum.x += weight * part.x;
    sum.y += weight * part.y;
  }
  store_as(out + row * out_stride + head * HEAD + d, pack2<T>(sum.x / total, sum.y / total));
}
