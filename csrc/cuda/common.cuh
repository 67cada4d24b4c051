// Shared code of the kernels in this folder. The only file with PTX, and the only one with code for both compilers:
// NVRTC for the GPU, and g++ with csrc/emulator for the tests.
//
// It needs no CUDA header, so that kernels compile on a machine with only NVRTC. Rules for kernels:
//   - shared memory only through DYNAMIC_SHARED, with its size given at the launch;
//   - vectors are accessed by load_as, store_as and load_stream, which tests check for alignment;
//   - no thread leaves before a barrier that another thread of its block reaches; warp operations have a full mask;
//   - element offsets into caches are int64: a cache may have more than 2^31 elements.
//
// Contents: types; float conversions (to_float, from_float<T>, pack2<T>, unpack2<T>, widen2<T>, unpack); memory
// (load_as<V>, store_as, load_stream, prefetch_l2, Vec<T, N>); mma_m16n8k16<T>; fma2<T>; transpose_8x8; exp2_fast,
// log2_fast; group_sum<N>, group_max<N>, warp_sum, warp_max, block_sum, block_max; ceil_div, round_up; copy_async_16,
// copy_async_wait, copy_async_commit, copy_async_wait_but<N>, load_matrices, load_matrices_transposed; subtract_exact,
// divide_exact.
#pragma once
#ifndef __CUDACC__
#include "cuda_on_cpu.h"
#endif

using int64 = long long;
using uint64 = unsigned long long;
using uint32 = unsigned int;
using uint16 = unsigned short;
using uint8 = unsigned char;

// ---- element types: bits only; arithmetic is in float

struct __half {
  uint16 bits;
};
struct __nv_bfloat16 {
  uint16 bits;
};
struct fp8_e4m3 {  // largest 448, no infinity; torch.float8_e4m3fn
  uint8 bits;
};
struct fp8_e5m2 {  // the upper byte of a half; torch.float8_e5m2
  uint8 bits;
};

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;
template <class T>
constexpr bool kIsFp8 = kSame<T, fp8_e4m3> || kSame<T, fp8_e5m2>;

// N elements moved by one instruction if N * sizeof(T) is 1, 2, 4, 8 or 16 bytes.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T at[N];
};

// ---- what the two compilers say differently

#ifdef __CUDACC__

#ifndef INT_MAX
#define INT_MAX 0x7fffffff
#endif
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

#define DYNAMIC_SHARED(T, name)                       \
  extern __shared__ uint4 vllm_lite_dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(vllm_lite_dynamic_shared)

