// Activations, sums and products over rows.
#include "../elementwise.h"

#include <cmath>

#include "row_vectors.h"

namespace VLLM_LITE_ISA {
namespace {

// ---- activations

// x / (1 + e^-y). Where e^-y would overflow it is infinity: finite x become 0 and -infinity becomes NaN.
VLLM_LITE_INLINE Vec gate(Vec x, Vec y) {
  const Vec power = exp(max(-y, splat(-88)));
  return x / (1 + (y < -88.0f ? splat(INFINITY) : power));
}

template <Activation kActivation>
VLLM_LITE_INLINE Vec activated(Vec x) {
  if (kActivation == kSilu) return gate(x, x);
  // 0.5 (1 + tanh(z)) = 1 / (1 + e^-2z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
  if (kActivation == kGeluTanh) return gate(x, 1.5957691216f * x * (1 + 0.044715f * (x * x)));
  if (kActivation == kRelu) return x < 0.0f ? Vec{} : x;
  if (kActivation == kRelu2) return x < 0.0f ? Vec{} : x * x;
  const Vec tail = normal_tail(x < 0.0f ? -x : x);
  return x * (x < 0.0f ? tail : 1 - tail);
}

// gpt-oss's activation. NaN stays NaN.
VLLM_LITE_INLINE Vec swiglu_oai(Vec x, Vec up) {
  const Vec limit = splat(7);
  x = x > limit ? limit : x;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return (up + 1) * gate(x, 1.702f * x);
}

template <class T, Activation kActivation>
void activate_rows(const Activate& op, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    T* x = static_cast<T*>(op.x) + i * op.stride;
    each_vector(op.size, [&](int64_t k, int64_t count) __attribute__((always_inline)) {
      store_at(x, k, activated<kActivation>(load_at(x, k, count)), count);
    });
  }
}

template <class T, Activation kActivation>
void activate_rows(const GatedActivation& op, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const T* gate = static_cast<const T*>(op.gate_up) + i * op.in_stride;
    const T* up = gate + op.size;
    T* out = static_cast<T*>(op.out) + i * op.out_stride;
    each_vector(op.size, [&](int64_t k, int64_t count) __attribute__((always_inline)) {
      const Vec x = load_at(gate, k, count), times = load_at(up, k, count);
      if (kActivation == kSwigluOai) {
        store_at(out, k, swiglu_oai(x, times), count);
      } else {
        store_at(out, k, rounded(activated<kActivation>(x), T()) * times, count);
      }
    });
  }
}

template <class T>
void activate_more(const Activate&, int64_t, int64_t) {}

template <class T>
void activate_more(const GatedActivation& op, int64_t first, int64_t last) {
  if (op.activation == kSwigluOai) activate_rows<T, kSwigluOai>(op, first, last);
}

template <class T, class Op>
void activate_by_kind(const Op& op, int64_t first, int64_t last) {
  if (op.activation == kSilu) activate_rows<T, kSilu>(op, first, last);
  if (op.activation == kGeluTanh) activate_rows<T, kGeluTanh>(op, first, last);
  if (op.activation == kGelu) activate_rows<T, kGelu>(op, first, last);
  if (op.activation == kRelu) activate_rows<T, kRelu>(op, first, last);
  if (op.activation == kRelu2) activate_rows<T, kRelu2>(op, first, last);
  activate_more<T>(op, first, last);
}

// ---- sums and products

template <class T>
void add_rows_at(const AddRows& op, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const int64_t row = op.positions == nullptr ? i : op.positions[i];
    add_row(static_cast<T*>(op.x) + i * op.x_stride, static_cast<const T*>(op.added) + row * op.added_stride, op.size);
  }
}

template <class T>
void scale_rows_at(const ScaleRows& op, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const Vec factor = splat(op.table == nullptr ? op.factor : op.table[op.positions[i]]);
    for (int64_t j = 0; j < op.num_inner; ++j) {
      T* x = static_cast<T*>(op.x) + i * op.x_outer + j * op.x_inner;
      each_vector(op.size, [&](int64_t k, int64_t count) __attribute__((always_inline)) {
        store_at(x, k, load_at(x, k, count) * factor, count);
      });
    }
  }
}

