// Recurrent layers: a short convolution over a sequence's tokens, and a state matrix per head, by the gated delta rule
// or Mamba-2. vllm_lite/kernels/delta_rule.py and mamba.py define them, and are the reference.
//
// A sequence's rows are divided into segments. Each begins with the state in slot `source` and stores its own in slot
// `target`; source 0 is the state before the first token, and target 0 stores nothing. A segment without rows copies a
// state. All segments of a sequence are in one block, and each thread writes only what it reads again, since a segment
// may begin with the state of the one before. No other block reads a written slot.
//
// Grids depend only on the numbers of sequences, heads and channels, and segments are read on the device: a CUDA graph
// can contain the launches. Sums have one order, and a token gets the same bits however its prompt is divided.
#pragma once
#include "common.cuh"

namespace recurrent {

constexpr int CONV_THREADS = 128;
constexpr int LANES = 4;  // of each column of a matrix
constexpr int TILE = 16;  // tokens that are prepared together

__device__ __forceinline__ float silu(float x) {
  return x / (1.f + expf(-x));
}
__device__ __forceinline__ float softplus(float x) {
  return x > 20.f ? x : log1pf(expf(x));
}

// Threads of a block for a matrix with `columns` columns: whole warps.
constexpr int threads(int columns) {
  return (columns * LANES + 31) / 32 * 32;
}
// Concurrent blocks per multiprocessor, with up to 128 registers per thread.
constexpr int blocks(int columns) {
  return threads(columns) < 512 ? 512 / threads(columns) : 1;
}
// Rows of a matrix, and elements of vectors multiplied with them, padded with zeros to whole runs per lane.
constexpr int padded(int size) {
  return (size + 4 * LANES - 1) / (4 * LANES) * (4 * LANES);
}

// A thread's part of a head's matrix [SIZE, COLUMNS]: the elements of one column in every LANES-th run of 4 rows.
template <int SIZE, int COLUMNS>
struct Column {
  static constexpr int ROWS = padded(SIZE) / LANES;
  float at[ROWS];
  const int column = threadIdx.x / LANES, lane = threadIdx.x % LANES;

  __device__ __forceinline__ bool is_there() const { return threads(COLUMNS) == COLUMNS * LANES || column < COLUMNS; }
  __device__ __forceinline__ int row(int i) const { return 4 * lane + i / 4 * (4 * LANES) + i % 4; }
  __device__ __forceinline__ bool has(int i) const { return is_there() && (padded(SIZE) == SIZE || row(i) < SIZE); }
  __device__ __forceinline__ void load(const float* from) {  // nullptr: zeros
#pragma unroll
    for (int i = 0; i < ROWS; ++i) at[i] = from != nullptr && has(i) ? from[row(i) * COLUMNS + column] : 0.f;
  }
  __device__ __forceinline__ void store(float* to) const {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      if (has(i)) to[row(i) * COLUMNS + column] = at[i];
  }
  // x^T S for this column; every lane gets it. x: shared memory, padded.
  __device__ __forceinline__ float dot(const float* x) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < ROWS; i += 4) {
      const auto part = load_as<Vec<float, 4>>(x + row(i));
#pragma unroll
      for (int e = 0; e < 4; ++e) sum = fmaf(part.at[e], at[i + e], sum);
    }
    return group_sum<LANES>(sum);
  }
  // S = decay S + x added; returns y^T S.
  __device__ __forceinline__ float update(const float* x, const float* y, float decay, float added) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < ROWS; i += 4) {
      const auto in = load_as<Vec<float, 4>>(x + row(i)), out = load_as<Vec<float, 4>>(y + row(i));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        at[i + e] = fmaf(in.at[e], added, at[i + e] * decay);
        sum = fmaf(out.at[e], at[i + e], sum);
      }
    }
    return group_sum<LANES>(sum);
  }
};

