"""Deaths of workers at any time and any number of times: every stream gets the tokens of an undisturbed run, each once;
every findable block has the contents of its hash; every block is free at the end; and a replay of the trace makes the
same decisions."""

import random
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.cached_contents import CachedContents
from tests.examples import examples
from tests.recorded import Recorded, agrees
from tests.simulated_worker import next_token, seed_of
from tests.unit.test_replay import configurations
from vllm_lite.engine.blocks.host_tier import HostTier
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.core import EngineCore
from vllm_lite.engine.intake import Attached
from vllm_lite.engine.request import Produced, Request
from vllm_lite.engine.scheduling.in_flight import MessageLength
from vllm_lite.protocol.api import ForkRequest, Generate
from vllm_lite.protocol.codec import pack_tokens, unpack_tokens


class FixedLength(MessageLength):
    """Puts so many steps into a message from the beginning, and learns nothing."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def ended(self, now_s: float, *, steady: bool) -> None: ...


class WatchedCore(EngineCore):
    """Reports added requests to the watcher. A message has up to `steps_at_once` steps."""

    watcher: "Watched"
    steps_at_once: int

    def begin(self) -> bool:
        if not self.in_flight:
            self.message_length = FixedLength(self.steps_at_once)
        return super().begin()

    def add(self, client: bytes, message: Generate) -> Attached:
        attached = super().add(client, message)
        self.watcher.added(attached, message)
        return attached

    def fork(self, client: bytes, message: ForkRequest) -> Request:
        child = super().fork(client, message)
        tokens = child.sequences[0].tokens.tolist()
        self.watcher.begin(child, tokens[: child.num_prompt], tokens[child.num_prompt :])
        return child

    def abort(self, request_id: str, samples: Sequence[int] = (), *, stopped: bool = False) -> list[tuple[int, int]]:
        ended = super().abort(request_id, samples, stopped=stopped)
        self.watcher.reasons.update(((request_id, sample), "abort") for sample, _ in ended)
        return ended


class Watched(Recorded):
    """The client of every request: collects its stream, and asserts that no token is repeated or missing."""

    def __init__(self, trace: Path | None, steps_at_once: int = 1, **configuration: Any) -> None:
        super().__init__(trace, **configuration)
        self.core.__class__ = WatchedCore
        self.core.watcher, self.core.steps_at_once = self, steps_at_once  # type: ignore[attr-defined]
        self.requests: dict[str, Request] = {}
        self.beginnings: dict[str, tuple[list[int], list[int]]] = {}
        """The prompt of each request, and the output that it began with."""
        self.streams: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.scores: dict[str, int] = defaultdict(int)
        self.reasons: dict[tuple[str, int], str] = {}
        self.cached = CachedContents(self.core.kv)

    def loop(self, fail: bool = False) -> bool:
        has_result = super().loop(fail)
        if self.scheduler.has_workers and not self.scheduler.in_flight.num_unsent:
            self.cached.check(self.worker, self.scheduler.queues.unfinished())
        return has_result

    def begin(self, request: Request, prompt: list[int], output: list[int]) -> None:
        self.requests[request.request_id] = request
        self.beginnings[request.request_id] = prompt, output
        self.streams[request.request_id, 0] = list(output)

    def added(self, attached: Attached, message: Generate) -> None:
        name = message.request_id
        if name not in self.requests:
            self.begin(attached.request, unpack_tokens(message.prompt), unpack_tokens(message.output))
        else:  # it was sent again by a client that has the tokens in the message
            for sample in message.samples:
                self.streams[name, sample.index] = unpack_tokens(sample.output)
            if not message.samples:
                self.streams[name, 0] = unpack_tokens(message.output)
            self.streams[name, 0] += attached.resend
            if (name, 0) not in self.reasons:
                self.scores[name] = 0
        for item in attached.done:  # it lacked the end and nothing else
            self.take(item)
            self.scores[name] = attached.request.num_prompt - 1

    def take(self, item: Produced) -> None:
        super().take(item)
        name, stream = item.request.request_id, self.streams[item.request.request_id, item.sample]
        assert (name, item.sample) not in self.reasons, "it has ended"
        assert item.start == len(stream) or item.reason == "error"
        stream += item.token_ids
        if item.prompt is not None:
            assert item.prompt.start == self.scores[name] + 1, "each score comes once, in order"
            self.scores[name] += len(item.prompt.entries)
        if item.reason == "error":  # the whole request ends
            for sample in range(item.request.params.n):
                self.reasons.setdefault((name, sample), "error")
        elif item.reason is not None:
            self.reasons[name, item.sample] = item.reason

    def lose_workers(self, cause: str = "worker 0 died") -> None:
        super().lose_workers(cause)
        assert not any(pool.num_used or pool.num_cached for pool in self.pools())

    def pools(self) -> list[Any]:
        kv = self.core.kv
        host = kv.part(KVBlocks).host
        return [kv.pool, host.pool] if isinstance(host, HostTier) else [kv.pool]

    def check_streams(self) -> None:
        """Compare every stream with the model's continuation of its prompt, or with an undisturbed beam search."""
        for name, request in self.requests.items():
            beams = self._beams(name, request) if request.beam is not None else None
            for index in range(request.params.n):
                stream, reason = self.streams[name, index], self.reasons[name, index]
                wanted = self._continuation(name, request, index) if beams is None else beams[index]
                is_whole = reason in {"stop", "length"}
                assert stream == (wanted if is_whole else wanted[: len(stream)]), (name, index, reason)
                if is_whole and index == 0 and request.params.prompt_logprobs is not None:
                    assert self.scores[name] == request.num_prompt - 1

    def _continuation(self, name: str, request: Request, index: int) -> list[int]:
        prompt, output = self.beginnings[name]
        tokens = prompt + output
        while len(tokens) < request.max_len and not (output and tokens[-1] in request.stop_ids):
            tokens.append(next_token(tokens, self.worker.vocab_size, index, seed_of(request.params)))
            output = tokens[len(prompt) :]
        return tokens[len(prompt) :]

    def _beams(self, name: str, request: Request) -> list[list[int]]:
        alone = Watched(None, num_blocks=400)
        prompt, _ = self.beginnings[name]
        params = msgspec.structs.replace(request.params, deadline_ms=None)
        alone.core.add(b"client", Generate("alone", pack_tokens(prompt), params))
        alone.drain()
        return [alone.streams["alone", index] for index in range(request.params.n)]


@settings(max_examples=examples(80), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    seed=st.integers(0, 2**32),
    configuration=configurations,
    death_rate=st.sampled_from([0.05, 0.2, 0.5]),
    steps_at_once=st.sampled_from([1, 1, 3]),
)
def test_answers_do_not_depend_on_the_death_of_workers(
    seed: int, configuration: dict[str, Any], death_rate: float, steps_at_once: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        watched = Watched(trace, steps_at_once, **configuration)
        watched.random_work(random.Random(seed), death_rate=death_rate)
        watched.drain()
        assert not any(pool.num_used for pool in watched.pools())
        watched.check_streams()
        agrees(trace, watched)
