// The arithmetic of low-rank adapters; ../lora.h describes the layout.
#include "../lora.h"

#include <type_traits>

#include "row_vectors.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int kVectors = kLoraBlock / kWidth;
constexpr int64_t kAhead = 2048;                   // distance of prefetches, in bytes
constexpr int kShrinkRows = 4;                     // rows at a time
constexpr int kExpandRows = kWidth == 16 ? 8 : 2;  // rows at a time, so that their sums stay in registers

// Row `row` of the adapter. Its rows are not adjacent in the caller's tensor.
template <class T>
VLLM_LITE_INLINE T* row_of(const void* rows, int64_t stride, const LoraCall& call, int64_t row) {
  return static_cast<T*>(const_cast<void*>(rows)) + call.rows[row] * stride;
}

// Calls body(row, R), with a constant R, for all rows: `R` at a time, then once for the rest.
template <int R, class Body>
VLLM_LITE_INLINE void last_rows(int64_t row, int64_t left, const Body& body) {
  if constexpr (R > 0) {
    if (left == R) return body(row, std::integral_constant<int, R>());
    last_rows<R - 1>(row, left, body);
  }
}
template <int R, class Body>
VLLM_LITE_INLINE void each_rows(int64_t num_rows, const Body& body) {
  int64_t row = 0;
  for (; row + R <= num_rows; row += R) body(row, std::integral_constant<int, R>());
  last_rows<R - 1>(row, num_rows - row, body);
}

// Prefetches weights, which come from memory unless there are many rows.
template <class T>
VLLM_LITE_INLINE void fetch(const T* weights) {
  __builtin_prefetch(weights + kAhead / static_cast<int64_t>(sizeof(T)));
}

// to[k] = the sum of all elements of x[k].
#if defined(__AVX512F__)
VLLM_LITE_INLINE void store_sums(const Vec (&x)[kLoraRanks], float* to) {
  const __m512 a = (__m512)x[0], b = (__m512)x[1], c = (__m512)x[2], d = (__m512)x[3];
  const __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 four = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
  const __m256 two =
      _mm256_add_ps(_mm512_castps512_ps256(four), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(four), 1)));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
}
#else
VLLM_LITE_INLINE void store_sums(const Vec (&x)[kLoraRanks], float* to) {
  for (int64_t k = 0; k < kLoraRanks; ++k) to[k] = sum_of(x[k]);
}
#endif

// hidden [R][stride] = the products of R rows of x with a block of kLoraRanks rows of A.
template <int R, class T>
VLLM_LITE_INLINE void shrink_block(const T* const* x, const T* down, int64_t num_inputs, float* hidden,
                                   int64_t stride) {
  Vec total[R][kLoraRanks] = {};
  each_vector(num_inputs, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const T* weights = down + i / kLoraInputs * kLoraInputs * kLoraRanks + i % kLoraInputs;
    Vec values[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) values[r] = load_at(x[r], i, count);
#pragma GCC unroll 16
    for (int k = 0; k < kLoraRanks; ++k) {
      const Vec weight = load(weights + k * kLoraInputs);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) total[r][k] = multiply_add(values[r], weight, total[r][k]);
    }
  });
  for (int r = 0; r < R; ++r) store_sums(total[r], hidden + r * stride);
}

#if defined(__AVX512BF16__)
VLLM_LITE_INLINE __m512bh load_pairs(const BFloat16* from, int64_t count) {
  const __mmask32 mask = count >= 32 ? 0xffffffffu : (1u << count) - 1;
  return (__m512bh)_mm512_maskz_loadu_epi16(mask, from);
}
template <int R>
VLLM_LITE_INLINE void shrink_block(const BFloat16* const* x, const BFloat16* down, int64_t num_inputs, float* hidden,
                                   int64_t stride) {
  static_assert(kLoraInputs == 32, "one vector");
  Vec total[R][kLoraRanks] = {};
  for (int64_t i = 0; i < num_inputs; i += 32, down += kLoraRanks * 32) {
    __m512bh values[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) values[r] = load_pairs(x[r] + i, num_inputs - i);
#pragma GCC unroll 16
    for (int k = 0; k < kLoraRanks; ++k) {
      fetch(down + k * 32);
      const __m512bh weight = (__m512bh)_mm512_loadu_si512(down + k * 32);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) total[r][k] = (Vec)_mm512_dpbf16_ps((__m512)total[r][k], values[r], weight);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) store_sums(total[r], hidden + r * stride);
}
#endif

