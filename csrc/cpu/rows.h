// Distributes the rows of small operations over the threads, and checks their indexes.
#pragma once

#include <cstdint>

#include "thread_pool.h"

namespace vllm_lite {

// Calls kernel(op, first, last) for parts of [0, num_rows), as tasks on all threads if there is enough work.
template <class Op>
void over_rows(int64_t num_rows, int64_t row_elements, void (*kernel)(const Op&, int64_t, int64_t), const Op& op) {
  constexpr int64_t kTaskElements = 1 << 15;    // 5 us or so
  constexpr int64_t kSharedElements = 1 << 17;  // less work is faster on the calling thread alone
  if (num_rows * row_elements < kSharedElements || num_threads() == 1) return kernel(op, 0, num_rows);
  const int64_t rows = row_elements < kTaskElements ? kTaskElements / row_elements : 1;
  parallel_for((num_rows + rows - 1) / rows, [&](int64_t task) {
    kernel(op, task * rows, (task + 1) * rows < num_rows ? (task + 1) * rows : num_rows);
  });
}

// The position of the first of `count` numbers outside of [0, end), or -1.
inline int64_t first_outside(const int64_t* numbers, int64_t count, int64_t end) {
  for (int64_t i = 0; i < count; ++i) {
    if (numbers[i] < 0 || numbers[i] >= end) return i;
  }
  return -1;
}

}  // namespace vllm_lite
