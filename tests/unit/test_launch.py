"""Starting an engine process: what is checked before, how a failed start is told, and that nothing is left behind."""

import json
import queue
import socket
import stat
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests import fake_engine_process
from tests.fakes import DEADLINE_S, welcome
from vllm_lite.client.engines import instances
from vllm_lite.client.engines.launch import LaunchedEngine, launch
from vllm_lite.client.streams.stream import Event, StreamFailure
from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.errors import ConfigError, EngineDeadError, EngineError, ModelError
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.params import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import launch_engine  # found only once scripts/ is on the path

pytestmark = pytest.mark.usefixtures("place")


def config(behaviour: str, **settings: object) -> EngineConfig:
    return EngineConfig.check({"served_model_name": behaviour, "ready_timeout_s": DEADLINE_S, **settings})


def folder_of(launched: LaunchedEngine) -> Path:
    return Path(launched.address.removeprefix("ipc://")).parent


def test_an_engine_lives_in_a_private_folder_until_it_is_closed(place: Path) -> None:
    launched = launch(config("serves"))
    try:
        assert launched.engine.model == "serves"
        assert launched.alive() is None
        assert launched.config.max_model_len == 2048
        folder = folder_of(launched)
        assert folder.parent == place
        assert folder.name.startswith("vl-")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        child = psutil.Process(launched.pid)
    finally:
        launched.close()
    assert not child.is_running()
    assert not folder.exists()
    launched.close()


def test_a_refusal_tells_the_root_cause() -> None:
    with pytest.raises(ModelError, match=f"^{fake_engine_process.REASON}$"):
        launch(config("refuses"))


def test_an_engine_that_ends_at_once() -> None:
    with pytest.raises(EngineError, match=r"^the engine did not start: exit status 3$"):
        launch(config("exits"))


def test_an_engine_that_never_gets_ready() -> None:
    with pytest.raises(EngineError, match=r"no engine answered at ipc://.* within 1 s"):
        launch(config("hangs", ready_timeout_s=1))


def test_a_model_that_ranks_cannot_share_is_refused_before_anything_starts() -> None:
    with pytest.raises(
        ConfigError, match=r"^tensor_parallel_size 5 does not fit this model, whose .* fit 1, 2, 4 or 8$"
    ):
        launch(config("hangs", tensor_parallel_size=5))


def test_a_start_can_be_stopped() -> None:
    began = time.monotonic()
    with pytest.raises(EngineError, match="stopped while it was starting"):
        launch(config("hangs", ready_timeout_s=100), lambda: time.monotonic() > began + 0.3)
    assert time.monotonic() - began < DEADLINE_S


def test_there_is_time_while_it_starts() -> None:
    """The fake never gets ready: what is called meanwhile is not called when it is."""

    def meanwhile(resolved: ResolvedConfig) -> None:
        assert resolved.max_model_len == 2048
        raise ModelError("no tokenizer")

    with pytest.raises(ModelError, match=r"^no tokenizer$"):
        launch(config("hangs"), meanwhile=meanwhile)


def test_a_killed_engine_ends_every_stream_with_its_reason() -> None:
    launched = launch(config("dies", max_restarts=0))
    try:
        events: queue.Queue[list[Event]] = queue.Queue()
        folder = folder_of(launched)
        launched.session.submit(Generate("r", b"\1\0\0\0", SamplingParams()), events.put)
        (failure,) = events.get(timeout=DEADLINE_S)
        assert isinstance(failure, StreamFailure)
        assert isinstance(failure.error, EngineDeadError)
        assert str(failure.error) == "the engine died: killed by SIGKILL"
        assert launched.wait(DEADLINE_S)
        assert launched.reason == "the engine died: killed by SIGKILL"
        assert not folder.exists()
    finally:
        launched.close()


def test_a_killed_engine_leaves_no_socket_at_an_address_of_ones_own(place: Path) -> None:
    launched = launch(config("serves", address=f"ipc://{place}/mine", max_restarts=0))
    try:
        psutil.Process(launched.pid).kill()
        assert launched.wait(DEADLINE_S)
        assert list(place.iterdir()) == []
    finally:
        launched.close()


def test_an_address_of_ones_own(place: Path) -> None:
    address = f"ipc://{place}/mine"
    launched = launch(config("serves", address=address))
    try:
        assert launched.address == address
        with pytest.raises(ConfigError, match="in use by another engine"):
            launch(config("serves", address=address))
    finally:
        launched.close()
    assert not (place / "mine").exists()


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        ({"model": "/no/such/model"}, ModelError, "/no/such/model"),
        (
            {"max_model_len": 10**6},
            ConfigError,
            "max_model_len must be at most the model's 2048 positions, got 1000000",
        ),
        ({"cpu_bind": "0|0", "device": "cpu"}, ConfigError, r"^cpu_bind must be auto, none, or one list of CPUs like "),
        ({"tensor_parallel_size": 3}, ConfigError, r"^tensor_parallel_size 3 does not fit this model, whose 8 heads "),
    ],
)
def test_bad_input_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], kind: type[Exception], text: str
) -> None:
    monkeypatch.setattr("vllm_lite.runtime.supervise.spawn", None)
    with pytest.raises(kind, match=text):
        launch(config("serves", **settings))


def test_a_taken_port_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_lite.runtime.supervise.spawn", None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"^cannot listen on {address}: Address already in use; choose another$"):
            launch(config("serves", tcp_address=address, insecure=True))


def test_missing_keys_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_lite.runtime.supervise.spawn", None)
    with pytest.raises(ConfigError, match=r"/no/keys/server\.key_secret is not a key file"):
        launch(config("serves", tcp_address="tcp://127.0.0.1:5555", curve_keys="/no/keys"))


def test_a_long_tmpdir_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = place / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match=r"at most 107 bytes, got 1\d\d: .*; set TMPDIR to a shorter folder"):
        launch(config("serves"))
    assert list(deep.iterdir()) == []
    deep.rmdir()


def test_a_file_system_that_cannot_be_written_is_reported(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    with pytest.raises(ConfigError, match=r"^no folder for the engine's sockets can be made: .*; set TMPDIR to"):
        launch(config("serves"))
    assert instances.find() == []


def test_the_launcher_prints_the_tokens_that_the_engine_holds() -> None:
    """With KV groups these are fewer than its blocks have places."""
    engine = welcome(num_blocks=32, block_size=4, kv_tokens=40)
    launched: Any = SimpleNamespace(address="ipc://x", config=EngineConfig(), pid=1, engine=engine)
    assert json.loads(launch_engine.ready_line(launched))["capacity_tokens"] == 40
