// Products by AMX: dense bfloat16 and int8, for one task. See ../linear.h for the layout of weights, which is what a
// tile of weights has to be: 16 groups of 4 bytes, each for 16 outputs.
//
// One step is 64 bytes of each row times 2 KiB of a block. 32 rows and the block's 32 outputs take four tiles of sums,
// two of rows and two of weights. A row's sums are made in one order, however many rows there are.
#include "linear_task.h"
#include "tiles.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int64_t kWeightStride = 4 * kBlock;                 // bytes from one group of inputs to the next
constexpr int64_t kStepWeights = kTileRows * kWeightStride;   // of a block
constexpr int64_t kSteps = 16;                                // their weights stay in L1 for all rows
constexpr int64_t kRowStride = (kSteps + 1) * kTileRowBytes;  // no power of two: rows lie in cache sets of their own
constexpr int64_t kGroup = 2 * kTileRows;                     // rows at a time
constexpr int64_t kQuantSteps = kQuantGroup / kTileRowBytes;  // of int8 that share a row's scale
constexpr int64_t kAheadBytes = 8192;

// Bytes of a block for so many of a row.
constexpr int64_t packed_bytes(int64_t row_bytes) {
  return (row_bytes + 3) / 4 * kWeightStride;
}

// A part of one block's weights. The last step's lie at `last`: a copy with zeros where the inputs end within it.
struct Weights {
  const char* data;
  int64_t num_steps;
  const char* last;
  const char* next;  // needed next, asked for meanwhile

  const char* at(int64_t step) const { return step + 1 < num_steps ? data + step * kStepWeights : last; }
};

// Up to kGroup rows.
struct Group {
  const char* x;  // [num_rows][kRowStride], from the first input of the weights on
  int64_t num_rows;
  float* sums;  // [num_rows][stride], of the block
  int64_t stride;
  int64_t first_row;    // of the call's
  int64_t first_scale;  // of a row's
  int64_t number, num_groups;

  // Groups share the work, so that memory is kept busy all the time and not by the first one only.
  void prefetch(const Weights& weights, int64_t step) const {
    const int64_t end = (number + 1) * kStepWeights / num_groups;
    const char* from = weights.next + step * kStepWeights;
    for (int64_t i = number * kStepWeights / num_groups; i < end; i += 64) __builtin_prefetch(from + i);
  }
};

// ---- tiles 0 to 3: sums, those of the first rows in 0 and 1; 4 and 5: rows; 6 and 7: weights

void shape_for(int64_t num_rows) {
  TileShapes shapes;
  const int64_t first = num_rows < kTileRows ? num_rows : kTileRows, second = num_rows - first;
  shapes.set(0, first);
  shapes.set(1, first);
  shapes.set(2, second);
  shapes.set(3, second);
  shapes.set(4, first);
  shapes.set(5, second);
  shapes.set(6, kTileRows);
  shapes.set(7, kTileRows);
  TILES_FENCE();
  TILES_SHAPE(&shapes);
}

template <bool kTwo>
VLLM_LITE_INLINE void load_sums(const float* from, int64_t stride) {
  TILE_LOAD(0, from, stride * 4);
  TILE_LOAD(1, from + kTileRows, stride * 4);
  if constexpr (kTwo) {
    TILE_LOAD(2, from + kTileRows * stride, stride * 4);
    TILE_LOAD(3, from + kTileRows * stride + kTileRows, stride * 4);
  }
}

template <bool kTwo, class T>
VLLM_LITE_INLINE void store_sums(T* to, int64_t stride) {
  TILE_STORE(0, to, stride * 4);
  TILE_STORE(1, to + kTileRows, stride * 4);
  if constexpr (kTwo) {
    TILE_STORE(2, to + kTileRows * stride, stride * 4);
    TILE_STORE(3, to + kTileRows * stride + kTileRows, stride * 4);
  }
}

