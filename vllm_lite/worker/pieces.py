"""Piecewise graphs, for steps that compute chunks of prompts beside decodes on a GPU.

Only attention depends on how a step's tokens are divided between its sequences. The rest depends on their number, so it
is recorded in pieces, from one layer's attention to the next one's, for a few numbers of tokens. A step is padded to
one of these numbers, replays the pieces, and launches attention between them. A layer then costs the host one replay
and one or two launches instead of ten.

Only small steps have pieces (sizing.piece_sizes): with more tokens a GPU computes longer than the host launches.
Padding tokens have the slot PAD_SLOT: their KV is not written, and their attention output is zero. A step that would be
padded to more than twice its tokens runs eagerly, except for small ones.

All pieces are captured at the start, the largest first, as long as that takes no more than MOST_S: a model of 32 layers
has 33 pieces per number of tokens, 231 for the seven default numbers (--cudagraph-piece-sizes).
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from vllm_lite.attention.backend import Attend, AttentionBackend, AttentionShape, Heads
from vllm_lite.attention.cuda_plan import Plan
from vllm_lite.attention.step_batch import PAD_SLOT, HostLens, StepBatch, staged, to_device
from vllm_lite.checkpoint.tensors.kv_scales import KVScales
from vllm_lite.runtime import log
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.forward import EagerForward
from vllm_lite.worker.graphs import Capture, Graph, capturing

logger = log.get(__name__)


MOST_S = 20.0
"""Seconds of capturing pieces after which no further capture begins."""
FREE_TOKENS = 256
"""Steps padded to at most this many tokens cost nothing extra: the GPU waits for the weights anyway."""


@runtime_checkable
class PieceCapture(Capture, Protocol):
    """Records the device operations of a call in as many graphs as the call asks for."""

    def pieces(self, run: Callable[[Callable[[], None]], None]) -> Sequence[Graph]:
        """Call `run`, twice, with a function that ends a graph and begins the next; return the second call's graphs.
        Between two of them nothing is recorded, and nothing may be launched."""
        ...


class CuttingBackend(AttentionBackend):
    """Writes K and V by the real backend, and passes attention calls to `cut` instead of running them."""

    graph_safe = True

    def __init__(self, backend: AttentionBackend, cut: Callable[[Attend], None]) -> None:
        super().__init__(backend.shape)
        self.fuses_norms = backend.fuses_norms
        self._backend = backend
        self._cut = cut

    @classmethod
    def supports(cls, shape: AttentionShape) -> str | None:  # noqa: ARG003
        return "it only records calls for another backend"

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int, max_seq_len: int) -> int:  # noqa: ARG002
        return 0

    def prepare(self, batch: StepBatch) -> None:
        batch.plan = Plan()

    def write_kv(
        self, heads: Heads, kv: torch.Tensor, batch: StepBatch, group: int, scales: KVScales | None = None
    ) -> None:
        self._backend.write_kv(heads, kv, batch, group, scales)

    def attend_layer(self, call: Attend, batch: StepBatch) -> None:  # noqa: ARG002
        self._cut(call)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Graphs recorded for one number of tokens, with one attention call between two of them."""

    batch: StepBatch
    graphs: Sequence[Graph]
    calls: Sequence[Attend]
    hidden: torch.Tensor  # [num_tokens, hidden_size], where the last graph leaves it


