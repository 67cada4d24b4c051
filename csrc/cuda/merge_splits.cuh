// Splits of a row's context, and merging of their results.
//
// Long contexts are processed by several blocks at once (Flash-Decoding, Dao et al. 2023). The splits of a row's
// context depend on its length and the window, never on the batch or the grid, and are merged in order: equal inputs
// give equal bits in any batch. The host computes the splits, too (attention_work.py), and lists them.
#pragma once
#include "last_block.cuh"

constexpr int kTile = 16;  // tokens that a warp processes at once
constexpr float kLog2e = 1.4426950408889634f;

// An entry of a work list: 16 bytes, loaded at once. Before the first one are the lengths of this list and of the list
// of shared splits (cascade_attention.cuh).
struct Work {
  int a, b, c, d;
};

__device__ __forceinline__ Work work_at(const int* list, int at) {
  const uint4 raw = load_as<uint4>(list + 4 * (at + 1));
  return {int(raw.x), int(raw.y), int(raw.z), int(raw.w)};
}
// Loads the entry again, so that the compiler does not keep the first one in registers.
__device__ __forceinline__ Work work_again(const int* list, int at) {
  const uint4 raw = load_fresh4(list + 4 * (at + 1));
  return {int(raw.x), int(raw.y), int(raw.z), int(raw.w)};
}
// An element of a list of integers, loaded in the same way.
__device__ __forceinline__ int number_again(const int* list, int at) {
  return __float_as_int(load_fresh(reinterpret_cast<const float*>(list) + at));
}

// Tiles per split for a row of `tiles` tiles: all of up to 512 tokens; then 256 tokens for up to 16 splits, and 512 for
// up to 64 splits. Longer rows have 64 splits.
__device__ __forceinline__ int tiles_a_split(int tiles) {
  return tiles <= 32 ? 32 : tiles <= 256 ? 16 : max(32, ceil_div(tiles, 64));
}

// The context of a row that is the last of `seen` tokens, in tokens and in tiles.
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

// One head's out = the sum of its splits' outputs, each weighted by its share 2^lse of the whole softmax, including
// `sink` (a logit in base 2, or -INFINITY). By one warp, for splits that are `stride` heads apart, starting with the
// first. The order of all sums depends only on the number of splits.
template <class T, int HEAD>
__device__ __forceinline__ void merge_splits(T* out, const float* part_out, const float* part_lse, int splits,
                                             int stride, float sink) {
  constexpr int PAIRS = ceil_div(HEAD, 64);    // of dims, of a lane
  constexpr int kAhead = HEAD <= 128 ? 8 : 4;  // splits being loaded at a time, as registers allow
  const int lane = threadIdx.x % 32;
  float top = sink;
  for (int s = lane; s < splits; s += 32) top = fmaxf(top, load_fresh(part_lse + int64(s) * stride));
  top = warp_max(top);
  float total = 0.f;
  float2 sum[PAIRS];
#pragma unroll
  for (int p = 0; p < PAIRS; ++p) sum[p] = make_float2(0.f, 0.f);
  for (int first = 0; first < splits; first += 32) {
    const int count = min(32, splits - first);
    const float own = lane < count ? exp2_fast(load_fresh(part_lse + int64(first + lane) * stride) - top) : 0.f;
    total += own;
    const float* from = part_out + int64(first) * stride * HEAD;
#pragma unroll kAhead
    for (int s = 0; s < count; ++s) {
      const float weight = __shfl_sync(~0u, own, s);
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) {
        const int d = 2 * lane + 64 * p;
        if (d >= HEAD) continue;
        const float2 part = load_fresh2(from + int64(s) * stride * HEAD + d);
        sum[p].x += weight * part.x;
        sum[p].y += weight * part.y;
      }
    }
  }
  total = warp_sum(total) + exp2_fast(sink - top);
#pragma unroll
  for (int p = 0; p < PAIRS; ++p) {
    const int d = 2 * lane + 64 * p;
    if (d < HEAD) store_as(out + d, pack2<T>(sum[p].x / total, sum[p].y / total));
  }
}
