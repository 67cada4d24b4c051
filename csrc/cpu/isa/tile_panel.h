// Copies the rows of a task in the order in which tiles read them.
#pragma once

#include <sys/mman.h>

#include "tile_groups.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int64_t kStepRows = kGroup * kTileRowBytes;  // bytes that one step reads of a group

// A thread's memory for copied rows and sums, kept from one task to the next.
class TileMemory {
 public:
  TileMemory() = default;
  TileMemory(const TileMemory&) = delete;
  TileMemory& operator=(const TileMemory&) = delete;
  ~TileMemory() { std::free(data_); }

  char* get(int64_t num_bytes) {
    if (num_bytes <= size_) return data_;
    std::free(data_);
    size_ = (num_bytes + kHugePage - 1) / kHugePage * kHugePage;
    data_ = static_cast<char*>(std::aligned_alloc(kHugePage, static_cast<size_t>(size_)));
    if (data_ == nullptr) std::abort();
#if defined(MADV_HUGEPAGE)
    madvise(data_, static_cast<size_t>(size_), MADV_HUGEPAGE);
#endif
    return data_;
  }

 private:
  static constexpr int64_t kHugePage = 2 << 20;
  char* data_ = nullptr;
  int64_t size_ = 0;
};

// One memory for all kinds of products.
TileMemory& tile_memory() {
  static thread_local TileMemory memory;
  return memory;
}

// Copies num_bytes of each row, padded with zeros, to [groups][steps][kGroup][kTileRowBytes]. In place, rows whose
// distance is a multiple of 4096 bytes would share few sets of the caches, and with a distance of 16 KiB fewer than
// they need.
void copy_rows(const char* from, int64_t stride, int64_t num_rows, int64_t num_bytes, char* to) {
  const int64_t num_steps = (num_bytes + kTileRowBytes - 1) / kTileRowBytes, rest = num_bytes % kTileRowBytes;
  for (int64_t row = 0; row < num_rows; ++row, from += stride) {
    char* at = to + row / kGroup * num_steps * kStepRows + row % kGroup * kTileRowBytes;
    for (int64_t step = 0; step < num_bytes / kTileRowBytes; ++step) {
      std::memcpy(at + step * kStepRows, from + step * kTileRowBytes, kTileRowBytes);
    }
    if (rest == 0) continue;
    at += (num_steps - 1) * kStepRows;
    std::memcpy(at, from + num_bytes - rest, static_cast<size_t>(rest));
    std::memset(at + rest, 0, static_cast<size_t>(kTileRowBytes - rest));
  }
}

}  // namespace
}  // namespace VLLM_LITE_ISA
