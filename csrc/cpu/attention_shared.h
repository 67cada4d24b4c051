// What sequences of a step begin with alike, and the items by which it is read once for all of them.
//
// Sections are what can be shared: all keys of one lie in the same blocks, and all rows see them. A row's sections are
// added in their order as they would be without, so its bits are the same.
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

// A sequence that may have something in common with others, and what of it is computed with them.
struct Sharer {
  int32_t sequence, query_row, num_tokens, position;
  const int32_t* blocks;
  int section;                   // its size
  int num_sections, num_before;  // all, and those that end before the sequence's first row
  int shared_sections;           // the first ones: these are computed with others
  int shared_splits;             // as many, or 1: then all of them are one item, and one result
  int shared_end;                // where the keys end that are computed with others: there, or in the section behind
  int32_t first_token;           // among `tokens`
  int32_t owner;                 // the sequence's first item: if it resumes a section, the one that does
};

class SharedPrefixes {
 public:
  std::vector<Sharer> sharers;      // by sequence
  std::vector<SharedToken> tokens;  // those of sequences that begin alike side by side

  void clear();
  // Adds a sequence unless it is too short to share anything, or its rows have sections of several sizes.
  void add(int sequence, int query_row, int query_len, int seq_len, const int32_t* blocks);
  // Sets what each sharer has in common with others, and adds the items for it, of up to `most_rows` rows.
  void find(const AttentionShape& shape, int most_rows, std::vector<AttentionItem>* items);
  // Gives the tokens their owners, which have been set by now: -1 and less are behind the first `num_items`.
  void name_owners(int num_items);

 private:
  struct Sizes;
  void sort(int block_size);
  void share(const Sizes& sizes, int begin, int end, std::vector<AttentionItem>* items);
  int end_in_common(const Sizes& sizes, int begin, int end) const;
  void add_items(const Sizes& sizes, int begin, int end, AttentionItem item, std::vector<AttentionItem>* items) const;

  std::vector<int32_t> order_;   // of `sharers`: those that begin alike side by side
  std::vector<int32_t> common_;  // by place in it: sections that it has in common with the one before it
  std::vector<int32_t> owners_;  // of `tokens`, by sharer
};

}  // namespace vllm_lite
