// The experts of a layer as one operation: rows are grouped by expert, each group goes through its expert's two
// products, and the outputs are added up for each token.
// A pair is a token and one of its experts. Pairs are sorted by expert, then by token. They are computed in windows of
// at most kMaxPairs, so that scratch memory does not grow with the step and stays in the caches; with few threads,
// windows are smaller. A window ends after a whole expert if possible. A token's outputs are added in the order of the
// experts' numbers, independent of the rest of the step: the result depends only on the row, its experts, its adapter
// and the instruction set.
// Adapters (lora.h) are added to the output of each product, for the pairs of their tokens.
#include "experts.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "elementwise.h"
#include "expert_products.h"
#include "linear.h"
#include "lora_calls.h"
#include "pack.h"
#include "program.h"
#include "rows.h"
#include "thread_pool.h"

// The same record as `_Record` in vllm_lite/kernels/cpu/experts.py.
struct ExpertWeights {
  const PackedWeight* const* gate_up;  // of each expert of this rank: [2 * inner, hidden], the gate first, if any
  const PackedWeight* const* down;     // [hidden, inner]
  int64_t first_expert;                // number of this rank's first expert
  int64_t num_experts;                 // experts of this rank
  int64_t hidden;
  int64_t inner;
  int32_t activation;
  int32_t gated;
};

// The same record as `_Adapters` in vllm_lite/kernels/cpu/experts.py: the LoraLayers of each expert of this rank; all
// have the same slots.
struct ExpertAdapters {
  const LoraLayer* const* gate_up;
  const LoraLayer* const* down;
  int64_t num_slots;
};

namespace {

using vllm_lite::ceil_div;
using vllm_lite::Countdowns;
using vllm_lite::ExpertProduct;
using vllm_lite::kMaxPairs;
using vllm_lite::parallel_for;
using vllm_lite::Segment;

constexpr int64_t kThreadPairs = 256;
constexpr int64_t kFewRows = 32;  // maximum rows of a segment that one thread activates

// The pairs of a call, sorted by expert.
struct Pairs {
  std::vector<int64_t> ends;    // end of each expert's pairs
  std::vector<int64_t> tokens;  // token of each pair
  std::vector<int64_t> places;  // [num_rows][top]: pairs of a token, in the order of experts; -1 after the last
  std::vector<float> weights;   // [num_rows][top], as places
};

// The memory of a call. A thread keeps it for its next call, so that memory is rarely allocated.
class ExpertCall {
 public:
  struct Tokens {
    const char* x;
    int64_t x_stride;
    int32_t dtype;
    const int32_t* chosen;  // [num_rows][top]
    const float* weights;   // [num_rows][top]
    int64_t num_rows;
    int64_t top;
    char* out;  // may be x
    int64_t out_stride;
  };

  // Tokens by slot of their adapter: the tokens of slot i are rows[starts[i]] up to, without it, rows[starts[i + 1]].
  struct Adapted {
    const ExpertAdapters* adapters;  // null: no adapters, and the other fields are unused
    const int32_t* rows;
    const int32_t* starts;  // [num_slots + 1]
  };

  void run(const ExpertWeights& experts, const Tokens& tokens, const Adapted& adapted) {
    group(experts, tokens);
    find_slots(adapted, tokens.num_rows);
    lay_out(experts, tokens);
    std::memset(sums_, 0, static_cast<size_t>(tokens.num_rows * experts.hidden) * 4);
    const int64_t num_pairs = static_cast<int64_t>(pairs_.tokens.size());
    for (int64_t first = 0, end = 0; first < num_pairs; first = end) {
      end = window_end(first);
      compute(experts, tokens, adapted, first, end);
      add_up(experts, tokens, first, end);
    }
    const int64_t row_bytes = tokens.out_stride * element_size(tokens.dtype);
    const auto convert = VLLM_LITE_DISPATCH(convert);
    for_tokens(tokens.num_rows, experts.hidden, [&](int64_t i) {
      convert(sums_ + i * experts.hidden, kFloat32, tokens.out + i * row_bytes, tokens.dtype, experts.hidden);
    });
  }

 private:
  // Calls body(i) for each i in [0, count). For little work, this thread alone is faster.
  template <class Body>
  static void for_tokens(int64_t count, int64_t row_elements, const Body& body) {
    constexpr int64_t kShared = 1 << 17, kTask = 1 << 15;  // elements
    if (count * row_elements < kShared) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    const int64_t rows = row_elements < kTask ? kTask / row_elements : 1;
    parallel_for(ceil_div(count, rows), [&](int64_t task) {
      for (int64_t i = task * rows; i < count && i < (task + 1) * rows; ++i) body(i);
    });
  }

