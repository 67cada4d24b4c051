// The arithmetic of low-rank adapters: see ../lora.h for the layout.
#include "../lora.h"

#include "row_vectors.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int kVectors = kLoraBlock / kWidth;

// sums[r][k] = the product of row r of x with row k of A.
template <int R, int K, class T>
VLLM_LITE_INLINE void dots(const T* const* x, const T* down, int64_t num_inputs, float (&sums)[R][K]) {
  Vec total[R][K] = {};
  each_vector(num_inputs, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    Vec values[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) values[r] = load_at(x[r], i, count);
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) {
      const Vec weight = load_at(down + k * num_inputs, i, count);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) total[r][k] = multiply_add(values[r], weight, total[r][k]);
    }
  });
  for (int r = 0; r < R; ++r) {
    for (int k = 0; k < K; ++k) sums[r][k] = sum_of(total[r][k]);
  }
}

#if defined(__AVX512BF16__)
VLLM_LITE_INLINE __m512bh load_pairs(const BFloat16* from, int64_t count) {
  const __mmask32 mask = count >= 32 ? 0xffffffffu : (1u << count) - 1;
  return (__m512bh)_mm512_maskz_loadu_epi16(mask, from);
}
template <int R, int K>
VLLM_LITE_INLINE void dots(const BFloat16* const* x, const BFloat16* down, int64_t num_inputs, float (&sums)[R][K]) {
  __m512 total[R][K];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) total[r][k] = _mm512_setzero_ps();
  }
  for (int64_t i = 0; i < num_inputs; i += 32) {
    const int64_t count = num_inputs - i;
    __m512bh values[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) values[r] = load_pairs(x[r] + i, count);
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) {
      const __m512bh weight = load_pairs(down + k * num_inputs + i, count);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) total[r][k] = _mm512_dpbf16_ps(total[r][k], values[r], weight);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) sums[r][k] = _mm512_reduce_add_ps(total[r][k]);
  }
}
#endif

template <int R, int K, class T>
VLLM_LITE_INLINE void shrink_ranks(const T* const* x, const T* down, int64_t num_inputs, float* hidden,
                                   int64_t stride) {
  float sums[R][K];
  dots<R, K>(x, down, num_inputs, sums);
  for (int r = 0; r < R; ++r) {
    for (int k = 0; k < K; ++k) hidden[r * stride + k] = sums[r][k];
  }
}

template <int R, class T>
void shrink_rows(const LoraCall& call, int64_t row, int64_t first, int64_t last) {
  const int64_t num_inputs = call.layer->num_inputs, stride = call.slot->num_ranks;
  const T* x[R];
  for (int r = 0; r < R; ++r) x[r] = static_cast<const T*>(call.x) + call.rows[row + r] * call.x_stride;
  const T* down = static_cast<const T*>(call.slot->down);
  float* hidden = call.hidden + row * stride;
  int64_t k = first;
  for (; k + kLoraRanks <= last; k += kLoraRanks) {
    shrink_ranks<R, kLoraRanks>(x, down + k * num_inputs, num_inputs, hidden + k, stride);
  }
  for (; k < last; ++k) shrink_ranks<R, 1>(x, down + k * num_inputs, num_inputs, hidden + k, stride);
}

// `rows`(row, R) for all rows, kLoraRows at a time and the last ones as they are left.
template <class Rows>
VLLM_LITE_INLINE void each_rows(int64_t num_rows, const Rows& rows) {
  int64_t row = 0;
  for (; row + kLoraRows <= num_rows; row += kLoraRows) rows(row, kLoraRows);
  if (row < num_rows) rows(row, num_rows - row);
}

template <class T>
void shrink(const LoraCall& call, int64_t first, int64_t last) {
  static_assert(kLoraRows == 4, "as the cases");
  each_rows(call.num_rows, [&](int64_t row, int64_t count) {
    if (count == 4) return shrink_rows<4, T>(call, row, first, last);
    if (count == 3) return shrink_rows<3, T>(call, row, first, last);
    if (count == 2) return shrink_rows<2, T>(call, row, first, last);
    shrink_rows<1, T>(call, row, first, last);
  });
}

