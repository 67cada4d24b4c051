// Bitmasks of many samples on their rows of logits.
#include "masks.h"

#include "common.h"
#include "thread_pool.h"

namespace {

constexpr int32_t kPartTokens = 1 << 15;    // tokens of a task, a multiple of a word's 32: 5 us or more
constexpr int64_t kSharedTokens = 1 << 17;  // less work is faster on the calling thread alone

}  // namespace

// For each i of [0, num_samples): rules out the tokens that bitmasks [i, words] does not allow, in row samples[i] of
// logits [.., vocab]. Rows are `stride` floats apart; no two samples have the same row.
VLLM_LITE_API void vllm_lite_rule_out(float* logits, int64_t stride, int32_t vocab, const int64_t* samples,
                                      int64_t num_samples, const uint32_t* bitmasks, int64_t words) {
  const auto rule_out = VLLM_LITE_DISPATCH(rule_out);
  if (num_samples * vocab < kSharedTokens) {
    for (int64_t i = 0; i < num_samples; ++i) rule_out(logits + samples[i] * stride, vocab, bitmasks + i * words);
    return;
  }
  const int64_t num_parts = (vocab + kPartTokens - 1) / kPartTokens;
  vllm_lite::parallel_for(num_samples * num_parts, [&](int64_t task) {
    const int64_t i = task / num_parts;
    const int32_t first = static_cast<int32_t>(task % num_parts) * kPartTokens;
    const int32_t count = vocab - first < kPartTokens ? vocab - first : kPartTokens;
    rule_out(logits + samples[i] * stride + first, count, bitmasks + i * words + first / 32);
  });
}
