// Packs weights and cuts a linear layer into tasks; the arithmetic is in isa/linear.cpp, the layout in linear.h.
#include "linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "common.h"
#include "linear_pair.h"
#include "pack.h"
#include "program.h"
#include "read_ahead.h"
#include "thread_pool.h"

namespace {

// Minimum size of a task, in weights times rows: about 5 us of work, and 0.5 us for tasks that a thread takes from its
// own share. Smaller ones cost more to hand out than they save.
constexpr int64_t kMinTask = 64 << 10, kMinOwnTask = 16 << 10;

// Up to this many rows the time is that of reading the weights, and tasks are smaller.
constexpr int64_t kFewRows = 4;

// Maximum blocks whose sums a task by tiles keeps, up to 2 MiB.
constexpr int64_t kMaxSummedBlocks = 64;
constexpr int64_t kWideBlocks = 16;

// Alignment of the integers of rows: tiles read whole cache lines.
constexpr int64_t kLine = 64;

// Maximum bytes of rows that each thread prefetches before its first task.
constexpr int64_t kMaxShared = 4096;

// The same as kMinTask for quantizing, in inputs; about 5 us.
constexpr int64_t kMinQuantized = 32 << 10;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// One pair of inputs of one output, or one input, is one word: 2 bfloat16, 1 float32 or 1 float16.
bool short_words(int32_t type) {
  return type == kFloat16;
}

template <class Word>
void unpack_row(const char* column, int64_t row_bytes, char* row) {
  constexpr int64_t kSize = sizeof(Word);
  const int64_t num_words = row_bytes / kSize;
  for (int64_t i = 0; i < num_words; ++i) std::memcpy(row + i * kSize, column + i * kBlock * kSize, kSize);
  std::memcpy(row + num_words * kSize, column + num_words * kBlock * kSize, static_cast<size_t>(row_bytes % kSize));
}

// Division of rows into parts of whole units, at most `most` rows each; each part has its own panel of quantized rows.
struct RowParts {
  int64_t num_rows;
  int64_t most;
  int64_t unit = 1;
  int64_t count = ceil_div(num_rows, most);

  int64_t first(int64_t part) const {
    if (count == 1) return part * num_rows;
    const int64_t row = ceil_div(part * num_rows, count * unit) * unit;
    return row < num_rows ? row : num_rows;
  }
};

// Whether tiles compute tasks of up to kMaxTileRows rows and any number of blocks.
bool fits_wide_tiles(const PackedWeight& weight, int32_t x_type) {
  return is_amx(isa()) && !is_grouped(weight.type) && fits_tiles(weight, x_type);
}

// Maximum rows, and blocks, of a task by tiles that copies its rows first.
int64_t most_rows(int64_t num_inputs) {
  return num_inputs > kSpanInputs / 2 ? kMaxTileRows / 2 : kMaxTileRows;
}
int64_t most_blocks(int64_t num_inputs, int64_t num_blocks) {
  return num_inputs > kSpanInputs ? kMaxSummedBlocks : num_blocks;
}

// Rows of a task by tiles that copies them first: few enough that each thread gets two tasks of kWideBlocks blocks.
int64_t most_tile_rows(const LinearCall& call) {
  const int64_t num_blocks = ceil_div(call.weight->num_outputs, kBlock), threads = vllm_lite::num_threads();
  int64_t most = most_rows(call.weight->num_inputs);
  if (threads == 1) return most;
  while (most > kTilesInPlace && ceil_div(call.num_rows, most) * ceil_div(num_blocks, kWideBlocks) < 2 * threads)
    most /= 2;
  return most;
}

// Division of the blocks of outputs into parts; the unit is two blocks if two are multiplied at a time.
struct ColumnParts {
  int64_t num_blocks, unit, count;
  int64_t num_units = ceil_div(num_blocks, unit);

