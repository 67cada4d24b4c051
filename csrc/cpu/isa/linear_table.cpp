// Grouped weights whose codes are indexes of a table of floats, as in fp8 and NF4, times rows of bfloat16.
//
// Codes become bfloat16 in registers, pairs of products are added up in float32, and each group's sum is multiplied by
// its scale. bfloat16 represents 8-bit floats exactly. A table of 16 is split into sums of two bfloat16 each, with an
// error of 2^-17 of a value. A pair is inputs i and i + 2, because their codes are in one word; rows are arranged in
// the same way.
#include "grouped_cells.h"
#include "linear_task.h"

namespace VLLM_LITE_ISA {
namespace {

#if defined(__AVX512BF16__)
constexpr int kGroup = 12;               // rows at a time: two sums each
constexpr int kFewRows = 2;              // maximum rows for which memory is the limit
constexpr int64_t kTile = 256;           // inputs of the rows on the stack
constexpr int64_t kLongTile = 2048;      // the same for one group of rows
constexpr int64_t kLongestTile = 12288;  // the same for few rows: blocks are read without a jump, so that
                                         // prefetched memory is what comes next (4096 inputs of NF4: 0.72 times the
                                         // time)
constexpr int64_t kLargestGroup = 128;
constexpr int64_t kAheadBytes = 8192;
constexpr int32_t kSign = 0x8000;

VLLM_LITE_INLINE __m512i halves(int32_t bits) {
  return _mm512_set1_epi16(static_cast<int16_t>(bits));
}

// Codes of 8 bits: a sign, and one of 128 magnitudes.
struct Bytes {
  static constexpr int kPairs = 2, kParts = 1;
  static constexpr int64_t kInputs = 4;  // of a word
  __m512i sizes[4];

  explicit Bytes(const float* values) {
    for (int i = 0; i < 4; ++i) {
      uint16_t upper[32];
      for (int j = 0; j < 32; ++j) upper[j] = static_cast<uint16_t>(bits_of(values[32 * i + j]) >> 16);
      sizes[i] = _mm512_loadu_si512(upper);
    }
  }

  static bool takes(const float* values) {
    bool all = true;
    for (int i = 0; i < 128; ++i) {
      const uint32_t bits = bits_of(values[i]);
      const bool same = bits_of(values[i + 128]) == (bits ^ 0x80000000) || values[i] != values[i];
      all = all && same && (bits & 0xffff) == 0 && bits >> 31 == 0;
    }
    return all;
  }

  // The codes are the lower 8 bits of `at`, the signs the highest bits of `signs`.
  inline __attribute__((always_inline)) __m512i look_up(__m512i at, __m512i signs) const {
    const __m512i small = _mm512_permutex2var_epi16(sizes[0], at, sizes[1]);
    const __m512i large = _mm512_permutex2var_epi16(sizes[2], at, sizes[3]);
    const __m512i size = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(at, halves(64)), small, large);
    return _mm512_ternarylogic_epi32(size, signs, halves(kSign), 0xf8);  // size | signs & kSign
  }
  inline __attribute__((always_inline)) void decode(__m512i words, __m512i (&out)[kPairs][kParts]) const {
    out[0][0] = look_up(words, _mm512_slli_epi16(words, 8));
    out[1][0] = look_up(_mm512_srli_epi16(words, 8), words);
  }
};

// Codes of 4 bits: one of 16 values, each a sum of two.
struct Nibbles {
  static constexpr int kPairs = 4, kParts = 2;
  static constexpr int64_t kInputs = 8;
  __m512i parts[2];  // the table twice, because the look-up uses five bits

  explicit Nibbles(const float* values) {
    const __m512 all = _mm512_loadu_ps(values);
    const __m256i upper = (__m256i)_mm512_cvtneps_pbh(all);
    const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(upper), 16));
    const __m256i rest = (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(all, wide));
    parts[0] = _mm512_broadcast_i64x4(upper);
    parts[1] = _mm512_broadcast_i64x4(rest);
  }

  static bool takes(const float*) { return true; }

  inline __attribute__((always_inline)) void decode(__m512i words, __m512i (&out)[kPairs][kParts]) const {
    const __m512i at[] = {words, _mm512_srli_epi16(words, 8), _mm512_srli_epi16(words, 4),
                          _mm512_srli_epi16(words, 12)};
#pragma GCC unroll 4
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) out[pair][part] = _mm512_permutexvar_epi16(at[pair], parts[part]);
    }
  }
};