// One block of outputs for R rows: out [R][out_stride] += hidden [R][stride] times `up` [rank][kLoraBlock].
template <int R, class T, class Out>
void expand_block(const T* up, int64_t rank, const float* hidden, int64_t stride, Out* const* out, int64_t count) {
  Vec total[R][kVectors] = {};
  for (int64_t k = 0; k < rank; ++k) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const Vec weight = load(up + k * kLoraBlock + v * kWidth);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) total[r][v] = multiply_add(splat(hidden[r * stride + k]), weight, total[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const int64_t left = count - v * kWidth, part = left < kWidth ? left : kWidth;
    if (part <= 0) break;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      store_at(out[r], v * kWidth, load_at(out[r], v * kWidth, part) + total[r][v], part);
    }
  }
}

// Blocks [first, last) of one projection, whose outputs begin at `column`.
template <class T, class Out>
void expand_projection(const LoraCall& call, int32_t number, const T* up, int64_t column, int64_t first, int64_t last) {
  const LoraSlot& slot = *call.slot;
  const int32_t matrix = call.layer->matrix[number];
  const int64_t rank = slot.ranks[matrix], stride = slot.num_ranks, size = call.layer->sizes[number];
  const float* hidden = call.hidden;
  for (int32_t before = 0; before < matrix; ++before) hidden += slot.ranks[before];
  for (int64_t block = first; block < last; ++block) {
    const int64_t left = size - block * kLoraBlock, count = left < kLoraBlock ? left : kLoraBlock;
    const T* weights = up + block * rank * kLoraBlock;
    each_rows(call.num_rows, [&](int64_t row, int64_t num_rows) {
      Out* out[kLoraRows];
      for (int64_t r = 0; r < num_rows; ++r) {
        out[r] = static_cast<Out*>(call.out) + call.rows[row + r] * call.out_stride + column + block * kLoraBlock;
      }
      const float* own = hidden + row * stride;
      if (num_rows == 4) return expand_block<4>(weights, rank, own, stride, out, count);
      if (num_rows == 3) return expand_block<3>(weights, rank, own, stride, out, count);
      if (num_rows == 2) return expand_block<2>(weights, rank, own, stride, out, count);
      expand_block<1>(weights, rank, own, stride, out, count);
    });
  }
}

template <class T, class Out>
void expand(const LoraCall& call, int64_t first, int64_t last) {
  const LoraLayer& layer = *call.layer;
  const T* up = static_cast<const T*>(call.slot->up);
  int64_t column = 0, begin = 0;  // in outputs, and in blocks
  for (int32_t number = 0; number < layer.num_projections; ++number) {
    const int64_t rank = call.slot->ranks[layer.matrix[number]];
    const int64_t num_blocks = (layer.sizes[number] + kLoraBlock - 1) / kLoraBlock, end = begin + num_blocks;
    const int64_t from = first > begin ? first : begin, to = last < end ? last : end;
    if (rank > 0 && from < to) expand_projection<T, Out>(call, number, up, column, from - begin, to - begin);
    up += num_blocks * rank * kLoraBlock;
    column += layer.sizes[number];
    begin = end;
  }
}

template <class T>
void expand_into(const LoraCall& call, int64_t first, int64_t last) {
  if (call.out_type == kFloat32) return expand<T, float>(call, first, last);
  expand<T, T>(call, first, last);
}

}  // namespace

void lora_shrink(const LoraCall& call, int64_t first, int64_t last) {
  if (call.type == kFloat32) return shrink<float>(call, first, last);
  if (call.type == kFloat16) return shrink<Float16>(call, first, last);
  shrink<BFloat16>(call, first, last);
}

void lora_expand(const LoraCall& call, int64_t first, int64_t last) {
  if (call.type == kFloat32) return expand_into<float>(call, first, last);
  if (call.type == kFloat16) return expand_into<Float16>(call, first, last);
  expand_into<BFloat16>(call, first, last);
}

}  // namespace VLLM_LITE_ISA
