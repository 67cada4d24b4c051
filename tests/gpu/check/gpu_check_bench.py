"""Part of `gpu_check`: measures the kernels, beside limits of the device and other implementations.

Kernels that are limited by memory are compared with the copy bandwidth, which is measured here. gpu_check_prefill.py
measures prefill. Times are medians of graph replays, except for operations that cannot be captured. The launches of a
decode use several sets of blocks in turn, so that no cache of the device holds them.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from gpu_check_cases import open_launcher, usable
from gpu_check_experts import measure as measure_experts
from gpu_check_graphs import Work, lists_for
from gpu_check_linear import measure as measure_linear
from gpu_check_parts import emit, parser_of, run_checks
from gpu_check_recurrent import measure as measure_recurrent
from gpu_check_setup import Launch, Paged, Shape, paged, timer_for

from vllm_lite.kernels.cuda import cache_ops, fused, masks, sampler
from vllm_lite.kernels.cuda.attention import decode_attention as decode
from vllm_lite.kernels.cuda.attention import prefill_attention
from vllm_lite.kernels.cuda.attention.attention_inputs import PagedKV, Scoring
from vllm_lite.kernels.cuda.attention.attention_work import Cascade, RowWork, SplitList, prefill_tiles, rows_of
from vllm_lite.kernels.cuda.attention.shared_prefix import Worth, cascade_lists
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.ops import Ops, Rotation, TorchOps
from vllm_lite.kernels.sampling import DRAW, MaskedRows

E4M3 = torch.float8_e4m3fn


class Bench:
    """Runs measurements one after the other, and reports each at once."""

    def __init__(self, launcher: Launcher, device: torch.device) -> None:
        self.launcher = launcher
        self.device = device
        self.small = device.type == "cpu"
        self.timer = timer_for(device)
        self.copy_gb_s = 0.0
        self.cold_bytes = 1 << 12 if self.small else 1 << 28

    def row(self, kernel: str, shape: object, seconds: float, **figures: float) -> None:
        values = {"kernel": kernel, "shape": str(shape), "us": round(seconds * 1e6, 2)}
        values |= {name: round(value, 4) for name, value in figures.items()}
        emit(row=values)

    def bytes_row(self, kernel: str, shape: object, seconds: float, num_bytes: float) -> None:
        gb_s = num_bytes / seconds / 1e9
        self.row(kernel, shape, seconds, gb_s=gb_s, limit=self.copy_gb_s, share=gb_s / self.copy_gb_s)

    def checks(self, chosen: str) -> dict[str, Callable[[], None]]:
        """Measurements by name: `first` selects those that other measurements need, `second` all others."""
        first: list[Callable[[], None]] = [self.launch, self.decode, self.linear, self.experts]
        second: list[Callable[[], None]] = [
            *(self.layers, self.few_rows, self.long_graphs, self.decode_fetch, self.shared_prefix),
            *(self.decode_variants, self.fused, self.sampler, self.masks, self.recurrent),
        ]
        parts = {"first": first, "second": second, "all": first + second}[chosen]
        return {part.__name__: partial(self._run, part) for part in parts}

    def _run(self, part: Callable[[], None]) -> None:
        try:
            part()
        finally:
            if not self.small:
                torch.cuda.empty_cache()

    # ---- the limits

    def copy(self) -> None:
        """Measure the bytes per second that a copy of large tensors reads and writes: the limit of kernels that read
        memory in order."""
        size = 1 << 20 if self.small else 1 << 30
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        seconds = self.timer.eager_seconds(lambda _: target.copy_(source))
        self.copy_gb_s = 2 * size / seconds / 1e9
        self.row("copy", f"{size >> 20} MiB", seconds, gb_s=self.copy_gb_s, limit=self.copy_gb_s, share=1.0)

    def launch(self) -> None:
        """Time of one call in Python, without waiting for the device. A graph saves this time for each kernel."""
        x = torch.zeros(1, 64, dtype=torch.bfloat16, device=self.device)
        ops, weight = fused.CudaOps(self.launcher), torch.ones(64, dtype=torch.bfloat16, device=self.device)
        problem = paged(Shape(1, 16, 1), self.device, 0)
        work = lists_for(problem, [problem.shape.context])
        for name, call in (
            ("launch: rms_norm", lambda: ops.rms_norm(x, weight, 1e-5, x)),
            ("launch: decode_attention", lambda: self.attend(problem, 0, work)),
            ("launch: torch add", lambda: x.add_(1)),
        ):
            count = 2 if self.small else 2000
            call()
            start_s = time.perf_counter()
            for _ in range(count):
                call()
            us = (time.perf_counter() - start_s) / count * 1e6
            emit(fact={f"{name}, us": round(us, 2)}, say=f"{name}: {us:.1f} us of the host for a call")
            if not self.small:
                torch.cuda.synchronize()

    # ---- attention

    def attend(self, problem: Paged, which: int, work: Work, split_tokens: int = 0) -> None:
        decode.decode_attention(
            *(self.launcher, problem.out, problem.query),
            PagedKV(problem.kv, problem.tables[which], None, problem.seq_lens),
            work[0],
            Scoring(problem.shape.head_size**-0.5),
            workspace=work[1],
            split_tokens=split_tokens,
        )

    def decode_row(self, shape: Shape, split_tokens: int = 0, name: str = "decode_attention") -> None:
        if not self.small and shape.kv_bytes > 0.6 * torch.cuda.mem_get_info()[0]:
            emit(say=f"{shape}: too large for the memory")
            return
        problem = paged(shape, self.device, self.cold_bytes)
        work = lists_for(problem, [shape.context] * shape.batch, split_tokens)
        seconds = self.timer.seconds(lambda which: self.attend(problem, which, work, split_tokens), len(problem.tables))
        self.bytes_row(name, shape, seconds, shape.kv_bytes)

    def decode(self) -> None:
        batches, contexts = ((1, 8, 64), (1024, 8192, 32768)) if not self.small else ((1, 2), (40,))
        for group in (1, 4, 8):
            for batch in batches:
                for context in contexts:
                    self.decode_row(self.shape(batch, context, group))

    def decode_variants(self) -> None:
        large = (64, 4096) if not self.small else (2, 40)
        for layout in ("HND", "NHD"):
            self.decode_row(self.shape(*large, 4, layout=layout))
        for dtype in (torch.bfloat16, E4M3):
            self.decode_row(self.shape(*large, 8, kv_dtype=dtype))
        for block_size in (8, 32, 64):
            name = f"decode_attention block {block_size}"
            self.decode_row(self.shape(*large, 4, block_size=block_size), name=name)
        for batch, context in ((1, 32768), (8, 8192), (64, 8192)) if not self.small else ((1, 200),):
            for split_tokens in (128, 256, 512, 1024, 2048):
                name = f"decode_attention split {split_tokens}"
                self.decode_row(self.shape(batch, context, 4), split_tokens, name)

    def decode_fetch(self) -> None:
        """Decode attention that prefetches tiles into L2."""
        kept = decode.FETCH
        decode.FETCH = True
        try:
            for batch, context in ((64, 8192), (8, 8192), (1, 32768), (64, 1024)) if not self.small else ((1, 40),):
                for kv_dtype in (torch.bfloat16, E4M3):
                    self.decode_row(self.shape(batch, context, 4, kv_dtype=kv_dtype), name="decode_attention fetch")
        finally:
            decode.FETCH = kept

    def shared_prefix(self) -> None:
        """Decodes of sequences with a common prefix, which is read once for several rows, or by each row."""
        points = ((8, 4096, 4), (16, 4096, 4), (64, 4096, 4), (64, 4096, 8), (64, 1024, 4))
        for batch, common, group in points if not self.small else ((3, 32, 2),):
            self.shared_point(self.shape(batch, common + 256, group), common)

    def shared_point(self, shape: Shape, common: int) -> None:
        problem, split_tokens = paged(shape, self.device, self.cold_bytes), 16 if self.small else 0
        for table in problem.tables:
            table[:, : common // shape.block_size] = table[0, : common // shape.block_size]
        places = np.arange(shape.batch)
        lists = cascade_lists(
            *(RowWork(places, places, np.full(shape.batch, shape.context)), problem.tables[0].cpu().numpy()),
            *(shape.block_size, decode.most_sharing(shape.group, shape.head_size), shape.num_kv_heads),
            worth=Worth(split_tokens or 1024, 2, 1),
            split_tokens=split_tokens,
        )
        if lists is None:
            raise AssertionError(f"{shape}: nothing is shared")
        each, workspace = lists_for(problem, [shape.context] * shape.batch, split_tokens)
        nothing = torch.zeros(shape.batch * 64, 4, dtype=torch.int32, device=self.device)
        empty = each._replace(cascade=Cascade(nothing, nothing.view(-1), nothing.view(-1, 2)))
        for name, work in (("each by itself", each), ("read once", lists.on(self.device)), ("nothing shared", empty)):
            seconds = self.timer.seconds(
                lambda which: self.attend(problem, which, (work, workspace), split_tokens),  # noqa: B023
                len(problem.tables),
            )
            self.bytes_row(f"decode, {common} in common: {name}", shape, seconds, shape.kv_bytes)

    def shape(self, batch: int, context: int, group: int, **fields: object) -> Shape:
        sizes = {"num_kv_heads": 1, "head_size": 64} if self.small else {}
        return Shape(batch, context, group, **(sizes | fields))  # type: ignore[arg-type]

    def few_rows(self) -> None:
        """Drafts and short chunks after a long context: with the decode kernel, which computes each row separately, and
        with the prefill kernel."""
        for query_len in (2, 5, 16, 64) if not self.small else (3,):
            for batch, context in ((1, 32768), (8, 8192), (64, 4096)) if not self.small else ((1, 40),):
                self.few_rows_point(query_len, self.shape(batch, context, 4))

    def few_rows_point(self, query_len: int, shape: Shape) -> None:
        problem, batch = paged(shape, self.device, 0), shape.batch
        query = torch.randn(batch * query_len, *problem.query.shape[1:], dtype=torch.bfloat16, device=self.device)
        out, scoring = torch.empty_like(query), Scoring(shape.head_size**-0.5)
        starts = torch.arange(0, len(query) + 1, query_len, dtype=torch.int32, device=self.device)
        cache = PagedKV(problem.kv, problem.tables[0], starts, problem.seq_lens)
        lens = np.full(batch, query_len), np.full(batch, shape.context)
        tiles = torch.from_numpy(prefill_tiles(*lens, shape.group, lens[0] > 0)).to(self.device)
        lists = SplitList.on(self.device, rows_of(*lens, len(query), lens[0] > 0))
        sizes = (lists.most_splits, shape.num_heads, shape.head_size)
        workspace = decode.Workspace.for_splits(self.device, *sizes)
        ways: dict[str, Launch] = {
            "few rows: prefill": lambda _: prefill_attention.prefill_attention(
                self.launcher, out, query, cache, tiles, scoring
            ),
            "few rows: decode": lambda _: decode.decode_attention(
                self.launcher, out, query, cache, lists, scoring, workspace=workspace
            ),
        }
        for name, way in ways.items():
            self.bytes_row(name, f"{batch} x {query_len} of {shape.context}", self.timer.seconds(way), shape.kv_bytes)

    def long_graphs(self) -> None:
        """Decodes with lists that have room for 131,072 tokens of each sequence, as in a graph, and with lists of the
        exact size."""
        for batch, context in ((1, 2048), (64, 1024), (256, 512)) if not self.small else ((1, 40),):
            problem = paged(self.shape(batch, context, 4), self.device, self.cold_bytes)
            exact, workspace = lists_for(problem, [context] * batch)
            room = torch.zeros(1 + batch * 64, 4, dtype=torch.int32, device=self.device)
            room[: len(exact.splits)] = exact.splits
            for name, work in (("exact", exact), ("room for 131072", exact._replace(splits=room))):
                sizes = (work.most_splits, problem.shape.num_heads, problem.shape.head_size)
                scratch = workspace if work is exact else decode.Workspace.for_splits(self.device, *sizes)
                seconds = self.timer.seconds(lambda i: self.attend(problem, i, (work, scratch)), len(problem.tables))  # noqa: B023
                self.bytes_row(f"decode, list {name}", problem.shape, seconds, problem.shape.kv_bytes)

    def layers(self) -> None:
        """Decodes over the engine's pool, in which all layers of a block are contiguous, and over a pool of one
        layer."""
        for batch, context in ((64, 1024), (8, 8192)) if not self.small else ((1, 40),):
            for num_layers in (1, 32) if not self.small else (1, 2):
                self.layers_point(paged(self.shape(batch, context, 4), self.device, 0), num_layers)

    def layers_point(self, problem: Paged, num_layers: int) -> None:
        kv = problem.kv
        pool = torch.empty(len(kv), num_layers, *kv.shape[1:], dtype=kv.dtype, device=self.device)
        pool[:] = kv[:, None]
        spread = [replace(problem, kv=pool[:, layer]) for layer in range(num_layers)]
        work = lists_for(problem, problem.seq_lens.tolist())
        seconds = self.timer.seconds(lambda i: self.attend(spread[i], 0, work), num_layers)
        self.bytes_row(f"decode, {num_layers} layers in a block", problem.shape, seconds, problem.shape.kv_bytes)

    # ---- the rest

    def fused(self) -> None:
        """Speed at which our fused operations and plain torch read and write the bytes that they must."""
        hidden, inner = (4096, 14336) if not self.small else (64, 64)
        for rows in (1, 64, 2048) if not self.small else (2,):
            for name, ops in (("", fused.CudaOps(self.launcher)), ("torch: ", TorchOps())):
                self.fused_row(name, ops, rows, hidden, inner)
            self.rope_row(rows, hidden)

    def tensors(self, *shapes: tuple[int, ...]) -> Iterable[torch.Tensor]:
        return (torch.randn(shape, dtype=torch.bfloat16, device=self.device) for shape in shapes)

    def fused_row(self, name: str, ops: Ops, rows: int, hidden: int, inner: int) -> None:
        residual, x, out, weight, gate_up, activated = self.tensors(
            *[(rows, hidden)] * 3, (hidden,), (rows, 2 * inner), (rows, inner)
        )
        seconds = self.timer.seconds(lambda _: ops.add_rms_norm(residual, x, weight, 1e-5, out))
        self.bytes_row(f"{name}add_rms_norm", f"{rows} x {hidden}", seconds, 4 * residual.nbytes)
        seconds = self.timer.seconds(lambda _: ops.activate_and_mul("silu", gate_up, activated))
        self.bytes_row(f"{name}silu_and_mul", f"{rows} x {inner}", seconds, gate_up.nbytes + activated.nbytes)

    def rope_row(self, rows: int, hidden: int) -> None:
        size, kv_heads = (128, 8) if not self.small else (32, 1)
        heads = hidden // size
        query, key, value, cos, sin, kv = self.tensors(
            *((rows, heads, size), (rows, kv_heads, size), (rows, kv_heads, size), (rows, size), (rows, size)),
            (rows // 16 + 2, 2, kv_heads, 16, size),
        )
        to = cache_ops.CacheSlots(kv, torch.arange(16, 16 + rows, device=self.device))
        rotation = Rotation(cos, sin)
        seconds = self.timer.seconds(lambda _: cache_ops.rope_and_cache(self.launcher, query, key, value, rotation, to))
        num_bytes = 2 * (query.nbytes + key.nbytes) + key.nbytes + 2 * value.nbytes + cos.nbytes + sin.nbytes
        self.bytes_row("rope_and_cache", f"{rows} x {heads}/{kv_heads} x {size}", seconds, num_bytes)

    def sampler(self) -> None:
        """One token per row with top-k and top-p: our single kernel, and sorting in torch."""
        vocab = 128256 if not self.small else 1000
        for rows in (1, 64, 256) if not self.small else (2,):
            logits = torch.randn(rows, vocab, device=self.device).mul_(4)
            draws = np.zeros(rows, DRAW)
            draws["seed"], draws["temperature"] = np.arange(rows), 1.0
            draws["top_k"], draws["top_p"], draws["max_distance"] = 50, 0.9, np.inf
            seconds = self.timer.device_seconds(lambda _: sampler.pick_on_device(self.launcher, logits, draws))  # noqa: B023
            self.bytes_row("sampler pick", f"{rows} x {vocab} top-k 50 top-p 0.9", seconds, logits.nbytes)
            seconds = self.timer.device_seconds(lambda _: by_sorting(logits))  # noqa: B023
            self.bytes_row("torch: sort and multinomial", f"{rows} x {vocab}", seconds, logits.nbytes)

    def masks(self) -> None:
        """Masks that allow one token in a hundred, like those of a grammar inside a structure."""
        vocab = 151936 if not self.small else 1000
        for rows in (1, 32, 256) if not self.small else (2,):
            logits = torch.randn(rows, vocab, device=self.device)
            allowed = np.random.default_rng(0).random((rows, -(-vocab // 32) * 32)) < 0.01
            bitmasks = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
            masked = masks.bring(logits, MaskedRows(np.arange(rows), bitmasks))
            seconds = self.timer.device_seconds(lambda _: masks.rule_out(self.launcher, logits, masked))  # noqa: B023
            self.bytes_row("rule_out", f"{rows} x {vocab}", seconds, 2 * logits.nbytes)

    def experts(self) -> None:
        measure_experts(self, self.launcher, self.device)

    def recurrent(self) -> None:
        measure_recurrent(self, self.launcher, self.device)

    def linear(self) -> None:
        measure_linear(self, self.launcher, self.device)


def by_sorting(logits: torch.Tensor) -> torch.Tensor:
    """top-k 50 and top-p 0.9 as usually written: [rows, vocab] -> int64 [rows, 1]."""
    values, ids = logits.sort(descending=True)
    probs = values.softmax(-1)
    probs[:, 50:] = 0
    probs.masked_fill_(probs.cumsum(-1) - probs > 0.9, 0)
    return ids.gather(1, probs.multinomial(1))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="?", choices=("first", "second", "all"), default="all")
    arguments = parser.parse_args()
    launcher, device = open_launcher(arguments.emulate)
    bench = Bench(launcher, device)
    bench.copy()
    run_checks(bench.checks(arguments.parts), arguments.first, lambda: usable(device))


if __name__ == "__main__":
    main()
