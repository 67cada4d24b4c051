// The small operations between matrix products, as defined, with their rounding, in vllm_lite/kernels/ops.py.
// Arithmetic is in float32.
//
// T is float, __half or __nv_bfloat16. N elements are moved at a time: 16 bytes if a row's length, stride and address
// allow it, else 1. Strides are in elements. There is one thread block per row; the division of a row among its threads
// depends only on its length, so a row's result does not depend on the number of rows.
#pragma once
#include "common.cuh"

template <class T, int N>
__device__ __forceinline__ void load_floats(const T* from, float (&values)[N]) {
  const auto raw = load_as<Vec<T, N>>(from);
#pragma unroll
  for (int j = 0; j < N; ++j) values[j] = to_float(raw.at[j]);
}

template <class T, int N>
__device__ __forceinline__ void store_floats(T* to, const float (&values)[N]) {
  Vec<T, N> raw;
#pragma unroll
  for (int j = 0; j < N; ++j) raw.at[j] = from_float<T>(values[j]);
  store_as(to, raw);
}

// ---- RMSNorm

// x = row * scale * weight, not rounded yet; the first product is rounded to T.
template <class T, int N>
__device__ __forceinline__ void load_normed(const T* row, const T* weight, float scale, float (&x)[N]) {
  float w[N];
  load_floats(row, x);
  load_floats(weight, w);
#pragma unroll
  for (int j = 0; j < N; ++j) x[j] = to_float(from_float<T>(x[j] * scale)) * w[j];
}

// out = row / sqrt(sum / size + eps) * weight for this thread's elements; `sum` is that of the row's squares. The
// quotient is rounded to T before it is multiplied. `out` may be `row`.
template <class T, int N>
__device__ __forceinline__ void normalize(const T* row, const T* weight, T* out, int size, float sum, float eps) {
  const float scale = rsqrtf(sum / size + eps);
  for (int i = threadIdx.x * N; i < size; i += blockDim.x * N) {
    float x[N];
    load_normed<T, N>(row + i, weight + i, scale, x);
    store_floats(out + i, x);
  }
}

// x, out: [num_rows, size]. The offset of row r is (r / inner) outer strides and (r % inner) inner strides: the rows of
// [num_tokens, inner, size]. Grid: num_rows. Shared memory: 32 floats.
template <class T, int N>
__global__ void rms_norm(const T* x, const T* weight, T* out, int size, float eps, int inner, int64 x_outer,
                         int64 x_inner, int64 out_outer, int64 out_inner) {
  DYNAMIC_SHARED(float, scratch);
  const int64 outer = blockIdx.x / inner, within = blockIdx.x % inner;
  const T* row = x + outer * x_outer + within * x_inner;
  float sum = 0.f;
  for (int i = threadIdx.x * N; i < size; i += blockDim.x * N) {
    float values[N];
    load_floats(row + i, values);
#pragma unroll
    for (int j = 0; j < N; ++j) sum = fmaf(values[j], values[j], sum);
  }
  sum = block_sum(sum, scratch);
  normalize<T, N>(row, weight, out + outer * out_outer + within * out_inner, size, sum, eps);
}

// residual += x, rounded to T; out = rms_norm(residual). All [num_rows, size]; `out` may be `x`. Grid: num_rows. Shared
// memory: 32 floats.
template <class T, int N>
__global__ void add_rms_norm(T* residual, const T* x, const T* weight, T* out, int size, float eps,
                             int64 residual_stride, int64 x_stride, int64 out_stride) {
  DYNAMIC_SHARED(float, scratch);
  T* row = residual + blockIdx.x * residual_stride;
  const T* added = x + blockIdx.x * x_stride;
  float sum = 0.f;
  for (int i = threadIdx.x * N; i < size; i += blockDim.x * N) {
    float values[N], more[N];
    load_floats(row + i, values);
    load_floats(added + i, more);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      values[j] = to_float(from_float<T>(values[j] + more[j]));
      sum = fmaf(values[j], values[j], sum);
    }
    store_floats(row + i, values);  // read again by the same thread in normalize()
  }
  sum = block_sum(sum, scratch);
  normalize<T, N>(row, weight, out + blockIdx.x * out_stride, size, sum, eps);
}

// ---- rotary embedding

