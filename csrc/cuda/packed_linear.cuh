// Linear layers with packed quantized weights: y = x W^T + bias. The reference is kernels/grouped.py with torch.mm;
// vllm_lite/kernels/cuda/weights/packed_linear.py packs weights and launches.
//
// A weight is scale * (code - zero) or scale * code - minimum, with a scale for each group of inputs. For few rows a
// product reads each weight once and computes little with it, like decode attention, and has the same structure: a lane
// loads 16 bytes of codes from global memory, converts them to operands of mma.m16n8k16 in registers, and loads rows
// straight into the other operand. The weight is the left operand, 16 outputs, so that 8 rows need no padding. Codes
// become T exactly, products of a group are added up in float, and the scale is applied to their sum.
//
// Codes: [outputs / 16, inputs / (64 or 32), lane, 16 bytes]. A span is 32 inputs. Lane 4 * r + q has of each span the
// inputs 8 * q + [0, 8) of outputs r and r + 8, in two words of 4 bits or four of 8. The order of a product's inner
// index is free if both operands agree on it: for the first mma of a span the inputs 8 * q + [0, 4), for the second 8 *
// q + [4, 8).
//   4 bits: word t is for mma t; its half-byte h + 2 * j + 4 * e is the code of output r + 8 * h, input
//           8 * q + 4 * t + 2 * j + e, for e, j, h in {0, 1}. A code of c means c - 8, or is a float4 (E2M1).
//   8 bits: word 2 * t + j is for mma t; its byte h + 2 * e is the same one's.
// Scales: [groups, outputs], and with zeros or minima pairs of a scale and a zero or minimum.
//
// Inputs are divided into parts (blocks along z), a part into the chunks of its 8 warps, and sums are added up in the
// order of inputs within a warp, of warps, and of parts. All of that depends only on the shape of the weight: a row's
// bits depend neither on the other rows nor on their number.
#pragma once
#include "common.cuh"

namespace packed {

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int TILE = 16;         // outputs of an mma
constexpr int SPAN = 32;         // inputs
constexpr int TILE_BYTES = 512;  // of a chunk, which a warp loads at once

enum Codes { INT4, E2M1, INT8, E4M3 };  // what codes are: c - 8, float4, two's complement, float8
enum Less { NOTHING, ZEROS, MINIMA };

template <Codes CODES>
constexpr bool kHalfBytes = CODES == INT4 || CODES == E2M1;
template <Codes CODES>
constexpr int kChunkSpans = kHalfBytes<CODES> ? 2 : 1;

// The codes in the lowest half-bytes of both halves of `word`, minus 8, as a pair of T. Exact: with the exponent of 128
// or 1024, the bits are that number plus the code.
template <class T>
__device__ __forceinline__ unsigned widen4(unsigned word) {
  if constexpr (kSame<T, __half>) return fma2<T>((word & 0x000f000f) | 0x64006400, 0x3c003c00, 0xe408e408);
  return fma2<T>((word & 0x000f000f) | 0x43004300, 0x3f803f80, 0xc308c308);
}

// The same for float4: a sign, 2 exponent bits and 1 fraction bit. Moved to T's exponent and fraction they are a number
// 2^14 (half) or 2^126 (bfloat16) times too small, a subnormal if the exponent is 0. The product with that power of two
// is exact.
template <class T>
__device__ __forceinline__ unsigned widen_float4(unsigned word) {
  const unsigned sign = (word & 0x00080008) << 12, size = word & 0x00070007;
  if constexpr (kSame<T, __half>) return fma2<T>(sign | size << 9, 0x74007400, 0);
  return fma2<T>(sign | size << 6, 0x7e807e80, 0);
}

// The codes in bytes 0 and 2 of `word`, as a pair of T; exact. bfloat16 has only 7 bits for them: the eighth changes
// the 128 that is subtracted to 256.
template <class T, Codes CODES>
__device__ __forceinline__ unsigned widen8(unsigned word) {
  if constexpr (CODES == E4M3) return widen2<T, fp8_e4m3>(__byte_perm(word, 0, 0x4420));
  if constexpr (kSame<T, __half>) return fma2<T>((word & 0x00ff00ff) ^ 0x64806480, 0x3c003c00, 0xe480e480);
  return fma2<T>((word & 0x007f007f) | 0x43004300, 0x3f803f80, (word & 0x00800080) | 0xc300c300);
}

// The left operands of the two mma of span `span` of a chunk.
template <class T, Codes CODES>
__device__ __forceinline__ void widen(unsigned (&operands)[2][4], const uint4& codes, int span) {
  if constexpr (kHalfBytes<CODES>) {
    const unsigned words[2] = {span ? codes.z : codes.x, span ? codes.w : codes.y};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned word = words[i / 4] >> (4 * (i % 4));
      operands[i / 4][i % 4] = CODES == E2M1 ? widen_float4<T>(word) : widen4<T>(word);
    }
  } else {
    const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) operands[i / 4][i % 4] = widen8<T, CODES>(words[i / 2] >> (8 * (i % 2)));
  }
}

