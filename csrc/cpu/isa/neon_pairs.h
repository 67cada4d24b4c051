// Pairs of bfloat16 by NEON. By the architecture's definition a product of matrices (BFMMLA) is two successive dot
// products (BFDOT), roundings included. So rows may be multiplied two at a time, and a single row has the same bits.
// Both round to odd and treat denormals as zero.
#pragma once

#include "simd.h"

namespace VLLM_LITE_ISA {
namespace {

typedef bfloat16x8_t Dots;  // pairs of inputs for kWidth outputs, or four inputs for two outputs

VLLM_LITE_INLINE Dots load_dots(const BFloat16* from) {
  return vreinterpretq_bf16_u16(vld1q_u16(&from->bits));
}
VLLM_LITE_INLINE Dots all_pairs(const BFloat16* pair) {
  uint32_t both;
  std::memcpy(&both, pair, sizeof both);
  return vreinterpretq_bf16_u32(vdupq_n_u32(both));
}
VLLM_LITE_INLINE Dots two_pairs(const BFloat16* first, const BFloat16* second) {  // of each
  const uint16x8_t all = vcombine_u16(vld1_u16(&first->bits), vld1_u16(&second->bits));
  return vreinterpretq_bf16_u16(all);
}
VLLM_LITE_INLINE Vec add_dots(Vec sum, Dots x, Dots y) {
  return reinterpret_cast<Vec>(vbfdotq_f32(reinterpret_cast<float32x4_t>(sum), x, y));
}
VLLM_LITE_INLINE Vec add_matrices(Vec sum, Dots x, Dots y) {
  return reinterpret_cast<Vec>(vbfmmlaq_f32(reinterpret_cast<float32x4_t>(sum), x, y));
}

// Rearranges the sums of two consecutive rows as matrices of two outputs and both rows, or back.
template <bool kBack, int R, int V>
VLLM_LITE_INLINE void pair_rows(Vec (&total)[R][V]) {
#pragma GCC unroll 16
  for (int r = 0; r + 2 <= R; r += 2) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const float32x4_t x = reinterpret_cast<float32x4_t>(total[r][v]);
      const float32x4_t y = reinterpret_cast<float32x4_t>(total[r + 1][v]);
      total[r][v] = reinterpret_cast<Vec>(kBack ? vuzp1q_f32(x, y) : vzip1q_f32(x, y));
      total[r + 1][v] = reinterpret_cast<Vec>(kBack ? vuzp2q_f32(x, y) : vzip2q_f32(x, y));
    }
  }
}

// total += the products of two pairs of inputs of R rows, where total is as pair_rows() leaves it.
template <int64_t kStride, int R, int V>
VLLM_LITE_INLINE void add_two_pairs(const BFloat16* x, const BFloat16* weights, Vec (&total)[R][V]) {
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    const Dots first = load_dots(weights + 2 * v * kWidth), second = load_dots(weights + 2 * (kBlock + v * kWidth));
    const uint32x4_t a = vreinterpretq_u32_bf16(first), b = vreinterpretq_u32_bf16(second);
    const Dots low = vreinterpretq_bf16_u32(vzip1q_u32(a, b)), high = vreinterpretq_bf16_u32(vzip2q_u32(a, b));
#pragma GCC unroll 16
    for (int r = 0; r + 2 <= R; r += 2) {
      const Dots rows = two_pairs(x + r * kStride, x + (r + 1) * kStride);
      total[r][v] = add_matrices(total[r][v], low, rows);
      total[r + 1][v] = add_matrices(total[r + 1][v], high, rows);
    }
    if constexpr (R % 2 != 0) {
      const BFloat16* last = x + (R - 1) * kStride;
      total[R - 1][v] = add_dots(add_dots(total[R - 1][v], first, all_pairs(last)), second, all_pairs(last + 2));
    }
  }
}

// total += the products of num_pairs pairs of inputs, of R rows at x [R][kStride] and kWidth * V outputs of a block;
// calls meanwhile(pair) for each pair.
template <int64_t kStride, int R, int V, class Meanwhile>
VLLM_LITE_INLINE void multiply_pairs(const BFloat16* x, const BFloat16* weights, int64_t num_pairs, Vec (&total)[R][V],
                                     const Meanwhile& meanwhile) {
  int64_t pair = 0;
  pair_rows<false>(total);
  for (; pair + 2 <= num_pairs; pair += 2) {
    meanwhile(pair);
    meanwhile(pair + 1);
    add_two_pairs<kStride>(x + 2 * pair, weights + 2 * pair * kBlock, total);
  }
  pair_rows<true>(total);
  if (pair == num_pairs) return;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const Dots words = load_dots(weights + 2 * (pair * kBlock + v * kWidth));
      total[r][v] = add_dots(total[r][v], words, all_pairs(x + r * kStride + 2 * pair));
    }
  }
}

}  // namespace
}  // namespace VLLM_LITE_ISA
