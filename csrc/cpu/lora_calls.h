// Low-rank adapters of many rows: collects calls for one layer or several and runs them as tasks on all threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lora.h"
#include "pack.h"

// A thread keeps it for its next use, so that memory is rarely allocated.
class LoraCalls {
 public:
  void clear() { calls_.clear(); }

  // Adds a call for `run`; it needs no `hidden`. No two calls may have the same rows of `out`.
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
