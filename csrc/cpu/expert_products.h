// The matrix products of a layer's experts, as tasks: one product for all experts of a window of pairs.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "linear.h"
#include "pack.h"
#include "thread_pool.h"
#include "wait.h"

namespace vllm_lite {

constexpr int64_t kMaxPairs = 2048;  // maximum pairs of a window

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// The pairs of one expert in a window; rows are counted from the window's first pair.
struct Segment {
  int64_t expert, first_row, num_rows;
};

// One product of all segments of a window: out = x W^T, both with a row for each pair.
class ExpertProduct {
 public:
  struct Rows {
    void* data;
    int64_t stride;  // 0: one row for all pairs
    int32_t type;
  };

  // Sets the product up. `integers`: memory for quantized rows.
  void prepare(const PackedWeight* const* weights, const std::vector<Segment>& segments, Rows x, Rows out,
               char* integers) {
    const bool as_integers = quantizes_rows(*weights[segments[0].expert]);
    const RowLayout layout = as_integers ? RowLayout::of(*weights[segments[0].expert]) : RowLayout{};
    const bool shares = x.stride == 0 && are_alike(weights, segments);
    calls_.resize(segments.size());
    quantized_.resize(segments.size());
    int64_t num_blocks = 0;
    for (size_t i = 0; i < segments.size(); ++i) {
      const Segment& segment = segments[i];
      const PackedWeight* weight = weights[segment.expert];
      const auto at = [&](Rows rows) {
        return static_cast<char*>(rows.data) + segment.first_row * rows.stride * element_size(rows.type);
      };
      calls_[i] = {weight, at(x), x.stride, at(out), out.stride, segment.num_rows, x.type, out.type, nullptr};
      if (as_integers) {
        quantized_[i] = QuantizedRows::in(integers, kMaxPairs, layout).from(shares ? 0 : segment.first_row);
        calls_[i].quantized = &quantized_[i];
      }
      num_blocks += ceil_div(weight->num_outputs, kBlock);
    }
    cut(num_blocks);
    if (shares) panels_.resize(1);
    if (!as_integers) panels_.clear();
  }

  void quantize() const {
    parallel_for(static_cast<int64_t>(panels_.size()),
                 [&](int64_t number) { quantize(panels_[static_cast<size_t>(number)]); });
  }

  // Quantizes the rows of one segment on this thread.
  void quantize(size_t segment) const {
    const auto is_before = [](const Task& panel, size_t call) { return panel.call < call; };
    auto panel = std::lower_bound(panels_.begin(), panels_.end(), segment, is_before);
    for (; panel != panels_.end() && panel->call == segment; ++panel) quantize(*panel);
  }

  int64_t num_tasks() const { return static_cast<int64_t>(tasks_.size()); }
  size_t segment_of(int64_t task) const { return tasks_[static_cast<size_t>(task)].call; }
  int64_t num_tasks_of(size_t segment) const { return counts_[segment]; }

  void multiply(int64_t number) const {
    const Task& task = tasks_[static_cast<size_t>(number)];
    VLLM_LITE_DISPATCH_TILES(linear)(calls_[task.call], task.part);
  }

