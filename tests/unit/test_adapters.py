"""Adapters in the engine: names, admission by max_loras, memory of the workers, prefixes of their own, replay."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_worker import SimulatedWorker, next_token
from vllm_lite.config import EngineConfig
from vllm_lite.engine.core import EngineCore, Lives, PoolSizes
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.engine.request import Produced
from vllm_lite.errors import ConfigError, RequestError
from vllm_lite.protocol.adapters import AdapterAnswer, LoadAdapter, UnloadAdapter
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.control import KVGroupInfo, Ready
from vllm_lite.protocol.params import SamplingParams

VOCAB = 50


class Engine:
    """An engine core, its adapter loader and a simulated worker, stepped by hand like the engine's loop."""

    def __init__(self, num_blocks: int = 40, **settings: Any) -> None:
        settings = {"block_size": 4, "enable_lora": True, "max_loras": 2, "max_num_seqs": 8, **settings}
        config = EngineConfig.check(settings)
        self.config = config.resolve(max_position_embeddings=1000, dtype="float32", model_path="m")
        self.ready = Ready(0, 1, num_blocks, 64, (KVGroupInfo("full", 1),), 1000, VOCAB, ())
        self.num_blocks = num_blocks
        self.worker = self.make_worker()
        self.core = EngineCore(self.config, self.ready, self.worker, PoolSizes(num_blocks), Lives())  # type: ignore[arg-type]
        self.lists: list[tuple[str, ...]] = []
        ticks = itertools.count()
        self.loader = self.core.adapter_loader
        self.loader.clock = lambda: float(next(ticks))
        self.loader.on_listed = self.listed
        self.answers: dict[int, str | None] = {}
        self.missing: list[str] = []
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, Produced] = {}
        self.numbers = itertools.count(1)

    def make_worker(self) -> SimulatedWorker:
        worker = SimulatedWorker(self.num_blocks, 4, 8, VOCAB)
        worker.max_adapters = self.config.max_loras
        return worker

    def listed(self) -> None:
        self.lists.append(tuple(info.name for info in self.loader.infos))

    def load(self, name: str, path: str = "", **options: Any) -> int:
        question = next(self.numbers)
        self.loader.load(LoadAdapter(question, name, path or f"/{name}", **options), self.answered)
        return question

    def unload(self, name: str) -> int:
        question = next(self.numbers)
        self.loader.unload(UnloadAdapter(question, name), self.answered)
        return question

    def answered(self, answer: AdapterAnswer) -> None:
        assert answer.question not in self.answers
        self.answers[answer.question] = answer.error
        if answer.is_missing:
            self.missing.append(answer.name)

    def add(self, name: str, prompt: list[int], adapter: str = "", **params: Any) -> None:
        params = {"max_tokens": 5, **params}
        self.core.add(b"c", Generate(name, pack_tokens(prompt), SamplingParams(**params), adapter=adapter))

    def turn(self) -> None:
        """One pass of the engine's loop."""
        produced: list[Produced] = []
        while (output := self.worker.poll()) is not None:
            produced += self.core.finish(output)
        self.loader.receive(self.worker, produced)  # type: ignore[arg-type]
        while self.core.begin():
            pass
        self.loader.send(self.worker)  # type: ignore[arg-type]
        self.core.scheduler.check_integrity()
        assert len(self.worker.adapters) <= max((self.config.max_cpu_loras or self.config.max_loras), len(self.running))
        for item in produced:
            if item.sample:
                continue
            self.outputs.setdefault(item.request.request_id, []).extend(item.token_ids)
            if item.reason is not None:
                assert item.request.request_id not in self.ends
                self.ends[item.request.request_id] = item

    @property
    def running(self) -> set[str]:
        return {each.request.adapter.name for each in self.core.scheduler.running if each.request.adapter}

    def drain(self) -> None:
        for _ in range(2000):
            if not self.core.scheduler.requests and not self.loader.asked:
                self.turn()
                return
            self.turn()
        raise AssertionError(f"requests are left that make no progress: {self.core.scheduler.requests}")

    def lose_workers(self) -> None:
        self.worker.die()
        self.core.lose_workers("killed")
        self.worker = self.make_worker()
        self.core.resume(self.worker, self.core.scheduler.generation + 1, 0.0)  # type: ignore[arg-type]


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def test_a_request_may_name_an_adapter_that_is_being_loaded() -> None:
    engine = Engine()
    question = engine.load("sql")
    engine.add("r", [1, 2, 3], "sql")
    engine.turn()
    assert not engine.answers  # nothing runs before the workers have it
    assert engine.loader.infos == ()
    engine.drain()
    assert engine.answers == {question: None}
    assert engine.lists == [("sql",)]
    assert engine.outputs["r"] == continuation([1, 2, 3], 5)
    with pytest.raises(RequestError, match="there is no adapter 'other'"):
        engine.add("s", [1], "other")


