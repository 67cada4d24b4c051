// Which instruction set kernels use. The files in isa/ are compiled once for each set of this list, each time with
// VLLM_LITE_ISA defined as the name of their namespace.
//
// Trap: an inline function or a template with external linkage (of the standard library, too) would exist once for each
// set under one name, and the linker would keep any of them, perhaps one that this machine cannot run. Everything in
// isa/ is therefore in namespace VLLM_LITE_ISA or static, and nothing of <algorithm> or <vector> is used there.
#pragma once

enum class Isa {
  kBaseline = 0,  // of Arm, too, where it has vectors and fused multiply-adds
  kAvx2 = 1,
  kAvx512 = 2,
  kAvx512Bf16 = 3,
  kAmx = 4,
  kAmxEmulated = 5,
  kNeonDot = 6,
  kNeonI8mm = 7
};
constexpr int kNumIsas = 8;

Isa isa();

static inline bool is_amx(Isa set) {
  return set == Isa::kAmx || set == Isa::kAmxEmulated;
}

// The namespaces that a file in isa/ fills.
#if defined(VLLM_LITE_ARM)
#define VLLM_LITE_DECLARE(declaration) \
  namespace baseline {                 \
  declaration;                         \
  }                                    \
  namespace neon_dot {                 \
  declaration;                         \
  }                                    \
  namespace neon_i8mm {                \
  declaration;                         \
  }
#else
#define VLLM_LITE_DECLARE(declaration) \
  namespace baseline {                 \
  declaration;                         \
  }                                    \
  namespace avx2 {                     \
  declaration;                         \
  }                                    \
  namespace avx512 {                   \
  declaration;                         \
  }                                    \
  namespace avx512_bf16 {              \
  declaration;                         \
  }
#endif

// The same for what isa/*_tiles.cpp have for AMX besides, where all else is as for AVX512-BF16.
#define VLLM_LITE_DECLARE_TILES(declaration) \
  VLLM_LITE_DECLARE(declaration)             \
  namespace amx {                            \
  declaration;                               \
  }                                          \
  namespace amx_emulated {                   \
  declaration;                               \
  }

// The address of `name` in the namespace of the set in use. VLLM_LITE_ONLY is the only one that a library was built
// for.
#if defined(VLLM_LITE_ONLY)
#define VLLM_LITE_DISPATCH(name) (&VLLM_LITE_ONLY::name)
#elif defined(VLLM_LITE_X86)
#define VLLM_LITE_DISPATCH(name)                  \
  (isa() >= Isa::kAvx512Bf16 ? &avx512_bf16::name \
   : isa() == Isa::kAvx512   ? &avx512::name      \
   : isa() == Isa::kAvx2     ? &avx2::name        \
                             : &baseline::name)
#elif defined(VLLM_LITE_ARM)
#define VLLM_LITE_DISPATCH(name) \
  (isa() == Isa::kNeonI8mm ? &neon_i8mm::name : isa() == Isa::kNeonDot ? &neon_dot::name : &baseline::name)
#else
#define VLLM_LITE_DISPATCH(name) (&baseline::name)
#endif
#ifdef VLLM_LITE_AMX
#define VLLM_LITE_DISPATCH_TILES(name) \
  (isa() == Isa::kAmx ? &amx::name : isa() == Isa::kAmxEmulated ? &amx_emulated::name : VLLM_LITE_DISPATCH(name))
#else
#define VLLM_LITE_DISPATCH_TILES(name) VLLM_LITE_DISPATCH(name)
#endif
