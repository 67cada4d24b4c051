"""Preparation of `gpu_check` in a bare checkout: wheels, compiled kernels and the native library.

Nothing is installed. Wheels are unpacked into a folder that is in every part's PYTHONPATH, kernels into the cache that
every worker reads. The native library is taken from CARRIED. If it is not there it is built, by CMake or with the
commands of CMakeLists.txt, and moved to its place when it is complete.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LIBRARY = Path("vllm_lite", "_native", "libvllm_lite_cpu.so")
CARRIED = ".carry"
"""The folder of a checkout that gpu_check_carry.py fills."""
KERNELS = "kernels.tar.xz"
WHEEL_FOLDERS = (CARRIED, ".whl", "wheels", "../wheels")
ASK = "from vllm_lite.kernels import cpu; print(cpu.available())"


def wheel_folder(given: str | None) -> Path | None:
    """Find the folder of wheels: as given, or beside or in the checkout; None if there is none."""
    folders = [Path(given)] if given else [ROOT / name for name in WHEEL_FOLDERS]
    return next((folder for folder in folders if any(folder.glob("*.whl"))), None)


def unpack_wheels(folder: Path, into: Path) -> tuple[list[str], list[str]]:
    """Unpack the wheels of `folder` that this Python can load. Returns their names, and the names of the others. A
    wheel is an archive of files for site-packages, so this needs no pip, which some images lack.
    """
    taken, left = [], []
    for wheel in sorted(folder.glob("*.whl")):
        if fits(wheel.name):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
            taken.append(wheel.name)
        else:
            left.append(wheel.name)
    return taken, left


def fits(name: str) -> bool:
    """Whether this Python on this machine can load the wheel of this name: NAME-VERSION[-BUILD]-PYTHON-ABI-PLATFORM."""
    parts = name.removesuffix(".whl").split("-")
    if len(parts) < 5:
        return False
    python, abi, platform = (part.split(".") for part in parts[-3:])
    major, minor = sys.version_info[:2]
    own = f"cp{major}{minor}"
    versions = [int(found[1]) for tag in python if (found := re.fullmatch(rf"cp{major}(\d+)", tag))]
    loads = own in python or f"py{major}" in python or ("abi3" in abi and any(v <= minor for v in versions))
    machine = sysconfig.get_platform().replace("-", "_").replace(".", "_").removeprefix("linux_")
    return loads and any(tag == "any" or (tag.endswith(machine) and "linux" in tag) for tag in platform)


def unpack_kernels(archive: Path, into: Path) -> int:
    """Unpack compiled kernels into the cache, readable only by this user, as the cache requires. Returns the number of
    kernels."""
    into.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tarfile.open(archive, "r:xz") as opened:
        names = [member for member in opened if member.isfile() and member.name.endswith(".cubin")]
        opened.extractall(into, names, filter="data")
    for member in names:
        (into / member.name).chmod(0o600)
    return len(names)


class NativeBuild:
    """The build of the native library, while other stages run. Without the library a step's inputs take ten times as
    long, and the GPU waits."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self._pool = ThreadPoolExecutor(1)
        self._result: Future[str] | None = None

    def start(self, seconds: float) -> str:
        """Start the build, unless there is a library. Returns a sentence that says what is done."""
        if self._answers():
            return "the native library is there"
        carried = self.root / CARRIED / LIBRARY.name
        if carried.exists() and not self._put(carried) and self._answers():
            return "the native library was carried along"
        if shutil.which("cmake") is None:
            return "no native library: there is no cmake to build it with"
        self._result = self._pool.submit(self._build, seconds)
        return "the native library is being built"

    def wait(self) -> str:
        """Wait for the build, which has its time limit. Returns why it failed, or nothing."""
        return "" if self._result is None else self._result.result()

    def _answers(self) -> bool:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(self.root), os.environ.get("PYTHONPATH", "")])}
        try:
            done = subprocess.run(
                [sys.executable, "-c", ASK],
                cwd=self.root,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.stdout.strip().endswith("True")

    def _build(self, seconds: float) -> str:
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        with tempfile.TemporaryDirectory() as folder:
            make = ["cmake", "-S", str(self.root), "-B", folder, "-DCMAKE_BUILD_TYPE=Release", *generator]
            build = ["cmake", "--build", folder, "-j", str(os.cpu_count() or 2)]
            for command in (make, build):
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
                except subprocess.TimeoutExpired:
                    return f"the native library was not built in {seconds:.0f} s"
                except OSError as error:
                    return f"{command[0]}: {error}"
                if done.returncode:
                    return f"{' '.join(command[:2])}: {' | '.join((done.stdout + done.stderr).splitlines()[-3:])}"
            return self._put(Path(folder, LIBRARY.name))

    def _put(self, built: Path) -> str:
        place = self.root / LIBRARY
        try:
            place.parent.mkdir(exist_ok=True)
            new = place.with_suffix(".new")
            shutil.copy2(built, new)
            new.replace(place)
        except OSError as error:
            return f"the native library cannot be put into its place: {error}"
        return ""
