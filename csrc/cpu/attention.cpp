// Cuts a step's attention into items and tasks, once per step, and runs them, once per layer.
// The order in which a row's keys are summed up depends only on its position (attention.h), never on other rows, the
// batch or the number of threads. So a token has the same bits in a decode step, as a draft, and in any chunk of a
// prompt.
#include "attention.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention_shared.h"
#include "common.h"
#include "program.h"
#include "thread_pool.h"

using namespace vllm_lite;

namespace {

constexpr int kBlockRows = 6;  // rows that the kernel computes together

// Estimates for the sizes of tasks. Taking a task costs about 0.1 us, waking threads several us.
constexpr double kNsPerItem = 300, kBytesPerNs = 25, kFlopsPerNs = 100;
constexpr double kTaskNs = 10'000, kLargeTaskNs = 80'000, kAloneNs = 5'000, kLeastTaskNs = 3'000;
constexpr int kTasksPerThread = 12;  // enough for threads to finish together; keys are prefetched within a task only

// The caller's buffer of int32 has the plan: this record, the items, the SharedTokens, the end of each task (in units
// of one item and one KV head, items outermost), then the rows to be zeroed as (first row, number of rows).
struct Plan {
  int32_t num_items, num_tokens, num_tasks, num_gaps, num_partial_rows, num_counters, window;
};
constexpr int64_t kPlanInts = sizeof(Plan) / 4, kItemInts = sizeof(AttentionItem) / 4;
constexpr int64_t kTokenInts = sizeof(SharedToken) / 4;

// Counters of a sequence: rows whose results of a split are done, and rows whose shared part of an open section is
// done, after which an item of the sequence alone resumes the section.
constexpr int kCounters = 2;

struct Draft {
  std::vector<AttentionItem> items;
  std::vector<AttentionItem> resuming;  // stored after `items`; run, outside of tasks, after the items that they resume
  std::vector<int32_t> task_ends, gaps;
  SharedPrefixes shared;
};

int64_t element_bytes(int dtype) {
  return dtype == kFloat32 ? 4 : dtype >= kFp8E4M3 ? 1 : 2;
}

int round_up(int x, int unit) {
  return (x + unit - 1) / unit * unit;
}

// Adds an item for each split of `item`, whose first split is in the section `section`.
void add_each_split(Plan* plan, std::vector<AttentionItem>* items, AttentionItem item, int section, int size) {
  const int begin = item.key_begin, end = item.key_end;
  item.partial = plan->num_partial_rows;
  item.counter = plan->num_counters;
  plan->num_counters += kCounters;
  plan->num_partial_rows += item.num_splits * item.num_rows;
  for (; item.split < item.num_splits; ++item.split, ++section) {
    item.key_begin = std::max(begin, section * size);
    item.key_end = std::min(end, (section + 1) * size);
    items->push_back(item);
  }
}

// Adds an item for each section of `item`, whose key range is set for all of them; or `item` itself, if it has only one
// section or if the partial results would take too much memory.
void add_splits(Plan* plan, std::vector<AttentionItem>* items, AttentionItem item, int size, int most) {
  const int first = item.key_begin / size, count = (item.key_end - 1) / size + 1 - first;
  if (count == 1 || count > kMaxSections || count * item.num_rows > most) {
    items->push_back(item);
    return;
  }
  item.num_splits = count;
  add_each_split(plan, items, item, first, size);
}

// Rows of an item. With few units for each thread, items are half as large, so that no thread waits long for others at
// the end.
int rows_of_items(const AttentionShape& shape, int num_tokens) {
  const int most = max_rows(shape.head_size);
  return 1.0 * num_tokens * shape.num_heads < 1.0 * kTasksPerThread * num_threads() * most ? most / 2 : most;
}

// A sequence's rows in a step: l in [0, num_rows), the first at `position`.
struct Rows {
  int sequence, query_row, position, num_rows, group;
  int most;  // maximum rows of an item
  bool both_ways;

