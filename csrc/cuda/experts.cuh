// Matrix products of a layer's experts, as defined in vllm_lite/layers/moe/expert_matmul.py; the reference is
// LoopedExperts there.
//
// A pair is a token with one of its experts: pair p is that of token p / top. Pairs are sorted by expert, followed by
// those of other ranks' experts. Each launch is for all experts:
//     sort_pairs     chosen -> the place of each pair in that order, and the begin of each expert's pairs
//     expert_tiles   gate and up with the activation, from x; in a second launch down, from the first one's outputs
//     sum_experts    the outputs of a token's experts, weighted and added
// No grid and no size depends on the chosen experts: blocks without work return. So a CUDA graph can contain all
// launches, and nothing waits for the host.
//
// A row's bits depend only on the row and its expert: in every tile, the products of an output are added up in the same
// order.
#pragma once
#include "fused.cuh"

namespace experts {

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int SORT_THREADS = 1024;  // each block reads all pairs of a step: 65,536 of 8,192 tokens with 8 experts each
constexpr int COLUMNS = 64;         // of a tile: two times 8 for each warp, 32 apart
constexpr int ROW_BYTES = 128;      // of a row of a tile in shared memory, which holds so much of the depth
constexpr int PITCH_BYTES = 144;    // from one row to the next: an odd number of 16 bytes, no conflicts
constexpr int CHUNKS = ROW_BYTES / 16;

// Pairs of tiles (rows and columns) in shared memory: all but one are being loaded while that one is multiplied. Few
// rows make few blocks, whose loads must fill the memory bandwidth; many rows make many blocks, limited by computing.
constexpr int stages(int row_tiles) {
  return row_tiles == 1 ? 4 : 2;
}

enum Activation { NONE, SILU, GELU_TANH, GELU, RELU, RELU2, SWIGLU_OAI };

// Whether a kind takes a gate; experts without one have RELU2.
constexpr bool takes_gate(Activation kind) {
  return kind != NONE && kind != RELU2;
}

template <Activation KIND>
__device__ __forceinline__ float activated(float x) {
  if constexpr (KIND == SILU) return silu(x);
  if constexpr (KIND == GELU_TANH) return gelu_tanh(x);
  if constexpr (KIND == GELU) return .5f * x * (1.f + erff(x * .70710678118654752f));
  const float positive = x > 0.f ? x : x != x ? x : 0.f;  // NaN stays
  return KIND == RELU2 ? positive * positive : positive;
}

// gpt-oss's. NaN stays.
__device__ __forceinline__ float swiglu_oai(float gate, float up) {
  gate = gate > 7.f ? 7.f : gate;
  up = up > 7.f ? 7.f : up < -7.f ? -7.f : up;
  return (up + 1.f) * gate / (1.f + expf(-1.702f * gate));
}

// The output of a gated MLP for gate and up rounded to T: rounded once, or after the activation as well.
template <class T, class O, Activation KIND>
__device__ __forceinline__ O gated(float gate, float up) {
  if constexpr (KIND == SWIGLU_OAI)
    return from_float<O>(swiglu_oai(gate, up));
  else
    return from_float<O>(to_float(from_float<T>(activated<KIND>(gate))) * up);
}

// Copies 16 bytes from global to shared memory; only the first `left` elements exist, the others become zeros. VECTOR:
// `left` is 0 or all, and `from` a multiple of 16 bytes. Readable after a wait for the copies and a barrier.
template <class T, bool VECTOR>
__device__ __forceinline__ void fetch(T* to, const T* from, int left) {
  if constexpr (VECTOR) {
    copy_async_16(to, from, left > 0);
  } else {
#pragma unroll
    for (int i = 0; i < int(16 / sizeof(T)); ++i) to[i] = i < left ? from[i] : from_float<T>(0.f);
  }
}

// sums += rows * columns^T over the depth of one tile. Both are in shared memory, with rows PITCH_BYTES apart. A warp
// computes all rows and, in sums[.][t], the columns 32 * t + 8 * warp + [0, 8), in the layout of an mma's result.
template <class T, int MT>
__device__ __forceinline__ void multiply(float (&sums)[MT][2][4], const T* rows, const T* columns) {
  constexpr int PITCH = PITCH_BYTES / sizeof(T), DEPTH = ROW_BYTES / sizeof(T);
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 8;
  if constexpr (kSame<T, float>) {
    for (int k = 0; k < DEPTH; ++k)
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float a = rows[(16 * m + 8 * (i / 2 % 2) + lane / 4) * PITCH + k];
          const float b = columns[(32 * (i / 4) + first + 2 * (lane % 4) + i % 2) * PITCH + k];
          sums[m][i / 4][i % 4] = fmaf(a, b, sums[m][i / 4][i % 4]);
        }
  } else {
    // Lane 8 * i + r loads row r of the i-th of four 8x8 matrices.
    const int matrix = lane / 8, r = lane % 8;
    const T* const a_row = rows + (matrix % 2 * 8 + r) * PITCH + matrix / 2 * 8;
    const T* const b_row = columns + (matrix / 2 * 32 + first + r) * PITCH + matrix % 2 * 8;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
      unsigned b[4];
      load_matrices(b, b_row + k);
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        unsigned a[4];
        load_matrices(a, a_row + 16 * m * PITCH + k);
        mma_m16n8k16<T>(sums[m][0], a, b[0], b[1]);
        mma_m16n8k16<T>(sums[m][1], a, b[2], b[3]);
      }
    }
  }
}

}  // namespace experts

