"""The checks of `vllm-lite doctor`. Each is a function that yields lines; an exception becomes a line, too."""

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from vllm_lite.runtime import machine

GIB = 1024**3
PACKAGE = "vllm-lite"
MODULES = {"pyzmq": "zmq", "pyyaml": "yaml", "pillow": "PIL"}
"""Modules of distributions with other names."""
MIN_FILES, MIN_MEMORY, MIN_SHM, MIN_TMP = 4096, 2 * GIB, 512 << 20, 256 << 20
"""Minimum values. MIN_SHM: what several GPUs need in /dev/shm; a container has 64 MiB by default."""
PROBE_S = 60.0
IPC_BYTES = 107
ISAS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8", "asimddp", "i8mm", "bf16")


@dataclass(frozen=True)
class Line:
    """One finding; `advice` says how to fix it unless it is OK."""

    level: Literal["OK", "WARN", "FAIL"]
    name: str
    text: str
    advice: str = ""


def ok_or_warn(name: str, text: str, advice: str | None) -> Line:
    """A finding that is OK without `advice`, else a warning."""
    return Line("OK" if advice is None else "WARN", name, text, advice or "")


def examine(port: int = 8000) -> list[Line]:
    """Run all checks and return the lines of the report."""
    checks: list[tuple[str, Callable[[], Iterator[Line]]]] = [
        ("python", python),
        ("packages", packages),
        ("torch", torch_build),
        ("native kernels", native_kernels),
        ("cpu", cpu),
        ("cores", cores),
        ("memory", memory),
        ("gpu", gpu),
        ("port", lambda: ports(port)),
        ("open files", open_files),
        ("shared memory", shared_memory),
        ("TMPDIR", temporary_files),
        ("model hub", model_hub),
        ("settings", settings),
        ("instances", left_overs),
    ]
    return [line for name, check in checks for line in guarded(name, check)]


def guarded(name: str, check: Callable[[], Iterator[Line]]) -> Iterator[Line]:
    """Yield the lines of a check, and a FAIL line if it raises."""
    try:
        yield from check()
    except Exception as error:
        yield Line("FAIL", name, f"cannot be looked at: {type(error).__name__}: {error}", "install vllm-lite again")


def as_json(lines: list[Line]) -> list[dict[str, str]]:
    return [asdict(line) for line in lines]


# ---- software


def python() -> Iterator[Line]:
    text = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield Line("FAIL", "python", text, "install Python 3.11, 3.12 or 3.13")
    else:
        is_tested = (platform.system(), platform.machine()) == ("Linux", "x86_64")
        yield ok_or_warn("python", text, None if is_tested else "Linux on x86-64 is what is tested")


def packages() -> Iterator[Line]:
    """Compare the installed packages with the declared ones, and import them in a child."""
    try:
        own, declared = metadata.version(PACKAGE), metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        yield Line("FAIL", PACKAGE, "is not installed, only found", "pip install . in its folder")
        return
    yield Line("OK", PACKAGE, own)
    importable = []
    needed: dict[tuple[str, str], list[str | None]] = {}  # name and version -> extras, which may share it
    for requirement in declared:
        name, least, extra = _parts(requirement)
        if extra not in ("test", "dev"):
            needed.setdefault((name, least), []).append(extra)
    for (name, least), extras in needed.items():
        found, is_optional = _version(name), all(extras)
        if found is None and is_optional:
            yield Line("OK", name, f"not installed (optional: {', '.join(f'{PACKAGE}[{each}]' for each in extras)})")
        elif found is None:
            yield Line("FAIL", name, "not installed", f"pip install '{name}>={least}'")
        elif _numbers(found) < _numbers(least):
            yield Line("FAIL", name, f"{found}, at least {least} is needed", f"pip install -U '{name}>={least}'")
        else:
            yield Line("OK", name, found)
            if name != "torch" and not is_optional:
                importable.append(MODULES.get(name, name.replace("-", "_")))
    broken = probe(
        "import importlib, json, sys\nbroken = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        importlib.import_module(name)\n"
        "    except BaseException as error:\n        broken[name] = f'{type(error).__name__}: {error}'\n"
        "print(json.dumps(broken))",
        *importable,
    )
    for name, error in broken.items():
        yield Line("FAIL", name, f"cannot be imported: {error}", "install it again")


