// The tile registers of AMX: 8 matrices of up to 16 rows of 64 bytes, and instructions that add the product of two to a
// third.
//
// With VLLM_LITE_EMULATED_TILES the same operations are plain C++ that follows Intel's manual (Software Developer's
// Manual, volume 2, TDPBF16PS and TDPBSUD; the order of additions, denormals as zeros), so that kernels are tested on
// machines without AMX. In a comparison with a processor all results had the same bits, except for the kind of NaN. A
// tile's number must be a literal. TILE_LOAD_ONCE reads from L2 without evicting data from L1.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "simd.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileRowBytes = 64;

// The operand of LDTILECFG, which also sets all tiles to zero.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t num_rows, int64_t num_bytes = kTileRowBytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(num_rows == 0 ? 0 : num_bytes);
  }
};
static_assert(sizeof(TileShapes) == 64, "as the instruction reads it");

#if defined(VLLM_LITE_EMULATED_TILES)

struct EmulatedTile {
  int64_t num_rows = 0, row_bytes = 0;
  alignas(64) char bytes[kTileRows][kTileRowBytes];
};
thread_local EmulatedTile tiles[8];

// A tile that must have rows; a processor would raise an invalid-instruction fault.
inline EmulatedTile& shaped(int number) {
  if (tiles[number].num_rows == 0) std::abort();
  return tiles[number];
}

inline void shape_tiles(const TileShapes* shapes) {
  for (int i = 0; i < 8; ++i) {
    tiles[i].num_rows = shapes->rows[i];
    tiles[i].row_bytes = shapes->row_bytes[i];
    std::memset(tiles[i].bytes, 0, sizeof tiles[i].bytes);
  }
}
inline void load_tile(EmulatedTile& tile, const void* from, int64_t stride) {
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    std::memcpy(tile.bytes[row], static_cast<const char*>(from) + row * stride, static_cast<size_t>(tile.row_bytes));
  }
}
inline void store_tile(const EmulatedTile& tile, void* to, int64_t stride) {
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, tile.bytes[row], static_cast<size_t>(tile.row_bytes));
  }
}
inline float without_denormals(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}

// sum + x * w, with denormal results as zero. A result is denormal if it is below 2^-126 when it is rounded with an
// unlimited exponent; fma() rounds it to fewer bits, which may round it up to 2^-126.
inline float add_product(float sum, float x, float w) {
  const float total = std::fma(x, w, sum);
  if (std::fabs(total) == 0x1p-126f && std::fabs(std::fma(x * 0x1p24f, w, sum * 0x1p24f)) < 0x1p-102f) {
    return std::copysign(0.0f, total);
  }
  return without_denormals(total);
}

// total [rows][16] of float += a [rows][16 pairs] of bfloat16 times b [16 pairs][16]; even and odd inputs are summed up
// separately.
inline void dot_tiles_bf16(EmulatedTile& total, const EmulatedTile& a, const EmulatedTile& b) {
  for (int64_t row = 0; row < total.num_rows; ++row) {
    float sums[2][kTileRows] = {}, all[kTileRows];
    for (int64_t k = 0; k < b.num_rows; ++k) {
      BFloat16 x[2], w[2 * kTileRows];
      std::memcpy(x, a.bytes[row] + 4 * k, sizeof x);
      std::memcpy(w, b.bytes[k], sizeof w);
      for (int64_t n = 0; n < 2 * kTileRows; ++n) {
        float& sum = sums[n % 2][n / 2];
        sum = add_product(sum, without_denormals(to_float(x[n % 2])), without_denormals(to_float(w[n])));
      }
    }
    std::memcpy(all, total.bytes[row], sizeof all);
    for (int64_t n = 0; n < kTileRows; ++n) {
      all[n] = without_denormals(without_denormals(all[n]) + without_denormals(sums[0][n] + sums[1][n]));
    }
    std::memcpy(total.bytes[row], all, sizeof all);
  }
}

// total [rows][16] of int32 += a [rows][16 groups of 4] of int8 times b [16 groups][16][4] of uint8.
inline void dot_tiles_int8(EmulatedTile& total, const EmulatedTile& a, const EmulatedTile& b) {
  for (int64_t row = 0; row < total.num_rows; ++row) {
    int32_t sums[kTileRows];
    std::memcpy(sums, total.bytes[row], sizeof sums);
    for (int64_t k = 0; k < b.num_rows; ++k) {
      for (int64_t n = 0; n < 4 * kTileRows; ++n) {
        sums[n / 4] += static_cast<int8_t>(a.bytes[row][4 * k + n % 4]) * static_cast<uint8_t>(b.bytes[k][n]);
      }
    }
    std::memcpy(total.bytes[row], sums, sizeof sums);
  }
}