// Trap: a tile that is shaped to no rows must not be touched, not even made zero.
template <bool kTwo>
VLLM_LITE_INLINE void zero_sums() {
  TILE_ZERO(0);
  TILE_ZERO(1);
  if constexpr (kTwo) {
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
}

template <bool kTwo>
VLLM_LITE_INLINE void load_step(const char* x, const char* weights) {
  TILE_LOAD(4, x, kRowStride);
  TILE_LOAD(6, weights, kWeightStride);
  TILE_LOAD(7, weights + kTileRowBytes, kWeightStride);
  if constexpr (kTwo) TILE_LOAD(5, x + kTileRows * kRowStride, kRowStride);
}

// ---- groups of rows times a part of a block

// sums += x times the weights of one step.
template <bool kTwo, class Product>
VLLM_LITE_INLINE void add_step(const Group& group, const Weights& weights, int64_t step) {
  group.prefetch(weights, step);
  load_step<kTwo>(group.x + step * kTileRowBytes, weights.at(step));
  Product::add_first();
  if constexpr (kTwo) Product::add_second();
}

// sums += x times weights, both bfloat16.
struct Bf16Product {
  VLLM_LITE_INLINE void add_first() {
    TILE_DOT_BF16(0, 4, 6);
    TILE_DOT_BF16(1, 4, 7);
  }
  VLLM_LITE_INLINE void add_second() {
    TILE_DOT_BF16(2, 5, 6);
    TILE_DOT_BF16(3, 5, 7);
  }

  template <bool kTwo>
  void add(const Group& group, const Weights& weights) const {
    TILES_FENCE();
    load_sums<kTwo>(group.sums, group.stride);
    for (int64_t step = 0; step < weights.num_steps; ++step) {
      add_step<kTwo, Bf16Product>(group, weights, step);
    }
    store_sums<kTwo>(group.sums, group.stride);
    TILES_FENCE();
  }
};

// The same for integers times bytes, which are added up exactly for each scale of a row: the bits of linear_int8().
struct Int8Product {
  const QuantizedRows& rows;

  VLLM_LITE_INLINE void add_first() {
    TILE_DOT_INT8(0, 4, 6);
    TILE_DOT_INT8(1, 4, 7);
  }
  VLLM_LITE_INLINE void add_second() {
    TILE_DOT_INT8(2, 5, 6);
    TILE_DOT_INT8(3, 5, 7);
  }

  template <bool kTwo>
  void add(const Group& group, const Weights& weights) const {
    alignas(64) int32_t totals[kGroup * kBlock];
    for (int64_t begin = 0; begin < weights.num_steps; begin += kQuantSteps) {
      const int64_t left = weights.num_steps - begin, end = begin + (left < kQuantSteps ? left : kQuantSteps);
      zero_sums<kTwo>();
      for (int64_t step = begin; step < end; ++step) {
        add_step<kTwo, Int8Product>(group, weights, step);
      }
      store_sums<kTwo>(totals, kBlock);
      TILES_FENCE();
      add_scaled(group, totals, group.first_scale + begin / kQuantSteps);
    }
  }

  void add_scaled(const Group& group, const int32_t* totals, int64_t number) const {
    for (int64_t row = 0; row < group.num_rows; ++row, totals += kBlock) {
      const int64_t at = group.first_row + row;
      const __m512 scale = _mm512_set1_ps(rows.scales[at * rows.layout.num_scales + number]);
      const __m512i bias = _mm512_set1_epi32(rows.biases[at * rows.layout.num_groups + number]);
      for (int64_t i = 0; i < kBlock; i += kWidth) {
        float* sum = group.sums + row * group.stride + i;
        const __m512i total = _mm512_add_epi32(_mm512_load_si512(totals + i), bias);
        _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), scale, _mm512_loadu_ps(sum)));
      }
    }
  }
};

template <class Product>
void add_rows(const Product& product, const Weights& weights, const LinearTask& task, const char* x,
              int64_t first_scale, float* sums) {
  const int64_t num_groups = (task.num_rows + kGroup - 1) / kGroup, stride = task.num_blocks * kBlock;
  for (int64_t number = 0, shape = 0; number < num_groups; ++number) {
    const int64_t row = number * kGroup, left = task.num_rows - row, count = left < kGroup ? left : kGroup;
    const Group group = {x + row * kRowStride, count,  sums + row * stride, stride, task.first_row + row,
                         first_scale,          number, num_groups};
    if (count != shape) shape_for(shape = count);
    if (count > kTileRows) {
      product.template add<true>(group, weights);
    } else {
      product.template add<false>(group, weights);
    }
  }
}

// ---- one task

// Bytes of every row from `begin` on, with zeros up to whole steps.
void copy_rows(const char* rows, int64_t stride, int64_t num_rows, int64_t begin, int64_t num_bytes, char* x) {
  const int64_t padded = (num_bytes + kTileRowBytes - 1) / kTileRowBytes * kTileRowBytes;
  for (int64_t row = 0; row < num_rows; ++row, x += kRowStride) {
    std::memcpy(x, rows + row * stride + begin, static_cast<size_t>(num_bytes));
    std::memset(x + num_bytes, 0, static_cast<size_t>(padded - num_bytes));
  }
}

