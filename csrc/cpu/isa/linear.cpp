// The linear layer's arithmetic, for one task: see ../linear.h for the layout of the weight.
//
// A task processes the inputs in tiles. For each tile it copies its rows of x to the stack (as float32, or as bfloat16
// if the machine multiplies that), then multiplies the weights of every block with all rows, a group of rows at a time.
// Reused data stays in the caches: sums and x in L2, a tile of weights in L1. Between tiles the sums are in memory.
#include "../linear.h"

#include "grouped_floats.h"
#include "linear_task.h"
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "neon_pairs.h"
#endif

namespace VLLM_LITE_ISA {
namespace {

constexpr int64_t kTile = 256;       // inputs: a tile of a block's weights stays in L1 for all groups of rows
constexpr int64_t kLongTile = 2048;  // for a single group of rows, which reads weights once
constexpr size_t kAheadBytes = 8192;
// Rows of a group: with two vectors of sums each, and some weights, they fill the registers.
constexpr int kGroup = kWidth == 16 ? 12 : 6;
constexpr int kAlone = kWidth == 16 ? 12 : 2;  // maximum rows that are a single group
// Vectors of weights at a time: several, because each sum is a chain of additions, and chains run in parallel.
template <int R>
constexpr int kVectors = kWidth == 16 || R > 2 ? 2 : 4;

// ---- the weights of input 2 * pair + i for kWidth outputs, from a block's `column` on, as float32

template <class T>
VLLM_LITE_INLINE Vec load_weights(const T* block, int64_t pair, int64_t i, int64_t column) {
  return load(block + (2 * pair + i) * kBlock + column);
}

VLLM_LITE_INLINE Vec load_weights(const BFloat16* block, int64_t pair, int64_t i, int64_t column) {
  VecI both;
  std::memcpy(&both, block + 2 * (pair * kBlock + column), sizeof both);
  return reinterpret_cast<Vec>(i == 0 ? both << 16 : both & static_cast<int32_t>(0xffff0000));
}

template <class T>
constexpr int64_t kPairBytes = 2 * kBlock * static_cast<int64_t>(sizeof(T));

// Bytes that a kernel prefetches per pair. Several groups of rows share the prefetches, so that memory is busy all the
// time and not only during the first group.
template <int64_t kStride, class T>
constexpr int64_t kAhead = kStride == kLongTile ? kPairBytes<T> : kPairBytes<T> / 2;

// ---- arithmetic in float32

// Adds the products of a pair, one input after the other, which needs fewer registers for weights.
template <int R, int64_t kStride, class T>
VLLM_LITE_INLINE void add_pair(const float* x, const T* block, int64_t pair, int64_t column,
                               Vec (&total)[R][kVectors<R>]) {
#pragma GCC unroll 2
  for (int64_t i = 0; i < 2; ++i) {
    Vec weights[kVectors<R>];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors<R>; ++v) weights[v] = load_weights(block, pair, i, column + v * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec value = splat(x[r * kStride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors<R>; ++v) total[r][v] = multiply_add(value, weights[v], total[r][v]);
    }
  }
}

template <int R, int V>
VLLM_LITE_INLINE void load_sums(const float* from, int64_t stride, Vec (&total)[R][V]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) total[r][v] = load(from + r * stride + v * kWidth);
  }
}
template <int R, int V>
VLLM_LITE_INLINE void store_sums(const Vec (&total)[R][V], float* to, int64_t stride) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(to + r * stride + v * kWidth, total[r][v]);
  }
}

// sums [R][sums_stride] += x [R][kStride] times a tile of one block's weights; prefetches `ahead`.
template <int R, int64_t kStride, class T>
void multiply(const float* x, const T* block, int64_t num_pairs, float* sums, int64_t sums_stride, Ahead ahead) {
  constexpr int V = kVectors<R>;
  ahead.step = ahead.step * V * kWidth / kBlock;  // of a pass
  for (int64_t column = 0; column < kBlock; column += V * kWidth, ahead.from += num_pairs * ahead.step) {
    Vec total[R][V];
    load_sums(sums + column, sums_stride, total);
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
      prefetch<kAhead<kStride, T>>(ahead, pair);
      add_pair<R, kStride>(x + 2 * pair, block, pair, column, total);
    }
    store_sums(total, sums + column, sums_stride);
  }
}

