// Products of grouped weights with a scale for each kQuantGroup inputs, by tiles of bytes. Codes are widened to bytes
// once for all rows of a task. Sums are added up as in linear_grouped.cpp, bit for bit.
//
// 16 rows are multiplied with 16 outputs, and their sums stay in registers for a part of the inputs. For each scale two
// tiles have the exact integer sums of the upper and of the lower plane. While tiles compute the next sums in two other
// tiles, vectors scale these, and the following ones are stored to memory.
#pragma once

#include <type_traits>

#include "grouped_codes.h"
#include "tile_outputs.h"
#include "tile_panel.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int64_t kLongInputs = 512;                         // inputs of a part: its weights stay in L1
constexpr int64_t kLongSteps = kQuantGroup / kTileRowBytes;  // steps of a plane with one scale for a row
constexpr int64_t kLongHalf = kLongSteps * kTileSums * 4;    // bytes of a group's weights for 16 outputs
constexpr int64_t kLongTotals = 2 * kTileSums;
constexpr int64_t kAheadLong = 8192;  // bytes of weights
static_assert(kLongRows == kTileRows, "rows are laid out for one tile");

// ---- weights of a part of one block: codes as bytes, scales as floats

struct LongPanel {
  alignas(64) char codes[kLongInputs * kBlock];  // [groups][vectors of outputs][inputs / 4][outputs][4]
  alignas(64) float scales[kLongInputs / kQuantGroup * 4 * kWidth];  // [groups][vectors][scales, minima][outputs]
};

// Widens parts of a weight to panels.
class LongWeights {
 public:
  explicit LongWeights(const PackedWeight& weight)
      : weight_(weight), layout_(CellLayout::of(weight)), num_groups_(layout_.groups(weight.num_inputs)) {}

  const char* cell(int64_t block, int64_t group) const {
    return static_cast<const char*>(weight_.data) + (block * num_groups_ + group) * layout_.bytes();
  }
  int64_t cell_bytes() const { return layout_.bytes(); }
  int64_t num_groups() const { return num_groups_; }
  bool have_minima() const { return layout_.minima_type != kNoMinima && layout_.minima_type != kShifts; }

  // Widens groups [first, first + count), and prefetches memory `ahead` bytes after them; 0: prefetches nothing new.
  void widen(int64_t block, int64_t first, int64_t count, int64_t ahead, LongPanel* panel) const {
    float* to = panel->scales;
    for (int64_t group = first; group < first + count; ++group) {
      const float* supers = weight_.supers_of(block, group);
      for (int v = 0; v < 2; ++v, to += 2 * kWidth) {
        const Scales scales(cell(block, group), layout_, supers, v * kWidth);
        store(to, scales.scale);
        store(to + kWidth, scales.minima);
      }
    }
    if (weight_.type == kGrouped8) return widen_as<Bytes<2>>(block, first, count, ahead, panel->codes);
    if (layout_.minima_type == kShifts) return widen_as<Shifted<2>>(block, first, count, ahead, panel->codes);
    weight_.bytes == nullptr ? widen_as<Nibbles<2>>(block, first, count, ahead, panel->codes)
                             : widen_as<Looked<2>>(block, first, count, ahead, panel->codes);
  }

 private:
  template <class Codes>
  void widen_as(int64_t block, int64_t first, int64_t count, int64_t ahead, char* to) const {
    Codes codes(weight_.bytes);
    for (int64_t group = first; group < first + count; ++group) {
      codes.enter(cell(block, group), layout_, 0);
      const char* from = cell(block, group) + layout_.codes();
      for (int v = 0; v < 2; ++v) {
        for (int64_t octet = 0; octet < kQuantGroup / 8; ++octet, to += 2 * kTileRowBytes) {
          const char* at = from + octet * Codes::kBytes;
          for (int64_t i = 0; i < Codes::kBytes; i += 128) __builtin_prefetch(at + ahead + i + v * 64);
          const Octet both = codes.load(at, v);
          _mm512_store_si512(to, both.first);
          _mm512_store_si512(to + kTileRowBytes, both.second);
        }
      }
    }
  }

  const PackedWeight& weight_;
  const CellLayout layout_;
  const int64_t num_groups_;
};

// ---- 16 rows times a group's weights for 16 outputs

void shape_planes(int64_t num_rows) {
  TileShapes shapes;
  for (int tile = 0; tile < 6; ++tile) shapes.set(tile, num_rows);
  shapes.set(6, kTileRows);
  TILES_FENCE();
  TILES_SHAPE(&shapes);
}

// One of the two pairs of tiles for totals.
template <int kNumber>
using Pair = std::integral_constant<int, kNumber>;

// Operands of tiles: the upper plane of rows, the lower one `plane` bytes after it, and weights.
struct LongOperands {
  const char *x, *weights;
  int64_t plane;
};

