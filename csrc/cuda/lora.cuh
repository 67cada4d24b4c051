// Low-rank adapters (LoRA): out += (x A^T) B^T for rows of several adapters, which are in slots. The reference is
// StackedSlots in vllm_lite/layers/weights/lora.py, the CPU's kernel csrc/cpu/lora.cpp.
//
// Rows are grouped: slot i has the rows in order[starts[i] : starts[i + 1]]. A block computes a tile of rows of one
// slot, which share its reads of A or B. No grid depends on the rows' adapters: blocks without rows return. So a CUDA
// graph can contain both launches.
//
// Sums are in float32, rounded once at the end. A row's bits depend only on the row and its adapter.
#pragma once
#include "common.cuh"

namespace lora {

constexpr int TILE = 8, WARPS = 4, THREADS = 32 * WARPS;

struct Tile {
  int slot, first, count;  // rows order[first] up to order[first + count]
};

// The tile with a number counted over all slots; without rows after the last one.
__device__ __forceinline__ Tile tile_of(const int* starts, int num_slots, int number) {
  for (int slot = 0; slot < num_slots; ++slot) {
    const int first = starts[slot], size = starts[slot + 1] - first, tiles = ceil_div(size, TILE);
    if (number < tiles) return {slot, first + number * TILE, min(TILE, size - number * TILE)};
    number -= tiles;
  }
  return {0, 0, 0};
}

}  // namespace lora

// hidden = x A^T, for a row at its index in `order`. Grid: tiles, ranks of all matrices / WARPS; one per warp.
template <class T, int WIDTH>
__global__ void __launch_bounds__(lora::THREADS)
    lora_shrink(const T* __restrict__ x,         // [num_rows, inputs], rows strided
                const T* __restrict__ down,      // [num_slots, matrices * rank, inputs]
                float* __restrict__ hidden,      // [num_rows, matrices * rank]
                const int* __restrict__ order,   // [num_rows]
                const int* __restrict__ starts,  // [num_slots + 1]
                const int* __restrict__ ranks,   // [num_slots], up to `rank`; 0: the slot is empty
                int64 x_stride, int num_slots, int inputs, int rank, int width) {
  using namespace lora;
  const Tile tile = tile_of(starts, num_slots, blockIdx.x);
  const int lane = threadIdx.x % 32, number = blockIdx.y * WARPS + threadIdx.x / 32;
  if (tile.count == 0 || number >= width || number % rank >= ranks[tile.slot]) return;
  const T* const weights = down + (int64(tile.slot) * width + number) * inputs;
  float sums[TILE] = {};
  for (int i = lane * WIDTH; i < inputs; i += 32 * WIDTH) {
    const auto weight = load_as<Vec<T, WIDTH>>(weights + i);
#pragma unroll
    for (int r = 0; r < TILE; ++r) {
      if (r >= tile.count) break;
      const auto value = load_as<Vec<T, WIDTH>>(x + order[tile.first + r] * x_stride + i);
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) sums[r] = fmaf(to_float(value.at[e]), to_float(weight.at[e]), sums[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < TILE; ++r) {
    if (r >= tile.count) break;
    const float sum = warp_sum(sums[r]);
    if (lane == 0) hidden[int64(tile.first + r) * width + number] = sum;
  }
}

// out += hidden B^T. Grid: tiles, outputs / THREADS; each thread computes one output of each row. The outputs from
// `second` and from `third` on are those of the second and third matrix; with a single matrix these are `outputs`.
template <class T, class O>
__global__ void __launch_bounds__(lora::THREADS)
    lora_expand(const float* __restrict__ hidden,  // [num_rows, width]
                const T* __restrict__ up,          // [num_slots, rank, outputs]
                O* __restrict__ out,               // [num_rows, outputs], rows strided
                const int* __restrict__ order, const int* __restrict__ starts, const int* __restrict__ ranks,
                int64 out_stride, int num_slots, int outputs, int rank, int width, int second, int third) {
  using namespace lora;
  const Tile tile = tile_of(starts, num_slots, blockIdx.x);
  const int column = blockIdx.y * THREADS + threadIdx.x;
  if (tile.count == 0 || column >= outputs) return;
  const int own_rank = ranks[tile.slot], matrix = (column >= second) + (column >= third);
  const T* const weights = up + int64(tile.slot) * rank * outputs + column;
  const float* const own = hidden + int64(tile.first) * width + matrix * rank;
  float sums[TILE] = {};
  for (int k = 0; k < own_rank; ++k) {
    const float weight = to_float(weights[int64(k) * outputs]);
#pragma unroll
    for (int r = 0; r < TILE; ++r) {
      if (r >= tile.count) break;
      sums[r] = fmaf(own[r * width + k], weight, sums[r]);
    }
  }
  if (own_rank == 0) return;
#pragma unroll
  for (int r = 0; r < TILE; ++r) {
    if (r >= tile.count) break;
    O* const to = out + order[tile.first + r] * out_stride + column;
    *to = from_float<O>(to_float(*to) + sums[r]);
  }
}
