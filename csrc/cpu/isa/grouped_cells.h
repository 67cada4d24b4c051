// Converts the cells of grouped weights (../linear.h) to float32.
#pragma once

#include "../linear.h"
#include "simd.h"

namespace VLLM_LITE_ISA {
namespace {

// Loads bytes, signed or not, as float32.
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

// Loads scales or minima of the outputs from `column` on. `type` is a DType or kIntegers, whose factors are `supers`.
VLLM_LITE_INLINE Vec load_scales(const char* from, int32_t type, int64_t column, const float* supers) {
  if (type == kIntegers) return load_whole<int8_t>(from + column) * load(supers + column);
  if (type == kBFloat16) return load(reinterpret_cast<const BFloat16*>(from) + column);
  if (type == kFloat16) return load(reinterpret_cast<const Float16*>(from) + column);
  return load(reinterpret_cast<const float*>(from) + column);
}

VLLM_LITE_INLINE const float* of_minima(const float* supers) {
  return supers == nullptr ? supers : supers + kBlock;
}

// A cell's minima; zeros if it has none. `supers`: see PackedWeight::supers_of.
VLLM_LITE_INLINE Vec load_minima(const char* cell, const CellLayout& layout, int64_t column, const float* supers) {
  if (layout.minima_type == kNoMinima) return splat(0);
  const char* from = cell + layout.scale_bytes;
  if (layout.minima_type != kShifts) return load_scales(from, layout.minima_type, column, of_minima(supers));
  return -load_whole<uint8_t>(from + column) * load_scales(cell, layout.scale_type, column, supers);
}

// Values of the 8-bit codes at bit `at` of each word, from a table of 256.
struct ManyValues {
  const float* values;
  explicit ManyValues(const float* from) : values(from) {}
  VLLM_LITE_INLINE Vec of(const ManyValues& table, VecI words, int at) {
    const VecI codes = words >> at & 255;
#if defined(__AVX512F__)
    return reinterpret_cast<Vec>(_mm512_i32gather_ps(reinterpret_cast<__m512i>(codes), table.values, 4));
#elif defined(__AVX2__)
    return reinterpret_cast<Vec>(_mm256_i32gather_ps(table.values, reinterpret_cast<__m256i>(codes), 4));
#else
    Vec out;
    for (int i = 0; i < kWidth; ++i) out[i] = table.values[codes[i]];
    return out;
#endif
  }
};

// The same for E4M3's table, by arithmetic, which takes a third of the time.
struct E4m3Values {
  explicit E4m3Values(const float*) {}
  VLLM_LITE_INLINE Vec of(const E4m3Values&, VecI words, int at) {
    const VecI size = words >> at & 127, bits = size << 20;
    const Vec normal = reinterpret_cast<Vec>(bits + (120 << 23));
    const Vec denormal = reinterpret_cast<Vec>(bits + (121 << 23)) - 0x1p-6f;
    const VecI found =
        reinterpret_cast<VecI>(size < 8 ? denormal : normal) | (size == 127 ? 0x7fc00000 + VecI{} : VecI{});
    return reinterpret_cast<Vec>(found | (words << (24 - at) & INT32_MIN));
  }

  static bool takes(const float* values) {
    bool all = true;
    for (int code = 0; code < 256; ++code) {
      const float value = to_float(Fp8E4M3{static_cast<uint8_t>(code)});
      all = all && (bits_of(values[code]) == bits_of(value) || (values[code] != values[code] && value != value));
    }
    return all;
  }
};

// The same for consecutive whole numbers.
struct WholeValues {
  float least;
  explicit WholeValues(const float* from) : least(*from) {}
  VLLM_LITE_INLINE Vec of(const WholeValues& table, VecI words, int at) {
    return __builtin_convertvector(words >> at & 255, Vec) + table.least;
  }
};

// The same for codes of 5 bits, whose fifth bits are stored separately.
struct FiveValues {
  float least;
  explicit FiveValues(const float* from) : least(*from) {}

  // Loads the fifth bits at `from`, four of each output, into the lowest bits of its element; higher bits are
  // undefined.
  VLLM_LITE_INLINE VecI fifth_bits(const char* from) {
    VecI out = {};
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    out = reinterpret_cast<VecI>(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes)));
#else
    for (int i = 0; i < kWidth; ++i) out[i] = static_cast<uint8_t>(from[i / 2]);
#endif
    VecI shifts;
    for (int i = 0; i < kWidth; ++i) shifts[i] = 4 * (i % 2);
    return out >> shifts;
  }
  // Value of input i of four, whose lower bits are at bit `at` of `words`.
  VLLM_LITE_INLINE Vec of(const FiveValues& table, VecI words, int at, VecI bits, int i) {
    return __builtin_convertvector((words >> at & 15) | (bits >> i & 1) << 4, Vec) + table.least;
  }
};

// Values of the 4-bit codes at bit `at` of each word, from a table of 16.
struct FewValues {
#if defined(__AVX512F__)
  __m512 values;
  explicit FewValues(const float* from) : values(_mm512_loadu_ps(from)) {}
  VLLM_LITE_INLINE Vec of(const FewValues& table, VecI words, int at) {
    return reinterpret_cast<Vec>(_mm512_permutexvar_ps(reinterpret_cast<__m512i>(words >> at), table.values));
  }
#elif defined(__AVX2__)
  __m256 low, high;
  explicit FewValues(const float* from) : low(_mm256_loadu_ps(from)), high(_mm256_loadu_ps(from + 8)) {}
  VLLM_LITE_INLINE Vec of(const FewValues& table, VecI words, int at) {
    const __m256i codes = reinterpret_cast<__m256i>(words >> at);  // the instruction uses the lowest three bits
    const __m256 is_high = reinterpret_cast<__m256>(words << (28 - at));
    return reinterpret_cast<Vec>(_mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, codes),
                                                  _mm256_permutevar8x32_ps(table.high, codes), is_high));
  }
#else
  const float* values;
  explicit FewValues(const float* from) : values(from) {}
  VLLM_LITE_INLINE Vec of(const FewValues& table, VecI words, int at) {
    Vec out;
    for (int i = 0; i < kWidth; ++i) out[i] = table.values[words[i] >> at & 15];
    return out;
  }
#endif
};

// Converts a cell's codes times scales, without minima, to [group_size][kBlock]. kInputs is the number of a word's
// inputs.
template <int kInputs, class Values>
VLLM_LITE_INLINE void widen_codes(const Values& values, const char* codes, int64_t group_size, Vec scale,
                                  int64_t column, float* to) {
  for (int64_t first = 0; first < group_size; first += kInputs, codes += 4 * kBlock) {
    VecI words;
    std::memcpy(&words, codes + 4 * column, sizeof words);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      float* at = to + (first + i) * kBlock + column;
      store(at, Values::of(values, words, 8 * i) * scale);
      if constexpr (kInputs == 8) store(at + 4 * kBlock, Values::of(values, words, 8 * i + 4) * scale);
    }
  }
}

}  // namespace
}  // namespace VLLM_LITE_ISA
