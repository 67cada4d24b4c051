// What the pieces of paged attention tell each other; the kernels themselves stand in isa/attention*.
//
// Query rows of one KV head are numbered l = row * group + head, where row counts the sequence's query rows and group
// is the number of heads that share the KV head. An item is a range of l against a range of keys, for all KV heads.
#pragma once

#include <cstdint>

#include "common.h"
#include "isa.h"

namespace vllm_lite {

constexpr int kMaxHeadSize = 576;
constexpr int kMaxRows = 252;    // of one item
constexpr int kStreamRows = 16;  // items of up to so many rows read the cache as it lies, larger ones pack it first

constexpr int64_t kAttentionScratchBytes = 896 << 10;  // of a thread

// Of an item: as many as keep what they have of a head in a cache, and twice as many as an item has at least where
// there are more, for threads to have enough of them.
VLLM_LITE_INLINE constexpr int max_rows(int head_size) {
  return head_size <= 128 ? kMaxRows : head_size <= 256 ? 120 : 48;
}

// What all layers share. Mirrored by _Shape in vllm_lite/kernels/cpu/attention.py.
struct AttentionShape {
  int32_t num_heads, num_kv_heads, head_size, value_size, block_size;
  int32_t dtype, kv_dtype;  // DType; kInt8: rows of vllm_lite/attention/int8_rows.py
  int32_t both_ways;        // 0: a row sees the keys up to its own; else those behind it as well, as in an encoder
  float scale, soft_cap, k_scale, v_scale;
  const float* slopes;  // [num_heads] or null
};

// Scores of rows [first, first + num_rows) with the keys at positions [key_begin, key_end).
struct AttentionItem {
  int32_t sequence;            // row of the block table
  int32_t query_row;           // the sequence's first row among the step's tokens
  int32_t position;            // that row's position
  int32_t first, num_rows;     // l
  int32_t key_begin, key_end;  // the items of one range of rows are consecutive
  int32_t split, num_splits;   // 0, 1 when this item sees all of the keys; else it sees those of one section or more
  int32_t partial;             // rows of partial results before those of split 0, in units of num_kv_heads
  int32_t counter;             // the first of its kCounters, in units of num_kv_heads
  int32_t shared;              // -1, or the first of its tokens among the plan's SharedTokens: see there
  int32_t open_split;          // -1, or the split that goes on in its last section, and finds there how far it is
  int32_t resumes;             // 1: its first section was begun by an item with an open split
};

// A token whose rows meet keys that its sequence shares with others, in an item with the rows of these. The item's
// `sequence` and `position` are those of its first token, `first` is 0, and `partial` and `counter` mean nothing.
struct SharedToken {
  int32_t query_row;  // among the step's tokens
  int32_t position;
  int32_t first;  // l of its first row, within its own sequence
  int32_t owner;  // an item of its sequence, which has the splits that the sequence shares with nobody
};

// What a thread computes after an item and a KV head; item null = nothing, or not known.
struct NextUnit {
  const AttentionItem* item;
  int kv_head;
};

// One call: one layer of a step. Strides in bytes.
struct AttentionCall {
  const AttentionShape* shape;
  const char* query;  // [num_tokens, num_heads, head_size], rows strided
  int64_t query_stride;
  char* out;  // [num_tokens, num_heads, value_size], rows strided
  int64_t out_stride;
  const char* kv;
  int64_t block_stride;
  int64_t value_offset;  // from K to V; 0 = V is the first value_size elements of K
  int64_t head_stride, token_stride;
  const int32_t* table;  // [num_seqs, table_stride]
  int64_t table_stride;
  int32_t window;              // 0 = none
  const float* sinks;          // [num_heads] or null: one more score of each head, which attends to nothing
  float* partials;             // rows of partial_size: weighted sum of V, largest score, sum of weights
  const AttentionItem* items;  // of the plan
  const SharedToken* tokens;   // of the plan
};

// Floats of a row of partial results. A section that is not at its end has a sum of weights for each lane of a vector:
// each goes on where it was, so that the row has the bits that it would have alone.
constexpr int kMostLanes = 16;
VLLM_LITE_INLINE int64_t partial_size(const AttentionShape& shape) {
  return shape.value_size + 1 + kMostLanes;
}

// The keys of a row are summed up in sections, which begin at multiples of a size that the row's position alone
// decides; then the sections' results are added in their order. So a row has the same bits whether its sections are
// shared out to threads, as in decoding, or one follows the other, as in a chunk of a prompt.
constexpr int kSectionKeys = 512;  // least keys of a section
constexpr int kMaxSections = 16;   // of a row: one more than the keys alone would need, as a window begins anywhere
constexpr int kSectionUnit = 64;   // sizes are multiples of it
constexpr int kStepKeys = 64;      // that the softmax takes at once

// The size of the sections of the row at `position`; window 0 = none.
VLLM_LITE_INLINE int section_keys(int position, int window) {
  const int seen = window > 0 && window <= position ? window : position + 1;
  const int least = (seen + kMaxSections - 2) / (kMaxSections - 1);
  return least <= kSectionKeys ? kSectionKeys : (least + kSectionUnit - 1) / kSectionUnit * kSectionUnit;
}

// The first position whose sections have the same size as those of `position`.
VLLM_LITE_INLINE int first_alike(int position, int window) {
  const int size = section_keys(position, window);
  return size == kSectionKeys ? 0 : (kMaxSections - 1) * (size - kSectionUnit);
}

// All rows of an item have sections of one size. Rows that see both ways have a single one: they are computed with all
// others of their text.
VLLM_LITE_INLINE int section_keys(const AttentionCall& call, const AttentionItem& item) {
  if (call.shape->both_ways) return (item.key_end + kStepKeys - 1) / kStepKeys * kStepKeys;
  return section_keys(item.position + item.first * call.shape->num_kv_heads / call.shape->num_heads, call.window);
}

// Where the partial result of row i of an item is, for one split and one KV head.
VLLM_LITE_INLINE float* partial_of(const AttentionCall& call, const AttentionItem& item, int split, int kv_head,
                                   int i) {
  const AttentionItem* owner = &item;
  if (item.shared >= 0) {
    const int group = call.shape->num_heads / call.shape->num_kv_heads;
    const SharedToken& token = call.tokens[item.shared + i / group];
    owner = &call.items[token.owner];
    i = token.first + i % group;
  }
  const int64_t rows = owner->partial + static_cast<int64_t>(split) * owner->num_rows;
  const int64_t row = rows * call.shape->num_kv_heads + static_cast<int64_t>(kv_head) * owner->num_rows + i;
  return call.partials + row * partial_size(*call.shape);
}

}  // namespace vllm_lite

// Computes one item for one KV head: into `out` when the item is alone, else into its partial results. Meanwhile the
// first keys of what this thread computes next are fetched.
VLLM_LITE_DECLARE_TILES(void attend_item(const vllm_lite::AttentionCall& call, const vllm_lite::AttentionItem& item,
                                         int kv_head, vllm_lite::NextUnit next, char* scratch))
// Merges the partial results of all splits, in their order, into `out`.
VLLM_LITE_DECLARE(void merge_splits(const vllm_lite::AttentionCall& call, const vllm_lite::AttentionItem& item,
                                    int kv_head))
