"""Attack a server as a stranger would, and print the cost of each attack: memory, and time of the server's event loop.

    python -m tests.acceptance.attack                                        # starts a server with the demo model
    python -m tests.acceptance.attack --url http://127.0.0.1:8000 --pid 4711 --key sk-one --other-key sk-two

It changes nothing but the store of responses. A server that is started here has two API keys and takes adapters; of
another one the memory is that of `--pid` and its children, and attacks that need keys are left out without two of them.
The exit status is 1 if an attack took more than the bars, or was answered otherwise than it should be.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from tests.http_server import serving
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.http.body import MAX_BYTES, MAX_COMMAS, MAX_NESTED

MAX_MB, MAX_MS = 100.0, 100.0
"""Maximum memory that an attack may take, in MB, and maximum time for which it may block the loop, in ms."""
MB = 1_000_000
SETTLE_S = 30.0
"""Seconds in which the memory of a fresh server may still grow without requests."""
PROBE = """
import http.client, sys, time
longest, end = 0.0, time.monotonic() + float(sys.argv[3])
connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=60)
while time.monotonic() < end and sys.stdin.readable():
    begin = time.monotonic()
    connection.request("GET", "/health/live")
    connection.getresponse().read()
    longest = max(longest, time.monotonic() - begin)
    print(longest * 1000, flush=True)
    time.sleep(0.002)
"""
"""A program that asks repeatedly, in its own process, and prints the time of the longest answer in milliseconds."""


class Row(NamedTuple):
    """Result of one attack: its answers, memory in MB, the loop's longest stall in ms, seconds, and what was wrong."""

    attack: str
    answers: str
    megabytes: float
    milliseconds: float
    took_s: float
    problem: str


