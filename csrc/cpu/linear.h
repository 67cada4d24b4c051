// Linear layers: out = x W^T + bias, with W packed once.
//
// Packed weight: blocks of kBlock outputs (the last one filled up), each [inputs / pair][kBlock][pair] with pairs of
// inputs for bfloat16, single ones for float32 and float16; inputs are filled up to whole pairs. A block is read from
// its first byte to its last, so memory delivers at full speed, and a vector holds the weights of one input, or of a
// pair, for several outputs: no sum over a vector's elements at the end.
//
// Grouped weights are codes of 4, 5 or 8 bits: a weight is values[code] * scale - minimum, with a scale and perhaps a
// minimum for each group of inputs of an output. A block is [groups] cells, a cell is what its 32 outputs have of one
// group: scales, minima, then codes. Codes of 8 bits lie [inputs / 4][kBlock][4]. Those of 4 bits lie [inputs / 8]
// [kBlock][4]: the lower half of a byte is for the first four inputs, the upper half for the other four, so that one
// vector of bytes becomes two of weights by a mask and a shift. Codes of 5 bits lie as those of 4, and behind them
// their fifth bits, [inputs / 4][kBlock][4] bits: what raises the bytes of a vector by 16 is a mask. They stand for
// whole numbers that follow one another. Minima that come from zero points are a byte each, kShifts: a weight is
// (values[code] + byte) * scale. Scales and minima may be signed bytes, kIntegers, times numbers that kSuperInputs
// inputs share.
//
// Where values are whole numbers, which bytes stand for less an offset, and the machine multiplies bytes, rows are
// quantized, too, each group of inputs by itself: x ~ integer * scale. A byte times an integer is exact, and what the
// offset adds up to is known from the row alone. Integers have 15 bits in two planes of signed bytes, 128 * upper +
// lower, so that rows with channels far larger than others lose no more than 2^-15 of the largest. For codes of 4 bits,
// which are coarser themselves, they have one plane, with a scale for kOnePlane inputs or fewer; but for tiles of
// larger groups, two. With codes of 5 or 8 bits a group of kOnePlane inputs or fewer has 8 bits, unless its largest
// is kUneven times the mean: then two of its fours, those with the largest numbers, have 15, and the scale is one for
// the others. With VNNI alone so have larger groups of weights with `byte_rows`. Where values are no whole numbers, and
// elsewhere, rows stay as they are, and weights become floats, a tile at a time.
//
// Every output is one chain of additions over its inputs in their order, however many rows there are: a row's results
// do not depend on the rows beside it nor on the number of threads, bit for bit. They do depend on the instruction set.
#pragma once

#include <cstdint>

#include "common.h"
#include "isa.h"

constexpr int64_t kBlock = 32;            // outputs
constexpr int64_t kMaxRows = 96;          // of one task
constexpr int64_t kMaxByteRows = 192;     // the same where rows are quantized
constexpr int64_t kMaxTileRows = 512;     // the same where tiles multiply, of no more than
constexpr int64_t kSpanInputs = 2048;     // inputs at a time, and of half as many rows where there are more than half
constexpr int64_t kTilesInPlace = 64;     // rows, which tiles read where they lie
constexpr int64_t kMaxBlocks = 8;         // of one task; any number where tiles multiply more rows than those
constexpr int64_t kMaxGroupedRows = 256;  // the most of a task where tiles multiply grouped weights
constexpr int64_t kTileGroup = 32;        // rows that tiles take at a time,
constexpr int64_t kLongRows = 16;         // and of integers in groups of kQuantGroup
constexpr int64_t kManyRows = 13;         // which meet two blocks at a time, but for
constexpr int64_t kStreamedRows = 32;     // rows or fewer that linear_streamed takes, of a panel
constexpr int64_t kPanelInputs = 256;     // adjacent inputs of a row in LinearCall::panel
constexpr int64_t kQuantGroup = 128;      // the most inputs that share a scale
constexpr int64_t kOnePlane = 32;         // the most that share one where rows have 8 bits
constexpr float kUneven = 4;              // of a group's sizes, the largest by the mean: too much for 8 bits
constexpr float kUnevenLong = 6;          // the same of groups of more than kOnePlane inputs, by chance often 4
constexpr int kNumLarge = 2;              // fours of inputs of a group that may have 15 bits where it has not one plane
constexpr int32_t kGrouped4 = 101;        // beside the DTypes: codes of 4 bits, and
constexpr int32_t kGrouped8 = 102;        // of 8 bits, with scales for groups of inputs
constexpr int32_t kGrouped5 = 106;        // and of 5 bits
constexpr int32_t kNoMinima = -1;
constexpr int32_t kShifts = 103;       // minima as bytes; only of codes of 4 bits that are bytes themselves
constexpr int32_t kIntegers = 104;     // scales or minima as signed bytes, to be multiplied by those of `supers`
constexpr int64_t kSuperInputs = 256;  // that share one of those

