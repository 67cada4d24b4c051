// From a row of logits to a token, without a sort. vllm_lite/worker/sampling/sampler.py defines the hash, the noise and
// the filters. Hash and filters have the same bits, the noise differs by a few units in the last place.
//
// One block of 1024 threads per row, or several if there are few rows (see `best_part`); nothing depends on other rows,
// nor on the number of blocks per row. A filter's limit is found in histograms: first one of 2048 equal steps of
// distance (over which real logits spread well, so that atomic additions rarely collide), then, within the step found,
// on the bits of the distance, until one value is left. Counts and masses are integers, so that the order of the atomic
// additions cannot change a bit.
#pragma once
#include "last_block.cuh"

struct Draw {  // the same record as DRAW in vllm_lite/kernels/sampling.py
  uint64 seed;
  uint32 sample, position;
  float temperature;   // 0: greedy, and nothing else of the record counts
  int top_k;           // vocab: off
  float top_p;         // 1: off
  float max_distance;  // what min_p allows; infinity: off
};
static_assert(sizeof(Draw) == 32, "the record has no padding");

struct Picked {  // the same record as PICKED in vllm_lite/kernels/cuda/sampler.py
  int64 token;
  float best;   // the row's largest logit, NaN if one is NaN; where it is not finite the token means nothing
  float limit;  // the largest distance kept
};

constexpr int kThreads = 1024, kCoarse = 2048, kFine = 1024;
constexpr float kCoarseSteps = 64.f;  // per unit of distance; a power of two, so that no border of a bin is rounded.
                                      // The last bin takes the rest.
constexpr uint32 kEnd = 0x7f800001;   // bits above those of every distance: infinity's are the largest

template <int BINS>
struct Histogram {
  uint32 count[BINS], mass_low[BINS], mass_high[BINS];

  __device__ __forceinline__ void clear() {
    for (int i = threadIdx.x; i < BINS; i += kThreads) count[i] = mass_low[i] = mass_high[i] = 0;
  }
  // A 64-bit addition from two 32-bit ones: the thread that makes the lower half overflow carries.
  __device__ __forceinline__ void add(int bin, uint64 mass) {
    atomicAdd(&count[bin], 1u);
    if (mass == 0) return;
    const uint32 low = uint32(mass), before = atomicAdd(&mass_low[bin], low);
    const uint32 high = uint32(mass >> 32) + (uint32(before + low) < low);
    if (high) atomicAdd(&mass_high[bin], high);
  }
  // Adds the bins of another histogram; all threads must call it, after a barrier.
  __device__ __forceinline__ void add_all(const Histogram& other) {
    for (int i = threadIdx.x; i < BINS; i += kThreads) {
      if (other.count[i] == 0) continue;
      const uint32 low = other.mass_low[i], before = low ? atomicAdd(&mass_low[i], low) : 0;
      const uint32 high = other.mass_high[i] + (uint32(before + low) < low);
      atomicAdd(&count[i], other.count[i]);
      if (high) atomicAdd(&mass_high[i], high);
    }
  }
  // Copies the sums of other blocks, bypassing the multiprocessor's L1.
  __device__ __forceinline__ void copy(const volatile Histogram& from) {
    for (int i = threadIdx.x; i < BINS; i += kThreads) {
      count[i] = from.count[i];
      mass_low[i] = from.mass_low[i];
      mass_high[i] = from.mass_high[i];
    }
  }
  __device__ __forceinline__ uint64 mass(int bin) const { return uint64(mass_high[bin]) << 32 | mass_low[bin]; }
};

struct Tally {  // of some tokens
  uint64 count, mass;
};

struct SamplerShared {
  Histogram<kCoarse> coarse;
  Histogram<kFine> fine;
  uint64 scratch[32];
  float scores[32];
  int tokens[32];
  Tally below;
  int bin;
};
static_assert(sizeof(SamplerShared) <= 37632, "SHARED_BYTES in vllm_lite/kernels/cuda/sampler.py");

// ---- the noise

