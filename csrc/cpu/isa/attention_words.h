// The two kinds of arithmetic that attention is computed in. Both use vectors of 4-byte words: one float, or a pair of
// bfloat16 that one instruction multiplies and adds up. A word of K and Q has adjacent elements of a row, a word of the
// weights and of V adjacent tokens.
#pragma once

#include <type_traits>

#include "attention_math.h"

namespace VLLM_LITE_ISA {
namespace {

template <class From, class To>
VLLM_LITE_INLINE void convert_row(const void* from, To* to, int size) {
  for (int d = 0; d < size; d += kWidth) {
    store_some(to + d, load_some(static_cast<const From*>(from) + d, size - d), size - d);
  }
}

#if defined(__AVX512BF16__)
// Upper halves of the floats of all float8 codes without sign, which are exact in bfloat16.
struct Fp8Table {
  alignas(64) uint16_t upper[128];
};
template <class From>
static const Fp8Table& fp8_table() {  // made at its first use: nothing in this file may run at load time on a machine
                                      // that lacks the instructions
  static const Fp8Table table = [] {
    Fp8Table made;
    for (int i = 0; i < 128; ++i) made.upper[i] = static_cast<uint16_t>(bits_of(to_float(From{uint8_t(i)})) >> 16);
    return made;
  }();
  return table;
}

static void convert_row(const Fp8Table& table, const void* from, BFloat16* to, int size) {
  __m512i part[4];
  for (int i = 0; i < 4; ++i) part[i] = _mm512_load_si512(table.upper + 32 * i);
  for (int d = 0; d < size; d += 32) {
    const __mmask32 mask = size - d >= 32 ? ~0u : (1u << (size - d)) - 1;
    const char* bytes = static_cast<const char*>(from) + d;
    const __m512i code = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, bytes));
    const __m512i low = _mm512_permutex2var_epi16(part[0], code, part[1]);  // the index is the code's last 6 bits
    const __m512i high = _mm512_permutex2var_epi16(part[2], code, part[3]);
    const __m512i size_bits = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(code, _mm512_set1_epi16(64)), low, high);
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(128)), 8);
    _mm512_mask_storeu_epi16(to + d, mask, _mm512_or_si512(size_bits, sign));
  }
}

static void convert_row(int dtype, const void* from, BFloat16* to, int size) {
  if (dtype == kFp8E4M3) return convert_row(fp8_table<Fp8E4M3>(), from, to, size);
  if (dtype == kFp8E5M2) return convert_row(fp8_table<Fp8E5M2>(), from, to, size);
  for (int d = 0; d < size; d += 32) {
    const __mmask32 mask = size - d >= 32 ? ~0u : (1u << (size - d)) - 1;
    _mm512_mask_storeu_epi16(to + d, mask, _mm512_maskz_loadu_epi16(mask, static_cast<const BFloat16*>(from) + d));
  }
}
#elif defined(VLLM_LITE_MULTIPLIES_PAIRS)
static void convert_row(int dtype, const void* from, BFloat16* to, int size) {
  if (dtype == kFp8E4M3) return convert_row<Fp8E4M3>(from, to, size);
  if (dtype == kFp8E5M2) return convert_row<Fp8E5M2>(from, to, size);
  std::memcpy(to, from, static_cast<size_t>(size) * 2);
}
#endif

static void convert_scaled(const void* from, float* to, int size) {
  const float scale = row_scale(from, size);
  for (int d = 0; d < size; d += kWidth) {
    store_some(to + d, load_some(static_cast<const Int8*>(from) + d, size - d) * scale, size - d);
  }
}

// Converts `size` elements of type `dtype` to floats.
[[maybe_unused]] static void convert_row(int dtype, const void* from, float* to, int size) {
  if (dtype == kFloat32) convert_row<float>(from, to, size);
  if (dtype == kBFloat16) convert_row<BFloat16>(from, to, size);
  if (dtype == kFloat16) convert_row<Float16>(from, to, size);
  if (dtype == kFp8E4M3) convert_row<Fp8E4M3>(from, to, size);
  if (dtype == kFp8E5M2) convert_row<Fp8E5M2>(from, to, size);
  if (dtype == kInt8) convert_scaled(from, to, size);
}