// Sorts the pairs by expert, and those of one expert by number. Expert e of [first, first + held) has the places
// [starts[e - first], starts[e - first + 1]); starts[held] and later places are those of other experts. Grid: held + 1,
// block: whole warps, up to experts::SORT_THREADS. Shared memory: 2 ints per warp.
__global__ void __launch_bounds__(experts::SORT_THREADS)
    sort_pairs(const int* __restrict__ chosen,  // [num_pairs]
               int* __restrict__ pairs,         // [num_pairs], which pair is at each place
               int* __restrict__ places,        // [num_pairs], the place of each pair
               int* __restrict__ starts,        // [held + 1]
               int num_pairs, int first, int held) {
  using namespace experts;
  DYNAMIC_SHARED(int, own_counts);
  const int warps = blockDim.x / 32;
  int* const counts_before = own_counts + warps;
  const int group = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // This warp's pairs, and the group of each.
  const int share = round_up(ceil_div(num_pairs, warps), 32), low = min(warp * share, num_pairs);
  const int high = min(low + share, num_pairs);
  const auto group_of = [&](int pair) {
    if (pair >= high) return held + 1;
    const int expert = chosen[pair];
    return expert >= first && expert < first + held ? expert - first : held;
  };

  int own = 0, before = 0;
  for (int at = low; at < high; at += 32) {
    const int of_pair = group_of(at + lane);
    own += __popc(__ballot_sync(~0u, of_pair == group));
    before += __popc(__ballot_sync(~0u, of_pair < group));
  }
  if (lane == 0) {
    own_counts[warp] = own;
    counts_before[warp] = before;
  }
  __syncthreads();
  int place = 0;
  for (int w = 0; w < warps; ++w) place += counts_before[w];
  if (threadIdx.x == 0) starts[group] = place;
  for (int w = 0; w < warp; ++w) place += own_counts[w];
  for (int at = low; at < high; at += 32) {
    const bool mine = group_of(at + lane) == group;
    const unsigned all = __ballot_sync(~0u, mine);
    if (mine) {
      const int here = place + __popc(all & ((1u << lane) - 1));
      pairs[here] = at + lane;
      places[at + lane] = here;
    }
    place += __popc(all);
  }
}