class PiecewiseForward:
    """A Forward that replays pieces for a step if it has some, and uses `eager` otherwise."""

    def __init__(self, eager: EagerForward, capture: PieceCapture, sizes: Sequence[int]) -> None:
        """`sizes` are in ascending order, as piece_sizes() returns them."""
        self.eager = eager
        self.sizes = tuple(sizes)
        self.num_replays = 0
        num_groups = len(eager.model.spec.kv_groups)
        self._memory = torch.zeros(2 + num_groups, max(sizes, default=0), dtype=torch.int64, device=eager.device)
        """int64 [2 + num_groups, max size]: token ids, positions and slots per group; graphs read the first columns."""
        self._memory[2:] = PAD_SLOT
        self._capture = capture
        self._pieces: dict[int, _Pieces] = {}

    @torch.inference_mode()
    def capture_all(self, progress: Callable[[], None] = lambda: None) -> None:
        """Capture the pieces of every size, or of as many as MOST_S allows. `progress` is called after each."""
        start_s = time.monotonic()
        what = f"CUDA graphs in pieces for up to {len(self.sizes)} numbers of tokens, {self.sizes[-1]} at most"
        with capturing(self._capture, what):
            for size in reversed(self.sizes):
                if self._pieces and time.monotonic() - start_s > MOST_S:
                    break
                self._pieces[size] = self._record(size)
                progress()
        left = [size for size in self.sizes if size not in self._pieces]
        self.sizes = tuple(sorted(self._pieces))
        taken_s, count = time.monotonic() - start_s, sum(len(pieces.graphs) for pieces in self._pieces.values())
        logger.info("%d graphs in pieces, %.1f ms for each", count, 1000 * taken_s / count)
        if left:
            logger.warning(
                "steps with prompts of up to %d tokens have no graphs: their capture was stopped after %.0f s; "
                "--cudagraph-piece-sizes %s asks for less",
                left[-1],
                taken_s,
                ",".join(map(str, self.sizes)),
            )

    def size_of(self, num_tokens: int) -> int | None:
        """Number of tokens to which a step is padded; None: run it eagerly."""
        at = bisect_left(self.sizes, num_tokens)
        size = self.sizes[at] if at < len(self.sizes) else None
        return size if size is not None and size <= max(FREE_TOKENS, 2 * num_tokens) else None

    def _record(self, size: int) -> _Pieces:
        eager, rows = self.eager, self._memory[:, :size]
        nothing = torch.zeros(1, dtype=torch.int32, device=eager.device)
        batch = StepBatch(
            num_tokens=size,
            num_seqs=0,
            max_query_len=size,
            max_seq_len=0,
            token_ids=rows[0],
            positions=rows[1],
            query_start_loc=nothing,
            seq_lens=nothing[:0],
            block_tables=tuple(nothing.view(1, 1)[:0] for _ in rows[2:]),
            slot_mapping=tuple(rows[2:]),
        )
        calls: list[Attend] = []
        hidden: list[torch.Tensor] = []

        def run(cut: Callable[[], None]) -> None:
            calls.clear()
            hidden.clear()

            def attend(call: Attend) -> None:
                calls.append(call)
                cut()

            backend = CuttingBackend(eager.backend, attend)
            backend.prepare(batch)
            hidden.append(eager.model.forward(batch, eager.kv_caches, backend, eager.progress))

        graphs = self._capture.pieces(run)
        return _Pieces(batch, graphs, calls, hidden[0])

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """See Forward.logits."""
        size = self.size_of(inputs.num_tokens)
        if size is None or inputs.states is not None or inputs.token_types is not None:
            return self.eager.logits(inputs)
        pieces = self._pieces[size]
        self._load(inputs, size)
        batch = self._attended(inputs, pieces.batch)
        self.eager.backend.prepare(batch)
        for graph, call in zip(pieces.graphs, pieces.calls, strict=False):
            graph.replay()
            self.eager.backend.attend_layer(call, batch)
        pieces.graphs[-1].replay()
        self.num_replays += 1
        self.eager.num_last = inputs.num_tokens
        hidden, wanted = pieces.hidden[: inputs.num_tokens], inputs.wanted
        return self.eager.model.logits(hidden if wanted is None else hidden[to_device(wanted, self.eager.device)])

    def _load(self, inputs: StepInputs, size: int) -> None:
        """Copy a step's tokens, padded to `size`, to the memory that the graphs read."""
        rows = np.zeros((len(self._memory), size), np.int64)
        count = inputs.num_tokens
        rows[0, :count], rows[1, :count], rows[2:, count:] = inputs.input_ids, inputs.positions, PAD_SLOT
        for group, slots in enumerate(inputs.slot_mapping, start=2):
            rows[group, :count] = slots
        self._memory[:, :size].copy_(staged(rows, self.eager.device), non_blocking=True)
        if inputs.device_ids is not None:
            self._memory[0, :count].copy_(inputs.device_ids)

    def _attended(self, inputs: StepInputs, padded: StepBatch) -> StepBatch:
        """The batch for attention of a step whose last rows are padding."""
        device = self.eager.device
        return StepBatch(
            num_tokens=padded.num_tokens,
            num_seqs=len(inputs.rows),
            max_query_len=int(inputs.num_scheduled.max()),
            max_seq_len=int(inputs.seq_lens.max()),
            token_ids=padded.token_ids,
            positions=padded.positions,
            query_start_loc=to_device(inputs.query_start_loc, device),
            seq_lens=to_device(inputs.seq_lens, device),
            block_tables=tuple(to_device(table, device) for table in inputs.block_tables),
            slot_mapping=padded.slot_mapping,
            host=HostLens(inputs.num_scheduled, inputs.seq_lens, inputs.block_tables),
        )
