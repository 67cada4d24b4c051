"""ServeSession over replicas that are none: streams that move, ends that are made here, answers of several replicas."""

import asyncio
from array import array

# ruff: noqa: ARG002
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress

import msgspec
import pytest

from tests.deadlines import scaled
from tests.fakes import STATS, welcome
from vllm_lite.client.engines.session import MAX_MOVES
from vllm_lite.client.streams.stream import Event, StreamFailure
from vllm_lite.config import EngineConfig
from vllm_lite.errors import EngineError, RequestError
from vllm_lite.protocol import api
from vllm_lite.protocol.adapters import AdapterAnswer, AdapterInfo
from vllm_lite.protocol.api import Finished, Generate, OutputBatch, Tokens
from vllm_lite.protocol.codec import client_to_engine, engine_to_client, pack_tokens
from vllm_lite.protocol.operations import OperationDone, Sleep
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.ray import session as module
from vllm_lite.ray.messages import HASH_BYTES, UNKNOWN, Answer, Introduction, Route
from vllm_lite.ray.session import ReplicaLostError, ServeSession

NUM_TOKENS = 6
CONFIG = EngineConfig.check({"prefix_hash_seed": "s"}).resolve(
    max_position_embeddings=1000, dtype="float32", model_path="m"
)
INTRODUCED = Introduction(0, CONFIG, welcome(), [])


def token(position: int) -> int:
    """Token of the model at a position, whichever replica computes it."""
    return 100 + position


class FakeReplicas:
    """Each request runs as `scripts` say, one after the other: after how many tokens its replica dies."""

    def __init__(self, *scripts: int | None) -> None:
        self.scripts = list(scripts)
        self.requests: list[Generate] = []
        self.routes: list[Route] = []
        self.known: list[Introduction] = [INTRODUCED]
        self.answers: list[Answer] = []
        self.num_cancelled = 0
        self.num_silent = 0
        self.num_looks = 0
        self.is_full = False
        """Whether requests wait for a place, for ever."""
        self.pauses_after = NUM_TOKENS
        """Number of tokens after which a stream pauses."""

    async def generate(self, payload: bytes, route: Route) -> AsyncGenerator[bytes, None]:
        request = client_to_engine.decode(payload)
        assert isinstance(request, Generate)
        self.requests.append(request)
        self.routes.append(route)
        dies_after = self.scripts.pop(0) if self.scripts else None
        if self.is_full:
            await asyncio.Event().wait()
        if dies_after == -1:
            raise ReplicaLostError("there was none")
        yield b""
        start, name = request.have, request.request_id
        try:
            for position in range(start, NUM_TOKENS):
                if dies_after is not None and position - start == dies_after:
                    raise ReplicaLostError("it was killed")
                if position - start == self.pauses_after:
                    await asyncio.Event().wait()
                last = position == NUM_TOKENS - 1
                output = (
                    Finished(name, position, [token(position)], "length")
                    if last
                    else Tokens(name, position, [token(position)])
                )
                yield b""
                yield engine_to_client.encode(OutputBatch(3, [output]))
                await asyncio.sleep(0)
        except (GeneratorExit, asyncio.CancelledError):
            self.num_cancelled += 1
            raise

    async def ask(self, payload: bytes, timeout_s: float, *, needs_all: bool) -> list[Answer]:
        if not self.answers:
            raise ReplicaLostError("there is no replica")
        return self.answers

    async def introduce(self) -> list[Introduction]:
        self.num_looks += 1
        if not self.known:
            raise ReplicaLostError("there is no replica")
        return self.known


class Rig:
    def __init__(self, replicas: FakeReplicas) -> None:
        self.replicas = replicas
        self.session = ServeSession(replicas, [INTRODUCED])
        self.events: list[Event] = []

    def submit(self, name: str = "r") -> None:
        params = SamplingParams(temperature=0.5, seed=7, max_tokens=NUM_TOKENS)
        self.session.submit(Generate(name, pack_tokens(range(40)), params), self.events.extend)

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Tokens | Finished) for token in event.token_ids]

    async def until_ended(self) -> None:
        await until(lambda: any(not isinstance(event, Tokens) for event in self.events))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(scaled(10)):
        while not condition():  # noqa: ASYNC110 - conditions of several kinds
            await asyncio.sleep(0.001)