VLLM_LITE_INLINE void widen(const float* from, int64_t count, float* to) {
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof *to);
}
template <class T>
VLLM_LITE_INLINE void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

template <class T>
void widen_tile(const T* block, int64_t num_pairs, float* tile, const T* next) {
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    prefetch<kPairBytes<T>>({reinterpret_cast<const char*>(next), kPairBytes<T>}, pair);
    for (int64_t column = 0; column < kBlock; column += kWidth) {
#pragma GCC unroll 2
      for (int64_t i = 0; i < 2; ++i) {
        store(tile + (2 * pair + i) * kBlock + column, load_weights(block, pair, i, column));
      }
    }
  }
}

// ---- arithmetic in bfloat16: pairs of products, added up in float32

#if defined(__AVX512BF16__)
VLLM_LITE_INLINE __m512bh load_dots(const BFloat16* block, int64_t pair, int v) {
  return (__m512bh)_mm512_loadu_si512(block + 2 * (pair * kBlock + v * kWidth));
}
template <int R, int64_t kStride>
void multiply(const BFloat16* x, const BFloat16* block, int64_t num_pairs, float* sums, int64_t sums_stride,
              Ahead ahead) {
  __m512 total[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < 2; ++v) total[r][v] = _mm512_loadu_ps(sums + r * sums_stride + v * kWidth);
  }
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    prefetch<kAhead<kStride, BFloat16>>(ahead, pair);
    const __m512bh first = load_dots(block, pair, 0), second = load_dots(block, pair, 1);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t both;
      std::memcpy(&both, x + r * kStride + 2 * pair, 4);
      const __m512bh value = (__m512bh)_mm512_set1_epi32(both);
      total[r][0] = _mm512_dpbf16_ps(total[r][0], first, value);
      total[r][1] = _mm512_dpbf16_ps(total[r][1], second, value);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < 2; ++v) _mm512_storeu_ps(sums + r * sums_stride + v * kWidth, total[r][v]);
  }
}
#elif defined(VLLM_LITE_MULTIPLIES_PAIRS)
template <int R, int64_t kStride>
void multiply(const BFloat16* x, const BFloat16* block, int64_t num_pairs, float* sums, int64_t sums_stride,
              Ahead ahead) {
  constexpr int V = 4;
  ahead.step = ahead.step * V * kWidth / kBlock;  // of a pass
  for (int64_t column = 0; column < kBlock; column += V * kWidth, ahead.from += num_pairs * ahead.step) {
    Vec total[R][V];
    load_sums(sums + column, sums_stride, total);
    multiply_pairs<kStride>(x, block + 2 * column, num_pairs, total, [&](int64_t pair) __attribute__((always_inline)) {
      prefetch<kAhead<kStride, BFloat16>>(ahead, pair);
    });
    store_sums(total, sums + column, sums_stride);
  }
}
#endif

#if defined(VLLM_LITE_MULTIPLIES_PAIRS)
VLLM_LITE_INLINE void widen(const BFloat16* from, int64_t count, BFloat16* to) {
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof *to);
}
#endif

// ---- one task

// For `rows` rows, 1 <= rows <= R.
template <int R, int64_t kStride, class X, class T>
void multiply_group(int64_t rows, const X* x, const T* block, int64_t num_pairs, float* sums, int64_t sums_stride,
                    Ahead ahead) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_group<R - 1, kStride>(rows, x, block, num_pairs, sums, sums_stride, ahead);
  }
  multiply<R, kStride>(x, block, num_pairs, sums, sums_stride, ahead);
}

