// Vectors of float32 as wide as the instruction set, and conversions of elements from and to other types. Include this
// file in the files of isa/ only, outside of every namespace; it opens namespace VLLM_LITE_ISA itself.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of undefined vectors in its own header
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Defined if an instruction multiplies pairs of bfloat16 and adds them to a float.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define VLLM_LITE_MULTIPLIES_PAIRS
#endif

#include "../common.h"

namespace VLLM_LITE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

// float32 [kWidth]; arithmetic and comparisons work element by element.
typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t VecI __attribute__((vector_size(kWidth * 4)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Fp8E4M3 {  // the "fn" kind: no infinity, 0x7f is NaN, largest 448
  uint8_t bits;
};
struct Fp8E5M2 {  // the upper half of a Float16
  uint8_t bits;
};

// Not Vec{} + x: the addition would stay in the code, because 0 + -0 is 0.
VLLM_LITE_INLINE Vec splat(float x) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_set1_ps(x));
#elif defined(__AVX2__)
  return reinterpret_cast<Vec>(_mm256_set1_ps(x));
#elif defined(__aarch64__)
  return reinterpret_cast<Vec>(vdupq_n_f32(x));
#else
  Vec out;
  for (int i = 0; i < kWidth; ++i) out[i] = x;
  return out;
#endif
}

VLLM_LITE_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

VLLM_LITE_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// ---- one element

VLLM_LITE_INLINE float to_float(float x) {
  return x;
}
VLLM_LITE_INLINE float to_float(BFloat16 x) {
  return float_of(static_cast<uint32_t>(x.bits) << 16);
}
VLLM_LITE_INLINE float to_float(Float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
  __fp16 half;
  std::memcpy(&half, &x, sizeof half);
  return half;
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | rest << 13);
  // A denormal half is a normal float: scaling by 2^112 moves the exponent's bias and is exact.
  return float_of(bits_of(float_of(rest << 13) * 0x1p112f) | sign);
#endif
}
VLLM_LITE_INLINE float to_float(Fp8E5M2 x) {
  return to_float(Float16{static_cast<uint16_t>(x.bits << 8)});
}
VLLM_LITE_INLINE float to_float(Fp8E4M3 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80) << 24, rest = x.bits & 0x7f;
  if (rest == 0x7f) return float_of(sign | 0x7fc00000);
  return float_of(bits_of(float_of(rest << 20) * 0x1p120f) | sign);
}

