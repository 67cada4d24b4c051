// The vectorised parts of the sampler. vllm_lite/worker/sampling/sampler.py defines the results.
#pragma once

#include <cstdint>

#include "isa.h"

// The same record as DRAW in vllm_lite/kernels/sampling.py.
struct Draw {
  uint64_t seed;
  uint32_t sample;
  uint32_t position;
  float temperature;  // 0 = greedy
  int32_t top_k;      // 1 to vocab; vocab = off
  float top_p;        // 1 = off
  float max_distance;
};
static_assert(sizeof(Draw) == 32, "the record has no padding");

struct Score {
  float score;
  int32_t token;
};

// Parameters that turn a row's logits into distances from its best one.
struct Scale {
  float best;
  float temperature;
};

constexpr int32_t kGroupsPerBlock = 16;  // tokens i, i + 16, i + 32, ... of a block are one group
constexpr int32_t kBlock = 256;          // tokens of a block
constexpr int32_t kSlack = 16;           // entries that may be written after the end of a list

// Sets maxima, [num_blocks, kGroupsPerBlock], to the largest of each group of logits[0, count), -inf for groups without
// a token. Returns the largest of all logits, NaN if any logit is NaN.
VLLM_LITE_DECLARE(float group_maxima(const float* logits, int32_t count, float* maxima))
// The first i with logits[i] == best, which exists; maxima as above.
VLLM_LITE_DECLARE(int32_t first_best(const float* logits, int32_t count, const float* maxima, float best))
VLLM_LITE_DECLARE(void distances_of(const float* logits, int32_t count, Scale scale, float* distances))
// Lists the tokens in logits[0, count) with a distance of at most `reach`, ascending; returns their number.
VLLM_LITE_DECLARE(int32_t collect(const float* logits, int32_t count, const float* maxima, Scale scale, float reach,
                                  int32_t first_token, int32_t* tokens, float* distances))
// Removes entries with a distance above `reach` from the three lists, in place; returns the number that is left.
VLLM_LITE_DECLARE(int32_t strike(int32_t count, float reach, int32_t* tokens, float* distances, float* weights))
// weights[i] = the mass of an entry before rounding down, at most 2^40.
VLLM_LITE_DECLARE(void weigh(const float* distances, int32_t count, float* weights))
// The first token with the largest noise - distance, of all tokens of a row (draw_any) or of a list. `state` is the
// row's hash, and `first_token` the token of logits[0].
VLLM_LITE_DECLARE(Score draw_any(const float* logits, int32_t count, Scale scale, int32_t first_token, uint32_t state))
VLLM_LITE_DECLARE(Score draw_listed(const int32_t* tokens, const float* distances, int32_t count, uint32_t state))
// For tests.
VLLM_LITE_DECLARE(void noise_of(uint32_t state, int32_t count, uint32_t* hashes, float* noise))
