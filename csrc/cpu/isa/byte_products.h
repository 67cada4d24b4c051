// Products of bytes and integers, added up exactly in 32 bits: by VNNI, by NEON's dot products, or by AVX2 and AVX-512,
// whose products of bytes are first added up in 16 bits. VLLM_LITE_MULTIPLIES_BYTES is defined if there is such a way,
// and VLLM_LITE_PLANES_APART if rows with two planes are bytes, not words of 16 bits.
#pragma once

#include "../linear.h"
#include "simd.h"

#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define VLLM_LITE_MULTIPLIES_BYTES
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define VLLM_LITE_PLANES_APART
#endif

#if defined(__ARM_FEATURE_DOTPROD)
#include "neon_bytes.h"
#else
#include "x86_bytes.h"
#endif

namespace VLLM_LITE_ISA {
namespace {

// Whether the planes of a group are stored separately; otherwise its integers are words.
#if defined(VLLM_LITE_PLANES_APART)
constexpr bool kPlanesApart = true;
#else
constexpr bool kPlanesApart = false;
#endif

// Whether LargeFours can take the place of a second plane (RowLayout::has_fours); they always do in groups of up to
// kOnePlane inputs.
#if defined(__AVX512VNNI__)
#define VLLM_LITE_LARGE_FOURS
constexpr bool kLargeFours = true;
#else
constexpr bool kLargeFours = false;
#endif

// Rows of a panel that a product computes together: with two vectors of sums each they fill the registers. A few more
// rows with one plane are still faster in one group, whose float sums are then in memory, than in two.
template <int kPlanes>
constexpr int kGroupRows = kWidth == 16   ? 6
                           : kPlanes == 1 ? 4
                                          : 2;
template <int kPlanes>
constexpr int kAloneRows = kWidth == 16 ? (kLargeFours && kPlanes == 2 ? 8 : 12 / kPlanes) : kGroupRows<kPlanes>;

// Division of a panel's rows into groups, which differ by one row at most.
struct RowGroups {
  int64_t num_rows, count;

  static RowGroups of(const RowLayout& layout, int64_t num_rows) {
    return layout.num_planes == 1 ? of<1>(num_rows) : of<2>(num_rows);
  }
  int64_t first(int64_t group) const { return group * num_rows / count; }

 private:
  template <int kPlanes>
  static RowGroups of(int64_t num_rows) {
    constexpr int64_t kRows = kGroupRows<kPlanes>;
    return {num_rows, num_rows <= kAloneRows<kPlanes> ? 1 : (num_rows + kRows - 1) / kRows};
  }
};

// Four integers of a row, repeated for each output.
VLLM_LITE_INLINE Ints four_of(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return all_ints(four);
}

VLLM_LITE_INLINE Vec to_floats(Ints x) {
  return __builtin_convertvector(reinterpret_cast<VecI>(x), Vec);
}

#if defined(VLLM_LITE_PLANES_APART)
// Sum of a row's planes, upper one first; below 2^31 including its bias.
VLLM_LITE_INLINE Ints both_planes(Ints upper, Ints lower) {
  return reinterpret_cast<Ints>((reinterpret_cast<VecI>(upper) << 7) + reinterpret_cast<VecI>(lower));
}
#endif

// Returns x, but hides from GCC that all its elements are equal: otherwise it would compute with the scalar and copy
// each result to a vector, by units that products need.
VLLM_LITE_INLINE Ints in_vector(Ints x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#endif
  return x;
}

// Initial sums of R rows and V vectors of outputs, before a group's products with its only plane or the upper one of
// two: the biases.
template <int kPlanes, int R, int V>
VLLM_LITE_INLINE void begin_group(const int32_t* biases, Ints (&total)[R][V]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Ints bias = kPlanes == 2 ? in_vector(all_ints(biases[r])) : all_ints(biases[r]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      total[r][v] = bias;
      if constexpr (kPlanes == 2) total[r][v] = reinterpret_cast<Ints>(reinterpret_cast<VecI>(bias) >> 7);
    }
  }
}

// Initial sums for products with both planes of N / 2 rows, each with separate sums.
template <int N, int V>
VLLM_LITE_INLINE void begin_planes(const int32_t* biases, Ints (&total)[N][V]) {
#pragma GCC unroll 16
  for (int r = 0; r < N / 2; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
#if defined(VLLM_LITE_PLANES_APART)
      total[2 * r][v] = all_ints(0);
      total[2 * r + 1][v] = all_ints(biases[r]);
#else
      total[2 * r][v] = total[2 * r + 1][v] = all_twos(biases[r]);
#endif
    }
  }
}

#if defined(VLLM_LITE_PLANES_APART)
// Turns sums of R rows' upper planes into initial sums of their lower planes, all below 2^31.
template <int R, int V>
VLLM_LITE_INLINE void shift_planes(const int32_t* biases, Ints (&total)[R][V]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    // The part of the bias that begin_group() could not include.
    const Ints rest = both_bits(in_vector(all_ints(biases[r])), all_ints(127));
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) total[r][v] = both_planes(total[r][v], rest);
  }
}
#endif

#if !defined(VLLM_LITE_PLANES_APART)
// A vector's bytes as words of 16 bits.
struct WidenedBytes {
  Ints lower, upper;
};

// total += the products of four inputs of R / 2 rows, as words, with the v-th vector of outputs.
template <int R, int V>
VLLM_LITE_INLINE void multiply_words(const int8_t* x, const WidenedBytes& bytes, int v, Ints (&total)[R][V]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r += 2) {
    const Ints words = four_words(x + 4 * r);
    total[r][v] = add_words(total[r][v], bytes.lower, words);
    total[r + 1][v] = add_words(total[r + 1][v], bytes.upper, words);
  }
}
#endif

// The sum of one row and vector after a group's products with both planes.
template <int N, int V>
VLLM_LITE_INLINE Vec planes_sum(const Ints (&total)[N][V], int r, int v) {
#if defined(VLLM_LITE_PLANES_APART)
  return to_floats(both_planes(total[2 * r][v], total[2 * r + 1][v]));
#else
  return to_floats(add_twos(total[2 * r][v], total[2 * r + 1][v]));
#endif
}

}  // namespace
}  // namespace VLLM_LITE_ISA

#endif
