// Products of bytes of weights with integers of rows, within one group of inputs; linear_grouped.cpp adds up groups.
#pragma once

#include <cstddef>

#include "byte_products.h"
#include "grouped_codes.h"
#include "linear_task.h"

namespace VLLM_LITE_ISA {
namespace {

#if defined(VLLM_LITE_MULTIPLIES_BYTES)
// Distance of prefetches for rows that are a single group ("alone"). Codes of fewer bits take longer to multiply per
// byte, so more must be under way (8192 bytes take 0.89 times as long with 5 bits, 0.97 with 4, but 1.03 with 8).
template <class Codes>
constexpr int64_t kAheadBytes = Codes::kBytes == kOctetBytes ? 8192 : 4096;
// On Intel's processors, which are those with tiles, prefetches go to L2: prefetches to L1 that wait for memory delay
// L2's own prefetches. Two threads then read 1.07 to 1.11 times as fast (4096 is the best of 3072 to 16384 bytes).
constexpr int64_t kAheadBytesL2 = 4096, kAheadBytesL1 = 1024;
// Octets of a group that are unrolled for many rows: groups of 32 inputs are the most common.
constexpr int kUnrolled = 4;

// One group of rows, from one of its groups of inputs on.
struct Rows {
  const int8_t* values;
  const int8_t* fours;  // LargeFours, [groups][rows]
  const float* scales;  // [groups][rows], like biases and sums
  const int32_t* biases;
  const float* sums;
  const uint8_t* lower;  // [groups]: whether any of these rows has a lower plane
  bool have_fours;
};

// Consecutive cells of one block.
struct Cells {
  const char* first;
  CellLayout layout;
  int64_t count;
  int64_t parts;         // groups of the rows' inputs that share a cell
  int64_t num_octets;    // of such a group
  const uint8_t* table;  // [16] or nullptr
  bool is_wide;          // whether products subtract 128 from the bytes first (taken_off)
  const float* supers;   // PackedWeight::supers_of the first
  bool into_l2;          // whether rows that are alone prefetch into L2
  const float* floats;   // scales and minima as floats, for rows that are not alone: [count][2][kBlock]

  const float* supers_of(int64_t number) const {
    return supers == nullptr ? supers : supers + 2 * kBlock * (number * layout.group_size / kSuperInputs);
  }
};

// total [R][V] += the products of eight inputs. kBoth: R counts both planes of R / 2 rows; the lower plane is at
// x + plane.
template <bool kBoth, int R, int V, class Codes>
VLLM_LITE_INLINE void multiply_octet(const Codes& codes, const int8_t* x, [[maybe_unused]] int64_t plane,
                                     const char* from, Ints (&total)[R][V]) {
#if defined(__AVX512VNNI__)
  const auto add = [&](const int8_t* four, Ints first, Ints second) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Ints integers = four_of(!kBoth ? four + 4 * r : four + r % 2 * plane + 4 * (r / 2));
      add_products(total[r][0], first, integers);
      add_products(total[r][1], second, integers);
    }
  };
  const Octet low = codes.load(from, 0), high = codes.load(from, 1);
  add(x, low.first, high.first);
  add(x + (kBoth ? 2 * R : 4 * R), low.second, high.second);
#elif defined(VLLM_LITE_PLANES_APART)
  const auto four = [&](int r, int half) __attribute__((always_inline)) {
    return x + (kBoth ? r % 2 * plane + 4 * (r / 2) + 2 * R * half : 4 * (r + R * half));
  };
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    Octet octet = codes.load(from, v);
    if constexpr (kSignedBytes && !Codes::kNarrow) octet = {signed_bytes(octet.first), signed_bytes(octet.second)};
    add_octet(octet.first, octet.second, four, v, total);
  }
#else
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    if constexpr (kBoth) {
      multiply_words(x, codes.widened(from, v, false), v, total);
      multiply_words(x + 4 * R, codes.widened(from, v, true), v, total);
      continue;
    }
    const Octet weights = codes.load(from, v);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Ints first = four_of(x + 4 * r), second = four_of(x + 4 * (R + r));
      if constexpr (Codes::kNarrow) {
        total[r][v] = add_narrow(total[r][v], weights.first, first, weights.second, second);
      } else {
        total[r][v] = add_signed(total[r][v], signed_bytes(weights.first), first);
        total[r][v] = add_signed(total[r][v], signed_bytes(weights.second), second);
      }
    }
  }