// 1 + e^-x. The gated value is divided by it.
VLLM_LITE_INLINE Vec inverse_sigmoid(Vec x) {
  const Vec negative = 0.0f - x;
  return 1.0f + exp(negative > 87.0f ? splat(87.0f) : negative);
}

template <class T>
void sigmoid_gate_rows(const SigmoidGate& op, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    T* x = static_cast<T*>(op.x) + i * op.x_stride;
    const T* gate = static_cast<const T*>(op.gate) + i * op.gate_stride;
    each_vector(op.size, [&](int64_t k, int64_t count) __attribute__((always_inline)) {
      store_at(x, k, load_at(x, k, count) / inverse_sigmoid(load_at(gate, k, count)), count);
    });
  }
}

template <class T>
void gate_heads_at(const GateHeads& op, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const T* gates = static_cast<const T*>(op.gate) + i * op.gate_stride;
    for (int64_t j = 0; j < op.num_heads; ++j) {
      T* x = static_cast<T*>(op.x) + i * op.x_stride + j * op.head_size;
      const Vec scale = inverse_sigmoid(splat(load_part(gates + j, 1)[0]));
      each_vector(op.head_size, [&](int64_t k, int64_t count) __attribute__((always_inline)) {
        store_at(x, k, load_at(x, k, count) / scale, count);
      });
    }
  }
}

// e^x - 1 for x <= 0; by its series near 0, where subtraction would cancel most digits.
VLLM_LITE_INLINE Vec exp_minus_one(Vec x) {
  const Vec series =
      x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8)))))));
  return x > -0.5f ? series : exp(max(x, splat(-87))) - 1;
}

template <class T>
void xielu_rows(const Xielu& op, int64_t first, int64_t last) {
  const Vec above = splat(op.factors[0]), below = splat(op.factors[1]);
  const Vec beta = splat(op.factors[2]), eps = splat(op.factors[3]);
  for (int64_t i = first; i < last; ++i) {
    T* row = static_cast<T*>(op.x) + i * op.stride;
    each_vector(op.size, [&](int64_t k, int64_t count) __attribute__((always_inline)) {
      const Vec x = load_at(row, k, count), least = x > eps ? eps : x;
      const Vec curved = x > 0.0f ? above * (x * x) : below * (exp_minus_one(least) - x);
      store_at(row, k, curved + beta * x, count);
    });
  }
}

template <class T>
void clamp_rows(const Clamp& op, int64_t first, int64_t last) {
  const Vec high = rounded(splat(op.limit), T()), low = -high;
  for (int64_t i = first; i < last; ++i) {
    T* row = static_cast<T*>(op.x) + i * op.stride;
    each_vector(op.size, [&](int64_t k, int64_t count) __attribute__((always_inline)) {
      const Vec x = load_at(row, k, count);
      store_at(row, k, x > high ? high : x < low ? low : x, count);
    });
  }
}

}  // namespace

VLLM_LITE_BY_DTYPE(activate, activate_by_kind, Activate)
VLLM_LITE_BY_DTYPE(gated_activation, activate_by_kind, GatedActivation)
VLLM_LITE_BY_DTYPE(add_rows, add_rows_at, AddRows)
VLLM_LITE_BY_DTYPE(scale_rows, scale_rows_at, ScaleRows)
VLLM_LITE_BY_DTYPE(sigmoid_gate, sigmoid_gate_rows, SigmoidGate)
VLLM_LITE_BY_DTYPE(gate_heads, gate_heads_at, GateHeads)
VLLM_LITE_BY_DTYPE(xielu, xielu_rows, Xielu)
VLLM_LITE_BY_DTYPE(clamp, clamp_rows, Clamp)

void scale_and_cap(const ScaleAndCap& op, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    float* row = op.logits + i * op.stride;
    each_vector(op.size, [&](int64_t k, int64_t count) __attribute__((always_inline)) {
      const Vec scaled = load_at(row, k, count) * op.factor;
      store_at(row, k, op.cap == 0 ? scaled : op.cap * tanh(scaled / op.cap), count);
    });
  }
}

}  // namespace VLLM_LITE_ISA
