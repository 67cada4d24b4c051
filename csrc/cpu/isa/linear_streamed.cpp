// 13 to kStreamedRows rows of bfloat16 times dense weights of bfloat16. Reading such weights takes about as long as
// multiplying them, so both must go on at the same time. Weights are read once, in the order of memory: each tile of a
// block stays in L1 for all groups of rows, and each group prefetches its share of a later tile.
#include "linear_task.h"
#include "row_sums.h"

namespace VLLM_LITE_ISA {
namespace {

#if defined(__AVX512BF16__)
constexpr int kRows = 14;  // at a time: 28 vectors of sums, two of weights
constexpr int64_t kPairBytes = 4 * kBlock;
constexpr int64_t kAheadBytes = 32768;  // distance of prefetches: two tiles

// Rows of a panel, one tile after the other, and the weights that they meet.
struct Tiles {
  const BFloat16* x;
  int64_t x_step;  // from a tile to the next
  const char* weights;
  int64_t num_pairs, num_tiles;
};

// Adds the products of some tiles to the sums of R rows and a block; each pair of inputs prefetches kAhead bytes.
template <int R, int kAhead>
void multiply(const Tiles& tiles, Ahead ahead, const Sums& sums, At at) {
  Vec total[R][2];
  sums.begin(at, total);
  const char* weights = tiles.weights;
  int64_t left = tiles.num_pairs;
  for (int64_t tile = 0; tile < tiles.num_tiles; ++tile) {
    const BFloat16* x = tiles.x + tile * tiles.x_step;
    const int64_t count = left < kPanelInputs / 2 ? left : kPanelInputs / 2;
    left -= count;
    for (int64_t pair = 0; pair < count; ++pair, weights += kPairBytes, ahead.from += ahead.step, x += 2) {
      prefetch<kAhead>(ahead, 0);
      const __m512bh first = (__m512bh)_mm512_loadu_si512(weights);
      const __m512bh second = (__m512bh)_mm512_loadu_si512(weights + kPairBytes / 2);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        int32_t both;
        std::memcpy(&both, x + r * kPanelInputs, 4);
        const __m512bh value = (__m512bh)_mm512_set1_epi32(both);
        total[r][0] = reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(total[r][0]), first, value));
        total[r][1] = reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(total[r][1]), second, value));
      }
    }
  }
  sums.end(at, total);
}

// For `rows` rows, 1 <= rows <= R.
template <int R, int kAhead>
void multiply_group(int64_t rows, const Tiles& tiles, Ahead ahead, const Sums& sums, At at) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_group<R - 1, kAhead>(rows, tiles, ahead, sums, at);
  }
  multiply<R, kAhead>(tiles, ahead, sums, at);
}

void run(const LinearCall& call, const LinearTask& task) {
  alignas(64) float memory[kStreamedRows * kBlock];
  const int64_t num_inputs = call.weight->num_inputs, num_rows = call.num_rows;
  const int64_t num_groups = (num_rows + kRows - 1) / kRows;
  const int64_t length = num_groups == 1 ? num_inputs : kPanelInputs;  // a single group's sums stay in registers
  const char* data = static_cast<const char*>(call.weight->data);
  for (int64_t block = task.first_block; block < task.first_block + task.num_blocks; ++block) {
    for (int64_t input = 0; input < num_inputs; input += length) {
      const int64_t left = num_inputs - input, count = left < length ? left : length;
      const char* weights = data + (block * num_inputs + input) * 2 * kBlock;
      const Sums sums = {memory, kBlock, input > 0, count == left, &call, 0, block * kBlock};
      const BFloat16* x = static_cast<const BFloat16*>(call.panel) + input * num_rows;
      const int64_t num_tiles = (count + kPanelInputs - 1) / kPanelInputs, bytes = count * 2 * kBlock;
      for (int64_t group = 0, row = 0; group < num_groups; ++group) {
        const int64_t end = (group + 1) * num_rows / num_groups;
        const Tiles tiles = {x + row * kPanelInputs, num_rows * kPanelInputs, weights, count / 2, num_tiles};
        const char* from = weights + kAheadBytes + group * bytes / num_groups;
        if (num_groups == 1) {
          multiply_group<kRows, kPairBytes>(end - row, tiles, {from, kPairBytes}, sums, {row, 0});
        } else {
          multiply_group<kRows, kPairBytes / 2>(end - row, tiles, {from, kPairBytes / num_groups}, sums, {row, 0});
        }
        row = end;
      }
    }
  }
}
#endif

}  // namespace

void linear_streamed([[maybe_unused]] const LinearCall& call, [[maybe_unused]] const LinearTask& task) {
#if defined(__AVX512BF16__)
  run(call, task);
#endif
}

}  // namespace VLLM_LITE_ISA