__device__ __forceinline__ uint32 rotl(uint32 x, int bits) {
  return x << bits | x >> (32 - bits);
}
__device__ __forceinline__ uint32 mix(uint32 state, uint32 key) {
  return rotl(state ^ (rotl(key * 0xcc9e2d51u, 15) * 0x1b873593u), 13) * 5 + 0xe6546b64u;
}
__device__ __forceinline__ uint32 finish(uint32 h) {
  h = (h ^ h >> 16) * 0x85ebca6bu;
  h = (h ^ h >> 13) * 0xc2b2ae35u;
  return h ^ h >> 16;
}
// The state before the token id is mixed in, the same for a whole row.
__device__ __forceinline__ uint32 row_state(uint64 seed, uint32 sample, uint32 position) {
  return mix(mix(mix(uint32(seed) ^ 0x9e3779b9u, uint32(seed >> 32)), sample), position);
}
__device__ __forceinline__ float gumbel_noise(uint32 hash) {
  const float v = (float(hash & 0x7fffffff) + 0.5f) * __uint_as_float(0x2fffffff);  // 0x1.fffffep-32
  return -logf(-log1pf(-v));
}

// ---- distance and mass: each operation rounded by itself

__device__ __forceinline__ float distance_of(float logit, float best, float temperature) {
  return fabsf(divide_exact(subtract_exact(best, logit), temperature));
}

__device__ __forceinline__ uint64 mass_of(float distance) {
  const float y = __fmul_rn(fminf(distance, 28.f), -1.44269504f), n = rintf(y), f = y - n;
  float e = 1.5403530e-4f;
  e = __fadd_rn(__fmul_rn(e, f), 1.3333558e-3f);
  e = __fadd_rn(__fmul_rn(e, f), 9.6181291e-3f);
  e = __fadd_rn(__fmul_rn(e, f), 5.5504109e-2f);
  e = __fadd_rn(__fmul_rn(e, f), 2.4022651e-1f);
  e = __fadd_rn(__fmul_rn(e, f), 6.9314718e-1f);
  e = __fadd_rn(__fmul_rn(e, f), 1.f);
  return uint64(e * __uint_as_float(uint32(int(n) + 40 + 127) << 23));  // e * 2^(n + 40), n >= -41
}

// ---- over a block; all of its threads must take part

struct Scanned {
  uint64 upto, total;  // the sum over the threads up to this one, itself included; over all
};

__device__ __forceinline__ Scanned block_scan(uint64 x, uint64* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const uint64 other = __shfl_up_sync(~0u, x, i);
    if (lane >= i) x += other;
  }
  if (lane == 31) scratch[warp] = x;
  __syncthreads();
  Scanned scanned = {x, 0};
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) scanned.upto += scratch[w];
    scanned.total += scratch[w];
  }
  __syncthreads();
  return scanned;
}

struct Best {
  float score;
  int token;
};

// The larger score; of equal ones the smaller token. No score is NaN.
__device__ __forceinline__ Best better(Best a, Best b) {
  return b.score > a.score || (b.score == a.score && b.token < a.token) ? b : a;
}

__device__ __forceinline__ Best block_best(Best best, SamplerShared* shared) {
#pragma unroll
  for (int i = 16; i; i /= 2) {
    const float score = __shfl_xor_sync(~0u, best.score, i);
    const int token = __shfl_xor_sync(~0u, best.token, i);
    best = better(best, Best{score, token});
  }
  if (threadIdx.x % 32 == 0) {
    shared->scores[threadIdx.x / 32] = best.score;
    shared->tokens[threadIdx.x / 32] = best.token;
  }
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) best = better(best, Best{shared->scores[w], shared->tokens[w]});
  __syncthreads();
  return best;
}

// Calls visit(logit, token) for this thread's tokens of [begin, end), in ascending order.
template <int N, class Visit>
__device__ __forceinline__ void for_range(const float* logits, int begin, int end, Visit visit) {
  for (int i = begin + threadIdx.x * N; i < end; i += kThreads * N) {
    const auto values = load_as<Vec<float, N>>(logits + i);
#pragma unroll
    for (int j = 0; j < N; ++j) visit(values.at[j], i + j);
  }
}

template <int N, class Visit>
__device__ __forceinline__ void for_tokens(const float* logits, int vocab, Visit visit) {
  for_range<N>(logits, 0, vocab, visit);
}

// ---- the search for a limit

struct Row {
  const float* logits;
  int vocab;
  float best, temperature;
  bool with_mass;  // else masses are not needed and taken as 0
};

