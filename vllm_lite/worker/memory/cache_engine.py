"""CacheEngine: owns the bytes of the KV cache on one worker and executes the engine's block ops on them.

Layout: block-major `[num_blocks, block_elements]`, on the device and in the host swap pool alike. A block's bytes are
contiguous, so that a block moves in one copy. The layers of its group share it as `[num_layers, 2, num_kv_heads,
block_size, head_size]`; the rest is unused. In int8 each row of head_size is followed by its scale, so that scales move
with their block.
Ids are global: the device tier has [0, num_blocks), the host tier [num_blocks, num_blocks + num_host_blocks).
"""

import math
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from vllm_lite.attention.int8_rows import scale_bytes
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.errors import ConfigError, ProtocolError
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import memory
from vllm_lite.kernels.cuda.cupy_launcher import default_launcher
from vllm_lite.kernels.recurrent import KVAndStates
from vllm_lite.protocol.step import BlockOp
from vllm_lite.worker.memory.block_mover import (
    BlockRun,
    CudaMover,
    CudaStreams,
    Mover,
    NativeMover,
    Pools,
    TorchMover,
    stages,
)
from vllm_lite.worker.memory.touch_ahead import TouchAhead

NULL_BLOCK = 0
"""Id of the null block, which stands in block tables for missing blocks. No token is ever written to it."""

STATE_OPS = {BlockOp.STATE_OUT: BlockOp.SWAP_OUT, BlockOp.STATE_IN: BlockOp.SWAP_IN}
"""State op -> block op of the same direction, which movers know."""

MEASURED_BYTES = 4 << 20
"""Bytes that one round of measure_swap() moves in each direction, or one block if that is more."""
MEASURING_S = 0.01


