"""CUDA graphs of decode steps: the model's kernels are recorded once per batch size and then launched by one call.

A decode step computes one token of each sequence, so its kernels depend on the number of sequences only. That number is
rounded up to one of a few sizes ("buckets"); a graph is captured for each, the largest first, so that the others find
their memory in the same pool. (A backend that keeps one scratch memory and makes it larger when `prepare` needs more
then makes it once.)

Inside a graph: `model.forward` with the attention backend's `write_kv` and `attend`, and the logits of all rows. Every
address and every grid in it is that of the capture, so all that changes from step to step is read from memory which a
graph shares with the next step:

- input ids, positions, slots and sequence lengths, which one copy brings to the device,
- block tables, in their full width, of which a copy fills what the step uses.

Rows of a bucket behind the step's last sequence are padding: sequence length 0, slot PAD_SLOT, token 0 at position 0.
They write nothing, their attention is zero and nobody reads their logits.

Outside: those copies; `backend.prepare`, which runs once, before the capture, on the bucket's own metadata (there
max_seq_len is max_model_len, and a backend must keep in `metadata.plan`, and read from device memory, all that the
captured kernels need); sampling; and every step that is not pure decoding or has more sequences than the largest
bucket. Such steps run eagerly.
"""

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_lite import log
from vllm_lite.attention.metadata import PAD_SLOT, AttentionMetadata
from vllm_lite.config import GIB
from vllm_lite.errors import ConfigError
from vllm_lite.worker.forward import EagerForward, to_device
from vllm_lite.worker.step_inputs import StepInputs

LARGEST = 512
"""Above this many rows the device is busy for longer than the launches take."""
GRAPH_BYTES = 8 << 20
"""Set aside for each graph beside its tensors: an allowance, not a measurement."""

logger = log.get(__name__)


class Graph(Protocol):
    def replay(self) -> None:
        """Run what was captured, on the current stream, with what is in memory now."""
        ...


class Capture(Protocol):
    """What can record a graph."""

    def __call__(self, prepare: Callable[[], None], run: Callable[[], None]) -> Graph:
        """Call `prepare`, then record what `run` does to the device. `run` may be called several times."""
        ...

    def used_bytes(self) -> int:
        """In use on the device; for the log."""
        ...