// Rows are `row_bytes` long, `stride` apart; sums [task.num_rows][task.num_blocks * kBlock] are written.
template <class Product>
void run(const Product& product, const LinearCall& call, const LinearTask& task, const char* rows, int64_t stride,
         int64_t row_bytes) {
  constexpr int64_t kLength = kSteps * kTileRowBytes;
  alignas(64) char x[kMaxRows * kRowStride];
  alignas(64) char filled_up[kStepWeights];
  alignas(64) float sums[kMaxRows * kMaxBlocks * kBlock];
  std::memset(sums, 0, static_cast<size_t>(task.num_rows * task.num_blocks * kBlock) * sizeof *sums);
  const int64_t block_bytes = packed_bytes(row_bytes);
  const char* blocks = static_cast<const char*>(call.weight->data) + task.first_block * block_bytes;
  for (int64_t begin = 0; begin < row_bytes; begin += kLength) {
    const int64_t left = row_bytes - begin, count = left < kLength ? left : kLength;
    const int64_t num_steps = (count + kTileRowBytes - 1) / kTileRowBytes, rest = count % kTileRowBytes;
    copy_rows(rows, stride, task.num_rows, begin, count, x);
    for (int64_t block = 0; block < task.num_blocks; ++block) {
      const char* data = blocks + block * block_bytes + packed_bytes(begin);
      Weights weights = {data, num_steps, data + (num_steps - 1) * kStepWeights, data + kAheadBytes};
      if (rest != 0) {
        const int64_t num_bytes = packed_bytes(rest);
        std::memcpy(filled_up, weights.last, static_cast<size_t>(num_bytes));
        std::memset(filled_up + num_bytes, 0, static_cast<size_t>(kStepWeights - num_bytes));
        weights.last = filled_up;
      }
      if (task.num_rows > kGroup) {  // the same inputs of the next block, for which these rows stay where they are
        weights.next = block + 1 < task.num_blocks ? data + block_bytes : blocks + packed_bytes(begin + kLength);
      }
      add_rows(product, weights, task, x, begin / kQuantGroup, sums + block * kBlock);
    }
  }
  TILES_RELEASE();
  if (call.out_type == kFloat32) return write<float>(call, task, sums, task.num_blocks * kBlock);
  if (call.x_type == kFloat16) return write<Float16>(call, task, sums, task.num_blocks * kBlock);
  write<BFloat16>(call, task, sums, task.num_blocks * kBlock);
}

// Rows lie as they are, not in panels: [rows][inputs, filled up to groups of four].
void quantize_as_they_lie(const LinearCall& call, const QuantizeTask& task) {
  const QuantizedRows& rows = *call.quantized;
  const RowLayout& layout = rows.layout;
  const int64_t size = call.x_type == kFloat32 ? 4 : 2;
  for (int64_t row = task.first_row; row < task.first_row + task.num_rows; ++row) {
    const char* x = static_cast<const char*>(call.x) + row * call.x_stride * size;
    for (int64_t number = task.first_scale; number < task.first_scale + task.num_scales; ++number) {
      const int64_t first = number * kQuantGroup, left = call.weight->num_inputs - first;
      const int64_t count = left < kQuantGroup ? left : kQuantGroup, rest = layout.width - first;
      int8_t* to = rows.values + row * layout.width + first;
      float* scale = rows.scales + row * layout.num_scales + number;
      VLLM_LITE_VECTORS::quantize(x + first * size, call.x_type, count, to, scale);
      std::memset(to + count, 0, static_cast<size_t>((rest < kQuantGroup ? rest : kQuantGroup) - count));
      int32_t sum = 0;
      for (int64_t i = 0; i < count; ++i) sum += to[i];
      rows.biases[row * layout.num_groups + number] = -128 * sum;
    }
  }
}

}  // namespace

void linear(const LinearCall& call, const LinearTask& task) {
  const PackedWeight& weight = *call.weight;
  if (call.quantized != nullptr && !is_grouped(weight.type)) {
    const QuantizedRows& rows = *call.quantized;
    const char* first = reinterpret_cast<const char*>(rows.values) + task.first_row * rows.layout.width;
    return run(Int8Product{rows}, call, task, first, rows.layout.width, rows.layout.width);
  }
  if (call.x_type == kBFloat16 && weight.type == kBFloat16) {
    const char* first = static_cast<const char*>(call.x) + task.first_row * call.x_stride * 2;
    return run(Bf16Product{}, call, task, first, call.x_stride * 2, weight.num_inputs * 2);
  }
  VLLM_LITE_VECTORS::linear(call, task);
}

void quantize_rows(const LinearCall& call, const QuantizeTask& task) {
  is_grouped(call.weight->type) ? VLLM_LITE_VECTORS::quantize_rows(call, task) : quantize_as_they_lie(call, task);
}

int64_t multiply_registers(int32_t type, int64_t rounds, float* x) {
  if (type != kBFloat16) return VLLM_LITE_VECTORS::multiply_registers(type, rounds, x);
  alignas(64) char zeros[kGroup * kRowStride] = {};
  shape_for(kGroup);
  load_step<true>(zeros, zeros);
  for (int64_t i = 0; i < rounds; ++i) {
    TILE_DOT_BF16(0, 4, 6);
    TILE_DOT_BF16(1, 4, 7);
    TILE_DOT_BF16(2, 5, 6);
    TILE_DOT_BF16(3, 5, 7);
  }
  store_sums<true>(reinterpret_cast<float*>(zeros), kBlock);
  TILES_RELEASE();
  return rounds * 2 * kGroup * kBlock * kTileRowBytes / 2;
}

}  // namespace VLLM_LITE_ISA
