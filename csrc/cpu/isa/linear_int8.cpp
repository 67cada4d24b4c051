// int8: rows quantized as they are used, and bytes times integers where the machine has instructions for it.
#include "byte_products.h"
#include "convert.h"
#include "linear_task.h"
#include "row_sums.h"

namespace VLLM_LITE_ISA {
namespace {

VLLM_LITE_INLINE int32_t sum_of(VecI x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(x));
#else
  int32_t total = 0;
  for (int i = 0; i < kWidth; ++i) total += x[i];
  return total;
#endif
}
VLLM_LITE_INLINE int32_t max_of(VecI x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(x));
#else
  int32_t most = x[0];
  for (int i = 1; i < kWidth; ++i) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

constexpr int32_t kLargest = 127;             // of integers of one plane
constexpr int32_t kLargestOfTwo = 127 * 128;  // so that the upper plane's are those, the lower one's from 0 to 127
typedef int8_t Bytes __attribute__((vector_size(kWidth)));

// The sizes of x: that of the largest, where NaN is above all, and what they add up to.
struct Sizes {
  float largest, sum;

  // Whether 8 bits with one scale are too few for so many of them. Few groups are where numbers are spread by chance;
  // in real models those of channels that are larger than others by far.
  bool are_uneven(int64_t count) const { return largest * static_cast<float>(count) > kUneven * sum; }
};

template <class T>
VLLM_LITE_INLINE Sizes sizes_of(const T* x, int64_t count) {
  VecI largest = {};  // as integers the sizes of floats are in order
  Vec sum = {};
  for (int64_t i = 0; i < count; i += kWidth) {
    const int left = static_cast<int>(count - i < kWidth ? count - i : kWidth);
    const VecI size = reinterpret_cast<VecI>(load_some(x + i, left)) & 0x7fffffff;
    largest = size > largest ? size : largest;
    sum = sum + reinterpret_cast<Vec>(size);
  }
  return {float_of(static_cast<uint32_t>(max_of(largest))), sum_of(sum)};
}

// Integers up to `most`, at most 2^22, times 2^shift.
struct Range {
  int32_t most;
  int shift = 0;
};

// x, whose largest is of this size, as integers times *scale; NaN or infinity in x make the scale that. put(i,
// integers, count) is called for each vector. Returns the sum of the integers.
template <class T, class Put>
VLLM_LITE_INLINE int32_t quantize_to(const T* x, int64_t count, float size, Range range, float* scale, const Put& put) {
  const float limit = static_cast<float>(range.most);
  *scale = size / limit / static_cast<float>(1 << range.shift);
  const Vec inverse = splat(size > 0 ? limit / size : 0);
  const Vec magic = splat(0x1.8p23f);  // adding it rounds to a whole number, which then is in the lowest bits
  VecI total = {};
  for (int64_t i = 0; i < count; i += kWidth) {
    const int left = static_cast<int>(count - i < kWidth ? count - i : kWidth);
    const Vec shifted = load_some(x + i, left) * inverse + magic;
    const VecI whole = (reinterpret_cast<VecI>(shifted) - reinterpret_cast<VecI>(magic)) << range.shift;
    put(i, whole, left);
    total = total + whole;
  }
  return sum_of(total);
}

// One plane of integers, to [count].
template <class T>
VLLM_LITE_INLINE int32_t quantize_row(const T* x, int64_t count, int8_t* to, float* scale) {
  const float size = sizes_of(x, count).largest;
  return quantize_to(x, count, size, {kLargest}, scale,
                     [to](int64_t i, VecI whole, int left) __attribute__((always_inline)) {
                       const Bytes bytes = __builtin_convertvector(whole, Bytes);
                       std::memcpy(to + i, &bytes, static_cast<size_t>(left));
                     });
}

#if defined(VLLM_LITE_MULTIPLIES_BYTES)
// Integers of 15 bits, to [2 * count] bytes: those of the upper plane before the lower one's, whole = 128 * upper +
// lower; without VNNI words. Where *lower is false then, all of the lower plane are 0.
template <class T>
VLLM_LITE_INLINE int32_t quantize_row_twice(const T* x, int64_t count, int64_t plane, int8_t* to, float* scale,
                                            bool* lower) {
  const Sizes sizes = sizes_of(x, count);
  *lower = plane > kOnePlane || sizes.are_uneven(plane);
  return quantize_to(x, count, sizes.largest, *lower ? Range{kLargestOfTwo} : Range{kLargest, 7}, scale,
                     [=](int64_t i, VecI whole, int left) __attribute__((always_inline)) {
                       const size_t size = static_cast<size_t>(left);
#if defined(__AVX512VNNI__)
                       const Bytes upper = __builtin_convertvector(whole >> 7, Bytes),
                                   lower = __builtin_convertvector(whole & 127, Bytes);
                       std::memcpy(to + i, &upper, size);
                       std::memcpy(to + plane + i, &lower, size);
#else
    typedef int16_t Words __attribute__((vector_size(kWidth * 2)));
    const Words words = __builtin_convertvector(whole, Words);
    std::memcpy(to + 2 * i, &words, 2 * size);
#endif
                     });
}

// The inputs from `first` on that share a scale, in the order of the weight's columns.
template <class T>
VLLM_LITE_INLINE const T* columns(const T* row, const int32_t* order, int64_t first, int64_t count, T* buffer) {
  if (order == nullptr) return row + first;
  for (int64_t i = 0; i < count; ++i) buffer[i] = row[order[first + i]];
  return buffer;
}

// Where a group's integers go: those of four inputs lie `step` behind those of the four before, with VNNI the lower
// plane `plane` behind the other; and the index of its scale and the like.
struct GroupPlace {
  int8_t* to;
  int64_t step, plane, scale;
};

// A group of inputs of one row. run() returns whether there is anything in its lower plane.
template <class T>
struct RowQuantizer {
  const LinearCall& call;
  const QuantizedRows& rows = *call.quantized;
  const int32_t* order = is_grouped(call.weight->type) ? call.weight->order : nullptr;
  const int32_t lacking = (is_grouped(call.weight->type) ? call.weight->offset : -128) + taken_off(*call.weight);

