// RMSNorm, gated activations and rotary embedding over rows. Sums run in an order that depends on the row's size and
// the instruction set only.
#include "../fused.h"

#include <cmath>

#include "simd.h"

namespace VLLM_LITE_ISA {
namespace {

// The first `count` elements; the others of the vector are 0.
template <class T>
VLLM_LITE_INLINE Vec load_part(const T* from, int64_t count) {
  T padded[kWidth] = {};
  std::memcpy(padded, from, static_cast<size_t>(count) * sizeof(T));
  return load(padded);
}

template <class T>
VLLM_LITE_INLINE void store_part(T* to, Vec x, int64_t count) {
  T padded[kWidth];
  store(padded, x);
  std::memcpy(to, padded, static_cast<size_t>(count) * sizeof(T));
}

// x as it comes back from a T.
VLLM_LITE_INLINE Vec rounded(Vec x, float) {
  return x;
}
VLLM_LITE_INLINE Vec rounded(Vec x, BFloat16) {
#if defined(__AVX512BF16__)
  const __m256i halves = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x)));
  return reinterpret_cast<Vec>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#else
  typedef uint32_t Bits __attribute__((vector_size(kWidth * 4)));
  const Bits bits = reinterpret_cast<Bits>(x);
  return x != x ? x : reinterpret_cast<Vec>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
#endif
}
VLLM_LITE_INLINE Vec rounded(Vec x, Float16) {
  Float16 stored[kWidth];
  store(stored, x);
  return load(stored);
}

// body(i, count) for each vector of [0, size): count is kWidth, a constant, but for the last one.
template <class Body>
VLLM_LITE_INLINE void each_vector(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) body(i, kWidth);
  if (i < size) body(i, size - i);
}

template <class T>
VLLM_LITE_INLINE Vec load_at(const T* from, int64_t i, int64_t count) {
  return count == kWidth ? load(from + i) : load_part(from + i, count);
}

template <class T>
VLLM_LITE_INLINE void store_at(T* to, int64_t i, Vec x, int64_t count) {
  if (count == kWidth) return store(to + i, x);
  store_part(to + i, x, count);
}

// The sum of the squares of what `next` gives for each vector, in four chains.
template <class Next>
VLLM_LITE_INLINE float sum_of_squares(int64_t size, const Next& next) {
  Vec sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= size; i += 4 * kWidth) {
    for (int chain = 0; chain < 4; ++chain) {
      const Vec x = next(i + chain * kWidth, kWidth);
      sums[chain] += x * x;
    }
  }
  for (; i < size; i += kWidth) {
    const Vec x = next(i, size - i < kWidth ? size - i : kWidth);
    sums[0] += x * x;
  }
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
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

// x / (1 + e^-y). Where e^-y would overflow it is infinity: finite x become 0 and -infinity becomes NaN.
VLLM_LITE_INLINE Vec gate(Vec x, Vec y) {
  const Vec power = exp(max(-y, splat(-88)));
  return x / (1 + (y < -88.0f ? splat(INFINITY) : power));
}

template <Activation kActivation>
VLLM_LITE_INLINE Vec activate(Vec x) {
  if (kActivation == kSilu) return gate(x, x);
  // 0.5 (1 + tanh(z)) = 1 / (1 + e^-2z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
  return gate(x, 1.5957691216f * x * (1 + 0.044715f * (x * x)));
}

template <class T, Activation kActivation>
void activate_rows(const GatedActivation& op, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const T* gate = static_cast<const T*>(op.gate_up) + i * op.in_stride;
    const T* up = gate + op.size;
    T* out = static_cast<T*>(op.out) + i * op.out_stride;
    each_vector(op.size, [&](int64_t k, int64_t count) __attribute__((always_inline)) {
      const Vec activated = rounded(activate<kActivation>(load_at(gate, k, count)), T());
      store_at(out, k, activated * load_at(up, k, count), count);
    });
  }
}

template <class T>
void gated_activation_rows(const GatedActivation& op, int64_t first, int64_t last) {
  if (op.activation == kSilu) return activate_rows<T, kSilu>(op, first, last);
  activate_rows<T, kGelu>(op, first, last);
}

template <class T>
void rotate_tokens(const Rotate& op, int64_t first, int64_t last) {
  const int64_t half = op.head_size / 2;
  for (int64_t token = first; token < last; ++token) {
    const T* cos = static_cast<const T*>(op.cos) + token * op.rotation_stride;
    const T* sin = static_cast<const T*>(op.sin) + token * op.rotation_stride;
    for (int64_t head = 0; head < op.num_heads; ++head) {
      T* low = static_cast<T*>(op.heads) + token * op.token_stride + head * op.head_stride;
      T* high = low + half;
      each_vector(half, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const Vec a = load_at(low, i, count), b = load_at(high, i, count);
        store_at(low, i, a * load_at(cos, i, count) + b * load_at(sin, i, count), count);
        store_at(high, i, b * load_at(cos + half, i, count) + a * load_at(sin + half, i, count), count);
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

// Each picks the element type. The caller has seen to it that there is one.
#define VLLM_LITE_BY_DTYPE(name, function, Op)                      \
  void name(const Op& op, int64_t first, int64_t last) {            \
    if (op.dtype == kFloat32) function<float>(op, first, last);     \
    if (op.dtype == kBFloat16) function<BFloat16>(op, first, last); \
    if (op.dtype == kFloat16) function<Float16>(op, first, last);   \
  }
VLLM_LITE_BY_DTYPE(rms_norm, rms_norm_rows, RmsNorm)
VLLM_LITE_BY_DTYPE(add_rms_norm, add_rms_norm_rows, AddRmsNorm)
VLLM_LITE_BY_DTYPE(gated_activation, gated_activation_rows, GatedActivation)
VLLM_LITE_BY_DTYPE(rotate, rotate_tokens, Rotate)
VLLM_LITE_BY_DTYPE(select_rotation, select_rotation_tokens, SelectRotation)

}  // namespace VLLM_LITE_ISA
