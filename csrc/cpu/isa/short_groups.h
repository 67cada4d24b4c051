// Products of grouped weights with a scale for 16 or 32 inputs, by tiles of bfloat16. bfloat16 represents codes and
// rows' integers exactly, and with one plane float32 represents their sums exactly. The products of the upper plane,
// times 128, are added last, in a single addition, so that the sum of both planes is rounded once, like an integer that
// is converted to float. Sums are added up as in linear_grouped.cpp, bit for bit.
//
// 32 rows are multiplied with 32 outputs. While vectors scale one group's sums, tiles compute the next one's. Only one
// of the two vector units multiplies meanwhile, so vector instructions are the limit.
#pragma once

#include <utility>

#include "grouped_codes.h"
#include "tile_outputs.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int64_t kShortInputs = 256;  // inputs of a part: its weights stay in L1
constexpr int64_t kStripRows = 8;      // rows whose sums are in vectors at a time

// Minimum rows for tiles. Fewer rows are faster by vectors, and more so if codes take longer to widen.
int64_t least_short_rows(const PackedWeight& weight) {
  return weight.type == kGrouped8 ? 32 : 17;
}

// ---- weights of a part of one block: codes as bfloat16, scales as floats

struct ShortPanel {
  alignas(64) char codes[kShortInputs * kBlock * 2];         // [groups][vectors of outputs][inputs / 2][outputs][2]
  alignas(64) float scales[kShortInputs / 16 * 4 * kWidth];  // [groups][vectors][scales, minima][outputs]
  int64_t group_bytes;                                       // bytes of a group's codes
  bool has_minima;

  const char* of(int64_t group) const { return codes + group * group_bytes; }
  const float* scales_of(int64_t group) const { return scales + group * 4 * kWidth; }
};

// Widens codes up to 31 by a table of their values in a register.
struct CodesOfTable {
  __m512i table;

  explicit CodesOfTable(const PackedWeight& weight) {
    alignas(64) BFloat16 values[32] = {};
    const int count = weight.type == kGrouped4 ? 16 : 32;
    for (int code = 0; code < count; ++code) {
      const int byte = weight.bytes == nullptr ? code : weight.bytes[code];
      from_float(static_cast<float>(byte + weight.offset), values + code);
    }
    table = _mm512_load_si512(values);
  }
  VLLM_LITE_INLINE __m512i widen(const CodesOfTable& codes, __m512i words) {
    return _mm512_permutexvar_epi16(words, codes.table);
  }
};

// Widens any bytes.
struct CodesOfBytes {
  __m512i offset;

  explicit CodesOfBytes(const PackedWeight& weight) : offset(_mm512_set1_epi16(static_cast<int16_t>(weight.offset))) {}

  VLLM_LITE_INLINE __m512i widen(const CodesOfBytes& codes, __m512i words) {
    const VecI whole = reinterpret_cast<VecI>(_mm512_add_epi16(words, codes.offset));
    const VecI first = reinterpret_cast<VecI>(to_floats(reinterpret_cast<Ints>(whole << 16 >> 16)));
    const VecI second = reinterpret_cast<VecI>(to_floats(reinterpret_cast<Ints>(whole >> 16)));
    return reinterpret_cast<__m512i>((first >> 16 & 0xffff) | (second & static_cast<int32_t>(0xffff0000)));
  }
};

// Puts four inputs' bytes into two rows of a tile: the first and the third, then the second and the fourth.
template <class Values>
VLLM_LITE_INLINE void put_four(const Values& values, Ints bytes, char* to) {
  const __m512i even = _mm512_set1_epi16(255);
  _mm512_store_si512(to, Values::widen(values, _mm512_and_si512(bytes, even)));
  _mm512_store_si512(to + kTileRowBytes, Values::widen(values, _mm512_srli_epi16(bytes, 8)));
}

// Widens a cell's codes, of `size` inputs, to the tiles of one group.
template <class Codes, class Values>
VLLM_LITE_INLINE void widen_group(Codes& codes, const Values& values, const char* from, int64_t size, char* to) {
  const int64_t tile = size / 2 * kTileRowBytes;
  for (int64_t input = 0; input < size; input += 8, from += Codes::kBytes, to += 4 * kTileRowBytes) {
    for (int v = 0; v < 2; ++v) {
      const Octet octet = codes.load(from, v);
      put_four(values, octet.first, to + v * tile);
      put_four(values, octet.second, to + v * tile + 2 * kTileRowBytes);
    }
  }
}

// Widens parts of one weight.
class ShortWeights {
 public:
  ShortWeights(const PackedWeight& weight, const RowLayout& rows)
      : weight_(weight), layout_(CellLayout::of(weight)), size_(rows.group_size), num_groups_(rows.num_groups) {}