// All groups of rows times a tile of one block; groups differ by one row at most. The next tile is at `next`.
template <int64_t kStride, class X, class T>
void multiply_rows(const X* x, int64_t num_rows, const T* block, int64_t num_pairs, float* sums, int64_t sums_stride,
                   const T* next) {
  const int64_t num_groups = (num_rows + kGroup - 1) / kGroup;
  const char* from = reinterpret_cast<const char*>(next);
  for (int64_t group = 0, row = 0; group < num_groups; ++group) {
    const int64_t end = (group + 1) * num_rows / num_groups;
    const Ahead ahead = {from + group * num_pairs * kPairBytes<T> / num_groups, kPairBytes<T> / num_groups};
    multiply_group<kGroup, kStride>(end - row, x + row * kStride, block, num_pairs, sums + row * sums_stride,
                                    sums_stride, ahead);
    row = end;
  }
}

// Whether each group of rows reads packed weights in place; else they are widened once for all groups.
template <class T>
constexpr bool kUseInPlace = false;
template <>
constexpr bool kUseInPlace<float> = true;
template <>
constexpr bool kUseInPlace<BFloat16> = true;

// x has type In in memory and X on the stack; weights have type T. A tile has kLength inputs.
template <int64_t kLength, class In, class X, class T>
void run_tiles(const LinearCall& call, const LinearTask& task, X* x, float* sums) {
  const PackedWeight& weight = *call.weight;
  const int64_t num_inputs = padded_inputs(weight.num_inputs), sums_stride = task.num_blocks * kBlock;
  const T* blocks = static_cast<const T*>(weight.data) + task.first_block * kBlock * num_inputs;
  const In* rows = static_cast<const In*>(call.x) + task.first_row * call.x_stride;
  for (int64_t input = 0; input < weight.num_inputs; input += kLength) {
    const int64_t left = weight.num_inputs - input, count = left < kLength ? left : kLength;
    const int64_t num_pairs = (count + 1) / 2;
    for (int64_t row = 0; row < task.num_rows; ++row) {
      widen(rows + row * call.x_stride + input, count, x + row * kLength);
      if (count % 2 != 0) x[row * kLength + count] = X{};
    }
    for (int64_t block = 0; block < task.num_blocks; ++block) {
      const T* tile = blocks + (block * num_inputs + input) * kBlock;
      const T* next = block + 1 < task.num_blocks    ? tile + num_inputs * kBlock
                      : input + kLength < num_inputs ? blocks + (input + kLength) * kBlock
                                                     : tile;
      float* block_sums = sums + block * kBlock;
      if constexpr (kLength == kLongTile) {
        // The next tile is too far away: prefetch the memory right after that which is being read.
        multiply_rows<kLength>(x, task.num_rows, tile, num_pairs, block_sums, sums_stride,
                               tile + kAheadBytes / sizeof(T));
      } else if constexpr (kUseInPlace<T>) {
        multiply_rows<kLength>(x, task.num_rows, tile, num_pairs, block_sums, sums_stride, next);
      } else {  // several groups: the weights are widened once for all
        alignas(64) X wide[kBlock * kTile];
        widen_tile(tile, num_pairs, wide, next);
        multiply_rows<kLength>(x, task.num_rows, wide, num_pairs, block_sums, sums_stride, wide);
      }
    }
  }
}

template <class In, class X, class T>
void run(const LinearCall& call, const LinearTask& task) {
  static_assert(kGroup * kLongTile <= kMaxRows * kTile, "x has room for both");
  alignas(64) X x[kMaxRows * kTile];
  alignas(64) float sums[kMaxRows * kMaxBlocks * kBlock];
  std::memset(sums, 0, static_cast<size_t>(task.num_rows * task.num_blocks * kBlock) * sizeof *sums);
  if (task.num_rows <= kAlone) {
    run_tiles<kLongTile, In, X, T>(call, task, x, sums);
  } else {
    run_tiles<kTile, In, X, T>(call, task, x, sums);
  }
  if (call.out_type == kFloat32) return write<float>(call, task, sums, task.num_blocks * kBlock);
  write<In>(call, task, sums, task.num_blocks * kBlock);
}

