// Attention over an int8 cache with integer products: four codes are multiplied by one instruction, without conversion.
// The method is the same for any number of rows: 64 keys are packed, then multiplied with all rows of the item.
// A query row is quantized to integers of 15 bits. The weights of a row, times the scales of V, are quantized to 16
// bits for each step of 64 keys. Both are split into two bytes, and sums of integers are exact. So rounding is finer
// than in bfloat16, and the bits of a row do not depend on the rows that are computed with it.
#pragma once

#include "attention_words.h"

#if defined(__AVX512VNNI__)
namespace VLLM_LITE_ISA {
namespace {

constexpr int kCodeRows = 6;  // rows of a block: their sums, two for each of two vectors, leave registers for operands
constexpr int kLargestQuery = 127 * 128;
constexpr int kLargestWeight = 65535;
constexpr float kLeastWeight = 1e-30f;  // a row whose weights are all smaller adds nothing

struct CodeScratch {
  static constexpr int kSize = kMaxHeadSize;
  static constexpr int kRows = kMaxRows * 128;  // elements of an item's rows, see max_rows
  Softmax softmax;
  alignas(64) int32_t keys[kSize / 4 * kKeys];    // words [head_size / 4][kKeys] of codes + 128
  alignas(64) int32_t values[kKeys / 4 * kSize];  // words [kKeys / 4][padded value_size] of four tokens' codes
  alignas(64) int8_t query[2][kRows];             // [num_rows][head_size]: q = 128 * the first + the second
  alignas(64) float acc[kRows];                   // [num_rows][padded value_size]
  alignas(64) float all[kRows];                   // the same for the sections before
  alignas(64) float k_scales[kKeys], v_scales[kKeys];
  alignas(64) int32_t products[kCodeRows][kKeys];
  alignas(64) float scores[kCodeRows][kKeys];
  alignas(64) float weights[kCodeRows][kKeys];
  alignas(64) uint8_t parts[2][kCodeRows][kKeys];  // weight = 256 * the first + the second
  float part_scales[kCodeRows];
  float query_scales[kMaxRows];
  int32_t biases[kMaxRows];    // amount that the 128 of the keys' bytes adds to a row's products
  const char* rows[2][kKeys];  // of K in the cache: of these tokens and of the next
};

struct CodeSizes {
  int head, value;  // elements of K and V
  int padded;       // of V, filled up to 16
};

// x - x: 0, or NaN if x is NaN or infinite. Added to a scale, it makes the result NaN.
VLLM_LITE_INLINE Vec zero_or_nan(Vec x) {
  return x - x;
}

// Quantizes row i of the item's queries.
VLLM_LITE_INLINE void quantize_query(CodeScratch& s, const AttentionCall& call, const AttentionItem& item, int kv_head,
                                     int i) {
  const int size = call.shape->head_size;
  alignas(64) float row[kMaxHeadSize + kWidth];
  load_query(call, item, kv_head, i, row, round_up(size, kWidth));
  Vec largest = {}, check = {};
  for (int d = 0; d < size; d += kWidth) {
    const Vec x = load(row + d);
    largest = max(vec_of(bits_of_vec(x) & 0x7fffffff), largest);
    check += zero_or_nan(x);
  }
  const float top = largest_of(largest);
  const float factor = top > kLeastWeight ? kLargestQuery / top : 0;
  VecI sum = {};
  for (int d = 0; d < size; d += kWidth) {
    const __m512i x = _mm512_cvtps_epi32(reinterpret_cast<__m512>(load(row + d) * factor));
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(64)), 7);
    const __mmask16 mask = first_lanes(size - d);
    _mm512_mask_cvtepi32_storeu_epi8(s.query[0] + i * size + d, mask, high);
    _mm512_mask_cvtepi32_storeu_epi8(s.query[1] + i * size + d, mask, _mm512_sub_epi32(x, _mm512_slli_epi32(high, 7)));
    sum += reinterpret_cast<VecI>(x);
  }
  s.query_scales[i] = top / kLargestQuery + sum_of(check);
  s.biases[i] = 128 * _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(sum));
}

