// Grouped weights times rows that were quantized: bytes times integers within a group, float32 from group to group.
//
// Cells are used as they lie in memory, for any number of rows: codes of 4 bits become bytes in registers, again for
// each group of rows. For each output what the integers of a group add up to, times the weights' scale, times the
// row's, is added to the sum.
#include "byte_products.h"
#include "grouped_codes.h"
#include "linear_task.h"
#include "row_sums.h"

namespace VLLM_LITE_ISA {
namespace {

#if defined(VLLM_LITE_MULTIPLIES_BYTES)
// Vectors of outputs at a time: half a block, but for few rows, which have registers for more. R counts planes.
template <int R>
constexpr int kVectors = kWidth == 16 || (kWidth == 8 && R > 2) ? 2 : 4;
constexpr int64_t kDepth = kWidth == 16 ? 1024 : 512;  // inputs: a block's weights stay in L1 for all groups of rows
// How far before its use memory is asked for by rows that are alone. Codes of fewer bits than 8 are used up later than
// they could be read, so that more has to be on its way (8192 bytes: 0.89 times the time with 5 bits, 0.97 with 4, but
// 1.03 with 8).
template <class Codes>
constexpr int64_t kAheadBytes = Codes::kBytes == kOctetBytes ? 8192 : 4096;
// Where there are tiles, that is on Intel's processors, into L2: what waits for memory on its way to L1 holds up what
// L2 fetches by itself. Two threads then read 1.07 to 1.11 times as fast (of 3072 to 16384 bytes the best).
constexpr int64_t kAheadBytesL2 = 4096, kAheadBytesL1 = 1024;
// A weight of so many numbers is likely to be of a model that no cache holds. From a cache it takes 1.05 to 1.08 as
// long.
constexpr int64_t kWeightsOfMemory = 1 << 21;

// Rows of one group, from one of their groups of inputs on.
struct Rows {
  const int8_t* values;
  const float* scales;  // [groups][rows], as those below
  const int32_t* biases;
  const float* sums;
  const uint8_t* lower;  // [groups]: whether any of these rows has a lower plane
};

// Cells of one block that follow one another.
struct Cells {
  const char* first;
  CellLayout layout;
  int64_t count;
  int64_t parts;         // groups of the rows' inputs that share a cell
  const uint8_t* table;  // [16] or nullptr
  bool is_wide;          // whether something is taken off its bytes
  const float* supers;   // PackedWeight::supers_of the first
  bool into_l2;          // where rows that are alone ask for it

  const float* supers_of(int64_t number) const {
    return supers == nullptr ? supers : supers + 2 * kBlock * (number * layout.group_size / kSuperInputs);
  }
};

// total [R][V] += the products of eight inputs. kBoth: R are both planes of R / 2 rows; the lower one is `plane`
// behind.
template <bool kBoth, int R, int V, class Codes>
VLLM_LITE_INLINE void multiply_octet(const Codes& codes, const int8_t* x, [[maybe_unused]] int64_t plane,
                                     const char* from, Ints (&total)[R][V]) {
#if defined(__AVX512VNNI__)
  const Octet low = codes.load(from, 0), high = codes.load(from, 1);
  const auto add = [&](const int8_t* four, Ints first, Ints second) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Ints integers = four_of(!kBoth ? four + 4 * r : four + r % 2 * plane + 4 * (r / 2));
      add_products(total[r][0], first, integers);
      add_products(total[r][1], second, integers);
    }
  };
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

// The codes that products with a group take, and what is asked for meanwhile.
struct Stretch {
  const char* from;
  int64_t num_octets;
  Ahead ahead;
  bool into_l2 = false;
};

// total [R][V] += the products of one group; kBoth as above.
template <bool kBoth, bool kAlone, int R, int V, class Codes>
VLLM_LITE_INLINE void multiply_codes(const Codes& codes, const int8_t* x, const Stretch& stretch, Ints (&total)[R][V]) {
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

// part = what the upper plane of R rows makes of a group, or the only one.
template <int kPlanes, bool kAlone, int R, int V, class Codes>
VLLM_LITE_INLINE void multiply_plane(const Codes& codes, const int8_t* x, const int32_t* biases, const Stretch& stretch,
                                     Vec (&part)[R][V]) {
  Ints total[R][V];
  begin_group<kPlanes>(biases, total);
  multiply_codes<false, kAlone>(codes, x, stretch, total);
  all_to_floats(total, part);
}

// The same of two planes. Few sums would wait for one another: each plane has its own then.
template <bool kAlone, int R, int V, class Codes>
VLLM_LITE_INLINE void multiply_planes(const Codes& codes, const int8_t* x, const int32_t* biases,
                                      const Stretch& stretch, Vec (&part)[R][V]) {
  if constexpr (R * V <= 8 || !kPlanesApart) {
    Ints total[2 * R][V];
    begin_planes(biases, total);
    multiply_codes<true, kAlone>(codes, x, stretch, total);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) part[r][v] = planes_sum(total, r, v);
    }
  } else {
    Ints total[R][V];
    begin_group<2>(biases, total);
    multiply_codes<false, kAlone>(codes, x, stretch, total);
    shift_planes(biases, total);
    multiply_codes<false, false>(codes, x + 8 * R * stretch.num_octets, {stretch.from, stretch.num_octets, {}}, total);
    all_to_floats(total, part);
  }
}