  AttentionItem item(int first, int count, int window) const {
    AttentionItem item = {};
    item.sequence = sequence;
    item.query_row = query_row;
    item.position = position;
    item.first = first;
    item.num_rows = count;
    const int first_position = position + first / group;
    item.key_begin = window > 0 ? std::max(0, first_position - window + 1) : 0;
    item.key_end = position + (first + count - 1) / group + 1;
    if (both_ways) {
      const int end = position + num_rows / group;
      item.key_end = window > 0 ? std::min(end, item.key_end + window - 1) : end;
    }
    item.num_splits = 1;
    item.shared = item.open_split = -1;
    return item;
  }
};

// Adds the items of the rows [begin, end), whose sections have one size. The items with most keys come first, so that
// threads finish together.
void add_tiles(Plan* plan, std::vector<AttentionItem>* items, const Rows& rows, int begin, int end) {
  const int count = end - begin, num_tiles = (count + rows.most - 1) / rows.most;
  const int tile_rows = num_tiles == 1 ? count : round_up((count + num_tiles - 1) / num_tiles, kBlockRows);
  for (int first = begin + (count - 1) / tile_rows * tile_rows; first >= begin; first -= tile_rows) {
    items->push_back(rows.item(first, std::min(tile_rows, end - first), plan->window));
  }
}

void add_sequence(Plan* plan, std::vector<AttentionItem>* items, const Rows& rows) {
  const int window = plan->window;
  if (rows.both_ways) return add_tiles(plan, items, rows, 0, rows.num_rows);
  for (int end = rows.num_rows; end > 0;) {
    const int position = rows.position + (end - 1) / rows.group, alike = first_alike(position, window);
    const int begin = std::max(0, alike - rows.position) * rows.group;
    if (begin == 0 && end == rows.num_rows && rows.num_rows <= rows.most) {
      return add_splits(plan, items, rows.item(0, rows.num_rows, window), section_keys(position, window),
                        most_partial_rows(rows.group));
    }
    add_tiles(plan, items, rows, begin, end);
    end = begin;
  }
}

// Adds the items of the sections that a sequence does not share. The first of them may resume a shared section.
void add_own_sections(Plan* plan, Draft* draft, const Rows& rows, Sharer* sharer) {
  std::vector<AttentionItem>& items = draft->items;
  AttentionItem item = rows.item(0, rows.num_rows, 0);
  item.key_begin = sharer->shared_end;
  item.split = sharer->shared_splits;
  item.num_splits = sharer->shared_splits + sharer->num_sections - sharer->shared_sections;
  const size_t first = items.size();
  add_each_split(plan, &items, item, sharer->shared_sections, sharer->section);
  sharer->owner = static_cast<int32_t>(first);
  if (sharer->shared_end == sharer->shared_sections * sharer->section) return;
  sharer->owner = -1 - static_cast<int32_t>(draft->resuming.size());
  draft->resuming.push_back(items[first]);
  draft->resuming.back().resumes = 1;
  items.erase(items.begin() + static_cast<int64_t>(first));
}

double item_ns(const AttentionShape& shape, const AttentionItem& item) {
  const double products = 1.0 * (item.key_end - item.key_begin) * (shape.head_size + shape.value_size);
  return kNsPerItem + products * static_cast<double>(element_bytes(shape.kv_dtype)) / kBytesPerNs +
         2 * products * item.num_rows / kFlopsPerNs;
}

void make_tasks(const AttentionShape& shape, Draft* draft) {
  double total = 0;
  for (const AttentionItem& item : draft->items) total += item_ns(shape, item) * shape.num_kv_heads;
  const int threads = num_threads();
  const double least = std::clamp(total / threads, kLeastTaskNs, kTaskNs);
  const double enough =
      total < kAloneNs ? total + 1 : std::clamp(total / (kTasksPerThread * threads), least, kLargeTaskNs);
  double ns = 0;
  int32_t unit = 0;
  for (const AttentionItem& item : draft->items) {
    const double head_ns = item_ns(shape, item);
    for (int head = 0; head < shape.num_kv_heads; ++head) {
      ns += head_ns;
      ++unit;
      if (ns < enough) continue;
      draft->task_ends.push_back(unit);
      ns = 0;
    }
  }
  if (ns > 0) draft->task_ends.push_back(unit);
}

// The sequences of a step.
struct Step {
  const AttentionShape& shape;
  const int32_t *starts, *seq_lens;
  int num_seqs, group, most;

