// What the two attention kernels share: addresses of cached rows, and the softmax that runs along with the keys.
#pragma once

#include "../attention.h"
#include "convert.h"

namespace VLLM_LITE_ISA {
namespace {

using vllm_lite::AttentionCall;
using vllm_lite::AttentionItem;
using vllm_lite::AttentionShape;
using vllm_lite::kMaxHeadSize;
using vllm_lite::kMaxRows;
using vllm_lite::kStreamRows;
using vllm_lite::section_keys;

constexpr int kGroup = 16;          // tokens that are gathered together
constexpr int kKeys = 64;           // that take one step of the softmax, from a multiple of it on
constexpr float kNothing = -1e30f;  // score of what is not seen; finite, so that a difference of two is not NaN

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
  return max_of(x);
#endif
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

// Addresses of the K at positions [first, first + kKeys), with those of `begin` and of end - 1 in place of all that lie
// before and behind: what is computed with these is masked, but must not come from memory that is not the sequence's,
// where there may be NaN. first < end, begin < end.
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

// Addresses of the K that are read after those at positions [.., end) of an item; false if nobody knows them.
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

// Rows of queries while they meet the keys. Everything is indexed by the row's number within the item.
struct Softmax {
  float factor;        // of the products, to scores
  float cap, per_cap;  // soft cap and 1 / cap; 0 = none
  bool alibi;
  int32_t seen_from[kMaxRows], seen_to[kMaxRows];  // positions [from, to)
  float slope[kMaxRows];
  float top[kMaxRows];                      // largest score so far
  float rescale[kMaxRows];                  // what earlier sums must be multiplied by, after a new largest score
  alignas(64) float sum[kMaxRows][kWidth];  // of the weights, lane by lane

  void init(const AttentionCall& call, const AttentionItem& item, int kv_head) {
    const AttentionShape& shape = *call.shape;
    const int group = shape.num_heads / shape.num_kv_heads;
    factor = shape.scale * shape.k_scale;
    cap = shape.soft_cap;
    per_cap = cap != 0 ? 1 / cap : 0;
    alibi = shape.slopes != nullptr;
    for (int i = 0; i < item.num_rows; ++i) {
      const int row = (item.first + i) / group, head = (item.first + i) % group;
      const int position = item.position + row;
      seen_to[i] = position + 1;
      if (shape.both_ways) seen_to[i] = call.window > 0 ? least(position + call.window, item.key_end) : item.key_end;
      seen_from[i] = call.window > 0 && position >= call.window ? position - call.window + 1 : 0;
      slope[i] = alibi ? shape.slopes[kv_head * group + head] : 0;
      top[i] = kNothing;
      store(sum[i], Vec{});
    }
  }

  // Turns row i's products [kKeys] with the keys from `first` on into weights, and updates the row's state.
  template <class Words, bool kMasked>
  inline __attribute__((always_inline)) void step(const float* products, typename Words::Element* weights, int i,
                                                  int first, int end) {
    constexpr int kVecs = kKeys / kWidth;
    const VecI from = VecI{} + seen_from[i], to = VecI{} + least(seen_to[i], end);
    const VecI lanes = lane_numbers();
    Vec x[kVecs], most = splat(kNothing);
    for (int j = 0; j < kVecs; ++j) {
      const VecI keys = lanes + (first + j * kWidth);
      x[j] = load(products + j * kWidth) * factor;
      if (cap != 0) x[j] = tanh(x[j] * per_cap) * cap;
      if (alibi) x[j] += slope[i] * __builtin_convertvector(keys - (seen_to[i] - 1), Vec);
      if (kMasked) x[j] = (keys >= from) & (keys < to) ? x[j] : splat(kNothing);
      most = max(most, x[j]);
    }
    const float old = top[i], largest = largest_of(most);
    top[i] = largest > old ? largest : old;
    rescale[i] = largest > old ? exp<true>(splat(old - largest))[0] : 1.0f;
    Vec total = load(sum[i]) * rescale[i];
    for (int j = 0; j < kVecs; ++j) {
      const VecI keys = lanes + (first + j * kWidth);
      x[j] = exp<true>(x[j] - top[i]);
      if (kMasked) x[j] = (keys >= from) & (keys < to) ? x[j] : Vec{};
      total += x[j];
      Words::put_weights(weights + j * kWidth, x[j]);
    }
    store(sum[i], total);
  }