// total += the products of four unsigned bytes and four signed ones; the second form has the same four signed bytes, at
// `integers`, in all lanes. Written as assembly, because GCC 12 copies the sums otherwise.
VLLM_LITE_INLINE void add_products(__m512i& total, __m512i bytes, __m512i integers) {
  asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(bytes), "v"(integers));
}
VLLM_LITE_INLINE void add_products(__m512i& total, __m512i bytes, const int32_t* integers) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(total) : "v"(bytes), "m"(*integers));
}

// Computes products [R][kKeys] of R rows, from `row` on, with the keys [0, count).
template <int R>
VLLM_LITE_INLINE void multiply_codes(CodeScratch& s, int row, int head, int count) {
  const int words = head / 4;
  const char* query[2] = {reinterpret_cast<const char*>(s.query[0] + row * head),
                          reinterpret_cast<const char*>(s.query[1] + row * head)};
  for (int j = 0; j < count; j += 2 * kWidth) {
    __m512i high[R][2] = {}, low[R][2] = {};
    const int32_t* keys = s.keys + j;
    for (int n = 0; n < words; ++n, keys += kKeys) {
      const __m512i first = _mm512_load_si512(keys), second = _mm512_load_si512(keys + kWidth);
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) {
        const int32_t* part = reinterpret_cast<const int32_t*>(query[0] + i * head + 4 * n);
        add_products(high[i][0], first, part);
        add_products(high[i][1], second, part);
        part = reinterpret_cast<const int32_t*>(query[1] + i * head + 4 * n);
        add_products(low[i][0], first, part);
        add_products(low[i][1], second, part);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const __m512i bias = _mm512_set1_epi32(s.biases[row + i]);
      for (int v = 0; v < 2; ++v) {
        const __m512i total = _mm512_add_epi32(_mm512_slli_epi32(high[i][v], 7), low[i][v]);
        _mm512_store_si512(s.products[i] + j + v * kWidth, _mm512_sub_epi32(total, bias));
      }
    }
  }
}

// Turns row i's products into floats, to which the softmax applies its factor.
VLLM_LITE_INLINE void scale_products(CodeScratch& s, int i, float scale) {
  for (int j = 0; j < kKeys; j += kWidth) {
    const __m512 whole = _mm512_cvtepi32_ps(_mm512_load_si512(s.products[i] + j));
    store(s.scores[i] + j, reinterpret_cast<Vec>(whole) * (load(s.k_scales + j) * scale));
  }
}

