// Conversions of vectors from and to float8 (simd.h has those of single elements) and rows of int8; incomplete vectors.
#pragma once

#include "simd.h"

namespace VLLM_LITE_ISA {
namespace {

typedef uint32_t VecU __attribute__((vector_size(kWidth * 4)));
typedef uint8_t Vec8 __attribute__((vector_size(kWidth)));

VLLM_LITE_INLINE VecU bits_of_vec(Vec x) {
  return reinterpret_cast<VecU>(x);
}
VLLM_LITE_INLINE Vec vec_of(VecU bits) {
  return reinterpret_cast<Vec>(bits);
}

// ---- from float8. kBias is the format's exponent bias. Denormal codes are converted as whole numbers, because
// denormal floats take a hundred cycles each on some machines.

template <int kMantissa, int kBias>
VLLM_LITE_INLINE Vec from_fp8(VecU code) {
  const VecU rest = code & 0x7f;
  const VecU normal = (rest << (23 - kMantissa)) + ((127 - kBias) << 23);
  const Vec whole = __builtin_convertvector(reinterpret_cast<VecI>(rest), Vec);
  const Vec denormal = whole * float_of((128 - kBias - kMantissa) << 23);
  const VecU size = rest < (1 << kMantissa) ? bits_of_vec(denormal) : normal;
  return vec_of(size | (code & 0x80) << 24);
}
VLLM_LITE_INLINE VecU load_bytes(const void* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecU>(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<VecU>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
#else
  Vec8 bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, VecU);
#endif
}
VLLM_LITE_INLINE Vec load(const Fp8E4M3* from) {
  const VecU code = load_bytes(from), nan = code << 24 | 0x7fc00000;
  return vec_of((code & 0x7f) == 0x7f ? nan : bits_of_vec(from_fp8<3, 7>(code)));
}
VLLM_LITE_INLINE Vec load(const Fp8E5M2* from) {
  const VecU code = load_bytes(from), finite = bits_of_vec(from_fp8<2, 15>(code));
  return vec_of((code & 0x7f) >= 0x7c ? finite | 0x7f800000 : finite);
}

// ---- to float8: to nearest, ties to even; numbers out of range become the largest number, NaN stays NaN.

template <int kMantissa, int kBias>
VLLM_LITE_INLINE void store_fp8(void* to, Vec x, float largest) {
  constexpr int kCut = 23 - kMantissa;
  const VecU sign = bits_of_vec(x) >> 24 & 0x80, given = bits_of_vec(x) & 0x7fffffff, limit = VecU{} + bits_of(largest);
  const VecU size = given > limit ? limit : given;
  const VecU rounded = size + (size >> kCut & 1) + ((1 << (kCut - 1)) - 1);
  const VecU normal = (rounded - ((127 - kBias) << 23)) >> kCut;
  // Codes below the smallest normal number are multiples of a unit; adding 2^23 rounds to whole ones.
  const Vec units = vec_of(size) * float_of((126 + kBias + kMantissa) << 23) + 0x1p23f;
  const VecU denormal = bits_of_vec(units) - bits_of(0x1p23f);
  VecU code = size < ((128 - kBias) << 23) ? denormal : normal;
  code = (given > 0x7f800000 ? VecU{} + 0x7f : code) | sign;
  const Vec8 bytes = __builtin_convertvector(code, Vec8);
  std::memcpy(to, &bytes, sizeof bytes);
}
VLLM_LITE_INLINE void store(Fp8E4M3* to, Vec x) {
  store_fp8<3, 7>(to, x, 448.0f);
}
VLLM_LITE_INLINE void store(Fp8E5M2* to, Vec x) {
  store_fp8<2, 15>(to, x, 57344.0f);
}

// ---- int8 with a scale for each row: `size` codes, then a float. An element is code * scale.

struct Int8 {
  int8_t code;
};
VLLM_LITE_INLINE Vec load(const Int8* from) {
  return __builtin_convertvector(reinterpret_cast<VecI>(load_bytes(from) << 24) >> 24, Vec);
}
// To nearest, ties to even. |x| is at most about 127, so that adding 1.5 * 2^23 leaves the code in the low byte. NaN
// gets an arbitrary code.
VLLM_LITE_INLINE void store(Int8* to, Vec x) {
  const Vec8 bytes = __builtin_convertvector(bits_of_vec(x + 0x1.8p23f) & 0xff, Vec8);
  std::memcpy(static_cast<void*>(to), &bytes, sizeof bytes);
}
VLLM_LITE_INLINE float row_scale(const void* row, int size) {
  float scale;
  std::memcpy(&scale, static_cast<const char*>(row) + size, sizeof scale);
  return scale;
}

// ---- the first `count` elements; loads set the others to zero, stores leave them out

#if defined(__AVX512F__)
VLLM_LITE_INLINE __mmask16 first_lanes(int count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1);
}
#endif

template <class T>
VLLM_LITE_INLINE Vec load_some(const T* from, int count) {
  if (count >= kWidth) return load(from);
  return load_part(from, count);
}
template <class T>
VLLM_LITE_INLINE void store_some(T* to, Vec x, int count) {
  if (count >= kWidth) return store(to, x);
  store_part(to, x, count);
}
#if defined(__AVX512F__)
VLLM_LITE_INLINE Vec load_some(const float* from, int count) {
  return reinterpret_cast<Vec>(_mm512_maskz_loadu_ps(first_lanes(count), from));
}
VLLM_LITE_INLINE void store_some(float* to, Vec x, int count) {
  _mm512_mask_storeu_ps(to, first_lanes(count), reinterpret_cast<__m512>(x));
}
#endif

}  // namespace
}  // namespace VLLM_LITE_ISA