// Words of 16 outputs, decoded when they are loaded, or before.
template <class Codes>
struct Packed {
  const Codes& codes;
  const char* from;

  inline __attribute__((always_inline)) void load(int64_t word, int half,
                                                  __m512i (&out)[Codes::kPairs][Codes::kParts]) const {
    const char* words = from + 4 * kBlock * word + 64 * half;
    __builtin_prefetch(words + kAheadBytes);  // evenly spread: many at once would be dropped or delayed
    codes.decode(_mm512_loadu_si512(words), out);
  }
};

template <class Codes>
struct Decoded {
  static constexpr int64_t kVectors = Codes::kPairs * Codes::kParts;  // of a word
  const __m512i* from;

  inline __attribute__((always_inline)) void load(int64_t word, int half,
                                                  __m512i (&out)[Codes::kPairs][Codes::kParts]) const {
    std::memcpy(&out, from + (2 * word + half) * kVectors, sizeof out);
  }
};

// Sums of one row for kHalves vectors of outputs, separately for a table's two parts, so that chains of additions are
// half as long.
template <class Codes, int kHalves>
struct Sums {
  __m512 of[kHalves][Codes::kParts];

  inline __attribute__((always_inline)) Vec sum(int half) const {
    __m512 all = of[half][0];
    if constexpr (Codes::kParts == 2) all = _mm512_add_ps(all, of[half][1]);
    return reinterpret_cast<Vec>(all);
  }
};

// total [R] += the products of R rows [R][kStride] with one word of codes, for the outputs from half `first` on.
template <class Codes, int R, int64_t kStride, int kHalves, class Source>
VLLM_LITE_INLINE void add_word(const Source& source, int first, const uint16_t* x, int64_t word,
                               Sums<Codes, kHalves> (&total)[R]) {
  __m512i weights[kHalves][Codes::kPairs][Codes::kParts];
#pragma GCC unroll 2
  for (int half = 0; half < kHalves; ++half) source.load(word, first + half, weights[half]);
#pragma GCC unroll 4
  for (int pair = 0; pair < Codes::kPairs; ++pair) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t both;
      std::memcpy(&both, x + r * kStride + word * Codes::kInputs + 2 * pair, 4);
      const __m512bh value = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; ++half) {
#pragma GCC unroll 2
        for (int part = 0; part < Codes::kParts; ++part) {
          __m512& sum = total[r].of[half][part];
          sum = _mm512_dpbf16_ps(sum, (__m512bh)weights[half][pair][part], value);
        }
      }
    }
  }
}

// sums [R][sums_stride] += scales times the products of the rows with one group.
template <class Codes, int R, int64_t kStride, int kHalves, class Source>
VLLM_LITE_INLINE void multiply_halves(const Source& source, int first, const uint16_t* x, int64_t num_words,
                                      const Vec (&scales)[2], float* sums, int64_t sums_stride) {
  Sums<Codes, kHalves> total[R] = {};
  for (int64_t word = 0; word < num_words; ++word) add_word<Codes, R, kStride>(source, first, x, word, total);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int half = 0; half < kHalves; ++half) {
      float* to = sums + r * sums_stride + (first + half) * kWidth;
      store(to, multiply_add(total[r].sum(half), scales[first + half], load(to)));
    }
  }
}

// For `count` rows, 1 <= count <= R.
template <class Codes, int R, int64_t kStride, class Source>
void multiply(int64_t count, const Source& source, const uint16_t* x, int64_t num_words, const Vec (&scales)[2],
              float* sums, int64_t sums_stride) {
  if constexpr (R > 1) {
    if (count < R) return multiply<Codes, R - 1, kStride>(count, source, x, num_words, scales, sums, sums_stride);
  }
  if constexpr (R * Codes::kParts <= kGroup) {  // both halves' sums fit the registers
    multiply_halves<Codes, R, kStride, 2>(source, 0, x, num_words, scales, sums, sums_stride);
  } else {
    multiply_halves<Codes, R, kStride, 1>(source, 0, x, num_words, scales, sums, sums_stride);
    multiply_halves<Codes, R, kStride, 1>(source, 1, x, num_words, scales, sums, sums_stride);
  }
}

