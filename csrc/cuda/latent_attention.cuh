// Paged attention over cached latents (MLA; DeepSeek-AI 2024): one KV head, whose V is the first VALUE elements of its
// K, and many query heads. An entry of the work list is a row of a step and one of its splits; rows are computed
// separately, for decodes and prompts.
//
// A block of 4 warps computes up to 16 * ROW_TILES heads of one row, so a latent is loaded once for all of them: tiles
// of 32 tokens are copied by cp.async from their pages to shared memory, 16 bytes at a time, the next one during the
// products of the current one. With the heads as the rows of mma.m16n8k16,
//     scores [heads, 32 tokens]  = Q [heads, HEAD] * K^T       warp w computes those of the tokens 8 w ... 8 w + 7
//     out    [heads, VALUE]     += P [heads, 32] * V           warp w has a quarter of the dims
// so that neither the output (512 dims per head exceed a warp's registers) nor a score is computed twice. In between,
// the warps exchange their rows' maxima and P through shared memory.
//
// A row's bits depend only on what it sees, which determines its splits and the order of all sums.
#pragma once
#include "merge_splits.cuh"

namespace latent {

constexpr int WARPS = 4, THREADS = 32 * WARPS, KEYS = 8 * WARPS;

template <int HEAD, int VALUE, int ROW_TILES>
struct Shape {
  static_assert(HEAD % 8 == 0 && VALUE % 8 == 0 && VALUE <= HEAD && VALUE <= 512);
  static constexpr int ROWS = 16 * ROW_TILES;         // heads of a block
  static constexpr int DIMS = round_up(HEAD, 32);     // what mma contracts; columns from HEAD on are zeros
  static constexpr int PITCH = DIMS + 8;              // elements of a row: an odd number of 16 bytes, no conflicts
  static constexpr int P_PITCH = KEYS + 8;            // alike, of a row of P
  static constexpr int UNITS = ceil_div(VALUE, 16);   // of 16 dims of the output
  static constexpr int OWN = ceil_div(UNITS, WARPS);  // of a warp
  // Elements of T: Q, two tiles, P. They are followed by a float for each warp and row.
  static constexpr int ELEMENTS = (ROWS + 2 * KEYS) * PITCH + ROWS * P_PITCH;
};

// A thread's part of copying tokens [begin, end) to shared memory: 8 neighbouring threads copy one token, so that 128
// consecutive bytes are read together.
template <class T, int HEAD, int DIMS, int PITCH>
struct Loader {
  static constexpr int LOADS = KEYS * 8 / THREADS;  // tokens of a thread in a tile

  const int* table;  // of the sequence
  const T* keys;     // block 0
  int64 block_stride;
  int token_stride, block_shift, begin, end;
  int page[LOADS];  // of this thread's tokens in the next tile

  __device__ __forceinline__ int token(int tile, int load) const {
    return begin + tile * KEYS + load * (THREADS / 8) + int(threadIdx.x) / 8;
  }
  // Looks up the pages of a tile, ahead of its use. Table entries past the end are not read.
  __device__ __forceinline__ void look_up(int tile) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int position = token(tile, i);
      page[i] = position < end ? table[position >> block_shift] : 0;
    }
  }
  // Starts copying the tile that was looked up to `to`, [KEYS][PITCH]; tokens past the end become zeros and are not
  // read.
  __device__ __forceinline__ void start(int tile, T* to) const {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int position = token(tile, i);
      const bool seen = position < end;
      const T* const row = keys + page[i] * block_stride + int64(position & ((1 << block_shift) - 1)) * token_stride;
      T* const place = to + (i * (THREADS / 8) + int(threadIdx.x) / 8) * PITCH;
      for (int dim = int(threadIdx.x) % 8 * 8; dim < DIMS; dim += 64) {
        const bool valid = seen && dim < HEAD;
        copy_async_16(place + dim, valid ? row + dim : keys, valid);
      }
    }
  }
};

// A warp's part of the output, and the online softmax of its lane's rows: lane / 4 and that + 8 of each tile of 16. All
// warps have equal maxima; `sum` counts only the lane's own tokens.
template <class S, int ROW_TILES>
struct State {
  float o[ROW_TILES][S::OWN][2][4];
  float top[ROW_TILES][2], sum[ROW_TILES][2];

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) top[r][h] = -INFINITY, sum[r][h] = 0.f;
#pragma unroll
      for (int u = 0; u < S::OWN; ++u)
#pragma unroll
        for (int i = 0; i < 8; ++i) o[r][u][i / 4][i % 4] = 0.f;
    }
  }
};