  int64_t first(int64_t part) const {
    const int64_t block = part * num_units / count * unit;
    return block < num_blocks ? block : num_blocks;
  }
};

bool by_thread(const LinearCall& call) {
  return call.num_rows <= kFewRows || call.panel != nullptr;
}

// Wide tasks read x once for many blocks; with many rows, reading x is a fifth of a narrow task's time. There are
// several tasks per thread, so that all threads finish at about the same time.
ColumnParts column_parts(const LinearCall& call, const RowParts& rows) {
  const int64_t num_blocks = ceil_div(call.weight->num_outputs, kBlock),
                unit = call.num_rows < kManyRows || call.panel != nullptr ? 1 : 2;
  const int64_t num_units = ceil_div(num_blocks, unit), each = by_thread(call) ? 8 : 4;
  const int64_t wanted = vllm_lite::num_threads() == 1 ? 1 : each * vllm_lite::num_threads();
  const int64_t least = ceil_div(by_thread(call) ? kMinOwnTask : kMinTask,
                                 unit * kBlock * call.weight->num_inputs * ceil_div(call.num_rows, rows.count));
  int64_t width = num_units * rows.count / wanted;
  width = width < least ? least : width;
  width = width < 1 ? 1 : width > kMaxBlocks / unit ? kMaxBlocks / unit : width;
  // A multiple of the number of threads, so that all have equally many.
  const int64_t count = ceil_div(ceil_div(num_units, width), vllm_lite::num_threads()) * vllm_lite::num_threads();
  return {num_blocks, unit, count < num_units ? count : num_units};
}

// The same for tiles whose tasks copy their rows first: as wide as possible, with two tasks per thread, and as long as
// the sums, which are kept from one span of inputs to the next, fit into L2.
ColumnParts tile_column_parts(const LinearCall& call, const RowParts& rows) {
  const int64_t num_blocks = ceil_div(call.weight->num_outputs, kBlock), threads = vllm_lite::num_threads();
  const int64_t most = most_blocks(call.weight->num_inputs, num_blocks);
  const int64_t few = std::max(ceil_div(num_blocks, most), threads > 1 ? ceil_div(2 * threads, rows.count) : 1);
  const int64_t least = std::min(few, num_blocks), end = std::min(2 * least, num_blocks);
  int64_t count = least;  // or the next number, up to twice as many, that all threads share evenly
  while (count < end && count * rows.count % threads != 0) ++count;
  return {num_blocks, 1, count * rows.count % threads == 0 ? count : least};
}

// Memory for the rows of `call` as integers, valid until this thread's next call with the same `place`, 0 or 1.
QuantizedRows quantized_rows(const LinearCall& call, int place) {
  static thread_local Scratch scratches[2];
  Scratch& scratch = scratches[place];
  const RowLayout layout = RowLayout::of(*call.weight);
  char* memory = scratch.get(call.num_rows * layout.row_bytes() + kLine);
  const uintptr_t values = reinterpret_cast<uintptr_t>(QuantizedRows::in(memory, call.num_rows, layout).values);
  return QuantizedRows::in(memory + -values % kLine, call.num_rows, layout);
}

void fill_quantized(const LinearCall& call, const RowParts& parts) {
  const auto quantize_rows = VLLM_LITE_DISPATCH_TILES(quantize_rows);
  const RowLayout& layout = call.quantized->layout;
  const int64_t num_groups = layout.num_groups, panel_rows = ceil_div(call.num_rows, parts.count);
  // Two tasks for each thread if there is enough work: wide ones quantize the most groups at a time.
  const int64_t least = ceil_div(kMinQuantized, layout.group_size * panel_rows);
  const int64_t most = std::max(least, ceil_div(num_groups * parts.count, 2 * vllm_lite::num_threads()));
  const int64_t group_parts = ceil_div(num_groups, most), width = ceil_div(num_groups, group_parts);
  vllm_lite::parallel_for(parts.count * group_parts, [&](int64_t number) {
    const int64_t part = number / group_parts, first_row = parts.first(part), rows = parts.first(part + 1) - first_row;
    const int64_t first_group = number % group_parts * width, left = num_groups - first_group;
    quantize_rows(call, {first_row, rows, first_group, left < width ? left : width, false});
  });
}

// Whether multiplying takes about as long as reading the weights. If so, the rows are copied into a panel.
bool are_streamed(const LinearCall& call) {
  const bool are_pairs = call.x_type == kBFloat16 && call.weight->type == kBFloat16 && call.weight->num_inputs % 2 == 0;
  return isa() == Isa::kAvx512Bf16 && are_pairs && call.num_rows >= kManyRows && call.num_rows <= kStreamedRows;
}

// Copies the rows of `call` into a panel, whose memory is valid until this thread's next call. Used in place, rows at a
// distance of a power of two would evict each other from L1.
const void* panel_of(const LinearCall& call) {
  static thread_local Scratch scratch;
  const int64_t num_inputs = call.weight->num_inputs, num_tiles = ceil_div(num_inputs, kPanelInputs);
  char* panel = scratch.get(num_tiles * call.num_rows * kPanelInputs * 2 + kLine);
  panel += -reinterpret_cast<uintptr_t>(panel) % kLine;
  char* to = panel;
  for (int64_t input = 0; input < num_inputs; input += kPanelInputs) {
    const int64_t left = num_inputs - input, count = left < kPanelInputs ? left : kPanelInputs;
    for (int64_t row = 0; row < call.num_rows; ++row, to += kPanelInputs * 2) {
      const char* from = static_cast<const char*>(call.x) + (row * call.x_stride + input) * 2;
      std::memcpy(to, from, static_cast<size_t>(count * 2));
    }
  }
  return panel;
}

// The same call, with its rows in a panel if that is faster.
LinearCall with_panel(LinearCall call) {
  if (are_streamed(call)) call.panel = panel_of(call);
  return call;
}

// The words of one output of a packed weight that is not grouped.
void copy_output(const PackedWeight& weight, int64_t output, char* row) {
  const int64_t row_bytes = weight.num_inputs * element_size(weight.type);
  const char* block =
      static_cast<const char*>(weight.data) + output / kBlock * packed_block_bytes(weight.num_inputs, weight.type);
  if (short_words(weight.type)) return unpack_row<uint16_t>(block + output % kBlock * 2, row_bytes, row);
  unpack_row<uint32_t>(block + output % kBlock * 4, row_bytes, row);
}

// Whether tasks by tiles copy the rows of `call` first.
bool are_wide(const LinearCall& call) {
  return call.num_rows > kTilesInPlace && fits_wide_tiles(*call.weight, call.x_type);
}

RowParts row_parts(const LinearCall& call) {
  const PackedWeight& weight = *call.weight;
  const bool are_grouped = is_amx(isa()) && is_grouped(weight.type) && fits_tiles(weight, call.x_type);
  const int64_t by_vectors = quantizes_rows(weight) ? kMaxByteRows : kMaxRows;
  const int64_t most = are_wide(call) ? most_tile_rows(call) : are_grouped ? kMaxGroupedRows : by_vectors;
  return {call.num_rows, most, are_wide(call) || are_grouped ? kTileGroup : 1};
}

// A product as the body of a job. It has all that a task reads beside rows and weights in a few adjacent lines, which
// another thread gets at once (thread_pool.cpp).
struct alignas(64) Product {
  LinearCall call;
  QuantizedRows quantized = {};
  RowParts parts;
  ColumnParts columns;
  void (*multiply)(const LinearCall& call, const LinearTask& task);
  int64_t block_bytes;
  bool own_parts;                 // whether each thread has a consecutive part of the columns
  const Product* then = nullptr;  // what a thread computes after its part; nullptr: the program's next product