// All rows of a task times one cell. `x` points to the group's first input.
template <class Codes, int64_t kStride>
void multiply_cell(const Codes& codes, const char* from, const CellLayout& layout, int64_t num_rows, const uint16_t* x,
                   const Vec (&scales)[2], float* sums, int64_t sums_stride) {
  const int64_t num_words = layout.group_size / Codes::kInputs;
  const Packed<Codes> packed = {codes, from};
  if constexpr (kStride >= kLongTile) {
    constexpr int kRows = kStride == kLongestTile ? kFewRows : kGroup;
    multiply<Codes, kRows, kStride>(num_rows, packed, x, num_words, scales, sums, sums_stride);
  } else {  // several groups of rows: codes are decoded once for all
    constexpr int64_t kVectors = Decoded<Codes>::kVectors;
    __m512i wide[2 * kLargestGroup / Codes::kInputs * kVectors];
    for (int64_t i = 0; i < 2 * num_words; ++i) {
      __m512i out[Codes::kPairs][Codes::kParts];
      packed.load(i / 2, static_cast<int>(i % 2), out);
      std::memcpy(wide + i * kVectors, &out, sizeof out);
    }
    for (int64_t row = 0; row < num_rows; row += kGroup) {
      const int64_t count = num_rows - row < kGroup ? num_rows - row : kGroup;
      multiply<Codes, kGroup, kStride>(count, Decoded<Codes>{wide}, x + row * kStride, num_words, scales,
                                       sums + row * sums_stride, sums_stride);
    }
  }
}

// Cells of one block, from group `first` on.
struct Cells {
  const PackedWeight& weight;
  const CellLayout layout;
  int64_t block, first;
  const char* from;

  // Also prefetches a later cell's scales.
  inline __attribute__((always_inline)) const char* codes(int64_t number) const {
    const char* cell = from + number * layout.bytes();
    for (int64_t i = 0; i < layout.codes(); i += 64) __builtin_prefetch(cell + kAheadBytes + i);
    return cell + layout.codes();
  }
  inline __attribute__((always_inline)) Vec scales(int64_t number, int half) const {
    const float* supers = weight.supers_of(block, first + number);
    return load_scales(from + number * layout.bytes(), layout.scale_type, half * kWidth, supers);
  }
};

// Whether the limit of few rows is the latency of sums, not memory.
template <class Codes>
constexpr bool kAreSlow = Codes::kParts == 2;

// R rows times `count` cells, G at a time as long as there are as many. The sums of G cells are independent, where
// those of few rows and one cell would wait for each other. Returns the number of the first cell that is left. The bits
// are the same as cell by cell.
template <class Codes, int R, int G>
int64_t multiply_cells(const Codes& codes, const Cells& cells, int64_t count, const uint16_t* x, float* sums,
                       int64_t sums_stride) {
  const int64_t group_size = cells.layout.group_size, num_words = group_size / Codes::kInputs;
  int64_t number = 0;
  for (; number + G <= count; number += G) {
    const char* from[G];
    for (int g = 0; g < G; ++g) from[g] = cells.codes(number + g);
    Sums<Codes, 2> total[G][R] = {};
    for (int64_t word = 0; word < num_words; ++word) {
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        add_word<Codes, R, kLongestTile>(Packed<Codes>{codes, from[g]}, 0, x + (number + g) * group_size, word,
                                         total[g]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        float* to = sums + r * sums_stride + half * kWidth;
        Vec all = load(to);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) all = multiply_add(total[g][r].sum(half), cells.scales(number + g, half), all);
        store(to, all);
      }
    }
  }
  return number;
}

// Arranges `padded` columns of one row, from `first` on, as pairs: inputs 0, 2, 1 and 3 of each four.
void pair_up(const PackedWeight& weight, const uint16_t* row, int64_t first, int64_t padded, uint16_t* to) {
  const int64_t left = weight.num_inputs - first, count = left < padded ? left : padded;
  const uint16_t* from = row + first;
  const auto at = [&](int64_t i) {
    return i >= count ? uint16_t{} : weight.order ? row[weight.order[first + i]] : from[i];
  };
  int64_t i = 0;
  if (weight.order == nullptr) {
    const __m128i pairs = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    for (; i + 8 <= count; i += 8) {
      const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm_shuffle_epi8(eight, pairs));
    }
  }
  for (; i < padded; i += 4) {
    to[i] = at(i);
    to[i + 1] = at(i + 2);
    to[i + 2] = at(i + 1);
    to[i + 3] = at(i + 3);
  }
}

