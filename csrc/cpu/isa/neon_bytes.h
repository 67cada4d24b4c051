// Products of bytes and integers by NEON: dot products of four, or of eight with two rows at a time on machines that
// multiply matrices (i8mm). The Arm version of x86_bytes.h.
#pragma once

#include "../linear.h"
#include "simd.h"

namespace VLLM_LITE_ISA {
namespace {

typedef int8x16_t Ints;  // bytes, or kWidth sums

VLLM_LITE_INLINE Ints load_ints(const void* from) {
  return vld1q_s8(static_cast<const int8_t*>(from));
}
VLLM_LITE_INLINE Ints repeat_16(const void* from) {
  return load_ints(from);
}
VLLM_LITE_INLINE Ints all_ints(int32_t x) {
  return vreinterpretq_s8_s32(vdupq_n_s32(x));
}
VLLM_LITE_INLINE Ints all_bytes(int8_t x) {
  return vdupq_n_s8(x);
}
VLLM_LITE_INLINE Ints upper_halves(Ints x) {  // of each byte
  return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x), 4));
}
VLLM_LITE_INLINE Ints both_bits(Ints x, Ints y) {
  return vandq_s8(x, y);
}
VLLM_LITE_INLINE Ints add_bytes(Ints x, Ints y) {
  return vaddq_s8(x, y);
}
VLLM_LITE_INLINE Ints shuffle_bytes(Ints x, Ints places) {
  return vqtbl1q_s8(x, vreinterpretq_u8_s8(places));
}
// x, with 16 added to the bytes whose bits at `from` are set.
VLLM_LITE_INLINE Ints add_fifth_bits(Ints x, const char* from) {
  static constexpr uint8_t kPlaces[] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  static constexpr uint8_t kOwn[] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  const uint8x16_t spread = vqtbl1q_u8(vreinterpretq_u8_u16(vdupq_n_u16(bits)), vld1q_u8(kPlaces));
  const uint8x16_t are_set = vtstq_u8(spread, vld1q_u8(kOwn));
  return vaddq_s8(x, vreinterpretq_s8_u8(vandq_u8(are_set, vdupq_n_u8(16))));
}
VLLM_LITE_INLINE Ints widen_bytes(const char* from) {  // kWidth of them
  uint32_t four;
  std::memcpy(&four, from, sizeof four);
  return vreinterpretq_s8_u16(
      vreinterpretq_u16_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))))));
}
VLLM_LITE_INLINE Ints signed_bytes(Ints x) {
  return veorq_s8(x, vdupq_n_s8(INT8_MIN));
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

constexpr bool kSignedBytes = false;

VLLM_LITE_INLINE void add_products(Ints& total, Ints bytes, Ints integers) {
  total = vreinterpretq_s8_s32(vusdotq_s32(vreinterpretq_s32_s8(total), vreinterpretq_u8_s8(bytes), integers));
}

// Amount that kernels subtract from each byte: 0, because the instruction takes unsigned bytes.
VLLM_LITE_INLINE int32_t taken_off(const PackedWeight&) {
  return 0;
}

#else

constexpr bool kSignedBytes = true;

VLLM_LITE_INLINE void add_products(Ints& total, Ints bytes, Ints integers) {
  total = vreinterpretq_s8_s32(vdotq_s32(vreinterpretq_s32_s8(total), bytes, integers));
}

// Amount that kernels subtract from each byte to make it signed: 128 for codes that may exceed 127.
VLLM_LITE_INLINE int32_t taken_off(const PackedWeight& weight) {
  int32_t largest = weight.type == kGrouped8 ? 255 : 15;  // shifts add 48 at most, and fifth bits 16
  for (int i = 0; i < 16 && weight.bytes != nullptr; ++i)
    largest = weight.bytes[i] > largest ? weight.bytes[i] : largest;
  return largest > INT8_MAX - 48 ? 128 : 0;
}

#endif

// Rearranges the sums of two consecutive rows as matrices of two outputs and both rows, in the same two vectors, and
// back. An odd last row stays as it is, and so do all rows on machines that do not multiply matrices.
template <int R, int V>
VLLM_LITE_INLINE void pair_rows([[maybe_unused]] Ints (&total)[R][V]) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
#pragma GCC unroll 16
  for (int r = 0; r + 2 <= R; r += 2) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const int32x4_t first = vreinterpretq_s32_s8(total[r][v]), second = vreinterpretq_s32_s8(total[r + 1][v]);
      total[r][v] = vreinterpretq_s8_s32(vzip1q_s32(first, second));
      total[r + 1][v] = vreinterpretq_s8_s32(vzip2q_s32(first, second));
    }
  }
#endif
}
template <int R, int V>
VLLM_LITE_INLINE void part_rows([[maybe_unused]] Ints (&total)[R][V]) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
#pragma GCC unroll 16
  for (int r = 0; r + 2 <= R; r += 2) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const int32x4_t low = vreinterpretq_s32_s8(total[r][v]), high = vreinterpretq_s32_s8(total[r + 1][v]);
      total[r][v] = vreinterpretq_s8_s32(vuzp1q_s32(low, high));
      total[r + 1][v] = vreinterpretq_s8_s32(vuzp2q_s32(low, high));
    }
  }
#endif
}

VLLM_LITE_INLINE uint32_t four_bytes(const int8_t* x) {
  uint32_t four;
  std::memcpy(&four, x, sizeof four);
  return four;
}

// total[..][v], as pair_rows() leaves it, += the bytes of four inputs for kWidth outputs and of the next four inputs,
// times rows; place(r, half) is the address of row r's four integers.
template <int R, int V, class Place>
VLLM_LITE_INLINE void add_octet(Ints first, Ints second, const Place& place, int v, Ints (&total)[R][V]) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  constexpr int kPaired = R / 2 * 2;
  const int32x4_t a = vreinterpretq_s32_s8(first), b = vreinterpretq_s32_s8(second);
  const uint8x16_t low = vreinterpretq_u8_s32(vzip1q_s32(a, b)), high = vreinterpretq_u8_s32(vzip2q_s32(a, b));
#pragma GCC unroll 16
  for (int r = 0; r < kPaired; r += 2) {
    const uint32x4_t both = {four_bytes(place(r, 0)), four_bytes(place(r, 1)), four_bytes(place(r + 1, 0)),
                             four_bytes(place(r + 1, 1))};
    const int8x16_t rows = vreinterpretq_s8_u32(both);
    total[r][v] = vreinterpretq_s8_s32(vusmmlaq_s32(vreinterpretq_s32_s8(total[r][v]), low, rows));
    total[r + 1][v] = vreinterpretq_s8_s32(vusmmlaq_s32(vreinterpretq_s32_s8(total[r + 1][v]), high, rows));
  }
#else
  constexpr int kPaired = 0;
#endif
#pragma GCC unroll 16
  for (int r = kPaired; r < R; ++r) {
    add_products(total[r][v], first, vreinterpretq_s8_u32(vdupq_n_u32(four_bytes(place(r, 0)))));
    add_products(total[r][v], second, vreinterpretq_s8_u32(vdupq_n_u32(four_bytes(place(r, 1)))));
  }
}

}  // namespace
}  // namespace VLLM_LITE_ISA
