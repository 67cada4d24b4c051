// int8: rows quantized as they are used, and bytes times integers where the machine has an instruction for it.
#include "byte_products.h"
#include "convert.h"
#include "linear_task.h"

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

// x as integers in [-127, 127] times *scale; NaN or infinity in x make the scale that. Returns the sum of the integers.
template <class T>
VLLM_LITE_INLINE int32_t quantize_row(const T* x, int64_t count, int8_t* to, float* scale) {
  // As integers the sizes of floats are in order, and NaN is above all.
  VecI largest = {};
  for (int64_t i = 0; i < count; i += kWidth) {
    const int left = static_cast<int>(count - i < kWidth ? count - i : kWidth);
    const VecI size = reinterpret_cast<VecI>(load_some(x + i, left)) & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  const float size = float_of(static_cast<uint32_t>(max_of(largest)));
  *scale = size / 127;
  const Vec inverse = splat(size > 0 ? 127 / size : 0);

  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  const Vec magic = splat(0x1.8p23f);  // adding it rounds to a whole number, which then is in the lowest bits
  VecI total = {};
  for (int64_t i = 0; i < count; i += kWidth) {
    const int left = static_cast<int>(count - i < kWidth ? count - i : kWidth);
    const Vec shifted = load_some(x + i, left) * inverse + magic;
    const VecI whole = reinterpret_cast<VecI>(shifted) - reinterpret_cast<VecI>(magic);
    const Bytes bytes = __builtin_convertvector(whole, Bytes);
    std::memcpy(to + i, &bytes, static_cast<size_t>(left));
    total = total + whole;
  }
  return sum_of(total);
}

VLLM_LITE_INLINE int32_t sum_of(const int8_t* integers, int64_t count) {
  int32_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += integers[i];
  return total;
}

// The inputs from `first` on that share a scale, in the order of the weight's columns.
template <class T>
VLLM_LITE_INLINE const T* columns(const T* row, const int32_t* order, int64_t first, int64_t count, T* buffer) {
  if (order == nullptr) return row + first;
  for (int64_t i = 0; i < count; ++i) buffer[i] = row[order[first + i]];
  return buffer;
}

// What the groups of `size` among a scale's `width` integers add up to; all of them add up to `sum`.
VLLM_LITE_INLINE void fill_sums(const int8_t* integers, int64_t width, int64_t size, int32_t sum, int32_t lacking,
                                int32_t* biases, float* sums) {
  for (int64_t i = 0; i < width; i += size) {
    const int32_t own = size == kQuantGroup ? sum : sum_of(integers + i, size);
    *biases++ = static_cast<int32_t>(static_cast<uint32_t>(lacking) * static_cast<uint32_t>(own));
    *sums++ = static_cast<float>(own);
  }
}

// What is missing in a weight's bytes as they are multiplied.
VLLM_LITE_INLINE int32_t lost([[maybe_unused]] const PackedWeight& weight) {
#if defined(VLLM_LITE_MULTIPLIES_BYTES)
  return taken_off(weight);
#else
  return 0;
#endif
}

template <class T>
void quantize_panel(const LinearCall& call, const QuantizeTask& task) {
  const QuantizedRows& rows = *call.quantized;
  const RowLayout& layout = rows.layout;
  const bool grouped = is_grouped(call.weight->type);
  const int32_t lacking = (grouped ? call.weight->offset : -128) + lost(*call.weight);
  const int32_t* order = grouped ? call.weight->order : nullptr;
  int8_t* panel = rows.values + task.first_row * layout.width;
  alignas(64) int8_t integers[kQuantGroup];
  T buffer[kQuantGroup];
  for (int64_t number = task.first_scale; number < task.first_scale + task.num_scales; ++number) {
    const int64_t input = number * kQuantGroup, left = call.weight->num_inputs - input, rest = layout.width - input;
    const int64_t width = rest < kQuantGroup ? rest : kQuantGroup, group = input / layout.group_size;
    if (left < kQuantGroup) std::memset(integers, 0, sizeof integers);
    for (int64_t row = 0; row < task.num_rows; ++row) {
      const int64_t at = task.first_row + row, place = at * layout.num_groups + group;
      const T* whole = static_cast<const T*>(call.x) + at * call.x_stride;
      const T* x = columns(whole, order, input, left < kQuantGroup ? left : kQuantGroup, buffer);
      float* scale = rows.scales + at * layout.num_scales + number;
      const int32_t sum = left < kQuantGroup ? quantize_row(x, left, integers, scale)
                                             : quantize_row(x, kQuantGroup, integers, scale);  // a size known here
      int8_t* to = panel + input * task.num_rows + 4 * row;
      for (int64_t i = 0; i < width; i += 4) std::memcpy(to + i * task.num_rows, integers + i, 4);
      fill_sums(integers, width, layout.group_size, sum, lacking, rows.biases + place, rows.sums + place);
    }
  }
}

#if defined(VLLM_LITE_MULTIPLIES_BYTES)
constexpr int kVectors = 2;                    // of sums at a time
constexpr int kGroup = kWidth == 16 ? 12 : 4;  // rows at a time: two sums each, and some weights, fill the registers
constexpr int64_t kTile = 512;                 // inputs: a tile of a block's weights stays in L1 for all groups of rows
constexpr int64_t kQuadBytes = 4 * kBlock;
constexpr int64_t kAheadBytes = 4096;

// Rows of a panel from a multiple of kQuantGroup inputs on.
struct Rows {
  const int8_t* values;  // those of one group of inputs lie together, those of the next `stride` bytes behind
  int64_t stride;
  const float* scales;  // [rows][num_groups], like biases
  const int32_t* biases;
  int64_t num_groups;

  Rows from(int64_t row) const {
    return {values + 4 * row, stride, scales + row * num_groups, biases + row * num_groups, num_groups};
  }
};

// total [R] += the products of four inputs with kVectors vectors of outputs.
template <int R>
VLLM_LITE_INLINE void multiply_quad(const int8_t* x, const uint8_t* bytes, Ints (&total)[R][kVectors]) {
#if defined(__AVX512VNNI__)
  const Ints low = load_ints(bytes), high = load_ints(bytes + sizeof(Ints));
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Ints value = four_of(x + 4 * r);
    add_products(total[r][0], low, value);
    add_products(total[r][1], high, value);
  }
#else
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    const Ints weights = signed_bytes(load_ints(bytes + v * sizeof(Ints)));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) total[r][v] = add_signed(total[r][v], weights, four_of(x + 4 * r));
  }
