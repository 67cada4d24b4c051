// Runs the recorded calls of a program.
#include "program.h"

#include <unistd.h>

#include <atomic>

#include "linear.h"
#include "linear_pair.h"
#include "read_ahead.h"
#include "thread_pool.h"
#include "wait.h"

VLLM_LITE_API int64_t vllm_lite_linear_recorded(const uint64_t* words);
VLLM_LITE_API int64_t vllm_lite_experts_recorded(const uint64_t* words);

using vllm_lite::from_word;
using vllm_lite::now_ns;
using vllm_lite::RecordedCall;

namespace {

std::atomic<uint32_t> num_read{0};  // number of products of all programs so far

int64_t weight_bytes(const PackedWeight& weight) {
  return (weight.num_outputs + kBlock - 1) / kBlock * block_bytes(weight);
}

// Whether L3 can hold the weights of all products of a program. A program with experts has others in each run, so it
// does not. Looked up in each run: a program at the same address may be another one, or its weights.
bool fits_cache(const uint64_t* program, int64_t num_calls) {
  static const int64_t cache_bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  int64_t bytes = 0;
  for (const uint64_t* call = program; num_calls > 0 && bytes <= cache_bytes; --num_calls, call += 2 + call[1]) {
    const RecordedCall recorded = from_word<RecordedCall>(call[0]);
    if (recorded == &vllm_lite_experts_recorded) return false;
    if (recorded == &vllm_lite_linear_recorded) bytes += weight_bytes(*from_word<const PackedWeight*>(call[2]));
  }
  return bytes <= cache_bytes;
}

// Announces the weights that the next products of a program will read, for waiting threads to prefetch (read_ahead.h).
// After the last product follow the first ones of the same program, because the next step is likely to run it again.
class Weights {
 public:
  Weights(const uint64_t* program, int64_t num_calls) : program_(program), num_calls_(num_calls), at_(program) {
    vllm_lite::expect_cached(fits_cache(program, num_calls));
    if (vllm_lite::num_threads() == 1) return;
    while (number_ - next_ < vllm_lite::kReadsKnown && expect_next()) {
    }
  }

  ~Weights() {
    num_read.store(next_, std::memory_order_relaxed);
    vllm_lite::expect_cached(false);
  }

  // To be called before each call.
  void begin(RecordedCall call) {
    if (number_ == next_ || call != &vllm_lite_linear_recorded) return;
    vllm_lite::begin_read(++next_);
    expect_next();
  }

 private:
  bool expect_next() {
    for (int64_t passed = 0; passed < num_calls_; ++passed) {
      if (left_ == 0) at_ = program_, left_ = num_calls_;
      const uint64_t* call = at_;
      at_ += 2 + call[1];
      --left_;
      if (from_word<RecordedCall>(call[0]) != &vllm_lite_linear_recorded) continue;
      const PackedWeight& weight = *from_word<const PackedWeight*>(call[2]);
      vllm_lite::expect_read(number_++, {static_cast<const char*>(weight.data), block_bytes(weight),
                                         (weight.num_outputs + kBlock - 1) / kBlock});
      return true;
    }
    return false;
  }

  const uint64_t* program_;
  int64_t num_calls_;
  const uint64_t* at_;
  int64_t left_ = num_calls_;
  uint32_t next_ = num_read.load(std::memory_order_relaxed), number_ = next_;
};

// Makes the next call of a program, or the next two if they can be one job. Returns how many; 0 if it failed.
int64_t make_calls(const uint64_t* program, int64_t num_left, Weights* weights) {
  const RecordedCall call = from_word<RecordedCall>(program[0]);
  const uint64_t* const words = program + 2;
  const uint64_t* const next = words + program[1];
  weights->begin(call);
  const bool are_products = call == &vllm_lite_linear_recorded && num_left > 1 && next[0] == program[0];
  if (!are_products || !are_pair(words, next + 2)) return call(words) == -1 ? 1 : 0;
  weights->begin(call);
  linear_pair(words, next + 2);
  return 2;
}

// Makes all calls of a program. Calls after(i) when call i has ended. Returns -1, or the index of a call that failed.
template <class After>
int64_t run_program(const uint64_t* program, int64_t num_calls, const After& after) {
  Weights weights(program, num_calls);
  for (int64_t i = 0; i < num_calls;) {
    const int64_t made = make_calls(program, num_calls - i, &weights);
    if (made == 0) return i;
    for (const int64_t end = i + made; i < end; ++i) {
      program += 2 + program[1];
      after(i);
    }
  }
  return -1;
}

}  // namespace

// Makes the calls of a program in order. A call is the address of its `_recorded` function, the number of its words,
// and these words. Returns -1, or the index of the first call that failed; later ones are not made.
VLLM_LITE_API int64_t vllm_lite_run_program(const uint64_t* program, int64_t num_calls) {
  return run_program(program, num_calls, [](int64_t) {});
}

// The same, and writes the times at which each call began and the last one ended, in nanoseconds of the monotonic
// clock, to times_ns [num_calls + 1]. Two products that were one job end at the same time.
VLLM_LITE_API int64_t vllm_lite_profile_program(const uint64_t* program, int64_t num_calls, int64_t* times_ns) {
  *times_ns = now_ns();
  return run_program(program, num_calls, [=](int64_t i) { times_ns[i + 1] = now_ns(); });
}
