// Rows of any length as vectors of simd.h: incomplete vectors, and conversions of element types.
#pragma once

#include "simd.h"

namespace VLLM_LITE_ISA {
namespace {

// x, with zeros after the first `count` elements.
VLLM_LITE_INLINE Vec first_of(Vec x, int64_t count) {
  if (count == kWidth) return x;
  float elements[kWidth];
  store(elements, x);
  return load_part(elements, count);
}

// x rounded to a T and converted back.
VLLM_LITE_INLINE Vec rounded(Vec x, float) {
  return x;
}
VLLM_LITE_INLINE Vec rounded(Vec x, BFloat16) {
#if defined(__AVX512BF16__)
  const __m256i halves = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x)));
  return reinterpret_cast<Vec>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#else
  typedef uint32_t Bits __attribute__((vector_size(kWidth * 4)));
  const Bits bits = reinterpret_cast<Bits>(x);
  return x != x ? x : reinterpret_cast<Vec>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
#endif
}
VLLM_LITE_INLINE Vec rounded(Vec x, Float16) {
  Float16 stored[kWidth];
  store(stored, x);
  return load(stored);
}

// Calls body(i, count) for each vector of [0, size). count is the constant kWidth except for an incomplete last vector.
template <class Body>
VLLM_LITE_INLINE void each_vector(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) body(i, kWidth);
  if (i < size) body(i, size - i);
}

template <class T>
VLLM_LITE_INLINE Vec load_at(const T* from, int64_t i, int64_t count) {
  return count == kWidth ? load(from + i) : load_part(from + i, count);
}

template <class T>
VLLM_LITE_INLINE void store_at(T* to, int64_t i, Vec x, int64_t count) {
  if (count == kWidth) return store(to + i, x);
  store_part(to + i, x, count);
}

// row += x, rounded to T.
template <class T>
VLLM_LITE_INLINE void add_row(T* row, const T* x, int64_t size) {
  each_vector(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    store_at(row, i, load_at(row, i, count) + load_at(x, i, count), count);
  });
}

// x / (1 + exp(-x))
VLLM_LITE_INLINE Vec silu(Vec x) {
  const Vec negative = 0.0f - x;
  return x / (1.0f + exp(negative > 87.0f ? splat(87.0f) : negative));
}

}  // namespace
}  // namespace VLLM_LITE_ISA

// Defines `name` as `function` for the element type op.dtype, which must be one of these.
#define VLLM_LITE_BY_DTYPE(name, function, Op)                      \
  void name(const Op& op, int64_t first, int64_t last) {            \
    if (op.dtype == kFloat32) function<float>(op, first, last);     \
    if (op.dtype == kBFloat16) function<BFloat16>(op, first, last); \
    if (op.dtype == kFloat16) function<Float16>(op, first, last);   \
  }
