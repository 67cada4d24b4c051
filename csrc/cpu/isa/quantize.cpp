// Searches the scale of a group of weights. Candidates are the elements of a vector, and weights are read one by one,
// so that no sum over a vector's elements is needed.
#include "../quantize.h"

#include "convert.h"

namespace VLLM_LITE_ISA {
namespace {

// Candidates for the number of steps, for codes up to 15, into which a group's range is divided at first; with more
// than 15 the last ones are cut off. The same as STEPS4 in vllm_lite/kernels/grouped.py.
constexpr int kNumTried = 16;
constexpr float kMost4 = 15;
constexpr float kSteps4[] = {13,    13.25f, 13.5f, 13.75f, 14,    14.25f, 14.5f, 14.75f,
                             15.0f, 15.25f, 15.5f, 15.75f, 16.0f, 16.25f, 16.5f, 16.75f};
// Candidates for the value that a group's largest magnitude gets on the scale of symmetric 4-bit integers, -8 to 7.
// Because there are more negative than positive integers, a scale may be negative as well. The same as ENDS in
// grouped.py.
constexpr float kEnds4[] = {-9,    -8.75f, -8.5f, -8.25f, -8,   -7.75f, -7.5f, -7.25f,
                            -7.0f, -6.75f, 6.5f,  6.75f,  7.0f, 7.25f,  7.5f,  8};
// Candidates of refine_line: small changes of an integer scale, and changes of the integer minimum around the one that
// keeps the middle of the group in place. The same as NEAR in grouped.py.
constexpr int kMostLess = 2, kMostBeside = 1, kNumNear = kNumTried;
constexpr float kMostInteger = 127;
struct Near {
  float scales[kNumNear] = {}, minima[kNumNear] = {};

  constexpr Near() {
    int number = 1;  // no change is the first candidate, so that equally good ones do not replace it
    for (int scale = -kMostLess; scale <= kMostLess; ++scale) {
      for (int minimum = -kMostBeside; minimum <= kMostBeside; ++minimum, ++number) {
        scales[number] = static_cast<float>(scale);
        minima[number] = static_cast<float>(minimum);
      }
    }
  }
};
constexpr Near kNear;
constexpr float kMagic = 0x1.8p23f;  // adding it rounds to a whole number, which is then in the lowest bits

// Limits a whole number plus kMagic to a range. Such floats have the same order as their bits.
VLLM_LITE_INLINE Vec within(Vec shifted, float least, float most) {
  const VecI low = reinterpret_cast<VecI>(splat(kMagic + least)), high = reinterpret_cast<VecI>(splat(kMagic + most));
  const VecI bits = reinterpret_cast<VecI>(shifted), above = bits < low ? low : bits;
  return reinterpret_cast<Vec>(above > high ? high : above);
}

VLLM_LITE_INLINE Vec within_floats(Vec x, Vec least, Vec most) {
  const Vec above = x < least ? least : x;
  return above > most ? most : above;
}

VLLM_LITE_INLINE Vec round_all(Vec x) {  // |x| up to 2^22
  return x + kMagic - kMagic;
}

VLLM_LITE_INLINE float to_bfloat16(float x) {
  BFloat16 narrow;
  from_float(x, &narrow);
  return to_float(narrow);
}

// The range of a group, NaN if a number is not finite: codes would hide that, and with it a broken model.
struct Range {
  float least = 0, most = 0;

