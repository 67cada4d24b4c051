// One row times grouped weights, as in a decode step of one sequence. The layout of a cell is known at compile time,
// for those of GGUF files and of weights that are quantized during loading, and all blocks of a task are one loop, so
// that nothing is prepared for each block. The arithmetic, and so each bit, is that of linear_grouped.cpp, which
// multiplies weights with other layouts.
#pragma once

#include "group_products.h"
#include "row_sums.h"

namespace VLLM_LITE_ISA {
namespace {

#if defined(VLLM_LITE_LARGE_FOURS)
// Distance of prefetches for weights that are in L3: 12288 is the best of 2048 to 24576 bytes; with 4096, 8 bits take
// 1.25 times as long. Weights from memory take 1.05 times as long with this distance.
constexpr int64_t kAheadBytesL3 = 12288;

// Scales, and perhaps minima, of a cell: floats of 16 bits, or bytes times floats that kSuperInputs inputs share.
template <class T, int32_t kCode, bool kHasMinima>
struct FloatScales {
  static constexpr bool kMinima = kHasMinima;
  static constexpr int64_t kBytes = 2 * kBlock;  // of scales, and of minima
  static constexpr int32_t kType = kCode;
  VLLM_LITE_INLINE Vec load_from(const char* from, const float*, int64_t column) {
    return load(reinterpret_cast<const T*>(from) + column);
  }
};
template <bool kHasMinima>
using HalfScales = FloatScales<Float16, kFloat16, kHasMinima>;
template <bool kHasMinima>
using BrainScales = FloatScales<BFloat16, kBFloat16, kHasMinima>;

template <bool kHasMinima>
struct ByteScales {
  static constexpr bool kMinima = kHasMinima;
  static constexpr int64_t kBytes = kBlock;
  static constexpr int32_t kType = kIntegers;
  VLLM_LITE_INLINE Vec load_from(const char* from, const float* supers, int64_t column) {
    return load_whole<int8_t>(from + column) * load(supers + column);
  }
};

// Prefetches bytes [begin, end) from `from` on.
VLLM_LITE_INLINE void prefetch_lines(const char* from, int64_t begin, int64_t end) {
#pragma GCC unroll 8
  for (int64_t i = begin; i < end; i += 64) __builtin_prefetch(from + i);
}

// Loads the weights of four adjacent inputs, the `four`-th ones of a cell with codes at `codes`, for kWidth outputs
// from `column` on, as bytes.
VLLM_LITE_INLINE Ints four_bytes(const Bytes<2>&, const char* codes, int64_t four, int64_t column) {
  return load_ints(codes + four * kLargeStep + 4 * column);
}
VLLM_LITE_INLINE Ints four_bytes(const Fives<2>& fives, const char* codes, int64_t four, int64_t column) {
  const Ints both = load_ints(codes + four / 2 * kOctetBytes + 4 * column);
  const __m128i half = _mm_cvtsi64_si128(4 * (four % 2));
  return add_fifth_bits(both_bits(_mm512_srl_epi16(both, half), all_bytes(15)),
                        fives.bits + four * kBlock / 2 + column / 2);
}

// total += 128 times the products of the LargeFours at `x` with their weights.
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

// Computes the outputs of a task. Codes: for both vectors of a block's outputs. kGroup: inputs of a cell. kFours:
// whether the row may have LargeFours; otherwise it has one plane only. kAhead: distance of prefetches, in bytes.
template <class Codes, class Scales, int64_t kGroup, bool kFours, int64_t kAhead>
__attribute__((noinline)) void multiply_lone(const LinearCall& call, const LinearTask& task, const Rows& rows) {
  constexpr CellLayout kLayout = {kGroup,
                                  Scales::kBytes,
                                  Scales::kMinima ? Scales::kBytes : 0,
                                  kBlock * kGroup * Codes::kBits / 8,
                                  Scales::kType,
                                  Scales::kMinima ? Scales::kType : kNoMinima};
  constexpr int64_t kPart = kGroup < kOnePlane ? kGroup : kOnePlane;  // inputs of the row that share a scale
  constexpr int64_t kCellsOfSuper = kSuperInputs / kGroup, kOctets = kPart / 8;
  const PackedWeight& weight = *call.weight;
  const ReadOn read_on = task.read_on;
  const int64_t num_cells = kLayout.groups(weight.num_inputs);
  const char* cell = static_cast<const char*>(weight.data) + task.first_block * num_cells * kLayout.bytes();
  Codes codes(nullptr);
  for (int64_t block = task.first_block; block < task.first_block + task.num_blocks; ++block) {
    Vec sum[1][2] = {};
    const float* const block_supers = weight.supers_of(block, 0);
    int64_t group = 0;  // of the row
    for (int64_t number = 0; number < num_cells; ++number, cell += kLayout.bytes()) {
      const char* ahead = read_on.ahead_of(cell, kAhead);
      const float* supers = nullptr;
      if constexpr (Scales::kType == kIntegers) {
        supers = block_supers + 2 * kBlock * (number / kCellsOfSuper);
        prefetch_supers(supers, number % kCellsOfSuper);
      }
      codes.enter(cell, kLayout, 0);
      const char* from = cell + kLayout.codes();
      Vec scale[2], minima[2] = {};
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        scale[v] = Scales::load_from(cell, supers, v * kWidth);
        if constexpr (Scales::kMinima)
          minima[v] = Scales::load_from(cell + Scales::kBytes, of_minima(supers), v * kWidth);
      }
      prefetch_lines(ahead, 0, kLayout.codes());
      prefetch_lines(ahead, kLayout.codes() + kGroup / 8 * Codes::kBytes, kLayout.bytes());
      ahead += kLayout.codes();
#pragma GCC unroll 1
      for (int64_t at = 0; at < kGroup / 8 * Codes::kBytes; at += kOctets * Codes::kBytes, ++group) {
        Vec part[1][2];
        Ints total[1][2];
        begin_group<1>(rows.biases + group, total);
        if constexpr (kFours) {
          if (rows.lower[group] != 0) {
            add_fours(codes, rows.fours + group * static_cast<int64_t>(sizeof(LargeFours)), from + at, total);
          }
        }
        const int8_t* x = rows.values + kPart * group;
#pragma GCC unroll 4
        for (int64_t octet = 0; octet < kOctets; ++octet) {
          const int64_t place = at + octet * Codes::kBytes;
          prefetch_lines(ahead + place, 0, Codes::kBytes);
          multiply_octet<false>(codes, x + 8 * octet, 0, from + place, total);
        }
        all_to_floats(total, part);
        add_rows<Scales::kMinima>(rows, group, scale, minima, part, sum);
      }
    }
    const Sums sums = {nullptr, 0, false, true, &call, task.first_row, block * kBlock};
    sums.end({0, 0}, sum);
  }
}

// The same, with the distance of prefetches that suits memory or L3, whichever has the weights.
template <class Codes, class Scales, int64_t kGroup, bool kFours>
bool multiply_lone_from(const LinearCall& call, const LinearTask& task, const Rows& rows) {
  if (task.read_on.from_cache) {
    multiply_lone<Codes, Scales, kGroup, kFours, kAheadBytesL3>(call, task, rows);
  } else {
    multiply_lone<Codes, Scales, kGroup, kFours, kAheadBytes<Codes>>(call, task, rows);
  }
  return true;
}

// The same for groups of kOnePlane inputs, by the types of scales and minima.
template <class Codes, bool kFours>
bool multiply_lone_short(const LinearCall& call, const LinearTask& task, const Rows& rows) {
  const int32_t scale = call.weight->scale_type, minima = call.weight->minima_type;
  const auto run = [&](auto scales) {
    return multiply_lone_from<Codes, decltype(scales), kOnePlane, kFours>(call, task, rows);
  };
  if (scale == kFloat16 && minima == kNoMinima) return run(HalfScales<false>{});
  if (scale == kFloat16 && minima == kFloat16) return run(HalfScales<true>{});
  if (scale == kIntegers && minima == kIntegers) return run(ByteScales<true>{});
  return false;
}

// Computes the outputs of a task with one row. Returns false, and does nothing, for weights with another layout.
bool multiply_lone_row(const LinearCall& call, const LinearTask& task, const Rows& rows) {
  const PackedWeight& weight = *call.weight;
  const int32_t scale = weight.scale_type, minima = weight.minima_type;
  if (weight.type == kGrouped4) {
    if (weight.bytes != nullptr || call.quantized->layout.num_planes != 1) return false;
    if (weight.group_size == kOnePlane) return multiply_lone_short<Nibbles<2>, false>(call, task, rows);
    // From memory the loops of linear_grouped.cpp are as fast: these take 1.01 to 1.04 times as long.
    const bool is_known = weight.group_size == kQuantGroup && scale == kBFloat16 && minima == kBFloat16;
    if (!is_known || !task.read_on.from_cache) return false;
    multiply_lone<Nibbles<2>, BrainScales<true>, kQuantGroup, false, kAheadBytesL3>(call, task, rows);
    return true;
  }
  if (!rows.have_fours) return false;
  if (weight.type == kGrouped5) {
    return weight.group_size == kOnePlane && multiply_lone_short<Fives<2>, true>(call, task, rows);
  }
  if (weight.group_size == kOnePlane) return multiply_lone_short<Bytes<2>, true>(call, task, rows);
  const bool is_known = weight.group_size == 16 && scale == kIntegers && minima == kNoMinima;
  return is_known && multiply_lone_from<Bytes<2>, ByteScales<false>, 16, true>(call, task, rows);
}
#endif

}  // namespace
}  // namespace VLLM_LITE_ISA