  template <int64_t kSize, int kPlanes>
  inline __attribute__((always_inline)) bool run(int64_t row, int64_t group, GroupPlace place) const {
    const int64_t input = group * kSize, left = call.weight->num_inputs - input, at = place.scale;
    alignas(64) int8_t integers[kPlanes * kSize];
    T buffer[kSize];
    if (left < kSize) std::memset(integers, 0, sizeof integers);
    const T* whole = static_cast<const T*>(call.x) + row * call.x_stride;
    const T* x = columns(whole, order, input, left < kSize ? left : kSize, buffer);
    float* scale = rows.scales + at;
    bool lower = false;
    const int32_t sum = left < kSize ? quantize<kSize, kPlanes>(x, left, integers, scale, &lower)
                                     : quantize<kSize, kPlanes>(x, kSize, integers, scale, &lower);
    for (int64_t i = 0; i < kSize; i += 4, place.to += place.step) put<kSize, kPlanes>(integers, i, place);
    rows.biases[at] = static_cast<int32_t>(static_cast<uint32_t>(lacking) * static_cast<uint32_t>(sum));
    rows.sums[at] = static_cast<float>(sum);
    return lower;
  }

 private:
  template <int64_t kSize, int kPlanes>
  VLLM_LITE_INLINE int32_t quantize(const T* x, int64_t count, int8_t* to, float* scale, bool* lower) {
    if constexpr (kPlanes == 1)
      return quantize_row(x, count, to, scale);
    else
      return quantize_row_twice(x, count, kSize, to, scale, lower);
  }
  // Those of four inputs from i on.
  template <int64_t kSize, int kPlanes>
  VLLM_LITE_INLINE void put(const int8_t* integers, int64_t i, const GroupPlace& place) {
    if constexpr (kPlanes == 1) {
      std::memcpy(place.to, integers + i, 4);
    } else {
#if defined(__AVX512VNNI__)
      std::memcpy(place.to, integers + i, 4);
      std::memcpy(place.to + place.plane, integers + kSize + i, 4);
#else
      std::memcpy(place.to, integers + 2 * i, 8);
#endif
    }
  }
};

// Group after group of rows, as each writes its part of the panel from the first byte to the last.
template <class T, int64_t kSize, int kPlanes>
void quantize_groups(const LinearCall& call, const QuantizeTask& task) {
  const RowQuantizer<T> quantizer{call};
  const RowLayout& layout = call.quantized->layout;
  const RowGroups groups = RowGroups::of(layout, task.num_rows);
  int8_t* panel = call.quantized->values + task.first_row * layout.value_bytes();
  constexpr int kTogether = kPlanesApart ? 1 : kPlanes;
  for (int64_t part = 0; part < groups.count; ++part) {
    const int64_t first = groups.first(part), count = groups.first(part + 1) - first;
    const int64_t scales = (task.first_row + first) * layout.num_groups;
    for (int64_t group = task.first_group; group < task.first_group + task.num_groups; ++group) {
      int8_t* to = panel + first * layout.value_bytes() + group * kSize * kPlanes * count;
      bool any = false;
      for (int64_t row = 0; row < count; ++row) {
        any |= quantizer.template run<kSize, kPlanes>(
            task.first_row + first + row, group,
            {to + 4 * kTogether * row, 4 * kTogether * count, kSize * count, scales + group * count + row});
      }
      call.quantized->lower[scales + group] = any;
    }
  }
}

// Only machines with VNNI have tiles.
template <class T, int64_t kSize>
void quantize_for_tiles(const LinearCall& call, const QuantizeTask& task) {
  const RowQuantizer<T> quantizer{call};
  const RowLayout& layout = call.quantized->layout;
  for (int64_t row = task.first_row; row < task.first_row + task.num_rows; ++row) {
    for (int64_t group = task.first_group; group < task.first_group + task.num_groups; ++group) {
      int8_t* to = call.quantized->values + row * layout.value_bytes() + group * kSize;
      quantizer.template run<kSize, 2>(row, group, {to, 4, layout.width(), row * layout.num_groups + group});
    }
  }
}

// Sizes are those of linear.h; what has one plane or goes through tiles is known there, too.
template <class T>
void quantize_panel(const LinearCall& call, const QuantizeTask& task) {
  const RowLayout& layout = call.quantized->layout;
  const bool two = layout.num_planes == 2;
  if (task.for_tiles) return quantize_for_tiles<T, kQuantGroup>(call, task);
  if (layout.group_size == 16)
    return two ? quantize_groups<T, 16, 2>(call, task) : quantize_groups<T, 16, 1>(call, task);
  if (layout.group_size == 32)
    return two ? quantize_groups<T, 32, 2>(call, task) : quantize_groups<T, 32, 1>(call, task);
  layout.group_size == 64 ? quantize_groups<T, 64, 2>(call, task) : quantize_groups<T, 128, 2>(call, task);
}

constexpr int kPlanes = 2;
constexpr int kVectors = 2;                            // of outputs at a time
constexpr int64_t kDepth = kWidth == 16 ? 1024 : 512;  // inputs: their sums stay in registers
constexpr int64_t kQuadBytes = 4 * kBlock;
constexpr int64_t kAheadBytes = 8192;

// Rows of one group, from a multiple of kQuantGroup inputs on.
struct Rows {
  const int8_t* values;
  const float* scales;  // [groups][rows], like biases
  const int32_t* biases;
};

// total [R] += the products of four inputs, both planes of R / 2 rows, with kVectors vectors of outputs.
template <int R>
VLLM_LITE_INLINE void multiply_quad(const int8_t* x, const uint8_t* bytes, Ints (&total)[R][kVectors]) {
#if defined(__AVX512VNNI__)
  const Ints low = load_ints(bytes), high = load_ints(bytes + sizeof(Ints));
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const int8_t* plane = r % 2 == 0 ? x : x + kQuantGroup * R / 2;
    const Ints value = four_of(plane + 4 * (r / 2));
    add_products(total[r][0], low, value);
    add_products(total[r][1], high, value);
  }
#else
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) multiply_words(x, bytes + v * sizeof(Ints), v, total);
#endif
}

