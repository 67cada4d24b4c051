"""Part of `gpu_check`: our prefill over pages next to torch's FlashAttention.

Workers compute a prompt in the faster way by a table (vllm_lite/kernels/cuda/attention/prefill_table.py), which is
measured here and kept where workers on this device find it. torch computes whole prompts from the K and V of the layer,
which are slices of rows with Q, K and V, and chunks after a prefix from a copy of their pages.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from gpu_check_bench import Bench
from gpu_check_cases import open_launcher, usable
from gpu_check_parts import emit, parser_of, run_checks
from gpu_check_setup import Launch, Paged, Shape, paged
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from vllm_lite.kernels.cuda.attention import prefill_attention, prefill_table, torch_prefill, varlen
from vllm_lite.kernels.cuda.attention.attention_inputs import PagedKV, Scoring
from vllm_lite.kernels.cuda.attention.attention_work import prefill_tiles
from vllm_lite.kernels.cuda.attention.gather_kv import gather_kv

TORCH = "torch sdpa, contiguous"
FLASH, VARLEN = "torch sdpa, flash", "torch varlen, contiguous"
OURS = "prefill_attention, paged"
BACKENDS = {FLASH: SDPBackend.FLASH_ATTENTION}
POINTS = (  # sequences, their new tokens, their tokens
    (1, 4096, 4096),
    (1, 1024, 1024),
    (16, 512, 512),
    (1, 16384, 16384),
    (1, 2048, 16384),
    (4, 2048, 4096),
    (1, 512, 32768),
    (1, 64, 32768),
)


TABLE_SHAPES = ((128, 4, 8), (128, 8, 8), (128, 1, 8), (64, 4, 8), (64, 8, 4), (256, 4, 4))
"""Head size, query heads of a KV head, KV heads."""
TABLE_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
TABLE_TOKENS = 2048
"""Minimum tokens of a measurement: shorter prompts are measured in batches."""
TABLE_CHUNKS = tuple((length, before) for length in (512, 2048) for before in (2048, 8192, 30720))
"""Pairs: the tokens of a chunk, and the tokens before it."""
LONG = 2048
"""With prompts of this many tokens a launch takes the device longer than the host."""


class Prefill:
    """Prefill of one shape, in every way."""

    def __init__(self, bench: Bench, batch: int, query_len: int, shape: Shape) -> None:
        self.bench, self.batch, self.query_len, self.shape = bench, batch, query_len, shape
        self.problem: Paged = paged(shape, bench.device, 0)
        self.tokens = batch * query_len
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        rows = torch.randn(self.tokens, sum(heads), shape.head_size, dtype=torch.bfloat16, device=bench.device)
        self.query, self.new_keys, self.new_values = rows.split(heads, 1)
        self.out = torch.empty(self.query.shape, dtype=rows.dtype, device=bench.device)
        self.lens = np.array([query_len] * batch), np.array([shape.context] * batch)
        self.starts = torch.arange(0, self.tokens + 1, query_len, dtype=torch.int32, device=bench.device)
        self.scale = shape.head_size**-0.5
        blocks = self.problem.tables[0].long()
        keys, values = (self.problem.kv[:, i][blocks].transpose(2, 3).flatten(1, 2) for i in (0, 1))
        self.keys, self.values = (part[:, : shape.context].contiguous() for part in (keys, values))

    @property
    def is_fresh(self) -> bool:
        return self.query_len == self.shape.context

    def sdpa(self) -> Launch:
        """torch's choice of its backends, or that of whoever calls it; a chunk's rows are the last of its sequence."""
        new = self.query.view(self.batch, self.query_len, *self.query.shape[1:])
        q, k, v = (part.transpose(1, 2) for part in (new, self.keys, self.values))
        if self.is_fresh:
            fresh = {"is_causal": True, "scale": self.scale, "enable_gqa": True}
            return lambda _: scaled_dot_product_attention(q, k, v, **fresh)
        mask = causal_lower_right(self.query_len, self.shape.context)
        return lambda _: scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)

    def whole(self, way: str) -> Launch:
        """A prompt that comes whole, as a layer hands it over."""
        prompts = (torch_prefill.WholePrompts(0, self.batch, self.query_len, way),)
        call = (self.out, self.query, self.new_keys, self.new_values, prompts, self.scale)
        return lambda _: torch_prefill.torch_prefill(*call)

    def by_backend(self, backend: SDPBackend) -> Launch:
        attend = self.sdpa()

        def launch(which: int) -> None:
            with sdpa_kernel(backend):
                attend(which)

        return launch

    def ours(self) -> Launch:
        tiles = prefill_tiles(*self.lens, self.shape.group, self.lens[0] > 0)
        tiles_there = torch.from_numpy(tiles).to(self.bench.device)
        cache = PagedKV(self.problem.kv, self.problem.tables[0], self.starts, self.problem.seq_lens)
        call = (self.bench.launcher, self.out, self.query, cache, tiles_there, Scoring(self.scale))
        return lambda _: prefill_attention.prefill_attention(*call)

    def plan(self) -> varlen.VarlenPlan:
        return varlen.make_plan(*self.lens, self.tokens, self.lens[0] > 0, self.bench.device)

    def gathered(self) -> Launch:
        plan = self.plan()
        where = (self.problem.kv, self.problem.tables[0], self.problem.seq_lens, plan)
        call = (self.bench.launcher, self.out, self.query, *where)
        return lambda _: varlen.varlen_prefill(*call, scale=self.scale)

    def contiguous(self) -> Launch:
        """torch's attention over sequences of any lengths, on K and V as a layer has just made them."""
        plan = self.plan()
        keys, values = (part.flatten(0, 1) for part in (self.keys, self.values))
        function = varlen.torch_varlen() if self.query.is_cuda else None
        if function is None:
            return lambda _: varlen.attend_by_sequence(self.query, keys, values, plan, self.scale)
        return lambda _: varlen.call_varlen(function, self.query, keys, values, plan, self.scale)

    def gather_only(self) -> Launch:
        plan = self.plan()
        keys = self.query.new_empty(self.batch * self.shape.context, *self.keys.shape[2:])
        where = (self.problem.kv, self.problem.tables[0], plan.gather_start_loc, self.problem.seq_lens)
        call = (self.bench.launcher, keys, torch.empty_like(keys), *where)
        return lambda _: gather_kv(*call, max_rows=self.shape.context)

    def seconds(self, launch: Launch) -> float:
        timer = self.bench.timer
        return timer.eager_seconds(launch) if self.tokens >= LONG else timer.device_seconds(launch)

    def measure(self) -> None:
        """A row for every way, beside the best of torch's."""
        shape = self.shape
        pairs = self.batch * (self.query_len * shape.context - self.query_len * (self.query_len - 1) / 2)
        flops = 4 * shape.num_heads * shape.head_size * pairs
        ways: dict[str, Callable[[], Launch]] = {TORCH: self.sdpa, OURS: self.ours, VARLEN: self.contiguous}
        ways |= {"gather + torch varlen": self.gathered, "gather_kv": self.gather_only}
        ways |= {name: partial(self.by_backend, backend) for name, backend in BACKENDS.items()}
        label = f"{self.batch} x {self.query_len} new of {shape.context} gqa {shape.group}"
        seconds: dict[str, float] = {}
        for name, way in ways.items():
            try:
                seconds[name] = self.seconds(way())
            except Exception as error:
                why = f"{name}, {label}: {type(error).__name__}: {str(error)[:300]}"
                emit(**({"say": f"cannot: {why}"} if name in BACKENDS or name == VARLEN else {"failed": why}))
        limit = min((seconds[name] for name in (TORCH, *BACKENDS) if name in seconds), default=None)
        for name, taken in seconds.items():
            against = {} if limit is None else {"limit": flops / limit / 1e12, "share": limit / taken}
            self.bench.row(name, label, taken, tflop_s=flops / taken / 1e12, **against)


