// Grouped weights times rows that were quantized: bytes times integers within a group, and between groups float32.
//
// A few rows stream through the cells as they lie in memory: codes of 4 bits become bytes in registers. For more rows a
// tile is turned once into cells of bytes with float32 scales, which stay in L1 for all groups of rows. Both are the
// same operations in the same order for each output.
#include "grouped_cells.h"
#include "linear_task.h"

namespace VLLM_LITE_ISA {
namespace {

#if defined(__AVX512VNNI__)
constexpr int kGroup = 12;      // rows at a time: two sums each, and some weights, fill the registers
constexpr int64_t kTile = 512;  // inputs: a tile of a block's weights stays in L1 for all groups of rows
constexpr int64_t kOctetBytes = 4 * kBlock;
constexpr int64_t kAheadBytes = 4096;

// Rows of a panel from the first input of a group on.
struct Rows {
  const int8_t* values;  // those of four inputs lie together, those of the next `stride` bytes behind
  int64_t stride;
  const float* scales;  // [rows][num_groups], like biases and sums
  const int32_t* biases;
  const float* sums;
  int64_t num_groups;

  Rows from(int64_t row) const {
    const int64_t group = row * num_groups;
    return {values + 4 * row, stride, scales + group, biases + group, sums + group, num_groups};
  }
};

// Cells of one block that follow one another.
struct Cells {
  const char* first;
  CellLayout layout;
  int64_t count;
  const uint8_t* table;  // [16] or nullptr
};

// The weights of eight inputs for 32 outputs as bytes: two vectors for the first four inputs, two for the others.
struct Octet {
  __m512i first[2], second[2];
};

// Codes of 4 bits that are bytes themselves.
struct Nibbles {
  static constexpr int64_t kBytes = kOctetBytes;
  explicit Nibbles(const uint8_t*) {}
  inline __attribute__((always_inline)) Octet load(const char* codes) const {
    const __m512i mask = _mm512_set1_epi8(15);
    Octet out;
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m512i both = _mm512_loadu_si512(codes + 64 * v);
      out.first[v] = _mm512_and_si512(both, mask);
      out.second[v] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    }
    return out;
  }
};

// Codes of 4 bits that stand for bytes of a table.
struct Looked {
  static constexpr int64_t kBytes = kOctetBytes;
  __m512i table;
  explicit Looked(const uint8_t* bytes)
      : table(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)))) {}
  inline __attribute__((always_inline)) Octet load(const char* codes) const {
    Octet out = Nibbles(nullptr).load(codes);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      out.first[v] = _mm512_shuffle_epi8(table, out.first[v]);
      out.second[v] = _mm512_shuffle_epi8(table, out.second[v]);
    }
    return out;
  }
};

struct Bytes {
  static constexpr int64_t kBytes = 2 * kOctetBytes;
  explicit Bytes(const uint8_t*) {}
  inline __attribute__((always_inline)) Octet load(const char* codes) const {
    Octet out;
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      out.first[v] = _mm512_loadu_si512(codes + 64 * v);
      out.second[v] = _mm512_loadu_si512(codes + kOctetBytes + 64 * v);
    }
    return out;
  }
};

VLLM_LITE_INLINE __m512i add_products(__m512i total, __m512i bytes, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm512_dpbusd_epi32(total, bytes, _mm512_set1_epi32(four));
}

// total [R][2] += the products of one group.
template <int R, class Codes, bool kAlone>
VLLM_LITE_INLINE void multiply_codes(const Codes& codes, const int8_t* x, int64_t stride, const char* from,
                                     int64_t num_octets, Ahead ahead, __m512i (&total)[R][2]) {
  for (int64_t octet = 0; octet < num_octets; ++octet, from += Codes::kBytes, x += 2 * stride) {
    if constexpr (kAlone) {
      prefetch<Codes::kBytes>({from + kAheadBytes, 0}, 0);
    } else {
      prefetch<64>(ahead, octet);
    }
    const Octet weights = codes.load(from);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) total[r][v] = add_products(total[r][v], weights.first[v], x + 4 * r);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) total[r][v] = add_products(total[r][v], weights.second[v], x + stride + 4 * r);
    }
  }
}

// sums [R][sums_stride] += total times the scales of weights and rows, minus minima times what rows add up to.
template <int R>
VLLM_LITE_INLINE void add_group(const Rows& rows, int64_t group, const char* cell, const CellLayout& layout,
                                const __m512i (&total)[R][2], float* sums, int64_t sums_stride) {
  const bool has_minima = layout.minima_type != kNoMinima;
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const __m512 scale = reinterpret_cast<__m512>(load_scales(cell, layout.scale_type, v * kWidth));
    __m512 minima = _mm512_setzero_ps();
    if (has_minima) {
      minima = reinterpret_cast<__m512>(load_scales(cell + layout.scale_bytes, layout.minima_type, v * kWidth));
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const int64_t place = r * rows.num_groups + group;
      float* sum = sums + r * sums_stride + v * kWidth;
      __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(total[r][v]), scale);
      value = _mm512_fmadd_ps(value, _mm512_set1_ps(rows.scales[place]), _mm512_loadu_ps(sum));
      if (has_minima) value = _mm512_fnmadd_ps(minima, _mm512_set1_ps(rows.sums[place]), value);
      _mm512_storeu_ps(sum, value);
    }
  }
}

