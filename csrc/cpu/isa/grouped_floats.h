// Grouped weights times unquantized rows, in float32. The products of a group are summed up for each output in the
// order of its inputs. This sum times the group's scale, less its minimum times the sum of the row's inputs, is added
// to the total. So a weight needs no multiplication by its scale.
//
// For few rows, codes are converted in registers, and several groups at a time, because each sum is a chain of
// additions. For more rows they are converted in memory, once for all. Both ways give the same bits.
#pragma once

#include "grouped_cells.h"

namespace VLLM_LITE_ISA {
namespace {

// Rows of x, [rows][stride], from the first input of a cell on, and the sum of each group of inputs.
struct FloatRows {
  const float* x;
  int64_t stride;
  const float* sums;  // [rows][sums_stride]
  int64_t sums_stride;
};

// A cell, and the supers of its scales.
struct FloatCell {
  const char* from;
  const float* supers;
};

template <int R>
VLLM_LITE_INLINE void add_products(const FloatRows& rows, int64_t input, Vec first, Vec second, Vec (&total)[R][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Vec value = splat(rows.x[r * rows.stride + input]);
    total[r][0] = multiply_add(value, first, total[r][0]);
    total[r][1] = multiply_add(value, second, total[r][1]);
  }
}

// sums [R][stride] += the scaled totals of one group, for R rows and the outputs from `column` on.
template <int R>
VLLM_LITE_INLINE void add_total(const FloatRows& rows, int64_t group, const CellLayout& layout, const FloatCell& cell,
                                int64_t column, const Vec (&total)[R][2], float* sums, int64_t stride) {
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const int64_t at = column + v * kWidth;
    const Vec scale = load_scales(cell.from, layout.scale_type, at, cell.supers);
    const Vec minima = load_minima(cell.from, layout, at, cell.supers);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float* to = sums + r * stride + at;
      const Vec part = multiply_add(total[r][v], scale, load(to));
      store(to, subtract_product(minima, splat(rows.sums[r * rows.sums_stride + group]), part));
    }
  }
}

// R rows times G consecutive cells, the first of which is number `group` of the rows'. kInputs is the number of a
// word's inputs.
template <int R, int G, int kInputs, class Values>
void multiply_codes(const Values& values, const FloatRows& rows, int64_t group, const CellLayout& layout,
                    const FloatCell (&cells)[G], float* sums, int64_t stride) {
  for (int64_t column = 0; column < kBlock; column += 2 * kWidth) {
    Vec total[G][R][2] = {};
    const int64_t num_words = layout.group_size / kInputs;
    for (int64_t word = 0; word < num_words; ++word) {
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        const char* codes = cells[g].from + layout.codes() + 4 * (word * kBlock + column);
        VecI words[2];
        std::memcpy(words, codes, sizeof words);
        const int64_t input = (group + g) * layout.group_size + word * kInputs;
#pragma GCC unroll 8
        for (int i = 0; i < kInputs; ++i) {
          const int at = 8 * (i % 4) + 4 * (i / 4);
          add_products<R>(rows, input + i, Values::of(values, words[0], at), Values::of(values, words[1], at),
                          total[g]);
        }
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      add_total<R>(rows, group + g, layout, cells[g], column, total[g], sums, stride);
    }
  }
}

// Converts a cell's codes, without its scales, to [group_size][kBlock].
template <int kInputs, class Values>
void widen_numbers(const Values& values, const CellLayout& layout, const char* cell, float* to) {
  for (int64_t column = 0; column < kBlock; column += kWidth) {
    widen_codes<kInputs>(values, cell + layout.codes(), layout.group_size, splat(1), column, to);
  }
}

// The same for codes of 5 bits.
template <int kInputs>
void widen_numbers(const FiveValues& values, const CellLayout& layout, const char* cell, float* to) {
  const char *codes = cell + layout.codes(), *fifth = cell + layout.fifth_bits();
  for (int64_t first = 0; first < layout.group_size; first += 4, fifth += kBlock / 2, to += 4 * kBlock) {
    const int shift = first % 8 == 0 ? 0 : 4;
    for (int64_t column = 0; column < kBlock; column += kWidth) {
      VecI words;
      std::memcpy(&words, codes + 4 * (first / 8 * kBlock + column), sizeof words);
      const VecI bits = FiveValues::fifth_bits(fifth + column / 2);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        store(to + i * kBlock + column, FiveValues::of(values, words, 8 * i + shift, bits, i));
      }
    }
  }
}

// R rows times a cell whose values are `wide` [group_size][kBlock].
template <int R>
void multiply_numbers(const FloatRows& rows, int64_t group, const CellLayout& layout, const FloatCell& cell,
                      const float* wide, float* sums, int64_t stride) {
  for (int64_t column = 0; column < kBlock; column += 2 * kWidth) {
    Vec total[R][2] = {};
    for (int64_t i = 0; i < layout.group_size; ++i) {
      const float* at = wide + i * kBlock + column;
      add_products<R>(rows, group * layout.group_size + i, load(at), load(at + kWidth), total);
    }
    add_total<R>(rows, group, layout, cell, column, total, sums, stride);
  }
}

// The same for `count` rows, 1 <= count <= R.
template <int R>
void multiply_some(int64_t count, const FloatRows& rows, int64_t group, const CellLayout& layout, const FloatCell& cell,
                   const float* wide, float* sums, int64_t stride) {
  if constexpr (R > 1) {
    if (count < R) return multiply_some<R - 1>(count, rows, group, layout, cell, wide, sums, stride);
  }
  multiply_numbers<R>(rows, group, layout, cell, wide, sums, stride);
}

}  // namespace
}  // namespace VLLM_LITE_ISA