// Rounding is to nearest, ties to even; NaN stays NaN.
VLLM_LITE_INLINE void from_float(float x, float* out) {
  *out = x;
}
VLLM_LITE_INLINE void from_float(float x, BFloat16* out) {
  const uint32_t bits = bits_of(x);
  out->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
// Rounds to a format with `mantissa` bits whose smallest normal number is 2^least. Numbers beyond the code `largest`
// become `overflow`.
VLLM_LITE_INLINE uint32_t round_to(float x, int mantissa, int least, uint32_t largest, uint32_t overflow) {
  const float size = std::fabs(x);
  if (!(size < 0x1p30f)) return overflow;
  // Adding and subtracting a power of two rounds to its last place, to nearest even: the last place of the number
  // itself, or of the smallest normal one.
  const float least_normal = float_of(static_cast<uint32_t>(least + 127) << 23);
  const float scale = float_of((bits_of(size < least_normal ? least_normal : size) & 0x7f800000));
  const float magic = scale * float_of(static_cast<uint32_t>(23 - mantissa + 127) << 23);
  const volatile float shifted = size + magic;
  const float rounded = shifted - magic;
  const float unit = least_normal * float_of(static_cast<uint32_t>(127 - mantissa) << 23);
  uint32_t code;
  if (rounded < least_normal) {
    code = static_cast<uint32_t>(rounded / unit);
  } else {
    const uint32_t bits = bits_of(rounded);
    const uint32_t exponent = (bits >> 23) - 127 - static_cast<uint32_t>(least) + 1;
    code = exponent << mantissa | (bits & 0x7fffff) >> (23 - mantissa);
  }
  return code > largest ? overflow : code;
}
VLLM_LITE_INLINE void from_float(float x, Float16* out) {
#if defined(__F16C__)
  out->bits = static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  const __fp16 half = static_cast<__fp16>(x);
  std::memcpy(out, &half, sizeof half);
#else
  const uint32_t sign = bits_of(x) >> 16 & 0x8000;
  out->bits = static_cast<uint16_t>(x != x ? 0x7e00 : sign | round_to(x, 10, -14, 0x7bff, 0x7c00));
#endif
}
// Numbers out of the range of fp8 become the largest number: KV scales are chosen so that this is rare, and infinity
// would make the whole row NaN.
VLLM_LITE_INLINE void from_float(float x, Fp8E4M3* out) {
  const uint32_t sign = bits_of(x) >> 24 & 0x80;
  out->bits = static_cast<uint8_t>(sign | (x != x ? 0x7f : round_to(x, 3, -6, 0x7e, 0x7e)));
}
VLLM_LITE_INLINE void from_float(float x, Fp8E5M2* out) {
  const uint32_t sign = bits_of(x) >> 24 & 0x80;
  out->bits = static_cast<uint8_t>(sign | (x != x ? 0x7f : round_to(x, 2, -14, 0x7b, 0x7b)));
}

// ---- kWidth elements from and to unaligned memory

template <class T>
VLLM_LITE_INLINE Vec load(const T* from) {
  Vec out;
  for (int i = 0; i < kWidth; ++i) out[i] = to_float(from[i]);
  return out;
}
template <class T>
VLLM_LITE_INLINE void store(T* to, Vec x) {
  for (int i = 0; i < kWidth; ++i) from_float(x[i], to + i);
}
VLLM_LITE_INLINE Vec load(const float* from) {
  Vec out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
VLLM_LITE_INLINE void store(float* to, Vec x) {
  std::memcpy(to, &x, sizeof x);
}
#if defined(__AVX512F__)
VLLM_LITE_INLINE Vec load(const BFloat16* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return reinterpret_cast<Vec>(_mm512_slli_epi32(wide, 16));
}
VLLM_LITE_INLINE Vec load(const Float16* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return reinterpret_cast<Vec>(_mm512_maskz_cvtph_ps(0xffff, halves));  // GCC 12 warns of the one without a mask
}
VLLM_LITE_INLINE void store(Float16* to, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(reinterpret_cast<__m512>(x), 0));
}
#elif defined(__AVX2__)
VLLM_LITE_INLINE Vec load(const BFloat16* from) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return reinterpret_cast<Vec>(_mm256_slli_epi32(wide, 16));
}
VLLM_LITE_INLINE Vec load(const Float16* from) {
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
VLLM_LITE_INLINE void store(Float16* to, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(reinterpret_cast<__m256>(x), 0));
}
#elif defined(__aarch64__)
VLLM_LITE_INLINE Vec load(const BFloat16* from) {
  return reinterpret_cast<Vec>(vshll_n_u16(vld1_u16(&from->bits), 16));
}
VLLM_LITE_INLINE Vec load(const Float16* from) {
  return reinterpret_cast<Vec>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))));
}
VLLM_LITE_INLINE void store(Float16* to, Vec x) {
  vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32(reinterpret_cast<float32x4_t>(x))));
}
#endif
#if !defined(__AVX512BF16__)
VLLM_LITE_INLINE void store(BFloat16* to, Vec x) {
  typedef uint32_t Bits __attribute__((vector_size(kWidth * 4)));
  typedef uint16_t Halves __attribute__((vector_size(kWidth * 2)));
  const Bits bits = reinterpret_cast<Bits>(x), upper = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Halves halves = __builtin_convertvector(x != x ? Bits{} + 0x7fc0 : upper, Halves);
  std::memcpy(to, &halves, sizeof halves);
}
#else
VLLM_LITE_INLINE void store(BFloat16* to, Vec x) {  // denormals become zero
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x))));
}
#endif

// ---- the first `count` elements, fewer than kWidth; loads set the others to 0, stores leave them out

template <class T>
VLLM_LITE_INLINE Vec load_part(const T* from, int64_t count) {
  T padded[kWidth] = {};
#if defined(__AVX512F__)
  const __mmask16 lanes = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (sizeof(T) == 2) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(padded), _mm256_maskz_loadu_epi16(lanes, from));
  } else if constexpr (sizeof(T) == 4) {
    _mm512_storeu_si512(padded, _mm512_maskz_loadu_epi32(lanes, from));
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(padded), _mm_maskz_loadu_epi8(lanes, from));
  }
#else
  std::memcpy(padded, from, static_cast<size_t>(count) * sizeof(T));
#endif
  return load(padded);
}

template <class T>
VLLM_LITE_INLINE void store_part(T* to, Vec x, int64_t count) {
  T padded[kWidth];
  store(padded, x);
#if defined(__AVX512F__)
  const __mmask16 lanes = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (sizeof(T) == 2) {
    // Not a masked store: a following load of the elements after these would wait for it.
    __m128i rest = _mm_loadu_si128(reinterpret_cast<const __m128i*>(padded));
    if (count & 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), rest);
      rest = _mm_loadu_si128(reinterpret_cast<const __m128i*>(padded + 8));
      to += 8;
    }
    if (count & 4) {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to), rest);
      rest = _mm_srli_si128(rest, 8);
      to += 4;
    }
    uint32_t last = static_cast<uint32_t>(_mm_cvtsi128_si32(rest));
    if (count & 2) {
      std::memcpy(to, &last, 4);
      last = static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_srli_si128(rest, 4)));
      to += 2;
    }
    if (count & 1) std::memcpy(to, &last, 2);
  } else if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_epi32(to, lanes, _mm512_loadu_si512(padded));
  } else {
    _mm_mask_storeu_epi8(to, lanes, _mm_loadu_si128(reinterpret_cast<const __m128i*>(padded)));
  }
#else
  std::memcpy(to, padded, static_cast<size_t>(count) * sizeof(T));
#endif
}