// A scale and the number subtracted, if there is one.
template <class S, Less LESS>
using Scale = Vec<S, LESS == NOTHING ? 1 : 2>;

template <class S, Less LESS>
__device__ __forceinline__ Scale<S, LESS> load_scale(const S* scales, int64 group, int num_outputs, int output) {
  using V = Scale<S, LESS>;
  return load_as<V>(scales + (group * num_outputs + output) * int64(sizeof(V) / sizeof(S)));
}

// total += the scaled product of a row and a group's codes; row_sum: the sum of the row's inputs.
template <class S, Less LESS>
__device__ __forceinline__ void add_scaled(float& total, float product, const Scale<S, LESS>& both, float row_sum) {
  if constexpr (LESS == ZEROS) product = fmaf(-to_float(both.at[1]), row_sum, product);
  total = fmaf(to_float(both.at[0]), product, total);
  if constexpr (LESS == MINIMA) total = fmaf(-to_float(both.at[1]), row_sum, total);
}

// A lane's loads of one chunk, ahead of the multiplication of an earlier one.
template <class S, Less LESS, int NT, int FLUSHES>
struct Stage {
  uint4 codes[NT];
  Scale<S, LESS> scales[NT][FLUSHES][2];
};

// A block's weights: tiles of outputs from `codes` and `first_output` on, of which the block multiplies the chunks
// [begin, end). `num_outputs` is the number of outputs between the scales of two groups.
template <class S>
struct Weights {
  const uint8* codes;  // of the first tile
  const S* scales;
  int first_output, num_outputs, num_chunks, group_shift;
};