template <int kPair>
VLLM_LITE_INLINE void multiply_planes(const LongOperands& of) {
#pragma GCC unroll 2
  for (int64_t step = 0; step < kLongSteps; ++step) {
    const char* x = of.x + step * (of.plane / kLongSteps);
    TILE_LOAD(6, of.weights + step * kTileSums * 4, kTileRowBytes);
    TILE_LOAD(4, x, kTileRowBytes);
    TILE_LOAD(5, x + of.plane, kTileRowBytes);
    if constexpr (kPair == 0) {
      if (step == 0) TILE_ZERO(0);
      TILE_DOT_INT8(0, 4, 6);
      if (step == 0) TILE_ZERO(1);
      TILE_DOT_INT8(1, 5, 6);
    } else {
      if (step == 0) TILE_ZERO(2);
      TILE_DOT_INT8(2, 4, 6);
      if (step == 0) TILE_ZERO(3);
      TILE_DOT_INT8(3, 5, 6);
    }
  }
}

template <int kPair>
VLLM_LITE_INLINE void store_planes(int32_t* to) {
  if constexpr (kPair == 0) {
    TILE_STORE(0, to, kTileRowBytes);
    TILE_STORE(1, to + kTileSums, kTileRowBytes);
  } else {
    TILE_STORE(2, to, kTileRowBytes);
    TILE_STORE(3, to + kTileSums, kTileRowBytes);
  }
}

// Biases and factors of a group's totals.
struct LongFactors {
  const int32_t* biases;
  const float *sums, *rows;  // of rows
  const float* weights;
  int64_t stride;  // between two groups, in elements of the rows' arrays

  inline __attribute__((always_inline)) void advance() {
    biases += stride;
    sums += stride;
    rows += stride;
    weights += 4 * kWidth;
  }
};

template <bool kMinima, int kRows>
VLLM_LITE_INLINE void add_planes(const int32_t* totals, const LongFactors& of, Vec (&sum)[kRows]) {
  const Vec scale = load(of.weights);
  [[maybe_unused]] const Vec minima = load(of.weights + kWidth);
#pragma GCC unroll 16
  for (int64_t row = 0; row < kRows; ++row) {
    const int32_t* upper = totals + row * kTileRows;
    const Ints both = both_planes(load_ints(upper), load_ints(upper + kTileSums));
    Vec scaled = to_floats(_mm512_add_epi32(both, all_ints(of.biases[row]))) * scale;
    if constexpr (kMinima) scaled = subtract_product(minima, splat(of.sums[row]), scaled);
    sum[row] = multiply_add(scaled, splat(of.rows[row]), sum[row]);
  }
}

template <int kRows>
VLLM_LITE_INLINE void begin_sums(bool are_begun, const float* from, Vec (&sum)[kRows]) {
#pragma GCC unroll 16
  for (int64_t row = 0; row < kRows; ++row) sum[row] = are_begun ? load(from + row * kTileRows) : Vec{};
}

template <int kRows>
VLLM_LITE_INLINE void end_sums(const Vec (&sum)[kRows], float* to) {
#pragma GCC unroll 16
  for (int64_t row = 0; row < kRows; ++row) store(to + row * kTileRows, sum[row]);
}

// ---- one task

class LongTask {
 public:
  LongTask(const LinearCall& call, const LinearTask& task)
      : call_(call), task_(task), rows_(*call.quantized), weights_(*call.weight) {}

  void run() {
    const int64_t num_groups = weights_.num_groups(), length = kLongInputs / kQuantGroup;
    const int64_t full = task_.num_rows / kTileRows, rest = task_.num_rows % kTileRows;
    std::memset(totals_, 0, sizeof totals_);
    for (int64_t first = 0; first < num_groups; first += length) {
      const int64_t left = num_groups - first, count = left < length ? left : length;
      for (int64_t block = 0; block < task_.num_blocks; ++block) {
        const Inputs part = {block, first, count};
        weights_.widen(task_.first_block + block, first, count, are_few() ? kAheadLong : 0, &panel_);
        if (full > 0) add(part, {0, full, kTileRows});
        if (rest > 0) add(part, {full, 1, rest});
        if (left <= length) write(block);
      }
    }
    if (streamed_) _mm_sfence();
    TILES_RELEASE();
  }

 private:
  struct Inputs {
    int64_t block, first, count;
  };

  // Tiles of rows of the task, with equal numbers of rows.
  struct Several {
    int64_t first, count, num_rows;
  };

  void add(const Inputs& part, const Several& tiles) {
    if (tiles.num_rows != shape_) shape_planes(shape_ = tiles.num_rows);
    const bool few = tiles.num_rows <= kTileRows / 2;
    if (weights_.have_minima()) return few ? add_all<true, 8>(part, tiles) : add_all<true, 16>(part, tiles);
    few ? add_all<false, 8>(part, tiles) : add_all<false, 16>(part, tiles);
  }