struct Floats {
  using Element = float;
  static constexpr int kPack = 1;  // elements of a word
  static constexpr int kElement = kFloat32;

  VLLM_LITE_INLINE Vec add_product(Vec sum, float x, Vec y) { return multiply_add(splat(x), y, sum); }
  static constexpr float kPerScore = 1;
  // Weight of a score; x is the score times kPerScore, less the largest one.
  VLLM_LITE_INLINE Vec weight(Vec x) { return exp<true>(x); }
  VLLM_LITE_INLINE void put_weights(float* to, Vec x, Vec y) {
    store(to, x);
    store(to + kWidth, y);
  }
};

#if defined(__AVX512BF16__)
struct Pairs {
  using Element = BFloat16;
  static constexpr int kPack = 2;
  static constexpr int kElement = kBFloat16;

  VLLM_LITE_INLINE Vec add_product(Vec sum, float x, Vec y) {
    const __m512i pair = _mm512_castps_si512(_mm512_set1_ps(x));
    return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(pair),
                                                  reinterpret_cast<__m512bh>(y)));
  }
  // 2^x with a relative error of 1e-4, which is enough for the 8 bits of bfloat16; exact for x = 0, the largest weight.
  static constexpr float kPerScore = 1.44269504f;
  VLLM_LITE_INLINE Vec weight(Vec x) {
    const __m512 whole = _mm512_roundscale_ps(reinterpret_cast<__m512>(x), 0);
    const Vec f = x - reinterpret_cast<Vec>(whole);  // in [-0.5, 0.5]
    Vec p = multiply_add(splat(5.5008933e-2f), f, splat(2.4221097e-1f));
    p = multiply_add(p, f, splat(6.9328290e-1f));
    p = multiply_add(p, f, splat(1));
    return reinterpret_cast<Vec>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), whole));
  }
  VLLM_LITE_INLINE void put_weights(BFloat16* to, Vec x, Vec y) {
    const __m512bh both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(x));
    _mm512_storeu_si512(to, reinterpret_cast<__m512i>(both));
  }
};

// Interleaves two rows of bfloat16 to words x[0], y[0], x[1], y[1] and so on: the first 16 words, and the next 16.
VLLM_LITE_INLINE __m512i pairs_low(__m512i x, __m512i y) {
  const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  return _mm512_permutex2var_epi16(x, order, y);
}
VLLM_LITE_INLINE __m512i pairs_high(__m512i x, __m512i y) {
  const __m512i order = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54, 22,
                                         53, 21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
  return _mm512_permutex2var_epi16(x, order, y);
}

VLLM_LITE_INLINE __m512i load_halves(const void* from, int count) {
  if (count >= 32) return _mm512_loadu_si512(from);
  return _mm512_maskz_loadu_epi16(count <= 0 ? 0 : (1u << count) - 1, from);
}
#elif defined(VLLM_LITE_MULTIPLIES_PAIRS)
struct Pairs {
  using Element = BFloat16;
  static constexpr int kPack = 2;
  static constexpr int kElement = kBFloat16;

  VLLM_LITE_INLINE Vec add_product(Vec sum, float x, Vec y) {
    const bfloat16x8_t pair = vreinterpretq_bf16_f32(vdupq_n_f32(x));
    const bfloat16x8_t words = vreinterpretq_bf16_f32(reinterpret_cast<float32x4_t>(y));
    return reinterpret_cast<Vec>(vbfdotq_f32(reinterpret_cast<float32x4_t>(sum), pair, words));
  }
  // 2^x with a relative error of 1e-4, which is enough for the 8 bits of bfloat16; exact for x = 0, the largest weight.
  // 0 below 2^-126.
  static constexpr float kPerScore = 1.44269504f;
  VLLM_LITE_INLINE Vec weight(Vec x) {
    const Vec whole = reinterpret_cast<Vec>(vrndnq_f32(reinterpret_cast<float32x4_t>(x)));
    const Vec f = x - whole;  // in [-0.5, 0.5]
    Vec p = multiply_add(splat(5.5008933e-2f), f, splat(2.4221097e-1f));
    p = multiply_add(p, f, splat(6.9328290e-1f));
    p = multiply_add(p, f, splat(1));
    const VecI exponent = (__builtin_convertvector(max(whole, splat(-127)), VecI) + 127) << 23;
    return p * reinterpret_cast<Vec>(exponent);
  }
  VLLM_LITE_INLINE void put_weights(BFloat16* to, Vec x, Vec y) {
    store(to, x);
    store(to + kWidth, y);
  }
};

