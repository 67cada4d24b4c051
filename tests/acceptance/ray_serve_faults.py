"""Checks of replicas on Ray Serve that hang, die, start later, or are started by commands; see ray_serve_check.py."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from tests.acceptance.ray_check import cluster  # isort: skip - it sets variables that ray reads at its import

import psutil
from safetensors.torch import load_file, save_file

from tests.acceptance.named_checks import check
from tests.acceptance.ray_serve_rig import (
    LENGTH,
    LOOK_S,
    NUM_STREAMS,
    PATIENCE_S,
    Stream,
    all_run,
    free_port,
    replicas,
    serving,
    texts,
    until,
)
from vllm_lite.checkpoint.tensors.lora import WEIGHTS_FILE
from vllm_lite.tools.bench.models import write_adapters
from vllm_lite.tools.bench.serve_http import HttpClient, HttpError

ORPHANS_S = 45.0


def check_kill() -> None:
    with serving(replicas=2, num_gpu_blocks_override=1024, max_num_seqs=16) as (url, nodes):
        asyncio.run(_kill(HttpClient(url, {}), nodes))


async def _kill(client: HttpClient, nodes: Sequence[Any]) -> None:
    await until(client, 2)
    expected, took_s, longest_s = await texts(client)
    print(f"{NUM_STREAMS} streams of {LENGTH} tokens: {took_s:.1f} s, longest pause {longest_s:.2f} s", flush=True)

    async def replica_dies(streams: list[Stream]) -> None:
        await all_run(streams)
        found = replicas()
        print(f"kill -9 of the replica {found[0].pid}, of {len(found)}", flush=True)
        found[0].kill()

    found, took_s, longest_s = await texts(client, replica_dies)
    check(found == expected, f"0 streams lost, the same texts, in {took_s:.1f} s; longest pause {longest_s:.2f} s")
    print(f"two replicas answer again {await until(client, 2):.1f} s later", flush=True)

    longest_s = await _raylet_dies(client, nodes, expected)
    print(f"the longest pause of a stream while a node died: {longest_s:.2f} s", flush=True)


async def _raylet_dies(client: HttpClient, nodes: Sequence[Any], expected: list[str]) -> float:
    """Kill a raylet alone, and run streams until its child processes have ended. Returns the longest pause of a stream.
    It is not the raylet of the HTTP replica, whose connections would end with it."""
    raylets = [psutil.Process(info.process.pid) for node in nodes for info in node.all_processes["raylet"]]
    trees = {raylet: raylet.children(recursive=True) for raylet in raylets}
    commands = {process: " ".join(process.cmdline())[:60] for below in trees.values() for process in below}
    raylet = next(each for each in raylets if not any("HttpReplica" in commands[process] for process in trees[each]))
    below, names = trees[raylet], {process.pid: command for process, command in commands.items()}
    print(f"kill -9 of the raylet {raylet.pid} alone", flush=True)
    began_s = time.monotonic()
    raylet.kill()

    def ended(process: psutil.Process) -> None:
        print(f"{time.monotonic() - began_s:.1f} s later ended: {names[process.pid]}", flush=True)

    ends = asyncio.ensure_future(asyncio.to_thread(psutil.wait_procs, below, ORPHANS_S, ended))
    longest_s = [0.0]
    while not ends.done():
        found, _, of_round_s = await texts(client)
        longest_s.append(of_round_s)
        if found != expected:
            check(condition=False, what="the texts are the same")
    check(condition=True, what=f"{len(longest_s) - 1} times {NUM_STREAMS} streams, 0 lost, the same texts")
    print("still there:", [names[process.pid] for process in ends.result()[1]], flush=True)
    return max(longest_s)


def check_hang(what: str) -> None:
    with serving(replicas=2, num_gpu_blocks_override=1024, max_num_seqs=16) as (url, _):
        asyncio.run(_hang(HttpClient(url, {}), what))


def family(replica: psutil.Process) -> dict[str, psutil.Process]:
    """Role -> process of a replica."""
    found = {"replica": replica}
    for child in replica.children(recursive=True):
        with suppress(psutil.Error):
            name = re.search(r"vllm_lite\.(engine|worker)", " ".join(child.cmdline()))
            if name is not None:
                found[name[1]] = child
    return found


async def _hang(client: HttpClient, what: str) -> None:
    await until(client, 2)
    expected, _, _ = await texts(client)
    before = family(replicas()[0])
    stopped = list(before.values()) if what == "replica" else [before[what]]
    others_s: list[float] = []
    health: set[str] = set()
    streams_run = True

    async def hangs(streams: list[Stream]) -> None:
        await all_run(streams)
        print(f"SIGSTOP of {[process.pid for process in stopped]}, {what} of {sorted(before)}", flush=True)
        for process in stopped:
            process.suspend()

    async def ask_others() -> None:
        """Send new requests all the time, and query the health of the application."""
        number = 100
        while streams_run:
            began_s = time.perf_counter()
            number += 1
            await Stream(number, 8).run(client)
            others_s.append(time.perf_counter() - began_s)
            try:
                await client.get("/health")
                health.add("200")
            except HttpError as error:
                health.add(str(error)[:80])
            await asyncio.sleep(LOOK_S)

    async def all_of_it() -> tuple[list[str], float, float]:
        nonlocal streams_run
        try:
            return await texts(client, hangs)
        finally:
            streams_run = False

    try:
        (found, took_s, longest_s), _ = await asyncio.gather(all_of_it(), ask_others())
        check(found == expected, f"0 streams lost, the same texts, in {took_s:.1f} s; longest pause {longest_s:.1f} s")
        slow = sum(each > 2 for each in others_s)
        print(f"{len(others_s)} requests meanwhile: longest {max(others_s):.1f} s, {slow} above 2 s; /health {health}")
        gone = psutil.wait_procs(stopped, PATIENCE_S)[0]
        check(len(gone) == len(stopped), "what hung has been ended")
        waited_s = await until(client, 2)
        same = before["replica"].is_running()
        print(f"two replicas answer {waited_s:.1f} s later; it is {'the same replica' if same else 'another one'}")
    finally:
        for process in stopped:
            with suppress(psutil.Error):
                process.resume()


def check_http() -> None:
    with serving(replicas=2, num_gpu_blocks_override=1024, max_num_seqs=16, api_server_count=2) as (url, _):
        asyncio.run(_http(HttpClient(url, {})))


async def _http(client: HttpClient) -> None:
    await until(client, 2)
    expected, _, _ = await texts(client)
    streams = [Stream(number) for number in range(NUM_STREAMS)]
    running = [asyncio.ensure_future(stream.run(client)) for stream in streams]
    await all_run(streams)
    of_http = replicas("HttpReplica")
    check(len(of_http) == 2, "there are two HTTP replicas")
    of_http[0].kill()
    ends = await asyncio.gather(*running, return_exceptions=True)
    whole = [number for number, stream in enumerate(streams) if stream.finished == "length"]
    broken = [number for number, end in enumerate(ends) if isinstance(end, BaseException)]
    print(f"kill -9 of one: streams {broken} broke, {whole} ended", flush=True)
    check(all(streams[number].text == expected[number] for number in whole), "what went on has the same texts")
    check(len(whole) > 0, "the streams of the other went on")
    began_s = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        while len(replicas("HttpReplica")) < 2:  # noqa: ASYNC110 - processes are looked for
            await asyncio.sleep(LOOK_S)
    for _ in range(3):
        found, _, _ = await texts(client)
        check(found == expected, "all are served again, with the same texts")
    print(f"two HTTP replicas again after {time.monotonic() - began_s:.1f} s", flush=True)


LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def check_late() -> None:
    settings = {"num_gpu_blocks_override": 256, "max_num_seqs": 16, **LORA}
    with tempfile.TemporaryDirectory() as folder, serving(replicas=2, **settings) as (url, _):
        (adapter,) = write_adapters(str(files("vllm_lite") / "demo_model"), Path(folder), 1, rank=8)
        weights = load_file(adapter / WEIGHTS_FILE)
        save_file({name: 15 * weight for name, weight in weights.items()}, adapter / WEIGHTS_FILE)  # it is to be heard
        asyncio.run(_late(HttpClient(url, {}), str(adapter)))


async def _late(client: HttpClient, adapter: str) -> None:
    await until(client, 2)
    await _admin(client, "/v1/load_lora_adapter", {"lora_name": "late", "lora_path": adapter})
    expected = await _texts_of(client, "late")
    check(expected != await _texts_of(client, "demo_model"), "the adapter says something else than its base model")
    print(f"kill -9 of a replica; two again after {await _another(client):.1f} s", flush=True)
    check(await _texts_of(client, "late") == expected, "the replica that came has the adapter: the same texts")
    await _admin(client, "/sleep", {})
    print(f"asleep, kill -9 of a replica; two again after {await _another(client):.1f} s", flush=True)
    asleep = r'^vllm:engine_sleep_state\{.*sleep_state="weights_offloaded".* 1\.0$'
    count = len(re.findall(asleep, (await client.get("/metrics")).decode(), re.MULTILINE))
    check(count == 2, "both sleep")
    await _admin(client, "/wake_up", {})
    check(await _texts_of(client, "late") == expected, "awake again, the same texts")


async def _another(client: HttpClient) -> float:
    """Kill a replica, and wait until another one replaces it. Returns the seconds."""
    found = replicas()
    found[0].kill()
    began_s = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        while len(replicas()) < 2 or found[0] in replicas():  # noqa: ASYNC110 - processes are looked for
            await asyncio.sleep(LOOK_S)
    await until(client, 2)
    return time.monotonic() - began_s


async def _admin(client: HttpClient, path: str, body: dict[str, Any]) -> None:
    await client.post(path, json.dumps(body).encode())


async def _texts_of(client: HttpClient, model: str) -> list[str]:
    """Short texts from both replicas; all prompts are new to the router."""
    body = {"model": model, "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    asked = (client.post("/v1/completions", json.dumps({**body, "prompt": f"{n} bears"}).encode()) for n in range(16))
    return [json.loads(answer)["choices"][0]["text"] for answer in await asyncio.gather(*asked)]


APPLICATION = {"model": "demo", "dtype": "float32", "cpu_threads": 1, "num_gpu_blocks_override": 256, "replicas": 2}


def check_command() -> None:
    """Start replicas with Serve's own commands, by import path and by file, and with this package's command."""
    serve = str(Path(sys.executable).with_name("serve"))
    with cluster(2), tempfile.TemporaryDirectory() as folder:
        port = free_port()
        places = ["--http-host", "127.0.0.1", "--http-port", str(port), "--proxy-location", "HeadOnly"]
        subprocess.run([serve, "start", *places], check=True, timeout=PATIENCE_S)
        words = [f"{name}={value}" for name, value in APPLICATION.items()]
        _command([serve, "run", "vllm_lite.ray:build_app", *words], port, signal.SIGINT)
        file = Path(folder, "application.yaml")
        made = {"name": "llm", "route_prefix": "/", "import_path": "vllm_lite.ray:build_app", "args": APPLICATION}
        http = {"host": "127.0.0.1", "port": port}
        file.write_text(json.dumps({"proxy_location": "HeadOnly", "http_options": http, "applications": [made]}))
        _command([serve, "run", str(file)], port, signal.SIGINT)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in APPLICATION.items() if name != "model"]
        flags += [f"--port={port}", "--proxy-location=HeadOnly"]
        _command([sys.executable, "-m", "vllm_lite", "ray-serve", "demo", *flags], port, signal.SIGTERM)


def _command(command: list[str], port: int, end: signal.Signals) -> None:
    """Run a command until two replicas answer, and end it with a signal."""
    name = " ".join(Path(word).name for word in command[:4])

    async def asked() -> tuple[float, Stream]:
        client = HttpClient(f"http://127.0.0.1:{port}", {})
        return await until(client, 2), await Stream(1, 20).run(client)

    began_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        ready_s, stream = asyncio.run(asked())
        check(stream.finished == "length", f"{name}: two replicas after {ready_s:.1f} s, {stream.text[:40]!r}")
    finally:
        process.send_signal(end)
        said = process.communicate(timeout=PATIENCE_S)[1].decode()
    took_s = time.monotonic() - began_s
    check(process.returncode == 0 and not replicas(), f"{end.name}: status {process.returncode} after {took_s:.1f} s")
    check("Traceback" not in said, "nothing failed")


FAULTS: dict[str, Callable[[], None]] = {
    "kill": check_kill,
    "engine": partial(check_hang, "engine"),
    "worker": partial(check_hang, "worker"),
    "replica": partial(check_hang, "replica"),
    "http": check_http,
    "late": check_late,
    "command": check_command,
}
