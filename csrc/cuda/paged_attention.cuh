// Paged attention, one query token per sequence: the simplest of the decode kernels.
//
// The keys and values of a sequence are in blocks of BLOCK_SIZE tokens, scattered over one cache; its row of the block
// table lists the physical blocks. One thread block computes one output vector, for one query head of one sequence, in
// three passes over the tokens:
//
//   1. logits   warp w takes blocks w, w + 4, ...; within a block a group of lanes shares a token, each lane reading a
//               part of its key. The logits stay in shared memory; the largest of them is the anchor of the softmax.
//   2. softmax  exp(logit - largest) in place, and their sum.
//   3. values   warp w takes the same blocks again; a lane reads neighbouring tokens of one dimension (that is why V is
//               stored transposed) and weighs them with their probabilities. The warps' vectors are added at the end.
//
// v1 does this for the whole sequence in one thread block. With few heads and sequences but many tokens, most of a GPU
// would be idle: v2 divides the sequence into partitions of 512 tokens, one thread block each, and a second kernel
// merges their results with the weights of one softmax over everything. (Kwon et al. 2023, "Efficient Memory Management
// for Large Language Model Serving with PagedAttention"; partitions: Flash-Decoding, Dao et al. 2023.)
//
// Query heads that share a key-value head each read it separately. The engine's own decode kernel reads it once for all
// of them: faster, but more complex.
#pragma once
#include "common.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerSm = 4;        // at least, so at most 128 registers a thread
constexpr int kPartitionTokens = 512;  // of v2; a multiple of every BLOCK_SIZE
constexpr float kLog2E = 1.4426950408889634f;

// Parameters of both versions. x = 16 / sizeof(cache_t), the elements of one 16-byte read.
template <class scalar_t, class cache_t>
struct Inputs {
  const scalar_t* q;        // [num_seqs, num_heads, head_size]
  int64 q_stride;           // elements from one sequence to the next
  const cache_t* keys;      // [num_blocks, num_kv_heads, head_size / x, block_size, x]
  const cache_t* values;    // [num_blocks, num_kv_heads, head_size, block_size]
  int64 kv_block_stride;    // elements from one block to the next, in both; a cache may exceed 2^31 elements
  int64 kv_head_stride;     // from one head to the next
  int num_kv_heads;         // num_heads / num_kv_heads query heads share one
  const int* block_tables;  // [num_seqs, max_blocks_per_seq]: physical block numbers
  int max_blocks_per_seq;
  const int* seq_lens;        // [num_seqs], including the query's own token; 0 for padding
  const float* alibi_slopes;  // [num_heads], or null
  float scale;                // of the logits: 1 / sqrt(head_size)
  float k_scale, v_scale;     // factors of fp8 codes; 1 for other caches
  int window;                 // number of last tokens that are seen, including the query's own; 0: all
  float soft_cap;             // 0: none
  int tp_rank;                // of this shard of the heads, for the block-sparse pattern
  int sparse_local_blocks;
  int sparse_vert_stride;   // 0 or 1: no pattern
  int sparse_block_tokens;  // tokens of a sparse block: a multiple of BLOCK_SIZE
  int sparse_head_step;     // shifts the pattern from query head to query head; below 0: from kv head to kv head
};

// The cache of this block's sequence and head.
template <class cache_t>
struct HeadCache {
  const cache_t *keys, *values;  // of this head, in physical block 0
  int64 block_stride;
  const int* block_table;

  __device__ int64 offset(int block) const { return block_table[block] * block_stride; }  // int64: see Inputs
};

// A fixed pattern per head: the query sees the last `local_blocks` sparse blocks and every `vert_stride`th one.
struct BlockSparse {
  int local_blocks;
  int vert_stride;
  int block_tokens;
  int head_offset;

  __device__ bool skips(int token, int seq_len) const {
    if (vert_stride <= 1) return false;
    const int block = token / block_tokens, query_block = (seq_len - 1) / block_tokens;
    return block <= query_block - local_blocks && (block + head_offset) % vert_stride != 0;
  }
};

