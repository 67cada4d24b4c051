"""Short decode steps travel several at a time; whatever else is to be done does not wait for them."""

import pytest

from tests.simulated_worker import SimulatedWorker, next_token
from vllm_lite.config import EngineConfig
from vllm_lite.engine.core import EngineCore, Lives, PoolSizes
from vllm_lite.engine.scheduling.in_flight import MAX_STEPS, MEASURED_STEPS, MESSAGE_S, MessageLength
from vllm_lite.executor.simulated import VirtualClock
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.control import KVGroupInfo, Ready
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.step import SchedulerOutput

VOCAB, EOS = 50, 7


class Rig:
    """A core whose steps take `step_s` each, and the steps of each message that it sends."""

    def __init__(self, step_s: float, **settings: object) -> None:
        self.step_s = step_s
        self.clock = VirtualClock(1.0)
        self.sent: list[list[int]] = []
        self.tokens: dict[str, list[int]] = {}
        config = EngineConfig.check({"block_size": 4, **settings})
        config = config.resolve(max_position_embeddings=1000, dtype="float32", model_path="m")
        ready = Ready(0, 1, 200, 64, (KVGroupInfo("full", 1),), 1000, VOCAB, (EOS,))
        self.worker = SimulatedWorker(200, 4, vocab_size=VOCAB)
        self.core = EngineCore(config, ready, self, PoolSizes(200), Lives(3), clock=self.clock)  # type: ignore[arg-type]

    def submit(self, *steps: SchedulerOutput) -> None:
        self.sent.append([step.step for step in steps])
        self.worker.submit(*steps)

    def add(self, name: str, prompt: list[int], max_tokens: int = 200) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.core.add(b"client", Generate(name, pack_tokens(prompt), params))

    def run(self, num_messages: int = 1000) -> None:
        """Take the answers of so many messages, or of all that come."""
        while self.core.begin():
            pass
        for _ in range(num_messages):
            if not self.core.in_flight:
                return
            answered = next(i for i, steps in enumerate(self.sent) if steps[-1] >= self.oldest)
            for _ in self.sent[answered]:
                self.clock.advance_to(self.clock.now_s + self.step_s)
                output = self.worker.poll()
                assert output is not None
                for item in self.core.finish(output):
                    self.tokens.setdefault(item.request.request_id, []).extend(item.token_ids)
            while self.core.begin():
                pass

    @property
    def oldest(self) -> int:
        return self.core.scheduler.in_flight.step_awaited


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def longest(sent: list[list[int]]) -> int:
    return max(map(len, sent))


def test_short_steps_go_together_and_give_the_same_tokens() -> None:
    rig = Rig(MESSAGE_S / 3.5)
    rig.add("a", [1, 2, 3])
    rig.run()
    assert longest(rig.sent) == 3
    assert longest(rig.sent[:MEASURED_STEPS]) == 1
    assert [step for steps in rig.sent for step in steps] == list(range(1, len(rig.tokens["a"]) + 1))
    assert rig.tokens["a"] == continuation([1, 2, 3], 200)
    rig.core.scheduler.check_integrity()


def test_very_short_ones_do_not_go_without_limit() -> None:
    rig = Rig(MESSAGE_S / 100)
    rig.add("a", [1, 2, 3])
    rig.run()
    assert longest(rig.sent) == MAX_STEPS


@pytest.mark.parametrize(
    ("step_s", "settings"), [(MESSAGE_S / 1.5, {}), (MESSAGE_S / 4.5, {"async_scheduling": False})]
)
def test_long_steps_go_alone_and_so_do_those_that_do_not_overlap(step_s: float, settings: dict[str, object]) -> None:
    rig = Rig(step_s, **settings)
    rig.add("a", [1, 2, 3])
    rig.run()
    assert longest(rig.sent) == 1


def test_an_arrival_waits_only_for_messages_in_flight() -> None:
    rig = Rig(MESSAGE_S / 4.5)
    rig.add("a", [1, 2, 3])
    rig.run(2 * MEASURED_STEPS)
    assert [len(steps) for steps in rig.sent[-4:]] == [MAX_STEPS] * 4
    num_sent = len(rig.sent)
    rig.add("b", [4, 5, 6, 7, 8])
    rig.run(1)
    assert not rig.core.scheduler.waiting
    assert len(rig.sent[num_sent]) == 1, "its first step"
    assert len(rig.core.in_flight) == MAX_STEPS + 1
    rig.run()
    assert rig.tokens["a"] == continuation([1, 2, 3], 200)
    assert rig.tokens["b"] == continuation([4, 5, 6, 7, 8], 200)


def test_an_end_that_is_noticed_late_changes_nothing() -> None:
    """Steps after it have been sent already. Their results are dropped, and the blocks are reused."""
    prompt = next(
        [first, 3, 1]
        for first in range(VOCAB)
        if EOS in (tokens := continuation([first, 3, 1], 99)) and tokens.index(EOS) > 2 * MEASURED_STEPS
    )
    rig = Rig(MESSAGE_S / 4.5)
    rig.core.add(b"client", Generate("a", pack_tokens(prompt), SamplingParams(max_tokens=150, temperature=0.0)))
    rig.run()
    end = continuation(prompt, 99).index(EOS)
    assert rig.tokens["a"] == continuation(prompt, end + 1)
    assert rig.sent[-1][-1] > end + 1
    rig.core.scheduler.check_integrity()
    rig.add("b", prompt[:2])
    rig.run()
    assert rig.tokens["b"] == continuation(prompt[:2], 200)


def test_the_pace_is_forgotten_when_something_else_happens() -> None:
    length = MessageLength()
    for index in range(MEASURED_STEPS + 1):
        length.ended(index * MESSAGE_S / 4.5, steady=True)
    assert length.steps == 4
    length.ended(1.0, steady=False)
    assert length.steps == 1
