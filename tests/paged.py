"""Runs a model over a paged KV cache without engine, runner or batch, for the parity tests of models."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from pathlib import Path
from typing import Any

import torch

from tests.attention_steps import changed, step_batch
from tests.checkpoints import VOCAB_SIZE, transformers_model
from tests.thread_group import on_ranks
from vllm_lite.attention.backend import AttentionShape
from vllm_lite.attention.select import select_backend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.kernels.recurrent import Segments
from vllm_lite.models.registry import Model, Sizes, build, examine
from vllm_lite.models.weights import load_weights
from vllm_lite.parallel.communicator import Communicator
from vllm_lite.worker.memory.cache_engine import CacheEngine

BLOCK_SIZE = 8
NUM_SLOTS = 64


class Oracle:
    """A checkpoint, its logits by transformers for a fixed prompt, and our model loaded from it."""

    def __init__(self, path: Path, dtype: str = "float32", max_model_len: int = 256, model_impl: str = "auto") -> None:
        """`max_model_len`: maximum length of a sequence, on which some kinds of rope depend."""
        self.path = path
        self.max_model_len = max_model_len
        self.tokens = torch.randint(3, VOCAB_SIZE, (150,), generator=torch.Generator().manual_seed(7))
        spec = load_spec(path, model_impl)
        self.spec = examine(spec, getattr(torch, dtype), max_model_len)
        reference = transformers_model(path, spec.architecture, dtype)
        with torch.inference_mode():
            self.logits = reference(self.tokens[None]).logits[0].float()  # [num_tokens, vocab_size]
        self.dtype = dtype
        self.model = self.load()

    def load(self, communicator: Communicator | None = None, quantization: Quantization | None = None) -> Model:
        """Load our model, or a rank's part of it."""
        model = build(self.spec, self.dtype, "cpu", Sizes(self.max_model_len, 512), quantization, communicator)
        load_weights(model, self.path)
        return model

    def stored_as(self, path: Path, communicator: Communicator | None = None) -> Model:
        """Load our model from another checkpoint with the same weights."""
        sizes = Sizes(self.max_model_len, 512)
        model = build(load_spec(path), self.dtype, "cpu", sizes, communicator=communicator)
        load_weights(model, path)
        return model

    def logits_of(self, path: Path, rank: Communicator | None = None) -> torch.Tensor:
        """All logits of the model stored at `path`, or by a rank of it, in steps of 64 tokens."""
        return Paged(self, model=self.stored_as(path, rank)).run(self.tokens, 64)

    def logits_on_two_ranks(self, path: Path, **options: Any) -> list[torch.Tensor]:
        """The same by each of two ranks; `options` as for on_ranks."""
        return on_ranks(2, lambda rank: self.logits_of(path, rank), **options)

    def difference(self, logits: torch.Tensor, first: int = 0) -> float:
        """Largest difference from transformers' logits, for rows at positions from `first` on."""
        return float((logits.float() - self.logits[first : first + len(logits)]).abs().max())


@dataclass
class Sequence:
    tokens: torch.Tensor
    tables: list[list[int]]  # per group
    slot: int = 0
    """Slot of its state, if the model has recurrent layers; 0: it has none yet."""
    num_computed: int = 0
    num_trimmed: list[int] = field(default_factory=list)
    """Per group, blocks that the window has passed; other sequences may have them."""
    logits: list[torch.Tensor] = field(default_factory=list)  # each [num_tokens of a step, vocab_size]


