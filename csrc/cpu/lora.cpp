// Cuts low-rank adapters into tasks; the arithmetic is in isa/lora.cpp, the layout in lora.h.
#include "lora.h"

#include <vector>

#include "common.h"
#include "pack.h"
#include "program.h"
#include "thread_pool.h"

namespace {

constexpr int64_t kTaskRows = 32;        // of one adapter, which one task computes
constexpr int64_t kMinTask = 64 << 10;   // weights times rows; about 5 us
constexpr int64_t kMinShared = 8 << 15;  // less is done sooner by the calling thread alone
constexpr int64_t kCallsPerThread = 2;   // from so many on no call is cut

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

struct Task {
  size_t call;
  int64_t first, last;
};

int64_t num_blocks(const LoraLayer& layer) {
  int64_t total = 0;
  for (int32_t i = 0; i < layer.num_projections; ++i) total += ceil_div(layer.sizes[i], kLoraBlock);
  return total;
}

// Everything of a call; kept by a thread from one call to the next, as memory is only ever added.
class Adapters {
 public:
  // `call` is an example of those for each adapter. starts [num_slots + 1]: where each slot's rows begin in `rows`.
  void run(const LoraCall& call, const int32_t* starts, int64_t num_slots) {
    group(call, starts, num_slots);
    if (calls_.empty()) return;
    const auto shrink = VLLM_LITE_DISPATCH(lora_shrink);
    const auto expand = VLLM_LITE_DISPATCH(lora_expand);
    const int64_t inputs = call.layer->num_inputs, blocks = num_blocks(*call.layer);
    const auto num_calls = static_cast<int64_t>(calls_.size()), num_threads = int64_t{vllm_lite::num_threads()};
    if (num_threads == 1 || num_calls >= kCallsPerThread * num_threads) {  // each by one thread, which has its hidden
      vllm_lite::parallel_for(num_calls, [&](int64_t number) {
        const LoraCall& own = calls_[static_cast<size_t>(number)];
        shrink(own, 0, lora_rank_blocks(*own.slot));
        expand(own, 0, blocks);
      });
      return;
    }
    each_task([](const LoraCall& each) { return lora_rank_blocks(*each.slot); },
              [&](const LoraCall&) { return kLoraRanks * inputs; }, shrink);
    each_task([&](const LoraCall&) { return blocks; },
              [](const LoraCall& each) { return kLoraBlock * each.slot->num_ranks; }, expand);
  }

 private:
  void group(const LoraCall& call, const int32_t* starts, int64_t num_slots) {
    calls_.clear();
    int64_t num_hidden = 0;
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      const LoraSlot* adapter = call.layer->slots + slot;
      if (adapter->num_ranks == 0) continue;
      for (int64_t row = starts[slot]; row < starts[slot + 1]; row += kTaskRows) {
        const int64_t left = starts[slot + 1] - row;
        LoraCall own = call;
        own.slot = adapter;
        own.rows = call.rows + row;
        own.num_rows = left < kTaskRows ? left : kTaskRows;
        calls_.push_back(own);
        num_hidden += own.num_rows * lora_hidden(*adapter);
      }
    }
    float* hidden = reinterpret_cast<float*>(scratch_.get(num_hidden * 4));
    for (LoraCall& own : calls_) {
      own.hidden = hidden;
      hidden += own.num_rows * lora_hidden(*own.slot);
    }
  }

  // kernel(call, first, last) over all units of all calls: `count`(call) of them, each of `cost`(call) weights.
  template <class Count, class Cost, class Kernel>
  void each_task(const Count& count, const Cost& cost, const Kernel& kernel) {
    int64_t total = 0;
    for (const LoraCall& call : calls_) total += count(call) * cost(call) * call.num_rows;
    const int64_t num_threads = vllm_lite::num_threads();
    if (num_threads == 1 || total < kMinShared) {
      for (const LoraCall& call : calls_) kernel(call, 0, count(call));
      return;
    }
    int64_t size = ceil_div(total, 4 * num_threads);
    size = size < kMinTask ? kMinTask : size;
    tasks_.clear();
    for (size_t i = 0; i < calls_.size(); ++i) {
      const LoraCall& call = calls_[i];
      const int64_t units = count(call), wanted = ceil_div(units * cost(call) * call.num_rows, size);
      const int64_t parts = wanted < units ? wanted : units;
      for (int64_t part = 0; part < parts; ++part) {
        tasks_.push_back({i, part * units / parts, (part + 1) * units / parts});
      }
    }
    vllm_lite::parallel_for(static_cast<int64_t>(tasks_.size()), [&](int64_t number) {
      const Task& task = tasks_[static_cast<size_t>(number)];
      kernel(calls_[task.call], task.first, task.last);
    });
  }

  std::vector<LoraCall> calls_;
  std::vector<Task> tasks_;
  Scratch scratch_;
};

}  // namespace

// out += (x A^T) B^T, for the rows of each slot's adapter. starts [num_slots + 1] says where in `rows` those of each
// begin; x_type is a DType up to kFloat16, which the adapters are of, too; out_type is the same or kFloat32.
VLLM_LITE_API void vllm_lite_lora(const LoraLayer* layer, const int32_t* rows, const int32_t* starts, int64_t num_slots,
                                  const void* x, int64_t x_stride, int32_t x_type, void* out, int64_t out_stride,
                                  int32_t out_type) {
  if (starts[num_slots] == 0) return;
  static thread_local Adapters adapters;
  const LoraCall call = {layer, nullptr, x, x_stride, out, out_stride, x_type, out_type, rows, 0, nullptr};
  adapters.run(call, starts, num_slots);
}
VLLM_LITE_RECORDABLE(vllm_lite_lora)
