"""From logits to tokens where stages share out the layers: the last one samples, and each keeps the sequences."""

import numpy as np
import torch

from vllm_lite.parallel.communicator import Communicator
from vllm_lite.worker.sampling.sampler import Sampled, SampleInputs, TokenSampler


class StagedSampler:
    """Samples as `last` does, in the last stage, and brings the tokens to the other stages. Failures and logprobs are
    known to the last stage alone, whose first rank answers."""

    def __init__(self, last: TokenSampler, communicator: Communicator) -> None:
        self._last = last
        self._communicator = communicator
        self._stage = communicator.shard.stage

    def sample(self, logits: torch.Tensor, inputs: SampleInputs) -> Sampled:
        """As TokenSampler.sample. `logits` have no columns but in the last stage."""
        if self._stage.is_last:
            sampled = self._last.sample(logits, inputs)
            tokens = torch.from_numpy(np.ascontiguousarray(sampled.tokens))
            for stage in range(self._stage.index):
                self._communicator.send(tokens, stage)
            return sampled
        tokens = torch.empty(len(inputs.params), dtype=torch.int64)
        self._communicator.receive(tokens, self._stage.count - 1)
        return Sampled(tokens.numpy(), {}, None)
