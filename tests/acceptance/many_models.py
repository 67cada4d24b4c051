"""Several models behind one address, with real checkpoints: random requests where memory holds one model, a stream over
a forced swap, a chat after one, and kills of any process.

    python -m tests.acceptance.many_models [--requests 200] [--kills 50] [--chat-tokens 6000]

Prints what was counted. The exit status is 1 if anything failed.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.deadlines import scaled
from tests.e2e.test_http_models import Stream, complete, states
from tests.e2e.test_processes import family
from tests.http_server import Server

REAL = Path("~/.cache/vllm-lite/real").expanduser()
WRITERS = {
    "demo": "demo",
    "smollm2": str(REAL / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gemma3": str(REAL / "gemma3-270m" / "gemma-3-270m-q4_k_m.gguf"),
}
VECTORS = str(REAL / "minilm")
SETTINGS = "dtype: float32, max_model_len: 8192, max_num_seqs: 8, cpu_kvcache_space: 0.5"
WORDS = [
    "a",
    "the",
    "sea",
    "old",
    "house",
    "stone",
    "bird",
    "under",
    "light",
    "runs",
    "cold",
    "seven",
    "green",
    "river",
    "and",
    "she",
    "it",
    "was",
    "many",
    "said",
]
REST_S = 120.0


@contextmanager
def routing(folder: Path, more: str, models: dict[str, str], *, vectors: bool = False) -> Iterator[Server]:
    lines = [
        f"  {name}: {{model: {path}{', max_model_len: 512' if name == 'demo' else ''}}}"
        for name, path in models.items()
    ]
    lines += [f"  vectors: {{model: {VECTORS}, max_model_len: 256}}"] if vectors else []
    path = folder / "models.yaml"
    path.write_text(f"{more}\ndefaults: {{{SETTINGS}}}\nmodels:\n" + "\n".join(lines) + "\n")
    server = Server("--models", str(path), "--port", "0", "--device", "cpu")
    try:
        server.wait_for("Try:")
        yield server
    finally:
        server.close()


def http_of(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=scaled(REST_S), limits=httpx.Limits(max_connections=64))


def memory_of(http: httpx.Client) -> dict[str, int]:
    return {card["id"]: card["vllm_lite"]["memory_bytes"] for card in http.get("/v1/models").json()["data"]}


def requests(count: int, rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    made = []
    for _ in range(count):
        prompt = " ".join(rng.choices(WORDS, k=rng.randint(3, 40)))
        made.append((rng.choice(list(WRITERS)), {"prompt": prompt, "max_tokens": rng.randint(1, 24)}))
    return made


def measure(folder: Path) -> int:
    """A memory limit that fits the largest model but no second one, from measurements of each model alone."""
    with routing(folder, "models_max: 1", WRITERS) as server, http_of(server) as http:
        sizes = {}
        for name in WRITERS:
            complete(http, name, max_tokens=20)
            time.sleep(2.5)  # between two measurements of the router
            sizes[name] = memory_of(http)[name]
    largest, smallest = max(sizes.values()), min(sizes.values())
    limit = largest + min(smallest // 2, 250 << 20)
    print(f"memory: {', '.join(f'{name} {size >> 20} MiB' for name, size in sizes.items())}; limit {limit >> 20} MiB")
    return limit


def alone(folder: Path, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """The texts of a separate server for each model, one request at a time."""
    texts = [""] * len(asked)
    for name, path in WRITERS.items():
        flags = [path, "--port", "0", "--device", "cpu", "--served-model-name", name]
        length = "512" if name == "demo" else "8192"
        flags += ["--dtype", "float32", "--max-model-len", length, "--max-num-seqs", "8", "--cpu-kvcache-space", "0.5"]
        server = Server(*flags)
        try:
            server.wait_for("Try:")
            with http_of(server) as http:
                for place, (wanted, body) in enumerate(asked):
                    if wanted == name:
                        texts[place] = complete(http, name, **body)["choices"][0]["text"]
        finally:
            server.close()
    return texts


def random_requests(folder: Path, limit: int, count: int, rng: random.Random) -> Counter[str]:
    found: Counter[str] = Counter()
    asked = requests(count, rng)
    expected = alone(folder, asked)
    began_s = time.monotonic()
    waits: list[float] = []
    settings = f"models_memory: {limit >> 20}MiB\nmodels_slice_s: 2"
    with routing(folder, settings, WRITERS) as server, http_of(server) as http, ThreadPoolExecutor(8) as threads:

        def one(each: tuple[str, dict[str, Any]]) -> str:
            start_s = time.monotonic()
            try:
                choice = complete(http, each[0], **each[1])["choices"][0]
                reason = choice["finish_reason"]
                return str(choice["text"]) + ("" if reason in ("stop", "length") else f" ENDED BY {reason}")
            except (AssertionError, httpx.HTTPError) as error:
                return f"ERROR {error}"
            finally:
                waits.append(time.monotonic() - start_s)

        stop = threading.Event()
        watch = threading.Thread(target=_watch_memory, args=(server, limit, stop, found), daemon=True)
        watch.start()
        texts = list(threads.map(one, asked))
        stop.set()
        watch.join(10)
        counts = _counters(http)
    for text, wanted in zip(texts, expected, strict=True):
        found["errors" if text.startswith("ERROR") else "equal" if text == wanted else "different"] += 1
        if text != wanted:
            print(f"  {text!r} instead of {wanted!r}")
    waits.sort()
    num_loads = counts["loads"] + counts["wakes"]
    print(f"random requests: {dict(found)}, {counts['loads']:.0f} loads and {counts['wakes']:.0f} wakes", end=" ")
    print(
        f"of {counts['load_s'] / max(1, num_loads):.2f} s; a request took {waits[len(waits) // 2]:.2f} s (median),",
        end=" ",
    )
    print(f"{waits[-1]:.2f} s (longest); {time.monotonic() - began_s:.0f} s in all")
    return Counter(failed=found["errors"] + found["different"] + found["over"])


def _watch_memory(server: Server, limit: int, stop: threading.Event, found: Counter[str]) -> None:
    """Count the samples in which all models together exceed their limit by more than a tenth."""
    with http_of(server) as http:
        while not stop.wait(1.0):
            with suppress(httpx.HTTPError):
                sizes = memory_of(http)
                total = sum(sizes.values())
                found["looks"] += 1
                found["peak_mib"] = max(found["peak_mib"], total >> 20)
                if total > 1.1 * limit:
                    found["over"] += 1
                    shown = ", ".join(f"{name} {size >> 20} MiB {states(http)[name]}" for name, size in sizes.items())
                    print(f"  over the limit: {shown}")


def _counters(http: httpx.Client) -> dict[str, float]:
    sums = {"loads": 0.0, "wakes": 0.0, "load_s": 0.0}
    names = {"vllm_lite:model_loads_total": "loads", "vllm_lite:model_wakes_total": "wakes"}
    names["vllm_lite:model_load_seconds_total"] = "load_s"
    for line in http.get("/metrics").text.splitlines():
        name = line.partition("{")[0]
        if name in names:
            sums[names[name]] += float(line.rpartition(" ")[2])
    return sums


def stream_and_chat(folder: Path, limit: int, chat_tokens: int) -> Counter[str]:
    """Run a stream over forced swaps, and a chat that finds its KV after a swap."""
    failed: Counter[str] = Counter()
    kv = f"models_memory: {limit >> 20}MiB\nmodels_slice_s: 1"
    models = {name: f"{path}, kv_cache_dir: {folder / 'kv'}" for name, path in WRITERS.items()}
    with routing(folder, kv, models) as server, http_of(server) as http, http_of(server) as others:
        long = {"temperature": 0, "ignore_eos": True, "max_tokens": 500}
        undisturbed = complete(http, "smollm2", **long)["choices"][0]["text"]
        stream = Stream(http, "smollm2", max_tokens=500)
        complete(others, "gemma3", max_tokens=4)
        is_open = stream.is_alive()
        same = stream.result() == undisturbed
        pauses = [after - before for before, after in zip(stream.times, stream.times[1:], strict=False)]
        tokens = "the same tokens" if same else "OTHER TOKENS"
        print(f"a stream over forced swaps: {tokens}, longest pause {max(pauses):.2f} s")
        failed["failed"] += not same or not is_open  # one that has ended was not swapped
        rng = random.Random(7)
        prompt = " ".join(rng.choices(WORDS, k=chat_tokens))
        first = complete(http, "smollm2", prompt=prompt, max_tokens=32)
        complete(http, "gemma3", max_tokens=4)
        state = states(http)["smollm2"]
        start_s = time.monotonic()
        again = complete(http, "smollm2", prompt=prompt + first["choices"][0]["text"] + " And then?", max_tokens=1)
        took_s, usage = time.monotonic() - start_s, again["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
        print(f"a chat of {usage['prompt_tokens']} tokens after a swap ({state}): {cached:.1%} cached,", end=" ")
        print(f"first token after {took_s:.2f} s")
        failed["failed"] += cached < 0.99
        failed["failed"] += state == "loaded"
    return failed


def kills(folder: Path, count: int, rng: random.Random) -> Counter[str]:
    """Kill random processes of one model after the other, while the streams of other models continue."""
    found: Counter[str] = Counter()
    names = list(WRITERS)
    with routing(folder, "models_memory: 16GiB", WRITERS, vectors=True) as server, http_of(server) as http:
        texts = {
            name: complete(http, name, temperature=0, ignore_eos=True, max_tokens=60)["choices"][0]["text"]
            for name in names
        }
        vectors = {"model": "vectors", "input": "A text."}
        vector = http.post("/v1/embeddings", json=vectors).json()["data"]
        for number in range(count):
            victim = [*names, "vectors"][number % 4]
            http.post("/models/load", json={"model": victim})
            _until_loaded(http, victim)
            pid = http.get(f"/v1/models/{victim}").json()["vllm_lite"]["pid"]
            streams = [Stream(http, name, max_tokens=60) for name in names if name != victim]
            chosen = rng.choice(family(pid))
            with suppress(ProcessLookupError):
                os.kill(chosen, signal.SIGKILL)
            for stream, name in zip(streams, [name for name in names if name != victim], strict=True):
                try:
                    found["undisturbed" if stream.result() == texts[name] else "disturbed"] += 1
                except (AssertionError, KeyError) as error:
                    found["disturbed"] += 1
                    print(f"  {name} beside the death of {victim}: {error!r}")
            if victim != "vectors":
                found[
                    "vectors" if http.post("/v1/embeddings", json=vectors).json().get("data") == vector else "disturbed"
                ] += 1
            found["kills"] += 1
    print(f"kills: {dict(found)}")
    return Counter(failed=found["disturbed"])


def _until_loaded(http: httpx.Client, name: str) -> None:
    """Wait until a model is loaded and its previous processes have ended."""
    deadline_s = time.monotonic() + scaled(REST_S)
    while states(http)[name] != "loaded":
        assert time.monotonic() < deadline_s, f"{name} was not loaded"
        with suppress(httpx.HTTPError):
            http.post("/models/load", json={"model": name})
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--chat-tokens", type=int, default=6000)
    parser.add_argument("--memory", type=int, metavar="MIB", help="limit of all models (default: measured)")
    parser.add_argument("--seed", type=int, default=53)
    arguments = parser.parse_args()
    rng, failed = random.Random(arguments.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        limit = measure(path) if arguments.memory is None else arguments.memory << 20
        if arguments.requests:
            failed += random_requests(path, limit, arguments.requests, rng)
        if arguments.chat_tokens:
            failed += stream_and_chat(path, limit, arguments.chat_tokens)
        if arguments.kills:
            failed += kills(path, arguments.kills, rng)
    print("nothing failed" if not failed["failed"] else f"{failed['failed']} failed")
    return int(failed["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
