"""Cases of paged_attention_v1 and v2, as named functions of a launcher and a device; no pytest in here.

Each case draws queries and a cache in the engine's layout, converts the cache, runs the kernels and compares with
float64. Slots that no token was written to hold NaN, blocks are drawn in random order, strides have gaps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tests.kernels import kv_layouts
from tests.kernels.cases import Case
from vllm_lite.checkpoint.layer_specs.block_sparse import BlockSparse
from vllm_lite.kernels.cuda.attention import paged_attention as pa
from vllm_lite.kernels.cuda.attention.attention_inputs import Scoring
from vllm_lite.kernels.cuda.launcher import Launcher

Version = Callable[[Launcher, torch.Tensor, torch.Tensor, pa.SplitCache, Scoring], None]
BOTH: tuple[Version, ...] = (pa.paged_attention_v1, pa.paged_attention_v2)
RAGGED = (0, 1, 15, 16, 17, 513)
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

# Bar relative to the largest output: rounding of the result to its dtype, and of float32 sums.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


@dataclass(frozen=True)
class Problem:
    seq_lens: tuple[int, ...] = RAGGED
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None  # fp8, or None: like q
    soft_cap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    window: int = 0
    sparse: BlockSparse | None = None


@dataclass(frozen=True)
class Drawn:
    """The tensors of a problem, on the CPU."""

    q: torch.Tensor
    engine: torch.Tensor  # the cache in the engine's layout; NaN in slots without a token
    tables: torch.Tensor
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    k_scale: float
    v_scale: float

    def scoring(self, problem: Problem, device: torch.device) -> Scoring:
        slopes = None if self.slopes is None else self.slopes.to(device)
        scale = problem.head_size**-0.5
        sinks = None if self.sinks is None else self.sinks.to(device)
        scales, window = (self.k_scale, self.v_scale), problem.window or None
        return Scoring(scale, problem.soft_cap, slopes, window, *scales, problem.sparse, sinks)


def draw(problem: Problem) -> Drawn:
    generator = torch.Generator().manual_seed(len(problem.seq_lens) * 1000 + problem.head_size + problem.block_size)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    block, kv_heads, size = problem.block_size, problem.num_kv_heads, problem.head_size
    widths = [math.ceil(length / block) for length in problem.seq_lens]
    num_blocks = sum(widths) + 3
    # Entries behind a sequence's last block are never to be read; here they point far outside the cache.
    tables = torch.full((len(widths), max(widths) + 1), 2**31 - 1, dtype=torch.int32)
    order = torch.randperm(num_blocks, generator=generator).tolist()
    wide = torch.full((num_blocks, 2, kv_heads, block, size), math.nan)
    for row, (length, width) in enumerate(zip(problem.seq_lens, widths, strict=True)):
        mine, order = order[:width], order[width:]
        tables[row, :width] = torch.tensor(mine, dtype=torch.int32)
        for index, at in enumerate(mine):
            count = min(block, length - index * block)
            wide[at, :, :, :count] = normal(2, kv_heads, count, size)
    fp8 = problem.kv_dtype in FP8.values()
    slopes = 2.0 ** -torch.arange(1, problem.num_heads + 1, dtype=torch.float32) if problem.alibi else None
    return Drawn(
        # Queries of length 3 * sqrt(size) make a softmax with a few large probabilities, not an average.
        q=(3 * normal(len(widths), problem.num_heads, size)).to(problem.dtype),
        engine=wide.to(problem.kv_dtype or problem.dtype),
        tables=tables,
        slopes=slopes,
        sinks=torch.linspace(-2, 14, problem.num_heads) if problem.sinks else None,
        k_scale=0.75 if fp8 else 1.0,
        v_scale=1.5 if fp8 else 1.0,
    )


def reference(problem: Problem, drawn: Drawn) -> torch.Tensor:  # float64 [num_seqs, num_heads, head_size]
    rows = []
    for q, table, length in zip(drawn.q, drawn.tables, problem.seq_lens, strict=True):
        keys, values = kv_layouts.gather(drawn.engine, table, length)
        token = torch.arange(length)
        mask = (token >= length - problem.window if problem.window else token >= 0).expand(problem.num_heads, -1)
        if problem.sparse is not None:
            mask = mask & sparse_mask(problem.sparse, problem.num_heads, problem.num_kv_heads, length)
        bias = None if drawn.slopes is None else drawn.slopes[:, None].double() * (token - length + 1)
        keys, values = keys * drawn.k_scale, values * drawn.v_scale
        scale = problem.head_size**-0.5
        sinks = drawn.sinks
        rows.append(
            kv_layouts.attend(q, keys, values, scale, soft_cap=problem.soft_cap, bias=bias, mask=mask, sinks=sinks)
        )
    return torch.stack(rows)


def sparse_mask(sparse: BlockSparse, num_heads: int, num_kv_heads: int, length: int) -> torch.Tensor:
    """bool [num_heads, length]: which tokens each head sees."""
    mask = torch.zeros(num_heads, length, dtype=torch.bool)
    for head in range(num_heads):
        if sparse.head_step >= 0:
            shift = (sparse.tp_rank * num_heads + head) * sparse.head_step + 1
        else:
            kv_head = head // (num_heads // num_kv_heads)
            shift = (sparse.tp_rank * num_kv_heads + kv_head) * -sparse.head_step + 1
        for token in range(length):
            block = token // sparse.block_tokens
            behind = (length - 1) // sparse.block_tokens - block
            mask[head, token] = behind < sparse.local_blocks or (block + shift) % sparse.vert_stride == 0
    return mask


def split_cache(problem: Problem, drawn: Drawn, device: torch.device) -> pa.SplitCache:
    """The drawn cache in the split layout, with gaps behind heads and behind blocks."""
    keys, values = kv_layouts.to_split(drawn.engine)
    return pa.SplitCache(
        with_gaps(keys.to(device)),
        with_gaps(values.to(device)),
        drawn.tables.to(device),
        torch.tensor(problem.seq_lens, dtype=torch.int32, device=device),
        max(problem.seq_lens),
    )


def with_gaps(cache: torch.Tensor) -> torch.Tensor:
    blocks, heads, *rest = cache.shape
    pitch = math.prod(rest) + 16
    room = (
        torch.empty(blocks, heads + 1, pitch, dtype=torch.float32, device=cache.device).fill_(math.nan).to(cache.dtype)
    )
    inner = [math.prod(rest[i + 1 :]) for i in range(len(rest))]
    view = room.as_strided(tuple(cache.shape), ((heads + 1) * pitch, pitch, *inner))
    view.copy_(cache)
    return view


def run(version: Version, launcher: Launcher, device: torch.device, problem: Problem, drawn: Drawn) -> torch.Tensor:
    out = torch.full_like(drawn.q, math.nan, device=device)
    version(launcher, out, drawn.q.to(device), split_cache(problem, drawn, device), drawn.scoring(problem, device))
    return out.cpu()


def check(launcher: Launcher, device: torch.device, problem: Problem, versions: tuple[Version, ...] = BOTH) -> None:
    drawn = draw(problem)
    expected = reference(problem, drawn)
    outs = [run(version, launcher, device, problem, drawn) for version in versions]
    for version, out in zip(versions, outs, strict=True):
        worst = (out.double() - expected).abs().max().item() / expected.abs().max().item()
        limit = TOLERANCE[problem.dtype]
        assert worst < limit, f"{version.__name__}: off by {worst:.2e} of the largest output, allowed {limit:.0e}"
        assert not out[[length == 0 for length in problem.seq_lens]].any(), "an empty sequence must give zeros"


def case(problem: Problem, versions: tuple[Version, ...] = BOTH) -> Case:
    return lambda launcher, device: check(launcher, device, problem, versions)


def repeatable(launcher: Launcher, device: torch.device) -> None:
    """The same bits again, with another order of the warps where the launcher has one."""
    problem = Problem(seq_lens=(40, 513, 1100), window=700)
    drawn = draw(problem)
    for version in BOTH:
        first = run(version, launcher, device, problem, drawn)
        for seed in (1, 2, 3, 4):
            if hasattr(launcher, "order_seed"):
                launcher.order_seed = seed
            again = run(version, launcher, device, problem, drawn)
            if hasattr(launcher, "order_seed"):
                launcher.order_seed = 0
            assert torch.equal(first.view(torch.int16), again.view(torch.int16)), f"{version.__name__}, seed {seed}"


def one_partition_is_v1(launcher: Launcher, device: torch.device) -> None:
    """With float32 results and a single partition the second kernel has nothing to change."""
    problem = Problem(seq_lens=(0, 1, 100, 512), dtype=torch.float32)
    drawn = draw(problem)
    v1, v2 = (run(version, launcher, device, problem, drawn) for version in BOTH)
    assert (v1 - v2).abs().max() <= 1e-6


def far_blocks(launcher: Launcher, device: torch.device) -> None:
    """Block 1 begins more than 2^31 elements behind block 0. Only the pages that are used take memory on a CPU."""
    problem = Problem(seq_lens=(20,), kv_dtype=torch.float8_e5m2, num_kv_heads=1, num_heads=2)
    drawn = draw(problem)
    drawn = replace(
        drawn, tables=torch.tensor([[1, 0]], dtype=torch.int32), engine=drawn.engine[drawn.tables[0, [1, 0]].long()]
    )
    keys, values = kv_layouts.to_split(drawn.engine.view(torch.uint8))
    stride = 2**31 + 4096
    room = torch.empty(stride + 2**16, dtype=torch.uint8, device=device)
    views = []
    for begin, part in ((0, keys), (2**15, values)):
        inner = [math.prod(part.shape[i + 1 :]) for i in range(1, part.dim())]
        view = room[begin:].as_strided(tuple(part.shape), (stride, *inner))
        view.copy_(part)
        views.append(view.view(torch.float8_e5m2))
    lens = torch.tensor(problem.seq_lens, dtype=torch.int32, device=device)
    cache = pa.SplitCache(views[0], views[1], drawn.tables.to(device), lens, 20)
    expected = reference(problem, drawn)
    for version in BOTH:
        out = torch.full_like(drawn.q, math.nan, device=device)
        version(launcher, out, drawn.q.to(device), cache, drawn.scoring(problem, device))
        assert (out.cpu().double() - expected).abs().max() < TOLERANCE[problem.dtype] * expected.abs().max()


def chosen(launcher: Launcher, device: torch.device) -> None:
    """`paged_attention` takes v2 for few long sequences; both give the reference."""
    check(launcher, device, Problem(seq_lens=(513, 20)), (pa.paged_attention,))
    check(launcher, device, Problem(seq_lens=(40, 20)), (pa.paged_attention,))


_SPARSE = BlockSparse(local_blocks=2, vert_stride=4, block_tokens=32, head_step=1)
_SPARSE_BY_KV_HEAD = replace(_SPARSE, head_step=-3, tp_rank=1)
_SPARSE_LINES = replace(_SPARSE, local_blocks=0, vert_stride=7)
_F32 = torch.float32
_HALF = Problem((5, 40, 200), dtype=torch.float16)

CASES: list[tuple[str, Case]] = [
    ("ragged", case(Problem())),
    *((f"head_{size}", case(Problem((0, 17, 70), head_size=size))) for size in pa.HEAD_SIZES if size != 64),
    *((f"block_{size}", case(Problem((0, 1, 63, 65, 530), block_size=size))) for size in pa.BLOCK_SIZES if size != 16),
    *((f"group_{group}", case(Problem((3, 33), 16, 16 // group))) for group in (1, 2, 4, 8, 16)),
    ("group_7", case(Problem((3, 33), 14, 2))),
    ("half", case(_HALF)),
    ("float", case(Problem(dtype=_F32))),
    ("float_block_8", case(Problem((1, 17, 70), dtype=_F32, block_size=8))),
    ("float_block_128", case(Problem((1, 129, 300), dtype=_F32, block_size=128))),
    ("alibi", case(Problem(alibi=True, dtype=_F32))),
    ("soft_cap", case(Problem(soft_cap=3.0, dtype=_F32))),
    ("soft_cap_then_alibi", case(Problem((17, 120), soft_cap=2.0, alibi=True, dtype=_F32))),
    ("sinks", case(Problem((0, 1, 17, 600), sinks=True))),
    ("sinks_window", case(Problem((40, 1100), sinks=True, soft_cap=3.0, window=60, dtype=_F32))),
    *((f"window_{window}", case(Problem((0, 1, 33, 700), window=window, dtype=_F32))) for window in (1, 16, 30, 600)),
    *((f"{name}", case(Problem((0, 1, 17, 600), kv_dtype=kv))) for name, kv in FP8.items()),
    *((f"half_{name}_block_8", case(replace(_HALF, kv_dtype=kv, block_size=8))) for name, kv in FP8.items()),
    *(
        (f"float_{name}_block_128", case(replace(_HALF, dtype=_F32, kv_dtype=kv, block_size=128)))
        for name, kv in FP8.items()
    ),
    ("sparse", case(Problem((0, 1, 200, 1100), sparse=_SPARSE, dtype=_F32))),
    (
        "sparse_kv_heads",
        case(Problem((200,), 4, 2, sparse=_SPARSE_BY_KV_HEAD, dtype=_F32)),
    ),
    (
        "sparse_only_lines",
        case(Problem((40, 300), sparse=_SPARSE_LINES, dtype=_F32)),
    ),
    ("all_at_once", case(Problem((700,), soft_cap=4.0, alibi=True, window=300, sparse=_SPARSE, kv_dtype=FP8["e4m3"]))),
    ("repeatable", repeatable),
    ("one_partition_is_v1", one_partition_is_v1),
    ("far_blocks", far_blocks),
    ("chosen", chosen),
]
