#include "../masks.h"

#include "simd.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int kWordBits = 32;

// Adds minus infinity to the logits of one word of the bitmask whose bits are set in `ruled`.
VLLM_LITE_INLINE void rule_out_word(float* logits, uint32_t ruled) {
  for (int i = 0; i < kWordBits; i += kWidth) {
#if defined(__AVX512F__)
    const __mmask16 lanes = static_cast<__mmask16>(ruled >> i);
    const __m512 x = _mm512_loadu_ps(logits + i);
    _mm512_storeu_ps(logits + i, _mm512_mask_add_ps(x, lanes, x, _mm512_set1_ps(-INFINITY)));
#else
    VecI bits;
    for (int lane = 0; lane < kWidth; ++lane) bits[lane] = 1 << lane;
    const VecI lanes = (bits & static_cast<int32_t>(ruled >> i)) != 0;
    const Vec x = load(logits + i);
    store(logits + i, lanes ? x + splat(-INFINITY) : x);
#endif
  }
}

}  // namespace

void rule_out(float* logits, int32_t count, const uint32_t* bitmask) {
  const int32_t whole = count / kWordBits;
  for (int32_t word = 0; word < whole; ++word) {
    const uint32_t ruled = ~bitmask[word];
    if (ruled != 0) rule_out_word(logits + word * kWordBits, ruled);
  }
  for (int32_t i = whole * kWordBits; i < count; ++i) {
    if ((bitmask[whole] >> (i % kWordBits) & 1) == 0) logits[i] += -INFINITY;
  }
}

}  // namespace VLLM_LITE_ISA
