// Threads, warps and blocks of the emulator. See cuda_on_cpu.h.
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <numeric>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace cpu {
constexpr int kWarp = 32, kMaxThreads = 1024;
constexpr size_t kMaxShared = 227 * 1024;  // what a block may have on sm_90
constexpr size_t kRedzone = 4096;          // behind the launched size; must stay untouched
constexpr size_t kStack = 128 * 1024, kGuard = 4096;
constexpr unsigned char kPoison = 0xff;  // NaN in every floating-point type, -1 as an integer

enum Kind { kRunning, kDone, kBarrier, kWarpOp };

struct Fiber {
  jmp_buf context;
  ucontext_t start;
  dim3 thread;
  Kind kind = kRunning;
  const char* operation = nullptr;  // what it waits in, and where
  int line = 0;
  unsigned parity = 0;  // which of the warp's two exchange areas its next warp operation uses
  int num_copies = 0;   // asynchronous copies it has not waited for (shared_memory.h)
  int num_groups = 0;   // that it has made of such copies
  bool begun = false;
};

// What the lanes of a warp show each other. Two areas alternate: a lane that writes the one knows that every lane has
// left the operation before the last, so that one wait per operation is enough.
struct Exchange {
  alignas(16) unsigned char lanes[kWarp][16];
  float a[16][16], b[8][16];  // mma operands
};

inline Fiber fibers[kMaxThreads];
inline Exchange exchanges[kMaxThreads / kWarp][2];
inline Fiber* self = nullptr;
inline jmp_buf scheduler, on_error;
inline dim3 block_index, block_dim, grid_dim;
alignas(128) inline unsigned char shared_bytes[kMaxShared + kRedzone];
inline size_t shared_size = 0;
inline int block_threads = 0;
inline void (*body)(void*) = nullptr;
inline void* body_args = nullptr;
inline char error[512];

inline int linear_thread() {
  return int(self - fibers);
}
inline int lane() {
  return linear_thread() % kWarp;
}

[[noreturn]] inline void fail(const char* what, const char* operation = "", int line = 0) {
  int used = std::snprintf(error, sizeof error, "block (%u, %u, %u)", block_index.x, block_index.y, block_index.z);
  if (self) used += std::snprintf(error + used, sizeof error - used, ", thread %d", linear_thread());
  used += std::snprintf(error + used, sizeof error - used, ": %s", what);
  if (line) std::snprintf(error + used, sizeof error - used, " (%s, line %d)", operation, line);
  _longjmp(on_error, 1);
}

// Back to the scheduler until it resumes this fiber. `operation` is a literal; `line` is the caller's in the kernel.
__attribute__((noinline)) inline void park(Kind kind, const char* operation, int line) {
  self->kind = kind;
  self->operation = operation;
  self->line = line;
  if (!_setjmp(self->context)) _longjmp(scheduler, 1);
}

inline void fiber_main() {
  body(body_args);
  self->kind = kDone;
  _longjmp(scheduler, 1);
}

inline char* stacks = nullptr;  // those of the launch that runs

// Stacks for one launch at a time, of any kernel of the process. They are never given back: guards make two mappings of
// each, a process has 65530 in all, and to make them anew takes longer than most launches.
inline void* make_stacks() {
  void* all = mmap(nullptr, kMaxThreads * (kStack + kGuard), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  // An overflow faults instead of damaging the neighbour.
  for (int thread = 0; thread < kMaxThreads; ++thread)
    mprotect(static_cast<char*>(all) + thread * (kStack + kGuard), kGuard, PROT_NONE);
  return all;
}

inline char* stack_of(int thread) {
  return stacks + thread * (kStack + kGuard) + kGuard;
}

inline void resume(Fiber& fiber) {
  self = &fiber;
  if (_setjmp(scheduler)) return;
  fiber.kind = kRunning;
  if (fiber.begun) _longjmp(fiber.context, 1);
  fiber.begun = true;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = stack_of(linear_thread());
  fiber.start.uc_stack.ss_size = kStack;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, fiber_main, 0);
  setcontext(&fiber.start);
}

// The fibers [first, last) must all have ended or all wait in the same operation at the same line.
inline bool all_ended(int first, int last, const char* partly, const char* mixed) {
  const Fiber& one = fibers[first];
  for (int t = first + 1; t < last; ++t) {
    const Fiber& other = fibers[t];
    if (one.kind == other.kind && (one.kind == kDone || (one.operation == other.operation && one.line == other.line)))
      continue;
    const Fiber& waiting = one.kind == kDone ? other : one;
    self = &fibers[t];
    fail(one.kind == other.kind ? mixed : partly, waiting.operation, waiting.line);
  }
  return one.kind == kDone;
}

// Steps one warp until all of its threads have ended or wait at the barrier of the block.
inline void run_warp(int first, int last, bool backwards) {
  do {
    for (int i = first; i < last; ++i) resume(fibers[backwards ? first + last - 1 - i : i]);
    if (all_ended(first, last, "not every thread of the warp reached this operation",
                  "threads of one warp wait in different operations"))
      return;
  } while (fibers[first].kind == kWarpOp);
}

inline void run_block(unsigned seed) {
  const int warps = (block_threads + kWarp - 1) / kWarp;
  int order[kMaxThreads / kWarp];
  for (int i = 0; i < warps; ++i) order[i] = i;
  std::memset(shared_bytes, kPoison, shared_size + kRedzone);
  for (int t = 0; t < block_threads; ++t) {
    Fiber& fiber = fibers[t];
    fiber.kind = kRunning;
    fiber.begun = false;
    fiber.parity = 0;
    fiber.num_copies = 0, fiber.num_groups = 0;
    fiber.thread = dim3(t % block_dim.x, t / block_dim.x % block_dim.y, t / (block_dim.x * block_dim.y));
  }
  unsigned random = seed * 2654435761u;
  do {
    for (int i = warps - 1; i > 0 && seed; --i) {  // a new order after every barrier: a missing one then shows
      random = random * 1664525u + 1013904223u;
      std::swap(order[i], order[(random >> 8) % unsigned(i + 1)]);
    }
    for (int i = 0; i < warps; ++i) {
      const int first = order[i] * kWarp, last = first + kWarp < block_threads ? first + kWarp : block_threads;
      run_warp(first, last, seed & 1);
    }
  } while (!all_ended(0, block_threads, "not every thread of the block reached this barrier",
                      "threads of one block wait at different barriers"));
  self = nullptr;
  for (size_t i = shared_size; i < shared_size + kRedzone; ++i)
    if (shared_bytes[i] != kPoison) fail("shared memory was written past the size given at the launch");
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<A>*>(args[I])...);
}

