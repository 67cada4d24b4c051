// Recurrent layers over prompts: 64 or 32 tokens of a sequence at a time, as products on tensor cores. The result is
// that of recurrent.cuh, which computes token by token; `chunk_rule` of vllm_lite/kernels/delta_rule.py and `scan` of
// mamba.py are the reference. With q, k, v of a chunk's tokens (c, b and dt x for Mamba-2), G_t the sum of log decays
// up to token t, and S the state before:
//
//     system[i, j] = beta_i (k_i k_j) exp(G_i - G_j), j < i      within[i, j] = (q_i k_j) exp(G_i - G_j), j <= i
//     (1 + system) change = beta (v - exp(G) k S)                Mamba-2: change = dt x, there is no system
//     out = exp(G) q S + within change                           S = exp(G_last) S + (exp(G_last - G) k)^T change
//
// A block computes a head of a sequence, and a warp 16 columns of its state, transposed in registers as results of
// mma.m16n8k16: [16 columns, SIZE]. Columns are independent, so between the two barriers around the data that all
// columns read (q, k, system and within, in shared memory) warps are independent: results of one product become left
// operands of the next in registers. The system is solved by blocks of 16 tokens, whose triangles are inverted in
// float.
//
// Operands are bfloat16. If T has more bits, each is two of them, a rounded float and the remainder, and a product is
// three: about 16 bits, over chunks half as long. Sums and states are float. A shorter last chunk is padded with tokens
// that change nothing. Chunks begin where segments do, so the last bits depend on how a prompt was divided.
#pragma once
#include "recurrent.cuh"

namespace recurrent {

constexpr int BLOCK = 16;              // tokens whose equations are solved together
constexpr float SMALLEST_LOG = -88.f;  // of a decay: its exp is negligible beside 1, and sums of 64 keep their bits

constexpr int wide(int size) {  // padded with zeros: whole operands
  return (size + BLOCK - 1) / BLOCK * BLOCK;
}
constexpr int chunk_threads(int columns) {
  return 2 * wide(columns);
}
template <class T>
constexpr int kParts = kSame<T, __nv_bfloat16> ? 1 : 2;
template <int PARTS>
constexpr int kTokens = PARTS == 1 ? 64 : 32;  // of a chunk

// An operand of 16x16: words of mma.m16n8k16's left operand, or of two right ones with 8 columns each.
template <int PARTS>
struct Operand {
  unsigned at[PARTS][4];
};

// parts[p][word]: a pair of floats as bfloat16, and with two parts their remainders.
template <int PARTS>
__device__ __forceinline__ void split_pair(unsigned (&parts)[PARTS][4], int word, float low, float high) {
  parts[0][word] = pack2<__nv_bfloat16>(low, high);
  if constexpr (PARTS == 2) {
    const float2 kept = unpack2<__nv_bfloat16>(parts[0][word]);
    parts[1][word] = pack2<__nv_bfloat16>(low - kept.x, high - kept.y);
  }
}

// Results for columns [0, 8) and [8, 16) as a left operand.
template <int PARTS>
__device__ __forceinline__ Operand<PARTS> left_of(const float (&first)[4], const float (&second)[4]) {
  Operand<PARTS> left;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    split_pair<PARTS>(left.at, h, first[2 * h], first[2 * h + 1]);
    split_pair<PARTS>(left.at, 2 + h, second[2 * h], second[2 * h + 1]);
  }
  return left;
}

// first and second += left * right, for the right operand's first and last 8 columns.
template <int PARTS>
__device__ __forceinline__ void multiply(float (&first)[4], float (&second)[4], const Operand<PARTS>& left,
                                         const Operand<PARTS>& right) {
  const auto add = [&](int l, int r) {
    mma_m16n8k16<__nv_bfloat16>(first, left.at[l], right.at[r][0], right.at[r][1]);
    mma_m16n8k16<__nv_bfloat16>(second, left.at[l], right.at[r][2], right.at[r][3]);
  };
  if constexpr (PARTS == 2) {
    add(1, 0);
    add(0, 1);
  }
  add(0, 0);
}

