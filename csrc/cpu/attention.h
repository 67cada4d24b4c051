// Data structures that the parts of paged attention share; the kernels themselves are in isa/attention*.
//
// Query rows of one KV head are numbered l = row * group + head, where row counts the sequence's query rows and group
// is the number of heads that share the KV head. An item is a range of l against a range of keys, for all KV heads.
#pragma once

#include <cstdint>

#include "common.h"
#include "isa.h"

namespace vllm_lite {

constexpr int kMaxHeadSize = 576;
constexpr int kMaxRows = 252;    // maximum rows of one item
constexpr int kStreamRows = 16;  // items of up to so many rows read the cache directly, larger ones pack it first

constexpr int64_t kAttentionScratchBytes = 896 << 10;  // of a thread

// Maximum rows of an item: few enough that their data of one head stays in a cache. Items may be half as large, so that
// there are enough for all threads.
VLLM_LITE_INLINE constexpr int max_rows(int head_size) {
  return head_size <= 128 ? kMaxRows : head_size <= 256 ? 120 : 48;
}

// Settings that all layers share. The same record as Shape in vllm_lite/kernels/cpu/attention.py.
struct AttentionShape {
  int32_t num_heads, num_kv_heads, head_size, value_size, block_size;
  int32_t dtype, kv_dtype;  // DType; kInt8: rows of vllm_lite/attention/int8_rows.py
  int32_t both_ways;        // 0: a row sees the keys up to its own position; else also later keys, as in an encoder
  float scale, soft_cap, k_scale, v_scale;
  const float* slopes;  // [num_heads] or null
};

// A unit of work: rows l in [first, first + num_rows) attend to the keys at positions [key_begin, key_end).
struct AttentionItem {
  int32_t sequence;            // row of the block table
  int32_t query_row;           // the sequence's first row among the step's tokens
  int32_t position;            // that row's position
  int32_t first, num_rows;     // l
  int32_t key_begin, key_end;  // the items of one range of rows are consecutive
  int32_t split, num_splits;   // 0, 1 if this item has all keys of its rows; else it has one section or more
  int32_t partial;             // index of split 0's first row of partial results, in units of num_kv_heads rows
  int32_t counter;             // index of the first of its kCounters counters, in units of num_kv_heads
  int32_t shared;              // index of its first token in the plan's SharedTokens; -1: it has rows of one sequence
  int32_t open_split;          // split whose section ends after this item and is resumed by another one; -1: none
  int32_t resumes;             // 1: its first section was begun by an item with this open split
};

// A token in an item with rows of several sequences, whose keys these sequences share. The item's `sequence` and
// `position` are those of its first token, `first` is 0, and `partial` and `counter` are unused.
struct SharedToken {
  int32_t query_row;  // row among the step's tokens
  int32_t position;
  int32_t first;  // l of its first row, within its own sequence
  int32_t owner;  // an item of its sequence, whose splits include those that the sequence shares with no other
};

// The item and KV head that a thread computes next; item null: none, or unknown.
struct NextUnit {
  const AttentionItem* item;
  int kv_head;
};

// Arguments of one call, for one layer of a step. Strides are in bytes.
struct AttentionCall {
  const AttentionShape* shape;
  const char* query;  // [num_tokens, num_heads, head_size], rows strided
  int64_t query_stride;
  char* out;  // [num_tokens, num_heads, value_size], rows strided
  int64_t out_stride;
  const char* kv;
  int64_t block_stride;
  int64_t value_offset;  // from K to V; 0: V is the first value_size elements of K
  int64_t head_stride, token_stride;
  const int32_t* table;  // [num_seqs, table_stride]
  int64_t table_stride;
  int32_t window;              // 0 = none
  const float* sinks;          // [num_heads] or null: one more score in each head's softmax, without a value
  float* partials;             // rows of partial_size: weighted sum of V, largest score, sum of weights
  const AttentionItem* items;  // of the plan
  const SharedToken* tokens;   // of the plan
};

// Floats of a row of partial results. An unfinished section keeps a sum of weights for each lane of a vector, so that
// the sums can be continued exactly and the row's bits are the same as without a break.
constexpr int kMostLanes = 16;
VLLM_LITE_INLINE int64_t partial_size(const AttentionShape& shape) {
  return shape.value_size + 1 + kMostLanes;
}

// The keys of a row are summed up in sections, which begin at multiples of a size that depends on the row's position
// only; then the results of the sections are added in order. So a row has the same bits whether several threads compute
// its sections, as in decoding, or one thread computes them in order, as in a chunk of a prompt.
constexpr int kSectionKeys = 512;  // minimum keys of a section
constexpr int kMaxSections = 16;   // of a row: one more than its keys need, because a window may begin within a section
constexpr int kSectionUnit = 64;   // section sizes are multiples of it
constexpr int kStepKeys = 64;      // keys in one step of the softmax

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

// All rows of an item have sections of one size. Rows that see later keys have a single section: all rows of their text
// are computed together.
VLLM_LITE_INLINE int section_keys(const AttentionCall& call, const AttentionItem& item) {
  if (call.shape->both_ways) return (item.key_end + kStepKeys - 1) / kStepKeys * kStepKeys;
  return section_keys(item.position + item.first * call.shape->num_kv_heads / call.shape->num_heads, call.window);
}

// Address of the partial result of row i of an item, for one split and one KV head.
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

// Computes one item for one KV head, into `out` if the item has all keys of its rows, else into its partial results.
// Meanwhile it prefetches the first keys of `next`.
VLLM_LITE_DECLARE_TILES(void attend_item(const vllm_lite::AttentionCall& call, const vllm_lite::AttentionItem& item,
                                         int kv_head, vllm_lite::NextUnit next, char* scratch))
// Merges the partial results of all splits, in their order, into `out`.
VLLM_LITE_DECLARE(void merge_splits(const vllm_lite::AttentionCall& call, const vllm_lite::AttentionItem& item,
                                    int kv_head))
