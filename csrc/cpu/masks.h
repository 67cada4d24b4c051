// Grammars' masks on logits. vllm_lite/worker/sampling/masks.py defines bitmasks, and has the plain twin.
#pragma once

#include <cstdint>

#include "isa.h"

// Adds minus infinity to those of logits[0, count) whose bit is clear; token t has bit t % 32 of word t / 32. So NaN
// and plus infinity, which are faults of the model, become NaN; allowed logits keep their bits.
VLLM_LITE_DECLARE(void rule_out(float* logits, int32_t count, const uint32_t* bitmask))