// sums[WARPS, NT, MT, 4, lane] = the products of 16 * NT outputs and 8 * MT rows over this warp's chunks, in the layout
// of an mma's result, readable after the final barrier. rows[m] is the row 8 * m + lane / 4, from the lane's first
// input on, or null. FLUSH: the number of spans after which a scale is applied: 1, or all of a chunk if groups have at
// least as many.
template <class T, class S, Codes CODES, Less LESS, int FLUSH, int MT, int NT>
__device__ __forceinline__ void multiply_chunks(float* sums, const T* const (&rows)[MT], const Weights<S>& weights,
                                                int begin, int end) {
  constexpr int SPANS = kChunkSpans<CODES>, FLUSHES = SPANS / FLUSH;
  constexpr int DEPTH = NT == 1 ? 4 : NT == 2 ? 3 : 2;  // chunks being loaded
  constexpr bool AHEAD = MT == 1;  // whether scales come with the codes; else there are no registers for them
  static_assert(SPANS % FLUSH == 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4;
  const int num_chunks = weights.num_chunks;
  const uint8* const codes = weights.codes + lane * 16;

  const auto scale_of = [&](int chunk, int f, int n, int h) {
    const int group = (chunk * SPANS + f * FLUSH) >> weights.group_shift;
    return load_scale<S, LESS>(weights.scales, group, weights.num_outputs,
                               weights.first_output + TILE * n + row + 8 * h);
  };
  Stage<S, LESS, NT, AHEAD ? FLUSHES : 1> stages[DEPTH];
  const auto load = [&](Stage<S, LESS, NT, AHEAD ? FLUSHES : 1>& to, int chunk) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      to.codes[n] = load_stream(codes + (int64(n) * num_chunks + chunk) * TILE_BYTES);
#pragma unroll
      for (int f = 0; AHEAD && f < FLUSHES; ++f)
#pragma unroll
        for (int h = 0; h < 2; ++h) to.scales[n][f][h] = scale_of(chunk, f, n, h);
    }
  };

  float totals[NT][MT][4] = {};
  const auto multiply = [&](const Stage<S, LESS, NT, AHEAD ? FLUSHES : 1>& stage, int chunk) {
#pragma unroll(AHEAD ? FLUSHES : 1)
    for (int f = 0; f < FLUSHES; ++f) {
      uint4 given[FLUSH][MT];
#pragma unroll
      for (int s = 0; s < FLUSH; ++s)
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          given[s][m] = make_uint4(0, 0, 0, 0);
          if (rows[m]) given[s][m] = load_as<uint4>(rows[m] + (chunk * SPANS + f * FLUSH + s) * SPAN);
        }
      float row_sums[MT][4] = {};  // of a row's inputs: an mma with ones
      if constexpr (LESS != NOTHING) {
        const unsigned one = pack2<T>(1.f, 1.f), ones[4] = {one, one, one, one};
#pragma unroll
        for (int s = 0; s < FLUSH; ++s)
#pragma unroll
          for (int m = 0; m < MT; ++m) {
            mma_m16n8k16<T>(row_sums[m], ones, given[s][m].x, given[s][m].y);
            mma_m16n8k16<T>(row_sums[m], ones, given[s][m].z, given[s][m].w);
          }
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        Scale<S, LESS> own[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) own[h] = AHEAD ? stage.scales[n][f][h] : scale_of(chunk, f, n, h);
        unsigned operands[FLUSH][2][4];
#pragma unroll
        for (int s = 0; s < FLUSH; ++s) widen<T, CODES>(operands[s], stage.codes[n], f * FLUSH + s);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          float products[4] = {};
#pragma unroll
          for (int s = 0; s < FLUSH; ++s) {
            mma_m16n8k16<T>(products, operands[s][0], given[s][m].x, given[s][m].y);
            mma_m16n8k16<T>(products, operands[s][1], given[s][m].z, given[s][m].w);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const Scale<S, LESS>& both = own[i / 2];
            add_scaled<S, LESS>(totals[n][m][i], products[i], both, row_sums[m][i % 2]);
          }
        }
      }
    }
  };

#pragma unroll
  for (int d = 0; d < DEPTH; ++d)
    if (begin + warp + d * WARPS < end) load(stages[d], begin + warp + d * WARPS);
  for (int first = begin + warp; first < end; first += DEPTH * WARPS) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const int chunk = first + d * WARPS;
      if (chunk < end) {
        multiply(stages[d], chunk);
        if (chunk + DEPTH * WARPS < end) load(stages[d], chunk + DEPTH * WARPS);
      }
    }
  }

#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[(((warp * NT + n) * MT + m) * 4 + i) * 32 + lane] = totals[n][m][i];
  __syncthreads();
}

// The product of output `output` of the block with its row r, added up over the warps.
template <int MT, int NT>
__device__ __forceinline__ float sum_of_warps(const float* sums, int output, int r) {
  const int i = output % TILE / 8 * 2 + r % 2, from = output % 8 * 4 + r % 8 / 2;
  float sum = 0.f;
  for (int w = 0; w < WARPS; ++w) sum += sums[(((w * NT + output / TILE) * MT + r / 8) * 4 + i) * 32 + from];
  return sum;
}

