"""Settings of engine and worker processes: the process that starts them sends these through a pipe, as msgpack."""

import msgspec

from vllm_lite.config import ResolvedConfig


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of an engine process; `run_dir` is a private folder that is removed when the engine ends.

    `worker_module` names the entry point of its workers, which it starts but never imports. `life` counts the engines
    that were started one after the other at this address; `launch` is the same for all of them.
    """

    config: ResolvedConfig
    address: str
    run_dir: str
    worker_module: str = "vllm_lite.worker.process"
    life: int = 1
    launch: str = ""


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Meeting place of a group that spans hosts: the address of each rank, and the port at that of rank 0."""

    hosts: tuple[str, ...]
    port: int
    listener: int | None = None
    """The descriptor of the socket that listens there, for rank 0."""


class WorkerGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shared memory and folder of one worker group's ranks. A group that spans hosts has `spread`. Each of its ranks
    then has a separate memory and folder, and learns from the engine that another rank has ended: the engine ends all
    of them."""

    memory: int
    """The open file of their common memory (runtime/group_memory.py), which has no name and ends with its processes."""
    folder: str
    """A private folder, in which ranks exchange the addresses of torch.distributed."""
    spread: Spread | None = None


class WorkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a worker process: the address of its engine, its rank, and the group's generation.

    `address` is ipc:// or, from another host, tcp://; for that `keys` is the folder of its keys, None: in the clear.
    `group` is there where several ranks share the model.
    """

    config: ResolvedConfig
    address: str
    rank: int
    generation: int
    keys: str | None = None
    group: WorkerGroup | None = None
