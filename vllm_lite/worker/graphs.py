"""Graphs of decode steps: the model's kernels are recorded once per batch size and then launched by one call.

A decode step computes one token of each sequence, so its kernels depend only on the number of sequences. That number is
rounded up to one of a few sizes ("buckets"), and a graph is captured for each.

- On CUDA all are captured at the start, the largest first, so that the others reuse its memory pool. (A backend that
  enlarges its scratch memory when `prepare` needs more then allocates it once.)
- On a CPU a graph is a program of native calls. Padding would cost as much as a sequence there, and capturing takes a
  millisecond, so every number of sequences is a bucket, captured when a step first has that many. With drafts there
  are buckets of as many rows as a step may sample, up to LARGEST, of which a sequence may have several.

Inside a graph: `model.forward` with the attention backend's `write_kv` and `attend`, and the logits of all rows. All
addresses and grids are fixed at capture, so everything that changes from step to step is read from memory that all
graphs share:

- token ids, positions, slots and sequence lengths, by one copy to the device,
- block tables of full width, of which a copy fills the part that the step uses,
- the slots of recurrent states. (Models whose recurrent layers have no kernels have no graphs.)

Rows of a bucket after the step's last sequence are padding: sequence length 0, slot PAD_SLOT, token 0 at position 0.
They write nothing, their attention is zero and their logits are not read.

The hidden states of a replayed step are in the memory that the capture used, for callers that need them.

Outside: these copies; on CUDA `backend.prepare`, which runs once before the capture on the bucket's own StepBatch
(whose max_seq_len is max_model_len; a backend must keep all inputs of the captured kernels in `batch.plan` and device
memory; on a CPU `prepare` is the program's first part), and `backend.refresh` before each replay; sampling; and every
step that is not pure decoding or has more sequences than the largest bucket. Such steps run in pieces on CUDA
(pieces.py), as programs for any size on a CPU (prompt_programs.py), or eagerly; over a backend that is not
`graph_safe`, all steps run eagerly, and so do those of a bucket that cannot be captured. On a CPU a step that verifies
drafts, or has a few tokens of images beside decodes, is replayed as one that decodes more sequences. Programs stop
where vectors of images are inserted, and continue after that.
"""

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.attention.step_batch import AXIS_MASK, PAD_SLOT, PutVectors, StepBatch, staged, to_device
from vllm_lite.config import GIB
from vllm_lite.kernels.cpu.program import NotRecordable, Program
from vllm_lite.kernels.recurrent import Segments
from vllm_lite.runtime import log
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.forward import EagerForward, Forward
from vllm_lite.worker.progress import no_garbage_collection
from vllm_lite.worker.prompt_programs import PromptPrograms

logger = log.get(__name__)


FEW = 16
"""Maximum tokens of prompts with images in a step that is replayed as decodes. Each token reads the cache separately,
so with more the replay takes longer than calling the kernels from Python."""


class Graph(Protocol):
    def replay(self) -> None:
        """Run the captured work on the current stream, with the inputs that are in memory now."""
        ...


class Capture(Protocol):
    """Records graphs on one type of device."""

    on_demand: bool
    """Whether every batch size is captured when first needed, instead of a few sizes at the start."""
    spent_s: float
    """Seconds that captures on demand have taken so far."""

    def __call__(self, prepare: Callable[[], None], run: Callable[[], None]) -> Graph:
        """Call `prepare`, then record the device's work during `run`, which may be called several times. Raises
        NotRecordable if it cannot be recorded; such steps run eagerly."""
        ...

    def used_bytes(self) -> int:
        """Bytes in use on the device, for the log."""
        ...


@contextmanager
def capturing(capture: Capture, what: str) -> Iterator[None]:
    """Log the capture of `what`, its time and memory. Disables garbage collection meanwhile, which could free device
    memory and thereby abort a capture."""
    used_bytes, start_s = capture.used_bytes(), time.monotonic()
    logger.info("capturing %s", what)
    gc.collect()
    with no_garbage_collection():
        yield
    taken_s, taken_bytes = time.monotonic() - start_s, capture.used_bytes() - used_bytes
    logger.info("captured %s in %.1f s; they take %.2f GiB", what, taken_s, taken_bytes / GIB)