VLLM_LITE_INLINE uint16x8_t pairs_low(uint16x8_t x, uint16x8_t y) {
  return vzip1q_u16(x, y);
}
VLLM_LITE_INLINE uint16x8_t pairs_high(uint16x8_t x, uint16x8_t y) {
  return vzip2q_u16(x, y);
}

VLLM_LITE_INLINE uint16x8_t load_halves(const void* from, int count) {
  if (count >= 8) return vld1q_u16(static_cast<const uint16_t*>(from));
  uint16_t halves[8] = {};
  if (count > 0) std::memcpy(halves, from, static_cast<size_t>(count) * 2);
  return vld1q_u16(count >= 8 ? static_cast<const uint16_t*>(from) : halves);
}
#endif

// Row i of the item's queries, padded with zeros to `padded` elements. If the cache has Hadamard-transformed K, the
// query is transformed as well, which leaves their product unchanged.
template <class Element>
VLLM_LITE_INLINE void load_query(const AttentionCall& call, const AttentionItem& item, int kv_head, int i, Element* to,
                                 int padded) {
  const AttentionShape& shape = *call.shape;
  const int group = shape.num_heads / shape.num_kv_heads, size = shape.head_size;
  const Place place = place_of(call, item, group, i);
  const int head = kv_head * group + place.head;
  const char* from = call.query + place.query_row * call.query_stride + head * size * bytes_of(shape.dtype);
  convert_row(shape.dtype, from, to, size);
  if constexpr (std::is_same_v<Element, float>) {
    if (shape.kv_dtype == kInt8) hadamard(to, size);
  }
  for (int d = size; d < padded; ++d) to[d] = Element{};
}

#if defined(__AVX512F__)
VLLM_LITE_INLINE __m512 unpack_low_pairs(__m512 x, __m512 y) {
  return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
}
VLLM_LITE_INLINE __m512 unpack_high_pairs(__m512 x, __m512 y) {
  return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
}

// out[i]: word i of each of 16 rows; zeros for i >= count, where count <= 16.
VLLM_LITE_INLINE void turn(const char* const* rows, int64_t offset, int count, Vec (&out)[16]) {
  const __mmask16 mask = first_lanes(count);
  __m512 a[16], b[16];
#pragma GCC unroll 16
  for (int t = 0; t < 16; ++t) a[t] = _mm512_maskz_loadu_ps(mask, rows[t] + offset);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // a[4i + c]: of rows 4i to 4i + 3 the words 4b + c, in its group b of four lanes
    a[4 * i] = unpack_low_pairs(b[4 * i], b[4 * i + 2]);
    a[4 * i + 1] = unpack_high_pairs(b[4 * i], b[4 * i + 2]);
    a[4 * i + 2] = unpack_low_pairs(b[4 * i + 1], b[4 * i + 3]);
    a[4 * i + 3] = unpack_high_pairs(b[4 * i + 1], b[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 even_low = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88);  // groups 0 and 2
    const __m512 odd_low = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);   // groups 1 and 3
    const __m512 even_high = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
    const __m512 odd_high = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
    out[c] = reinterpret_cast<Vec>(_mm512_shuffle_f32x4(even_low, even_high, 0x88));
    out[8 + c] = reinterpret_cast<Vec>(_mm512_shuffle_f32x4(even_low, even_high, 0xdd));
    out[4 + c] = reinterpret_cast<Vec>(_mm512_shuffle_f32x4(odd_low, odd_high, 0x88));
    out[12 + c] = reinterpret_cast<Vec>(_mm512_shuffle_f32x4(odd_low, odd_high, 0xdd));
  }
}

