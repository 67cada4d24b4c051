"""What this machine has, found without importing torch: memory, cores, and a GPU that workers could use."""

import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""One of these is there when an NVIDIA driver is loaded, the second under Windows' Linux."""


def memory_limit_bytes() -> int:
    """This machine's memory, or the control group's limit if that is less."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limit = min(limit, int(Path(name).read_text()))
    return limit


def num_physical_cores() -> int:
    """Physical cores that this process may use: its affinity mask without hyper-threads, and the container's share."""
    cores = {_siblings(cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(cores), _quota()))


def num_cpus() -> int:
    """Hardware threads of this machine, or the container's share if that is less: no affinity mask changes it."""
    return max(1, min(os.cpu_count() or 1, _quota()))


def _siblings(cpu: int) -> str:
    """The hardware threads of `cpu`'s core, as the kernel lists them; a CPU that it does not list is its own core."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota() -> int:
    """CPUs that the control group grants, rounded up; a number larger than any machine if there is no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):
        return 1 << 30


class Gpu(NamedTuple):
    name: str
    memory_bytes: int
    driver: str


def gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi lists; none where it is not installed or does not answer."""
    import subprocess

    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        rows = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
        return [Gpu(name, int(mib) * 2**20, driver) for name, mib, driver in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def has_driver() -> bool:
    """Whether an NVIDIA driver is loaded. Only a worker finds out whether torch can use it."""
    return any(os.path.exists(file) for file in GPU_FILES)


def hides_gpus() -> bool:
    """Whether the user lets no process of ours see a GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")


def version(package: str) -> str:
    """The version of an installed package. Raises ModuleNotFoundError."""
    from importlib import metadata  # 7 ms, which every process would pay for a question that few ask

    return metadata.version(package)


def lacks_for_cuda(*, kernels: bool = True) -> str | None:
    """None when workers can be expected to run on a GPU, else what this machine lacks, as a clause.

    `kernels`: whether CuPy is needed, which compiles and launches ours; the reference backend does without.
    """
    if not has_driver():
        return "this machine has no NVIDIA driver (there is no /dev/nvidiactl)"
    if hides_gpus():
        return f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r} and hides every GPU"
    try:
        torch_version = version("torch")
    except ModuleNotFoundError:
        return "torch is not installed"
    if torch_version.endswith("+cpu"):
        return f"torch {torch_version} is built without CUDA; install a build with it"
    if kernels and find_spec("cupy") is None:
        return "the package cupy is not installed; install vllm-lite[cuda12] or vllm-lite[cuda13]"
    return None
