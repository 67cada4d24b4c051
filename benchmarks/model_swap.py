"""Two models, one of which is loaded at a time: seconds to the first token of the one that was swapped out.

    python benchmarks/model_swap.py --model PEERS/models/llama1b --chat-tokens 2000 --rounds 5

`swap` is a short prompt, `turn` the next turn of a chat that the model had before, `stay` the turn after that, without
a swap. The files are in the page cache, and a model is swapped in again --rest-s after it was swapped out. With
--llama-server and --gguf, llama.cpp's server in its router mode gets the same ids in the same rounds, in turn. Without
--no-disk, our server has its KV cache on disk as well.
"""

import argparse
import http.client
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peers_report
from http_peers import PORT, serving
from kv_chat import Chat, median

ONE, OTHER = "one", "other"
SHORT, NEW = 16, 64
"""Tokens of the short prompt, and of a chat's new message."""
REQUEST_S = 600.0

Figures = dict[str, float]


class Server:
    """A server of two models at a port, and the chat with one of them."""

    def __init__(self, port: int, chat: Chat, rest_s: float) -> None:
        self._port = port
        self._chat = chat
        self._rest_s = rest_s
        self._draw = random.Random(port)

    def ask(self, model: str, ids: list[int]) -> tuple[float, dict[str, Any]]:
        """Seconds to the answer of one token, and its usage. Raises RuntimeError for any other answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_S)
        body = json.dumps({"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0})
        began_s = time.perf_counter()
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            found = json.loads(answer.read())
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{model}: {answer.status} {found}")
        return time.perf_counter() - began_s, found["usage"]

    def begin(self) -> None:
        """Load both models once, and compute the chat."""
        self.ask(OTHER, self._short())
        self.ask(ONE, self._chat.tokens)

    def round(self) -> Figures:
        """Swap to the other model and back, twice."""
        self._swap_out()
        swap_s, _ = self.ask(ONE, self._short())
        self._swap_out()
        turn_s, usage = self.ask(ONE, self._chat.turn())
        stay_s, _ = self.ask(ONE, self._chat.turn())
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return {"swap_s": swap_s, "turn_s": turn_s, "stay_s": stay_s, "cached": cached / usage["prompt_tokens"]}

    def _swap_out(self) -> None:
        self.ask(OTHER, self._short())
        time.sleep(self._rest_s)

    def _short(self) -> list[int]:
        return [self._draw.randrange(3, 30000) for _ in range(SHORT)]


@contextmanager
def ours(options: argparse.Namespace, folder: Path, port: int) -> Iterator[None]:
    disk = "" if options.no_disk else f", kv_cache_dir: {folder / 'kv'}"
    space = f"max_model_len: {options.chat_tokens + 4096}, cpu_kvcache_space: {options.kv_gib}"
    entries = f"models:\n  {ONE}: {{model: {options.model}}}\n  {OTHER}: {{model: {options.other or options.model}}}\n"
    path = folder / "models.yaml"
    path.write_text(f"models_max: 1\ndefaults: {{{space}{disk}}}\n{entries}")
    command = [sys.executable, "-m", "vllm_lite", "serve", "--models", str(path), "--port", str(port)]
    with serving(command, {}, folder / "ours.log", port):
        yield


@contextmanager
def llama(options: argparse.Namespace, folder: Path, port: int) -> Iterator[None]:
    models = folder / "gguf"
    models.mkdir()
    for name, path in ((ONE, options.gguf), (OTHER, options.other_gguf or options.gguf)):
        (models / f"{name}.gguf").symlink_to(Path(path).absolute())
    command = [options.llama_server, "--models-dir", str(models), "--models-max", "1", "--port", str(port)]
    command += ["-c", str(options.chat_tokens + 4096), "-np", "1", "-t", "2", "-tb", "2"]
    with serving(command, {}, folder / "llama.log", port):
        yield


def measure(options: argparse.Namespace) -> dict[str, list[Figures]]:
    kinds: dict[str, Callable[..., Any]] = {} if options.only_llama else {"ours": ours}
    if options.llama_server:
        kinds["llama.cpp"] = llama
    with tempfile.TemporaryDirectory(prefix="swap", dir=options.folder) as name, ExitStack() as stack:
        servers = {}
        for place, (kind, start) in enumerate(kinds.items()):
            stack.enter_context(start(options, Path(name), PORT + place))
            servers[kind] = Server(PORT + place, Chat(options.chat_tokens, NEW), options.rest_s)
            servers[kind].begin()
        rounds: dict[str, list[Figures]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds):
            for kind, server in servers.items():
                rounds[kind].append(server.round())
                shown = ", ".join(f"{name} {value:.3f}" for name, value in rounds[kind][-1].items())
                print(f"{kind}: {shown}", flush=True)
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint")
    parser.add_argument("--other", help="the model in between (default: the same one)")
    parser.add_argument("--llama-server", help="llama.cpp's, with --models-dir")
    parser.add_argument("--gguf", help="a file of the same size for it")
    parser.add_argument("--other-gguf")
    parser.add_argument("--only-llama", action="store_true")
    parser.add_argument("--chat-tokens", type=int, default=2000)
    parser.add_argument("--kv-gib", type=float, default=2.0, help="KV cache of each model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rest-s", type=float, default=5.0)
    parser.add_argument("--no-disk", action="store_true", help="without --kv-cache-dir")
    parser.add_argument("--folder", help="where the KV cache and the logs go")
    parser.add_argument("--out", help="write a JSON file")
    options = parser.parse_args()
    rounds = measure(options)
    medians = {kind: {name: round(value, 3) for name, value in median(runs).items()} for kind, runs in rounds.items()}
    print(json.dumps(medians, indent=1))
    if options.out:
        head = {"device": peers_report.device(), "date": f"{datetime.now(UTC):%F}", "commit": peers_report.commit()}
        about = {"model": Path(options.model).name, "chat_tokens": options.chat_tokens, "rounds": options.rounds}
        Path(options.out).write_text(json.dumps({**head, **about, "medians": medians}, indent=1) + "\n")


if __name__ == "__main__":
    main()
