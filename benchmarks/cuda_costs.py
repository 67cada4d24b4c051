"""Costs of steps on the host of a GPU, and their launches: tables for docs/kernels-inside.md. Needs no GPU.

    python benchmarks/cuda_costs.py              # launches, blocks, bytes copied, microseconds of the host for a layer
    python benchmarks/cuda_costs.py --steps      # launches and microseconds of whole steps of a worker
    python benchmarks/cuda_costs.py --registers  # registers, spills and shared memory of kernels, by NVRTC
    python benchmarks/cuda_costs.py --compare    # those again, next to what benchmarks/results/cuda-costs.md has

Kernels go to a launcher that only counts, so the time is Python's time for one layer in bfloat16, with 32 query heads
of 128 over 8 KV heads, without torch's products: the best of many runs.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from vllm_lite.attention.backend import AttentionShape, Heads
from vllm_lite.attention.cuda import CudaBackend
from vllm_lite.attention.step_batch import HostLens, StepBatch
from vllm_lite.checkpoint.model_spec import AttentionSpec
from vllm_lite.kernels import cpu, select
from vllm_lite.kernels.cuda import cache_ops, fused, sampler
from vllm_lite.kernels.cuda.attention import decode_attention as decode
from vllm_lite.kernels.cuda.attention import prefill_attention as prefill
from vllm_lite.kernels.cuda.attention.attention_work import TILE, SplitList, tiles_a_split
from vllm_lite.kernels.cuda.fused import CudaOps
from vllm_lite.kernels.cuda.launcher import Arg, Kernel, packed
from vllm_lite.kernels.ops import Rotation
from vllm_lite.layers.weights import onednn
from vllm_lite.layers.weights.matmul import DenseMatmul
from vllm_lite.protocol.step import Entry, Finish
from vllm_lite.worker import worker as worker_module
from vllm_lite.worker.device import Device

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu" / "check")]

CPU, BF16 = torch.device("cpu"), torch.bfloat16
RECURRENT = (("short_conv", "4, false"), ("delta_rule", "128, 128"), ("mamba", "128, 64"), ("mamba", "256, 64"))
SPEC = AttentionSpec(32, 8, 128, scale=128**-0.5)
HIDDEN, INNER = 4096, 512
STEPS: dict[str, tuple[list[int], list[int]]] = {
    "64 decodes of 2048": ([1] * 64, [2048] * 64),
    "255 decodes of 1000, a chunk of 2048": ([1] * 255 + [2048], [1000] * 255 + [2048]),
    "8 x 5 drafts of 8192": ([5] * 8, [8192] * 8),
    "1 decode of 2048": ([1], [2048]),
    "a prompt of 8192": ([8192], [8192]),
    "64 decodes of 4352, each by itself": ([1] * 64, [4352] * 64),
    "64 decodes of 4352, 4096 of them in common": ([1] * 64, [4352] * 64),
    "16 decodes of 1280, 1024 of them in common": ([1] * 16, [1280] * 16),
}
"""Query lengths and sequence lengths."""
RECORD = Path(__file__).parents[1] / "benchmarks" / "results" / "cuda-costs.md"
ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


class NullLauncher:
    """Counts launches and blocks, and packs arguments as a launch would."""

    multiprocessor_bytes = 228 * 1024

    def __init__(self) -> None:
        self.blocks: dict[str, int] = {}
        self.launches = 0
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, source: str, name: str) -> Kernel:  # noqa: ARG002
        if name not in self._kernels:
            short = name.partition("<")[0]

            def launch(
                grid: tuple[int, int, int],
                block: tuple[int, int, int],  # noqa: ARG001
                args: Sequence[Arg],
                shared_bytes: int = 0,  # noqa: ARG001
            ) -> None:
                packed(name, args)
                self.launches += 1
                self.blocks[short] = self.blocks.get(short, 0) + grid[0] * grid[1] * grid[2]

            self._kernels[name] = launch
        return self._kernels[name]


def step_of(query_lens: list[int], seq_lens: list[int], common: int = 0) -> StepBatch:
    """`common`: number of first tokens that all sequences have in the same blocks."""
    n, num_seqs, longest = sum(query_lens), len(query_lens), max(seq_lens)
    tables = np.arange(num_seqs * -(-longest // 16), dtype=np.int32).reshape(num_seqs, -1)
    tables[:, : common // 16] = tables[0, : common // 16]
    lens = HostLens(np.array(query_lens), np.array(seq_lens), [tables])
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    zeros = torch.zeros(n, dtype=torch.int64)
    return StepBatch(
        num_tokens=n,
        num_seqs=num_seqs,
        max_query_len=max(query_lens),
        max_seq_len=longest,
        token_ids=zeros,
        positions=zeros,
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=(torch.zeros(num_seqs, -(-longest // 16), dtype=torch.int32),),
        slot_mapping=(zeros,),
        host=lens,
    )


def best_us(call: Callable[[], object], count: int = 50) -> float:
    call()
    times = []
    for _ in range(count):
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return min(times) * 1e6


def cost_of(name: str) -> str:
    """Measure one row of the table."""
    launcher = NullLauncher()
    shape = AttentionShape((SPEC,), 16, BF16, CPU, shares_prefixes=True, max_seq_len=131_072)
    backend, ops = CudaBackend(shape, launcher), CudaOps(launcher)
    common = re.search(r"(\d+) of them in common", name)
    batch = step_of(*STEPS[name], int(common[1]) if common else 0)
    n = batch.num_tokens
    qkv, turned = torch.zeros(n, 48, 128, dtype=BF16), torch.zeros(n, 128, dtype=BF16)
    heads = Heads(qkv[:, :32], qkv[:, 32:40], qkv[:, 40:], Rotation(turned, turned))
    kv, out = torch.zeros(4, 2, 8, 16, 128, dtype=BF16), torch.zeros(n, 32, 128, dtype=BF16)
    rows, weight = torch.zeros(n, HIDDEN, dtype=BF16), torch.zeros(HIDDEN, dtype=BF16)
    gate_up, inner = torch.zeros(n, 2 * INNER, dtype=BF16), torch.zeros(n, INNER, dtype=BF16)

    def attention() -> None:
        backend.write_kv(heads, kv, batch, 0)
        backend.attend(heads.query, kv, batch, 0, out)

    def small() -> None:
        ops.add_rms_norm(rows, rows, weight, 1e-5, rows)
        ops.activate_and_mul("silu", gate_up, inner)
        ops.add_rms_norm(rows, rows, weight, 1e-5, rows)

    def first() -> None:
        batch.plan.launches.clear()
        attention()

    prepare_us = best_us(lambda: backend.prepare(batch))
    launcher.blocks.clear()
    attention()
    blocks = ", ".join(f"{count} {kernel}" for kernel, count in launcher.blocks.items())
    plan = batch.plan
    works = [work for work in plan.decodes if work is not None]
    lists = [part for work in works for part in (work.splits, *(work.cascade or ()))]
    num_bytes = sum(part.nbytes for part in (*lists, *(part for part in plan.prefills if part is not None)))
    kv_mb = sum(map(decoded_tokens, works)) * 2 * SPEC.num_kv_heads * SPEC.head_size * BF16.itemsize / 1e6
    cells = (prepare_us, best_us(first), best_us(attention), best_us(small))
    return f"| {name} | {blocks} | {num_bytes} | {kv_mb:.0f} | " + " | ".join(f"{us:.0f}" for us in cells) + " |"


def decoded_tokens(work: SplitList) -> int:
    """Number of tokens whose K and V the decode kernels read, shared or not."""
    num_splits, num_shared = work.splits[0, :2].tolist()
    entries = work.splits[1 : 1 + num_splits].numpy()[:, 2:]
    if num_shared and work.cascade is not None:
        entries = np.concatenate((entries, work.cascade.shared[:num_shared].numpy()[:, [2, 1]]))
    seen, split = entries.T.astype(np.int64)
    size = TILE * tiles_a_split(-(-seen // TILE))
    return int((np.minimum((split + 1) * size, seen) - split * size).sum())


def kernels() -> list[tuple[str, str]]:
    """Source and name of the most important kernels, with their most frequent types."""
    bf16, e4m3 = "__nv_bfloat16", torch.float8_e4m3fn
    small = ("rms_norm", "add_rms_norm", "silu_and_mul")
    return [
        *((decode.SOURCE, decode.kernel_name(BF16, BF16, size, 4, 16)) for size in (64, 128, 256)),
        (decode.SOURCE, decode.kernel_name(BF16, e4m3, 128, 4, 16)),
        (decode.SOURCE, f"decode_attention<{bf16}, {bf16}, 128, 1, false, 4, true>"),
        *((decode.CASCADE_SOURCE, decode.cascade_name(BF16, kv, 128, 16)) for kv in (BF16, e4m3)),
        *((prefill.SOURCE, prefill.kernel_name(BF16, BF16, *shape)) for shape in ((64, 64), (128, 64), (128, 32))),
        (prefill.SOURCE, prefill.kernel_name(BF16, e4m3, 128, 64)),
        *((fused.SOURCE, f"{name}<{bf16}, 8>") for name in small),
        *((cache_ops.SOURCE, f"{name}_and_cache<{bf16}, {bf16}, 8>") for name in ("rope", "norm_rope")),
        *((sampler.SOURCE, f"{name}<4>") for name in ("pick", "best_part", "coarse_part", "draw_part")),
        ("experts.cuh", f"expert_tiles<{bf16}, {bf16}, experts::SILU, 1, true>"),
        ("experts.cuh", f"expert_tiles<{bf16}, {bf16}, experts::SILU, 4, true>"),
        ("packed_linear.cuh", f"packed_linear<{bf16}, {bf16}, __half, packed::INT4, packed::NOTHING, 2, 1, 2>"),
        ("packed_linear.cuh", f"packed_linear<{bf16}, {bf16}, __half, packed::INT4, packed::NOTHING, 2, 4, 4>"),
        ("packed_linear.cuh", f"packed_linear<{bf16}, float, float, packed::INT8, packed::NOTHING, 1, 1, 2>"),
        ("packed_tiles.cuh", f"packed_tiles<{bf16}, {bf16}, __half, packed::INT4, packed::NOTHING, 2, 4>"),
        ("packed_tiles.cuh", f"packed_tiles<{bf16}, {bf16}, __half, packed::INT4, packed::NOTHING, 2, 8>"),
        ("packed_tiles.cuh", f"packed_tiles<{bf16}, float, float, packed::INT8, packed::NOTHING, 1, 8>"),
        *(("recurrent.cuh", f"{name}<{bf16}, {sizes}>") for name, sizes in RECURRENT),
        *(("recurrent_chunks.cuh", f"{name}_chunks<{bf16}, {sizes}>") for name, sizes in RECURRENT[1:]),
    ]


def registers() -> None:
    """Also dynamic shared memory, where the host asks for some; static memory is ptxas's."""
    dynamic = {"pick": sampler.SHARED_BYTES}
    for size, keys in ((64, 64), (128, 64), (128, 32)):
        dynamic[f"prefill_attention<bf16, bf16, {size}, {keys}>"] = prefill.shared_bytes(size, keys)
    print(f"| registers (bytes spilled; static shared memory) | {' | '.join(ARCHES)} | dynamic |")
    print(f"|---|{'---|' * len(ARCHES)}---|")
    for source, name in kernels():
        cells = [f"{registers} ({spilled}; {shared})" for registers, spilled, shared in needs(source, name)]
        own = dynamic.get(short(name), sampler.SHARED_BYTES if source == sampler.SOURCE else "")
        print(f"| `{short(name)}` | {' | '.join(cells)} | {own} |", flush=True)