  // Quantizes or copies the rows. `place`: see quantized_rows.
  explicit Product(const LinearCall& given, int place = 0)
      : call(with_panel(given)),
        parts(row_parts(call)),
        columns(are_wide(call) ? tile_column_parts(call, parts) : column_parts(call, parts)),
        multiply(call.panel != nullptr ? VLLM_LITE_DISPATCH(linear_streamed) : VLLM_LITE_DISPATCH_TILES(linear)),
        block_bytes(::block_bytes(*call.weight)),
        own_parts(by_thread(call)) {
    if (!quantizes_rows(*call.weight)) return;
    quantized = quantized_rows(call, place);
    call.quantized = &quantized;
    fill_quantized(call, parts);
  }
  Product(const Product&) = delete;

  // Up to kMaxShared bytes of few rows, as they are multiplied.
  vllm_lite::Memory rows() const {
    if (!own_parts || call.panel != nullptr) return {};
    const int64_t row_bytes =
        call.quantized ? quantized.layout.row_bytes() : call.weight->num_inputs * element_size(call.x_type);
    const int64_t bytes = call.num_rows * row_bytes;
    const void* from = call.quantized ? static_cast<const void*>(quantized.scales) : call.x;
    return {from, static_cast<int32_t>(bytes < kMaxShared ? bytes : kMaxShared)};
  }

