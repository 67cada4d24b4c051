// The persistent batch's part of a decode step in which each sequence computes one token.
// vllm_lite/worker/batch/steady.py chooses the steps; vllm_lite/worker/batch/input_batch.py does the same for any step.
#include <algorithm>
#include <cstdint>

#include "common.h"

// The same record as _Record in vllm_lite/kernels/cpu/batch.py. Arrays of the batch have one element or row for each of
// its rows, arrays of the step one for each of the step's sequences.
struct DecodeRows {
  // Arrays of the batch.
  int32_t* token_ids;  // [..][token_stride]
  int64_t token_stride;
  int64_t* num_tokens;
  int64_t* num_computed;
  const int64_t* num_cached;
  const int32_t* table_lens;     // [..][num_groups]
  const int32_t* const* tables;  // for each group [..][table_stride]
  int64_t num_groups;
  int64_t table_stride;
  int64_t block_size;
  // Arrays of the step.
  const int64_t* rows;
  int64_t* input_ids;
  int64_t* positions;
  int64_t* lengths;   // of the sequences with this token, so also the place of the sampled token in token_ids
  int32_t* seq_lens;  // the same as int32
  int64_t* slots;     // [num_groups][slot_stride]
  int64_t slot_stride;
  int32_t* const* step_tables;  // for each group [..][table_stride]
};

namespace {

constexpr int64_t kPadSlot = -1;

// Fills in the inputs of the sequence in `row`, which is number i of the step. Returns false if it cannot decode.
bool fill(const DecodeRows& batch, int64_t i, int64_t row) {
  const int64_t position = batch.num_computed[row], block = position / batch.block_size;
  if (position + 1 != batch.num_tokens[row]) return false;
  batch.input_ids[i] = batch.token_ids[row * batch.token_stride + position];
  batch.positions[i] = position;
  batch.lengths[i] = position + 1;
  batch.seq_lens[i] = static_cast<int32_t>(position + 1);
  for (int64_t group = 0; group < batch.num_groups; ++group) {
    const int32_t* table = batch.tables[group] + row * batch.table_stride;
    const int64_t length = batch.table_lens[row * batch.num_groups + group];
    if (block >= length) return false;
    const bool written = position >= batch.num_cached[row];
    if (written && table[block] == 0) return false;  // the null block
    batch.slots[group * batch.slot_stride + i] =
        written ? table[block] * batch.block_size + position % batch.block_size : kPadSlot;
    std::copy_n(table, length, batch.step_tables[group] + i * batch.table_stride);
  }
  return true;
}

}  // namespace

// Fills in the inputs of a step in which each of `count` sequences computes its last token. Returns the length of the
// longest block table; or -1 if a sequence has more tokens to compute or lacks a block, and then the arrays of the step
// are undefined.
VLLM_LITE_API int64_t vllm_lite_decode_inputs(const DecodeRows* batch, int64_t count) {
  int32_t longest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = batch->rows[i];
    if (!fill(*batch, i, row)) return -1;
    const int32_t* lengths = batch->table_lens + row * batch->num_groups;
    longest = std::max(longest, *std::max_element(lengths, lengths + batch->num_groups));
  }
  return longest;
}

// Appends the token that the step has sampled for each sequence, and counts its input token as computed.
VLLM_LITE_API void vllm_lite_decode_commit(const DecodeRows* batch, int64_t count, const int64_t* sampled) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = batch->rows[i];
    const int64_t length = batch->num_tokens[row]++;
    batch->token_ids[row * batch->token_stride + length] = static_cast<int32_t>(sampled[i]);
    ++batch->num_computed[row];
  }
}