  static Range of(const float* x, int64_t count) {
    constexpr int32_t kInfinity = 0x7f800000;
    Range range;
    range.least = range.most = x[0];
    int32_t size = 0;  // magnitudes of floats, as integers, have the order of the floats
    for (int64_t i = 0; i < count; ++i) {
      range.least = x[i] < range.least ? x[i] : range.least;
      range.most = x[i] > range.most ? x[i] : range.most;
      const int32_t own = static_cast<int32_t>(bits_of(x[i]) & INT32_MAX);
      size = own > size ? own : size;
    }
    return size < kInfinity ? range : Range{NAN, NAN};
  }
};

// The number with the largest magnitude, the first of equal ones.
float largest_of(const float* x, int64_t count) {
  const Range range = Range::of(x, count);
  if (-range.least != range.most) return -range.least > range.most ? range.least : range.most;
  while (std::fabs(*x) != range.most) ++x;
  return *x;
}

// The scale for integers from `least` to `most` with the smallest squared error, if the number with the largest
// magnitude becomes one of `ends` [kNumTried]. NaN if a number is not finite.
float search(const float* x, int64_t count, const float* ends, float least, float most) {
  const float largest = largest_of(x, count);
  if (largest != largest) return NAN;
  if (largest == 0) return 0;
  float best = 0, chosen = 0;
  for (int first = 0; first < kNumTried; first += kWidth) {
    const Vec inverse = load(ends + first) / largest;
    Vec products = {}, squares = {};
    for (int64_t i = 0; i < count; ++i) {
      const Vec value = splat(x[i]), integer = within(value * inverse + kMagic, least, most) - kMagic;
      products = multiply_add(integer, value, products);
      squares = multiply_add(integer, integer, squares);
    }
    const Vec scales = products / squares, gains = products * scales;  // the squared error is sum(x^2) - gain
    for (int i = 0; i < kWidth; ++i) {
      chosen = gains[i] > best ? scales[i] : chosen;
      best = gains[i] > best ? gains[i] : best;
    }
  }
  return to_bfloat16(chosen);
}

// Sets codes to the integers nearest to x / scale, limited to [least, most], minus `least`.
void encode(const float* x, int64_t count, float scale, float least, float most, uint8_t* codes) {
  const float inverse = scale != 0 ? 1 / scale : 0;
  for (int64_t i = 0; i < count; ++i) {
    const float integer = __builtin_nearbyintf(x[i] * inverse);
    codes[i] = static_cast<uint8_t>(integer > most ? most - least : integer > least ? integer - least : 0);
  }
}

// Sums over a group's integers and numbers, for kWidth candidates.
struct Sums {
  Vec integers = {}, squares = {}, products = {};

  inline __attribute__((always_inline)) void add(Vec integer, Vec x) {
    integers = integers + integer;
    squares = multiply_add(integer, integer, squares);
    products = multiply_add(integer, x, products);
  }
};

// The least-squares line through `count` numbers, whose sum is `total`, as a function of their integers: number ~ scale
// * integer + start.
struct Line {
  Vec scale, start, gain;  // gain: reduction of the squared error, from the sum of squared numbers

