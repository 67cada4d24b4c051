// Attention of many rows: packs 64 tokens once so that all rows of the item multiply with them at full speed.
//
// Blocks of kBlockRows rows and several vectors of keys, then of dimensions, have all their sums in registers. The
// softmax runs along with the keys (Dao et al., FlashAttention, 2022), so scores exist for one block at a time.
#pragma once

#include "attention_words.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int kBlockRows =
    6;                        // with 4 vectors (2 where there are 16 registers) their sums leave registers for operands
constexpr int kFewRows = 48;  // up to here packing takes more time than computing
constexpr int kBlockVecs = kWidth == 16 ? 4 : 2;

template <class Words>
struct TileScratch {
  using Element = typename Words::Element;
  static constexpr int kSize = kMaxHeadSize;
  static constexpr int kRows = kMaxRows / 2 * kSize;  // elements of an item's rows, see max_rows
  Softmax softmax;
  alignas(64) float keys[kSize / Words::kPack * kKeys];    // words [head_size / kPack][kKeys]
  alignas(64) float values[kKeys / Words::kPack * kSize];  // words [kKeys / kPack][padded value_size]
  alignas(64) Element query[kRows];                        // [num_rows][head_size]
  alignas(64) float acc[kRows];                            // [num_rows][padded value_size]
  alignas(64) float all[kRows];                            // the same for the sections before
  alignas(64) float scores[kBlockRows][kKeys];
  alignas(64) Element weights[kBlockRows][kKeys];
  alignas(64) Element converted[kGroup * kSize];  // [tokens][padded head_size]
  const char* rows[2][kKeys];                     // of K in the cache: of this tile and of the next
};

// out[i][j] (+)= the sum over n < count of x[i][n] * y[n][j], for kRows rows and kVecs vectors of j. Strides in words.
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
  int j = 0;
  for (; j + kBlockVecs <= num_vecs; j += kBlockVecs) {
    multiply<Words, kRows, kBlockVecs, kAdd>(x, x_stride, y + j * kWidth, y_stride, count, out + j * kWidth, out_stride,
                                             rescale);
  }
  for (; j < num_vecs; ++j) {
    multiply<Words, kRows, 1, kAdd>(x, x_stride, y + j * kWidth, y_stride, count, out + j * kWidth, out_stride,
                                    rescale);
  }
}

struct Sizes {
  int head, value;  // elements of K and V
  int query;        // words of a query row
  int padded;       // of V, filled up to whole groups
};

// kRows rows of the item, from row `first_row` on, meet the keys at [first, end).
template <class Words, int kRows>
static void attend_block(TileScratch<Words>& s, const Sizes& sizes, int first_row, int first, int end) {
  Softmax& softmax = s.softmax;
  const int last_row = first_row + kRows - 1;
  if (first >= softmax.seen_to[last_row] || end <= softmax.seen_from[first_row]) return;
  const bool all_seen =
      end - first == kKeys && end <= softmax.seen_to[first_row] && first >= softmax.seen_from[last_row];
  const float* query = reinterpret_cast<const float*>(s.query) + first_row * sizes.query;
  multiply_all<Words, kRows, false>(query, sizes.query, s.keys, kKeys, sizes.query, s.scores[0], kKeys, nullptr,
                                    kKeys / kWidth);
  for (int i = 0; i < kRows; ++i) {
    if (all_seen) {
      softmax.template step<Words, false>(s.scores[i], s.weights[i], first_row + i, first, end);
    } else {
      softmax.template step<Words, true>(s.scores[i], s.weights[i], first_row + i, first, end);
    }
  }
  const int count = (end - first + Words::kPack - 1) / Words::kPack;
  multiply_all<Words, kRows, true>(reinterpret_cast<const float*>(s.weights), kKeys / Words::kPack, s.values,
                                   sizes.padded, count, s.acc + first_row * sizes.padded, sizes.padded,
                                   softmax.rescale + first_row, sizes.padded / kWidth);
}

