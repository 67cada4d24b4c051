// Attention of few rows: reads the cache as it lies, 16 tokens at a time, at the speed of memory.
//
// The next tokens are fetched while these are worked on; their addresses come from the block table, so the processor
// could not predict them. It has few places for lines that are on their way, and loads that miss wait for one, so lines
// must be asked for evenly: with all of K's in the first of 4 rows, 4 rows measured 18 instead of 27 GB/s.
#pragma once

#include "attention_words.h"

namespace VLLM_LITE_ISA {
namespace {

template <class Words>
struct StreamScratch {
  using Element = typename Words::Element;
  Softmax softmax;
  alignas(64) Element query[kStreamRows][kMaxHeadSize];  // filled up with zeros to whole vectors
  alignas(64) float acc[kStreamRows][kMaxHeadSize];
  alignas(64) Element weights[kStreamRows][kGroup];
  alignas(64) Element keys[kGroup][kMaxHeadSize];  // converted, when the cache has another type
  alignas(64) Element values[kGroup][kMaxHeadSize];
  const char* rows[2][kGroup];  // of K in the cache: of these tokens and of the next
  const char* converted[kGroup];
};

// The next rows of the cache, whose lines are to be fetched.
struct Ahead {
  const char* const* rows;  // of K at [16]
  int64_t offset;           // what to add for V
};

VLLM_LITE_INLINE void fetch(const char* row) {
  __builtin_prefetch(row);
}

VLLM_LITE_INLINE void fetch_row(const char* row, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += 64) fetch(row + i);
}

// ---- products of one query row with 16 keys; meanwhile the lines [from, to) of each of the next keys are fetched

VLLM_LITE_INLINE void products(Floats, const float* query, const char* const* keys, int size, const Ahead& ahead,
                               int from, int to, Vec* out) {
  for (int part = 0; part < kGroup; part += kWidth) {
    Vec sums[kWidth];
    for (int t = 0; t < kWidth; ++t) sums[t] = Vec{};
    for (int d = 0; d < size; d += kWidth) {
      const Vec q = load(query + d);
      const int line = from + d / 16;
      const bool ask = d % 16 == 0 && line < to;
      for (int t = 0; t < kWidth; ++t) {
        if (ask) fetch(ahead.rows[part + t] + 64 * line);
        sums[t] += q * load_some(reinterpret_cast<const float*>(keys[part + t]) + d, size - d);
      }
    }
    out[part / kWidth] = sums_of(sums);
  }
}

#if defined(__AVX512BF16__)
// kSize: the head size where it is known to the compiler, else 0. ahead: where kLines lines are to be fetched from.
template <int kLines, int kSize>
VLLM_LITE_INLINE Vec products_of(const BFloat16* query, const char* const* keys, int size, const char* const* ahead,
                                 int64_t line) {
  Vec sums[kGroup];
  if (kSize > 0) {
    __m512i q[kSize / 32 + 1];
    for (int i = 0; i < kSize / 32; ++i) q[i] = _mm512_load_si512(query + 32 * i);
#pragma GCC unroll 16
    for (int t = 0; t < kGroup; ++t) {
      Vec sum{};
      for (int i = 0; i < kLines; ++i) fetch(ahead[t] + line + 64 * i);
      for (int i = 0; i < kSize / 32; ++i) sum = add_products(sum, q[i], _mm512_loadu_si512(keys[t] + 64 * i));
      sums[t] = sum;
    }
  } else {
    for (int t = 0; t < kGroup; ++t) sums[t] = Vec{};
    for (int t = 0; kLines > 0 && t < kGroup; ++t) {
      for (int i = 0; i < kLines; ++i) fetch(ahead[t] + line + 64 * i);
    }
    for (int d = 0; d < size; d += 32) {
      const __m512i q = _mm512_load_si512(query + d);
#pragma GCC unroll 16
      for (int t = 0; t < kGroup; ++t) sums[t] = add_products(sums[t], q, load_halves(keys[t] + 2 * d, size - d));
    }
  }
  return sums_of(sums);
}

template <int kLines>
VLLM_LITE_INLINE void products_with(const BFloat16* query, const char* const* keys, int size, const Ahead& ahead,
                                    int64_t line, Vec* out) {
  *out = size == 128  ? products_of<kLines, 128>(query, keys, size, ahead.rows, line)
         : size == 64 ? products_of<kLines, 64>(query, keys, size, ahead.rows, line)
                      : products_of<kLines, 0>(query, keys, size, ahead.rows, line);
}

VLLM_LITE_INLINE void products(Pairs, const BFloat16* query, const char* const* keys, int size, const Ahead& ahead,
                               int from, int to, Vec* out) {
  const int64_t line = 64 * from;
  switch (to - from) {
    case 0:
      return products_with<0>(query, keys, size, ahead, line, out);
    case 1:
      return products_with<1>(query, keys, size, ahead, line, out);
    case 2:
      return products_with<2>(query, keys, size, ahead, line, out);
    case 3:
      return products_with<3>(query, keys, size, ahead, line, out);
    case 4:
      return products_with<4>(query, keys, size, ahead, line, out);
    default:
      return products_with<8>(query, keys, size, ahead, line, out);
  }
}
#endif

// ---- acc = acc * rescale + weights * V for kRows rows and 16 tokens

template <int kRows, bool kFetch>
static void add_values(Floats, float (*acc)[kMaxHeadSize], const float* rescale, const float (*weights)[kGroup],
                       const char* const* values, int size, const Ahead& ahead) {
  for (int d = 0; d < size; d += 2 * kWidth) {
    const int left = size - d;
    Vec sums[kRows][2] = {};
    for (int t = 0; t < kGroup; ++t) {
      const float* row = reinterpret_cast<const float*>(values[t]) + d;
      for (int line = 0; kFetch && line < 2 * kWidth; line += 16) {
        fetch(ahead.rows[t] + ahead.offset + 4 * (d + line));
      }
      const Vec v0 = load_some(row, left), v1 = left > kWidth ? load_some(row + kWidth, left - kWidth) : Vec{};
      for (int i = 0; i < kRows; ++i) {
        sums[i][0] += weights[i][t] * v0;
        sums[i][1] += weights[i][t] * v1;
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < 2; ++j) {
        float* to = acc[i] + d + j * kWidth;
        if (j * kWidth < left) store(to, load(to) * rescale[i] + sums[i][j]);
      }
    }
  }
}

#if defined(__AVX512BF16__)
template <int kRows, bool kFetch>
static void add_values(Pairs, float (*acc)[kMaxHeadSize], const float* rescale, const BFloat16 (*weights)[kGroup],
                       const char* const* values, int size, const Ahead& ahead) {
  for (int d = 0; d < size; d += 32) {
    const int left = size - d;
    Vec sums[kRows][2] = {};
#pragma GCC unroll 8
    for (int t = 0; t < kGroup; t += 2) {
      if (kFetch) {
        fetch(ahead.rows[t] + ahead.offset + 2 * d);
        fetch(ahead.rows[t + 1] + ahead.offset + 2 * d);
      }
      const __m512i x = load_halves(values[t] + 2 * d, left), y = load_halves(values[t + 1] + 2 * d, left);
      const __m512i v0 = pairs_low(x, y), v1 = pairs_high(x, y);
      for (int i = 0; i < kRows; ++i) {
        int32_t pair;
        std::memcpy(&pair, &weights[i][t], 4);
        sums[i][0] = add_products(sums[i][0], _mm512_set1_epi32(pair), v0);
        sums[i][1] = add_products(sums[i][1], _mm512_set1_epi32(pair), v1);
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < 2; ++j) {
        float* to = acc[i] + d + j * kWidth;
        store(to, load(to) * rescale[i] + sums[i][j]);
      }
    }
  }
}
#endif

template <class Words, bool kFetch>
static void add_values(StreamScratch<Words>& s, int num_rows, const char* const* values, int size, const Ahead& ahead) {
  constexpr int kMost = kWidth == 16 ? 8 : 4;  // rows whose sums fit into the registers
  for (int i = 0; i < num_rows; i += kMost) {
    const auto acc = s.acc + i;
    const auto weights = s.weights + i;
    const float* rescale = s.softmax.rescale + i;
    switch (least(num_rows - i, kMost)) {
      case 1:
        add_values<1, kFetch>(Words{}, acc, rescale, weights, values, size, ahead);
        break;
      case 2:
        add_values<2, kFetch>(Words{}, acc, rescale, weights, values, size, ahead);
        break;
      case 3:
        add_values<3, kFetch>(Words{}, acc, rescale, weights, values, size, ahead);
        break;
      case 4:
        add_values<4, kFetch>(Words{}, acc, rescale, weights, values, size, ahead);
        break;
      case 5:
        add_values<least(5, kMost), kFetch>(Words{}, acc, rescale, weights, values, size, ahead);
        break;
      case 6:
        add_values<least(6, kMost), kFetch>(Words{}, acc, rescale, weights, values, size, ahead);
        break;
      case 7:
        add_values<least(7, kMost), kFetch>(Words{}, acc, rescale, weights, values, size, ahead);
        break;
      default:
        add_values<kMost, kFetch>(Words{}, acc, rescale, weights, values, size, ahead);
    }
  }
}

template <class Words>
static void stream(const AttentionCall& call, const AttentionItem& item, int kv_head, char* memory) {
  using Scratch = StreamScratch<Words>;
  Scratch& s = *reinterpret_cast<Scratch*>(memory);
  const AttentionShape& shape = *call.shape;
  const int size = shape.head_size, padded = round_up(size, 32);
  const Cached cache = cached(call, item, kv_head);
  const bool convert = shape.kv_dtype != Words::kElement;
  const int64_t row_bytes = size * bytes_of(shape.kv_dtype);
  const int num_lines = convert ? 0 : static_cast<int>((row_bytes + 63) / 64);  // to be fetched with the products
  const char** now = s.rows[0];
  const char** next = s.rows[1];

  int first = item.key_begin, end = least((first | (kGroup - 1)) + 1, item.key_end);
  find_keys<kGroup>(now, cache, first, end);
  for (int t = 0; t < kGroup; ++t) fetch_row(now[t], row_bytes);
  for (int t = 0; t < kGroup; ++t) fetch_row(now[t] + cache.value_offset, row_bytes);
  s.softmax.init(call, item, kv_head);
  for (int i = 0; i < item.num_rows; ++i) {
    load_query(call, item, kv_head, i, s.query[i], padded);
    std::memset(s.acc[i], 0, static_cast<size_t>(padded) * 4);
  }
  while (first < item.key_end) {
    const int next_end = least(end + kGroup, item.key_end);
    if (end < next_end) find_keys<kGroup>(next, cache, end, next_end);
    // After the last tokens the same ones are fetched again, which costs nothing.
    const Ahead ahead = {end < next_end ? next : now, cache.value_offset};
    const char* const* keys = now;
    const char* values[kGroup];
    for (int t = 0; t < kGroup; ++t) values[t] = now[t] + cache.value_offset;
    if (convert) {
      for (int t = 0; t < kGroup; ++t) {
        fetch_row(ahead.rows[t], row_bytes);
        convert_row(shape.kv_dtype, now[t], s.keys[t], size);
        fetch_row(ahead.rows[t] + ahead.offset, row_bytes);
        convert_row(shape.kv_dtype, values[t], s.values[t], size);
        s.converted[t] = reinterpret_cast<const char*>(s.keys[t]);
        values[t] = reinterpret_cast<const char*>(s.values[t]);
      }
      keys = s.converted;
    }
    for (int i = 0; i < item.num_rows; ++i) {
      Vec x[kGroup / kWidth];
      const int from = num_lines * i / item.num_rows, to = num_lines * (i + 1) / item.num_rows;
      products(Words{}, s.query[i], keys, size, ahead, from, to, x);
      s.softmax.template step<kGroup / kWidth, true>(x, i, first, end);
      for (int j = 0; j < kGroup / kWidth; ++j) Words::put_weights(s.weights[i] + j * kWidth, x[j]);
    }
    if (convert) {
      add_values<Words, false>(s, item.num_rows, values, size, ahead);
    } else {
      add_values<Words, true>(s, item.num_rows, values, size, ahead);
    }
    const char** const used = now;
    now = next;
    next = used;
    first = end;
    end = next_end;
  }
  put_rows(call, item, kv_head, s.softmax, s.acc[0], kMaxHeadSize);
}

}  // namespace
}  // namespace VLLM_LITE_ISA
