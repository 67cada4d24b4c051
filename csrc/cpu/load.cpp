// Packs weights straight from the files of a checkpoint, on its own threads, while the caller does other work.
// A weight consists of blocks, and each block is a task. Tasks are taken in order, so weights become ready in order.
// Files are read into a thread's scratch memory, not mapped: so a file that was truncated causes an error instead of a
// signal, and file contents do not count as memory of this process.
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <vector>

#include "common.h"
#include "linear.h"
#include "pack.h"
#include "quantize.h"

// Rows of one tensor that become consecutive rows of a weight; the same record as `_Piece` in
// vllm_lite/kernels/cpu/weights/file_packer.py.
struct WeightPiece {
  int64_t offset;        // of the tensor's first byte in its file
  int64_t row_elements;  // elements of a row of the tensor
  int64_t first_input;   // first element that is taken from each row
  int64_t first_row;     // first row that is taken, if `order` is nullptr
  int64_t num_rows;
  const int64_t* order;  // the rows that are taken, [num_rows], or nullptr
  int32_t file;          // an open descriptor
  int32_t type;          // DType of the tensor, up to kFloat16
};

// The same record as `_Job` in file_packer.py. The memory it points to belongs to the caller, and must stay valid until
// vllm_lite_load_end.
struct WeightJob {
  const WeightPiece* pieces;
  int64_t num_pieces;
  int64_t num_outputs;
  int64_t num_inputs;
  char* packed;        // the output, zeros before
  float* supers;       // an output of types with supers; else nullptr
  int32_t row_type;    // DType to which rows are converted first
  int32_t type;        // the same DType, or a type of quantize.h
  int64_t group_size;  // inputs of a group for a type of quantize.h; else 0
};

namespace {

constexpr int32_t kPending = -2, kCutOff = -1, kDone = 0;  // or an errno

class Loading {
 public:
  Loading(const WeightJob* jobs, int64_t num_jobs, int32_t niceness)
      : jobs_(jobs, jobs + num_jobs), left_(static_cast<size_t>(num_jobs)), niceness_(niceness) {
    int64_t total = 0;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      left_[i] = (jobs_[i].num_outputs + kBlock - 1) / kBlock;
      total += left_[i];
      ends_.push_back(total);
    }
  }

  // Starts up to `num_threads` threads. If the system refuses some, waiting callers do the rest of the work.
  void start(int32_t num_threads) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // inherited: signals must go to the program's own threads
    for (int32_t i = 0; i < num_threads; ++i) {
      pthread_t thread;
      if (pthread_create(&thread, nullptr, serve, this) != 0) break;
      threads_.push_back(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // Runs tasks until the job is done or the time is over.
  int32_t wait(size_t job, int64_t limit_ns) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(limit_ns);
    while (!is_over(job) && std::chrono::steady_clock::now() < deadline && take()) {
    }
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_until(lock, deadline, [&] { return left_[job] == 0 || error_ != kDone; });
    return left_[job] == 0 ? kDone : error_ != kDone ? error_ : kPending;
  }

  void end() {
    next_.store(INT64_MAX / 2, std::memory_order_relaxed);
    for (const pthread_t thread : threads_) pthread_join(thread, nullptr);
  }

 private:
  static void* serve(void* loading) {
    Loading* self = static_cast<Loading*>(loading);
    // On Linux this changes the priority of this thread only. Other work of the process then has priority.
    setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + self->niceness_);
    while (self->take()) {
    }
    return nullptr;
  }

  bool is_over(size_t job) {
    std::lock_guard<std::mutex> lock(mutex_);
    return left_[job] == 0 || error_ != kDone;
  }

