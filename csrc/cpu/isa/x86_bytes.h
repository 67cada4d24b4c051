// Products of bytes and integers by AVX2, AVX-512 and VNNI: the instructions for byte_products.h.
#pragma once

#include "../linear.h"
#include "simd.h"

namespace VLLM_LITE_ISA {
namespace {

#if defined(__AVX512F__)

typedef __m512i Ints;  // bytes, or kWidth sums

VLLM_LITE_INLINE Ints load_ints(const void* from) {
  return _mm512_loadu_si512(from);
}
VLLM_LITE_INLINE Ints all_ints(int32_t x) {
  return _mm512_set1_epi32(x);
}
VLLM_LITE_INLINE Ints all_bytes(int8_t x) {
  return _mm512_set1_epi8(x);
}
VLLM_LITE_INLINE Ints upper_halves(Ints x) {  // of each byte, in its lower half; its upper half has other bits
  return _mm512_srli_epi16(x, 4);
}
VLLM_LITE_INLINE Ints both_bits(Ints x, Ints y) {
  return _mm512_and_si512(x, y);
}
VLLM_LITE_INLINE Ints add_bytes(Ints x, Ints y) {
  return _mm512_add_epi8(x, y);
}
// x, with 16 added to the bytes whose bits at `from` are set.
VLLM_LITE_INLINE Ints add_fifth_bits(Ints x, const char* from) {
  uint64_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return _mm512_mask_add_epi8(x, bits, x, all_bytes(16));
}
VLLM_LITE_INLINE Ints repeat_16(const void* from) {
  const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return _mm512_maskz_broadcast_i32x4(0xffff, x);  // GCC 12 warns of the one without a mask
}
VLLM_LITE_INLINE Ints shuffle_bytes(Ints x, Ints places) {  // within 16
  return _mm512_shuffle_epi8(x, places);
}
VLLM_LITE_INLINE Ints widen_bytes(const char* from) {  // kWidth of them
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

#else

typedef __m256i Ints;

VLLM_LITE_INLINE Ints load_ints(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
VLLM_LITE_INLINE Ints all_ints(int32_t x) {
  return _mm256_set1_epi32(x);
}
VLLM_LITE_INLINE Ints all_bytes(int8_t x) {
  return _mm256_set1_epi8(x);
}
VLLM_LITE_INLINE Ints upper_halves(Ints x) {
  return _mm256_srli_epi16(x, 4);
}
VLLM_LITE_INLINE Ints both_bits(Ints x, Ints y) {
  return _mm256_and_si256(x, y);
}
VLLM_LITE_INLINE Ints add_bytes(Ints x, Ints y) {
  return _mm256_add_epi8(x, y);
}
VLLM_LITE_INLINE Ints add_fifth_bits(Ints x, const char* from) {
  int32_t bits;
  std::memcpy(&bits, from, sizeof bits);
  const Ints places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const Ints own = _mm256_set1_epi64x(INT64_C(-0x7fbfdfeff7fbfdff));  // 1, 2, 4 ... 128
  const Ints set = _mm256_and_si256(_mm256_shuffle_epi8(all_ints(bits), places), own);
  return _mm256_add_epi8(x, _mm256_and_si256(_mm256_cmpeq_epi8(set, own), all_bytes(16)));
}
VLLM_LITE_INLINE Ints repeat_16(const void* from) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
VLLM_LITE_INLINE Ints shuffle_bytes(Ints x, Ints places) {
  return _mm256_shuffle_epi8(x, places);
}
VLLM_LITE_INLINE Ints widen_bytes(const char* from) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

#endif

#if defined(__AVX512VNNI__)

// Written as assembly, because GCC 12 copies the sums otherwise, more than there are registers: with 12 rows it takes
// 1.4 times as long.
VLLM_LITE_INLINE void add_products(Ints& total, Ints bytes, Ints integers) {
  asm("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(bytes), "v"(integers));
}

// Amount that kernels subtract from each byte: none.
VLLM_LITE_INLINE int32_t taken_off(const PackedWeight&) {
  return 0;
}

#else

// Two products of a byte up to kNarrow with an integer up to 127, plus two more, fit in 16 bits. Larger bytes, less
// 128, are signed: their magnitude is multiplied with an integer that has taken over the sign, two products at a time.
// Rows of 15 bits are words of 16 bits here, not two planes, and bytes are widened to words.
constexpr int32_t kNarrow = 64;

VLLM_LITE_INLINE bool are_narrow(const PackedWeight& weight) {
  int32_t largest = 15;  // of codes; shifts add at most 48
  for (int i = 0; i < 16 && weight.bytes != nullptr; ++i)
    largest = weight.bytes[i] > largest ? weight.bytes[i] : largest;
  return largest <= kNarrow;
}

// Amount that kernels subtract from each byte.
VLLM_LITE_INLINE int32_t taken_off(const PackedWeight& weight) {
  return weight.type != kGrouped4 || are_narrow(weight) ? 0 : 128;
}

#if defined(__AVX512F__)
VLLM_LITE_INLINE Ints signed_bytes(Ints x) {
  return _mm512_xor_si512(x, all_bytes(INT8_MIN));
}
VLLM_LITE_INLINE Ints add_pairs(Ints total, Ints products) {
  return _mm512_add_epi32(total, _mm512_madd_epi16(products, _mm512_set1_epi16(1)));
}
VLLM_LITE_INLINE Ints add_narrow(Ints total, Ints first, Ints x, Ints second, Ints y) {
  return add_pairs(total, _mm512_add_epi16(_mm512_maddubs_epi16(first, x), _mm512_maddubs_epi16(second, y)));
}
// Half of a vector's bytes as words of 16 bits, and four words of a row for each output: two sums for each output.
VLLM_LITE_INLINE Ints widen_half(const void* from) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}
VLLM_LITE_INLINE Ints widen_lower(Ints x) {
  return _mm512_cvtepu8_epi16(_mm512_castsi512_si256(x));
}
VLLM_LITE_INLINE Ints widen_upper(Ints x) {
  return _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(x, 1));
}
VLLM_LITE_INLINE Ints four_words(const int8_t* x) {
  int64_t four;
  std::memcpy(&four, x, 8);
  return _mm512_set1_epi64(four);
}
VLLM_LITE_INLINE Ints add_words(Ints total, Ints weights, Ints x) {
  return _mm512_add_epi32(total, _mm512_madd_epi16(weights, x));
}
VLLM_LITE_INLINE Ints add_twos(Ints lower, Ints upper) {  // sums for the outputs of both halves
  const Ints even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const Ints odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return _mm512_add_epi32(_mm512_permutex2var_epi32(lower, even, upper), _mm512_permutex2var_epi32(lower, odd, upper));
}
VLLM_LITE_INLINE Ints all_twos(int32_t x) {  // initial value for which add_twos() returns x
  return _mm512_set1_epi64(static_cast<uint32_t>(x));
}
VLLM_LITE_INLINE Ints add_signed(Ints total, Ints bytes, Ints x) {
  const Ints turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(bytes), _mm512_setzero_si512(), x);
  return add_pairs(total, _mm512_maddubs_epi16(_mm512_abs_epi8(bytes), turned));
}
#else
VLLM_LITE_INLINE Ints signed_bytes(Ints x) {
  return _mm256_xor_si256(x, all_bytes(INT8_MIN));
}

VLLM_LITE_INLINE Ints add_pairs(Ints total, Ints products) {
  return _mm256_add_epi32(total, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
}
VLLM_LITE_INLINE Ints add_narrow(Ints total, Ints first, Ints x, Ints second, Ints y) {
  return add_pairs(total, _mm256_add_epi16(_mm256_maddubs_epi16(first, x), _mm256_maddubs_epi16(second, y)));
}
VLLM_LITE_INLINE Ints widen_half(const void* from) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
VLLM_LITE_INLINE Ints widen_lower(Ints x) {
  return _mm256_cvtepu8_epi16(_mm256_castsi256_si128(x));
}
VLLM_LITE_INLINE Ints widen_upper(Ints x) {
  return _mm256_cvtepu8_epi16(_mm256_extracti128_si256(x, 1));
}
VLLM_LITE_INLINE Ints four_words(const int8_t* x) {
  int64_t four;
  std::memcpy(&four, x, 8);
  return _mm256_set1_epi64x(four);
}
VLLM_LITE_INLINE Ints add_words(Ints total, Ints weights, Ints x) {
  return _mm256_add_epi32(total, _mm256_madd_epi16(weights, x));
}
VLLM_LITE_INLINE Ints add_twos(Ints lower, Ints upper) {
  return _mm256_permute4x64_epi64(_mm256_hadd_epi32(lower, upper), 0xd8);
}
VLLM_LITE_INLINE Ints all_twos(int32_t x) {
  return _mm256_set1_epi64x(static_cast<uint32_t>(x));
}
VLLM_LITE_INLINE Ints add_signed(Ints total, Ints bytes, Ints x) {
  return add_pairs(total, _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(x, bytes)));
}
#endif

#endif

// Arrangement of rows' sums for products: none on x86.
template <int R, int V>
VLLM_LITE_INLINE void pair_rows(Ints (&)[R][V]) {}
template <int R, int V>
VLLM_LITE_INLINE void part_rows(Ints (&)[R][V]) {}

}  // namespace
}  // namespace VLLM_LITE_ISA
