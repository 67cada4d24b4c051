"""One step on one worker: block ops, diffs, forward pass, sampling, output. `ModelRunner.execute` is the overview;
CacheEngine, InputBatch, the model, the attention backend and the Sampler do the work, and each feature is a StepPart
that the runner does not know by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_lite.attention.backend import LoadsKernels
from vllm_lite.errors import ProtocolError
from vllm_lite.kernels.cuda import sampler as cuda_sampler
from vllm_lite.kernels.cuda.patience import PATIENCE_S
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput
from vllm_lite.runtime import log
from vllm_lite.worker.batch.block_tables import BlockTables
from vllm_lite.worker.batch.input_batch import InputBatch
from vllm_lite.worker.batch.part import StepPart, StepResult, hooks
from vllm_lite.worker.batch.rows import Rows
from vllm_lite.worker.batch.step_inputs import Int64s, StepInputs, padding_step
from vllm_lite.worker.forward import EagerForward, Forward
from vllm_lite.worker.graphs import Capture, DecodeGraphs
from vllm_lite.worker.memory.cache_engine import CacheEngine
from vllm_lite.worker.pieces import PieceCapture, PiecewiseForward
from vllm_lite.worker.profiler import StepRanges
from vllm_lite.worker.progress import Progress
from vllm_lite.worker.sampling.ranked_sampler import sampler_of
from vllm_lite.worker.sampling.sampler import ROW_PARAMS, Sampled, SampleInputs, TokenSampler, row_params

NO_TOKENS = np.zeros(0, np.int64)
NOTHING_DRAWN = Sampled(NO_TOKENS, {}, None)
WARM_UP_WORK = 2_000_000_000
"""Maximum multiply-adds of the warm-up on a CPU: about 0.1 s on one core."""

logger = log.get(__name__)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of one step, for which buffers are allocated."""

    max_num_seqs: int
    max_num_tokens: int
    max_model_len: int
    block_size: int
    num_groups: int = 1
    patience_s: float = PATIENCE_S
    """Seconds that a GPU may take for a step before it counts as hung."""