// The sums of R rows and some of a block's outputs go on with a tile of weights. Rows that are alone ask for all that
// comes.
template <int R, bool kAlone>
void multiply(const Rows& rows, const uint8_t* tile, int64_t num_quads, Ahead ahead, const Sums<true>& sums, At at) {
  constexpr int64_t kAtOnce = kQuantGroup / 4, kStep = kPlanesApart ? 4 * R : 8 * R;
  Vec sum[R][kVectors];
  sums.begin(at, sum);
  const int8_t* whole = rows.values;
  for (int64_t first = 0, group = 0; first < num_quads; first += kAtOnce, ++group, whole += kQuantGroup * R * kPlanes) {
    Ints total[R * kPlanes][kVectors];
    begin_planes(rows.biases + group * R, total);
    const int64_t left = num_quads - first, count = left < kAtOnce ? left : kAtOnce;
    const uint8_t* bytes = tile + first * kQuadBytes;
    const int8_t* x = whole;
    for (int64_t quad = 0; quad < count; ++quad, x += kStep, bytes += kQuadBytes) {
      if constexpr (kAlone) {
        prefetch<kQuadBytes * kVectors * kWidth / kBlock>(ahead, first + quad);
      } else {
        prefetch_l2<64>(ahead, first + quad);
      }
      multiply_quad(x, bytes, total);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec scale = splat(rows.scales[group * R + r]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] = multiply_add(planes_sum(total, r, v), scale, sum[r][v]);
    }
  }
  sums.end(at, sum);
}