// The term of a head's attention sink, a learned logit without a value, in the sum of exp(logit - largest). It is added
// once per row, after all its tokens. A sum of infinity is correct, too: all weights are then 0.
__device__ inline float weight_of_sink(const float* sinks, float largest) {
  return sinks ? exp2_fast((sinks[blockIdx.x] - largest) * kLog2E) : 0.f;
}

// From a dot product to a logit: scale, soft cap, ALiBi, in this order.
struct Scoring {
  float scale;        // 1 / sqrt(head_size); for an fp8 cache times the scale of the keys
  float soft_cap;     // c * tanh(logit / c); 0: none
  float alibi_slope;  // of this head: + slope * (token - last token); 0: none

  __device__ float logit(float dot, int token, int seq_len) const {
    float x = dot * scale;
    if (soft_cap > 0.f) x = soft_cap * tanhf(x / soft_cap);
    return x + alibi_slope * float(token - seq_len + 1);
  }
};

// The tokens [first, last) of this thread block, and their blocks. `base` is the first token of the first block, from
// which logits in shared memory are indexed.
struct Range {
  int first, last, base, first_block, last_block;
};

template <int BLOCK_SIZE>
__device__ Range range_of(int seq_len, int window, int partition_first, int partition_tokens) {
  Range r;
  r.first = max(partition_first, window > 0 ? seq_len - window : 0);
  r.last = partition_tokens < seq_len - partition_first ? partition_first + partition_tokens : seq_len;
  r.first = min(r.first, r.last);  // a partition before the window has no tokens
  r.first_block = r.first / BLOCK_SIZE;
  r.last_block = r.first < r.last ? ceil_div(r.last, BLOCK_SIZE) : r.first_block;
  r.base = r.first_block * BLOCK_SIZE;
  return r;
}