// Sets shared->bin to the first bin at which the running count (or mass) reaches `wanted`, which some bin does, and
// shared->below to the sum before it. `wanted` is at least 1.
template <int BINS>
__device__ __forceinline__ void find_bin(const Histogram<BINS>& histogram, bool by_mass, uint64 wanted,
                                         SamplerShared* shared) {
  constexpr int own = BINS / kThreads;
  const int first = threadIdx.x * own;
  Tally mine = {0, 0};
  for (int b = first; b < first + own; ++b) {
    mine.count += histogram.count[b];
    mine.mass += histogram.mass(b);
  }
  const uint64 counts = block_scan(mine.count, shared->scratch).upto,
               masses = block_scan(mine.mass, shared->scratch).upto;
  const uint64 upto = by_mass ? masses : counts, before = upto - (by_mass ? mine.mass : mine.count);
  if (before < wanted && wanted <= upto) {
    Tally below = {counts - mine.count, masses - mine.mass};
    int b = first;
    for (; (by_mass ? below.mass + histogram.mass(b) : below.count + histogram.count[b]) < wanted; ++b) {
      below.count += histogram.count[b];
      below.mass += histogram.mass(b);
    }
    shared->bin = b;
    shared->below = below;
  }
  __syncthreads();
}

struct Limit {
  uint32 bits;  // of the distance
  Tally below;  // of the tokens with a smaller one
};

// The smallest distance up to which there are `wanted` tokens (or mass). `coarse` is filled.
template <int N>
__device__ __forceinline__ Limit find_limit(const Row& row, bool by_mass, uint64 wanted, SamplerShared* shared) {
  find_bin(shared->coarse, by_mass, wanted, shared);
  Limit limit = {__float_as_uint(shared->bin / kCoarseSteps), shared->below};
  uint32 end = shared->bin == kCoarse - 1 ? kEnd : __float_as_uint((shared->bin + 1) / kCoarseSteps);
  for (int shift = 31; shift > 0;) {  // the distance's bits lie in [limit.bits, end)
    for (shift = 0; (end - limit.bits - 1) >> shift >= kFine;) ++shift;
    shared->fine.clear();
    __syncthreads();
    for_tokens<N>(row.logits, row.vocab, [&](float logit, int) {
      const float distance = distance_of(logit, row.best, row.temperature);
      const uint32 bits = __float_as_uint(distance);
      if (limit.bits <= bits && bits < end)
        shared->fine.add((bits - limit.bits) >> shift, row.with_mass ? mass_of(distance) : 0);
    });
    __syncthreads();
    find_bin(shared->fine, by_mass, wanted - (by_mass ? limit.below.mass : limit.below.count), shared);
    limit.below.count += shared->below.count;
    limit.below.mass += shared->below.mass;
    limit.bits += uint32(shared->bin) << shift;
    end = min(end, limit.bits + (1u << shift));
  }
  return limit;
}

__device__ __forceinline__ bool is_filtered(const Row& row, const Draw& draw) {
  return draw.top_k < row.vocab || row.with_mass;
}

// Fills shared->coarse with the tokens of [begin, end).
template <int N>
__device__ __forceinline__ void count_coarsely(const Row& row, int begin, int end, SamplerShared* shared) {
  shared->coarse.clear();
  __syncthreads();
  for_range<N>(row.logits, begin, end, [&](float logit, int) {
    const float distance = distance_of(logit, row.best, row.temperature), step = distance * kCoarseSteps;
    shared->coarse.add(step < kCoarse - 1 ? int(step) : kCoarse - 1, row.with_mass ? mass_of(distance) : 0);
  });
  __syncthreads();
}

// The largest distance that top_k and top_p keep; at least one of them is on, and shared->coarse has all tokens.
template <int N>
__device__ __forceinline__ float filter(const Row& row, const Draw& draw, SamplerShared* shared) {
  const bool by_count = draw.top_k < row.vocab;
  float within = INFINITY;
  uint64 total = 0;
  if (by_count) {
    const Limit limit = find_limit<N>(row, false, draw.top_k, shared);
    within = __uint_as_float(limit.bits);
    total = limit.below.mass + (draw.top_k - limit.below.count) * mass_of(within);
  } else {
    for (int b = threadIdx.x; b < kCoarse; b += kThreads) total += shared->coarse.mass(b);
    total = block_scan(total, shared->scratch).total;
  }
  if (!row.with_mass) return within;
  const uint64 wanted = uint64(ceil(double(draw.top_p) * double(total)));
  return fminf(within, __uint_as_float(find_limit<N>(row, true, wanted > 1 ? wanted : 1, shared).bits));
}

