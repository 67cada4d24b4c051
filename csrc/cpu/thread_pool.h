// The library's thread pool: kernels provide tasks, and free threads take the next one.
#pragma once

#include <cstdint>

namespace vllm_lite {

// Threads that take part in a kernel, the calling one included: 1 until vllm_lite_set_num_threads says otherwise.
int num_threads();

using TaskFunction = void (*)(const void* body, int64_t task, int thread);

// Order in which a thread takes tasks. kFirst: always the first task that is left. kByThread: each thread has a
// consecutive part of the tasks, which it takes in order; then it takes the last tasks of other threads' parts.
enum class Order { kFirst, kByThread };

struct Memory {
  const void* from = nullptr;
  int32_t bytes = 0;
};
void run_tasks(int64_t num_tasks, Order order, Memory body, Memory data, TaskFunction call);

// Calls body(task) once for each task in [0, num_tasks), on all threads, in no particular order. Returns when all are
// done; their writes are then visible to the caller. Threads take one task at a time, so a thread that the system has
// preempted delays only its own task, and a thread that wakes up late delays nothing. Taking a task costs about 0.1 us,
// waking threads some us, or 0.4 us while they still spin: a job of less than 8 us is faster as one task, in a program
// one of less than 2 us. Tasks should last 5 us or more, with kByThread 0.5 us or more.
//
// A body should have its data in itself instead of references: all of it is on its way to a thread that takes a task.
//
// Within a task, and while another thread is in a kernel, it runs all tasks itself, in order.
template <class Body>
void parallel_for(int64_t num_tasks, const Body& body, Order order = Order::kFirst) {
  run_tasks(num_tasks, order, {&body, sizeof body}, {},
            [](const void* typed, int64_t task, int) { (*static_cast<const Body*>(typed))(task); });
}

// Calls body(task, thread), with thread in [0, num_threads()). Two tasks of one call never run at the same time with
// the same thread number, so it can index scratch memory. This memory must belong to the call: two calls may both use
// number 0. `data`: what all tasks read, if it is little; each thread prefetches it.
template <class Body>
void parallel_for_indexed(int64_t num_tasks, const Body& body, Order order = Order::kFirst, Memory data = {}) {
  run_tasks(num_tasks, order, {&body, sizeof body}, data,
            [](const void* typed, int64_t task, int thread) { (*static_cast<const Body*>(typed))(task, thread); });
}

}  // namespace vllm_lite
