// Sums over ranks. Each element is summed by itself, so its bits depend neither on the vector's width nor on the part
// that a thread or a rank computes.
#include "../collectives.h"

#include "convert.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int kVectors = 4;  // at once, so that loads from another core's cache overlap

template <class T>
VLLM_LITE_INLINE const T* input(const RankSum& op, int rank, int64_t i) {
  return static_cast<const T*>(op.inputs[rank]) + i;
}

template <class T>
void sum(const RankSum& op, int64_t first, int64_t last) {
  T* out = static_cast<T*>(op.out);
  int64_t i = first;
  for (; i + kVectors * kWidth <= last; i += kVectors * kWidth) {
    Vec sums[kVectors];
    for (int v = 0; v < kVectors; ++v) sums[v] = load(input<T>(op, 0, i + v * kWidth));
    for (int rank = 1; rank < op.world; ++rank) {
      for (int v = 0; v < kVectors; ++v) sums[v] += load(input<T>(op, rank, i + v * kWidth));
    }
    for (int v = 0; v < kVectors; ++v) store(out + i + v * kWidth, sums[v]);
  }
  for (; i < last; i += kWidth) {
    const int count = last - i < kWidth ? static_cast<int>(last - i) : kWidth;
    Vec total = load_some(input<T>(op, 0, i), count);
    for (int rank = 1; rank < op.world; ++rank) total += load_some(input<T>(op, rank, i), count);
    store_some(out + i, total, count);
  }
}

}  // namespace

void sum_over_ranks(const RankSum& op, int64_t first, int64_t last) {
  if (op.dtype == kFloat32) return sum<float>(op, first, last);
  if (op.dtype == kBFloat16) return sum<BFloat16>(op, first, last);
  sum<Float16>(op, first, last);
}

}  // namespace VLLM_LITE_ISA
