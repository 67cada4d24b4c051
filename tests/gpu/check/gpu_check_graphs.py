"""Part of `gpu_check`: kernels captured in a CUDA graph give the same bits as eager launches, also with other lengths
than at the capture."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from gpu_check_cases import open_launcher, usable
from gpu_check_linear import KINDS, random_weight
from gpu_check_parts import parser_of, run_checks
from gpu_check_setup import Paged, Shape, capture, paged

from tests.kernels.experts_cases import Sizes
from tests.kernels.packed_experts_cases import layer as packed_layer
from vllm_lite.kernels.cuda import cache_ops
from vllm_lite.kernels.cuda.attention import decode_attention as decode
from vllm_lite.kernels.cuda.attention.attention_inputs import PagedKV, Scoring
from vllm_lite.kernels.cuda.attention.attention_work import Cascade, RowWork, SplitList
from vllm_lite.kernels.cuda.attention.shared_prefix import Worth, cascade_lists
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.cuda.moe.experts import StackedExperts, Stacks
from vllm_lite.kernels.cuda.moe.sorted_experts import SortedExperts
from vllm_lite.kernels.cuda.weights.packed_linear import FEW_ROWS, PackedLinear
from vllm_lite.kernels.grouped import E2M1
from vllm_lite.kernels.ops import Rotation
from vllm_lite.kernels.routing import Chosen

Work = tuple[SplitList, decode.Workspace]


def lists_for(problem: Paged, lens: Sequence[int], split_tokens: int = 0) -> Work:
    """Work lists of decode attention for sequences of these lengths, and its workspace."""
    shape, places, device = problem.shape, np.arange(len(lens)), problem.query.device
    work = SplitList.on(device, RowWork(places, places, np.array(lens)), None, split_tokens)
    return work, decode.Workspace.for_splits(device, work.most_splits, shape.num_heads, shape.head_size)


def decode_attention(launcher: Launcher, device: torch.device, context: int) -> str | None:
    """Captured once with padding only, and replayed with other lists, queries and tables."""
    shape = Shape(batch=8, context=context, group=4, num_kv_heads=2)
    problem = paged(shape, device, at_least_bytes=3 * shape.kv_bytes)
    table = problem.tables[0].clone()
    longest, workspace = lists_for(problem, [context] * shape.batch)
    room = longest._replace(splits=torch.zeros_like(longest.splits))

    def run(out: torch.Tensor, lists: SplitList) -> None:
        cache, scoring = PagedKV(problem.kv, table, None, problem.seq_lens), Scoring(shape.head_size**-0.5)
        decode.decode_attention(launcher, out, problem.query, cache, lists, scoring, workspace=workspace)

    captured, eager = torch.full_like(problem.out, torch.nan), torch.full_like(problem.out, torch.nan)
    replay = capture(lambda: run(captured, room))
    for number in range(3):
        lens = [1 + (37 * (row + number)) % context for row in range(shape.batch - 1)] + [0]
        exact, _ = lists_for(problem, lens)
        room.splits[: len(exact.splits)] = exact.splits
        table.copy_(problem.tables[number % len(problem.tables)])
        problem.query.normal_()
        replay()
        run(eager, exact)
        if not torch.equal(captured, eager):
            return f"replay {number} differs by {(captured - eager).abs().max().item():g}"
        if captured[-1].any() or not captured[:-1].any():
            return f"replay {number}: the padding row is not zero, or all is"
        if workspace.arrived.any():
            return f"replay {number}: the next one would find blocks that have arrived"
    return None


def shared_prefix(launcher: Launcher, device: torch.device) -> str | None:
    """Captured with empty lists; replayed with and without a common prefix, and compared with each sequence alone."""
    shape = Shape(batch=9, context=1400, group=4, num_kv_heads=2)
    problem = paged(shape, device, at_least_bytes=0)
    table, (longest, workspace) = problem.tables[0].clone(), lists_for(problem, [shape.context] * shape.batch)
    room = torch.zeros_like(longest.splits)
    cascade = Cascade(torch.zeros_like(room), torch.zeros_like(room).view(-1), torch.zeros_like(room).view(-1, 2))
    graph_lists = longest._replace(splits=room, cascade=cascade)

    def run(out: torch.Tensor, lists: SplitList) -> None:
        cache, scoring = PagedKV(problem.kv, table, None, problem.seq_lens), Scoring(shape.head_size**-0.5)
        decode.decode_attention(launcher, out, problem.query, cache, lists, scoring, workspace=workspace)

    captured, eager = torch.full_like(problem.out, torch.nan), torch.full_like(problem.out, torch.nan)
    replay = capture(lambda: run(captured, graph_lists))
    lens, places = [*range(1400, 1312, -11), 0], np.arange(shape.batch)
    exact, _ = lists_for(problem, lens)
    for common in (0, 1024, 1280, 0):
        table[:] = problem.tables[0]
        table[:, : common // 16] = table[0, : common // 16].clone()
        rows, most_rows = RowWork(places, places, np.array(lens)), decode.most_sharing(shape.group, shape.head_size)
        lists = cascade_lists(rows, table.cpu().numpy(), 16, most_rows, 2, worth=Worth(saved_blocks=1))
        if (lists is None) != (common == 0):
            return f"{common} tokens in common: {'not found' if lists is None else 'found'}"
        given = exact if lists is None else lists.on(device)
        room[: len(given.splits)] = given.splits
        for kept, part in zip(cascade, given.cascade or (), strict=False):
            kept[: len(part)] = part
        problem.query.normal_()
        replay()
        run(eager, exact)
        if not torch.equal(captured, eager):
            return f"{common} tokens in common: differs by {(captured - eager).abs().max().item():g}"
        if workspace.arrived.any():
            return f"{common} tokens in common: the next replay would find blocks that have arrived"
    return None


def rope_and_cache(launcher: Launcher, device: torch.device) -> str | None:
    """Slots are read from memory: a replay writes to the slots of that time, and nowhere for -1."""
    tokens, heads, kv_heads, size, blocks = 8, 8, 2, 64, 16
    kv = torch.zeros(2, blocks, 2, kv_heads, 16, size, dtype=torch.bfloat16, device=device)  # captured, eager
    qkv = torch.zeros(2, tokens, heads + 2 * kv_heads, size, dtype=torch.bfloat16, device=device)
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    rotation = Rotation(*torch.zeros(2, tokens, size, dtype=torch.bfloat16, device=device).unbind())

    def run(which: int) -> None:
        query, key, value = qkv[which].split((heads, kv_heads, kv_heads), dim=1)
        to = cache_ops.CacheSlots(kv[which], slots)
        cache_ops.rope_and_cache(launcher, query, key, value, rotation, to)

    replay = capture(lambda: run(0))
    if kv.any():
        return "the capture wrote to the cache, with no slot given"
    for number in range(3):
        qkv[0].normal_()
        qkv[1].copy_(qkv[0])
        angles = torch.rand(tokens, size // 2, device=device) * 6
        rotation.cos.copy_(torch.cat((angles.cos(), angles.cos()), 1))
        rotation.sin.copy_(torch.cat((-angles.sin(), angles.sin()), 1))
        slots.copy_(torch.randperm(blocks * 16)[:tokens])
        slots[number] = -1
        replay()
        run(1)
        for name, pair in (("cache", kv), ("heads", qkv)):
            if not torch.equal(pair[0], pair[1]):
                return f"replay {number}: another {name}"
    return None if kv.any() else "nothing was written"


def experts(launcher: Launcher, device: torch.device, rows: int) -> str | None:
    """Captured while all rows choose one expert; replayed with other choices, so that other experts have tiles."""
    hidden, inner, num_experts, top = 64, 32, 12, 3
    gate_up = torch.randn(num_experts, 2 * inner, hidden, dtype=torch.bfloat16, device=device) / 8
    down = torch.randn(num_experts, hidden, inner, dtype=torch.bfloat16, device=device) / 4
    return replayed_experts(StackedExperts(launcher, Stacks(gate_up, down), 0, "silu"), device, rows, top)


def packed_experts(launcher: Launcher, device: torch.device, rows: int) -> str | None:
    """The same with experts whose weights stay packed."""
    sizes = Sizes(num_experts=12, top=3, hidden=64, inner=32, held=12)
    packed = packed_layer(device, torch.bfloat16, E2M1, 32, sizes=sizes)
    return replayed_experts(packed.experts(launcher), device, rows, sizes.top)


def replayed_experts(layer: SortedExperts, device: torch.device, rows: int, top: int) -> str | None:
    """Compare replays with eager launches, each time with other rows and other experts."""
    num_experts, hidden, _ = layer.shape
    x = torch.randn(rows, hidden, dtype=torch.bfloat16, device=device)
    ids, factors = (torch.zeros(rows, top, dtype=dtype, device=device) for dtype in (torch.int32, torch.float32))
    captured, eager = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    replay = capture(lambda: layer.forward(x, Chosen(ids, factors), captured))
    for number in range(3):
        ids.copy_(torch.rand(rows, num_experts).argsort(1)[:, :top])
        factors.uniform_()
        x.normal_()
        replay()
        layer.forward(x, Chosen(ids, factors), eager)
        if not torch.equal(captured, eager):
            return f"replay {number} differs by {(captured - eager).abs().max().item():g}"
        if not captured.any():
            return f"replay {number}: all is zero"
    return None


def packed_linear(launcher: Launcher, device: torch.device, rows: int) -> str | None:
    """Rows are read from memory. There are so many inputs that several parts of the sum are computed separately. A row
    has the same bits among the fewest rows that are multiplied in the same way; another way rounds in another order."""
    weight = random_weight(KINDS[0], (64, 4096), device)
    layer = PackedLinear(launcher, weight, torch.randn(64, device=device))
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16, device=device)
    captured, eager = (torch.full((rows, 64), torch.nan, device=device) for _ in range(2))  # float32 hides no bit
    replay = capture(lambda: layer.forward(x, captured))
    for number in range(3):
        x.normal_()
        replay()
        layer.forward(x, eager)
        if not torch.equal(captured, eager):
            return f"replay {number} differs by {(captured - eager).abs().max().item():g}"
        last = x[-(FEW_ROWS + 1 if rows > FEW_ROWS else 1) :]
        fewer = torch.full_like(eager[: len(last)], torch.nan)
        layer.forward(last, fewer)
        if not torch.equal(fewer, eager[-len(last) :]):
            return f"replay {number}: a row has other bits among {len(last)} rows"
    return None


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    launcher, device = open_launcher(arguments.emulate)
    checks: dict[str, Callable[[], str | None]] = {
        "decode attention, one split": lambda: decode_attention(launcher, device, 64),
        "decode attention, splits": lambda: decode_attention(launcher, device, 1200),
        "decode attention, in common": lambda: shared_prefix(launcher, device),
        "rope and cache": lambda: rope_and_cache(launcher, device),
        "experts, small tiles": lambda: experts(launcher, device, 8),
        "experts, large tiles": lambda: experts(launcher, device, 150),
        "packed experts, few rows": lambda: packed_experts(launcher, device, 3),
        "packed experts, many rows": lambda: packed_experts(launcher, device, 300),
        "packed linear, 1 row": lambda: packed_linear(launcher, device, 1),
        "packed linear, 20 rows": lambda: packed_linear(launcher, device, 20),
    }
    run_checks(checks, arguments.first, lambda: usable(device))


if __name__ == "__main__":
    main()
