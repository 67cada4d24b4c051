// Quantizes a group of inputs of a row for products with bytes, if the machine has instructions for these; see
// ../linear.h for the formats.
#pragma once

#include "byte_products.h"
#include "convert.h"

namespace VLLM_LITE_ISA {
namespace {

#if defined(VLLM_LITE_MULTIPLIES_BYTES)
VLLM_LITE_INLINE int32_t sum_of(VecI x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(x));
#else
  int32_t total = 0;
  for (int i = 0; i < kWidth; ++i) total += x[i];
  return total;
#endif
}

constexpr int32_t kLargest = 127;             // integer of one plane
constexpr int32_t kLargestOfTwo = 127 * 128;  // the upper plane is then up to 127, the lower one 0 to 127
typedef int8_t Bytes __attribute__((vector_size(kWidth)));

// Absolute values of a group: the largest, where NaN is larger than all, and the sum.
struct Sizes {
  float largest, sum;

  // Whether the largest of `count` elements is too large for 8 bits with one scale. This is rare by chance; in real
  // models it happens in groups with channels that are far larger than others.
  bool are_uneven(int64_t count) const {
    return largest * static_cast<float>(count) > (count > kOnePlane ? kUnevenLong : kUneven) * sum;
  }
};

template <class T>
VLLM_LITE_INLINE Sizes sizes_of(const T* x, int64_t count) {
  VecI largest = {};  // absolute values of floats have the same order as integers
  Vec sum = {};
  for (int64_t i = 0; i < count; i += kWidth) {
    const int left = static_cast<int>(count - i < kWidth ? count - i : kWidth);
    const VecI size = reinterpret_cast<VecI>(load_some(x + i, left)) & 0x7fffffff;
    largest = size > largest ? size : largest;
    sum = sum + reinterpret_cast<Vec>(size);
  }
  return {float_of(static_cast<uint32_t>(max_of(largest))), sum_of(sum)};
}

// Integers up to `most`, at most 2^22, times 2^shift.
struct Range {
  int32_t most;
  int shift = 0;
};

// x times `inverse` as integers, at most 2^22 in size.
VLLM_LITE_INLINE VecI whole_of(Vec x, Vec inverse) {
  const Vec magic = splat(0x1.8p23f);  // adding it rounds to a whole number, in the lowest bits of the result
  return reinterpret_cast<VecI>(x * inverse + magic) - reinterpret_cast<VecI>(magic);
}

VLLM_LITE_INLINE Vec inverse_of(float size, float limit) {
  return splat(size > 0 ? limit / size : 0);
}

// Quantizes x, whose largest absolute value is `size`, to integers times *scale; if x has NaN or infinity, *scale is
// NaN or infinity. Calls put(i, integers, count) for each vector. Returns the sum of the integers.
template <class T, class Put>
VLLM_LITE_INLINE int32_t quantize_to(const T* x, int64_t count, float size, Range range, float* scale, const Put& put) {
  const float limit = static_cast<float>(range.most);
  *scale = size / limit / static_cast<float>(1 << range.shift);
  const Vec inverse = inverse_of(size, limit);
  VecI total = {};
  for (int64_t i = 0; i < count; i += kWidth) {
    const int left = static_cast<int>(count - i < kWidth ? count - i : kWidth);
    const VecI whole = whole_of(load_some(x + i, left), inverse) << range.shift;
    put(i, whole, left);
    total = total + whole;
  }
  return sum_of(total);
}

// Stores the lowest bytes of `count` integers.
VLLM_LITE_INLINE void put_bytes(int8_t* to, VecI whole, int64_t count) {
  const Bytes bytes = __builtin_convertvector(whole, Bytes);
  std::memcpy(to, &bytes, static_cast<size_t>(count));
}

// Stores one plane of integers to [count]. Returns their sum, as do the next functions.
template <class T>
VLLM_LITE_INLINE int32_t quantize_row(const T* x, int64_t count, int8_t* to, float* scale) {
  const float size = sizes_of(x, count).largest;
  return quantize_to(x, count, size, {kLargest}, scale,
                     [to](int64_t i, VecI whole, int left)
                         __attribute__((always_inline)) { put_bytes(to + i, whole, left); });
}

// Size of a four that is chosen: less than 0, so that it is not chosen again where all others are 0.
constexpr int32_t kTaken = -1;

// The kNumLarge fours with the largest absolute values among up to kSize inputs, the largest first, and the largest
// absolute value of the others. Values are compared as integers, with the index of the four in the lowest bits: fours
// whose values differ by less than 2^-18 may be in any order.
template <int64_t kSize>
struct FourSizes {
  static constexpr int kVectors = static_cast<int>(kSize + kWidth - 1) / kWidth;
  static constexpr int32_t kPlaces = kQuantGroup / 4 - 1;
  int32_t places[kNumLarge], next;