def short(name: str) -> str:
    return name.replace("__nv_bfloat16", "bf16")


def needs(source: str, name: str) -> list[tuple[int, int, int]]:
    """Registers, spilled bytes and bytes of static shared memory of a kernel, for each of ARCHES."""
    from tests.kernels import nvrtc

    reports = [nvrtc.compile_report(source, name, arch) for arch in ARCHES]
    return [(report.registers, report.spill_bytes, report.shared) for report in reports]


def recorded() -> dict[str, list[tuple[int, int, int]]]:
    """Read the result of `needs` when RECORD was written, by the short name of the kernel."""
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", RECORD.read_text(), re.MULTILINE)
    found = {name: re.findall(r"(\d+) \((\d+); (\d+)\)", cells) for name, cells in rows}
    return {name: [(int(a), int(b), int(c)) for a, b, c in cells] for name, cells in found.items() if cells}


def compare(chosen: Sequence[tuple[str, str]]) -> list[str]:
    """List kernels that need more than RECORD says, one per line: over two registers more, or any more spilled or
    shared bytes."""
    known, said = recorded(), []
    for source, name in chosen:
        for arch, now, before in zip(ARCHES, needs(source, name), known[short(name)], strict=True):
            if now[0] > before[0] + 2 or now[1:] > before[1:]:
                said.append(f"{short(name)}, {arch}: {now}, recorded {before}")
    return said


