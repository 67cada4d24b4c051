"""One step on one worker: block program, diffs, forward pass, sampling, answer. `ModelRunner.execute` is the table of
contents; the parts are CacheEngine, InputBatch, the model, the attention backend and the Sampler, and stay there.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.attention.backend import AttentionBackend, AttentionShape
from vllm_lite.attention.metadata import PAD_SLOT, AttentionMetadata
from vllm_lite.errors import ProtocolError
from vllm_lite.models.registry import Model
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput
from vllm_lite.worker.cache_engine import CacheEngine
from vllm_lite.worker.input_batch import InputBatch
from vllm_lite.worker.progress import Progress
from vllm_lite.worker.sampler import ROW_PARAMS, Sampled, SampleInputs, Sampler
from vllm_lite.worker.speculative import NO_GUESS, NgramDrafter, num_kept
from vllm_lite.worker.step_inputs import StepInputs

WARM_UP_WORK = 2_000_000_000
"""Multiply-adds that the warm-up may cost: about 0.1 s on one core."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most that one step may ask for; buffers are made for it."""

    max_num_seqs: int
    max_num_tokens: int
    max_model_len: int
    block_size: int


class ModelRunner:
    """Runs steps on a loaded model. Not thread-safe; a step that raised leaves it unusable."""

    def __init__(
        self,
        limits: StepLimits,
        model: Model,
        cache_engine: CacheEngine,
        backend: AttentionBackend,
        drafter: NgramDrafter | None = None,
    ) -> None:
        self.limits = limits
        self.model = model
        self.cache_engine = cache_engine
        self.backend = backend
        self.device = device = cache_engine.pool.device
        self.kv_caches = cache_engine.layer_views()
        self.batch = InputBatch(
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            vocab_size=model.spec.vocab_size,
            block_size=limits.block_size,
            num_blocks=cache_engine.num_blocks,
            windows=[group.window for group in model.spec.kv_groups],
        )
        self.sampler = Sampler(model.spec.vocab_size, device)
        self.drafter = drafter

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Run one step. Raises ProtocolError for one that does not fit this worker's state or limits."""
        self.cache_engine.execute(step.block_ops)
        self.batch.apply(step.entries)
        self._guess()
        inputs = self.batch.build()
        if inputs.num_tokens == 0:
            return ModelOutput(step.epoch, step.step, b"")
        if inputs.num_tokens > self.limits.max_num_tokens:
            raise ProtocolError(f"a step of {inputs.num_tokens} tokens, expected at most {self.limits.max_num_tokens}")
        sampled = self._sample(self._forward(inputs), inputs)
        kept = _num_kept(inputs, sampled)
        self.batch.commit(inputs, sampled.tokens, kept)
        return _answer(step, inputs, sampled, kept)

    def _guess(self) -> None:
        if self.drafter is not None:
            for handle, max_drafts in self.batch.max_drafts.items():
                self.batch.guess(handle, self.drafter.propose(self.batch.tokens_of(handle), max_drafts))

    def _forward(self, inputs: StepInputs) -> torch.Tensor:  # [num_tokens, hidden_size]
        metadata = AttentionMetadata(
            num_tokens=inputs.num_tokens,
            num_seqs=len(inputs.rows),
            max_query_len=int(inputs.num_scheduled.max()),
            max_seq_len=int(inputs.seq_lens.max()),
            query_start_loc=self._to_device(inputs.query_start_loc),
            seq_lens=self._to_device(inputs.seq_lens),
            block_tables=tuple(self._to_device(table) for table in inputs.block_tables),
            slot_mapping=tuple(self._to_device(slots) for slots in inputs.slot_mapping),
        )
        self.backend.prepare(metadata)
        input_ids, positions = self._to_device(inputs.input_ids), self._to_device(inputs.positions)
        return self.model.forward(input_ids, positions, self.kv_caches, metadata, self.backend)

    def _sample(self, hidden: torch.Tensor, inputs: StepInputs) -> Sampled:
        """hidden: [num_tokens, hidden_size]; logits are made of the rows only whose next token is wanted."""
        if inputs.num_samples.sum() < inputs.num_tokens:
            hidden = hidden[self._to_device(inputs.sample_tokens)]
        return self.sampler.sample(self.model.logits(hidden).float(), self.batch.sample_inputs(inputs))

    def _to_device(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run the largest step that is quick, writing nothing, so that the first request does not pay for what torch
        and the kernels set up on their first call.
        """
        num_tokens = min(self.limits.max_num_tokens, max(1, WARM_UP_WORK // self.model.spec.num_parameters()))
        num_seqs = min(num_tokens, self.limits.max_num_seqs)
        query_start_loc = np.linspace(0, num_tokens, num_seqs + 1).astype(np.int32)
        query_lens = np.diff(query_start_loc)
        num_groups = len(self.model.spec.kv_groups)
        width = -(-int(query_lens.max()) // self.limits.block_size)
        inputs = StepInputs(
            handles=[],
            rows=np.arange(num_seqs),
            num_scheduled=query_lens.astype(np.int64),
            input_ids=np.zeros(num_tokens, np.int64),
            positions=np.zeros(num_tokens, np.int64),
            slot_mapping=(np.full(num_tokens, PAD_SLOT, np.int64),) * num_groups,
            block_tables=(np.zeros((num_seqs, width), np.int32),) * num_groups,  # reads the null block, which is zero
            query_start_loc=query_start_loc,
            seq_lens=query_lens,
            sampling=np.arange(num_seqs),
            num_samples=np.ones(num_seqs, np.int64),
        )
        logits = self.model.logits(self._forward(inputs)[:1]).float()
        random = np.array([(1.0, 0, 0.9, 0.0, 0, 0, 1, 0)], ROW_PARAMS)
        self.sampler.sample(logits, SampleInputs(random, np.zeros(1, np.int64)))


def _num_kept(inputs: StepInputs, sampled: Sampled) -> NDArray[np.int64]:  # [num_sampling]
    """How many samples of each sequence are its tokens."""
    if len(inputs.sampling) == len(sampled.tokens):
        return inputs.num_samples
    guesses, places = inputs.guesses, inputs.sample_places
    for (
        sample
    ) in sampled.failed:  # behind a guess it is not taken: the next step comes to it again, without a guess before
        if places[sample]:
            guesses[sample - 1] = NO_GUESS
    return num_kept(sampled.tokens, guesses, inputs.sample_starts)


def _answer(step: SchedulerOutput, inputs: StepInputs, sampled: Sampled, kept: NDArray[np.int64]) -> ModelOutput:
    tokens, logprobs, counts = sampled.tokens, sampled.logprobs, None
    if len(kept) < len(tokens):
        chosen = np.flatnonzero(inputs.sample_places < np.repeat(kept, inputs.num_samples))
        tokens, counts = tokens[chosen], kept.tolist()
        logprobs = logprobs and [logprobs[sample] for sample in chosen]
    sequences, places = np.repeat(inputs.sampling, inputs.num_samples), inputs.sample_places
    failed = [(inputs.handles[sequences[i]], why) for i, why in sampled.failed.items() if places[i] == 0]
    return ModelOutput(
        step.epoch,
        step.step,
        tokens.astype("<u4").tobytes(),
        counts=counts if counts and max(counts) > 1 else None,
        logprobs=logprobs,
        failed=failed or None,
    )


class ObservedBackend:
    """An attention backend that advances `progress` in each layer; everything else is `inner`'s."""

    def __init__(self, inner: AttentionBackend, progress: Progress) -> None:
        self.inner = inner
        self.progress = progress
        self.workspace_bytes = inner.workspace_bytes
        self.prepare = inner.prepare
        self.write_kv = inner.write_kv

    @classmethod
    def supports(cls, shape: AttentionShape) -> str | None:  # noqa: ARG003 (the interface's)
        """Whatever was chosen is observed."""
        return None

    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_size]
        kv: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_size]
        metadata: AttentionMetadata,
        group: int,
        out: torch.Tensor,  # [num_tokens, num_heads, head_size]
    ) -> None:
        self.progress.advance()
        self.inner.attend(query, kv, metadata, group, out)
