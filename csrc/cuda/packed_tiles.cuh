// Linear layers with packed quantized weights, for more rows than packed_linear.cuh: a block has 256 outputs, so that a
// row is read from L2 once for all of them. Codes and scales are explained in packed_linear.cuh.
//
// Inputs are processed in steps of 64. Four steps are in shared memory at a time, in a ring: while one is multiplied,
// three are being loaded by cp.async. A warp has 32 outputs, whose codes only it reads, and all rows of the block,
// whose inputs all warps read: 16 bytes at a time, which are a lane's right operands for a span of 32 inputs. The
// 16-byte units are permuted in every other row, so that 8 lanes read from different banks.
//
// Inputs are divided into parts (blocks along z) by the weight's shape alone. A warp adds up its part's products in the
// order of inputs: a row's bits depend neither on the other rows nor on their number.
//
// Blocks have 32 or 64 rows. Sums of 128 would take half of a thread's registers, and the rest would be spilled.
#pragma once
#include "packed_linear.cuh"

namespace packed {

constexpr int STEP = 64, STAGES = 4;                      // inputs that pass together, and steps in shared memory
constexpr int WARP_TILES = 2;                             // of 16 outputs, a warp
constexpr int BLOCK_OUTPUTS = TILE * WARP_TILES * WARPS;  // 256
constexpr int UNITS = STEP * 2 / 16;                      // of 16 bytes of a row's inputs

// A step in shared memory: codes [warp, chunk, tile, lane, 16 bytes], scales [flush, output], rows [row, unit].
template <class S, Codes CODES, Less LESS, int FLUSH, int MT>
struct Step {
  static constexpr int CHUNKS = STEP / (SPAN * kChunkSpans<CODES>);
  static constexpr int FLUSHES = STEP / (SPAN * FLUSH);
  static constexpr int CODES_BYTES = WARPS * WARP_TILES * CHUNKS * TILE_BYTES;
  static constexpr int SCALES_BYTES = FLUSHES * BLOCK_OUTPUTS * int(sizeof(Scale<S, LESS>));
  static constexpr int BYTES = CODES_BYTES + SCALES_BYTES + 8 * MT * STEP * 2;

  // Of lane `lane` of this warp.
  static __device__ __forceinline__ int code(int chunk, int tile) {
    return (((int(threadIdx.x) / 32 * CHUNKS + chunk) * WARP_TILES + tile) * 32 + int(threadIdx.x) % 32) * 16;
  }
  static __device__ __forceinline__ int scale(int flush, int output) {
    return CODES_BYTES + (flush * BLOCK_OUTPUTS + output) * int(sizeof(Scale<S, LESS>));
  }
  static __device__ __forceinline__ int row(int row, int unit) {
    return CODES_BYTES + SCALES_BYTES + (row * UNITS + (unit ^ (row & 1) * (UNITS / 2))) * 16;
  }
};

// Starts loading inputs [STEP * step, ..) of a part that ends before chunk `end`; missing elements become zeros. rows:
// x from the block's first row on, with `num_rows` rows.
template <class At, class T, class S>
__device__ __forceinline__ void bring_step(uint8* to, const Weights<S>& weights, const T* rows, int64 row_stride,
                                           int num_rows, int max_rows, int chunk, int end, int flush_spans) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tiles = min(BLOCK_OUTPUTS, weights.num_outputs - weights.first_output) / TILE;
#pragma unroll
  for (int c = 0; c < At::CHUNKS; ++c)
#pragma unroll
    for (int n = 0; n < WARP_TILES; ++n) {
      const int tile = warp * WARP_TILES + n;
      const bool is_there = tile < tiles && chunk + c < end;
      const uint8* const from = weights.codes + (int64(tile) * weights.num_chunks + chunk + c) * TILE_BYTES + lane * 16;
      copy_async_16(to + At::code(c, n), is_there ? from : weights.codes, is_there);
    }
  const int first_span = chunk * (STEP / SPAN / At::CHUNKS), end_span = end * (STEP / SPAN / At::CHUNKS);
  constexpr int A_SCALE = (At::SCALES_BYTES / At::FLUSHES / BLOCK_OUTPUTS),
                EACH = 16 / A_SCALE;  // bytes; scales a unit
#pragma unroll 1
  for (int unit = threadIdx.x; unit < At::SCALES_BYTES / 16; unit += THREADS) {
    const int flush = unit / (BLOCK_OUTPUTS / EACH), output = unit % (BLOCK_OUTPUTS / EACH) * EACH;
    const int span = first_span + flush * flush_spans;
    const bool is_there = span < end_span && output < tiles * TILE;
    const int64 place = int64(span >> weights.group_shift) * weights.num_outputs + weights.first_output + output;
    const auto* const from = reinterpret_cast<const uint8*>(weights.scales) + place * A_SCALE;
    copy_async_16(to + At::scale(flush, output), is_there ? static_cast<const void*>(from) : weights.scales, is_there);
  }
#pragma unroll 1
  for (int at = threadIdx.x; at < max_rows * UNITS; at += THREADS) {
    const int row = at / UNITS, unit = at % UNITS, input = first_span * SPAN + 8 * unit;
    const bool is_there = row < num_rows && input < end_span * SPAN;
    copy_async_16(to + At::row(row, unit), is_there ? rows + row * row_stride + input : rows, is_there);
  }
}