# ---- whole steps


class NullGraph:
    """The captured launches. A replay counts as one launch."""

    replays = 0

    def replay(self) -> None:
        NullGraph.replays += 1


class NullCapture:
    """Records nothing, so that a replay takes only Python's time."""

    on_demand = False
    spent_s = 0.0

    def __call__(self, prepare: Callable[[], None], run: Callable[[], None]) -> NullGraph:
        prepare()
        run()
        return NullGraph()

    def pieces(self, run: Callable[[Callable[[], None]], None]) -> list[NullGraph]:
        graphs = [NullGraph()]
        run(lambda: graphs.append(NullGraph()))
        return graphs

    def used_bytes(self) -> int:
        return 0


def steps() -> None:
    """A worker with 32 layers. Torch's products are left out: four calls a layer where it runs eagerly."""
    from gpu_check_models import MODELS, HostMemory, RandomWorker
    from gpu_check_step import Steps

    launcher = NullLauncher()
    for name, (module, value) in {
        "select_backend": (worker_module, lambda shape, _: CudaBackend(shape, launcher)),
        "TorchOps": (select, lambda: CudaOps(launcher)),
        "available": (cpu, lambda: False),
        "pack": (onednn, lambda _: None),
        "forward": (DenseMatmul, lambda *_: None),
    }.items():
        setattr(module, name, value)
    MODELS["tiny"] |= {"num_hidden_layers": 32, "max_position_embeddings": 2048}
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "cudagraph_capture_sizes": (8, 64)}
    worker = RandomWorker(
        "tiny",
        Device(CPU, HostMemory(), NullCapture()),
        **settings,
        num_gpu_blocks_override=4096,
        enable_prefix_caching=False,
    )
    made = Steps("tiny", worker)
    runner = worker.worker.runner
    forwards = {"graphs": runner.forward, "eager": runner.eager}
    print("| step of 32 layers | way | launches of ours | replays | us of the host |\n|---|---|---|---|---|")
    for decodes, chunk in ((8, 0), (64, 0), (7, 48), (63, 192)):
        with made.decoding(decodes, 512) as going:
            handle = 0

            def entries(going: list[Entry] = going, chunk: int = chunk) -> list[Entry]:
                nonlocal handle
                ended: list[Entry] = [Finish(handle)] if handle else []
                if not chunk:
                    return going
                first = made.request(0, chunk, 3000)
                handle = first.handle
                return [*ended, *going, first]

            for way, forward in forwards.items():
                runner.forward = forward
                worker.run(entries())
                launcher.launches, NullGraph.replays = 0, 0
                worker.run(entries())
                counts = f"{launcher.launches} | {NullGraph.replays}"
                us = best_us(lambda: worker.run(entries()), 15)
                what = f"{decodes} decodes" + (f", a chunk of {chunk}" if chunk else "")
                print(f"| {what} | {way} | {counts} | {us:.0f} |", flush=True)
            if handle:
                worker.run([Finish(handle)])
    worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--registers", action="store_true")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--steps", action="store_true")
    arguments = parser.parse_args()
    if arguments.compare:
        worse = compare(kernels())
        print("\n".join(worse) or "no kernel needs more than is recorded")
        sys.exit(bool(worse))
    if arguments.registers or arguments.steps:
        (registers if arguments.registers else steps)()
        return
    print(
        "| step | blocks of a layer | bytes of lists, a step | MB of K and V that decodes read | us: lists "
        "| first layer | others | norms, activation |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in STEPS:
        print(cost_of(name), flush=True)


if __name__ == "__main__":
    main()