#endif
}

// sums [R][sums_stride] += R rows times a tile of some of a block's outputs. A group that is alone asks for all that
// comes.
template <int R, bool kAlone>
void multiply(const Rows& rows, const uint8_t* tile, int64_t num_quads, float* sums, int64_t sums_stride, Ahead ahead) {
  constexpr int64_t kAtOnce = kQuantGroup / 4;
  for (int64_t first = 0, group = 0; first < num_quads; first += kAtOnce, ++group) {
    Ints total[R][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) total[r][v] = all_ints(rows.biases[r * rows.num_groups + group]);
    }
    const int64_t left = num_quads - first, count = left < kAtOnce ? left : kAtOnce;
    const int8_t* x = rows.values + first * rows.stride;
    const uint8_t* bytes = tile + first * kQuadBytes;
    for (int64_t quad = 0; quad < count; ++quad, x += rows.stride, bytes += kQuadBytes) {
      prefetch<kAlone ? kQuadBytes * kVectors * kWidth / kBlock : 64>(ahead, first + quad);
      multiply_quad<R>(x, bytes, total);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec scale = splat(rows.scales[r * rows.num_groups + group]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        float* sum = sums + r * sums_stride + v * kWidth;
        store(sum, multiply_add(to_floats(total[r][v]), scale, load(sum)));
      }
    }
  }
}