def test_hits_in_the_prefix_cache_do_not_cross_adapters() -> None:
    engine = Engine(max_loras=3)
    for name in ("a", "b"):
        engine.load(name)
    prompt = list(range(1, 30))
    for number, adapter in enumerate(["", "a", "b", "a", "", "b"]):
        engine.add(f"r{number}", prompt, adapter)
        engine.drain()
        hit = engine.ends[f"r{number}"].request.num_cached_at_start
        assert hit == (28 if number > 2 else 0)
    engine.unload("a")
    engine.load("a")  # another one, for all that is known
    engine.add("again", prompt, "a")
    engine.drain()
    assert engine.ends["again"].request.num_cached_at_start == 0
    salted = {"cache_salt": "lora"}
    engine.add("salted", prompt, **salted)
    engine.drain()
    assert engine.ends["salted"].request.num_cached_at_start == 0


def test_a_step_has_at_most_max_loras_adapters_and_others_pass() -> None:
    engine = Engine(max_cpu_loras=4)
    for name in "abc":
        engine.load(name)
    for number, adapter in enumerate(["a", "b", "c", "a", "", "c", "b"]):
        engine.add(f"r{number}", [number, 1, 2], adapter, max_tokens=8)
    engine.turn()
    engine.turn()
    while not engine.running:
        engine.turn()
    assert engine.running == {"a", "b"}
    assert {each.request.request_id for each in engine.core.scheduler.running} == {"r0", "r1", "r3", "r4", "r6"}
    (state,) = engine.core.describe(["r2"]).requests
    assert state.admission.reason == "waits_for_adapter"
    stats = engine.core.stats()
    assert (stats.running_adapters, stats.waiting_adapters) == (["a", "b"], ["c"])
    assert (stats.num_waiting, stats.num_deferred) == (2, 2), "there is room, but not for their adapter"
    engine.drain()
    assert all(engine.outputs[f"r{number}"] == continuation([number, 1, 2], 8) for number in range(7))


def test_more_adapters_than_memory_take_turns() -> None:
    engine = Engine(max_loras=1)
    for name in "abcd":
        engine.load(name)
    for number in range(40):
        engine.add(f"r{number}", [number % 50, 3], "abcd"[number % 4])
    engine.drain()
    assert all(end.reason == "length" for end in engine.ends.values())
    assert len(engine.ends) == 40
    assert len(engine.worker.adapters) == 1


def test_an_unloaded_adapter_serves_its_requests_to_their_end() -> None:
    engine = Engine()
    engine.load("a")
    engine.add("r", [1, 2], "a", max_tokens=9)
    for _ in range(4):
        engine.turn()
    unloaded = engine.unload("a")
    assert engine.answers[unloaded] is None
    with pytest.raises(RequestError, match="there is no adapter 'a'"):
        engine.add("s", [1], "a")
    assert engine.worker.adapters
    engine.drain()
    engine.turn()
    assert engine.outputs["r"] == continuation([1, 2], 9)
    assert not engine.worker.adapters
    assert not engine.core.adapters.by_number
    assert engine.answers[engine.unload("a")] == "there is no adapter 'a'"
    assert engine.missing == ["a"]


