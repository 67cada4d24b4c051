// Prefetching for later calls. The expected reads may change while waiting threads read them: a mix of old and new
// fields is at worst a useless address.
#include "read_ahead.h"

#include <algorithm>
#include <atomic>

#include "common.h"

namespace vllm_lite {
namespace {

constexpr int64_t kAheadBytes = 512 << 10;  // bytes that a thread prefetches: half of a small L2
constexpr int64_t kPieceBytes = 1024, kLineBytes = 64;

struct Expected {
  std::atomic<const char*> data{nullptr};
  std::atomic<int64_t> block_bytes{0}, num_blocks{0};
};

alignas(64) std::atomic<uint32_t> next_number{0};
std::atomic<bool> cached{false};
Expected expected[kReadsKnown];

struct Part {
  const char* data;
  int64_t bytes;
};

// The part of a read that a thread multiplies.
Part part_of(uint32_t number, int thread, int num_threads) {
  const Expected& read = expected[number % kReadsKnown];
  const char* data = read.data.load(std::memory_order_relaxed);
  const int64_t blocks = read.num_blocks.load(std::memory_order_relaxed);
  const int64_t block_bytes = read.block_bytes.load(std::memory_order_relaxed);
  const int64_t first = blocks * thread / num_threads, end = blocks * (thread + 1) / num_threads;
  return {data + first * block_bytes, (end - first) * block_bytes};
}

}  // namespace

void expect_read(uint32_t number, const Read& read) {
  Expected& slot = expected[number % kReadsKnown];
  slot.data.store(read.data, std::memory_order_relaxed);
  slot.block_bytes.store(read.block_bytes, std::memory_order_relaxed);
  slot.num_blocks.store(read.num_blocks, std::memory_order_relaxed);
}

void begin_read(uint32_t next) {
  next_number.store(next, std::memory_order_release);
}

void expect_cached(bool are_cached) {
  cached.store(are_cached, std::memory_order_relaxed);
}

bool are_cached() {
  return cached.load(std::memory_order_relaxed);
}

const char* next_read(int thread, int num_threads) {
  return part_of(next_number.load(std::memory_order_relaxed), thread, num_threads).data;
}

bool Fetcher::step(int num_threads) {
  const uint32_t next = next_number.load(std::memory_order_acquire);
  if ((number_ - next >= kReadsKnown || at_ >= end_) && !next_part(next, num_threads)) return false;
  const char* end = std::min(at_ + kPieceBytes, end_);
  for (; at_ < end; at_ += kLineBytes) __builtin_prefetch(at_, 0, 2);
  return true;
}

// Continues with the first read from `next` on that this thread has not begun. Returns false if there is none yet, or
// if the thread has prefetched as much as it may.
bool Fetcher::next_part(uint32_t next, int num_threads) {
  const uint32_t number = number_ - next < kReadsKnown ? number_ + 1 : next;
  if (number - next >= kReadsKnown) return false;
  int64_t room = kAheadBytes;
  for (uint32_t before = next; before != number; ++before) room -= part_of(before, thread_, num_threads).bytes;
  const Part part = part_of(number, thread_, num_threads);
  if (room <= 0 || part.bytes <= 0) return false;
  number_ = number;
  at_ = part.data;
  end_ = at_ + std::min(part.bytes, room);
  return true;
}

}  // namespace vllm_lite

// For tests: the number of pieces that a thread prefetches of `reads` [count], whose first has the number `first`, if
// the read with the number `next` is the next one.
VLLM_LITE_API int64_t vllm_lite_count_fetches(const vllm_lite::Read* reads, int64_t count, int64_t first, int64_t next,
                                              int64_t thread, int64_t num_threads) {
  for (int64_t i = 0; i < count; ++i) vllm_lite::expect_read(static_cast<uint32_t>(first + i), reads[i]);
  vllm_lite::begin_read(static_cast<uint32_t>(next));
  vllm_lite::Fetcher fetcher(static_cast<int>(thread));
  int64_t pieces = 0;
  while (fetcher.step(static_cast<int>(num_threads))) ++pieces;
  return pieces;
}