// A warp loads a vector to shared memory, padded with zeros, times `factor`; with `UNIT` divided by its length first.
template <int SIZE, bool UNIT>
__device__ __forceinline__ void bring(const float* from, float* to, float factor) {
  const int lane = threadIdx.x % 32;
  if constexpr (UNIT) {
    float squares = 0.f;
    for (int i = lane; i < SIZE; i += 32) squares = fmaf(from[i], from[i], squares);
    factor *= rsqrtf(warp_sum(squares) + 1e-6f);
  }
  for (int i = lane; i < padded(SIZE); i += 32) to[i] = i < SIZE ? from[i] * factor : 0.f;
}

// Parameters that all scans share.
struct Steps {
  float* states;  // [num_slots][heads, SIZE, COLUMNS]
  int64 slot_stride;
  const int *firsts, *rows, *sources, *targets;
  int chunked_rows;  // sequences with as many rows or more are those of recurrent_chunks.cuh
};
__device__ __forceinline__ int rows_of_sequence(const Steps& steps) {
  return steps.rows[steps.firsts[blockIdx.x + 1]] - steps.rows[steps.firsts[blockIdx.x]];
}

// Updates the matrix of head blockIdx.y over the segments of sequence blockIdx.x, unless it is computed in chunks, TILE
// tokens at a time: a warp prepares each token, prepare(row, t), then all threads process one after another,
// pass(state, row, t), and with FINISHES a warp finishes each, finish(row, t). t is the index in the tile, whose shared
// memory is the caller's.
template <int SIZE, int COLUMNS, bool FINISHES, class Prepare, class Pass, class Finish>
__device__ __forceinline__ void scan(const Steps& steps, const Prepare& prepare, const Pass& pass,
                                     const Finish& finish) {
  if (rows_of_sequence(steps) >= steps.chunked_rows) return;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  float* const states = steps.states + int64(blockIdx.y) * SIZE * COLUMNS;
  Column<SIZE, COLUMNS> state;
  for (int segment = steps.firsts[blockIdx.x]; segment < steps.firsts[blockIdx.x + 1]; ++segment) {
    const int source = steps.sources[segment], target = steps.targets[segment], end = steps.rows[segment + 1];
    state.load(source == 0 ? nullptr : states + source * steps.slot_stride);
    for (int first = steps.rows[segment]; first < end; first += TILE) {
      const int count = min(TILE, end - first);
      __syncthreads();  // the previous tile has been read
      for (int t = warp; t < count; t += warps) prepare(int64(first + t), t);
      __syncthreads();
      for (int t = 0; t < count; ++t) pass(state, int64(first + t), t);
      if constexpr (FINISHES) {
        __syncthreads();
        for (int t = warp; t < count; t += warps) finish(int64(first + t), t);
      }
    }
    if (target != 0) state.store(states + target * steps.slot_stride);
  }
}

// A token's log decay and beta of the gated delta rule.
__device__ __forceinline__ float2 delta_rates(float decay, float step, float b) {
  return make_float2(-decay * softplus(step), 1.f / (1.f + expf(-b)));
}
__device__ __forceinline__ float mamba_step(float step, float least, float most) {
  return fminf(fmaxf(softplus(step), least), most);
}

// A warp normalizes a token's head of the gated delta rule, and multiplies it by SiLU(z).
template <class T, int VALUE>
__device__ __forceinline__ void gated_norm(const float* read, const T* z, const float* norm, float eps, T* out) {
  const int lane = threadIdx.x % 32;
  float squares = 0.f;
  for (int i = lane; i < VALUE; i += 32) squares = fmaf(read[i], read[i], squares);
  const float scale = rsqrtf(warp_sum(squares) / VALUE + eps);
  for (int i = lane; i < VALUE; i += 32) out[i] = from_float<T>(read[i] * scale * norm[i] * silu(to_float(z[i])));
}

}  // namespace recurrent

