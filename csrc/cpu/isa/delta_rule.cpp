// The gated delta rule, token by token. kColumns columns of a head's matrix stay in the first-level cache for kTile
// tokens of a segment. The order of sums depends only on sizes: a token has the same bits however its prompt is
// divided.
//
// The chunked form, with matrix products of float32 over 32 tokens, was tried and is no faster, because it takes 1.2
// times as many operations.
#include "../delta_rule.h"

#include <cmath>

#include "row_vectors.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int64_t kTile = 16;  // tokens whose q and k are normalized together
constexpr int kVectors = 2;
constexpr int64_t kColumns = kVectors * kWidth;
constexpr int kChains = 4;

// Inputs of the convolution for kWidth channels, or `count`: first those in the state, then a segment's rows.
template <class T>
struct ConvInputs {
  const T* rows;       // [num_rows], `stride` apart
  const T* gates;      // factors of these, laid out the same way; nullptr: none
  const float* state;  // [kept], `channels` apart; nullptr: zeros
  int64_t stride, channels, kept;

  // Input `n`: from the state if n < kept, else from the rows.
  VLLM_LITE_INLINE Vec at(const ConvInputs& self, int64_t n, int64_t i, int64_t count) {
    if (n >= self.kept) {
      const int64_t row = (n - self.kept) * self.stride;
      const Vec x = load_at(self.rows + row, i, count);
      return self.gates == nullptr ? x : x * load_at(self.gates + row, i, count);
    }
    return self.state == nullptr ? Vec{} : load_at(self.state + n * self.channels, i, count);
  }
};

template <class T>
void conv_segment(const ShortConv& op, int64_t begin, int64_t size, int64_t segment) {
  const int64_t kept = op.conv_size - 1, row = op.segments.rows[segment];
  const int64_t num_rows = op.segments.rows[segment + 1] - row;
  const int32_t source = op.segments.sources[segment], target = op.segments.targets[segment];
  const float* state = source == 0 ? nullptr : op.states + source * op.slot_stride + begin;
  const int64_t offset = row * op.x_stride + begin;
  const T* gates = op.gate == nullptr ? nullptr : static_cast<const T*>(op.gate) + offset;
  const T* out_gates = op.out_gate == nullptr ? nullptr : static_cast<const T*>(op.out_gate) + offset;
  const ConvInputs<T> inputs = {static_cast<const T*>(op.x) + offset, gates, state, op.x_stride, op.channels, kept};
  const float* weight = op.weight + begin;
  for (int64_t n = 0; n < num_rows; ++n) {
    const int64_t at = (row + n) * op.out_stride + begin;
    each_vector(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      Vec sum = op.bias == nullptr ? Vec{} : load_at(op.bias + begin, i, count);
      for (int64_t tap = 0; tap <= kept; ++tap) {
        sum = multiply_add(inputs.at(inputs, n + tap, i, count), load_at(weight + tap * op.channels, i, count), sum);
      }
      if (out_gates == nullptr) {
        store_at(static_cast<float*>(op.out) + at, i, silu(sum), count);
      } else {
        store_at(static_cast<T*>(op.out) + at, i, sum * load_at(out_gates + n * op.x_stride, i, count), count);
      }
    });
  }
  if (target == 0) return;
  float* to = op.states + target * op.slot_stride +
              begin;  // may be the state that is read: each input is read before it is overwritten
  for (int64_t n = 0; n < kept; ++n) {
    each_vector(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      store_at(to + n * op.channels, i, inputs.at(inputs, num_rows + n, i, count), count);
    });
  }
}

template <class T>
void conv_tasks(const ShortConv& op, int64_t first, int64_t last) {
  const int64_t parts = (op.channels + kConvChannels - 1) / kConvChannels;
  for (int64_t task = first; task < last; ++task) {
    const int64_t seq = task / parts, begin = task % parts * kConvChannels;
    const int64_t size = op.channels - begin < kConvChannels ? op.channels - begin : kConvChannels;
    for (int64_t segment = op.segments.firsts[seq]; segment < op.segments.firsts[seq + 1]; ++segment) {
      conv_segment<T>(op, begin, size, segment);
    }
  }
}