  static inline __attribute__((always_inline)) Line through(const Sums& sums, float total, int64_t count) {
    const Vec n = splat(static_cast<float>(count)), all = splat(total);
    const Vec spread = n * sums.squares - sums.integers * sums.integers;
    const Vec scale = spread > 0 ? (n * sums.products - sums.integers * all) / spread : splat(0);
    const Vec start = (all - scale * sums.integers) / n;
    return {scale, start, scale * sums.products + start * all};
  }
};

// Sums for the integers of (x - least - start) * inverse.
VLLM_LITE_INLINE Sums sum_codes(const float* x, int64_t count, float least, Vec start, Vec inverse, float most) {
  Sums sums;
  for (int64_t i = 0; i < count; ++i) {
    const Vec value = splat(x[i] - least);
    sums.add(within((value - start) * inverse + kMagic, 0, most) - kMagic, value);
  }
  return sums;
}

VLLM_LITE_INLINE float inverse_for_fp8(float scale) {
  return scale >= 0x1p-126f ? 1 / scale : 0;
}

// The squared error of x [count], padded with zeros, as E4M3 times a scale.
float error_as_fp8(const float* x, int64_t count, float scale) {
  const float inverse = inverse_for_fp8(scale);
  Vec squares = {};
  for (int64_t i = 0; i < count; i += kWidth) {
    Fp8E4M3 codes[kWidth];
    store(codes, load(x + i) * inverse);
    const Vec error = load(codes) * scale - load(x + i);
    squares = multiply_add(error, error, squares);
  }
  return sum_of(squares);
}

}  // namespace

void search_line(const float* x, int64_t count, float most, float* scale, float* minimum) {
  const Range range = Range::of(x, count);
  const float least = range.least, width = range.most - range.least;
  *scale = 0;
  *minimum = width < 3e38f ? -least : NAN;
  if (!(width > 0) || *minimum != *minimum) return;  // all numbers are equal, or not all are finite
  float total = 0, best = 0, chosen = 0, start = 0;
  for (int64_t i = 0; i < count; ++i) total += x[i] - least;
  for (int first = 0; first < kNumTried; first += kWidth) {
    const Vec inverse = load(kSteps4 + first) * (most / kMost4) / width;
    // Twice, because the numbers may be nearest to other integers on the new line.
    Line line = Line::through(sum_codes(x, count, least, splat(0), inverse, most), total, count);
    const Vec again = line.scale > 0 ? splat(1) / line.scale : splat(0);
    line = Line::through(sum_codes(x, count, least, line.start, again, most), total, count);
    for (int i = 0; i < kWidth; ++i) {
      if (!(line.gain[i] > best)) continue;
      best = line.gain[i];
      chosen = line.scale[i];
      start = line.start[i];
    }
  }
  *scale = chosen;
  *minimum = -(least + start);
}

void refine_line(const float* x, int64_t count, const float (&units)[2], float most, float* scale, float* minimum) {
  const Vec largest = splat(kMostInteger);
  const float step = most / 2 * units[0] / units[1], own_scale = *scale, own_minimum = *minimum;
  float best = INFINITY;
  for (int first = 0; first < kNumNear; first += kWidth) {
    const Vec less = load(kNear.scales + first), scales = within_floats(less + own_scale, splat(0), largest);
    const Vec beside = round_all(less * step) + load(kNear.minima + first);
    const Vec minima = within_floats(beside + own_minimum, splat(-kMostInteger), largest);
    const Vec size = scales * units[0], start = minima * units[1], inverse = size > 0 ? splat(1) / size : splat(0);
    Vec squares = {};
    for (int64_t i = 0; i < count; ++i) {
      const Vec value = splat(x[i]) + start, code = within(value * inverse + kMagic, 0, most) - kMagic;
      const Vec error = subtract_product(code, size, value);
      squares = multiply_add(error, error, squares);
    }
    for (int i = 0; i < kWidth; ++i) {
      if (!(squares[i] < best)) continue;
      best = squares[i];
      *scale = scales[i];
      *minimum = minima[i];
    }
  }
}

void find_range(const float* x, int64_t count, float* least, float* most) {
  const Range range = Range::of(x, count);
  *least = range.least;
  *most = range.most;
}

void encode_group(const float* x, int64_t count, const CodeLine& line, uint8_t* codes) {
  const float inverse = line.scale > 0 ? 1 / line.scale : 0;
  for (int64_t i = 0; i < count; ++i) {
    const float code = (x[i] + line.minimum) * inverse;
    codes[i] = static_cast<uint8_t>(code > 0 ? (code < line.most ? code : line.most) + 0.5f : 0);
  }
}

void quantize_symmetric4(const float* x, int64_t count, uint8_t* codes, float* scale) {
  *scale = search(x, count, kEnds4, -8, 7);
  encode(x, count, *scale, -8, 7, codes);
}

// The same as _quantize_fp8_rows in vllm_lite/kernels/grouped.py.
void quantize_group_fp8(const float* from, int64_t count, uint8_t* codes, float* scale) {
  alignas(64) float x[kQuantGroup] = {};
  std::memcpy(x, from, static_cast<size_t>(count) * sizeof *x);
  const float least = std::fabs(largest_of(x, count)) / 448;
  *scale = to_bfloat16(least);
  float best = INFINITY;
  for (int i = 0; i < kNumTried; ++i) {
    const float tried = to_bfloat16(least * (1 + static_cast<float>(i) / kNumTried));
    const float error = error_as_fp8(x, count, tried);
    if (!(error < best)) continue;
    best = error;
    *scale = tried;
  }
  for (int64_t i = 0; i < count; i += kWidth) {
    store_some(reinterpret_cast<Fp8E4M3*>(codes + i), load(x + i) * inverse_for_fp8(*scale),
               static_cast<int>(count - i));
  }
}

}  // namespace VLLM_LITE_ISA