  const char* cell(int64_t block, int64_t group) const {
    return static_cast<const char*>(weight_.data) + (block * num_groups_ + group) * layout_.bytes();
  }
  int64_t cell_bytes() const { return layout_.bytes(); }

  void widen(int64_t block, int64_t first, int64_t count, ShortPanel* panel) const {
    panel->group_bytes = size_ * 2 * kBlock;
    panel->has_minima = layout_.minima_type != kNoMinima && layout_.minima_type != kShifts;
    for (int64_t group = 0; group < count; ++group) {
      const float* supers = weight_.supers_of(block, first + group);
      float* to = panel->scales + group * 4 * kWidth;
      for (int v = 0; v < 2; ++v, to += 2 * kWidth) {
        const Scales scales(cell(block, first + group), layout_, supers, v * kWidth);
        store(to, scales.scale);
        store(to + kWidth, scales.minima);
      }
    }
    if (weight_.type == kGrouped8) return widen_as<Bytes<2>, CodesOfBytes>(block, first, count, panel);
    if (weight_.type == kGrouped5) return widen_as<Fives<2>, CodesOfTable>(block, first, count, panel);
    if (layout_.minima_type == kShifts) return widen_as<Shifted<2>, CodesOfBytes>(block, first, count, panel);
    widen_as<Nibbles<2>, CodesOfTable>(block, first, count, panel);
  }

 private:
  template <class Codes, class Values>
  void widen_as(int64_t block, int64_t first, int64_t count, ShortPanel* panel) const {
    Codes codes(weight_.bytes);
    const Values values(weight_);
    char* to = panel->codes;
    for (int64_t group = first; group < first + count; ++group, to += panel->group_bytes) {
      const char* from = cell(block, group);
      codes.enter(from, layout_, 0);
      widen_group(codes, values, from + layout_.codes(), size_, to);
    }
  }

  const PackedWeight& weight_;
  const CellLayout layout_;
  const int64_t size_, num_groups_;
};

// ---- up to 32 rows times a part of a block

// Rows, from one of their groups of inputs on; see QuantizedRows.
struct ShortRows {
  const char* values;
  const float* scales;
  const float* sums;
  const uint8_t* lower;
  int64_t count, size, num_planes;

  static ShortRows of(const QuantizedRows& rows, int64_t row, int64_t count, int64_t group) {
    const RowLayout& layout = rows.layout;
    const int64_t first = row * layout.num_groups, place = first + group * count;
    const int64_t bytes = 2 * layout.num_planes * layout.group_size * count;
    return {reinterpret_cast<const char*>(rows.values) + row * layout.value_bytes() + group * bytes,
            rows.scales + place,
            rows.sums + place,
            rows.lower + first + group,
            count,
            layout.group_size,
            layout.num_planes};
  }
  int64_t row_bytes() const { return 2 * size; }
  int64_t plane_bytes() const { return count * row_bytes(); }
  const char* of(int64_t group) const { return values + group * num_planes * plane_bytes(); }
  bool have_both(int64_t group) const { return num_planes == 2 && lower[group] != 0; }
};

void shape_short(int64_t num_rows, int64_t num_inputs) {
  TileShapes shapes;
  const int64_t first = num_rows < kTileRows ? num_rows : kTileRows, second = num_rows - first;
  for (int tile = 0; tile < 4; ++tile) shapes.set(tile, tile < 2 ? first : second);
  shapes.set(4, first, 2 * num_inputs);
  shapes.set(5, second, 2 * num_inputs);
  shapes.set(6, num_inputs / 2);
  shapes.set(7, num_inputs / 2);
  TILES_FENCE();
  TILES_SHAPE(&shapes);
}

// Operands of tiles for one group.
struct ShortStep {
  const char *x, *second, *weights;  // rows: the lower plane if the group has one, and then the upper one
  int64_t stride, half;              // bytes between two rows, and of the weights of a vector of outputs

  static ShortStep of(const ShortRows& rows, const ShortPanel& panel, int64_t group) {
    const char* upper = rows.of(group);
    const bool both = rows.have_both(group);
    return {both ? upper + rows.plane_bytes() : upper, both ? upper : nullptr, panel.of(group), rows.row_bytes(),
            panel.group_bytes / 2};
  }
};

