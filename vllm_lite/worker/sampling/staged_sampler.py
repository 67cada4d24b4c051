"""Sampling with pipeline stages: the last stage samples, and each stage keeps the sequences."""

import numpy as np
import torch

from vllm_lite.parallel.communicator import Communicator
from vllm_lite.parallel.stages import take_from_last
from vllm_lite.worker.sampling.sampler import Sampled, SampleInputs, TokenSampler


class StagedSampler:
    """Samples by `last` in the last stage, and broadcasts the tokens to the other stages, token t of a failed row as
    -1 - t. Only the last stage, whose first rank answers, has logprobs and the reasons of failures."""

    def __init__(self, last: TokenSampler, communicator: Communicator) -> None:
        self._last = last
        self._communicator = communicator

    def sample(self, logits: torch.Tensor, inputs: SampleInputs) -> Sampled:
        """See TokenSampler.sample. `logits` have no columns except in the last stage."""
        if not self._communicator.shard.stage.is_last:
            sent = np.empty(len(inputs.params), np.int64)
            take_from_last(torch.from_numpy(sent), self._communicator)
            failed = dict.fromkeys(np.flatnonzero(sent < 0).tolist(), "it failed in the last stage")
            return Sampled(np.maximum(sent, -1 - sent), failed, None)
        sampled = self._last.sample(logits, inputs)
        sent = np.array(sampled.tokens, np.int64)
        sent[list(sampled.failed)] = -1 - sent[list(sampled.failed)]
        take_from_last(torch.from_numpy(sent), self._communicator)
        return sampled
