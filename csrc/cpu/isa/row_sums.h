// Loads and stores of the sums of a group of rows: from and to memory, or as outputs.
#pragma once

#include "../linear.h"
#include "row_vectors.h"

namespace VLLM_LITE_ISA {
namespace {

// Position of a group's sums within a task's. It is passed separately: a copy of Sums with another position would be
// loaded in vectors from words just stored, and that has to wait for all earlier stores, including those of outputs.
struct At {
  int64_t row, output;
};

// The sums of a task's rows and some of its outputs. Between parts of the inputs they are in memory, [rows][stride].
// Registers are indexed by constants only, because sums on the stack would be stored behind the outputs, and those wait
// for their cache lines.
struct Sums {
  float* memory;
  int64_t stride;
  bool are_begun, are_done;
  const LinearCall* call;
  int64_t row, output;  // of the call

  template <int R, int V>
  inline __attribute__((always_inline)) void begin(At at, Vec (&total)[R][V]) const {
    const float* from = memory + at.row * stride + at.output;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) total[r][v] = are_begun ? load(from + r * stride + v * kWidth) : Vec{};
    }
  }

  template <int R, int V>
  inline __attribute__((always_inline)) void end(At at, const Vec (&total)[R][V]) const {
    if (!are_done) return store_all(memory + at.row * stride + at.output, stride, total);
    const int64_t left = call->weight->num_outputs - output - at.output;
    if (left < V * kWidth) {
      float sums[R * V * kWidth];
      store_all(sums, V * kWidth, total);
      return put_part_by_type(at, sums, V * kWidth, left, R);
    }
    if (call->out_type == kFloat32) return put<float>(at, total);
    call->out_type == kFloat16 ? put<Float16>(at, total) : put<BFloat16>(at, total);
  }

 private:
  template <class Out>
  Out* place(At at) const {
    return static_cast<Out*>(call->out) + (row + at.row) * call->out_stride + output + at.output;
  }

  template <int R, int V>
  VLLM_LITE_INLINE void store_all(float* to, int64_t stride, const Vec (&total)[R][V]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) store(to + r * stride + v * kWidth, total[r][v]);
    }
  }

  template <class Out, int R, int V>
  inline __attribute__((always_inline)) void put(At at, const Vec (&total)[R][V]) const {
    const int64_t first = output + at.output;
    Vec bias[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      bias[v] = splat(-0.0f);  // adding it changes nothing, not even -0
      if (call->weight->bias != nullptr) bias[v] = load(call->weight->bias + first + v * kWidth);
    }
    const int64_t step = call->out_stride;
    Out* to = place<Out>(at);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r, to += step) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) store(to + v * kWidth, total[r][v] + bias[v]);
    }
  }

  // Writes the first `left` outputs of rows in memory; `left` may be 0 or less.
  template <class Out>
  void put_part(At at, const float* sums, int64_t stride, int64_t left, int rows) const {
    const PackedWeight& weight = *call->weight;
    const int64_t first = output + at.output;
    for (int r = 0; r < rows; ++r) {
      Out* to = place<Out>(at) + r * call->out_stride;
      each_vector(left, [&](int64_t i, int64_t count) {
        const Vec sum = load(sums + r * stride + i);
        store_at(to, i, weight.bias == nullptr ? sum : sum + load_at(weight.bias + first, i, count), count);
      });
    }
  }

  __attribute__((noinline)) void put_part_by_type(At at, const float* sums, int64_t stride, int64_t left,
                                                  int rows) const {
    if (call->out_type == kFloat32) return put_part<float>(at, sums, stride, left, rows);
    call->out_type == kFloat16 ? put_part<Float16>(at, sums, stride, left, rows)
                               : put_part<BFloat16>(at, sums, stride, left, rows);
  }
};

}  // namespace
}  // namespace VLLM_LITE_ISA