  // Sorts pairs by expert. Experts of other ranks get no pairs.
  void group(const ExpertWeights& experts, const Tokens& tokens) {
    const int64_t count = tokens.num_rows * tokens.top;
    const auto held = [&](int64_t i) {
      const int64_t expert = tokens.chosen[i] - experts.first_expert;
      return expert >= 0 && expert < experts.num_experts ? expert : -1;
    };
    pairs_.ends.assign(static_cast<size_t>(experts.num_experts) + 1, 0);
    for (int64_t i = 0; i < count; ++i) {
      if (held(i) >= 0) ++pairs_.ends[static_cast<size_t>(held(i)) + 1];
    }
    for (int64_t expert = 0; expert < experts.num_experts; ++expert) {
      const size_t at = static_cast<size_t>(expert);
      pairs_.ends[at + 1] += pairs_.ends[at];
    }
    pairs_.tokens.resize(static_cast<size_t>(pairs_.ends.back()));
    pairs_.places.assign(static_cast<size_t>(count), -1);
    pairs_.weights.resize(static_cast<size_t>(count));
    for (int64_t token = 0; token < tokens.num_rows; ++token) {
      int64_t* places = pairs_.places.data() + token * tokens.top;
      float* weights = pairs_.weights.data() + token * tokens.top;
      int64_t known = 0;
      for (int64_t j = token * tokens.top; j < (token + 1) * tokens.top; ++j) {
        if (held(j) < 0) continue;
        const int64_t place = pairs_.ends[static_cast<size_t>(held(j))]++;  // becomes the end of this expert's pairs
        pairs_.tokens[static_cast<size_t>(place)] = token;
        int64_t k = known++;
        for (; k > 0 && places[k - 1] > place; --k) {
          places[k] = places[k - 1];
          weights[k] = weights[k - 1];
        }
        places[k] = place;
        weights[k] = tokens.weights[j];
      }
    }
  }

  void lay_out(const ExpertWeights& experts, const Tokens& tokens) {
    const int64_t size = element_size(tokens.dtype), hidden = experts.hidden, inner = experts.inner;
    const bool has_any = experts.num_experts > 0;
    const int64_t integers = has_any ? ExpertProduct::integer_bytes(*experts.gate_up[0]) : 0;
    const int64_t second_integers = has_any ? ExpertProduct::integer_bytes(*experts.down[0]) : 0;
    const int64_t pairs = static_cast<int64_t>(pairs_.tokens.size()), rows = pairs < kMaxPairs ? pairs : kMaxPairs;
    const int64_t bytes[] = {
        rows * hidden * size, rows * width(experts) * size, experts.gated ? rows * inner * size : 0,
        rows * hidden * 4,    tokens.num_rows * hidden * 4, integers,
        second_integers};
    int64_t total = 64;
    for (const int64_t part : bytes) total += (part + 63) / 64 * 64;
    char* memory = scratch_.get(total);
    memory += -reinterpret_cast<uintptr_t>(memory) % 64;
    char** const parts[] = {&gathered_, &gate_up_,        &activated_, &outputs_, reinterpret_cast<char**>(&sums_),
                            &integers_, &second_integers_};
    for (size_t i = 0; i < 7; ++i) {
      *parts[i] = memory;
      memory += (bytes[i] + 63) / 64 * 64;
    }
  }

  // The end of the window that begins at pair `first`: after the last expert that fits completely, or within the first
  // expert.
  int64_t window_end(int64_t first) const {
    const int64_t own = kThreadPairs * vllm_lite::num_threads(),
                  most = first + std::clamp(own, 2 * kThreadPairs, kMaxPairs);
    const auto behind = std::upper_bound(pairs_.ends.begin(), pairs_.ends.end(), most);
    return behind == pairs_.ends.begin() || *(behind - 1) <= first ? most : *(behind - 1);
  }

