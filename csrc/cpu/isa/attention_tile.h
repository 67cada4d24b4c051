// Attention of many rows: packs 64 tokens once so that all rows of the item multiply with them at full speed.
// Blocks of kBlockRows rows and several vectors of keys, then of dimensions, have all their sums in registers. The
// softmax is online (Dao et al., FlashAttention, 2022), so scores exist for 64 keys at a time only, but for many rows:
// K stays in L1 for one product and V for the other, and the softmax's steps of several rows overlap.
#pragma once

#include "attention_words.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int kBlockRows =
    6;                        // with 4 vectors (2 where there are 16 registers) their sums leave registers for operands
constexpr int kFewRows = 48;  // up to this number of rows, packing takes more time than computing
constexpr int kBlockVecs = kWidth == 16 ? 4 : 2;

// Up to this head size, K and V of a tile are both in L1 beside the scores of kRowsAtOnce rows, and each kRowsAtOnce
// rows compute both products. With longer heads, only one of K and V is in L1, so all rows compute one product first.
constexpr int kShortHead = 160, kRowsAtOnce = 48;

template <class Words>
struct TileScratch {
  using Element = typename Words::Element;
  static constexpr int kSize = kMaxHeadSize;
  static constexpr int kRows = kMaxRows * 128;  // elements of an item's rows, see max_rows
  Softmax softmax;
  alignas(64) float keys[kSize / Words::kPack * kKeys];    // words [head_size / kPack][kKeys]
  alignas(64) float values[kKeys / Words::kPack * kSize];  // words [kKeys / kPack][padded value_size]
  alignas(64) Element query[kRows];                        // [num_rows][head_size]
  alignas(64) float acc[kRows];                            // [num_rows][padded value_size]
  alignas(64) float all[kRows];                            // the same for the sections before
  alignas(64) float scores[kMaxRows][kKeys];               // of the rows that attend at once
  alignas(64) Element weights[kMaxRows][kKeys];            // the same
  alignas(64) Element converted[kGroup * kSize];           // [tokens][padded head_size]
  const char* rows[2][kKeys];                              // of K in the cache: of this tile and of the next
};

// Sets out[i][j] to the sum over n < count of x[i][n] * y[n][j], with kAdd plus out[i][j] * rescale[i], for kRows rows
// i and kVecs vectors of j. Strides in words.
template <class Words, int kRows, int kVecs, bool kAdd>
VLLM_LITE_INLINE void multiply(const float* x, int x_stride, const float* y, int y_stride, int count, float* out,
                               int out_stride, const float* rescale) {
  Vec sums[kRows][kVecs] = {};
  for (int n = 0; n < count; ++n) {
    Vec row[kVecs];
    for (int j = 0; j < kVecs; ++j) row[j] = load(y + n * y_stride + j * kWidth);
    for (int i = 0; i < kRows; ++i) {
      const float word = x[i * x_stride + n];
      for (int j = 0; j < kVecs; ++j) sums[i][j] = Words::add_product(sums[i][j], word, row[j]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVecs; ++j) {
      float* to = out + i * out_stride + j * kWidth;
      store(to, kAdd ? multiply_add(load(to), splat(rescale[i]), sums[i][j]) : sums[i][j]);
    }
  }
}

// The same for `num_vecs` vectors.
template <class Words, int kRows, bool kAdd>
static void multiply_all(const float* x, int x_stride, const float* y, int y_stride, int count, float* out,
                         int out_stride, const float* rescale, int num_vecs) {
  const auto next = [&](auto vecs, int j) __attribute__((always_inline)) {
    constexpr int kVecs = decltype(vecs)::value;
    multiply<Words, kRows, kVecs, kAdd>(x, x_stride, y + j * kWidth, y_stride, count, out + j * kWidth, out_stride,
                                        rescale);
  };
  int j = 0;
  for (; j + kBlockVecs <= num_vecs && (kBlockVecs == 2 || j + 5 != num_vecs); j += kBlockVecs) {
    next(std::integral_constant<int, kBlockVecs>(), j);
  }
  if (kBlockVecs > 2 && j + 5 == num_vecs) {  // the sums of a single vector would wait for each other
    next(std::integral_constant<int, 3>(), j);
    j += 3;
  }
  if (kBlockVecs > 2 && j + 2 <= num_vecs) {
    next(std::integral_constant<int, 2>(), j);
    j += 2;
  }
  if (j < num_vecs) next(std::integral_constant<int, 1>(), j);
}

struct Sizes {
  int head, value;  // elements of K and V
  int query;        // words of a query row
  int padded;       // elements of V, padded to whole groups
};

// Computes the scores of kRows rows of the item, from `row` on, with `count` keys. The buffers of scores and weights
// begin with row `some`.
template <class Words, int kRows>
VLLM_LITE_INLINE void score_rows(TileScratch<Words>& s, const Sizes& sizes, int some, int row, int count) {
  const float* query = reinterpret_cast<const float*>(s.query) + row * sizes.query;
  multiply_all<Words, kRows, false>(query, sizes.query, s.keys, kKeys, sizes.query, s.scores[row - some], kKeys,
                                    nullptr, (count + kWidth - 1) / kWidth);
}

// Adds the values of `count` tokens, times the weights, to the accumulators of kRows rows.
template <class Words, int kRows>
VLLM_LITE_INLINE void add_rows(TileScratch<Words>& s, const Sizes& sizes, int some, int row, int count) {
  multiply_all<Words, kRows, true>(reinterpret_cast<const float*>(s.weights[row - some]), kKeys / Words::kPack,
                                   s.values, sizes.padded, (count + Words::kPack - 1) / Words::kPack,
                                   s.acc + row * sizes.padded, sizes.padded, s.softmax.rescale + row,
                                   sizes.padded / kWidth);
}

// Does one of these for `num_rows` rows, 1 <= num_rows <= kRows.
template <class Words, int kRows, bool kAdd>
VLLM_LITE_INLINE void multiply_rows(TileScratch<Words>& s, const Sizes& sizes, int some, int row, int num_rows,
                                    int count) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return multiply_rows<Words, kRows - 1, kAdd>(s, sizes, some, row, num_rows, count);
  }
  if constexpr (kAdd) {
    add_rows<Words, kRows>(s, sizes, some, row, count);
  } else {
    score_rows<Words, kRows>(s, sizes, some, row, count);
  }
}

