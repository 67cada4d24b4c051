// Primitives of waits: the clock, a pause of the processor, a sleep until a word changes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace vllm_lite {

// The threads that may wake a sleeper: those of this process (faster), or of all processes that map the word.
enum class Futex : int { kPrivate = FUTEX_PRIVATE_FLAG, kShared = 0 };

inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // some tens of cycles; `yield` takes none where a core has no second thread
#endif
}

// Sleeps while `word` is `while_equal`: until it is woken, at most `limit_ns`. May also return early.
inline void futex_wait(std::atomic<uint32_t>* word, uint32_t while_equal, Futex kind, int64_t limit_ns = INT64_MAX) {
  const timespec limit = {limit_ns / 1'000'000'000, limit_ns % 1'000'000'000};
  const timespec* until = limit_ns == INT64_MAX ? nullptr : &limit;
  syscall(SYS_futex, word, FUTEX_WAIT | static_cast<int>(kind), while_equal, until, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>* word, int count, Futex kind) {
  syscall(SYS_futex, word, FUTEX_WAKE | static_cast<int>(kind), count, nullptr, nullptr, 0);
}

}  // namespace vllm_lite
