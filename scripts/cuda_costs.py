"""What steps cost the host of a GPU, and what they launch: tables for docs/kernels.md. Needs no GPU.

    python scripts/cuda_costs.py              # launches, blocks, bytes copied, microseconds of the host
    python scripts/cuda_costs.py --registers  # registers, spills and shared memory of the attention kernels, by NVRTC

Kernels go to a launcher that counts and does nothing, so the time is what Python takes for one layer of 32 heads of 128
over 8, bfloat16, beside torch's own products: the best of many.
"""

import argparse
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
from vllm_lite.kernels.cuda.fused import CudaOps
from vllm_lite.kernels.cuda.launcher import Arg, Kernel, packed
from vllm_lite.kernels.ops import Rotation

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SPEC = AttentionSpec(32, 8, 128, scale=128**-0.5)
HIDDEN, INNER = 4096, 512
STEPS: dict[str, tuple[list[int], list[int]]] = {
    "64 decodes of 2048": ([1] * 64, [2048] * 64),
    "255 decodes of 1000, a chunk of 2048": ([1] * 255 + [2048], [1000] * 255 + [2048]),
    "8 x 5 drafts of 8192": ([5] * 8, [8192] * 8),
    "1 decode of 2048": ([1], [2048]),
    "a prompt of 8192": ([8192], [8192]),
}
"""Query lengths and sequence lengths."""
ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


class NullLauncher:
    """Counts launches and blocks, and packs arguments as a launch would."""

    multiprocessor_bytes = 228 * 1024

    def __init__(self) -> None:
        self.blocks: dict[str, int] = {}
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
                self.blocks[short] = self.blocks.get(short, 0) + grid[0] * grid[1] * grid[2]

            self._kernels[name] = launch
        return self._kernels[name]


def step_of(query_lens: list[int], seq_lens: list[int]) -> StepBatch:
    lens = HostLens(np.array(query_lens), np.array(seq_lens))
    n, num_seqs, longest = sum(query_lens), len(query_lens), max(seq_lens)
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
    """A row of the table."""
    launcher = NullLauncher()
    backend = CudaBackend(AttentionShape((SPEC,), 16, BF16, CPU, max_seq_len=131_072), launcher)
    batch, ops = step_of(*STEPS[name]), CudaOps(launcher)
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
    lists = [*(part for lists in plan.decodes if lists for part in lists if part is not None)]
    num_bytes = sum(part.nbytes for part in (*lists, *(part for part in plan.prefills if part is not None)))
    cells = (best_us(first), best_us(attention), best_us(small))
    return f"| {name} | {blocks} | {num_bytes} | {prepare_us:.0f} | " + " | ".join(f"{us:.0f}" for us in cells) + " |"


def registers() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.kernels import nvrtc
    from vllm_lite.kernels.cuda import decode_attention as decode
    from vllm_lite.kernels.cuda import prefill_attention as prefill

    kernels = [
        *((decode.SOURCE, decode.kernel_name(BF16, BF16, size, 4, 16)) for size in (64, 128, 256)),
        *((prefill.SOURCE, prefill.kernel_name(BF16, BF16, *shape)) for shape in ((64, 64), (128, 64), (128, 32))),
    ]
    print(f"| registers (bytes spilled) | {' | '.join(ARCHES)} |\n|---|{'---|' * len(ARCHES)}")
    for source, name in kernels:
        reports = [nvrtc.compile_report(source, name, arch) for arch in ARCHES]
        cells = [f"{report.registers} ({report.spill_bytes})" for report in reports]
        print(f"| `{name.replace('__nv_bfloat16', 'bf16')}` | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--registers", action="store_true")
    if parser.parse_args().registers:
        registers()
        return
    print(
        "| step | blocks of a layer | bytes of lists, a step | us: lists | first layer | others | norms, activation |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in STEPS:
        print(cost_of(name), flush=True)


if __name__ == "__main__":
    main()