def torch_build() -> Iterator[Line]:
    if _version("torch") is None:
        return  # reported by packages()
    found = probe(
        "import json, torch\n"
        "cuda = torch.cuda.is_available()\n"
        "count = torch.cuda.device_count() if cuda else 0\n"
        "peers = [[i, j] for i in range(count) for j in range(count)\n"
        "         if i != j and not torch.cuda.can_device_access_peer(i, j)]\n"
        "names = [f'{torch.cuda.get_device_name(i)} sm_%d%d' % torch.cuda.get_device_capability(i)\n"
        "         for i in range(count)]\n"
        "nccl = torch.cuda.nccl.version() if cuda and torch.distributed.is_nccl_available() else ()\n"
        "print(json.dumps(dict(version=torch.__version__, cuda=torch.version.cuda, available=cuda, peers=peers,\n"
        "                      names=names, threads=torch.get_num_threads(), nccl=nccl)))"
    )
    if "error" in found:
        yield Line("FAIL", "torch", f"cannot be imported: {found['error']}", "install it again")
        return
    built = f"for CUDA {found['cuda']}" if found["cuda"] else "for CPUs"
    yield Line("OK", "torch build", f"{found['version']} {built}, {found['threads']} threads")
    for name in found["names"]:
        yield Line("OK", "torch sees", name)
    if len(found["names"]) > 1:
        yield from _between_gpus(found)


def _between_gpus(found: dict[str, Any]) -> Iterator[Line]:
    """Checks for a model on several GPUs."""
    if found["peers"]:
        pairs = ", ".join(f"{first}-{second}" for first, second in found["peers"])
        yield Line("WARN", "peer access", f"not between GPUs {pairs}", "what they exchange goes through host memory")
    else:
        yield Line("OK", "peer access", f"between all {len(found['names'])} GPUs")
    if found["nccl"]:
        yield Line("OK", "nccl", ".".join(map(str, found["nccl"])))
    else:
        advice = "install a torch with it; --tensor-parallel-backend gloo works without, much slower"
        yield Line("WARN", "nccl", "this torch is built without it", advice)


def native_kernels() -> Iterator[Line]:
    fields = _cpu_fields()
    flags = fields.get("flags", fields.get("Features", "")).split()
    has = [isa for isa in ISAS if isa in flags]
    found = probe(
        "import json\nfrom vllm_lite.kernels.cpu.library import ABI, isa, open_library\n"
        "open_library()\nprint(json.dumps(dict(abi=ABI, isa=isa())))"
    )
    if "error" in found:
        advice = "install a C++ compiler and vllm-lite again; until then plain torch does the work, much slower"
        yield Line("WARN", "native kernels", found["error"], advice)
        return
    text = f"ABI {found['abi']}, using {found['isa']}; this CPU has {', '.join(has) or 'nothing beyond the baseline'}"
    forced = os.environ.get("VLLM_LITE_ISA")
    text += "" if forced is None else f"; VLLM_LITE_ISA is {forced}"
    yield ok_or_warn("native kernels", text, None if forced is None else "unset it for the best there is")


# ---- hardware


def cpu() -> Iterator[Line]:
    physical, logical, allowed = machine.num_physical_cores(), os.cpu_count() or 1, len(os.sched_getaffinity(0))
    name = _cpu_fields().get("model name", platform.machine())
    text = f"{name}: {physical} physical cores to use, {allowed} of {logical} hardware threads"
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) < physical:
        yield Line("WARN", "cpu", f"{text}; OMP_NUM_THREADS is {threads}", "unset it, or give --cpu-threads")
    else:
        yield Line("OK", "cpu", text)


