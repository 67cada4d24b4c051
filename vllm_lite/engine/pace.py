"""How many steps go to the workers in one message.

Engine and workers share the cores with the kernels, and a message each way costs as much of them as a tenth of a small
model's step. While nothing but short decode steps is to be done, several travel together, and so do their results.
"""

TURN_S = 0.003
"""Steps are put together up to this time: a stream is read in such pieces, an arrival waits for at most two of them."""
MAX_STEPS = 4
MEASURED_STEPS = 16


class Pace:
    """`steps` that go together. It is told of each step that ends, and learns how long they take."""

    def __init__(self) -> None:
        self.steps = 1
        self._since_s: float | None = None
        self._count = 0

    def ended(self, now_s: float, *, steady: bool) -> None:
        """A step has ended. `steady`: it was one of decoding only, and the next one is under way already."""
        if not steady:
            self._since_s = None
            self.steps = 1
        elif self._since_s is None:
            self._since_s, self._count = now_s, 0
        else:
            self._count += 1
            if self._count >= MEASURED_STEPS:
                step_s = (now_s - self._since_s) / self._count
                self.steps = max(1, min(MAX_STEPS, int(TURN_S / step_s))) if step_s > 0 else 1
                self._since_s, self._count = now_s, 0
