"""Times decode steps with drafts and without when a worker starts: the engine then knows what drafts take before the
first request. All steps read the null block and write nothing."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from vllm_lite.config import ResolvedConfig
from vllm_lite.protocol.control import StepTiming
from vllm_lite.worker.batch.step_inputs import StepInputs, padding_step
from vllm_lite.worker.model_runner import ModelRunner
from vllm_lite.worker.sampling.sampler import ROW_PARAMS, SampleInputs

CROWD = 8
"""Sequences of the steps that show what further ones take."""
WORK = 4_000_000_000
"""Multiply-adds of a row that all steps of one kind may cost: about 0.2 s. The first of them is not timed."""
MOST_REPEATS = 5


def timings_of(
    runner: ModelRunner, draft: Callable[[StepInputs], None], config: ResolvedConfig
) -> tuple[StepTiming, ...]:
    """Time steps as `time_steps` does, if times decide how much is drafted; else there are none."""
    speculation = config.speculative_config
    if speculation is None or config.disable_adaptive_drafts or runner.model.spec.encoder is not None:
        return ()
    return time_steps(runner, draft, speculation.num_speculative_tokens)


def time_steps(runner: ModelRunner, draft: Callable[[StepInputs], None], most: int) -> tuple[StepTiming, ...]:
    """Time steps of one sequence and of several, without drafts, with one, and with `most`. `draft` makes one draft of
    each sequence of a step. All ranks call it, and run the same steps: their number does not depend on the clock."""
    limits = runner.limits
    crowd = min(CROWD, limits.max_num_seqs, limits.max_num_tokens)
    shapes = dict.fromkeys([(1, 0), (1, 1), (1, most), (crowd, 0), (crowd, 1)])
    fitting = [shape for shape in shapes if shape[0] * (1 + shape[1]) <= limits.max_num_tokens]
    repeats = 1 + max(1, min(MOST_REPEATS, WORK // (8 * runner.model.spec.active_parameters())))
    return tuple(_time(runner, draft, repeats, *shape) for shape in fitting)


@torch.inference_mode()
def _time(
    runner: ModelRunner, draft: Callable[[StepInputs], None], repeats: int, num_seqs: int, num_drafts: int
) -> StepTiming:
    verified, drawn = _step(runner, num_seqs, 1 + num_drafts), _step(runner, num_seqs, 1)
    num_rows = num_seqs * (1 + num_drafts)
    params = np.zeros(num_rows, ROW_PARAMS)
    samples = SampleInputs(params, np.ones(num_rows, np.int64), plain=True)
    took_s = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        for _ in range(num_drafts):
            draft(drawn)
        runner.sampler.sample(runner.forward.logits(verified), samples)
        took_s.append(time.perf_counter() - began_s)
        runner.progress.advance()
    return StepTiming(num_rows, num_drafts, min(took_s[1:]))


def _step(runner: ModelRunner, num_seqs: int, each: int) -> StepInputs:
    """Make a step of so many sequences, with so many tokens of each that draw one."""
    limits, has_states = runner.limits, runner.model.spec.state_elements > 0
    step = padding_step(num_seqs * each, num_seqs, limits.num_groups, limits.block_size, num_sampling=num_seqs)
    return replace(
        step,
        num_samples=np.full(num_seqs, each, np.int64),
        has_proposals=each > 1,
        states=step.states if has_states else None,
    )