@dataclass
class Target:
    """The server, its address and keys, and the rows so far."""

    url: str
    key: str
    other_key: str
    pid: int | None
    admin_key: str = ""
    largest: int = MAX_BYTES
    """Bytes of the longest body that the server accepts."""
    rows: list[Row] = field(default_factory=list)

    @property
    def long(self) -> int:
        """Bytes of a text that nearly fills a body."""
        return self.largest - 16_384

    def client(self, key: str | None = None) -> httpx.Client:
        key = self.key if key is None else key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=300)

    def memory(self) -> float:
        """Megabytes of the server and its children; 0 if no process is known."""
        if self.pid is None:
            return 0.0
        total = 0
        for process in [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total / MB

    def measure(self, name: str, attack: Callable[[], Counter[int]], check: Callable[[Counter[int]], str]) -> None:
        """Run an attack, and measure memory and loop meanwhile."""
        before, most, over = self.memory(), 0.0, threading.Event()

        def look() -> None:
            nonlocal most
            while not over.wait(0.01):
                most = max(most, self.memory())

        watch = threading.Thread(target=look)
        with self._probe() as longest_ms:
            watch.start()
            begin_s = time.monotonic()
            try:
                answers = attack()
            finally:
                took_s = time.monotonic() - begin_s
                over.set()
                watch.join()
            held_ms = longest_ms()
        more = max(0.0, most - before)
        problem = check(answers)
        problem += f" over {MAX_MB:g} MB" if more > MAX_MB else ""
        problem += f" over {MAX_MS:g} ms" if held_ms > MAX_MS else ""
        shown = ", ".join(f"{count} x {status}" for status, count in sorted(answers.items()))
        self.rows.append(Row(name, shown, more, held_ms, took_s, problem.strip()))

    @contextmanager
    def _probe(self) -> Iterator[Callable[[], float]]:
        url = httpx.URL(self.url)
        command = [sys.executable, "-c", PROBE, url.host, str(url.port or 80), "600"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            longest = [0.0]

            def read() -> None:
                for line in process.stdout or ():
                    longest[0] = float(line)

            reader = threading.Thread(target=read)
            reader.start()
            time.sleep(0.3)  # its own start
            longest[0] = 0.0
            try:
                yield lambda: longest[0]
            finally:
                process.kill()
                reader.join()


Attack = Callable[[Target], None]


def thought(num_bytes: int) -> dict[str, Any]:
    """An item that takes space in the store but none in the prompt."""
    text = {"type": "reasoning_text", "text": "x" * num_bytes}
    return {"type": "reasoning", "summary": [], "content": [text]}


def stored(http: httpx.Client, *items: Any, **more: Any) -> tuple[str, list[str]]:
    """Store a response on the server. Returns its id, and those of its input items."""
    body = {"input": [*items, {"role": "user", "content": "Hi."}], "max_output_tokens": 1, **more}
    answer = http.post("/v1/responses", json=body)
    answer.raise_for_status()
    name: str = answer.json()["id"]
    listed = http.get(f"/v1/responses/{name}/input_items", params={"order": "asc"})
    listed.raise_for_status()
    return name, [item["id"] for item in listed.json()["data"]]


def ask(http: httpx.Client, body: Any, path: str = "/v1/responses") -> int:
    return http.post(path, json=body).status_code


def expect(*statuses: int) -> Callable[[Counter[int]], str]:
    def check(answers: Counter[int]) -> str:
        others = [status for status in answers if status not in statuses]
        return f"answered {others}" if others else ""

    return check


# ---- the store of responses


def references(target: Target) -> None:
    with target.client() as http:
        _, names = stored(http, thought(target.long), thought(10))
        refer = [{"type": "item_reference", "id": names[1]}] * 400
        body = {"input": [*refer, {"role": "user", "content": "Hi."}], "max_output_tokens": 1}
        target.measure("400 references to the longest response", lambda: Counter([ask(http, body)]), expect(200))
        refer = [{"type": "item_reference", "id": names[0]}] * 40
        body = {**body, "input": [*refer, {"role": "user", "content": "Hi."}]}
        target.measure("40 references to the longest item", lambda: Counter([ask(http, body)]), expect(400))


def conversations(target: Target) -> None:
    with target.client() as http:
        name, _ = stored(http, thought(target.long))
        body = {"input": "And?", "previous_response_id": name, "max_output_tokens": 1}

        target.measure("16 of the longest conversations at once", lambda: at_once(http, body), expect(200, 429))
        half = thought(target.long // 2)
        later, _ = stored(http, previous_response_id=stored(http, half)[0])
        path = f"/v1/responses/{later}/input_items?limit=1"

        def pages() -> Counter[int]:
            return Counter(http.get(path).status_code for _ in range(12))

        target.measure("12 pages of one long item", pages, expect(200))


def queued(target: Target) -> None:
    body = {"input": [thought(target.long), {"role": "user", "content": "Hi."}], "background": True}
    slow, names = {"max_output_tokens": 1500, "ignore_eos": True}, list[str]()
    with target.client() as http:

        def attack() -> Counter[int]:
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda _: http.post("/v1/responses", json={**body, **slow}), range(20)))
            names.extend(answer.json()["id"] for answer in answers if answer.is_success)
            return Counter(answer.status_code for answer in answers)

        target.measure("20 of the longest bodies, queued", attack, expect(200, 429))
        for name in names:
            http.post(f"/v1/responses/{name}/cancel")


def eviction(target: Target) -> None:
    with target.client() as http, target.client(target.other_key) as other:
        name, _ = stored(other)
        count = ServeConfig().responses_store_bytes // target.long + 2

        def attack() -> Counter[int]:
            for _ in range(count):
                stored(http, thought(target.long))
            return Counter([other.get(f"/v1/responses/{name}").status_code])

        target.measure(f"{count} of the longest answers, and another key's", attack, expect(200))


# ---- bodies


CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
COSTLY: dict[str, tuple[str, Callable[[int], Any]]] = {
    "of one text": (CHAT, lambda size: chat("x" * size)),
    "of one wide text": (CHAT, lambda size: chat("x" * size + WIDE)),
    "of one wide thought": (CHAT, lambda size: chat("?", reasoning="x" * size + WIDE)),
    "of lists": (CHAT, lambda size: chat("?", [[]] * min(size // 4, MAX_NESTED - 100))),
    "of objects": (CHAT, lambda size: chat("?", [{"a": 0}] * min(size // 8, MAX_NESTED // 2 - 100))),
    "of fields": (CHAT, lambda size: chat("?", {f"{n:x}": 0 for n in range(min(size // 16, MAX_NESTED - 100))})),
    "of short texts": (CHAT, lambda size: chat("?", ["ab"] * min(size // 6, MAX_COMMAS - 100))),
    "with too many objects": (CHAT, lambda size: chat("?", [{"a": 0}] * (size // 8))),
    "of token ids": (TEXTS, lambda size: {"prompt": [1] * min(size // 3, MAX_COMMAS - 100)}),
    "of prompts": (TEXTS, lambda size: {"prompt": ["ab"] * (size // 6)}),
}
"""Name -> path and maker of a long body with costly content; the maker takes the number of bytes."""
WIDE = "\N{GRINNING FACE}"
"""With one such character, all characters of a text take 4 bytes."""


def chat(text: str, variable: Any = None, reasoning: str | None = None) -> dict[str, Any]:
    thought_of = [] if reasoning is None else [{"role": "assistant", "content": "", "reasoning": reasoning}]
    messages = [*thought_of, {"role": "user", "content": text}]
    return {"messages": messages, "chat_template_kwargs": {"x": variable}}


def at_once(http: httpx.Client, body: Any, path: str = "/v1/responses") -> Counter[int]:
    """Send sixteen equal requests at once."""
    data = json.dumps(body, ensure_ascii=False).encode()
    headers = {"content-type": "application/json"}
    with ThreadPoolExecutor(16) as pool:
        return Counter(pool.map(lambda _: http.post(path, content=data, headers=headers).status_code, range(16)))


def costly(name: str) -> Attack:
    path, make = COSTLY[name]

    def attack(target: Target) -> None:
        body = {**make(target.long), "max_tokens": 1}
        with target.client() as http:
            target.measure(f"16 long bodies {name}", lambda: at_once(http, body, path), expect(200, 400, 413, 429))

    return attack


def instructions(target: Target) -> None:
    """Attack with long instructions: three events of each stream contain the response object with them."""
    body = {"input": "Hi.", "instructions": "x" * target.long, "stream": True, "background": True}
    with target.client() as http:
        target.measure("16 long instructions, streamed", lambda: at_once(http, body), expect(200, 429))


def readers(target: Target) -> None:
    """Attack with readers that do not read: streams are stored compressed, and each reader has one decompressed."""
    with target.client() as http:
        body = {"input": "Hi.", "instructions": "x" * target.long, "background": True, "stream": True}
        with http.stream("POST", "/v1/responses", json=body) as answer:
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
            name = json.loads(events[0])["response"]["id"]

        def attack() -> Counter[int]:
            with ExitStack() as opened:
                path = f"/v1/responses/{name}?stream=true"
                streams = [opened.enter_context(http.stream("GET", path)) for _ in range(24)]
                return Counter(stream.status_code for stream in streams)

        target.measure("24 readers of a long stream who read nothing", attack, expect(200, 429))


def scored(target: Target) -> None:
    """Attack with the logprobs of long answers: 21 candidates for each token, which stay packed."""
    body = {"prompt": "Hi", "max_tokens": 1900, "ignore_eos": True, "logprobs": 20}
    with target.client() as http:
        for stream in (False, True):
            asked = {**body, "stream": stream}
            name = f"16 {'streams' if stream else 'answers'} of 1,900 tokens with logprobs"
            target.measure(name, lambda asked=asked: at_once(http, asked, TEXTS), expect(200, 429))  # type: ignore[misc]


# ---- who may call what


def others(target: Target) -> None:
    with target.client() as http, target.client(target.other_key) as other:
        body = {"prompt": "Hi", "max_tokens": 1500, "ignore_eos": True, "stream": True, "request_id": "mine"}
        with http.stream("POST", "/v1/completions", json={**body, "resumable": True}) as stream:
            next(stream.iter_lines())
            paths = ("/v1/requests/cmpl-mine/stream", "/v1/requests/cmpl-none/stream")
            target.measure(
                "the stream of another key, and none",
                lambda: Counter(other.get(path).status_code for path in paths),
                expect(404),
            )
            again = {**body, "max_tokens": 1, "stream": False}
            target.measure("the id of another key's request", lambda: Counter([ask(other, again, TEXTS)]), expect(200))


def proxied(target: Target) -> None:
    headers = ({"X-Forwarded-For": "203.0.113.7"}, {"Forwarded": "for=203.0.113.7"}, {"Via": "1.1 proxy"})

    def attack() -> Counter[int]:
        with target.client("") as http:
            return Counter(http.post("/pause", headers=each).status_code for each in headers)

    target.measure("pause without a key, through a proxy", attack, expect(401, 403))


def aborts(target: Target) -> None:
    with target.client() as http:
        body = {"request_ids": [f"none-{number}" for number in range(1024)]}
        target.measure(
            "1,024 unknown requests to abort",
            lambda: Counter([ask(http, body, "/abort_requests")]),
            expect(200, 401, 403),
        )


# ---- files of a stranger


def adapters(target: Target) -> None:
    with tempfile.TemporaryDirectory() as folder, target.client(target.admin_key or target.key) as http:
        for name in ("pipe", "endless", "sparse"):
            place = Path(folder, name)
            place.mkdir()
            config = place / "adapter_config.json"
            if name == "pipe":
                os.mkfifo(config)
            elif name == "endless":
                config.symlink_to("/dev/zero")
            else:
                with config.open("wb") as file:
                    file.truncate(2**40)
            body = {"lora_name": name, "lora_path": str(place)}
            target.measure(
                f"an adapter whose config is {name}",
                lambda body=body: Counter([ask(http, body, "/v1/load_lora_adapter")]),  # type: ignore[misc]
                expect(400, 401, 403),
            )


def warm_up(target: Target) -> None:
    """Send a small request to each API, so that memory for the first request does not count as an attack's."""
    with target.client() as http:
        ask(http, {"input": "Hi.", "max_output_tokens": 1})
        ask(http, {"prompt": "Hi", "max_tokens": 1}, TEXTS)
        ask(http, chat("Hi") | {"max_tokens": 1}, CHAT)
    before, end_s = 0.0, time.monotonic() + SETTLE_S
    while time.monotonic() < end_s and abs((now := target.memory()) - before) > 0.1:  # workers load beside requests
        before = now
        time.sleep(0.5)


ATTACKS: list[Attack] = [
    *map(costly, COSTLY),
    instructions,
    readers,
    scored,
    references,
    conversations,
    queued,
    eviction,
    others,
    proxied,
    aborts,
    adapters,
]
NEED_TWO_KEYS = (eviction, others)


def show(rows: list[Row]) -> int:
    """Print the rows. Returns the exit status."""
    print(f"{'attack':<40}{'answers':<22}{'MB':>8}{'ms of the loop':>16}{'s':>8}  problem")
    for row in rows:
        print(
            f"{row.attack:<40}{row.answers:<22}{row.megabytes:>8.1f}{row.milliseconds:>16.1f}{row.took_s:>8.2f}  "
            f"{row.problem or '-'}"
        )
    return int(any(row.problem for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="the server, without a path; one is started if none is given")
    parser.add_argument("--pid", type=int, help="its process, whose memory is looked at, with its children's")
    parser.add_argument("--key", default="", help="an API key of it")
    parser.add_argument("--other-key", default="", help="another one")
    parser.add_argument("--largest", type=int, default=Target.largest, help="bytes of the longest body that it takes")
    args = parser.parse_args()
    if args.url is not None:
        target = Target(args.url.rstrip("/"), args.key, args.other_key, args.pid, largest=args.largest)
        for attack in ATTACKS:
            if target.other_key or attack not in NEED_TWO_KEYS:
                attack(target)
        return show(target.rows)
    rows = list[Row]()
    flags = ["--enable-lora", "--api-key", "sk-one", "--api-key", "sk-two", "--admin-api-key", "sk-admin"]
    for attack in ATTACKS:  # each on a fresh server: an attack could otherwise reuse memory of an earlier one unnoticed
        with serving(*flags, "--max-request-bytes", str(args.largest)) as server:
            target = Target(server.url, "sk-one", "sk-two", server.process.pid, "sk-admin", args.largest)
            warm_up(target)
            attack(target)
            rows += target.rows
    return show(rows)


if __name__ == "__main__":
    sys.exit(main())