// The supers behind those at `supers`, a part with each of the cells that use these.
VLLM_LITE_INLINE void prefetch_supers(const float* supers, int64_t cell) {
  constexpr int64_t kLineFloats = 16, kLines = 2 * kBlock / kLineFloats;
  if (cell < kLines) __builtin_prefetch(supers + 2 * kBlock + cell * kLineFloats);
}

// A cell but for what products with its codes ask for, so many bytes of them.
VLLM_LITE_INLINE void prefetch_around(const char* cell, const CellLayout& layout, int64_t code_bytes) {
  for (int64_t i = 0; i < layout.codes(); i += 64) __builtin_prefetch(cell + i);
  for (int64_t i = layout.codes() + code_bytes; i < layout.bytes(); i += 64) __builtin_prefetch(cell + i);
}

// part = what one group of R rows and the weights' codes make; returns what it is to be multiplied by.
template <int kPlanes, bool kAlone, int R, int V, class Codes>
VLLM_LITE_INLINE float multiply_part(const Codes& codes, const Rows& rows, int64_t group, const Stretch& stretch,
                                     Vec (&part)[R][V]) {
  const int8_t* x = rows.values + 8 * R * kPlanes * stretch.num_octets * group;
  const int32_t* biases = rows.biases + group * R;
  if constexpr (kPlanes == 1) {
    multiply_plane<1, kAlone>(codes, x, biases, stretch, part);
  } else if (kPlanesApart && rows.lower[group] == 0) {
    multiply_plane<kPlanes, kAlone>(codes, x, biases, stretch, part);
    return 128;
  } else {
    multiply_planes<kAlone>(codes, x, biases, stretch, part);
  }
  return 1;
}

// Outputs of a cell, from `column` on.
struct Outputs {
  const char* cell;
  const CellLayout& layout;
  const float* supers;
  int64_t column;
};

// part times the scales of weights and `unit`, less minima times what rows add up to, times the scales of rows. Row by
// row, as there are registers for two numbers of a row beside all sums, and none for those of all rows.
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

template <int kPlanes, int R, int V>
VLLM_LITE_INLINE void add_group(const Rows& rows, int64_t group, const Outputs& outputs, const Vec (&part)[R][V],
                                float unit, Vec (&sum)[R][V]) {
  Vec scale[V], minima[V];
  bool has_minima = false;
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    const Scales scales(outputs.cell, outputs.layout, outputs.supers, outputs.column + v * kWidth);
    scale[v] = kPlanes == 2 ? scales.scale * splat(unit) : scales.scale;
    minima[v] = scales.minima;
    has_minima = scales.has_minima;
  }
  if (has_minima) return add_rows<true>(rows, group, scale, minima, part, sum);
  add_rows<false>(rows, group, scale, minima, part, sum);
}