// Values of 16 tokens as words [16 / kPack][padded].
VLLM_LITE_INLINE void pack_values(Floats, const char* const* rows, const Sizes& sizes, float* to) {
  for (int t = 0; t < kGroup; ++t) {
    const float* row = reinterpret_cast<const float*>(rows[t]);
    for (int d = 0; d < sizes.padded; d += kWidth) {
      store(to + t * sizes.padded + d, sizes.value > d ? load_some(row + d, sizes.value - d) : Vec{});
    }
  }
}
#if defined(__AVX512BF16__)
VLLM_LITE_INLINE void pack_values(Pairs, const char* const* rows, const Sizes& sizes, float* to) {
  for (int t = 0; t < kGroup; t += 2, to += sizes.padded) {
    for (int d = 0; d < sizes.padded; d += 32) {
      const __m512i x = load_halves(rows[t] + 2 * d, sizes.value - d);
      const __m512i y = load_halves(rows[t + 1] + 2 * d, sizes.value - d);
      _mm512_storeu_si512(to + d, pairs_low(x, y));
      if (d + 16 < sizes.padded) _mm512_storeu_si512(to + d + 16, pairs_high(x, y));
    }
  }
}
#endif

// Addresses of 16 rows of K or V in the cache, or of the same converted. Meanwhile fetches the first num_next of
// `next`.
template <class Words>
VLLM_LITE_INLINE void find_rows(TileScratch<Words>& s, int kv_dtype, int size, const char* const* keys, int64_t offset,
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

// Packs K and V of `count` tokens from the cache; keys: addresses of K. Meanwhile fetches the first num_next of `next`.
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

template <class Words>
VLLM_LITE_INLINE void attend_rows(TileScratch<Words>& s, const Sizes& sizes, int row, int num_rows, int first,
                                  int end) {
  switch (num_rows) {
    case 1:
      return attend_block<Words, 1>(s, sizes, row, first, end);
    case 2:
      return attend_block<Words, 2>(s, sizes, row, first, end);
    case 3:
      return attend_block<Words, 3>(s, sizes, row, first, end);
    case 4:
      return attend_block<Words, 4>(s, sizes, row, first, end);
    case 5:
      return attend_block<Words, 5>(s, sizes, row, first, end);
    default:
      return attend_block<Words, kBlockRows>(s, sizes, row, first, end);
  }
}

template <class Words>
static void tile(const AttentionCall& call, const AttentionItem& item, int kv_head, char* memory) {
  TileScratch<Words>& s = *reinterpret_cast<TileScratch<Words>*>(memory);
  const int head = call.shape->head_size, value = call.shape->value_size;
  const Sizes sizes = {head, value, head / Words::kPack, round_up(value, 16)};
  const Cached cache = cached(call, item, kv_head);
  const int64_t row_bytes = head * bytes_of(call.shape->kv_dtype);
  s.softmax.init(call, item, kv_head);
  for (int i = 0; i < item.num_rows; ++i) load_query(call, item, kv_head, i, s.query + i * head, head);
  const char** now = s.rows[0];
  const char** next = s.rows[1];
  find_keys(now, cache, item.key_begin / kKeys * kKeys, item.key_begin, item.key_end);
  over_keys(call, item, kv_head, s.softmax, s.acc, s.all, sizes.padded, [&](int first, int end) {
    const int num_next = least(item.key_end - end, kKeys);
    if (num_next > 0) find_keys(next, cache, end, item.key_begin, item.key_end);
    // Evenly over the time that the tile takes: with few rows that is mostly the packing.
    const bool few = item.num_rows <= kFewRows;
    pack(s, call, now, sizes, end - first, next, few ? num_next : 0);
    for (int row = 0; row < item.num_rows; row += kBlockRows) {
      attend_rows(s, sizes, row, item.num_rows - row, first, end);
      const int until = few ? 0 : least(num_next, num_next * (row + kBlockRows) / item.num_rows);
      for (int t = num_next * row / item.num_rows; t < until; ++t) {
        fetch_row(next[t], row_bytes);
        if (cache.value_offset != 0) fetch_row(next[t] + cache.value_offset, row_bytes);
      }
    }
    const char** const used = now;
    now = next;
    next = used;
  });
}

}  // namespace
}  // namespace VLLM_LITE_ISA
