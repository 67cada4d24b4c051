// Products by AMX, for one task: dense bfloat16 and grouped weights. A block of a packed weight (../linear.h) has the
// layout of tiles: 16 groups of 4 bytes, each for 16 outputs.
//
// A step multiplies 64 bytes of each row with 2 KiB of a block. 32 rows and the block's 32 outputs take four tiles of
// sums, two of rows and two of weights. The sums of a row have one order for any number of rows.
//
// L2 has a task's rows, up to kSpanInputs of each, in the order in which tiles read them. L1 has a part of a block's
// weights, which is multiplied with all of those rows; loads of rows do not evict it. During the products of a group of
// rows, outputs of the previous group are written and the next weights are prefetched, a few lines a step.
#include "long_groups.h"
#include "short_groups.h"
#include "tile_groups.h"
#include "tile_outputs.h"
#include "tile_panel.h"

namespace VLLM_LITE_ISA {
namespace {

// Weights in the layout of tiles, in blocks of `block_bytes`.
struct DenseWeights {
  static constexpr int64_t kMaxSteps = 20;  // maximum steps of a part
  const char* data;
  int64_t block_bytes;
  alignas(64) char last[kStepWeights];  // copy of an incomplete last step

  const char* at(const LinearTask& task, int64_t block, int64_t begin) const {
    return data + (task.first_block + block) * block_bytes + packed_bytes(begin);
  }

  Weights part(const LinearTask& task, const Part& part) {
    const char* from = at(task, part.block, part.begin);
    const int64_t num_steps = (part.num_bytes + kTileRowBytes - 1) / kTileRowBytes,
                  rest = part.num_bytes % kTileRowBytes;
    Weights weights = {from, num_steps, from + (num_steps - 1) * kStepWeights, from + kAheadBytes, kStepWeights};
    if (rest != 0) {
      const size_t filled = static_cast<size_t>(packed_bytes(rest));
      std::memcpy(last, weights.last, filled);
      std::memset(last + filled, 0, sizeof last - filled);
      weights.last = last;
    }
    if (task.num_rows > kGroup) weights.next = at(task, part.next_block, part.next_begin);
    return weights;
  }
};

// sums += x times weights, both bfloat16.
struct Bf16Product : DenseWeights {
  VLLM_LITE_INLINE void add00() { TILE_DOT_BF16(0, 4, 6); }
  VLLM_LITE_INLINE void add01() { TILE_DOT_BF16(1, 4, 7); }
  VLLM_LITE_INLINE void add10() { TILE_DOT_BF16(2, 5, 6); }
  VLLM_LITE_INLINE void add11() { TILE_DOT_BF16(3, 5, 7); }

  explicit Bf16Product(const LinearCall& call)
      : DenseWeights{static_cast<const char*>(call.weight->data), packed_bytes(call.weight->num_inputs * 2), {}} {}

  void shape(int64_t num_rows) const { shape_for(num_rows); }

  template <class Meanwhile>
  void add(const Group& group, const Weights& weights, const Meanwhile& meanwhile) const {
    group.num_rows > kTileRows ? add_rows<true>(group, weights, meanwhile) : add_rows<false>(group, weights, meanwhile);
  }

  template <bool kTwo, class Meanwhile>
  void add_rows(const Group& group, const Weights& weights, const Meanwhile& meanwhile) const {
    const Group::Ahead ahead = group.ahead(weights);
    TILES_FENCE();
    group.are_begun ? load_tile_sums<kTwo>(group.sums) : zero_sums<kTwo>();
    for (int64_t step = 0; step < weights.num_steps; ++step) {
      prefetch(ahead, step);
      meanwhile(step);
      add_step<kTwo, Bf16Product>(group.x, weights, step);
    }
    store_tile_sums<kTwo>(group.sums);
    TILES_FENCE();
  }
};

// ---- one task

// Rows of `width` bytes, `stride` bytes apart.
struct TaskRows {
  const char* data;
  int64_t stride, width;
};

class DenseTask {
 public:
  DenseTask(const LinearCall& call, const LinearTask& task, const TaskRows& rows)
      : call(call), task(task), rows(rows), product(call), streamed(are_streamed(call)) {
    const int64_t panel_bytes = in_place ? 0 : num_groups * span_bytes * kGroup;
    const int64_t places = span_bytes < rows.width ? task.num_blocks : 1;
    panel = tile_memory().get(panel_bytes + num_groups * places * kGroupSums * 4);
    sums = reinterpret_cast<float*>(panel + panel_bytes);
  }

  void run() {
    for (int64_t begin = 0; begin < rows.width; begin += span_bytes) {
      const int64_t left = rows.width - begin, num_bytes = left < span_bytes ? left : span_bytes;
      enter(begin, num_bytes);
      for (int64_t block = 0; block < task.num_blocks; ++block) add_block(block, begin, num_bytes);
    }
    streamed ? stream(waiting, 0, kGroup) : waiting.write(0, kGroup);
    if (streamed) _mm_sfence();
    TILES_RELEASE();
  }

