// The cells of grouped weights (../linear.h) as float32.
#pragma once

#include "../linear.h"
#include "simd.h"

namespace VLLM_LITE_ISA {
namespace {

// Bytes as float32; signed ones, or not.
template <class Byte>
VLLM_LITE_INLINE Vec load_whole(const char* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  constexpr bool kSigned = static_cast<Byte>(-1) < 0;
  const __m512i whole = kSigned ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
  return reinterpret_cast<Vec>(_mm512_cvtepi32_ps(whole));
#else
  typedef Byte Bytes __attribute__((vector_size(kWidth)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, VecI), Vec);
#endif
}

// Scales or minima of the outputs from `column` on. `type` is a DType, or kIntegers; `supers` are then for them.
VLLM_LITE_INLINE Vec load_scales(const char* from, int32_t type, int64_t column, const float* supers) {
  if (type == kIntegers) return load_whole<int8_t>(from + column) * load(supers + column);
  if (type == kBFloat16) return load(reinterpret_cast<const BFloat16*>(from) + column);
  if (type == kFloat16) return load(reinterpret_cast<const Float16*>(from) + column);
  return load(reinterpret_cast<const float*>(from) + column);
}

VLLM_LITE_INLINE const float* of_minima(const float* supers) {
  return supers == nullptr ? supers : supers + kBlock;
}

// A cell's minima; zeros where it has none. `supers` as PackedWeight::supers_of.
VLLM_LITE_INLINE Vec load_minima(const char* cell, const CellLayout& layout, int64_t column, const float* supers) {
  if (layout.minima_type == kNoMinima) return splat(0);
  const char* from = cell + layout.scale_bytes;
  if (layout.minima_type != kShifts) return load_scales(from, layout.minima_type, column, of_minima(supers));
  return -load_whole<uint8_t>(from + column) * load_scales(cell, layout.scale_type, column, supers);
}

VLLM_LITE_INLINE Vec values_of(const float* values, VecI codes) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_i32gather_ps(reinterpret_cast<__m512i>(codes), values, 4));
#elif defined(__AVX2__)
  return reinterpret_cast<Vec>(_mm256_i32gather_ps(values, reinterpret_cast<__m256i>(codes), 4));
#else
  Vec out;
  for (int i = 0; i < kWidth; ++i) out[i] = values[codes[i]];
  return out;
#endif
}

// A table of 16.
VLLM_LITE_INLINE Vec few_values_of(const float* values, VecI codes) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_permutexvar_ps(reinterpret_cast<__m512i>(codes), _mm512_loadu_ps(values)));
#else
  return values_of(values, codes);
#endif
}

// A cell's codes times scales, without minima: to [group_size][kBlock].
VLLM_LITE_INLINE void widen_codes(const PackedWeight& weight, const char* codes, Vec scale, int64_t column, float* to) {
  const bool four = weight.type == kGrouped4;
  const int64_t num_words = weight.group_size / (four ? 8 : 4);
  for (int64_t word = 0; word < num_words; ++word) {
    VecI bytes;
    std::memcpy(&bytes, codes + 4 * (word * kBlock + column), sizeof bytes);
    for (int i = 0; i < 4; ++i) {
      float* at = to + (word * (four ? 8 : 4) + i) * kBlock + column;
      if (four) {
        store(at, few_values_of(weight.values, bytes >> (8 * i) & 15) * scale);
        store(at + 4 * kBlock, few_values_of(weight.values, bytes >> (8 * i + 4) & 15) * scale);
      } else {
        store(at, values_of(weight.values, bytes >> (8 * i) & 255) * scale);
      }
    }
  }
}

// A whole cell: to [group_size][kBlock].
VLLM_LITE_INLINE void widen_cell(const PackedWeight& weight, const CellLayout& layout, const char* cell,
                                 const float* supers, float* to) {
  for (int64_t column = 0; column < kBlock; column += kWidth) {
    widen_codes(weight, cell + layout.codes(), load_scales(cell, layout.scale_type, column, supers), column, to);
    if (layout.minima_type == kNoMinima) continue;
    const Vec minima = load_minima(cell, layout, column, supers);
    for (int64_t i = 0; i < layout.group_size; ++i) {
      store(to + i * kBlock + column, load(to + i * kBlock + column) - minima);
    }
  }
}

}  // namespace
}  // namespace VLLM_LITE_ISA