async def play(scene: Callable[[Rig], Awaitable[None]], *scripts: int | None) -> Rig:
    rig = Rig(FakeReplicas(*scripts))
    await scene(rig)
    return rig


async def one(rig: Rig) -> None:
    rig.submit()
    await rig.until_ended()


async def test_a_stream_of_one_replica() -> None:
    rig = await play(one)
    assert rig.tokens == [token(position) for position in range(NUM_TOKENS)]
    assert {event.request_id for event in rig.events} == {"r"}
    assert rig.replicas.requests[0].request_id != "r"
    assert not rig.session.is_live("r")


@pytest.mark.parametrize("dies_after", range(NUM_TOKENS))
async def test_a_stream_continues_behind_its_tokens_when_its_replica_dies(
    dies_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 3600.0)  # resuming must not wait for this pause
    rig = await play(one, dies_after)
    assert rig.tokens == [token(position) for position in range(NUM_TOKENS)]
    first, second = rig.replicas.requests
    assert second.have == dies_after
    assert list(array("I", second.output)) == [token(position) for position in range(dies_after)]
    assert (second.prompt, second.params) == (first.prompt, first.params)
    assert rig.replicas.routes[0] == rig.replicas.routes[1]


async def test_a_request_that_ends_its_replicas_does_not_end_them_all() -> None:
    rig = await play(one, *[0] * 10)
    assert len(rig.replicas.requests) == MAX_MOVES + 1
    assert isinstance(rig.events[-1], StreamFailure)
    assert "it was killed" in str(rig.events[-1].error)


async def test_waiting_for_a_replica_counts_as_no_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.0001)
    rig = await play(one, *[-1] * 9)
    assert rig.tokens == [token(position) for position in range(NUM_TOKENS)]
    assert len(rig.replicas.requests) == 10


async def test_a_silent_replica_is_given_up() -> None:
    async def scene(rig: Rig) -> None:
        async def silent(payload: bytes, route: Route) -> AsyncGenerator[bytes, None]:
            rig.replicas.generate = speaking  # type: ignore[method-assign]
            yield b""
            await asyncio.Event().wait()

        speaking, rig.replicas.generate = rig.replicas.generate, silent  # type: ignore[method-assign]
        rig.session.silence_s = 0.01
        await one(rig)

    assert (await play(scene)).tokens == [token(position) for position in range(NUM_TOKENS)]


async def test_the_end_of_an_engine_moves_its_streams() -> None:
    async def scene(rig: Rig) -> None:
        async def dying(payload: bytes, route: Route) -> AsyncGenerator[bytes, None]:
            rig.replicas.generate = speaking  # type: ignore[method-assign]
            yield b""
            yield engine_to_client.encode(api.Dying("killed by SIGKILL"))

        speaking, rig.replicas.generate = rig.replicas.generate, dying  # type: ignore[method-assign]
        await one(rig)

    assert (await play(scene)).tokens == [token(position) for position in range(NUM_TOKENS)]


async def test_an_abort_ends_the_stream_here_and_tells_the_replica() -> None:
    async def scene(rig: Rig) -> None:
        rig.replicas.pauses_after = 2
        rig.submit()
        await until(lambda: len(rig.tokens) == 2)
        rig.session.abort("r")
        await until(lambda: rig.replicas.num_cancelled == 1)

    rig = await play(scene)
    assert isinstance(rig.events[-1], Finished)
    assert rig.events[-1].reason == "abort"
    assert not rig.session.is_live("r")


async def test_dropped_requests_get_no_more_events() -> None:
    async def scene(rig: Rig) -> None:
        rig.replicas.pauses_after = 2
        rig.submit()
        await until(lambda: len(rig.tokens) == 2)
        seen = len(rig.events)
        rig.session.drop("r")
        rig.submit()  # the name is free again
        rig.session.drop("r")
        await until(lambda: rig.replicas.num_cancelled == 1)
        assert len(rig.events) == seen

    await play(scene)


async def test_an_id_in_use_is_refused() -> None:
    async def scene(rig: Rig) -> None:
        rig.submit()
        with pytest.raises(RequestError, match="in use"):
            rig.submit()

    await play(scene)


