// Rotary embedding and the write of K and V, in one pass over a token's heads.
#include "../cache_ops.h"

#include "../attention.h"
#include "hadamard.h"

namespace VLLM_LITE_ISA {
namespace {

using vllm_lite::kMaxHeadSize;

// Rotates one head in place: elements i and i + size / 2 by angle i.
template <class T>
VLLM_LITE_INLINE void rotate(T* head, const float* cos, const float* sin, int size) {
  const int half = size / 2;
  for (int i = 0; i < half; i += kWidth) {
    const int left = half - i;
    const Vec low = load_some(head + i, left), high = load_some(head + half + i, left);
    const Vec new_low = low * load(cos + i) + high * load(sin + i);
    const Vec new_high = high * load(cos + half + i) + low * load(sin + half + i);
    store_some(head + i, new_low, left);
    store_some(head + half + i, new_high, left);
  }
}

template <class T, class Stored>
VLLM_LITE_INLINE void put(const T* from, Stored* to, float scale, int size) {
  for (int d = 0; d < size; d += kWidth) {
    Vec x = load_some(from + d, size - d);
    if (sizeof(Stored) == 1) x = x / scale;
    store_some(to + d, x, size - d);
  }
}

VLLM_LITE_INLINE void put(const BFloat16* from, BFloat16* to, float, int size) {
  std::memcpy(to, from, static_cast<size_t>(size) * 2);
}
VLLM_LITE_INLINE void put(const Float16* from, Float16* to, float, int size) {
  std::memcpy(to, from, static_cast<size_t>(size) * 2);
}
VLLM_LITE_INLINE void put(const float* from, float* to, float, int size) {
  std::memcpy(to, from, static_cast<size_t>(size) * 4);
}

// Writes a row of int8 and its scale, as in vllm_lite/attention/int8_rows.py; it divides as that file does, for the
// same codes. If an element is NaN or infinite, the scale is NaN, and so are all elements read back.
template <class T>
VLLM_LITE_INLINE void put(const T* from, Int8* to, float, int size) {
  alignas(64) float row[kMaxHeadSize + kWidth];
  for (int d = 0; d < size; d += kWidth) store(row + d, load_some(from + d, size - d));
  hadamard(row, size);
  VecI largest = {};  // magnitudes of floats, as integers, have the order of the floats, and NaN is above all
  for (int d = 0; d < size; d += kWidth) {
    const VecI x = reinterpret_cast<VecI>(load(row + d)) & 0x7fffffff;
    largest = x > largest ? x : largest;
  }
  float scale = float_of(static_cast<uint32_t>(max_of(largest))) / 127.0f;
  scale += scale - scale;  // adds 0, or NaN if the scale is not finite
  if (scale < 0x1p-126f) scale = 0;
  const float divisor = scale == 0 ? __builtin_inff() : scale;
  for (int d = 0; d < size; d += kWidth) store_some(to + d, load(row + d) / divisor, size - d);
  std::memcpy(static_cast<void*>(to + size), &scale, sizeof scale);
}

template <class T>
static void rotate_token(const vllm_lite::CacheWrite& w, int64_t token) {
  const int size = w.head_size;
  float cos[kMaxHeadSize + kWidth], sin[kMaxHeadSize + kWidth];  // padded, because they are read in whole vectors
  for (int d = 0; d < size; d += kWidth) {
    store(cos + d, load_some(static_cast<const T*>(w.cos) + token * w.rotation_stride + d, size - d));
    store(sin + d, load_some(static_cast<const T*>(w.sin) + token * w.rotation_stride + d, size - d));
  }
  T* query = static_cast<T*>(w.query) + token * w.query_stride;
  for (int head = 0; head < w.num_heads; ++head) rotate(query + head * size, cos, sin, size);
  T* key = static_cast<T*>(w.key) + token * w.key_stride;
  for (int head = 0; head < w.num_kv_heads; ++head) rotate(key + head * size, cos, sin, size);
}

template <class T, class Stored>
static void write(const vllm_lite::CacheWrite& w, int64_t first, int64_t end) {
  for (int64_t token = first; token < end; ++token) {
    if (w.cos != nullptr) rotate_token<T>(w, token);
    const int64_t slot = w.slots[token];
    if (slot < 0) continue;
    const int64_t block = slot / w.block_size, offset = slot - block * w.block_size;
    Stored* to = static_cast<Stored*>(w.kv) + block * w.block_stride + offset * w.token_stride;
    const T* key = static_cast<const T*>(w.key) + token * w.key_stride;
    const T* value = static_cast<const T*>(w.value) + token * w.value_stride;
    for (int head = 0; head < w.num_kv_heads; ++head, to += w.head_stride) {
      put(key + head * w.head_size, to, w.k_scale, w.head_size);
      if (w.value_offset != 0) put(value + head * w.head_size, to + w.value_offset, w.v_scale, w.head_size);
    }
  }
}

template <class T>
static void write(const vllm_lite::CacheWrite& w, int64_t first, int64_t end) {
  switch (w.kv_dtype) {
    case kFloat32:
      return write<T, float>(w, first, end);
    case kBFloat16:
      return write<T, BFloat16>(w, first, end);
    case kFloat16:
      return write<T, Float16>(w, first, end);
    case kFp8E4M3:
      return write<T, Fp8E4M3>(w, first, end);
    case kInt8:
      return write<T, Int8>(w, first, end);
    default:
      return write<T, Fp8E5M2>(w, first, end);
  }
}

}  // namespace

void write_tokens(const vllm_lite::CacheWrite& w, int64_t first, int64_t end) {
  if (w.dtype == kFloat32) return write<float>(w, first, end);
  if (w.dtype == kBFloat16) return write<BFloat16>(w, first, end);
  write<Float16>(w, first, end);
}

}  // namespace VLLM_LITE_ISA