@pytest.mark.parametrize("name", ["a,b", "a\nb", "a\n", "a b", 'a"', "a\u2028", "x" * 129, "\x00"])
def test_a_name_that_a_list_of_names_cannot_hold_is_refused(name: str) -> None:
    """Metrics list the names of those that run, with commas; logs have one line for each."""
    engine = Engine()
    error = engine.answers[engine.load(name)]
    assert error is not None
    assert error.startswith("an adapter's name has letters, digits and . _ : / @ + - only")
    assert "\n" not in error
    assert engine.loader.infos == ()
    with pytest.raises(ConfigError, match="lora_modules: an adapter's name has letters"):
        EngineConfig.check({"enable_lora": True, "lora_modules": [{"name": name, "path": "/x"}]})


@pytest.mark.parametrize("name", ["sql", "org/sql-lora.v2", "größe:1", "a@b+c", "x" * 128])
def test_other_names_are_taken(name: str) -> None:
    engine = Engine()
    question = engine.load(name)
    engine.drain()
    assert engine.answers[question] is None
    EngineConfig.check({"enable_lora": True, "lora_modules": [{"name": name, "path": "/x"}]})


def test_an_adapter_that_cannot_be_read_is_refused_with_its_requests() -> None:
    engine = Engine()
    engine.worker.unreadable |= {"/bad", "/missing"}
    engine.load("missing")
    question = engine.load("bad")
    engine.add("r", [1], "bad")
    engine.add("s", [1])
    engine.drain()
    assert engine.answers[question] == engine.ends["r"].error == "adapter 'bad' cannot be read"
    assert engine.ends["s"].reason == "length"
    assert engine.missing == ["missing"]
    assert engine.loader.infos == ()
    engine.load("good")
    engine.drain()
    engine.lose_workers()
    engine.worker.unreadable.add("/good")  # its folder has gone meanwhile
    engine.add("t", [1], "good")
    engine.drain()
    assert engine.ends["t"].error == "adapter 'good' cannot be read"
    engine.worker.unreadable.clear()
    engine.add("u", [1], "good")
    engine.drain()
    assert engine.ends["u"].reason == "length"


def test_an_adapter_replaces_another_one_with_its_name() -> None:
    engine = Engine()
    engine.load("a")
    engine.drain()
    first = engine.core.adapters.get("a")
    assert engine.answers[engine.load("a", "/elsewhere")].startswith("adapter 'a' is loaded from /a")  # type: ignore[union-attr]
    assert engine.answers[engine.load("a")] is None  # sent again
    engine.worker.unreadable.add("/worse")
    engine.load("a", "/worse", in_place=True)
    engine.drain()
    assert engine.core.adapters.get("a") is first
    engine.load("a", "/better", in_place=True)
    engine.add("r", [1], "a")  # with the one that is there
    engine.drain()
    engine.turn()
    assert engine.core.adapters.get("a") is not first
    assert [info.path for info in engine.loader.infos] == ["/better"]
    assert len(engine.worker.adapters) == len(engine.core.adapters.by_number) == 1


def test_new_workers_get_the_adapters_that_are_wanted() -> None:
    engine = Engine()
    engine.load("a")
    pending = engine.load("b")
    engine.add("r", [1, 2], "a", max_tokens=20)
    for _ in range(6):
        engine.turn()
    engine.add("s", [1], "b")
    engine.lose_workers()
    late = engine.load("c")
    engine.drain()
    assert engine.outputs["r"] == continuation([1, 2], 20)
    assert engine.outputs["s"] == continuation([1], 5)
    assert engine.answers[pending] is None
    assert engine.answers[late] is None