// The sums of R rows and V vectors of a block's outputs, from `column` on, go on with some of its cells. Rows that are
// alone ask for all that comes.
template <int R, int V, class Codes, int kPlanes, bool kAlone>
__attribute__((noinline)) void multiply(const Rows& rows, const Cells& cells, Ahead ahead, const Sums& sums,
                                        int64_t row, int64_t column) {
  Codes codes(cells.table);
  const CellLayout layout = cells.layout;
  const int64_t num_octets = layout.group_size / 8 / cells.parts;
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
      const float unit = multiply_part<kPlanes, kAlone>(codes, rows, group, {from, num_octets, next, into_l2}, made);
      add_group<kPlanes>(rows, group, {cell, layout, supers, column}, made, unit, sum);
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
    multiply<R, V, Codes<V>, kPlanes, kAlone>(rows, cells, ahead, sums, row, column);
  }
}

// A task's rows from one cell's inputs on.
struct Panel {
  const LinearTask& task;
  const QuantizedRows& all;
  RowGroups groups;
  int64_t input;

  Rows rows(int64_t row, int64_t count) const {
    const RowLayout& layout = all.layout;
    const int64_t at = task.first_row + row, group = input / layout.group_size;
    const int64_t place = at * layout.num_groups + group * count;
    return {all.values + at * layout.value_bytes() + input * layout.num_planes * count, all.scales + place,
            all.biases + place, all.sums + place, all.lower + at * layout.num_groups + group};
  }
};

// All rows of a task. `ahead` is what is needed next, by eight inputs.
template <template <int> class Codes, int kPlanes>
void multiply_rows(const Panel& panel, const Cells& cells, Ahead ahead, const Sums& sums) {
  const int64_t num_rows = panel.groups.num_rows, num_groups = panel.groups.count;
  if (num_groups == 1) {
    const Rows rows = panel.rows(0, num_rows);
    return multiply_group<kAloneRows<kPlanes>, Codes, kPlanes, true>(num_rows, rows, cells, {}, sums, 0);
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
  if constexpr (kPlanes == 1 || kPlanesApart) {  // 4 bits have two planes where there are tiles
    if (cells.layout.minima_type == kShifts) return multiply_rows<Shifted, kPlanes>(panel, cells, ahead, sums);
    if (cells.table == nullptr) return multiply_rows<Nibbles, kPlanes>(panel, cells, ahead, sums);
#if !defined(__AVX512VNNI__) && !defined(__ARM_FEATURE_MATMUL_INT8)
    if (cells.is_wide) return multiply_rows<LookedWide, kPlanes>(panel, cells, ahead, sums);
#endif
    multiply_rows<Looked, kPlanes>(panel, cells, ahead, sums);
  }
}

template <int kPlanes>
void run(const LinearCall& call, const LinearTask& task) {
  alignas(64) float memory[kMaxRows * kMaxBlocks * kBlock];
  const PackedWeight& weight = *call.weight;
  const CellLayout layout = CellLayout::of(weight);
  const int64_t num_groups = layout.groups(weight.num_inputs), block_bytes = num_groups * layout.bytes();
  const int64_t parts = layout.group_size / call.quantized->layout.group_size;
  const int64_t depth = weight.type == kGrouped8 ? kDepth / 2 : kDepth;
  const int64_t length = task.num_rows <= kAloneRows<kPlanes> ? num_groups : depth / layout.group_size;
  const int64_t octet_bytes = layout.bytes() * 8 / layout.group_size;
  const bool into_l2 = is_amx(isa()) && weight.num_outputs * weight.num_inputs >= kWeightsOfMemory;
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
                           weight.bytes,
                           taken_off(weight) != 0,
                           weight.supers_of(task.first_block + block, group),
                           into_l2};
      const char* next = block + 1 < task.num_blocks   ? tile + block_bytes
                         : group + length < num_groups ? blocks + (group + length) * layout.bytes()
                                                       : tile;
      const Sums sums = {memory + block * kBlock, task.num_blocks * kBlock,           group > 0, count == left, &call,
                         task.first_row,          (task.first_block + block) * kBlock};
      multiply_cells<kPlanes>(panel, cells, weight.type, {next, octet_bytes}, sums);
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
