"""RayExecutor: workers on the hosts of a Ray cluster, which connect over tcp with keys that Ray passes to them.

The rest is MultiprocExecutor's: the workers are the same processes, and use the same protocol.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from vllm_lite.checkpoint.shard import num_ranks
from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import ConfigError
from vllm_lite.executor.meeting_place import MeetingPlace
from vllm_lite.executor.multiproc import MultiprocExecutor, WorkerTcp
from vllm_lite.executor.ray.ranks import RankStart, RemoteChild, RemoteRanks
from vllm_lite.process_settings import WorkerSettings
from vllm_lite.runtime.supervise import remove_dir
from vllm_lite.transport import Tcp
from vllm_lite.transport.keys import make_client_keys, make_engine_keys

NAMESPACE = "vllm_lite"


def connect() -> str:
    """Connect to the Ray cluster of RAY_ADDRESS, or of this machine. Returns this node's address in it.

    Raises ConfigError if there is no cluster.
    """
    with _own_signals():
        if not ray.is_initialized():
            try:
                ray.init(
                    address="auto",
                    namespace=NAMESPACE,
                    log_to_driver=False,
                    configure_logging=False,
                    logging_level="warning",
                )
            except ConnectionError as error:
                raise ConfigError(
                    f"distributed_executor_backend is ray, and there is no Ray cluster: {error}; run `ray start "
                    "--head` here, or set RAY_ADDRESS"
                ) from error
        return str(ray.util.get_node_ip_address())


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the signal handlers after the body: those of Ray would end the process in the middle of its work."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


class RayExecutor(MultiprocExecutor):
    """See Executor. Resources are requested when the workers are spawned, and released when the group is closed."""

    def __init__(self, config: ResolvedConfig, address: str, generation: int, worker_module: str, folder: str) -> None:
        """`folder` is created for the keys of this group. Raises ConfigError if there is no cluster."""
        host = connect()
        self._folder = Path(folder)
        make_engine_keys(self._folder)
        self._remote: RemoteRanks | None = None
        host = f"[{host}]" if ":" in host else host
        tcp = WorkerTcp(Tcp(f"tcp://{host}:*", self._folder), None)
        super().__init__(config, address, generation, worker_module, tcp)

    def spawn(self) -> None:
        starts = []
        for rank in range(num_ranks(self._config)):
            keys = make_client_keys(self._folder, f"rank-{rank}")
            settings = WorkerSettings(self._config, self._worker_address, rank, self._generation)
            starts.append(RankStart(settings, {file.name: file.read_bytes() for file in keys.iterdir()}))
            remove_dir(str(keys))
        self._remote = RemoteRanks(self._config, self._worker_module, starts, self._exits.set)
        super().spawn()
        self._remote.start()

    def _spawn(self, rank: int) -> RemoteChild:
        if self._remote is None:
            raise RuntimeError("spawn() has not been called")
        return self._remote.children[rank]

    def _meet(self, _: str) -> MeetingPlace:
        return RemoteMeetingPlace(self)

    def end_remote_group(self) -> None:
        if self._remote is not None:
            self._remote.end_group()

    def close(self) -> None:
        super().close()
        if self._remote is not None:
            self._remote.close()
        remove_dir(str(self._folder))


class RemoteMeetingPlace(MeetingPlace):
    """A meeting place on the ranks' own hosts; the engine only ends it."""

    def __init__(self, executor: RayExecutor) -> None:
        super().__init__(1, "")
        self._executor = executor

    def end(self) -> None:
        self._executor.end_remote_group()
