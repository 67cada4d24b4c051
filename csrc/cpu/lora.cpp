// Cuts low-rank adapters into tasks; the arithmetic is in isa/lora.cpp, the layout in lora.h.
#include "lora.h"

#include "common.h"
#include "lora_calls.h"
#include "program.h"
#include "thread_pool.h"

namespace {

constexpr int64_t kTaskRows = 32;        // maximum rows of a task, all of one adapter
constexpr int64_t kMinTask = 64 << 10;   // weights times rows; about 5 us
constexpr int64_t kMinShared = 8 << 15;  // less work is faster on the calling thread alone
constexpr int64_t kCallsPerThread = 2;   // minimum calls per thread with which no call is cut into tasks

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

int64_t num_blocks(const LoraCall& call) {
  int64_t total = 0;
  for (int32_t i = 0; i < call.layer->num_projections; ++i) total += ceil_div(call.layer->sizes[i], kLoraBlock);
  return total;
}

}  // namespace

void LoraCalls::add(const LoraCall& call) {
  for (int64_t row = 0; row < call.num_rows; row += kTaskRows) {
    LoraCall own = call;
    own.rows = call.rows + row;
    own.num_rows = call.num_rows - row < kTaskRows ? call.num_rows - row : kTaskRows;
    calls_.push_back(own);
  }
}

void LoraCalls::run() {
  if (calls_.empty()) return;
  lay_out();
  const auto shrink = VLLM_LITE_DISPATCH(lora_shrink);
  const auto expand = VLLM_LITE_DISPATCH(lora_expand);
  const auto num_calls = static_cast<int64_t>(calls_.size()), num_threads = int64_t{vllm_lite::num_threads()};
  if (num_threads == 1 || num_calls >= kCallsPerThread * num_threads) {  // each call on one thread, with own memory
    vllm_lite::parallel_for(num_calls, [&](int64_t number) {
      const LoraCall& own = calls_[static_cast<size_t>(number)];
      shrink(own, 0, lora_rank_blocks(*own.slot));
      expand(own, 0, num_blocks(own));
    });
    return;
  }
  each_task([](const LoraCall& call) { return lora_rank_blocks(*call.slot); },
            [](const LoraCall& call) { return kLoraRanks * call.layer->num_inputs; }, shrink);
  each_task(num_blocks, [](const LoraCall& call) { return kLoraBlock * call.slot->num_ranks; }, expand);
}

void LoraCalls::lay_out() {
  int64_t num_hidden = 0;
  for (const LoraCall& call : calls_) num_hidden += call.num_rows * lora_hidden(*call.slot);
  float* hidden = reinterpret_cast<float*>(scratch_.get(num_hidden * 4));
  for (LoraCall& call : calls_) {
    call.hidden = hidden;
    hidden += call.num_rows * lora_hidden(*call.slot);
  }
}

// Runs kernel(call, first, last) over all units of all calls. A call has `count(call)` units of `cost(call)` weights
// each.
template <class Count, class Cost, class Kernel>
void LoraCalls::each_task(const Count& count, const Cost& cost, const Kernel& kernel) {
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

// out += (x A^T) B^T for the rows of each slot's adapter. The rows of slot i begin at starts[i] in `rows`; starts:
// [num_slots + 1]. x_type: a DType up to kFloat16, also that of the adapters; out_type: the same or kFloat32.
VLLM_LITE_API void vllm_lite_lora(const LoraLayer* layer, const int32_t* rows, const int32_t* starts, int64_t num_slots,
                                  const void* x, int64_t x_stride, int32_t x_type, void* out, int64_t out_stride,
                                  int32_t out_type) {
  if (starts[num_slots] == 0) return;
  static thread_local LoraCalls calls;
  calls.clear();
  for (int64_t i = 0; i < num_slots; ++i) {
    const LoraSlot* slot = layer->slots + i;
    if (slot->num_ranks == 0) continue;
    calls.add({layer, slot, x, x_stride, out, out_stride, x_type, out_type, rows + starts[i], starts[i + 1] - starts[i],
               nullptr});
  }
  calls.run();
}
VLLM_LITE_RECORDABLE(vllm_lite_lora)
