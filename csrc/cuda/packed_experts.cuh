// Matrix products of a layer's experts with packed weights: pairs, places and starts are explained in experts.cuh,
// codes and scales in packed_linear.cuh. The reference is LoopedExperts in vllm_lite/layers/moe/expert_matmul.py over
// kernels/grouped.py.
//
//     packed_experts  for few rows an expert: a product of codes, as packed_linear is, for each expert that has rows
//     widen_experts   for many: some experts become numbers, which expert_tiles multiplies
//
// No grid depends on the chosen experts. A step of few pairs has no more experts than pairs: blocks look up their
// expert among those that have rows, so that the others need no blocks.
#pragma once
#include "experts.cuh"
#include "packed_linear.cuh"

namespace packed {

// The expert with index `which` among those that have rows; num_experts if there are fewer. Called by whole warps.
__device__ __forceinline__ int expert_with_rows(const int* starts, int num_experts, int which) {
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < num_experts; first += 32) {
    const int expert = first + lane;
    const unsigned with_rows = __ballot_sync(~0u, expert < num_experts && starts[expert + 1] > starts[expert]);
    const int count = __popc(with_rows);
    if (which < count) {
      const bool is_it = (with_rows >> lane & 1) && __popc(with_rows & ((1u << lane) - 1)) == which;
      return first + __ffs(int(__ballot_sync(~0u, is_it))) - 1;
    }
    which -= count;
  }
  return num_experts;
}

}  // namespace packed

// For each expert the product of its rows with its weight, 8 * MT rows and 16 * NT outputs per block. The row at a
// place is rows[pairs[place] / top] or, if `pairs` is null, rows[place]. Without a gate, out[place, :] = row *
// weight^T, float, or with RELU2 T(relu(T(row * weight^T))^2). With one, tiles of 16 outputs of gate and of up
// alternate; `biases` are added to both unless they are null, and out[place, :] = T(activation(T(gate))) * T(up). T, S,
// CODES, LESS, FLUSH, MT, NT: as in packed_linear, NT even with a gate; O: float without an activation, else T. The
// scales of the experts follow each other. A row's bits depend only on the row and its expert. Grid: (num_outputs / (16
// * NT), the smaller of experts and pairs, row tiles at once), block: packed::THREADS. Shared memory: NT * MT * 4 *
// THREADS floats.
template <class T, class O, experts::Activation KIND, class S, packed::Codes CODES, packed::Less LESS, int FLUSH,
          int MT, int NT>
