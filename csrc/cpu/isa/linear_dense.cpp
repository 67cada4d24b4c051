// Many rows of bfloat16 times dense weights of bfloat16: 6 rows and two blocks at a time, whose 24 sums stay in
// registers for up to kDepth inputs. Rows are read in place: 6 rows and the two blocks' weights fit in L1 whatever the
// distance of rows, and reused data is in L2.
#include "linear_task.h"
#include "row_sums.h"

namespace VLLM_LITE_ISA {
namespace {

#if defined(__AVX512BF16__)
constexpr int kRows = 6;
constexpr int64_t kDepth = 1024;  // inputs: two blocks' weights and the next two's, beside a task's rows, fit in L2
constexpr int64_t kPairElements = 2 * kBlock;
constexpr int64_t kLinePairs = 16;  // of a row in a cache line

// One or two blocks' weights of some inputs.
struct Weights {
  const BFloat16* blocks[2];
  int64_t num_pairs;
  const BFloat16* next;    // prefetched: the same number of pairs of the next block, and
  int64_t block_elements;  // of the block after it, at this distance

  Ahead ahead(int64_t block, int64_t group, int64_t num_groups) const {
    const int64_t bytes = num_pairs * 2 * kPairElements;
    const char* from = reinterpret_cast<const char*>(next + block * block_elements);
    return {from + group * bytes / num_groups, bytes / num_groups / num_pairs};
  }
};

struct Aheads {
  Ahead blocks[2];
};

// Continues the sums of R rows and V / 2 blocks with x [R][x_stride].
template <int R, int V, bool kFetch>
void multiply(const BFloat16* x, int64_t x_stride, const Weights& weights, const Aheads& ahead, const Sums& sums,
              At at) {
  Vec total[R][V];
  sums.begin(at, total);
  for (int64_t begin = 0; begin < weights.num_pairs; begin += kLinePairs) {
    if (kFetch) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) __builtin_prefetch(x + (R + r) * x_stride + 2 * begin);
    }
    const int64_t left = weights.num_pairs - begin, end = left < kLinePairs ? weights.num_pairs : begin + kLinePairs;
    for (int64_t pair = begin; pair < end; ++pair) {
      prefetch_l2<64>(ahead.blocks[0], pair);
      prefetch_l2<64>(ahead.blocks[1], pair);
      __m512bh words[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        words[v] = (__m512bh)_mm512_loadu_si512(weights.blocks[v / 2] + pair * kPairElements + v % 2 * 2 * kWidth);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        int32_t both;
        std::memcpy(&both, x + r * x_stride + 2 * pair, 4);
        const __m512bh value = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          total[r][v] = reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(total[r][v]), words[v], value));
        }
      }
    }
  }
  sums.end(at, total);
}

// For `rows` rows, 1 <= rows <= R.
template <int R, int V, bool kFetch>
void multiply_group(int64_t rows, const BFloat16* x, int64_t x_stride, const Weights& weights, const Aheads& ahead,
                    const Sums& sums, At at) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_group<R - 1, V, kFetch>(rows, x, x_stride, weights, ahead, sums, at);
  }
  multiply<R, V, kFetch>(x, x_stride, weights, ahead, sums, at);
}

// All rows of a task times some inputs of V / 2 blocks; groups differ by one row at most. kFetch: prefetches the next
// group's rows, for the first blocks of a task, which read them from memory.
template <int V, bool kFetch>
void multiply_rows(const LinearTask& task, const BFloat16* x, const Weights& weights, const Sums& sums) {
  const int64_t num_groups = (task.num_rows + kRows - 1) / kRows, x_stride = sums.call->x_stride;
  for (int64_t group = 0, row = 0; group < num_groups; ++group) {
    const int64_t end = (group + 1) * task.num_rows / num_groups;
    const Aheads ahead = {{weights.ahead(0, group, num_groups), weights.ahead(1, group, num_groups)}};
    multiply_group<kRows, V, kFetch>(end - row, x + row * x_stride, x_stride, weights, ahead, sums, {row, 0});
    row = end;
  }
}

void run(const LinearCall& call, const LinearTask& task) {
  alignas(64) float memory[kMaxRows * kMaxBlocks * kBlock];
  const PackedWeight& weight = *call.weight;
  const int64_t num_inputs = weight.num_inputs, block_elements = num_inputs * kBlock;
  const BFloat16* blocks = static_cast<const BFloat16*>(weight.data) + task.first_block * block_elements;
  const BFloat16* rows = static_cast<const BFloat16*>(call.x) + task.first_row * call.x_stride;
  for (int64_t input = 0; input < num_inputs; input += kDepth) {
    const int64_t left = num_inputs - input, count = left < kDepth ? left : kDepth;
    for (int64_t block = 0; block < task.num_blocks; block += 2) {
      const BFloat16* first = blocks + block * block_elements + input * kBlock;
      const bool is_last = block + 2 >= task.num_blocks, goes_on = count < left;
      const BFloat16* next = !is_last  ? first + 2 * block_elements
                             : goes_on ? blocks + (input + kDepth) * kBlock
                                       : first;
      const Weights weights = {{first, first + block_elements}, count / 2, next, block_elements};
      const Sums sums = {memory + block * kBlock, task.num_blocks * kBlock,           input > 0, !goes_on, &call,
                         task.first_row,          (task.first_block + block) * kBlock};
      if (block + 1 == task.num_blocks) {
        multiply_rows<2, false>(task, rows + input, weights, sums);
      } else if (block == 0) {
        multiply_rows<4, true>(task, rows + input, weights, sums);
      } else {
        multiply_rows<4, false>(task, rows + input, weights, sums);
      }
    }
  }
}
#endif

}  // namespace

bool linear_dense([[maybe_unused]] const LinearCall& call, [[maybe_unused]] const LinearTask& task) {
#if defined(__AVX512BF16__)
  const PackedWeight& weight = *call.weight;
  const bool are_pairs = weight.num_inputs % 2 == 0;  // an incomplete pair would include an element after the row
  if (call.x_type != kBFloat16 || weight.type != kBFloat16 || task.num_rows < kManyRows || !are_pairs) return false;
  run(call, task);
  return true;
#else
  return false;
#endif
}

}  // namespace VLLM_LITE_ISA
