"""Owns the bytes of the KV cache on one worker and executes the engine's block programs on them.

Layout: block-major `[num_blocks, layers_per_group, 2, num_kv_heads, block_size, head_dim]`, on the device and in the
host swap pool alike. All of a block's bytes lie together, so that a block moves in one copy.
Ids are global: the device tier has [0, num_blocks), the host tier [num_blocks, num_blocks + num_host_blocks).
"""

import math
import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from vllm_lite.errors import ProtocolError
from vllm_lite.model_spec import ModelSpec
from vllm_lite.protocol.step import BlockOp

NULL_BLOCK = 0
"""Stands in block tables where nothing is; no token is ever written to it."""


MEASURED_BYTES = 4 << 20
"""What one round of `measure_swap` moves each way, or one block if that is more."""
MEASURING_S = 0.01


class _Run(NamedTuple):
    """`length` ops of one kind whose sources and destinations are both consecutive: one copy."""

    op: BlockOp
    src: int
    dst: int
    length: int


class CacheEngine:
    """The device pool, the host swap pool, and the only code that moves blocks between and within them."""

    def __init__(
        self,
        spec: ModelSpec,
        block_size: int,
        num_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        block = (spec.layers_per_group(), 2, spec.num_kv_heads, block_size, spec.head_dim)
        on_cpu = device.type == "cpu"
        self.pool = (
            _zeros(num_blocks, *block, dtype=dtype)
            if on_cpu
            else torch.zeros(num_blocks, *block, dtype=dtype, device=device)
        )
        self.host_pool = (
            _zeros(num_host_blocks, *block, dtype=dtype)
            if on_cpu
            else torch.zeros(num_host_blocks, *block, dtype=dtype, pin_memory=True)
        )

    def layer_views(self) -> list[torch.Tensor]:
        """Per layer of the model its strided view of the pool: [num_blocks, 2, num_kv_heads, block_size, head_dim].

        A block belongs to one group at a time, so the n-th layers of all groups share the n-th place in a block.
        """
        views: dict[int, torch.Tensor] = {}
        for group in self.spec.kv_groups:
            views |= {layer: self.pool[:, place] for place, layer in enumerate(group.layers)}
        return [views[layer] for layer in range(self.spec.num_layers)]

    def execute(self, block_ops: Sequence[tuple[int, int, int]]) -> None:
        """Run a program of (op, src, dst) as if one op at a time, in order.

        The program is checked as a whole first. Raises ProtocolError when an op is unknown or an id lies outside its
        tier or is the null block's as a destination; then nothing has moved.
        """
        program = [self._check(index, *entry) for index, entry in enumerate(block_ops)]
        for run in _merge(program):
            source, destination = self._tensors(run.op)
            first_src, first_dst = run.src, run.dst
            destination[first_dst : first_dst + run.length].copy_(source[first_src : first_src + run.length])

    def measure_swap(self) -> float:
        """Blocks that can be moved between the tiers in a second, either way; 0 without a host tier.

        For when the pools are new: the blocks hold nothing yet, nor do they afterwards. Ids are not consecutive, as
        those of a running engine seldom are.
        """
        size = max(1, MEASURED_BYTES // max(1, self.pool[0].nbytes))
        count = min(self.num_blocks - 1, self.num_host_blocks, size)
        if count < 1:
            return 0.0
        pairs = [(1 + i, self.num_blocks + count - 1 - i) for i in range(count)]
        program = [(int(BlockOp.SWAP_OUT), block, host) for block, host in pairs]
        program += [(int(BlockOp.SWAP_IN), host, block) for block, host in pairs]
        self.execute(program)  # its pages are made by the first access
        num_rounds, start_s = 0, time.perf_counter()
        while (took_s := time.perf_counter() - start_s) < MEASURING_S:
            self.execute(program)
            self._wait_for_device()
            num_rounds += 1
        return num_rounds * len(program) / took_s

    def _wait_for_device(self) -> None:
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize(self.pool.device)

    def _check(self, index: int, op: int, src: int, dst: int) -> _Run:
        """One op as a run of length 1, its ids made relative to their tiers' pools."""
        device, host = range(self.num_blocks), range(self.num_blocks, self.num_blocks + self.num_host_blocks)
        if op == BlockOp.COPY:
            sources, destinations = device, device
        elif op == BlockOp.SWAP_OUT:
            sources, destinations = device, host
        elif op == BlockOp.SWAP_IN:
            sources, destinations = host, device
        else:
            raise ProtocolError(f"block op {index}: {op} is none of {', '.join(f'{o} {o.name}' for o in BlockOp)}")
        for what, block, allowed in (("source", src, sources), ("destination", dst, destinations)):
            if block not in allowed or (what == "destination" and block == NULL_BLOCK):
                first = max(allowed.start, 1) if what == "destination" else allowed.start
                raise ProtocolError(
                    f"block op {index}: {what} {block} of {BlockOp(op).name} must be in [{first}, {allowed.stop})"
                )
        return _Run(BlockOp(op), src - sources.start, dst - destinations.start, 1)

    def _tensors(self, op: BlockOp) -> tuple[torch.Tensor, torch.Tensor]:
        if op == BlockOp.SWAP_OUT:
            return self.pool, self.host_pool
        if op == BlockOp.SWAP_IN:
            return self.host_pool, self.pool
        return self.pool, self.pool


def _merge(program: Sequence[_Run]) -> Iterator[_Run]:
    """Join neighbours that continue each other, as long as the joined copy does not read what it writes."""
    run: _Run | None = None
    for op in program:
        if run is not None and _continues(run, op):
            run = run._replace(length=run.length + 1)
            continue
        if run is not None:
            yield run
        run = op
    if run is not None:
        yield run


def _continues(run: _Run, op: _Run) -> bool:
    if op.op != run.op or op.src != run.src + run.length or op.dst != run.dst + run.length:
        return False
    return run.op != BlockOp.COPY or abs(run.src - run.dst) > run.length


def _zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in pages that the kernel makes when they are first written: gigabytes of cache cost no start-up time.

    Page-aligned, and huge pages where the machine gives them.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes)
    with suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