// Inputs of a packed weight that is not grouped: whole pairs.
inline int64_t padded_inputs(int64_t num_inputs) {
  return (num_inputs + 1) / 2 * 2;
}

// The same record as PackedWeight in vllm_lite/kernels/cpu/weights/linear.py.
struct PackedWeight {
  const void* data;   // aligned to 64 bytes
  const float* bias;  // [num_outputs] or nullptr
  int64_t num_inputs;
  int64_t num_outputs;
  int32_t type;
  // What follows is for grouped weights.
  int32_t group_size;    // inputs that share a scale: 16, 32, 64 or 128
  int32_t scale_type;    // DType up to kFloat16, or kIntegers
  int32_t minima_type;   // the same, or kNoMinima, or kShifts
  const float* values;   // [16], [32] or [256]
  const uint8_t* bytes;  // [16]: a value is its byte plus `offset`; nullptr: bytes are the codes
  int32_t offset;
  int32_t are_whole;     // whether values are whole numbers, so that `bytes` and `offset` count
  const int32_t* order;  // [num_inputs]: column k is for input order[k]; nullptr: for input k
  const float* supers;   // [blocks][inputs / kSuperInputs][2][kBlock]: what kIntegers are multiplied by, or nullptr
  // Of all weights again.
  int32_t exact_rows;  // whether products take rows as they are, where they could quantize them
  int32_t byte_rows;   // whether rows may have 8 bits in groups of more than kOnePlane inputs; of codes of 8 bits

  // Those of a group: of its scales, then of its minima.
  const float* supers_of(int64_t block, int64_t group) const {
    if (supers == nullptr) return nullptr;
    const int64_t count = (num_inputs + kSuperInputs - 1) / kSuperInputs;
    return supers + 2 * kBlock * (block * count + group * group_size / kSuperInputs);
  }
};

inline bool is_grouped(int32_t type) {
  return type == kGrouped4 || type == kGrouped5 || type == kGrouped8;
}

// The bytes of a cell's parts; see above.
struct CellLayout {
  int64_t group_size, scale_bytes, minima_bytes, code_bytes;
  int32_t scale_type, minima_type;

  static int64_t item_bytes(int32_t type) {
    return type == kNoMinima ? 0 : type == kShifts || type == kIntegers ? 1 : type == 0 ? 4 : 2;
  }

  static int64_t bits_of(int32_t type) { return type == kGrouped4 ? 4 : type == kGrouped5 ? 5 : 8; }

  static CellLayout of(const PackedWeight& weight) {
    return {weight.group_size,
            kBlock * item_bytes(weight.scale_type),
            kBlock * item_bytes(weight.minima_type),
            kBlock * weight.group_size * bits_of(weight.type) / 8,
            weight.scale_type,
            weight.minima_type};
  }
  constexpr int64_t codes() const { return scale_bytes + minima_bytes; }              // where they begin
  constexpr int64_t fifth_bits() const { return codes() + kBlock * group_size / 2; }  // the same of codes of 5 bits
  constexpr int64_t bytes() const { return codes() + code_bytes; }
  int64_t groups(int64_t num_inputs) const { return (num_inputs + group_size - 1) / group_size; }
};

// Whether tiles take groups of so few inputs: bfloat16 holds whole numbers up to 256, so that products of a group are
// exact in the float32 sums of tiles, but for one rounding where rows have two planes.
inline bool has_short_groups(const PackedWeight& weight) {
  const bool are_bytes = is_grouped(weight.type) && weight.are_whole != 0 && weight.exact_rows == 0;
  return are_bytes && weight.group_size <= kOnePlane && weight.offset >= -256 && weight.offset <= 1;
}

