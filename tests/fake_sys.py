"""A fake /sys: sockets, cores, hardware threads, and the limits of a container."""

from pathlib import Path

from vllm_lite.runtime.machine import format_cpu_list


def make_sys(root: Path, cores_of_nodes: list[int], threads: int = 1, cpu_max: str | None = None) -> Path:
    """Write the tree and return its root. Like Linux, number the first threads of all cores before the second ones.

    `cores_of_nodes`: the physical cores of each NUMA node. `cpu_max`: the limit of the control group, in the format of
    version 2.
    """
    total = sum(cores_of_nodes)
    cpus, nodes = root / "devices/system/cpu", root / "devices/system/node"
    for cpu in range(total * threads):
        topology = cpus / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        siblings = range(cpu % total, total * threads, total)
        (topology / "thread_siblings_list").write_text(format_cpu_list(siblings) + "\n")
    (cpus / "online").write_text(f"0-{total * threads - 1}\n")
    first = 0
    for node, count in enumerate(cores_of_nodes):
        own = [cpu for cpu in range(total * threads) if first <= cpu % total < first + count]
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}" / "cpulist").write_text(format_cpu_list(own) + "\n")
        first += count
    if cpu_max is not None:
        (root / "fs/cgroup").mkdir(parents=True)
        (root / "fs/cgroup/cpu.max").write_text(f"{cpu_max}\n")
    return root
