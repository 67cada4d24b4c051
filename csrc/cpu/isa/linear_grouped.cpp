// Grouped weights times rows that were quantized: bytes times integers within a group, float32 from group to group.
//
// Cells are used as they lie in memory, for any number of rows: codes of 4 bits become bytes in registers, again for
// each group of rows. (Bytes that were made once for all rows took 5 % more time, as twice as much has to stay in L1.)
// For each output the integers of a group of weights, times its scale, are added up over the inputs that share a scale
// of the row, and that, times this scale, to the sum.
#include "byte_products.h"
#include "grouped_codes.h"
#include "linear_task.h"

namespace VLLM_LITE_ISA {
namespace {

#if defined(VLLM_LITE_MULTIPLIES_BYTES)
// Rows at a time: two sums each, and some weights, fill the registers; and two more sums each where groups of weights
// are smaller than those of rows.
template <bool kSmall>
constexpr int kGroup = kWidth == 16 ? (kSmall ? 6 : 12) : 4;
// A few more are still faster in one group, some of whose sums are in memory then, than in two.
template <bool kSmall>
constexpr int kAloneRows = kWidth == 16 ? (kSmall ? 8 : 12) : 4;
// Vectors of outputs at a time: half a block, but for few rows, which have registers for more.
template <int R>
constexpr int kVectors = kWidth == 16 || R > 2 ? 2 : 4;
constexpr int64_t kTile = 512;  // inputs: a tile of a block's weights stays in L1 for all groups of rows
constexpr int64_t kAheadBytes = 4096;

// Rows of a panel from the first input of a scale on.
struct Rows {
  const int8_t* values;  // those of four inputs lie together, those of the next `stride` bytes behind
  int64_t stride;
  const float* scales;    // [rows][num_scales]
  const int32_t* biases;  // [rows][num_groups], like sums
  const float* sums;
  int64_t num_scales, num_groups;

  Rows from(int64_t row) const {
    const int64_t group = row * num_groups;
    return {values + 4 * row, stride, scales + row * num_scales, biases + group, sums + group, num_scales, num_groups};
  }
};

// Cells of one block that follow one another.
struct Cells {
  const char* first;
  CellLayout layout;
  int64_t count;
  const uint8_t* table;  // [16] or nullptr
  bool is_wide;          // whether something is taken off its bytes
  const float* supers;   // PackedWeight::supers_of the first