 private:
  static constexpr int64_t kMostBytes = kSpanInputs * 2;

  // Whether copying the rows would take more time than it saves.
  bool are_used_seldom() const {
    return task.num_rows <= kTilesInPlace || (task.num_blocks <= kMaxBlocks && rows.width <= kMostBytes);
  }

  // Bytes of a row that are multiplied in one span: whole steps.
  int64_t most_bytes() const {
    const int64_t all = (rows.width + kTileRowBytes - 1) / kTileRowBytes * kTileRowBytes;
    return in_place || all < kMostBytes ? all : kMostBytes;
  }

  // Prepares the inputs from `begin` on: copies rows, unless they are used in place.
  void enter(int64_t begin, int64_t num_bytes) {
    const char* from = rows.data + begin;
    if (in_place) {
      x = {from, rows.stride, kTileRowBytes, kGroup * rows.stride};
      return;
    }
    const int64_t group_bytes = (num_bytes + kTileRowBytes - 1) / kTileRowBytes * kStepRows;
    x = {panel, kTileRowBytes, kStepRows, group_bytes};
    copy_rows(from, rows.stride, task.num_rows, num_bytes, panel);
  }

  // Multiplies part after part. A single group of rows uses weights once, so it takes all in one part.
  void add_block(int64_t block, int64_t begin, int64_t num_bytes) {
    const int64_t num_steps = (num_bytes + kTileRowBytes - 1) / kTileRowBytes;
    const int64_t num_parts = num_groups == 1 ? 1 : (num_steps + Bf16Product::kMaxSteps - 1) / Bf16Product::kMaxSteps;
    const int64_t steps = (num_steps + num_parts - 1) / num_parts;
    for (int64_t step = 0; step < num_steps; step += steps) {
      const int64_t at = step * kTileRowBytes, left = num_bytes - at;
      Part part = {block, begin + at, left, block, begin + at + steps * kTileRowBytes};
      if (left > steps * kTileRowBytes) {
        part.num_bytes = steps * kTileRowBytes;
      } else if (block + 1 < task.num_blocks) {
        part.next_block = block + 1;
        part.next_begin = begin;
      } else {
        part.next_block = 0;
        part.next_begin = begin + num_bytes;
      }
      add_part(part, x.behind(step * x.step));
    }
  }

  void add_part(const Part& part, Rows from) {
    const Weights weights = product.part(task, part);
    const bool is_last = part.begin + part.num_bytes == rows.width;
    const int64_t first_place = span_bytes < rows.width ? part.block * num_groups : 0;
    for (int64_t number = 0, shape = 0; number < num_groups; ++number, from = from.behind(from.group)) {
      const int64_t row = number * kGroup, left = task.num_rows - row, count = left < kGroup ? left : kGroup;
      float* of_group = sums + (first_place + number) * kGroupSums;
      const Group group = {from, count, of_group, part.begin > 0, task.first_row + row, number, num_groups};
      if (count != shape) product.shape(shape = count);
      add_group(group, weights);
      if (is_last) waiting = {&call, of_group, group.first_row, count, task.first_block + part.block};
    }
  }

  // Multiplies a group, and meanwhile writes the rows that wait for it.
  void add_group(const Group& group, const Weights& weights) {
    const int64_t each = (kGroup + weights.num_steps - 1) / weights.num_steps;
    const auto write = [this, each](int64_t step) {
      if (step * each >= waiting.num_rows) return;
      if (streamed) {
        stream(waiting, step * each, (step + 1) * each);
      } else {
        waiting.write(step * each, (step + 1) * each);
      }
    };
    product.add(group, weights, write);
    waiting = Outputs();
  }

  const LinearCall& call;
  const LinearTask& task;
  const TaskRows rows;
  Bf16Product product;
  const bool streamed;
  const int64_t num_groups = (task.num_rows + kGroup - 1) / kGroup;
  const bool in_place = rows.width % kTileRowBytes == 0 && are_used_seldom();
  const int64_t span_bytes = most_bytes();
  char* panel;
  float* sums;  // [blocks][groups][kGroupSums]; for one block if all inputs are in one span
  Rows x = {};
  Outputs waiting;
};

// Whether tiles are used. Fewer rows of integers are faster by vectors, with the same bits.
bool are_tiled(const LinearCall& call) {
  if (!fits_tiles(*call.weight, call.x_type)) return false;
  const int64_t least = has_short_groups(*call.weight) ? least_short_rows(*call.weight) : kManyRows;
  return call.weight->type == kBFloat16 || (call.quantized != nullptr && call.num_rows >= least);
}

}  // namespace

void linear(const LinearCall& call, const LinearTask& task) {
  if (!are_tiled(call)) return VLLM_LITE_VECTORS::linear(call, task);
  if (call.quantized == nullptr) {
    const char* first = static_cast<const char*>(call.x) + task.first_row * call.x_stride * 2;
    return DenseTask(call, task, {first, call.x_stride * 2, call.weight->num_inputs * 2}).run();
  }
  has_short_groups(*call.weight) ? ShortTask(call, task).run() : LongTask(call, task).run();
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
