// Attention of the new tokens of each sequence over its paged cache: chunked prefill, on tensor cores.
//
// A block computes 64 query rows of one KV head of one sequence. Row r is head r % group of that KV head's query heads,
// for the token r / group of the tile: with the group in the rows, the tile is also full for short chunks, and K and V
// are read once for the whole group. Four warps have 16 rows each. Keys are processed in tiles; for each
//     S = Q K^T -> mask -> online softmax -> O += P V            (FlashAttention-2, Dao 2023)
// where P never leaves the registers: the accumulators of S, rounded, are the A operand of the second product.
//
// K and V are copied from their pages to shared memory asynchronously, V during the first product and the next K during
// the second. A float8 cache is loaded into registers instead and widened on its way to shared memory.
//
// A row's bits depend only on its own keys: not on the other sequences, nor on how its prompt was divided into chunks.
// Tiles begin at multiples of KEYS from the start of the sequence, and a tile that a row does not see does not change
// it.
#pragma once
#include "common.cuh"

namespace prefill {

constexpr int ROWS = 64, WARPS = 4, THREADS = 32 * WARPS;
constexpr float LOG2E = 1.4426950408889634f;

// TILE: keys of a tile. On a multiprocessor with 100 KB of shared memory 64 keys of 128 dims would leave room for one
// block.
template <class C, int HEAD, int TILE>
struct Shape {
  static constexpr int DIMS = round_up(HEAD, 16);  // what mma contracts; columns from HEAD on are zeros
  static constexpr int PITCH = DIMS + 8;  // elements of a row in shared memory: an odd number of 16 bytes, no conflicts
  static constexpr int KEYS = TILE;
  // Concurrent blocks per multiprocessor, so that one's softmax overlaps another's products. With Q in registers
  // instead of shared memory there would be one less; wider fragments (32 rows per warp) spill.
  static constexpr int BLOCKS = HEAD > 128 || (HEAD > 64 && TILE == 32) ? 2 : (HEAD <= 64 ? 4 : 3) - kIsFp8<C>;
  static constexpr int ELEMENTS = (ROWS + 2 * KEYS) * PITCH;  // of shared memory: Q, K, V
  static constexpr int LOADS = KEYS / 32;                     // of a thread in a tile, a token each
  static constexpr int CHUNKS = ceil_div(DIMS / 8, 4);        // of 8 elements, of a thread in a token
};

// A thread's part of copying a tile from the pages to shared memory: four neighbouring threads copy one token, each
// every fourth chunk of 8 elements, so that 64 (float8: 32) consecutive bytes are read together.
template <class T, class C, int HEAD, int TILE>
struct Loader {
  using S = Shape<C, HEAD, TILE>;
  static constexpr bool WIDEN = kIsFp8<C>;

  const int* table;  // of the sequence
  const C* keys;     // of the KV head in block 0
  int64 block_stride, token_stride;
  int block_size, first, end;  // positions [first, end) exist for this block of threads; others are zeros, never read
  int64 offset[S::LOADS];      // of this thread's tokens in `keys`; -1: zeros
  int page[S::LOADS];          // of its tokens in the tile after `offset`'s
  uint2 waiting[WIDEN ? S::LOADS * S::CHUNKS : 1];

  __device__ __forceinline__ int token(int tile, int load) const {
    return tile * S::KEYS + load * 32 + int(threadIdx.x) / 4;
  }
  __device__ __forceinline__ bool exists(int position) const { return position >= first && position < end; }

