// The memory that the ranks of a model have in common, and how they wait for each other in it.
//
// Ranks are processes, or threads of one process, that map the same file (vllm_lite/runtime/group_memory.py). Its first
// page is for control, then come two slots for each rank, then what vllm_lite/kernels/cpu/collectives.py places there.
//
// All that ranks exchange is exchanged in meetings. A meeting has three parts: a rank writes to its own slot, comes,
// and waits until all the others have come; then it may read the slots of all. Meetings are numbered, and a meeting
// uses the slots of its number's parity. That is what makes it safe to write again without asking: a rank that writes
// for meeting n + 2 has waited in meeting n + 1 until all had come there, and who comes to meeting n + 1 has read all
// that it wanted of meeting n.
//
// Nobody holds a lock, and a rank changes nothing but its own line and slots. So a rank that is killed at any point
// leaves nothing that others could stumble over: they wait for it, and leave as soon as the group has ended.
#pragma once

#include <atomic>
#include <cstdint>

namespace vllm_lite {

// Written by its rank alone, but for `sleepers`. Two cache lines, since processors fetch them in pairs.
struct alignas(128) RankLine {
  std::atomic<uint32_t> come;      // number of the latest meeting that the rank has come to; others sleep on it
  std::atomic<uint32_t> sleepers;  // ranks that may sleep on `come`; too many, where one was killed in its sleep
  std::atomic<uint32_t> taken;     // 1 once a rank has joined with this number
  std::atomic<uint64_t> call[2];   // what it exchanges at its latest two meetings, each at its number's parity
};

constexpr int64_t kControlBytes = 4096;
constexpr int kMaxRanks = kControlBytes / sizeof(RankLine) - 1;

struct ControlPage {
  alignas(128) std::atomic<uint32_t> ended_by;  // 1 + the rank that ended the group first, 0xffffffff for the engine
  RankLine ranks[kMaxRanks];
};
static_assert(sizeof(ControlPage) <= kControlBytes && std::atomic<uint64_t>::is_always_lock_free);

// What one rank knows; the same record as in vllm_lite/kernels/cpu/collectives.py. Not shared.
struct RankGroup {
  ControlPage* control;
  char* slots;  // [world][2][slot_bytes]
  int64_t slot_bytes;
  int64_t spin_ns, yield_ns, timeout_ns;  // how long a wait spins, then yields the core; when it fails
  int32_t rank, world;
  std::atomic<int32_t> waits_for;  // 1 + the rank that this one waits for at the moment, or 0
  std::atomic<int32_t> missing;    // 1 + the rank that it was waiting for when a call failed, or 0
  int32_t failed;                  // the Status of the call that failed, or 0: all later ones fail as well
};

// What calls return, the same numbers as in vllm_lite/kernels/cpu/collectives.py; kDone is that of recordable
// functions.
enum Status : int64_t { kDone = -1, kEnded = 1, kTimedOut = 2, kDiffers = 3, kTaken = 4 };

// Number of the next meeting.
inline uint32_t next_meeting(const RankGroup& group) {
  // Only this rank writes the word, so it needs no order.
  return group.control->ranks[group.rank].come.load(std::memory_order_relaxed) + 1;
}

inline char* slot_of(const RankGroup& group, int rank, uint32_t meeting) {
  return group.slots + (rank * 2 + static_cast<int64_t>(meeting & 1)) * group.slot_bytes;
}

// Comes to the next meeting and waits for the others. `call` says what is exchanged: kDiffers if another rank exchanges
// something else, and then no slot may be read. kEnded, kTimedOut: not all have come. A group that has failed once
// stays so, because its ranks may no longer be at the same meeting.
Status meet(RankGroup& group, uint64_t call);

}  // namespace vllm_lite