// totals += the products of a loaded step.
template <class At, class T, class S, Codes CODES, Less LESS, int FLUSH, int MT>
__device__ __forceinline__ void multiply_step(float (&totals)[WARP_TILES][MT][4], const uint8* from) {
  constexpr int SPANS = kChunkSpans<CODES>;
  const int row = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  const int first_output = threadIdx.x / 32 * (WARP_TILES * TILE);
  const uint8* const halves[2] = {from + At::row(row, quad), from + At::row(row, SPAN / 8 + quad)};  // spans of a row
#pragma unroll
  for (int f = 0; f < At::FLUSHES; ++f) {
    unsigned operands[WARP_TILES][FLUSH][2][4];
    Scale<S, LESS> own[WARP_TILES][2];
#pragma unroll
    for (int n = 0; n < WARP_TILES; ++n) {
#pragma unroll
      for (int s = 0; s < FLUSH; ++s) {
        const int span = f * FLUSH + s;
        widen<T, CODES>(operands[n][s], load_as<uint4>(from + At::code(span / SPANS, n)), span % SPANS);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
        own[n][h] = load_as<Scale<S, LESS>>(from + At::scale(f, first_output + TILE * n + row + 8 * h));
    }
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      float products[WARP_TILES][4] = {}, row_sums[4] = {};  // of a row's inputs: an mma with ones
#pragma unroll
      for (int s = 0; s < FLUSH; ++s) {
        const auto given = load_as<uint4>(halves[f * FLUSH + s] + m * (8 * UNITS * 16));
        if constexpr (LESS != NOTHING) {
          const unsigned one = pack2<T>(1.f, 1.f), ones[4] = {one, one, one, one};
          mma_m16n8k16<T>(row_sums, ones, given.x, given.y);
          mma_m16n8k16<T>(row_sums, ones, given.z, given.w);
        }
#pragma unroll
        for (int n = 0; n < WARP_TILES; ++n) {
          mma_m16n8k16<T>(products[n], operands[n][s][0], given.x, given.y);
          mma_m16n8k16<T>(products[n], operands[n][s][1], given.z, given.w);
        }
      }
#pragma unroll
      for (int n = 0; n < WARP_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          add_scaled<S, LESS>(totals[n][m][i], products[n][i], own[n][i / 2], row_sums[i % 2]);
    }
  }
}

}  // namespace packed

// out = x W^T + bias for 8 * MT rows and BLOCK_OUTPUTS outputs per block; otherwise as packed_linear. Grid:
// (ceil(num_outputs / BLOCK_OUTPUTS), ceil(rows / (8 * MT)), parts), block: THREADS. Shared memory: STAGES *
// Step::BYTES.
template <class T, class O, class S, packed::Codes CODES, packed::Less LESS, int FLUSH, int MT>
__global__ void __launch_bounds__(packed::THREADS, 1)
    packed_tiles(O* __restrict__ out,                // [num_rows, size], rows strided
                 float* __restrict__ parts,          // [parts, num_rows, size] or null
                 const T* __restrict__ x,            // [num_rows, inputs], rows strided
                 const uint8* __restrict__ weights,  // codes
                 const S* __restrict__ scales,       // [groups, num_outputs, 1 or 2]
                 const float* __restrict__ bias,     // [size] or null
                 int64 out_stride, int64 x_stride, int num_rows, int num_outputs, int size, int num_chunks,
                 int group_shift) {
  using namespace packed;
  using At = Step<S, CODES, LESS, FLUSH, MT>;
  DYNAMIC_SHARED(uint8, ring);
  const int first_output = blockIdx.x * BLOCK_OUTPUTS, first_row = blockIdx.y * 8 * MT;
  const int begin = int(int64(num_chunks) * blockIdx.z / gridDim.z);
  const int end = int(int64(num_chunks) * (blockIdx.z + 1) / gridDim.z);
  const Weights<S> own = {weights + int64(first_output / TILE) * num_chunks * TILE_BYTES,
                          scales,
                          first_output,
                          num_outputs,
                          num_chunks,
                          group_shift};
  const int steps = ceil_div(end - begin, At::CHUNKS);
  const auto bring = [&](int step) {
    if (step < steps)
      bring_step<At>(ring + step % STAGES * At::BYTES, own, x + first_row * x_stride, x_stride, num_rows - first_row,
                     8 * MT, begin + step * At::CHUNKS, end, FLUSH);
    copy_async_commit();
  };

  float totals[WARP_TILES][MT][4] = {};
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) bring(step);
  for (int step = 0; step < steps; ++step) {
    copy_async_wait_but<STAGES - 2>();
    __syncthreads();  // this step is loaded, and the one before is no longer read
    bring(step + STAGES - 1);
    multiply_step<At, T, S, CODES, LESS, FLUSH, MT>(totals, ring + step % STAGES * At::BYTES);
  }

  const int lane = threadIdx.x % 32, first_column = first_output + int(threadIdx.x) / 32 * (WARP_TILES * TILE);
#pragma unroll
  for (int n = 0; n < WARP_TILES; ++n)
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = first_column + TILE * n + lane / 4 + i / 2 * 8;
        const int place = first_row + 8 * m + 2 * (lane % 4) + i % 2;
        if (column >= size || place >= num_rows) continue;
        if (parts)
          parts[(int64(blockIdx.z) * num_rows + place) * size + column] = totals[n][m][i];
        else
          out[place * out_stride + column] = from_float<O>(totals[n][m][i] + (bias ? bias[column] : 0.f));
      }
}