// Pass 1. Fills logits[0, last_block * BLOCK_SIZE - base); -infinity for tokens that are not seen. Returns the largest
// one of this thread.
template <class cache_t, int HEAD_SIZE, int BLOCK_SIZE>
__device__ float compute_logits(float* logits, const float* q, const HeadCache<cache_t>& cache, const Range& range,
                                const Scoring& scoring, const BlockSparse& sparse, int seq_len) {
  constexpr int kX = 16 / sizeof(cache_t);
  constexpr int kGroup = BLOCK_SIZE < 32 ? 32 / BLOCK_SIZE : 1;  // lanes that share a token
  constexpr int kTokensAtOnce = 32 / kGroup;                     // of a warp: min(BLOCK_SIZE, 32)
  constexpr int kPart = kX / kGroup;                             // elements of each x that one lane reads
  static_assert(HEAD_SIZE % kX == 0 && kX % kGroup == 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / kGroup, part = lane % kGroup * kPart;

  float largest = -INFINITY;
  for (int block = range.first_block + warp; block < range.last_block; block += kWarps) {
    const bool skipped = sparse.skips(block * BLOCK_SIZE, seq_len);
    const cache_t* keys = cache.keys + cache.offset(block);
#pragma unroll 1
    for (int first = 0; first < BLOCK_SIZE; first += kTokensAtOnce) {
      const int slot = first + group, token = block * BLOCK_SIZE + slot;
      float dot = 0.f;
      if (!skipped) {
#pragma unroll 8
        for (int d = 0; d < HEAD_SIZE / kX; ++d) {
          const auto k = load_as<Vec<cache_t, kPart>>(keys + (d * BLOCK_SIZE + slot) * kX + part);
#pragma unroll
          for (int i = 0; i < kPart; ++i) dot += q[d * kX + part + i] * to_float(k.at[i]);
        }
      }
      dot = group_sum<kGroup>(dot);
      // Slots outside the range may have any value, also NaN: it is dropped, not multiplied by 0.
      const bool live = !skipped && token >= range.first && token < range.last;
      const float logit = live ? scoring.logit(dot, token, seq_len) : -INFINITY;
      if (lane % kGroup == 0) logits[token - range.base] = logit;
      largest = fmaxf(largest, logit);
    }
  }
  return largest;
}

// Pass 3. Adds up probability * value over the blocks of each warp, into sums[kWarps, HEAD_SIZE]. `sums` may overlap
// the probabilities.
template <class cache_t, int HEAD_SIZE, int BLOCK_SIZE>
__device__ void add_values(float* sums, const float* probabilities, const HeadCache<cache_t>& cache, const Range& range,
                           const BlockSparse& sparse, int seq_len) {
  constexpr int kX = 16 / sizeof(cache_t);
  constexpr int kTokens = kX < BLOCK_SIZE ? kX : BLOCK_SIZE;  // that a lane reads at once
  constexpr int kReads = BLOCK_SIZE / kTokens;                // for the whole block, of one dimension
  constexpr int kLanes = kReads < 2 ? kReads : 2;             // that share a dimension: 32 bytes, one sector
  constexpr int kRowsAtOnce = 32 / kLanes;
  constexpr int kRows = (HEAD_SIZE + kRowsAtOnce - 1) / kRowsAtOnce;  // dimensions of one lane
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = lane / kLanes, share = lane % kLanes;

  float sum[kRows] = {};
  for (int block = range.first_block + warp; block < range.last_block; block += kWarps) {
    if (sparse.skips(block * BLOCK_SIZE, seq_len)) continue;
    const cache_t* values = cache.values + cache.offset(block);
#pragma unroll 1
    for (int read = share; read < kReads; read += kLanes) {
      const int slot = read * kTokens, token = block * BLOCK_SIZE + slot;  // the first of kTokens
      float p[kTokens];
#pragma unroll
      for (int i = 0; i < kTokens; ++i) p[i] = probabilities[token - range.base + i];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int d = row + r * kRowsAtOnce;
        if (d >= HEAD_SIZE) break;
        const auto v = load_as<Vec<cache_t, kTokens>>(values + d * BLOCK_SIZE + slot);
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
          sum[r] += p[i] != 0.f ? p[i] * to_float(v.at[i]) : 0.f;  // an unused slot may hold NaN, and 0 * NaN is NaN
        }
      }
    }
  }
  __syncthreads();  // every warp has read its probabilities
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int d = row + r * kRowsAtOnce;
    const float total = group_sum<kLanes>(sum[r]);
    if (share == 0 && d < HEAD_SIZE) sums[warp * HEAD_SIZE + d] = total;
  }
  __syncthreads();
}

struct Softmax {
  float largest;  // logit; -infinity if no token takes part
  float sum;      // of exp(logit - largest)
};

// Pass 2. Replaces logits[0, count) by exp(logit - largest); `largest` is each thread's own.
__device__ inline Softmax exponentiate(float* logits, int count, float largest, float* scratch) {
  Softmax softmax;
  softmax.largest = block_max(largest, scratch);  // its barrier also ends pass 1
  float sum = 0.f;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const float p = logits[i] == -INFINITY ? 0.f : exp2_fast((logits[i] - softmax.largest) * kLog2E);
    logits[i] = p;
    sum += p;
  }
  softmax.sum = block_sum(sum, scratch);
  return softmax;
}

