// CUDA's device functions for the emulator: warp operations, atomics, bits, conversions, mma. See cuda_on_cpu.h.
#pragma once

namespace cpu {
inline void whole_warp(unsigned mask, const char* operation, int line) {
  if (mask != ~0u) fail("a mask of fewer than 32 lanes is not emulated", operation, line);
  if (linear_thread() / kWarp * kWarp + kWarp > block_threads)
    fail("a warp-wide operation in a warp of fewer than 32 threads", operation, line);
}
inline Exchange& next_exchange() {
  return exchanges[linear_thread() / kWarp][self->parity ^= 1];
}

// Shows `value` to the other lanes; the values of all lanes once each has come here.
template <class T>
struct Shown {
  const Exchange& all;
  T operator[](int lane) const {
    T value;
    std::memcpy(&value, all.lanes[lane], sizeof value);
    return value;
  }
};
template <class T>
Shown<T> show(unsigned mask, const T& value, const char* operation, int line) {
  static_assert(sizeof(T) <= 16);
  whole_warp(mask, operation, line);
  Exchange& mine = next_exchange();
  std::memcpy(mine.lanes[lane()], &value, sizeof value);
  park(kWarpOp, operation, line);
  return {mine};
}

// Operands in the fragment layout of the PTX manual for mma.m16n8k16, widened to float: a[2 * register + half], b
// alike. Sums in the order of k, in float32; a tensor core has its own order.
inline void mma_m16n8k16(float (&d)[4], const float (&a)[8], const float (&b)[4], int line) {
  whole_warp(~0u, "mma", line);
  const int row = lane() / 4, col = lane() % 4 * 2;
  Exchange& mine = next_exchange();
  for (int i = 0; i < 4; ++i)
    for (int h = 0; h < 2; ++h) mine.a[row + (i & 1) * 8][col + (i >> 1) * 8 + h] = a[2 * i + h];
  for (int i = 0; i < 2; ++i)
    for (int h = 0; h < 2; ++h) mine.b[row][col + i * 8 + h] = b[2 * i + h];
  park(kWarpOp, "mma", line);
  for (int i = 0; i < 4; ++i) {
    float sum = 0;
    for (int k = 0; k < 16; ++k) sum += mine.a[row + (i >> 1) * 8][k] * mine.b[col + (i & 1)][k];
    d[i] += sum;
  }
}

inline float half_to_float(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return float(half);
}
inline uint16_t float_to_half(float value) {
  const _Float16 half = _Float16(value);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
inline void check_aligned(const void* p, size_t bytes, int line) {
  if (reinterpret_cast<uintptr_t>(p) % bytes) fail("the address of a vector access is not aligned", "access", line);
}
}  // namespace cpu

inline void __syncthreads(int line = __builtin_LINE()) {
  cpu::park(cpu::kBarrier, "__syncthreads", line);
}
inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
  cpu::whole_warp(mask, "__syncwarp", line);
  cpu::park(cpu::kWarpOp, "__syncwarp", line);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
  const auto all = cpu::show(mask, value, "__shfl_sync", line);
  return all[(cpu::lane() & ~(width - 1)) | (source & (width - 1))];
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, int line = __builtin_LINE()) {
  const auto all = cpu::show(mask, value, "__shfl_xor_sync", line);
  const int source = cpu::lane() ^ bits;
  return all[source / width == cpu::lane() / width ? source : cpu::lane()];
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const auto all = cpu::show(mask, value, "__shfl_down_sync", line);
  const int source = cpu::lane() + int(delta);
  return all[source / width == cpu::lane() / width ? source : cpu::lane()];
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const auto all = cpu::show(mask, value, "__shfl_up_sync", line);
  const int source = cpu::lane() - int(delta);
  return all[source >= 0 && source / width == cpu::lane() / width ? source : cpu::lane()];
}
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  const auto all = cpu::show(mask, predicate != 0, "__ballot_sync", line);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= unsigned(all[i]) << i;
  return bits;
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, predicate, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, predicate, line) == ~0u;
}
// One thread runs at a time, so that plain reads and writes are atomic.
template <class T>
T atomicAdd(T* p, std::common_type_t<T> value) {
  const T old = *p;
  *p = T(old + value);
  return old;
}
template <class T>
T atomicMax(T* p, std::common_type_t<T> value) {
  const T old = *p;
  if (value > old) *p = value;
  return old;
}
template <class T>
T atomicMin(T* p, std::common_type_t<T> value) {
  const T old = *p;
  if (value < old) *p = value;
  return old;
}
template <class T>
T atomicOr(T* p, std::common_type_t<T> value) {
  const T old = *p;
  *p = old | value;
  return old;
}
template <class T>
T atomicAnd(T* p, std::common_type_t<T> value) {
  const T old = *p;
  *p = old & value;
  return old;
}
template <class T>
T atomicExch(T* p, std::common_type_t<T> value) {
  const T old = *p;
  *p = value;
  return old;
}
template <class T>
T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> value) {
  const T old = *p;
  if (old == expected) *p = value;
  return old;
}

template <class To, class From>
To bit_cast_to(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float __int_as_float(int x) {
  return bit_cast_to<float>(x);
}
inline float __uint_as_float(unsigned x) {
  return bit_cast_to<float>(x);
}
namespace cpu {
inline std::vector<const void*> prefetched;  // what was brought to L2 since a test last asked, as far as that is kept

inline void note_prefetch(const void* p) {
  if (prefetched.size() < 1 << 16) prefetched.push_back(p);
}
}  // namespace cpu

inline int __float_as_int(float x) {
  return bit_cast_to<int>(x);
}
inline unsigned __float_as_uint(float x) {
  return bit_cast_to<unsigned>(x);
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __popcll(unsigned long long x) {
  return __builtin_popcountll(x);
}
inline int __clz(int x) {
  return x ? __builtin_clz(unsigned(x)) : 32;
}
inline int __clzll(long long x) {
  return x ? __builtin_clzll((unsigned long long)x) : 64;
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
  return __builtin_ffsll(x);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return unsigned(uint64_t(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)(a)*b >> 64);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t both = uint64_t(y) << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i) & 0xf, byte = unsigned(both >> (8 * (pick & 7)) & 0xff);
    out |= (pick & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << (8 * i);  // bit 3: the sign, eight times
  }
  return out;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}

inline float __expf(float x) {
  return expf(x);
}
inline float __logf(float x) {
  return logf(x);
}
inline float __log2f(float x) {
  return log2f(x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float x) {
  return 1.f / x;
}
inline float __fsqrt_rn(float x) {
  return sqrtf(x);
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fmaf_rn(float a, float b, float c) {
  return fmaf(a, b, c);
}
inline float rsqrtf(float x) {
  return 1.f / sqrtf(x);
}
inline int __float2int_rn(float x) {
  return int(nearbyintf(x));
}
inline int __float2int_rz(float x) {
  return int(x);
}
inline float __saturatef(float x) {
  return x > 0.f ? (x < 1.f ? x : 1.f) : 0.f;
}

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(b) : T(a);
}
