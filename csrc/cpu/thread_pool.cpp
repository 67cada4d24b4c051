// The thread pool. Threads that wait for a job first spin for a while, then sleep in a futex.
//
// A job is closed when its last task has been taken, and done when its last task has been finished. The caller takes
// tasks like every other thread and then waits for the tasks that others have taken, never for a thread that has taken
// none. Such a thread may read the pool at any later time, even in the middle of another job. This is safe because a
// ticket has the job's number and its remaining tasks in one word, and a task is taken by a compare-exchange of the
// whole word. If the exchange succeeds, the job was open since the ticket was read, so the fields read in between
// belong to it.
//
// A job may have one ticket for each thread, so that a thread takes consecutive tasks: first its own, in order, then
// those of other threads, from the last one backwards.
//
// A cache line that another CPU has written takes 0.25 us to arrive if the two share no L3, and lines of which each has
// the address of the next take 0.15 us each (0.05 and 0.03 us with one L3). So a thread waits for the line of its own
// ticket, which has all that is needed to take a task, and prefetches the job's body and data meanwhile. The caller has
// its first task from the beginning, and runs it while its stores are on their way to others.
//
// If there are as many threads as CPUs, each is bound to a CPU of its own, other than the caller's. Some kernels wake a
// thread on the CPU of its waker although another one is idle (seen on virtual machines): the two then share that CPU
// for milliseconds, and a step takes twice as long.
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <climits>

#include "common.h"
#include "read_ahead.h"
#include "wait.h"

namespace vllm_lite {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int64_t kSpinNs = 50'000;  // a few times the pause between two kernels of one step

constexpr int kUnbound = -1;

constexpr uint32_t kMostTasks = UINT16_MAX;  // of a job

struct Job {
  Memory body, data;  // data: what all tasks read
  TaskFunction call;
  int64_t first;  // number that `call` gets for task 0
  uint32_t num_tasks;
};

// Tasks [first, end) of a job that have not been taken. The job's fields are in the same cache line, so that a thread
// waits for one line only; they are written while no task can be taken, and read before a task is taken.
struct Ticket {
  alignas(64) std::atomic<uint64_t> word{0};  // number of the job << 32 | end << 16 | first
  std::atomic<const void*> body{nullptr}, data{nullptr};
  std::atomic<TaskFunction> call{nullptr};
  std::atomic<int64_t> before{0};  // Job::first
  std::atomic<int32_t> body_bytes{0}, data_bytes{0};
  std::atomic<int> in_use{1};  // number of the job's tickets that get tasks

  void open(const Job& job, int num_tickets, uint32_t number, uint32_t first, uint32_t end) {
    body.store(job.body.from, std::memory_order_relaxed);
    body_bytes.store(job.body.bytes, std::memory_order_relaxed);
    data.store(job.data.from, std::memory_order_relaxed);
    data_bytes.store(job.data.bytes, std::memory_order_relaxed);
    call.store(job.call, std::memory_order_relaxed);
    before.store(job.first, std::memory_order_relaxed);
    in_use.store(num_tickets, std::memory_order_relaxed);
    word.store(of(number, first, end), std::memory_order_release);
  }

  // Number of the latest job that was announced to the ticket's thread.
  uint32_t number() const { return static_cast<uint32_t>(word.load(std::memory_order_acquire) >> 32); }

  static uint64_t of(uint32_t job, uint32_t first, uint32_t end) {
    return static_cast<uint64_t>(job) << 32 | end << 16 | first;
  }
};

struct Pool {
  Ticket tickets[kMaxThreads];

  alignas(64) std::atomic<uint32_t> epoch{0};  // number of the latest job; sleeping threads wait for it to change
  std::atomic<int> sleepers{0};                // threads that the next job must wake

  alignas(64) std::atomic<uint32_t> finished{0};  // tasks that threads other than the caller have finished so far
  std::atomic<bool> caller_sleeps{false};

  alignas(64) std::atomic<int> num_threads{1};  // wanted, with the caller; thread i ends when i >= num_threads

