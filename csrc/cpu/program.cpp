// Runs programs.
#include "program.h"

#include "wait.h"

using vllm_lite::from_word;
using vllm_lite::now_ns;
using vllm_lite::RecordedCall;

// Makes the calls of a program one after the other: for each the address of its `_recorded` function, the number of its
// words, and these. Returns -1; or the index of the first call that could not do its work, and no later one is made.
VLLM_LITE_API int64_t vllm_lite_run_program(const uint64_t* program, int64_t num_calls) {
  for (int64_t i = 0; i < num_calls; ++i) {
    const RecordedCall call = from_word<RecordedCall>(program[0]);
    if (call(program + 2) != -1) return i;
    program += 2 + program[1];
  }
  return -1;
}

// The same, with the times at which each call began and the last one ended, in nanoseconds of the monotonic clock:
// times_ns [num_calls + 1].
VLLM_LITE_API int64_t vllm_lite_profile_program(const uint64_t* program, int64_t num_calls, int64_t* times_ns) {
  *times_ns = now_ns();
  for (int64_t i = 0; i < num_calls; ++i) {
    const RecordedCall call = from_word<RecordedCall>(program[0]);
    if (call(program + 2) != -1) return i;
    times_ns[i + 1] = now_ns();
    program += 2 + program[1];
  }
  return -1;
}
