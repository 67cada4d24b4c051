"""Facts about this machine, found without importing torch: memory, cores, GPUs."""

import os
import re
import resource
from collections.abc import Collection, Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from vllm_lite.errors import ConfigError

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""One of these exists when an NVIDIA driver is loaded; the second under WSL."""
SYS = Path("/sys")
"""Folder in which the kernel describes the machine; tests pass a tree of their own."""
NO_QUOTA = 1 << 30
MAX_FILES = 1 << 16
"""Open files that a server allows itself: each connection takes one."""
MAX_CPU = 1 << 16
"""Above the kernel's own maximum of 8192; keeps a typing error from becoming a set of a billion numbers."""


def memory_limit_bytes() -> int:
    """This machine's memory, or the cgroup's limit if that is less."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limit = min(limit, int(Path(name).read_text()))
    return limit


def parse_bytes(name: str, text: str) -> int:
    """ "24GiB", "24G" (both 2**30) or "24GB" (10**9) as bytes. Raises ConfigError, also for a number without a
    unit that is less than 1 MiB, since `24` does not mean 24 bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(iB|B|)", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]) or (not match[2] + match[3] and float(match[1]) < 1 << 20):
        raise ConfigError(f"{name}: expected an amount of memory like 24GiB, got {text!r}")
    base = 1000 if match[3].lower() == "b" else 1024
    return int(float(match[1]) * base ** ["", "K", "M", "G", "T"].index(match[2].upper()))


def num_physical_cores(sys: Path = SYS, allowed: Collection[int] | None = None) -> int:
    """Physical cores that this process may use: those of its affinity mask, at most the container's CPU quota."""
    cores = {siblings(cpu, sys) for cpu in (os.sched_getaffinity(0) if allowed is None else allowed)}
    return max(1, min(len(cores), cpu_quota(sys)))


def num_cpus() -> int:
    """Hardware threads of this machine, or the container's CPU quota if that is less; affinity masks do not count."""
    return max(1, min(os.cpu_count() or 1, cpu_quota()))


def siblings(cpu: int, sys: Path = SYS) -> tuple[int, ...]:
    """The hardware threads of `cpu`'s core, ascending; `cpu` alone if the kernel does not list it."""
    try:
        return parse_cpu_list((sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
    except (OSError, ValueError):
        return (cpu,)


def cpu_quota(sys: Path = SYS) -> int:
    """The cgroup's CPU quota, rounded up; NO_QUOTA if there is none. Read from cpu.max (cgroup v2) or from v1's two
    files."""
    group = sys / "fs/cgroup"
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return -(-int(quota) // int(period))
    with suppress(OSError, ValueError):
        quota_us, period_us = (int((group / f"cpu/cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return -(-quota_us // period_us) if quota_us > 0 else NO_QUOTA
    return NO_QUOTA


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse a list like "0-3,8", as the kernel writes it: ascending, without duplicates. Raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch("([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        if match is None:
            raise ValueError(f"expected numbers of CPUs like 0-3,8, got {part.strip()!r}")
        low, high = int(match[1]), int(match[2] or match[1])
        if not low <= high <= MAX_CPU:
            raise ValueError(f"expected a rising range of CPUs up to {MAX_CPU}, got {part.strip()!r}")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Inverse of parse_cpu_list: (0, 1, 2, 3, 8) becomes "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


class Gpu(NamedTuple):
    name: str
    memory_bytes: int
    driver: str


def gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi lists; empty if it is not installed or fails."""
    import subprocess

    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        rows = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
        return [Gpu(name, int(mib) * 2**20, driver) for name, mib, driver in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def has_driver() -> bool:
    """Whether an NVIDIA driver is loaded. Only workers check whether torch can use it."""
    return any(os.path.exists(file) for file in GPU_FILES)


def hides_gpus() -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides every GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")


def version(package: str) -> str:
    """The version of an installed package. Raises ModuleNotFoundError."""
    from importlib import metadata  # takes 7 ms, and few processes need it

    return metadata.version(package)


def cuda_extra() -> str | None:
    """The extra of this package with a CuPy for the installed torch's CUDA version, found without importing torch; None
    if torch is not installed or built without CUDA."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    try:
        text = (Path(torch.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^cuda\b.*= *['\"](\d+)\.", text, re.MULTILINE)
    return f"cuda{found.group(1)}" if found else None


def lacks_for_cuda(*, kernels: bool = True) -> str | None:
    """Return what this machine lacks for workers on a GPU, as a clause, or None. `kernels`: whether CuPy is needed,
    which compiles and launches this package's kernels; the reference backend works without."""
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
        extra = cuda_extra()
        wanted = f"vllm-lite[{extra}]" if extra else "vllm-lite[cuda12] or vllm-lite[cuda13]"
        return f"the package cupy is not installed; install {wanted}"
    return None


def allow_files(count: int) -> None:
    """Raise the soft limit of this process's open files to `count`, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def has_folder() -> bool:
    """Whether the current folder still exists. Libraries that torch loads end a process without one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
