// Products by AMX, for one task: dense bfloat16 and grouped weights. See ../linear.h for their layout, which is
// what a tile of weights has to be: 16 groups of 4 bytes, each for 16 outputs.
//
// One step is 64 bytes of each row times 2 KiB of a block. 32 rows and the block's 32 outputs take four tiles of sums,
// two of rows and two of weights. A row's sums are made in one order, however many rows there are. Rows are read where
// they lie: what a tile takes of one is a line of the cache.
#include "grouped_tiles.h"
#include "tile_groups.h"

namespace VLLM_LITE_ISA {
namespace {

// Weights that lie as tiles take them: blocks of so many bytes.
struct DenseWeights {
  const char* data;
  int64_t block_bytes;
  alignas(64) char last[kStepWeights];  // of inputs that end within the last step

  static int64_t part_bytes(int64_t num_rows, int64_t row_bytes) {
    return num_rows <= kGroup ? row_bytes : kSteps * kTileRowBytes;  // what is used once need not stay anywhere
  }

  Weights part(const LinearTask& task, int64_t number, int64_t begin, int64_t num_bytes) {
    const char* first = data + task.first_block * block_bytes;
    const char* from = first + number * block_bytes + packed_bytes(begin);
    const int64_t num_steps = (num_bytes + kTileRowBytes - 1) / kTileRowBytes, rest = num_bytes % kTileRowBytes;
    Weights weights = {from, num_steps, from + (num_steps - 1) * kStepWeights, from + kAheadBytes, kStepWeights};
    if (rest != 0) {
      const size_t filled = static_cast<size_t>(packed_bytes(rest));
      std::memcpy(last, weights.last, filled);
      std::memset(last + filled, 0, sizeof last - filled);
      weights.last = last;
    }
    if (task.num_rows > kGroup) {  // the same inputs of the next block, for which these rows stay where they are
      weights.next = number + 1 < task.num_blocks ? from + block_bytes : first + packed_bytes(begin + num_bytes);
    }
    return weights;
  }
};

// sums += x times weights, both bfloat16.
struct Bf16Product : DenseWeights {
  static constexpr bool kRowsAreFull = false;
  VLLM_LITE_INLINE void add00() { TILE_DOT_BF16(0, 4, 6); }
  VLLM_LITE_INLINE void add01() { TILE_DOT_BF16(1, 4, 7); }
  VLLM_LITE_INLINE void add10() { TILE_DOT_BF16(2, 5, 6); }
  VLLM_LITE_INLINE void add11() { TILE_DOT_BF16(3, 5, 7); }

  explicit Bf16Product(const LinearCall& call)
      : DenseWeights{static_cast<const char*>(call.weight->data), packed_bytes(call.weight->num_inputs * 2), {}} {}

  template <bool kTwo>
  void add(const Group& group, const Weights& weights) const {
    const Group::Ahead ahead = group.ahead(weights);
    TILES_FENCE();
    group.are_begun ? load_sums<kTwo>(group.sums, kBlock) : zero_sums<kTwo>();
    for (int64_t step = 0; step < weights.num_steps; ++step) {
      ahead.prefetch(step);
      add_step<kTwo, Bf16Product>(group.x, weights, step);
    }
    store_sums<kTwo>(group.sums, kBlock);
    TILES_FENCE();
  }
};

// ---- one task

// A task's rows and sums, while one part of its inputs follows the other.
template <class Product>
struct Task {
  const Product& product;
  const LinearCall& call;
  const LinearTask& task;
  float* sums;             // [blocks][groups][kGroupSums], or of one group where all inputs are one part
  bool is_first, is_last;  // of the parts

