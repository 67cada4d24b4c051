"""Programs of steps with prompts, on a CPU: a step of any size is one native call, as decode steps are.

Python takes a millisecond or more of such a step, since it last ran many steps ago and is in no cache; that is a
quarter of the first token of a small model. A program is recorded for all sizes at once (SizedProgram): the numbers of
tokens, of sequences, of tokens to sample from, and of sequences that sample. So a prompt of any length, several of
them, chunks and decodes beside them are the same to it; their lengths, slots and tables are read from memory. The calls
are those of EagerForward, and so are the bits.

There are three programs, because `Decoder.forward` goes three ways: no token is sampled from, as in a prompt's chunks
but the last; attention of the last layer is computed for all tokens; or for the sampled ones alone (EagerForward.tail).
They are recorded while the worker waits for the engine, in parts, so that a request waits for one part at most.

These steps run eagerly: with states of recurrent layers, vectors of images, adapters or hidden states that somebody
reads; of models that cannot be recorded; and large ones, of which Python is too small a part to matter, and which
would show no progress meanwhile.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.kernels.cpu.program import NotRecordable, Program, SizedProgram
from vllm_lite.models.decoder import Decoder
from vllm_lite.runtime import log
from vllm_lite.worker.batch.step_inputs import Int64s, StepInputs
from vllm_lite.worker.forward import EagerForward

logger = log.get(__name__)

MOST_WORK = 100_000_000_000
"""Maximum multiply-adds of a replayed step: about a second, or a few on an old processor."""
LEAST_WANTED = 4
"""Minimum number of tokens to sample from in the largest recorded step, so that it differs enough from the smallest."""


class _Kind(NamedTuple):
    """One of the ways through `Decoder.forward`."""

    samples: bool
    """Whether any token is sampled from."""
    has_tail: bool
    """Whether the last layer attends for the sampled tokens alone."""


_KINDS = (_Kind(samples=True, has_tail=False), _Kind(samples=True, has_tail=True), _Kind(samples=False, has_tail=False))


class _Size(NamedTuple):
    """The sizes on which a program depends."""

    num_tokens: int
    num_seqs: int
    num_wanted: int
    num_sampling: int  # of the tail; 0 without


class _Rows:
    """Memory for the inputs of a step: of its tokens and sequences. It begins at the same addresses for all sizes."""

    def __init__(self, max_tokens: int, max_seqs: int, tables: list[torch.Tensor]) -> None:
        """`tables`: per KV group, int32 [max_seqs or more, width]."""
        self._numbers = torch.zeros(2 + len(tables), max_tokens, dtype=torch.int64)  # ids, positions, slots per group
        self._starts = torch.zeros(max_seqs + 1, dtype=torch.int32)
        self._seq_lens = torch.zeros(max_seqs, dtype=torch.int32)
        self._tables = tables

    def batch(self, num_tokens: int, num_seqs: int, max_seq_len: int) -> StepBatch:
        """The batch of a step of this size, as views."""
        ids, positions, *slots = self._numbers[:, :num_tokens]
        return StepBatch(
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            max_query_len=num_tokens,
            max_seq_len=max_seq_len,
            token_ids=ids,
            positions=positions,
            query_start_loc=self._starts[: num_seqs + 1],
            seq_lens=self._seq_lens[:num_seqs],
            block_tables=tuple(table[:num_seqs] for table in self._tables),
            slot_mapping=tuple(slots),
        )

    def load(self, inputs: StepInputs) -> None:
        """Copy a step's inputs into the memory."""
        count, num_seqs, numbers = inputs.num_tokens, len(inputs.rows), self._numbers.numpy()
        numbers[0, :count], numbers[1, :count] = inputs.input_ids, inputs.positions
        for own, slots in zip(numbers[2:], inputs.slot_mapping, strict=True):
            own[:count] = slots
        self._starts.numpy()[: num_seqs + 1] = inputs.query_start_loc
        self._seq_lens.numpy()[:num_seqs] = inputs.seq_lens
        for table, used in zip(self._tables, inputs.block_tables, strict=True):
            table.numpy()[:num_seqs, : used.shape[1]] = used