async def test_requests_are_routed_by_their_blocks_and_their_salt() -> None:
    async def scene(rig: Rig) -> None:
        rig.submit("plain")
        rig.session.submit(
            Generate("salted", pack_tokens(range(40)), SamplingParams(cache_salt="mine", max_tokens=1)),
            rig.events.extend,
        )
        await until(lambda: len(rig.replicas.routes) == 2)

    plain, salted = (await play(scene)).replicas.routes
    assert (len(plain.blocks), plain.affinity) == (40 // welcome().block_size, None)
    assert salted.affinity == "mine"
    assert {len(block) for block in plain.blocks} == {HASH_BYTES}
    assert set(plain.blocks).isdisjoint(salted.blocks)


async def test_answers_of_several_replicas_are_joined() -> None:
    async def scene(rig: Rig) -> None:
        payload = engine_to_client.encode(STATS)
        rig.replicas.answers = [Answer(0, payload), Answer(2, error="it starts"), Answer(1, payload)]
        stats = await asyncio.wrap_future(rig.session.request_stats())
        assert stats.prompt_tokens == 2 * STATS.prompt_tokens
        rig.session.known = [msgspec.structs.replace(INTRODUCED, number=number) for number in (2, 1, 0)]
        members = rig.session.ask_each()
        assert [member.number for member in members] == [0, 1, 2]
        assert await asyncio.wrap_future(members[1].stats) == STATS
        with pytest.raises(EngineError):
            await asyncio.wrap_future(members[2].stats)

    await play(scene)


async def test_an_operation_is_done_by_all_or_is_an_error() -> None:
    async def scene(rig: Rig) -> None:
        rig.session.known = [msgspec.structs.replace(INTRODUCED, number=number) for number in (0, 1)]
        rig.replicas.answers = [Answer(0, engine_to_client.encode(OperationDone()))]
        with pytest.raises(EngineError, match="a replica did not answer"):
            await asyncio.wrap_future(rig.session.operate(Sleep(1)))
        rig.replicas.answers.append(Answer(1, engine_to_client.encode(OperationDone())))
        rig.replicas.answers.append(Answer(UNKNOWN, error="a third one hangs"))
        with pytest.raises(EngineError, match="a third one hangs"):
            await asyncio.wrap_future(rig.session.operate(Sleep(1)))
        del rig.replicas.answers[-1]
        assert await asyncio.wrap_future(rig.session.operate(Sleep(1))) == OperationDone()

    await play(scene)


async def test_an_adapter_may_be_named_as_soon_as_it_is_loaded() -> None:
    async def scene(rig: Rig) -> None:
        rig.replicas.known = [msgspec.structs.replace(INTRODUCED, adapters=[AdapterInfo("a", "/a")])]
        rig.replicas.answers = [Answer(0, engine_to_client.encode(AdapterAnswer(1, "a")))]
        assert rig.session.adapters == {}
        await asyncio.wrap_future(rig.session.load_adapter("a", "/a"))
        assert list(rig.session.adapters) == ["a"]

    await play(scene)


async def test_requests_of_a_silent_replica_are_routed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.001)

    async def scene(rig: Rig) -> None:
        watch = asyncio.ensure_future(rig.session.watch())
        rig.session.silence_s = 0.01
        rig.replicas.is_full = True
        rig.submit()
        looks = rig.replicas.num_looks
        await until(lambda: rig.replicas.num_looks > looks + 50)
        assert len(rig.replicas.requests) == 1, "none is silent, and it keeps its place in the queue"
        rig.replicas.is_full, rig.replicas.num_silent = False, 1
        await rig.until_ended()
        assert len(rig.replicas.requests) == 2
        assert rig.tokens == [token(position) for position in range(NUM_TOKENS)]
        watch.cancel()

    await play(scene)


async def test_questions_without_replicas_raise() -> None:
    async def scene(rig: Rig) -> None:
        with pytest.raises(EngineError, match="no replica"):
            await asyncio.wrap_future(rig.session.request_stats())

    await play(scene)


async def test_streams_wait_for_replicas_and_end_when_none_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)

    async def scene(rig: Rig) -> None:
        watch = asyncio.ensure_future(rig.session.watch())
        rig.session.recovery_s = 0.05
        rig.replicas.known = []
        await until(lambda: rig.session.recovering is not None)
        rig.submit()
        await until(lambda: isinstance(rig.events[-1] if rig.events else None, StreamFailure))
        rig.replicas.known = [INTRODUCED]
        await until(lambda: rig.session.recovering is None)
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch

    await play(scene, *[-1] * 10_000)
