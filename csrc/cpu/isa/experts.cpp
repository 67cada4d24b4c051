// Weighted sums of rows.
#include "../experts.h"

#include "row_vectors.h"

namespace VLLM_LITE_ISA {

void add_weighted(float* sum, const float* row, float weight, int64_t size) {
  const Vec factor = splat(weight);
  each_vector(size, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    store_at(sum, i, multiply_add(factor, load_at(row, i, count), load_at(sum, i, count)), count);
  });
}

namespace {

template <class T>
void add_gated_rows(const AddGated& op, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const float gate = op.gates[i * op.gate_stride];
    const Vec factor = 1 / (1 + exp(splat(gate < -88 ? 88.0f : -gate)));
    T* x = static_cast<T*>(op.x) + i * op.x_stride;
    const T* added = static_cast<const T*>(op.added) + i * op.added_stride;
    each_vector(op.size, [&](int64_t k, int64_t count) __attribute__((always_inline)) {
      store_at(x, k, multiply_add(factor, load_at(added, k, count), load_at(x, k, count)), count);
    });
  }
}

}  // namespace

VLLM_LITE_BY_DTYPE(add_gated, add_gated_rows, AddGated)

}  // namespace VLLM_LITE_ISA
