// Linear layers: out = x W^T + bias, with W packed once.
//
// Dense weights. A packed weight is blocks of kBlock outputs, the last one padded with zeros. A block is
// [inputs / pair][kBlock][pair]: pairs of inputs for bfloat16, single inputs for float32 and float16; the number of
// inputs is padded to whole pairs. A block is read from its first byte to its last, at full memory bandwidth. A vector
// has the weights of one input, or of a pair, for several outputs, so that its elements need no sum at the end.
//
// Grouped weights. A weight is values[code] * scale - minimum, where an output has a scale, and perhaps a minimum, for
// each group of inputs. A block is [groups] cells; a cell has the scales, minima and codes of one group for the 32
// outputs of the block.
//   8 bits   codes are [inputs / 4][kBlock][4] bytes.
//   4 bits   codes are [inputs / 8][kBlock][4] bytes. The lower half of a byte is for the first four inputs, the upper
//            half for the other four: a mask and a shift make two vectors of weights of one vector of bytes.
//   5 bits   the lower four bits as above, then the fifth bits, [inputs / 4][kBlock][4] bits, which are the mask for
//            adding 16 to the bytes of a vector. Values are consecutive whole numbers.
// Minima made from zero points are one byte each (kShifts): a weight is (values[code] + byte) * scale. Scales and
// minima may also be signed bytes (kIntegers), to be multiplied by numbers that kSuperInputs inputs share.
//
// Quantized rows. If values are whole numbers, each a byte plus an offset, and the machine multiplies bytes, rows are
// quantized as well: x ~ integer * scale, with one scale for each group of inputs of a row. A byte times an integer is
// exact, and the offset's contribution follows from the row alone. Integers have 15 bits in two planes of signed bytes,
// 128 * upper + lower, so that an error is at most 2^-15 of a group's largest element, also if some channels are far
// larger than others. They have fewer bits in two cases:
// - With codes of 4 bits, which are less precise themselves, rows have one plane, and a scale for at most kOnePlane
//   inputs. (By tiles, groups of more than kOnePlane inputs have two planes.)
// - With codes of 5 or 8 bits, groups of at most kOnePlane inputs have 8 bits, unless their largest element is more
//   than kUneven times the mean. Then two fours of inputs, those with the largest elements, have 15 bits, and the scale
//   is that of the other elements. With VNNI and without tiles, the same holds for larger groups of weights with
//   `byte_rows`.
// In all other cases rows are not quantized, and weights are converted to floats, a tile at a time.
//
// Each output is one chain of additions in the order of the inputs, whatever the number of rows. So a row's results do
// not depend on other rows nor on the number of threads, bit for bit. They do depend on the instruction set.
#pragma once

#include <cstdint>

#include "common.h"
#include "isa.h"

