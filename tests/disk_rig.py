"""A scheduler with a disk tier whose transfers end when a test ends them."""

from collections.abc import Callable
from typing import Any

from tests.scheduler_rig import Rig, expected
from vllm_lite.engine.blocks.disk_tier import DiskTier
from vllm_lite.protocol.transfers import (
    STATE,
    ForgetStored,
    LoadBlocks,
    LoadEncoded,
    StoreBlocks,
    StoreEncoded,
    Transfer,
)

Moving = LoadBlocks | StoreBlocks | LoadEncoded | StoreEncoded


class DiskRig(Rig):
    """A rig with a disk whose transfers end when a test, or `choose`, ends them."""

    def __init__(self, num_blocks: int = 20, *, contents: dict[bytes, Any] | None = None, **options: Any) -> None:
        super().__init__(num_blocks, disk=True, **options)
        self.contents: dict[bytes, Any] = {} if contents is None else contents
        self.tier = self.kv.part(DiskTier)
        self.pending: list[Any] = []
        """Transfers that have not ended."""
        self.loads: list[LoadBlocks] = []
        self.loads_of_media: list[LoadEncoded] = []
        self.fails: Callable[[bytes], bool] = lambda _: False
        self.holds = False
        """Whether transfers are held back from ending."""
        self.scheduler.stored_keys(list(self.contents), [])

    def send(self) -> None:
        """Begin the scheduler's transfers, as the engine does after it has sent steps."""
        for message in self.tier.take_messages():
            self._take(message)

    def _take(self, message: Transfer) -> None:
        if isinstance(message, ForgetStored):
            for key in list(self.contents) if message.keys is None else message.keys:
                self.contents.pop(key, None)
            return
        self.pending.append(message)
        if isinstance(message, LoadBlocks):
            self.loads.append(message)
        if isinstance(message, LoadEncoded):
            self.loads_of_media.append(message)

    def end(self, message: Moving) -> None:
        """Move the bytes of a transfer now, and report its end."""
        self.pending.remove(message)
        failed = self._move(message)
        self.scheduler.transferred(message.ticket, failed)
        self.scheduler.check_integrity()

    def _move(self, message: Moving) -> list[int]:
        """Move the bytes. Returns the positions of failed contents."""
        if isinstance(message, LoadEncoded | StoreEncoded):
            return self._move_vectors(message)
        failed = []
        for place, (key, item) in enumerate(zip(message.keys, message.ids, strict=True)):
            if self.fails(key) or (isinstance(message, LoadBlocks) and key not in self.contents):
                failed.append(place)
            elif isinstance(message, StoreBlocks):
                self.contents[key] = self._read(key, item)
            else:
                self._write(key, item, self.contents[key])
        return failed

    def _move_vectors(self, message: LoadEncoded | StoreEncoded) -> list[int]:
        encoded, on_host = self.worker.encoded, self.worker.encoded_on_host
        key, digest = message.key, message.digest
        if isinstance(message, StoreEncoded):
            if self.fails(key) or digest not in encoded | on_host:
                return [0]
            self.contents[key] = digest
            return []
        if self.fails(key) or self.contents.get(key) != digest:
            return [0]
        if digest not in on_host:
            encoded.add(digest)
        return []

    def _read(self, key: bytes, item: int) -> Any:
        states = self.worker.states
        return states.get(item) if key.endswith(STATE) and states is not None else list(self.worker.kv[item])

    def _write(self, key: bytes, item: int, content: Any) -> None:
        if key.endswith(STATE) and self.worker.states is not None:
            self.worker.states[item] = content
        else:
            self.worker.kv[item] = list(content)

    def end_all(self) -> None:
        while self.pending:
            self.end(self.pending[0])
            self.send()

    def step(self) -> list[Any]:
        in_flight = self.scheduler.in_flight
        while len(in_flight) < self.depth and (output := self.scheduler.schedule()) is not None:
            self.worker.submit(output)
        self.send()
        if not self.holds:
            self.end_all()
        assert in_flight or self.pending or not self.scheduler.requests or self.kv.is_freeing or not self.holds
        produced = []
        if (result := self.worker.poll()) is not None:
            produced = self.scheduler.update(result)
            self.scheduler.check_integrity()
        for item in produced:
            self.record(item)
        self.send()
        return produced

    def drain(self, max_steps: int = 3000) -> None:
        self.holds = False
        self.send()
        for _ in range(max_steps):
            if not (self.scheduler.requests or self.scheduler.in_flight or self.pending or self.kv.is_freeing):
                assert self.kv.pool.num_used == 0
                return
            self.step()
        raise AssertionError("requests are left that make no progress")

    def serve(self, name: str, prompt: list[int], max_tokens: int = 5, **params: Any) -> int:
        """Serve a request alone and check its tokens. Returns the number of cached prompt tokens."""
        request = self.add(name, prompt, max_tokens, **params)
        self.drain()
        assert self.output(name) == expected(prompt, max_tokens)
        assert request.num_cached_at_start is not None
        return request.num_cached_at_start


PROMPT = list(range(1, 30))


def restarted(rig: DiskRig, **options: Any) -> DiskRig:
    """A new engine over the same disk."""
    return DiskRig(contents=rig.contents, **options)


def loading() -> DiskRig:
    """A restarted rig that has served PROMPT before; its first load has begun and is held back."""
    rig = DiskRig()
    rig.serve("a", PROMPT)
    again = restarted(rig)
    again.holds = True
    again.add("a", PROMPT)
    again.step()
    return again