// The fours of a row's group whose numbers may be more than a byte holds: the upper bytes of those, or 0.
struct LargeFours {
  uint8_t places[4];  // how many fours are before it
  int8_t upper[kNumLarge][4];
};

// How the rows of a product with a grouped weight are quantized: each group of inputs has a scale, and is known by the
// sum of its integers. Groups are those of the weight or parts of them, filled up with zeros.
struct RowLayout {
  int64_t group_size;  // inputs
  int64_t num_groups;
  int64_t num_planes;
  int64_t item_bytes;  // there is room for, of an integer: tiles take those of short groups as bfloat16
  bool has_fours;      // LargeFours in place of a second plane

  static RowLayout of(const PackedWeight& weight) {
    const int64_t size = weight.group_size, count = (weight.num_inputs + size - 1) / size;
    const bool has_tiles = is_amx(isa()), is_long = size > kOnePlane;
    const int64_t item = has_tiles && has_short_groups(weight) ? 2 : 1;
    const bool has_vnni = has_tiles || isa() == Isa::kAvx512Bf16;
    const bool has_fours = has_vnni && (!is_long || (weight.byte_rows != 0 && !has_tiles));
    if (weight.type != kGrouped4 || (is_long && has_tiles)) return {size, count, 2, item, has_fours};
    const int64_t own = is_long ? kOnePlane : size;
    return {own, count * (size / own), 1, item, false};
  }
  int64_t width() const { return num_groups * group_size; }                  // integers of a plane
  int64_t value_bytes() const { return item_bytes * num_planes * width(); }  // of a row
  // Where in the values of `count` rows their LargeFours begin, from one of their groups of inputs on.
  int64_t fours(int64_t group, int64_t count) const {
    return width() * count + group * count * static_cast<int64_t>(sizeof(LargeFours));
  }
  // Of all that belongs to one row.
  int64_t row_bytes() const { return value_bytes() + 13 * num_groups; }
};

// Rows as integers, one panel for the rows of each task, which begins at values + its first row * value_bytes(). A
// panel is groups of rows (isa/byte_products.h), each [groups of inputs][planes][inputs / 4][rows][4], so that a
// product reads its rows from the first byte to the last; the upper plane comes first. With VNNI groups of kOnePlane
// inputs or fewer, and those of `byte_rows`, have one plane for all inputs, and behind the last of them LargeFours,
// [groups of inputs][rows]: integers are numbers of the plane plus 128 times theirs. With AVX2, and AVX-512 without
// VNNI, two planes are words of 16 bits, [4] of them. For products by AMX the panel is, by kLongRows rows, [groups of
// inputs][planes] [inputs / 64][rows][64], or in short groups, by kTileGroup rows, [groups of
// inputs][planes][rows][inputs] of bfloat16: whole numbers, those of the upper plane times 128, and of four inputs the
// second and the third in each other's place.
struct QuantizedRows {
  int8_t* values;
  float* scales;    // of a panel's group of rows [num_groups][rows], as those below
  int32_t* biases;  // what bytes of weights lack, their offset, times the sum
  float* sums;      // of a group's integers
  uint8_t* lower;   // [num_groups] at the first row of a group of rows: whether any has more than 8 bits there
  RowLayout layout;

  // In `memory` of num_rows * layout.row_bytes(), which is aligned as floats are.
  static QuantizedRows in(char* memory, int64_t num_rows, const RowLayout& layout) {
    const int64_t bytes = 4 * num_rows * layout.num_groups;
    int8_t* values = reinterpret_cast<int8_t*>(memory + 3 * bytes);
    return {values,
            reinterpret_cast<float*>(memory),
            reinterpret_cast<int32_t*>(memory + bytes),
            reinterpret_cast<float*>(memory + 2 * bytes),
            reinterpret_cast<uint8_t*>(values + num_rows * layout.value_bytes()),
            layout};
  }
  QuantizedRows from(int64_t row) const {
    const int64_t group = row * layout.num_groups;
    return {values + row * layout.value_bytes(), scales + group, biases + group, sums + group, lower + group, layout};
  }
};