__global__ void __launch_bounds__(packed::THREADS, MT == 1 ? 2 : 1)
    packed_experts(O* __restrict__ out,                // [num_pairs, size], rows strided
                   const T* __restrict__ rows,         // [.., inputs], rows strided
                   const uint8* __restrict__ weights,  // codes: [experts, num_outputs / 16, num_chunks, TILE_BYTES]
                   const S* __restrict__ scales,       // [experts, groups, num_outputs, 1 or 2]
                   const T* __restrict__ biases,       // [experts, 2 * size], the gate's first, or null
                   const int* __restrict__ starts,     // [experts + 1]
                   const int* __restrict__ pairs,      // [num_pairs] or null
                   int64 out_stride, int64 row_stride, int num_experts, int num_outputs, int size, int num_chunks,
                   int groups, int group_shift, int top) {
  using namespace packed;
  constexpr bool GATED = experts::takes_gate(KIND);
  constexpr int ROWS = 8 * MT, WIDTH = TILE * NT / (GATED ? 2 : 1);
  static_assert(!GATED || NT % 2 == 0);
  DYNAMIC_SHARED(float, sums);  // [WARPS, NT, MT, 4, lane]
  const bool all = int(gridDim.y) == num_experts;
  const int expert = all ? int(blockIdx.y) : expert_with_rows(starts, num_experts, blockIdx.y);
  if (expert == num_experts) return;
  const int start = starts[expert], count = starts[expert + 1] - start;
  const int first_output = blockIdx.x * TILE * NT, first_column = blockIdx.x * WIDTH, lane = threadIdx.x % 32;
  const Weights<S> own = {weights + (int64(expert) * (num_outputs / TILE) + blockIdx.x * NT) * num_chunks * TILE_BYTES,
                          scales + int64(expert) * groups * num_outputs * (LESS == NOTHING ? 1 : 2),
                          first_output,
                          num_outputs,
                          num_chunks,
                          group_shift};

  for (int tile = blockIdx.z; tile * ROWS < count; tile += gridDim.z) {
    const T* sources[MT];  // null: there is no such row
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      const int at = tile * ROWS + 8 * m + lane / 4;
      sources[m] = nullptr;
      if (at < count)
        sources[m] = rows + int64(pairs ? pairs[start + at] / top : start + at) * row_stride + 8 * (lane % 4);
    }
    multiply_chunks<T, S, CODES, LESS, FLUSH, MT, NT>(sums, sources, own, 0, num_chunks);
    for (int i = threadIdx.x; i < WIDTH * ROWS; i += THREADS) {
      const int c = i % WIDTH, r = i / WIDTH, at = tile * ROWS + r, column = first_column + c;
      if (at >= count || column >= size) continue;
      O* const to = out + int64(start + at) * out_stride + column;
      const auto rounded = [](float x) { return to_float(from_float<T>(x)); };
      if constexpr (GATED) {
        const int output = c / TILE * 2 * TILE + c % TILE;
        const T* const bias = biases ? biases + (int64(expert) * 2) * size + column : nullptr;
        const float gate = sum_of_warps<MT, NT>(sums, output, r) + (bias ? to_float(bias[0]) : 0.f);
        const float up = sum_of_warps<MT, NT>(sums, output + TILE, r) + (bias ? to_float(bias[size]) : 0.f);
        *to = experts::gated<T, O, KIND>(rounded(gate), rounded(up));
      } else {
        const float sum = sum_of_warps<MT, NT>(sums, c, r);
        *to = from_float<O>(KIND == experts::NONE ? sum : experts::activated<KIND>(rounded(sum)));
      }
    }
    __syncthreads();  // the sums are no longer read
  }
}

// Dequantizes the weights of some experts to T, rounded once: out[expert, output, input], outputs = size. `weights` and
// `scales` begin with the first of them; with `in_turn`, tiles of gate and up alternate, and out has all of the gate
// before up. A warp widens a chunk of 16 outputs. `depth` inputs, a multiple of 8. Grid: (ceil(num_chunks / WARPS),
// num_outputs / 16, experts), block: packed::THREADS.
template <class T, class S, packed::Codes CODES, packed::Less LESS>
__global__ void __launch_bounds__(packed::THREADS)
    widen_experts(T* __restrict__ out,                // [experts, size, depth]
                  const uint8* __restrict__ weights,  // as packed_experts'
                  const S* __restrict__ scales,       // as packed_experts'
                  int in_turn, int num_outputs, int size, int depth, int num_chunks, int groups, int group_shift) {
  using namespace packed;
  const int lane = threadIdx.x % 32, chunk = blockIdx.x * WARPS + threadIdx.x / 32, tile = blockIdx.y;
  if (chunk >= num_chunks) return;
  const int64 place = int64(blockIdx.z) * (num_outputs / TILE) + tile;
  const uint4 codes = load_stream(weights + (place * num_chunks + chunk) * TILE_BYTES + lane * 16);
  const S* const own = scales + int64(blockIdx.z) * groups * num_outputs * (LESS == NOTHING ? 1 : 2);
  const int first = in_turn ? tile % 2 * (size / 2) + tile / 2 * TILE : tile * TILE;
  T* const to = out + int64(blockIdx.z) * size * depth;
  widen_chunk<T, S, CODES, LESS>(codes, own, tile * TILE, num_outputs, chunk, group_shift,
                                 [&](int output, int input, const uint4& numbers) {
                                   if (tile * TILE + output < size && input < depth)
                                     store_as(to + int64(first + output) * depth + input, numbers);
                                 });
}