// to[i * stride + t] = word i of rows[t], for i < count <= 16 and 16 rows.
VLLM_LITE_INLINE void transpose(const char* const* rows, int64_t offset, int count, float* to, int stride) {
  Vec words[16];
  turn(rows, offset, count, words);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (i < count) store(to + i * stride, words[i]);
  }
}
#elif defined(__AVX2__)
// Four words of 8 rows: one vector of each word.
VLLM_LITE_INLINE void turn_four(const char* const* rows, int64_t offset, float* to, int stride) {
  __m256 x[4];
#pragma GCC unroll 4
  for (int t = 0; t < 4; ++t) {
    const auto four = [&](int row) __attribute__((always_inline)) {
      return _mm_loadu_ps(reinterpret_cast<const float*>(rows[row] + offset));
    };
    x[t] = _mm256_insertf128_ps(_mm256_castps128_ps256(four(t)), four(t + 4), 1);
  }
  const __m256 low = _mm256_unpacklo_ps(x[0], x[1]), low_next = _mm256_unpacklo_ps(x[2], x[3]);
  const __m256 high = _mm256_unpackhi_ps(x[0], x[1]), high_next = _mm256_unpackhi_ps(x[2], x[3]);
  _mm256_storeu_ps(to, _mm256_shuffle_ps(low, low_next, 0x44));
  _mm256_storeu_ps(to + stride, _mm256_shuffle_ps(low, low_next, 0xee));
  _mm256_storeu_ps(to + 2 * stride, _mm256_shuffle_ps(high, high_next, 0x44));
  _mm256_storeu_ps(to + 3 * stride, _mm256_shuffle_ps(high, high_next, 0xee));
}

// The same; count is a multiple of 4, as head sizes are multiples of 8.
VLLM_LITE_INLINE void transpose(const char* const* rows, int64_t offset, int count, float* to, int stride) {
  for (int i = 0; i < count; i += 4) {
    turn_four(rows, offset + 4 * i, to + i * stride, stride);
    turn_four(rows + 8, offset + 4 * i, to + i * stride + 8, stride);
  }
}
#elif defined(__aarch64__)
VLLM_LITE_INLINE void turn_four(const char* const* rows, int64_t offset, float* to, int stride) {
  float32x4_t x[4];
  for (int t = 0; t < 4; ++t) x[t] = vld1q_f32(reinterpret_cast<const float*>(rows[t] + offset));
  const float32x4_t low = vzip1q_f32(x[0], x[2]), high = vzip2q_f32(x[0], x[2]);
  const float32x4_t other_low = vzip1q_f32(x[1], x[3]), other_high = vzip2q_f32(x[1], x[3]);
  vst1q_f32(to, vzip1q_f32(low, other_low));
  vst1q_f32(to + stride, vzip2q_f32(low, other_low));
  vst1q_f32(to + 2 * stride, vzip1q_f32(high, other_high));
  vst1q_f32(to + 3 * stride, vzip2q_f32(high, other_high));
}

VLLM_LITE_INLINE void transpose(const char* const* rows, int64_t offset, int count, float* to, int stride) {
  for (int i = 0; i < count; i += 4) {
    for (int t = 0; t < 16; t += 4) turn_four(rows + t, offset + 4 * i, to + i * stride + t, stride);
  }
}
#else
VLLM_LITE_INLINE void transpose(const char* const* rows, int64_t offset, int count, float* to, int stride) {
  for (int t = 0; t < 16; ++t) {
    float words[16];
    std::memcpy(words, rows[t] + offset, static_cast<size_t>(count) * 4);
    for (int i = 0; i < count; ++i) to[i * stride + t] = words[i];
  }
}
#endif

}  // namespace
}  // namespace VLLM_LITE_ISA