  // Computes the outputs of pairs [first, end).
  void compute(const ExpertWeights& experts, const Tokens& tokens, const Adapted& adapted, int64_t first, int64_t end) {
    find_segments(experts, first, end);
    int64_t longest = 0;
    for (const Segment& segment : segments_) longest = std::max(longest, segment.num_rows);
    const bool alone = tokens.num_rows == 1 && longest == 1 && slots_.empty();
    const int64_t size = element_size(tokens.dtype), row_bytes = experts.hidden * size, inner = experts.inner;
    for_tokens(alone ? 1 : end - first, experts.hidden, [&](int64_t i) {
      const int64_t token = pairs_.tokens[static_cast<size_t>(first + i)];
      std::memcpy(gathered_ + i * row_bytes, tokens.x + token * tokens.x_stride * size, static_cast<size_t>(row_bytes));
    });
    const ExpertProduct::Rows rows = {gathered_, alone ? 0 : experts.hidden, tokens.dtype};
    const ExpertProduct::Rows gate_up = {gate_up_, width(experts), tokens.dtype};
    const ExpertProduct::Rows activated = {experts.gated ? activated_ : gate_up_, inner, tokens.dtype};
    const ExpertProduct::Rows outputs = {outputs_, experts.hidden, kFloat32};
    first_.prepare(experts.gate_up, segments_, rows, gate_up, integers_);
    second_.prepare(experts.down, segments_, activated, outputs, second_integers_);
    if (slots_.empty() && longest <= kFewRows) return run_together(experts, tokens.dtype);
    first_.run();
    if (!slots_.empty()) adapt(adapted, adapted.adapters->gate_up, first, rows, gate_up);
    if (experts.gated) {
      vllm_lite::over_rows(end - first, 2 * inner, VLLM_LITE_DISPATCH(gated_activation), gated(experts, tokens.dtype));
    } else {
      vllm_lite::over_rows(end - first, inner, VLLM_LITE_DISPATCH(activate), ungated(experts, tokens.dtype));
    }
    second_.run();
    if (!slots_.empty()) adapt(adapted, adapted.adapters->down, first, activated, outputs);
  }

  void find_segments(const ExpertWeights& experts, int64_t first, int64_t end) {
    segments_.clear();
    int64_t begin = 0;
    for (int64_t expert = 0; expert < experts.num_experts; ++expert) {
      const int64_t limit = pairs_.ends[static_cast<size_t>(expert)];
      const int64_t from = begin > first ? begin : first, to = limit < end ? limit : end;
      if (from < to) segments_.push_back({expert, from - first, to - from});
      begin = limit;
    }
  }

  // Computes both products of a window as one job. The thread that finishes the first product of a segment prepares its
  // rows for the second; tasks of the second product wait for this. There is no deadlock: tasks are taken in order, so
  // a task waits only for earlier tasks, which other threads have taken and whose own waits are for still earlier ones.
  void run_together(const ExpertWeights& experts, int32_t dtype) {
    const int64_t num_first = first_.num_tasks(), num_tasks = num_first + second_.num_tasks();
    const int64_t threads = vllm_lite::num_threads();
    countdowns_.begin(first_, segments_.size());
    first_.quantize();
    parallel_for(num_tasks, [&](int64_t number) {
      const int64_t next = number + threads;  // likely this thread's next task
      if (threads > 1 && next < num_tasks) next < num_first ? first_.fetch(next) : second_.fetch(next - num_first);
      if (number >= num_first) {
        countdowns_.wait(second_.segment_of(number - num_first));
        return second_.multiply(number - num_first);
      }
      first_.multiply(number);
      const size_t segment = first_.segment_of(number);
      if (!countdowns_.done(segment)) return;
      const int64_t row = segments_[segment].first_row, end = row + segments_[segment].num_rows;
      if (experts.gated) {
        VLLM_LITE_DISPATCH(gated_activation)(gated(experts, dtype), row, end);
      } else {
        VLLM_LITE_DISPATCH(activate)(ungated(experts, dtype), row, end);
      }
      second_.quantize(segment);
      countdowns_.ready(segment);
    });
  }

  GatedActivation gated(const ExpertWeights& experts, int32_t dtype) const {
    return {dtype, experts.activation, experts.inner, gate_up_, activated_, 2 * experts.inner, experts.inner};
  }
  Activate ungated(const ExpertWeights& experts, int32_t dtype) const {
    return {dtype, experts.activation, experts.inner, gate_up_, experts.inner};
  }

  // Sets the slot of each token's adapter, -1 for none; empty if no token has an adapter.
  void find_slots(const Adapted& adapted, int64_t num_rows) {
    slots_.clear();
    if (adapted.adapters == nullptr || adapted.starts[adapted.adapters->num_slots] == 0) return;
    slots_.assign(static_cast<size_t>(num_rows), -1);
    for (int64_t slot = 0; slot < adapted.adapters->num_slots; ++slot) {
      for (int32_t i = adapted.starts[slot]; i < adapted.starts[slot + 1]; ++i) {
        const int32_t row = adapted.rows[i];  // a step that only warms up may have fewer rows than the one before
        if (row < num_rows) slots_[static_cast<size_t>(row)] = slot;
      }
    }
  }

