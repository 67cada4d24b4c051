// Picks the instruction set when the library is opened: the best that the machine has, or VLLM_LITE_ISA names.
#include "isa.h"

#include <cstdlib>
#include <cstring>

#include "common.h"

namespace {

constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "avx512_bf16"};

bool supported(Isa set) {
#ifdef VLLM_LITE_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  return set == Isa::kBaseline || (set == Isa::kAvx2 && avx2) || (set == Isa::kAvx512 && avx512) ||
         (set == Isa::kAvx512Bf16 && bf16);
#else
  return set == Isa::kBaseline;
#endif
}

Isa choose() {
  Isa best = Isa::kBaseline;
  const char* wanted = std::getenv("VLLM_LITE_ISA");
  for (int i = 0; i < 4; ++i) {
    const Isa set = static_cast<Isa>(i);
    if (!supported(set)) continue;
    best = set;
    if (wanted != nullptr && std::strcmp(wanted, kNames[i]) == 0) return set;
  }
  return best;
}

Isa chosen = choose();

}  // namespace

Isa isa() {
  return chosen;
}

VLLM_LITE_API int32_t vllm_lite_isa() {
  return static_cast<int32_t>(chosen);
}

// For tests, between kernels. Returns 0 and changes nothing where the machine does not have the set.
VLLM_LITE_API int32_t vllm_lite_set_isa(int32_t set) {
  if (set < 0 || set > 3 || !supported(static_cast<Isa>(set))) return 0;
  chosen = static_cast<Isa>(set);
  return 1;
}
