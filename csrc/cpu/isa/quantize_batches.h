// Quantizes kWidth groups of kOnePlane inputs at a time: their largest values, sums and totals become a vector each, by
// half of the shuffles and a quarter of the additions that each group alone takes, and all that follows from them is
// computed for all at once. The order of sums is that of a group alone, and so are the bits.
#pragma once

#include "quantize_group.h"
#include "row_vectors.h"

#if defined(__AVX512F__)
namespace VLLM_LITE_ISA {
namespace {

// Lanes of a and b, which have items of 2 * kHalf lanes: the first half of each item, or the second one.
template <int kHalf, bool kSecond>
VLLM_LITE_INLINE VecI half_of_items(VecI a, VecI b) {
  VecI places = {};
  for (int i = 0; i < kWidth; ++i) places[i] = i / kHalf * 2 * kHalf + i % kHalf + (kSecond ? kHalf : 0);
  return __builtin_shuffle(a, b, places);
}

struct LargestItem {
  VecI value;
  template <int kHalf>
  VLLM_LITE_INLINE LargestItem joined(LargestItem a, LargestItem b) {
    const VecI x = half_of_items<kHalf, false>(a.value, b.value), y = half_of_items<kHalf, true>(a.value, b.value);
    return {x > y ? x : y};
  }
};

struct TotalItem {
  VecI value;
  template <int kHalf>
  VLLM_LITE_INLINE TotalItem joined(TotalItem a, TotalItem b) {
    return {half_of_items<kHalf, false>(a.value, b.value) + half_of_items<kHalf, true>(a.value, b.value)};
  }
};

struct SizesItem {
  LargestItem largest;
  Vec sum;
  template <int kHalf>
  VLLM_LITE_INLINE SizesItem joined(SizesItem a, SizesItem b) {
    const VecI x = reinterpret_cast<VecI>(a.sum), y = reinterpret_cast<VecI>(b.sum);
    return {LargestItem::joined<kHalf>(a.largest, b.largest),
            reinterpret_cast<Vec>(half_of_items<kHalf, false>(x, y)) +
                reinterpret_cast<Vec>(half_of_items<kHalf, true>(x, y))};
  }
};

// Reduces kWidth vectors next(0), next(1) ... to one with the result of the i-th in lane i.
template <class Item, int kHalf = 1, class Next>
VLLM_LITE_INLINE Item reduced(const Next& next, int first = 0) {
  if constexpr (kHalf == kWidth) {
    return next(first);
  } else {
    const Item a = reduced<Item, 2 * kHalf>(next, first);
    return Item::template joined<kHalf>(a, reduced<Item, 2 * kHalf>(next, first + kWidth / kHalf / 2));
  }
}

VLLM_LITE_INLINE VecI size_bits(Vec x) {
  return reinterpret_cast<VecI>(x) & 0x7fffffff;
}

// FourSizes of kWidth groups.
struct FourBatch {
  static constexpr int kFours = kOnePlane / 4;
  VecI places[kNumLarge], next;

  // sizes: the largest absolute values of the groups' fours.
  explicit inline __attribute__((always_inline)) FourBatch(VecI (&sizes)[kFours]) {
    for (VecI& place : places) {
      VecI most = {};
#pragma GCC unroll 8
      for (int f = 0; f < kFours; ++f) {
        const VecI size = (sizes[f] & ~(kFours - 1)) | f;
        most = size > most ? size : most;
      }
      place = most & (kFours - 1);
#pragma GCC unroll 8
      for (int f = 0; f < kFours; ++f) sizes[f] = place == f ? VecI{} + kTaken : sizes[f];
    }
    next = sizes[0];
#pragma GCC unroll 8
    for (int f = 1; f < kFours; ++f) next = sizes[f] > next ? sizes[f] : next;
  }
};

// Up to kWidth groups of kOnePlane inputs; x has an address for each lane.
template <class T>
struct GroupBatch {
  const T* x[kWidth];
  int count;

  inline __attribute__((always_inline)) SizesItem sizes() const {
    return reduced<SizesItem>([&](int i) __attribute__((always_inline)) -> SizesItem {
      if (i >= count) return SizesItem();
      const VecI a = size_bits(load(x[i])), b = size_bits(load(x[i] + kWidth));
      return {{a > b ? a : b}, reinterpret_cast<Vec>(a) + reinterpret_cast<Vec>(b)};
    });
  }

  inline __attribute__((always_inline)) FourBatch fours() const {
    VecI sizes[FourBatch::kFours];
#pragma GCC unroll 8
    for (int i = 0; i < FourBatch::kFours; ++i) {
      sizes[i] = LargestItem::joined<1>(four_sizes(2 * i), four_sizes(2 * i + 1)).value;  // [2 groups][fours]
    }
    for (int f = 1; f < FourBatch::kFours; f *= 2) {
      VecI split[FourBatch::kFours];
#pragma GCC unroll 4
      for (int i = 0; i < FourBatch::kFours / 2; ++i) {
        split[i] = half_of_items<1, false>(sizes[2 * i], sizes[2 * i + 1]);
        split[i + FourBatch::kFours / 2] = half_of_items<1, true>(sizes[2 * i], sizes[2 * i + 1]);
      }
      std::memcpy(sizes, split, sizeof sizes);
    }
    return FourBatch(sizes);
  }

