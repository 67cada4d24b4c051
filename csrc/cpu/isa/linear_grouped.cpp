// Grouped weights times quantized rows: bytes times integers within a group, float32 from group to group.
//
// Cells are read in place; codes of 4 bits become bytes in registers, again for each group of rows, and those of 5 bits
// in memory, once for many rows: adding fifth bits takes as long as a third of the products. The integer sum of a
// group, times the weights' scale and the row's scale, is added to each output's sum.
#include "lone_row.h"

namespace VLLM_LITE_ISA {
namespace {

#if defined(VLLM_LITE_MULTIPLIES_BYTES)
// Vectors of outputs at a time: half a block, or more for few rows, which leave registers for it. R counts planes.
template <int R>
constexpr int kVectors = kWidth == 16 || (kWidth == 8 && R > 2) ? 2 : 4;
constexpr int64_t kDepth = kWidth == 16 ? 1024 : 512;  // inputs: a block's weights stay in L1 for all groups of rows
constexpr int64_t kLongDepth = 1152;                   // the same for weights of 8 bits in long groups with byte_rows
// Weights with at least this many elements are assumed to be read from memory, since the model hardly fits into a
// cache. If they are in a cache after all, prefetching into L2 takes 1.05 to 1.08 times as long.
constexpr int64_t kWeightsOfMemory = 1 << 21;

// Whether few rows prefetch a weight into L2.
bool fetches_into_l2(const PackedWeight& weight) {
  return is_amx(isa()) && weight.num_outputs * weight.num_inputs >= kWeightsOfMemory;
}

// Scales and minima of the outputs of a cell, from `column` on.
template <int V>
struct Factors {
  Vec scale[V], minima[V];
  bool has_minima;

  inline __attribute__((always_inline)) Factors(const char* cell, const CellLayout& layout, const float* supers,
                                                int64_t column) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const Scales scales(cell, layout, supers, column + v * kWidth);
      scale[v] = scales.scale;
      minima[v] = scales.minima;
      has_minima = scales.has_minima;
    }
  }
  // From Cells::floats.
  inline __attribute__((always_inline)) Factors(const float* floats, const CellLayout& layout, int64_t column)
      : has_minima(has_floats(layout)) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      scale[v] = load(floats + column + v * kWidth);
      minima[v] = load(floats + kBlock + column + v * kWidth);
    }
  }
};

template <int kPlanes, int R, int V>
VLLM_LITE_INLINE void add_group(const Rows& rows, int64_t group, Factors<V> factors, const Vec (&part)[R][V],
                                float unit, Vec (&sum)[R][V]) {
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    if constexpr (kPlanes == 2) factors.scale[v] = factors.scale[v] * splat(unit);
  }
  if (factors.has_minima) return add_rows<true>(rows, group, factors.scale, factors.minima, part, sum);
  add_rows<false>(rows, group, factors.scale, factors.minima, part, sum);
}

// Adds the products of some cells to the sums of R rows and V vectors of the block's outputs, from `column` on. kAlone:
// the rows are the only group, and prefetch all memory themselves.
template <int R, int V, class Codes, int kPlanes, bool kAlone, int kOctets>
__attribute__((noinline)) void multiply(const Rows& rows, const Cells& cells, Ahead ahead, const Sums& sums,
                                        int64_t row, int64_t column) {
  Codes codes(cells.table);
  const CellLayout layout = cells.layout;
  const int64_t num_octets = kOctets > 0 ? kOctets : cells.num_octets;
  const bool into_l2 = kAlone && cells.into_l2;
  const int64_t ahead_bytes = into_l2 ? kAheadBytesL2 : kAheadBytes<Codes>;
  Vec sum[R][V];
  sums.begin({row, column}, sum);
  const char* cell = cells.first;
  for (int64_t number = 0, group = 0; number < cells.count; ++number, cell += layout.bytes()) {
    const float* supers = cells.supers_of(number);
    if (kAlone && column == 0) {
      prefetch_around(cell + ahead_bytes, layout, num_octets * cells.parts * Codes::kBytes);
      if (supers != nullptr) prefetch_supers(supers, number * layout.group_size % kSuperInputs / layout.group_size);
    }
    codes.enter(cell, layout, column);
    const char* from = cell + layout.codes() + 4 * column;
    for (int64_t part = 0; part < cells.parts; ++part, ++group, from += num_octets * Codes::kBytes) {
      const Ahead next = {ahead.from + group * num_octets * ahead.step, ahead.step};
      Vec made[R][V];
      const float unit =
          multiply_part<kPlanes, kAlone, kOctets>(codes, rows, group, {from, num_octets, next, into_l2}, made);
      if constexpr (kAlone) {
        add_group<kPlanes>(rows, group, Factors<V>(cell, layout, supers, column), made, unit, sum);
      } else {
        const Factors<V> factors(cells.floats + 2 * kBlock * number, layout, column);
        add_group<kPlanes>(rows, group, factors, made, unit, sum);
      }
    }
  }
  sums.end({row, column}, sum);
}

