"""Cases of the cache operations, as named functions of a launcher and a device, without pytest.

Caches start with random bytes, and all of their bytes are compared afterwards, also those that must not change.
"""

import torch

from tests.kernels import kv_layouts
from tests.kernels.cases import Case
from tests.kernels.fused_cases import draw, draw_rotation
from vllm_lite.kernels.cuda import cache_ops
from vllm_lite.kernels.cuda.cache_ops import CacheSlots
from vllm_lite.kernels.cuda.fused import CudaOps
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.ops import HeadNormWeights

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NUM_BLOCKS, BLOCK = 5, 4
SLOTS = (7, -1, 0, 19, 8, -1, 13)  # not in order; two are padding


def random_cache(dtype: torch.dtype, num_kv_heads: int, head_size: int, device: torch.device) -> torch.Tensor:
    """One layer of a pool of three, so that strides have gaps."""
    generator = torch.Generator().manual_seed(head_size)
    shape = (NUM_BLOCKS, 3, 2, num_kv_heads, BLOCK, head_size * dtype.itemsize)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype).to(device)[:, 1]


def stored(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """The stored bytes of x, [..., bytes]."""
    if dtype.itemsize > 1:
        return x.to(dtype).contiguous().view(torch.uint8)
    limit = torch.finfo(dtype).max
    divisor = torch.tensor(scale, device=x.device)  # by a number of Python torch multiplies with 1 / scale on a GPU
    return (x.float() / divisor).clamp(-limit, limit).to(dtype).view(torch.uint8)


def write(
    kv: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, scales: tuple[float, float]
) -> None:
    """The plain way. In bytes: torch cannot index float8."""
    block_size = kv.shape[3]
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            place = kv[slot // block_size, :, :, slot % block_size]  # [2, num_kv_heads, head_size]
            for which, (heads, scale) in enumerate(((key, scales[0]), (value, scales[1]))):
                place[which].view(torch.uint8).copy_(stored(heads[row], kv.dtype, scale))


def whole(kv: torch.Tensor) -> torch.Tensor:
    """All bytes from the first to the last element of a view, gaps included."""
    return torch.as_strided(kv, (kv.untyped_storage().nbytes() // kv.element_size(),), (1,), 0).view(torch.uint8)


def copy_of(kv: torch.Tensor) -> torch.Tensor:
    """With the same strides and the same bytes in the gaps."""
    flat = whole(kv).clone().view(kv.dtype)
    return torch.as_strided(flat, kv.shape, kv.stride(), kv.storage_offset())


def draw_heads(
    dtype: torch.dtype, num_kv_heads: int, head_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V of a fused projection, twice as many heads in Q."""
    heads = (2 * num_kv_heads, num_kv_heads, num_kv_heads)
    projected = draw((len(SLOTS), sum(heads) * head_size), dtype, device, 4.0)
    parts = projected.split([count * head_size for count in heads], dim=1)
    q, k, v = (part.view(len(SLOTS), count, head_size) for part, count in zip(parts, heads, strict=True))
    return q, k, v


def reshape_and_cache(
    dtype: torch.dtype, cache: torch.dtype, head_size: int, num_kv_heads: int = 2, by_token: bool = False
) -> Case:
    def run(launcher: Launcher, device: torch.device) -> None:
        _, key, value = draw_heads(dtype, num_kv_heads, head_size, device)
        slots = torch.tensor(SLOTS, device=device)
        kv = random_cache(cache, num_kv_heads, head_size, device)
        if by_token:  # the bytes as [num_blocks, 2, block_size, num_kv_heads, head_size]
            dense = kv.contiguous()
            kv = dense.view(NUM_BLOCKS, 2, BLOCK, num_kv_heads, head_size).transpose(2, 3)
        scales = (0.5, 0.013)
        expected = copy_of(kv)
        write(expected, key, value, slots, scales)
        cache_ops.reshape_and_cache(launcher, key, value, CacheSlots(kv, slots, *scales))
        assert torch.equal(whole(kv), whole(expected))

    return run


def every_value(dtype: torch.dtype, cache: torch.dtype, scale: float) -> Case:
    """Each of the 2^16 numbers of a 16-bit type, subnormal ones, infinities and NaN included, into an 8-bit cache."""

    def run(launcher: Launcher, device: torch.device) -> None:
        codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
        key = codes.view(dtype).view(64, 8, 128).to(device)
        slots = torch.arange(64, device=device)
        kv = torch.zeros(4, 2, 8, 16, 128, dtype=torch.uint8, device=device).view(cache)
        cache_ops.reshape_and_cache(launcher, key, key, CacheSlots(kv, slots, scale, 1.0))
        for which, by in ((0, scale), (1, 1.0)):
            found = kv[:, which].view(torch.uint8).transpose(1, 2).reshape(64, 8, 128)
            expected = stored(key, cache, by)
            nan = expected.view(cache).float().isnan()  # of either sign
            assert torch.equal(found.view(cache).float().isnan(), nan)
            assert torch.equal(found[~nan], expected[~nan])

    return run


def rope_and_cache(dtype: torch.dtype, cache: torch.dtype, head_size: int, num_kv_heads: int = 2) -> Case:
    """Bit for bit rotate() and reshape_and_cache(), which have cases of their own. Padding is turned too."""

    def run(launcher: Launcher, device: torch.device) -> None:
        query, key, value = draw_heads(dtype, num_kv_heads, head_size, device)
        rotation = draw_rotation(len(SLOTS), head_size, dtype, device)
        slots = torch.tensor(SLOTS, device=device)
        kv = random_cache(cache, num_kv_heads, head_size, device)
        scales = (0.25, 2.0) if cache.itemsize == 1 else (1.0, 1.0)
        turned_query, turned_key, expected = query.clone(), key.clone(), copy_of(kv)
        CudaOps(launcher).rotate(turned_query, rotation)
        CudaOps(launcher).rotate(turned_key, rotation)
        write(expected, turned_key, value, slots, scales)
        value_before = value.clone()
        cache_ops.rope_and_cache(launcher, query, key, value, rotation, CacheSlots(kv, slots, *scales))
        assert torch.equal(query, turned_query)
        assert torch.equal(key, turned_key)
        assert torch.equal(value, value_before)
        assert torch.equal(whole(kv), whole(expected))

    return run


def norm_rope_and_cache(dtype: torch.dtype, cache: torch.dtype, head_size: int, num_kv_heads: int = 2) -> Case:
    """Bit for bit rms_norm() of each head, then rope_and_cache(). Padding is normed and turned too."""

    def run(launcher: Launcher, device: torch.device) -> None:
        heads = draw_heads(dtype, num_kv_heads, head_size, device)
        weights = (draw((head_size,), dtype, device, 2.0), draw((head_size,), dtype, device, 1.5))
        norms = HeadNormWeights(*weights, 1e-5)
        rotation = draw_rotation(len(SLOTS), head_size, dtype, device)
        kv = random_cache(cache, num_kv_heads, head_size, device)
        scales = (0.25, 2.0) if cache.itemsize == 1 else (1.0, 1.0)
        expected, slots = copy_of(kv), torch.tensor(SLOTS, device=device)
        query, key, value = (part.clone() for part in heads)
        for part, weight in zip((query, key), weights, strict=True):
            CudaOps(launcher).rms_norm(part, weight, norms.eps, part)
        cache_ops.rope_and_cache(launcher, query, key, value, rotation, CacheSlots(expected, slots, *scales))
        cache_ops.norm_rope_and_cache(launcher, heads, norms, rotation, CacheSlots(kv, slots, *scales))
        for part, other in zip(heads, (query, key, value), strict=True):
            assert torch.equal(part, other)
        assert torch.equal(whole(kv), whole(expected))

    return run


def split_layout(dtype: torch.dtype, cache: torch.dtype, head_size: int) -> Case:
    def run(launcher: Launcher, device: torch.device) -> None:
        _, key, value = draw_heads(dtype, 2, head_size, device)
        slots = torch.tensor(SLOTS, device=device)
        kv = random_cache(cache, 2, head_size, device).contiguous()
        typed = torch.uint8 if cache.itemsize == 1 else cache  # layouts of float8 are converted as bytes
        caches = tuple(part.to(device).contiguous().view(cache) for part in kv_layouts.to_split(kv.view(typed)))
        scales = (0.5, 0.013) if cache.itemsize == 1 else (1.0, 1.0)
        write(kv, key, value, slots, scales)
        cache_ops.reshape_and_cache_x(launcher, key, value, (caches[0], caches[1]), slots, scales)
        found = kv_layouts.from_split(caches[0].view(typed), caches[1].view(typed))
        assert torch.equal(found.view(torch.uint8), kv.view(torch.uint8))

    return run


def far_slots(launcher: Launcher, device: torch.device) -> None:
    """Write slots after element 2^31 of the cache. A few pages of its memory are ever used."""
    block_elements = 2 * 2 * 16 * 128
    num_blocks = 2**31 // block_elements + 3
    pool = torch.empty(num_blocks * block_elements, dtype=torch.uint8, device=device)
    kv = pool.view(E4M3).view(num_blocks, 2, 2, 16, 128)
    key, value = draw((2, 2, 128), BF16, device), draw((2, 2, 128), BF16, device).flip(0)
    slots = torch.tensor([(num_blocks - 1) * 16 + 15, (num_blocks - 2) * 16], device=device)
    last = pool[-2 * block_elements :].zero_().clone().view(E4M3).view(2, 2, 2, 16, 128)
    write(last, key, value, slots - (num_blocks - 2) * 16, (1.0, 1.0))
    cache_ops.reshape_and_cache(launcher, key, value, CacheSlots(kv, slots))
    assert torch.equal(pool[-2 * block_elements :], last.view(torch.uint8).flatten())
    blocks = pool.view(num_blocks, block_elements)
    pairs = torch.tensor([(num_blocks - 1, 1), (num_blocks - 2, num_blocks - 3)], device=device)
    cache_ops.copy_blocks(launcher, blocks, pairs)
    assert torch.equal(blocks[1], blocks[num_blocks - 1])
    assert torch.equal(blocks[num_blocks - 3], blocks[num_blocks - 2])


def copy_blocks(dtype: torch.dtype, block_shape: tuple[int, ...]) -> Case:
    def run(launcher: Launcher, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = (9, *block_shape[:-1], block_shape[-1] * dtype.itemsize)
        pool = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device)
        before = pool.clone()
        pairs = torch.tensor([(3, 1), (8, 7), (3, 5), (2, 2)], device=device)  # one source twice
        cache_ops.copy_blocks(launcher, pool.view(dtype), pairs)
        assert torch.equal(pool, before[[0, 3, 2, 3, 4, 3, 6, 8, 8]])

    return run


def nothing_to_do(launcher: Launcher, device: torch.device) -> None:
    kv, slots = torch.zeros(2, 2, 2, 4, 8, device=device), torch.empty(0, dtype=torch.int64, device=device)
    heads = torch.empty(0, 2, 8, device=device)
    cache_ops.reshape_and_cache(launcher, heads, heads, CacheSlots(kv, slots))
    cache_ops.rope_and_cache(launcher, heads, heads, heads, draw_rotation(0, 8, F32, device), CacheSlots(kv, slots))
    cache_ops.copy_blocks(launcher, kv, slots.view(0, 2))
    assert not kv.any()


PAIRS = {f"{a}_{b}".replace("torch.", ""): (a, b) for a in (F32, F16, BF16) for b in (a, E4M3, E5M2)}

CASES: list[tuple[str, Case]] = [
    *((f"store_{name}", reshape_and_cache(*pair, head_size=80)) for name, pair in PAIRS.items()),
    *((f"store_odd_{name}", reshape_and_cache(*pair, head_size=7)) for name, pair in PAIRS.items()),
    ("store_by_token", reshape_and_cache(BF16, BF16, 64, by_token=True)),
    ("store_by_token_fp8", reshape_and_cache(F16, E4M3, 64, by_token=True)),
    ("store_one_head", reshape_and_cache(BF16, E5M2, 128, num_kv_heads=1)),
    ("store_many_heads", reshape_and_cache(F16, F16, 128, num_kv_heads=20)),
    *(
        (f"every_{scalar}_{cache}_{scale}".replace("torch.", ""), every_value(scalar, cache, scale))
        for scalar in (F16, BF16)
        for cache in (E4M3, E5M2)
        for scale in (1.0, 7.0)  # at 7, a product with 1 / 7 would round ties the wrong way
    ),
    *((f"rope_{name}", rope_and_cache(*pair, head_size=80)) for name, pair in PAIRS.items()),
    *((f"rope_odd_{name}", rope_and_cache(*pair, head_size=6)) for name, pair in PAIRS.items()),
    ("rope_many_heads", rope_and_cache(BF16, BF16, 128, num_kv_heads=17)),
    *((f"norm_rope_{name}", norm_rope_and_cache(*pair, head_size=80)) for name, pair in PAIRS.items()),
    ("norm_rope_many_heads", norm_rope_and_cache(BF16, BF16, 128, num_kv_heads=17)),
    ("norm_rope_widest", norm_rope_and_cache(BF16, E4M3, 256)),
    ("norm_rope_too_wide", norm_rope_and_cache(F32, F32, 256)),
    ("norm_rope_odd", norm_rope_and_cache(F16, F16, 6)),
    *((f"split_{name}", split_layout(*pair, head_size=64)) for name, pair in PAIRS.items()),
    ("far_slots", far_slots),
    ("copy", copy_blocks(BF16, (3, 2, 2, 16, 64))),
    ("copy_fp8", copy_blocks(E4M3, (2, 2, 8, 32))),
    ("copy_unaligned", copy_blocks(F16, (3, 5, 7))),
    ("copy_tiny", copy_blocks(torch.uint8, (1,))),
    ("copy_large", copy_blocks(F32, (100_000,))),
    ("nothing_to_do", nothing_to_do),
]