class PromptPrograms:
    """A Forward that replays a program for steps with prompts, and runs the others eagerly."""

    def __init__(
        self, eager: EagerForward, logits: torch.Tensor, tables: list[torch.Tensor], most: int, longest: int
    ) -> None:
        """`logits` and `tables` (of each KV group, int32 [max_seqs, width]): memory that steps of `eager` or of another
        Forward may overwrite; a step has at most as many sampled tokens and sequences as these have rows. `most`:
        maximum tokens of a step. `longest`: maximum tokens of a sequence."""
        self.eager = eager
        self.num_replays = 0
        num_tokens = min(most, MOST_WORK // eager.model.spec.active_parameters())
        num_seqs = min(len(logits), num_tokens)
        num_wanted = min(max(len(logits), LEAST_WANTED), num_tokens)
        self._most = _Size(num_tokens, num_seqs, num_wanted, num_seqs)
        self._longest = longest
        self._logits = logits if len(logits) >= num_wanted else eager.model.empty_logits(num_wanted)
        self._wanted = torch.zeros(num_wanted, dtype=torch.int64)
        self._rows = _Rows(num_tokens, num_seqs, tables)
        self._tail_rows = _Rows(num_wanted, num_seqs, [torch.zeros_like(table) for table in tables])
        self._programs: dict[_Kind, SizedProgram] = {}
        self._kept: list[StepBatch] = []
        """Batches whose plans own memory that programs read."""
        self._left = self._recording() if num_tokens > 1 and _can_record(eager) else iter(())

    @torch.inference_mode()
    def record_ahead(self) -> bool:
        """See DecodeGraphs.record_ahead."""
        return next(self._left, None) is not None

    def _recording(self) -> Iterator[_Kind]:
        """Record all programs, in parts."""
        for kind in _KINDS:
            try:
                yield from self._record(kind)
            except NotRecordable as error:
                logger.info("steps with prompts run eagerly: %s", error)
                return

    def _record(self, kind: _Kind) -> Iterator[_Kind]:
        """Record the program of a kind, in parts."""
        # One row has other strides than several, although nobody uses them.
        tokens, wanted = min(2, self._most.num_tokens), min(2, self._most.num_wanted)
        least = _Size(tokens, 1, wanted if kind.samples else 0, int(kind.has_tail))
        most = _Size(*(limit if least[index] else 0 for index, limit in enumerate(self._most)))
        recorded: list[tuple[_Size, Program]] = []
        largest: list[StepBatch] = []
        for size in map(_Size._make, SizedProgram.sizes_to_record(least, most)):
            batch = self._batch(size)
            for own, before in zip(_with_tail(batch), largest, strict=False):
                own.larger = before
            program = Program()
            program.record(partial(self.eager.backend.prepare, batch))
            program.record(partial(self._run, batch))
            recorded.append((size, program))
            largest = largest or _with_tail(batch)
            yield kind
        self._programs[kind] = sized = SizedProgram(recorded)
        self._kept += largest
        logger.debug("%s are programs of %d native calls", kind, len(sized))

    def _batch(self, size: _Size) -> StepBatch:
        batch = self._rows.batch(size.num_tokens, size.num_seqs, self._longest)
        batch.wanted = self._wanted[: size.num_wanted]
        if size.num_sampling:
            batch.tail = self._tail_rows.batch(size.num_wanted, size.num_sampling, self._longest)
        return batch

    def _run(self, batch: StepBatch) -> None:
        eager, wanted = self.eager, batch.wanted
        hidden = eager.model.forward(batch, eager.kv_caches, eager.backend, eager.progress)
        if wanted is not None and len(wanted):
            eager.model.logits(hidden, self._logits[: len(wanted)])

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """See Forward.logits."""
        wanted = inputs.wanted
        if wanted is None or not self._takes(inputs, wanted):
            return self.eager.logits(inputs)
        tail = self.eager.tail(inputs, wanted)
        program = self._programs.get(_Kind(len(wanted) > 0, tail is not None))
        num_wanted, num_sampling = len(wanted), 0 if tail is None else len(tail.rows)
        size = _Size(inputs.num_tokens, len(inputs.rows), num_wanted, num_sampling)
        if program is None or not program.fits(size):
            return self.eager.logits(inputs)
        self._rows.load(inputs)
        self._wanted.numpy()[:num_wanted] = wanted
        if tail is not None:
            self._tail_rows.load(tail)
        program.replay(size)
        self.num_replays += 1
        self.eager.num_last = num_wanted
        return self._logits[:num_wanted]

    def _takes(self, inputs: StepInputs, wanted: Int64s) -> bool:
        """Whether the step is of a kind and a size that programs can have."""
        most = self._most
        if inputs.num_tokens > most.num_tokens or len(inputs.rows) > most.num_seqs or len(wanted) > most.num_wanted:
            return False
        if inputs.states is not None or inputs.vectors is not None or inputs.images or inputs.token_types is not None:
            return False
        return inputs.device_ids is None


def _with_tail(batch: StepBatch) -> list[StepBatch]:
    return [batch] if batch.tail is None else [batch, batch.tail]


def _can_record(eager: EagerForward) -> bool:
    """Whether programs can have the model's steps with prompts at all: recurrent layers and adapters change with the
    step in ways that are not in its sizes."""
    model = eager.model
    return isinstance(model, Decoder) and not model.spec.state_elements and not model.buffers.has_adapters
