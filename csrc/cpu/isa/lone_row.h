// One row times weights with a scale for 32 inputs, of 5 bits or from L3: what a decode step of one sequence does. What
// layout cells have is known to the compiler here, for those of GGUF files and of weights that are quantized when they
// are loaded; the arithmetic, and so each bit, is that of linear_grouped.cpp, which takes all others.
#pragma once

#include "group_products.h"
#include "row_sums.h"

namespace VLLM_LITE_ISA {
namespace {

#if defined(VLLM_LITE_LARGE_FOURS)
// How far before its use L3 is asked for: with 4096 bytes 8 bits take 1.25 times as long (of 2048 to 24576 the best).
// What comes from memory, which two threads read at its full speed, takes 1.05 times as long this way.
constexpr int64_t kAheadBytesL3 = 12288;

// Scales, and perhaps minima, of a cell: float16, or bytes times numbers that kSuperInputs inputs share.
template <bool kHasMinima>
struct HalfScales {
  static constexpr bool kMinima = kHasMinima;
  static constexpr int64_t kBytes = 2 * kBlock;  // of scales, and of minima
  static constexpr int32_t kType = kFloat16;
  VLLM_LITE_INLINE Vec load_from(const char* from, const float*, int64_t column) {
    return load(reinterpret_cast<const Float16*>(from) + column);
  }
};

template <bool kHasMinima>
struct ByteScales {
  static constexpr bool kMinima = kHasMinima;
  static constexpr int64_t kBytes = kBlock;
  static constexpr int32_t kType = kIntegers;
  VLLM_LITE_INLINE Vec load_from(const char* from, const float* supers, int64_t column) {
    return load_whole<int8_t>(from + column) * load(supers + column);
  }
};

// Lines [begin, end) of what lies at `from`.
VLLM_LITE_INLINE void prefetch_lines(const char* from, int64_t begin, int64_t end) {
#pragma GCC unroll 8
  for (int64_t i = begin; i < end; i += 64) __builtin_prefetch(from + i);
}

// A four of inputs of a cell whose codes begin at `codes`: the bytes of kWidth outputs from `column` on.
VLLM_LITE_INLINE Ints four_bytes(const Bytes<2>&, const char* codes, int64_t four, int64_t column) {
  return load_ints(codes + four * kLargeStep + 4 * column);
}
VLLM_LITE_INLINE Ints four_bytes(const Fives<2>& fives, const char* codes, int64_t four, int64_t column) {
  const Ints both = load_ints(codes + four / 2 * kOctetBytes + 4 * column);
  const __m128i half = _mm_cvtsi64_si128(4 * (four % 2));
  return add_fifth_bits(both_bits(_mm512_srl_epi16(both, half), all_bytes(15)),
                        fives.bits + four * kBlock / 2 + column / 2);
}

// total += 128 times what the fours at `x` and their weights make.
template <class Codes>
VLLM_LITE_INLINE void add_fours(const Codes& codes, const int8_t* x, const char* from, Ints (&total)[1][2]) {
  const uint8_t* places = reinterpret_cast<const uint8_t*>(x);
  Ints upper[2] = {};
#pragma GCC unroll 4
  for (int k = 0; k < kNumLarge; ++k) {
    const Ints integers = four_of(x + offsetof(LargeFours, upper) + 4 * k);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) add_products(upper[v], four_bytes(codes, from, places[k], v * kWidth), integers);
  }
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) total[0][v] = both_planes(upper[v], total[0][v]);
}

