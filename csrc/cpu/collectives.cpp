// Collectives of ranks over shared memory. All ranks make the same calls in the same order; data that does not fit into
// a slot is sent in pieces. Every call returns a Status, so that it can be part of a program: kDone, or the reason for
// which it failed. After a failure, no later call of the group can succeed.
#include "collectives.h"

#include <algorithm>
#include <cstring>

#include "common.h"
#include "program.h"
#include "rank_group.h"
#include "thread_pool.h"

using namespace vllm_lite;

namespace {

// Minimum bytes for which each rank sums up only a part. With two ranks both ways take as long; with four, each rank
// reads half as much.
constexpr int64_t kPartsBytes = 64 << 10;
constexpr int64_t kTaskBytes = 64 << 10;     // 5 us or so
constexpr int64_t kSharedBytes = 256 << 10;  // less work is faster on the calling thread alone
constexpr int64_t kPartAlignment = 64;       // in elements, so that no two ranks write to one cache line

enum Kind : uint64_t { kSum = 2, kGather = 3, kBroadcast = 4, kBarrier = 5 };

// A word that describes a call. Ranks with equal words exchange the same number of bytes, so they read only bytes that
// were written.
uint64_t call_of(Kind kind, int32_t detail, int64_t size) {
  return kind << 56 | static_cast<uint64_t>(detail & 0xff) << 48 | (static_cast<uint64_t>(size) & 0xffff'ffff'ffff);
}

// Runs body(first, last) over [0, bytes), as tasks on all threads if there is enough work. Tasks begin at multiples of
// 64 KiB.
template <class Body>
void over_bytes(int64_t bytes, const Body& body) {
  if (bytes < kSharedBytes || num_threads() == 1) return body(int64_t{0}, bytes);
  parallel_for((bytes + kTaskBytes - 1) / kTaskBytes,
               [&](int64_t task) { body(task * kTaskBytes, std::min(bytes, (task + 1) * kTaskBytes)); });
}

void copy(void* to, const void* from, int64_t bytes) {
  over_bytes(bytes, [&](int64_t first, int64_t last) {
    std::memcpy(static_cast<char*>(to) + first, static_cast<const char*>(from) + first,
                static_cast<size_t>(last - first));
  });
}

// One piece of an all-reduce: `bytes` at x, of elements of `dtype`; at most a slot.
struct Piece {
  RankGroup& group;
  int32_t dtype;
  int64_t element_bytes;
  char* x;
  int64_t bytes;
  uint64_t call;
};

// Sets x[first, last), in bytes, to the sum of x, which is this rank's input, and of the other ranks' slots.
void sum_slots(const Piece& piece, uint32_t meeting, int64_t first, int64_t last) {
  const RankGroup& group = piece.group;
  const void* inputs[kMaxRanks];
  for (int rank = 0; rank < group.world; ++rank) {
    inputs[rank] = (rank == group.rank ? piece.x : slot_of(group, rank, meeting)) + first;
  }
  const RankSum op = {piece.dtype, group.world, inputs, piece.x + first};
  const auto run = VLLM_LITE_DISPATCH(sum_over_ranks);
  over_bytes(last - first,
             [&](int64_t from, int64_t to) { run(op, from / piece.element_bytes, to / piece.element_bytes); });
}

// Every rank computes the whole sum: this takes one meeting, and each rank reads all other slots completely.
Status sum_at_once(const Piece& piece) {
  RankGroup& group = piece.group;
  const uint32_t meeting = next_meeting(group);
  copy(slot_of(group, group.rank, meeting), piece.x, piece.bytes);
  if (const Status status = meet(group, piece.call); status != kDone) return status;
  sum_slots(piece, meeting, 0, piece.bytes);
  return kDone;
}

struct Part {
  int64_t first, last;  // in bytes
};

Part part_of(const Piece& piece, int rank) {
  const int64_t unit = kPartAlignment * piece.element_bytes, units = (piece.bytes + unit - 1) / unit;
  const int64_t size = (units + piece.group.world - 1) / piece.group.world * unit;
  return {std::min(piece.bytes, rank * size), std::min(piece.bytes, (rank + 1) * size)};
}

// Every rank computes its part of the sum, and the others copy it. This takes one more meeting, but a rank reads no
// byte twice, and only 2 / W of the bytes that sum_at_once reads.
Status sum_by_parts(const Piece& piece) {
  RankGroup& group = piece.group;
  const Part own = part_of(piece, group.rank);
  uint32_t meeting = next_meeting(group);
  char* slot = slot_of(group, group.rank, meeting);
  copy(slot, piece.x, own.first);  // without its own part, which no other rank reads
  copy(slot + own.last, piece.x + own.last, piece.bytes - own.last);
  if (const Status status = meet(group, piece.call); status != kDone) return status;
  sum_slots(piece, meeting, own.first, own.last);

  meeting = next_meeting(group);
  copy(slot_of(group, group.rank, meeting) + own.first, piece.x + own.first, own.last - own.first);
  if (const Status status = meet(group, piece.call); status != kDone) return status;
  for (int i = 1; i < group.world; ++i) {
    const int rank = (group.rank + i) % group.world;  // each rank begins with another one
    const Part part = part_of(piece, rank);
    copy(piece.x + part.first, slot_of(group, rank, meeting) + part.first, part.last - part.first);
  }
  return kDone;
}

// Calls exchange(offset, bytes) for each piece of `bytes`, none larger than a slot, until one fails.
template <class Exchange>
int64_t in_pieces(const RankGroup& group, int64_t bytes, const Exchange& exchange) {
  Status status = kDone;
  for (int64_t from = 0; from < bytes && status == kDone; from += group.slot_bytes) {
    status = exchange(from, std::min(group.slot_bytes, bytes - from));
  }
  return status;
}

}  // namespace

