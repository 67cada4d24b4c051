// Chooses the kernel for an item, and merges the results of its splits.
#include "attention_codes.h"
#include "attention_stream.h"
#include "attention_tile.h"

namespace VLLM_LITE_ISA {

void attend_item(const vllm_lite::AttentionCall& call, const vllm_lite::AttentionItem& item, int kv_head,
                 vllm_lite::NextUnit next, char* scratch) {
  const bool few = item.num_rows <= kStreamRows;
  [[maybe_unused]] const AttentionShape& shape = *call.shape;
#if defined(__AVX512VNNI__)
  static_assert(sizeof(CodeScratch) <= vllm_lite::kAttentionScratchBytes, "scratch of a thread");
  if (shape.dtype != kFloat32 && shape.kv_dtype == kInt8) return codes(call, item, kv_head, next, scratch);
#endif
#if defined(VLLM_LITE_MULTIPLIES_PAIRS)
  static_assert(sizeof(TileScratch<Pairs>) <= vllm_lite::kAttentionScratchBytes, "scratch of a thread");
  const bool fit = shape.kv_dtype == kBFloat16 || shape.kv_dtype == kFp8E4M3 || shape.kv_dtype == kFp8E5M2;
  if (shape.dtype == kBFloat16 && fit) {  // in bfloat16
    return few ? stream<Pairs>(call, item, kv_head, next, scratch) : tile<Pairs>(call, item, kv_head, next, scratch);
  }
#endif
  static_assert(sizeof(StreamScratch<Floats>) <= vllm_lite::kAttentionScratchBytes, "scratch of a thread");
  static_assert(sizeof(TileScratch<Floats>) <= vllm_lite::kAttentionScratchBytes, "scratch of a thread");
  return few ? stream<Floats>(call, item, kv_head, next, scratch) : tile<Floats>(call, item, kv_head, next, scratch);
}

void merge_splits(const vllm_lite::AttentionCall& call, const vllm_lite::AttentionItem& item, int kv_head) {
  const int size = call.shape->value_size;
  alignas(64) float acc[kMaxHeadSize + kWidth];
  for (int i = 0; i < item.num_rows; ++i) {
    std::memset(acc, 0, sizeof acc);
    Result all = {kNothing, 0, acc};
    for (int split = 0; split < item.num_splits; ++split) {
      const float* partial = partial_of(call, item, split, kv_head, i);
      add_section(&all, partial[size], partial[size + 1], partial, size);
    }
    put_row(call, item, kv_head, i, all);
  }
}

}  // namespace VLLM_LITE_ISA
