"""One step on one worker: block program, diffs, forward pass, sampling, output. `ModelRunner.execute` is the table of
contents; the parts are CacheEngine, InputBatch, the model, the attention backend and the Sampler, and stay there.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.errors import ProtocolError
from vllm_lite.kernels.cuda import sampler as cuda_sampler
from vllm_lite.kernels.cuda.patience import PATIENCE_S
from vllm_lite.models.registry import Model
from vllm_lite.protocol.api import PromptLogprobs
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.step import Handle, ModelOutput, SchedulerOutput
from vllm_lite.runtime import log
from vllm_lite.worker.adapter_cache import AdapterCache
from vllm_lite.worker.batch.input_batch import InputBatch
from vllm_lite.worker.batch.row_states import RowStates
from vllm_lite.worker.batch.step_inputs import StepInputs, padding_step
from vllm_lite.worker.expert_load import ExpertLoad
from vllm_lite.worker.forward import EagerForward, Forward
from vllm_lite.worker.graphs import Capture, DecodeGraphs
from vllm_lite.worker.memory.cache_engine import CacheEngine
from vllm_lite.worker.pieces import PieceCapture, PiecewiseForward
from vllm_lite.worker.pooling import Failed, Pooled, pool
from vllm_lite.worker.process import Progress
from vllm_lite.worker.sampling import readiness
from vllm_lite.worker.sampling.drafter import NO_DRAFT, Drafter, num_kept
from vllm_lite.worker.sampling.logprobs import score
from vllm_lite.worker.sampling.masks import SequenceMask
from vllm_lite.worker.sampling.ranked_sampler import TokenSampler, sampler_of
from vllm_lite.worker.sampling.sampler import ALL_BANNED, ROW_PARAMS, Sampled, SampleInputs, row_params

NO_TOKENS = np.zeros(0, np.int64)
WARM_UP_WORK = 2_000_000_000
"""Multiply-adds that the warm-up may cost on a CPU: about 0.1 s on one core."""

PromptScored = list[tuple[Handle, PromptLogprobs]]

logger = log.get(__name__)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most that one step may ask for; buffers are made for it."""

    max_num_seqs: int
    max_num_tokens: int
    max_model_len: int
    block_size: int
    num_groups: int = 1
    patience_s: float = PATIENCE_S
    """How long a GPU may take for a step, before it counts as hung."""