#endif
}

// The codes of a group, and the memory to prefetch during its products.
struct Stretch {
  const char* from;
  int64_t num_octets;
  Ahead ahead;
  bool into_l2 = false;
};

// The same for all octets of a group, whose number is known at compile time.
template <bool kBoth, int kOctets, int R, int V, class Codes>
VLLM_LITE_INLINE void multiply_octets(const Codes& codes, const int8_t* x, const Stretch& stretch,
                                      Ints (&total)[R][V]) {
  constexpr int64_t kStep = kBoth && kPlanesApart ? 4 * R : 8 * R;
  for (int64_t at = 0; at < kOctets * stretch.ahead.step; at += 64) __builtin_prefetch(stretch.ahead.from + at);
  pair_rows(total);
#pragma GCC unroll 4
  for (int64_t octet = 0; octet < kOctets; ++octet)
    multiply_octet<kBoth>(codes, x + octet * kStep, kOctets * kStep, stretch.from + octet * Codes::kBytes, total);
  part_rows(total);
}

// total [R][V] += the products of one group; kBoth as above.
template <bool kBoth, bool kAlone, int kOctets, int R, int V, class Codes>
VLLM_LITE_INLINE void multiply_codes(const Codes& codes, const int8_t* x, const Stretch& stretch, Ints (&total)[R][V]) {
  if constexpr (kOctets > 0) return multiply_octets<kBoth, kOctets>(codes, x, stretch, total);
  constexpr int64_t kStep = kBoth && kPlanesApart ? 4 * R : 8 * R;
  const int64_t plane = stretch.num_octets * kStep;
  const char* from = stretch.from;
  pair_rows(total);
  for (int64_t octet = 0; octet < stretch.num_octets; ++octet, from += Codes::kBytes, x += kStep) {
    if constexpr (kAlone) {
      constexpr int64_t kBytes = Codes::kBytes * V * kWidth / kBlock;
      if (stretch.into_l2) {
        prefetch_l2<kBytes>({from + kAheadBytesL2, 0}, 0);
        prefetch<kBytes>({from + kAheadBytesL1, 0}, 0);
      } else {
        prefetch<kBytes>({from + kAheadBytes<Codes>, 0}, 0);
      }
    } else {
      const char* line = stretch.ahead.from + octet * stretch.ahead.step;
      __builtin_prefetch(line);
      for (int64_t i = 64; i < stretch.ahead.step; i += 64) __builtin_prefetch(line + i);
    }
    multiply_octet<kBoth>(codes, x, plane, from, total);
  }
  part_rows(total);
}

template <int R, int V>
VLLM_LITE_INLINE void all_to_floats(const Ints (&total)[R][V], Vec (&part)[R][V]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) part[r][v] = to_floats(total[r][v]);
  }
}

// part = the products of a group with the only plane of R rows, or with the upper one.
template <int kPlanes, bool kAlone, int kOctets, int R, int V, class Codes>
VLLM_LITE_INLINE void multiply_plane(const Codes& codes, const int8_t* x, const int32_t* biases, const Stretch& stretch,
                                     Vec (&part)[R][V]) {
  Ints total[R][V];
  begin_group<kPlanes>(biases, total);
  multiply_codes<false, kAlone, kOctets>(codes, x, stretch, total);
  all_to_floats(total, part);
}

// The same for two planes at once, each with its own sums: with few rows, chains of additions would be too few.
template <bool kAlone, int kOctets, int R, int V, class Codes>
VLLM_LITE_INLINE void multiply_planes(const Codes& codes, const int8_t* x, const int32_t* biases,
                                      const Stretch& stretch, Vec (&part)[R][V]) {
  Ints total[2 * R][V];
  begin_planes(biases, total);
  multiply_codes<true, kAlone, kOctets>(codes, x, stretch, total);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) part[r][v] = planes_sum(total, r, v);
  }
}