VLLM_LITE_INLINE float sum_of(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x));
#else
  float total = 0;
  for (int i = 0; i < kWidth; ++i) total += x[i];
  return total;
#endif
}
VLLM_LITE_INLINE int32_t max_of(VecI x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(x));
#else
  int32_t most = x[0];
  for (int i = 1; i < kWidth; ++i) most = x[i] > most ? x[i] : most;
  return most;
#endif
}
// x > y ? x : y, so y if one of them is NaN.
VLLM_LITE_INLINE Vec max(Vec x, Vec y) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_maskz_max_ps(0xffff, reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(y)));
#elif defined(__AVX2__)
  return reinterpret_cast<Vec>(_mm256_max_ps(reinterpret_cast<__m256>(x), reinterpret_cast<__m256>(y)));
#else
  return x > y ? x : y;
#endif
}

// a * b + c, rounded once if the machine has such an instruction.
VLLM_LITE_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__FMA__)
  return reinterpret_cast<Vec>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#elif defined(__aarch64__)
  return reinterpret_cast<Vec>(
      vfmaq_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<float32x4_t>(a), reinterpret_cast<float32x4_t>(b)));
#else
  return a * b + c;
#endif
}

// c - a * b, in the same way.
VLLM_LITE_INLINE Vec subtract_product(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(
      _mm512_fnmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__FMA__)
  return reinterpret_cast<Vec>(
      _mm256_fnmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#elif defined(__aarch64__)
  return reinterpret_cast<Vec>(
      vfmsq_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<float32x4_t>(a), reinterpret_cast<float32x4_t>(b)));
#else
  return c - a * b;
#endif
}

// e^x with a relative error of 2e-7, for x <= 88; 0 below -87. kFused: uses multiply_add for the series, so that its
// rounding does not depend on the compiler.
template <bool kFused = false>
VLLM_LITE_INLINE Vec exp(Vec x) {
  const Vec scaled = max(x, splat(-87.33f)) * 1.44269504f;
#if defined(__AVX512F__)
  const Vec whole = reinterpret_cast<Vec>(_mm512_roundscale_ps(reinterpret_cast<__m512>(scaled), 0));
#else
  const Vec magic = splat(0x1.8p23f);  // adding it rounds to a whole number
  Vec shifted = scaled + magic;
#if defined(__aarch64__)
  asm("" : "+w"(shifted));
#else
  asm("" : "+x"(shifted));
#endif
  const Vec whole = shifted - magic;
#endif
  const Vec f = scaled - whole;  // in [-0.5, 0.5]; 2^f by its series
  Vec p = splat(1.5403530e-4f);
  constexpr float kTerms[] = {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f};
  for (const float term : kTerms) p = kFused ? multiply_add(p, f, splat(term)) : p * f + term;
#if defined(__AVX512F__)
  const VecI exponent = (__builtin_convertvector(whole, VecI) + 127) << 23;
  const Vec power = p * reinterpret_cast<Vec>(exponent);
#else
  // The integer is in the low bits of `shifted`. Adding it to the exponent multiplies exactly, as no result is
  // denormal.
  const Vec power = reinterpret_cast<Vec>(reinterpret_cast<VecI>(p) + (reinterpret_cast<VecI>(shifted) << 23));
#endif
  return x < -87.33f ? splat(0) : power;
}

// The probability that a standard normal variable exceeds x >= 0, erfc(x / sqrt(2)) / 2, with a relative error of (2 +
// x^2 / 2) 1.2e-7. It is e^(-x^2 / 2) times a slowly falling function: t = 1 / (1 + 0.35 x) times a polynomial of t.
VLLM_LITE_INLINE Vec normal_tail(Vec x) {
  const Vec t = 1 / (1 + 0.35f * x), y = 2 * t - 1;
  Vec p = splat(-1.1385137e-4f);
  constexpr float kTerms[] = {2.1396868e-4f, 6.9008092e-4f, -1.7543346e-3f, -5.1087597e-3f,
                              1.0233851e-2f, 7.1098946e-2f, 1.7149581e-1f,  2.5324428e-1f};
  for (const float term : kTerms) p = p * y + term;
  return exp(-0.5f * x * x) * t * p;
}

// With a relative error of 5e-7; NaN stays NaN.
VLLM_LITE_INLINE Vec tanh(Vec x) {
  const Vec size = reinterpret_cast<Vec>(reinterpret_cast<VecI>(x) & INT32_MAX);
  const Vec e = exp<true>((size > 20.0f ? splat(20.0f) : size) * 2.0f);
  const Vec large = 1.0f - 2.0f / (e + 1.0f);
  const Vec square = x * x;
  Vec series = splat(62.0f / 2835);
  series = series * square - 17.0f / 315;
  series = series * square + 2.0f / 15;
  series = series * square - 1.0f / 3;
  series = series * square + 1.0f;
  const VecI signed_large = reinterpret_cast<VecI>(large) | (reinterpret_cast<VecI>(x) & INT32_MIN);
  return size >= 0.25f ? reinterpret_cast<Vec>(signed_large) : x * series;
}

}  // namespace
}  // namespace VLLM_LITE_ISA