  // Runs the next task. Returns whether there was one.
  bool take() {
    const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
    if (ends_.empty() || task >= ends_.back()) return false;
    size_t low = 0, high = ends_.size() - 1;
    while (low < high) {
      const size_t middle = (low + high) / 2;
      if (task < ends_[middle]) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const int32_t error = run(jobs_[low], task - (low == 0 ? 0 : ends_[low - 1]));
    std::lock_guard<std::mutex> lock(mutex_);
    if (error != kDone) {
      error_ = error;
      next_.store(INT64_MAX / 2, std::memory_order_relaxed);
    } else if (--left_[low] > 0) {
      return true;
    }
    changed_.notify_all();
    return error == kDone;
  }

  static int32_t run(const WeightJob& job, int64_t block) {
    static thread_local Scratch scratch;
    const int64_t first = block * kBlock, left = job.num_outputs - first, count = left < kBlock ? left : kBlock;
    const int64_t row_bytes = job.num_inputs * element_size(job.row_type);
    char* rows = scratch.get(count * row_bytes);
    int64_t piece_start = 0, row = 0;
    for (int64_t i = 0; i < job.num_pieces && row < count; ++i) {
      const WeightPiece& piece = job.pieces[i];
      const int64_t from = first + row - piece_start, rest = piece.num_rows - from;
      piece_start += piece.num_rows;
      if (rest <= 0) continue;
      const int64_t taken = rest < count - row ? rest : count - row;
      const int32_t error = read_rows(job, piece, from, taken, rows + row * row_bytes);
      if (error != kDone) return error;
      row += taken;
    }
    const RowsToPack part = {rows, job.num_inputs, count, job.num_inputs, job.row_type};
    if (job.group_size != 0) {
      const PackedWeight weight = quantized_weight(job.type, job.num_outputs, job.num_inputs, job.group_size);
      pack_quantized(part, job.type, job.group_size, job.packed + block * quantized_block_bytes(weight),
                     job.supers + block * num_supers(weight));
    } else {
      pack_rows(part, job.packed + block * packed_block_bytes(job.num_inputs, job.type));
    }
    return kDone;
  }

  // Reads rows [first, first + count) of a piece, in the job's row type. Contiguous rows are read at once.
  static int32_t read_rows(const WeightJob& job, const WeightPiece& piece, int64_t first, int64_t count, char* to) {
    static thread_local Scratch scratch;
    const int64_t stored = element_size(piece.type), width = job.num_inputs;
    const bool whole = piece.order == nullptr && width == piece.row_elements;
    const int64_t at_once = whole ? count : 1;
    char* into = piece.type == job.row_type ? to : scratch.get(count * width * stored);
    for (int64_t i = 0; i < count; i += at_once) {
      const int64_t row = piece.order == nullptr ? piece.first_row + first + i : piece.order[first + i];
      const int64_t at = piece.offset + (row * piece.row_elements + piece.first_input) * stored;
      const int32_t error = read_all(piece.file, into + i * width * stored, at_once * width * stored, at);
      if (error != kDone) return error;
    }
    if (into != to) VLLM_LITE_DISPATCH(convert)(into, piece.type, to, job.row_type, count * width);
    return kDone;
  }

  static int32_t read_all(int32_t file, char* to, int64_t num_bytes, int64_t at) {
    while (num_bytes > 0) {
      const ssize_t count = pread(file, to, static_cast<size_t>(num_bytes), at);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return count < 0 ? errno : kCutOff;
      to += count;
      at += count;
      num_bytes -= count;
    }
    return kDone;
  }

  std::vector<WeightJob> jobs_;
  std::vector<int64_t> left_;  // unfinished tasks of each job
  std::vector<int64_t> ends_;  // number of tasks of all jobs up to and including each job
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;  // for left_ and error_
  std::condition_variable changed_;
  int32_t error_ = kDone;
  int32_t niceness_;
  std::vector<pthread_t> threads_;
};

}  // namespace

// Begins to pack the jobs in order, on `num_threads` threads whose nice value is higher than the caller's by
// `niceness`; without threads, waiting callers pack. Returns a handle for the other functions, which vllm_lite_load_end
// frees; nullptr if memory is exhausted.
VLLM_LITE_API void* vllm_lite_load_begin(const WeightJob* jobs, int64_t num_jobs, int32_t num_threads,
                                         int32_t niceness) {
  Loading* loading = new (std::nothrow) Loading(jobs, num_jobs, niceness);
  if (loading != nullptr) loading->start(num_threads);
  return loading;
}

// Waits for a job up to `limit_ns`, and packs meanwhile. Returns 0 if it is done, -2 if the time is over. If a file
// cannot be read, all unfinished jobs fail: it then returns an errno, or -1 if a file ends too soon.
VLLM_LITE_API int32_t vllm_lite_load_wait(void* loading, int64_t job, int64_t limit_ns) {
  return static_cast<Loading*>(loading)->wait(static_cast<size_t>(job), limit_ns);
}

// Waits for the blocks that are being packed, stops, and frees the handle.
VLLM_LITE_API void vllm_lite_load_end(void* loading) {
  static_cast<Loading*>(loading)->end();
  delete static_cast<Loading*>(loading);
}
