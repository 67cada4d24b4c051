// How what a row sees of the cache is cut into splits, and the kernel that puts the splits together again.
//
// Long contexts are attended to by several blocks at once (Flash-Decoding, Dao et al. 2023). Where a row's context is
// cut depends on its length and the window, never on the batch or the grid, and splits are merged in their order: equal
// inputs give equal bits in any company. The host cuts them, too (attention_work.py), and lists the splits.
#pragma once
#include "common.cuh"

constexpr int kTile = 16;  // tokens that a warp takes at once
constexpr float kLog2e = 1.4426950408889634f;

// An entry of a work list: 16 bytes that one access brings. The list's length stands before its first entry.
struct Work {
  int a, b, c, d;
};

__device__ __forceinline__ Work work_at(const int* list, int at) {
  const uint4 raw = load_as<uint4>(list + 4 * (at + 1));
  return {int(raw.x), int(raw.y), int(raw.z), int(raw.w)};
}

// Tiles of a split of a row that sees `tiles` of them: all where there are few, 256 tokens while that makes no more
// than 16 splits, then 512, and beyond 32 768 tokens what makes 64 splits.
__device__ __forceinline__ int tiles_a_split(int tiles) {
  return tiles <= 32 ? 32 : tiles <= 256 ? 16 : max(32, ceil_div(tiles, 64));
}

// What a row sees that is the last of `seen` tokens, in tokens and in tiles.
struct Cut {
  int begin, end;   // tokens [begin, end)
  int first, past;  // tiles [first, past), of which the first and the last may be seen in part
  int split_tiles;  // of a split; the last one may have fewer

  __device__ __forceinline__ int splits() const { return ceil_div(past - first, split_tiles); }
};

__device__ __forceinline__ Cut cut_of(int seen, int window,
                                      int split_tiles) {  // window 0: all; split_tiles 0: as above
  const int begin = window > 0 && seen > window ? seen - window : 0;
  const int first = begin / kTile, past = ceil_div(seen, kTile);
  return {begin, seen, first, past, split_tiles > 0 ? split_tiles : tiles_a_split(past - first)};
}

// out = the sum of the splits' outputs, each weighted by its share 2^lse of the whole softmax, a head's sink included.
//
// Grid (num_heads, any number of blocks to share the rows), HEAD / 2 threads, rounded up to whole warps.
template <class T, int HEAD>
__global__ void merge_splits(T* __restrict__ out,                 // [num_tokens, num_heads, HEAD]
                             const float* __restrict__ part_out,  // [splits of all rows, num_heads, HEAD]
                             const float* __restrict__ part_lse,  // [splits of all rows, num_heads], base 2
                             const int* __restrict__ rows,        // list of (token, its first split, splits, -)
                             const float* __restrict__ sinks,     // [num_heads] or null
                             int64 out_stride) {
  const int head = blockIdx.x, num_heads = gridDim.x, d = 2 * threadIdx.x;
  if (d >= HEAD) return;
  const float sink = sinks ? kLog2e * sinks[head] : -INFINITY;
  for (int at = blockIdx.y; at < rows[0]; at += gridDim.y) {
    const Work row = work_at(rows, at);
    const int token = row.a, splits = row.c;
    const int64 first = int64(row.b) * num_heads + head;
    const float* lse = part_lse + first;
    float top = sink;
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll 4
    for (int s = 0; s < splits; ++s) top = fmaxf(top, lse[s * num_heads]);
    float total = exp2_fast(sink - top);
#pragma unroll 4
    for (int s = 0; s < splits; ++s) {
      const float weight = exp2_fast(lse[s * num_heads] - top);
      const float2 part = load_as<float2>(part_out + (first + int64(s) * num_heads) * HEAD + d);
      total += weight;
      sum.x += weight * part.x;
      sum.y += weight * part.y;
    }
    store_as(out + token * out_stride + head * HEAD + d, pack2<T>(sum.x / total, sum.y / total));
  }
}
