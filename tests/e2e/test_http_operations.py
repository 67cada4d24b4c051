"""Pause, sleep and other weights over HTTP, in real processes: two API servers, an engine and two ranks, any of which
may die at any moment. No token of a stream is lost, and a replay of the trace makes the same decisions."""

import gzip
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.checkpoints import make_checkpoint
from tests.deadlines import scaled
from tests.e2e.reference import Reference
from tests.http_server import Server, client, serving, until
from tests.unit.test_time_slice import skip_without_slices, slice_of
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.trace.segments import segment_paths
from vllm_lite.transport.time_slice import SHORTEST_NS

PROMPT = [11, 12, 13, 14, 15]
NUM_TOKENS = 280
FEW = 60
"""Tokens where nothing happens beside a stream. A profile of all would have a million events."""
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
LONG |= {"return_token_ids": True, "stream": True}
DEADLINE_S = scaled(100.0)
_KILLED: list[int] = []
"""Engines that tests of this file have killed: those that run, as any of them may run alone."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one model, and others that cannot take their place."""
    root = tmp_path_factory.mktemp("weights")
    made = {name: make_checkpoint(root / name, seed=seed) for seed, name in enumerate(("first", "second"))}
    made["vocab_size"] = make_checkpoint(root / "vocabulary", vocab_size=400)
    made["layers"] = make_checkpoint(root / "layers", num_hidden_layers=3)
    made["architecture"] = make_checkpoint(root / "family", "qwen3")
    made["truncated"] = shutil.copytree(made["second"], root / "truncated")
    os.truncate(root / "truncated/model.safetensors", 60_000)
    made["no such folder"] = root / "nowhere"
    return made


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "trace"


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], trace: Path) -> Iterator[Server]:
    flags = ["--dtype", "float32", "-tp", "2", "--api-server-count", "2", "--record", str(trace)]
    flags += ["--admin-api-key", "admin", "--attention-backend", "reference", "--enforce-eager"]
    flags += [
        "--profiler-config",
        json.dumps({"profiler": "torch", "torch_profiler_dir": str(trace.parent / "profiles")}),
    ]
    with serving(str(folders["first"]), *flags, "--served-model-name", "tiny") as server:
        yield server
    divergences = [Replay(path).run().divergence for path in segment_paths(str(trace))]
    assert divergences == [None] * len(divergences)
    assert len(divergences) > len(_KILLED), "each engine begins another segment"


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with client(server, headers={"Authorization": "Bearer admin"}) as http:
        http.timeout = httpx.Timeout(DEADLINE_S)
        yield http


class Stream:
    """A stream that a separate thread reads."""

    def __init__(self, server: Server, num_tokens: int = NUM_TOKENS) -> None:
        self.tokens: list[int] = []
        self.reason: str | None = None
        self._url = server.url + "/v1/completions"
        self._body = LONG | {"max_tokens": num_tokens}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=DEADLINE_S) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    self.tokens += choice["token_ids"] or []
                    self.reason = choice["finish_reason"]

    def reach(self, num_tokens: int) -> None:
        until(lambda: len(self.tokens) >= num_tokens, f"{num_tokens} tokens")

    def all(self) -> list[int]:
        self._thread.join(DEADLINE_S)
        assert self.reason == "length"
        return self.tokens


@pytest.fixture(scope="module")
def expected(server: Server) -> list[int]:
    """Tokens with the first weights; at least the first ones equal transformers'."""
    return Stream(server).all()


