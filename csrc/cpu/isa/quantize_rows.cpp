// Rows as integers for products with bytes, where the machine has instructions for those; see ../linear.h.
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

constexpr int32_t kLargest = 127;             // of integers of one plane
constexpr int32_t kLargestOfTwo = 127 * 128;  // so that the upper plane's are those, the lower one's from 0 to 127
typedef int8_t Bytes __attribute__((vector_size(kWidth)));

// The sizes of x: that of the largest, where NaN is above all, and what they add up to.
struct Sizes {
  float largest, sum;

  // Whether 8 bits with one scale are too few for so many of them. Few groups are where numbers are spread by chance;
  // in real models those of channels that are larger than others by far.
  bool are_uneven(int64_t count) const { return largest * static_cast<float>(count) > kUneven * sum; }
};

template <class T>
VLLM_LITE_INLINE Sizes sizes_of(const T* x, int64_t count) {
  VecI largest = {};  // as integers the sizes of floats are in order
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

// x, whose largest is of this size, as integers times *scale; NaN or infinity in x make the scale that. put(i,
// integers, count) is called for each vector. Returns the sum of the integers.
template <class T, class Put>
VLLM_LITE_INLINE int32_t quantize_to(const T* x, int64_t count, float size, Range range, float* scale, const Put& put) {
  const float limit = static_cast<float>(range.most);
  *scale = size / limit / static_cast<float>(1 << range.shift);
  const Vec inverse = splat(size > 0 ? limit / size : 0);
  const Vec magic = splat(0x1.8p23f);  // adding it rounds to a whole number, which then is in the lowest bits
  VecI total = {};
  for (int64_t i = 0; i < count; i += kWidth) {
    const int left = static_cast<int>(count - i < kWidth ? count - i : kWidth);
    const Vec shifted = load_some(x + i, left) * inverse + magic;
    const VecI whole = (reinterpret_cast<VecI>(shifted) - reinterpret_cast<VecI>(magic)) << range.shift;
    put(i, whole, left);
    total = total + whole;
  }
  return sum_of(total);
}

// One plane of integers, to [count].
template <class T>
VLLM_LITE_INLINE int32_t quantize_row(const T* x, int64_t count, int8_t* to, float* scale) {
  const float size = sizes_of(x, count).largest;
  return quantize_to(x, count, size, {kLargest}, scale,
                     [to](int64_t i, VecI whole, int left) __attribute__((always_inline)) {
                       const Bytes bytes = __builtin_convertvector(whole, Bytes);
                       std::memcpy(to + i, &bytes, static_cast<size_t>(left));
                     });
}

// The sizes of up to kOnePlane inputs by fours: in each lane that of its four's largest, as integers.
struct FourSizes {
  static constexpr int kVectors = static_cast<int>(kOnePlane) / kWidth;
  VecI largest[kVectors];
  int32_t next = 0;  // the largest but for kNumLarge fours

  template <class T>
  inline __attribute__((always_inline)) FourSizes(const T* x, int64_t count) {
    VecI pairs = {}, fours = {};  // the lanes beside it in pairs, and in fours
    for (int i = 0; i < kWidth; ++i) pairs[i] = i ^ 1, fours[i] = i ^ 2;
    int32_t most[kNumLarge] = {};
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const int64_t left = count - v * kWidth, num = left < kWidth ? left : kWidth;
      VecI size = {};
      if (left > 0) size = reinterpret_cast<VecI>(load_some(x + v * kWidth, static_cast<int>(num))) & 0x7fffffff;
      const VecI beside = __builtin_shuffle(size, pairs), two = beside > size ? beside : size;
      const VecI others = __builtin_shuffle(two, fours);
      largest[v] = others > two ? others : two;
#pragma GCC unroll 4
      for (int i = 0; i < kWidth; i += 4) {
        int32_t own = largest[v][i];
#pragma GCC unroll 4
        for (int32_t& more : most) {
          const int32_t less = own < more ? own : more;
          more = own < more ? more : own;
          own = less;
        }
        next = own > next ? own : next;
      }
    }
  }
  // All bits of the lanes of those fours, or of fewer: one as large as the next is none.
  VecI large(int v) const { return largest[v] > next; }
};

// What kLargest stands for where some fours have 15 bits: the largest of the others, or more where 15 bits are too few.
VLLM_LITE_INLINE float size_without_fours(const Sizes& sizes, const FourSizes& fours) {
  const float next = float_of(static_cast<uint32_t>(fours.next)), least = sizes.largest / 128;
  return next > least ? next : least;
}

