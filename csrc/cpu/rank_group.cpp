// Waits in three phases: first spinning, which reacts fastest; then yielding the core, which the awaited rank may need;
// then sleeping in a futex, from which the arriving rank wakes sleepers. Each phase checks whether the group has ended.
#include "rank_group.h"

#include <sched.h>

#include <algorithm>
#include <climits>

#include "common.h"
#include "program.h"
#include "wait.h"

namespace vllm_lite {
namespace {

constexpr int64_t kLookNs = 10'000'000;  // the engine ends a group without waking sleepers, so they check this often
constexpr uint64_t kJoin = 1;            // word of a call that joins; the words in collectives.cpp begin after it

// Numbers wrap around; ranks are at most one meeting apart.
bool has_come(uint32_t come, uint32_t meeting) {
  return static_cast<int32_t>(come - meeting) >= 0;
}

void sleep(RankLine& line, uint32_t meeting, int64_t limit_ns) {
  // The arriving rank stores `come` and then reads `sleepers`; this thread writes `sleepers` and then reads `come`. All
  // four accesses are sequentially consistent: either it sees a sleeper, or this thread sees that it has arrived. If it
  // arrives between the load and the system call, the system call returns at once because the word has changed.
  line.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t come = line.come.load(std::memory_order_seq_cst);
  if (!has_come(come, meeting)) futex_wait(&line.come, come, Futex::kShared, limit_ns);
  line.sleepers.fetch_sub(1, std::memory_order_relaxed);  // a superfluous wake does no harm
}

Status wait_until_come(const RankGroup& group, RankLine& line, uint32_t meeting) {
  const int64_t begin_ns = now_ns();
  for (;;) {
    for (int i = 0; i < 16; ++i) {
      // Acquire, paired with the release of its store: the rank's writes to its slot before it arrived are visible.
      if (has_come(line.come.load(std::memory_order_acquire), meeting)) return kDone;
      pause_cpu();
    }
    // No other data depends on this word, so relaxed order is enough.
    if (group.control->ended_by.load(std::memory_order_relaxed) != 0) return kEnded;
    const int64_t waited_ns = now_ns() - begin_ns;
    if (waited_ns >= group.timeout_ns) return kTimedOut;
    if (waited_ns < group.spin_ns) continue;
    if (waited_ns < group.spin_ns + group.yield_ns) {
      sched_yield();
    } else {
      sleep(line, meeting, std::min(kLookNs, group.timeout_ns - waited_ns));
    }
  }
}

void come(RankLine& line, uint32_t meeting, uint64_t call) {
  line.call[meeting & 1].store(call, std::memory_order_relaxed);
  // Release order: a rank that sees this number also sees everything that this rank wrote, and this rank has finished
  // its reads of earlier meetings before others may write there again. `sleep` even requires seq_cst.
  line.come.store(meeting, std::memory_order_seq_cst);
  if (line.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake(&line.come, INT_MAX, Futex::kShared);
}

Status wait_for(RankGroup& group, int rank, uint32_t meeting, uint64_t call) {
  RankLine& line = group.control->ranks[rank];
  if (!has_come(line.come.load(std::memory_order_acquire), meeting)) {
    group.waits_for.store(rank + 1, std::memory_order_relaxed);
    const Status status = wait_until_come(group, line, meeting);
    group.waits_for.store(0, std::memory_order_relaxed);
    if (status != kDone) {
      group.missing.store(rank + 1, std::memory_order_relaxed);
      return status;
    }
  }
  // The rank may already be at the next meeting; the word of this meeting is still stored under its parity.
  return line.call[meeting & 1].load(std::memory_order_relaxed) == call ? kDone : kDiffers;
}

}  // namespace

Status meet(RankGroup& group, uint64_t call) {
  if (group.failed != 0) return static_cast<Status>(group.failed);
  Status status = group.control->ended_by.load(std::memory_order_relaxed) == 0 ? kDone : kEnded;
  const uint32_t meeting = next_meeting(group);
  if (status == kDone) come(group.control->ranks[group.rank], meeting, call);
  for (int i = 1; i < group.world && status == kDone; ++i) {
    status = wait_for(group, (group.rank + i) % group.world, meeting, call);
  }
  if (status != kDone) group.failed = static_cast<int32_t>(status);
  return status;
}

}  // namespace vllm_lite

using namespace vllm_lite;

// The first meeting, for which only the control page must be mapped. All ranks must agree on `shared_bytes`, below
// 2^48. kTaken: there is a rank of this number.
VLLM_LITE_API int64_t vllm_lite_group_join(RankGroup* group, int64_t shared_bytes) {
  if (group->control->ranks[group->rank].taken.exchange(1, std::memory_order_relaxed) != 0) return kTaken;
  return meet(*group, kJoin << 56 | static_cast<uint64_t>(group->world) << 48 | static_cast<uint64_t>(shared_bytes));
}

// Makes all ranks leave their waits, and every later one. The first rank that does so counts.
VLLM_LITE_API void vllm_lite_group_end(RankGroup* group) {
  ControlPage* control = group->control;
  uint32_t nobody = 0;
  control->ended_by.compare_exchange_strong(nobody, static_cast<uint32_t>(group->rank) + 1, std::memory_order_relaxed);
  for (int rank = 0; rank < group->world; ++rank) futex_wake(&control->ranks[rank].come, INT_MAX, Futex::kShared);
}

// As many ranks as a group can have.
VLLM_LITE_API int32_t vllm_lite_group_max_ranks() {
  return kMaxRanks;
}
