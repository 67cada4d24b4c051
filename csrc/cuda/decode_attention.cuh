// Paged attention of single new tokens: the engine's decode kernel, on tensor cores.
//
// Each token has 1 query row per head and reads the K and V of its whole context once, so memory bandwidth is the
// limit. Therefore a block processes all query heads of a KV head (K and V are read once), long contexts are split over
// blocks (merge_splits.cuh), and K and V are loaded from global memory straight into the registers of the matrix
// instruction, 16 bytes per lane, without shared memory. Pages as in Kwon et al. 2023, online softmax as in Milakov &
// Gimelshein 2018.
//
// A warp processes 16 tokens at a time (a tile) and computes, with the tokens or dims as the 16 rows of mma.m16n8k16
// and 8 query heads as its columns,
//     scores^T [16 tokens, 8 heads] = K [16, HEAD] * Q^T [HEAD, 8]
//     out^T    [HEAD, 8 heads]     += V^T [HEAD, 16] * P^T [16 tokens, 8]
// The order of a product's inner index is free as long as both operands agree on it, and so is the order of its rows.
// Hence lane (row = lane / 4, quad = lane % 4) loads
//     of K  the dims K_VEC * quad ... of the tokens row and row + 8: 2 pieces of 16 bytes for every 4 * K_VEC dims;
//     of V  the dims V_VEC * row ... of the tokens 2 quad, 2 quad + 1, 2 quad + 8, 2 quad + 9,
// which are contiguous pieces of rows in any layout whose rows are contiguous. Dims of V are paired across tokens by
// byte permutation. In the result of the first product a lane has one token of two heads, and in the operand of the
// second two tokens of one head: transpose_8x8 converts.
//
// A float8 cache is widened to half in registers; a bfloat16 query is then converted to half, scaled by a power of two
// per head.
#pragma once
#include "decode_pages.cuh"

// Concurrent blocks per multiprocessor: as many as leave enough registers for a tile of K and one of V.
template <class Cache, int HEAD, int HEAD_TILES, bool SMALL_BLOCKS>
constexpr int decode_blocks() {
  if (HEAD * HEAD_TILES <= 64) return 4;
  return HEAD * HEAD_TILES <= (SMALL_BLOCKS && !kIsFp8<Cache> ? 96 : 128) ? 3 : 2;
}

// Loads the query as the second operand of K * Q^T: for head `row` of each tile of heads, the dims of K that the lane
// has. column(h) is the row of head h; null: there is none, and it is 0. `scale` becomes the factor of the products of
// the heads whose results the lane will have: `factor`, and the divisor that made the head fit the range of half.
template <class T, class Cache, int HEAD, int HEAD_TILES, class Column>
__device__ __forceinline__ void load_query(
    unsigned (&q)[HEAD_TILES][DecodeShape<T, Cache, HEAD>::CHUNKS][DecodeShape<T, Cache, HEAD>::K_VEC / 2],
    float (&scale)[HEAD_TILES][2], const Column& column, float factor) {
  using S = DecodeShape<T, Cache, HEAD>;
  const int row = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < HEAD_TILES; ++n) {
    const T* const query = column(8 * n + row);
    float most = 0.f;
#pragma unroll
    for (int c = 0; c < S::CHUNKS; ++c)
#pragma unroll
      for (int part = 0; part < S::K_VEC / 8; ++part) {
        const int dim = 4 * S::K_VEC * c + S::K_VEC * quad + 8 * part;
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (query && dim < HEAD) raw = load_as<uint4>(query + dim);
        const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          q[n][c][4 * part + w] = words[w];
          const float2 pair = unpack2<T>(words[w]);
          most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        }
      }
    scale[n][0] = scale[n][1] = factor;
    if constexpr (!kSame<T, typename S::Operand>) {
      most = group_max<4>(most);
      const unsigned exponent = min(max(__float_as_uint(most) >> 23, 1u), 253u);  // of the head's largest element
      const float down = __uint_as_float((254 - exponent) << 23), up = __uint_as_float(exponent << 23);
#pragma unroll
      for (int c = 0; c < S::CHUNKS; ++c)
#pragma unroll
        for (int w = 0; w < S::K_VEC / 2; ++w) {
          const float2 pair = unpack2<T>(q[n][c][w]);
          q[n][c][w] = pack2<typename S::Operand>(pair.x * down, pair.y * down);
        }
#pragma unroll
      for (int i = 0; i < 2; ++i) scale[n][i] *= __shfl_sync(~0u, up, (2 * quad + i) * 4);
    }
  }
}