__device__ __forceinline__ float half_bits_to_float(uint16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ __forceinline__ uint16 float_to_half_bits(float value) {
  uint16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ __forceinline__ uint16 float_to_bfloat16_bits(float value) {
  uint16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Two floats, rounded to nearest, as a pair of T: `low` in the low half, which is the element at the lower address.
template <class T>
__device__ __forceinline__ unsigned pack2(float low, float high) {
  static_assert(kSame<T, __half> || kSame<T, __nv_bfloat16>);
  unsigned pair;
  if constexpr (kSame<T, __half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// d += a * b for tiles 16x16 (row major) and 16x8 (column major); the layout over lanes is in the PTX manual, under
// mma.m16n8k16. All lanes of the warp must call it.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  static_assert(kSame<T, __half> || kSame<T, __nv_bfloat16>);
  if constexpr (kSame<T, __half>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8x8 matrix of 16-bit elements, spread over the warp as a quarter of an mma operand (lane: row lane / 4,
// columns 2 * (lane % 4) and the next); the result has the same layout. All lanes of the warp must call it.
__device__ __forceinline__ unsigned transpose_8x8(unsigned pair) {
  unsigned transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// a * b + c for pairs of T, each rounded once.
template <class T>
__device__ __forceinline__ unsigned fma2(unsigned a, unsigned b, unsigned c) {
  static_assert(kSame<T, __half> || kSame<T, __nv_bfloat16>);
  unsigned pair;
  if constexpr (kSame<T, __half>)
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}

// Loads 16 bytes at a 16-byte boundary that no thread of the launch writes and that are read once, without L1.
__device__ __forceinline__ uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Prefetches the 128 bytes around p to L2, without waiting.
__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Loads sizeof(V) bytes at an address that is a multiple of it.
template <class V>
__device__ __forceinline__ V load_as(const void* p) {
  return *static_cast<const V*>(p);
}
template <class V>
__device__ __forceinline__ void store_as(void* p, const V& value) {
  *static_cast<V*>(p) = value;
}

// Error up to 2 units in the last place; exp2_fast(-INFINITY) is 0, log2_fast(0) is -INFINITY.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#else  // for the emulator

inline float half_bits_to_float(uint16 bits) {
  return cpu::half_to_float(bits);
}
inline uint16 float_to_half_bits(float value) {
  return cpu::float_to_half(value);
}
inline uint16 float_to_bfloat16_bits(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;      // the GPU's NaN
  return uint16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to nearest, ties to even
}
template <class T>
unsigned pack2(float low, float high) {
  static_assert(kSame<T, __half> || kSame<T, __nv_bfloat16>);
  if constexpr (kSame<T, __half>)
    return unsigned(float_to_half_bits(high)) << 16 | float_to_half_bits(low);
  else
    return unsigned(float_to_bfloat16_bits(high)) << 16 | float_to_bfloat16_bits(low);
}
template <class T>
float2 unpack2(unsigned pair);
template <class T>
unsigned fma2(unsigned a, unsigned b, unsigned c) {  // rounded twice if float has too few bits; products of T are exact
  const float2 x = unpack2<T>(a), y = unpack2<T>(b), z = unpack2<T>(c);
  return pack2<T>(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y));
}
template <class T>
void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int line = __builtin_LINE()) {
  const float2 a0 = unpack2<T>(a[0]), a1 = unpack2<T>(a[1]), a2 = unpack2<T>(a[2]), a3 = unpack2<T>(a[3]);
  const float2 b_low = unpack2<T>(b0), b_high = unpack2<T>(b1);
  const float wide_a[8] = {a0.x, a0.y, a1.x, a1.y, a2.x, a2.y, a3.x, a3.y};
  const float wide_b[4] = {b_low.x, b_low.y, b_high.x, b_high.y};
  cpu::mma_m16n8k16(d, wide_a, wide_b, line);
}
inline unsigned transpose_8x8(unsigned pair, int line = __builtin_LINE()) {
  const int row = cpu::lane() / 4, quad = cpu::lane() % 4, from = 8 * quad + row / 2;
  const unsigned low = __shfl_sync(~0u, pair, from, 32, line), high = __shfl_sync(~0u, pair, from + 4, 32, line);
  return __byte_perm(low, high, row & 1 ? 0x7632 : 0x5410);
}
template <class V>
V load_as(const void* p, int line = __builtin_LINE()) {
  cpu::check_aligned(p, sizeof(V), line);
  return *static_cast<const V*>(p);
}
template <class V>
void store_as(void* p, const V& value, int line = __builtin_LINE()) {
  cpu::check_aligned(p, sizeof(V), line);
  *static_cast<V*>(p) = value;
}
inline void prefetch_l2(const void* p) {  // reads like a GPU, so that invalid addresses are detected
  static_cast<void>(*static_cast<const volatile char*>(p));
  cpu::note_prefetch(p);
}
inline uint4 load_stream(const void* p, int line = __builtin_LINE()) {
  return load_as<uint4>(p, line);
}
inline float exp2_fast(float x) {
  return exp2f(x);
}
inline float log2_fast(float x) {
  return log2f(x);
}

#endif

// ---- conversions

__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(__half x) {
  return half_bits_to_float(x.bits);
}
__device__ __forceinline__ float to_float(__nv_bfloat16 x) {
  return __uint_as_float(unsigned(x.bits) << 16);
}
__device__ __forceinline__ float to_float(fp8_e5m2 x) {
  return half_bits_to_float(uint16(x.bits << 8));
}
__device__ __forceinline__ float to_float(fp8_e4m3 x) {
  // As a half, its value is 2^-8 of the fp8 value, subnormals included. (As a float, subnormals would be flushed to 0.)
  const unsigned magnitude = x.bits & 0x7f;
  if (magnitude == 0x7f) return __uint_as_float(0x7fc00000);
  return half_bits_to_float(uint16(unsigned(x.bits & 0x80) << 8 | magnitude << 7)) * 256.f;
}

// Float to an 8-bit format with MANTISSA bits and exponent bias BIAS: rounded to nearest, ties to even; too large
// values and infinity become the largest finite number (code LARGEST), NaN becomes 0x7f.
template <int MANTISSA, int BIAS, int LARGEST>
__device__ __forceinline__ uint8 to_fp8_bits(float x) {
  const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint8(sign | 0x7f);
  constexpr unsigned kSmallestNormal = (128 - BIAS) << 23;  // 2^(1 - BIAS)
  unsigned code;
  if (magnitude < kSmallestNormal) {
    // Subnormals are multiples of 2^(1 - BIAS - MANTISSA); a sum with 2^23 of these units has just that resolution.
    constexpr unsigned kSteps = (128 - BIAS - MANTISSA + 23) << 23;
    code = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(kSteps)) - kSteps;
  } else {
    constexpr int kDropped = 23 - MANTISSA;
    const unsigned rounded = magnitude + (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1);
    code = (rounded >> kDropped) - ((127 - BIAS) << MANTISSA);
  }
  return uint8(sign | (code < LARGEST ? code : LARGEST));
}

template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (kSame<T, float>)
    return x;
  else if constexpr (kSame<T, __half>)
    return T{float_to_half_bits(x)};
  else if constexpr (kSame<T, __nv_bfloat16>)
    return T{float_to_bfloat16_bits(x)};
  else if constexpr (kSame<T, fp8_e4m3>)
    return T{to_fp8_bits<3, 7, 0x7e>(x)};
  else {
    static_assert(kSame<T, fp8_e5m2>, "no conversion from float to this type");
    return T{to_fp8_bits<2, 15, 0x7b>(x)};
  }
}

// The two elements of a packed pair, the lower address first.
template <class T>
__device__ __forceinline__ float2 unpack2(unsigned pair) {
  return make_float2(to_float(T{uint16(pair & 0xffff)}), to_float(T{uint16(pair >> 16)}));
}

// Two fp8 codes, the lower address in the low byte, as a packed pair of T; bits above them are ignored. Exact, as T has
// more bits. To half it takes 1 instruction (e5m2, and e4m3 from sm_89 on) or 5, to bfloat16 3 more; before sm_89,
// e4m3's NaN becomes 480.
template <class T, class Fp8>
__device__ __forceinline__ unsigned widen2(unsigned codes) {
#ifdef __CUDACC__
  if constexpr (kSame<T, __half> && kSame<Fp8, fp8_e5m2>) return __byte_perm(codes, 0, 0x1404);
  if constexpr (kSame<T, __half> && kSame<Fp8, fp8_e4m3>) {
    unsigned pair;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(uint16(codes)));
#else  // as in to_float: as a half, the value is 2^-8 of the fp8 value; 0x5c00 is 256
    const unsigned upper = __byte_perm(codes, 0, 0x1404);
    const unsigned small = (upper & 0x80008000) | (upper & 0x7f007f00) >> 1;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(small), "r"(0x5c005c00));
#endif
    return pair;
  }
  if constexpr (kSame<T, __nv_bfloat16> && kSame<Fp8, fp8_e4m3>) {
    const float2 pair = unpack2<__half>(widen2<__half, Fp8>(codes));
    return pack2<T>(pair.x, pair.y);
  }
#endif
  return pack2<T>(to_float(Fp8{uint8(codes & 0xff)}), to_float(Fp8{uint8(codes >> 8 & 0xff)}));
}

// 16 bytes of T as floats, in the order of their addresses.
template <class T>
__device__ __forceinline__ void unpack(const uint4& raw, float (&out)[16 / sizeof(T)]) {
  const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      out[i] = __uint_as_float(words[i]);
    } else if constexpr (sizeof(T) == 2) {
      const float2 pair = unpack2<T>(words[i]);
      out[2 * i] = pair.x;
      out[2 * i + 1] = pair.y;
    } else {
#pragma unroll
      for (int b = 0; b < 4; ++b) out[4 * i + b] = to_float(T{uint8(words[i] >> (8 * b) & 0xff)});
    }
  }
}