constexpr int64_t kBlock = 32;            // outputs
constexpr int64_t kMaxRows = 96;          // of a task
constexpr int64_t kMaxByteRows = 192;     // of a task with quantized rows
constexpr int64_t kMaxTileRows = 512;     // of a dense task by tiles; half of it with over kSpanInputs / 2 inputs
constexpr int64_t kSpanInputs = 2048;     // inputs that such a task multiplies at a time
constexpr int64_t kTilesInPlace = 64;     // maximum rows that tiles read without copying them first
constexpr int64_t kMaxBlocks = 8;         // of a task; no limit for tasks by tiles that copy their rows
constexpr int64_t kMaxGroupedRows = 256;  // of a task by tiles with grouped weights
constexpr int64_t kTileGroup = 32;        // rows that tiles multiply at a time
constexpr int64_t kLongRows = 16;         // the same for integers in groups of kQuantGroup
constexpr int64_t kManyRows = 13;         // rows from which on two blocks are multiplied at a time, except in a panel
constexpr int64_t kStreamedRows = 32;     // maximum rows of a panel, for linear_streamed
constexpr int64_t kPanelInputs = 256;     // adjacent inputs of a row in LinearCall::panel
constexpr int64_t kQuantGroup = 128;      // maximum inputs that share a scale
constexpr int64_t kOnePlane = 32;         // maximum inputs that share a scale of 8 bits
constexpr float kUneven = 4;              // ratio of a group's largest size to the mean that is too much for 8 bits
constexpr float kUnevenLong = 6;          // the same for more than kOnePlane inputs, where chance often makes it 4
constexpr int kNumLarge = 2;              // fours of inputs per group that may have 15 bits without a second plane
constexpr int32_t kGrouped4 = 101;        // types beside the DTypes: codes of 4 bits,
constexpr int32_t kGrouped8 = 102;        // of 8 bits,
constexpr int32_t kGrouped5 = 106;        // and of 5 bits, with scales for groups of inputs
constexpr int32_t kNoMinima = -1;
constexpr int32_t kShifts = 103;       // minima as bytes, only for codes of 4 bits that are bytes themselves
constexpr int32_t kIntegers = 104;     // scales or minima as signed bytes, to be multiplied by `supers`
constexpr int64_t kSuperInputs = 256;  // inputs that share one of `supers`

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
  // The next fields are for grouped weights.
  int32_t group_size;    // inputs that share a scale: 16, 32, 64 or 128
  int32_t scale_type;    // DType up to kFloat16, or kIntegers
  int32_t minima_type;   // the same, or kNoMinima, or kShifts
  const float* values;   // [16], [32] or [256]
  const uint8_t* bytes;  // [16]: a value is its byte plus `offset`; nullptr: bytes are the codes
  int32_t offset;
  int32_t are_whole;     // whether values are whole numbers; only then `bytes` and `offset` are valid
  const int32_t* order;  // [num_inputs]: column k is for input order[k]; nullptr: for input k
  const float* supers;   // [blocks][inputs / kSuperInputs][2][kBlock]: factors of kIntegers, or nullptr
  // The last two are for all weights.
  int32_t exact_rows;  // whether rows are not quantized, even if they could be
  int32_t byte_rows;   // with codes of 8 bits: whether rows may have 8 bits in groups of more than kOnePlane inputs

  // The supers of a group: those of its scales, then those of its minima. nullptr if there are none.
  const float* supers_of(int64_t block, int64_t group) const {
    if (supers == nullptr) return nullptr;
    const int64_t count = (num_inputs + kSuperInputs - 1) / kSuperInputs;
    return supers + 2 * kBlock * (block * count + group * group_size / kSuperInputs);
  }
};

inline bool is_grouped(int32_t type) {
  return type == kGrouped4 || type == kGrouped5 || type == kGrouped8;
}

// Sizes of the parts of a cell in bytes.
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
  constexpr int64_t codes() const { return scale_bytes + minima_bytes; }              // offset in the cell
  constexpr int64_t fifth_bits() const { return codes() + kBlock * group_size / 2; }  // the same, for codes of 5 bits
  constexpr int64_t bytes() const { return codes() + code_bytes; }
  int64_t groups(int64_t num_inputs) const { return (num_inputs + group_size - 1) / group_size; }
};

// Whether tiles multiply the weight's groups as bfloat16, because they are short. bfloat16 represents whole numbers up
// to 256, so the float32 sums of a group's products are exact, except for one rounding if rows have two planes.
inline bool has_short_groups(const PackedWeight& weight) {
  const bool are_bytes = is_grouped(weight.type) && weight.are_whole != 0 && weight.exact_rows == 0;
  return are_bytes && weight.group_size <= kOnePlane && weight.offset >= -256 && weight.offset <= 1;
}

// The fours of inputs in a group of a row whose integers may exceed a byte: their upper bytes, or 0.
struct LargeFours {
  uint8_t places[4];  // index of each four in the group
  int8_t upper[kNumLarge][4];
};

