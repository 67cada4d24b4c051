"""Pause, sleep and new weights: steps during these, the fate of requests, and the state that the next engine gets.

The engine's loop is stepped by hand, and the workers are fakes.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import vllm_lite
from tests.deadlines import scaled
from tests.unit.test_core import continuation
from tests.unit.test_engine_clients import Client
from tests.unit.test_worker_groups import NUM_BLOCKS, PARAMS, PROMPT, READY, FakeGroup, Host
from vllm_lite.engine.kept_state import KeptState, keep, kept
from vllm_lite.engine.operations import REATTACH_S, REST_S, Operations
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.protocol.api import Abort, Describe, Descriptions, Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.operations import (
    Operation,
    OperationDone,
    PauseGeneration,
    PauseMode,
    ResumeGeneration,
    Sleep,
    UpdateWeights,
    WakeUp,
)

DONE = OperationDone()
DEMO = Path(vllm_lite.__file__).parent / "demo_model"


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    host = Host(request.node.name)
    yield host
    host.close()


@pytest.fixture
def client(host: Host) -> Client:
    return host.client()


def answers(client: Client) -> list[OperationDone]:
    return [message for message in client.other if isinstance(message, OperationDone)]


def do(host: Host, client: Client, message: Operation, error: str | None = None) -> None:
    """Ask for an operation, and see it done, or refused with words of `error`."""
    count = len(answers(client))
    client.say(message)
    deadline_s = time.monotonic() + scaled(60.0)
    while len(answers(client)) == count:  # a thread may have to read files
        assert time.monotonic() < deadline_s
        host.loop()
    done = answers(client)[-1]
    if error is None:
        assert done == DONE
    else:
        assert error in (done.error or "")
    assert len(answers(client)) == count + 1
    assert not host.operations.is_on


def num_tokens(client: Client, name: str = "a") -> int:
    return len(client.got.get((name, 0), []))


def why(host: Host, client: Client, name: str) -> str | None:
    client.say(Describe((name,)))
    host.loop()
    found = client.other[-1]
    assert isinstance(found, Descriptions)
    return found.requests[0].admission.reason


# ---- pause


def test_a_paused_engine_computes_nothing_and_continues_afterwards(host: Host, client: Client) -> None:
    host.generate(client, "a")
    host.loop(5)
    do(host, client, PauseGeneration("keep"))
    before, steps = num_tokens(client), host.core.scheduler.step
    assert 0 < before < 20
    host.generate(client, "late")
    host.loop(5)
    assert (num_tokens(client), num_tokens(client, "late"), host.core.scheduler.step) == (before, 0, steps)
    assert why(host, client, "late") == "waits_for_resume"
    stats = host.stats(client)
    assert (stats.is_paused, stats.rests, stats.num_deferred) == (True, True, stats.num_waiting)
    do(host, client, ResumeGeneration())
    assert host.stats(client).num_deferred == 0
    host.drain(client, "a", "late")
    assert not host.stats(client).rests


def test_a_paused_engine_ends_requests_that_are_late_or_aborted(host: Host, client: Client) -> None:
    do(host, client, PauseGeneration())
    late = msgspec.structs.replace(PARAMS, deadline_ms=1)
    client.say(Generate("late", pack_tokens(PROMPT), late))
    host.generate(client, "aborted")
    client.say(Abort("aborted"))
    host.loop()
    while len(client.ends) < 2:
        host.loop()
    assert {end.request_id: end.reason for end in client.ends} == {"aborted": "abort", "late": "error"}


def test_an_abort_ends_all_that_are_there(host: Host, client: Client) -> None:
    host.generate(client, "a", "b")
    host.loop(4)
    do(host, client, PauseGeneration("abort"))
    assert [end.reason for end in client.ends] == ["abort", "abort"]
    assert not host.core.scheduler.kv.pool.num_cached, "and the cache is empty"


def test_wait_mode_finishes_running_requests_and_holds_new_ones(host: Host, client: Client) -> None:
    host.generate(client, "a")
    host.loop(3)
    client.say(PauseGeneration("wait", clear_cache=False))
    host.loop()
    host.generate(client, "late")
    host.loop(3)
    assert why(host, client, "late") == "waits_for_resume"
    assert not answers(client)
    for _ in range(40):
        host.loop()
    assert [end.request_id for end in client.ends] == ["a"]
    assert client.got["a", 0] == continuation(PROMPT, 20)
    assert (answers(client), num_tokens(client, "late")) == ([DONE], 0)
    assert host.core.scheduler.kv.pool.num_cached, "that was asked for"
    client.ends.clear()
    do(host, client, ResumeGeneration())
    host.drain(client, "late")


def test_a_resume_calls_a_wait_off(host: Host, client: Client) -> None:
    host.generate(client, "a")
    host.loop(3)
    for message in (PauseGeneration("wait"), ResumeGeneration()):
        client.say(message)
        host.loop(2)
    first, second = answers(client)
    assert "called off" in (first.error or "")
    assert second == DONE
    host.generate(client, "b")
    host.drain(client, "a", "b")


def test_an_abort_cuts_a_wait_short(host: Host, client: Client) -> None:
    host.generate(client, "a")
    host.loop(3)
    client.say(PauseGeneration("wait"))
    host.loop(2)
    host.generate(client, "late")
    host.loop()
    client.say(Sleep(2, "abort"))
    host.loop(6)
    assert answers(client) == [DONE, DONE]
    assert {end.request_id for end in client.ends} == {"a", "late"}


# ---- sleep


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_ends_the_workers_and_loses_no_token(
    host: Host, client: Client, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.generate(client, "a")
    host.loop(5)
    do(host, client, Sleep(level, "keep"))
    assert host.made[0].is_ending
    assert len(host.made) == 1, "who put it to sleep needs the cores first"
    assert host.operations.looks_soon is (level == 1)
    later_s = time.monotonic() + REST_S
    monkeypatch.setattr(host.operations, "_clock", lambda: later_s)
    host.loop()
    assert [group.phase for group in host.made[1:]] == (["spawned"] if level == 1 else [])
    assert not host.operations.looks_soon
    host.generate(client, "late")
    host.loop(5)
    assert num_tokens(client, "late") == 0
    assert host.stats(client).sleep_level == level
    do(host, client, WakeUp(("kv_cache",)))
    assert host.stats(client).sleep_level == level, "weights are still missing"
    do(host, client, WakeUp(("weights",)))
    assert host.current is host.made[1]
    assert host.stats(client).sleep_level is None
    host.drain(client, "a", "late")


def test_a_wake_directly_after_sleep_starts_workers_itself(host: Host, client: Client) -> None:
    do(host, client, Sleep(1))
    do(host, client, WakeUp())
    assert host.current is host.made[1]
    assert not host.operations.looks_soon
    do(host, client, Sleep(1))
    do(host, client, Sleep(2))
    assert not host.operations.looks_soon, "no worker is to wait any more"


def test_a_sleep_of_level_0_is_a_pause_that_a_wake_up_ends(host: Host, client: Client) -> None:
    do(host, client, Sleep(0))
    host.generate(client, "a")
    host.loop(3)
    assert num_tokens(client) == 0
    assert len(host.made) == 1
    do(host, client, WakeUp(("scheduling",)))
    host.drain(client, "a")


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_lite.engine.operations.REST_S", 0.0)


@pytest.mark.usefixtures("no_rest")
def test_a_deeper_sleep_keeps_no_process(host: Host, client: Client) -> None:
    do(host, client, Sleep(1))
    host.loop()
    do(host, client, Sleep(2))
    assert [group.is_closed for group in host.made[1:]] == [True]
    do(host, client, WakeUp())
    host.generate(client, "a")
    host.drain(client, "a")


@pytest.mark.usefixtures("no_rest")
def test_a_process_that_dies_while_all_sleep_is_replaced(host: Host, client: Client) -> None:
    do(host, client, Sleep(1))
    host.loop()
    host.made[1].die()
    host.loop(3)
    assert not host.recovery.is_on
    do(host, client, WakeUp())
    assert host.current is host.made[2]
    host.generate(client, "a")
    host.drain(client, "a")


def test_workers_that_die_while_they_wake_are_started_again(host: Host, client: Client) -> None:
    host.generate(client, "a")
    host.loop(4)
    do(host, client, Sleep(2, "keep"))
    host.dies_when = {2: "loads", 3: "allocates"}
    do(host, client, WakeUp())
    assert host.current is host.made[3]
    host.drain(client, "a")


def test_an_engine_that_cannot_wake_sleeps_on(host: Host, client: Client) -> None:
    host.generate(client, "a")
    host.loop(4)
    do(host, client, Sleep(2, "keep"))
    host.ready = msgspec.structs.replace(READY, num_blocks=5)
    do(host, client, WakeUp(), "there is room for 5 KV blocks now")
    assert host.stats(client).sleep_level == 2
    host.ready = READY
    do(host, client, WakeUp())
    host.drain(client, "a")


def test_workers_may_die_while_the_engine_is_paused(host: Host, client: Client) -> None:
    host.generate(client, "a")
    host.loop(5)
    do(host, client, PauseGeneration("keep"))
    before = num_tokens(client)
    host.current.die()
    host.loop(8)
    assert not host.recovery.is_on
    assert num_tokens(client) == before
    do(host, client, ResumeGeneration())
    host.drain(client, "a")


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_workers_may_die_on_the_way_to_sleep(host: Host, client: Client, mode: PauseMode) -> None:
    host.generate(client, "a")
    host.loop(5)
    client.say(Sleep(2, mode))
    host.current.die()
    for _ in range(60):
        host.loop()
    assert answers(client) == [DONE]
    assert host.stats(client).sleep_level == 2
    do(host, client, WakeUp())
    if mode == "abort":
        assert [end.reason for end in client.ends] == ["abort"]
    else:
        host.drain(client, "a")


# ---- other weights


@pytest.fixture
def folders(host: Host, tmp_path: Path) -> tuple[Path, Path]:
    """The folder that is served, and one with other weights."""
    served, other = tmp_path / "served", tmp_path / "other"
    for folder in (served, other):
        shutil.copytree(DEMO, folder)
    host.groups.model = host.core.meter.counters.model = str(served)
    return served, other


def model_of(group: FakeGroup) -> str | None:
    return Path(group.model).name if group.model else None


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_other_weights_are_loaded_by_other_workers(
    host: Host, client: Client, folders: tuple[Path, Path], mode: PauseMode
) -> None:
    host.generate(client, "a")
    host.loop(5)
    before = num_tokens(client)
    host.imports = False
    client.say(UpdateWeights(str(folders[1]), mode))
    while num_tokens(client) < before + 3:
        host.loop()
    assert not host.made[0].is_ending, "the old workers serve while the new ones start"
    host.imports = True
    while not answers(client):
        host.loop()
    assert answers(client) == [DONE]
    assert model_of(host.current) == "other"
    assert host.stats(client).model == str(folders[1])
    host.drain(client, "a")
    host.current.die()  # the next group loads the same
    client.ends.clear()
    host.generate(client, "b")
    host.drain(client, "b")
    assert model_of(host.current) == "other"


def test_a_folder_that_is_not_the_same_model_is_refused_and_disturbs_nothing(
    host: Host, client: Client, folders: tuple[Path, Path]
) -> None:
    host.generate(client, "a")
    host.loop(3)
    do(host, client, UpdateWeights("nowhere", "abort"), "nowhere: no such folder")
    (folders[1] / "model.safetensors").write_bytes(b"")
    do(host, client, UpdateWeights(str(folders[1]), "abort"), "model.safetensors")
    assert len(host.made) == 1
    host.drain(client, "a")


@pytest.mark.parametrize("error", [ModelError, ConfigError])
def test_after_a_failed_reload_the_former_weights_are_served(
    host: Host, client: Client, folders: tuple[Path, Path], error: type[ModelError | ConfigError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    host.generate(client, "a")
    host.loop(5)
    begin_load = FakeGroup.begin_load

    def fail(group: FakeGroup, timeout_s: float, model: str | None = None) -> None:
        begin_load(group, timeout_s, model)
        if model_of(group) == "other":
            group.die("tensor x is NaN", "failed", error)

    monkeypatch.setattr(FakeGroup, "begin_load", fail)
    do(host, client, UpdateWeights(str(folders[1]), "keep"), "tensor x is NaN")
    assert answers(client)[-1].bad_input
    assert (model_of(host.current), host.stats(client).model) == ("served", str(folders[0]))
    host.drain(client, "a")
    monkeypatch.setattr(FakeGroup, "begin_load", lambda group, *_: group.die("no file", "failed", error))
    do(host, client, UpdateWeights(str(folders[1])), "the engine sleeps, until /wake_up or other weights")
    assert host.stats(client).sleep_level == 2
    monkeypatch.setattr(FakeGroup, "begin_load", begin_load)
    do(host, client, UpdateWeights(str(folders[1])))
    do(host, client, WakeUp())
    assert model_of(host.current) == "other"


def test_weights_set_during_sleep_are_loaded_at_the_wake_up(
    host: Host, client: Client, folders: tuple[Path, Path]
) -> None:
    do(host, client, Sleep(1))
    do(host, client, WakeUp(("weights",)))
    shutil.rmtree(folders[0])  # the folder is not needed any more
    do(host, client, UpdateWeights(str(folders[1])))
    assert model_of(host.current) is None
    do(host, client, WakeUp(("kv_cache",)))
    assert model_of(host.current) == "other"


# ---- the next engine


def test_a_kept_state_that_cannot_be_read_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An engine that was asleep is awake then, and takes memory that others may have by now."""
    keep(str(tmp_path), KeptState("m"))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert kept(str(tmp_path)) is None
    assert f"the one before was asked for: {file} cannot be read" in caplog.text