// Quantizes row i's weights, times the scales of V, to 16 bits.
VLLM_LITE_INLINE void quantize_weights(CodeScratch& s, int i) {
  constexpr int kVecs = kKeys / kWidth;
  Vec x[kVecs], largest = {}, check = {};
  for (int j = 0; j < kVecs; ++j) {
    x[j] = load(s.weights[i] + j * kWidth) * load(s.v_scales + j * kWidth);
    largest = max(x[j], largest);
    check += zero_or_nan(x[j]);
  }
  const float top = largest_of(largest);
  const float factor = top > kLeastWeight ? kLargestWeight / top : 0;
  s.part_scales[i] = top / kLargestWeight + sum_of(check);
  for (int j = 0; j < kVecs; ++j) {
    const __m512i whole = _mm512_cvtps_epi32(reinterpret_cast<__m512>(x[j] * factor));
    _mm_store_si128(reinterpret_cast<__m128i*>(s.parts[0][i] + j * kWidth),
                    _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
    _mm_store_si128(reinterpret_cast<__m128i*>(s.parts[1][i] + j * kWidth), _mm512_cvtepi32_epi8(whole));
  }
}

// acc [kVecs * 16 of `stride`] = acc * rescale + weights times V for R rows and `count` tokens.
template <int R, int kVecs>
VLLM_LITE_INLINE void add_codes(CodeScratch& s, float* acc, const float* rescale, int place, int stride, int count) {
  __m512i high[R][kVecs] = {}, low[R][kVecs] = {};
  const int32_t* values = s.values + place;
  for (int t = 0; t < count; t += 4, values += stride) {
    __m512i codes[kVecs];
    for (int v = 0; v < kVecs; ++v) codes[v] = _mm512_load_si512(values + v * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      int32_t four[2];
      std::memcpy(&four[0], s.parts[0][i] + t, 4);
      std::memcpy(&four[1], s.parts[1][i] + t, 4);
      const __m512i first = _mm512_set1_epi32(four[0]), second = _mm512_set1_epi32(four[1]);
      for (int v = 0; v < kVecs; ++v) {
        add_products(high[i][v], first, codes[v]);
        add_products(low[i][v], second, codes[v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
    for (int v = 0; v < kVecs; ++v) {
      float* to = acc + i * stride + place + v * kWidth;
      const __m512i total = _mm512_add_epi32(_mm512_slli_epi32(high[i][v], 8), low[i][v]);
      const Vec sum = reinterpret_cast<Vec>(_mm512_cvtepi32_ps(total)) * s.part_scales[i];
      store(to, multiply_add(load(to), splat(rescale[i]), sum));
    }
  }
}

// Attends with R rows of the item, from row `row` on, to the keys at [first, end).
template <int R>
static void attend_codes(CodeScratch& s, const CodeSizes& sizes, int row, int first, int end) {
  Softmax& softmax = s.softmax;
  if (first >= softmax.seen_to[row + R - 1] || end <= softmax.seen_from[row]) return;
  multiply_codes<R>(s, row, sizes.head, end - first);
  for (int i = 0; i < R; ++i) scale_products(s, i, s.query_scales[row + i]);
  softmax.template step<Floats>(s.scores, s.weights, row, R, first, end);
  for (int i = 0; i < R; ++i) quantize_weights(s, i);
  float* acc = s.acc + row * sizes.padded;
  const float* rescale = softmax.rescale + row;
  int place = 0;
  for (; place + 2 * kWidth <= sizes.padded; place += 2 * kWidth) {
    add_codes<R, 2>(s, acc, rescale, place, sizes.padded, end - first);
  }
  if (place < sizes.padded) add_codes<R, 1>(s, acc, rescale, place, sizes.padded, end - first);
}

// The same for `count` rows, 1 <= count <= R.
template <int R>
VLLM_LITE_INLINE void attend_code_rows(CodeScratch& s, const CodeSizes& sizes, int row, int count, int first, int end) {
  if constexpr (R > 1) {
    if (count < R) return attend_code_rows<R - 1>(s, sizes, row, count, first, end);
  }
  attend_codes<R>(s, sizes, row, first, end);
}

// Interleaves 64 bytes of four rows to words of four tokens: out[v] has the words of the elements from 16 * v on.
VLLM_LITE_INLINE void interleave(const __m512i (&rows)[4], __m512i (&out)[4]) {
  // Unpack instructions work within each group of 16 bytes; this permutation makes their results come out in order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i x[4];
  for (int i = 0; i < 4; ++i) x[i] = _mm512_permutexvar_epi32(order, rows[i]);
  const __m512i low = _mm512_unpacklo_epi8(x[0], x[1]), high = _mm512_unpackhi_epi8(x[0], x[1]);
  const __m512i other_low = _mm512_unpacklo_epi8(x[2], x[3]), other_high = _mm512_unpackhi_epi8(x[2], x[3]);
  out[0] = _mm512_unpacklo_epi16(low, other_low);
  out[1] = _mm512_unpackhi_epi16(low, other_low);
  out[2] = _mm512_unpacklo_epi16(high, other_high);
  out[3] = _mm512_unpackhi_epi16(high, other_high);
}

// Packs K of 16 tokens into words [head_size / 4][kKeys]. Meanwhile prefetches the lines of the next tokens.
VLLM_LITE_INLINE void pack_keys(CodeScratch& s, const char* const* rows, const char* const* next, int size, int group) {
  const __m512i half = _mm512_set1_epi8(static_cast<char>(0x80));
  for (int word = 0; word < size / 4; word += 16) {
    for (int t = 0; t < kGroup; ++t) __builtin_prefetch(next[t] + 4 * word, 0, 2);
    Vec words[16];
    const int count = least(16, size / 4 - word);
    turn(rows, 4 * word, count, words);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (i >= count) continue;
      _mm512_store_si512(s.keys + (word + i) * kKeys + group,
                         _mm512_xor_si512(reinterpret_cast<__m512i>(words[i]), half));
    }
  }
  for (int t = 0; t < kGroup; ++t) s.k_scales[group + t] = row_scale(rows[t], size);
}

// Packs V of four tokens into words [padded value_size], with the same prefetch.
VLLM_LITE_INLINE void pack_values(CodeScratch& s, const char* const* rows, const char* const* next, int64_t offset,
                                  const CodeSizes& sizes, int token) {
  int32_t* to = s.values + token / 4 * sizes.padded;
  for (int d = 0; d < sizes.padded; d += 64) {
    const int left = sizes.value - d;
    const __mmask64 mask = left >= 64 ? ~0ull : (1ull << left) - 1;
    __m512i lines[4], words[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      __builtin_prefetch(next[t] + offset + d, 0, 2);
      lines[t] = _mm512_maskz_loadu_epi8(mask, rows[t] + offset + d);
    }
    interleave(lines, words);
    for (int v = 0; v < 4 && d + v * kWidth < sizes.padded; ++v) _mm512_store_si512(to + d + v * kWidth, words[v]);
  }
  for (int t = 0; t < 4; ++t) s.v_scales[token + t] = row_scale(rows[t] + offset, sizes.value);
}

static void codes(const AttentionCall& call, const AttentionItem& item, int kv_head, vllm_lite::NextUnit after,
                  char* memory) {
  CodeScratch& s = *reinterpret_cast<CodeScratch*>(memory);
  const int head = call.shape->head_size, value = call.shape->value_size;
  const CodeSizes sizes = {head, value, round_up(value, kWidth)};
  const Cached cache = cached(call, item, kv_head);
  s.softmax.init<Floats>(call, item, kv_head);
  for (int i = 0; i < item.num_rows; ++i) quantize_query(s, call, item, kv_head, i);
  const int num_blocks = (item.num_rows + kCodeRows - 1) / kCodeRows;
  const char** now = s.rows[0];
  const char** next = s.rows[1];
  find_keys(now, cache, item.key_begin / kKeys * kKeys, item.key_begin, item.key_end);
  over_keys(call, item, kv_head, s.softmax, s.acc, s.all, sizes.padded, kKeys, [&](int first, int end) {
    const bool more = find_next_keys(next, call, item, kv_head, after, end);
    const char* const* ahead = more ? next : now;  // prefetching these again costs nothing
    // All 64, because missing scales would be undefined: masked keys get the scales of another key.
    for (int t = 0; t < kKeys; t += kGroup) pack_keys(s, now + t, ahead + t, head, t);
    for (int t = 0; t < kKeys; t += 4) pack_values(s, now + t, ahead + t, cache.value_offset, sizes, t);
    for (int block = 0, row = 0; block < num_blocks; ++block) {
      const int until = (block + 1) * item.num_rows / num_blocks;
      attend_code_rows<kCodeRows>(s, sizes, row, until - row, first, end);
      row = until;
    }
    const char** const used = now;
    now = next;
    next = used;
  });
}

}  // namespace
}  // namespace VLLM_LITE_ISA
#endif