// ---- reductions. The order of the additions is fixed, so that equal inputs give equal bits.

// Sum over each aligned group of N lanes (N a power of two); every lane gets the result.
template <int N>
__device__ __forceinline__ float group_sum(float x) {
#pragma unroll
  for (int i = N / 2; i; i /= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}
template <int N>
__device__ __forceinline__ float group_max(float x) {
#pragma unroll
  for (int i = N / 2; i; i /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
  return group_sum<32>(x);
}
__device__ __forceinline__ float warp_max(float x) {
  return group_max<32>(x);
}

// Sum over a one-dimensional block of whole warps; every thread gets the result. `scratch` is shared memory for one
// float per warp (32 are always enough); it may be reused when this returns.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0.f;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) x += scratch[w];
  __syncthreads();
  return x;
}
__device__ __forceinline__ float block_max(float x, float* scratch) {
  x = warp_max(x);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = -INFINITY;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) x = fmaxf(x, scratch[w]);
  __syncthreads();
  return x;
}

// ---- integers

template <class A, class B>
__device__ __forceinline__ constexpr auto ceil_div(A a, B b) {  // a >= 0, b > 0
  return (a + b - 1) / b;
}
template <class A, class B>
__device__ __forceinline__ constexpr auto round_up(A a, B b) {
  return ceil_div(a, b) * b;
}