// The sums of a block's outputs. `Codes` are of both vectors of them; kFours: rows have LargeFours, else one plane.
template <class Codes, class Scales, bool kFours, int64_t kAhead>
__attribute__((noinline)) void multiply_lone(const Rows& rows, const Cells& cells, const Sums& sums) {
  constexpr CellLayout kLayout = {kOnePlane,
                                  Scales::kBytes,
                                  Scales::kMinima ? Scales::kBytes : 0,
                                  kBlock * kOnePlane * Codes::kBits / 8,
                                  Scales::kType,
                                  Scales::kMinima ? Scales::kType : kNoMinima};
  constexpr int64_t kGroupsOfSuper = kSuperInputs / kOnePlane;
  Codes codes(nullptr);
  Vec sum[1][2];
  sums.begin({0, 0}, sum);
  const char* cell = cells.first;
  for (int64_t group = 0; group < cells.count; ++group, cell += kLayout.bytes()) {
    const char* ahead = cells.read_on.ahead_of(cell, kAhead);
    const float* supers = nullptr;
    if constexpr (Scales::kType == kIntegers) {
      supers = cells.supers + 2 * kBlock * (group / kGroupsOfSuper);
      prefetch_supers(supers, group % kGroupsOfSuper);
    }
    codes.enter(cell, kLayout, 0);
    const char* from = cell + kLayout.codes();
    Vec part[1][2], scale[2], minima[2] = {};
    Ints total[1][2];
    begin_group<1>(rows.biases + group, total);
    if constexpr (kFours) {
      if (rows.lower[group] != 0) {
        add_fours(codes, rows.fours + group * static_cast<int64_t>(sizeof(LargeFours)), from, total);
      }
    }
    prefetch_lines(ahead, 0, kLayout.codes());
    prefetch_lines(ahead, kLayout.codes() + kUnrolled * Codes::kBytes, kLayout.bytes());
#pragma GCC unroll 1
    for (int64_t octet = 0; octet < kUnrolled; ++octet) {  // or all lines would be asked for at once, and wait in line
      const int64_t at = octet * Codes::kBytes;
      prefetch_lines(ahead + kLayout.codes() + at, 0, Codes::kBytes);
      multiply_octet<false>(codes, rows.values + kOnePlane * group + 8 * octet, 0, from + at, total);
    }
    all_to_floats(total, part);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      scale[v] = Scales::load_from(cell, supers, v * kWidth);
      if constexpr (Scales::kMinima)
        minima[v] = Scales::load_from(cell + Scales::kBytes, of_minima(supers), v * kWidth);
    }
    add_rows<Scales::kMinima>(rows, group, scale, minima, part, sum);
  }
  sums.end({0, 0}, sum);
}

// Codes with a layout that is known: one row has LargeFours where it has two planes.
template <template <int> class Codes, int kPlanes>
constexpr bool kIsKnown = false;
template <>
constexpr bool kIsKnown<Nibbles, 1> = true;
template <>
constexpr bool kIsKnown<Fives, 2> = true;
template <>
constexpr bool kIsKnown<Bytes, 2> = true;

// Whether the loops of linear_grouped.cpp take codes more slowly than memory delivers them.
template <class Codes>
constexpr bool kIsSlow = Codes::kBits == 5;

// The same for cells with such a layout. False, and nothing is done, for others.
template <template <int> class Codes, int kPlanes>
bool multiply_lone_row(const Rows& rows, const Cells& cells, const Sums& sums) {
  if constexpr (kIsKnown<Codes, kPlanes>) {
    const int32_t scale = cells.layout.scale_type, minima = cells.layout.minima_type;
    if (cells.num_octets != kUnrolled || cells.parts != 1 || cells.into_l2) return false;
    const bool from_cache = cells.read_on.from_cache;
    if (!from_cache && !kIsSlow<Codes<2>>) return false;
    const auto run = [&](auto scales) {
      constexpr bool kFours = kPlanes == 2;
      if constexpr (kIsSlow<Codes<2>>) {
        if (!from_cache) {
          multiply_lone<Codes<2>, decltype(scales), kFours, kAheadBytes<Codes<2>>>(rows, cells, sums);
          return true;
        }
      }
      multiply_lone<Codes<2>, decltype(scales), kFours, kAheadBytesL3>(rows, cells, sums);
      return true;
    };
    if (scale == kFloat16 && minima == kNoMinima) return run(HalfScales<false>{});
    if (scale == kFloat16 && minima == kFloat16) return run(HalfScales<true>{});
    if (scale == kIntegers && minima == kIntegers) return run(ByteScales<true>{});
  }
  return false;
}
#endif

}  // namespace
}  // namespace VLLM_LITE_ISA