  // Looks a tile's pages up, one tile ahead of their use.
  __device__ __forceinline__ void look_up(int tile) {
#pragma unroll
    for (int i = 0; i < S::LOADS; ++i) {
      const int position = token(tile, i);
      page[i] = exists(position) ? table[position / block_size] : 0;
    }
  }
  // Uses the pages that were looked up for `tile`.
  __device__ __forceinline__ void enter(int tile) {
#pragma unroll
    for (int i = 0; i < S::LOADS; ++i) {
      const int position = token(tile, i);
      offset[i] = exists(position) ? page[i] * block_stride + position % block_size * token_stride : -1;
    }
  }
  // Starts copying the entered tile of `base` (keys, or the values beside them) to `tile`, [KEYS][PITCH].
  __device__ __forceinline__ void start(const C* base, T* tile) {
#pragma unroll
    for (int i = 0; i < S::LOADS; ++i)
#pragma unroll
      for (int c = 0; c < S::CHUNKS; ++c) {
        const int dim = 8 * (int(threadIdx.x) % 4 + 4 * c);
        if (S::DIMS % 32 && dim >= S::DIMS) continue;
        const bool valid = offset[i] >= 0 && dim < HEAD;
        const C* from = base + (valid ? offset[i] + dim : 0);
        if constexpr (WIDEN)
          waiting[i * S::CHUNKS + c] = valid ? load_as<uint2>(from) : make_uint2(0, 0);
        else
          copy_async_16(tile + (i * 32 + int(threadIdx.x) / 4) * S::PITCH + dim, from, valid);
      }
  }
  // Completes `start`. A barrier is still needed before other threads may read the tile.
  __device__ __forceinline__ void finish(T* tile) {
    if constexpr (!WIDEN) {
      copy_async_wait();
    } else {
#pragma unroll
      for (int i = 0; i < S::LOADS; ++i)
#pragma unroll
        for (int c = 0; c < S::CHUNKS; ++c) {
          const int dim = 8 * (int(threadIdx.x) % 4 + 4 * c);
          if (S::DIMS % 32 && dim >= S::DIMS) continue;
          const uint2 raw = waiting[i * S::CHUNKS + c];
          const uint4 wide = make_uint4(widen2<T, C>(raw.x), widen2<T, C>(raw.x >> 16), widen2<T, C>(raw.y),
                                        widen2<T, C>(raw.y >> 16));
          store_as(tile + (i * 32 + int(threadIdx.x) / 4) * S::PITCH + dim, wide);
        }
    }
  }
};

// Converts dot products to scores, and masks them.
struct Scores {
  float scale;     // of a dot product, k_scale included
  float soft_cap;  // 0: none
  bool alibi;
  float slope[2];  // of this thread's two rows
  int position[2];
  int window;

  // Scores times `unit()` are exponents of 2.
  __device__ __forceinline__ float unit() const { return soft_cap > 0.f || alibi ? 1.f : scale * LOG2E; }

  // s[t]: two rows (elements 0, 1 and 2, 3) of the keys key + 8 * t and the one after.
  template <int N>
  __device__ __forceinline__ void bend(float (&s)[N][4], int key) const {
    const float in = soft_cap > 0.f ? 2.f * LOG2E * scale / soft_cap : 0.f;
#pragma unroll
    for (int t = 0; t < N; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x = s[t][i] * scale;
        if (soft_cap > 0.f) x = soft_cap * (1.f - 2.f / (exp2_fast(s[t][i] * in) + 1.f));  // cap * tanh(x / cap)
        if (alibi) x += slope[i / 2] * float(key + 8 * t + i % 2 - position[i / 2]);
        s[t][i] = x * LOG2E;
      }
  }
  template <int N>
  __device__ __forceinline__ void mask(float (&s)[N][4], int key) const {
#pragma unroll
    for (int t = 0; t < N; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int distance = position[i / 2] - (key + 8 * t + i % 2);
        if (distance < 0 || distance >= window) s[t][i] = -INFINITY;
      }
  }
};

}  // namespace prefill