  // Prefetches the first weights of a task.
  void fetch(int64_t number) const {
    constexpr int64_t kBytes = 4096;
    const Task& task = tasks_[static_cast<size_t>(number)];
    const PackedWeight& weight = *calls_[task.call].weight;
    const char* from = static_cast<const char*>(weight.data) + task.part.first_block * block_bytes(weight);
    for (int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(from + i, 0, 2);
  }

  void run() const {
    quantize();
    parallel_for(num_tasks(), [&](int64_t number) { multiply(number); });
  }

  // Bytes of `integers` for a window.
  static int64_t integer_bytes(const PackedWeight& weight) {
    return quantizes_rows(weight) ? kMaxPairs * RowLayout::of(weight).row_bytes() : 0;
  }

 private:
  static constexpr int64_t kMinTask = 64 << 10;  // weights times rows; about 5 us

  struct Task {
    size_t call;
    LinearTask part;
  };

  // Whether a row is quantized to the same integers for all these weights.
  static bool are_alike(const PackedWeight* const* weights, const std::vector<Segment>& segments) {
    const PackedWeight& first = *weights[segments[0].expert];
    return std::all_of(segments.begin(), segments.end(), [&](const Segment& segment) {
      const PackedWeight& weight = *weights[segment.expert];
      return weight.order == first.order && weight.offset == first.offset;
    });
  }

  void quantize(const Task& panel) const {
    const LinearCall& call = calls_[panel.call];
    const LinearTask& part = panel.part;
    VLLM_LITE_DISPATCH_TILES(quantize_rows)(
        call, {part.first_row, part.num_rows, 0, call.quantized->layout.num_groups, false});
  }

  // Cuts the product into tasks of about one size, several for each thread. Consecutive tasks have the same weights and
  // other rows, so the weights are in the cache. Blocks are interleaved so that threads of equal speed get consecutive
  // blocks of an expert each, and use what they prefetched.
  void cut(int64_t total_blocks) {
    tasks_.clear();
    panels_.clear();
    counts_.assign(calls_.size(), 0);
    const int64_t threads = num_threads();
    for (size_t i = 0; i < calls_.size(); ++i) {
      const LinearCall& call = calls_[i];
      const int64_t num_rows = call.num_rows, num_blocks = ceil_div(call.weight->num_outputs, kBlock);
      const WideTiles wide = wide_tiles(call);
      const int64_t unit = wide.most_rows > 0 ? kTileGroup : 1;
      const int64_t row_parts = ceil_div(num_rows, wide.most_rows > 0 ? wide.most_rows : kMaxRows);
      const int64_t rows = ceil_div(num_rows, row_parts);
      const int64_t least = ceil_div(kMinTask, kBlock * call.weight->num_inputs * rows);
      const int64_t most = wide.most_rows > 0 ? wide.most_blocks : kMaxBlocks;
      const int64_t wanted = (wide.most_rows > 0 ? 4 : 8) * threads;
      int64_t width = threads == 1 ? num_blocks : total_blocks / wanted;
      width = width < least ? least : width;
      width = width < 1 ? 1 : width > most ? most : width;
      const int64_t column_parts = ceil_div(num_blocks, width), each = ceil_div(column_parts, threads);
      for (int64_t turn = 0; turn < each * threads; ++turn) {
        const int64_t column = turn % threads * each + turn / threads;
        if (column >= column_parts) continue;
        const int64_t first = column * num_blocks / column_parts, end = (column + 1) * num_blocks / column_parts;
        for (int64_t row = 0; row < row_parts; ++row) {
          const auto start = [&](int64_t part) {
            return std::min(ceil_div(part * num_rows, row_parts * unit) * unit, num_rows);
          };
          const int64_t first_row = start(row), end_row = start(row + 1);
          const Task task = {i, {first_row, end_row - first_row, first, end - first}};
          tasks_.push_back(task);
          ++counts_[i];
          if (column == 0) panels_.push_back(task);
        }
      }
    }
  }

  std::vector<LinearCall> calls_;
  std::vector<QuantizedRows> quantized_;
  std::vector<Task> tasks_, panels_;
  std::vector<int64_t> counts_;  // number of each segment's tasks
};

// Counts the tasks of each segment that are left before it is ready.
class Countdowns {
 public:
  void begin(const ExpertProduct& product, size_t num_segments) {
    if (num_segments > size_) left_.reset(new std::atomic<int64_t>[size_ = num_segments]);
    for (size_t i = 0; i < num_segments; ++i) left_[i].store(product.num_tasks_of(i), std::memory_order_relaxed);
  }

  // Called after a task. True for the last task of a segment; its thread must then call `ready`.
  bool done(size_t segment) { return left_[segment].fetch_sub(1, std::memory_order_acq_rel) == 1; }
  void ready(size_t segment) { left_[segment].store(kReady, std::memory_order_release); }

  void wait(size_t segment) const {
    constexpr int kSpins = 4096;  // then yield, because a preempted thread needs a processor
    for (int i = 0; left_[segment].load(std::memory_order_acquire) != kReady; ++i) {
      i < kSpins ? pause_cpu() : static_cast<void>(sched_yield());
    }
  }

 private:
  static constexpr int64_t kReady = -1;
  std::unique_ptr<std::atomic<int64_t>[]> left_;
  size_t size_ = 0;
};

}  // namespace vllm_lite
