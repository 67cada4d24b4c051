// Parts that the attention kernels share: addresses of cached rows, and the online softmax.
#pragma once

#include "../attention.h"
#include "hadamard.h"

namespace VLLM_LITE_ISA {
namespace {

using vllm_lite::AttentionCall;
using vllm_lite::AttentionItem;
using vllm_lite::AttentionShape;
using vllm_lite::kMaxHeadSize;
using vllm_lite::kMaxRows;
using vllm_lite::kStreamRows;
using vllm_lite::NextUnit;
using vllm_lite::section_keys;

constexpr int kGroup = 16;          // tokens that are gathered together
constexpr int kKeys = 64;           // keys of one step of the softmax, which begins at a multiple of this
constexpr float kNothing = -1e30f;  // score of a masked key; finite, so that the difference of two is not NaN

VLLM_LITE_INLINE constexpr int least(int x, int y) {
  return x < y ? x : y;
}
VLLM_LITE_INLINE int round_up(int x, int unit) {
  return (x + unit - 1) / unit * unit;
}

VLLM_LITE_INLINE float largest_of(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(x));
#elif defined(__AVX2__)
  const __m256 whole = reinterpret_cast<__m256>(x);
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(whole), _mm256_extractf128_ps(whole, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
#else
  float top = x[0];
  for (int i = 1; i < kWidth; ++i) top = x[i] > top ? x[i] : top;
  return top;
#endif
}

// out[i] = the largest of rows[i], for i < count <= kWidth.
VLLM_LITE_INLINE Vec largest_of_each(Vec (&rows)[kWidth], int count) {
#if defined(__AVX512F__)
  if (count > 4) {  // merge halves of two rows into one vector, until there is one vector of all rows
    for (int i = count; i < kWidth; ++i) rows[i] = Vec{};
    __m512 x[16];
    constexpr int kSlots[] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};  // puts results in order
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) x[kSlots[i]] = reinterpret_cast<__m512>(rows[i]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      x[i] = _mm512_max_ps(_mm512_shuffle_f32x4(x[i], x[i + 8], 0x44), _mm512_shuffle_f32x4(x[i], x[i + 8], 0xee));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm512_max_ps(_mm512_shuffle_f32x4(x[i], x[i + 4], 0x88), _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      x[i] = _mm512_max_ps(_mm512_shuffle_ps(x[i], x[i + 2], 0x44), _mm512_shuffle_ps(x[i], x[i + 2], 0xee));
    }
    const __m512 all = _mm512_max_ps(_mm512_shuffle_ps(x[0], x[1], 0x88), _mm512_shuffle_ps(x[0], x[1], 0xdd));
    return reinterpret_cast<Vec>(all);
  }
#elif defined(__AVX2__)
  if (count > 2) {
    for (int i = count; i < kWidth; ++i) rows[i] = Vec{};
    __m256 x[8];
    constexpr int kSlots[] = {0, 2, 1, 3, 4, 6, 5, 7};
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) x[kSlots[i]] = reinterpret_cast<__m256>(rows[i]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm256_max_ps(_mm256_permute2f128_ps(x[i], x[i + 4], 0x20), _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      x[i] = _mm256_max_ps(_mm256_shuffle_ps(x[i], x[i + 2], 0x44), _mm256_shuffle_ps(x[i], x[i + 2], 0xee));
    }
    const __m256 all = _mm256_max_ps(_mm256_shuffle_ps(x[0], x[1], 0x88), _mm256_shuffle_ps(x[0], x[1], 0xdd));
    return reinterpret_cast<Vec>(all);
  }
#endif
  Vec out = {};
  for (int i = 0; i < count; ++i) out[i] = largest_of(rows[i]);
  return out;
}

VLLM_LITE_INLINE VecI lane_numbers() {
  VecI numbers;
  for (int i = 0; i < kWidth; ++i) numbers[i] = i;
  return numbers;
}

VLLM_LITE_INLINE int bytes_of(int dtype) {
  return dtype == kFloat32 ? 4 : dtype >= kFp8E4M3 ? 1 : 2;
}

// The cache of one KV head as one sequence sees it.
struct Cached {
  const char* head;
  const int32_t* table;
  int64_t block_stride, token_stride, value_offset;
  int block_size;
};

VLLM_LITE_INLINE Cached cached(const AttentionCall& call, const AttentionItem& item, int kv_head) {
  return {call.kv + kv_head * call.head_stride,
          call.table + item.sequence * call.table_stride,
          call.block_stride,
          call.token_stride,
          call.value_offset,
          call.shape->block_size};
}

// Addresses of the K at positions [first, first + kKeys). Positions before `begin` get the address of `begin`,
// positions from `end` on that of end - 1: their products are masked, but must not be read from memory outside of the
// sequence, which may hold NaN. first < end, begin < end.
VLLM_LITE_INLINE void find_keys(const char** rows, const Cached& cache, int first, int begin, int end) {
  const int count = least(end - first, kKeys), skipped = begin > first ? begin - first : 0;
  int n = skipped;
  while (n < count) {
    const int block = (first + n) / cache.block_size, offset = first + n - block * cache.block_size;
    const int run = least(cache.block_size - offset, count - n);
    const char* row = cache.head + cache.table[block] * cache.block_stride + offset * cache.token_stride;
    for (int i = 0; i < run; ++i) rows[n + i] = row + i * cache.token_stride;
    n += run;
  }
  for (; n < kKeys; ++n) rows[n] = rows[count - 1];
  for (n = 0; n < skipped; ++n) rows[n] = rows[skipped];
}

// Addresses of the K that are read after those at positions [.., end) of an item. False if they are unknown.
VLLM_LITE_INLINE bool find_next_keys(const char** rows, const AttentionCall& call, const AttentionItem& item,
                                     int kv_head, vllm_lite::NextUnit next, int end) {
  if (end < item.key_end) {
    find_keys(rows, cached(call, item, kv_head), end, item.key_begin, item.key_end);
    return true;
  }
  if (!next.item) return false;
  const AttentionItem& other = *next.item;
  find_keys(rows, cached(call, other, next.kv_head), other.key_begin / kKeys * kKeys, other.key_begin, other.key_end);
  return true;
}

// With tiles, that is on Intel's processors, into L2, which can have more outstanding line fills than L1. On AMD's a
// line that is in L2 alone takes a second place in the queue of L1, in which lines of memory wait.
VLLM_LITE_INLINE void fetch(const char* row) {
#if defined(VLLM_LITE_VECTORS)
  __builtin_prefetch(row, 0, 2);
#else
  __builtin_prefetch(row, 0, 3);
#endif
}

VLLM_LITE_INLINE void fetch_row(const char* row, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += 64) fetch(row + i);
}

