// Attention of few rows: reads the cache without packing it, at the speed of memory. Every sum has the same order as in
// attention_tile.h: products are added word by word, for which 16 keys at a time are transposed in registers, and V
// token by token.
// The next tokens are prefetched meanwhile; their addresses come from the block table, so the processor could not
// predict them. It has few line fill buffers, and loads that miss wait for one, so prefetches must be spread evenly:
// with all of K's in the first of 4 rows, 4 rows measured 18 instead of 27 GB/s.
#pragma once

#include "attention_words.h"

namespace VLLM_LITE_ISA {
namespace {

template <class Words>
struct StreamScratch {
  using Element = typename Words::Element;
  Softmax softmax;
  alignas(64) Element query[kStreamRows * kMaxHeadSize];  // [num_rows][padded head_size], filled up with zeros
  alignas(64) float acc[kStreamRows * kMaxHeadSize];      // [num_rows][padded value_size]
  alignas(64) float all[kStreamRows * kMaxHeadSize];      // the same for the sections before
  alignas(64) float scores[kStreamRows][kKeys];
  alignas(64) Element weights[kStreamRows][kKeys];
  alignas(64) Element keys[kKeys * kMaxHeadSize];  // [tokens][padded head_size], when the cache has another type
  alignas(64) Element values[kKeys * kMaxHeadSize];
  const char* rows[2][kKeys];  // of K in the cache: of these tokens and of the next
  const char* converted[kKeys];
};

// The lines of the next K or V in the cache, which are prefetched row by row.
struct Ahead {
  const char* const* rows;  // of K at [kKeys]
  int64_t offset;           // what to add for V
  int64_t row_bytes;
  int row;
  int64_t byte;

  void fetch_lines(int count) {
    for (int i = 0; i < count && row < kKeys; ++i) {
      fetch(rows[row] + offset + byte);
      byte += 64;
      if (byte >= row_bytes) ++row, byte = 0;
    }
  }
};

// Adds to `to` [num_rows] the products of 16 words of the query rows with those of 16 keys. Strides in floats.
template <class Words>
VLLM_LITE_INLINE void multiply_words(const float* query, int stride, int num_rows, const char* const* keys, int word,
                                     int count, float (*to)[kKeys]) {
#if defined(__AVX512F__)
  Vec words[16];
  turn(keys, 4 * word, count, words);
  query += word;  // the remaining offsets are constants, which take no register
  for (int i = 0; i < num_rows; ++i, query += stride) {
    Vec sum = load(to[i]);
#pragma GCC unroll 16
    for (int n = 0; n < 16; ++n) sum = Words::add_product(sum, query[n], words[n]);
    store(to[i], sum);
  }
#else
  alignas(64) float words[16][kGroup];
  transpose(keys, 4 * word, count, words[0], kGroup);
  for (int i = 0; i < num_rows; ++i, query += stride) {
    for (int j = 0; j < kGroup; j += kWidth) {
      Vec sum = load(to[i] + j);
      for (int n = 0; n < count; ++n) sum = Words::add_product(sum, query[word + n], load(words[n] + j));
      store(to[i] + j, sum);
    }
  }
#endif
}

// Computes scores [num_rows][kKeys], the products of the query rows with `count` keys. Meanwhile prefetches the next K.
template <class Words, bool kFetch>
static void multiply_keys(StreamScratch<Words>& s, int stride, int num_rows, const char* const* keys, int count,
                          int num_words, Ahead ahead) {
  std::memset(s.scores, 0, static_cast<size_t>(num_rows) * sizeof s.scores[0]);
  for (int pair = 0; pair < count; pair += 2 * kGroup) {  // two groups, whose sums do not depend on each other
    for (int word = 0; word < num_words; word += 16) {
      for (int group = pair; group < least(pair + 2 * kGroup, count); group += kGroup) {
        if (kFetch) ahead.fetch_lines(kGroup);
        multiply_words<Words>(reinterpret_cast<const float*>(s.query), stride, num_rows, keys + group, word,
                              least(16, num_words - word), reinterpret_cast<float (*)[kKeys]>(s.scores[0] + group));
      }
    }
  }
}

// ---- acc [kRows][stride] = acc * rescale + weights * V for kRows rows and `count` tokens

template <int kRows, bool kFetch>
static void add_values(Floats, float* acc, int stride, const float* rescale, const float (*weights)[kKeys],
                       const char* const* values, int count, int size, Ahead ahead) {
  for (int d = 0; d < size; d += 2 * kWidth) {
    const int left = size - d;
    Vec sums[kRows][2] = {};
    for (int t = 0; t < count; ++t) {
      const float* row = reinterpret_cast<const float*>(values[t]) + d;
      if (kFetch) ahead.fetch_lines(kWidth > 8 ? 2 : 1);
      const Vec v0 = load_some(row, left), v1 = left > kWidth ? load_some(row + kWidth, left - kWidth) : Vec{};
      for (int i = 0; i < kRows; ++i) {
        sums[i][0] = Floats::add_product(sums[i][0], weights[i][t], v0);
        sums[i][1] = Floats::add_product(sums[i][1], weights[i][t], v1);
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < 2; ++j) {
        float* to = acc + i * stride + d + j * kWidth;
        if (j * kWidth < left) store(to, multiply_add(load(to), splat(rescale[i]), sums[i][j]));
      }
    }
  }
}

#if defined(VLLM_LITE_MULTIPLIES_PAIRS)
template <int kRows, bool kFetch>
static void add_values(Pairs, float* acc, int stride, const float* rescale, const BFloat16 (*weights)[kKeys],
                       const char* const* values, int count, int size, Ahead ahead) {
  for (int d = 0; d < size; d += 2 * kWidth) {
    const int left = size - d;
    Vec sums[kRows][2] = {};
#pragma GCC unroll 8
    for (int t = 0; t < count; t += 2) {
      if (kFetch) ahead.fetch_lines(2);
      const auto x = load_halves(values[t] + 2 * d, left), y = load_halves(values[t + 1] + 2 * d, left);
      const Vec v0 = reinterpret_cast<Vec>(pairs_low(x, y)), v1 = reinterpret_cast<Vec>(pairs_high(x, y));
      for (int i = 0; i < kRows; ++i) {
        float pair;
        std::memcpy(&pair, &weights[i][t], 4);
        sums[i][0] = Pairs::add_product(sums[i][0], pair, v0);
        sums[i][1] = Pairs::add_product(sums[i][1], pair, v1);
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < 2; ++j) {
        float* to = acc + i * stride + d + j * kWidth;
        store(to, multiply_add(load(to), splat(rescale[i]), sums[i][j]));
      }
    }
  }
}
#endif

template <class Words, int kRows, bool kFetch>
VLLM_LITE_INLINE void add_some(StreamScratch<Words>& s, int row, int num_rows, int stride, const char* const* values,
                               int count, int size, Ahead ahead) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) {
      return add_some<Words, kRows - 1, kFetch>(s, row, num_rows, stride, values, count, size, ahead);
    }
  }
  add_values<kRows, kFetch>(Words{}, s.acc + row * stride, stride, s.softmax.rescale + row, s.weights + row, values,
                            count, size, ahead);
}