class CudaCapture:
    """torch.cuda.graph, on one stream and in one memory pool."""

    on_demand = False
    spent_s = 0.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, prepare: Callable[[], None], run: Callable[[], None]) -> Graph:
        prepare()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels and lets libraries allocate workspaces, neither of which a capture allows
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph

    def pieces(self, run: Callable[[Callable[[], None]], None]) -> Sequence[Graph]:
        """See PieceCapture.pieces."""
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run(lambda: None)
            torch.cuda.synchronize(self._device)
            begin()
            try:
                run(cut)
            finally:
                graphs[-1].capture_end()
        return graphs

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)


class CpuCapture:
    """Records programs of native calls, which include `prepare`."""

    on_demand = True
    spent_s = 0.0
    recording: Program | None = None
    """The program being recorded, or recorded last."""

    def __call__(self, prepare: Callable[[], None], run: Callable[[], None]) -> Graph:
        self.recording = program = Program()
        began_s = time.perf_counter()
        try:
            program.record(prepare)
            program.record(run)
        finally:
            self.spent_s += time.perf_counter() - began_s
        logger.debug("a decode step is recorded as a program of %d native calls", len(program))
        return program

    def used_bytes(self) -> int:
        return 0


class DecodeInputs:
    """The memory that graphs read: one buffer for the small inputs of each row, and the block tables."""

    def __init__(self, max_rows: int, table_width: int, num_groups: int, device: torch.device) -> None:
        self.device = device
        self.num_groups = num_groups
        self._row_bytes = 8 * (2 + num_groups) + 4
        self._memory = torch.zeros(max_rows * self._row_bytes, dtype=torch.uint8, device=device)
        self.tables = [torch.zeros(max_rows, table_width, dtype=torch.int32, device=device) for _ in range(num_groups)]
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._states = torch.zeros(2, max_rows, dtype=torch.int32, device=device)  # sources and targets
        self._host_states = self._states.numpy() if device.type == "cpu" else None
        self._host_tables = [table.numpy() for table in self.tables] if device.type == "cpu" else None
        self._staged: dict[int, tuple[NDArray[np.int64], NDArray[np.int32]]] = {}

    def views(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A bucket's part of the buffer: int64 [2 + num_groups, size] (token ids, positions, slots of each group) and
        the sequence lengths, int32 [size].

        Parts of all buckets start at the same address and overlap; each step overwrites its part completely.
        """
        return _split(self._memory[: size * self._row_bytes], self.num_groups, size)

    def batch(self, size: int, max_seq_len: int) -> StepBatch:
        """Make the batch of a bucket; its tensors are views of the shared memory."""
        rows, seq_lens = self.views(size)
        return StepBatch(
            num_tokens=size,
            num_seqs=size,
            max_query_len=1,
            max_seq_len=max_seq_len,
            token_ids=rows[0],
            positions=rows[1],
            query_start_loc=self._starts[: size + 1],
            seq_lens=seq_lens,
            block_tables=tuple(table[:size] for table in self.tables),
            slot_mapping=tuple(rows[2:]),
            states=Segments(self._starts[: size + 1], self._starts[: size + 1], *self._states[:, :size]),
        )

    def load(self, inputs: StepInputs | None, size: int) -> None:
        """Copy a step's inputs (None: padding only) to the device, padded to `size` rows."""
        if self._host_tables is not None:
            self._fill(inputs, *self._host_rows(size))
            for host_table, used in zip(self._host_tables, inputs.block_tables if inputs else (), strict=False):
                host_table[: used.shape[0], : used.shape[1]] = used
            if self._host_states is not None:
                self._host_states[:, :size] = _slots(inputs, size)
            self._take_device_ids(inputs, size)
            return
        staging = torch.empty(size * self._row_bytes, dtype=torch.uint8, pin_memory=True)
        rows, seq_lens = _split(staging, self.num_groups, size)
        self._fill(inputs, rows.numpy(), seq_lens.numpy())
        for table, used in zip(self.tables, inputs.block_tables if inputs else (), strict=False):
            table[: used.shape[0], : used.shape[1]].copy_(staged(used, self.device), non_blocking=True)
        self._memory[: len(staging)].copy_(staging, non_blocking=True)
        if inputs is None or inputs.states is not None:
            self._states[:, :size].copy_(staged(_slots(inputs, size), self.device), non_blocking=True)
        self._take_device_ids(inputs, size)

    def _take_device_ids(self, inputs: StepInputs | None, size: int) -> None:
        if inputs is not None and inputs.device_ids is not None:
            self.views(size)[0][0, : inputs.num_tokens].copy_(inputs.device_ids)

    def _host_rows(self, size: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The views of a bucket on a CPU."""
        if size not in self._staged:
            rows, seq_lens = self.views(size)
            self._staged[size] = rows.numpy(), seq_lens.numpy()
        return self._staged[size]

    def host(
        self, size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], list[NDArray[np.int32]]]:
        """The memory of a bucket on a CPU: the arrays of OwnRows."""
        states = self._states[:, :size].numpy()
        return *self._host_rows(size), states, [table.numpy() for table in self.tables]

    def _fill(self, inputs: StepInputs | None, rows: NDArray[np.int64], seq_lens: NDArray[np.int32]) -> None:
        count = 0
        if inputs is not None:
            count = inputs.num_tokens
            rows[0, :count], rows[1, :count], seq_lens[:count] = inputs.input_ids, inputs.positions, inputs.seq_lens
            for group, slots in enumerate(inputs.slot_mapping, start=2):
                rows[group, :count] = slots
        if count < len(seq_lens):
            rows[:2, count:], rows[2:, count:], seq_lens[count:] = 0, PAD_SLOT, 0


def _slots(inputs: StepInputs | None, size: int) -> NDArray[np.int32]:  # [2, size]
    """Source and target slots of the states of a step of decodes; padding reads and writes none."""
    slots = np.zeros((2, size), np.int32)
    if inputs is not None and inputs.states is not None:
        slots[:, : inputs.num_tokens] = inputs.states[2:]
    return slots


def _split(memory: torch.Tensor, num_groups: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [size * (8 * (2 + num_groups) + 4)] -> int64 [2 + num_groups, size] and int32 [size]."""
    num_bytes = 8 * (2 + num_groups) * size
    rows = memory[:num_bytes].view(torch.int64).view(2 + num_groups, size)
    return rows, memory[num_bytes:].view(torch.int32)


def _as_decodes(inputs: StepInputs) -> StepInputs:
    """Convert a step that verifies drafts, or has a few tokens of images, to one of more sequences with a token each:
    they read the same blocks, each one token further. A layer writes all K and V before any are read. Other steps are
    returned unchanged: with prompts, with recurrent states that would pass from row to row, and with images whose
    tokens attend to later ones."""
    num_samples = int(inputs.num_samples.sum())
    most = 0 if inputs.vectors is None or inputs.images or not num_samples else FEW
    if inputs.states is not None or inputs.num_tokens - num_samples > most:
        return inputs
    sequence_of = np.arange(len(inputs.rows)).repeat(inputs.num_scheduled)
    ones = np.ones(inputs.num_tokens, np.int64)
    places = inputs.positions
    if inputs.counts_otherwise:
        places = np.arange(inputs.num_tokens) + (inputs.starts - inputs.query_start_loc[:-1])[sequence_of]
    return replace(
        inputs,
        rows=inputs.rows[sequence_of],
        num_scheduled=ones,
        block_tables=tuple(table[sequence_of] for table in inputs.block_tables),
        query_start_loc=np.arange(inputs.num_tokens + 1, dtype=np.int32),
        seq_lens=(places + 1).astype(np.int32),
        sampling=inputs.sample_tokens,
        num_samples=ones[:num_samples],
    )


@dataclass(frozen=True, slots=True)
class _Bucket:
    """One graph. `batch` is kept because its plan holds memory that the graph reads."""

    size: int
    batch: StepBatch
    graph: Graph
    logits: torch.Tensor  # float32 [size, vocab_size]
    hidden: torch.Tensor  # [size, hidden_size], from which the logits are made; the next forward pass overwrites it
    program: Program | None = None
    puts: Sequence[PutVectors] = ()
    """`program`: the graph if it can take vectors of images; `puts`: functions to call with them at each of its
    stops."""


@dataclass(frozen=True, slots=True)
class OwnRows:
    """A graph of decodes on a CPU whose caller writes the inputs of all rows before each replay."""

    numbers: NDArray[np.int64]  # [2 + num_groups, num_rows]: token ids, positions, slots of each group
    seq_lens: NDArray[np.int32]  # [num_rows]
    states: NDArray[np.int32]  # [2, num_rows], slots of recurrent states: sources and targets
    tables: list[NDArray[np.int32]]  # per group: [max_rows, width]; the same for graphs of all sizes
    graph: Graph
    logits: torch.Tensor  # float32 [num_rows, vocab_size]
    hidden: torch.Tensor  # [num_rows, hidden_size]


class DecodeGraphs:
    """A Forward that replays a step's graph if there is one, and else runs `other`."""

    def __init__(
        self, eager: EagerForward, capture: Capture, sizes: Sequence[int], *, max_model_len: int, block_size: int
    ) -> None:
        """`sizes`: ascending, see `bucket_sizes`."""
        spec = eager.model.spec
        self.eager = eager
        self.other: Forward = eager
        """Runs the steps without a graph."""
        self.capture = capture
        self.sizes = tuple(sizes)
        self.max_model_len = max_model_len
        self.num_replays = 0
        num_groups = len(spec.kv_groups)
        self._inputs = DecodeInputs(self.sizes[-1], -(-max_model_len // block_size), num_groups, eager.device)
        self._logits = eager.model.empty_logits(self.sizes[-1])
        self.buckets: dict[int, _Bucket] = {}
        self._own: dict[int, OwnRows] = {}
        # Per-layer vectors depend on which tokens are placeholders.
        self._takes_vectors = capture.on_demand and eager.model.tower is not None and not spec.per_layer_size
        self._failed: set[int] = set()
        """Sizes that cannot be captured, whose steps run eagerly."""

    @torch.inference_mode()
    def capture_all(self, progress: Callable[[], None] = lambda: None) -> None:
        """Capture a graph for every size. `progress` is called after each."""
        with capturing(self.capture, f"CUDA graphs for {len(self.sizes)} batch sizes up to {self.sizes[-1]}"):
            for size in reversed(self.sizes):
                self._inputs.load(None, size)
                self._capture(size)
                progress()

    def _capture(self, size: int) -> _Bucket | None:
        """Capture a graph. Returns None, now and for later steps of this size, if that is not possible."""
        eager = self.eager
        batch = self._inputs.batch(size, self.max_model_len)
        logits = self._logits_of(size)
        left: list[torch.Tensor] = []
        puts: list[PutVectors] = []

        def stop(put: PutVectors) -> None:
            if isinstance(self.capture, CpuCapture) and self.capture.recording is not None:
                self.capture.recording.stop()
                puts.append(put)

        if self._takes_vectors:
            batch.late = stop

        def run() -> None:
            hidden = eager.model.forward(batch, eager.kv_caches, eager.backend, eager.progress)
            eager.model.logits(hidden, logits)
            left[:] = [hidden]

        try:
            graph = self.capture(lambda: eager.backend.prepare(batch), run)
        except NotRecordable as error:
            level = logging.DEBUG if self._failed else logging.INFO
            logger.log(level, "steps of %d rows are not recorded and run eagerly: %s", size, error)
            self._failed.add(size)
            return None
        program = graph if isinstance(graph, Program) else None
        self.buckets[size] = bucket = _Bucket(size, batch, graph, logits, left[0], program, puts)
        return bucket

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """See Forward.logits."""
        decodes = self._of_decodes(inputs)
        bucket = self._bucket_of(decodes)
        if bucket is None:
            return (self.other if inputs.vectors is None else self.eager).logits(inputs)
        return self._replay(bucket, decodes)

    def shown(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Run a step and return hidden states and logits of all its tokens: [num_tokens, hidden_size], overwritten by
        the next forward pass, and see `logits`. None, without running it, for a step that has no graph or has a token
        that is not sampled from."""
        inputs = self._of_decodes(inputs)
        bucket = self._bucket_of(inputs) if len(inputs.sampling) == inputs.num_tokens else None
        if bucket is None:
            return None
        logits = self._replay(bucket, inputs)
        return bucket.hidden[: inputs.num_tokens], logits

    def forget(self) -> None:
        """Drop graphs that are captured on demand, because the model's computation has changed."""
        self.buckets, self._own, self._failed, self._logits = {}, {}, set(), self._logits[:0]

    def replay_prompts(self, most: int) -> None:
        """On a CPU, replay also other steps, of at most `most` tokens, once `record_ahead` has recorded them."""
        if isinstance(self.capture, CpuCapture):
            self.other = PromptPrograms(self.eager, self._logits, self._inputs.tables, most, self.max_model_len)

    def record_ahead(self) -> bool:
        """Do a few milliseconds of recording for later steps. Returns False if nothing is left to record."""
        return isinstance(self.other, PromptPrograms) and self.other.record_ahead()

    def _logits_of(self, count: int) -> torch.Tensor:  # [count, vocab_size]
        """Memory for the logits of `count` rows. After `forget` it grows as steps need it, since filling that of all
        rows takes tens of milliseconds."""
        if count > len(self._logits):
            self._logits = self.eager.model.empty_logits(min(self.sizes[-1], 1 << (count - 1).bit_length()))
        return self._logits[:count]

    def own_rows(self, count: int) -> OwnRows | None:
        """Graph of exactly `count` rows, for a caller that writes their inputs itself; None if there is none, or not on
        a CPU. The memory of graphs of different sizes overlaps."""
        if (own := self._own.get(count)) is not None or not self.capture.on_demand or self._size_of(count) != count:
            return own
        bucket = self.buckets.get(count) or self._capture(count)
        if bucket is not None:
            own = OwnRows(*self._inputs.host(count), bucket.graph, bucket.logits, bucket.hidden)
            self._own[count] = own
        return own

    def _of_decodes(self, inputs: StepInputs) -> StepInputs:
        """Convert a step of few tokens to one of decodes, on a CPU and if possible; see `_as_decodes`."""
        has_others = len(inputs.rows) < inputs.num_tokens or inputs.vectors is not None
        can_be = has_others and self.capture.on_demand and self._size_of(inputs.num_tokens) is not None
        return _as_decodes(inputs) if can_be else inputs

    def _size_of(self, num_rows: int) -> int | None:
        """The smallest size that has room for `num_rows` rows; None if there is none, or if it cannot be captured."""
        place = bisect_left(self.sizes, num_rows)
        if place == len(self.sizes) or self.sizes[place] in self._failed:
            return None
        return self.sizes[place]

    def _bucket_of(self, inputs: StepInputs) -> _Bucket | None:
        """Bucket of a step of decodes; None for other steps, and for sizes that cannot be captured."""
        num_seqs = len(inputs.rows)
        size = self._size_of(num_seqs) if inputs.num_tokens == num_seqs else None
        if size is None:
            return None
        if inputs.vectors is not None and (not self._takes_vectors or inputs.states is not None):
            return None
        return self.buckets.get(size) or self._capture(size)

    def _replay(self, bucket: _Bucket, inputs: StepInputs) -> torch.Tensor:  # float32 [num_sampling, vocab_size]
        num_seqs, size, vectors = len(inputs.rows), bucket.size, inputs.vectors
        along_axes = inputs.positions
        if vectors is not None:
            inputs = replace(inputs, positions=along_axes & AXIS_MASK)
        self._inputs.load(inputs, size)
        self.eager.backend.refresh(bucket.batch, inputs.seq_lens, inputs.block_tables)
        if vectors is None or bucket.program is None:
            bucket.graph.replay()
        else:
            own = torch.from_numpy(np.pad(along_axes, (0, size - num_seqs)))
            bucket.program.replay_with([partial(put, vectors, own) for put in bucket.puts])
        self.num_replays += 1
        self.eager.num_last = num_seqs
        logits = bucket.logits if size == num_seqs else bucket.logits[:num_seqs]
        if len(inputs.sampling) < num_seqs:  # a prompt's chunk of one token that is not its last
            return self._select(logits, inputs.sampling)
        return logits

    def _select(self, logits: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:  # [len(rows), vocab_size]
        """Move `rows` to the front, in the memory of `empty_logits`, so that other ranks can complete them. This rank
        moves only its own columns."""
        own, selected = logits[:, self.eager.model.own_columns], logits[: len(rows)]
        if np.array_equal(rows, np.arange(len(rows))):  # next tokens come before prompts
            return selected
        own[: len(rows)] = own[to_device(rows, self.eager.device)]
        return selected
