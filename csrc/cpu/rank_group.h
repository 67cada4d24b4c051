// The memory that the ranks of a model share, and their waits for each other.
//
// Ranks are processes, or threads of one process, that map the same file (vllm_lite/runtime/group_memory.py). Its first
// page is for control; then follow two slots for each rank, and the rows of vllm_lite/kernels/cpu/collectives.py.
// Ranks exchange data in meetings. In a meeting, a rank writes to its own slot, arrives, and waits until all others
// have arrived; then it may read all slots. Meetings are numbered, and a meeting uses the slots of its number's parity.
// So a rank may write for meeting n + 2 without another wait: in meeting n + 1 it has waited until all had arrived, and
// a rank that arrives at meeting n + 1 has read everything that it needs of meeting n.
// There is no lock, and a rank writes only to its own line and slots. So a rank that is killed at any point leaves
// nothing inconsistent: the others wait for it, and return as soon as the group has ended.
#pragma once

#include <atomic>
#include <cstdint>

namespace vllm_lite {

// Only its own rank writes it, except for `sleepers`. It has two cache lines, because processors fetch lines in pairs.
struct alignas(128) RankLine {
  std::atomic<uint32_t> come;      // number of the latest meeting at which the rank has arrived; others sleep on it
  std::atomic<uint32_t> sleepers;  // ranks that may sleep on `come`; too many if one was killed while it slept
  std::atomic<uint32_t> taken;     // 1 once a rank has joined with this number
  std::atomic<uint64_t> call[2];   // words of its calls at the latest two meetings, by the meeting's parity
};

constexpr int64_t kControlBytes = 4096;
constexpr int kMaxRanks = kControlBytes / sizeof(RankLine) - 1;

struct ControlPage {
  alignas(128) std::atomic<uint32_t> ended_by;  // 1 + the rank that ended the group first, 0xffffffff for the engine
  RankLine ranks[kMaxRanks];
};
static_assert(sizeof(ControlPage) <= kControlBytes && std::atomic<uint64_t>::is_always_lock_free);

// A rank's own data, not shared; the same record as `_Record` in vllm_lite/kernels/cpu/collectives.py.
struct RankGroup {
  ControlPage* control;
  char* slots;  // [world][2][slot_bytes]
  int64_t slot_bytes;
  int64_t spin_ns, yield_ns, timeout_ns;  // of a wait: it spins, then yields the core; and fails after the last
  int32_t rank, world;
  std::atomic<int32_t> waits_for;  // 1 + the rank that this one is waiting for, or 0
  std::atomic<int32_t> missing;    // 1 + the rank that it was waiting for when a call failed, or 0
  int32_t failed;                  // the Status of a failed call, with which all later calls fail as well; or 0
};

// Results of calls, the same numbers as in vllm_lite/kernels/cpu/collectives.py; kDone is the same as for other
// recordable functions.
enum Status : int64_t { kDone = -1, kEnded = 1, kTimedOut = 2, kDiffers = 3, kTaken = 4 };

// Number of the next meeting.
inline uint32_t next_meeting(const RankGroup& group) {
  // Only this rank writes the word, so relaxed order is enough.
  return group.control->ranks[group.rank].come.load(std::memory_order_relaxed) + 1;
}

inline char* slot_of(const RankGroup& group, int rank, uint32_t meeting) {
  return group.slots + (rank * 2 + static_cast<int64_t>(meeting & 1)) * group.slot_bytes;
}

// Arrives at the next meeting and waits for the others. `call` describes the exchange. Returns kDiffers if another rank
// makes a different call; then no slot may be read. Returns kEnded or kTimedOut if not all ranks arrived. After one
// failure the group stays failed, because its ranks may no longer be at the same meeting.
Status meet(RankGroup& group, uint64_t call);

}  // namespace vllm_lite
