// Chooses the instruction set when the library is loaded: the one that VLLM_LITE_ISA names, or the best that the
// machine supports.
#include "isa.h"

#include <cstdlib>
#include <cstring>

#include "common.h"

#ifdef VLLM_LITE_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef VLLM_LITE_ARM
#include <sys/auxv.h>
#endif

namespace {

constexpr const char* kNames[kNumIsas] = {"baseline", "avx2",         "avx512",   "avx512_bf16",
                                          "amx",      "amx_emulated", "neon_dot", "neon_i8mm"};
#ifdef VLLM_LITE_AMX
constexpr bool kHasAmx = true;
#else
constexpr bool kHasAmx = false;  // of this library, whatever the machine has
#endif
constexpr Isa kNone = static_cast<Isa>(-1);

// Whether the processor has tile registers, and the system lets this process use them. Linux requires a request before
// the first use; its answer holds for all threads.
[[maybe_unused]] bool has_tiles() {
#ifdef VLLM_LITE_AMX
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24, kInt8 = 1u << 25;  // of leaf 7, EDX
  constexpr long kRequestPermission = 0x1023, kTileData = 18;                // ARCH_REQ_XCOMP_PERM, XTILEDATA
  unsigned a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & kBf16) == 0 || (d & kTiles) == 0 || (d & kInt8) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// Whether this library was compiled with the set.
bool built(Isa set) {
#ifdef VLLM_LITE_ONLY
#define VLLM_LITE_TEXT_OF(name) #name
#define VLLM_LITE_TEXT(name) VLLM_LITE_TEXT_OF(name)
  const bool is_only = std::strcmp(kNames[static_cast<int>(set)], VLLM_LITE_TEXT(VLLM_LITE_ONLY)) == 0;
  return is_only || (is_amx(set) && kHasAmx);
#else
  return !is_amx(set) || kHasAmx;
#endif
}

#ifdef VLLM_LITE_ARM
// Tests bits of Linux's auxiliary vector. Literals, because older systems lack names for some.
bool has_all(unsigned long vector, unsigned long bits) {
  return (getauxval(vector) & bits) == bits;
}
bool has_dot_products() {  // and the extensions of Armv8.1, which compilers then use as well
  constexpr unsigned long kAtomics = 1ul << 8, kDoubling = 1ul << 12, kDots = 1ul << 20;
  return has_all(AT_HWCAP, kAtomics | kDoubling | kDots);
}
bool has_matrix_products() {
  constexpr unsigned long kInt8 = 1ul << 13, kBf16 = 1ul << 14;
  return has_dot_products() && has_all(AT_HWCAP2, kInt8 | kBf16);
}
#endif

bool supported(Isa set) {
  if (!built(set)) return false;
#ifdef VLLM_LITE_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  return set == Isa::kBaseline || (set == Isa::kAvx2 && avx2) || (set == Isa::kAvx512 && avx512) ||
         (set == Isa::kAvx512Bf16 && bf16) || (set == Isa::kAmx && bf16 && has_tiles()) ||
         (set == Isa::kAmxEmulated && bf16 && kHasAmx);
#elif defined(VLLM_LITE_ARM)
  return set == Isa::kBaseline || (set == Isa::kNeonDot && has_dot_products()) ||
         (set == Isa::kNeonI8mm && has_matrix_products());
#else
  return set == Isa::kBaseline;
#endif
}

// The set to use; kNone if the machine supports none of this library's.
Isa choose() {
  Isa best = kNone;
  const char* wanted = std::getenv("VLLM_LITE_ISA");
  for (int i = 0; i < kNumIsas; ++i) {
    const Isa set = static_cast<Isa>(i);
    if (!supported(set)) continue;
    if (set != Isa::kAmxEmulated) best = set;
    if (wanted != nullptr && std::strcmp(wanted, kNames[i]) == 0) return set;
  }
  return best;
}

Isa chosen = choose();

}  // namespace

Isa isa() {
  return chosen;
}

// The number of the set in use; -1 if the library was built for another processor, and no kernel may be called.
VLLM_LITE_API int32_t vllm_lite_isa() {
  return static_cast<int32_t>(chosen);
}

// For tests; no kernel may be running. Returns 0 and changes nothing if the machine does not support the set.
VLLM_LITE_API int32_t vllm_lite_set_isa(int32_t set) {
  if (set < 0 || set >= kNumIsas || !supported(static_cast<Isa>(set))) return 0;
  chosen = static_cast<Isa>(set);
  return 1;
}