// Packs the values of 16 tokens as words [16 / kPack][padded].
VLLM_LITE_INLINE void pack_values(Floats, const char* const* rows, const Sizes& sizes, float* to) {
  for (int t = 0; t < kGroup; ++t) {
    const float* row = reinterpret_cast<const float*>(rows[t]);
    for (int d = 0; d < sizes.padded; d += kWidth) {
      store(to + t * sizes.padded + d, sizes.value > d ? load_some(row + d, sizes.value - d) : Vec{});
    }
  }
}
#if defined(VLLM_LITE_MULTIPLIES_PAIRS)
VLLM_LITE_INLINE void pack_values(Pairs, const char* const* rows, const Sizes& sizes, float* to) {
  for (int t = 0; t < kGroup; t += 2, to += sizes.padded) {
    for (int d = 0; d < sizes.padded; d += 2 * kWidth) {
      const auto x = load_halves(rows[t] + 2 * d, sizes.value - d);
      const auto y = load_halves(rows[t + 1] + 2 * d, sizes.value - d);
      store(to + d, reinterpret_cast<Vec>(pairs_low(x, y)));
      if (d + kWidth < sizes.padded) store(to + d + kWidth, reinterpret_cast<Vec>(pairs_high(x, y)));
    }
  }
}
#endif

// Addresses of 16 rows of K or V in the cache, or of their converted copies. Meanwhile prefetches the first num_next of
// `next`.
template <class Words, class Scratch>
VLLM_LITE_INLINE void find_rows(Scratch& s, int kv_dtype, int size, const char* const* keys, int64_t offset,
                                const char* const* next, int num_next, const char** rows) {
  const int stride = round_up(size, 16);
  for (int t = 0; t < kGroup; ++t) {
    rows[t] = keys[t] + offset;
    if (t < num_next) fetch_row(next[t] + offset, size * bytes_of(kv_dtype));
    if (kv_dtype == Words::kElement) continue;
    typename Words::Element* const to = s.converted + t * stride;
    convert_row(kv_dtype, rows[t], to, size);
    rows[t] = reinterpret_cast<const char*>(to);
  }
}

// Packs K and V of `count` tokens from the cache; keys: addresses of K. Meanwhile prefetches the first num_next of
// `next`.
template <class Words>
static void pack(TileScratch<Words>& s, const AttentionCall& call, const char* const* keys, const Sizes& sizes,
                 int count, const char* const* next, int num_next) {
  const int kv_dtype = call.shape->kv_dtype;
  for (int group = 0; group < count; group += kGroup) {
    const char* rows[kGroup];
    find_rows<Words>(s, kv_dtype, sizes.head, keys + group, 0, next + group, num_next - group, rows);
    for (int word = 0; word < sizes.query; word += 16) {
      transpose(rows, word * 4, least(16, sizes.query - word), s.keys + word * kKeys + group, kKeys);
    }
    if (call.value_offset != 0) {
      find_rows<Words>(s, kv_dtype, sizes.value, keys + group, call.value_offset, next + group, num_next - group, rows);
    }
    pack_values(Words{}, rows, sizes, s.values + group / Words::kPack * sizes.padded);
  }
}