  const float* supers_of(int64_t group) const {
    return supers == nullptr ? supers : supers + 2 * kBlock * (group * layout.group_size / kSuperInputs);
  }
};

// total [R][V] += the products of eight inputs of R rows, whose second four are `stride` bytes behind.
template <int R, int V, class Codes>
VLLM_LITE_INLINE void multiply_octet(const Codes& codes, const int8_t* x, int64_t stride, const char* from,
                                     Ints (&total)[R][V]) {
#if defined(__AVX512VNNI__)
  const Octet low = codes.load(from, 0), high = codes.load(from, 1);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Ints integers = four_of(x + 4 * r);
    add_products(total[r][0], low.first, integers);
    add_products(total[r][1], high.first, integers);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Ints integers = four_of(x + stride + 4 * r);
    add_products(total[r][0], low.second, integers);
    add_products(total[r][1], high.second, integers);
  }
#else
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    const Octet weights = codes.load(from, v);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Ints first = four_of(x + 4 * r), second = four_of(x + stride + 4 * r);
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

// total [R][V] += the products of one group.
template <int R, int V, class Codes, bool kAlone>
VLLM_LITE_INLINE void multiply_codes(const Codes& codes, const int8_t* x, int64_t stride, const char* from,
                                     int64_t num_octets, Ahead ahead, Ints (&total)[R][V]) {
  for (int64_t octet = 0; octet < num_octets; ++octet, from += Codes::kBytes, x += 2 * stride) {
    if constexpr (kAlone) {
      prefetch<Codes::kBytes * V * kWidth / kBlock>({from + kAheadBytes, 0}, 0);
    } else {
      const char* line = ahead.from + octet * ahead.step;
      __builtin_prefetch(line);
      for (int64_t i = 64; i < ahead.step; i += 64) __builtin_prefetch(line + i);
    }
    multiply_octet<R, V>(codes, x, stride, from, total);
  }
}

VLLM_LITE_INLINE void add_to(float* sum, Vec value, Vec scale) {
  store(sum, multiply_add(value, scale, load(sum)));
}

// sums [R][sums_stride] += total times the scales of weights and rows, less minima times what rows add up to. All are
// those of a block's outputs from `column` on.
template <int R, int V>
VLLM_LITE_INLINE void add_group(const Rows& rows, int64_t group, const char* cell, const Cells& cells, int64_t column,
                                const Ints (&total)[R][V], float* sums, int64_t sums_stride) {
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    const Scales scales(cell, cells.layout, cells.supers_of(group), column + v * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec value = to_floats(total[r][v]) * scales.scale;
      add_to(sums + r * sums_stride + column + v * kWidth,
             scales.less_minima(value, rows.sums[r * rows.num_groups + group]),
             splat(rows.scales[r * rows.num_scales + group]));
    }
  }
}

// The same without the scales of rows, as there are other groups with the same: to parts [R][V].
template <int R, int V>
VLLM_LITE_INLINE void add_part(const Rows& rows, int64_t group, const char* cell, const Cells& cells, int64_t column,
                               const Ints (&total)[R][V], Vec (&parts)[R][V]) {
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    const Scales scales(cell, cells.layout, cells.supers_of(group), column + v * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec value = multiply_add(to_floats(total[r][v]), scales.scale, parts[r][v]);
      parts[r][v] = scales.less_minima(value, rows.sums[r * rows.num_groups + group]);
    }
  }
}

// Of one cell: total [R][V] = what its bytes lack, plus its products.
template <int R, int V, bool kAlone, class Codes>
VLLM_LITE_INLINE void multiply_cell(Codes& codes, const Rows& rows, int64_t group, const char* cell,
                                    const CellLayout& layout, int64_t column, Ahead ahead, Ints (&total)[R][V]) {
  if (kAlone && column == 0) {
    for (int64_t i = 0; i < layout.codes(); i += 64) __builtin_prefetch(cell + kAheadBytes + i);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) total[r][v] = all_ints(rows.biases[r * rows.num_groups + group]);
  }
  codes.enter(cell + layout.scale_bytes + column);
  const int64_t num_octets = layout.group_size / 8;
  multiply_codes<R, V, Codes, kAlone>(codes, rows.values + 2 * num_octets * group * rows.stride, rows.stride,
                                      cell + layout.codes() + 4 * column, num_octets,
                                      {ahead.from + group * num_octets * ahead.step, ahead.step}, total);
}

// sums [R][sums_stride] += R rows times cells of one block, for V vectors of its outputs from `column` on. Rows that
// are alone ask for all that comes. kSmall: groups of weights are smaller than kQuantGroup.
template <int R, int V, class Codes, bool kSmall, bool kAlone>
__attribute__((noinline)) void multiply(const Rows& rows, const Cells& cells, int64_t column, float* sums,
                                        int64_t sums_stride, Ahead ahead) {
  Codes codes(cells.table);
  const CellLayout layout = cells.layout;
  const char* cell = cells.first;
  Ints total[R][V];
  if constexpr (!kSmall) {
    for (int64_t group = 0; group < cells.count; ++group, cell += layout.bytes()) {
      multiply_cell<R, V, kAlone>(codes, rows, group, cell, layout, column, ahead, total);
      add_group<R, V>(rows, group, cell, cells, column, total, sums, sums_stride);
    }
    return;
  }
  const int64_t at_once = kQuantGroup / layout.group_size;
  for (int64_t first = 0; first < cells.count; first += at_once) {
    Vec parts[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) parts[r][v] = splat(0);
    }
    for (int64_t group = first; group < first + at_once && group < cells.count; ++group, cell += layout.bytes()) {
      multiply_cell<R, V, kAlone>(codes, rows, group, cell, layout, column, ahead, total);
      add_part<R, V>(rows, group, cell, cells, column, total, parts);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec scale = splat(rows.scales[r * rows.num_scales + first / at_once]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) add_to(sums + r * sums_stride + column + v * kWidth, parts[r][v], scale);
    }
  }
}

