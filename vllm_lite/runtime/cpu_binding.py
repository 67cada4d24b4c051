"""Cores, threads and memory for the workers of one CPU machine: `--cpu-bind auto|none|LIST`. No torch.

Ranks of one model wait for each other several times in each layer, so the slowest rank sets the speed of all: two ranks
on the same core, or a rank whose memory is on another socket, slow down the whole group. `auto` therefore gives each
rank its own cores, and cores of a single NUMA node where that costs few of them.
"""

import ctypes
import os
import platform
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from vllm_lite.errors import ConfigError
from vllm_lite.runtime import log
from vllm_lite.runtime.machine import SYS, cpu_quota, format_cpu_list, parse_cpu_list, siblings

AUTO, NONE = "auto", "none"
LEAST_SHARE = 0.75
"""Ranks get cores of one NUMA node each if none then has less than this share of len(cores) // world. Chosen, not
measured, as that takes a machine with several nodes."""
MPOL_PREFERRED = 1
MAX_NODES = 1024
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call set_mempolicy, by architecture."""

logger = log.get(__name__)


class Core(NamedTuple):
    """A physical core: the hardware threads of it that this process may use, ascending, and its NUMA node."""

    cpus: tuple[int, ...]
    node: int


class Topology(NamedTuple):
    """The CPUs that this process may use."""

    cores: tuple[Core, ...]
    """Sorted by node, then by number."""
    allowed: Mapping[int, int]
    """The NUMA node of every usable hardware thread, including the second ones of a core."""
    online: frozenset[int]
    """All hardware threads of the machine."""
    quota: int
    """CPUs that the container may use at a time; NO_QUOTA if there is no limit."""

    @property
    def num_cores(self) -> int:
        """Physical cores that can be busy at the same time."""
        return max(1, min(len(self.cores), self.quota))

    @property
    def num_nodes(self) -> int:
        return len({core.node for core in self.cores})


class Binding(NamedTuple):
    """Cores, threads and memory of one worker."""

    cpus: tuple[int, ...]
    """Hardware threads on which its threads may run, ascending; empty = not bound."""
    num_threads: int
    node: int | None
    """The preferred NUMA node of its memory, if the machine has several and all `cpus` belong to one."""

    def __str__(self) -> str:
        threads = f"{self.num_threads} thread{'s' * (self.num_threads > 1)}"
        if not self.cpus:
            return f"{threads}, not bound"
        where = "" if self.node is None else f" of node {self.node}"
        return f"{threads} on CPUs {format_cpu_list(self.cpus)}{where}"


def read_topology(sys: Path = SYS, allowed: Collection[int] | None = None) -> Topology:
    """`allowed`: the usable CPUs; by default those of this process's affinity mask."""
    usable = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    nodes = numa_nodes(sys)
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(usable):
        cores.setdefault(siblings(cpu, sys), []).append(cpu)
    found = [Core(tuple(cpus), nodes.get(cpus[0], 0)) for cpus in cores.values()]
    ordered = sorted(found, key=lambda core: (core.node, core.cpus))
    allowed_nodes = {cpu: nodes.get(cpu, 0) for cpu in usable}
    return Topology(tuple(ordered), allowed_nodes, usable | _online(sys), cpu_quota(sys))


