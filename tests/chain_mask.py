"""A toy grammar for the worker's tests in which most tokens are forced. It repeats: a choice of four tokens, three
tokens that follow from it, any even token, and one fixed token."""

from collections.abc import Sequence

import numpy as np

from tests.parity_mask import ParityMask
from vllm_lite.worker.sampling.masks import Uint32s

PERIOD = 6
CHOICES = (40, 41, 42, 43)


class ChainMask(ParityMask):
    """A MaskSource that reports forced tokens."""

    def allowed(self) -> Sequence[int]:
        place = len(self.output) % PERIOD
        if place == 0:
            return CHOICES
        if place <= 3:
            return (100 + 10 * place + self.output[-place] - CHOICES[0],)
        return range(0, self.vocab_size, 2) if place == 4 else (7,)

    def accept(self, token: int) -> bool:
        if token not in self.allowed():
            return False
        self.output.append(token)
        return True

    def fill_bitmask(self, bitmask: Uint32s) -> None:
        bits = np.zeros(32 * len(bitmask), np.bool_)
        bits[list(self.allowed())] = True
        bitmask &= np.packbits(bits, bitorder="little").view(np.uint32)

    def forced_tokens(self) -> list[int]:
        length = len(self.output)
        while len(allowed := self.allowed()) == 1:
            self.output.append(allowed[0])
        forced = self.output[length:]
        self.rollback(len(forced))
        return forced