  // Parts of rows change fastest, so that the weights of one part of the columns stay in the cache for all rows. With
  // few rows, the blocks of a thread follow each other: it prefetches its own next blocks, and computes with them next.
  void operator()(int64_t number, int thread) const {
    // A task of one row may take 0.3 us, of which each division would be a hundredth.
    const int64_t part = parts.count == 1 ? number : number / parts.count, rows = number - part * parts.count;
    const int64_t first_row = parts.first(rows), end_row = parts.first(rows + 1), first = columns.first(part);
    LinearTask task = {first_row, end_row - first_row, first, columns.first(part + 1) - first};
    if (own_parts) task.read_on = read_on(part, thread);
    multiply(call, task);
  }

 private:
  // The memory that thread `thread` prefetches after the task with `part` of the columns: up to the end of its own
  // tasks (of this task, if it was another thread's), and then the weights of its part of the next product.
  ReadOn read_on(int64_t part, int thread) const {
    const int64_t threads = vllm_lite::num_threads(), begin = first_part(thread), end = first_part(thread + 1);
    const char* next =
        then ? then->block(then->first_part(thread)) : vllm_lite::next_read(thread, static_cast<int>(threads));
    return {block(part >= begin && part < end ? end : part + 1), next, vllm_lite::are_cached()};
  }

  // The first part of the columns that is a thread's own, and where the weights of a part begin.
  int64_t first_part(int64_t thread) const { return columns.count * thread / vllm_lite::num_threads(); }
  const char* block(int64_t part) const {
    return static_cast<const char*>(call.weight->data) + columns.first(part) * block_bytes;
  }
};

// Two products of the same rows as the body of a job. A thread's part of the tasks is its part of both.
struct Pair {
  Product first, second;
  int64_t first_each, second_each;  // tasks of a thread's part

  Pair(const LinearCall& one, const LinearCall& other) : first(one, 0), second(other, 1) {
    first.then = &second;
    const int64_t threads = vllm_lite::num_threads();  // may have changed after are_pair
    const bool divides = first.columns.count % threads == 0 && second.columns.count % threads == 0;
    first_each = first.columns.count / (divides ? threads : 1);
    second_each = second.columns.count / (divides ? threads : 1);
  }

  void operator()(int64_t number, int thread) const {
    const int64_t owner = number / (first_each + second_each), own = number - owner * (first_each + second_each);
    own < first_each ? first(owner * first_each + own, thread) : second(owner * second_each + own - first_each, thread);
  }
};

// The arguments of vllm_lite_linear, as a program has recorded them.
LinearCall recorded_call(const uint64_t* words) {
  using vllm_lite::from_word;
  return {from_word<const PackedWeight*>(words[0]),
          from_word<const void*>(words[1]),
          from_word<int64_t>(words[2]),
          from_word<void*>(words[4]),
          from_word<int64_t>(words[5]),
          from_word<int64_t>(words[7]),
          from_word<int32_t>(words[3]),
          from_word<int32_t>(words[6]),
          nullptr};
}

}  // namespace

WideTiles wide_tiles(const LinearCall& call) {
  if (call.num_rows <= kTilesInPlace || !fits_wide_tiles(*call.weight, call.x_type)) return {};
  const int64_t num_inputs = call.weight->num_inputs, num_blocks = ceil_div(call.weight->num_outputs, kBlock);
  return {most_rows(num_inputs), most_blocks(num_inputs, num_blocks)};
}

int64_t block_bytes(const PackedWeight& weight) {
  if (!is_grouped(weight.type)) return packed_block_bytes(weight.num_inputs, weight.type);
  const CellLayout layout = CellLayout::of(weight);
  return layout.groups(weight.num_inputs) * layout.bytes();
}

// Number of elements of a packed weight that is not grouped.
VLLM_LITE_API int64_t vllm_lite_packed_size(int64_t num_outputs, int64_t num_inputs) {
  return ceil_div(num_outputs, kBlock) * kBlock * padded_inputs(num_inputs);
}

// Packs rows [num_outputs][num_inputs] of DType `type` into `packed`, which must be zero.
VLLM_LITE_API void vllm_lite_pack(const void* rows, int64_t stride, int32_t type, int64_t num_outputs,
                                  int64_t num_inputs, void* packed) {
  const int64_t block_bytes = packed_block_bytes(num_inputs, type);
  vllm_lite::parallel_for(ceil_div(num_outputs, kBlock), [=](int64_t number) {
    const int64_t first = number * kBlock, left = num_outputs - first, count = left < kBlock ? left : kBlock;
    const char* from = static_cast<const char*>(rows) + first * stride * element_size(type);
    pack_rows({from, stride, count, num_inputs, type}, static_cast<char*>(packed) + number * block_bytes);
  });
}