def cores() -> Iterator[Line]:
    """The NUMA nodes, and the bindings of --cpu-bind auto for as many workers as nodes, at least 2."""
    from vllm_lite.runtime.cpu_binding import plan_binding, read_topology

    topology = read_topology()
    world = max(2, topology.num_nodes)
    nodes = f"{topology.num_nodes} NUMA node{'s' * (topology.num_nodes > 1)}"
    plans = [plan_binding("auto", rank, world, None, topology) for rank in range(world)]
    if all(plan.cpus for plan in plans):
        bound = "; ".join(f"{rank}: {plan}" for rank, plan in enumerate(plans))
        yield Line("OK", "cores", f"{nodes}; workers of -tp {world} get {bound}")
    else:
        why = "too few cores" if len(topology.cores) < world else f"the container may use {topology.quota} CPUs"
        yield Line("OK", "cores", f"{nodes}; workers of -tp {world} get {plans[0]}: {why}")


def memory() -> Iterator[Line]:
    limit = machine.memory_limit_bytes()
    fields = dict(re.findall(r"^(\w+):\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE))
    free = min(limit, int(fields.get("MemAvailable", "0")) * 1024)
    text = f"{_gib(limit)}, of which {_gib(free)} are available"
    advice = "end what uses it; vllm-lite plan MODEL says what a model takes"
    yield ok_or_warn("memory", text, advice if free < MIN_MEMORY else None)


def gpu() -> Iterator[Line]:
    if not machine.has_driver():
        yield Line("OK", "gpu", "no NVIDIA driver: workers run on the CPU")
        return
    for device in machine.gpus():
        yield Line("OK", "gpu", f"{device.name}, {_gib(device.memory_bytes)}, driver {device.driver}")
    lack = machine.lacks_for_cuda()
    if lack is not None:
        yield Line("WARN", "gpu", f"is not used: {lack}", "--device cpu says that this is meant")
        return
    found = probe(
        "import cupy, json\nfrom cupy.cuda import nvrtc, runtime\n"
        "kernel = cupy.RawKernel('extern \"C\" __global__ void k(int* x) { *x = 1; }', 'k')\n"
        "x = cupy.zeros(1, dtype='int32'); kernel((1,), (1,), (x,))\n"
        "print(json.dumps(dict(cupy=cupy.__version__, nvrtc='%d.%d' % nvrtc.getVersion(), ran=int(x[0]),\n"
        "                      runtime=runtime.runtimeGetVersion())))"
    )
    if found.get("ran") == 1:
        text = f"cupy {found['cupy']} with NVRTC {found['nvrtc']} compiles and runs kernels"
        yield Line("OK", "cupy", text)
    else:
        advice = "install vllm-lite[cuda12] or vllm-lite[cuda13], as the driver's CUDA version is"
        yield Line("FAIL", "cupy", f"cannot run a kernel: {found.get('error')}", advice)


# ---- the system


def ports(port: int) -> Iterator[Line]:
    with socket.socket() as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind(("127.0.0.1", port))
        except OSError as error:
            yield Line("WARN", "port", f"{port} cannot be listened on: {error.strerror}", "give serve another --port")
        else:
            yield Line("OK", "port", f"{port} is free")


def open_files() -> Iterator[Line]:
    """Check the hard limit, to which servers raise the soft one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = machine.MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, machine.MAX_FILES)
    advice = f"ulimit -Hn {machine.MAX_FILES} as root, or LimitNOFILE of a service; each connection takes one"
    yield ok_or_warn("open files", f"up to {most}", advice if most < MIN_FILES else None)


def shared_memory() -> Iterator[Line]:
    """Check /dev/shm, which NCCL needs between GPUs. Workers on a CPU use an anonymous file, which has no limit of its
    own."""
    from vllm_lite.runtime.group_memory import create_group_memory

    place = "/dev/shm"  # noqa: S108 - only read
    free, several = shutil.disk_usage(place).free, len(machine.gpus()) > 1
    text = f"{place} has {_gib(free)} free; only NCCL needs it, between GPUs"
    advice = "give a container --shm-size 1g, or --ipc host" if several and free < MIN_SHM else None
    yield ok_or_warn("shared memory", text, advice)
    try:
        os.close(create_group_memory())
    except OSError as error:
        what = f"workers cannot share memory (memfd_create: {error.strerror})"
        yield Line("WARN", "shared memory", what, "-tp does not work here; let the container make that call")


def temporary_files() -> Iterator[Line]:
    folder = tempfile.gettempdir()
    with tempfile.NamedTemporaryFile(prefix="vl-"):
        pass
    free, length = shutil.disk_usage(folder).free, len(os.fsencode(f"{folder}/vl-12345678/workers-99.9999"))
    if length > IPC_BYTES:
        text = f"{folder}: a socket in it would have a path of {length} bytes, at most {IPC_BYTES} are possible"
        yield Line("FAIL", "TMPDIR", text, "set TMPDIR to a shorter folder")
    elif free < MIN_TMP:
        yield Line("WARN", "TMPDIR", f"{folder} has {_gib(free)} free", "free some, or set TMPDIR to another folder")
    else:
        yield Line("OK", "TMPDIR", f"{folder} has {_gib(free)} free, socket paths take {length} of {IPC_BYTES} bytes")


def model_hub() -> Iterator[Line]:
    from huggingface_hub import constants, get_token

    cache = Path(constants.HF_HUB_CACHE)
    nearest = next(folder for folder in (cache, *cache.parents) if folder.exists())
    token = "a token is set" if get_token() else "no token"
    offline = ", offline" if constants.is_offline_mode() else ""
    text = f"{constants.ENDPOINT}{offline}, {token}; cache {cache} with {_gib(shutil.disk_usage(nearest).free)} free"
    advice = "the cache cannot be written: set HF_HOME to a folder that can"
    yield ok_or_warn("model hub", text, None if os.access(nearest, os.W_OK) else advice)


def settings() -> Iterator[Line]:
    """Check that every variable of this package and of vLLM is known and has a valid value."""
    from vllm_lite.errors import ConfigError
    from vllm_lite.runtime.settings_sources import ENV_PREFIX
    from vllm_lite.server.config import ServeConfig

    notices: list[str] = []
    try:
        ServeConfig.load(notice=notices.append)
    except ConfigError as error:
        last = Line("FAIL", "settings", str(error), "correct the variable")
    else:
        given = sorted(name for name in os.environ if name.startswith(ENV_PREFIX))
        last = Line("OK", "settings", ", ".join(given) or f"no {ENV_PREFIX} variables")
    for text in notices:
        yield Line("WARN", "settings", text, "unset what is not meant for this server")
    yield last


def left_overs() -> Iterator[Line]:
    from vllm_lite.client.engines.instances import find

    found = find()
    stale = [instance for instance in found if instance.state == "stale"]
    yield Line("OK", "instances", f"{len(found) - len(stale)} of yours are running")
    if stale:
        yield Line("WARN", "instances", f"{len(stale)} have left files behind", "vllm-lite ps --clean")


# ---- probes and helpers


def probe(program: str, *words: str) -> dict[str, Any]:
    """Run `program` in a child process, as a broken package may crash it. Returns the object it prints, or {"error":
    why}."""
    command = [sys.executable, "-W", "ignore", "-c", program, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {PROBE_S:.0f} s"}
    if done.returncode < 0:
        return {"error": f"killed by signal {-done.returncode}"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": lines[-1].strip() if lines else f"exit status {done.returncode}"}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _parts(requirement: str) -> tuple[str, str, str | None]:
    """Split a requirement into name, minimum version and extra: 'transformers>=5; extra == "hf"'."""
    specifier, _, marker = requirement.partition(";")
    name = re.split(r"[<>=!~ \[(]", specifier.strip())[0]
    least = re.search(r">=\s*([\w.]+)", specifier)
    extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", marker)
    return name.lower(), least.group(1) if least else "0", extra.group(1) if extra else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part)  # type: ignore[index]


def _cpu_fields() -> dict[str, str]:
    text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