// Scores of the block's heads for the warp's 8 tokens of a tile, in base 2; -INFINITY from the token `left` on.
template <class T, class S, int ROW_TILES>
__device__ __forceinline__ void score(float (&s)[ROW_TILES][4], const T* q, const T* tile, float factor, int left) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T* const q_rows = q + lane % 16 * S::PITCH + lane / 16 * 8;  // in ldmatrix's layout
  const T* const k_rows = tile + (8 * warp + lane % 8) * S::PITCH + lane / 8 * 8;
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) s[r][0] = s[r][1] = s[r][2] = s[r][3] = 0.f;
#pragma unroll 6
  for (int i = 0; i < S::DIMS / 32; ++i) {
    unsigned k[4];
    load_matrices(k, k_rows + 32 * i);
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned a[4];
        load_matrices(a, q_rows + 16 * r * S::PITCH + 32 * i + 16 * half);
        mma_m16n8k16<T>(s[r], a, k[2 * half], k[2 * half + 1]);
      }
  }
  const int key = 8 * warp + lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[r][i] = key + i % 2 < left ? s[r][i] * factor : -INFINITY;
}

// Adds a tile, of which `left` tokens are seen, to the state. `most`: [WARPS][ROWS], `p`: [ROWS][P_PITCH].
template <class T, class S, int ROW_TILES>
__device__ __forceinline__ void attend(State<S, ROW_TILES>& state, const T* q, const T* tile, T* p, float* most,
                                       float factor, int left) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
  float s[ROW_TILES][4];
  score<T, S>(s, q, tile, factor, left);
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float highest = group_max<4>(fmaxf(s[r][2 * h], s[r][2 * h + 1]));
      if (lane % 4 == 0) most[warp * S::ROWS + 16 * r + 8 * h + row] = highest;
    }
  __syncthreads();  // the maxima of all warps are written
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float now = state.top[r][h];
#pragma unroll
      for (int w = 0; w < WARPS; ++w) now = fmaxf(now, most[w * S::ROWS + 16 * r + 8 * h + row]);  // finite: 1 is seen
      const float fix = exp2_fast(state.top[r][h] - now);
      state.top[r][h] = now;
      const float one = exp2_fast(s[r][2 * h] - now), two = exp2_fast(s[r][2 * h + 1] - now);
      state.sum[r][h] = state.sum[r][h] * fix + (one + two);
      store_as(p + (16 * r + 8 * h + row) * S::P_PITCH + 8 * warp + lane % 4 * 2, pack2<T>(one, two));
#pragma unroll
      for (int u = 0; u < S::OWN; ++u)
#pragma unroll
        for (int j = 0; j < 2; ++j) state.o[r][u][j][2 * h] *= fix, state.o[r][u][j][2 * h + 1] *= fix;
    }
  __syncthreads();  // P of all warps is written
  const T* const p_rows = p + lane % 16 * S::P_PITCH + lane / 16 * 8;
  const T* const v_rows = tile + lane % 16 * S::PITCH + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < KEYS / 16; ++k) {
    unsigned a[ROW_TILES][4];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) load_matrices(a[r], p_rows + 16 * r * S::P_PITCH + 16 * k);
#pragma unroll
    for (int u = 0; u < S::OWN; ++u) {
      const int unit = warp * S::OWN + u;
      if (unit >= S::UNITS) continue;  // the whole warp alike
      unsigned v[4];
      load_matrices_transposed(v, v_rows + 16 * k * S::PITCH + 16 * unit);
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        mma_m16n8k16<T>(state.o[r][u][0], a[r], v[0], v[1]);
        mma_m16n8k16<T>(state.o[r][u][1], a[r], v[2], v[3]);
      }
    }
  }
}

}  // namespace latent