class CacheEngine:
    """Owns the device pool and the host swap pool; no other code moves blocks between and within them."""

    def __init__(
        self,
        spec: ModelSpec,
        block_size: int,
        num_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`spec` is this rank's part of the model, from ModelSpec.per_rank()."""
        self.spec = spec
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        own, host = range(num_blocks), range(num_blocks, num_blocks + num_host_blocks)
        self._tiers: dict[int, tuple[range, range]] = {  # the blocks that each op may read and write
            BlockOp.COPY: (own, own),
            BlockOp.SWAP_OUT: (own, host),
            BlockOp.SWAP_IN: (host, own),
        }
        self._row_extra = scale_bytes(dtype) // dtype.itemsize
        elements = spec.block_elements(block_size, self._row_extra)
        if device.type == "cpu":
            self.pool = _host_zeros((num_blocks, elements), dtype)
            self.host_pool = _host_zeros((num_host_blocks, elements), dtype)
        else:
            self.pool = _device_zeros((num_blocks, elements), dtype, device)
            self.host_pool = self.locked(_host_zeros((num_host_blocks, elements), dtype))
        self.make_states(1)
        self.mover = make_mover(Pools(self.pool, self.host_pool))
        self._touch_ahead = TouchAhead(self.pool) if device.type == "cpu" and elements else None

    def take(self, pages: TouchAhead) -> None:
        """Use memory of a CPU whose pages were touched before the number of blocks was known. Called before any block
        is used. Memory that does not fit the blocks is ignored."""
        rows = pages.pool
        if rows.dtype == torch.uint8 and len(rows) >= self.num_blocks and rows[0].nbytes == self.pool[0].nbytes > 0:
            self.pool = rows[: self.num_blocks].view(self.pool.dtype)
            self.mover = make_mover(Pools(self.pool, self.host_pool))
            self._touch_ahead = pages

    def layer_views(self) -> list[Any]:
        """Strided view of the pool per layer of the model: [num_blocks, 2, num_kv_heads, block_size, head_size]; for a
        recurrent layer its states: float32 [num_slots, state_elements]; for a layer with both, KVAndStates; for a layer
        with neither, an empty view. Then the views of a drafter's layers, which follow the model's in the KV groups.

        A block belongs to one group at a time, so the n-th layers of all groups share the n-th place in a block.
        """
        views: dict[int, Any] = {}
        for group in self.spec.kv_groups:
            shape = group.kv_shape(self.block_size, self._row_extra)
            layers = self.pool[:, : math.prod(shape)].unflatten(1, shape).unbind(1)
            views |= dict(zip(group.layers, layers, strict=True))
        recurrent = [index for index, own in enumerate(self.spec.layers) if own.recurrent is not None]
        sizes = [own.recurrent.state_elements for own in self.spec.layers if own.recurrent is not None]
        for index, states in zip(recurrent, self.states.split(sizes, dim=1) if sizes else (), strict=True):
            views[index] = KVAndStates(views[index], states) if self.spec.layers[index].keeps_kv else states
        layers, nothing = enumerate(self.spec.layers), self.pool[:0]
        further = [views[layer] for layer in sorted(views) if layer >= len(self.spec.layers)]
        own = [views.get(layer if each.kv_layer is None else each.kv_layer, nothing) for layer, each in layers]
        return own + further

    def make_states(self, num_slots: int, num_host_states: int = 0, num_scratch: int = 0) -> None:
        """Allocate slots for recurrent states, each with all layers: float32 [num_slots, ...]; `num_host_states` places
        on the host; and `num_scratch` further slots after the others, which no block op may name."""
        size, device = self.spec.state_elements, self.pool.device
        is_host = device.type == "cpu" and size > 0
        shape = (num_slots + num_scratch, size)
        self.states = _host_zeros(shape, torch.float32) if is_host else torch.zeros(shape, device=device)
        self.host_states = _host_zeros((num_host_states if size else 0, size), torch.float32)
        if device.type != "cpu":
            self.locked(self.host_states)
        own, host = range(num_slots), range(num_slots, num_slots + len(self.host_states))
        self._tiers |= {BlockOp.STATE_OUT: (own, host), BlockOp.STATE_IN: (host, own)}
        self._state_mover = make_mover(Pools(self.states, self.host_states)) if size else None

    def execute(self, block_ops: Sequence[tuple[int, int, int]]) -> None:
        """Execute (op, src, dst) triples as if one at a time, in order.

        On a GPU they run after the present work of torch's current stream and before its later work. All are checked
        first. Raises ProtocolError for an unknown op, an id outside its tier, or the null block as a destination; then
        nothing has moved.
        """
        program = [self.check(index, *entry) for index, entry in enumerate(block_ops)]
        for stage in stages(run for run in program if run.op not in STATE_OPS):
            self.mover.move(stage)
        if self._state_mover is None:
            return
        # Blocks and states are in different memory, so their ops do not depend on each other.
        for stage in stages(run._replace(op=STATE_OPS[run.op]) for run in program if run.op in STATE_OPS):
            self._state_mover.move(stage)

    def measure_swap(self) -> float:
        """Measure the rate of block moves between the tiers, in blocks per second, both directions in turn; 0 without a
        host tier. It overwrites the blocks that it moves.

        Called while the pools are still empty. The ids are not consecutive, like most in a running engine.
        """
        if not self.pool.shape[1]:
            return 0.0
        size = max(1, MEASURED_BYTES // self.pool[0].nbytes)
        count = min(self.num_blocks - 1, self.num_host_blocks, size)
        if count < 1:
            return 0.0
        pairs = [(1 + i, self.num_blocks + count - 1 - i) for i in range(count)]
        program = [(int(BlockOp.SWAP_OUT), block, host) for block, host in pairs]
        program += [(int(BlockOp.SWAP_IN), host, block) for block, host in pairs]
        self.execute(program)  # its pages are made by the first access
        self._wait_for_device()
        num_rounds, start_s = 0, time.perf_counter()
        while (took_s := time.perf_counter() - start_s) < MEASURING_S:
            self.execute(program)
            self._wait_for_device()
            num_rounds += 1
        return num_rounds * len(program) / took_s

    def expect(self, step_tokens: int) -> None:
        """Set the tokens of the largest step. On a CPU, pages of its blocks are touched before it begins."""
        if self._touch_ahead is not None:
            num_blocks = -(-step_tokens // self.block_size) * len(self.spec.kv_groups)
            self._touch_ahead.expect(num_blocks * self._touch_ahead.block_bytes)

    def use(self, highest_block: int) -> None:
        """Set the highest block id used so far. On a CPU, pages of the blocks after it are touched ahead."""
        if self._touch_ahead is not None:
            self._touch_ahead.use(highest_block)

    def _wait_for_device(self) -> None:
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize(self.pool.device)

    def check(self, index: int, op: int, src: int, dst: int) -> BlockRun:
        """Check one op, and turn it into a run of length 1 with ids relative to the pools of their tiers."""
        if op not in self._tiers:
            raise ProtocolError(f"block op {index}: {op} is none of {', '.join(f'{o} {o.name}' for o in BlockOp)}")
        sources, destinations = self._tiers[op]
        for what, block, allowed in (("source", src, sources), ("destination", dst, destinations)):
            if block not in allowed or (what == "destination" and block == NULL_BLOCK):
                first = max(allowed.start, 1) if what == "destination" else allowed.start
                raise ProtocolError(
                    f"block op {index}: {what} {block} of {BlockOp(op).name} must be in [{first}, {allowed.stop})"
                )
        return BlockRun(BlockOp(op), src - sources.start, dst - destinations.start)

    def locked(self, pool: torch.Tensor) -> torch.Tensor:
        """Pin `pool` in place, so that the device can read and write it while the host continues. Raises ConfigError.

        torch's pinned memory is not used, since it rounds up to a power of two: 8 GiB for 5 GiB of swap space.
        """
        if pool.numel() == 0:
            return pool
        cuda = torch.cuda.cudart()
        if code := int(cuda.cudaHostRegister(pool.data_ptr(), pool.nbytes, 0)):
            raise ConfigError(
                f"the {pool.nbytes / 2**30:.1f} GiB of swap space cannot be locked in memory (CUDA error {code}); "
                "try a smaller --swap-space, or 0"
            )
        release = weakref.finalize(self, cuda.cudaHostUnregister, pool.data_ptr())
        release.atexit = False  # the memory is released at the end of the process anyway
        return pool


def make_mover(pools: Pools) -> Mover:
    """The fastest mover for the device of `pools`."""
    if pools.device.is_cuda:
        return CudaMover(pools, CudaStreams(pools.device.device), default_launcher())
    return NativeMover(pools) if cpu.available() else TorchMover(pools)


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in pages that are allocated when first written, so that gigabytes of cache cost no start-up time."""
    return memory.zeros(math.prod(shape), dtype).view(shape)


def _device_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros made as bytes, since torch cannot make zeros of float8 on every device."""
    return torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=device).view(dtype).view(shape)
