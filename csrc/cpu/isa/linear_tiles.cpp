// Products by AMX: dense bfloat16 and int8, for one task. See ../linear.h for the layout of weights, which is what a
// tile of weights has to be: 16 groups of 4 bytes, each for 16 outputs.
//
// One step is 64 bytes of each row times 2 KiB of a block. 32 rows and the block's 32 outputs take four tiles of sums,
// two of rows and two of weights. A row's sums are made in one order, however many rows there are. Rows are read where
// they lie: what a tile takes of one is a line of the cache.
#include "linear_task.h"
#include "tiles.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int64_t kWeightStride = 4 * kBlock;                // bytes from one group of inputs to the next
constexpr int64_t kStepWeights = kTileRows * kWeightStride;  // of a block
constexpr int64_t kSteps = 16;                               // their weights stay in L1 for all rows
constexpr int64_t kGroup = 2 * kTileRows;                    // rows at a time
constexpr int64_t kGroupSums = kGroup * kBlock;
constexpr int64_t kQuantSteps = kQuantGroup / kTileRowBytes;  // of int8 that share a row's scale
constexpr int64_t kAheadBytes = 4096;

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

// Rows of x, from the first input of the weights on. What belongs to the last step may lie elsewhere, as weights' do.
struct Rows {
  const char* data;
  int64_t stride;
  const char* last;
  int64_t last_stride;

  Rows from(int64_t row) const { return {data + row * stride, stride, last + row * last_stride, last_stride}; }
};

// Up to kGroup rows.
struct Group {
  Rows x;
  int64_t num_rows;
  float* sums;                     // [kGroup][kBlock]
  bool are_begun;                  // whether sums are those of the inputs before, or anything
  int64_t first_row;               // of the call's
  int64_t first_scale;             // of a row's
  int64_t ahead_begin, ahead_end;  // bytes of a step's weights that this group asks for