// Grid: (number of tiles, kv_heads), block: prefill::THREADS. Shared memory: prefill::Shape<C, HEAD, TILE>::ELEMENTS of
// T. The tiles are a list of (sequence, index of its tile); those with the most context are first. Rows in no tile are
// unchanged. T: __half or __nv_bfloat16; C: T or a float8. Addresses of rows are multiples of 16 bytes, in a float8
// cache of 8.
template <class T, class C, int HEAD, int TILE>
__global__ void __launch_bounds__(prefill::THREADS, (prefill::Shape<C, HEAD, TILE>::BLOCKS)) prefill_attention(
    T* __restrict__ out,                      // [num_tokens, heads, HEAD], rows of tokens strided
    const T* __restrict__ query,              // [num_tokens, heads, HEAD], rows of tokens strided
    const C* __restrict__ kv,                 // [num_blocks, 2, kv_heads, block_size, HEAD], any strides but the last
    const int* __restrict__ block_tables,     // [num_seqs, max_blocks]
    const int* __restrict__ query_start_loc,  // [num_seqs + 1]
    const int* __restrict__ seq_lens,         // [num_seqs]
    const int* __restrict__ tiles_to_do,      // [grid, 2]
    const float* __restrict__ alibi_slopes,   // [heads] or null
    const float* __restrict__ sinks,          // [heads] or null
    int64 out_stride, int64 query_stride, int64 block_stride, int64 value_stride, int64 head_stride, int64 token_stride,
    int table_stride, int group, int block_size, int window, float scale, float v_scale, float soft_cap) {
  using namespace prefill;
  using S = Shape<C, HEAD, TILE>;
  constexpr int KEYS = S::KEYS, PITCH = S::PITCH, DIMS = S::DIMS, STEPS = DIMS / 16;
  const uint2 own = load_as<uint2>(tiles_to_do + 2 * blockIdx.x);
  const int sequence = int(own.x), tile = int(own.y), kv_head = blockIdx.y;
  const int query_start = query_start_loc[sequence], query_len = query_start_loc[sequence + 1] - query_start;
  const int first_row = tile * ROWS, rows = min(query_len * group - first_row, ROWS);
  if (rows <= 0) return;  // all threads of the block alike

  const int seq_len = seq_lens[sequence], first_position = seq_len - query_len;
  const int lane = threadIdx.x % 32, quad = lane % 4, warp_row = threadIdx.x / 32 * 16;
  DYNAMIC_SHARED(T, q_tile);  // [ROWS][PITCH]; a warp accesses only its own rows, which have its output at the end
  T* const k_tile = q_tile + ROWS * PITCH;  // [KEYS][PITCH]
  T* const v_tile = k_tile + KEYS * PITCH;  // [KEYS][PITCH]

  // This warp's rows: 16 bytes at a time, dimensions past HEAD and rows past the chunk as zeros.
  for (int i = lane; i < 16 * (DIMS / 8); i += 32) {
    const int r = warp_row + i / (DIMS / 8), dim = i % (DIMS / 8) * 8, row = first_row + r;
    const bool valid = r < rows && dim < HEAD;
    const T* from = query + (query_start + row / group) * query_stride + (kv_head * group + row % group) * HEAD + dim;
    copy_async_16(q_tile + r * PITCH + dim, valid ? from : query, valid);
  }

  Scores scores{scale, soft_cap, alibi_slopes != nullptr, {0.f, 0.f}, {0, 0}, window};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + warp_row + lane / 4 + 8 * h;
    scores.position[h] = first_position + row / group;
    if (alibi_slopes) scores.slope[h] = alibi_slopes[kv_head * group + row % group];
  }
  const float unit = scores.unit();
  // The positions of the first and the last of this block's rows, and of this warp's.
  const int block_low = first_position + first_row / group,
            block_high = first_position + (first_row + rows - 1) / group;
  const int warp_low = first_position + (first_row + warp_row) / group;
  const int warp_high = first_position + (first_row + warp_row + 15) / group;

  Loader<T, C, HEAD, TILE> loader{block_tables + int64(sequence) * table_stride,
                                  kv + kv_head * head_stride,
                                  block_stride,
                                  token_stride,
                                  block_size,
                                  max(0, block_low - window + 1),
                                  min(seq_len, block_high + 1)};
  const C* const values = loader.keys + value_stride;
  const int first_tile = loader.first / KEYS, tiles = ceil_div(max(loader.end, 0), KEYS);

  float o[DIMS / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
  const T* const q_rows = q_tile + (warp_row + lane % 16) * PITCH + lane / 16 * 8;  // in ldmatrix's layout
  const T* const k_rows = k_tile + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8;
  const T* const v_rows = v_tile + lane % 16 * PITCH + lane / 16 * 8;

  loader.look_up(first_tile);
  loader.enter(first_tile);
  loader.start(loader.keys, k_tile);
  copy_async_wait();  // Q; the barrier before its first use follows in the loop

  for (int t = first_tile; t < tiles; ++t) {
    loader.look_up(t + 1);
    loader.finish(k_tile);
    __syncthreads();  // K of this tile is loaded; V of the last one is no longer read
    loader.start(values, v_tile);

    float s[KEYS / 8][4] = {};
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      unsigned q[4];
      load_matrices(q, q_rows + 16 * i);
#pragma unroll
      for (int j = 0; j < KEYS / 16; ++j) {
        unsigned k[4];
        load_matrices(k, k_rows + 16 * j * PITCH + 16 * i);
        mma_m16n8k16<T>(s[2 * j], q, k[0], k[1]);
        mma_m16n8k16<T>(s[2 * j + 1], q, k[2], k[3]);
      }
    }
    loader.finish(v_tile);
    __syncthreads();  // V of this tile is loaded; K of it is no longer read
    if (t + 1 < tiles) {
      loader.enter(t + 1);
      loader.start(loader.keys, k_tile);
    }

    const int key = t * KEYS + 2 * quad;
    if (soft_cap > 0.f || alibi_slopes) scores.bend(s, key);
    if (t * KEYS + KEYS - 1 > warp_low || warp_high - t * KEYS >= window) scores.mask(s, key);
    float base[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float highest = top[h];
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) highest = fmaxf(highest, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
      highest = group_max<4>(highest);
      // Both products are rounded, not fused into the subtraction: exactly 1 for the highest score.
      base[h] = highest == -INFINITY ? 0.f : __fmul_rn(highest, unit);  // -infinity: no key yet
      const float shrink = exp2_fast(__fmul_rn(top[h], unit) - base[h]);
      top[h] = highest;
      sum[h] *= shrink;
#pragma unroll
      for (int j = 0; j < DIMS / 8; ++j) {
        o[j][2 * h] *= shrink;
        o[j][2 * h + 1] *= shrink;
      }
    }
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i / 2] += s[j][i] = exp2_fast(fmaf(s[j][i], unit, -base[i / 2]));
#pragma unroll
    for (int j = 0; j < KEYS / 16; ++j) {
      const unsigned p[4] = {pack2<T>(s[2 * j][0], s[2 * j][1]), pack2<T>(s[2 * j][2], s[2 * j][3]),
                             pack2<T>(s[2 * j + 1][0], s[2 * j + 1][1]), pack2<T>(s[2 * j + 1][2], s[2 * j + 1][3])};
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        unsigned v[4];
        load_matrices_transposed(v, v_rows + 16 * j * PITCH + 16 * i);
        mma_m16n8k16<T>(o[2 * i], p, v[0], v[1]);
        mma_m16n8k16<T>(o[2 * i + 1], p, v[2], v[3]);
      }
    }
  }

  // Through shared memory, so that whole rows are written 16 bytes at a time. A row without keys is zero.
  __syncwarp();  // without a tile there was no barrier after the copies of Q
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = group_sum<4>(sum[h]);
    if (sinks && total > 0.f) {  // a sum beyond all floats is right, too: next to such a sink nothing counts
      const int head = kv_head * group + (first_row + warp_row + lane / 4 + 8 * h) % group;
      total += exp2_fast(LOG2E * sinks[head] - __fmul_rn(top[h], unit));
    }
    const float factor = total > 0.f ? v_scale / total : 0.f;
    T* const to = q_tile + (warp_row + lane / 4 + 8 * h) * PITCH + 2 * quad;
#pragma unroll
    for (int j = 0; j < DIMS / 8; ++j) store_as(to + 8 * j, pack2<T>(o[j][2 * h] * factor, o[j][2 * h + 1] * factor));
  }
  __syncwarp();
  for (int i = lane; i < 16 * (HEAD / 8); i += 32) {
    const int r = warp_row + i / (HEAD / 8), dim = i % (HEAD / 8) * 8, row = first_row + r;
    if (r >= rows) continue;
    T* to = out + (query_start + row / group) * out_stride + (kv_head * group + row % group) * HEAD + dim;
    store_as(to, load_as<uint4>(q_tile + r * PITCH + dim));
  }
}