// A step through `blocks` numbers that meets each once and goes to and fro between far ones.
inline uint64_t stride_of(uint64_t blocks) {
  uint64_t step = blocks - blocks * 3 / 8;  // near the golden section
  while (std::gcd(step, blocks) != 1) ++step;
  return step;
}

// Runs a whole grid; 0, or 1 with the reason in `error`. Not for two threads at once: the state is global.
template <class... A>
int launch(void (*kernel)(A...), const unsigned* grid, const unsigned* block, size_t shared, void** args, unsigned seed,
           void* launch_stacks) {
  auto run = [&] { call(kernel, args, std::index_sequence_for<A...>{}); };
  body = [](void* p) { (*static_cast<decltype(run)*>(p))(); };
  body_args = &run;
  grid_dim = dim3(grid[0], grid[1], grid[2]);
  block_dim = dim3(block[0], block[1], block[2]);
  block_index = dim3(0, 0, 0);
  shared_size = shared;
  error[0] = 0;
  self = nullptr;
  stacks = static_cast<char*>(launch_stacks);
  if (_setjmp(on_error)) return 1;
  if (!stacks) fail("no memory for the stacks of the threads");
  const uint64_t threads = uint64_t(block[0]) * block[1] * block[2], blocks = uint64_t(grid[0]) * grid[1] * grid[2];
  if (threads == 0 || blocks == 0 || threads > kMaxThreads)
    fail("a block has 1 to 1024 threads, a grid at least 1 block");
  if (grid[1] > 65535 || grid[2] > 65535 || grid[0] > 0x7fffffffu) fail("the grid is larger than a GPU allows");
  if (shared > kMaxShared) fail("more shared memory than a GPU has");
  block_threads = int(threads);
  const uint64_t step = stride_of(blocks);
  for (uint64_t i = 0; i < blocks; ++i) {
    const uint64_t at = seed & 2 ? (blocks - 1 - i) * step % blocks : i;
    block_index = dim3(unsigned(at % grid[0]), unsigned(at / grid[0] % grid[1]), unsigned(at / grid[0] / grid[1]));
    run_block(seed ? seed + unsigned(i) * 4 : 0);  // * 4: the two low bits choose the order of lanes and blocks
  }
  return 0;
}

template <class T>
const char* spelling() {
  return __PRETTY_FUNCTION__;  // "... [with T = const float*]"
}
template <class... A>
void signature(void (*)(A...), void (*add)(const char*)) {
  (add(spelling<A>()), ...);
}
}  // namespace cpu