def done(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def family(server: Server, module: str) -> list[psutil.Process]:
    """The processes below the server that run a module."""
    found = []
    for each in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended just now
            if module in " ".join(each.cmdline()):
                found.append(each)
    return found


def test_api_servers_have_short_time_slices(server: Server) -> None:
    skip_without_slices()
    pids = [server.process.pid, *(each.pid for each in family(server, "http_server"))]
    assert len(pids) == 2
    until(lambda: {slice_of(Path(f"/proc/{pid}")) for pid in pids} == {SHORTEST_NS}, "short slices")


def kill_engine(server: Server) -> None:
    for each in family(server, "engine.process"):
        each.send_signal(signal.SIGKILL)
        _KILLED.append(each.pid)


def same_as(folder: Path, tokens: list[int]) -> bool:
    return Reference(folder).generate(PROMPT).tokens == tokens[:32]


def test_a_stream_continues_behind_pause_sleep_and_killed_processes(
    server: Server, http: httpx.Client, folders: dict[str, Path], expected: list[int]
) -> None:
    assert same_as(folders["first"], expected)
    stream = Stream(server)
    stream.reach(30)
    assert done(http.post("/pause", params={"mode": "keep"})) == {"status": "paused"}
    kept = len(stream.tokens)
    for _ in range(20):  # whichever of the two servers answers
        assert done(httpx.get(server.url + "/is_paused", headers=http.headers)) == {"is_paused": True}
    assert "paused" in http.get("/health").json()["error"]["message"]
    assert http.get("/health/live").status_code == 200
    assert done(http.get("/get_world_size")) == {"world_size": 2}
    assert len(stream.tokens) <= kept + 8, "what was in flight, or not read yet"
    done(http.post("/resume"))
    stream.reach(kept + 20)
    assert done(http.post("/sleep", params={"level": 2, "mode": "keep"})) == {"status": "sleeping", "level": 2}
    assert not family(server, "worker.process")
    kill_engine(server)
    until(lambda: http.get("/is_sleeping").status_code == 200, "another engine")
    assert done(http.get("/is_sleeping")) == {"is_sleeping": True}
    assert not family(server, "worker.process"), "it takes no memory either"
    late = Stream(server, FEW)
    assert done(http.post("/wake_up"))["status"] == "awake"
    assert stream.all() == expected
    assert late.all() == expected[:FEW]
    assert http.get("/health").status_code == 200


def test_processes_die_while_the_engine_sleeps_lightly_and_wakes(
    server: Server, http: httpx.Client, expected: list[int]
) -> None:
    stream = Stream(server)
    stream.reach(30)
    done(http.post("/sleep", params={"level": 1, "mode": "keep"}))
    until(lambda: bool(family(server, "worker.process")), "a worker that waits for the wake")
    (first, *_) = family(server, "worker.process")
    first.send_signal(signal.SIGKILL)
    assert done(http.post("/wake_up", params={"tags": ["weights"]}))["status"] == "sleeping"
    with ThreadPoolExecutor() as threads:
        woken = threads.submit(http.post, "/wake_up", params={"tags": ["kv_cache"]})
        until(lambda: len(family(server, "worker.process")) >= 2, "workers")
        family(server, "worker.process")[0].send_signal(signal.SIGKILL)
        assert done(woken.result(DEADLINE_S))["status"] == "awake"
    assert stream.all() == expected


@pytest.mark.parametrize("name", ["vocab_size", "layers", "architecture", "truncated", "no such folder"])
def test_a_folder_that_cannot_be_served_is_refused_in_a_sentence(
    server: Server, http: httpx.Client, folders: dict[str, Path], name: str
) -> None:
    del server
    answer = http.post("/update_weights", json={"model": str(folders[name])})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert name in error["message"]
    assert str(folders[name]) in error["message"]
    assert (error["param"], "\n" in error["message"]) == ("model", False)
    assert http.get("/health").status_code == 200


def test_other_weights_are_served_without_a_restart_also_by_the_next_engine(
    server: Server, http: httpx.Client, folders: dict[str, Path], expected: list[int]
) -> None:
    stream = Stream(server)
    stream.reach(30)
    update = {"model": str(folders["second"])}
    done(http.post("/update_weights", json=update))
    assert stream.all() == expected, "it ended by the weights with which it began"
    other = Stream(server, FEW).all()
    assert other != expected[:FEW]
    assert same_as(folders["second"], other)
    kill_engine(server)
    assert Stream(server, FEW).all() == other
    kept = Stream(server)
    kept.reach(30)
    loaded = family(server, "worker.process")
    with ThreadPoolExecutor() as threads:
        back = {"model": str(folders["first"]), "mode": "keep"}
        updated = threads.submit(http.post, "/update_weights", json=back)
        until(lambda: any(each not in loaded for each in family(server, "worker.process")), "other workers")
        family(server, "worker.process")[-1].send_signal(signal.SIGKILL)
        done(updated.result(DEADLINE_S))
    tokens = kept.all()
    assert tokens[:30] == other[:30], "what was delivered stays"
    assert len(tokens) == NUM_TOKENS
    assert Stream(server, FEW).all() == expected[:FEW]


def test_profiles_of_both_ranks_are_written(
    server: Server, http: httpx.Client, trace: Path, expected: list[int]
) -> None:
    assert http.post("/stop_profile").status_code == 400
    assert done(http.post("/start_profile")) == {"status": "profiling"}
    assert "on already" in http.post("/start_profile").json()["error"]["message"]
    assert Stream(server, FEW).all() == expected[:FEW]
    assert done(http.post("/stop_profile")) == {"status": "written"}
    folder = trace.parent / "profiles"
    for rank in range(2):
        (path,) = folder.glob(f"rank{rank}.*.pt.trace.json.gz")
        with gzip.open(path) as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        assert names.count("model") > FEW // 2
        assert (folder / f"profiler_out_{rank}.txt").exists()
    assert Stream(server, FEW).all() == expected[:FEW]


def test_users_may_not(server: Server) -> None:
    for path in ("/pause", "/resume", "/sleep", "/wake_up", "/update_weights", "/start_profile", "/stop_profile"):
        assert httpx.post(server.url + path, json={}).status_code == 401
    for path in ("/is_sleeping", "/get_world_size"):
        assert httpx.get(server.url + path).status_code == 401
