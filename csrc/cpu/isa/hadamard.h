// The Hadamard transform of rows of an int8 KV cache; vllm_lite/attention/int8_rows.py says why.
#pragma once

#include "convert.h"

namespace VLLM_LITE_ISA {
namespace {

// x with lanes i and i ^ kHalf exchanged.
template <int kHalf>
VLLM_LITE_INLINE Vec exchange_lanes(Vec x) {
#if defined(__AVX512F__)
  const __m512 lanes = reinterpret_cast<__m512>(x);
  if (kHalf == 1) return reinterpret_cast<Vec>(_mm512_shuffle_ps(lanes, lanes, 0xb1));
  if (kHalf == 2) return reinterpret_cast<Vec>(_mm512_shuffle_ps(lanes, lanes, 0x4e));
  return reinterpret_cast<Vec>(_mm512_shuffle_f32x4(lanes, lanes, kHalf == 4 ? 0xb1 : 0x4e));
#elif defined(__AVX2__)
  const __m256 lanes = reinterpret_cast<__m256>(x);
  if (kHalf == 4) return reinterpret_cast<Vec>(_mm256_permute2f128_ps(lanes, lanes, 1));
  return reinterpret_cast<Vec>(_mm256_permute_ps(lanes, kHalf == 1 ? 0xb1 : 0x4e));
#else
  Vec out;
  for (int i = 0; i < kWidth; ++i) out[i] = x[i ^ kHalf];
  return out;
#endif
}

// Replaces lanes i and i + kHalf by their sum and difference.
template <int kHalf>
VLLM_LITE_INLINE Vec add_and_subtract_lanes(Vec x) {
  Vec signs;
  for (int i = 0; i < kWidth; ++i) signs[i] = i & kHalf ? -1.0f : 1.0f;
  return multiply_add(x, signs, exchange_lanes<kHalf>(x));
}

// 2^(-exponent / 2)
VLLM_LITE_INLINE float root_of_power(int exponent) {
  return float_of(static_cast<uint32_t>(127 - exponent / 2) << 23) * (exponent % 2 != 0 ? 0x1.6a09e6p-1f : 1.0f);
}

// The first steps of the transform: those within vectors, for blocks of `block` elements.
VLLM_LITE_INLINE Vec transform_lanes(Vec x, int block) {
  x = add_and_subtract_lanes<2>(add_and_subtract_lanes<1>(x));
  if constexpr (kWidth > 4) x = add_and_subtract_lanes<4>(x);
  if constexpr (kWidth > 8) x = block > 8 ? add_and_subtract_lanes<8>(x) : x;
  return x;
}

// The steps within each kVecs vectors of a row, for blocks of at least kVecs vectors.
template <int kVecs>
VLLM_LITE_INLINE void transform_vectors(float* row, int size, float factor) {
  for (float* from = row; from < row + size; from += kVecs * kWidth) {
    Vec x[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) x[v] = transform_lanes(load(from + v * kWidth) * factor, kWidth);
#pragma GCC unroll 3
    for (int half = 1; half < kVecs; half *= 2) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        if (v & half) continue;
        const Vec low = x[v], high = x[v + half];
        x[v] = low + high;
        x[v + half] = low - high;
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) store(from + v * kWidth, x[v]);
  }
}

// Multiplies a row by an orthonormal Hadamard matrix in place, in blocks of the largest power of two that divides
// `size`, a multiple of 8. The transform is its own inverse. Its sums have one order on all machines, for the same
// codes.
VLLM_LITE_INLINE void hadamard(float* row, int size) {
  constexpr int kMost = 8 * kWidth;
  const int block = size & -size;
  const float factor = root_of_power(__builtin_ctz(static_cast<unsigned>(size)));
  if (block < kWidth) {
    for (int d = 0; d < size; d += kWidth) {
      store_some(row + d, transform_lanes(load_some(row + d, size - d) * factor, block), size - d);
    }
  } else if (block == kWidth) {
    transform_vectors<1>(row, size, factor);
  } else if (block == 2 * kWidth) {
    transform_vectors<2>(row, size, factor);
  } else if (block == 4 * kWidth) {
    transform_vectors<4>(row, size, factor);
  } else {
    transform_vectors<8>(row, size, factor);
  }
  for (int half = kMost; half < block; half *= 2) {
    for (int d = 0; d < size; d += 2 * half) {
      for (float* low = row + d; low < row + d + half; low += kWidth) {
        const Vec x = load(low), y = load(low + half);
        store(low, x + y);
        store(low + half, x - y);
      }
    }
  }
}

}  // namespace
}  // namespace VLLM_LITE_ISA
