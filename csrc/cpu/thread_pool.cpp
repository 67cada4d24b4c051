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
  const void* body;
  TaskFunction call;
  int64_t first;  // number that `call` gets for task 0
  uint32_t num_tasks;
};

// Tasks [first, end) of a job that have not been taken. The job's fields are in the same cache line, so that a thread
// waits for one line only; they are written while no task can be taken, and read before a task is taken.
struct Ticket {
  alignas(64) std::atomic<uint64_t> word{0};  // number of the job << 32 | end << 16 | first
  std::atomic<const void*> body{nullptr};
  std::atomic<TaskFunction> call{nullptr};
  std::atomic<int64_t> before{0};  // Job::first

  void open(const Job& job, uint32_t number, uint32_t first, uint32_t end) {
    body.store(job.body, std::memory_order_relaxed);
    call.store(job.call, std::memory_order_relaxed);
    before.store(job.first, std::memory_order_relaxed);
    word.store(of(number, first, end), std::memory_order_release);
  }

  static uint64_t of(uint32_t job, uint32_t first, uint32_t end) {
    return static_cast<uint64_t>(job) << 32 | end << 16 | first;
  }
};

struct Pool {
  Ticket tickets[kMaxThreads];

  alignas(64) std::atomic<uint32_t> epoch{0};  // number of the latest job; idle threads wait for it to change
  std::atomic<int> num_tickets{1};             // of the latest job
  std::atomic<int> sleepers{0};                // threads that the next job must wake

  alignas(64) std::atomic<uint32_t> finished{0};  // tasks of the job that threads other than the caller have finished
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

// Spins until `word` differs from `old` or kSpinNs have passed.
void spin_while_equal(const std::atomic<uint32_t>& word, uint32_t old, Fetcher& fetcher) {
  const int threads = pool.num_threads.load(std::memory_order_relaxed);
  const int64_t deadline_ns = now_ns() + kSpinNs;
  do {
    for (int i = 0; i < 16; ++i) {
      if (word.load(std::memory_order_acquire) != old) return;
      if (!fetcher.step(threads)) pause_cpu();
    }
  } while (now_ns() < deadline_ns);
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
  const int num_tickets = pool.num_tickets.load(std::memory_order_relaxed);
  const int own = thread < num_tickets ? thread : 0;
  uint32_t count = take_tasks(pool.tickets[own], true, thread);
  for (int i = 1; i < num_tickets; ++i) count += take_tasks(pool.tickets[(own + i) % num_tickets], false, thread);
  return count;
}

void* serve(void* number) {
  const int thread = static_cast<int>(reinterpret_cast<intptr_t>(number));
  Fetcher fetcher(thread);
  for (;;) {
    const uint32_t seen = pool.epoch.load(std::memory_order_acquire);
    if (thread >= pool.num_threads.load(std::memory_order_acquire)) return nullptr;
    take_tasks(thread);
    spin_while_equal(pool.epoch, seen, fetcher);
    if (pool.epoch.load(std::memory_order_acquire) != seen) continue;
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

// Announces an event to waiting threads, and wakes sleeping ones.
void publish(uint32_t epoch, int wake_at_most) {
  pool.epoch.store(epoch, std::memory_order_seq_cst);
  if (pool.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake(&pool.epoch, wake_at_most, Futex::kPrivate);
}

void wait_for_others(uint32_t num_taken) {
  uint32_t finished;
  while ((finished = pool.finished.load(std::memory_order_acquire)) != num_taken) {
    spin_while_equal(pool.finished, finished, pool.fetcher);
    if (pool.finished.load(std::memory_order_acquire) != finished) continue;
    pool.caller_sleeps.store(true, std::memory_order_seq_cst);
    while (pool.finished.load(std::memory_order_seq_cst) == finished) {
      futex_wait(&pool.finished, finished, Futex::kPrivate);
    }
    pool.caller_sleeps.store(false, std::memory_order_relaxed);
  }
}

// The caller holds `busy`.
void run_job(const Job& job, Order order) {
  const uint32_t threads = static_cast<uint32_t>(pool.num_threads.load(std::memory_order_relaxed)),
                 tasks = job.num_tasks;
  const uint32_t tickets = order == Order::kByThread ? threads : 1, epoch = next_epoch();
  pool.num_tickets.store(static_cast<int>(tickets), std::memory_order_relaxed);
  pool.finished.store(0, std::memory_order_relaxed);
  for (uint64_t i = 0; i < tickets; ++i) {
    const uint64_t first = i * tasks / tickets, end = (i + 1) * tasks / tickets;
    pool.tickets[i].open(job, epoch, static_cast<uint32_t>(first), static_cast<uint32_t>(end));
  }
  if (pool.sleepers.load(std::memory_order_relaxed) > 0) keep_apart();
  publish(epoch, static_cast<int>(tasks < threads ? tasks - 1 : threads - 1));
  wait_for_others(tasks - take_tasks(0));
}

}  // namespace

int num_threads() {
  return pool.num_threads.load(std::memory_order_relaxed);
}

void run_tasks(int64_t num_tasks, Order order, const void* body, TaskFunction call) {
  const int threads = num_threads();
  if (threads == 1 || num_tasks <= 1 || pool.busy.exchange(true, std::memory_order_acquire)) {
    for (int64_t task = 0; task < num_tasks; ++task) call(body, task, 0);
    return;
  }
  if (pool.num_started + 1 < threads) start_threads(threads);
  for (int64_t first = 0; first < num_tasks; first += kMostTasks) {
    const int64_t left = num_tasks - first;
    run_job({body, call, first, left < kMostTasks ? static_cast<uint32_t>(left) : kMostTasks}, order);
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
  publish(next_epoch(), INT_MAX);
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
