"""Effect of SamplingParams on the logits of one token of one request, written down plainly: the truth for the
worker."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_lite.protocol.params import SamplingParams


def changed(
    logits: NDArray[np.float32],  # [vocab]
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Iterable[int] = (),
) -> NDArray[np.float32]:  # [vocab]
    """The logits before temperature and filters, when `output` has been generated after `prompt`."""
    ruled_out = set()
    if params.allowed_token_ids is not None:
        ruled_out |= set(range(len(logits))) - set(params.allowed_token_ids)
    for word in params.bad_words_token_ids:
        start = len(output) - len(word) + 1
        if start >= 0 and list(output[start:]) == list(word[:-1]):
            ruled_out.add(word[-1])
    if len(output) < params.min_tokens:
        ruled_out |= set(stop_ids)
    row = logits.astype(np.float32).copy()
    for token in range(len(row)):
        if token in ruled_out:
            row[token] = -np.inf
            continue
        row[token] += np.float32((params.logit_bias or {}).get(token, 0.0))
        if token in prompt or token in output:
            penalty = np.float32(params.repetition_penalty)
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        count = list(output).count(token)
        row[token] -= np.float32(params.frequency_penalty) * np.float32(count) + (
            np.float32(params.presence_penalty) if count else np.float32(0)
        )
    return row