class ModelRunner:
    """Runs steps on a loaded model. Not thread-safe; a step that raised leaves it unusable."""

    def __init__(
        self,
        limits: StepLimits,
        model: Model,
        cache_engine: CacheEngine,
        backend: AttentionBackend,
        progress: Progress,
        drafter: Drafter | None = None,
    ) -> None:
        self.limits = limits
        self.model = model
        self.cache_engine = cache_engine
        self.progress = progress
        self.device = device = cache_engine.pool.device
        self.eager = EagerForward(model, cache_engine.layer_views(), backend, device, progress.advance)
        self.forward: Forward = self.eager
        self.batch = InputBatch(
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            vocab_size=model.spec.vocab_size,
            block_size=limits.block_size,
            num_blocks=cache_engine.num_blocks,
            windows=[group.window for group in model.spec.kv_groups],
        )
        if model.spec.pooling is not None:
            self.batch.pooled.kind = model.spec.pooling.kind
        if model.spec.state_elements:
            self.batch.states = RowStates(limits.max_num_seqs, len(cache_engine.states))
        self.sampler = sampler_of(model, device, limits.patience_s)
        self.expert_load: ExpertLoad | None = None
        self.drafter = drafter
        self.adapters: AdapterCache | None = None
        communicator = model.communicator
        self.batch.rules.fills_masks = communicator.shard.rank == 0 or not communicator.shares_memory

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Run one step, as all ranks do. Their answers are equal, but for logprobs, which only rank 0 reports.

        Raises ProtocolError for a step that does not fit this worker's state or limits.
        """
        if step.block_ops:
            self.cache_engine.execute(step.block_ops)
        self.batch.apply(step.entries)
        self.cache_engine.use(self.batch.highest_block)
        self._draft()
        inputs = self.batch.build()
        if inputs.num_tokens == 0:
            return ModelOutput(step.generation, step.step, b"")
        self.check_size(inputs)
        if self.adapters is not None:
            self.adapters.begin_step(inputs)
        if inputs.only_pools:
            pooled, failed = self._pool(self.eager.hidden(inputs), inputs)
            self.batch.commit(inputs, NO_TOKENS)
            return _answer_pooled(ModelOutput(step.generation, step.step, b"", counts=[]), inputs, pooled, failed)
        unsettled = self.batch.unsettled(inputs)
        if unsettled and self.batch.states.num_slots:  # a state cannot take up the last token a second time
            self._settle(unsettled, inputs, patient=True)
            unsettled = {}
        samples = None if unsettled else self.batch.sample_inputs(inputs)
        logits, prompts, (pooled, unfit) = self._logits(inputs)
        waiting = self._settle(unsettled, inputs) if unsettled else set()
        sampled = self.sampler.sample(logits, samples or self.batch.sample_inputs(inputs))
        if self.expert_load is not None:  # the device has done the step, or there would be no tokens
            self.expert_load.count(inputs.num_tokens, self.eager.num_last)
        self._explain(sampled, inputs)
        kept = _num_kept(inputs, sampled, waiting)
        if inputs.drafted and (confirmed := self.batch.states.confirmed(inputs, kept)) is not None:
            self.eager.take_up(*confirmed)
        self.batch.commit(inputs, sampled.tokens, kept)
        output = _answer(step, inputs, sampled, kept, prompts)
        return output if inputs.pooling is None else _answer_pooled(output, inputs, pooled, unfit)

    def check_size(self, inputs: StepInputs) -> None:
        """Raises ProtocolError for a step that the buffers are not made for."""
        if inputs.num_tokens > self.limits.max_num_tokens:
            raise ProtocolError(f"a step of {inputs.num_tokens} tokens, expected at most {self.limits.max_num_tokens}")

    def _settle(
        self, unsettled: dict[Handle, SequenceMask], inputs: StepInputs, *, patient: bool = False
    ) -> set[Handle]:
        """Return the sequences that get no token in this step: their grammars are still being compiled. A `patient`
        step waits for them, as does one in which nobody else gets a token."""
        patient = patient or len(unsettled) == len(inputs.handles)
        settled = readiness.settle(unsettled.values(), self.model.communicator, patient=patient)
        for handle, is_settled in zip(unsettled, settled, strict=True):
            if is_settled:
                self.batch.settled(handle)
        return {handle for handle, is_settled in zip(unsettled, settled, strict=True) if not is_settled}

    def _explain(self, sampled: Sampled, inputs: StepInputs) -> None:
        """Say of sequences without a token left what ruled the last one out, if that was a grammar."""
        if not sampled.failed:
            return
        sequences = np.repeat(inputs.sampling, inputs.num_samples)
        for sample, why in sampled.failed.items():
            if why == ALL_BANNED:
                sampled.failed[sample] = self.batch.explain(inputs.handles[sequences[sample]]) or why

    def _logits(self, inputs: StepInputs) -> tuple[torch.Tensor, PromptScored | None, tuple[Pooled, Failed]]:
        """The logits that are sampled; and the logprobs of prompts and what is pooled, which graphs know nothing of."""
        if inputs.scoring is None and inputs.pooling is None:
            return self.forward.logits(inputs), None, ([], [])
        hidden = self.eager.hidden(inputs)
        num_pooled = 0 if inputs.pooling is None else len(inputs.pooling.positions)
        num_scored = 0 if inputs.scoring is None else len(inputs.scoring.positions)
        scored_at, pooled_at = len(hidden) - num_pooled - num_scored, len(hidden) - num_pooled
        found = self._pool(hidden[pooled_at:], inputs) if inputs.pooling is not None else ([], [])
        prompts = None
        if inputs.scoring is not None:
            prompts = score(self.model, hidden[scored_at:pooled_at], inputs.scoring, self.progress.advance)
        return self.eager.head(hidden[:scored_at]), prompts, found

    def _pool(self, hidden: torch.Tensor, inputs: StepInputs) -> tuple[Pooled, Failed]:
        """What the prompts that the step completes asked for; rank 0 alone says."""
        pooler = self.model.pooler
        if pooler is None or inputs.pooling is None:
            raise ProtocolError("a step pools, and the model has no pooler")
        if self.model.communicator.shard.rank:
            return [], []
        return pool(pooler, hidden, inputs.pooling)

    def _draft(self) -> None:
        if self.drafter is not None and (batch := self.batch.draft_batch()) is not None:
            self.batch.add_drafts(self.drafter.propose(batch))

    def capture_graphs(self, capture: Capture, sizes: Sequence[int], pieces: Sequence[int] = ()) -> None:
        """From now on decode steps of at most `sizes[-1]` sequences are replayed, and other steps of at most
        `pieces[-1]` tokens in pieces. The KV cache is in its place."""
        limits = self.limits
        graphs = DecodeGraphs(
            self.eager, capture, sizes, max_model_len=limits.max_model_len, block_size=limits.block_size
        )
        if not capture.on_demand:
            graphs.capture_all(self.progress.advance)
        if pieces and isinstance(capture, PieceCapture):
            graphs.other = piecewise = PiecewiseForward(self.eager, capture, pieces)
            piecewise.capture_all(self.progress.advance)
        self.forward = graphs

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run what the first requests would otherwise wait for: what torch and the kernels set up on their first call.

        Nothing is written. On a CPU the step is the largest that is quick; on a GPU it is the largest of all, and one
        of pure decoding, for which kernels may have to be compiled: few samples are drawn by other ones than many.
        """
        limits = self.limits
        if self.device.type == "cpu":
            num_tokens = min(limits.max_num_tokens, max(1, WARM_UP_WORK // self.model.spec.active_parameters()))
            if self.model.spec.encoder is not None:
                num_seqs = min(num_tokens, limits.max_num_seqs)
                self.eager.hidden(padding_step(num_tokens, num_seqs, 0, limits.block_size, num_sampling=num_seqs))
                return
            warm_up_step(self.eager, self.sampler, limits, num_tokens, num_sampling=1)
            return
        logger.info("warming up; what kernels are not in the cache are compiled now")
        decodes = min(limits.max_num_seqs, limits.max_num_tokens)
        for num_tokens, num_sampling in ((limits.max_num_tokens, 1), (decodes, min(decodes, cuda_sampler.BLOCKS))):
            warm_up_step(self.eager, self.sampler, limits, num_tokens, num_sampling=num_sampling)
        torch.cuda.synchronize(self.device)


def warm_up_step(
    forward: Forward, sampler: TokenSampler, limits: StepLimits, num_tokens: int, *, num_sampling: int | None = None
) -> None:
    """A step of `num_tokens` tokens over as many sequences as there may be, which writes nothing. `num_sampling` of the
    sequences (None: all) draw a token, with all filters on.
    """
    num_seqs = min(num_tokens, limits.max_num_seqs)
    num_sampling = num_seqs if num_sampling is None else num_sampling
    inputs = padding_step(num_tokens, num_seqs, limits.num_groups, limits.block_size, num_sampling=num_sampling)
    drawn = row_params(SamplingParams(top_p=0.9, logprobs=1).for_worker(0, 0, (), None, unscored=False), rules=0)
    random = np.array([drawn] * num_sampling, ROW_PARAMS)
    sampler.sample(forward.logits(inputs), SampleInputs(random, np.zeros(num_sampling, np.int64)))


def _answer_pooled(output: ModelOutput, inputs: StepInputs, pooled: Pooled, failed: Failed) -> ModelOutput:
    """The answer with what was pooled. Sequences that are pooled get no token, and count where they stand."""
    places = set[int]() if inputs.pooling is None else set(inputs.pooling.places)
    sampled = iter([1] * len(inputs.sampling) if output.counts is None else output.counts)
    num_caught_up = len(inputs.sampling) + len(places)
    counts = [0 if place in places else next(sampled) for place in range(num_caught_up)]
    all_failed = [*(output.failed or ()), *failed]
    counts_or_ones = counts if 0 in counts else None
    return msgspec.structs.replace(output, counts=counts_or_ones, pooled=pooled or None, failed=all_failed or None)


def _num_kept(inputs: StepInputs, sampled: Sampled, waiting: Collection[Handle]) -> NDArray[np.int64]:  # [num_sampling]
    """How many samples of each sequence are its tokens: none of those `waiting`."""
    kept = _num_proven(inputs, sampled)
    if waiting:
        kept = np.where([inputs.handles[index] in waiting for index in inputs.sampling.tolist()], 0, kept)
    return kept


def _num_proven(inputs: StepInputs, sampled: Sampled) -> NDArray[np.int64]:  # [num_sampling]
    """How many samples of each sequence are proved by the drafts before them, which are right."""
    if not inputs.drafted:
        return inputs.num_samples
    drafts, num_before = inputs.drafts, inputs.num_drafts_before
    # A failed draft position is rejected; the next step samples it again, undrafted.
    for sample in sampled.failed:
        if num_before[sample]:
            drafts[sample - 1] = NO_DRAFT
    return num_kept(sampled.tokens, drafts, inputs.sample_starts)


def _answer(
    step: SchedulerOutput,
    inputs: StepInputs,
    sampled: Sampled,
    kept: NDArray[np.int64],  # [num_sampling]
    prompts: PromptScored | None,
) -> ModelOutput:
    tokens, logprobs, counts = sampled.tokens, sampled.logprobs, None
    if len(kept) < len(tokens) or not kept.all():
        chosen = np.flatnonzero(inputs.num_drafts_before < np.repeat(kept, inputs.num_samples))
        tokens, counts = tokens[chosen], kept.tolist()
        logprobs = logprobs and [logprobs[sample] for sample in chosen]
    drafted = inputs.num_samples - 1
    failed = []
    if sampled.failed:
        sequences, num_before = np.repeat(inputs.sampling, inputs.num_samples), inputs.num_drafts_before
        failed = [(inputs.handles[sequences[i]], why) for i, why in sampled.failed.items() if num_before[i] == 0]
    return ModelOutput(
        step.generation,
        step.step,
        tokens.astype("<u4").tobytes(),
        counts=counts if counts and set(counts) != {1} else None,
        logprobs=logprobs,
        failed=failed or None,
        prompts=prompts,
        drafted=(int(np.count_nonzero(drafted)), int(drafted.sum())) if inputs.drafted else None,
    )