// Converts a scaled product q * k to an exponent of 2.
struct Scoring {
  float cap;            // in base 2; 0: none
  const float* slopes;  // ALiBi, [heads] of the block, or null
  int heads;
};

// Online softmax of the heads 2 quad and 2 quad + 1 of each tile of heads; `sum` counts only the lane's own tokens.
template <int HEAD_TILES>
struct Softmax {
  float top[HEAD_TILES][2], sum[HEAD_TILES][2], scale[HEAD_TILES][2];

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int n = 0; n < HEAD_TILES; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) top[n][i] = -INFINITY, sum[n][i] = 0.f;
  }

  // Converts products to probabilities relative to `top`, in place, for one tile of heads. `fix` is the factor for all
  // sums relative to the old top. products[i]: token row + 8 (i / 2), head 2 quad + i % 2.
  template <class Pages>
  __device__ __forceinline__ void add(float (&products)[4], float (&fix)[2], int n, int tile, const Pages& pages,
                                      const Scoring& scoring) {
    const int row = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) products[i] *= scale[n][i % 2];
    if (scoring.cap > 0.f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) products[i] = scoring.cap * tanhf(products[i]);
    }
    if (scoring.slopes) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int head = 8 * n + 2 * quad + i % 2, distance = tile * kTile + row + i / 2 * 8 - (pages.cut.end - 1);
        if (head < scoring.heads) products[i] += kLog2e * scoring.slopes[head] * distance;
      }
    }
    if (pages.partly_seen(tile)) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!pages.sees(tile * kTile + row + i / 2 * 8)) products[i] = -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float now = fmaxf(products[i], products[i + 2]);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) now = fmaxf(now, __shfl_xor_sync(~0u, now, lanes));
      now = fmaxf(now, top[n][i]);  // finite, as some token of the tile is seen
      fix[i] = exp2_fast(top[n][i] - now);
      top[n][i] = now;
      products[i] = exp2_fast(products[i] - now);
      products[i + 2] = exp2_fast(products[i + 2] - now);
      sum[n][i] = sum[n][i] * fix[i] + (products[i] + products[i + 2]);
    }
  }
};

// out += V^T * P^T. Rows `row` and row + 8 of product j are the dims 2 j and 2 j + 1 of the lane's part of V.
template <class S, class M, class Cache, int HEAD_TILES>
__device__ __forceinline__ void accumulate(float (&o)[HEAD_TILES][S::SETS][S::PAIRS][4],
                                           const unsigned (&v)[4][S::SETS][S::V_WORDS],
                                           const unsigned (&p)[HEAD_TILES][2]) {
#pragma unroll
  for (int s = 0; s < S::SETS; ++s)
#pragma unroll
    for (int j = 0; j < S::PAIRS; ++j) {
      const unsigned a[4] = {across<M, Cache>(v[0][s], v[1][s], j, 0), across<M, Cache>(v[0][s], v[1][s], j, 1),
                             across<M, Cache>(v[2][s], v[3][s], j, 0), across<M, Cache>(v[2][s], v[3][s], j, 1)};
#pragma unroll
      for (int n = 0; n < HEAD_TILES; ++n) mma_m16n8k16<M>(o[n][s][j], a, p[n][0], p[n][1]);
    }
}

// Writes a warp's unnormalised output, maxima and sums to shared memory: [heads][PITCH].
template <class S, int HEAD, int HEAD_TILES>
__device__ __forceinline__ void share(float* mine, const float (&o)[HEAD_TILES][S::SETS][S::PAIRS][4],
                                      const Softmax<HEAD_TILES>& softmax) {
  const int row = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < HEAD_TILES; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = softmax.sum[n][i];
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
      float* head = mine + (8 * n + 2 * quad + i) * S::PITCH;
#pragma unroll
      for (int s = 0; s < S::SETS; ++s) {
        const int dim = 8 * S::V_VEC * s + S::V_VEC * row;
        if (dim >= HEAD) continue;
#pragma unroll
        for (int j = 0; j < S::PAIRS; ++j) store_as(head + dim + 2 * j, make_float2(o[n][s][j][i], o[n][s][j][i + 2]));
      }
      if (row == 0) store_as(head + HEAD, make_float2(softmax.top[n][i], sum));
    }
}

