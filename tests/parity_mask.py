"""A toy grammar for the worker's tests: an odd token is never followed by another one."""

from collections.abc import Sequence

import numpy as np

from vllm_lite.worker.sampling.masks import Uint32s


class ParityMask:
    """A MaskSource. It remembers the whole output, so that a wrong rollback shows."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.output: list[int] = []

    def accept(self, token: int) -> bool:
        if self.output and self.output[-1] % 2 and token % 2:
            return False
        self.output.append(token)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self.output)
        self.output = self.output[: len(self.output) - num_tokens]

    def forced_tokens(self) -> list[int]:
        return []  # two tokens at least are even

    def num_valid(self, tokens: Sequence[int]) -> int:
        accepted = 0
        while accepted < len(tokens) and self.accept(tokens[accepted]):
            accepted += 1
        self.rollback(accepted)
        return accepted

    def fill_bitmask(self, bitmask: Uint32s) -> None:
        assert len(bitmask) == -(-self.vocab_size // 32)
        if self.output and self.output[-1] % 2:
            bitmask[:] = np.uint32(0x55555555)
