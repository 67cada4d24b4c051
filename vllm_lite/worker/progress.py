"""How a worker shows that it is busy and not hung. No torch here: hearts beat while torch is being imported."""


class Progress:
    """Grows with every layer computed, shard loaded and step done. One thread writes it, the heartbeat's reads it."""

    def __init__(self) -> None:
        self.count = 0

    def advance(self) -> None:
        self.count += 1