// The largest logit among [begin, end), and whether one of them is NaN.
template <int N>
__device__ __forceinline__ Best find_best(const float* logits, int begin, int end, float* failed,
                                          SamplerShared* shared) {
  Best best = {-INFINITY, 0};
  *failed = 0.f;
  for_range<N>(logits, begin, end, [&](float logit, int token) {
    if (logit > best.score) best = {logit, token};
    if (logit != logit) *failed = 1.f;
  });
  best = block_best(best, shared);
  *failed = block_max(*failed, shared->scores);
  return best;
}

// The token in [begin, end) with the largest score; tokens further than `limit` have none.
template <int N>
__device__ __forceinline__ Best find_drawn(const Row& row, const Draw& draw, float limit, int begin, int end,
                                           SamplerShared* shared) {
  const uint32 state = row_state(draw.seed, draw.sample, draw.position);
  Best best = {-INFINITY, 0};
  for_range<N>(row.logits, begin, end, [&](float logit, int token) {
    const float distance = distance_of(logit, row.best, row.temperature);
    if (distance > limit) return;
    const float score = gumbel_noise(finish(mix(state, uint32(token)))) - distance;
    if (score > best.score) best = {score, token};
  });
  return block_best(best, shared);
}

__device__ __forceinline__ float best_or_nan(float best, float failed) {
  return failed == 0.f ? best : __uint_as_float(0x7fc00000);
}

// logits: float32 [num_rows, vocab], rows `stride` elements apart. Grid: num_rows. Block: 1024. Shared memory:
// sizeof(SamplerShared).
template <int N>
__global__ void __launch_bounds__(kThreads, 1)
    pick(const float* logits, int64 stride, int vocab, const Draw* draws, Picked* picked) {
  DYNAMIC_SHARED(SamplerShared, shared);
  const Draw draw = draws[blockIdx.x];
  const float* own = logits + blockIdx.x * stride;
  float failed, limit = INFINITY;
  Best best = find_best<N>(own, 0, vocab, &failed, shared);
  const Row row = {own, vocab, best_or_nan(best.score, failed), draw.temperature, draw.top_p < 1.f};
  if (fabsf(row.best) < INFINITY && draw.temperature > 0.f) {  // the same for all threads of the block
    if (is_filtered(row, draw)) {
      count_coarsely<N>(row, 0, vocab, shared);
      limit = filter<N>(row, draw, shared);
    }
    limit = fminf(limit, draw.max_distance);
    best = find_drawn<N>(row, draw, limit, 0, vocab, shared);
  }
  if (threadIdx.x == 0) picked[blockIdx.x] = {best.token, row.best, limit};
}

// ---- the same in parts: three launches, in each of which several blocks share a row
//
// Few rows leave most of a GPU idle, and one multiprocessor takes longer for a large vocabulary than the model's last
// layer. `best_part` finds the largest logits, and finishes greedy rows; `coarse_part`, if some row is filtered, fills
// the histogram, and its last block finds the limit; `draw_part` draws. The last block of a row merges the parts'
// results. All of it is maxima and integer sums: the bits are those of `pick`.

constexpr int kMaxParts = 16;

struct PartBest {
  float score;
  int token;
  float failed;
  int unused;
};

struct RowParts {  // of one row, zero before the first launch
  int arrived[3];
  float limit;
  PartBest best[kMaxParts], drawn[kMaxParts];
  Histogram<kCoarse> coarse;
};
static_assert(sizeof(RowParts) == 25104, "ROW_BYTES in vllm_lite/kernels/cuda/sampler.py");

struct Part {
  int begin, end;  // its tokens
};

template <int N>
__device__ __forceinline__ Part part_of(int vocab) {
  const int size = round_up(ceil_div(vocab, int(gridDim.y)), N);
  const int begin = min(vocab, int(blockIdx.y) * size);
  return {begin, min(vocab, begin + size)};
}

