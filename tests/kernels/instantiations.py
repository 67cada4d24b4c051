"""Every kernel that production code can launch: for each template the choices of arguments that take most registers.

`max_registers` is a ceiling: above it fewer blocks share a multiprocessor than the kernel's design counts on. Raise one
only with a reason. tests/kernels/test_nvrtc.py compiles them all.
"""

from typing import NamedTuple


class Instantiation(NamedTuple):
    source: str  # file of csrc/cuda
    name: str
    max_registers: int


def _paged_attention() -> list[Instantiation]:
    half, bf16 = "__half", "__nv_bfloat16"
    found = []
    for scalar, kv in ((bf16, bf16), (half, "fp8_e4m3"), (bf16, "fp8_e5m2"), ("float", "float")):
        kernels = [
            *(f"paged_attention_v1<{scalar}, {kv}, {shape}>" for shape in ("128, 16", "256, 8", "256, 128")),
            *(f"paged_attention_v2<{scalar}, {kv}, {shape}>" for shape in ("128, 16", "256, 128")),
        ]
        found += [Instantiation("paged_attention.cuh", name, 128) for name in kernels]
        found.append(Instantiation("paged_attention.cuh", f"paged_attention_v2_reduce<{scalar}, 256>", 64))
    return found


_PAIR = ("__nv_bfloat16", "__nv_bfloat16")


def _small_operations() -> list[Instantiation]:
    """The fused operations, cache writes and copies, by 16 bytes and by single elements; masks and the sampler."""
    fused, stores = (
        ("rms_norm", "add_rms_norm", "rotate", "silu_and_mul", "gelu_and_mul", "add_gated"),
        ("reshape", "rope"),
    )
    found = [("cache_ops.cuh", f"copy_blocks<{unit}>") for unit in ("uint4", "uint8")]
    found.append(("routing.cuh", "route"))
    found += [("lora.cuh", f"lora_shrink<{kind}>") for kind in ("__half, 8", "__nv_bfloat16, 8", "__nv_bfloat16, 1")]
    found += [("lora.cuh", f"lora_expand<{scalar}, {out}>") for scalar, out in (("__half", "float"), _PAIR)]
    found += [
        (f"{file}.cuh", f"{kernel}<{n}>")
        for file, kernel in (
            *(("sampler", kernel) for kernel in ("pick", "best_part", "coarse_part", "draw_part")),
            ("masks", "rule_out"),
        )
        for n in (4, 1)
    ]
    for scalar, wide in (("float", 4), ("__half", 8), ("__nv_bfloat16", 8)):
        caches = (scalar, "fp8_e4m3", "fp8_e5m2")
        found += [("cache_ops.cuh", f"norm_rope_and_cache<{scalar}, {cache}, {wide}>") for cache in caches]
        for width in (wide, 1):
            found += [("fused.cuh", f"{kernel}<{scalar}, {width}>") for kernel in fused]
            for cache in caches:
                found += [("cache_ops.cuh", f"{kernel}_and_cache<{scalar}, {cache}, {width}>") for kernel in stores]
        found += [("cache_ops.cuh", f"reshape_and_cache_x<{scalar}, {cache}>") for cache in caches]
    return [Instantiation(source, name, 64) for source, name in found]


def _experts() -> list[Instantiation]:
    """Ceilings: registers per thread with which as many blocks of 128 threads fit on a multiprocessor, which has 65 536
    registers, as fit by its shared memory: 4 with tiles of 16 rows and 5 with tiles of 64. Fewer blocks fit with
    float32 and if single elements are loaded."""
    half, bf16 = "__half", "__nv_bfloat16"
    kernels = [("sort_pairs", 64)]
    kernels += [(f"sum_experts<{types}>", 40) for types in ("float, float", f"{half}, float", f"{bf16}, {bf16}")]
    for types in (f"{bf16}, {bf16}, experts::SILU", f"{half}, float, experts::NONE"):
        shapes = (("1, true", 128), ("4, true", 96), ("4, false", 128))
        kernels += [(f"expert_tiles<{types}, {shape}>", registers) for shape, registers in shapes]
    kernels += [
        (f"expert_tiles<{bf16}, {bf16}, experts::{kind}, 1, true>", 128)
        for kind in ("GELU", "GELU_TANH", "RELU", "RELU2", "SWIGLU_OAI")
    ]
    kernels += [(f"expert_tiles<float, float, experts::{kind}, 4, true>", 128) for kind in ("GELU", "NONE")]
    return [Instantiation("experts.cuh", name, registers) for name, registers in kernels]