  alignas(64) std::atomic<bool> busy{false};  // lock: for a running job, and for changes of the fields below
  Fetcher fetcher{0};                         // the caller's
  int num_started = 0;                        // threads 1 to num_started exist
  bool fork_handled = false;
  bool binds = true;               // whether threads are bound to CPUs if there are as many
  int cpus[kMaxThreads];           // CPU of each thread, that of the caller when it last woke others; or kUnbound
  pthread_t threads[kMaxThreads];  // thread i at i; 0 is the caller
};

Pool pool;  // never destroyed: threads may be waiting in it when the process ends

// Spins while `is_waiting()`, at most for kSpinNs.
template <class IsWaiting>
void spin_while(const IsWaiting& is_waiting, Fetcher& fetcher) {
  const int threads = pool.num_threads.load(std::memory_order_relaxed);
  const int64_t deadline_ns = now_ns() + kSpinNs;
  do {
    for (int i = 0; i < 16; ++i) {
      if (!is_waiting()) return;
      if (!fetcher.step(threads)) pause_cpu();
    }
  } while (now_ns() < deadline_ns);
}

void prefetch(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i);
}

// Prefetches what a thread's first task of a job reads from other threads, and the count that it will write.
void prefetch_job(const Ticket& ticket) {
  prefetch(ticket.body.load(std::memory_order_relaxed), ticket.body_bytes.load(std::memory_order_relaxed));
  prefetch(ticket.data.load(std::memory_order_relaxed), ticket.data_bytes.load(std::memory_order_relaxed));
  __builtin_prefetch(&pool.finished, 1);
}