// Replaces x, `count` elements of `dtype`, a float of 2 or 4 bytes, by the sum of all ranks' x.
VLLM_LITE_API int64_t vllm_lite_all_reduce(RankGroup* group, int32_t dtype, int64_t count, char* x) {
  const int64_t element_bytes = dtype == kFloat32 ? 4 : 2;
  return in_pieces(*group, count * element_bytes, [&](int64_t from, int64_t bytes) {
    const Piece piece = {*group, dtype, element_bytes, x + from, bytes, call_of(kSum, dtype, bytes)};
    return bytes < kPartsBytes ? sum_at_once(piece) : sum_by_parts(piece);
  });
}
VLLM_LITE_RECORDABLE(vllm_lite_all_reduce)

// Writes the `bytes` at x of every rank to out, [world][bytes].
VLLM_LITE_API int64_t vllm_lite_all_gather(RankGroup* group, int64_t bytes, const char* x, char* out) {
  return in_pieces(*group, bytes, [&](int64_t from, int64_t size) {
    const uint32_t meeting = next_meeting(*group);
    copy(slot_of(*group, group->rank, meeting), x + from, size);
    const Status status = meet(*group, call_of(kGather, 0, size));
    if (status != kDone) return status;
    for (int rank = 0; rank < group->world; ++rank) {
      const char* part = rank == group->rank ? x + from : slot_of(*group, rank, meeting);
      copy(out + rank * bytes + from, part, size);
    }
    return kDone;
  });
}
VLLM_LITE_RECORDABLE(vllm_lite_all_gather)

// Replaces the `bytes` at x by those of rank `source`.
VLLM_LITE_API int64_t vllm_lite_broadcast(RankGroup* group, int32_t source, int64_t bytes, char* x) {
  return in_pieces(*group, bytes, [&](int64_t from, int64_t size) {
    const uint32_t meeting = next_meeting(*group);
    if (group->rank == source) copy(slot_of(*group, source, meeting), x + from, size);
    const Status status = meet(*group, call_of(kBroadcast, source, size));
    if (status == kDone && group->rank != source) copy(x + from, slot_of(*group, source, meeting), size);
    return status;
  });
}
VLLM_LITE_RECORDABLE(vllm_lite_broadcast)

// Waits until all ranks have called it. Their earlier writes to shared memory are then visible.
VLLM_LITE_API int64_t vllm_lite_barrier(RankGroup* group) {
  return meet(*group, call_of(kBarrier, 0, 0));
}
VLLM_LITE_RECORDABLE(vllm_lite_barrier)