// A matrix in shared memory from which operands are loaded. 16 bytes after each row keep 8 rows in different banks.
template <int ROWS, int COLUMNS, int PARTS>
struct Matrix {
  static constexpr int NUM_ROWS = ROWS, PITCH = COLUMNS + 8, PART = ROWS * PITCH, BYTES = 2 * PARTS * PART;
  uint16* at;

  __device__ __forceinline__ void set_pair(int row, int column, float low, float high) const {  // column: even
    unsigned parts[PARTS][4];
    split_pair<PARTS>(parts, 0, low, high);
#pragma unroll
    for (int p = 0; p < PARTS; ++p) store_as(at + p * PART + row * PITCH + column, parts[p][0]);
  }
  __device__ __forceinline__ void set(int row, int column, float x) const {
    unsigned parts[PARTS][4];
    split_pair<PARTS>(parts, 0, x, 0.f);
#pragma unroll
    for (int p = 0; p < PARTS; ++p) at[p * PART + row * PITCH + column] = uint16(parts[p][0]);
  }
  // The 16 rows from `row` on and 16 columns from `column` on as a left operand.
  __device__ __forceinline__ Operand<PARTS> left(int row, int column) const {
    Operand<PARTS> operand;
    const uint16* const own = at + (row + threadIdx.x % 16) * PITCH + column + threadIdx.x % 32 / 16 * 8;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) load_matrices(operand.at[p], own + p * PART);
    return operand;
  }
  // The same, transposed, as right operands: a product's inner index is along its rows.
  __device__ __forceinline__ Operand<PARTS> right(int row, int column) const {
    Operand<PARTS> operand;
    const int lane = threadIdx.x % 32;
    const uint16* const own = at + (row + lane % 8 + lane / 16 * 8) * PITCH + column + lane / 8 % 2 * 8;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) load_matrices(operand.at[p], own + p * PART);
    return operand;
  }
  // The same, not transposed, as right operands: the inner index is along its columns.
  __device__ __forceinline__ Operand<PARTS> right_upright(int row, int column) const {
    Operand<PARTS> operand;
    const uint16* const own = at + (row + threadIdx.x % 16) * PITCH + column + threadIdx.x % 32 / 16 * 8;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) load_matrices_transposed(operand.at[p], own + p * PART);
    return operand;
  }
};

// A chunk in a block's shared memory. `found`, the tokens' outputs, finally replaces `reads` and `writes`.
template <int SIZE, int COLUMNS, int PARTS, bool SOLVES>
struct Chunk {
  static constexpr int TOKENS = kTokens<PARTS>, BLOCKS = TOKENS / BLOCK;
  using Rows = Matrix<TOKENS, wide(SIZE), PARTS>;
  using Square = Matrix<TOKENS, TOKENS, PARTS>;
  using Corner = Matrix<TOKENS, BLOCK, PARTS>;
  static constexpr int FOUND_PITCH = wide(COLUMNS) + 4;
  static constexpr int FOUND_BYTES = 4 * TOKENS * FOUND_PITCH;
  static constexpr int ROWS_BYTES = 2 * Rows::BYTES > FOUND_BYTES ? 2 * Rows::BYTES : FOUND_BYTES;

  Rows reads, writes;            // q and k; c and b
  Square within, system;         // blocks up to the diagonal; below it, negative
  Corner inverse;                // of 1 + the system's blocks on the diagonal, less 1
  float* diagonal;               // [TOKENS, BLOCK], those blocks
  float *totals, *grown, *left;  // [TOKENS]: G, exp(G), exp(G_last - G)
  float *gains, *found;          // [TOKENS]: beta or dt; [TOKENS, FOUND_PITCH]

  __device__ __forceinline__ explicit Chunk(uint16* shared) {
    reads.at = shared;
    writes.at = shared + Rows::BYTES / 2;
    found = reinterpret_cast<float*>(shared);
    within.at = shared + ROWS_BYTES / 2;
    uint16* free = within.at + Square::BYTES / 2;
    if constexpr (SOLVES) {
      system.at = free;
      inverse.at = system.at + Square::BYTES / 2;
      diagonal = reinterpret_cast<float*>(inverse.at + Corner::BYTES / 2);
      free = reinterpret_cast<uint16*>(diagonal + TOKENS * BLOCK);
    }
    totals = reinterpret_cast<float*>(free);
    grown = totals + TOKENS, left = grown + TOKENS, gains = left + TOKENS;
  }
};

