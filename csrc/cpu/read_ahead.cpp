// Fetches ahead. What is expected changes while waiting threads look at it: mixed up, it is a wrong address at worst.
#include "read_ahead.h"

#include <algorithm>
#include <atomic>

#include "common.h"

namespace vllm_lite {
namespace {

constexpr int64_t kAheadBytes = 512 << 10;  // of a thread: half of a small L2
constexpr int64_t kPieceBytes = 512, kLineBytes = 64;

struct Expected {
  std::atomic<const char*> data{nullptr};
  std::atomic<int64_t> block_bytes{0}, num_blocks{0};
};

alignas(64) std::atomic<uint32_t> next_read{0};
Expected expected[kReadsKnown];

// What a thread has fetched of read `number`: everything before `at`.
struct Place {
  uint32_t number = 0;
  const char *at = nullptr, *end = nullptr;
};

// The thread's part of a read, but no more than `most` bytes.
Place part_of(uint32_t number, int thread, int num_threads, int64_t most) {
  const Expected& read = expected[number % kReadsKnown];
  const char* data = read.data.load(std::memory_order_relaxed);
  const int64_t blocks = read.num_blocks.load(std::memory_order_relaxed);
  const int64_t block_bytes = read.block_bytes.load(std::memory_order_relaxed);
  if (data == nullptr) return {number};
  const int64_t first = blocks * thread / num_threads, end = blocks * (thread + 1) / num_threads;
  const int64_t bytes = std::min((end - first) * block_bytes, most);
  return {number, data + first * block_bytes, data + first * block_bytes + bytes};
}

}  // namespace

void expect_read(uint32_t number, const Read& read) {
  Expected& slot = expected[number % kReadsKnown];
  slot.data.store(read.data, std::memory_order_relaxed);
  slot.block_bytes.store(read.block_bytes, std::memory_order_relaxed);
  slot.num_blocks.store(read.num_blocks, std::memory_order_relaxed);
}

void begin_read(uint32_t next) {
  next_read.store(next, std::memory_order_release);
}

bool fetch_ahead(int thread, int num_threads) {
  static thread_local Place place;
  static thread_local int64_t ahead_bytes = 0;  // of the reads from next_read on before `place`
  const uint32_t next = next_read.load(std::memory_order_acquire);
  const uint32_t distance = place.number - next;
  if (distance >= kReadsKnown) {
    ahead_bytes = 0;
    place = part_of(next, thread, num_threads, kAheadBytes);
  }
  if (place.at >= place.end) {
    int64_t bytes = 0;
    for (uint32_t number = next; number != place.number + 1; ++number) {
      const Place part = part_of(number, thread, num_threads, kAheadBytes);
      bytes += part.end - part.at;
    }
    if (place.number + 1 - next >= kReadsKnown || bytes >= kAheadBytes) return false;
    place = part_of(place.number + 1, thread, num_threads, kAheadBytes - bytes);
    if (place.at == place.end) return false;
  }
  const char* end = std::min(place.at + kPieceBytes, place.end);
  for (; place.at < end; place.at += kLineBytes) __builtin_prefetch(place.at, 0, 2);
  return true;
}

}  // namespace vllm_lite

// For tests: how many pieces a thread fetches of reads [count], which begin at number `first`, until none is left, when
// that of number `next` is the next one.
VLLM_LITE_API int64_t vllm_lite_count_fetches(const vllm_lite::Read* reads, int64_t count, int64_t first, int64_t next,
                                              int64_t thread, int64_t num_threads) {
  for (int64_t i = 0; i < count; ++i) vllm_lite::expect_read(static_cast<uint32_t>(first + i), reads[i]);
  vllm_lite::begin_read(static_cast<uint32_t>(next));
  int64_t pieces = 0;
  while (vllm_lite::fetch_ahead(static_cast<int>(thread), static_cast<int>(num_threads))) ++pieces;
  return pieces;
}