// Format of the quantized rows of a product with a grouped weight. Each group of inputs has a scale and the sum of its
// integers. Groups are those of the weight, or parts of them, padded with zeros.
struct RowLayout {
  int64_t group_size;  // inputs
  int64_t num_groups;
  int64_t num_planes;
  int64_t item_bytes;  // per integer: 2 for short groups by tiles, which are bfloat16
  bool has_fours;      // whether rows have LargeFours instead of a second plane

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
  // Offset of the LargeFours of group `group` in the values of `count` rows.
  int64_t fours(int64_t group, int64_t count) const {
    return width() * count + group * count * static_cast<int64_t>(sizeof(LargeFours));
  }
  // Bytes of everything that belongs to one row.
  int64_t row_bytes() const { return value_bytes() + 13 * num_groups; }
};

// Rows as integers. The rows of each task are a panel, which begins at values + first row * value_bytes(). A panel is
// groups of rows (isa/byte_products.h), each [groups of inputs][planes][inputs / 4][rows][4], so that a product reads
// its rows from the first byte to the last; the upper plane comes first. Exceptions:
// - With VNNI, groups of at most kOnePlane inputs, and all groups of weights with `byte_rows`, have one plane. After
//   the last group follow the LargeFours, [groups of inputs][rows]; 128 times their upper bytes is added to the
//   integers of the plane.
// - With AVX2, and with AVX-512 without VNNI, two planes are stored as words of 16 bits, [4] of them.
// - For AMX, kLongRows rows are [groups of inputs][planes][inputs / 64][rows][64]. In short groups, kTileGroup rows are
//   [groups of inputs][planes][rows][inputs] of bfloat16: whole numbers, 128 times those of the upper plane, with the
//   second and the third of four inputs exchanged.
struct QuantizedRows {
  int8_t* values;
  float* scales;    // of each group of rows [num_groups][rows], like the next three
  int32_t* biases;  // the offset of the weights' bytes times the sum of the integers
  float* sums;      // of the integers of a group
  uint8_t* lower;   // [num_groups] at the first row of a group of rows: whether any of them has over 8 bits there
  RowLayout layout;

  // Place the arrays in `memory` of num_rows * layout.row_bytes() bytes, aligned like floats.
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

// Strides count elements; the elements of a row are adjacent.
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

// Memory that a thread prefetches after a task's weights: the memory that follows them up to `end`, then that at
// `next`.
struct ReadOn {
  const char* end = nullptr;
  const char* next = nullptr;  // nullptr: unknown; then `end` is ignored
  bool from_cache = false;     // whether L3 is likely to hold all of it

  // The address to prefetch that is `bytes` after `at` in this order.
  const char* ahead_of(const char* at, int64_t bytes) const {
    const char* there = at + bytes;
    return next == nullptr || there < end ? there : next + (there - end);
  }
};

// Part of the output: at most kMaxRows rows and kMaxBlocks blocks, or the limits of tiles.
struct LinearTask {
  int64_t first_row;
  int64_t num_rows;
  int64_t first_block;
  int64_t num_blocks;
  ReadOn read_on = {};  // for few rows: prefetched by a lone row (isa/lone_row.h)
};

// Maximum rows and blocks of a task by tiles that copies its rows first; 0 if the call has no such tasks, because it
// has few rows or another kind of weight.
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
// The same for many rows of bfloat16 and weights of bfloat16. Returns false, and does nothing, if it cannot do it.
VLLM_LITE_DECLARE(bool linear_dense(const LinearCall& call, const LinearTask& task))
// The same for rows of bfloat16 and grouped weights with float values. Returns false, and does nothing, if it cannot.
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

// Whether products of rows of DType `x_type` with `weight` use tiles, on machines that have them.
inline bool fits_tiles(const PackedWeight& weight, int32_t x_type) {
  if (!is_grouped(weight.type)) return weight.type == kBFloat16 && x_type == kBFloat16;
  const bool are_bytes = weight.are_whole != 0 && weight.exact_rows == 0 && weight.type != kGrouped5;
  return has_short_groups(weight) || (are_bytes && weight.group_size == kQuantGroup);
}