// Inputs of a chunk's tokens, from its first token on.
struct Tokens {
  const float *reads, *writes, *values;  // [count, ..], rows `stride` apart
  int64 stride;
  int count;
};

// Loads vectors to rows of a matrix, times `factor`; with UNIT divided by their lengths first. Padded with zeros.
template <int SIZE, bool UNIT, class Rows>
__device__ __forceinline__ void bring_rows(const Rows& to, const float* from, int64 stride, int count, float factor) {
  constexpr int EACH = (wide(SIZE) + 31) / 32, AT_ONCE = 2;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll 1
  for (int first = threadIdx.x / 32; first < Rows::NUM_ROWS; first += AT_ONCE * warps) {
    float own[AT_ONCE][EACH];
#pragma unroll
    for (int a = 0; a < AT_ONCE; ++a)
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const int t = first + a * warps, i = lane + 32 * e;
        own[a][e] = t < count && i < SIZE ? from[t * stride + i] : 0.f;
      }
#pragma unroll
    for (int a = 0; a < AT_ONCE; ++a) {
      float times = factor;
      if constexpr (UNIT) {
        float squares = 0.f;
#pragma unroll
        for (int e = 0; e < EACH; ++e) squares = fmaf(own[a][e], own[a][e], squares);
        times *= rsqrtf(warp_sum(squares) + 1e-6f);
      }
      const int t = first + a * warps;
#pragma unroll
      for (int e = 0; e < EACH; ++e)
        if (t < Rows::NUM_ROWS && lane + 32 * e < wide(SIZE)) to.set(t, lane + 32 * e, own[a][e] * times);
    }
  }
}

// Warp 0 adds up the tokens' log decays. rates(t): the token's log decay, and its gain.
template <class Chunk, class Rates>
__device__ __forceinline__ void add_decays(const Chunk& chunk, int count, const Rates& rates) {
  if (threadIdx.x / 32 != 0) return;
  const int lane = threadIdx.x, t = 2 * lane;
  float2 both[2] = {make_float2(0.f, 0.f), make_float2(0.f, 0.f)};
#pragma unroll
  for (int e = 0; e < 2; ++e)
    if (t + e < count) both[e] = rates(t + e);
  const float first = fmaxf(both[0].x, SMALLEST_LOG), pair = first + fmaxf(both[1].x, SMALLEST_LOG);
  float sum = pair;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const float before = __shfl_sync(~0u, sum, lane >= i ? lane - i : lane);
    if (lane >= i) sum += before;
  }
  const float before = __shfl_sync(~0u, sum, lane > 0 ? lane - 1 : 0), last = __shfl_sync(~0u, sum, 31);
  const float totals[2] = {(lane > 0 ? before : 0.f) + first, sum};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (t >= Chunk::TOKENS) break;
    chunk.totals[t + e] = totals[e];
    chunk.grown[t + e] = expf(totals[e]);
    chunk.left[t + e] = expf(last - totals[e]);
    chunk.gains[t + e] = both[e].y;
  }
}

// A warp's job: 16 tokens' rows of `within`, or of the system, from `left`.
template <int SIZE, bool OF_SYSTEM, class Chunk>
__device__ __forceinline__ void relate(const Chunk& chunk, int block) {
  const auto& rows = OF_SYSTEM ? chunk.writes : chunk.reads;
  constexpr int BLOCKS = Chunk::BLOCKS;
  const int row = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  float products[BLOCKS][2][4] = {};
#pragma unroll 1
  for (int k = 0; k < wide(SIZE); k += 16) {
    const auto left = rows.left(BLOCK * block, k);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
      if (b <= block) multiply(products[b][0], products[b][1], left, chunk.writes.right(BLOCK * b, k));
  }
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    if (b > block) continue;
#pragma unroll
    for (int p = 0; p < 4; ++p) {  // pairs: half a block's tokens j, half its tokens i
      const int i = BLOCK * block + row + p % 2 * 8, within = p / 2 * 8 + 2 * quad, j = BLOCK * b + within;
      float pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool is_seen = OF_SYSTEM ? j + e < i : j + e <= i;
        pair[e] = is_seen ? products[b][p / 2][p % 2 * 2 + e] * expf(chunk.totals[i] - chunk.totals[j + e]) : 0.f;
      }
      if constexpr (!OF_SYSTEM)
        chunk.within.set_pair(i, j, pair[0], pair[1]);
      else if (b < block)
        chunk.system.set_pair(i, j, -chunk.gains[i] * pair[0], -chunk.gains[i] * pair[1]);
      else
        store_as(chunk.diagonal + i * BLOCK + within,
                 Vec<float, 2>{{chunk.gains[i] * pair[0], chunk.gains[i] * pair[1]}});
    }
  }
}