def measure(bench: Bench, batch: int, query_len: int, context: int) -> None:
    Prefill(bench, batch, query_len, bench.shape(batch, context, 4)).measure()
    if not bench.small:
        torch.cuda.empty_cache()


def measure_table(bench: Bench) -> list[prefill_table.Measured]:
    """Measure whole prompts and chunks with our kernel and torch's. The table has only ways that the device
    supports."""
    shapes: Sequence[tuple[int, int, int]] = TABLE_SHAPES if not bench.small else ((64, 2, 1),)
    lengths: Sequence[int] = TABLE_LENGTHS if not bench.small else (20,)
    chunks: Sequence[tuple[int, int]] = TABLE_CHUNKS if not bench.small else ((20, 30),)
    tokens = TABLE_TOKENS if not bench.small else 40
    points = [(max(1, tokens // length), (length, 0)) for length in lengths] + [(1, chunk) for chunk in chunks]
    return [measure_point(bench, sizes, *point) for sizes in shapes for point in points]


def measure_point(
    bench: Bench, sizes: tuple[int, int, int], batch: int, chunk: tuple[int, int]
) -> prefill_table.Measured:
    """Measure one line of the table. `chunk`: its tokens, and the tokens before it."""
    (head_size, group, num_kv_heads), (length, before) = sizes, chunk
    one = Prefill(bench, batch, length, Shape(batch, length + before, group, num_kv_heads, head_size))
    ways: dict[str, Callable[[], Launch]] = {prefill_table.GATHERED: one.gathered}
    if before == 0:
        ways = {way: partial(one.whole, way) for way in prefill_table.LIBRARIES}
    us = {prefill_table.OURS: 1e6 * one.seconds(one.ours())}
    label = f"{batch} x {length} behind {before} head {head_size} gqa {group}"
    for way, launch in ways.items():
        try:
            us[way] = 1e6 * one.seconds(launch())
        except Exception as error:
            emit(say=f"cannot: {way}, {label}: {str(error)[:200]}")
    for way, taken in us.items():
        kind = "chunks" if before else "whole prompts"
        bench.row(f"{kind}: {way}", label, taken / 1e6, share=us[prefill_table.OURS] / taken)
    measured = prefill_table.Measured("bfloat16", head_size, group, length, us, before)
    emit(say=f"{label}: {measured.best() or prefill_table.OURS}")
    return measured


def keep(measured: list[prefill_table.Measured], device: str, folder: Path | None) -> None:
    """Write the table to the file that workers on such a device read, and check that it can be read back."""
    path = prefill_table.path_for(device, folder)
    prefill_table.save(path, measured)
    kept = prefill_table.load(path)
    for one in measured:
        layers = torch.bfloat16, one.head_size, one.group
        whole = (one.num_tokens, one.best()) in kept.ways(*layers)
        if not (whole or (one.num_tokens, one.num_before, one.best() is not None) in kept.behind(*layers)):
            emit(failed=f"{path} has not what was measured: {one}")
            return
    emit(fact={"table": str(path)}, say=f"wrote {path}")


def make_table(bench: Bench) -> None:
    """Measure the table and keep it; on a GPU in the place where workers find it."""
    measured = measure_table(bench)
    if not bench.small:
        keep(measured, torch.cuda.get_device_name(), None)
        return
    with TemporaryDirectory() as folder:
        keep(measured, "emulator", Path(folder))


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    launcher, device = open_launcher(arguments.emulate)
    bench = Bench(launcher, device)
    points = POINTS if not bench.small else ((2, 20, 36), (1, 20, 20))
    checks: dict[str, Callable[[], None]] = {"table": lambda: make_table(bench)}
    checks |= {f"{point[0]} x {point[1]} of {point[2]}": partial(measure, bench, *point) for point in points}
    run_checks(checks, arguments.first, lambda: usable(device))


if __name__ == "__main__":
    main()