template <class T>
void shrink(const LoraCall& call, int64_t first, int64_t last) {
  const int64_t num_inputs = call.layer->num_inputs, stride = lora_hidden(*call.slot);
  const int64_t block = (num_inputs + kLoraInputs - 1) / kLoraInputs * kLoraInputs * kLoraRanks;
  each_rows<kShrinkRows>(call.num_rows, [&](int64_t row, auto number) {
    constexpr int R = decltype(number)::value;
    const T* x[R];
    for (int r = 0; r < R; ++r) x[r] = row_of<const T>(call.x, call.x_stride, call, row + r);
    for (int64_t k = first; k < last; ++k) {
      const T* down = static_cast<const T*>(call.slot->down) + k * block;
      shrink_block<R>(x, down, num_inputs, call.hidden + row * stride + k * kLoraRanks, stride);
    }
  });
}

// Factors and summands of the outputs of one projection (DoRA); null: none.
struct Lengths {
  const float* gain;
  const float* shift;
};

// For R rows and the `count` outputs from `start` on: out += hidden [R][stride] times `up` [rank][kLoraBlock].
template <int R, class T, class Out>
VLLM_LITE_INLINE void expand_block(const T* up, int64_t rank, const float* hidden, int64_t stride, Out* const* out,
                                   int64_t start, int64_t count, Lengths lengths) {
  Vec total[R][kVectors] = {};
  for (int64_t k = 0; k < rank; ++k) {
    fetch(up + k * kLoraBlock);
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
    const int64_t first = start + v * kWidth;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      Vec sum = load_at(out[r], first, part) + total[r][v];
      if (lengths.gain != nullptr) {
        sum = multiply_add(sum, load_at(lengths.gain, first, part), load_at(lengths.shift, first, part));
      }
      store_at(out[r], first, sum, part);
    }
  }
}

// Blocks [first, last) of one projection, whose outputs begin at `column`. Rows are the outer loop, because their
// outputs are far apart in memory.
template <class T, class Out>
void expand_projection(const LoraCall& call, int32_t number, const T* up, int64_t column, int64_t first, int64_t last) {
  const LoraSlot& slot = *call.slot;
  const int32_t matrix = call.layer->matrix[number];
  const int64_t rank = slot.ranks[matrix], stride = lora_hidden(slot), size = call.layer->sizes[number];
  const float* hidden = call.hidden;
  for (int32_t before = 0; before < matrix; ++before) hidden += slot.ranks[before];
  const Lengths lengths = slot.gain == nullptr ? Lengths{} : Lengths{slot.gain + column, slot.shift + column};
  each_rows<kExpandRows>(call.num_rows, [&](int64_t row, auto num_rows) {
    constexpr int R = decltype(num_rows)::value;
    Out* out[R];
    for (int r = 0; r < R; ++r) out[r] = row_of<Out>(call.out, call.out_stride, call, row + r) + column;
    for (int64_t block = first; block < last; ++block) {
      const int64_t start = block * kLoraBlock, left = size - start;
      expand_block<R>(up + start * rank, rank, hidden + row * stride, stride, out, start,
                      left < kLoraBlock ? left : kLoraBlock, lengths);
    }
  });
}

template <class T, class Out>
void expand(const LoraCall& call, int64_t first, int64_t last) {
  const LoraLayer& layer = *call.layer;
  const T* up = static_cast<const T*>(call.slot->up);
  int64_t column = 0, begin = 0;  // position of the projection, in outputs and in blocks
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