// A warp's job: (1 + a block on the system's diagonal)^-1 - 1, a column by each of 16 lanes.
template <class Chunk>
__device__ __forceinline__ void invert(const Chunk& chunk, int block) {
  const int column = threadIdx.x % 32;
  if (column >= BLOCK) return;
  float solved[BLOCK];
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) {
    solved[i] = i == column ? 1.f : 0.f;
#pragma unroll
    for (int j = 0; j < i; ++j)
      solved[i] = fmaf(-chunk.diagonal[(BLOCK * block + i) * BLOCK + j], solved[j], solved[i]);
    chunk.inverse.set(BLOCK * block + i, column, i > column ? solved[i] : 0.f);
  }
}

// 16 columns of a head's matrix [SIZE, COLUMNS], transposed: at[n] is for rows [8 * n, 8 * n + 8), as an mma's result.
template <int SIZE, int COLUMNS>
struct Columns {
  static constexpr int TILES = wide(SIZE) / 8;
  float at[TILES][4];

  static __device__ __forceinline__ int column(int i) {
    return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 * 8;
  }
  static __device__ __forceinline__ int row(int n, int i) { return 8 * n + 2 * (threadIdx.x % 4) + i % 2; }
  static __device__ __forceinline__ bool has(int n, int i) {
    return (wide(SIZE) == SIZE || row(n, i) < SIZE) && (wide(COLUMNS) == COLUMNS || column(i) < COLUMNS);
  }
  __device__ __forceinline__ void load(const float* from) {  // nullptr: zeros
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) at[n][i] = from != nullptr && has(n, i) ? from[row(n, i) * COLUMNS + column(i)] : 0.f;
  }
  __device__ __forceinline__ void store(float* to) const {
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (has(n, i)) to[row(n, i) * COLUMNS + column(i)] = at[n][i];
  }
};

// Updates a warp's columns over a chunk whose `reads` and so on are loaded. out: the tokens' outputs, as results for 8
// tokens each. With SOLVES it waits for the inverse.
template <int SIZE, int COLUMNS, int PARTS, bool SOLVES>
__device__ __forceinline__ void pass_chunk(Columns<SIZE, COLUMNS>& state, float (&out)[kTokens<PARTS> / 8][4],
                                           const Chunk<SIZE, COLUMNS, PARTS, SOLVES>& chunk, const Tokens& tokens) {
  using Own = Columns<SIZE, COLUMNS>;
  constexpr int BLOCKS = Chunk<SIZE, COLUMNS, PARTS, SOLVES>::BLOCKS;
  float change[2 * BLOCKS][4] = {};
#pragma unroll
  for (int k = 0; k < wide(SIZE); k += 16) {
    const auto left = left_of<PARTS>(state.at[k / 8], state.at[k / 8 + 1]);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      multiply(out[2 * b], out[2 * b + 1], left, chunk.reads.right(BLOCK * b, k));
      if constexpr (SOLVES) multiply(change[2 * b], change[2 * b + 1], left, chunk.writes.right(BLOCK * b, k));
    }
  }
#pragma unroll
  for (int n = 0; n < 2 * BLOCKS; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = Own::row(n, i), column = Own::column(i);
      const bool is_there = t < tokens.count && (wide(COLUMNS) == COLUMNS || column < COLUMNS);
      const float value = is_there ? tokens.values[t * tokens.stride + column] : 0.f;
      change[n][i] = chunk.gains[t] * fmaf(-chunk.grown[t], change[n][i], value);
      out[n][i] *= chunk.grown[t];
    }
  const float decay = chunk.grown[kTokens<PARTS> - 1];