// Computes a warp's part of a split: every WARPS-th tile from its first one on, up to `past`, into `o` (zeros before)
// and `softmax`. `own` is the warp's shared memory for `share`. A column's result does not depend on other columns:
// they only decide whether it is multiplied by 1.
//
// FETCH: prefetch V one tile ahead to L2, and K two, while a tile is computed. On some architectures ptxas moves the
// loads of V after the first product when registers are short; L2 has room. A variant to measure: no bit depends on it.
template <class T, class Cache, int HEAD, int HEAD_TILES, bool SMALL_BLOCKS, int WARPS, bool FETCH, class Column>
__device__ __forceinline__ void attend_tiles(
    float (&o)[HEAD_TILES][DecodeShape<T, Cache, HEAD>::SETS][DecodeShape<T, Cache, HEAD>::PAIRS][4],
    Softmax<HEAD_TILES>& softmax, float* own, const Pages<T, Cache, HEAD, SMALL_BLOCKS>& pages, int tile, int past,
    const Column& column, const Scoring& scoring, float factor) {
  using S = DecodeShape<T, Cache, HEAD>;
  using M = typename S::Operand;
  using P = Pages<T, Cache, HEAD, SMALL_BLOCKS>;
  int here = pages.find(tile), next = pages.find(tile + WARPS);
  typename P::K k;
  typename P::V v;
  if (tile < past) pages.load_k(k, tile, here);
  unsigned q[HEAD_TILES][S::CHUNKS][S::K_VEC / 2];
  load_query<T, Cache, HEAD, HEAD_TILES>(q, softmax.scale, column, factor);
  // A lane reads what it wrote itself; the barriers keep the compiler from holding it in registers.
  uint4* const kept = reinterpret_cast<uint4*>(own) + threadIdx.x % 32;
  if constexpr (S::Q_SHARED) {
#pragma unroll
    for (int n = 0; n < HEAD_TILES; ++n)
#pragma unroll
      for (int c = 0; c < S::CHUNKS; ++c)
        store_as(kept + 32 * (n * S::CHUNKS + c), make_uint4(q[n][c][0], q[n][c][1], q[n][c][2], q[n][c][3]));
  }
  softmax.start();
  for (; tile < past; tile += WARPS) {
    if constexpr (S::Q_SHARED) __syncwarp();
    pages.load_v(v, tile, here);
    const int after = pages.find(tile + 2 * WARPS);
    if (FETCH && tile + WARPS < past) pages.prefetch(pages.values, tile + WARPS, next);
    if (FETCH && tile + 2 * WARPS < past) pages.prefetch(pages.keys, tile + 2 * WARPS, after);
    float scores[HEAD_TILES][4] = {};
#pragma unroll
    for (int c = 0; c < S::CHUNKS; ++c) {
      if constexpr (S::Q_SHARED) {
#pragma unroll
        for (int n = 0; n < HEAD_TILES; ++n) {
          const uint4 raw = load_as<uint4>(kept + 32 * (n * S::CHUNKS + c));
          q[n][c][0] = raw.x, q[n][c][1] = raw.y, q[n][c][2] = raw.z, q[n][c][3] = raw.w;
        }
      }
#pragma unroll
      for (int s = 0; s < S::STEPS; ++s) {
        const unsigned a[4] = {pair_of<M, Cache>(k[0][c], 2 * s), pair_of<M, Cache>(k[1][c], 2 * s),
                               pair_of<M, Cache>(k[0][c], 2 * s + 1), pair_of<M, Cache>(k[1][c], 2 * s + 1)};
#pragma unroll
        for (int n = 0; n < HEAD_TILES; ++n) mma_m16n8k16<M>(scores[n], a, q[n][c][2 * s], q[n][c][2 * s + 1]);
      }
    }
    if (tile + WARPS < past) pages.load_k(k, tile + WARPS, next);

    unsigned p[HEAD_TILES][2];
    float fix[HEAD_TILES][2];
    bool fixed = true;
#pragma unroll
    for (int n = 0; n < HEAD_TILES; ++n) {
      softmax.add(scores[n], fix[n], n, tile, pages, scoring);
      fixed &= fix[n][0] == 1.f && fix[n][1] == 1.f;
#pragma unroll
      for (int h = 0; h < 2; ++h) p[n][h] = transpose_8x8(pack2<M>(scores[n][2 * h], scores[n][2 * h + 1]));
    }
    if (!__all_sync(~0u, fixed)) {
#pragma unroll
      for (int n = 0; n < HEAD_TILES; ++n)
#pragma unroll
        for (int s = 0; s < S::SETS; ++s)
#pragma unroll
          for (int j = 0; j < S::PAIRS; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) o[n][s][j][i] *= fix[n][i % 2];
    }
    if (pages.partly_seen(tile)) pages.clear_unseen(v, tile);
    accumulate<S, M, Cache>(o, v, p);
    here = next;
    next = after;
  }
  if constexpr (S::Q_SHARED) __syncwarp();  // the next writes may overwrite another lane's data
}