class Paged:
    """Runs a model over a paged cache with shuffled block ids, whose unwritten slots have NaN. Blocks outside of the
    window become NaN and free, while the tables still have them."""

    def __init__(self, oracle: Oracle, seed: int = 0, num_blocks: int = 128, model: Model | None = None) -> None:
        """`model`: a rank's part of the model; all ranks must run the same steps."""
        self.model = model = model or oracle.model
        spec = oracle.spec.per_rank(model.communicator.shard)
        self.groups = spec.kv_groups
        self.dtype = model.embedding.dtype  # type: ignore[attr-defined]
        self.cache = CacheEngine(spec, BLOCK_SIZE, num_blocks, 0, self.dtype, torch.device("cpu"))
        self.cache.make_states(NUM_SLOTS)
        self.cache.pool.fill_(torch.nan)
        self.cache.states.fill_(torch.nan)
        self.num_slots = 1
        self.kv = self.cache.layer_views()
        shuffled = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.free: list[int] = shuffled.tolist()
        groups = tuple(group.attention for group in self.groups)
        self.shape = AttentionShape(groups, BLOCK_SIZE, self.dtype, torch.device("cpu"))
        self.backend = select_backend(self.shape)

    def set_windows(self, windows: list[int | None]) -> None:
        """Set the windows of the groups, which are the model's own at first."""
        self.shape = changed(self.shape, windows=windows)
        self.backend = select_backend(self.shape)

    def take(self, num_blocks: int) -> list[int]:
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        assert len(taken) == num_blocks
        return taken

    def sequence(self, tokens: torch.Tensor) -> Sequence:
        return Sequence(tokens, [[] for _ in self.groups], num_trimmed=[0] * len(self.groups))

    def step(self, *work: tuple[Sequence, int], shift: int = 0, ends: list[int] | None = None) -> None:
        """Compute the next tokens of each sequence, so many; `shift` is a deliberate error in the positions.
        `ends`: the logits of so many rows at the end of each are wanted and no others, as layers are told."""
        ids, positions, starts = [], [], [0]
        slots: list[list[torch.Tensor]] = [[] for _ in self.groups]
        for sequence, count in work:
            at = torch.arange(sequence.num_computed, sequence.num_computed + count)
            sequence.num_computed += count
            ids.append(sequence.tokens[at])
            positions.append(at + shift)
            for table, group_slots in zip(sequence.tables, slots, strict=True):
                table.extend(self.take(max(0, -(-sequence.num_computed // BLOCK_SIZE) - len(table))))
                group_slots.append(torch.tensor(table)[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
            starts.append(starts[-1] + count)
        sequences = [sequence for sequence, _ in work]
        tables = [_rectangle([s.tables[group] for s in sequences]) for group in range(len(self.groups))]
        lens = [(count, sequence.num_computed) for sequence, count in work]
        batch = step_batch(lens, tables, list(map(torch.cat, slots)), torch.cat(ids), torch.cat(positions))
        batch.states = self.segments(sequences, starts)
        if ends is not None:
            set_tail(batch, lens, ends)
            starts = [0, *accumulate(ends)]
        self.backend.prepare(batch)
        hidden = self.model.forward(batch, self.kv, self.backend)
        logits = self.model.logits(hidden)
        self.model.gather_logits(logits)
        for sequence, first, last in zip(sequences, starts[:-1], starts[1:], strict=True):
            sequence.logits.append(logits[first:last].clone())  # ranks use the same memory again
            self.trim(sequence)

    def segments(self, sequences: list[Sequence], starts: list[int]) -> Segments:
        """Segments that move every state to a new slot, so that reading an old slot would be an error."""
        sources = [sequence.slot for sequence in sequences]
        for sequence in sequences:
            sequence.slot = self.num_slots = self.num_slots % (NUM_SLOTS - 1) + 1
        targets = [sequence.slot for sequence in sequences]
        firsts = range(len(sequences) + 1)
        return Segments(*(torch.tensor(each, dtype=torch.int32) for each in (firsts, starts, sources, targets)))

    def trim(self, sequence: Sequence) -> None:
        """Free the blocks that the next position does not see."""
        for index, group in enumerate(self.groups):
            if group.window is None:
                continue
            first = max(0, sequence.num_computed - group.window + 1) // BLOCK_SIZE
            given = sequence.tables[index][sequence.num_trimmed[index] : first]
            self.cache.pool[given] = torch.nan
            self.free = given + self.free  # the next to be taken
            sequence.num_trimmed[index] = first

    def run(self, tokens: torch.Tensor, chunk: int | Iterable[int]) -> torch.Tensor:
        """All logits of `tokens`, computed `chunk` tokens a step: [num_tokens, vocab_size]; or as many as it says, the
        rest one by one."""
        sequence = self.sequence(tokens)
        chunks = repeat(chunk) if isinstance(chunk, int) else chain(chunk, repeat(1))
        while sequence.num_computed < len(tokens):
            self.step((sequence, min(next(chunks), len(tokens) - sequence.num_computed)))
        return torch.cat(sequence.logits)


def set_tail(batch: StepBatch, lens: list[tuple[int, int]], ends: list[int]) -> None:
    """Have the last `ends` rows of each sequence be those that are wanted, and a batch of their own.
    lens: (rows, length) of each."""
    places, starts = torch.arange(batch.num_tokens), [0, *accumulate(count for count, _ in lens)]
    lasts = list(zip(starts[1:], ends, strict=True))
    batch.wanted = torch.cat([places[end - count : end] for end, count in lasts])
    kept = [index for index, count in enumerate(ends) if count]
    if kept:
        batch.tail = step_batch(
            [(ends[index], lens[index][1]) for index in kept],
            [table[kept] for table in batch.block_tables],
            [slots[batch.wanted] for slots in batch.slot_mapping],
            batch.token_ids[batch.wanted],
            batch.positions[batch.wanted],
        )


def _rectangle(tables: list[list[int]]) -> torch.Tensor:  # int32 [num_seqs, longest]
    longest = max(map(len, tables))
    return torch.tensor([table + [0] * (longest - len(table)) for table in tables], dtype=torch.int32)


def check_mixed(paged: Paged, oracle: Oracle, most: float) -> None:
    """Compare the logits of five sequences, prompts in chunks among decodes, with transformers', to `most`."""
    lengths = [150, 1, 9, 64, 33]
    sequences = [paged.sequence(oracle.tokens[:length]) for length in lengths]
    long, one, short, middle, late = sequences
    paged.step((long, 50), (short, 8), (middle, 17))
    paged.step((middle, 1), (long, 1), (one, 1), (late, 33), (short, 1))
    paged.step((long, 99), (middle, 46))
    for sequence in sequences:
        assert sequence.num_computed == len(sequence.tokens)
        assert oracle.difference(torch.cat(sequence.logits)) < most