  // Starts row i anew, for the keys of another section.
  void restart(int i) {
    top[i] = kNothing;
    store(sum[i], Vec{});
  }
};

// A row's result over one or more sections of its keys.
struct Result {
  float top, sum;  // largest score; sum of the weights
  float* acc;      // weighted sum of V, readable and writable in whole vectors
};

// Adds the next section's result. A row's sections are added in their order wherever they were computed. The first one
// is added to {kNothing, 0, zeros}, which keeps its bits.
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

// What a row's weighted sum of V has to be multiplied with, from the largest score and the sum of the weights of all
// its keys. A sink joins here, once, after all keys: so bits do not depend on who summed these up.
VLLM_LITE_INLINE float normalizer(const AttentionCall& call, int head, float top, float sum) {
  const float v_scale = call.shape->v_scale;
  if (call.sinks == nullptr) return v_scale / sum;
  const float sink = call.sinks[head], most = sink > top ? sink : top;
  const float keys = exp<true>(splat(top - most))[0], rest = exp<true>(splat(sink - most))[0];
  return v_scale * keys / (sum * keys + rest);
}

// Row i's output from its result over all keys.
VLLM_LITE_INLINE void put_row(const AttentionCall& call, const AttentionItem& item, int kv_head, int i,
                              const Result& all) {
  const AttentionShape& shape = *call.shape;
  const int group = shape.num_heads / shape.num_kv_heads, size = shape.value_size;
  const int row = (item.first + i) / group, head = kv_head * group + (item.first + i) % group;
  char* line = call.out + (item.query_row + row) * call.out_stride;
  const float factor = normalizer(call, head, all.top, all.sum);
  const int64_t place = static_cast<int64_t>(head) * size;
  if (shape.dtype == kFloat32) put_output<float>(line + place * 4, all.acc, factor, size);
  if (shape.dtype == kBFloat16) put_output<BFloat16>(line + place * 2, all.acc, factor, size);
  if (shape.dtype == kFloat16) put_output<Float16>(line + place * 2, all.acc, factor, size);
}

// Runs the rows of an item through its keys: `add` is called with the first and the last + 1 of up to kKeys of them at
// a time and updates `softmax` and acc [num_rows][stride]. Where a section ends, its result joins those before it in
// `all` [num_rows][stride], or becomes the item's partial result. Then the rows are put out.
template <class Add>
VLLM_LITE_INLINE void over_keys(const AttentionCall& call, const AttentionItem& item, int kv_head, Softmax& softmax,
                                float* acc, float* all, int stride, const Add& add) {
  const int size = call.shape->value_size, section = section_keys(call, item);
  const bool several = item.num_splits == 1 && item.key_begin / section < (item.key_end - 1) / section;
  Result results[kMaxRows];
  if (several) std::memset(all, 0, static_cast<size_t>(item.num_rows * stride) * 4);
  for (int i = 0; several && i < item.num_rows; ++i) results[i] = {kNothing, 0, all + i * stride};
  for (int begin = item.key_begin; begin < item.key_end;) {
    const int end = least((begin / section + 1) * section, item.key_end);
    std::memset(acc, 0, static_cast<size_t>(item.num_rows * stride) * 4);
    for (int first = begin / kKeys * kKeys; first < end; first += kKeys) add(first, least(first + kKeys, end));
    for (int i = 0; several && i < item.num_rows; ++i) {
      add_section(&results[i], softmax.top[i], sum_of(load(softmax.sum[i])), acc + i * stride, size);
      softmax.restart(i);
    }
    begin = end;
  }
  for (int i = 0; i < item.num_rows; ++i) {
    if (several) {
      put_row(call, item, kv_head, i, results[i]);
      continue;
    }
    const float sum = sum_of(load(softmax.sum[i]));
    if (item.num_splits == 1) {
      put_row(call, item, kv_head, i, {softmax.top[i], sum, acc + i * stride});
      continue;
    }
    float* partial = partial_of(call, item, item.split, kv_head) + i * vllm_lite::partial_size(*call.shape);
    std::memcpy(partial, acc + i * stride, static_cast<size_t>(size) * 4);
    partial[size] = softmax.top[i];
    partial[size + 1] = sum;
  }
}

}  // namespace
}  // namespace VLLM_LITE_ISA