#if defined(VLLM_LITE_LARGE_FOURS)
// The same integers: the plane that all inputs have, to [count], and what large ones lack there. *large says whether
// there are some.
template <class T>
VLLM_LITE_INLINE int32_t quantize_row_fours(const T* x, int64_t count, int64_t group, int8_t* to, float* scale,
                                            bool* large, LargeFours* fours) {
  const Sizes sizes = sizes_of(x, count);
  *large = sizes.are_uneven(group);
  *fours = {};
  const auto put_bytes = [](int8_t* to, VecI whole, int left) __attribute__((always_inline)) {
    const Bytes bytes = __builtin_convertvector(whole, Bytes);
    std::memcpy(to, &bytes, static_cast<size_t>(left));
  };
  if (!*large) {
    return quantize_to(x, count, sizes.largest, {kLargest}, scale,
                       [=](int64_t i, VecI whole, int left)
                           __attribute__((always_inline)) { put_bytes(to + i, whole, left); });
  }
  const FourSizes by_four(x, count);
  alignas(64) int8_t upper[kOnePlane];
  uint32_t lanes = 0;  // that have upper bytes
  const float size = size_without_fours(sizes, by_four);
  const int32_t sum = quantize_to(
      x, count, size, {kLargest}, scale, [&](int64_t i, VecI whole, int left) __attribute__((always_inline)) {
        const VecI are_large = by_four.large(static_cast<int>(i / kWidth)), own = (whole + 64) >> 7 & are_large;
        lanes |= static_cast<uint32_t>(_mm512_movepi32_mask(reinterpret_cast<__m512i>(are_large))) << i;
        put_bytes(to + i, whole - (own << 7), left);
        put_bytes(upper + i, own, kWidth);
      });
  lanes &= 0x11111111;
  for (int k = 0; lanes != 0; ++k, lanes &= lanes - 1) {
    const int first = __builtin_ctz(lanes);
    fours->places[k] = static_cast<uint8_t>(first / 4);
    std::memcpy(fours->upper[k], upper + first, 4);
  }
  return sum;
}
#endif

// Integers of 15 bits, to [2 * plane] bytes: those of the upper plane before the lower one's, whole = 128 * upper +
// lower; or words of both. Where *lower is false then, all of the lower plane are 0.
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
    size = size_without_fours(sizes, FourSizes(x, count));
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

// A group of inputs of one row. run() makes its integers, as quantize_row() does or quantize_row_twice(), and what is
// at index `at` of scales and the like. It returns whether there is anything in the lower plane, or in `fours`, which
// take its place.
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
      if (fours != nullptr) return quantize_row_fours(x, count, kSize, to, scale, lower, fours);
#endif
      return quantize_row_twice(x, count, kSize, to, scale, lower);
    }
  }
};

// kBytes of each of `count` rows after the other, then those behind them; kSize of a row, and rows are `stride` apart.
template <int kBytes, int64_t kSize>
VLLM_LITE_INLINE void interleave(const int8_t* rows, int64_t stride, int64_t count, int8_t* to) {
  for (int64_t row = 0; row < count; ++row, rows += stride, to += kBytes) {
#pragma GCC unroll 32
    for (int64_t i = 0; i < kSize; i += kBytes) std::memcpy(to + i * count, rows + i, kBytes);
  }
}

// Group after group of rows, as each writes its part of the panel from the first byte to the last.
template <class T, int64_t kSize, int kPlanes>
void quantize_groups(const LinearCall& call, const QuantizeTask& task) {
  const RowQuantizer<T> quantizer{call};
  const RowLayout& layout = call.quantized->layout;
  const RowGroups groups = RowGroups::of(layout, task.num_rows);
  int8_t* panel = call.quantized->values + task.first_row * layout.value_bytes();
  constexpr int kTogether = kPlanesApart ? 1 : kPlanes;
  constexpr int64_t kPlane = kSize * kTogether;
  constexpr bool kFours = kLargeFours && kPlanes == 2 && kSize <= kOnePlane;
  alignas(64) int8_t integers[kAloneRows<kPlanes>][kPlanes * kSize];
  LargeFours fours[kAloneRows<kPlanes>];
  for (int64_t part = 0; part < groups.count; ++part) {
    const int64_t first = groups.first(part), count = groups.first(part + 1) - first;
    const int64_t scales = (task.first_row + first) * layout.num_groups;
    int8_t* values = panel + first * layout.value_bytes();
    for (int64_t group = task.first_group; group < task.first_group + task.num_groups; ++group) {
      int8_t* to = values + group * kSize * (kFours ? 1 : kPlanes) * count;
      bool any = false;
      for (int64_t row = 0; row < count; ++row) {
        any |= quantizer.template run<kSize, kPlanes>(task.first_row + first + row, group, integers[row],
                                                      scales + group * count + row, kFours ? fours + row : nullptr);
      }
      interleave<4 * kTogether, kPlane>(integers[0], kPlanes * kSize, count, to);
      // What is 0 in all rows is not read either, and is up to half of all that would be written.
      if constexpr (kFours) {
        const size_t bytes = static_cast<size_t>(count) * sizeof *fours;
        if (any) std::memcpy(values + layout.fours(group, count), fours, bytes);
      } else if (kPlanes > kTogether && any) {
        interleave<4, kPlane>(integers[0] + kPlane, kPlanes * kSize, count, to + kPlane * count);
      }
      call.quantized->lower[scales + group] = any;
    }
  }
}