// One token's inputs to a head, and its output.
struct Token {
  const float *q, *k, *v;
  float decay, beta;
  float* out;
};

// to = decay * from + k (beta (v - decay from^T k))^T, out = to^T q, for `width` columns. `to` may be `from`.
template <bool kWhole>
VLLM_LITE_INLINE void update(const Token& token, int64_t key_size, const float* from, int64_t from_stride, float* to,
                             int64_t to_stride, int64_t width) {
  const auto size = [&](int i) __attribute__((always_inline)) {
    const int64_t left = width - i * kWidth;
    return kWhole || left > kWidth ? static_cast<int64_t>(kWidth) : left < 0 ? 0 : left;
  };
  const auto read = [&](const float* row, int i) __attribute__((always_inline)) {
    return kWhole ? load(row + i * kWidth) : load_at(row, i * kWidth, size(i));
  };
  const auto write = [&](float* row, int i, Vec x) __attribute__((always_inline)) {
    if (kWhole) return store(row + i * kWidth, x);
    store_at(row, i * kWidth, x, size(i));
  };
  Vec sums[kChains][kVectors] = {};
  int64_t k = 0;
  for (; k + kChains <= key_size; k += kChains) {
    for (int chain = 0; chain < kChains; ++chain) {
      const float* row = from + (k + chain) * from_stride;
      for (int i = 0; i < kVectors; ++i) {
        sums[chain][i] = multiply_add(splat(token.k[k + chain]), read(row, i), sums[chain][i]);
      }
    }
  }
  for (; k < key_size; ++k) {
    for (int i = 0; i < kVectors; ++i) {
      sums[0][i] = multiply_add(splat(token.k[k]), read(from + k * from_stride, i), sums[0][i]);
    }
  }
  Vec delta[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    const Vec known = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    delta[i] = (read(token.v, i) - known * token.decay) * token.beta;
    for (int chain = 0; chain < kChains; ++chain) sums[chain][i] = Vec{};
  }
  const auto pass = [&](int64_t at, int chain) __attribute__((always_inline)) {
    for (int i = 0; i < kVectors; ++i) {
      const Vec next = multiply_add(splat(token.k[at]), delta[i], read(from + at * from_stride, i) * token.decay);
      write(to + at * to_stride, i, next);
      sums[chain][i] = multiply_add(splat(token.q[at]), next, sums[chain][i]);
    }
  };
  for (k = 0; k + kChains <= key_size; k += kChains) {
    for (int chain = 0; chain < kChains; ++chain) pass(k + chain, chain);
  }
  for (; k < key_size; ++k) pass(k, 0);
  for (int i = 0; i < kVectors; ++i) {
    write(token.out, i, (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]));
  }
}

VLLM_LITE_INLINE float dot(const float* x, const float* y, int64_t size) {
  Vec sum = {};
  each_vector(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    sum = multiply_add(load_at(x, i, count), load_at(y, i, count), sum);
  });
  return sum_of(sum);
}

// to = x / sqrt(x^T x + 1e-6) * factor
VLLM_LITE_INLINE void unit(const float* x, int64_t size, float factor, float* to) {
  const float scale = factor / std::sqrt(dot(x, x, size) + 1e-6f);
  each_vector(size, [&](int64_t i, int64_t count)
                        __attribute__((always_inline)) { store_at(to, i, load_at(x, i, count) * scale, count); });
}

template <class T>
VLLM_LITE_INLINE void gated_norm(const DeltaRule& op, const float* x, const T* z, T* out) {
  const float scale = 1 / std::sqrt(dot(x, x, op.value_size) / static_cast<float>(op.value_size) + op.eps);
  each_vector(op.value_size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const Vec normed = load_at(x, i, count) * scale * load_at(op.norm, i, count);
    store_at(out, i, normed * silu(load_at(z, i, count)), count);
  });
}