// For `count` rows, 1 <= count <= R.
template <int R, template <int> class Codes, int kPlanes, bool kAlone>
void multiply_group(int64_t count, const Rows& rows, const Cells& cells, Ahead ahead, const Sums& sums, int64_t row) {
  if constexpr (R > 1) {
    if (count < R) return multiply_group<R - 1, Codes, kPlanes, kAlone>(count, rows, cells, ahead, sums, row);
  }
  constexpr int V = kVectors<R * kPlanes>;
  for (int64_t column = 0; column < kBlock; column += V * kWidth) {
    if constexpr (kWidth == 16 && !kAlone && R > kGroupRows<kPlanes> / 2) {
      if (cells.num_octets == kUnrolled) {
        multiply<R, V, Codes<V>, kPlanes, false, kUnrolled>(rows, cells, ahead, sums, row, column);
        continue;
      }
    }
    multiply<R, V, Codes<V>, kPlanes, kAlone, 0>(rows, cells, ahead, sums, row, column);
  }
}

// The rows of a task, from the inputs of one cell on.
struct Panel {
  const LinearTask& task;
  const QuantizedRows& all;
  RowGroups groups;
  int64_t input;

  Rows rows(int64_t row, int64_t count) const {
    const RowLayout& layout = all.layout;
    const int64_t at = task.first_row + row, group = input / layout.group_size;
    const int64_t place = at * layout.num_groups + group * count;
    const int8_t* first = all.values + at * layout.value_bytes();
    return {first + input * (layout.has_fours ? 1 : layout.num_planes) * count,
            first + layout.fours(group, count),
            all.scales + place,
            all.biases + place,
            all.sums + place,
            all.lower + at * layout.num_groups + group,
            layout.has_fours};
  }
};

// Multiplies all rows of a task. `ahead`: the memory to prefetch, in steps of eight inputs.
template <template <int> class Codes, int kPlanes>
void multiply_rows(const Panel& panel, const Cells& cells, Ahead ahead, const Sums& sums) {
  const int64_t num_rows = panel.groups.num_rows, num_groups = panel.groups.count;
  if (num_groups == 1) {
    return multiply_group<kAloneRows<kPlanes>, Codes, kPlanes, true>(num_rows, panel.rows(0, num_rows), cells, {}, sums,
                                                                     0);
  }
  const int64_t step = ahead.step / num_groups, num_octets = cells.count * cells.layout.group_size / 8;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t row = panel.groups.first(group), count = panel.groups.first(group + 1) - row;
    const Rows rows = panel.rows(row, count);
    multiply_group<kGroupRows<kPlanes>, Codes, kPlanes, false>(
        count, rows, cells, {ahead.from + group * num_octets * step, step}, sums, row);
  }
}

