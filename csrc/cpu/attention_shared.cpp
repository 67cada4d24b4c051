#include "attention_shared.h"

#include "thread_pool.h"

namespace vllm_lite {

namespace {

constexpr int kUnitsPerThread = 4;  // enough equal units for threads to finish at about the same time
constexpr int kLeastRows = 64;      // minimum rows of an item: with fewer, packing keys takes most of the time

// Number of first blocks that both have in common, up to `most`.
int num_equal(const Sharer& x, const Sharer& y, int most) {
  return static_cast<int>(std::mismatch(x.blocks, x.blocks + most, y.blocks).first - x.blocks);
}

// Index of the block that has a section's last key.
int last_block(const Sharer& sharer, int section, int block_size) {
  return ((section + 1) * sharer.section - 1) / block_size;
}

// Number of first sections whose keys both sequences have in the same blocks.
int sections_in_common(const Sharer& x, const Sharer& y, int block_size) {
  if (x.section != y.section) return 0;
  const int most = std::min(x.num_before, y.num_before), num_blocks = last_block(x, most - 1, block_size) + 1;
  const int equal = num_equal(x, y, num_blocks);
  return equal == num_blocks ? most : equal * block_size / x.section;
}

}  // namespace

struct SharedPrefixes::Sizes {
  int group, num_kv_heads, block_size, most_rows;
};

void SharedPrefixes::clear() {
  sharers.clear();
  tokens.clear();
  owners_.clear();
}

void SharedPrefixes::add(int sequence, int query_row, int query_len, int seq_len, const int32_t* blocks) {
  const int position = seq_len - query_len, section = section_keys(position, 0);
  if (position < section || first_alike(seq_len - 1, 0) > position) return;
  Sharer sharer = {sequence, query_row, query_len, position, blocks, section};
  sharer.num_sections = (seq_len - 1) / section + 1;
  sharer.num_before = position / section;
  sharers.push_back(sharer);
}

// Sorts by the blocks in which sections end: if these are equal, the blocks before them nearly always are, too.
void SharedPrefixes::sort(int block_size) {
  order_.resize(sharers.size());
  for (size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<int32_t>(i);
  std::sort(order_.begin(), order_.end(), [&](int32_t i, int32_t j) {
    const Sharer &x = sharers[i], &y = sharers[j];
    if (x.section != y.section) return x.section < y.section;
    const int most = std::min(x.num_before, y.num_before);
    for (int section = 0; section < most; ++section) {
      const int block = last_block(x, section, block_size);
      if (x.blocks[block] != y.blocks[block]) return x.blocks[block] < y.blocks[block];
    }
    return x.num_before != y.num_before ? x.num_before < y.num_before : i < j;
  });
  common_.assign(order_.size() + 1, 0);
  for (size_t i = 1; i < order_.size(); ++i) {
    common_[i] = sections_in_common(sharers[order_[i - 1]], sharers[order_[i]], block_size);
  }
}

void SharedPrefixes::find(const AttentionShape& shape, int most_rows, std::vector<AttentionItem>* items) {
  if (sharers.size() < 2) return;
  sort(shape.block_size);
  const Sizes sizes = {shape.num_heads / shape.num_kv_heads, shape.num_kv_heads, shape.block_size, most_rows};
  const int count = static_cast<int>(order_.size());
  for (int begin = 0, end; begin < count; begin = end) {
    for (end = begin + 1; common_[end] > 0; ++end) {
    }
    if (end - begin > 1) share(sizes, begin, end, items);
  }
}

// Shares the prefix of the sequences at [begin, end) of the order, which have at least one section in common. If some
// of them have more sections in common than all, each section becomes an item; else one item has all sections, provided
// that there are enough items for all threads.
void SharedPrefixes::share(const Sizes& sizes, int begin, int end, std::vector<AttentionItem>* items) {
  const auto [least, most] = std::minmax_element(common_.begin() + begin + 1, common_.begin() + end);
  int64_t num_rows = 0, by_section = 0, at_once = 0, room = 0, more_room = 0;  // rows of results, and limits
  for (int i = begin; i < end; ++i) {
    const Sharer& sharer = sharers[order_[i]];
    const int64_t rows = sharer.num_tokens * sizes.group;
    num_rows += rows;
    by_section += rows * sharer.num_sections;
    at_once += rows * (1 + sharer.num_sections - *least);
    room += most_partial_rows(sizes.group);
    more_room += std::max<int64_t>(most_partial_rows(sizes.group), 2 * rows);
  }
  const int64_t num_units = std::max<int64_t>(1, num_rows / kLeastRows) * sizes.num_kv_heads;
  const bool is_enough = num_units >= kUnitsPerThread * num_threads() && *least == *most;
  const bool whole = at_once <= more_room && (is_enough || by_section > room);
  if (!whole && by_section > room) return;
  const int shared_end = *least == *most ? end_in_common(sizes, begin, end) : 0;
  for (int i = begin; i < end; ++i) {
    Sharer& sharer = sharers[order_[i]];
    const int before = i > begin ? common_[i] : 0, behind = i + 1 < end ? common_[i + 1] : 0;
    sharer.shared_sections = whole ? *least : std::max(before, behind);
    sharer.shared_splits = whole ? 1 : sharer.shared_sections;
    sharer.shared_end = std::max(shared_end, sharer.shared_sections * sharer.section);
    sharer.first_token = static_cast<int32_t>(tokens.size());
    for (int t = 0; t < sharer.num_tokens; ++t) {
      tokens.push_back({sharer.query_row + t, sharer.position + t, t * sizes.group, 0});
      owners_.push_back(order_[i]);
    }
  }
  const int size = sharers[order_[begin]].section, closed = *least * size;
  AttentionItem item = {};
  item.open_split = -1;
  if (whole) {
    item.key_end = std::max(shared_end, closed);
    if (shared_end > closed) item.open_split = 1;
    return add_items(sizes, begin, end, item, items);
  }
  for (; item.split < *most; ++item.split) {
    item.key_begin = item.split * size;
    item.key_end = item.key_begin + size;
    for (int first = begin, past; first < end; first = past) {
      for (past = first + 1; past < end && common_[past] > item.split; ++past) {
      }
      if (past - first > 1) add_items(sizes, first, past, item, items);
    }
  }
  if (shared_end <= closed) return;
  item.key_begin = closed;
  item.key_end = shared_end;
  item.open_split = item.split;
  add_items(sizes, begin, end, item, items);
}

// End of the keys that all sequences at [begin, end) of the order have in the same blocks and before their rows,
// rounded down to whole steps of the softmax. 0 if a sequence has a whole section after the common ones.
int SharedPrefixes::end_in_common(const Sizes& sizes, int begin, int end) const {
  const Sharer& first = sharers[order_[begin]];
  int num_keys = first.position;
  for (int i = begin; i < end; ++i) {
    const Sharer& sharer = sharers[order_[i]];
    if (sharer.num_before != common_[begin + 1]) return 0;
    num_keys = std::min(num_keys, sharer.position);
    num_keys = std::min(num_keys, num_equal(first, sharer, num_keys / sizes.block_size) * sizes.block_size);
  }
  return num_keys / kStepKeys * kStepKeys;
}

// Adds `item` for the sequences at [begin, end) of the order, cut into several items by their number of rows.
void SharedPrefixes::add_items(const Sizes& sizes, int begin, int end, AttentionItem item,
                               std::vector<AttentionItem>* items) const {
  const Sharer &first = sharers[order_[begin]], &last = sharers[order_[end - 1]];
  const int num_tokens = last.first_token + last.num_tokens - first.first_token;
  const int at_most = sizes.most_rows / sizes.group;  // tokens of an item
  const int wanted = (kUnitsPerThread * num_threads() + sizes.num_kv_heads - 1) / sizes.num_kv_heads;
  const int least = (num_tokens + at_most - 1) / at_most, most = num_tokens * sizes.group / kLeastRows;
  const int count = std::min(std::max(std::min(wanted, most), least), end - begin);
  for (int i = 0; i < count; ++i) {
    const int from = num_tokens * i / count, to = num_tokens * (i + 1) / count;
    item.sequence = first.sequence;
    item.position = first.position;
    item.num_rows = (to - from) * sizes.group;
    item.num_splits = 2;  // this and those of its owners
    item.shared = first.first_token + from;
    items->push_back(item);
  }
}

void SharedPrefixes::name_owners(int num_items) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    const int32_t owner = sharers[owners_[i]].owner;
    tokens[i].owner = owner < 0 ? num_items - 1 - owner : owner;
  }
}

}  // namespace vllm_lite