  // Stores the integers of the groups to [count][kOnePlane]. Returns their sums.
  inline __attribute__((always_inline)) VecI quantize(Vec inverse, int8_t* to) const {
    alignas(64) float inverses[kWidth];
    store(inverses, inverse);
    const TotalItem total = reduced<TotalItem>([&](int i) __attribute__((always_inline)) -> TotalItem {
      if (i >= count) return TotalItem();
      const Vec own = splat(inverses[i]);
      const VecI a = whole_of(load(x[i]), own), b = whole_of(load(x[i] + kWidth), own);
      put_bytes(to + i * kOnePlane, a, kWidth);
      put_bytes(to + i * kOnePlane + kWidth, b, kWidth);
      return {a + b};
    });
    return total.value;
  }

 private:
  // The largest value of each of a group's fours, in two parts.
  inline __attribute__((always_inline)) LargestItem four_sizes(int i) const {
    if (i >= count) return LargestItem();
    return LargestItem::joined<2>({size_bits(load(x[i]))}, {size_bits(load(x[i] + kWidth))});
  }
};

// Replaces the bytes of a group's fours with the largest values by lower bytes, and stores their upper bytes.
template <class T>
VLLM_LITE_INLINE void split_fours(const T* x, float inverse, int32_t (&places)[kNumLarge], int8_t* to,
                                  LargeFours* fours) {
  alignas(64) int8_t uppers[kOnePlane];
  VecI own = {};
  for (int i = 0; i < kWidth; ++i) own[i] = i / 4;
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v, own += kWidth / 4) {
    const VecI whole = whole_of(load(x + v * kWidth), splat(inverse)), upper = (whole + 64) >> 7;
    const VecI large = (own == places[0]) | (own == places[1]);
    put_bytes(uppers + v * kWidth, upper, kWidth);
    put_bytes(to + v * kWidth, whole - ((upper << 7) & large), kWidth);
  }
  for (int k = 0; k < kNumLarge; ++k) {
    fours->places[k] = static_cast<uint8_t>(places[k]);
    std::memcpy(fours->upper[k], uppers + 4 * places[k], 4);
  }
}

// What a batch writes for its groups: integers, LargeFours if rows have them, and numbers of [kWidth].
struct BatchOutput {
  int8_t* integers;
  LargeFours* fours;  // zeros, or nullptr
  float* scales;
  int32_t* biases;
  float* sums;
};

// Returns a bit for each group that has LargeFours. `lacking`: factor of the biases.
template <bool kFours, class T>
uint32_t quantize_batch(const GroupBatch<T>& batch, int32_t lacking, const BatchOutput& out) {
  const SizesItem sizes = batch.sizes();
  const Vec limit = splat(kLargest), largest = reinterpret_cast<Vec>(sizes.largest.value);
  Vec size = largest;
  uint32_t large = 0;
  alignas(64) int32_t places[kNumLarge][kWidth];
  if constexpr (kFours) {
    const VecI are_uneven = largest * static_cast<float>(kOnePlane) > kUneven * sizes.sum;
    large = _mm512_movepi32_mask(reinterpret_cast<__m512i>(are_uneven));
    if (large != 0) {
      const FourBatch fours = batch.fours();
      const Vec next = reinterpret_cast<Vec>(fours.next), least = largest / 128.0f;
      size = are_uneven ? (next > least ? next : least) : size;
      std::memcpy(places, fours.places, sizeof places);
    }
  }
  const Vec inverse = size > 0.0f ? limit / size : Vec{};
  const VecI total = batch.quantize(inverse, out.integers);
  store_at(out.scales, 0, size / limit, batch.count);
  store_at(out.sums, 0, __builtin_convertvector(total, Vec), batch.count);
  const VecI bias = reinterpret_cast<VecI>(_mm512_mullo_epi32(all_ints(lacking), reinterpret_cast<__m512i>(total)));
  store_at(reinterpret_cast<float*>(out.biases), 0, reinterpret_cast<Vec>(bias), batch.count);
  for (uint32_t left = large; left != 0; left &= left - 1) {
    const int i = __builtin_ctz(left);
    int32_t own[kNumLarge];
    for (int k = 0; k < kNumLarge; ++k) own[k] = places[k][i];
    split_fours(batch.x[i], inverse[i], own, out.integers + i * kOnePlane, out.fours + i);
  }
  return large;
}

// Interleaves kCount rows of kOnePlane bytes, 5 or 6: a four of each row, then the next four of each, and so on.
template <int kCount>
VLLM_LITE_INLINE void interleave_fours(const int8_t* rows, int8_t* to) {
  constexpr int kFours = kOnePlane / 4, kNum = kCount * kFours;
  VecI from[3] = {};
  std::memcpy(from, rows, kCount * kOnePlane);
#pragma GCC unroll 3
  for (int first = 0; first < kNum; first += kWidth) {
    VecI places = {};
    for (int i = 0; i < kWidth; ++i) places[i] = (first + i) % kCount * kFours + (first + i) / kCount;
    const VecI two = __builtin_shuffle(from[0], from[1], places);
    const VecI mixed = places >= 2 * kWidth ? __builtin_shuffle(from[2], places) : two;
    constexpr int64_t kBytes = sizeof mixed;
    const int64_t left = 4 * (kNum - first);
    std::memcpy(to + 4 * first, &mixed, static_cast<size_t>(left < kBytes ? left : kBytes));
  }
}

VLLM_LITE_INLINE void interleave_rows(const int8_t* rows, int64_t count, int8_t* to) {
  if (count == 6) return interleave_fours<6>(rows, to);
  if (count == 5) return interleave_fours<5>(rows, to);
  if (count == 1) {
    std::memcpy(to, rows, kOnePlane);
    return;
  }
  interleave<4, kOnePlane>(rows, kOnePlane, count, to);
}

// Quantizes groups of inputs of the rows that a product multiplies together, and writes them one after the other.
template <class T, bool kFours>
struct BatchQuantizer {
  const LinearCall& call;
  const RowLayout& layout = call.quantized->layout;
  const int32_t lacking = call.weight->offset + taken_off(*call.weight);
  static constexpr int kPlanes = kFours ? 2 : 1;
  static constexpr int kMost = kWidth * kAloneRows<kPlanes>;
  alignas(64) int8_t integers[kMost * kOnePlane];
  LargeFours fours[kFours ? kMost : 1];