template <class Codes, int64_t kStride>
void run_tiles(const LinearCall& call, const LinearTask& task, uint16_t* x, float* sums) {
  const PackedWeight& weight = *call.weight;
  const Codes codes(weight.values);
  const CellLayout layout = CellLayout::of(weight);
  const int64_t sums_stride = task.num_blocks * kBlock, num_groups = layout.groups(weight.num_inputs);
  const int64_t cell_bytes = layout.bytes(), at_once = kStride / layout.group_size;
  const char* blocks = static_cast<const char*>(weight.data) + task.first_block * num_groups * cell_bytes;
  const uint16_t* rows = static_cast<const uint16_t*>(call.x) + task.first_row * call.x_stride;
  for (int64_t first = 0; first < num_groups; first += at_once) {
    const int64_t end = first + at_once < num_groups ? first + at_once : num_groups;
    for (int64_t row = 0; row < task.num_rows; ++row) {
      pair_up(weight, rows + row * call.x_stride, first * layout.group_size, (end - first) * layout.group_size,
              x + row * kStride);
    }
    for (int64_t block = 0; block < task.num_blocks; ++block) {
      const Cells cells = {weight, layout, task.first_block + block, first,
                           blocks + (block * num_groups + first) * cell_bytes};
      float* own = sums + block * kBlock;
      int64_t number = 0;
      if constexpr (kStride == kLongestTile && kAreSlow<Codes>) {
        if (task.num_rows == 1) number = multiply_cells<Codes, 1, 4>(codes, cells, end - first, x, own, sums_stride);
        if (task.num_rows == 2) number = multiply_cells<Codes, 2, 2>(codes, cells, end - first, x, own, sums_stride);
      }
      for (; number < end - first; ++number) {
        const Vec scales[] = {cells.scales(number, 0), cells.scales(number, 1)};
        multiply_cell<Codes, kStride>(codes, cells.codes(number), layout, task.num_rows, x + number * layout.group_size,
                                      scales, own, sums_stride);
      }
    }
  }
}

template <class Codes>
bool run(const LinearCall& call, const LinearTask& task) {
  static_assert(kGroup * kLongTile <= kMaxRows * kTile && kFewRows * kLongestTile <= kMaxRows * kTile, "x has room");
  if (!Codes::takes(call.weight->values)) return false;
  alignas(64) uint16_t x[kMaxRows * kTile];
  alignas(64) float sums[kMaxRows * kMaxBlocks * kBlock];
  const int64_t sums_stride = task.num_blocks * kBlock;
  std::memset(sums, 0, static_cast<size_t>(task.num_rows * sums_stride) * sizeof *sums);
  if (task.num_rows <= kFewRows) {
    run_tiles<Codes, kLongestTile>(call, task, x, sums);
  } else if (task.num_rows <= kGroup) {
    run_tiles<Codes, kLongTile>(call, task, x, sums);
  } else {
    run_tiles<Codes, kTile>(call, task, x, sums);
  }
  if (call.out_type == kFloat32) {
    write<float>(call, task, sums, sums_stride);
  } else {
    write<BFloat16>(call, task, sums, sums_stride);
  }
  return true;
}
#endif

}  // namespace

bool linear_table(const LinearCall& call, const LinearTask& task) {
#if defined(__AVX512BF16__)
  const PackedWeight& weight = *call.weight;
  const bool floats = weight.are_whole == 0 && weight.minima_type == kNoMinima;
  if (floats && call.x_type == kBFloat16 && weight.type == kGrouped8) return run<Bytes>(call, task);
  if (floats && call.x_type == kBFloat16 && weight.type == kGrouped4) return run<Nibbles>(call, task);
#else
  static_cast<void>(call);
  static_cast<void>(task);
#endif
  return false;
}

}  // namespace VLLM_LITE_ISA