def plan_binding(
    cpu_bind: str, rank: int, world: int, cpu_threads: int | None, topology: Topology | None = None
) -> Binding:
    """Cores, threads and memory of worker `rank` of `world` on this machine. `cpu_threads` is the user's setting.
    Raises ConfigError for a list that does not fit the workers or the machine."""
    topology = topology or read_topology()
    shared_out = Binding((), cpu_threads or max(1, topology.num_cores // world), None)
    if cpu_bind == NONE:
        return shared_out
    if cpu_bind != AUTO:
        cpus = _parse(cpu_bind, world, topology)[rank]
        return Binding(cpus, cpu_threads or len(cpus), _node_of(cpus, topology))
    num_cores = len(topology.cores)
    if world == 1 or num_cores < world or topology.quota < num_cores:
        return shared_out  # with a quota ranks have no cores of their own: the kernel stops all when it is used up
    share = _shares(topology.cores, world)[rank]
    num_threads = cpu_threads or len(share)
    per_core = 1 if num_threads <= len(share) else None  # else use all hardware threads
    cpus = tuple(sorted(cpu for core in share for cpu in core.cpus[:per_core]))
    return Binding(cpus, num_threads, _node_of(cpus, topology))


def check_binding(cpu_bind: str, world: int, device: str, topology: Topology | None = None) -> None:
    """Check a list before any process starts. Raises ConfigError."""
    if cpu_bind in (AUTO, NONE):
        return
    if device != "cpu":
        raise ConfigError(f"cpu_bind {cpu_bind!r} is for CPU workers, and this engine's run on GPUs; leave it out")
    _parse(cpu_bind, world, topology or read_topology())


def threads_of_the_user() -> int | None:
    """Threads of each worker according to OMP_NUM_THREADS; None if it is not set, or not a number."""
    outermost = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(outermost) if outermost.isdecimal() and int(outermost) > 0 else None


def apply(binding: Binding) -> None:
    """Bind the calling thread and all threads that it starts later. Call it before torch is imported, which starts
    OMP_NUM_THREADS threads; the user's own value is kept. If the machine or container forbids binding, this is only
    logged: the worker is slower, not wrong."""
    os.environ.setdefault("OMP_NUM_THREADS", str(binding.num_threads))
    if not binding.cpus:
        return
    try:
        os.sched_setaffinity(0, binding.cpus)
    except OSError as error:
        logger.warning("cannot be bound to CPUs %s: %s", format_cpu_list(binding.cpus), error.strerror)
        return
    if binding.node is not None:
        _prefer_memory_of(binding.node)
    logger.info("%s", binding)


# ---- a list


def _parse(cpu_bind: str, world: int, topology: Topology) -> list[tuple[int, ...]]:
    """The CPUs of every rank from "0-15|16-31". Raises ConfigError."""
    parts = cpu_bind.split("|")
    if len(parts) != world:
        wanted = "one list of CPUs" if world == 1 else f"{world} lists of CPUs, one for each rank,"
        raise ConfigError(
            f"cpu_bind must be auto, none, or {wanted} like {_example(topology, world)}; got {len(parts)}: {cpu_bind!r}"
        )
    try:
        lists = [parse_cpu_list(part) for part in parts]
    except ValueError as error:
        raise ConfigError(f"cpu_bind: {error}; it looks like {_example(topology, world)}") from error
    for rank, cpus in enumerate(lists):
        _check_part(rank, set(cpus), lists[:rank], topology)
    return lists


def _check_part(rank: int, cpus: set[int], earlier: Sequence[Collection[int]], topology: Topology) -> None:
    usable = format_cpu_list(topology.allowed)
    if missing := cpus - topology.online:
        raise ConfigError(
            f"cpu_bind names CPUs {format_cpu_list(missing)} for worker {rank}, which this machine does not have; "
            f"it may use {usable}"
        )
    if refused := cpus.difference(topology.allowed):
        raise ConfigError(
            f"cpu_bind names CPUs {format_cpu_list(refused)} for worker {rank}, which this process may not use; "
            f"it may use {usable}"
        )
    for other, taken in enumerate(earlier):
        if both := cpus.intersection(taken):
            raise ConfigError(
                f"cpu_bind gives CPUs {format_cpu_list(both)} to worker {other} and to worker {rank}; "
                "each may have a CPU of its own only"
            )


def _example(topology: Topology, world: int) -> str:
    """An example for error messages: valid on this machine if it has enough cores."""
    if len(topology.cores) < world:
        return "|".join(f"{4 * rank}-{4 * rank + 3}" for rank in range(min(world, 4)))
    shares = _shares(topology.cores, world)
    return "|".join(format_cpu_list(core.cpus[0] for core in share) for share in shares)


# ---- shares


def _shares(cores: Sequence[Core], world: int) -> list[Sequence[Core]]:
    """The cores of every rank, disjoint and contiguous in the order of nodes. There are at least as many cores as
    ranks."""
    within = _within_nodes(cores, world)
    if min(map(len, within)) >= LEAST_SHARE * (len(cores) // world):
        return within
    return _even(cores, world)


def _within_nodes(cores: Sequence[Core], world: int) -> list[Sequence[Core]]:
    """Shares in which every rank has cores of one node. The next rank goes to the node with the most cores per rank."""
    sizes = Counter(core.node for core in cores)
    ranks = Counter[int]()
    for _ in range(world):
        ranks[max(sizes, key=lambda node: (sizes[node] // (ranks[node] + 1), -node))] += 1
    shares: list[Sequence[Core]] = []
    for node in sorted(ranks):
        shares += _even([core for core in cores if core.node == node], ranks[node])
    return shares


def _even(cores: Sequence[Core], count: int) -> list[Sequence[Core]]:
    """`count` parts whose sizes differ by at most one."""
    ends = [len(cores) * part // count for part in range(count + 1)]
    return [cores[start:end] for start, end in pairwise(ends)]


# ---- nodes


def numa_nodes(sys: Path = SYS) -> dict[int, int]:
    """The NUMA node of every CPU that the kernel lists under a node."""
    found: dict[int, int] = {}
    for folder in (sys / "devices/system/node").glob("node[0-9]*"):
        with suppress(OSError, ValueError):
            found |= dict.fromkeys(parse_cpu_list((folder / "cpulist").read_text()), int(folder.name[4:]))
    return found


def _online(sys: Path) -> frozenset[int]:
    try:
        return frozenset(parse_cpu_list((sys / "devices/system/cpu/online").read_text()))
    except (OSError, ValueError):
        return frozenset(range(os.cpu_count() or 1))


def _node_of(cpus: Collection[int], topology: Topology) -> int | None:
    """The node of `cpus` if they all belong to one and the machine has several, else None."""
    nodes = {topology.allowed[cpu] for cpu in cpus}
    return nodes.pop() if len(nodes) == 1 and topology.num_nodes > 1 else None


def _prefer_memory_of(node: int) -> None:
    """Prefer memory of `node`. A bound thread does so anyway, unless it inherited a policy, such as numactl's.
    Containers often forbid the call."""
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None or node >= MAX_NODES:
        return
    mask = (ctypes.c_ulong * (MAX_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), MPOL_PREFERRED, mask, ctypes.c_ulong(MAX_NODES + 1)) != 0:
        logger.info("memory is not bound to node %d: %s", node, os.strerror(ctypes.get_errno()))