// Copies the inputs of one row that belong to `count` columns of the weight, from `first` on.
template <class In>
void widen_columns(const In* row, const int32_t* order, int64_t first, int64_t count, float* to) {
  if (order == nullptr) return widen(row + first, count, to);
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(row[order[first + i]]);
}

// The cells of one block for a tile of inputs.
struct TileCells {
  const PackedWeight& weight;
  const CellLayout& layout;
  int64_t block, first, count;  // first: group

  FloatCell cell(int64_t group) const {
    const int64_t place = block * layout.groups(weight.num_inputs) + first + group;
    const char* from = static_cast<const char*>(weight.data) + place * layout.bytes();
    for (int64_t i = 0; i < layout.bytes(); i += 64) __builtin_prefetch(from + kAheadBytes + i);
    return {from, weight.supers_of(block, first + group)};
  }
};

// Multiplies R rows with all cells, G at a time.
template <int R, int G, int kInputs, class Values>
void multiply_cells(const Values& values, const FloatRows& rows, const TileCells& cells, float* sums, int64_t stride) {
  int64_t group = 0;
  for (; group + G <= cells.count; group += G) {
    FloatCell some[G];
    for (int g = 0; g < G; ++g) some[g] = cells.cell(group + g);
    multiply_codes<R, G, kInputs>(values, rows, group, cells.layout, some, sums, stride);
  }
  for (; group < cells.count; ++group) {
    const FloatCell one[] = {cells.cell(group)};
    multiply_codes<R, 1, kInputs>(values, rows, group, cells.layout, one, sums, stride);
  }
}

// Maximum rows that are multiplied without widening the codes in memory.
template <class Values>
constexpr int64_t kFewRows = 4;
template <>
constexpr int64_t kFewRows<FiveValues> = 0;  // a code takes two loads and operations on the bits of both

template <int kInputs, class Values>
void multiply_few(int64_t num_rows, const Values& values, const FloatRows& rows, const TileCells& cells, float* sums,
                  int64_t stride) {
  if (num_rows == 1) return multiply_cells<1, 4, kInputs>(values, rows, cells, sums, stride);
  if (num_rows == 2) return multiply_cells<2, 2, kInputs>(values, rows, cells, sums, stride);
  if (num_rows == 3) return multiply_cells<3, 1, kInputs>(values, rows, cells, sums, stride);
  multiply_cells<4, 1, kInputs>(values, rows, cells, sums, stride);
}

template <int kInputs, class Values>
void multiply_many(int64_t num_rows, const Values& values, const FloatRows& rows, const TileCells& cells, float* sums,
                   int64_t stride) {
  alignas(64) float wide[kQuantGroup * kBlock];
  for (int64_t group = 0; group < cells.count; ++group) {
    const FloatCell cell = cells.cell(group);
    widen_numbers<kInputs>(values, cells.layout, cell.from, wide);
    for (int64_t row = 0; row < num_rows; row += kGroup) {
      const int64_t left = num_rows - row;
      const FloatRows some = {rows.x + row * rows.stride, rows.stride, rows.sums + row * rows.sums_stride,
                              rows.sums_stride};
      multiply_some<kGroup>(left < kGroup ? left : kGroup, some, group, cells.layout, cell, wide, sums + row * stride,
                            stride);
    }
  }
}