  // Adds the adapters' outputs to a product of the window that begins at pair `first`.
  void adapt(const Adapted& adapted, const LoraLayer* const* layers, int64_t first, ExpertProduct::Rows x,
             ExpertProduct::Rows out) {
    lora_calls_.clear();
    lora_rows_.clear();
    lora_rows_.reserve(kMaxPairs);  // calls keep their addresses
    for (const Segment& segment : segments_) {
      const LoraLayer* layer = layers[segment.expert];
      for (int64_t slot = 0; slot < adapted.adapters->num_slots; ++slot) {
        if (layer->slots[slot].num_ranks == 0) continue;
        const size_t begin = lora_rows_.size();
        for (int64_t row = segment.first_row; row < segment.first_row + segment.num_rows; ++row) {
          const int64_t token = pairs_.tokens[static_cast<size_t>(first + row)];
          if (slots_[static_cast<size_t>(token)] == slot) lora_rows_.push_back(static_cast<int32_t>(row));
        }
        const auto count = static_cast<int64_t>(lora_rows_.size() - begin);
        lora_calls_.add({layer, layer->slots + slot, x.data, x.stride, out.data, out.stride, x.type, out.type,
                         lora_rows_.data() + begin, count, nullptr});
      }
    }
    lora_calls_.run();
  }

  // Outputs of the first product for a pair.
  static int64_t width(const ExpertWeights& experts) { return (experts.gated ? 2 : 1) * experts.inner; }

  // Adds the outputs of pairs [first, end) to the sums of their tokens.
  void add_up(const ExpertWeights& experts, const Tokens& tokens, int64_t first, int64_t end) {
    const auto add_weighted = VLLM_LITE_DISPATCH(add_weighted);
    const float* outputs = reinterpret_cast<const float*>(outputs_);
    for_tokens(tokens.num_rows, experts.hidden * tokens.top, [&](int64_t token) {
      for (int64_t j = token * tokens.top; j < (token + 1) * tokens.top; ++j) {
        const int64_t place = pairs_.places[static_cast<size_t>(j)];
        if (place < first || place >= end) continue;
        const float* output = outputs + (place - first) * experts.hidden;
        add_weighted(sums_ + token * experts.hidden, output, pairs_.weights[static_cast<size_t>(j)], experts.hidden);
      }
    });
  }

  Pairs pairs_;
  std::vector<Segment> segments_;
  ExpertProduct first_, second_;
  Countdowns countdowns_;
  std::vector<int64_t> slots_;
  std::vector<int32_t> lora_rows_;
  LoraCalls lora_calls_;
  Scratch scratch_;
  char *gathered_, *gate_up_, *activated_, *outputs_, *integers_, *second_integers_;
  float* sums_;
};

}  // namespace

// out = the sum over each token's experts of weight * expert(x); out may be x. `adapters` may be null; else rows and
// starts [num_slots + 1] are those of vllm_lite_lora.
VLLM_LITE_API void vllm_lite_experts(const ExpertWeights* experts, const void* x, int64_t x_stride, int32_t dtype,
                                     const int32_t* chosen, const float* weights, int64_t num_rows, int64_t top,
                                     void* out, int64_t out_stride, const ExpertAdapters* adapters, const int32_t* rows,
                                     const int32_t* starts) {
  if (num_rows <= 0) return;
  static thread_local ExpertCall call;
  const ExpertCall::Tokens tokens = {static_cast<const char*>(x), x_stride,  dtype, chosen, weights, num_rows, top,
                                     static_cast<char*>(out),     out_stride};
  call.run(*experts, tokens, {adapters, rows, starts});
}
VLLM_LITE_RECORDABLE(vllm_lite_experts)

// x += sigmoid(gates) * added; x, added: [num_rows, size], gates: float32 [num_rows].
VLLM_LITE_API void vllm_lite_add_gated(int32_t dtype, int64_t num_rows, int64_t size, void* x, int64_t x_stride,
                                       const void* added, int64_t added_stride, const float* gates,
                                       int64_t gate_stride) {
  const AddGated op = {dtype, size, x, added, gates, x_stride, added_stride, gate_stride};
  vllm_lite::over_rows(num_rows, size, VLLM_LITE_DISPATCH(add_gated), op);
}
VLLM_LITE_RECORDABLE(vllm_lite_add_gated)
