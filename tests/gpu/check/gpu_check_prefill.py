"""Part of `gpu_check`: our prefill over pages next to what torch has: FlashAttention and cuDNN on contiguous K and V.

Prompts that come whole go the fastest way of a table (vllm_lite/kernels/cuda/prefill_table.py), which is measured here
and kept where workers on this device find it; all others through our kernel.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from gpu_check_bench import Bench
from gpu_check_cases import open_launcher
from gpu_check_parts import emit
from gpu_check_setup import Launch, Paged, Shape, paged
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from vllm_lite.kernels.cuda import prefill_attention, prefill_table, varlen
from vllm_lite.kernels.cuda.attention_inputs import PagedKV, Scoring
from vllm_lite.kernels.cuda.attention_work import prefill_tiles
from vllm_lite.kernels.cuda.gather_kv import gather_kv

TORCH = "torch sdpa, contiguous"
FLASH, CUDNN, VARLEN = "torch sdpa, flash", "torch sdpa, cudnn", "torch varlen, contiguous"
OURS = "prefill_attention, paged"
BACKENDS = {FLASH: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}
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
"""Of a measurement, at least: shorter prompts come several at a time."""


class Prefill:
    """One shape by every way."""

    def __init__(self, bench: Bench, batch: int, query_len: int, shape: Shape) -> None:
        self.bench, self.batch, self.query_len, self.shape = bench, batch, query_len, shape
        self.problem: Paged = paged(shape, bench.device, 0)
        self.tokens = batch * query_len
        size = (self.tokens, shape.num_heads, shape.head_size)
        self.query = torch.randn(size, dtype=torch.bfloat16, device=bench.device)
        self.out = torch.empty_like(self.query)
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

    def by_backend(self, backend: SDPBackend) -> Launch:
        attend = self.sdpa()

        def launch(which: int) -> None:
            with sdpa_kernel(backend):
                attend(which)

        return launch

    def ours(self) -> Launch:
        lens = np.array([self.query_len] * self.batch), np.array([self.shape.context] * self.batch)
        tiles = torch.from_numpy(prefill_tiles(*lens, self.shape.group, lens[0] > 0)).to(self.bench.device)
        cache = PagedKV(self.problem.kv, self.problem.tables[0], self.starts, self.problem.seq_lens)
        call = (self.bench.launcher, self.out, self.query, cache, tiles, Scoring(self.scale))
        return lambda _: prefill_attention.prefill_attention(*call)

    def gathered(self) -> Launch:
        plan = varlen.make_plan(self.starts, self.problem.seq_lens, self.tokens)
        where = (self.problem.kv, self.problem.tables[0], self.problem.seq_lens, plan)
        call = (self.bench.launcher, self.out, self.query, *where)
        return lambda _: varlen.varlen_prefill(*call, scale=self.scale)

    def contiguous(self) -> Launch:
        """torch's attention over sequences of any lengths, on K and V as a layer has just made them."""
        plan = varlen.make_plan(self.starts, self.problem.seq_lens, self.tokens)
        keys, values = (part.flatten(0, 1) for part in (self.keys, self.values))
        function = varlen.torch_varlen() if self.query.is_cuda else None
        if function is None:
            return lambda _: varlen.attend_by_sequence(self.query, keys, values, plan, self.scale)
        return lambda _: varlen.call_varlen(function, self.query, keys, values, plan, self.scale)

    def gather_only(self) -> Launch:
        plan = varlen.make_plan(self.starts, self.problem.seq_lens, self.tokens)
        keys = self.query.new_empty(self.batch * self.shape.context, *self.keys.shape[2:])
        where = (self.problem.kv, self.problem.tables[0], plan.kv_start_loc, self.problem.seq_lens)
        call = (self.bench.launcher, keys, torch.empty_like(keys), *where)
        return lambda _: gather_kv(*call, max_rows=self.shape.context)

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
                seconds[name] = self.bench.timer.eager_seconds(way())
            except Exception as error:
                why = f"{name}, {label}: {type(error).__name__}: {str(error)[:300]}"
                emit(**({"say": f"cannot: {why}"} if name in BACKENDS or name == VARLEN else {"failed": why}))
        limit = min((seconds[name] for name in (TORCH, *BACKENDS) if name in seconds), default=None)
        for name, taken in seconds.items():
            against = {} if limit is None else {"limit": flops / limit / 1e12, "share": limit / taken}
            self.bench.row(name, label, taken, tflop_s=flops / taken / 1e12, **against)


def measure(bench: Bench) -> None:
    for batch, query_len, context in POINTS if not bench.small else ((2, 20, 36), (1, 20, 20)):
        try:
            Prefill(bench, batch, query_len, bench.shape(batch, context, 4)).measure()
        except Exception as error:
            emit(failed=f"{batch} x {query_len} of {context}: {type(error).__name__}: {error}")
        if not bench.small:
            torch.cuda.empty_cache()


def measure_table(bench: Bench) -> list[prefill_table.Measured]:
    """Whole prompts by our kernel and torch's; what a device cannot do is no way of its table."""
    shapes: Sequence[tuple[int, int, int]] = TABLE_SHAPES if not bench.small else ((64, 2, 1),)
    lengths: Sequence[int] = TABLE_LENGTHS if not bench.small else (20,)
    tokens = TABLE_TOKENS if not bench.small else 40
    measured = []
    for head_size, group, num_kv_heads in shapes:
        for length in lengths:
            shape = Shape(max(1, tokens // length), length, group, num_kv_heads, head_size)
            one = Prefill(bench, shape.batch, length, shape)
            us = {prefill_table.OURS: 1e6 * bench.timer.eager_seconds(one.ours())}
            for way, backend in prefill_table.LIBRARIES.items():
                try:
                    us[way] = 1e6 * bench.timer.eager_seconds(one.by_backend(backend))
                except Exception as error:
                    emit(say=f"cannot: {way}, {shape}: {str(error)[:200]}")
            label = f"{shape.batch} x {length} head {head_size} gqa {group}"
            for way, taken in us.items():
                bench.row(f"whole prompts: {way}", label, taken / 1e6, share=us[prefill_table.OURS] / taken)
            measured.append(prefill_table.Measured("bfloat16", head_size, group, length, us))
            emit(say=f"{label}: {measured[-1].best() or prefill_table.OURS}")
    return measured


def keep(measured: list[prefill_table.Measured], device: str, folder: Path | None) -> None:
    """Where workers on such a device look for it; and read it as they do."""
    path = prefill_table.path_for(device, folder)
    prefill_table.save(path, measured)
    kept = prefill_table.load(path)
    for one in measured:
        if (one.num_tokens, one.best()) not in kept.ways(torch.bfloat16, one.head_size, one.group):
            emit(failed=f"{path} has not what was measured: {one}")
            return
    emit(fact={"table": str(path)}, say=f"wrote {path}")


def make_table(bench: Bench) -> None:
    """Measure and keep it, on a GPU for the workers."""
    try:
        measured = measure_table(bench)
        if not bench.small:
            keep(measured, torch.cuda.get_device_name(), None)
            return
        with TemporaryDirectory() as folder:
            keep(measured, "emulator", Path(folder))
    except Exception as error:
        emit(failed=f"table: {type(error).__name__}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulate", action="store_true")
    bench = Bench(*open_launcher(parser.parse_args().emulate))
    make_table(bench)
    measure(bench)
    emit(finished=True)


if __name__ == "__main__":
    main()