// The three passes for head blockIdx.x of sequence blockIdx.y over the tokens from `partition_first` on, with `sinks`
// or null. Each dimension of the result goes to store(d, value) from one thread. Dynamic shared memory, floats: q
// [HEAD_SIZE], scratch [kWarps], then max(tokens in the blocks of the range, kWarps * HEAD_SIZE) for the logits and,
// after pass 3, the warps' sums.
template <class scalar_t, class cache_t, int HEAD_SIZE, int BLOCK_SIZE, class Store>
__device__ Softmax attend(const Inputs<scalar_t, cache_t>& in, const float* sinks, int partition_first,
                          int partition_tokens, Store store) {
  const int head = blockIdx.x, seq = blockIdx.y, num_heads = gridDim.x;
  const int kv_head = head / (num_heads / in.num_kv_heads);
  const int seq_len = in.seq_lens[seq];
  const Range range = range_of<BLOCK_SIZE>(seq_len, in.window, partition_first, partition_tokens);
  const HeadCache<cache_t> cache = {in.keys + kv_head * in.kv_head_stride, in.values + kv_head * in.kv_head_stride,
                                    in.kv_block_stride, in.block_tables + int64(seq) * in.max_blocks_per_seq};
  const Scoring scoring = {in.scale * in.k_scale, in.soft_cap, in.alibi_slopes ? in.alibi_slopes[head] : 0.f};
  const int step = in.sparse_head_step;
  const BlockSparse sparse = {
      in.sparse_local_blocks, in.sparse_vert_stride, in.sparse_block_tokens,
      1 + (step >= 0 ? (in.tp_rank * num_heads + head) * step : (in.tp_rank * in.num_kv_heads + kv_head) * -step)};

  DYNAMIC_SHARED(float, shared);
  float *wide_q = shared, *scratch = wide_q + HEAD_SIZE, *logits = scratch + kWarps, *sums = logits;

  const scalar_t* q = in.q + seq * in.q_stride + head * HEAD_SIZE;
  for (int d = threadIdx.x; d < HEAD_SIZE; d += kThreads) wide_q[d] = to_float(q[d]);
  __syncthreads();
  const float largest =
      compute_logits<cache_t, HEAD_SIZE, BLOCK_SIZE>(logits, wide_q, cache, range, scoring, sparse, seq_len);
  const Softmax softmax = exponentiate(logits, range.last_block * BLOCK_SIZE - range.base, largest, scratch);
  add_values<cache_t, HEAD_SIZE, BLOCK_SIZE>(sums, logits, cache, range, sparse, seq_len);

  const float all = softmax.sum + weight_of_sink(sinks, softmax.largest);
  const float factor = softmax.sum > 0.f ? in.v_scale / all : 0.f;  // no token at all: zeros
  for (int d = threadIdx.x; d < HEAD_SIZE; d += kThreads) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += sums[w * HEAD_SIZE + d];
    store(d, total * factor);
  }
  return softmax;
}

// Grid (num_heads, num_seqs, 1), kThreads threads. The parameters from q on are those of Inputs.
template <class scalar_t, class cache_t, int HEAD_SIZE, int BLOCK_SIZE>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    paged_attention_v1(scalar_t* out,       // [num_seqs, num_heads, head_size]
                       const float* sinks,  // [num_heads] or null
                       const scalar_t* q, int64 q_stride, const cache_t* keys, const cache_t* values,
                       int64 kv_block_stride, int64 kv_head_stride, int num_kv_heads, const int* block_tables,
                       int max_blocks_per_seq, const int* seq_lens, const float* alibi_slopes, float scale,
                       float k_scale, float v_scale, int window, float soft_cap, int tp_rank, int sparse_local_blocks,
                       int sparse_vert_stride, int sparse_block_tokens, int sparse_head_step) {
  // clang-format off
  const Inputs<scalar_t, cache_t> in = {
      q, q_stride, keys, values, kv_block_stride, kv_head_stride, num_kv_heads, block_tables, max_blocks_per_seq,
      seq_lens, alibi_slopes, scale, k_scale, v_scale, window, soft_cap, tp_rank, sparse_local_blocks,
      sparse_vert_stride, sparse_block_tokens, sparse_head_step};
  // clang-format on
  const int64 row = int64(blockIdx.y) * gridDim.x + blockIdx.x;
  attend<scalar_t, cache_t, HEAD_SIZE, BLOCK_SIZE>(
      in, sinks, 0, INT_MAX, [&](int d, float value) { out[row * HEAD_SIZE + d] = from_float<scalar_t>(value); });
}