  explicit BatchQuantizer(const LinearCall& own) : call(own) {}  // the arrays are not filled with zeros

  // Up to kWidth groups of the rows from `row` on.
  void run(int64_t row, int64_t count, int64_t group, int64_t num_groups) {
    const QuantizedRows rows = call.quantized->from(row);
    const int64_t num = num_groups * count, begin = group * count;
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride + group * kOnePlane;
    bool large[kWidth] = {};
    if (kFours) std::memset(fours, 0, static_cast<size_t>(num) * sizeof *fours);
    int64_t own_group = 0, own_row = 0;
    const T* next = x;
    for (int64_t first = 0; first < num; first += kWidth) {
      GroupBatch<T> batch;
      batch.count = num - first < kWidth ? static_cast<int>(num - first) : kWidth;
      const int64_t begin_group = own_group, begin_row = own_row;
      for (int i = 0; i < batch.count; ++i) {
        batch.x[i] = next;
        // Prefetch the next rows: a little is read of several in turn, which the hardware does not predict.
        __builtin_prefetch(next + count * call.x_stride);
        next += call.x_stride;
        if (++own_row == count) own_row = 0, next = x + ++own_group * kOnePlane;
      }
      const int64_t at = begin + first;
      const BatchOutput out = {integers + first * kOnePlane, kFours ? fours + first : nullptr, rows.scales + at,
                               rows.biases + at, rows.sums + at};
      uint32_t bits = quantize_batch<kFours>(batch, lacking, out);
      for (; bits != 0; bits &= bits - 1) large[begin_group + (begin_row + __builtin_ctz(bits)) / count] = true;
    }
    store_groups(rows, count, group, num_groups, large);
  }

 private:
  void store_groups(const QuantizedRows& rows, int64_t count, int64_t group, int64_t num_groups,
                    const bool (&large)[kWidth]) const {
    const size_t bytes = static_cast<size_t>(count) * sizeof *fours;
    for (int64_t i = 0; i < num_groups; ++i) {
      interleave_rows(integers + i * count * kOnePlane, count, rows.values + (group + i) * kOnePlane * count);
      if (kFours && large[i]) std::memcpy(rows.values + layout.fours(group + i, count), fours + i * count, bytes);
      rows.lower[group + i] = large[i];
    }
  }
};

// Quantizes whole groups of a task, without an order of columns.
template <class T, bool kFours>
void quantize_batches(const LinearCall& call, const QuantizeTask& task) {
  BatchQuantizer<T, kFours> quantizer(call);
  const RowGroups groups = RowGroups::of(call.quantized->layout, task.num_rows);
  const int64_t end = task.first_group + task.num_groups;
  for (int64_t part = 0; part < groups.count; ++part) {
    const int64_t row = groups.first(part), count = groups.first(part + 1) - row;
    for (int64_t group = task.first_group; group < end; group += kWidth) {
      quantizer.run(task.first_row + row, count, group, end - group < kWidth ? end - group : kWidth);
    }
  }
}

}  // namespace
}  // namespace VLLM_LITE_ISA
#endif