#if defined(__AVX512VNNI__)  // which all machines with tiles have
// Integers of a group as bfloat16, in the order in which tiles take them; those of the lower plane lie `plane` behind.
template <int64_t kSize, int kPlanes>
VLLM_LITE_INLINE void widen_row(const int8_t* integers, BFloat16* to, int64_t plane) {
#pragma GCC unroll 2
  for (int p = 0; p < kPlanes; ++p) {
    const Vec unit = splat(kPlanes == 2 && p == 0 ? 128 : 1);
    for (int64_t i = 0; i < kSize; i += kWidth) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(integers + p * kSize + i));
      const __m512i ordered = _mm512_shuffle_epi32(_mm512_cvtepi8_epi32(bytes), _MM_PERM_DBCA);
      store(to + p * plane + i, to_floats(ordered) * unit);
    }
  }
}

template <class T, int64_t kSize, int kPlanes>
void quantize_short_groups(const LinearCall& call, const QuantizeTask& task) {
  const RowQuantizer<T> quantizer{call};
  const RowLayout& layout = call.quantized->layout;
  for (int64_t first = 0; first < task.num_rows; first += kTileGroup) {
    const int64_t left = task.num_rows - first, count = left < kTileGroup ? left : kTileGroup;
    const int64_t begin = task.first_row + first, scales = begin * layout.num_groups;
    BFloat16* values = reinterpret_cast<BFloat16*>(call.quantized->values + begin * layout.value_bytes());
    for (int64_t group = task.first_group; group < task.first_group + task.num_groups; ++group) {
      bool any = false;
      for (int64_t row = 0; row < count; ++row) {
        alignas(64) int8_t integers[kPlanes * kSize];
        const int64_t place = scales + group * count + row;
        any |= quantizer.template run<kSize, kPlanes>(begin + row, group, integers, place);
        widen_row<kSize, kPlanes>(integers, values + (group * kPlanes * count + row) * kSize, count * kSize);
      }
      call.quantized->lower[scales + group] = any;
    }
  }
}

// Groups of kQuantGroup inputs stay bytes.
template <class T>
void quantize_long_groups(const LinearCall& call, const QuantizeTask& task) {
  constexpr int64_t kSize = kQuantGroup, kLine = 64;
  const RowQuantizer<T> quantizer{call};
  const RowLayout& layout = call.quantized->layout;
  for (int64_t first = 0; first < task.num_rows; first += kLongRows) {
    const int64_t left = task.num_rows - first, count = left < kLongRows ? left : kLongRows;
    const int64_t begin = task.first_row + first, scales = begin * layout.num_groups;
    int8_t* values = call.quantized->values + begin * layout.value_bytes();
    for (int64_t group = task.first_group; group < task.first_group + task.num_groups; ++group) {
      int8_t* to = values + group * 2 * kSize * count;
      for (int64_t row = 0; row < count; ++row, to += kLine) {
        alignas(64) int8_t integers[2 * kSize];
        quantizer.template run<kSize, 2>(begin + row, group, integers, scales + group * count + row);
        for (int64_t i = 0; i < 2 * kSize; i += kLine) std::memcpy(to + i * count, integers + i, kLine);
      }
    }
  }
}

template <class T>
void quantize_panel_for_tiles(const LinearCall& call, const QuantizeTask& task) {
  const RowLayout& layout = call.quantized->layout;
  const bool two = layout.num_planes == 2;
  if (layout.group_size == kQuantGroup) return quantize_long_groups<T>(call, task);
  if (layout.group_size == 16)
    return two ? quantize_short_groups<T, 16, 2>(call, task) : quantize_short_groups<T, 16, 1>(call, task);
  two ? quantize_short_groups<T, 32, 2>(call, task) : quantize_short_groups<T, 32, 1>(call, task);
}
#endif

// Sizes are those of linear.h; what has one plane or goes through tiles is known there, too.
template <class T>
void quantize_panel(const LinearCall& call, const QuantizeTask& task) {
  const RowLayout& layout = call.quantized->layout;
  const bool two = layout.num_planes == 2;
#if defined(__AVX512VNNI__)
  if (task.for_tiles) return quantize_panel_for_tiles<T>(call, task);
#endif
  if (layout.group_size == 16)
    return two ? quantize_groups<T, 16, 2>(call, task) : quantize_groups<T, 16, 1>(call, task);
  if (layout.group_size == 32)
    return two ? quantize_groups<T, 32, 2>(call, task) : quantize_groups<T, 32, 1>(call, task);
  layout.group_size == 64 ? quantize_groups<T, 64, 2>(call, task) : quantize_groups<T, 128, 2>(call, task);
}
#endif

}  // namespace

bool multiplies_bytes() {
#if defined(VLLM_LITE_MULTIPLIES_BYTES)
  return true;
#else
  return false;
#endif
}

void quantize_rows([[maybe_unused]] const LinearCall& call, [[maybe_unused]] const QuantizeTask& task) {
#if defined(VLLM_LITE_MULTIPLIES_BYTES)
  if (call.x_type == kFloat32) return quantize_panel<float>(call, task);
  if (call.x_type == kFloat16) return quantize_panel<Float16>(call, task);
  quantize_panel<BFloat16>(call, task);
#endif
}

}  // namespace VLLM_LITE_ISA
