"""Send a server thousands of hostile images and URLs, and print the results.

    python -m tests.acceptance.hostile_images 10000 1             # so many, made from this seed
    python -m tests.acceptance.hostile_images 10000 1 mistral3    # to another family's processor

It starts a server with a random checkpoint that sees images, of which one name of this machine is allowed as a source.
A listener stands at the addresses that URLs try to reach. The exit status is 1 if an answer was a 5xx or none, if a
decoder's words were shown, if anybody was contacted, or memory or the loop's longest stall went over the bars.
"""

import base64
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from PIL import Image

from tests.acceptance.attack import MAX_MS, MB, PROBE
from tests.http_server import serving
from tests.images import make_mistral3, make_onevision, make_qwen, make_smolvlm, picture

MAX_MB = 200.0
"""Limit of the memory that the server and its children may take in addition: two images at a time, with up to five
bytes a pixel."""
AT_ONCE = 8
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "smolvlm": make_smolvlm,
    "qwen3_5": make_qwen,
    "mistral3": make_mistral3,
    "onevision": make_onevision,
}
FLAGS = [
    "--dtype",
    "float32",
    "--cpu-threads",
    "1",
    "--max-model-len",
    "512",
    "--served-model-name",
    "eyes",
]
BODY: dict[str, Any] = {"model": "eyes", "max_completion_tokens": 1, "temperature": 0}
KINDS = {"PNG": "png", "JPEG": "jpeg", "WEBP": "webp", "GIF": "gif"}
OTHERS = {
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="http://127.0.0.1/"/></svg>',
    "jp2": b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(400),
    "tiff": b"II*\x00" + bytes(400),
    "bmp": b"BM" + bytes(400),
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "ico": b"\x00\x00\x01\x00\x01\x00" + bytes(400),
    "avif": b"\x00\x00\x00\x1cftypavif" + bytes(400),
    "pdf": b"%PDF-1.7\n",
    "zip": b"PK\x03\x04" + bytes(100),
}
WORDS_OF_DECODERS = ("PIL", "Pillow", "Traceback", "libjpeg", "zlib", "decoder error", "UnidentifiedImage", "Errno")


def main() -> int:
    given = sys.argv[1:]
    count, seed, family = (*given, *("1000", "1", "smolvlm")[len(given) :])
    return run(int(count), int(seed), FAMILIES[family])


def run(count: int, seed: int, make: Callable[[Path], Path]) -> int:
    with tempfile.TemporaryDirectory() as folder, listening() as (port, contacts):
        path = make(Path(folder) / "m")
        with (
            serving("--model", str(path), "--allowed-media-domains", "localhost", *FLAGS) as server,
            httpx.Client(base_url=server.url, timeout=120.0) as http,
        ):
            for _ in range(20):  # so that it is warm
                sent(http, part(url_of(honest(random.Random(0)), "png")))
            before, began_s = megabytes(server.process.pid), time.monotonic()
            answers, problems, stall_ms, most = attack(http, server.process.pid, count, seed, port)
            good = sent(http, part(url_of(honest(random.Random(0)), "png"))).status_code
        took_s = time.monotonic() - began_s
    print(f"{count} in {took_s:.0f} s: {dict(answers)}")
    print(f"memory + {most - before:.0f} MB (at most {MAX_MB:.0f})")
    print(f"longest stall {stall_ms:.0f} ms (at most {MAX_MS:.0f})")
    if contacts:
        problems.append(f"{len(contacts)} connections to addresses that no image may come from")
    if good != 200:
        problems.append(f"an honest image is answered with {good} afterwards")
    if most - before > MAX_MB:
        problems.append("too much memory")
    if stall_ms > MAX_MS:
        problems.append("the loop stood still for too long")
    print("\n".join(problems[:20]) or "nothing was wrong")
    return int(bool(problems))


