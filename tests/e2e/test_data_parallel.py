"""`serve -dp 2`: two engines behind one address, also when one is killed under load."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
from safetensors.torch import load_file, save_file

from tests.deadlines import scaled
from tests.http_server import Server, client, serving, until
from vllm_lite.checkpoint.tensors.lora import WEIGHTS_FILE
from vllm_lite.config import demo_folder
from vllm_lite.tools.bench.models import write_adapters

FLAGS = (
    "-dp",
    "2",
    "-asc",
    "2",
    "--dtype",
    "float32",
    "--num-gpu-blocks-override",
    "512",
    "--prefix-hash-seed",
    "s",
    "--enable-lora",
)
SLOW = ("--attention-backend", "reference", "--enforce-eager")
"""Settings that make an engine slow, so that it can be killed while requests run."""
NUM_TOKENS = 200
ENGINE = "vllm_lite.engine.process"


def engines_of(server: Server) -> list[int]:
    family = psutil.Process(server.process.pid).children(recursive=True)
    return [child.pid for child in family if any(ENGINE in word for word in child.cmdline())]


def values(http: httpx.Client, name: str) -> dict[str, float]:
    """A metric of each engine."""
    text = http.get("/metrics").text
    return {
        engine: float(value) for engine, value in re.findall(rf'^{name}{{engine="(\d)".*}} (\S+)$', text, re.MULTILINE)
    }


def adapter(folder: Path) -> Path:
    """An adapter that changes the output of the demo model."""
    path = write_adapters(str(demo_folder()), folder, 1, 4)[0]
    file = path / WEIGHTS_FILE
    save_file({name: tensor * 20 for name, tensor in load_file(file).items()}, file)
    return path


def bodies(count: int) -> list[dict[str, Any]]:
    settings = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.8}
    asked = [{"prompt": f"{place} " * 20 + "Once upon a time", "seed": place, **settings} for place in range(count)]
    return [*asked, *({"model": "own", **body} for body in asked)]


def texts(server: Server, asked: list[dict[str, Any]]) -> list[str]:
    def one(body: dict[str, Any]) -> str:
        with client(server) as http:
            answer = http.post("/v1/completions", json=body, timeout=scaled(60.0))
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(len(asked)) as threads:
        return list(threads.map(one, asked))


def test_two_engines_serve_as_one_and_streams_survive_the_death_of_either(tmp_path: Path) -> None:
    """Half of the requests have an adapter, which was loaded while the server runs: in both engines, and in the one
    that takes the place of another."""
    asked = bodies(4)
    with serving(*FLAGS, *SLOW) as server, client(server) as http:
        assert "with 2 engines" in server.output
        load = {"lora_name": "own", "lora_path": str(adapter(tmp_path))}
        assert http.post("/v1/load_lora_adapter", json=load).status_code == 200
        before = texts(server, asked)
        assert len(set(before)) == len(asked)
        served = values(http, "vllm:generation_tokens_total")
        assert sum(served.values()) == NUM_TOKENS * len(asked)
        assert min(served.values()) > 0, "all went to one engine"
        pids = engines_of(server)
        assert len(pids) == 2
        with ThreadPoolExecutor(1) as thread:
            again = thread.submit(texts, server, asked)
            until(lambda: min(values(http, "vllm:num_requests_running").values()) > 0, "requests at both")
            os.kill(pids[0], signal.SIGKILL)
            assert http.get("/health").status_code == 200  # the other one serves
            assert again.result(scaled(60.0)) == before
        until(lambda: len(values(http, "vllm_lite:engine_life")) == 2, "the engine that takes its place")
        assert sorted(values(http, "vllm_lite:engine_life").values()) == [1, 2]
        assert [card["id"] for card in http.get("/v1/models").json()["data"]][1:] == ["own"]
        assert texts(server, asked) == before
        assert server.stop() == 0
