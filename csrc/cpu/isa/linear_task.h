// Code that tasks of all types share: prefetches, and the conversion of sums to outputs.
#pragma once

#include "../linear.h"
#include "simd.h"

namespace VLLM_LITE_ISA {
namespace {

// Memory to prefetch during a tile, because the processor itself looks ahead within 4 KiB only: `step` bytes for each
// pair of inputs. The address need not be valid.
struct Ahead {
  const char* from;
  int64_t step;
};

template <int64_t kBytes>
VLLM_LITE_INLINE void prefetch(Ahead ahead, int64_t pair) {
  for (int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(ahead.from + pair * ahead.step + i);
}

// The same into L2, which holds more than L1.
template <int64_t kBytes>
VLLM_LITE_INLINE void prefetch_l2(Ahead ahead, int64_t pair) {
  for (int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(ahead.from + pair * ahead.step + i, 0, 2);
}

template <class Out>
void write(const LinearCall& call, const LinearTask& task, const float* sums, int64_t sums_stride) {
  const PackedWeight& weight = *call.weight;
  const int64_t first = task.first_block * kBlock, left = weight.num_outputs - first;
  const int64_t count = left < sums_stride ? left : sums_stride;
  for (int64_t row = 0; row < task.num_rows; ++row, sums += sums_stride) {
    Out* out = static_cast<Out*>(call.out) + (task.first_row + row) * call.out_stride + first;
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) {
      Vec value = load(sums + i);
      if (weight.bias != nullptr) value = value + load(weight.bias + first + i);
      store(out + i, value);
    }
    for (; i < count; ++i) {
      float value = sums[i];
      if (weight.bias != nullptr) value += weight.bias[first + i];
      from_float(value, out + i);
    }
  }
}

}  // namespace
}  // namespace VLLM_LITE_ISA