def attack(
    http: httpx.Client, pid: int, count: int, seed: int, port: int
) -> tuple[Counter[int], list[str], float, float]:
    """Run the attacks. Returns the answers by status, the faults, the longest stall in ms and the peak memory in MB."""
    answers, problems, done = Counter[int](), list[str](), threading.Event()
    most = megabytes(pid)

    def watch() -> None:
        nonlocal most
        while not done.wait(0.1):
            most = max(most, megabytes(pid))

    def one(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        name, given = chance.choice(ATTACKS)(chance, port)
        try:
            answer = sent(http, given)
        except httpx.HTTPError as error:
            problems.append(f"{number} {name}: {type(error).__name__}")
            return
        answers[answer.status_code] += 1
        shown = [word for word in WORDS_OF_DECODERS if word in answer.text]
        if answer.status_code >= 500 or shown:
            problems.append(f"{number} {name}: {answer.status_code} {answer.text[:200]}")

    host, _, probed = http.base_url.netloc.decode().partition(":")
    probe = subprocess.Popen(
        [sys.executable, "-c", PROBE, host, probed, "86400"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for number, _ in enumerate(threads.map(one, range(count)), 1):
                if number % 500 == 0:
                    print(f"{number} of {count}: {dict(answers)}, {len(problems)} problems", flush=True)
    finally:
        done.set()
        watcher.join()
        probe.kill()
        lines = probe.communicate()[0].split()
    return answers, problems, float(lines[-1]), most


def sent(http: httpx.Client, *parts: Any) -> httpx.Response:
    content = [*parts, {"type": "text", "text": "a page"}]
    return http.post("/v1/chat/completions", json={**BODY, "messages": [{"role": "user", "content": content}]})


def part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def url_of(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def megabytes(pid: int) -> float:
    """Resident memory of a process and its descendants."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / MB


@contextmanager
def listening() -> Iterator[tuple[int, list[Any]]]:
    """A listening port, and the connections to it."""
    contacts = list[Any]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        done = threading.Event()

        def accept() -> None:
            while not done.is_set():
                try:
                    connection, address = listener.accept()
                except TimeoutError:
                    continue
                contacts.append(address)
                connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1], contacts
        finally:
            done.set()
            thread.join()


# ---- the attacks: each makes a part of a content, by chance


def honest(chance: random.Random, kind: str = "PNG") -> bytes:
    made = BytesIO()
    size = chance.randint(1, 90), chance.randint(1, 90)
    Image.fromarray(picture(*size, chance.randint(0, 99))).save(made, kind)
    return made.getvalue()


def some(chance: random.Random) -> tuple[str, bytes]:
    kind = chance.choice(list(KINDS))
    return KINDS[kind], honest(chance, kind)


def flipped(chance: random.Random, _: int) -> tuple[str, Any]:
    kind, data = some(chance)
    changed = bytearray(data)
    for _ in range(chance.randint(1, 20)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return f"{kind} with other bytes", part(url_of(bytes(changed), kind))


def cut(chance: random.Random, _: int) -> tuple[str, Any]:
    kind, data = some(chance)
    return f"{kind} cut off", part(url_of(data[: chance.randrange(len(data))], kind))


def noise(chance: random.Random, _: int) -> tuple[str, Any]:
    kind, data = some(chance)
    return f"noise as {kind}", part(url_of(data[: chance.randint(4, 40)] + chance.randbytes(2000), kind))


def other_format(chance: random.Random, _: int) -> tuple[str, Any]:
    name, data = chance.choice(list(OTHERS.items()))
    return name, part(url_of(data, chance.choice([name, "png"])))


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, rows: bytes, *chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def bomb(chance: random.Random, _: int) -> tuple[str, Any]:
    """A small file that expands to many bytes: pixels, a text, or a color profile."""
    zeros = zlib.compress(bytes(chance.choice([1, 8, 64]) * 1_000_000), 9)
    name, made = chance.choice(
        [
            ("pixels", png(chance.choice([4000, 65535, 2**31 - 1]), 4000, zeros)),
            ("text", png(8, 8, zlib.compress(bytes(8 * 25)), chunk(b"zTXt", b"a\0\0" + zeros))),
            ("profile", png(8, 8, zlib.compress(bytes(8 * 25)), chunk(b"iCCP", b"a\0\0" + zeros))),
            ("chunks", png(8, 8, zlib.compress(bytes(8 * 25)), *[chunk(b"tEXt", b"a\0b")] * 2000)),
        ]
    )
    return f"bomb of {name}", part(url_of(made, "png"))


@cache
def large() -> list[tuple[str, bytes]]:
    """Files whose decoding needs the most memory: plain, rotated, transparent and converted images."""
    turned, made = Image.Exif(), list[tuple[str, bytes]]()
    turned[0x0112] = 6
    for kind, mode, size, more in (
        ("PNG", "RGB", (6000, 4000), {}),
        ("PNG", "P", (6000, 4000), {}),
        ("PNG", "L", (6000, 4000), {}),
        ("PNG", "RGBA", (4000, 3100), {}),
        ("PNG", "I;16", (4000, 3100), {}),
        ("JPEG", "RGB", (6000, 4000), {}),
        ("JPEG", "RGB", (4000, 3100), {"exif": turned}),
        ("JPEG", "CMYK", (4000, 3100), {"exif": turned}),
        ("JPEG", "RGB", (4000, 3100), {"progressive": True}),
        ("JPEG", "RGB", (3600, 2300), {"progressive": True, "subsampling": "4:4:4"}),
        ("WEBP", "RGBA", (4000, 3100), {}),
        ("GIF", "P", (6000, 4000), {}),
    ):
        file = BytesIO()
        Image.new(mode, size, 7 if mode in ("P", "L", "I;16") else 0).save(file, kind, **more)
        made.append((KINDS[kind], file.getvalue()))
    return made


def big(chance: random.Random, _: int) -> tuple[str, Any]:
    kind, data = chance.choice(large())
    return f"large {kind}", part(url_of(data, kind))


def frames(chance: random.Random, _: int) -> tuple[str, Any]:
    made = BytesIO()
    few = [Image.new("P", (9, 9), number % 256) for number in range(chance.randint(2, 60))]
    few[0].save(made, "GIF", save_all=True, append_images=few[1:])
    return "frames", part(url_of(made.getvalue(), "gif"))


def odd_url(chance: random.Random, port: int) -> tuple[str, Any]:
    hosts = ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "0177.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "127.1"]
    hosts += ["localhost.", "LOCALHOST", "localhost%00.example.org", "example.org@localhost", "localhost#@example.org"]
    scheme = chance.choice(["http", "https", "HTTP", "http:", "file", "ftp", "gopher", "data", "javascript"])
    url = f"{scheme}://{chance.choice(hosts)}:{port}/{chance.choice(['', 'a.png', '../../etc/passwd', '%0d%0aHost:x'])}"
    return f"URL of {urlsplit(url).scheme}", part(url)


def odd_data(chance: random.Random, _: int) -> tuple[str, Any]:
    odd: list[Any] = ["", " ", None, 7, [], {"url": 1}, "x" * 100_000, "data:,", "data:" + "a" * 9999]
    odd += ["data:image/png;base64", "data:image/png,abc", "data:image/svg+xml;base64,AAAA"]
    odd += ["data:image/png;base64,====", "data:image/png;base64,\u00e9"]
    return "odd data", part(chance.choice(odd))


def odd_part(chance: random.Random, _: int) -> tuple[str, Any]:
    source = chance.choice(
        [None, {}, {"type": "base64"}, {"type": "base64", "data": 7}, {"type": "url", "url": "file:///"}]
    )
    kind = chance.choice(["image", "input_image", "image_url", "image_pil", "video_url", "input_audio"])
    return "odd part", {"type": kind, "source": source}


def fine(chance: random.Random, _: int) -> tuple[str, Any]:
    kind, data = some(chance)
    return "an honest one", part(url_of(data, kind))


ATTACKS: list[Callable[[random.Random, int], tuple[str, Any]]] = [
    *[flipped] * 6,
    *[cut] * 3,
    *[noise] * 3,
    *[other_format] * 2,
    *[odd_url] * 4,
    *[odd_data] * 2,
    *[odd_part] * 2,
    *[fine] * 3,
    frames,
    bomb,
    big,
]

if __name__ == "__main__":
    sys.exit(main())