// One step of the softmax. `rows`: addresses of K in the cache, from the key `first` on. Prefetches the next rows.
template <class Words, bool kConvert>
static void attend_few(StreamScratch<Words>& s, const AttentionCall& call, int num_rows, const char* const* rows,
                       int first, int end, const char* const* next) {
  constexpr int kMost = kWidth == 16 ? 8 : 4;  // rows whose sums fit into the registers
  const int size = call.shape->head_size, value_size = call.shape->value_size, padded = round_up(size, 32);
  const int count = round_up(end - first, kGroup), kv_dtype = call.shape->kv_dtype;
  const int64_t row_bytes = size * bytes_of(kv_dtype), offset = call.value_offset;
  const bool shared = offset == 0;  // V is fetched and converted with K
  const char* const* keys = rows;
  const char* values[kKeys];
  for (int t = 0; t < count; ++t) values[t] = rows[t] + offset;
  if (kConvert) {
    for (int t = 0; t < count; ++t) {
      fetch_row(next[t], row_bytes);
      convert_row(kv_dtype, rows[t], s.keys + t * padded, size);
      s.converted[t] = reinterpret_cast<const char*>(s.keys + t * padded);
      if (!shared) {
        fetch_row(next[t] + offset, row_bytes);
        convert_row(kv_dtype, values[t], s.values + t * padded, size);
      }
      values[t] = reinterpret_cast<const char*>((shared ? s.keys : s.values) + t * padded);
    }
    keys = s.converted;
  }
  multiply_keys<Words, !kConvert>(s, padded / Words::kPack, num_rows, keys, count, size / Words::kPack,
                                  {next, 0, row_bytes, 0, 0});
  s.softmax.template step<Words>(s.scores, s.weights, 0, num_rows, first, end);
  const int stride = round_up(value_size, 32);
  for (int i = 0; i < num_rows; i += kMost) {
    if (i == 0 && !shared) {
      add_some<Words, kMost, !kConvert>(s, i, num_rows - i, stride, values, count, value_size,
                                        {next, offset, row_bytes, 0, 0});
    } else {
      add_some<Words, kMost, false>(s, i, num_rows - i, stride, values, count, value_size, {});
    }
  }
}

template <class Words>
static void stream(const AttentionCall& call, const AttentionItem& item, int kv_head, vllm_lite::NextUnit after,
                   char* memory) {
  StreamScratch<Words>& s = *reinterpret_cast<StreamScratch<Words>*>(memory);
  const AttentionShape& shape = *call.shape;
  const int size = shape.head_size, padded = round_up(size, 32);
  const Cached cache = cached(call, item, kv_head);
  const int64_t row_bytes = size * bytes_of(shape.kv_dtype);
  const char** now = s.rows[0];
  const char** next = s.rows[1];
  find_keys(now, cache, item.key_begin / kKeys * kKeys, item.key_begin, item.key_end);
  const int most = least(kKeys, round_up(item.key_end - item.key_begin, kGroup));
  for (int t = 0; t < most; ++t) fetch_row(now[t], row_bytes);
  for (int t = 0; t < most; ++t) fetch_row(now[t] + cache.value_offset, row_bytes);
  s.softmax.template init<Words>(call, item, kv_head);
  for (int i = 0; i < item.num_rows; ++i) load_query(call, item, kv_head, i, s.query + i * padded, padded);
  const int stride = round_up(shape.value_size, 32);
  over_keys(call, item, kv_head, s.softmax, s.acc, s.all, stride, kKeys, [&](int first, int end) {
    const bool more = find_next_keys(next, call, item, kv_head, after, end);
    const char* const* ahead = more ? next : now;  // prefetching these again costs nothing
    if (shape.kv_dtype == Words::kElement) {
      attend_few<Words, false>(s, call, item.num_rows, now, first, end, ahead);
    } else {
      attend_few<Words, true>(s, call, item.num_rows, now, first, end, ahead);
    }
    const char** const used = now;
    now = next;
    next = used;
  });
}

}  // namespace
}  // namespace VLLM_LITE_ISA