// For `count` rows, 1 <= count <= R.
template <int R, bool kAlone>
void multiply_group(int64_t count, const Rows& rows, const uint8_t* tile, int64_t num_quads, Ahead ahead,
                    const Sums<true>& sums, At at) {
  if constexpr (R > 1) {
    if (count < R) return multiply_group<R - 1, kAlone>(count, rows, tile, num_quads, ahead, sums, at);
  }
  ahead.step = ahead.step * kVectors * kWidth / kBlock;  // of a pass
  for (int64_t column = 0; column < kBlock; column += kVectors * kWidth, ahead.from += num_quads * ahead.step) {
    multiply<R, kAlone>(rows, tile + 4 * column, num_quads, ahead, sums, {at.row, column});
  }
}

// A task's rows from a multiple of kQuantGroup inputs on.
struct Panel {
  const LinearTask& task;
  const QuantizedRows& all;
  RowGroups groups;
  int64_t input;

  Rows rows(int64_t row, int64_t count) const {
    const RowLayout& layout = all.layout;
    const int64_t at = task.first_row + row, place = at * layout.num_groups + input / kQuantGroup * count;
    return {all.values + at * layout.value_bytes() + input * kPlanes * count, all.scales + place, all.biases + place};
  }
};

// All rows of a task times a tile of one block. The next tile is at `next`.
void multiply_rows(const Panel& panel, const uint8_t* tile, int64_t num_quads, const uint8_t* next,
                   const Sums<true>& sums) {
  const char* from = reinterpret_cast<const char*>(next);
  const int64_t num_rows = panel.groups.num_rows, num_groups = panel.groups.count;
  if (num_groups == 1) {
    const Rows rows = panel.rows(0, num_rows);
    return multiply_group<kAloneRows<kPlanes>, true>(num_rows, rows, tile, num_quads, {from, kQuadBytes}, sums, {0, 0});
  }
  const int64_t step = kQuadBytes / num_groups;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t row = panel.groups.first(group), count = panel.groups.first(group + 1) - row;
    const Rows rows = panel.rows(row, count);
    multiply_group<kGroupRows<kPlanes>, false>(count, rows, tile, num_quads, {from + group * num_quads * step, step},
                                               sums, {row, 0});
  }
}

void run(const LinearCall& call, const LinearTask& task) {
  alignas(64) float memory[kMaxRows * kMaxBlocks * kBlock];
  const int64_t num_inputs = padded_inputs(call.weight->num_inputs, kInt8Weight), stride = task.num_blocks * kBlock;
  const bool are_alone = task.num_rows <= kAloneRows<kPlanes>;
  const int64_t length = are_alone ? num_inputs : kDepth;
  const uint8_t* blocks = static_cast<const uint8_t*>(call.weight->data) + task.first_block * kBlock * num_inputs;
  for (int64_t input = 0; input < num_inputs; input += length) {
    const Panel panel = {task, *call.quantized, RowGroups::of(call.quantized->layout, task.num_rows), input};
    const int64_t left = num_inputs - input, count = left < length ? left : length;
    for (int64_t block = 0; block < task.num_blocks; ++block) {
      const uint8_t* tile = blocks + (block * num_inputs + input) * kBlock;
      const uint8_t* next = are_alone                     ? tile + kAheadBytes  // what is to come lies behind
                            : block + 1 < task.num_blocks ? tile + num_inputs * kBlock
                            : input + length < num_inputs ? blocks + (input + length) * kBlock
                                                          : tile;
      const Sums<true> sums = {memory + block * kBlock,
                               stride,
                               input > 0,
                               count == left,
                               &call,
                               task.first_row,
                               (task.first_block + block) * kBlock};
      multiply_rows(panel, tile, count / 4, next, sums);
    }
  }
}
#endif

}  // namespace

bool multiplies_bytes() {
#if defined(VLLM_LITE_MULTIPLIES_BYTES)
  return true;
#else
  return false;
#endif
}

void quantize(const void* x, int32_t type, int64_t count, int8_t* to, float* scale) {
  if (type == kFloat32) {
    quantize_row(static_cast<const float*>(x), count, to, scale);
  } else if (type == kFloat16) {
    quantize_row(static_cast<const Float16*>(x), count, to, scale);
  } else {
    quantize_row(static_cast<const BFloat16*>(x), count, to, scale);
  }
}

void quantize_rows([[maybe_unused]] const LinearCall& call, [[maybe_unused]] const QuantizeTask& task) {
#if defined(VLLM_LITE_MULTIPLIES_BYTES)
  if (call.x_type == kFloat32) return quantize_panel<float>(call, task);
  if (call.x_type == kFloat16) return quantize_panel<Float16>(call, task);
  quantize_panel<BFloat16>(call, task);
#endif
}

void linear_int8([[maybe_unused]] const LinearCall& call, [[maybe_unused]] const LinearTask& task) {
#if defined(VLLM_LITE_MULTIPLIES_BYTES)
  run(call, task);
#endif
}

}  // namespace VLLM_LITE_ISA
