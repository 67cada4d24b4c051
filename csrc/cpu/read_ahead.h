// Memory that the calls behind a program's next one will read: threads that wait fetch their parts of it meanwhile.
//
// Between two products of a decode step one thread computes what is small, and the others have nothing to do but to
// wait, while memory has nothing to do either. They ask for the weights that they will be the ones to multiply
// (thread_pool.h: Order::kByThread), as many as stay in their own caches. Nothing depends on it but time: an address
// that is not right any more costs a fetch that nobody uses.
#pragma once

#include <cstdint>

namespace vllm_lite {

// A weight: blocks that follow one another, which are shared out to threads in their order.
struct Read {
  const char* data;
  int64_t block_bytes, num_blocks;
};

constexpr uint32_t kReadsKnown = 4;  // reads ahead that are known at a time

// Reads have numbers, one behind the other: what is known of read `number`, and the one that is next.
void expect_read(uint32_t number, const Read& read);
void begin_read(uint32_t next);

// What one thread fetches while it waits.
class Fetcher {
 public:
  explicit Fetcher(int thread) : thread_(thread) {}

  // Fetches a little of what the thread, one of so many, will read. False if there is nothing left to fetch.
  bool step(int num_threads);

 private:
  bool next_part(uint32_t next, int num_threads);

  int thread_;
  uint32_t number_ = 0;  // of the read of which it has fetched what lies before `at_`
  const char *at_ = nullptr, *end_ = nullptr;
};

}  // namespace vllm_lite