// sums [R][sums_stride] += R rows times cells of one block. Rows that are alone ask for all that comes.
template <int R, class Codes, bool kAlone>
void multiply(const Rows& rows, const Cells& cells, float* sums, int64_t sums_stride, Ahead ahead) {
  const Codes codes(cells.table);
  const CellLayout layout = cells.layout;
  const int64_t num_octets = layout.group_size / 8, cell_bytes = layout.bytes();
  const int8_t* x = rows.values;
  const char* cell = cells.first;
  for (int64_t group = 0; group < cells.count; ++group, cell += cell_bytes) {
    if constexpr (kAlone) {
      for (int64_t i = 0; i < layout.codes(); i += 64) __builtin_prefetch(cell + kAheadBytes + i);
    }
    __m512i total[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      total[r][0] = total[r][1] = _mm512_set1_epi32(rows.biases[r * rows.num_groups + group]);
    }
    multiply_codes<R, Codes, kAlone>(codes, x, rows.stride, cell + layout.codes(), num_octets, ahead, total);
    add_group<R>(rows, group, cell, layout, total, sums, sums_stride);
    x += 2 * num_octets * rows.stride;
    ahead.from += num_octets * ahead.step;
  }
}

// For `count` rows, 1 <= count <= R.
template <int R, class Codes, bool kAlone>
void multiply_group(int64_t count, const Rows& rows, const Cells& cells, float* sums, int64_t sums_stride,
                    Ahead ahead) {
  if constexpr (R > 1) {
    if (count < R) return multiply_group<R - 1, Codes, kAlone>(count, rows, cells, sums, sums_stride, ahead);
  }
  multiply<R, Codes, kAlone>(rows, cells, sums, sums_stride, ahead);
}

// At most kGroup rows, on cells as they lie in memory.
void multiply_few(int64_t count, const Rows& rows, const Cells& cells, bool four, float* sums, int64_t sums_stride) {
  if (!four) return multiply_group<kGroup, Bytes, true>(count, rows, cells, sums, sums_stride, {});
  if (cells.table == nullptr) return multiply_group<kGroup, Nibbles, true>(count, rows, cells, sums, sums_stride, {});
  multiply_group<kGroup, Looked, true>(count, rows, cells, sums, sums_stride, {});
}

// All rows of a task; groups differ by one row at most. What is needed next lies at `next`, `octet_bytes` for each
// eight inputs.
void multiply_many(int64_t num_rows, const Rows& rows, const Cells& cells, float* sums, int64_t sums_stride,
                   const char* next, int64_t octet_bytes) {
  const int64_t num_groups = (num_rows + kGroup - 1) / kGroup, step = octet_bytes / num_groups;
  const int64_t num_octets = cells.count * cells.layout.group_size / 8;
  for (int64_t group = 0, row = 0; group < num_groups; ++group) {
    const int64_t end = (group + 1) * num_rows / num_groups;
    const Ahead ahead = {next + group * num_octets * step, step};
    multiply_group<kGroup, Bytes, false>(end - row, rows.from(row), cells, sums + row * sums_stride, sums_stride,
                                         ahead);
    row = end;
  }
}

template <class Codes>
VLLM_LITE_INLINE void unpack_codes(const Codes& codes, const char* from, int64_t num_octets, char* to) {
  for (int64_t octet = 0; octet < num_octets; ++octet, from += Codes::kBytes, to += Bytes::kBytes) {
    const Octet weights = codes.load(from);
    for (int v = 0; v < 2; ++v) {
      _mm512_storeu_si512(to + 64 * v, weights.first[v]);
      _mm512_storeu_si512(to + kOctetBytes + 64 * v, weights.second[v]);
    }
  }
}

// Cells as cells of bytes whose scales and minima are float32.
Cells unpack(const Cells& cells, bool four, char* to) {
  const CellLayout from = cells.layout;
  const int64_t group_size = from.group_size;
  const bool has_minima = from.minima_type != kNoMinima;
  const CellLayout wide = {group_size,          kBlock * 4, has_minima ? kBlock * 4 : 0,
                           kBlock * group_size, kFloat32,   has_minima ? kFloat32 : kNoMinima};
  for (int64_t group = 0; group < cells.count; ++group) {
    const char* cell = cells.first + group * from.bytes();
    char* into = to + group * wide.bytes();
    for (int64_t column = 0; column < kBlock; column += kWidth) {
      store(reinterpret_cast<float*>(into) + column, load_scales(cell, from.scale_type, column));
      if (!has_minima) continue;
      store(reinterpret_cast<float*>(into + wide.scale_bytes) + column,
            load_scales(cell + from.scale_bytes, from.minima_type, column));
    }
    const char* codes = cell + from.codes();
    if (!four) {
      unpack_codes(Bytes(nullptr), codes, group_size / 8, into + wide.codes());
    } else if (cells.table == nullptr) {
      unpack_codes(Nibbles(nullptr), codes, group_size / 8, into + wide.codes());
    } else {
      unpack_codes(Looked(cells.table), codes, group_size / 8, into + wide.codes());
    }
  }
  return {to, wide, cells.count, nullptr};
}