def _packed_linear() -> list[Instantiation]:
    """Ceilings: registers per thread with which enough blocks of 256 threads fit on a multiprocessor, which has 65 536
    registers, to load 32 KB of codes at a time: 2 blocks for up to 8 rows, 3 with 16 outputs a block. With more rows
    one block is enough, since it computes as long as it loads."""
    half, bf16 = "__half", "__nv_bfloat16"
    shapes = (("1, 2", 128), ("4, 4", 255))
    found = [("plain_codes", 40), *((f"sum_parts<{scalar}>", 40) for scalar in (half, bf16, "float"))]
    kinds = (
        (f"{bf16}, {bf16}, {half}", "INT4, packed::NOTHING, 2"),
        (f"{half}, float, {bf16}", "INT4, packed::ZEROS, 2"),
        (f"{bf16}, {bf16}, float", "INT4, packed::ZEROS, 1"),
        (f"{bf16}, float, float", "INT4, packed::MINIMA, 1"),
        (f"{bf16}, float, float", "INT8, packed::NOTHING, 1"),
        (f"{half}, {half}, {half}", "INT8, packed::ZEROS, 1"),
        (f"{bf16}, {bf16}, {bf16}", "E4M3, packed::NOTHING, 1"),
        (f"{bf16}, {bf16}, {bf16}", "E2M1, packed::NOTHING, 1"),
    )
    for types, kind in kinds:
        found += [(f"packed_linear<{types}, packed::{kind}, {shape}>", most) for shape, most in shapes]
        scalar, _, scales = types.split(", ")
        found.append((f"widen_weights<{scalar}, {scales}, packed::{kind[:-3]}>", 64))
    found += [
        (f"packed_linear<{bf16}, {bf16}, {half}, packed::INT4, packed::NOTHING, 2, {shape}>", most)
        for shape, most in (("1, 1", 80), ("2, 4", 255))
    ]
    return [Instantiation("packed_linear.cuh", name, registers) for name, registers in found]


def _packed_tiles() -> list[Instantiation]:
    """Ceilings: registers per thread with which one block of 256 threads fits on a multiprocessor. It loads three steps
    ahead, 36 KB or more."""
    half, bf16 = "__half", "__nv_bfloat16"
    kinds = (
        (f"{bf16}, {bf16}, {half}", "INT4, packed::NOTHING, 2"),
        (f"{half}, float, {bf16}", "INT4, packed::ZEROS, 2"),
        (f"{bf16}, float, float", "INT4, packed::MINIMA, 1"),
        (f"{bf16}, float, float", "INT8, packed::NOTHING, 1"),
        (f"{half}, {half}, {half}", "INT8, packed::ZEROS, 1"),
        (f"{bf16}, {bf16}, {bf16}", "E4M3, packed::NOTHING, 1"),
        (f"{bf16}, {bf16}, {bf16}", "E2M1, packed::NOTHING, 1"),
    )
    return [
        Instantiation("packed_tiles.cuh", f"packed_tiles<{types}, packed::{kind}, {rows}>", 255)
        for types, kind in kinds
        for rows in (4, 8)
    ]


def _packed_experts() -> list[Instantiation]:
    """Ceilings: those of packed_linear.cuh, whose products these kernels use. With two float32 numbers for each scale,
    one block less fits."""
    half, bf16 = "__half", "__nv_bfloat16"
    kinds = (
        (bf16, "SWIGLU_OAI", bf16, "E2M1", "NOTHING", 1),
        (half, "SILU", half, "INT4", "NOTHING", 2),
        (bf16, "SILU", "float", "INT4", "MINIMA", 1),
        (bf16, "GELU_TANH", half, "INT4", "ZEROS", 2),
        (bf16, "SILU", "float", "INT8", "NOTHING", 1),
        (bf16, "SILU", bf16, "E4M3", "NOTHING", 1),
    )
    found = []
    for scalar, activation, scales, codes, less, flush in kinds:
        of_codes = f"{scales}, packed::{codes}, packed::{less}"
        found.append((f"widen_experts<{scalar}, {of_codes}>", 64))
        for types, shapes in (
            (f"{scalar}, {scalar}, experts::{activation}", (("1, 2", 128), ("4, 4", 255))),
            (
                f"{scalar}, float, experts::NONE",
                (("1, 1", 128 if scales == "float" else 84), ("1, 2", 128), ("2, 4", 255)),
            ),
        ):
            names = ((f"packed_experts<{types}, {of_codes}, {flush}, {shape}>", most) for shape, most in shapes)
            found += names
    return [Instantiation("packed_experts.cuh", name, registers) for name, registers in found]


_IN_CHUNKS = (
    *(f"delta_rule_chunks<{kind}>" for kind in ("__nv_bfloat16, 128, 128", "float, 128, 128", "__half, 24, 20")),
    *(f"mamba_chunks<{kind}>" for kind in ("__nv_bfloat16, 128, 64", "__nv_bfloat16, 256, 64", "__half, 128, 64")),
)


