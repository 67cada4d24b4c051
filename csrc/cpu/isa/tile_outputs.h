// Writes the sums of groups of rows as outputs of one block.
#pragma once

#include "linear_task.h"
#include "tile_groups.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int64_t kStreamBytes = 1 << 20;

// The sums of a group that are still to be written: row by row, so that this can be done during the products of the
// next group.
struct Outputs {
  const LinearCall* call = nullptr;
  const float* sums = nullptr;
  int64_t first_row = 0, num_rows = 0;  // rows of the call
  int64_t block = 0;

  bool are_whole() const { return call->weight->num_outputs - block * kBlock >= kBlock; }

  char* at(int64_t row, int64_t size) const {
    return static_cast<char*>(call->out) + ((first_row + row) * call->out_stride + block * kBlock) * size;
  }

  // Outputs of a whole block. Without biases adds -0, which changes nothing, not even -0.
  Vec output(int64_t row, int64_t v) const {
    const float* biases = call->weight->bias;
    return load(sums + sums_at(row, v)) +
           (biases == nullptr ? splat(-0.0f) : load(biases + block * kBlock + v * kWidth));
  }

  // Writes rows [begin, end) of the group's kGroup; only num_rows of them exist.
  void write(int64_t begin, int64_t end) const {
    end = end < num_rows ? end : num_rows;
    if (begin >= end) return;
    if (!are_whole()) return call->out_type == kFloat32 ? write_part<float>(begin, end) : write_part_as_x(begin, end);
    if (call->out_type == kFloat32) return write_all<float>(begin, end);
    if (call->x_type == kFloat16) return write_all<Float16>(begin, end);
    write_all<BFloat16>(begin, end);
  }

 private:
  template <class Out>
  void write_part(int64_t begin, int64_t end) const {
    float of_row[kBlock];
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t v = 0; v < 2; ++v) store(of_row + v * kWidth, load(sums + sums_at(row, v)));
      VLLM_LITE_ISA::write<Out>(*call, {first_row + row, 1, block, 1}, of_row, kBlock);
    }
  }
  void write_part_as_x(int64_t begin, int64_t end) const {
    call->x_type == kFloat16 ? write_part<Float16>(begin, end) : write_part<BFloat16>(begin, end);
  }

  template <class Out>
  void write_all(int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; ++row) {
      Out* out = reinterpret_cast<Out*>(at(row, sizeof(Out)));
      for (int v = 0; v < 2; ++v) store(out + v * kWidth, output(row, v));
    }
  }
};

// Whether outputs are written past the caches: if they are so many that they would evict other data, and each row of a
// block is a whole cache line. Partial lines would first be read from memory.
bool are_streamed(const LinearCall& call) {
  const int64_t row_bytes = call.out_stride * 2, lines = reinterpret_cast<int64_t>(call.out) | row_bytes;
  const bool are_many = call.num_rows * call.weight->num_outputs * 2 > kStreamBytes;
  return call.out_type == kBFloat16 && lines % 64 == 0 && call.weight->num_outputs % kBlock == 0 && are_many;
}

// Like write(), past the caches.
VLLM_LITE_INLINE void stream(const Outputs& outputs, int64_t begin, int64_t end) {
  end = end < outputs.num_rows ? end : outputs.num_rows;
  for (int64_t row = begin; row < end; ++row) {
    const __m512bh both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(outputs.output(row, 1)),
                                              reinterpret_cast<__m512>(outputs.output(row, 0)));
    _mm512_stream_si512(reinterpret_cast<__m512i*>(outputs.at(row, 2)), reinterpret_cast<__m512i>(both));
  }
}

}  // namespace
}  // namespace VLLM_LITE_ISA
