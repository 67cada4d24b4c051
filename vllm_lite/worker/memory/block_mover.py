"""Movement of blocks: a list of block ops is cut into stages, and a mover for each kind of device executes them.

The result is that of running one op at a time, in order. An op goes into the first stage after every earlier op that it
must not overtake: one that writes what it reads or writes, or reads what it writes. So no op of a stage touches what
another one of it writes. The ops of a stage may be joined, reordered and run in parallel; stages run in order.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from vllm_lite.kernels.cpu import memory as native
from vllm_lite.kernels.cuda import cache_ops
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.protocol.step import BlockOp


class BlockRun(NamedTuple):
    """`length` ops of one kind with consecutive sources and consecutive destinations: a single copy.

    `src` and `dst` count from the beginning of their tiers.
    """

    op: BlockOp
    src: int
    dst: int
    length: int = 1


def stages(
    program: Iterable[BlockRun],  # of length 1
) -> list[list[BlockRun]]:
    """Cut ops into stages, and join consecutive ids within each into runs."""
    found: list[list[BlockRun]] = []
    read: dict[tuple[bool, int], int] = {}  # (in the host tier, block) -> number of stages up to its last reader
    written: dict[tuple[bool, int], int] = {}  # likewise up to its last writer
    for op in program:
        source, destination = (op.op == BlockOp.SWAP_IN, op.src), (op.op == BlockOp.SWAP_OUT, op.dst)
        if source == destination:
            continue
        stage = max(written.get(source, 0), written.get(destination, 0), read.get(destination, 0))
        if stage == len(found):
            found.append([])
        found[stage].append(op)
        written[destination] = stage + 1
        read[source] = max(read.get(source, 0), stage + 1)
    return [list(_join(stage)) for stage in found]


def _join(stage: list[BlockRun]) -> Iterator[BlockRun]:
    stage.sort()
    run = stage[0]
    for op in stage[1:]:
        if op == run._replace(src=run.src + run.length, dst=run.dst + run.length, length=1):
            run = run._replace(length=run.length + 1)
        else:
            yield run
            run = op
    yield run


def by_kind(stage: Iterable[BlockRun]) -> dict[BlockOp, list[BlockRun]]:
    """Split a stage, in which runs of one kind are adjacent, by kind."""
    return {op: list(runs) for op, runs in groupby(stage, key=lambda run: run.op)}


def pairs_of(runs: Iterable[BlockRun]) -> torch.Tensor:  # int64 [n, 2], (source, destination)
    pairs = [(run.src + i, run.dst + i) for run in runs for i in range(run.length)]
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)


class Pools(NamedTuple):
    """Memory of both tiers, [num_blocks, ...] each, contiguous."""

    device: torch.Tensor
    host: torch.Tensor

    def of(self, op: BlockOp) -> tuple[torch.Tensor, torch.Tensor]:
        """The pools that an op reads and writes, as bytes: uint8 [num_blocks, block_bytes] each."""
        source = self.host if op == BlockOp.SWAP_IN else self.device
        destination = self.host if op == BlockOp.SWAP_OUT else self.device
        return source.flatten(1).view(torch.uint8), destination.flatten(1).view(torch.uint8)

    def copy(self, runs: Sequence[BlockRun]) -> None:
        """Copy runs of one kind on torch's current stream. The host does not wait if its memory is pinned."""
        source, destination = self.of(runs[0].op)
        for _, src, dst, length in runs:
            destination[dst : dst + length].copy_(source[src : src + length], non_blocking=True)


class Mover(Protocol):
    def move(self, stage: Sequence[BlockRun]) -> None:
        """Copy all runs of one stage, after earlier stages and the device's earlier work."""
        ...


class TorchMover:
    """Copies on any device, one run after another."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def move(self, stage: Sequence[BlockRun]) -> None:
        for runs in by_kind(stage).values():
            self._pools.copy(runs)


class NativeMover:
    """Copies in a CPU's memory: one native, multi-threaded call for all runs of one kind."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def move(self, stage: Sequence[BlockRun]) -> None:
        for op, runs in by_kind(stage).items():
            native.copy_blocks(*self._pools.of(op), pairs_of(runs))


# ---- CUDA


Stream: TypeAlias = Any
"""A torch.cuda.Stream, or a test's fake. Only `wait_stream` is used: later work of one stream waits for the present
work of the other."""


class Streams(Protocol):
    """The stream of the forward passes, and one per direction between the tiers, since the bus is full-duplex."""

    def current(self) -> Stream: ...

    def of_op(self, op: BlockOp) -> Stream: ...

    def use(self, stream: Stream) -> AbstractContextManager[object]: ...


class CudaStreams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_op = {op: torch.cuda.Stream(device) for op in (BlockOp.SWAP_OUT, BlockOp.SWAP_IN)}

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def of_op(self, op: BlockOp) -> Stream:
        return self._of_op[op]

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)


class CudaMover:
    """Swaps on separate streams while a kernel copies within the device; the host does not wait.

    Every stage begins and ends on the current stream, so that stages run in order, after the previous forward pass and
    before the next.
    """

    def __init__(self, pools: Pools, streams: Streams, launcher: Launcher | None) -> None:
        """`launcher` runs the copy kernel; None: torch copies within the device, run by run."""
        self._pools = pools
        self._streams = streams
        self._launcher = launcher

    def move(self, stage: Sequence[BlockRun]) -> None:
        current = self._streams.current()
        kinds = by_kind(stage)
        copies = kinds.pop(BlockOp.COPY, None)
        streams = []
        for op, runs in kinds.items():
            stream = self._streams.of_op(op)
            stream.wait_stream(current)
            with self._streams.use(stream):
                self._pools.copy(runs)
            streams.append(stream)
        if copies:
            self._copy(copies)
        for stream in streams:
            current.wait_stream(stream)

    def _copy(self, runs: Sequence[BlockRun]) -> None:
        if self._launcher is None:
            self._pools.copy(runs)
            return
        pairs = pairs_of(runs)
        if self._pools.device.is_cuda:
            pairs = pairs.pin_memory().to(self._pools.device.device, non_blocking=True)
        cache_ops.copy_blocks(self._launcher, self._pools.device, pairs)