// For `count` rows, 1 <= count <= R.
template <int R, template <int> class Codes, bool kSmall, bool kAlone>
void multiply_group(int64_t count, const Rows& rows, const Cells& cells, float* sums, int64_t sums_stride,
                    Ahead ahead) {
  if constexpr (R > 1) {
    if (count < R) return multiply_group<R - 1, Codes, kSmall, kAlone>(count, rows, cells, sums, sums_stride, ahead);
  }
  constexpr int V = kVectors<R>;
  for (int64_t column = 0; column < kBlock; column += V * kWidth) {
    multiply<R, V, Codes<V>, kSmall, kAlone>(rows, cells, column, sums, sums_stride, ahead);
  }
}

// All rows of a task; groups differ by one row at most. `ahead` is what is needed next, by eight inputs.
template <template <int> class Codes, bool kSmall>
void multiply_rows(int64_t num_rows, const Rows& rows, const Cells& cells, float* sums, int64_t sums_stride,
                   Ahead ahead) {
  constexpr int kMost = kGroup<kSmall>, kAlone = kAloneRows<kSmall>;
  if (num_rows <= kAlone) {
    return multiply_group<kAlone, Codes, kSmall, true>(num_rows, rows, cells, sums, sums_stride, {});
  }
  const int64_t num_groups = (num_rows + kMost - 1) / kMost, step = ahead.step / num_groups;
  const int64_t num_octets = cells.count * cells.layout.group_size / 8;
  for (int64_t group = 0, row = 0; group < num_groups; ++group) {
    const int64_t end = (group + 1) * num_rows / num_groups;
    multiply_group<kMost, Codes, kSmall, false>(end - row, rows.from(row), cells, sums + row * sums_stride, sums_stride,
                                                {ahead.from + group * num_octets * step, step});
    row = end;
  }
}

// The same for any kind of codes; `four` bits or eight.
template <bool kSmall>
void multiply_cells(int64_t num_rows, const Rows& rows, const Cells& cells, bool four, float* sums, int64_t sums_stride,
                    Ahead ahead) {
  if (!four) return multiply_rows<Bytes, kSmall>(num_rows, rows, cells, sums, sums_stride, ahead);
  if (cells.layout.minima_type == kShifts) {
    return multiply_rows<Shifted, kSmall>(num_rows, rows, cells, sums, sums_stride, ahead);
  }
  if (cells.table == nullptr) return multiply_rows<Nibbles, kSmall>(num_rows, rows, cells, sums, sums_stride, ahead);
#if !defined(__AVX512VNNI__)
  if (cells.is_wide) return multiply_rows<LookedWide, kSmall>(num_rows, rows, cells, sums, sums_stride, ahead);
#endif
  multiply_rows<Looked, kSmall>(num_rows, rows, cells, sums, sums_stride, ahead);
}