// Token, position and query head of row i of an item: the token's row in the step, and the head among those that share
// the KV head.
struct Place {
  int query_row, position, head;
};
VLLM_LITE_INLINE Place place_of(const AttentionCall& call, const AttentionItem& item, int group, int i) {
  if (item.shared >= 0) {
    const vllm_lite::SharedToken& token = call.tokens[item.shared + i / group];
    return {token.query_row, token.position, i % group};
  }
  const int l = item.first + i, row = group == 1 ? l : l / group;
  return {item.query_row + row, item.position + row, l - row * group};
}

// State of the online softmax of an item's rows. Arrays are indexed by the row's number within the item.
struct Softmax {
  float factor;        // products times this are scores
  float per_score;     // Words::kPerScore: `top` is a score times this
  float cap, per_cap;  // soft cap and 1 / cap; 0 = none
  bool alibi;
  int32_t seen_from[kMaxRows], seen_to[kMaxRows];  // positions [from, to)
  float slope[kMaxRows];
  float top[kMaxRows];                      // largest score so far
  float rescale[kMaxRows];                  // factor for earlier sums after a new largest score
  alignas(64) float sum[kMaxRows][kWidth];  // sum of the weights, lane by lane

  template <class Words>
  void init(const AttentionCall& call, const AttentionItem& item, int kv_head) {
    const AttentionShape& shape = *call.shape;
    const int group = shape.num_heads / shape.num_kv_heads;
    factor = shape.scale * shape.k_scale;
    per_score = Words::kPerScore;
    cap = shape.soft_cap;
    per_cap = cap != 0 ? 1 / cap : 0;
    alibi = shape.slopes != nullptr;
    for (int i = 0; i < item.num_rows; ++i) {
      const Place place = place_of(call, item, group, i);
      const int position = place.position;
      seen_to[i] = position + 1;
      if (shape.both_ways) seen_to[i] = call.window > 0 ? least(position + call.window, item.key_end) : item.key_end;
      seen_from[i] = call.window > 0 && position >= call.window ? position - call.window + 1 : 0;
      slope[i] = alibi ? shape.slopes[kv_head * group + place.head] : 0;
      top[i] = kNothing;
      store(sum[i], Vec{});
    }
  }

