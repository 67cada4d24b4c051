"""RankActor: starts and watches the worker process of one rank on the node where Ray has placed the actor.

The process is the one that MultiprocExecutor starts, with the same settings. It ends with the actor, and the actor with
its node or with the engine.
"""

import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray

from vllm_lite.process_settings import Spread, WorkerGroup, WorkerSettings
from vllm_lite.runtime import supervise
from vllm_lite.runtime.group_memory import create_group_memory, end_group
from vllm_lite.runtime.supervise import Child


class Where(NamedTuple):
    """Location of a rank. Ranks of one node open each other's `memory` by `pid`; if there are several ranks, rank 0
    listens at `port`."""

    node: str
    host: str
    pid: int
    memory: int
    folder: str
    port: int


class RankActor:
    """The actor of one rank. Its methods may run concurrently."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="vl-ray-")  # mode 0700
        self._memory = create_group_memory()
        self._listener: socket.socket | None = None
        self._child: Child | None = None
        self._ended = threading.Event()

    def where(self, *, listens: bool) -> Where:
        """The location of this rank. `listens`: it is rank 0 of several."""
        host, port = str(ray.util.get_node_ip_address()), 0
        if listens:
            self._listener = socket.create_server((host, 0), family=_family(host))
            port = self._listener.getsockname()[1]
        node = ray.get_runtime_context().get_node_id()
        return Where(node, host, os.getpid(), self._memory, self._folder, port)

    def start(self, module: str, settings: bytes, keys: dict[str, bytes], ranks: list[Where]) -> int:
        """Start the worker, and return its pid. `keys`: its key files; `ranks`: locations of all ranks of the group."""
        folder = Path(self._folder) / "keys"
        folder.mkdir(mode=0o700)
        for name, content in keys.items():
            with open(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
        decoded = msgspec.msgpack.decode(settings, type=WorkerSettings)
        group, fds = self._group(decoded.rank, ranks)
        changed = msgspec.structs.replace(decoded, keys=str(folder), group=group)
        self._child = supervise.spawn(
            module, changed, f"worker {decoded.rank}", lambda _reason: self._ended.set(), fds=fds
        )
        return self._child.pid

    def _group(self, rank: int, ranks: list[Where]) -> tuple[WorkerGroup | None, tuple[int, ...]]:
        """The worker's group settings, and the descriptors that it inherits for them."""
        if len(ranks) == 1:
            return None, ()
        first = ranks[0]
        if all(other.node == first.node for other in ranks):
            if rank > 0:  # the memory has no other name, and disappears with its processes
                own, self._memory = self._memory, os.open(f"/proc/{first.pid}/fd/{first.memory}", os.O_RDWR)
                os.close(own)
            return WorkerGroup(self._memory, first.folder), (self._memory,)
        listener = None if self._listener is None else self._listener.fileno()
        spread = Spread(tuple(other.host for other in ranks), first.port, listener)
        fds = (self._memory,) if listener is None else (self._memory, listener)
        return WorkerGroup(self._memory, self._folder, spread), fds

    def wait(self) -> str:
        """Wait until the worker has ended, and return how it ended."""
        self._ended.wait()
        return (self._child and self._child.exited()) or "it was not started"

    def end_group(self) -> None:
        """Make the worker leave its waits for other ranks."""
        end_group(self._memory)

    def stop(self, grace_s: float) -> None:
        """End the worker, and wait until it is gone."""
        if self._child is not None:
            self._child.stop(grace_s)
        self._ended.set()
        supervise.remove_dir(self._folder)


def _family(host: str) -> Any:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
