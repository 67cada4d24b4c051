"""RemoteRanks: places, starts, watches and ends the actors of one worker group, for the engine.

Nothing here blocks the engine: placement waits for resources, and an actor may take seconds to answer, so threads do
both. Keys reach the actors as arguments of a call, which Ray neither logs nor shows.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vllm_lite.config import ResolvedConfig
from vllm_lite.executor.ray.actor import RankActor, Where
from vllm_lite.executor.ray.placement import bundle_of, missing, strategy
from vllm_lite.process_settings import WorkerSettings
from vllm_lite.runtime import log
from vllm_lite.runtime.supervise import Child

NAME_MISSING_EVERY_S = 5.0
LOOK_S = 0.1
KILL_S = 1.0
"""Seconds beyond its grace period in which a worker must be gone. A worker on a dead node never reports its end."""
MAX_CALLS = 4
"""Concurrent calls of one actor: one of them waits for the worker's end."""

logger = log.get(__name__)


class RankStart(NamedTuple):
    """Arguments of one rank's start: its settings, and its key files."""

    settings: WorkerSettings
    keys: dict[str, bytes]


class RemoteChild(Child):
    """The worker of one rank. It has no pid before its actor has started it, and it may end before that."""

    def __init__(self, rank: int, on_exit: Callable[[str], None]) -> None:
        super().__init__(f"worker {rank}", on_exit)
        self._actor: Any = None
        self._ended = threading.Event()

    def begin(self, actor: Any, pid: int) -> None:
        """Watch the process that `actor` has started."""
        self._actor, self.pid = actor, pid
        threading.Thread(target=self._watch, name=f"{self.name} watch", daemon=True).start()

    def end(self, reason: str) -> None:
        """Record the worker's end. Only the first call counts."""
        if not self._ended.is_set():
            self._reason = reason
            self._ended.set()
            self._on_exit(reason)

    def stop(self, grace_s: float) -> None:
        if self._actor is not None and not self._ended.is_set():
            with suppress(RayError):
                self._actor.stop.remote(grace_s)
            self._ended.wait(grace_s + KILL_S)
            with suppress(RayError):
                ray.kill(self._actor)
        self.end("it was stopped")

    def _watch(self) -> None:
        try:
            self.end(str(ray.get(self._actor.wait.remote())))
        except RayError as error:
            self.end(f"its actor or its node is gone ({type(error).__name__})")


class RemoteRanks:
    """The ranks of one group. Threads place and start them, from start() on, until close()."""

    def __init__(
        self, config: ResolvedConfig, module: str, starts: Sequence[RankStart], on_exit: Callable[[], None]
    ) -> None:
        self.children = [RemoteChild(start.settings.rank, lambda _reason: on_exit()) for start in starts]
        self._config = config
        self._module = module
        self._starts = starts
        self._actors: list[Any] = []
        self._group: Any = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray places workers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end_group(self) -> None:
        """Make all ranks leave their waits for each other, on all nodes."""
        actors = list(self._actors)
        _in_thread(lambda: [actor.end_group.remote() for actor in actors])

    def close(self) -> None:
        """Release the resources. Called when the children have ended."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(KILL_S)
        actors, group = list(self._actors), self._group

        def give_back() -> None:
            for actor in actors:
                ray.kill(actor)
            if group is not None:
                remove_placement_group(group)

        _in_thread(give_back).join(KILL_S)

    def _run(self) -> None:
        try:
            if self._place():
                self._begin()
        except Exception as error:
            logger.debug("a group could not be started", exc_info=True)
            for child in self.children:
                child.end(f"Ray did not start it: {error}")

    def _place(self) -> bool:
        """Wait until the cluster has room for all ranks. Returns False if close() was called before."""
        bundle, count = bundle_of(self._config), len(self._starts)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._group = placement_group([bundle] * count, strategy=strategy(bundle, count, nodes))
        waited_s, ready = 0.0, self._group.ready()
        said_s = time.monotonic()
        while not ray.wait([ready], timeout=LOOK_S)[0]:
            if self._closing.is_set():
                return False
            waited_s += LOOK_S
            if time.monotonic() - said_s > NAME_MISSING_EVERY_S:
                said_s = time.monotonic()
                lack = missing(bundle, count, ray.available_resources(), ray.cluster_resources())
                logger.warning("waiting for Ray to place the workers: %s", lack)
        return not self._closing.is_set()

    def _begin(self) -> None:
        bundle, count = bundle_of(self._config), len(self._starts)
        for index in range(count):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            kind = ray.remote(
                num_cpus=bundle.get("CPU", 0.0),
                num_gpus=bundle.get("GPU", 0.0),
                max_restarts=0,
                max_concurrency=MAX_CALLS,
                scheduling_strategy=place,
            )(RankActor)
            self._actors.append(kind.remote())
        asked = [actor.where.remote(listens=index == 0 and count > 1) for index, actor in enumerate(self._actors)]
        ranks: list[Where] = ray.get(asked)
        logger.info("Ray has placed the workers on %s", ", ".join(where.host for where in ranks))
        started = [
            actor.start.remote(self._module, msgspec.msgpack.encode(start.settings), start.keys, ranks)
            for actor, start in zip(self._actors, self._starts, strict=True)
        ]
        for child, actor, pid in zip(self.children, self._actors, ray.get(started), strict=True):
            child.begin(actor, pid)


def _in_thread(call: Callable[[], object]) -> threading.Thread:
    """Call Ray in a thread, since every call blocks for a while if the cluster's head is gone."""

    def run() -> None:
        with suppress(RayError):
            call()

    thread = threading.Thread(target=run, name="ray ends workers", daemon=True)
    thread.start()
    return thread