#if defined(VLLM_LITE_PLANES_APART)
// The same for the upper plane and then the lower one, if there is one, in the same sums.
template <bool kAlone, int kOctets, int R, int V, class Codes>
VLLM_LITE_INLINE void multiply_in_turn(const Codes& codes, const int8_t* x, const int32_t* biases,
                                       const Stretch& stretch, bool lower, Vec (&part)[R][V]) {
  Ints total[R][V];
  begin_group<2>(biases, total);
  multiply_codes<false, kAlone, kOctets>(codes, x, stretch, total);
  if (lower) {
    Stretch again = {stretch.from, stretch.num_octets, {}};
    asm("" : "+r"(again.from), "+r"(biases));  // load both once more, so that they take no registers meanwhile
    shift_planes(biases, total);
    multiply_codes<false, false, kOctets>(codes, x + 8 * R * stretch.num_octets, again, total);
  }
  all_to_floats(total, part);
}
#endif

// Stores the codes of some octets as bytes, as codes of 8 bits are stored. Where products of these take 128 off, it is
// added first: the rows were quantized for codes from which nothing is taken (taken_off).
template <int V, class Codes>
VLLM_LITE_INLINE void unpack_octets(const Codes& codes, const char* from, int64_t num_octets, char* to) {
  for (int64_t octet = 0; octet < num_octets; ++octet, from += Codes::kBytes, to += 2 * kOctetBytes) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      Octet bytes = codes.load(from, v);
#if defined(__ARM_FEATURE_DOTPROD)
      if (kSignedBytes) bytes = {signed_bytes(bytes.first), signed_bytes(bytes.second)};
#endif
      std::memcpy(to + v * sizeof(Ints), &bytes.first, sizeof(Ints));
      std::memcpy(to + kOctetBytes + v * sizeof(Ints), &bytes.second, sizeof(Ints));
    }
  }
}

#if defined(VLLM_LITE_LARGE_FOURS)
constexpr int64_t kLargeStep = 4 * kBlock;  // bytes of weights from one four to the next

// Starts the sums of R rows in a group with the products of their LargeFours, at `x`. The group's weights are at
// `bytes`, [fours][kLargeStep].
template <int R, int V>
VLLM_LITE_INLINE void begin_fours(const int8_t* x, const char* bytes, const int32_t* biases, Ints (&total)[R][V]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const int8_t* own = x + r * static_cast<int64_t>(sizeof(LargeFours));
    const uint8_t* places = reinterpret_cast<const uint8_t*>(own);
    const Ints bias = all_ints(biases[r]);
    Ints upper[V] = {};
#pragma GCC unroll 4
    for (int k = 0; k < kNumLarge; ++k) {
      const Ints integers = four_of(own + offsetof(LargeFours, upper) + 4 * k);
      const char* from = bytes + places[k] * kLargeStep;
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) add_products(upper[v], load_ints(from + v * sizeof(Ints)), integers);
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) total[r][v] = both_planes(upper[v], bias);
  }
}

// One group of inputs of a group of rows, some of which may have LargeFours.
struct RowsOfGroup {
  const int8_t *values, *fours;
  const int32_t* biases;
  bool have_fours;
};

// part = the products of the group with these rows.
template <bool kAlone, int kOctets, int R, int V, class Codes>
VLLM_LITE_INLINE void multiply_fours(const Codes& codes, const RowsOfGroup& rows, const Stretch& stretch,
                                     Vec (&part)[R][V]) {
  Ints total[R][V];
  if (!rows.have_fours) {
    begin_group<1>(rows.biases, total);
  } else if constexpr (Codes::kBytes == 2 * kOctetBytes) {
    begin_fours(rows.fours, stretch.from, rows.biases, total);
  } else {
    alignas(64) char bytes[kOnePlane / 4 * kLargeStep];  // larger groups have codes of 8 bits, used in place
    unpack_octets<V>(codes, stretch.from, stretch.num_octets, bytes);
    begin_fours(rows.fours, bytes, rows.biases, total);
  }
  multiply_codes<false, kAlone, kOctets>(codes, rows.values, stretch, total);
  all_to_floats(total, part);
}
#endif

