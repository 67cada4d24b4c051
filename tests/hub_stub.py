"""A local model hub with the routes that huggingface_hub uses: names of files, files, ranges, and refusals."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.deadlines import scaled

COMMIT = hashlib.sha1(b"commit", usedforsecurity=False).hexdigest()


class Hub:
    """A hub with the `files` of one repository `name`. `requests`: the requests that it got, as "METHOD path"."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()
        self.refuse: tuple[int, str | None] | None = None
        """Status and X-Error-Code of every answer; None: answer normally."""
        self.stall = threading.Event()
        """While it is set, weights stop after their first half."""
        self.stalled = threading.Event()
        self.released = threading.Event()
        self.url = ""

    def add_folder(self, folder: Path) -> None:
        self.files |= {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    def fetched(self) -> set[str]:
        """Names of the files whose bytes were requested."""
        return {path.rpartition("/")[2] for path in self.requests if path.startswith("GET") and "/resolve/" in path}


@contextmanager
def hub(name: str = "org/model") -> Iterator[Hub]:
    stub = Hub(name)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": stub}))
    server.daemon_threads = True
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    stub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.split("?")[0]
        self.stub.requests.append(f"{self.command} {path}")
        self.stub.tokens.add(self.headers.get("Authorization"))
        if self.stub.refuse is not None:
            self.reply(self.stub.refuse[0], {"X-Error-Code": self.stub.refuse[1]} if self.stub.refuse[1] else {}, b"{}")
        elif match := re.fullmatch(rf"/api/models/{self.stub.name}(/revision/(.+))?", path):
            self.info(match.group(2))
        elif match := re.fullmatch(rf"/{self.stub.name}/resolve/([^/]+)/(.+)", path):
            self.file(*match.groups())
        else:
            self.reply(404, {"X-Error-Code": "RepoNotFound"}, b"{}")

    def info(self, revision: str | None) -> None:
        if revision not in (None, "main", COMMIT):
            self.reply(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
            return
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.stub.files.items()]
        body = {"id": self.stub.name, "modelId": self.stub.name, "sha": COMMIT, "siblings": siblings, "private": False}
        self.reply(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def file(self, revision: str, name: str) -> None:
        if revision not in ("main", COMMIT):
            self.reply(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
            return
        if name not in self.stub.files:
            self.reply(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b"{}")
            return
        data = self.stub.files[name]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is None:
            self.reply(200, headers, data)
            return
        first, last = int(wanted.group(1)), int(wanted.group(2) or len(data) - 1)
        part = data[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        self.reply(206, headers, part)

    def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.stub.stall.is_set() and self.path.endswith(".safetensors"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.stub.stalled.set()
            self.stub.released.wait(scaled(60))
            self.close_connection = True
            return
        self.wfile.write(body)