template <bool kSmall>
void run_tiles(const LinearCall& call, const LinearTask& task, float* sums) {
  const PackedWeight& weight = *call.weight;
  const QuantizedRows& all = *call.quantized;
  const CellLayout layout = CellLayout::of(weight);
  const int64_t num_groups = all.layout.num_groups, block_bytes = num_groups * layout.bytes();
  const bool four = weight.type == kGrouped4;
  const int64_t length = task.num_rows <= kAloneRows<kSmall> ? num_groups : kTile / layout.group_size;
  const int64_t sums_stride = task.num_blocks * kBlock, octet_bytes = layout.bytes() * 8 / layout.group_size;
  const char* blocks = static_cast<const char*>(weight.data) + task.first_block * block_bytes;
  for (int64_t group = 0; group < num_groups; group += length) {
    const int64_t place = task.first_row * num_groups + group, left = num_groups - group;
    const int64_t input = group * layout.group_size;
    const Rows rows = {all.values + task.first_row * all.layout.width + input * task.num_rows,
                       4 * task.num_rows,
                       all.scales + task.first_row * all.layout.num_scales + input / kQuantGroup,
                       all.biases + place,
                       all.sums + place,
                       all.layout.num_scales,
                       num_groups};
    for (int64_t block = 0; block < task.num_blocks; ++block) {
      const char* tile = blocks + block * block_bytes + group * layout.bytes();
      const Cells cells = {tile,
                           layout,
                           left < length ? left : length,
                           weight.bytes,
                           taken_off(weight) != 0,
                           weight.supers_of(task.first_block + block, group)};
      float* block_sums = sums + block * kBlock;
      const char* next = block + 1 < task.num_blocks   ? tile + block_bytes
                         : group + length < num_groups ? blocks + (group + length) * layout.bytes()
                                                       : tile;
      multiply_cells<kSmall>(task.num_rows, rows, cells, four, block_sums, sums_stride, {next, octet_bytes});
    }
  }
}
#endif

template <class Out>
void unpack_to(const PackedWeight& weight, int64_t output, Out* to) {
  const CellLayout layout = CellLayout::of(weight);
  const int64_t num_groups = layout.groups(weight.num_inputs), column = output % kBlock;
  const char* cell = static_cast<const char*>(weight.data) + output / kBlock * num_groups * layout.bytes();
  const int64_t word = weight.type == kGrouped4 ? 8 : 4;  // inputs
  for (int64_t input = 0; input < weight.num_inputs; input += layout.group_size, cell += layout.bytes()) {
    const int64_t first = column / kWidth * kWidth, lane = column % kWidth;
    const float* supers = weight.supers_of(output / kBlock, input / layout.group_size);
    const float scale = load_scales(cell, layout.scale_type, first, supers)[lane];
    const float minimum = load_minima(cell, layout, first, supers)[lane];
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(cell + layout.codes()) + 4 * column;
    const int64_t left = weight.num_inputs - input, count = left < layout.group_size ? left : layout.group_size;
    for (int64_t i = 0; i < count; ++i) {
      const int byte = codes[i / word * 4 * kBlock + i % 4];
      const int code = word == 4 ? byte : i % 8 < 4 ? byte & 15 : byte >> 4;
      const int64_t place = weight.order == nullptr ? input + i : weight.order[input + i];
      from_float(weight.values[code] * scale - minimum, to + place);
    }
  }
}

}  // namespace

void linear_grouped([[maybe_unused]] const LinearCall& call, [[maybe_unused]] const LinearTask& task) {
#if defined(VLLM_LITE_MULTIPLIES_BYTES)
  alignas(64) float sums[kMaxRows * kMaxBlocks * kBlock];
  const int64_t stride = task.num_blocks * kBlock;
  std::memset(sums, 0, static_cast<size_t>(task.num_rows * stride) * sizeof *sums);
  if (call.weight->group_size < kQuantGroup) {
    run_tiles<true>(call, task, sums);
  } else {
    run_tiles<false>(call, task, sums);
  }
  if (call.out_type == kFloat32) return write<float>(call, task, sums, stride);
  if (call.x_type == kFloat16) return write<Float16>(call, task, sums, stride);
  write<BFloat16>(call, task, sums, stride);
#endif
}

void unpack_output(const PackedWeight& weight, int64_t output, int32_t type, void* to) {
  if (type == kFloat32) return unpack_to(weight, output, static_cast<float*>(to));
  if (type == kFloat16) return unpack_to(weight, output, static_cast<Float16*>(to));
  unpack_to(weight, output, static_cast<BFloat16*>(to));
}

}  // namespace VLLM_LITE_ISA