// Grid (num_heads, num_seqs, max_partitions), kThreads threads. Partitions after the end of a sequence write nothing.
template <class scalar_t, class cache_t, int HEAD_SIZE, int BLOCK_SIZE>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    paged_attention_v2(float* exp_sums,    // [num_seqs, num_heads, max_partitions]
                       float* max_logits,  // the same
                       float* tmp_out,     // [num_seqs, num_heads, max_partitions, head_size]
                       const scalar_t* q, int64 q_stride, const cache_t* keys, const cache_t* values,
                       int64 kv_block_stride, int64 kv_head_stride, int num_kv_heads, const int* block_tables,
                       int max_blocks_per_seq, const int* seq_lens, const float* alibi_slopes, float scale,
                       float k_scale, float v_scale, int window, float soft_cap, int tp_rank, int sparse_local_blocks,
                       int sparse_vert_stride, int sparse_block_tokens, int sparse_head_step) {
  static_assert(kPartitionTokens % BLOCK_SIZE == 0);
  // clang-format off
  const Inputs<scalar_t, cache_t> in = {
      q, q_stride, keys, values, kv_block_stride, kv_head_stride, num_kv_heads, block_tables, max_blocks_per_seq,
      seq_lens, alibi_slopes, scale, k_scale, v_scale, window, soft_cap, tp_rank, sparse_local_blocks,
      sparse_vert_stride, sparse_block_tokens, sparse_head_step};
  // clang-format on
  const int first = blockIdx.z * kPartitionTokens;
  if (first >= seq_lens[blockIdx.y]) return;  // the whole block leaves
  const int64 row = (int64(blockIdx.y) * gridDim.x + blockIdx.x) * gridDim.z + blockIdx.z;
  const Softmax softmax = attend<scalar_t, cache_t, HEAD_SIZE, BLOCK_SIZE>(
      in, nullptr, first, kPartitionTokens, [&](int d, float value) { tmp_out[row * HEAD_SIZE + d] = value; });
  if (threadIdx.x == 0) {
    exp_sums[row] = softmax.sum;
    max_logits[row] = softmax.largest;
  }
}

// Merges the partitions of v2, weighted by their shares of the sum over the whole sequence. Grid (num_heads, num_seqs,
// 1), kThreads threads. Dynamic shared memory: max_partitions + kWarps floats.
template <class scalar_t, int HEAD_SIZE>
__global__ void __launch_bounds__(kThreads)
    paged_attention_v2_reduce(scalar_t* out,            // [num_seqs, num_heads, head_size]
                              const float* exp_sums,    // [num_seqs, num_heads, max_partitions]
                              const float* max_logits,  // the same
                              const float* tmp_out,     // [num_seqs, num_heads, max_partitions, head_size]
                              const float* sinks,       // [num_heads] or null
                              const int* seq_lens, int max_partitions) {
  DYNAMIC_SHARED(float, scratch);
  float* const weights = scratch + kWarps;
  const int64 row = int64(blockIdx.y) * gridDim.x + blockIdx.x, first = row * max_partitions;
  const int count = ceil_div(seq_lens[blockIdx.y], kPartitionTokens);

  float largest = -INFINITY;
  for (int i = threadIdx.x; i < count; i += kThreads) largest = fmaxf(largest, max_logits[first + i]);
  largest = block_max(largest, scratch);
  float sum = 0.f;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const float top = max_logits[first + i];  // -infinity: no token of this partition is seen
    const float weight = top == -INFINITY ? 0.f : exp_sums[first + i] * exp2_fast((top - largest) * kLog2E);
    weights[i] = weight;
    sum += weight;
  }
  sum = block_sum(sum, scratch);

  const float factor = sum > 0.f ? 1.f / (sum + weight_of_sink(sinks, largest)) : 0.f;
  for (int d = threadIdx.x; d < HEAD_SIZE; d += kThreads) {
    float total = 0.f;
    for (int i = 0; i < count; ++i) total += weights[i] * tmp_out[(first + i) * HEAD_SIZE + d];
    out[row * HEAD_SIZE + d] = from_float<scalar_t>(total * factor);
  }
}