// The same for any kind of codes; `type` is the weight's.
template <int kPlanes>
void multiply_cells(const Panel& panel, const Cells& cells, int32_t type, Ahead ahead, const Sums& sums) {
  if constexpr (kPlanes == 2) {
    if (type == kGrouped8) return multiply_rows<Bytes, kPlanes>(panel, cells, ahead, sums);
    if (type == kGrouped5) return multiply_rows<Fives, kPlanes>(panel, cells, ahead, sums);
  }
  if constexpr (kPlanes == 1 || kPlanesApart) {  // two planes with codes of 4 bits exist with tiles only
    if (cells.layout.minima_type == kShifts) return multiply_rows<Shifted, kPlanes>(panel, cells, ahead, sums);
    if (cells.table == nullptr) return multiply_rows<Nibbles, kPlanes>(panel, cells, ahead, sums);
#if !defined(__AVX512VNNI__) && !defined(__ARM_FEATURE_MATMUL_INT8)
    if (cells.is_wide) return multiply_rows<LookedWide, kPlanes>(panel, cells, ahead, sums);
#endif
    multiply_rows<Looked, kPlanes>(panel, cells, ahead, sums);
  }
}

// Maximum cells of a tile.
constexpr int64_t kMaxCells = kDepth / 16;

// Converts scales and minima to floats, once for all rows: [cells][2][kBlock].
void widen_scales(const Cells& cells, float* to) {
  const char* cell = cells.first;
  for (int64_t number = 0; number < cells.count; ++number, cell += cells.layout.bytes(), to += 2 * kBlock) {
    const float* supers = cells.supers_of(number);
    for (int64_t column = 0; column < kBlock; column += kWidth) {
      const Scales scales(cell, cells.layout, supers, column);
      store(to + column, scales.scale);
      store(to + kBlock + column, scales.minima);
    }
  }
}

// Stores codes of 5 bits at `to` as codes of 8 bits. Returns the cells of these, without scales.
Cells unpack_fives(Cells cells, char* to) {
  constexpr int V = kBlock / kWidth;
  Fives<V> codes(cells.table);
  const char* cell = cells.first;
  const CellLayout layout = cells.layout;
  const CellLayout unpacked = {layout.group_size, 0, 0, kBlock * layout.group_size, layout.scale_type,
                               layout.minima_type};
  cells.first = to;
  cells.layout = unpacked;
  for (int64_t number = 0; number < cells.count; ++number, cell += layout.bytes(), to += unpacked.bytes()) {
    codes.enter(cell, layout, 0);
    unpack_octets<V>(codes, cell + layout.codes(), layout.group_size / 8, to);
  }
  return cells;
}

template <int kPlanes>
void run(const LinearCall& call, const LinearTask& task) {
  alignas(64) float memory[kMaxByteRows * kMaxBlocks * kBlock], floats[kMaxCells * 2 * kBlock];
  alignas(64) char bytes[kDepth / 2 * kBlock];
  const PackedWeight& weight = *call.weight;
  const CellLayout layout = CellLayout::of(weight);
  const int64_t num_groups = layout.groups(weight.num_inputs), block_bytes = num_groups * layout.bytes();
  const int64_t parts = layout.group_size / call.quantized->layout.group_size;
  const bool are_long = call.quantized->layout.has_fours && layout.group_size > kOnePlane;
  const bool are_many = task.num_rows > kAloneRows<kPlanes>;
  const bool are_unpacked = are_many && weight.type == kGrouped5 && layout.group_size <= kOnePlane;
  const int64_t depth = weight.type != kGrouped8 && !are_unpacked ? kDepth : are_long ? kLongDepth : kDepth / 2;
  const int64_t num_tiles = are_many ? (num_groups * layout.group_size + depth - 1) / depth : 1;
  // Groups of a tile. Groups that share supers are in the same tile.
  const int64_t unit = weight.supers != nullptr ? kSuperInputs / layout.group_size : 1;
  const int64_t length = (num_groups + num_tiles * unit - 1) / (num_tiles * unit) * unit;
  const int64_t octet_bytes = layout.bytes() * 8 / layout.group_size;
  const bool into_l2 = fetches_into_l2(weight);
  const char* blocks = static_cast<const char*>(weight.data) + task.first_block * block_bytes;
  for (int64_t group = 0; group < num_groups; group += length) {
    const Panel panel = {task, *call.quantized, RowGroups::of(call.quantized->layout, task.num_rows),
                         group * layout.group_size};
    const int64_t left = num_groups - group, count = left < length ? left : length;
    for (int64_t block = 0; block < task.num_blocks; ++block) {
      const char* tile = blocks + block * block_bytes + group * layout.bytes();
      const Cells cells = {tile,
                           layout,
                           count,
                           parts,
                           call.quantized->layout.group_size / 8,
                           weight.bytes,
                           taken_off(weight) != 0,
                           weight.supers_of(task.first_block + block, group),
                           into_l2,
                           floats};
      if (are_many) widen_scales(cells, floats);
      const char* next = block + 1 < task.num_blocks   ? tile + block_bytes
                         : group + length < num_groups ? blocks + (group + length) * layout.bytes()
                                                       : tile;
      const Sums sums = {memory + block * kBlock, task.num_blocks * kBlock,           group > 0, count == left, &call,
                         task.first_row,          (task.first_block + block) * kBlock};
      if (are_unpacked) {
        multiply_cells<kPlanes>(panel, unpack_fives(cells, bytes), kGrouped8, {next, octet_bytes}, sums);
      } else {
        multiply_cells<kPlanes>(panel, cells, weight.type, {next, octet_bytes}, sums);
      }
    }
  }
}
#endif