// Grouped weights times unquantized rows; see grouped_floats.h.
template <class In, int kInputs, class Values>
void run_grouped(const LinearCall& call, const LinearTask& task) {
  constexpr int64_t kLeastGroup = 16, kLength = 1024;
  alignas(64) float x[kMaxRows * kQuantGroup], sums[kMaxRows * kMaxBlocks * kBlock];
  float x_sums[kMaxRows * kQuantGroup / kLeastGroup];
  static_assert(kFewRows<Values> * kLength <= kMaxRows * kQuantGroup, "x has room for both");
  const PackedWeight& weight = *call.weight;
  const Values values(weight.values);
  const CellLayout layout = CellLayout::of(weight);
  const bool are_few = task.num_rows <= kFewRows<Values>;
  const int64_t length = are_few ? kLength : kQuantGroup, stride = task.num_blocks * kBlock;
  const FloatRows rows = {x, length, x_sums, length / kLeastGroup};
  const In* from = static_cast<const In*>(call.x) + task.first_row * call.x_stride;
  std::memset(sums, 0, static_cast<size_t>(task.num_rows * stride) * sizeof *sums);
  for (int64_t input = 0; input < weight.num_inputs; input += length) {
    const int64_t left = weight.num_inputs - input, count = left < length ? left : length;
    const int64_t first = input / layout.group_size, num_groups = layout.groups(count);
    for (int64_t row = 0; row < task.num_rows; ++row) {
      float* to = x + row * length;
      widen_columns(from + row * call.x_stride, weight.order, input, count, to);
      for (int64_t i = count; i < num_groups * layout.group_size; ++i) to[i] = 0;
      for (int64_t group = 0; group < num_groups; ++group) {
        float sum = 0;
        for (int64_t i = 0; i < layout.group_size; ++i) sum += to[group * layout.group_size + i];
        x_sums[row * rows.sums_stride + group] = sum;
      }
    }
    for (int64_t block = 0; block < task.num_blocks; ++block) {
      const TileCells cells = {weight, layout, task.first_block + block, first, num_groups};
      if constexpr (kFewRows<Values> > 0) {
        if (are_few) {
          multiply_few<kInputs>(task.num_rows, values, rows, cells, sums + block * kBlock, stride);
          continue;
        }
      }
      multiply_many<kInputs>(task.num_rows, values, rows, cells, sums + block * kBlock, stride);
    }
  }
  if (call.out_type == kFloat32) return write<float>(call, task, sums, stride);
  write<In>(call, task, sums, stride);
}

template <class In>
void run_grouped_for(const LinearCall& call, const LinearTask& task) {
  if (call.weight->type == kGrouped4) return run_grouped<In, 8, FewValues>(call, task);
  if (call.weight->type == kGrouped5) return run_grouped<In, 8, FiveValues>(call, task);
  if (call.weight->are_whole != 0) return run_grouped<In, 4, WholeValues>(call, task);
  if (E4m3Values::takes(call.weight->values)) return run_grouped<In, 4, E4m3Values>(call, task);
  run_grouped<In, 4, ManyValues>(call, task);
}

template <class In>
void run_for(const LinearCall& call, const LinearTask& task) {
  const int32_t type = call.weight->type;
  if (type == kFloat32) return run<In, float, float>(call, task);
  if (type == kFloat16) return run<In, float, Float16>(call, task);
  if (type == kBFloat16) return run<In, float, BFloat16>(call, task);
  run_grouped_for<In>(call, task);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int64_t kIntegerProducts = 8;
VLLM_LITE_INLINE int32x4_t multiply_integers(int32x4_t sum, int8x16_t a, int8x16_t b) {
  return vmmlaq_s32(sum, a, b);
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int64_t kIntegerProducts = 4;
VLLM_LITE_INLINE int32x4_t multiply_integers(int32x4_t sum, int8x16_t a, int8x16_t b) {
  return vdotq_s32(sum, a, b);
}
#endif

// Arithmetic at the maximum speed of a kernel: `multiply` in independent chains, with operands at x [64]. Returns the
// number of operations; an instruction makes and adds `products` products in each element of 32 bits.
template <class Operand, int kChains, class Multiply>
VLLM_LITE_INLINE int64_t multiply_chains(int64_t rounds, int64_t products, float* x, const Multiply& multiply) {
  Operand sums[kChains];
  for (int i = 0; i < kChains; ++i) {  // different values: the compiler would compute equal chains once
    sums[i] = reinterpret_cast<Operand>(splat(static_cast<float>(i)));
  }
  const Operand a = reinterpret_cast<Operand>(load(x)), b = reinterpret_cast<Operand>(load(x + kWidth));
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 24
    for (Operand& sum : sums) multiply(sum, a, b);
  }
  Vec total = reinterpret_cast<Vec>(sums[0]);
  for (int i = 1; i < kChains; ++i) total = total + reinterpret_cast<Vec>(sums[i]);
  store(x, total);
  return rounds * kChains * kWidth * products * 2;
}

}  // namespace