// Strides count elements; a row's elements lie side by side.
struct LinearCall {
  const PackedWeight* weight;
  const void* x;  // [num_rows][num_inputs]
  int64_t x_stride;
  void* out;  // [num_rows][num_outputs]
  int64_t out_stride;
  int64_t num_rows;
  int32_t x_type;
  int32_t out_type;
  const QuantizedRows* quantized;  // of x, or nullptr
  const void* panel = nullptr;     // x as [inputs / kPanelInputs][num_rows][kPanelInputs], or nullptr
};

// What a thread reads behind a task's weights: what follows them up to `end`, then what lies at `next`.
struct ReadOn {
  const char* end = nullptr;
  const char* next = nullptr;  // nullptr: unknown, and `end` does not count
  bool from_cache = false;     // whether L3 is likely to hold all of it

  // What is read so many bytes behind `at`.
  const char* ahead_of(const char* at, int64_t bytes) const {
    const char* there = at + bytes;
    return next == nullptr || there < end ? there : next + (there - end);
  }
};

// Part of the output: at most kMaxRows and kMaxBlocks, or what tiles take.
struct LinearTask {
  int64_t first_row;
  int64_t num_rows;
  int64_t first_block;
  int64_t num_blocks;
  ReadOn read_on = {};  // where rows are few; a lone row reads on (isa/lone_row.h)
};

// The most rows and blocks of a task by tiles that copies its rows first; 0: such tasks are not for the call, which has
// few rows, or another weight.
struct WideTiles {
  int64_t most_rows = 0;
  int64_t most_blocks = 0;
};
WideTiles wide_tiles(const LinearCall& call);

// The bytes of one block of a weight of any kind.
int64_t block_bytes(const PackedWeight& weight);

// Rows of one panel, and some of their groups of inputs.
struct QuantizeTask {
  int64_t first_row;
  int64_t num_rows;
  int64_t first_group;
  int64_t num_groups;
  bool for_tiles;  // see QuantizedRows
};

VLLM_LITE_DECLARE_TILES(void linear(const LinearCall& call, const LinearTask& task))
// The same on call.quantized, for grouped weights; only where multiplies_bytes().
VLLM_LITE_DECLARE(void linear_grouped(const LinearCall& call, const LinearTask& task))
// The same for all rows of call.panel; only with AVX512-BF16.
VLLM_LITE_DECLARE(void linear_streamed(const LinearCall& call, const LinearTask& task))
// The same for many rows of bfloat16 and weights of bfloat16. False, and nothing is done, where it has no way.
VLLM_LITE_DECLARE(bool linear_dense(const LinearCall& call, const LinearTask& task))
// The same on rows of bfloat16, for grouped weights that are floats. False, and nothing is done, where it has no way.
VLLM_LITE_DECLARE(bool linear_table(const LinearCall& call, const LinearTask& task))
VLLM_LITE_DECLARE(bool multiplies_bytes())
VLLM_LITE_DECLARE_TILES(void quantize_rows(const LinearCall& call, const QuantizeTask& task))
// One output of a grouped weight, all its inputs, as elements of DType `type`.
VLLM_LITE_DECLARE(void unpack_output(const PackedWeight& weight, int64_t output, int32_t type, void* to))
VLLM_LITE_DECLARE(int64_t read_all(const char* data, int64_t num_bytes))
VLLM_LITE_DECLARE_TILES(int64_t multiply_registers(int32_t type, int64_t rounds, float* x))

// Whether products with `weight` quantize their rows.
inline bool quantizes_rows(const PackedWeight& weight) {
  const bool are_bytes = is_grouped(weight.type) && weight.are_whole != 0;
  return are_bytes && weight.exact_rows == 0 && VLLM_LITE_DISPATCH(multiplies_bytes)();
}

// Whether products of rows of DType `x_type` with `weight` go through tiles, where there are some.
inline bool fits_tiles(const PackedWeight& weight, int32_t x_type) {
  if (!is_grouped(weight.type)) return weight.type == kBFloat16 && x_type == kBFloat16;
  const bool are_bytes = weight.are_whole != 0 && weight.exact_rows == 0 && weight.type != kGrouped5;
  return has_short_groups(weight) || (are_bytes && weight.group_size == kQuantGroup);
}