  int query_len(int i) const { return starts[i + 1] - starts[i]; }
  bool is_large(int i) const { return query_len(i) * group > most; }
  Rows rows(int i) const {
    const int num_rows = query_len(i) * group;
    return {i, starts[i], seq_lens[i] - query_len(i), num_rows, group, most, shape.both_ways != 0};
  }
};

// Adds the sequences with more rows than an item (`large`), or the others.
void add_sequences(Plan* plan, Draft* draft, const Step& step, bool large) {
  Sharer* sharer = draft->shared.sharers.data();
  const Sharer* const end = sharer + draft->shared.sharers.size();
  for (int i = 0; i < step.num_seqs; ++i) {
    if (step.query_len(i) <= 0 || large != step.is_large(i)) continue;
    if (step.seq_lens[i] <= 0) {
      draft->gaps.insert(draft->gaps.end(), {step.starts[i], step.query_len(i)});
      continue;
    }
    while (sharer < end && sharer->sequence < i) ++sharer;
    if (sharer < end && sharer->sequence == i && sharer->shared_sections > 0) {
      add_own_sections(plan, draft, step.rows(i), sharer);
    } else {
      add_sequence(plan, &draft->items, step.rows(i));
    }
  }
}

// Finds common prefixes of sequences by their block tables, and adds items for them.
void add_shared(Draft* draft, const Step& step, const int32_t* table, int64_t table_stride) {
  const int most = max_rows(step.shape.head_size);
  for (int i = 0; i < step.num_seqs; ++i) {
    if (step.query_len(i) <= 0 || step.seq_lens[i] <= 0 || step.query_len(i) * step.group > most) continue;
    draft->shared.add(i, step.starts[i], step.query_len(i), step.seq_lens[i], table + i * table_stride);
  }
  draft->shared.find(step.shape, most, &draft->items);
}

}  // namespace

// Plans the attention of a step. starts: int32 [num_seqs + 1], seq_lens: int32 [num_seqs]. window 0: none. table: null,
// or the block table [num_seqs, table_stride] that the layers will use; common prefixes are then read once for all
// their sequences, unless there is a window. Returns -1. If the plan needs more than `capacity` int32 or its splits
// more than `max_partial_rows`, returns the number of int32 that it needs, and writes no plan.
VLLM_LITE_API int64_t vllm_lite_attention_plan(const AttentionShape* shape, const int32_t* starts,
                                               const int32_t* seq_lens, int32_t num_seqs, int32_t num_tokens,
                                               int32_t window, const int32_t* table, int64_t table_stride,
                                               int32_t* plan_out, int64_t capacity, int64_t max_partial_rows) {
  thread_local Draft draft;
  draft.items.clear();
  draft.resuming.clear();
  draft.task_ends.clear();
  draft.gaps.clear();
  draft.shared.clear();
  Plan plan = {};
  plan.window = window;
  const int group = shape->num_heads / shape->num_kv_heads, most = rows_of_items(*shape, num_tokens);
  const Step step = {*shape, starts, seq_lens, num_seqs, group, most};
  if (table && window == 0 && !shape->both_ways) add_shared(&draft, step, table, table_stride);
  add_sequences(&plan, &draft, step, true);
  add_sequences(&plan, &draft, step, false);
  draft.shared.name_owners(static_cast<int>(draft.items.size()));
  const int num_rows = num_seqs > 0 ? starts[num_seqs] : 0;
  if (num_rows < num_tokens) draft.gaps.insert(draft.gaps.end(), {num_rows, num_tokens - num_rows});
  make_tasks(*shape, &draft);
  draft.items.insert(draft.items.end(), draft.resuming.begin(), draft.resuming.end());
  const std::vector<SharedToken>& tokens = draft.shared.tokens;
  plan.num_items = static_cast<int32_t>(draft.items.size());
  plan.num_tokens = static_cast<int32_t>(tokens.size());
  plan.num_tasks = static_cast<int32_t>(draft.task_ends.size());
  plan.num_gaps = static_cast<int32_t>(draft.gaps.size() / 2);
  const int64_t needed =
      kPlanInts + plan.num_items * kItemInts + plan.num_tokens * kTokenInts + plan.num_tasks + 2 * plan.num_gaps;
  if (needed > capacity || plan.num_partial_rows > max_partial_rows) return needed;
  std::memcpy(plan_out, &plan, sizeof plan);
  int32_t* to = plan_out + kPlanInts;
  std::copy_n(draft.items.data(), draft.items.size(), reinterpret_cast<AttentionItem*>(to));
  to += plan.num_items * kItemInts;
  std::copy_n(tokens.data(), tokens.size(), reinterpret_cast<SharedToken*>(to));
  to = std::copy(draft.task_ends.begin(), draft.task_ends.end(), to + plan.num_tokens * kTokenInts);
  std::copy(draft.gaps.begin(), draft.gaps.end(), to);
  return -1;
}
VLLM_LITE_RECORDABLE(vllm_lite_attention_plan)