// ---- shared memory: asynchronous copies, and matrices as mma wants them

#ifdef __CUDACC__

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return unsigned(__cvta_generic_to_shared(p));
}
// Starts copying 16 bytes from global to shared memory, past registers and L1; if not `valid`, writes zeros and reads
// nothing. Both addresses are multiples of 16. This thread can read the bytes after copy_async_wait(), others after a
// barrier as well.
__device__ __forceinline__ void copy_async_16(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_all;" : : : "memory");
}
// Makes a group, which may be empty, of this thread's copies since the last group.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" : : : "memory");
}
// Waits for this thread's groups except the last N.
template <int N>
__device__ __forceinline__ void copy_async_wait_but() {
  asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
}
// Loads four 8x8 matrices of 16-bit elements from shared memory. Lane 8 * m + r gives the address of row r of matrix m,
// 16 bytes; lane l gets the elements 2 * (l % 4) and the next of row l / 4 of each matrix or, transposed, of column l /
// 4.
__device__ __forceinline__ void load_matrices(unsigned (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(unsigned (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}

#else

inline void copy_async_16(void* to, const void* from, bool valid, int line = __builtin_LINE()) {
  cpu::copy_async(to, from, valid, 16, line);
}
inline void copy_async_wait() {
  cpu::copy_async_wait();
}
inline void copy_async_commit() {
  cpu::copy_async_commit();
}
template <int N>
void copy_async_wait_but() {
  cpu::copy_async_wait_but(N);
}
inline void load_matrices(unsigned (&m)[4], const void* row, int line = __builtin_LINE()) {
  cpu::load_matrices(m, row, false, line);
}
inline void load_matrices_transposed(unsigned (&m)[4], const void* row, int line = __builtin_LINE()) {
  cpu::load_matrices(m, row, true, line);
}

#endif

// ---- arithmetic that is the same on every device

// Rounded to nearest even, including subnormals, which the compiler's options would flush to 0.
__device__ __forceinline__ float subtract_exact(float a, float b) {
#ifdef __CUDACC__
  float difference;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
  return difference;
#else
  return a - b;
#endif
}
__device__ __forceinline__ float divide_exact(float a, float b) {
#ifdef __CUDACC__
  float quotient;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  return quotient;
#else
  return a / b;
#endif
}