// A quarter of the tiles' work for a group: stores the sums of the previous group to `done`, [tiles][rows][kTileRows],
// and begins this group's.
template <int kPart, bool kTwo>
VLLM_LITE_INLINE void step_tiles(const ShortStep& step, float* done) {
  const int64_t below = kTileRows * step.stride;
  if constexpr (kPart == 0) {
    TILE_LOAD(4, step.x, step.stride);
    TILE_LOAD(6, step.weights, kTileRowBytes);
    TILE_STORE(0, done, kTileRowBytes);
    TILE_ZERO(0);
    TILE_DOT_BF16(0, 4, 6);
    TILE_LOAD(7, step.weights + step.half, kTileRowBytes);
    TILE_STORE(1, done + kTileSums, kTileRowBytes);
    TILE_ZERO(1);
    TILE_DOT_BF16(1, 4, 7);
  } else if constexpr (kPart == 1 && kTwo) {
    TILE_LOAD(5, step.x + below, step.stride);
    TILE_STORE(2, done + 2 * kTileSums, kTileRowBytes);
    TILE_ZERO(2);
    TILE_DOT_BF16(2, 5, 6);
    TILE_STORE(3, done + 3 * kTileSums, kTileRowBytes);
    TILE_ZERO(3);
    TILE_DOT_BF16(3, 5, 7);
  } else if constexpr (kPart == 2) {
    if (step.second == nullptr) return;
    TILE_LOAD(4, step.second, step.stride);
    TILE_DOT_BF16(0, 4, 6);
    TILE_DOT_BF16(1, 4, 7);
  } else if constexpr (kPart == 3 && kTwo) {
    if (step.second == nullptr) return;
    TILE_LOAD(5, step.second + below, step.stride);
    TILE_DOT_BF16(2, 5, 6);
    TILE_DOT_BF16(3, 5, 7);
  }
}

template <bool kTwo>
VLLM_LITE_INLINE void step_all(const ShortStep& step, float* done) {
  step_tiles<0, kTwo>(step, done);
  step_tiles<1, kTwo>(step, done);
  step_tiles<2, kTwo>(step, done);
  step_tiles<3, kTwo>(step, done);
}

// sums += a strip's scaled totals, both as tiles. Rows after the last one are undefined.
template <bool kMinima>
VLLM_LITE_INLINE void add_strip(const float* totals, const float* scales, const float* row_scales,
                                const float* row_sums, float* sums) {
  const Vec scale[2] = {load(scales), load(scales + 2 * kWidth)};
  [[maybe_unused]] const Vec minima[2] = {load(scales + kWidth), load(scales + 3 * kWidth)};
#pragma GCC unroll 8
  for (int64_t row = 0; row < kStripRows; ++row) {
    const Vec own = splat(row_scales[row]);
    [[maybe_unused]] const Vec total = splat(row_sums[row]);
#pragma GCC unroll 2
    for (int64_t v = 0; v < 2; ++v) {
      Vec scaled = load(totals + v * kTileSums + row * kTileRows) * scale[v];
      if constexpr (kMinima) scaled = subtract_product(minima[v], total, scaled);
      float* sum = sums + v * kTileSums + row * kTileRows;
      store(sum, multiply_add(scaled, own, load(sum)));
    }
  }
}

// Position in the groups of a part of the inputs, for one group of rows after the other.
struct ShortPlace {
  int64_t rows, group;

  // Advances; stays at the last position, which is then multiplied once more, without use.
  void next(int64_t num_rows, int64_t num_groups) {
    if (group + 1 < num_groups) {
      ++group;
    } else if (rows + 1 < num_rows) {
      ++rows;
      group = 0;
    }
  }
};

// ---- one task

class ShortTask {
 public:
  ShortTask(const LinearCall& call, const LinearTask& task)
      : call_(call), task_(task), rows_(*call.quantized), weights_(*call.weight, rows_.layout) {}

  void run() {
    const int64_t num_groups = rows_.layout.num_groups, length = kShortInputs / rows_.layout.group_size;
    const int64_t full = task_.num_rows / kTileGroup, rest = task_.num_rows % kTileGroup;
    std::memset(totals_, 0, sizeof totals_);
    for (int64_t first = 0; first < num_groups; first += length) {
      const int64_t left = num_groups - first, count = left < length ? left : length;
      for (int64_t block = 0; block < task_.num_blocks; ++block) {
        weights_.widen(task_.first_block + block, first, count, &panel_);
        const Inputs part = {block, first, count, first == 0, left <= length};
        if (full > 0) add<true>(part, {0, full, kTileGroup});
        if (rest > kTileRows) add<true>(part, {full, 1, rest});
        if (rest > 0 && rest <= kTileRows) add<false>(part, {full, 1, rest});
      }
    }
    if (streamed_) _mm_sfence();
    TILES_RELEASE();
  }

 private:
  struct Inputs {
    int64_t block, first, count;
    bool is_first, is_last;
  };

