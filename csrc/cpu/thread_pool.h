// The library's own threads: kernels hand out tasks, threads that are free take the next one.
#pragma once

#include <cstdint>

namespace vllm_lite {

// Threads that take part in a kernel, the calling one included: 1 until vllm_lite_set_num_threads says otherwise.
int num_threads();

using TaskFunction = void (*)(const void* body, int64_t task, int thread);

// Which task a thread takes next: the first that nobody has taken; or, one after the other, those of its part, which
// all threads have of the tasks in their order, and then the last ones of other threads' parts.
enum class Order { kFirst, kByThread };
void run_tasks(int64_t num_tasks, Order order, const void* body, TaskFunction call);

// body(task) once for each task in [0, num_tasks), on all threads, in no order; returns when all are done, and what
// they wrote is then visible to the caller. Tasks are handed out one at a time, so that a thread that the system has
// put aside delays its own task only, and a thread that does not wake up in time delays nothing. Taking a task costs
// about 0.1 us, waking threads some us: a job of less than 8 us is faster as one task. Tasks should last 5 us or more,
// those of a thread's own part (kByThread) 0.5.
//
// Within a task, and while another thread is in a kernel, it runs all tasks itself, one after the other.
template <class Body>
void parallel_for(int64_t num_tasks, const Body& body, Order order = Order::kFirst) {
  run_tasks(num_tasks, order, &body,
            [](const void* typed, int64_t task, int) { (*static_cast<const Body*>(typed))(task); });
}

// body(task, thread), with thread in [0, num_threads()): no two tasks of one call run at the same time with the same
// number, so it can index scratch memory. That memory must belong to the call: two calls may both use number 0.
template <class Body>
void parallel_for_indexed(int64_t num_tasks, const Body& body, Order order = Order::kFirst) {
  run_tasks(num_tasks, order, &body,
            [](const void* typed, int64_t task, int thread) { (*static_cast<const Body*>(typed))(task, thread); });
}

}  // namespace vllm_lite
