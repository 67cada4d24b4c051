// Low-rank adapters of many rows at once: calls of one layer or of several, cut into tasks and shared by the threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lora.h"
#include "pack.h"

// Kept by a thread from one use to the next, as memory is only ever added.
class LoraCalls {
 public:
  void clear() { calls_.clear(); }

  // Has `run` compute a call, which needs no `hidden` yet. No other call may have the same rows of `out`.
  void add(const LoraCall& call);

  // Computes all calls.
  void run();

 private:
  struct Task {
    size_t call;
    int64_t first, last;
  };

  void lay_out();

  template <class Count, class Cost, class Kernel>
  void each_task(const Count& count, const Cost& cost, const Kernel& kernel);

  std::vector<LoraCall> calls_;
  std::vector<Task> tasks_;
  Scratch scratch_;
};