// Dequantizes a lane's part of a chunk of 16 outputs from `first_output` on, rounded once to T: calls write(output of
// the tile, input, 8 numbers) for each 8 of them.
template <class T, class S, Codes CODES, Less LESS, class Write>
__device__ __forceinline__ void widen_chunk(const uint4& codes, const S* scales, int first_output, int num_outputs,
                                            int chunk, int group_shift, const Write& write) {
  constexpr int SPANS = kChunkSpans<CODES>;
  const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
#pragma unroll
  for (int s = 0; s < SPANS; ++s) {
    unsigned operands[2][4];
    widen<T, CODES>(operands, codes, s);
    const int span = chunk * SPANS + s;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int output = row + 8 * h;
      const auto both = load_scale<S, LESS>(scales, span >> group_shift, num_outputs, first_output + output);
      const float scale = to_float(both.at[0]);
      float less = 0.f;
      if constexpr (LESS == ZEROS) less = scale * to_float(both.at[1]);
      if constexpr (LESS == MINIMA) less = to_float(both.at[1]);
      unsigned words[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const float2 pair = unpack2<T>(operands[p / 2][p % 2 * 2 + h]);
        words[p] = pack2<T>(fmaf(scale, pair.x, -less), fmaf(scale, pair.y, -less));
      }
      write(output, span * SPAN + 8 * quad, make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
}

}  // namespace packed

// out = x W^T + bias for 8 * MT rows and 16 * NT outputs per block. With several parts (blocks along z), blocks write
// their sums to `parts` and nothing to `out`; sum_parts adds them up. T: __half or __nv_bfloat16; O: T or float; S, of
// the scales: float or one of these. FLUSH: as in multiply_chunks. Groups have 2^group_shift spans each. Addresses and
// strides of rows are multiples of 16 bytes, inputs whole chunks, outputs multiples of 64. Grid: (outputs / (16 * NT),
// ceil(rows / (8 * MT)), parts), block: THREADS. Shared memory: NT * MT * 4 * THREADS floats.
template <class T, class O, class S, packed::Codes CODES, packed::Less LESS, int FLUSH, int MT, int NT>
__global__ void __launch_bounds__(packed::THREADS, MT == 1 ? 2 : 1)
    packed_linear(O* __restrict__ out,                // [num_rows, size], rows strided
                  float* __restrict__ parts,          // [parts, num_rows, size] or null
                  const T* __restrict__ x,            // [num_rows, inputs], rows strided
                  const uint8* __restrict__ weights,  // codes
                  const S* __restrict__ scales,       // [groups, num_outputs, 1 or 2]
                  const float* __restrict__ bias,     // [size] or null
                  int64 out_stride, int64 x_stride, int num_rows, int num_outputs, int size, int num_chunks,
                  int group_shift) {
  using namespace packed;
  DYNAMIC_SHARED(float, sums);  // [WARPS, NT, MT, 4, lane]
  const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const int first_output = blockIdx.x * TILE * NT, first_row = blockIdx.y * 8 * MT;
  const int begin = int(int64(num_chunks) * blockIdx.z / gridDim.z);
  const int end = int(int64(num_chunks) * (blockIdx.z + 1) / gridDim.z);
  const Weights<S> own = {weights + int64(blockIdx.x) * NT * num_chunks * TILE_BYTES,
                          scales,
                          first_output,
                          num_outputs,
                          num_chunks,
                          group_shift};

  const T* rows[MT];  // null: there is no such row
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    const int at = first_row + 8 * m + row;
    rows[m] = at < num_rows ? x + at * x_stride + 8 * quad : nullptr;
  }

  multiply_chunks<T, S, CODES, LESS, FLUSH, MT, NT>(sums, rows, own, begin, end);
  for (int at = threadIdx.x; at < NT * MT * TILE * 8; at += THREADS) {
    const int output = at % (TILE * NT), r = at / (TILE * NT);  // of the block
    const float sum = sum_of_warps<MT, NT>(sums, output, r);
    const int column = first_output + output, place = first_row + r;
    if (column >= size || place >= num_rows) continue;
    if (parts)
      parts[(int64(blockIdx.z) * num_rows + place) * size + column] = sum;
    else
      out[place * out_stride + column] = from_float<O>(sum + (bias ? bias[column] : 0.f));
  }
}