// Computes attention for one layer. Strides are in elements: of a row of `query` [num_tokens, num_heads, head_size], of
// `out` [num_tokens, num_heads, value_size] and of `table`, and kv_strides [4] of `kv` [num_blocks, 2, num_kv_heads,
// block_size, head_size], whose last axis is dense. kv_strides[1] is 0 if V is the first value_size elements of K.
// sinks: [num_heads], one more score in each head's softmax, without a value; or null. partials: room for
// num_partial_rows * num_kv_heads * partial_size floats. counters: num_counters * num_kv_heads zeros, which are zeros
// again afterwards.
VLLM_LITE_API void vllm_lite_attend(const AttentionShape* shape, const int32_t* plan_in, const int32_t* table,
                                    int64_t table_stride, const void* query, int64_t query_stride, const void* kv,
                                    const int64_t* kv_strides, void* out, int64_t out_stride, const float* sinks,
                                    float* partials, int32_t* counters) {
  Plan plan;
  std::memcpy(&plan, plan_in, sizeof plan);
  const AttentionItem* items = reinterpret_cast<const AttentionItem*>(plan_in + kPlanInts);
  const int32_t* token_ints = plan_in + kPlanInts + plan.num_items * kItemInts;
  const int32_t* task_ends = token_ints + plan.num_tokens * kTokenInts;
  const int32_t* gaps = task_ends + plan.num_tasks;
  const int64_t size = element_bytes(shape->dtype), kv_size = element_bytes(shape->kv_dtype);

  AttentionCall call = {};
  call.shape = shape;
  call.query = static_cast<const char*>(query);
  call.query_stride = query_stride * size;
  call.out = static_cast<char*>(out);
  call.out_stride = out_stride * size;
  call.kv = static_cast<const char*>(kv);
  call.block_stride = kv_strides[0] * kv_size;
  call.value_offset = kv_strides[1] * kv_size;
  call.head_stride = kv_strides[2] * kv_size;
  call.token_stride = kv_strides[3] * kv_size;
  call.table = table;
  call.table_stride = table_stride;
  call.window = plan.window;
  call.sinks = sinks;
  call.partials = partials;
  call.items = items;
  call.tokens = reinterpret_cast<const SharedToken*>(token_ints);

  const size_t row_bytes = static_cast<size_t>(shape->num_heads * shape->value_size * size);
  for (int i = 0; i < plan.num_gaps; ++i) {
    for (int row = 0; row < gaps[2 * i + 1]; ++row) {
      std::memset(call.out + (gaps[2 * i] + row) * call.out_stride, 0, row_bytes);
    }
  }
  const auto attend = VLLM_LITE_DISPATCH_TILES(attend_item);
  const auto merge = VLLM_LITE_DISPATCH(merge_splits);
  const int num_heads = shape->num_kv_heads, group = shape->num_heads / num_heads;
  // Counts finished rows of a sequence. True for the last of `all` rows; then the counter is 0 again.
  const auto are_last = [&](int counter, int head, int num_rows, int all) {
    int32_t* finished = counters + counter * num_heads + head;
    if (__atomic_add_fetch(finished, num_rows, __ATOMIC_ACQ_REL) < all) return false;
    *finished = 0;
    return true;
  };
  // Called when `num_rows` rows of a sequence have the results of a split. The thread with the last results merges all.
  const auto finish = [&](const AttentionItem& item, int head, int num_rows) {
    if (are_last(item.counter, head, num_rows, item.num_splits * item.num_rows)) merge(call, item, head);
  };
  // The same for rows of several sequences. An open section of a sequence is resumed when all its rows have the shared
  // part.
  const auto finish_shared = [&](const AttentionItem& item, int head, char* scratch) {
    const bool has_result = item.split != item.open_split;
    for (int i = 0; i < item.num_rows; i += group) {
      const AttentionItem& owner = items[call.tokens[item.shared + i / group].owner];
      if (has_result) finish(owner, head, group);
      if (item.open_split < 0 || !are_last(owner.counter + 1, head, group, owner.num_rows)) continue;
      attend(call, owner, head, NextUnit{}, scratch);
      finish(owner, head, owner.num_rows);
    }
  };
  parallel_for(plan.num_tasks, [&](int64_t task) {
    alignas(64) static thread_local char scratch[kAttentionScratchBytes];
    for (int unit = task == 0 ? 0 : task_ends[task - 1]; unit < task_ends[task]; ++unit) {
      const AttentionItem& item = items[unit / num_heads];
      const int head = unit % num_heads;
      const int next = unit + 1;
      attend(call, item, head,
             next < task_ends[task] ? NextUnit{&items[next / num_heads], next % num_heads} : NextUnit{}, scratch);
      if (item.num_splits == 1) continue;
      item.shared < 0 ? finish(item, head, item.num_rows) : finish_shared(item, head, scratch);
    }
  });
}
VLLM_LITE_RECORDABLE(vllm_lite_attend)
