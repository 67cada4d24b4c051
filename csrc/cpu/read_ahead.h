// Prefetching for later calls of a program: waiting threads prefetch the weights that they will multiply.
//
// Between two products of a decode step, one thread computes the small operations while the others wait and memory is
// idle. The waiting threads prefetch the weights of their own tasks (thread_pool.h: Order::kByThread), up to what their
// caches hold. Only the time depends on it: an outdated address costs a useless prefetch.
#pragma once

#include <cstdint>

namespace vllm_lite {

// A weight: consecutive blocks, of which each thread gets a consecutive part.
struct Read {
  const char* data;
  int64_t block_bytes, num_blocks;
};

constexpr uint32_t kReadsKnown = 4;  // number of future reads that are stored

// Reads have consecutive numbers. `expect_read` stores read `number`; `begin_read` says which read is next.
void expect_read(uint32_t number, const Read& read);
void begin_read(uint32_t next);

// Whether L3 is likely to hold the weights of all reads: those of the program that is running, which is repeated.
void expect_cached(bool are_cached);
bool are_cached();

// Where a thread's part of the next read begins; nullptr if none is expected.
const char* next_read(int thread, int num_threads);

// Prefetches for one thread while it waits.
class Fetcher {
 public:
  explicit Fetcher(int thread) : thread_(thread) {}

  // Prefetches a small part of the thread's share of the next reads. False if nothing is left to prefetch.
  bool step(int num_threads);

 private:
  bool next_part(uint32_t next, int num_threads);

  int thread_;
  uint32_t number_ = 0;  // the read that it is prefetching, up to `at_` so far
  const char *at_ = nullptr, *end_ = nullptr;
};

}  // namespace vllm_lite
