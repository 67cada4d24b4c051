"""Starts the engines of --data-parallel-size, on this machine, and waits until all of them serve."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

import msgspec

from vllm_lite.client.engines.data_parallel import DataParallelSession, joined_sessions
from vllm_lite.client.engines.launch import LaunchedEngine, finish, launch, resolve, spawn
from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.errors import EngineError
from vllm_lite.kv_disk.directory import hash_seed
from vllm_lite.protocol.api import Welcome


class LaunchedEngines:
    """The engines of --data-parallel-size, with the interface of LaunchedEngine. They serve while one is left."""

    def __init__(self, engines: Sequence[LaunchedEngine]) -> None:
        self.engines = engines
        self.config = engines[0].config
        self.addresses = tuple(engine.address for engine in engines)
        self.address = self.addresses[0]
        self._session: DataParallelSession | None = None

    @property
    def session(self) -> DataParallelSession:
        self.engines[0].check_process()
        if self._session is None:
            raise EngineError("the engines are not ready")
        return self._session

    @property
    def engine(self) -> Welcome:
        return self.session.welcome

    @property
    def reason(self) -> str:
        return str(self.session.dead)

    def wait_until_ready(self, stopped: Callable[[], bool]) -> None:
        for engine in self.engines:
            engine.wait_until_ready(stopped)
        self._session = joined_sessions([each.session for each in self.engines], self.config)

    def announce(self, url: str) -> None:
        for engine in self.engines:
            engine.announce(url)

    def wait(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        return all(engine.wait(max(0.0, deadline_s - time.monotonic())) for engine in self.engines)

    def close(self) -> None:
        if self.engines[0].is_forked:
            return
        if self._session is not None:
            self._session.close()
        threads = [threading.Thread(target=engine.close, name="engine stop") for engine in self.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def launch_engines(
    config: EngineConfig,
    stopped: Callable[[], bool] = lambda: False,
    meanwhile: Callable[[ResolvedConfig], None] = lambda _: None,
    *,
    streams: bool = True,
    template: str | None = None,
) -> LaunchedEngine | LaunchedEngines:
    """Like launch(), for the number of engines in `config`."""
    if config.data_parallel_size == 1:
        return launch(config, stopped, meanwhile, streams=streams, template=template)
    resolved = resolve(config, stopped, streams=streams, template=template)
    seed = hash_seed(resolved) or os.urandom(16).hex()  # the router computes the engines' hashes
    resolved = msgspec.structs.replace(resolved, prefix_hash_seed=seed)
    with ExitStack() as started:
        ranks = range(config.data_parallel_size)
        engines = [started.enter_context(closing(spawn(resolved.of_engine(rank), publishes=True))) for rank in ranks]
        started.pop_all()
    launched = LaunchedEngines(engines)
    finish(launched, stopped, meanwhile)
    return launched