template <class Out>
void unpack_to(const PackedWeight& weight, int64_t output, Out* to) {
  const CellLayout layout = CellLayout::of(weight);
  const int64_t num_groups = layout.groups(weight.num_inputs), column = output % kBlock;
  const char* cell = static_cast<const char*>(weight.data) + output / kBlock * num_groups * layout.bytes();
  const int64_t word = weight.type == kGrouped8 ? 4 : 8;  // inputs
  for (int64_t input = 0; input < weight.num_inputs; input += layout.group_size, cell += layout.bytes()) {
    const int64_t first = column / kWidth * kWidth, lane = column % kWidth;
    const float* supers = weight.supers_of(output / kBlock, input / layout.group_size);
    const float scale = load_scales(cell, layout.scale_type, first, supers)[lane];
    const float minimum = load_minima(cell, layout, first, supers)[lane];
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(cell + layout.codes()) + 4 * column;
    const int64_t left = weight.num_inputs - input, count = left < layout.group_size ? left : layout.group_size;
    for (int64_t i = 0; i < count; ++i) {
      const int byte = codes[i / word * 4 * kBlock + i % 4];
      int code = word == 4 ? byte : i % 8 < 4 ? byte & 15 : byte >> 4;
      if (weight.type == kGrouped5) {
        const int bits = cell[layout.fifth_bits() + i / 4 * kBlock / 2 + column / 2];
        code |= (bits >> (4 * (column % 2) + i % 4) & 1) << 4;
      }
      const int64_t place = weight.order == nullptr ? input + i : weight.order[input + i];
      from_float(weight.values[code] * scale - minimum, to + place);
    }
  }
}

}  // namespace

void linear_grouped([[maybe_unused]] const LinearCall& call, [[maybe_unused]] const LinearTask& task) {
#if defined(VLLM_LITE_LARGE_FOURS)
  if (task.num_rows == 1 && !fetches_into_l2(*call.weight)) {
    const Panel panel = {task, *call.quantized, {1, 1}, 0};
    if (multiply_lone_row(call, task, panel.rows(0, 1))) return;
  }
#endif
#if defined(VLLM_LITE_MULTIPLIES_BYTES)
  call.quantized->layout.num_planes == 1 ? run<1>(call, task) : run<2>(call, task);
#endif
}

void unpack_output(const PackedWeight& weight, int64_t output, int32_t type, void* to) {
  if (type == kFloat32) return unpack_to(weight, output, static_cast<float*>(to));
  if (type == kFloat16) return unpack_to(weight, output, static_cast<Float16*>(to));
  unpack_to(weight, output, static_cast<BFloat16*>(to));
}

}  // namespace VLLM_LITE_ISA