// The causal convolution of each channel and SiLU; GATED: of gate times x, times out_gate, without SiLU. Grid:
// sequences, channels / CONV_THREADS; each thread has one channel.
template <class T, int SIZE, bool GATED>
__global__ void __launch_bounds__(recurrent::CONV_THREADS)
    short_conv(const T* __restrict__ x, const T* __restrict__ gate,
               const T* __restrict__ out_gate,    // [num_rows, channels], rows strided
               const float* __restrict__ weight,  // [SIZE, channels]
               const float* __restrict__ bias,    // [channels], or nullptr
               float* states,                     // [num_slots][SIZE - 1, channels]
               const int* firsts, const int* rows, const int* sources, const int* targets,
               void* out,  // [num_rows, channels], float32 or, GATED, T
               int64 x_stride, int64 slot_stride, int64 out_stride, int channels) {
  const int channel = blockIdx.y * recurrent::CONV_THREADS + threadIdx.x;
  if (channel >= channels) return;
  float taps[SIZE], window[SIZE];
#pragma unroll
  for (int i = 0; i < SIZE; ++i) taps[i] = weight[i * channels + channel];
  const float base = bias == nullptr ? 0.f : bias[channel];
  for (int segment = firsts[blockIdx.x]; segment < firsts[blockIdx.x + 1]; ++segment) {
    const int source = sources[segment], target = targets[segment], end = rows[segment + 1];
#pragma unroll
    for (int i = 0; i < SIZE - 1; ++i)
      window[i] = source == 0 ? 0.f : states[source * slot_stride + i * channels + channel];
#pragma unroll 4
    for (int row = rows[segment]; row < end; ++row) {
      window[SIZE - 1] = to_float(x[row * x_stride + channel]);
      if constexpr (GATED) window[SIZE - 1] *= to_float(gate[row * x_stride + channel]);
      float sum = base;
#pragma unroll
      for (int i = 0; i < SIZE; ++i) sum = fmaf(window[i], taps[i], sum);
#pragma unroll
      for (int i = 0; i < SIZE - 1; ++i) window[i] = window[i + 1];
      const int64 at = row * out_stride + channel;
      if constexpr (GATED)
        static_cast<T*>(out)[at] = from_float<T>(sum * to_float(out_gate[row * x_stride + channel]));
      else
        static_cast<float*>(out)[at] = recurrent::silu(sum);
    }
    if (target == 0) continue;
#pragma unroll
    for (int i = 0; i < SIZE - 1; ++i) states[target * slot_stride + i * channels + channel] = window[i];
  }
}

// The gated delta rule, the norm after it and SiLU(z). Grid: sequences, value heads; LANES threads per column of the
// head's matrix. Shared: TILE tokens' q, k (padded), outputs, decay and beta.
template <class T, int KEY, int VALUE>
__global__ void __launch_bounds__(recurrent::threads(VALUE), recurrent::blocks(VALUE))
    delta_rule(const float* __restrict__ mixed,                   // [num_rows][q | k | v], contiguous
               const T* __restrict__ z,                           // [num_rows, heads * VALUE], rows strided
               const T* __restrict__ b, const T* __restrict__ a,  // [num_rows, heads], likewise
               const float* __restrict__ decay, const float* __restrict__ dt_bias,  // [heads]
               const float* __restrict__ norm,                                      // [VALUE]
               float* states,                                                       // [num_slots][heads, KEY, VALUE]
               const int* firsts, const int* rows, const int* sources, const int* targets,
               T* __restrict__ out,  // [num_rows, heads * VALUE], rows strided
               int64 stride, int64 slot_stride, int64 out_stride, int chunked_rows, int key_heads, float eps) {
  using namespace recurrent;
  DYNAMIC_SHARED(float, shared);
  constexpr int KEYS = padded(KEY);
  const int heads = gridDim.y, head = blockIdx.y, lane = threadIdx.x % 32;
  float *const q = shared, *const k = q + TILE * KEYS, *const read = k + TILE * KEYS;
  float *const decays = read + TILE * VALUE, *const betas = decays + TILE;
  const int key_head = head / (heads / key_heads), width = key_heads * KEY;
  const int64 channels = 2 * width + heads * VALUE;
  const auto prepare = [&](int64 row, int t) {
    const float* const token = mixed + row * channels + key_head * KEY;
    bring<KEY, true>(token, q + t * KEYS, rsqrtf(float(KEY)));
    bring<KEY, true>(token + width, k + t * KEYS, 1.f);
    const int64 at = row * stride + head;
    if (lane == 0) {
      const float2 both = delta_rates(decay[head], to_float(a[at]) + dt_bias[head], to_float(b[at]));
      decays[t] = expf(both.x);
      betas[t] = both.y;
    }
  };
  const auto pass = [&](Column<KEY, VALUE>& state, int64 row, int t) {
    const float* const v = mixed + row * channels + 2 * width + head * VALUE;
    const float known = state.dot(k + t * KEYS) * decays[t];
    const float change = state.is_there() ? (v[state.column] - known) * betas[t] : 0.f;
    const float found = state.update(k + t * KEYS, q + t * KEYS, decays[t], change);
    if (state.lane == 0 && state.is_there()) read[t * VALUE + state.column] = found;
  };
  const auto finish = [&](int64 row, int t) {
    gated_norm<T, VALUE>(read + t * VALUE, z + row * stride + head * VALUE, norm, eps,
                         out + row * out_stride + head * VALUE);
  };
  scan<KEY, VALUE, true>({states, slot_stride, firsts, rows, sources, targets, chunked_rows}, prepare, pass, finish);
}

