// Quantizes rows of dense weights to codes, scales and minima; the searches are in isa/quantize.cpp.
#include "quantize.h"

#include <algorithm>
#include <cmath>

#include "common.h"
#include "grouped.h"
#include "thread_pool.h"

namespace {

constexpr float kMostInteger = 127;  // maximum of scales and minima that are integers

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// One row, as float32, and its results; the rows of a block are stored below each other.
struct Row {
  const float* x;
  int64_t num_inputs, group_size;
  uint8_t* codes;
  float *scales, *minima;  // [groups]

  int64_t groups() const { return ceil_div(num_inputs, group_size); }
  int64_t count(int64_t group) const { return std::min(group_size, num_inputs - group * group_size); }
};

float as_type(float x, int32_t type) {
  char narrow[2];
  VLLM_LITE_DISPATCH(convert)(&x, kFloat32, narrow, type, 1);
  VLLM_LITE_DISPATCH(convert)(narrow, type, &x, kFloat32, 1);
  return x;
}

// The smallest float16 that is not less than x.
float float16_above(float x) {
  const float nearest = as_type(x, kFloat16);
  return nearest < x ? as_type(x + std::fabs(x) * 0x1p-10f + 0x1p-24f, kFloat16) : nearest;
}

// Replaces the numbers [count] by integers, and returns the float by which these are multiplied; NaN if a number is
// NaN.
float as_integers(float* numbers, int64_t count) {
  float most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float size = std::fabs(numbers[i]);
    if (size > most || size != size) most = size;
  }
  const float super = most / kMostInteger, inverse = super > 0 ? 1 / super : 0;
  for (int64_t i = 0; i < count; ++i) {
    const float whole = std::nearbyint(numbers[i] * inverse);
    numbers[i] = whole == whole ? whole : 0;
  }
  return super;
}

// Sets the codes of one group, from 0 to `most`, to the nearest ones for its scale and minimum.
void encode(const Row& row, int64_t group, float scale, float minimum, float most) {
  const int64_t input = group * row.group_size;
  VLLM_LITE_DISPATCH(encode_group)(row.x + input, row.count(group), {scale, minimum, most}, row.codes + input);
}

// Rounds scales and minima as they will be stored before it chooses codes, so that the codes compensate for a part of
// the rounding.
void quantize_few_bits(const Row& row, float most, float* supers) {
  const auto search = VLLM_LITE_DISPATCH(search_line);
  const auto refine = VLLM_LITE_DISPATCH(refine_line);
  const int64_t at_once = supers == nullptr ? 1 : kSuperInputs / row.group_size;
  for (int64_t first = 0; first < row.groups(); first += at_once, supers += supers == nullptr ? 0 : 2 * kBlock) {
    const int64_t count = std::min(at_once, row.groups() - first);
    float *scales = row.scales + first, *minima = row.minima + first, units[] = {1, 1};
    for (int64_t i = 0; i < count; ++i) {
      search(row.x + (first + i) * row.group_size, row.count(first + i), most, scales + i, minima + i);
    }
    if (supers != nullptr) {
      supers[0] = units[0] = as_integers(scales, count);
      supers[kBlock] = units[1] = as_integers(minima, count);
    } else {
      scales[0] = as_type(scales[0], kBFloat16);
      minima[0] = as_type(minima[0], kBFloat16);
    }
    for (int64_t i = 0; i < count; ++i) {
      const float* x = row.x + (first + i) * row.group_size;
      if (supers != nullptr && units[1] > 0) refine(x, row.count(first + i), units, most, scales + i, minima + i);
      encode(row, first + i, scales[i] * units[0], minima[i] * units[1], most);
    }
  }
}

// Divides the range of each group into 255 steps. Rounding for storage may widen the range but never narrow it: with
// steps this small, clipping costs more than it saves.
void quantize8(const Row& row) {
  const auto find_range = VLLM_LITE_DISPATCH(find_range);
  for (int64_t group = 0; group < row.groups(); ++group) {
    float least, most;
    find_range(row.x + group * row.group_size, row.count(group), &least, &most);
    const float minimum = float16_above(-least), width = most + minimum, scale = float16_above(width / 255);
    row.minima[group] = minimum;
    row.scales[group] = width > 0 ? scale : width == 0 ? 0 : NAN;
    encode(row, group, scale, minimum, 255);
  }
}

void quantize_floats8(const Row& row) {
  const auto quantize = VLLM_LITE_DISPATCH(quantize_group_fp8);
  for (int64_t group = 0; group < row.groups(); ++group) {
    const int64_t input = group * row.group_size;
    quantize(row.x + input, row.count(group), row.codes + input, row.scales + group);
  }
}

}  // namespace

PackedWeight quantized_weight(int32_t type, int64_t num_outputs, int64_t num_inputs, int64_t group_size) {
  PackedWeight weight = {};
  weight.num_inputs = num_inputs;
  weight.num_outputs = num_outputs;
  weight.type = type == kFloats8 ? kGrouped8 : type;
  weight.group_size = static_cast<int32_t>(group_size);
  // Few bits in small groups: scales and minima take a quarter less as bytes, and half as much. With 8 bits they are as
  // exact as 255 steps ask for: bytes would cost a fifth of what the minima gain.
  const bool few = type == kGrouped4 || type == kGrouped5;
  weight.scale_type = few && group_size < kQuantGroup ? kIntegers : type == kGrouped8 ? kFloat16 : kBFloat16;
  weight.minima_type = type == kFloats8 ? kNoMinima : weight.scale_type;
  weight.byte_rows = type == kGrouped8 ? 1 : 0;
  return weight;
}