class CudaCapture:
    """torch.cuda.graph, on one stream and in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, prepare: Callable[[], None], run: Callable[[], None]) -> Graph:
        prepare()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels and makes libraries allocate their workspaces, which a capture must not
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)


class DecodeInputs:
    """The memory that graphs read: one buffer for what has a few bytes per row, and the block tables."""

    def __init__(self, max_rows: int, table_width: int, num_groups: int, device: torch.device) -> None:
        self.device = device
        self.num_groups = num_groups
        self._row_bytes = 8 * (2 + num_groups) + 4
        self._memory = torch.zeros(max_rows * self._row_bytes, dtype=torch.uint8, device=device)
        self._tables = [torch.zeros(max_rows, table_width, dtype=torch.int32, device=device) for _ in range(num_groups)]
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)

    def views(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a bucket's part of the buffer: int64 [2 + num_groups, size] (input ids, positions, slots of each group)
        and the sequence lengths, int32 [size].

        Buckets start at the same address, so their parts overlap: what one step wrote, the next overwrites as a whole.
        """
        return _split(self._memory[: size * self._row_bytes], self.num_groups, size)

    def metadata(self, size: int, max_seq_len: int) -> AttentionMetadata:
        """Of a bucket; the tensors are the shared memory."""
        rows, seq_lens = self.views(size)
        return AttentionMetadata(
            num_tokens=size,
            num_seqs=size,
            max_query_len=1,
            max_seq_len=max_seq_len,
            query_start_loc=self._starts[: size + 1],
            seq_lens=seq_lens,
            block_tables=tuple(table[:size] for table in self._tables),
            slot_mapping=tuple(rows[2:]),
        )

    def load(self, inputs: StepInputs | None, size: int) -> None:
        """Bring a step, or none, to the device, padded to `size` rows."""
        on_gpu = self.device.type != "cpu"
        staging = torch.empty(size * self._row_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        staged_rows, staged_lens = _split(staging, self.num_groups, size)
        rows, seq_lens = staged_rows.numpy(), staged_lens.numpy()
        count = 0
        if inputs is not None:
            count = inputs.num_tokens
            rows[0, :count], rows[1, :count], seq_lens[:count] = inputs.input_ids, inputs.positions, inputs.seq_lens
            for group, slots in enumerate(inputs.slot_mapping):
                rows[2 + group, :count] = slots
            for table, used in zip(self._tables, inputs.block_tables, strict=True):
                table[:count, : used.shape[1]].copy_(to_device(used, self.device))
        rows[:2, count:], rows[2:, count:], seq_lens[count:] = 0, PAD_SLOT, 0
        self._memory[: len(staging)].copy_(staging, non_blocking=True)


def _split(memory: torch.Tensor, num_groups: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [size * (8 * (2 + num_groups) + 4)] -> int64 [2 + num_groups, size] and int32 [size]."""
    num_bytes = 8 * (2 + num_groups) * size
    rows = memory[:num_bytes].view(torch.int64).view(2 + num_groups, size)
    return rows, memory[num_bytes:].view(torch.int32)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """One graph. `metadata` is kept because its plan holds memory that the graph reads."""

    size: int
    metadata: AttentionMetadata
    graph: Graph


class DecodeGraphs:
    """A Forward that replays graphs where it has one, and is `eager` otherwise."""

    def __init__(self, eager: EagerForward, sizes: Sequence[int], *, max_model_len: int, block_size: int) -> None:
        """`sizes` ascend, as `bucket_sizes` gives them."""
        spec = eager.model.spec
        self.eager = eager
        self.sizes = tuple(sizes)
        self.max_model_len = max_model_len
        self.num_replays = 0
        num_groups = len(spec.kv_groups)
        self._inputs = DecodeInputs(self.sizes[-1], -(-max_model_len // block_size), num_groups, eager.device)
        self._logits = torch.zeros(self.sizes[-1], spec.vocab_size, dtype=torch.float32, device=eager.device)
        self._buckets: list[_Bucket] = []

    @torch.inference_mode()
    def capture(self, capture: Capture, progress: Callable[[], None] = lambda: None) -> None:
        """Capture a graph for every size. `progress` is called after each."""
        used_bytes, start_s = capture.used_bytes(), time.monotonic()
        logger.info("capturing CUDA graphs for %d batch sizes up to %d", len(self.sizes), self.sizes[-1])
        with _no_garbage_collection():
            for size in reversed(self.sizes):
                self._inputs.load(None, size)
                self._buckets.insert(0, self._capture(capture, size))
                progress()
        logger.info(
            "captured %d CUDA graphs in %.1f s; they take %.2f GiB",
            len(self.sizes),
            time.monotonic() - start_s,
            (capture.used_bytes() - used_bytes) / GIB,
        )

    def _capture(self, capture: Capture, size: int) -> _Bucket:
        eager = self.eager
        metadata = self._inputs.metadata(size, self.max_model_len)
        rows, _ = self._inputs.views(size)

        def run() -> None:
            hidden = eager.model.forward(rows[0], rows[1], eager.kv_caches, metadata, eager.backend)
            self._logits[:size].copy_(eager.model.logits(hidden))

        return _Bucket(size, metadata, capture(lambda: eager.backend.prepare(metadata), run))

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """As Forward.logits."""
        num_seqs = len(inputs.rows)
        if inputs.num_tokens > num_seqs or num_seqs > self.sizes[-1]:
            return self.eager.logits(inputs)
        bucket = self._buckets[bisect_left(self.sizes, num_seqs)]
        self._inputs.load(inputs, bucket.size)
        bucket.graph.replay()
        self.num_replays += 1
        logits = self._logits[:num_seqs]
        if len(inputs.sampling) < num_seqs:  # a prompt whose next to last token came by itself
            return logits[to_device(inputs.sampling, self.eager.device)]
        return logits


def bucket_sizes(max_rows: int, wanted: Sequence[int] | None = None, largest: int | None = None) -> tuple[int, ...]:
    """Ascending batch sizes to capture: `wanted`, or 1, 2, 4, then in steps of 8 and beyond 256 of 16.

    None is above `max_rows`, the most sequences that a step can have, nor above `largest`; unless sizes are wanted,
    that limit is one of them. Raises ConfigError if nothing is left.
    """
    limit = min(max_rows, LARGEST if largest is None and wanted is None else largest or max_rows)
    if wanted is None:
        regular = (1, 2, 4, *range(8, 256, 8), *range(256, limit, 16))
        return (*(size for size in regular if size < limit), limit)
    sizes = tuple(sorted({size for size in wanted if size <= limit}))
    if not sizes:
        raise ConfigError(
            f"cudagraph_capture_sizes must have one of at most {limit} (max_num_seqs, max_num_batched_tokens, "
            f"max_cudagraph_capture_size), got {', '.join(map(str, wanted))}"
        )
    return sizes


def reserved_bytes(sizes: Sequence[int], vocab_size: int, table_width: int, num_groups: int) -> int:
    """Bytes to leave free for graphs of these sizes: logits, as the model makes them and as they are kept, tables, and
    the graphs themselves. The attention backend's scratch memory is counted elsewhere: graphs share it.
    """
    if not sizes:
        return 0
    per_row = 2 * 4 * vocab_size + num_groups * (4 * table_width + 8) + 20
    return int(max(sizes) * per_row + len(sizes) * GRAPH_BYTES)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection in the middle of a capture could free device memory, which a capture does not survive."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
