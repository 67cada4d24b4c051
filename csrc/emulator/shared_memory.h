// Asynchronous copies to shared memory and matrix loads from it, for the emulator. See cuda_on_cpu.h.
#pragma once

namespace cpu {
// A copy takes place when its thread waits for it, the latest moment a GPU may choose; until then the destination holds
// poison. A block that ends with copies under way leaves them undone.
struct PendingCopy {
  void* to;
  const void* from;
  size_t bytes;
  bool valid;
  int group;  // number of groups that its thread had made before
};
constexpr int kMaxPending = 128;
inline PendingCopy pending_copies[kMaxThreads][kMaxPending];

inline void copy_async(void* to, const void* from, bool valid, size_t bytes, int line) {
  check_aligned(to, bytes, line);
  check_aligned(from, bytes, line);
  if (self->num_copies == kMaxPending) fail("too many asynchronous copies at once", "copy_async", line);
  pending_copies[linear_thread()][self->num_copies++] = {to, from, bytes, valid, self->num_groups};
  std::memset(to, kPoison, bytes);
}
// Does the copies of the groups before number `end`; later ones stay as they are.
inline void finish_groups(int end) {
  PendingCopy* const copies = pending_copies[linear_thread()];
  int left = 0;
  for (int i = 0; i < self->num_copies; ++i) {
    const PendingCopy copy = copies[i];
    if (copy.group >= end)
      copies[left++] = copy;
    else if (copy.valid)
      std::memcpy(copy.to, copy.from, copy.bytes);
    else
      std::memset(copy.to, 0, copy.bytes);
  }
  self->num_copies = left;
}
inline void copy_async_wait() {
  finish_groups(self->num_groups + 1);
}
inline void copy_async_commit() {
  ++self->num_groups;
}
inline void copy_async_wait_but(int count) {
  finish_groups(self->num_groups - count);
}

// ldmatrix: lane 8 * m + r brings the address of row r of the 8x8 matrix m.
inline void load_matrices(unsigned (&m)[4], const void* row, bool transposed, int line) {
  check_aligned(row, 16, line);
  const auto rows = show(~0u, static_cast<const uint16_t*>(row), "ldmatrix", line);
  for (int i = 0; i < 4; ++i) {
    const int major = lane() / 4, minor = lane() % 4 * 2;
    const uint16_t low = transposed ? rows[8 * i + minor][major] : rows[8 * i + major][minor];
    const uint16_t high = transposed ? rows[8 * i + minor + 1][major] : rows[8 * i + major][minor + 1];
    m[i] = unsigned(high) << 16 | low;
  }
}
}  // namespace cpu