int64_t num_supers(const PackedWeight& weight) {
  return weight.scale_type == kIntegers ? 2 * kBlock * ceil_div(weight.num_inputs, kSuperInputs) : 0;
}

int64_t quantized_block_bytes(const PackedWeight& weight) {
  const CellLayout layout = CellLayout::of(weight);
  return layout.groups(weight.num_inputs) * layout.bytes();
}

void pack_quantized(const RowsToPack& rows, int32_t type, int64_t group_size, char* block, float* supers) {
  const auto convert = VLLM_LITE_DISPATCH(convert);
  static thread_local Scratch scratch;
  const PackedWeight weight = quantized_weight(type, rows.num_rows, rows.num_inputs, group_size);
  const int64_t num_inputs = rows.num_inputs, num_groups = ceil_div(num_inputs, group_size);
  float* x = reinterpret_cast<float*>(scratch.get(4 * num_inputs + rows.num_rows * (8 * num_groups + num_inputs)));
  float *scales = x + num_inputs, *minima = scales + rows.num_rows * num_groups;
  uint8_t* codes = reinterpret_cast<uint8_t*>(minima + rows.num_rows * num_groups);
  const char* from = static_cast<const char*>(rows.rows);
  for (int64_t i = 0; i < rows.num_rows; ++i) {
    convert(from + i * rows.stride * element_size(rows.row_type), rows.row_type, x, kFloat32, num_inputs);
    const Row row = {
        x, num_inputs, group_size, codes + i * num_inputs, scales + i * num_groups, minima + i * num_groups};
    if (type == kFloats8) quantize_floats8(row);
    if (type == kGrouped8) quantize8(row);
    float* own = num_supers(weight) == 0 ? nullptr : supers + i;
    if (type == kGrouped4) quantize_few_bits(row, 15, own);
    if (type == kGrouped5) quantize_few_bits(row, 31, own);
  }
  pack_cells(weight, {codes, num_inputs, scales, weight.minima_type == kNoMinima ? nullptr : minima}, 0, block);
}

// Packs rows [num_outputs][num_inputs] of DType `row_type` into `packed`, which must be zero, and `supers`, nullptr for
// types without them. `type` as in quantize.h; groups have up to kQuantGroup inputs.
VLLM_LITE_API void vllm_lite_pack_quantized(const void* rows, int64_t stride, int32_t row_type, int64_t num_outputs,
                                            int64_t num_inputs, int32_t type, int64_t group_size, void* packed,
                                            float* supers) {
  const PackedWeight weight = quantized_weight(type, num_outputs, num_inputs, group_size);
  const int64_t block_bytes = quantized_block_bytes(weight), block_supers = num_supers(weight);
  vllm_lite::parallel_for(ceil_div(num_outputs, kBlock), [=](int64_t block) {
    const int64_t first = block * kBlock;
    const char* from = static_cast<const char*>(rows) + first * stride * element_size(row_type);
    const RowsToPack part = {from, stride, std::min(kBlock, num_outputs - first), num_inputs, row_type};
    pack_quantized(part, type, group_size, static_cast<char*>(packed) + block * block_bytes,
                   supers + block * block_supers);
  });
}

// Quantizes rows [num_outputs][num_inputs] of DType `type` to symmetric codes [num_outputs][num_inputs] and scales
// [num_outputs][groups]. Groups have `group_size` inputs, at most kQuantGroup; the last one may be shorter.
VLLM_LITE_API void vllm_lite_quantize4(const void* rows, int64_t stride, int32_t type, int64_t num_outputs,
                                       int64_t num_inputs, int64_t group_size, uint8_t* codes, float* scales) {
  const auto quantize = VLLM_LITE_DISPATCH(quantize_symmetric4);
  const auto convert = VLLM_LITE_DISPATCH(convert);
  const int64_t num_groups = ceil_div(num_inputs, group_size), row_bytes = stride * element_size(type);
  vllm_lite::parallel_for(num_outputs, [&](int64_t output) {
    static thread_local Scratch scratch;
    float* x = reinterpret_cast<float*>(scratch.get(4 * num_inputs));
    convert(static_cast<const char*>(rows) + output * row_bytes, type, x, kFloat32, num_inputs);
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t first = group * group_size, count = std::min(group_size, num_inputs - first);
      quantize(x + first, count, codes + output * num_inputs + first, scales + output * num_groups + group);
    }
  });
}

// Fills *weight, except for memory, bias and values. Returns the number of bytes of the packed weight, and sets *supers
// to its number of supers.
VLLM_LITE_API int64_t vllm_lite_quantized_weight(int64_t num_outputs, int64_t num_inputs, int32_t type,
                                                 int64_t group_size, PackedWeight* weight, int64_t* supers) {
  *weight = quantized_weight(type, num_outputs, num_inputs, group_size);
  const int64_t num_blocks = ceil_div(num_outputs, kBlock);
  *supers = num_blocks * num_supers(*weight);
  return num_blocks * quantized_block_bytes(*weight);
}
