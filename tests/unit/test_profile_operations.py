"""Profiles as operations of the engine: the messages to workers, and the errors if profiling is impossible."""

from collections.abc import Iterator

import pytest

from tests.unit.test_engine_clients import Client
from tests.unit.test_operations import answers, do, num_tokens
from tests.unit.test_worker_groups import Host
from vllm_lite.config import EngineConfig
from vllm_lite.engine import operations
from vllm_lite.errors import ConfigError
from vllm_lite.protocol.control import Profiled
from vllm_lite.protocol.operations import Sleep, StartProfile, StopProfile

TORCH = {"profiler": "torch", "torch_profiler_dir": "traces"}


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    host = Host(request.node.name, profiler_config=TORCH)
    yield host
    host.close()


@pytest.fixture
def client(host: Host) -> Client:
    return host.client()


def test_workers_begin_and_end_while_steps_continue(host: Host, client: Client) -> None:
    host.generate(client, "a")
    host.loop(3)
    host.current.profile_answers = None
    client.say(StartProfile())
    before = num_tokens(client)
    host.loop(5)
    assert num_tokens(client) > before
    assert host.operations.is_on, "not all ranks have answered"
    host.current.profile_answers = [Profiled(0, 1)]
    host.loop()
    assert not host.operations.is_on
    do(host, client, StopProfile())
    assert host.current.profiles == ["BeginProfile", "EndProfile"]
    host.drain(client, "a")


def test_a_workers_refusal_is_the_answer(host: Host, client: Client) -> None:
    host.current.profile_answers = [
        Profiled(0, 1),
        Profiled(1, 1, "no profile is on"),
        Profiled(2, 1, "no profile is on"),
    ]
    do(host, client, StopProfile(), "no profile is on")


def test_workers_that_sleep_die_or_say_nothing(host: Host, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    host.current.profile_answers = None
    monkeypatch.setattr(operations, "PROFILE_TIMEOUT_S", -1.0)
    do(host, client, StartProfile(), "have not answered within")
    monkeypatch.undo()
    do(host, client, Sleep(2))
    do(host, client, StartProfile(), "the engine sleeps")


def test_workers_that_die_meanwhile_are_replaced_as_ever(host: Host, client: Client) -> None:
    host.current.profile_answers = None
    client.say(StartProfile())
    host.loop(2)
    host.current.die()
    host.loop()
    assert not host.operations.is_on
    assert "died" in str(answers(client)[-1].error)
    host.generate(client, "a")
    host.drain(client, "a")


def test_without_a_profiler_the_flag_is_named(request: pytest.FixtureRequest) -> None:
    for settings in ({}, {"profiler_config": {"max_iterations": 3}}):
        host = Host(f"{request.node.name}-{len(settings)}", **settings)
        do(host, host.client(), StartProfile(), "give --profiler-config")
        assert host.current.profiles == []
        host.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"profiler": "torch"}, "needs torch_profiler_dir"),
        ({"profiler": "torch", "torch_profiler_dir": "gs://bucket/a"}, "a folder of this machine"),
        ({"profiler": "tensorboard"}, "profiler"),
        ({"torch_profiler_folder": "a"}, "torch_profiler_folder"),
        ({"max_iterations": -1}, "max_iterations"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig.check({"profiler_config": given})