#pragma unroll
  for (int n = 0; n < Own::TILES; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) state.at[n][i] *= decay;
  if constexpr (SOLVES) __syncthreads();  // the inverse is written

#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    auto &first = change[2 * b], &second = change[2 * b + 1];
    if constexpr (SOLVES) multiply(first, second, left_of<PARTS>(first, second), chunk.inverse.right(BLOCK * b, 0));
    const auto solved = left_of<PARTS>(first, second);
#pragma unroll
    for (int later = b; later < BLOCKS; ++later) {
      multiply(out[2 * later], out[2 * later + 1], solved, chunk.within.right(BLOCK * later, BLOCK * b));
      if constexpr (SOLVES)
        if (later > b)
          multiply(change[2 * later], change[2 * later + 1], solved, chunk.system.right(BLOCK * later, BLOCK * b));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      first[i] *= chunk.left[Own::row(2 * b, i)];
      second[i] *= chunk.left[Own::row(2 * b + 1, i)];
    }
    const auto added = left_of<PARTS>(first, second);
#pragma unroll
    for (int k = 0; k < wide(SIZE); k += 16)
      multiply(state.at[k / 8], state.at[k / 8 + 1], added, chunk.writes.right_upright(BLOCK * b, k));
  }
}

// Updates the matrix of head blockIdx.y over the segments of sequence blockIdx.x, if it has enough rows for chunks.
// tokens_at(row): a chunk's tokens; rates(row): a token's log decay and gain; finish(row, found): called by a warp with
// a token's output, [COLUMNS] in shared memory. UNIT, factor: as for bring_rows, of `reads`.
template <int SIZE, int COLUMNS, int PARTS, bool SOLVES, class TokensAt, class Rates, class Finish>
__device__ __forceinline__ void scan_chunks(const Steps& steps, uint16* shared, float factor, const TokensAt& tokens_at,
                                            const Rates& rates, const Finish& finish) {
  if (rows_of_sequence(steps) < steps.chunked_rows) return;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  using Own = Columns<SIZE, COLUMNS>;
  using Here = Chunk<SIZE, COLUMNS, PARTS, SOLVES>;
  constexpr int TOKENS = Here::TOKENS, BLOCKS = Here::BLOCKS;
  const Here chunk(shared);
  float* const states = steps.states + int64(blockIdx.y) * SIZE * COLUMNS;
  Own state;
  for (int segment = steps.firsts[blockIdx.x]; segment < steps.firsts[blockIdx.x + 1]; ++segment) {
    const int source = steps.sources[segment], target = steps.targets[segment], end = steps.rows[segment + 1];
    state.load(source == 0 ? nullptr : states + source * steps.slot_stride);
    for (int row = steps.rows[segment]; row < end; row += TOKENS) {
      Tokens tokens = tokens_at(int64(row));
      tokens.count = min(TOKENS, end - row);
      __syncthreads();  // the previous chunk has been read
      bring_rows<SIZE, SOLVES>(chunk.reads, tokens.reads, tokens.stride, tokens.count, factor);
      bring_rows<SIZE, SOLVES>(chunk.writes, tokens.writes, tokens.stride, tokens.count, 1.f);
      add_decays(chunk, tokens.count, [&](int t) { return rates(int64(row + t)); });
      __syncthreads();
#pragma unroll 1
      for (int job = warp; job < (SOLVES ? 2 : 1) * BLOCKS; job += warps)  // long and short jobs alternate
        if (job < BLOCKS)
          relate<SIZE, false>(chunk, job);
        else
          relate<SIZE, true>(chunk, 2 * BLOCKS - 1 - job);
      __syncthreads();
      if constexpr (SOLVES)
#pragma unroll 1
        for (int block = warp; block < BLOCKS; block += warps) invert(chunk, block);
      float out[2 * BLOCKS][4] = {};
      pass_chunk(state, out, chunk, tokens);
      __syncthreads();  // `found` replaces data that has been read
#pragma unroll
      for (int n = 0; n < 2 * BLOCKS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) chunk.found[Own::row(n, i) * chunk.FOUND_PITCH + Own::column(i)] = out[n][i];
      __syncthreads();
#pragma unroll 1
      for (int t = warp; t < tokens.count; t += warps) finish(int64(row + t), chunk.found + t * chunk.FOUND_PITCH);
    }
    if (target != 0) state.store(states + target * steps.slot_stride);
  }
}

}  // namespace recurrent

