// Quantizes rows for products with bytes, if the machine has instructions for these; see ../linear.h for the formats.
#include "quantize_batches.h"
#include "quantize_group.h"

namespace VLLM_LITE_ISA {
namespace {

#if defined(VLLM_LITE_MULTIPLIES_BYTES)
// Quantizes a task, one group of rows after the other, each of which writes its part of the panel from the first byte
// to the last. kFours: rows have LargeFours.
template <class T, int64_t kSize, int kPlanes, bool kFours>
void quantize_one_by_one(const LinearCall& call, const QuantizeTask& task) {
  const RowQuantizer<T> quantizer{call};
  const RowLayout& layout = call.quantized->layout;
  const RowGroups groups = RowGroups::of(layout, task.num_rows);
  int8_t* panel = call.quantized->values + task.first_row * layout.value_bytes();
  constexpr int kTogether = kPlanesApart ? 1 : kPlanes;
  constexpr int64_t kPlane = kSize * kTogether;
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
      // A second plane that is 0 in all rows is not read, so it is not written: up to half of all bytes.
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

// The same, whole groups of kOnePlane inputs kWidth at a time.
template <class T, int64_t kSize, int kPlanes, bool kFours>
void quantize_groups(const LinearCall& call, const QuantizeTask& task) {
  QuantizeTask rest = task;
#if defined(__AVX512F__)
  if constexpr (kSize == kOnePlane && (kPlanes == 1 || kFours)) {
    const int64_t left = call.weight->num_inputs / kSize - task.first_group, end = task.first_group + task.num_groups;
    const int64_t whole = call.weight->order != nullptr ? 0 : left < task.num_groups ? left : task.num_groups;
    if (whole > 0) {
      quantize_batches<T, kFours>(call, {task.first_row, task.num_rows, task.first_group, whole, false});
      rest.first_group += whole;
      rest.num_groups = end - rest.first_group;
    }
  }
#endif
  quantize_one_by_one<T, kSize, kPlanes, kFours>(call, rest);
}

#if defined(__AVX512VNNI__)  // all machines with tiles have it
// Stores the integers of a group as bfloat16, in the order in which tiles read them; the lower plane is at to + plane.
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

// Quantizes a task with the group size, planes and fours of its RowLayout.
template <class T>
void quantize_panel(const LinearCall& call, const QuantizeTask& task) {
  const RowLayout& layout = call.quantized->layout;
  const bool two = layout.num_planes == 2;
#if defined(__AVX512VNNI__)
  if (task.for_tiles) return quantize_panel_for_tiles<T>(call, task);
#endif
  if (layout.group_size == 16)
    return two ? quantize_groups<T, 16, 2, kLargeFours>(call, task) : quantize_groups<T, 16, 1, false>(call, task);
  if (layout.group_size == 32)
    return two ? quantize_groups<T, 32, 2, kLargeFours>(call, task) : quantize_groups<T, 32, 1, false>(call, task);
#if defined(VLLM_LITE_LARGE_FOURS)
  if (layout.has_fours) {
    return layout.group_size == 64 ? quantize_groups<T, 64, 2, true>(call, task)
                                   : quantize_groups<T, 128, 2, true>(call, task);
  }
#endif
  layout.group_size == 64 ? quantize_groups<T, 64, 2, false>(call, task)
                          : quantize_groups<T, 128, 2, false>(call, task);
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
