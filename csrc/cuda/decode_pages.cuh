// Loads of the decode kernel: tiles of K and V from the paged cache into the registers of mma.m16n8k16, for any layout
// whose rows are contiguous. decode_attention.cuh explains the layout over lanes.
#pragma once
#include "merge_splits.cuh"

template <bool FIRST, class A, class B>
struct Either {
  using type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using type = B;
};

template <class T, class Cache, int HEAD>
struct DecodeShape {
  static_assert(HEAD % 8 == 0 && HEAD <= 256);
  static_assert(kSame<Cache, T> || kIsFp8<Cache>);
  using Operand = typename Either<kIsFp8<Cache>, __half, T>::type;  // what the tensor cores multiply
  // Elements of a lane's access: 16 bytes, or 8 if 16 bytes of float8 would leave lanes idle or be misaligned.
  static constexpr int K_VEC = kIsFp8<Cache> && HEAD % 64 == 0 ? 16 : 8;
  static constexpr int V_VEC = kIsFp8<Cache> && HEAD % 128 == 0 ? 16 : 8;
  static constexpr int K_WORDS = K_VEC * sizeof(Cache) / 4, V_WORDS = V_VEC * sizeof(Cache) / 4;
  static constexpr int CHUNKS = ceil_div(HEAD, 4 * K_VEC);  // accesses of a lane to one token of K
  static constexpr int SETS = ceil_div(HEAD, 8 * V_VEC);    // accesses of a lane to one token of V
  static constexpr int STEPS = K_VEC / 4;                   // matrix instructions for one chunk, 16 dims each
  static constexpr int PAIRS = V_VEC / 2;                   // matrix instructions for one set, 16 dims each
  // Whether a lane's part of Q is in shared memory between tiles: with K, V and the output of large heads there are not
  // enough registers.
  static constexpr bool Q_SHARED = HEAD > 192 && !kIsFp8<Cache>;
  static constexpr int PITCH = HEAD + 2;  // floats of a head in shared memory: out, max, sum
};

template <int WORDS>
__device__ __forceinline__ void load_words(unsigned (&words)[WORDS], const void* p, bool there) {
  static_assert(WORDS == 2 || WORDS == 4);
  if constexpr (WORDS == 4) {
    const uint4 raw = there ? load_stream(p) : make_uint4(0, 0, 0, 0);
    words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
  } else {
    const uint2 raw = there ? load_as<uint2>(p) : make_uint2(0, 0);
    words[0] = raw.x, words[1] = raw.y;
  }
}

// Operand pair `i` of consecutive elements (2 i, 2 i + 1) in a lane's words.
template <class M, class Cache, int WORDS>
__device__ __forceinline__ unsigned pair_of(const unsigned (&words)[WORDS], int i) {
  if constexpr (kIsFp8<Cache>)
    return widen2<M, Cache>(words[i / 2] >> (16 * (i & 1)));
  else
    return words[i];
}

// Operand pair of element 2 i + `odd` of two tokens.
template <class M, class Cache, int WORDS>
__device__ __forceinline__ unsigned across(const unsigned (&a)[WORDS], const unsigned (&b)[WORDS], int i, int odd) {
  if constexpr (kIsFp8<Cache>) {
    const unsigned both = __byte_perm(a[i / 2], b[i / 2], i & 1 ? 0x7362 : 0x5140);  // elements 2 i and 2 i + 1
    return widen2<M, Cache>(both >> (16 * odd));
  } else {
    return __byte_perm(a[i], b[i], odd ? 0x7632 : 0x5410);
  }
}

// The pages of one sequence in the cache of one KV head, and a lane's loads of a tile.
template <class T, class Cache, int HEAD, bool SMALL_BLOCKS>
struct Pages {
  using S = DecodeShape<T, Cache, HEAD>;
  using K = unsigned[2][S::CHUNKS][S::K_WORDS];  // of the tokens row, row + 8
  using V = unsigned[4][S::SETS][S::V_WORDS];    // of the tokens 2 quad, 2 quad + 1, 2 quad + 8, 2 quad + 9

  const int* table;     // of the sequence
  const Cache* keys;    // of the KV head, in block 0
  const Cache* values;  // alike
  int64 block_stride;
  int token_stride, block_shift;  // a block has 1 << block_shift tokens
  Cut cut;

  // The block of a tile that may be past the end. Blocks smaller than a tile are looked up token by token instead.
  __device__ __forceinline__ int find(int tile) const {
    return SMALL_BLOCKS ? 0 : table[min(tile, cut.past - 1) * kTile >> block_shift];
  }
  __device__ __forceinline__ int64 offset_of(int tile, int block, int token) const {
    const int in_block = (1 << block_shift) - 1;
    if constexpr (SMALL_BLOCKS) {
      token = max(cut.begin, min(cut.end - 1, tile * kTile + token));  // no other table entry may be used
      return table[token >> block_shift] * block_stride + int64(token & in_block) * token_stride;
    } else {
      return block * block_stride + int64((tile * kTile & in_block) + token) * token_stride;
    }
  }
  __device__ __forceinline__ void load_k(K& k, int tile, int block) const {
    const int row = threadIdx.x % 32 / 4, lane_dim = threadIdx.x % 4 * S::K_VEC;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Cache* from = keys + offset_of(tile, block, row + 8 * h) + lane_dim;
#pragma unroll
      for (int c = 0; c < S::CHUNKS; ++c)
        load_words(k[h][c], from + 4 * S::K_VEC * c, 4 * S::K_VEC * c + lane_dim < HEAD);
    }
  }
  __device__ __forceinline__ void load_v(V& v, int tile, int block) const {
    const int quad = threadIdx.x % 4, lane_dim = threadIdx.x % 32 / 4 * S::V_VEC;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const Cache* from = values + offset_of(tile, block, 2 * quad + t % 2 + t / 2 * 8) + lane_dim;
#pragma unroll
      for (int s = 0; s < S::SETS; ++s)
        load_words(v[t][s], from + 8 * S::V_VEC * s, 8 * S::V_VEC * s + lane_dim < HEAD);
    }
  }
  // Prefetches a tile of `keys` or `values` to L2, a line of 128 bytes per lane.
  __device__ __forceinline__ void prefetch(const Cache* base, int tile, int block) const {
    constexpr int ROW_BYTES = HEAD * sizeof(Cache), LINES = ceil_div(ROW_BYTES, 128);
#pragma unroll
    for (int i = 0; i < LINES * kTile; i += 32) {
      const int at = i + threadIdx.x % 32;
      if (LINES * kTile % 32 == 0 || at < LINES * kTile)
        prefetch_l2(reinterpret_cast<const char*>(base + offset_of(tile, block, at / LINES)) + at % LINES * 128);
    }
  }
  __device__ __forceinline__ bool partly_seen(int tile) const {
    return tile * kTile < cut.begin || (tile + 1) * kTile > cut.end;
  }
  __device__ __forceinline__ bool sees(int token) const { return token >= cut.begin && token < cut.end; }
  // Tokens that are not seen may have any value, also NaN, and 0 * NaN is not 0.
  __device__ __forceinline__ void clear_unseen(V& v, int tile) const {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if (sees(tile * kTile + 2 * quad + t % 2 + t / 2 * 8)) continue;
#pragma unroll
      for (int s = 0; s < S::SETS; ++s)
#pragma unroll
        for (int w = 0; w < S::V_WORDS; ++w) v[t][s][w] = 0;
    }
  }
};