// The scan of Mamba-2 and SiLU(z). Grid: sequences, heads, with those of a group adjacent; LANES threads per column of
// the head's matrix. Shared: TILE tokens' b and c (padded), decay and dt.
template <class T, int STATE, int HEAD>
__global__ void __launch_bounds__(recurrent::threads(HEAD), recurrent::blocks(HEAD))
    mamba(const float* __restrict__ mixed,  // [num_rows][x | b of each group | c of each group], contiguous
          const T* __restrict__ z,          // [num_rows, heads * HEAD], rows strided
          const T* __restrict__ dt,         // [num_rows, heads], likewise
          const float* __restrict__ decay, const float* __restrict__ dt_bias,
          const float* __restrict__ skip,  // [heads]
          float* states,                   // [num_slots][heads, STATE, HEAD]
          const int* firsts, const int* rows, const int* sources, const int* targets,
          T* __restrict__ out,  // [num_rows, heads * HEAD], rows strided
          int64 stride, int64 slot_stride, int64 out_stride, int chunked_rows, int groups, float dt_min, float dt_max) {
  using namespace recurrent;
  DYNAMIC_SHARED(float, shared);
  constexpr int STATES = padded(STATE);
  const int heads = gridDim.y, head = blockIdx.y;
  float *const b = shared, *const c = b + TILE * STATES, *const decays = c + TILE * STATES, *const dts = decays + TILE;
  const int64 values = int64(heads) * HEAD, group = head / (heads / groups);
  const int64 channels = values + 2 * groups * STATE;
  const auto prepare = [&](int64 row, int t) {
    const float* const token = mixed + row * channels + values + group * STATE;
    bring<STATE, false>(token, b + t * STATES, 1.f);
    bring<STATE, false>(token + groups * STATE, c + t * STATES, 1.f);
    if (threadIdx.x % 32 == 0) {
      dts[t] = mamba_step(to_float(dt[row * stride + head]) + dt_bias[head], dt_min, dt_max);
      decays[t] = expf(-decay[head] * dts[t]);
    }
  };
  const auto pass = [&](Column<STATE, HEAD>& state, int64 row, int t) {
    const int64 at = int64(head) * HEAD + state.column;
    const float x = state.is_there() ? mixed[row * channels + at] : 0.f;
    const float found = state.update(b + t * STATES, c + t * STATES, decays[t], x * dts[t]);
    if (state.lane == 0 && state.is_there())
      out[row * out_stride + at] = from_float<T>(fmaf(x, skip[head], found) * silu(to_float(z[row * stride + at])));
  };
  scan<STATE, HEAD, false>({states, slot_stride, firsts, rows, sources, targets, chunked_rows}, prepare, pass,
                           [](int64, int) {});
}