// The best of all parts, read without the multiprocessor's L1.
__device__ __forceinline__ Best best_of_parts(const volatile PartBest* parts, float* failed) {
  Best best = {-INFINITY, 0};
  *failed = 0.f;
  for (unsigned p = 0; p < gridDim.y; ++p) {
    best = better(best, Best{parts[p].score, parts[p].token});
    *failed = fmaxf(*failed, parts[p].failed);
  }
  return best;
}

__device__ __forceinline__ Row row_of_parts(const float* logits, int64 stride, int vocab, const Draw& draw,
                                            const RowParts* parts) {
  float failed;
  const Best best = best_of_parts(parts->best, &failed);
  const float* own = logits + blockIdx.x * stride;
  return {own, vocab, best_or_nan(best.score, failed), draw.temperature, draw.top_p < 1.f};
}

// Grid of all three: (num_rows, parts), parts up to kMaxParts. Block and shared memory as `pick`.
template <int N>
__global__ void __launch_bounds__(kThreads, 1)
    best_part(const float* logits, int64 stride, int vocab, const Draw* draws, RowParts* rows, Picked* picked) {
  DYNAMIC_SHARED(SamplerShared, shared);
  RowParts* own = rows + blockIdx.x;
  const Part part = part_of<N>(vocab);
  float failed;
  Best best = find_best<N>(logits + blockIdx.x * stride, part.begin, part.end, &failed, shared);
  if (threadIdx.x == 0) own->best[blockIdx.y] = {best.score, best.token, failed, 0};
  if (!comes_last(&own->arrived[0], gridDim.y, &shared->bin) || threadIdx.x != 0) return;
  best = best_of_parts(own->best, &failed);
  picked[blockIdx.x] = {best.token, best_or_nan(best.score, failed), INFINITY};  // a random row's is written later
}

template <int N>
__global__ void __launch_bounds__(kThreads, 1)
    coarse_part(const float* logits, int64 stride, int vocab, const Draw* draws, RowParts* rows) {
  DYNAMIC_SHARED(SamplerShared, shared);
  RowParts* own = rows + blockIdx.x;
  const Draw draw = draws[blockIdx.x];
  const Row row = row_of_parts(logits, stride, vocab, draw, own);
  if (fabsf(row.best) < INFINITY && draw.temperature > 0.f && is_filtered(row, draw)) {  // the same for all blocks
    const Part part = part_of<N>(vocab);
    count_coarsely<N>(row, part.begin, part.end, shared);
    own->coarse.add_all(shared->coarse);
    if (comes_last(&own->arrived[1], gridDim.y, &shared->bin)) {
      shared->coarse.copy(own->coarse);
      __syncthreads();
      const float limit = filter<N>(row, draw, shared);
      if (threadIdx.x == 0) own->limit = limit;
    }
  }
}

template <int N>
__global__ void __launch_bounds__(kThreads, 1)
    draw_part(const float* logits, int64 stride, int vocab, const Draw* draws, RowParts* rows, Picked* picked) {
  DYNAMIC_SHARED(SamplerShared, shared);
  RowParts* own = rows + blockIdx.x;
  const Draw draw = draws[blockIdx.x];
  const Row row = row_of_parts(logits, stride, vocab, draw, own);
  if (fabsf(row.best) < INFINITY && draw.temperature > 0.f) {
    const float limit = fminf(is_filtered(row, draw) ? own->limit : INFINITY, draw.max_distance);
    const Part part = part_of<N>(vocab);
    Best best = find_drawn<N>(row, draw, limit, part.begin, part.end, shared);
    if (threadIdx.x == 0) own->drawn[blockIdx.y] = {best.score, best.token, 0.f, 0};
    if (comes_last(&own->arrived[2], gridDim.y, &shared->bin) && threadIdx.x == 0) {
      float failed;
      best = best_of_parts(own->drawn, &failed);
      picked[blockIdx.x] = {best.token, row.best, limit};
    }
  }
}

// For tests: hash and noise of the tokens of one row; mass of some distances.
__global__ void noise_row(uint64 seed, uint32 sample, uint32 position, int vocab, uint32* hashes, float* noise) {
  const int token = blockIdx.x * blockDim.x + threadIdx.x;
  if (token >= vocab) return;
  hashes[token] = finish(mix(row_state(seed, sample, position), uint32(token)));
  noise[token] = gumbel_noise(hashes[token]);
}

__global__ void mass_row(const float* distances, int count, int64* masses) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) masses[i] = int64(mass_of(distances[i]));
}