// Merges one head's dims d and d + 1 over all warps, in their order, from the data that `share` wrote to `head`. `lse`
// and `sink`, the logit of an attention sink or -INFINITY, are in base 2.
template <int HEAD, int WARPS>
__device__ __forceinline__ float2 merge_warps(const float* head, int warp_stride, int d, float sink, float& lse) {
  float top = sink;
  float2 value = make_float2(0.f, 0.f);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) top = fmaxf(top, head[w * warp_stride + HEAD]);
  float total = exp2_fast(sink - top);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const float2 state = load_as<float2>(head + w * warp_stride + HEAD);
    const float2 part = load_as<float2>(head + w * warp_stride + d);
    const float weight = exp2_fast(state.x - top);  // 0 for a warp without a tile
    total += weight * state.y;
    value.x += weight * part.x;
    value.y += weight * part.y;
  }
  lse = top + log2_fast(total);
  return make_float2(value.x / total, value.y / total);
}

// Grid (any number of blocks to share the work, num_kv_heads * tiles of heads); shared memory for
// WARPS * 8 * HEAD_TILES * PITCH floats.
//
// The work is a list of (token, sequence, tokens that it sees, split). A row's only split is written straight into
// `out`; several are written into part_out and part_lse, and the block that writes a row's last one merges them. The
// splits of a row are adjacent there, and in the list, whose indices are used. A row that sees nothing becomes 0, and
// rows that are not in the list are unchanged. Only seen entries of caches and tables are read, and the rest of a seen
// tile inside its block.
//
// If the second number of the list is not 0, the splits of a row in the list are its last ones, and the others are
// written by an earlier launch (cascade_attention.cuh), which also counts them as arrived.
template <class T, class Cache, int HEAD, int HEAD_TILES, bool SMALL_BLOCKS, int WARPS, bool FETCH = false>
__global__ void __launch_bounds__(WARPS * 32, (decode_blocks<Cache, HEAD, HEAD_TILES, SMALL_BLOCKS>()))
    decode_attention(
        T* __restrict__ out,                     // [num_tokens, num_heads, HEAD], rows out_stride apart
        float* __restrict__ part_out,            // [splits of all rows, num_heads, HEAD]
        float* __restrict__ part_lse,            // [splits of all rows, num_heads], base 2
        int* __restrict__ arrived,               // [splits of all rows, gridDim.y], 0 before the first and after this
        const T* __restrict__ query,             // as out, query_stride
        const Cache* __restrict__ k_cache,       // [num_blocks, num_kv_heads, 1 << block_shift, HEAD] by strides
        const Cache* __restrict__ v_cache,       // alike, the same strides
        const int* __restrict__ block_tables,    // [num_seqs, table_stride]
        const int* __restrict__ work,            // the list
        const int* __restrict__ firsts,          // [length of the list], index of its row's first split; or null
        const float* __restrict__ alibi_slopes,  // [num_heads] or null
        const float* __restrict__ sinks,         // [num_heads] or null
        int64 out_stride, int64 query_stride, int64 table_stride, int64 block_stride, int64 head_stride,
        int token_stride, int num_heads, int num_kv_heads, int block_shift, int window,
        int split_tiles,  // 0: from a row's length
        float factor,     // on q * k: to base 2, or with a cap to units of the cap
        float cap,        // in base 2; 0: none
        float v_scale) {
  using S = DecodeShape<T, Cache, HEAD>;
  using P = Pages<T, Cache, HEAD, SMALL_BLOCKS>;
  constexpr int HEADS = 8 * HEAD_TILES;
  const int warp = threadIdx.x / 32;
  const int group = num_heads / num_kv_heads, per_kv_head = ceil_div(group, HEADS);
  const int kv_head = blockIdx.y / per_kv_head, skipped = blockIdx.y % per_kv_head * HEADS;
  const int head = kv_head * group + skipped, heads = min(group - skipped, HEADS);  // [head, head + heads) are ours
  DYNAMIC_SHARED(float, shared);                                                    // [WARPS][HEADS][PITCH]
  for (int at = blockIdx.x; at < work[0]; at += gridDim.x) {
    const Work entry = work_at(work, at);
    if (entry.c == 0) {
      T* const to = out + entry.a * out_stride + head * HEAD;
      for (int i = 8 * threadIdx.x; i < heads * HEAD; i += 8 * WARPS * 32) store_as(to + i, make_uint4(0, 0, 0, 0));
      continue;
    }
    const P pages = {block_tables + entry.b * table_stride,
                     k_cache + kv_head * head_stride,
                     v_cache + kv_head * head_stride,
                     block_stride,
                     token_stride,
                     block_shift,
                     cut_of(entry.c, window, split_tiles)};
    const Cut& cut = pages.cut;
    const int past = min(cut.past, cut.first + (entry.d + 1) * cut.split_tiles);
    const int tile = cut.first + entry.d * cut.split_tiles + warp;
    const auto column = [&](int h) { return h < heads ? query + entry.a * query_stride + (head + h) * HEAD : nullptr; };
    const Scoring scoring = {cap, alibi_slopes ? alibi_slopes + head : nullptr, heads};
    float o[HEAD_TILES][S::SETS][S::PAIRS][4] = {};
    Softmax<HEAD_TILES> softmax;
    float* const mine = shared + warp * HEADS * S::PITCH;
    attend_tiles<T, Cache, HEAD, HEAD_TILES, SMALL_BLOCKS, WARPS, FETCH>(o, softmax, mine, pages, tile, past, column,
                                                                         scoring, factor);
    share<S, HEAD>(mine, o, softmax);
    __syncthreads();
    const Work own = work_again(work, at);  // loaded again, so that the loop needs no registers for it
    const int splits = cut_of(own.c, window, split_tiles).splits();
    T* const row = out + own.a * out_stride + head * HEAD;
    const bool only = splits == 1;
    const int first = number_again(work, 1) ? number_again(firsts, at) : at - own.d;  // index of the row's first split
    for (int i = threadIdx.x; i < heads * (HEAD / 2); i += WARPS * 32) {
      const int h = i / (HEAD / 2), d = i % (HEAD / 2) * 2;
      // With several splits, the sink is added when they are merged.
      const float sink = sinks && only ? kLog2e * sinks[head + h] : -INFINITY;
      float lse;
      float2 value = merge_warps<HEAD, WARPS>(shared + h * S::PITCH, HEADS * S::PITCH, d, sink, lse);
      value.x *= v_scale;
      value.y *= v_scale;
      if (only) {
        store_as(row + h * HEAD + d, pack2<T>(value.x, value.y));
      } else {
        const int64 part = int64(first + own.d) * num_heads + head + h;
        store_as(part_out + part * HEAD + d, value);
        if (d == 0) part_lse[part] = lse;
      }
    }
    __syncthreads();
    if (only) continue;
    if (!comes_last(arrived + int64(first) * gridDim.y + blockIdx.y, splits, reinterpret_cast<int*>(shared))) continue;
    for (int h = warp; h < heads; h += WARPS) {
      const int64 part = int64(first) * num_heads + head + h;
      const float sink = sinks ? kLog2e * sinks[head + h] : -INFINITY;
      merge_splits<T, HEAD>(row + h * HEAD, part_out + part * HEAD, part_lse + part, splits, num_heads, sink);
    }
  }
}