  template <class T>
  inline __attribute__((always_inline)) FourSizes(const T* x, int64_t count) {
    VecI pairs = {}, fours = {}, own = {};  // partner lanes in pairs and in fours; index of the four
    for (int i = 0; i < kWidth; ++i) pairs[i] = i ^ 1, fours[i] = i ^ 2, own[i] = i / 4;
    VecI sizes[kVectors];  // the largest value of its four in each lane
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const int64_t left = count - v * kWidth, num = left < kWidth ? left : kWidth;
      VecI size = {};
      if (left > 0) size = reinterpret_cast<VecI>(load_some(x + v * kWidth, static_cast<int>(num))) & 0x7fffffff;
      const VecI beside = __builtin_shuffle(size, pairs), two = beside > size ? beside : size;
      const VecI others = __builtin_shuffle(two, fours);
      sizes[v] = others > two ? others : two;
    }
    for (int32_t& place : places) {
      place = largest(sizes, own, ~kPlaces, kPlaces) & kPlaces;
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sizes[v] = own + v * kWidth / 4 == place ? VecI{} + kTaken : sizes[v];
    }
    next = largest(sizes, own, ~0, 0);
  }

 private:
  // Maximum of (sizes & size_bits) | (index of the four & four_bits).
  inline __attribute__((always_inline)) static int32_t largest(const VecI (&sizes)[kVectors], VecI own,
                                                               int32_t size_bits, int32_t four_bits) {
    VecI most = {};
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const VecI size = (sizes[v] & size_bits) | ((own + v * kWidth / 4) & four_bits);
      most = size > most ? size : most;
    }
    return max_of(most);
  }
};

// The value that becomes kLargest if some fours have 15 bits: the largest of the others, or more if 15 bits are not
// enough for the largest of all.
template <int64_t kSize>
VLLM_LITE_INLINE float size_without_fours(const Sizes& sizes, const FourSizes<kSize>& fours) {
  const float next = float_of(static_cast<uint32_t>(fours.next)), least = sizes.largest / 128;
  return next > least ? next : least;
}

#if defined(VLLM_LITE_LARGE_FOURS)
// Stores the plane of all inputs to [count], and the upper bytes of large fours to *fours. *large: whether there are
// any.
template <int64_t kSize, class T>
VLLM_LITE_INLINE int32_t quantize_row_fours(const T* x, int64_t count, int8_t* to, float* scale, bool* large,
                                            LargeFours* fours) {
  const Sizes sizes = sizes_of(x, count);
  const auto put = [to](int64_t i, VecI whole, int left)
                       __attribute__((always_inline)) { put_bytes(to + i, whole, left); };
  *large = sizes.are_uneven(kSize);
  *fours = {};
  if (!*large) return quantize_to(x, count, sizes.largest, {kLargest}, scale, put);
  const FourSizes<kSize> by_four(x, count);
  const float size = size_without_fours(sizes, by_four);
  const int32_t sum = quantize_to(x, count, size, {kLargest}, scale, put);
  const Vec inverse = inverse_of(size, kLargest);
  for (int k = 0; k < kNumLarge; ++k) {  // overwrites these fours, which did not fit into 8 bits
    const int64_t first = 4 * by_four.places[k], left = count - first;
    const auto put_four = [&](int num) __attribute__((always_inline)) {
      const VecI whole = whole_of(load_some(x + first, num), inverse), upper = (whole + 64) >> 7;
      fours->places[k] = static_cast<uint8_t>(by_four.places[k]);
      put_bytes(fours->upper[k], upper, 4);
      put_bytes(to + first, whole - (upper << 7), num);
    };
    if (left >= 4) {
      put_four(4);
    } else if (left > 0) {  // otherwise the four has no inputs: all others are 0
      put_four(static_cast<int>(left));
    }
  }
  return sum;
}
#endif

// Stores integers of 15 bits, 128 * upper + lower, to [2 * plane] bytes: the upper plane before the lower one, or words
// of both. If *lower is false, the lower plane is 0.
template <class T>
VLLM_LITE_INLINE int32_t quantize_row_twice(const T* x, int64_t count, int64_t plane, int8_t* to, float* scale,
                                            bool* lower) {
  const Sizes sizes = sizes_of(x, count);
  const bool is_long = plane > kOnePlane;
  *lower = is_long || sizes.are_uneven(plane);
  Range range = {kLargest, 7};
  float size = sizes.largest;
  if (is_long) {
    range = {kLargestOfTwo};
  } else if (*lower) {
    range = {kLargest};
    size = size_without_fours(sizes, FourSizes<kOnePlane>(x, count));
  }
  return quantize_to(x, count, size, range, scale, [=](int64_t i, VecI whole, int left) __attribute__((always_inline)) {
    const size_t num_bytes = static_cast<size_t>(left);
#if defined(VLLM_LITE_PLANES_APART)
    const Bytes upper = __builtin_convertvector(whole >> 7, Bytes), lower = __builtin_convertvector(whole & 127, Bytes);
    std::memcpy(to + i, &upper, num_bytes);
    std::memcpy(to + plane + i, &lower, num_bytes);
#else
    typedef int16_t Words __attribute__((vector_size(kWidth * 2)));
    const Words words = __builtin_convertvector(whole, Words);
    std::memcpy(to + 2 * i, &words, 2 * num_bytes);
#endif
  });
}

