// Conversion of grouped weights' codes to the bytes that are multiplied, and the scales of a cell.
#pragma once

#include "byte_products.h"
#include "grouped_cells.h"

namespace VLLM_LITE_ISA {
namespace {

#if defined(VLLM_LITE_MULTIPLIES_BYTES)
constexpr int64_t kOctetBytes = 4 * kBlock;

// Weights of eight inputs for kWidth outputs as bytes: the first four inputs, and the other four.
struct Octet {
  Ints first, second;
};

// Codes of 4 bits that are bytes themselves.
template <int V>
struct Nibbles {
  static constexpr int64_t kBits = 4, kBytes = kOctetBytes;  // of a code, and of an octet
  static constexpr bool kNarrow = true;
  explicit Nibbles(const uint8_t*) {}
  void enter(const char*, const CellLayout&, int64_t) {}
  inline __attribute__((always_inline)) Octet load(const char* codes, int v) const {
    const Ints mask = all_bytes(15), both = load_ints(codes + v * sizeof(Ints));
    return {both_bits(both, mask), both_bits(upper_halves(both), mask)};
  }
};

// Codes of 5 bits; the fifth bits of a cell are stored after the nibbles.
template <int V>
struct Fives {
  static constexpr int64_t kBits = 5, kBytes = kOctetBytes;
  static constexpr bool kNarrow = true;
  const char *nibbles = nullptr, *bits = nullptr;  // of the cell
  explicit Fives(const uint8_t*) {}
  void enter(const char* cell, const CellLayout& layout, int64_t) {
    nibbles = cell + layout.codes();
    bits = cell + layout.fifth_bits();
  }
  inline __attribute__((always_inline)) Octet load(const char* codes, int v) const {
    const int64_t place = codes - nibbles, octet = place / kOctetBytes, column = place % kOctetBytes / 4 + v * kWidth;
    const char* own = bits + octet * kBlock + column / 2;
    const Octet low = Nibbles<V>(nullptr).load(codes, v);
    return {add_fifth_bits(low.first, own), add_fifth_bits(low.second, own + kBlock / 2)};
  }
#if !defined(VLLM_LITE_PLANES_APART)
  inline __attribute__((always_inline)) WidenedBytes widened(const char* codes, int v, bool second) const {
    const Octet octet = load(codes, v);
    const Ints bytes = second ? octet.second : octet.first;
    return {widen_lower(bytes), widen_upper(bytes)};
  }
#endif
};

// Codes of 4 bits, to which a byte of each output is added (kShifts).
template <int V>
struct Shifted {
  static constexpr int64_t kBytes = kOctetBytes;
  static constexpr bool kNarrow = true;
  Ints shifts[V];
  explicit Shifted(const uint8_t*) {}
  // Loads the cell's bytes, and repeats the byte of each output for four inputs.
  inline __attribute__((always_inline)) void enter(const char* cell, const CellLayout& layout, int64_t column) {
    const char* bytes = cell + layout.scale_bytes + column;
    alignas(16) static constexpr int8_t kFour[] = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
    const Ints four = repeat_16(kFour);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) shifts[v] = shuffle_bytes(widen_bytes(bytes + v * kWidth), four);
  }
  inline __attribute__((always_inline)) Octet load(const char* codes, int v) const {
    const Octet octet = Nibbles<V>(nullptr).load(codes, v);
    return {add_bytes(octet.first, shifts[v]), add_bytes(octet.second, shifts[v])};
  }
};

// Codes of 4 bits that are indexes of a table of bytes.
template <int V>
struct Looked {
  static constexpr int64_t kBytes = kOctetBytes;
  static constexpr bool kNarrow = true;
  Ints table;
  void enter(const char*, const CellLayout&, int64_t) {}
  explicit Looked(const uint8_t* bytes) : table(repeat_16(bytes)) {}
  inline __attribute__((always_inline)) Octet load(const char* codes, int v) const {
    const Octet octet = Nibbles<V>(nullptr).load(codes, v);
    return {shuffle_bytes(table, octet.first), shuffle_bytes(table, octet.second)};
  }
};

template <int V>
struct LookedWide : Looked<V> {
  static constexpr bool kNarrow = false;
  using Looked<V>::Looked;
};

template <int V>
struct Bytes {
  static constexpr int64_t kBits = 8, kBytes = 2 * kOctetBytes;
  static constexpr bool kNarrow = false;
  explicit Bytes(const uint8_t*) {}
  void enter(const char*, const CellLayout&, int64_t) {}
  inline __attribute__((always_inline)) Octet load(const char* codes, int v) const {
    const char* from = codes + v * sizeof(Ints);
    return {load_ints(from), load_ints(from + kOctetBytes)};
  }
#if !defined(VLLM_LITE_PLANES_APART)
  inline __attribute__((always_inline)) WidenedBytes widened(const char* codes, int v, bool second) const {
    const char* from = codes + v * sizeof(Ints) + (second ? kOctetBytes : 0);
    return {widen_half(from), widen_half(from + sizeof(Ints) / 2)};
  }
#endif
};

// Whether cells have minima other than the bytes of kShifts.
VLLM_LITE_INLINE bool has_floats(const CellLayout& layout) {
  return layout.minima_type != kNoMinima && layout.minima_type != kShifts;
}

// Scales and minima of a cell for kWidth outputs.
struct Scales {
  Vec scale, minima;
  bool has_minima;

  inline __attribute__((always_inline)) Scales(const char* cell, const CellLayout& layout, const float* supers,
                                               int64_t column)
      : scale(load_scales(cell, layout.scale_type, column, supers)), minima(splat(0)), has_minima(has_floats(layout)) {
    if (has_minima) minima = load_scales(cell + layout.scale_bytes, layout.minima_type, column, of_minima(supers));
  }
  inline __attribute__((always_inline)) Vec less_minima(Vec value, float sum) const {
    return has_minima ? subtract_product(minima, splat(sum), value) : value;
  }
};

#endif

}  // namespace
}  // namespace VLLM_LITE_ISA