// For each expert the product of its rows with its weight [outputs, depth], in tiles of 16 * MT rows.
// Without a gate, out[place, :] = row * weight^T, float, or with RELU2 T(relu(T(row * weight^T))^2); outputs = size.
// With one, outputs = 2 * size, gate before up, to which `biases` are added unless they are null, and out[place, :] =
// T(activation(T(gate))) * T(up).
// The row at a place is rows[pairs[place] / top] or, if `pairs` is null, rows[place].
// T: float, __half or __nv_bfloat16; O: float without an activation, else T. VECTOR: depth and strides are multiples of
// 16 bytes, and so are the addresses.
// Grid: (ceil(size / columns), experts, row tiles at once), block: experts::THREADS; columns: COLUMNS, with a gate
// half of them. Shared memory: stages(MT) * PITCH_BYTES * (16 * MT + COLUMNS).
template <class T, class O, experts::Activation KIND, int MT, bool VECTOR>
__global__ void __launch_bounds__(experts::THREADS, MT == 4 && VECTOR ? 5 : 4)
    expert_tiles(O* __restrict__ out,             // [num_pairs, size]
                 const T* __restrict__ rows,      // [.., depth]
                 const T* __restrict__ weights,   // [experts, outputs, depth]
                 const T* __restrict__ biases,    // [experts, outputs] or null
                 const int* __restrict__ starts,  // [experts + 1]
                 const int* __restrict__ pairs,   // [num_pairs] or null
                 int64 row_stride, int depth, int size, int top) {
  using namespace experts;
  constexpr bool GATED = takes_gate(KIND);
  constexpr int ROWS = 16 * MT, WIDTH = GATED ? COLUMNS / 2 : COLUMNS;
  constexpr int PITCH = PITCH_BYTES / sizeof(T), DEPTH = ROW_BYTES / sizeof(T), UNIT = 16 / sizeof(T);
  constexpr int TILE = (ROWS + COLUMNS) * PITCH;  // elements of a pair of tiles: rows, then columns
  constexpr int STEP = THREADS / CHUNKS;          // rows that the block fetches at once
  constexpr int STAGES = stages(MT);
  DYNAMIC_SHARED(T, tiles);  // a ring of STAGES pairs
  const int expert = blockIdx.y, start = starts[expert], count = starts[expert + 1] - start;
  const int column = blockIdx.x * WIDTH, steps = ceil_div(depth, DEPTH);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = threadIdx.x / CHUNKS, within = threadIdx.x % CHUNKS * UNIT;  // of what this thread fetches first
  const int64 first_output = int64(expert) * (GATED ? 2 : 1) * size;
  const T* const weight = weights + first_output * depth;
  const auto bias = [&](int output) { return biases ? to_float(biases[first_output + output]) : 0.f; };

  for (int tile = blockIdx.z; tile * ROWS < count; tile += gridDim.z) {
    const T* sources[MT];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      const int at = tile * ROWS + m * STEP + row;
      sources[m] = nullptr;
      if (at < count) sources[m] = rows + int64(pairs ? pairs[start + at] / top : start + at) * row_stride;
    }
    const auto begin = [&](int step) {
      T* const to = tiles + step % STAGES * TILE + row * PITCH + within;
      const int k = step * DEPTH + within, left = max(depth - k, 0);
#pragma unroll
      for (int m = 0; m < MT; ++m)
        fetch<T, VECTOR>(to + m * STEP * PITCH, sources[m] && left ? sources[m] + k : rows, sources[m] ? left : 0);
#pragma unroll
      for (int i = 0; i < COLUMNS / STEP; ++i) {
        const int c = i * STEP + row;  // with a gate the second half is the up that belongs to the first
        const int output = column + c % WIDTH, valid = output < size && left;
        const T* from = valid ? weight + int64(c < WIDTH ? output : size + output) * depth + k : weight;
        fetch<T, VECTOR>(to + (ROWS + i * STEP) * PITCH, from, valid ? left : 0);
      }
    };

    float sums[MT][2][4] = {};
    begin(0);
    copy_async_commit();
#pragma unroll 1
    for (int step = 1; step < STAGES - 1; ++step) {
      if (step < steps) begin(step);
      copy_async_commit();
    }
    for (int step = 0; step < steps; ++step) {
      copy_async_wait_but<STAGES - 2>();
      __syncthreads();  // this step is loaded, and the previous pair is no longer read
      if (step + STAGES - 1 < steps) begin(step + STAGES - 1);
      copy_async_commit();
      const T* const pair = tiles + step % STAGES * TILE;
      multiply<T, MT>(sums, pair, pair + ROWS * PITCH);
    }
    __syncthreads();

#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = tile * ROWS + 16 * m + 8 * (i / 2) + lane / 4;
        const int c = column + 8 * warp + 2 * (lane % 4) + i % 2;
        if (at >= count) continue;
        O* const to = out + int64(start + at) * size;
        if constexpr (GATED) {
          if (c >= size) continue;
          const float gate = sums[m][0][i] + bias(c), up = sums[m][1][i] + bias(size + c);
          to[c] = gated<T, O, KIND>(to_float(from_float<T>(gate)), to_float(from_float<T>(up)));
        } else {
          const auto finish = [](float sum) {
            return from_float<O>(KIND == NONE ? sum : activated<KIND>(to_float(from_float<T>(sum))));
          };
          if (c < size) to[c] = finish(sums[m][0][i]);
          if (c + 32 < size) to[c + 32] = finish(sums[m][1][i]);
        }
      }
  }
}

// out[token] = the sum of weight * (wide + its expert's bias) over the token's pairs with experts in [first, first +
// held), in float in the order of the experts' numbers, rounded once; `biases` may be null. W: T or float. Grid:
// (tokens, ceil(size / threads)). Shared memory: 3 * top words.
template <class T, class W>
__global__ void sum_experts(T* __restrict__ out,                // [num_tokens, size], rows strided
                            const W* __restrict__ wide,         // [num_pairs, size], in the order of places
                            const T* __restrict__ biases,       // [held, size] or null
                            const int* __restrict__ places,     // [num_pairs]
                            const int* __restrict__ chosen,     // [num_pairs]
                            const float* __restrict__ weights,  // [num_pairs]
                            int64 out_stride, int size, int top, int first, int held) {
  DYNAMIC_SHARED(int, ordered);  // the places of the token's pairs by the numbers of their experts; -1: not held
  float* const factors = reinterpret_cast<float*>(ordered + top);
  int* const owners = ordered + 2 * top;
  const int64 pair = int64(blockIdx.x) * top;
  for (int i = threadIdx.x; i < top; i += blockDim.x) {
    const int expert = chosen[pair + i];
    int rank = 0;
    for (int j = 0; j < top; ++j) rank += chosen[pair + j] < expert || (chosen[pair + j] == expert && j < i);
    ordered[rank] = expert >= first && expert < first + held ? places[pair + i] : -1;
    factors[rank] = weights[pair + i];
    owners[rank] = expert - first;
  }
  __syncthreads();
  const int column = blockIdx.y * blockDim.x + threadIdx.x;
  if (column >= size) return;
  float sum = 0.f;
  for (int i = 0; i < top; ++i) {
    if (ordered[i] < 0) continue;
    float output = to_float(wide[int64(ordered[i]) * size + column]);
    if (biases) output += to_float(biases[int64(owners[i]) * size + column]);
    sum = fmaf(factors[i], output, sum);
  }
  out[blockIdx.x * out_stride + column] = from_float<T>(sum);
}
