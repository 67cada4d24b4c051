// The scan of Mamba-2 layers, token by token. kColumns columns of a head's matrix stay in the first-level cache for all
// tokens of a segment. The order of sums depends only on sizes: a token has the same bits however its prompt is
// divided.
#include "../mamba.h"

#include <cmath>

#include "row_vectors.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int kVectors = 2;
constexpr int64_t kColumns = kVectors * kWidth;
constexpr int kChains = 4;

// The columns [column, column + width) of a head's matrix.
struct Columns {
  int64_t head, column, width;
};

// Number of elements in vector `i` of the columns.
VLLM_LITE_INLINE int64_t size_of(const Columns& own, int i) {
  const int64_t left = own.width - i * kWidth;
  return left > kWidth ? static_cast<int64_t>(kWidth) : left < 0 ? 0 : left;
}

template <class T>
VLLM_LITE_INLINE void scan_token(const Mamba& op, const Columns& own, int64_t row, float* state) {
  const int64_t values = op.num_heads * op.head_size, begin = own.head * op.head_size + own.column;
  const int64_t shared = op.num_groups * op.state_size, group = own.head / (op.num_heads / op.num_groups);
  const float* mixed = op.mixed + row * (values + 2 * shared);
  const float *x = mixed + begin, *b = mixed + values + group * op.state_size, *c = b + shared;
  const float raw = to_float(static_cast<const T*>(op.dt)[row * op.projected_stride + own.head]) + op.dt_bias[own.head];
  const float softplus = raw > 20 ? raw : std::log1p(std::exp(raw));
  const float dt = softplus < op.dt_min ? op.dt_min : softplus > op.dt_max ? op.dt_max : softplus;
  const float decay = std::exp(-op.decay[own.head] * dt);
  Vec added[kVectors], sums[kChains][kVectors] = {};
  for (int i = 0; i < kVectors; ++i) added[i] = load_at(x, i * kWidth, size_of(own, i)) * dt;
  const auto pass = [&](int64_t k, int chain) __attribute__((always_inline)) {
    for (int i = 0; i < kVectors; ++i) {
      float* at = state + k * kColumns + i * kWidth;
      const Vec next = multiply_add(splat(b[k]), added[i], load(at) * decay);
      store(at, next);
      sums[chain][i] = multiply_add(splat(c[k]), next, sums[chain][i]);
    }
  };
  int64_t k = 0;
  for (; k + kChains <= op.state_size; k += kChains) {
    for (int chain = 0; chain < kChains; ++chain) pass(k + chain, chain);
  }
  for (; k < op.state_size; ++k) pass(k, 0);
  const T* z = static_cast<const T*>(op.z) + row * op.projected_stride + begin;
  T* out = static_cast<T*>(op.out) + row * op.out_stride + begin;
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = i * kWidth, count = size_of(own, i);
    if (count == 0) continue;
    const Vec read = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    const Vec all = multiply_add(load_at(x, at, count), splat(op.skip[own.head]), read);
    store_at(out, at, all * silu(load_at(z, at, count)), count);
  }
}

template <class T>
void scan_segment(const Mamba& op, const Columns& own, int64_t segment, const float* from, float* to) {
  alignas(64) float state[kMaxStateSize * kColumns];
  for (int64_t k = 0; k < op.state_size; ++k) {
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = i * kWidth, count = size_of(own, i);
      const bool is_there = from != nullptr && count > 0;
      store(state + k * kColumns + at, is_there ? load_at(from + k * op.head_size + own.column, at, count) : Vec{});
    }
  }
  for (int64_t row = op.segments.rows[segment]; row < op.segments.rows[segment + 1]; ++row) {
    scan_token<T>(op, own, row, state);
  }
  if (to == nullptr) return;
  for (int64_t k = 0; k < op.state_size; ++k) {
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = i * kWidth, count = size_of(own, i);
      if (count > 0) store_at(to + k * op.head_size + own.column, at, load(state + k * kColumns + at), count);
    }
  }
}

template <class T>
void mamba_tasks(const Mamba& op, int64_t first, int64_t last) {
  for (int64_t task = first; task < last; ++task) {
    const int64_t seq = task / op.num_heads, head = task % op.num_heads;
    const int64_t matrix = head * op.state_size * op.head_size;
    for (int64_t segment = op.segments.firsts[seq]; segment < op.segments.firsts[seq + 1]; ++segment) {
      const int32_t source = op.segments.sources[segment], target = op.segments.targets[segment];
      const float* from = source == 0 ? nullptr : op.states + source * op.slot_stride + matrix;
      float* to = target == 0 ? nullptr : op.states + target * op.slot_stride + matrix;
      for (int64_t column = 0; column < op.head_size; column += kColumns) {
        const int64_t left = op.head_size - column;
        scan_segment<T>(op, {head, column, left < kColumns ? left : kColumns}, segment, from, to);
      }
    }
  }
}

}  // namespace

VLLM_LITE_BY_DTYPE(mamba, mamba_tasks, Mamba)

}  // namespace VLLM_LITE_ISA