// Unpacks the rows of ids [count] to `rows`, of DType `type`: an embedding from a packed LM head. A weight that is not
// grouped must have that type. The weight has the rows of num_outputs ids, from first_id on, of a vocabulary of
// num_ids; rows of other ids become zero. Returns -1. If an id is outside of the vocabulary, writes nothing and returns
// the index of the first such id.
VLLM_LITE_API int64_t vllm_lite_unpack(const PackedWeight* weight, int64_t first_id, int64_t num_ids,
                                       const int64_t* ids, int64_t count, void* rows, int64_t stride, int32_t type) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= num_ids) return i;
  }
  const int64_t size = element_size(type);
  const auto unpack_output = VLLM_LITE_DISPATCH(unpack_output);
  vllm_lite::parallel_for(count, [=](int64_t i) {
    const int64_t output = ids[i] - first_id;
    char* row = static_cast<char*>(rows) + i * stride * size;
    if (output < 0 || output >= weight->num_outputs) {
      std::memset(row, 0, static_cast<size_t>(weight->num_inputs * size));
    } else if (is_grouped(weight->type)) {
      unpack_output(*weight, output, type, row);
    } else {
      copy_output(*weight, output, row);
    }
  });
  return -1;
}
VLLM_LITE_RECORDABLE(vllm_lite_unpack)

// x_type is a DType up to kFloat16; out_type is the same or kFloat32.
VLLM_LITE_API void vllm_lite_linear(const PackedWeight* weight, const void* x, int64_t x_stride, int32_t x_type,
                                    void* out, int64_t out_stride, int32_t out_type, int64_t num_rows) {
  if (num_rows <= 0) return;
  const Product product({weight, x, x_stride, out, out_stride, num_rows, x_type, out_type, nullptr});
  const vllm_lite::Order order = product.own_parts ? vllm_lite::Order::kByThread : vllm_lite::Order::kFirst;
  vllm_lite::parallel_for_indexed(product.columns.count * product.parts.count, product, order, product.rows());
}
VLLM_LITE_RECORDABLE(vllm_lite_linear)

bool are_pair(const uint64_t* first, const uint64_t* second) {
  const LinearCall one = recorded_call(first), other = recorded_call(second);
  const int64_t threads = vllm_lite::num_threads();
  const auto divides = [&](const LinearCall& call) {
    return ceil_div(call.weight->num_outputs, kBlock) % threads == 0;
  };
  const bool same_rows = one.x == other.x && one.x_stride == other.x_stride && one.num_rows == other.num_rows;
  return same_rows && threads > 1 && one.num_rows > 0 && one.num_rows <= kFewRows && divides(one) && divides(other);
}

void linear_pair(const uint64_t* first, const uint64_t* second) {
  const Pair pair(recorded_call(first), recorded_call(second));
  const int64_t num_tasks = pair.first.columns.count + pair.second.columns.count;
  vllm_lite::parallel_for_indexed(num_tasks, pair, vllm_lite::Order::kByThread, pair.first.rows());
}

VLLM_LITE_API int32_t vllm_lite_multiplies_bytes() {
  return VLLM_LITE_DISPATCH(multiplies_bytes)() ? 1 : 0;
}

// Reads num_bytes with all threads, for measuring memory bandwidth. The result depends on what was read.
VLLM_LITE_API int64_t vllm_lite_read(const void* data, int64_t num_bytes) {
  constexpr int64_t kPart = 1 << 20;
  const auto read_all = VLLM_LITE_DISPATCH(read_all);
  std::atomic<int64_t> total{0};
  vllm_lite::parallel_for(ceil_div(num_bytes, kPart), [&](int64_t part) {
    const int64_t start = part * kPart, left = num_bytes - start;
    total ^= read_all(static_cast<const char*>(data) + start, left < kPart ? left : kPart);
  });
  return total;
}

// Multiplies registers with all threads, in DType `type`, to measure the maximum speed of products.
// Returns the number of multiplications and additions.
VLLM_LITE_API int64_t vllm_lite_multiply(int32_t type, int64_t rounds) {
  const auto multiply = VLLM_LITE_DISPATCH_TILES(multiply_registers);
  std::atomic<int64_t> total{0};
  vllm_lite::parallel_for(vllm_lite::num_threads(), [&](int64_t) {
    float x[64] = {};
    total += multiply(type, rounds, x);
  });
  return total;
}