// out = the sum of the parts, in their order, + bias. Grid: (ceil(size / threads), rows).
template <class O>
__global__ void sum_parts(O* __restrict__ out,              // [num_rows, size], rows strided
                          const float* __restrict__ parts,  // [num_parts, num_rows, size]
                          const float* __restrict__ bias,   // [size] or null
                          int64 out_stride, int size, int num_parts) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= size) return;
  float sum = 0.f;
  for (int part = 0; part < num_parts; ++part) sum += parts[(int64(part) * gridDim.y + blockIdx.y) * size + column];
  out[blockIdx.y * out_stride + column] = from_float<O>(sum + (bias ? bias[column] : 0.f));
}

// Dequantizes the weights of the outputs from 64 * first_tile on to T, rounded once, for products with many rows:
// out[n, k]. A warp widens a chunk of 16 outputs. Grid: (ceil(num_chunks / WARPS), tiles of 16 outputs), block:
// THREADS.
template <class T, class S, packed::Codes CODES, packed::Less LESS>
__global__ void __launch_bounds__(packed::THREADS)
    widen_weights(T* __restrict__ out,                // [16 * tiles, inputs]
                  const uint8* __restrict__ weights,  // codes
                  const S* __restrict__ scales,       // [groups, num_outputs, 1 or 2]
                  int num_outputs, int num_chunks, int group_shift, int first_tile) {
  using namespace packed;
  constexpr int SPANS = kChunkSpans<CODES>;
  const int lane = threadIdx.x % 32, chunk = blockIdx.x * WARPS + threadIdx.x / 32;
  const int tile = first_tile + blockIdx.y;
  if (chunk >= num_chunks) return;
  const uint4 codes = load_stream(weights + (int64(tile) * num_chunks + chunk) * TILE_BYTES + lane * 16);
  widen_chunk<T, S, CODES, LESS>(codes, scales, TILE * tile, num_outputs, chunk, group_shift,
                                 [&](int output, int input, const uint4& numbers) {
                                   const int64 place = int64(blockIdx.y) * TILE + output;
                                   store_as(out + place * num_chunks * SPANS * SPAN + input, numbers);
                                 });
}

// The codes of 8 bits of the outputs from 16 * first_tile on, as a matrix: out[n, k]. Grid and block: as widen_weights.
__global__ void __launch_bounds__(packed::THREADS) plain_codes(uint8* __restrict__ out,  // [16 * tiles, inputs]
                                                               const uint8* __restrict__ weights,  // codes
                                                               int num_chunks, int first_tile) {
  using namespace packed;
  const int lane = threadIdx.x % 32, chunk = blockIdx.x * WARPS + threadIdx.x / 32, row = lane / 4, quad = lane % 4;
  if (chunk >= num_chunks) return;
  const uint4 codes =
      load_stream(weights + (int64(first_tile + blockIdx.y) * num_chunks + chunk) * TILE_BYTES + lane * 16);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const unsigned which = h ? 0x7531 : 0x6420;
    uint8* const to = out + (int64(blockIdx.y) * TILE + row + 8 * h) * num_chunks * SPAN + chunk * SPAN + 8 * quad;
    store_as(to, make_uint2(__byte_perm(codes.x, codes.y, which), __byte_perm(codes.z, codes.w, which)));
  }
}