// The inputs from `first` on that share a scale, in the order of the weight's columns.
template <class T>
VLLM_LITE_INLINE const T* columns(const T* row, const int32_t* order, int64_t first, int64_t count, T* buffer) {
  if (order == nullptr) return row + first;
  for (int64_t i = 0; i < count; ++i) buffer[i] = row[order[first + i]];
  return buffer;
}

// Quantizes one group of inputs of a row. run() stores its integers, and its scale, bias and sum at index `at`. It
// returns whether the lower plane, or `fours` in its place, is used.
template <class T>
struct RowQuantizer {
  const LinearCall& call;
  const QuantizedRows& rows = *call.quantized;
  const int32_t* order = call.weight->order;
  const int32_t lacking = call.weight->offset + taken_off(*call.weight);

  template <int64_t kSize, int kPlanes>
  inline __attribute__((always_inline)) bool run(int64_t row, int64_t group, int8_t* integers, int64_t at,
                                                 LargeFours* fours = nullptr) const {
    const int64_t input = group * kSize, left = call.weight->num_inputs - input;
    T buffer[kSize];
    if (left < kSize) std::memset(integers, 0, kPlanes * kSize);
    const T* whole = static_cast<const T*>(call.x) + row * call.x_stride;
    const T* x = columns(whole, order, input, left < kSize ? left : kSize, buffer);
    // Prefetch the row's next inputs: a little is read of several rows in turn, which the hardware does not predict.
    const char* next = reinterpret_cast<const char*>(whole + input + kSize);
    for (int64_t i = 0; i < kSize * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(next + i);
    float* scale = rows.scales + at;
    bool lower = false;
    const int32_t sum = left < kSize ? quantize<kSize, kPlanes>(x, left, integers, scale, &lower, fours)
                                     : quantize<kSize, kPlanes>(x, kSize, integers, scale, &lower, fours);
    rows.biases[at] = static_cast<int32_t>(static_cast<uint32_t>(lacking) * static_cast<uint32_t>(sum));
    rows.sums[at] = static_cast<float>(sum);
    return lower;
  }

 private:
  template <int64_t kSize, int kPlanes>
  VLLM_LITE_INLINE int32_t quantize(const T* x, int64_t count, int8_t* to, float* scale, bool* lower,
                                    [[maybe_unused]] LargeFours* fours) {
    if constexpr (kPlanes == 1) {
      return quantize_row(x, count, to, scale);
    } else {
#if defined(VLLM_LITE_LARGE_FOURS)
      if (fours != nullptr) return quantize_row_fours<kSize>(x, count, to, scale, lower, fours);
#endif
      return quantize_row_twice(x, count, kSize, to, scale, lower);
    }
  }
};

// Interleaves `count` rows of kSize bytes, which are `stride` apart: kBytes of each row, then the next kBytes of each,
// and so on. kCount is `count` if it is known at compile time, else 0.
template <int kBytes, int64_t kSize, int kCount = 0>
VLLM_LITE_INLINE void interleave(const int8_t* rows, int64_t stride, int64_t count, int8_t* to) {
  if constexpr (kCount == 0 && kWidth == 16) {
    if (count == 6) return interleave<kBytes, kSize, 6>(rows, stride, count, to);
    if (count == 5) return interleave<kBytes, kSize, 5>(rows, stride, count, to);
  }
  if constexpr (kCount > 0) {
    for (int64_t i = 0; i < kSize; i += kBytes, to += kCount * kBytes) {
#pragma GCC unroll 8
      for (int row = 0; row < kCount; ++row) std::memcpy(to + row * kBytes, rows + row * stride + i, kBytes);
    }
    return;
  }
  for (int64_t row = 0; row < count; ++row, rows += stride, to += kBytes) {
#pragma GCC unroll 32
    for (int64_t i = 0; i < kSize; i += kBytes) std::memcpy(to + i * count, rows + i, kBytes);
  }
}

#endif

}  // namespace
}  // namespace VLLM_LITE_ISA