  // Turns the products [count][kKeys] of the rows from `row` on with the keys [first, end) into weights, and updates
  // the rows' states. The result of a row does not depend on other rows.
  template <class Words>
  inline void step(float (*products)[kKeys], typename Words::Element (*weights)[kKeys], int row, int count, int first,
                   int end) {
    for (int i = 0; i < count && finishes_scores(); ++i) finish_scores(products[i], row + i, first);
    const float scale = finishes_scores() ? per_score : factor * per_score;
    for (int i = 0; i < count; i += kWidth) {
      const int some = least(kWidth, count - i), last = row + i + some - 1;
      if (end - first == kKeys && end <= seen_to[row + i] && first >= seen_from[last]) {
        step_some<Words, false>(products + i, weights + i, row + i, some, first, end, scale);
      } else {
        step_some<Words, true>(products + i, weights + i, row + i, some, first, end, scale);
      }
    }
  }

  float largest_score(int i) const { return top[i] / per_score; }

  // `save` stores the state of row i within a section at `to`, and `resume` continues from it.
  void save(int i, float* to) const {
    to[0] = top[i];
    store(to + 1, load(sum[i]));
  }
  void resume(int i, const float* from) {
    top[i] = from[0];
    store(sum[i], load(from + 1));
  }

  // Resets row i, for the keys of another section.
  void restart(int i) {
    top[i] = kNothing;
    store(sum[i], Vec{});
  }

 protected:
  bool finishes_scores() const { return cap != 0 || alibi; }

  // Turns products into scores, if these are not just multiples of them.
  void finish_scores(float* products, int i, int first) const {
    for (int j = 0; j < kKeys; j += kWidth) {
      Vec x = load(products + j) * factor;
      if (cap != 0) x = tanh(x * per_cap) * cap;
      if (alibi) x += slope[i] * __builtin_convertvector(lane_numbers() + (first + j - (seen_to[i] - 1)), Vec);
      store(products + j, x);
    }
  }

  VecI sees(int i, int key, int end) const {
    const VecI keys = lane_numbers() + key;
    return (keys >= seen_from[i]) & (keys < least(seen_to[i], end));
  }