// Rotates `low` and `high`, elements [i, i + N) and [half + i, half + i + N) of one head, rounds once, and stores them
// there. The fused multiply-add is explicit, so that all kernels that rotate give the same bits.
template <class T, int N>
__device__ __forceinline__ void turn_values(T* head, const T* cos, const T* sin, int half, int i, float (&low)[N],
                                            float (&high)[N]) {
  float cos_low[N], cos_high[N], sin_low[N], sin_high[N];
  load_floats(cos + i, cos_low);
  load_floats(cos + half + i, cos_high);
  load_floats(sin + i, sin_low);  // already negated
  load_floats(sin + half + i, sin_high);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float first = low[j], second = high[j];
    low[j] = to_float(from_float<T>(fmaf(second, sin_low[j], first * cos_low[j])));
    high[j] = to_float(from_float<T>(fmaf(first, sin_high[j], second * cos_high[j])));
  }
  store_floats(head + i, low);
  store_floats(head + half + i, high);
}

// The same for the stored elements.
template <class T, int N>
__device__ __forceinline__ void turn(T* head, const T* cos, const T* sin, int half, int i, float (&low)[N],
                                     float (&high)[N]) {
  load_floats(head + i, low);
  load_floats(head + half + i, high);
  turn_values<T, N>(head, cos, sin, half, i, low, high);
}

// heads: [num_tokens, num_heads, head_size], rotated in place; cos, sin: [num_tokens, head_size]. Grid: num_tokens.
template <class T, int N>
__global__ void rotate(T* heads, const T* cos, const T* sin, int num_heads, int head_size, int64 token_stride,
                       int64 head_stride, int64 cos_stride, int64 sin_stride) {
  const int64 token = blockIdx.x;
  const int half = head_size / 2, steps = half / N;
  for (int item = threadIdx.x; item < num_heads * steps; item += blockDim.x) {
    float low[N], high[N];
    T* head = heads + token * token_stride + item / steps * head_stride;
    turn<T, N>(head, cos + token * cos_stride, sin + token * sin_stride, half, item % steps * N, low, high);
  }
}

// ---- gated activations

__device__ __forceinline__ float silu(float x) {
  return x / (1.f + expf(-x));
}
// x / 2 * (1 + tanh(z)), written as x * sigmoid(2 z): without the cancellation where tanh(z) is near -1.
__device__ __forceinline__ float gelu_tanh(float x) {
  return x / (1.f + expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
}

// out = activation(gate) * up, the activation rounded to T first. gate_up: [num_rows, 2 * size], out: [num_rows, size],
// which may be the gate. Grid: (num_rows, ceil(size / N / threads)).
template <class T, int N, bool GELU>
__device__ __forceinline__ void activate(const T* gate_up, T* out, int size, int64 row_stride, int64 out_stride) {
  const int64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * N;
  if (i >= size) return;
  float gate[N], up[N];
  load_floats(gate_up + row * row_stride + i, gate);
  load_floats(gate_up + row * row_stride + size + i, up);
#pragma unroll
  for (int j = 0; j < N; ++j) up[j] *= to_float(from_float<T>(GELU ? gelu_tanh(gate[j]) : silu(gate[j])));
  store_floats(out + row * out_stride + i, up);
}

template <class T, int N>
__global__ void silu_and_mul(const T* gate_up, T* out, int size, int64 row_stride, int64 out_stride) {
  activate<T, N, false>(gate_up, out, size, row_stride, out_stride);
}

template <class T, int N>
__global__ void gelu_and_mul(const T* gate_up, T* out, int size, int64 row_stride, int64 out_stride) {
  activate<T, N, true>(gate_up, out, size, row_stride, out_stride);
}

// ---- sums

// residual += sigmoid(gates) * x, rounded once. residual, x: [num_rows, size]; gates: a float per row. Grid: (num_rows,
// ceil(size / N / threads)).
template <class T, int N>
__global__ void add_gated(T* residual, const T* x, const float* gates, int size, int64 residual_stride, int64 x_stride,
                          int64 gates_stride) {
  const int64 row = blockIdx.x;
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * N;
  if (i >= size) return;
  const float factor = 1.f / (1.f + expf(-gates[row * gates_stride]));
  float sum[N], added[N];
  load_floats(residual + row * residual_stride + i, sum);
  load_floats(x + row * x_stride + i, added);
#pragma unroll
  for (int j = 0; j < N; ++j) sum[j] = fmaf(factor, added[j], sum[j]);
  store_floats(residual + row * residual_stride + i, sum);
}