  // Groups share the work, so that memory is kept busy all the time and not by the first one only: into L2 then, as L1
  // is full of what is used now.
  void prefetch(const Weights& weights, int64_t step) const {
    const char* from = weights.next + step * kStepWeights;
    if (ahead_end - ahead_begin == kStepWeights) {
      for (int64_t i = 0; i < kStepWeights; i += 64) __builtin_prefetch(from + i);
    } else {
      for (int64_t i = ahead_begin; i < ahead_end; i += 64) __builtin_prefetch(from + i, 0, 2);
    }
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

// Sums lie [kGroup][kBlock], 4 bytes each.
template <bool kTwo>
VLLM_LITE_INLINE void load_sums(const float* from) {
  TILE_LOAD(0, from, kBlock * 4);
  TILE_LOAD(1, from + kTileRows, kBlock * 4);
  if constexpr (kTwo) {
    TILE_LOAD(2, from + kTileRows * kBlock, kBlock * 4);
    TILE_LOAD(3, from + kTileRows * kBlock + kTileRows, kBlock * 4);
  }
}

template <bool kTwo, class T>
VLLM_LITE_INLINE void store_sums(T* to) {
  TILE_STORE(0, to, kBlock * 4);
  TILE_STORE(1, to + kTileRows, kBlock * 4);
  if constexpr (kTwo) {
    TILE_STORE(2, to + kTileRows * kBlock, kBlock * 4);
    TILE_STORE(3, to + kTileRows * kBlock + kTileRows, kBlock * 4);
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
VLLM_LITE_INLINE void load_step(const char* x, int64_t stride, const char* weights) {
  TILE_LOAD(4, x, stride);
  TILE_LOAD(6, weights, kWeightStride);
  TILE_LOAD(7, weights + kTileRowBytes, kWeightStride);
  if constexpr (kTwo) TILE_LOAD(5, x + kTileRows * stride, stride);
}

// ---- groups of rows times a part of a block

// sums += x times the weights of one step.
template <bool kTwo, class Product>
VLLM_LITE_INLINE void add_step(const Group& group, const Weights& weights, int64_t step) {
  group.prefetch(weights, step);
  const bool is_last = step + 1 == weights.num_steps;
  const char* x = is_last ? group.x.last : group.x.data + step * kTileRowBytes;
  const int64_t stride = is_last ? group.x.last_stride : group.x.stride;
  const char* from = weights.at(step);
  TILE_LOAD(4, x, stride);
  TILE_LOAD(6, from, kWeightStride);
  Product::add00();
  TILE_LOAD(7, from + kTileRowBytes, kWeightStride);
  Product::add01();
  if constexpr (kTwo) {
    TILE_LOAD(5, x + kTileRows * stride, stride);
    Product::add10();
    Product::add11();
  }
}

// sums += x times weights, both bfloat16.
struct Bf16Product {
  VLLM_LITE_INLINE void add00() { TILE_DOT_BF16(0, 4, 6); }
  VLLM_LITE_INLINE void add01() { TILE_DOT_BF16(1, 4, 7); }
  VLLM_LITE_INLINE void add10() { TILE_DOT_BF16(2, 5, 6); }
  VLLM_LITE_INLINE void add11() { TILE_DOT_BF16(3, 5, 7); }

  template <bool kTwo>
  void add(const Group& group, const Weights& weights) const {
    TILES_FENCE();
    group.are_begun ? load_sums<kTwo>(group.sums) : zero_sums<kTwo>();
    for (int64_t step = 0; step < weights.num_steps; ++step) {
      add_step<kTwo, Bf16Product>(group, weights, step);
    }
    store_sums<kTwo>(group.sums);
    TILES_FENCE();
  }
};

// The same for integers times bytes, which are added up exactly for each scale of a row: the bits of linear_int8().
struct Int8Product {
  const QuantizedRows& rows;

  VLLM_LITE_INLINE void add00() { TILE_DOT_INT8(0, 4, 6); }
  VLLM_LITE_INLINE void add01() { TILE_DOT_INT8(1, 4, 7); }
  VLLM_LITE_INLINE void add10() { TILE_DOT_INT8(2, 5, 6); }
  VLLM_LITE_INLINE void add11() { TILE_DOT_INT8(3, 5, 7); }

  template <bool kTwo>
  void add(const Group& group, const Weights& weights) const {
    alignas(64) int32_t totals[kGroup * kBlock];
    for (int64_t begin = 0; begin < weights.num_steps; begin += kQuantSteps) {
      const int64_t left = weights.num_steps - begin, end = begin + (left < kQuantSteps ? left : kQuantSteps);
      zero_sums<kTwo>();
      for (int64_t step = begin; step < end; ++step) {
        add_step<kTwo, Int8Product>(group, weights, step);
      }
      store_sums<kTwo>(totals);
      TILES_FENCE();
      if (group.are_begun || begin > 0) {
        add_scaled<true>(group, totals, group.first_scale + begin / kQuantSteps);
      } else {
        add_scaled<false>(group, totals, group.first_scale);
      }
    }
  }

  template <bool kAdd>
  void add_scaled(const Group& group, const int32_t* totals, int64_t number) const {
    for (int64_t row = 0; row < group.num_rows; ++row, totals += kBlock) {
      const int64_t at = group.first_row + row;
      const __m512 scale = _mm512_set1_ps(rows.scales[at * rows.layout.num_scales + number]);
      const __m512i bias = _mm512_set1_epi32(rows.biases[at * rows.layout.num_groups + number]);
      for (int64_t i = 0; i < kBlock; i += kWidth) {
        float* sum = group.sums + row * kBlock + i;
        const __m512 total = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_load_si512(totals + i), bias));
        const __m512 before = kAdd ? _mm512_load_ps(sum) : _mm512_setzero_ps();
        _mm512_store_ps(sum, _mm512_fmadd_ps(total, scale, before));
      }
    }
  }
};

// ---- one task

// Where a group's sums go: outputs of one block.
struct Outputs {
  const LinearCall& call;
  int64_t first_row, num_rows;  // of the call's
  int64_t block;

  void* at(int64_t row, int64_t size) const {
    return static_cast<char*>(call.out) + ((first_row + row) * call.out_stride + block * kBlock) * size;
  }

  // Their lines, one of each row, are asked for while the sums are made: they lie far from each other.
  void prefetch() const {
    const int64_t size = call.out_type == kFloat32 ? 4 : 2;
    for (int64_t row = 0; row < num_rows; ++row) __builtin_prefetch(at(row, size), 1, 3);
  }

  void write(const float* sums) const {
    if (call.weight->num_outputs - block * kBlock < kBlock) {
      return call.out_type == kFloat32 ? write_part<float>(sums) : write_part_as_x(sums);
    }
    if (call.out_type == kFloat32) return write_all<float>(sums);
    if (call.x_type == kFloat16) return write_all<Float16>(sums);
    write_all<BFloat16>(sums);
  }

 private:
  template <class Out>
  void write_part(const float* sums) const {
    VLLM_LITE_ISA::write<Out>(call, {first_row, num_rows, block, 1}, sums, kBlock);
  }
  void write_part_as_x(const float* sums) const {
    call.x_type == kFloat16 ? write_part<Float16>(sums) : write_part<BFloat16>(sums);
  }

  template <class Out>
  void write_all(const float* sums) const {
    const float* biases = call.weight->bias;
    Vec bias[2] = {splat(-0.0f), splat(-0.0f)};  // which changes nothing, not even -0
    if (biases != nullptr) {
      bias[0] = load(biases + block * kBlock);
      bias[1] = load(biases + block * kBlock + kWidth);
    }
    if (call.weight->scales == nullptr) return write_rows<Out, false>(sums, bias);
    write_rows<Out, true>(sums, bias);
  }

  template <class Out, bool kScaled>
  void write_rows(const float* sums, const Vec (&bias)[2]) const {
    Vec scale[2];
    for (int v = 0; kScaled && v < 2; ++v) scale[v] = load(call.weight->scales + block * kBlock + v * kWidth);
    for (int64_t row = 0; row < num_rows; ++row, sums += kBlock) {
      Out* out = static_cast<Out*>(at(row, sizeof(Out)));
      for (int v = 0; v < 2; ++v) {
        const Vec sum = load(sums + v * kWidth);
        store(out + v * kWidth, (kScaled ? sum * scale[v] : sum) + bias[v]);
      }
    }
  }
};

// A task's rows and sums, while one part of its inputs follows the other.
template <class Product>
struct Task {
  const Product& product;
  const LinearCall& call;
  const LinearTask& task;
  float* sums;             // [blocks][groups][kGroupSums], or of one group where all inputs are one part
  bool is_first, is_last;  // of the parts
  int64_t first_scale;

  void add_block(const Weights& weights, const Rows& x, int64_t block) const {
    const int64_t num_groups = (task.num_rows + kGroup - 1) / kGroup;
    for (int64_t number = 0, shape = 0; number < num_groups; ++number) {
      const int64_t row = number * kGroup, left = task.num_rows - row, count = left < kGroup ? left : kGroup;
      const int64_t place = is_first && is_last ? 0 : block * num_groups + number;
      const Group group = {x.from(row),
                           count,
                           sums + place * kGroupSums,
                           !is_first,
                           task.first_row + row,
                           first_scale,
                           number * kStepWeights / num_groups,
                           (number + 1) * kStepWeights / num_groups};
      const Outputs outputs = {call, group.first_row, count, task.first_block + block};
      if (is_last) outputs.prefetch();
      if (count != shape) shape_for(shape = count);
      if (count > kTileRows) {
        product.template add<true>(group, weights);
      } else {
        product.template add<false>(group, weights);
      }
      if (is_last) outputs.write(group.sums);
    }
  }
};

// The last step of inputs that end within it, filled up with zeros.
struct FilledUp {
  alignas(64) char rows[kMaxTileRows * kTileRowBytes];
  alignas(64) char weights[kStepWeights];

  void set_rows(const char* from, int64_t stride, int64_t num_rows, int64_t num_bytes) {
    for (int64_t row = 0; row < num_rows; ++row) {
      char* to = rows + row * kTileRowBytes;
      std::memcpy(to, from + row * stride, static_cast<size_t>(num_bytes));
      std::memset(to + num_bytes, 0, static_cast<size_t>(kTileRowBytes - num_bytes));
    }
  }
  void set_weights(const char* from, int64_t num_bytes) {
    std::memcpy(weights, from, static_cast<size_t>(num_bytes));
    std::memset(weights + num_bytes, 0, static_cast<size_t>(kStepWeights - num_bytes));
  }
};

// Rows are `row_bytes` long, `stride` apart.
template <class Product>
void run(const Product& product, const LinearCall& call, const LinearTask& task, const char* rows, int64_t stride,
         int64_t row_bytes) {
  // Weights that are used once need not stay anywhere.
  const int64_t length = task.num_rows <= kGroup ? row_bytes : kSteps * kTileRowBytes;
  FilledUp filled_up;
  alignas(64) float sums[kMaxTileRows * kMaxBlocks * kBlock];
  const int64_t block_bytes = packed_bytes(row_bytes);
  const char* blocks = static_cast<const char*>(call.weight->data) + task.first_block * block_bytes;
  for (int64_t begin = 0; begin < row_bytes; begin += length) {
    const int64_t left = row_bytes - begin, count = left < length ? left : length;
    const int64_t num_steps = (count + kTileRowBytes - 1) / kTileRowBytes, rest = count % kTileRowBytes;
    const char* last = rows + begin + (num_steps - 1) * kTileRowBytes;
    Rows x = {rows + begin, stride, last, stride};
    if (rest != 0) {
      filled_up.set_rows(last, stride, task.num_rows, rest);
      x.last = filled_up.rows;
      x.last_stride = kTileRowBytes;
    }
    const Task<Product> part = {product, call, task, sums, begin == 0, left <= length, begin / kQuantGroup};
    for (int64_t block = 0; block < task.num_blocks; ++block) {
      const char* data = blocks + block * block_bytes + packed_bytes(begin);
      Weights weights = {data, num_steps, data + (num_steps - 1) * kStepWeights, data + kAheadBytes};
      if (rest != 0) {
        filled_up.set_weights(weights.last, packed_bytes(rest));
        weights.last = filled_up.weights;
      }
      if (task.num_rows > kGroup) {  // the same inputs of the next block, for which these rows stay where they are
        weights.next = block + 1 < task.num_blocks ? data + block_bytes : blocks + packed_bytes(begin + length);
      }
      part.add_block(weights, x, block);
    }
  }
  TILES_RELEASE();
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

// Fewer rows of integers are done sooner by vectors, with the same bits.
bool are_tiled(const LinearCall& call) {
  if (!fits_tiles(*call.weight, call.x_type)) return false;
  return call.weight->type == kBFloat16 || (call.quantized != nullptr && call.num_rows >= kManyRows);
}

}  // namespace

void linear(const LinearCall& call, const LinearTask& task) {
  if (!are_tiled(call)) return VLLM_LITE_VECTORS::linear(call, task);
  if (call.quantized != nullptr) {
    const QuantizedRows& rows = *call.quantized;
    const char* first = reinterpret_cast<const char*>(rows.values) + task.first_row * rows.layout.width;
    return run(Int8Product{rows}, call, task, first, rows.layout.width, rows.layout.width);
  }
  const char* first = static_cast<const char*>(call.x) + task.first_row * call.x_stride * 2;
  run(Bf16Product{}, call, task, first, call.x_stride * 2, call.weight->num_inputs * 2);
}

void quantize_rows(const LinearCall& call, const QuantizeTask& task) {
  are_tiled(call) ? quantize_as_they_lie(call, task) : VLLM_LITE_VECTORS::quantize_rows(call, task);
}

int64_t multiply_registers(int32_t type, int64_t rounds, float* x) {
  if (type != kBFloat16) return VLLM_LITE_VECTORS::multiply_registers(type, rounds, x);
  alignas(64) char zeros[kGroup * kBlock * 4] = {};
  shape_for(kGroup);
  load_step<true>(zeros, kTileRowBytes, zeros);
  for (int64_t i = 0; i < rounds; ++i) {
    TILE_DOT_BF16(0, 4, 6);
    TILE_DOT_BF16(1, 4, 7);
    TILE_DOT_BF16(2, 5, 6);
    TILE_DOT_BF16(3, 5, 7);
  }
  store_sums<true>(reinterpret_cast<float*>(zeros));
  TILES_RELEASE();
  return rounds * 2 * kGroup * kBlock * kTileRowBytes / 2;
}

}  // namespace VLLM_LITE_ISA