  void add_block(const Weights& weights, const Rows& x, int64_t block) const {
    const int64_t num_groups = (task.num_rows + kGroup - 1) / kGroup;
    for (int64_t number = 0, shape = 0; number < num_groups; ++number) {
      const int64_t row = number * kGroup, left = task.num_rows - row, count = left < kGroup ? left : kGroup;
      const int64_t place = is_first && is_last ? 0 : block * num_groups + number;
      const Group group = {x.from(row), count,     sums + place * kGroupSums, !is_first, task.first_row + row,
                           number,      num_groups};
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

// The last bytes of rows that end within a step, filled up with zeros.
void fill_up(const char* from, int64_t stride, int64_t num_rows, int64_t num_bytes, char* to) {
  for (int64_t row = 0; row < num_rows; ++row, from += stride, to += kTileRowBytes) {
    std::memcpy(to, from, static_cast<size_t>(num_bytes));
    std::memset(to + num_bytes, 0, static_cast<size_t>(kTileRowBytes - num_bytes));
  }
}

// Rows are `row_bytes` long, `stride` apart. Those of integers are as long as their first plane is, or what the weights
// have of it.
template <class Product>
void run(const LinearCall& call, const LinearTask& task, const char* rows, int64_t stride, int64_t row_bytes) {
  Product product(call);
  alignas(64) char filled_up[kMaxTileRows * kTileRowBytes];
  alignas(64) float sums[kMaxTileRows * kMaxBlocks * kBlock];
  const int64_t length = Product::part_bytes(task.num_rows, row_bytes);
  for (int64_t begin = 0; begin < row_bytes; begin += length) {
    const int64_t left = row_bytes - begin, count = left < length ? left : length, rest = count % kTileRowBytes;
    const char* last = rows + begin + (count - 1) / kTileRowBytes * kTileRowBytes;
    Rows x = {rows + begin, stride, last, stride};
    if (rest != 0 && !Product::kRowsAreFull) {
      fill_up(last, stride, task.num_rows, rest, filled_up);
      x.last = filled_up;
      x.last_stride = kTileRowBytes;
    }
    for (int64_t block = 0; block < task.num_blocks; ++block) {
      const Weights weights = product.part(task, block, begin, count);
      Task<Product>{product, call, task, sums, begin == 0, left <= length}.add_block(weights, x, block);
    }
  }
  TILES_RELEASE();
}

// Fewer rows of integers are done sooner by vectors, with the same bits.
bool are_tiled(const LinearCall& call) {
  if (!fits_tiles(*call.weight, call.x_type)) return false;
  return call.weight->type == kBFloat16 || (call.quantized != nullptr && call.num_rows >= kManyRows);
}

}  // namespace

void linear(const LinearCall& call, const LinearTask& task) {
  if (!are_tiled(call)) return VLLM_LITE_VECTORS::linear(call, task);
  if (call.quantized == nullptr) {
    const char* first = static_cast<const char*>(call.x) + task.first_row * call.x_stride * 2;
    return run<Bf16Product>(call, task, first, call.x_stride * 2, call.weight->num_inputs * 2);
  }
  const RowLayout& layout = call.quantized->layout;
  const char* first = reinterpret_cast<const char*>(call.quantized->values) + task.first_row * layout.value_bytes();
  run<GroupedProduct>(call, task, first, layout.value_bytes(), layout.width());
}

void quantize_rows(const LinearCall& call, const QuantizeTask& task) {
  QuantizeTask own = task;
  own.for_tiles = are_tiled(call);
  VLLM_LITE_VECTORS::quantize_rows(call, own);
}

int64_t multiply_registers(int32_t type, int64_t rounds, float* x) {
  if (type != kBFloat16 && type != kInt8) return VLLM_LITE_VECTORS::multiply_registers(type, rounds, x);
  alignas(64) char zeros[kGroup * kBlock * 4] = {};
  shape_for(kGroup);
  load_step<true>(zeros, kTileRowBytes, zeros);
  for (int64_t i = 0; type == kBFloat16 && i < rounds; ++i) {
    TILE_DOT_BF16(0, 4, 6);
    TILE_DOT_BF16(1, 4, 7);
    TILE_DOT_BF16(2, 5, 6);
    TILE_DOT_BF16(3, 5, 7);
  }
  for (int64_t i = 0; type == kInt8 && i < rounds; ++i) {
    TILE_DOT_INT8(0, 4, 6);
    TILE_DOT_INT8(1, 4, 7);
    TILE_DOT_INT8(2, 5, 6);
    TILE_DOT_INT8(3, 5, 7);
  }
  store_sums<true>(reinterpret_cast<float*>(zeros), kBlock);
  TILES_RELEASE();
  return rounds * 2 * kGroup * kBlock * kTileRowBytes / (type == kInt8 ? 1 : 2);
}

}  // namespace VLLM_LITE_ISA