class ModelRunner:
    """Runs steps on a loaded model. Not thread-safe; unusable after a step that raised."""

    def __init__(
        self,
        limits: StepLimits,
        forward: EagerForward,
        cache_engine: CacheEngine,
        progress: Progress,
        parts: Sequence[StepPart],
    ) -> None:
        """`forward` runs the model over the KV cache of `cache_engine`. `parts` are called in their order."""
        self.limits = limits
        self.model = model = forward.model
        self.cache_engine = cache_engine
        self.progress = progress
        self.ranges = StepRanges()
        self.device = device = cache_engine.pool.device
        self.eager = forward
        self.forward: Forward = forward
        self.parts = tuple(parts)
        self._captured_before_s = 0.0
        windows = [group.window for group in model.spec.kv_groups]
        sizes = limits.max_num_seqs, limits.max_model_len
        tables = BlockTables(*sizes, limits.block_size, cache_engine.num_blocks, windows)
        self.batch = InputBatch(Rows(*sizes, model.spec.vocab_size, tables), parts)
        self.sampler = sampler_of(model, device, limits.patience_s)
        self._moves = hooks(parts, "moves")
        self._prepare, self._after_hidden = hooks(parts, "prepare"), hooks(parts, "after_hidden")
        self.after_sample, self._answer = hooks(parts, "after_sample"), hooks(parts, "answer")

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Run one step. All ranks run it and get equal outputs, except for `other_s`, and for logprobs, which only rank
        0 reports.

        Raises ProtocolError for a step that does not fit this worker's state or limits.
        """
        self.ranges.step()
        with self.ranges("inputs"):
            inputs = self._inputs(step)
        if inputs.num_tokens == 0:
            return ModelOutput(step.generation, step.step, b"")
        for prepare in self._prepare:
            prepare(inputs)
        samples = self.batch.sample_inputs(inputs) if inputs.draws and not inputs.draws_late else None
        with self.ranges("model"):
            logits = self._logits(inputs)
        with self.ranges("sample"):
            result = self._sample(inputs, logits, samples)
        with self.ranges("answer"):
            fields = self._commit(inputs, result)
        return ModelOutput(step.generation, step.step, **fields)

    def _captured_s(self) -> float:
        """Seconds that captures on demand have taken so far."""
        return self.forward.capture.spent_s if isinstance(self.forward, DecodeGraphs) else 0.0

    def _inputs(self, step: SchedulerOutput) -> StepInputs:
        """Execute the block ops, apply the entries, and build the inputs of the forward pass."""
        self._captured_before_s = self._captured_s()
        if step.block_ops:
            self.cache_engine.execute(step.block_ops)
            for moves in self._moves:
                moves(step.block_ops)
        self.batch.apply(step.entries)
        self.cache_engine.use(self.batch.tables.highest_block)
        inputs = self.batch.build()
        self.check_size(inputs)
        return inputs

    def _sample(self, inputs: StepInputs, logits: torch.Tensor | None, samples: SampleInputs | None) -> StepResult:
        """Sample the tokens. `samples`: the sampler's inputs, if they were built before the forward pass."""
        if logits is None:
            return StepResult(NOTHING_DRAWN, inputs.num_samples)
        sampled = self.sampler.sample(logits, samples or self.batch.sample_inputs(inputs))
        result = StepResult(sampled, inputs.num_samples)
        for after_sample in self.after_sample:
            after_sample(inputs, result)
        return result

    def _commit(self, inputs: StepInputs, result: StepResult) -> dict[str, Any]:
        """Apply the step's tokens to the batch, and build the fields of the ModelOutput."""
        self.batch.commit(inputs, result.sampled.tokens, result.num_kept)
        fields = _fields(inputs, result.sampled, result.num_kept)
        for answer in () if inputs.is_steady else self._answer:
            answer(inputs, fields)
        fields["other_s"] = fields.get("other_s", 0.0) + self._captured_s() - self._captured_before_s
        return fields

    def check_size(self, inputs: StepInputs) -> None:
        """Raise ProtocolError for a step that is larger than the buffers."""
        if inputs.num_tokens > self.limits.max_num_tokens:
            raise ProtocolError(f"a step of {inputs.num_tokens} tokens, expected at most {self.limits.max_num_tokens}")

    def _logits(self, inputs: StepInputs) -> torch.Tensor | None:
        """Run the model. Returns the logits of the samples, or None if no sequence of the step samples."""
        hidden = logits = None
        if not inputs.is_eager:
            logits = self.forward.logits(inputs)
        elif shown := self._shown(inputs):
            hidden, logits = shown
        else:
            hidden = self.eager.hidden(inputs)
        for after_hidden in self._after_hidden:
            after_hidden(inputs, hidden)
        if logits is None and hidden is not None and inputs.draws:
            logits = self.eager.head(hidden, inputs.sampled_rows)
        return logits

    def _shown(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Hidden states and logits of a decode step from a recorded program that keeps hidden states, if there is one
        for this step."""
        forward = self.forward
        if inputs.reads or inputs.vectors is not None or not isinstance(forward, DecodeGraphs):
            return None
        return forward.shown(inputs)

    def capture_graphs(self, capture: Capture, sizes: Sequence[int], pieces: Sequence[int] = ()) -> None:
        """Replay decode steps of at most `sizes[-1]` sequences from now on, and other steps of at most `pieces[-1]`
        tokens in pieces. Called once the KV cache is allocated."""
        limits = self.limits
        graphs = DecodeGraphs(
            self.eager, capture, sizes, max_model_len=limits.max_model_len, block_size=limits.block_size
        )
        graphs.replay_prompts(limits.max_num_tokens)
        if not capture.on_demand:
            graphs.capture_all(self.progress.advance)
        if pieces and isinstance(capture, PieceCapture):
            graphs.other = piecewise = PiecewiseForward(self.eager, capture, pieces)
            piecewise.capture_all(self.progress.advance)
        self.forward = graphs

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run steps that make torch and the kernels do the set-up of their first call, so that no request waits for it.

        No KV is written. On a CPU it is one step of about 0.1 s. On a GPU it is the largest step, and one that only
        decodes: kernels may have to be compiled, and few samples use other kernels than many.
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
        logger.info("warming up; kernels that are not in the cache are compiled now")
        self.load_kernels()
        torch.cuda.synchronize(self.device)

    def load_kernels(self) -> None:
        """Launch the kernels of GPU steps once, and load those that only some steps launch."""
        limits, backend = self.limits, self.eager.backend
        if isinstance(backend, LoadsKernels):
            backend.load_kernels()
        decodes = min(limits.max_num_seqs, limits.max_num_tokens)
        for num_tokens, num_sampling in ((limits.max_num_tokens, 1), (decodes, min(decodes, cuda_sampler.BLOCKS))):
            warm_up_step(self.eager, self.sampler, limits, num_tokens, num_sampling=num_sampling)
        for part in self.parts:
            part.load_kernels(self.eager.device)


def warm_up_step(
    forward: Forward, sampler: TokenSampler, limits: StepLimits, num_tokens: int, *, num_sampling: int | None = None
) -> None:
    """Run a step of `num_tokens` tokens over as many sequences as possible, which writes no KV. `num_sampling` of the
    sequences (None: all) sample a token, with all filters on.
    """
    num_seqs = min(num_tokens, limits.max_num_seqs)
    num_sampling = num_seqs if num_sampling is None else num_sampling
    inputs = padding_step(num_tokens, num_seqs, limits.num_groups, limits.block_size, num_sampling=num_sampling)
    drawn = row_params(SamplingParams(top_p=0.9, logprobs=1).for_worker(0, 0, (), None, unscored=False), rules=0)
    random = np.array([drawn] * num_sampling, ROW_PARAMS)
    sampler.sample(forward.logits(inputs), SampleInputs(random, np.zeros(num_sampling, np.int64)))


def _fields(inputs: StepInputs, sampled: Sampled, num_kept: Int64s) -> dict[str, Any]:  # num_kept: [num_sampling]
    """The fields of the ModelOutput before StepParts add theirs."""
    tokens, logprobs, counts = sampled.tokens, sampled.logprobs, None
    if len(num_kept) < len(tokens) or not num_kept.all():
        chosen = np.flatnonzero(inputs.sample_offsets < np.repeat(num_kept, inputs.num_samples))
        tokens, counts = tokens[chosen], num_kept.tolist()
        logprobs = logprobs and [logprobs[sample] for sample in chosen]
    failed = []
    if sampled.failed:
        sequences, offsets = np.repeat(inputs.sampling, inputs.num_samples), inputs.sample_offsets
        failed = [(inputs.handles[sequences[i]], why) for i, why in sampled.failed.items() if offsets[i] == 0]
    return {
        "tokens": tokens.astype("<u4").tobytes(),
        "counts": counts if counts and set(counts) != {1} else None,
        "logprobs": logprobs,
        "failed": failed or None,
    }