#define TILES_SHAPE(shapes) shape_tiles(shapes)
#define TILES_RELEASE() (void)0
#define TILE_ZERO(tile) std::memset(shaped(tile).bytes, 0, sizeof tiles[tile].bytes)
#define TILE_LOAD(tile, from, stride) load_tile(shaped(tile), from, stride)
#define TILE_LOAD_ONCE(tile, from, stride) TILE_LOAD(tile, from, stride)
#define TILE_STORE(tile, to, stride) store_tile(shaped(tile), to, stride)
#define TILE_DOT_BF16(total, a, b) dot_tiles_bf16(shaped(total), shaped(a), shaped(b))
#define TILE_DOT_INT8(total, a, b) dot_tiles_int8(shaped(total), shaped(a), shaped(b))
#define TILES_FENCE() (void)0

#else

#define TILES_SHAPE(shapes) _tile_loadconfig(shapes)
#define TILES_RELEASE() _tile_release()
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_LOAD_ONCE(tile, from, stride) _tile_stream_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_DOT_BF16(total, a, b) _tile_dpbf16ps(total, a, b)
#define TILE_DOT_INT8(total, a, b) _tile_dpbsud(total, a, b)
// Trap: GCC does not know that a tile load reads memory, so this must stand between writes of that memory and the load.
#define TILES_FENCE() asm volatile("" ::: "memory")

#endif

// ---- tiles 0 to 3 as sums: [32 or 16 rows][32], with the first 16 rows in 0 and 1. Strides are in elements.

template <bool kTwo>
VLLM_LITE_INLINE void load_sums(const float* from, int64_t stride) {
  TILE_LOAD(0, from, stride * 4);
  TILE_LOAD(1, from + kTileRows, stride * 4);
  if constexpr (kTwo) {
    TILE_LOAD(2, from + kTileRows * stride, stride * 4);
    TILE_LOAD(3, from + kTileRows * stride + kTileRows, stride * 4);
  }
}

template <bool kTwo, class T>
VLLM_LITE_INLINE void store_sums(T* to, int64_t stride) {
  TILE_STORE(0, to, stride * 4);
  TILE_STORE(1, to + kTileRows, stride * 4);
  if constexpr (kTwo) {
    TILE_STORE(2, to + kTileRows * stride, stride * 4);
    TILE_STORE(3, to + kTileRows * stride + kTileRows, stride * 4);
  }
}

// The same sums tile by tile, [2 or 4][16][16], which is faster to store and load.
constexpr int64_t kTileSums = kTileRows * kTileRows;

template <bool kTwo>
VLLM_LITE_INLINE void load_tile_sums(const float* from) {
  TILE_LOAD_ONCE(0, from, kTileRowBytes);
  TILE_LOAD_ONCE(1, from + kTileSums, kTileRowBytes);
  if constexpr (kTwo) {
    TILE_LOAD_ONCE(2, from + 2 * kTileSums, kTileRowBytes);
    TILE_LOAD_ONCE(3, from + 3 * kTileSums, kTileRowBytes);
  }
}

template <bool kTwo, class T>
VLLM_LITE_INLINE void store_tile_sums(T* to) {
  TILE_STORE(0, to, kTileRowBytes);
  TILE_STORE(1, to + kTileSums, kTileRowBytes);
  if constexpr (kTwo) {
    TILE_STORE(2, to + 2 * kTileSums, kTileRowBytes);
    TILE_STORE(3, to + 3 * kTileSums, kTileRowBytes);
  }
}

// Index at which kTileRows sums of a row begin in that layout.
VLLM_LITE_INLINE int64_t sums_at(int64_t row, int64_t half) {
  return (row / kTileRows * 2 + half) * kTileSums + row % kTileRows * kTileRows;
}

// Trap: a tile that has no rows must not be used, not even set to zero.
template <bool kTwo>
VLLM_LITE_INLINE void zero_sums() {
  TILE_ZERO(0);
  TILE_ZERO(1);
  if constexpr (kTwo) {
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
}

}  // namespace
}  // namespace VLLM_LITE_ISA
