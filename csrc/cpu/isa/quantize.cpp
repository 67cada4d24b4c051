// The scale of a group of weights by trying some: the largest weight becomes one of kEnds, all others follow.
#include "../quantize.h"

#include "../linear.h"
#include "simd.h"

namespace VLLM_LITE_ISA {
namespace {

// Integers, and what lies between them, that the weight of the largest size may become. As there are more negative ones
// than positive ones, a scale may be negative, too. The same as ENDS in vllm_lite/kernels/grouped.py.
constexpr float kEnds[] = {-9,    -8.75f, -8.5f, -8.25f, -8,   -7.75f, -7.5f, -7.25f,
                           -7.0f, -6.75f, 6.5f,  6.75f,  7.0f, 7.25f,  7.5f,  8};
constexpr float kMagic = 0x1.8p23f;  // adding it and taking it off again rounds to a whole number, ties to even

VLLM_LITE_INLINE Vec whole(Vec x) {
  const Vec least = splat(-8), most = splat(7), magic = splat(kMagic);
  const Vec rounded = (x + magic) - magic;
  const Vec above = rounded < least ? least : rounded;
  return above > most ? most : above;
}

// The bfloat16 next to x, as a float.
VLLM_LITE_INLINE float to_bfloat16(float x) {
  BFloat16 narrow;
  from_float(x, &narrow);
  return to_float(narrow);
}

// The scale for x [count], filled up with zeros to whole vectors.
float search(const float* x, int64_t count) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::fabs(x[i]) > std::fabs(largest) ? x[i] : largest;
  if (largest == 0) return 0;
  float best = 0, scale = 0;
  for (const float end : kEnds) {
    const Vec inverse = splat(end / largest);
    Vec products = {}, squares = {};
    for (int64_t i = 0; i < count; i += kWidth) {
      const Vec value = load(x + i), integer = whole(value * inverse);
      products = products + value * integer;
      squares = squares + integer * integer;
    }
    const float product = sum_of(products), square = sum_of(squares);
    if (product * product > best * square) {  // the squared error is sum(x^2) - product^2 / square
      best = product * product / square;
      scale = product / square;
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
    const Vec shifted = whole(load(x + i) * inverse) + splat(8);
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(shifted, VecI), Bytes);
    std::memcpy(codes + i, &bytes, static_cast<size_t>(count - i < kWidth ? count - i : kWidth));
  }
}

}  // namespace

void quantize_group4(const void* x, int32_t type, int64_t count, uint8_t* codes, float* scale) {
  if (type == kFloat32) return quantize_group(static_cast<const float*>(x), count, codes, scale);
  if (type == kFloat16) return quantize_group(static_cast<const Float16*>(x), count, codes, scale);
  quantize_group(static_cast<const BFloat16*>(x), count, codes, scale);
}

}  // namespace VLLM_LITE_ISA
