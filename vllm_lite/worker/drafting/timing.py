"""Times decode steps with and without drafts when a worker starts, so that the engine knows their cost before the first
request. All steps read the null block and write nothing."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from vllm_lite.config import ResolvedConfig
from vllm_lite.protocol.control import STEP_ROWS, StepTiming
from vllm_lite.worker.batch.step_inputs import StepInputs, padding_step
from vllm_lite.worker.model_runner import ModelRunner
from vllm_lite.worker.sampling.sampler import ROW_PARAMS, SampleInputs

CROWD = 8
"""Sequences of the timed steps that show the cost of further sequences."""
WORK = 4_000_000_000
"""Maximum multiply-adds per row of all timed steps of one kind: about 0.2 s. The first step of a kind is not timed."""
MOST_REPEATS = 5
STRIDE = 97
"""Difference of successive token ids of a timed step: equal ids choose the same experts, so rows seem free."""
LEAST_REPEATS = 2
"""Minimum number of timed rounds: a delay seldom hits the same step twice."""


def timings_of(
    runner: ModelRunner, draft: Callable[[StepInputs], None], config: ResolvedConfig
) -> tuple[StepTiming, ...]:
    """Time steps as `time_steps` does, if times decide the number of drafts; else return none."""
    speculation = config.speculative_config
    if speculation is None or config.disable_adaptive_drafts or runner.model.spec.encoder is not None:
        return ()
    return time_steps(runner, draft, speculation.num_speculative_tokens)


def time_steps(runner: ModelRunner, draft: Callable[[StepInputs], None], most: int) -> tuple[StepTiming, ...]:
    """Time steps of one sequence with 0 to `most` drafts, one step for each of STEP_ROWS, and steps of several
    sequences with 0 and 1 drafts. `draft` makes one draft for each sequence of a step, and is timed separately. All
    ranks call it, and run the same steps: their number does not depend on the clock."""
    limits = runner.limits
    crowd = min(CROWD, limits.max_num_seqs, limits.max_num_tokens)
    alone = [(1, rows - 1) for rows in STEP_ROWS if rows <= most]
    shapes = dict.fromkeys([*alone, (1, most), (crowd, 0), (crowd, 1)])
    fitting = [
        (count, length)
        for count, length in shapes
        if count * (1 + length) <= limits.max_num_tokens and length < limits.max_model_len
    ]
    verify = {shape: _verification(runner, *shape) for shape in fitting}
    drafts = {count: partial(draft, _step(runner, count, 1)) for count in dict.fromkeys((1, crowd))}
    repeats = max(LEAST_REPEATS, min(MOST_REPEATS, WORK // (8 * runner.model.spec.active_parameters())))
    took_s = _fastest([*verify.values(), *drafts.values()], repeats, runner.progress.advance)
    draft_s = dict(zip(drafts, took_s[len(verify) :], strict=True))
    return tuple(
        StepTiming(count * (1 + length), length, own_s + length * draft_s[count])
        for (count, length), own_s in zip(verify, took_s, strict=False)
    )


def _verification(runner: ModelRunner, num_seqs: int, num_drafts: int) -> Callable[[], object]:
    """A step that verifies `num_drafts` drafts of each of `num_seqs` sequences."""
    step, num_rows = _step(runner, num_seqs, 1 + num_drafts), num_seqs * (1 + num_drafts)
    samples = SampleInputs(np.zeros(num_rows, ROW_PARAMS), np.ones(num_rows, np.int64), plain=True)
    return lambda: runner.sampler.sample(runner.forward.logits(step), samples)


@torch.inference_mode()
def _fastest(runs: Sequence[Callable[[], object]], repeats: int, progress: Callable[[], None]) -> list[float]:
    """The minimum time of each of `runs`, in seconds. They run alternately, so that a slow moment does not hit only one
    of them."""
    took_s: list[list[float]] = []
    for _ in range(1 + repeats):
        took_s.append([])
        for run in runs:
            began_s = time.perf_counter()
            run()
            took_s[-1].append(time.perf_counter() - began_s)
            progress()
    return [min(own) for own in zip(*took_s[1:], strict=True)]


def _step(runner: ModelRunner, num_seqs: int, each: int) -> StepInputs:
    """Build a step of `num_seqs` sequences with `each` tokens, after which each samples one token."""
    limits, spec = runner.limits, runner.model.spec
    step = padding_step(num_seqs * each, num_seqs, limits.num_groups, limits.block_size, num_sampling=num_seqs)
    return replace(
        step,
        input_ids=np.arange(num_seqs * each) * STRIDE % spec.vocab_size,
        num_samples=np.full(num_seqs, each, np.int64),
        has_proposals=each > 1,
        states=step.states if spec.state_elements > 0 else None,
    )