def test_an_adapter_that_was_being_read_when_workers_died_is_not_sent_again() -> None:
    """The files of an adapter may have killed the workers. If it were sent again, the next workers would die as well,
    and after the allowed restarts the engine."""
    engine = Engine()
    question = engine.load("deadly")
    engine.add("r", [1], "deadly")
    engine.add("s", [1])
    engine.loader.send(engine.worker)  # type: ignore[arg-type]
    engine.worker.adapters_read()  # the engine does not get the answer: the workers die first
    engine.lose_workers()
    engine.drain()
    assert engine.answers[question] == engine.ends["r"].error
    assert "'deadly' (/deadly) was being read when the workers were lost" in str(engine.ends["r"].error)
    assert engine.ends["s"].reason == "length"
    assert not engine.worker.adapters
    assert engine.loader.infos == ()


def test_load_and_unload_many_times() -> None:
    engine = Engine()
    for number in range(300):
        engine.load("a", f"/{number}")
        engine.drain()
        engine.unload("a")
        engine.turn()
    assert not engine.core.adapters.by_number
    assert not engine.worker.adapters
    assert not engine.core.adapters.wanted
    assert not engine.loader.asked


@pytest.mark.parametrize("seed", range(12))
def test_random_work_is_served_and_replayed(seed: int, tmp_path: Path) -> None:
    """Loads, unloads, deaths, aborts and preemptions; every token is right, and a replay decides the same."""
    rng = random.Random(seed)
    trace = tmp_path / "trace"
    limits = {"max_loras": rng.choice([1, 2, 3]), "max_cpu_loras": rng.choice([3, 4])}
    engine = Engine(rng.choice([12, 40]), record=str(trace), **limits)
    engine.core.kv.watermark = 0.0  # type: ignore[attr-defined]
    names, prompts = "abcde", {}
    for number in range(60):
        action, name = rng.random(), rng.choice(names)
        if action < 0.2:
            engine.load(name)
        elif action < 0.25 and engine.core.adapters.get(name) is not None:
            engine.unload(name)
        elif action < 0.28:
            engine.lose_workers()
        elif action < 0.32 and engine.core.scheduler.requests:
            engine.core.abort(rng.choice(list(engine.core.scheduler.requests)))
        else:
            adapter = name if engine.core.adapters.get(name) is not None and rng.random() < 0.8 else ""
            prompt = [*range(1, rng.randint(2, 9)), rng.randrange(VOCAB)]
            prompts[f"r{number}"] = prompt
            engine.add(f"r{number}", prompt, adapter, max_tokens=rng.randint(1, 9), n=rng.choice([1, 1, 1, 2]))
        for _ in range(rng.randint(0, 3)):
            engine.turn()
    engine.drain()
    engine.core.close()
    for name, end in engine.ends.items():
        if end.reason == "length":
            assert engine.outputs[name] == continuation(prompts[name], end.start + len(end.token_ids))
    replay = Replay(str(trace)).run()
    assert replay.divergence is None


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"lora_modules": ["a=/x"]}, "lora_modules needs enable_lora"),
        ({"enable_lora": True, "lora_modules": ["a"]}, "must be given as name=path or"),
        ({"enable_lora": True, "lora_modules": ["a=/x", "a=/y"]}, "the names of lora_modules must differ, got a, a"),
        (
            {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 2},
            "max_cpu_loras must be at least max_loras .3., got 2",
        ),
        ({"max_loras": 0}, "max_loras: must be at least 1, got 0"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        EngineConfig.check(settings)


def test_settings_of_adapters_are_read_from_flags_files_and_the_environment() -> None:
    for given in (
        "a=/x b=/y=z",
        ["a=/x", '{"name":"b","path":"/y=z"}'],
        '[{"name":"a","path":"/x"},{"name":"b","path":"/y=z"}]',
    ):
        config = EngineConfig.check({"enable_lora": True, "lora_modules": given})
        assert [(module.name, module.path) for module in config.lora_modules] == [("a", "/x"), ("b", "/y=z")]