void run_tiles(const LinearCall& call, const LinearTask& task, float* sums) {
  const PackedWeight& weight = *call.weight;
  const QuantizedRows& all = *call.quantized;
  const CellLayout layout = CellLayout::of(weight);
  const int64_t num_groups = all.layout.num_groups, block_bytes = num_groups * layout.bytes();
  const bool few = task.num_rows <= kGroup, four = weight.type == kGrouped4;
  const int64_t length = few ? num_groups : kTile / layout.group_size, sums_stride = task.num_blocks * kBlock;
  const int64_t octet_bytes = layout.bytes() * 8 / layout.group_size;
  const char* blocks = static_cast<const char*>(weight.data) + task.first_block * block_bytes;
  alignas(64) char wide[kTile * kBlock + 2 * kTile / 16 * kBlock * 4];
  for (int64_t group = 0; group < num_groups; group += length) {
    const int64_t place = task.first_row * num_groups + group, left = num_groups - group;
    const Rows rows = {all.values + task.first_row * all.layout.width + group * layout.group_size * task.num_rows,
                       4 * task.num_rows,
                       all.scales + place,
                       all.biases + place,
                       all.sums + place,
                       num_groups};
    for (int64_t block = 0; block < task.num_blocks; ++block) {
      const char* tile = blocks + block * block_bytes + group * layout.bytes();
      const Cells cells = {tile, layout, left < length ? left : length, weight.bytes};
      float* block_sums = sums + block * kBlock;
      if (few) {
        multiply_few(task.num_rows, rows, cells, four, block_sums, sums_stride);
        continue;
      }
      const char* next = block + 1 < task.num_blocks   ? tile + block_bytes
                         : group + length < num_groups ? blocks + (group + length) * layout.bytes()
                                                       : tile;
      multiply_many(task.num_rows, rows, unpack(cells, four, wide), block_sums, sums_stride, next, octet_bytes);
    }
  }
}
#endif

template <class Out>
void unpack_to(const PackedWeight& weight, int64_t output, Out* to) {
  const CellLayout layout = CellLayout::of(weight);
  const int64_t num_groups = layout.groups(weight.num_inputs), column = output % kBlock;
  const char* cell = static_cast<const char*>(weight.data) + output / kBlock * num_groups * layout.bytes();
  const int64_t word = weight.type == kGrouped4 ? 8 : 4;  // inputs
  for (int64_t input = 0; input < weight.num_inputs; input += layout.group_size, cell += layout.bytes()) {
    const int64_t first = column / kWidth * kWidth, lane = column % kWidth;
    const float scale = load_scales(cell, layout.scale_type, first)[lane];
    float minimum = 0;
    if (layout.minima_type != kNoMinima) {
      minimum = load_scales(cell + layout.scale_bytes, layout.minima_type, first)[lane];
    }
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(cell + layout.codes()) + 4 * column;
    const int64_t left = weight.num_inputs - input, count = left < layout.group_size ? left : layout.group_size;
    for (int64_t i = 0; i < count; ++i) {
      const int byte = codes[i / word * 4 * kBlock + i % 4];
      const int code = word == 4 ? byte : i % 8 < 4 ? byte & 15 : byte >> 4;
      from_float(weight.values[code] * scale - minimum, to + input + i);
    }
  }
}

}  // namespace

void linear_grouped([[maybe_unused]] const LinearCall& call, [[maybe_unused]] const LinearTask& task) {
#if defined(__AVX512VNNI__)
  alignas(64) float sums[kMaxRows * kMaxBlocks * kBlock];
  const int64_t stride = task.num_blocks * kBlock;
  std::memset(sums, 0, static_cast<size_t>(task.num_rows * stride) * sizeof *sums);
  run_tiles(call, task, sums);
  if (call.out_type == kFloat32) return write<float>(call, task, sums, stride);
  if (call.x_type == kFloat16) return write<Float16>(call, task, sums, stride);
  write<BFloat16>(call, task, sums, stride);
#endif
}

void unpack_output(const PackedWeight& weight, int64_t output, int32_t type, void* to) {
  if (type == kFloat32) return unpack_to(weight, output, static_cast<float*>(to));
  if (type == kFloat16) return unpack_to(weight, output, static_cast<Float16*>(to));
  unpack_to(weight, output, static_cast<BFloat16*>(to));
}

}  // namespace VLLM_LITE_ISA
