// Norms and rotary embedding over rows. The order of sums depends only on the row's size and the instruction set.
#include "../fused.h"

#include <cmath>

#include "row_vectors.h"

namespace VLLM_LITE_ISA {
namespace {

// The sum of next(i, count) over all vectors, in four chains.
template <class Next>
VLLM_LITE_INLINE float sum_over(int64_t size, const Next& next) {
  Vec sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= size; i += 4 * kWidth) {
    for (int chain = 0; chain < 4; ++chain) sums[chain] += next(i + chain * kWidth, kWidth);
  }
  for (; i < size; i += kWidth) sums[0] += next(i, size - i < kWidth ? size - i : kWidth);
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class Next>
VLLM_LITE_INLINE float sum_of_squares(int64_t size, const Next& next) {
  return sum_over(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const Vec x = next(i, count);
    return x * x;
  });
}

template <class T>
VLLM_LITE_INLINE void scale_row(const T* x, const T* weight, T* out, int64_t size, float squares, float eps) {
  const Vec scale = splat(1 / std::sqrt(squares / static_cast<float>(size) + eps));
  each_vector(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    store_at(out, i, rounded(load_at(x, i, count) * scale, T()) * load_at(weight, i, count), count);
  });
}

template <class T>
void rms_norm_rows(const RmsNorm& op, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    for (int64_t j = 0; j < op.num_inner; ++j) {
      const T* x = static_cast<const T*>(op.x) + i * op.x_outer + j * op.x_inner;
      T* out = static_cast<T*>(op.out) + i * op.out_outer + j * op.out_inner;
      const float squares = sum_of_squares(
          op.size, [&](int64_t k, int64_t count) __attribute__((always_inline)) { return load_at(x, k, count); });
      scale_row(x, static_cast<const T*>(op.weight), out, op.size, squares, op.eps);
    }
  }
}

template <class T>
void add_rms_norm_rows(const AddRmsNorm& op, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    T* residual = static_cast<T*>(op.residual) + i * op.residual_stride;
    const T* x = static_cast<const T*>(op.x) + i * op.x_stride;
    const float squares = sum_of_squares(op.size, [&](int64_t k, int64_t count) __attribute__((always_inline)) {
      const Vec sum = rounded(load_at(residual, k, count) + load_at(x, k, count), T());
      store_at(residual, k, sum, count);
      return sum;
    });
    T* out = static_cast<T*>(op.out) + i * op.out_stride;
    scale_row(residual, static_cast<const T*>(op.weight), out, op.size, squares, op.eps);
  }
}

// Rounds at the end only. x - mean is computed again for each sum instead of being stored.
template <class T>
VLLM_LITE_INLINE void wide_norm_row(const WideWeights& norm, const T* x, T* out, int64_t size) {
  const float elements = static_cast<float>(size);
  const auto next = [&](int64_t i, int64_t count) __attribute__((always_inline)) { return load_at(x, i, count); };
  const Vec mean = splat(norm.centered ? sum_over(size, next) / elements : 0);
  const float squares = sum_of_squares(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    return first_of(load_at(x, i, count) - mean, count);
  });
  const Vec scale = splat(1 / std::sqrt(squares / elements + norm.eps));
  each_vector(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const Vec shift = norm.bias == nullptr ? Vec{} : load_at(norm.bias, i, count);
    store_at(out, i, (load_at(x, i, count) - mean) * scale * load_at(norm.weight, i, count) + shift, count);
  });
}

template <class T>
void wide_norm_rows(const WideNorm& op, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    for (int64_t j = 0; j < op.num_inner; ++j) {
      const T* x = static_cast<const T*>(op.x) + i * op.x_outer + j * op.x_inner;
      const int64_t skipped = j * op.weight_inner;
      const float* bias = op.norm.bias == nullptr ? nullptr : op.norm.bias + skipped;
      const WideWeights norm = {op.norm.centered, op.norm.eps, op.norm.weight + skipped, bias};
      wide_norm_row(norm, x, static_cast<T*>(op.out) + i * op.out_outer + j * op.out_inner, op.size);
    }
  }
}

template <class T>
void add_wide_norm_rows(const AddWideNorm& op, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    T* residual = static_cast<T*>(op.residual) + i * op.residual_stride;
    add_row(residual, static_cast<const T*>(op.x) + i * op.x_stride, op.size);
    wide_norm_row(op.norm, residual, static_cast<T*>(op.out) + i * op.out_stride, op.size);
  }
}

template <class T>
void rotate_tokens(const Rotate& op, int64_t first, int64_t last) {
  const int64_t half = op.head_size / 2;
  for (int64_t token = first; token < last; ++token) {
    const T* cos = static_cast<const T*>(op.cos) + token * op.rotation_stride;
    const T* sin = static_cast<const T*>(op.sin) + token * op.rotation_stride;
    for (int64_t head = 0; head < op.num_heads; ++head) {
      const T* low = static_cast<const T*>(op.heads) + token * op.token_stride + head * op.head_stride;
      const T* high = low + half;
      T* out = static_cast<T*>(op.out) + token * op.out_token_stride + head * op.out_head_stride;
      each_vector(half, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const Vec a = load_at(low, i, count), b = load_at(high, i, count);
        store_at(out, i, a * load_at(cos, i, count) + b * load_at(sin, i, count), count);
        store_at(out + half, i, b * load_at(cos + half, i, count) + a * load_at(sin + half, i, count), count);
      });
    }
  }
}

template <class T>
void select_rotation_tokens(const SelectRotation& op, int64_t first, int64_t last) {
  for (int64_t token = first; token < last; ++token) {
    const float* row = op.table + op.positions[token] * 2 * op.half;
    T* cos = static_cast<T*>(op.cos) + token * op.stride;
    T* sin = static_cast<T*>(op.sin) + token * op.stride;
    each_vector(op.half, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec c = load_at(row, i, count), s = load_at(row + op.half, i, count);
      store_at(cos, i, c, count);
      store_at(cos + op.half, i, c, count);
      store_at(sin, i, -s, count);
      store_at(sin + op.half, i, s, count);
    });
  }
}

}  // namespace

VLLM_LITE_BY_DTYPE(rms_norm, rms_norm_rows, RmsNorm)
VLLM_LITE_BY_DTYPE(add_rms_norm, add_rms_norm_rows, AddRmsNorm)
VLLM_LITE_BY_DTYPE(wide_norm, wide_norm_rows, WideNorm)
VLLM_LITE_BY_DTYPE(add_wide_norm, add_wide_norm_rows, AddWideNorm)
VLLM_LITE_BY_DTYPE(rotate, rotate_tokens, Rotate)
VLLM_LITE_BY_DTYPE(select_rotation, select_rotation_tokens, SelectRotation)

}  // namespace VLLM_LITE_ISA