// Grid (any number of blocks to share the work, tiles of heads); shared memory for Shape::ELEMENTS of T and 4 * ROWS
// floats.
//
// The work, part_out, part_lse and arrived are as in decode_attention. A row that sees nothing becomes 0, and rows that
// are not in the list are unchanged. Only seen entries of caches and tables are read.
template <class T, int HEAD, int VALUE, int ROW_TILES>
__global__ void __launch_bounds__(latent::THREADS, 2)
    latent_attention(T* __restrict__ out,           // [num_tokens, num_heads, VALUE], rows out_stride apart
                     float* __restrict__ part_out,  // [splits of all rows, num_heads, VALUE]
                     float* __restrict__ part_lse,  // [splits of all rows, num_heads], base 2
                     int* __restrict__ arrived,    // [splits of all rows, gridDim.y], 0 before the first and after this
                     const T* __restrict__ query,  // [num_tokens, num_heads, HEAD], rows query_stride apart
                     const T* __restrict__ kv,     // [num_blocks, 1 << block_shift, HEAD] by strides
                     const int* __restrict__ block_tables,  // [num_seqs, table_stride]
                     const int* __restrict__ work,          // the list
                     int64 out_stride, int64 query_stride, int64 table_stride, int64 block_stride, int token_stride,
                     int num_heads, int block_shift,
                     int split_tiles,  // 0: from a row's length
                     float factor) {   // on q * k, to base 2
  using S = latent::Shape<HEAD, VALUE, ROW_TILES>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y * S::ROWS, heads = min(num_heads - head, S::ROWS);  // [head, head + heads) are ours
  DYNAMIC_SHARED(T, q);                                                           // [ROWS][PITCH]
  T* const tiles = q + S::ROWS * S::PITCH;                                        // [2][KEYS][PITCH]
  T* const p = tiles + 2 * latent::KEYS * S::PITCH;                               // [ROWS][P_PITCH]
  float* const most = reinterpret_cast<float*>(p + S::ROWS * S::P_PITCH);         // [WARPS][ROWS]
  for (int at = blockIdx.x; at < work[0]; at += gridDim.x) {
    const Work entry = work_at(work, at);
    T* const row = out + entry.a * out_stride + head * VALUE;
    if (entry.c == 0) {
      for (int i = 8 * threadIdx.x; i < heads * VALUE; i += 8 * latent::THREADS)
        store_as(row + i, make_uint4(0, 0, 0, 0));
      continue;
    }
    const Cut cut = cut_of(entry.c, 0, split_tiles);
    const int begin = entry.d * cut.split_tiles * kTile;
    const int end = entry.d + 1 < cut.splits() ? begin + cut.split_tiles * kTile : entry.c;
    const T* const from = query + entry.a * query_stride + head * HEAD;
    for (int i = threadIdx.x; i < S::ROWS * (S::DIMS / 8); i += latent::THREADS) {
      const int r = i / (S::DIMS / 8), dim = i % (S::DIMS / 8) * 8;
      const bool valid = r < heads && dim < HEAD;
      copy_async_16(q + r * S::PITCH + dim, valid ? from + r * HEAD + dim : query, valid);
    }
    latent::Loader<T, HEAD, S::DIMS, S::PITCH> loader = {
        block_tables + entry.b * table_stride, kv, block_stride, token_stride, block_shift, begin, end};
    loader.look_up(0);
    loader.start(0, tiles);
    loader.look_up(1);
    latent::State<S, ROW_TILES> state;
    state.start();
    const int count = ceil_div(end - begin, latent::KEYS);
    for (int t = 0; t < count; ++t) {
      copy_async_wait();
      __syncthreads();  // this tile is loaded; the previous one is no longer read
      if (t + 1 < count) {
        loader.start(t + 1, tiles + (t + 1) % 2 * latent::KEYS * S::PITCH);
        loader.look_up(t + 2);
      }
      latent::attend<T, S>(state, q, tiles + t % 2 * latent::KEYS * S::PITCH, p, most, factor,
                           end - begin - t * latent::KEYS);
    }
    // The maxima are no longer read, as the barrier before the last product came after that. They become sums.
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = group_sum<4>(state.sum[r][h]);
        if (lane % 4 == 0) most[warp * S::ROWS + 16 * r + 8 * h + lane / 4] = sum;
      }
    __syncthreads();
    const int splits = cut.splits();
    const int first = at - entry.d;  // index of the row's first split
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int own = 16 * r + 8 * h + lane / 4;
        if (own >= heads) continue;
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < latent::WARPS; ++w) total += most[w * S::ROWS + own];
        const float share = 1.f / total;
        const int64 part = int64(at) * num_heads + head + own;
        if (splits > 1 && warp == 0 && lane % 4 == 0) part_lse[part] = state.top[r][h] + log2_fast(total);
#pragma unroll
        for (int u = 0; u < S::OWN; ++u)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int dim = 16 * (warp * S::OWN + u) + 8 * j + lane % 4 * 2;
            if (dim >= VALUE) continue;
            const float2 value = make_float2(state.o[r][u][j][2 * h] * share, state.o[r][u][j][2 * h + 1] * share);
            if (splits == 1)
              store_as(row + own * VALUE + dim, pack2<T>(value.x, value.y));
            else
              store_as(part_out + part * VALUE + dim, value);
          }
      }
    // The shared memory that the next entry writes before its first barrier is no longer read.
    if (splits == 1) continue;
    if (!comes_last(arrived + int64(first) * gridDim.y + blockIdx.y, splits, reinterpret_cast<int*>(most))) continue;
    for (int h = warp; h < heads; h += latent::WARPS) {
      const int64 part = int64(first) * num_heads + head + h;
      merge_splits<T, VALUE>(row + h * VALUE, part_out + part * VALUE, part_lse + part, splits, num_heads, -INFINITY);
    }
  }
}