// Computes up to kTile tokens of a head, from `row` on.
template <class T>
void delta_tile(const DeltaRule& op, int64_t head, int64_t row, int64_t count, const float* from, float* to) {
  alignas(64) float q[kTile][kMaxHeadSize], k[kTile][kMaxHeadSize], out[kTile][kMaxHeadSize];
  alignas(64) float block[kMaxHeadSize * kColumns];
  Token tokens[kTile];
  const int64_t key_head = head / (op.num_value_heads / op.num_key_heads), width = op.num_key_heads * op.key_size;
  const int64_t channels = 2 * width + op.num_value_heads * op.value_size;
  const float factor = 1 / std::sqrt(static_cast<float>(op.key_size));
  for (int64_t t = 0; t < count; ++t) {
    const float* mixed = op.mixed + (row + t) * channels;
    const int64_t at = (row + t) * op.projected_stride + head;
    unit(mixed + key_head * op.key_size, op.key_size, factor, q[t]);
    unit(mixed + width + key_head * op.key_size, op.key_size, 1, k[t]);
    const float x = to_float(static_cast<const T*>(op.a)[at]) + op.dt_bias[head];
    const float softplus = x > 20 ? x : std::log1p(std::exp(x));
    const float b = to_float(static_cast<const T*>(op.b)[at]);
    const float* v = mixed + 2 * width + head * op.value_size;
    tokens[t] = {q[t], k[t], v, std::exp(-op.decay[head] * softplus), 1 / (1 + std::exp(-b)), out[t]};
  }
  for (int64_t column = 0; column < op.value_size; column += kColumns) {
    const int64_t left = op.value_size - column;
    for (int64_t t = 0; t < count; ++t) {
      // The first token reads the state in place, and the last one writes it to its destination.
      const bool is_first = t == 0 && from != nullptr, is_last = t == count - 1;
      if (t == 0 && !is_first) std::memset(block, 0, sizeof(float) * static_cast<size_t>(op.key_size * kColumns));
      const float* source = is_first ? from + column : block;
      float* target = is_last ? to + column : block;
      const int64_t source_stride = is_first ? op.value_size : kColumns;
      const int64_t target_stride = is_last ? op.value_size : kColumns;
      Token token = tokens[t];
      token.v += column;
      token.out += column;
      if (left >= kColumns) {
        update<true>(token, op.key_size, source, source_stride, target, target_stride, kColumns);
      } else {
        update<false>(token, op.key_size, source, source_stride, target, target_stride, left);
      }
    }
  }
  for (int64_t t = 0; t < count; ++t) {
    const T* z = static_cast<const T*>(op.z) + (row + t) * op.projected_stride + head * op.value_size;
    gated_norm(op, out[t], z, static_cast<T*>(op.out) + (row + t) * op.out_stride + head * op.value_size);
  }
}

template <class T>
void delta_tasks(const DeltaRule& op, int64_t first, int64_t last) {
  const int64_t matrix = op.key_size * op.value_size;
  alignas(64) static thread_local float kept[kMaxHeadSize * kMaxHeadSize];  // for a state that is discarded
  for (int64_t task = first; task < last; ++task) {
    const int64_t seq = task / op.num_value_heads, head = task % op.num_value_heads;
    for (int64_t segment = op.segments.firsts[seq]; segment < op.segments.firsts[seq + 1]; ++segment) {
      const int32_t source = op.segments.sources[segment], target = op.segments.targets[segment];
      const float* from = source == 0 ? nullptr : op.states + source * op.slot_stride + head * matrix;
      float* to = target == 0 ? kept : op.states + target * op.slot_stride + head * matrix;
      const int64_t end = op.segments.rows[segment + 1];
      if (op.segments.rows[segment] == end && from != nullptr) {
        std::memcpy(to, from, sizeof(float) * static_cast<size_t>(matrix));
      }
      for (int64_t row = op.segments.rows[segment]; row < end; row += kTile) {
        delta_tile<T>(op, head, row, end - row < kTile ? end - row : kTile, from, to);
        from = to;
      }
    }
  }
}

}  // namespace

VLLM_LITE_BY_DTYPE(short_conv, conv_tasks, ShortConv)
VLLM_LITE_BY_DTYPE(delta_rule, delta_tasks, DeltaRule)

}  // namespace VLLM_LITE_ISA
