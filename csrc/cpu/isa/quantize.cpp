// The scale of a group of weights by trying some: the largest weight becomes one of kEnds, all others follow.
#include "../quantize.h"

#include "../linear.h"
#include "convert.h"

namespace VLLM_LITE_ISA {
namespace {

// Integers, and what lies between them, that the weight of the largest size may become. As there are more negative ones
// than positive ones, a scale may be negative, too. The same as ENDS in vllm_lite/kernels/grouped.py.
constexpr float kEnds[] = {-9,    -8.75f, -8.5f, -8.25f, -8,   -7.75f, -7.5f, -7.25f,
                           -7.0f, -6.75f, 6.5f,  6.75f,  7.0f, 7.25f,  7.5f,  8};
constexpr int kNumEnds = 16;
constexpr float kMagic = 0x1.8p23f;  // adding it rounds to a whole number, which then is in the lowest bits

// x + kMagic, rounded and kept within the whole numbers of 4 bits: as bits they are in order.
VLLM_LITE_INLINE VecI within(Vec shifted) {
  const VecI least = reinterpret_cast<VecI>(splat(kMagic - 8)), most = reinterpret_cast<VecI>(splat(kMagic + 7));
  const VecI bits = reinterpret_cast<VecI>(shifted), above = bits < least ? least : bits;
  return above > most ? most : above;
}

// The bfloat16 next to x, as a float.
VLLM_LITE_INLINE float to_bfloat16(float x) {
  BFloat16 narrow;
  from_float(x, &narrow);
  return to_float(narrow);
}

// What integers times the weights, and times themselves, add up to; for kWidth of kEnds, side by side.
struct Sums {
  Vec products = {}, squares = {};

  inline __attribute__((always_inline)) void add(float x, Vec inverse) {
    const Vec shifted = multiply_add(splat(x), inverse, splat(kMagic));
    const Vec integer = reinterpret_cast<Vec>(within(shifted)) - kMagic;
    products = multiply_add(splat(x), integer, products);
    squares = multiply_add(integer, integer, squares);
  }
};

// The first number of the largest size among x [count], filled up with zeros to whole vectors.
VLLM_LITE_INLINE float largest_of(const float* x, int64_t count) {
  Vec most = {}, least = {};
  for (int64_t i = 0; i < count; i += kWidth) {
    const Vec value = load(x + i);
    most = value > most ? value : most;
    least = value < least ? value : least;
  }
  const float above = max_of(most), below = max_of(-least);
  if (above == 0 && below == 0) return 0;  // there may be NaN
  if (above != below) return above > below ? above : -below;
  while (std::fabs(*x) != above) ++x;
  return *x;
}

// The scale for x [count]. Ends are what lies in a vector, not weights: no sums over a vector's elements.
float search(const float* x, int64_t count) {
  const float largest = largest_of(x, count);
  if (largest == 0) return 0;
  float best = 0, scale = 0;
  for (int end = 0; end < kNumEnds; end += kWidth) {
    const Vec inverse = load(kEnds + end) / largest;
    Sums even, odd;  // two chains of additions
    for (int64_t i = 0; i < count; i += 2) {
      even.add(x[i], inverse);
      odd.add(x[i + 1], inverse);
    }
    const Vec products = even.products + odd.products, squares = even.squares + odd.squares;
    const Vec scales = products / squares, gains = products * scales;  // the squared error is sum(x^2) - gain
    for (int i = 0; i < kWidth; ++i) {
      scale = gains[i] > best ? scales[i] : scale;
      best = gains[i] > best ? gains[i] : best;
    }
  }
  return to_bfloat16(scale);
}

template <class T>
void quantize_group(const T* from, int64_t count, uint8_t* codes, float* scale) {
  alignas(64) float x[kQuantGroup] = {};
  for (int64_t i = 0; i < count; ++i) x[i] = to_float(from[i]);
  *scale = search(x, count);
  const Vec inverse = splat(*scale != 0 ? 1 / *scale : 0);
  typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
  for (int64_t i = 0; i < count; i += kWidth) {
    const VecI code = within(load(x + i) * inverse + kMagic) - reinterpret_cast<VecI>(splat(kMagic - 8));
    const Bytes bytes = __builtin_convertvector(code, Bytes);
    std::memcpy(codes + i, &bytes, static_cast<size_t>(count - i < kWidth ? count - i : kWidth));
  }
}

// As _quantize_fp8_rows in vllm_lite/kernels/grouped.py, code for code.
template <class T>
void quantize_group8(const T* from, int64_t count, uint8_t* codes, float* scale) {
  alignas(64) float x[kQuantGroup] = {};
  for (int64_t i = 0; i < count; ++i) x[i] = to_float(from[i]);
  *scale = to_bfloat16(std::fabs(largest_of(x, count)) / 448);
  const float inverse = *scale >= 0x1p-126f ? 1 / *scale : 0;
  for (int64_t i = 0; i < count; i += kWidth) {
    const int64_t left = count - i;
    store_some(reinterpret_cast<Fp8E4M3*>(codes + i), load(x + i) * inverse, static_cast<int>(left));
  }
}

}  // namespace

void quantize_group_fp8(const void* x, int32_t type, int64_t count, uint8_t* codes, float* scale) {
  if (type == kFloat32) return quantize_group8(static_cast<const float*>(x), count, codes, scale);
  if (type == kFloat16) return quantize_group8(static_cast<const Float16*>(x), count, codes, scale);
  quantize_group8(static_cast<const BFloat16*>(x), count, codes, scale);
}

void quantize_group4(const void* x, int32_t type, int64_t count, uint8_t* codes, float* scale) {
  if (type == kFloat32) return quantize_group(static_cast<const float*>(x), count, codes, scale);
  if (type == kFloat16) return quantize_group(static_cast<const Float16*>(x), count, codes, scale);
  quantize_group(static_cast<const BFloat16*>(x), count, codes, scale);
}

}  // namespace VLLM_LITE_ISA
