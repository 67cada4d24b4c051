// Attention in bfloat16 by AMX if that is faster, else by AVX512-BF16.
#include "attention_amx.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int kLeastGroup = 2;  // minimum heads per KV head: with one, packing a decode's keys takes too long
constexpr int kShortText = 16;  // tokens of an encoder's text up to which AMX is slower

// A row must have the same bits in every item, so this depends only on properties that all items of a row share.
bool by_tiles(const AttentionCall& call, const AttentionItem& item) {
  const AttentionShape& shape = *call.shape;
  if (shape.dtype != kBFloat16) return false;
  if (shape.kv_dtype != kBFloat16 && shape.kv_dtype != kFp8E4M3 && shape.kv_dtype != kFp8E5M2) return false;
  if (shape.both_ways) return call.window > 0 || item.key_end > kShortText;
  return shape.num_heads >= kLeastGroup * shape.num_kv_heads;
}

}  // namespace

void attend_item(const vllm_lite::AttentionCall& call, const vllm_lite::AttentionItem& item, int kv_head,
                 vllm_lite::NextUnit next, char* scratch) {
  static_assert(sizeof(AmxScratch) <= vllm_lite::kAttentionScratchBytes, "scratch of a thread");
  if (by_tiles(call, item)) return attend_by_tiles(call, item, kv_head, next, scratch);
  VLLM_LITE_VECTORS::attend_item(call, item, kv_head, next, scratch);
}

}  // namespace VLLM_LITE_ISA