  // One step of up to kWidth rows, whose largest scores are in one vector.
  template <class Words, bool kMasked>
  inline void step_some(const float (*products)[kKeys], typename Words::Element (*weights)[kKeys], int row, int count,
                        int first, int end, float scale) {
    Vec most[kWidth];
    // Weights of keys from `end` on are read, up to whole groups; up to all kKeys with narrow vectors.
    const int keys = kMasked && kWidth < 16 ? round_up(end - first, kGroup) : kKeys;
    for (int i = 0; i < count; ++i) most[i] = largest<kMasked>(products[i], row + i, first, end);
    const Vec found = largest_of_each(most, count), old = load_some(top + row, count);
    const Vec now = max(found > kNothing ? found * scale : found, old);
    store_some(top + row, now, count);
    store_some(rescale + row, exp<true>((old - now) / per_score), count);
    for (int i = 0; i < count; ++i) {
      const Vec most_here = splat(top[row + i]);
      Vec total = load(sum[row + i]) * rescale[row + i];
#pragma GCC unroll 16
      for (int j = 0; j < keys; j += 2 * kWidth) {
        Vec x[2];
        for (int k = 0; k < 2; ++k) {
          x[k] = Words::weight(load(products[i] + j + k * kWidth) * scale - most_here);  // weight(0) for the largest
          if (kMasked) x[k] = sees(row + i, first + j + k * kWidth, end) ? x[k] : Vec{};
          total += x[k];
        }
        Words::put_weights(weights[i] + j, x[0], x[1]);
      }
      store(sum[row + i], total);
    }
  }

  // The largest score of the keys that row i sees, lane by lane.
  template <bool kMasked>
  inline __attribute__((always_inline)) Vec largest(const float* products, int i, int first, int end) const {
    Vec x[kKeys / kWidth];
    for (int j = 0; j < kKeys / kWidth; ++j) {
      x[j] = load(products + j * kWidth);
      if (kMasked) x[j] = sees(i, first + j * kWidth, end) ? x[j] : splat(kNothing);
    }
    for (int n = kKeys / kWidth / 2; n > 0; n /= 2) {
      for (int j = 0; j < n; ++j) x[j] = max(x[j], x[j + n]);
    }
    return x[0];
  }
};

// Result of a row over one or more sections of its keys.
struct Result {
  float top, sum;  // largest score; sum of the weights
  float* acc;      // weighted sum of V, readable and writable in whole vectors
};

// Adds the result of the next section. A row's sections are added in order, no matter which thread computed them. The
// first one is added to {kNothing, 0, zeros}, which does not change its bits.
VLLM_LITE_INLINE void add_section(Result* all, float top, float sum, const float* acc, int size) {
  const float most = top > all->top ? top : all->top;
  const float old = exp<true>(splat(all->top - most))[0], fresh = exp<true>(splat(top - most))[0];
  all->top = most;
  all->sum = all->sum * old + sum * fresh;
  for (int d = 0; d < size; d += kWidth) {
    store(all->acc + d, multiply_add(load(all->acc + d), splat(old), load_some(acc + d, size - d) * fresh));
  }
}

template <class T>
VLLM_LITE_INLINE void put_output(char* to, const float* acc, float factor, int size) {
  for (int d = 0; d < size; d += kWidth) {
    store_some(reinterpret_cast<T*>(to) + d, load(acc + d) * factor, size - d);
  }
}

// Factor for a row's weighted sum of V, from the largest score and the sum of weights of all its keys. A sink is added
// here, once, after all keys, so the bits do not depend on how the keys were divided among threads.
VLLM_LITE_INLINE float normalizer(const AttentionCall& call, int head, float top, float sum) {
  const float v_scale = call.shape->v_scale;
  if (call.sinks == nullptr) return v_scale / sum;
  const float sink = call.sinks[head], most = sink > top ? sink : top;
  const float keys = exp<true>(splat(top - most))[0], rest = exp<true>(splat(sink - most))[0];
  return v_scale * keys / (sum * keys + rest);
}

// Writes the output of row i from its result over all keys. If the cache has V Hadamard-transformed, the result is
// transformed back in place.
VLLM_LITE_INLINE void put_row(const AttentionCall& call, const AttentionItem& item, int kv_head, int i,
                              const Result& all) {
  const AttentionShape& shape = *call.shape;
  const int group = shape.num_heads / shape.num_kv_heads, size = shape.value_size;
  const Place place = place_of(call, item, group, i);
  const int head = kv_head * group + place.head;
  char* line = call.out + place.query_row * call.out_stride;
  const float factor = normalizer(call, head, all.top, all.sum);
  const int64_t first = static_cast<int64_t>(head) * size;
  if (shape.kv_dtype == kInt8) hadamard(all.acc, size);
  if (shape.dtype == kFloat32) put_output<float>(line + first * 4, all.acc, factor, size);
  if (shape.dtype == kBFloat16) put_output<BFloat16>(line + first * 2, all.acc, factor, size);
  if (shape.dtype == kFloat16) put_output<Float16>(line + first * 2, all.acc, factor, size);
}