// Takes and runs tasks of one ticket until none is left. Returns how many it ran.
uint32_t take_tasks(Ticket& ticket, bool from_first, int thread) {
  uint32_t count = 0;
  uint64_t word = ticket.word.load(std::memory_order_acquire);
  for (;;) {
    const uint32_t first = word & kMostTasks, end = static_cast<uint32_t>(word) >> 16;
    if (first == end) return count;
    const void* body = ticket.body.load(std::memory_order_relaxed);
    const TaskFunction call = ticket.call.load(std::memory_order_relaxed);
    const int64_t task = ticket.before.load(std::memory_order_relaxed) + (from_first ? first : end - 1);
    const uint64_t left = from_first ? word + 1 : word - (1 << 16);
    if (thread != 0 && count == 0) prefetch_job(ticket);
    if (!ticket.word.compare_exchange_weak(word, left, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    call(body, task, thread);
    ++count;
    if (thread != 0) {
      // Sequentially consistent with the caller's accesses: either it sees the new count, or this thread sees that it
      // sleeps.
      pool.finished.fetch_add(1, std::memory_order_seq_cst);
      if (pool.caller_sleeps.load(std::memory_order_seq_cst)) futex_wake(&pool.finished, 1, Futex::kPrivate);
    }
    word = ticket.word.load(std::memory_order_acquire);
  }
}

// Takes and runs tasks of all tickets of the open job, if there is one, beginning with the thread's own ticket.
uint32_t take_tasks(int thread) {
  const int num_tickets = pool.tickets[thread].in_use.load(std::memory_order_relaxed);
  const int own = thread < num_tickets ? thread : 0;
  uint32_t count = take_tasks(pool.tickets[own], true, thread);
  for (int i = 1; i < num_tickets; ++i) count += take_tasks(pool.tickets[(own + i) % num_tickets], false, thread);
  return count;
}

void* serve(void* number) {
  const int thread = static_cast<int>(reinterpret_cast<intptr_t>(number));
  const Ticket& ticket = pool.tickets[thread];
  Fetcher fetcher(thread);
  for (;;) {
    const uint32_t seen = pool.epoch.load(std::memory_order_acquire);
    if (thread >= pool.num_threads.load(std::memory_order_acquire)) return nullptr;
    const uint32_t number = ticket.number();
    take_tasks(thread);
    spin_while([&] { return ticket.number() == number; }, fetcher);
    if (ticket.number() != number) continue;
    pool.sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (pool.epoch.load(std::memory_order_seq_cst) == seen) futex_wait(&pool.epoch, seen, Futex::kPrivate);
    pool.sleepers.fetch_sub(1, std::memory_order_relaxed);
  }
}

// Runs in a forked child, which has none of the parent's threads and no job.
void forget_threads() {
  for (Ticket& ticket : pool.tickets) ticket.word.store(0);
  pool.sleepers.store(0);
  pool.busy.store(false);
  pool.num_started = 0;
}

void bind_thread(int thread, const cpu_set_t& cpus, int cpu) {
  pool.cpus[thread] = cpu;
  pthread_setaffinity_np(pool.threads[thread], sizeof cpus, &cpus);
}

void bind_thread(int thread, int cpu) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  bind_thread(thread, one, cpu);
}

// Gives each thread a CPU of its own, or all that are `allowed` if their numbers differ. The caller of a kernel runs on
// `own`.
void bind_all(int own, const cpu_set_t& allowed) {
  pool.cpus[0] = own;
  const bool each = pool.binds && CPU_COUNT(&allowed) == pool.num_started + 1 && CPU_ISSET(own, &allowed);
  for (int thread = 1, cpu = own; thread <= pool.num_started; ++thread) {
    if (each) {
      do cpu = (cpu + 1) % CPU_SETSIZE;
      while (!CPU_ISSET(cpu, &allowed));
      bind_thread(thread, cpu);
    } else if (pool.cpus[thread] != kUnbound) {
      bind_thread(thread, allowed, kUnbound);
    }
  }
}

// Called before sleeping threads are woken: none of them may be bound to the caller's CPU.
void keep_apart() {
  const int own = sched_getcpu(), left = pool.cpus[0];
  cpu_set_t allowed;
  if (own < 0 || own == left || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  if (left != kUnbound && !CPU_ISSET(left, &allowed)) {
    // The user has moved the process to other CPUs, which its threads keep.
    for (int thread = 1; thread <= pool.num_started; ++thread) pool.cpus[thread] = kUnbound;
  }
  for (int thread = 1; left != kUnbound && thread <= pool.num_started; ++thread) {
    if (pool.cpus[thread] != own) continue;
    bind_thread(thread, left);
    pool.cpus[0] = own;
    return;
  }
  bind_all(own, allowed);
}

// Starts threads up to `wanted`; the caller holds `busy`. If the system refuses one, the existing threads do the work.
void start_threads(int wanted) {
  if (!pool.fork_handled) pool.fork_handled = pthread_atfork(nullptr, nullptr, forget_threads) == 0;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // inherited: signals must go to the program's own threads
  while (pool.num_started + 1 < wanted) {
    const intptr_t number = pool.num_started + 1;
    if (pthread_create(&pool.threads[number], nullptr, serve, reinterpret_cast<void*>(number)) != 0) break;
    pool.cpus[number] = kUnbound;
    pool.cpus[0] = kUnbound;  // so that all are bound again
    ++pool.num_started;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Number of the next event that threads wait for.
uint32_t next_epoch() {
  return pool.epoch.load(std::memory_order_relaxed) + 1;
}

// Wakes threads that sleep although the epoch has changed. It may have been stored without waiting for its visibility.
void wake_sleepers(int at_most) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (pool.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake(&pool.epoch, at_most, Futex::kPrivate);
}

// Waits until threads other than the caller have finished `num_taken` tasks since they had finished `before`.
void wait_for_others(uint32_t before, uint32_t num_taken) {
  uint32_t finished;
  while ((finished = pool.finished.load(std::memory_order_acquire)) - before != num_taken) {
    const auto is_waiting = [&] { return pool.finished.load(std::memory_order_acquire) == finished; };
    spin_while(is_waiting, pool.fetcher);
    if (!is_waiting()) continue;
    pool.caller_sleeps.store(true, std::memory_order_seq_cst);
    while (pool.finished.load(std::memory_order_seq_cst) == finished) {
      futex_wait(&pool.finished, finished, Futex::kPrivate);
    }
    pool.caller_sleeps.store(false, std::memory_order_relaxed);
  }
}

// Opens the tickets of a job for `threads` threads, the caller's own before a thread looks for the tasks of others.
// Returns whether the caller has its first task already.
bool open_tickets(const Job& job, Order order, uint32_t number, uint32_t threads) {
  const uint32_t tickets = order == Order::kByThread ? threads : 1, tasks = job.num_tasks;
  const bool has_first = tasks >= tickets;
  for (uint64_t i = 0; i < threads; ++i) {
    const uint64_t part = i < tickets ? i : tickets;
    const uint64_t first = part * tasks / tickets, end = i < tickets ? (i + 1) * tasks / tickets : first;
    const uint64_t taken = i == 0 && has_first ? 1 : 0;
    pool.tickets[i].open(job, static_cast<int>(tickets), number, static_cast<uint32_t>(first + taken),
                         static_cast<uint32_t>(end));
  }
  return has_first;
}

// The caller holds `busy`.
void run_job(const Job& job, Order order) {
  const uint32_t threads = static_cast<uint32_t>(pool.num_threads.load(std::memory_order_relaxed)),
                 tasks = job.num_tasks;
  const uint32_t epoch = next_epoch(), finished = pool.finished.load(std::memory_order_relaxed);
  const int wake_at_most = static_cast<int>(tasks < threads ? tasks - 1 : threads - 1);
  const bool has_first = open_tickets(job, order, epoch, threads);
  pool.epoch.store(epoch, std::memory_order_release);
  const bool any_sleep = pool.sleepers.load(std::memory_order_relaxed) > 0;
  if (any_sleep) {
    keep_apart();
    wake_sleepers(wake_at_most);
  }
  if (has_first) job.call(job.body.from, job.first, 0);
  if (!any_sleep) wake_sleepers(wake_at_most);  // those that fell asleep while the tickets were opened
  wait_for_others(finished, tasks - take_tasks(0) - (has_first ? 1 : 0));
}

}  // namespace

int num_threads() {
  return pool.num_threads.load(std::memory_order_relaxed);
}

void run_tasks(int64_t num_tasks, Order order, Memory body, Memory data, TaskFunction call) {
  const int threads = num_threads();
  if (threads == 1 || num_tasks <= 1 || pool.busy.exchange(true, std::memory_order_acquire)) {
    for (int64_t task = 0; task < num_tasks; ++task) call(body.from, task, 0);
    return;
  }
  if (pool.num_started + 1 < threads) start_threads(threads);
  for (int64_t first = 0; first < num_tasks; first += kMostTasks) {
    const int64_t left = num_tasks - first;
    run_job({body, data, call, first, left < kMostTasks ? static_cast<uint32_t>(left) : kMostTasks}, order);
  }
  pool.busy.store(false, std::memory_order_release);
}

}  // namespace vllm_lite

VLLM_LITE_API int32_t vllm_lite_num_threads() {
  return vllm_lite::num_threads();
}

// Sets the number of threads, and whether each is bound to a CPU if there are as many. Surplus threads end before it
// returns; missing ones are started by the next kernel. Must not be called within a task.
VLLM_LITE_API void vllm_lite_set_num_threads(int32_t count, int32_t binds) {
  using namespace vllm_lite;
  while (pool.busy.exchange(true, std::memory_order_acquire)) sched_yield();
  count = count < 1 ? 1 : count > kMaxThreads ? kMaxThreads : count;
  pool.num_threads.store(count, std::memory_order_release);
  pool.epoch.store(next_epoch(), std::memory_order_release);
  wake_sleepers(INT_MAX);
  for (; pool.num_started >= count; --pool.num_started) pthread_join(pool.threads[pool.num_started], nullptr);
  pool.binds = binds != 0;
  pool.cpus[0] = kUnbound;
  pool.busy.store(false, std::memory_order_release);
}

// For tests: adds 1 to counts[task] for each task, and sets threads[task]; a task hashes for `work` rounds. With
// `nested` > 0, each task also calls parallel_for with `nested` tasks, which add 1 each. `order`: an Order.
VLLM_LITE_API void vllm_lite_count_tasks(int64_t num_tasks, int64_t work, int64_t nested, int64_t order,
                                         int32_t* counts, int32_t* threads) {
  const auto count = [=](int64_t task, int thread) {
    uint64_t hash = static_cast<uint64_t>(task) + 1;
    for (int64_t i = 0; i < work; ++i) hash = (hash ^ hash >> 29) * 0xbf58476d1ce4e5b9u + 1;
    counts[task] += hash == 0 ? 2 : 1;
    threads[task] = thread;
    vllm_lite::parallel_for(nested, [=](int64_t) { ++counts[task]; });
  };
  vllm_lite::parallel_for_indexed(num_tasks, count, static_cast<vllm_lite::Order>(order));
}