// Prefetches the supers after those at `supers`, one line for each cell that uses these.
VLLM_LITE_INLINE void prefetch_supers(const float* supers, int64_t cell) {
  constexpr int64_t kLineFloats = 16, kLines = 2 * kBlock / kLineFloats;
  if (cell < kLines) __builtin_prefetch(supers + 2 * kBlock + cell * kLineFloats);
}

// Prefetches a cell without its first `code_bytes` bytes of codes, which the products prefetch.
VLLM_LITE_INLINE void prefetch_around(const char* cell, const CellLayout& layout, int64_t code_bytes) {
  for (int64_t i = 0; i < layout.codes(); i += 64) __builtin_prefetch(cell + i);
  for (int64_t i = layout.codes() + code_bytes; i < layout.bytes(); i += 64) __builtin_prefetch(cell + i);
}

#if defined(VLLM_LITE_PLANES_APART)
// part = the products of a group with an upper plane and perhaps a lower one. Returns the factor of `part`.
template <bool kAlone, int kOctets, int R, int V, class Codes>
VLLM_LITE_INLINE float multiply_apart(const Codes& codes, const int8_t* x, const int32_t* biases,
                                      const Stretch& stretch, bool lower, Vec (&part)[R][V]) {
  if constexpr (R * V > 8) {
    multiply_in_turn<kAlone, kOctets>(codes, x, biases, stretch, lower, part);
  } else if (lower) {
    multiply_planes<kAlone, kOctets>(codes, x, biases, stretch, part);
  } else {
    multiply_plane<2, kAlone, kOctets>(codes, x, biases, stretch, part);
  }
  return lower ? 1 : 128;
}
#endif

// part = the products of a group of inputs of R rows with the weights' codes. Returns the factor of `part`.
template <int kPlanes, bool kAlone, int kOctets, int R, int V, class Codes>
VLLM_LITE_INLINE float multiply_part(const Codes& codes, const Rows& rows, int64_t group, const Stretch& stretch,
                                     Vec (&part)[R][V]) {
  const int64_t plane = 8 * R * stretch.num_octets;
  const int8_t* x = rows.values + kPlanes * plane * group;
  const int32_t* biases = rows.biases + group * R;
  if constexpr (kPlanes == 1) {
    multiply_plane<1, kAlone, kOctets>(codes, x, biases, stretch, part);
    return 1;
  } else {
#if defined(VLLM_LITE_LARGE_FOURS)
    if (kOctets > 0 || rows.have_fours) {
      const int8_t* fours = rows.fours + R * group * static_cast<int64_t>(sizeof(LargeFours));
      multiply_fours<kAlone, kOctets>(codes, {rows.values + plane * group, fours, biases, rows.lower[group] != 0},
                                      stretch, part);
      return 1;
    }
#endif
#if defined(VLLM_LITE_PLANES_APART)
    return multiply_apart<kAlone, kOctets>(codes, x, biases, stretch, rows.lower[group] != 0, part);
#else
    multiply_planes<kAlone, kOctets>(codes, x, biases, stretch, part);
    return 1;
#endif
  }
}

// sum += (part * scale - minima * sums of rows) * scales of rows. Row by row, because beside all sums there are only
// registers for the two numbers of one row.
template <bool kMinima, int R, int V>
VLLM_LITE_INLINE void add_rows(const Rows& rows, int64_t group, const Vec (&scale)[V], const Vec (&minima)[V],
                               const Vec (&part)[R][V], Vec (&sum)[R][V]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const int64_t place = group * R + r;
    const Vec own = splat(rows.scales[place]);
    [[maybe_unused]] const Vec total = splat(rows.sums[place]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      Vec scaled = part[r][v] * scale[v];
      if constexpr (kMinima) scaled = subtract_product(minima[v], total, scaled);
      sum[r][v] = multiply_add(scaled, own, sum[r][v]);
    }
  }
}
#endif

}  // namespace
}  // namespace VLLM_LITE_ISA