  // For each 16 rows both halves of the block's outputs. The last product is computed once more, without use.
  template <bool kMinima, int kRows>
  __attribute__((noinline)) void add_all(const Inputs& part, const Several& tiles) {
    const int64_t last = 2 * tiles.count - 1;
    int64_t group = 0, half = 0, next_group = 0, next_half = 0;
    LongOperands next = operands(part, tiles, 0);
    LongFactors of = factors(part, tiles, 0);
    float* at = sums_of(part.block) + tiles.first * 2 * kTileSums;
    Vec sum[kRows];
    begin_sums(part.first > 0, at, sum);
    const auto multiply = [&](auto pair) __attribute__((always_inline)) {
      multiply_planes<decltype(pair)::value>(next);
      next.x += 2 * next.plane;
      next.weights += 2 * kLongHalf;
      if (++next_group < part.count) return;
      next_group = 0;
      if (next_half < last) ++next_half;
      next = operands(part, tiles, next_half);
    };
    const auto add_group = [&](auto pair) __attribute__((always_inline)) {
      constexpr int kPair = decltype(pair)::value;
      TILES_FENCE();
      multiply(pair);
      store_planes<1 - kPair>(totals_[1 - kPair]);
      TILES_FENCE();
      add_planes<kMinima, kRows>(totals_[kPair], of, sum);
      of.advance();
      if (++group < part.count) return true;
      group = 0;
      end_sums(sum, at);
      at += kTileSums;
      if (++half > last) return false;
      of = factors(part, tiles, half);
      begin_sums(part.first > 0, at, sum);
      return true;
    };
    TILES_FENCE();
    multiply(Pair<0>());
    store_planes<0>(totals_[0]);
    multiply(Pair<1>());
    while (add_group(Pair<0>()) && add_group(Pair<1>())) continue;
    TILES_FENCE();
  }

  // First row of a tile, counted in the call, and number of its rows.
  struct Place {
    int64_t row, count;
  };

  Place place(int64_t tile) const {
    const int64_t begin = tile * kLongRows, left = task_.num_rows - begin;
    return {task_.first_row + begin, left < kLongRows ? left : kLongRows};
  }

  // Operands and factors of the part's first group.
  __attribute__((noinline)) LongOperands operands(const Inputs& part, const Several& tiles, int64_t half) const {
    const Place rows = place(tiles.first + half / 2);
    const int64_t plane = rows.count * kQuantGroup;
    const int8_t* x = rows_.values + rows.row * rows_.layout.value_bytes() + part.first * 2 * plane;
    return {reinterpret_cast<const char*>(x), panel_.codes + half % 2 * kLongHalf, plane};
  }
  __attribute__((noinline)) LongFactors factors(const Inputs& part, const Several& tiles, int64_t half) const {
    const int64_t tile = tiles.first + half / 2;
    if (half % 2 == 0 && !are_few()) ask_ahead(part, tile);
    const Place rows = place(tile);
    const int64_t at = rows.row * rows_.layout.num_groups + part.first * rows.count;
    return {rows_.biases + at, rows_.sums + at, rows_.scales + at, panel_.scales + half % 2 * 2 * kWidth, rows.count};
  }

  void write(int64_t block) const {
    for (int64_t row = 0; row < task_.num_rows; row += kGroup) {
      const int64_t left = task_.num_rows - row, count = left < kGroup ? left : kGroup;
      const float* sums = sums_of(block) + row * kBlock;
      const Outputs outputs = {&call_, sums, task_.first_row + row, count, task_.first_block + block};
      streamed_ ? stream(outputs, 0, kGroup) : outputs.write(0, kGroup);
    }
  }

  // Whether weights are used faster than they could be read.
  bool are_few() const { return task_.num_rows <= kGroup; }

  int64_t num_sums() const { return (task_.num_rows + kGroup - 1) / kGroup * kGroupSums; }

  // [tiles of rows][vectors of outputs][rows][outputs]
  float* sums_of(int64_t block) const { return sums_ + block * num_sums(); }

  // Prefetches the part that is widened next; each tile of rows does a share. Trap: see prefetch() in tile_groups.h.
  inline __attribute__((always_inline)) void ask_ahead(const Inputs& part, int64_t tile) const {
    const bool is_end = part.block + 1 == task_.num_blocks;
    const char* next = is_end ? weights_.cell(task_.first_block, part.first + part.count)
                              : weights_.cell(task_.first_block + part.block + 1, part.first);
    const int64_t bytes = part.count * weights_.cell_bytes(), count = (task_.num_rows + kTileRows - 1) / kTileRows;
    for (int64_t i = tile * bytes / count; i < (tile + 1) * bytes / count; i += 64) __builtin_prefetch(next + i, 0, 2);
  }

  const LinearCall& call_;
  const LinearTask& task_;
  const QuantizedRows& rows_;
  const LongWeights weights_;
  const bool streamed_ = are_streamed(call_);
  int64_t shape_ = 0;  // number of rows for which tiles are shaped
  LongPanel panel_;
  alignas(64) int32_t totals_[2][kLongTotals];
  float* sums_ = reinterpret_cast<float*>(tile_memory().get(num_sums() * task_.num_blocks * 4));
};

}  // namespace
}  // namespace VLLM_LITE_ISA