// For `count` rows, 1 <= count <= R.
template <int R, bool kAlone>
void multiply_group(int64_t count, const Rows& rows, const uint8_t* tile, int64_t num_quads, float* sums,
                    int64_t sums_stride, Ahead ahead) {
  if constexpr (R > 1) {
    if (count < R) return multiply_group<R - 1, kAlone>(count, rows, tile, num_quads, sums, sums_stride, ahead);
  }
  ahead.step = ahead.step * kVectors * kWidth / kBlock;  // of a pass
  for (int64_t column = 0; column < kBlock; column += kVectors * kWidth, ahead.from += num_quads * ahead.step) {
    multiply<R, kAlone>(rows, tile + 4 * column, num_quads, sums + column, sums_stride, ahead);
  }
}

// All rows of a task times a tile of one block; groups differ by one row at most. The next tile is at `next`.
void multiply_rows(const Rows& rows, int64_t num_rows, const uint8_t* tile, int64_t num_quads, float* sums,
                   int64_t sums_stride, const uint8_t* next) {
  const int64_t num_groups = (num_rows + kGroup - 1) / kGroup, step = kQuadBytes / num_groups;
  const char* from = reinterpret_cast<const char*>(next);
  if (num_groups == 1) {
    return multiply_group<kGroup, true>(num_rows, rows, tile, num_quads, sums, sums_stride, {from, step});
  }
  for (int64_t group = 0, row = 0; group < num_groups; ++group) {
    const int64_t end = (group + 1) * num_rows / num_groups;
    const Ahead ahead = {from + group * num_quads * step, step};
    multiply_group<kGroup, false>(end - row, rows.from(row), tile, num_quads, sums + row * sums_stride, sums_stride,
                                  ahead);
    row = end;
  }
}

void run_tiles(const LinearCall& call, const LinearTask& task, int64_t length, float* sums) {
  const int64_t num_inputs = padded_inputs(call.weight->num_inputs, kInt8Weight);
  const int64_t sums_stride = task.num_blocks * kBlock;
  const uint8_t* blocks = static_cast<const uint8_t*>(call.weight->data) + task.first_block * kBlock * num_inputs;
  const QuantizedRows& all = *call.quantized;
  for (int64_t input = 0; input < num_inputs; input += length) {
    const int64_t first_group = task.first_row * all.layout.num_groups + input / kQuantGroup;
    const Rows rows = {all.values + task.first_row * num_inputs + input * task.num_rows, 4 * task.num_rows,
                       all.scales + first_group, all.biases + first_group, all.layout.num_groups};
    const int64_t left = num_inputs - input, count = left < length ? left : length;
    for (int64_t block = 0; block < task.num_blocks; ++block) {
      const uint8_t* tile = blocks + (block * num_inputs + input) * kBlock;
      const uint8_t* next = length == num_inputs          ? tile + kAheadBytes  // what is to come lies behind
                            : block + 1 < task.num_blocks ? tile + num_inputs * kBlock
                            : input + length < num_inputs ? blocks + (input + length) * kBlock
                                                          : tile;
      multiply_rows(rows, task.num_rows, tile, count / 4, sums + block * kBlock, sums_stride, next);
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

void quantize_rows(const LinearCall& call, const QuantizeTask& task) {
  if (call.x_type == kFloat32) return quantize_panel<float>(call, task);
  if (call.x_type == kFloat16) return quantize_panel<Float16>(call, task);
  quantize_panel<BFloat16>(call, task);
}

void linear_int8([[maybe_unused]] const LinearCall& call, [[maybe_unused]] const LinearTask& task) {
#if defined(VLLM_LITE_MULTIPLIES_BYTES)
  alignas(64) float sums[kMaxRows * kMaxBlocks * kBlock];
  const int64_t stride = task.num_blocks * kBlock;
  std::memset(sums, 0, static_cast<size_t>(task.num_rows * stride) * sizeof *sums);
  run_tiles(call, task, task.num_rows <= kGroup ? padded_inputs(call.weight->num_inputs, kInt8Weight) : kTile, sums);
  if (call.out_type == kFloat32) return write<float>(call, task, sums, stride);
  if (call.x_type == kFloat16) return write<Float16>(call, task, sums, stride);
  write<BFloat16>(call, task, sums, stride);
#endif
}

}  // namespace VLLM_LITE_ISA