// delta_rule for sequences of `chunked_rows` rows or more. Grid: sequences, value heads; 2 threads for each of
// wide(VALUE) columns. Shared: a Chunk.
template <class T, int KEY, int VALUE>
__global__ void __launch_bounds__(recurrent::chunk_threads(VALUE), VALUE <= 64 ? 2 : 1)
    delta_rule_chunks(const float* __restrict__ mixed, const T* __restrict__ z, const T* __restrict__ b,
                      const T* __restrict__ a, const float* __restrict__ decay, const float* __restrict__ dt_bias,
                      const float* __restrict__ norm, float* states, const int* firsts, const int* rows,
                      const int* sources, const int* targets, T* __restrict__ out, int64 stride, int64 slot_stride,
                      int64 out_stride, int chunked_rows, int key_heads, float eps) {
  using namespace recurrent;
  DYNAMIC_SHARED(uint16, shared);
  const int heads = gridDim.y, head = blockIdx.y, key_head = head / (heads / key_heads), width = key_heads * KEY;
  const int64 channels = 2 * width + heads * VALUE;
  const auto tokens_at = [&](int64 row) {
    const float* const token = mixed + row * channels;
    const float* const q = token + key_head * KEY;
    return Tokens{q, q + width, token + 2 * width + head * VALUE, channels, 0};
  };
  const auto rates = [&](int64 row) {
    const int64 at = row * stride + head;
    return delta_rates(decay[head], to_float(a[at]) + dt_bias[head], to_float(b[at]));
  };
  const auto finish = [&](int64 row, const float* found) {
    gated_norm<T, VALUE>(found, z + row * stride + head * VALUE, norm, eps, out + row * out_stride + head * VALUE);
  };
  scan_chunks<KEY, VALUE, kParts<T>, true>({states, slot_stride, firsts, rows, sources, targets, chunked_rows}, shared,
                                           rsqrtf(float(KEY)), tokens_at, rates, finish);
}

// mamba for sequences of `chunked_rows` rows or more. Grid: sequences, heads; 2 threads for each of wide(HEAD) columns.
// Shared: a Chunk.
template <class T, int STATE, int HEAD>
__global__ void __launch_bounds__(recurrent::chunk_threads(HEAD), HEAD <= 64 ? 2 : 1)
    mamba_chunks(const float* __restrict__ mixed, const T* __restrict__ z, const T* __restrict__ dt,
                 const float* __restrict__ decay, const float* __restrict__ dt_bias, const float* __restrict__ skip,
                 float* states, const int* firsts, const int* rows, const int* sources, const int* targets,
                 T* __restrict__ out, int64 stride, int64 slot_stride, int64 out_stride, int chunked_rows, int groups,
                 float dt_min, float dt_max) {
  using namespace recurrent;
  DYNAMIC_SHARED(uint16, shared);
  const int heads = gridDim.y, head = blockIdx.y;
  const int64 values = int64(heads) * HEAD, group = head / (heads / groups);
  const int64 channels = values + 2 * groups * STATE;
  const auto tokens_at = [&](int64 row) {
    const float* const token = mixed + row * channels;
    const float* const b = token + values + group * STATE;
    return Tokens{b + groups * STATE, b, token + int64(head) * HEAD, channels, 0};
  };
  const auto rates = [&](int64 row) {
    const float step = mamba_step(to_float(dt[row * stride + head]) + dt_bias[head], dt_min, dt_max);
    return make_float2(-decay[head] * step, step);
  };
  const auto finish = [&](int64 row, const float* found) {
    for (int i = threadIdx.x % 32; i < HEAD; i += 32) {
      const int64 at = int64(head) * HEAD + i;
      const float y = fmaf(mixed[row * channels + at], skip[head], found[i]);
      out[row * out_stride + at] = from_float<T>(y * silu(to_float(z[row * stride + at])));
    }
  };
  scan_chunks<STATE, HEAD, kParts<T>, false>({states, slot_stride, firsts, rows, sources, targets, chunked_rows},
                                             shared, 1.f, tokens_at, rates, finish);
}