void linear(const LinearCall& call, const LinearTask& task) {
  if (call.quantized != nullptr) return linear_grouped(call, task);
  if (is_grouped(call.weight->type) && linear_table(call, task)) return;
  if (linear_dense(call, task)) return;
#if defined(VLLM_LITE_MULTIPLIES_PAIRS)
  if (call.x_type == kBFloat16 && call.weight->type == kBFloat16) return run<BFloat16, BFloat16, BFloat16>(call, task);
#endif
  if (call.x_type == kFloat32) return run_for<float>(call, task);
  if (call.x_type == kFloat16) return run_for<Float16>(call, task);
  run_for<BFloat16>(call, task);
}

// Reads memory at the maximum speed of a kernel, as the reference for all of them. The result only keeps the compiler
// from removing the reads.
int64_t read_all(const char* data, int64_t num_bytes) {
  VecI sums[8] = {};
  for (int64_t i = 0; i + static_cast<int64_t>(sizeof sums) <= num_bytes; i += static_cast<int64_t>(sizeof sums)) {
    for (int v = 0; v < 8; ++v) {
      VecI part;
      std::memcpy(&part, data + i + v * static_cast<int64_t>(sizeof part), sizeof part);
      sums[v] = sums[v] ^ part;
    }
  }
  int64_t total = 0;
  for (int v = 0; v < 8; ++v) {
    for (int i = 0; i < kWidth; ++i) total ^= sums[v][i];
  }
  return total;
}

// The same for arithmetic. Returns the number of operations.
int64_t multiply_registers([[maybe_unused]] int32_t type, int64_t rounds, float* x) {
  constexpr int kChains = kWidth == 16 ? 24 : 12;  // as many as fit into registers
#if defined(__AVX512BF16__)
  if (type == kBFloat16) {
    return multiply_chains<__m512, kChains>(
        rounds, 2, x, [](__m512& sum, __m512 a, __m512 b) __attribute__((always_inline)) {
          sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
        });
  }
#endif
#if defined(__AVX512VNNI__)
  if (type == kInt8) {  // half as many, because GCC 12 copies the sums
    return multiply_chains<__m512i, kChains / 2>(rounds, 4, x,
                                                 [](__m512i& sum, __m512i a, __m512i b) __attribute__((always_inline)) {
                                                   sum = _mm512_dpbusd_epi32(sum, a, b);
                                                 });
  }
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  if (type == kBFloat16) {
    return multiply_chains<bfloat16x8_t, kChains>(
        rounds, 4, x, [](bfloat16x8_t& sum, bfloat16x8_t a, bfloat16x8_t b) __attribute__((always_inline)) {
          sum = reinterpret_cast<bfloat16x8_t>(vbfmmlaq_f32(reinterpret_cast<float32x4_t>(sum), a, b));
        });
  }
#endif
#if defined(__ARM_FEATURE_DOTPROD)
  if (type == kInt8) {
    return multiply_chains<int8x16_t, kChains>(
        rounds, kIntegerProducts, x, [](int8x16_t& sum, int8x16_t a, int8x16_t b) __attribute__((always_inline)) {
          sum = reinterpret_cast<int8x16_t>(multiply_integers(reinterpret_cast<int32x4_t>(sum), a, b));
        });
  }
#endif
  return multiply_chains<Vec, kChains>(
      rounds, 1, x, [](Vec& sum, Vec a, Vec b) __attribute__((always_inline)) { sum = multiply_add(a, b, sum); });
}

}  // namespace VLLM_LITE_ISA