// `save_section` stores the states of an item's rows within a section; `resume_section` continues from them.
VLLM_LITE_INLINE void save_section(const AttentionCall& call, const AttentionItem& item, int kv_head,
                                   const Softmax& softmax, const float* acc, int stride) {
  const int size = call.shape->value_size;
  for (int i = 0; i < item.num_rows; ++i) {
    float* partial = partial_of(call, item, item.open_split, kv_head, i);
    std::memcpy(partial, acc + i * stride, static_cast<size_t>(size) * 4);
    softmax.save(i, partial + size);
  }
}
VLLM_LITE_INLINE void resume_section(const AttentionCall& call, const AttentionItem& item, int kv_head,
                                     Softmax& softmax, float* acc, int stride) {
  const int size = call.shape->value_size;
  for (int i = 0; i < item.num_rows; ++i) {
    const float* partial = partial_of(call, item, item.split, kv_head, i);
    std::memcpy(acc + i * stride, partial, static_cast<size_t>(size) * 4);
    softmax.resume(i, partial + size);
  }
}

// Computes all rows of an item. Calls `add` with the ranges of up to `batch` keys, a multiple of kKeys; it updates
// `softmax` and acc [num_rows][stride]. At the end of a section, its result is added to `all` [num_rows][stride] or
// becomes the item's partial result. Finally the outputs are written.
template <class Add>
VLLM_LITE_INLINE void over_keys(const AttentionCall& call, const AttentionItem& item, int kv_head, Softmax& softmax,
                                float* acc, float* all, int stride, int batch, const Add& add) {
  const int size = call.shape->value_size, section = section_keys(call, item);
  const bool several = item.key_begin / section < (item.key_end - 1) / section;
  Result results[kMaxRows];
  if (several) std::memset(all, 0, static_cast<size_t>(item.num_rows * stride) * 4);
  for (int i = 0; several && i < item.num_rows; ++i) results[i] = {kNothing, 0, all + i * stride};
  for (int begin = item.key_begin; begin < item.key_end;) {
    const int end = least((begin / section + 1) * section, item.key_end);
    std::memset(acc, 0, static_cast<size_t>(item.num_rows * stride) * 4);
    if (item.resumes && begin == item.key_begin) resume_section(call, item, kv_head, softmax, acc, stride);
    for (int first = begin / kKeys * kKeys; first < end; first += batch) add(first, least(first + batch, end));
    if (item.open_split >= 0 && end == item.key_end) {
      save_section(call, item, kv_head, softmax, acc, stride);
      if (!several) return;
      break;
    }
    for (int i = 0; several && i < item.num_rows; ++i) {
      add_section(&results[i], softmax.largest_score(i), sum_of(load(softmax.sum[i])), acc + i * stride, size);
      softmax.restart(i);
    }
    begin = end;
  }
  for (int i = 0; i < item.num_rows; ++i) {
    if (!several) results[i] = {softmax.largest_score(i), sum_of(load(softmax.sum[i])), acc + i * stride};
    const Result& result = results[i];
    if (item.num_splits == 1) {
      put_row(call, item, kv_head, i, result);
      continue;
    }
    float* partial = partial_of(call, item, item.split, kv_head, i);
    std::memcpy(partial, result.acc, static_cast<size_t>(size) * 4);
    partial[size] = result.top;
    partial[size + 1] = result.sum;
  }
}

}  // namespace
}  // namespace VLLM_LITE_ISA
