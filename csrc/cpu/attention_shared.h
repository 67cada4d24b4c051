// Finds common prefixes of the sequences of a step, and makes the items that read them once for all these sequences.
//
// A section is shared if all its keys are in the same blocks for several sequences and all their rows see them. The
// results of a row's sections are added in the same order as without sharing, so its bits are the same.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention.h"

namespace vllm_lite {

// Rows of partial results of a sequence, for all its splits; max_partial_rows in vllm_lite/kernels/cpu/attention.py
// relies on it.
inline int most_partial_rows(int group) {
  return kMaxSections * std::clamp(group, 8, 16);
}

// A sequence that may have a common prefix with others, and the part of it that is computed with them.
struct Sharer {
  int32_t sequence, query_row, num_tokens, position;
  const int32_t* blocks;
  int section;                   // size of its sections, in keys
  int num_sections, num_before;  // all sections, and those that end before the sequence's first row
  int shared_sections;           // number of first sections that are computed with others
  int shared_splits;             // the same number; or 1, if they are one item with one result
  int shared_end;  // end of the keys that are computed with others: the end of these sections, or within the next one
  int32_t first_token;  // index in `tokens`
  int32_t owner;        // the sequence's first own item; if an item resumes a section, that one
};

class SharedPrefixes {
 public:
  std::vector<Sharer> sharers;      // by sequence
  std::vector<SharedToken> tokens;  // sorted so that sequences with a common prefix are adjacent

  void clear();
  // Adds a sequence unless it is too short to share anything, or its rows have sections of several sizes.
  void add(int sequence, int query_row, int query_len, int seq_len, const int32_t* blocks);
  // Sets the shared fields of each sharer, and adds the items of shared keys, of up to `most_rows` rows each.
  void find(const AttentionShape& shape, int most_rows, std::vector<AttentionItem>* items);
  // Sets the owners of tokens, once those of sharers are known. A sharer's owner below 0 is an item after the first
  // `num_items`.
  void name_owners(int num_items);

 private:
  struct Sizes;
  void sort(int block_size);
  void share(const Sizes& sizes, int begin, int end, std::vector<AttentionItem>* items);
  int end_in_common(const Sizes& sizes, int begin, int end) const;
  void add_items(const Sizes& sizes, int begin, int end, AttentionItem item, std::vector<AttentionItem>* items) const;

  std::vector<int32_t> order_;   // indexes of `sharers`, sorted so that those with a common prefix are adjacent
  std::vector<int32_t> common_;  // by position in `order_`: sections in common with the previous one
  std::vector<int32_t> owners_;  // the sharer of each of `tokens`
};

}  // namespace vllm_lite