// Rows to prefetch, evenly over the time of a tile: the next K and V and, if these belong to another item, its query.
struct NextRows {
  const char* const* rows;  // of K
  int64_t value_offset, row_bytes;
  int count;
  const char* query;  // of the first of num_queries tokens
  int64_t query_stride, query_bytes;
  int num_queries;

  inline __attribute__((always_inline)) void fetch_part(int from, int to, int of) const {
    to = least(to, of);
    for (int t = count * from / of; t < count * to / of; ++t) {
      fetch_row(rows[t], row_bytes);
      if (value_offset != 0) fetch_row(rows[t] + value_offset, row_bytes);
    }
    for (int t = num_queries * from / of; t < num_queries * to / of; ++t) {
      fetch_row(query + t * query_stride, query_bytes);
    }
  }
};

// The rows to prefetch while the keys up to `end` of an item are computed; writes addresses of K to `rows`.
static NextRows next_rows(const AttentionCall& call, const AttentionItem& item, int kv_head, NextUnit unit, int end,
                          const char** rows) {
  const AttentionShape& shape = *call.shape;
  NextRows next = {};
  if (!find_next_keys(rows, call, item, kv_head, unit, end)) return next;
  next.rows = rows;
  next.value_offset = call.value_offset;
  next.row_bytes = shape.head_size * bytes_of(shape.kv_dtype);
  if (end < item.key_end) {
    next.count = least(item.key_end - end, kKeys);
    return next;
  }
  const AttentionItem& other = *unit.item;
  const int group = shape.num_heads / shape.num_kv_heads;
  next.count = least(other.key_end - other.key_begin / kKeys * kKeys, kKeys);
  if (other.shared >= 0) return next;  // its rows are not contiguous
  const int first = place_of(call, other, group, 0).query_row;
  const int last = place_of(call, other, group, other.num_rows - 1).query_row;
  next.query_bytes = group * shape.head_size * bytes_of(shape.dtype);
  next.query_stride = call.query_stride;
  next.query = call.query + first * call.query_stride + unit.kv_head * next.query_bytes;
  next.num_queries = last - first + 1;
  return next;
}

// All rows of the item that see some of the packed keys [first, end) attend to them.
template <class Words>
static void attend_rows(TileScratch<Words>& s, const Sizes& sizes, int num_rows, int first, int end,
                        const NextRows& next) {
  Softmax& softmax = s.softmax;
  int begin = 0, stop = num_rows;
  while (begin < stop && first >= softmax.seen_to[begin]) ++begin;
  while (begin < stop && end <= softmax.seen_from[stop - 1]) --stop;
  const auto seen_by = [&](int row) { return least(end, softmax.seen_to[least(row + kBlockRows, stop) - 1]); };
  const int parts = stop - begin, at_once = sizes.head + sizes.padded <= kShortHead ? kRowsAtOnce : kMaxRows;
  for (int some = begin; some < stop; some += at_once) {
    const int rest = least(some + at_once, stop);
    for (int row = some; row < rest; row += kBlockRows) {
      multiply_rows<Words, kBlockRows, false>(s, sizes, some, row, stop - row, seen_by(row) - first);
    }
    softmax.template step<Words>(s.scores, s.weights, some, rest - some, first, end);
    for (int row = some; row < rest; row += kBlockRows) {
      multiply_rows<Words, kBlockRows, true>(s, sizes, some, row, stop - row, seen_by(row) - first);
      next.fetch_part(row - begin, row - begin + kBlockRows, parts);
    }
  }
}

template <class Words>
static void tile(const AttentionCall& call, const AttentionItem& item, int kv_head, NextUnit unit, char* memory) {
  TileScratch<Words>& s = *reinterpret_cast<TileScratch<Words>*>(memory);
  const int head = call.shape->head_size, value = call.shape->value_size;
  const Sizes sizes = {head, value, head / Words::kPack, round_up(value, 16)};
  const Cached cache = cached(call, item, kv_head);
  s.softmax.template init<Words>(call, item, kv_head);
  for (int i = 0; i < item.num_rows; ++i) load_query(call, item, kv_head, i, s.query + i * head, head);
  const char** now = s.rows[0];
  const char** ahead = s.rows[1];
  find_keys(now, cache, item.key_begin / kKeys * kKeys, item.key_begin, item.key_end);
  over_keys(call, item, kv_head, s.softmax, s.acc, s.all, sizes.padded, kKeys, [&](int first, int end) {
    NextRows next = next_rows(call, item, kv_head, unit, end, ahead);
    const bool few = item.num_rows <= kFewRows;  // then packing takes most of the time
    pack(s, call, now, sizes, end - first, ahead, few ? next.count : 0);
    if (few) next.count = 0;
    attend_rows(s, sizes, item.num_rows, first, end, next);
    const char** const used = now;
    now = ahead;
    ahead = used;
  });
}

}  // namespace
}  // namespace VLLM_LITE_ISA
