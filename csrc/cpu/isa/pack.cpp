// Transposes rows to columns, in tiles that stay in registers, and converts elements between types.
#include "../pack.h"

#include "../linear.h"
#include "simd.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int64_t kTile = 8;  // words of a row, and rows, of a tile

typedef uint32_t Words __attribute__((vector_size(kTile * 4)));

#define VLLM_LITE_MIX(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)

// Transposes eight words of eight rows.
VLLM_LITE_INLINE void transpose(const char* rows, int64_t stride, char* columns, int64_t column_bytes) {
  Words row[kTile], pair[kTile], quad[kTile];
  for (int64_t i = 0; i < kTile; ++i) std::memcpy(&row[i], rows + i * stride, sizeof(Words));
  for (int64_t i = 0; i < kTile; i += 2) {
    pair[i] = VLLM_LITE_MIX(row[i], row[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pair[i + 1] = VLLM_LITE_MIX(row[i], row[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int64_t i = 0; i < kTile; i += 4) {
    for (int64_t j = 0; j < 2; ++j) {
      quad[i + 2 * j] = VLLM_LITE_MIX(pair[i + j], pair[i + 2 + j], 0, 1, 8, 9, 4, 5, 12, 13);
      quad[i + 2 * j + 1] = VLLM_LITE_MIX(pair[i + j], pair[i + 2 + j], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int64_t i = 0; i < 4; ++i) {
    const Words low = VLLM_LITE_MIX(quad[i], quad[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    const Words high = VLLM_LITE_MIX(quad[i], quad[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    std::memcpy(columns + i * column_bytes, &low, sizeof low);
    std::memcpy(columns + (i + 4) * column_bytes, &high, sizeof high);
  }
}

// Copies the rows' words from `first` on, and an incomplete last word.
template <class Word>
void pack_rest(const char* rows, int64_t stride, int64_t num_rows, int64_t row_bytes, int64_t first, char* block) {
  constexpr int64_t kSize = sizeof(Word), kLine = 64 / kSize;
  const int64_t num_words = row_bytes / kSize, rest = row_bytes % kSize;
  for (; first < num_words; first += kLine) {  // a cache line of each row at a time, so that each line is read once
    const int64_t end = first + kLine < num_words ? first + kLine : num_words;
    for (int64_t row = 0; row < num_rows; ++row) {
      for (int64_t i = first; i < end; ++i) {
        std::memcpy(block + (i * kBlock + row) * kSize, rows + row * stride + i * kSize, kSize);
      }
    }
  }
  for (int64_t row = 0; rest > 0 && row < num_rows; ++row) {
    const char* last = rows + row * stride + num_words * kSize;
    std::memcpy(block + (num_words * kBlock + row) * kSize, last, static_cast<size_t>(rest));
  }
}

template <class From, class To>
void convert_all(const void* from, void* to, int64_t count) {
  const From* source = static_cast<const From*>(from);
  To* target = static_cast<To*>(to);
  for (int64_t i = 0; i < count; ++i) from_float(to_float(source[i]), target + i);
}

template <class From>
void convert_to(const void* from, void* to, int32_t to_type, int64_t count) {
  if (to_type == kFloat32) return convert_all<From, float>(from, to, count);
  if (to_type == kFloat16) return convert_all<From, Float16>(from, to, count);
  convert_all<From, BFloat16>(from, to, count);
}

}  // namespace

void pack_words(const char* rows, int64_t stride, int64_t num_rows, int64_t row_bytes, int64_t word_bytes,
                char* block) {
  if (word_bytes == 2) return pack_rest<uint16_t>(rows, stride, num_rows, row_bytes, 0, block);
  int64_t first = 0;
  if (num_rows == kBlock) {
    for (; (first + kTile) * 4 <= row_bytes; first += kTile) {
      for (int64_t row = 0; row < kBlock; row += kTile) {
        transpose(rows + row * stride + first * 4, stride, block + (first * kBlock + row) * 4, kBlock * 4);
      }
    }
  }
  pack_rest<uint32_t>(rows, stride, num_rows, row_bytes, first, block);
}

void convert(const void* from, int32_t from_type, void* to, int32_t to_type, int64_t count) {
  if (from_type == kFloat32) return convert_to<float>(from, to, to_type, count);
  if (from_type == kFloat16) return convert_to<Float16>(from, to, to_type, count);
  convert_to<BFloat16>(from, to, to_type, count);
}

}  // namespace VLLM_LITE_ISA