  // Groups of rows of the task, with equal numbers of rows.
  struct Several {
    int64_t first, count, num_rows;
  };

  template <bool kTwo>
  void add(const Inputs& part, const Several& several) {
    if (several.num_rows != shape_) shape_short(shape_ = several.num_rows, rows_.layout.group_size);
    panel_.has_minima ? add_all<kTwo, true>(part, several) : add_all<kTwo, false>(part, several);
  }

  ShortRows rows(const Inputs& part, const Several& several, int64_t number) const {
    return ShortRows::of(rows_, task_.first_row + (several.first + number) * kTileGroup, several.num_rows, part.first);
  }

  // Tiles are two groups ahead of vectors: one group's sums are in tiles, the other's in memory.
  template <bool kTwo, bool kMinima>
  __attribute__((noinline)) void add_all(const Inputs& part, const Several& several) {
    float *now = totals_, *done = totals_ + kGroupSums;
    ShortPlace ahead = {0, 0};
    ShortRows x = rows(part, several, 0);
    const auto next_step = [&]() __attribute__((always_inline)) {
      const ShortStep step = ShortStep::of(x, panel_, ahead.group);
      ahead.next(several.count, part.count);
      if (ahead.group == 0) x = rows(part, several, ahead.rows);
      return step;
    };
    TILES_FENCE();
    step_all<kTwo>(next_step(), done);
    step_all<kTwo>(next_step(), now);
    for (int64_t number = 0; number < several.count; ++number) {
      const ShortRows own = rows(part, several, number);
      const int64_t index = several.first + number;
      const Group::Ahead weights = weights_ahead(part, index);
      float* sums = sums_ + (part.is_first && part.is_last ? 0 : part.block * num_parts() + index) * kGroupSums;
      if (part.is_first) std::memset(sums, 0, kGroupSums * sizeof(float));
      for (int64_t group = 0; group < part.count; ++group) {
        prefetch(weights, group);
        add_group<kTwo, kMinima>(own, group, next_step(), now, done, sums);
        std::swap(now, done);
      }
      if (part.is_last)
        write({&call_, sums, task_.first_row + index * kTileGroup, own.count, task_.first_block + part.block});
    }
  }

  // Adds a group's totals, in `now`, to the sums of its rows; meanwhile stores the next group's totals to `done`, and
  // computes those of the one after it.
  template <bool kTwo, bool kMinima>
  inline __attribute__((always_inline)) void add_group(const ShortRows& rows, int64_t group, const ShortStep& step,
                                                       const float* now, float* done, float* sums) const {
    const float *scales = panel_.scales_of(group), *own = rows.scales + group * rows.count;
    const float* row_sums = rows.sums + group * rows.count;
    const auto add = [&](int64_t row) __attribute__((always_inline)) {
      if (row >= rows.count) return;
      const int64_t at = sums_at(row, 0);
      add_strip<kMinima>(now + at, scales, own + row, row_sums + row, sums + at);
    };
    TILES_FENCE();
    step_tiles<0, kTwo>(step, done);
    add(0);
    step_tiles<1, kTwo>(step, done);
    add(kStripRows);
    step_tiles<2, kTwo>(step, done);
    if constexpr (kTwo) add(2 * kStripRows);
    step_tiles<3, kTwo>(step, done);
    if constexpr (kTwo) add(3 * kStripRows);
    TILES_FENCE();
  }

  void write(const Outputs& outputs) const { streamed_ ? stream(outputs, 0, kGroup) : outputs.write(0, kGroup); }

  int64_t num_parts() const { return (task_.num_rows + kTileGroup - 1) / kTileGroup; }

  // The part that is widened next; each group of rows prefetches a share.
  Group::Ahead weights_ahead(const Inputs& part, int64_t index) const {
    const bool is_end = part.block + 1 == task_.num_blocks;
    const char* next = is_end ? weights_.cell(task_.first_block, part.first + part.count)
                              : weights_.cell(task_.first_block + part.block + 1, part.first);
    const int64_t bytes = weights_.cell_bytes(), count = num_parts();
    return {next, index * bytes / count, (index + 1) * bytes / count, bytes, count == 1};
  }

  const LinearCall& call_;
  const LinearTask& task_;
  const QuantizedRows& rows_;
  const ShortWeights weights_;
  const bool streamed_ = are_streamed(call_);
  int64_t shape_ = 0;  // number of rows for which tiles are shaped
  ShortPanel panel_;
  alignas(64) float totals_[2 * kGroupSums];
  alignas(64) float sums_[kMaxGroupedRows * kMaxBlocks * kBlock];
};

}  // namespace
}  // namespace VLLM_LITE_ISA