def _recurrent() -> list[Instantiation]:
    """Ceilings: registers per thread with which 512 threads, of one block or several, fit on a multiprocessor; for
    kernels of chunks 256 threads."""
    half, bf16 = "__half", "__nv_bfloat16"
    found = [(f"short_conv<{kind}>", 64) for kind in (f"{bf16}, 4, false", "float, 4, false", f"{half}, 3, true")]
    found += [(f"delta_rule<{kind}>", 128) for kind in (f"{bf16}, 128, 128", "float, 128, 128", f"{half}, 24, 20")]
    found += [(f"mamba<{kind}>", 128) for kind in (f"{bf16}, 128, 64", "float, 128, 64", f"{half}, 256, 64")]
    by_token = [Instantiation("recurrent.cuh", name, registers) for name, registers in found]
    return by_token + [Instantiation("recurrent_chunks.cuh", name, 255) for name in _IN_CHUNKS]


def _prefill() -> list[Instantiation]:
    """Ceilings: registers per thread with which `Shape::BLOCKS` blocks of 128 threads fit on a multiprocessor, which
    has 65 536 registers."""
    half, bf16, e4m3 = "__half", "__nv_bfloat16", "fp8_e4m3"
    found = [Instantiation("gather_kv.cuh", f"gather_kv<{bf16}, {cache}>", 64) for cache in (bf16, e4m3)]
    for scalar, cache in ((bf16, bf16), (half, e4m3), (bf16, e4m3)):
        shapes = (("64, 64", 128, 168), ("128, 64", 168, 255), ("128, 32", 255, 255), ("256, 32", 255, 255))
        for shape, most, most_float8 in shapes:
            registers = most if cache == scalar else most_float8
            name = f"prefill_attention<{scalar}, {cache}, {shape}>"
            found.append(Instantiation("prefill_attention.cuh", name, registers))
    return found


def _decode() -> list[Instantiation]:
    """Ceilings: registers per thread with which `decode_blocks` blocks of 128 threads fit on a multiprocessor, which
    has 65 536 registers.

    Template arguments after the head size: the number of groups of eight query heads, whether blocks have less than 16
    tokens, and the number of warps.
    """
    half, bf16 = "__half", "__nv_bfloat16"
    found = [
        Instantiation("attention_simple.cuh", f"attention_simple<{pair}>", 64)
        for pair in ("float, float", "float, fp8_e4m3")
    ]
    shapes = [("64, 1, false", 128), ("112, 1, true", 255), ("128, 1, false", 168), ("192, 1, false", 255)]
    shapes += [("256, 1, false", 255), ("256, 1, true", 255), ("64, 2, false", 168), ("128, 2, true", 255)]
    of_half = (shapes[0], shapes[5], shapes[7])  # the other shapes cost as much as with bfloat16
    for scalar, cache, some in (
        (bf16, bf16, shapes),
        (bf16, "fp8_e4m3", shapes),
        (half, half, of_half),
        (half, "fp8_e5m2", of_half),
    ):
        for shape, registers in some:
            name = f"decode_attention<{scalar}, {cache}, {shape}, 4>"
            found.append(Instantiation("decode_attention.cuh", name, registers))
    for cache, shape, registers in (
        (bf16, "128, 2, false", 255),
        (bf16, "256, 1, true", 255),
        ("fp8_e4m3", "128, 2, false", 255),
    ):
        name = f"cascade_attention<{bf16}, {cache}, {shape}, 4>"
        found.append(Instantiation("cascade_attention.cuh", name, registers))
    for cache in (bf16, "fp8_e4m3"):
        name = f"decode_attention<{bf16}, {cache}, 128, 1, false, 4, true>"
        found.append(Instantiation("decode_attention.cuh", name, 168))
    return found


def _latent() -> list[Instantiation]:
    """Ceilings: registers per thread with which 2 blocks of 128 threads fit on a multiprocessor, as many as fit by its
    shared memory. With up to 16 heads a third block fits on some GPUs, for which 168 registers per thread leave
    room."""
    return [
        Instantiation("latent_attention.cuh", f"latent_attention<{scalar}, 576, 512, {tiles}>", most)
        for scalar in ("__nv_bfloat16", "__half")
        for tiles, most in ((1, 168), (2, 255))
    ]


INSTANTIATIONS: list[Instantiation] = [
    *_small_operations(),
    *_paged_attention(),
    *_experts(),
    *_packed_linear(),
    *_packed_tiles(),
    *_packed_experts(),
    *_recurrent(),
    *_prefill(),
    *_decode(),
    *_latent(),
]

ON_EVERY_ARCH = tuple(
    f"{kernel}_attention<__nv_bfloat16, __nv_bfloat16, {shape}"
    for kernel, shape in (
        ("decode", "128, 1, false, 4>"),
        ("decode", "256, 1, false, 4>"),
        ("cascade", "128, 2, false, 4>"),
        ("prefill", "128,"),
    )
)
"""Beginnings of the names of kernels that are also compiled for nvrtc.OTHER_ARCHES: the engine's attention at its
limits. `benchmarks/cuda_costs.py --compare` compiles more kernels for all of them, and compares them with the
record."""