def test_the_next_engine_is_as_this_one_was(host: Host, client: Client, tmp_path: Path) -> None:
    assert kept(str(tmp_path)) is None
    do(host, client, PauseGeneration())
    assert host.kept[-1] == KeptState("m", is_paused=True)
    do(host, client, Sleep(1))
    asleep = KeptState("m", True, 1, READY, NUM_BLOCKS, 0)
    assert host.kept[-1] == asleep
    keep(str(tmp_path), asleep)
    assert kept(str(tmp_path)) == asleep
    following = Host("the-next")
    try:
        following.groups.adopt(READY, NUM_BLOCKS, 0)
        following.current.end()
        take_over(following, asleep)
        other = following.client()
        following.generate(other, "a")
        following.loop(3)
        assert (num_tokens(other), following.stats(other).sleep_level) == (0, 1)
        do(following, other, WakeUp())
        following.drain(other, "a")
        assert following.kept[-1] == KeptState("m")
    finally:
        following.close()


def take_over(host: Host, state: KeptState) -> None:
    """Act as the next engine, which starts from `state`."""
    config, clock = host.process._config, lambda: host.now_s
    host.operations = Operations(host.core, host.groups, host.port, config, host.kept.append, clock)
    host.operations.restore(state)


@pytest.mark.parametrize("message", [PauseGeneration("wait"), Sleep(2, "wait")])
def test_an_engine_that_dies_while_draining_comes_back_paused(
    host: Host, client: Client, message: PauseGeneration | Sleep
) -> None:
    host.generate(client, "a")
    host.loop(3)
    client.say(message)
    host.loop(3)
    dying = host.kept[-1]
    assert dying == KeptState("m", asked=message)
    following = Host("after-the-drain")
    try:
        take_over(following, dying)
        assert following.kept[-1] == dying, "it may die as well"
        other = following.client()
        following.loop(3)
        assert not following.stats(other).rests, "its clients have to find it first"
        following.generate(other, "a", "b")
        following.loop(3)
        following.now_s += REATTACH_S
        following.loop(2)
        following.generate(other, "late")
        for _ in range(100):
            following.loop()
            if len(other.ends) == 2:
                break
        following.loop(3)
        stats = following.stats(other)
        assert (stats.rests, num_tokens(other, "late")) == (True, 0)
        assert following.kept[-1].asked is None
        do(following, other, ResumeGeneration() if isinstance(message, PauseGeneration) else WakeUp())
        following.drain(other, "a", "b", "late")
    finally:
        following.close()


def test_a_drain_that_was_taken_over_can_be_called_off(host: Host, client: Client) -> None:
    take_over(host, KeptState("m", asked=PauseGeneration("wait")))
    host.loop(2)
    do(host, client, ResumeGeneration())
    host.generate(client, "a")
    host.drain(client, "a")
    assert host.kept[-1] == KeptState("m")
