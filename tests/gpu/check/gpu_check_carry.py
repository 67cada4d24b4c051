"""Fill a folder with the files that `gpu_check` needs on a machine without a network: gpu_check_carry.py [FOLDER]

- wheels of what this package needs and such a machine's Python lacks
- kernels.tar.xz: the kernels compiled ahead (gpu_check_kernels.py), which the stage `kernels` puts into the cache
- the native library, which the stage `native` puts into its place

Beside the checkout's tracked files nothing else is needed. Put the folder, `.carry` by default, into the checkout's
root; git should ignore it.
"""

import argparse
import subprocess
import sys
import tarfile
from importlib.resources import files
from pathlib import Path

import gpu_check_kernels as kernels
from gpu_check_prepare import CARRIED, KERNELS, LIBRARY, ROOT

from vllm_lite.kernels import cpu
from vllm_lite.kernels.cuda.compiler import cache_folder

WHEELS = ("msgspec", "pyzmq", "llguidance>=1.9", "xxhash")
PLATFORMS = ("manylinux_2_31", "manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
"""All that a wheel may name: pip takes an older release rather than one for another of these."""
MOST_BYTES = 60_000_000


def download_wheels(folder: Path, python: str) -> None:
    """Download the wheels for this version of Python on x86-64, except those that `folder` already has."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version", python, "--implementation", "cp"]
    command += [part for platform in PLATFORMS for part in ("--platform", f"{platform}_x86_64")]
    subprocess.run([*command, *WHEELS], check=True)


def pack_kernels(built: Path, into: Path) -> int:
    """Returns how many kernels the archive has."""
    paths = sorted(built.glob("*.cubin"))
    with tarfile.open(into, "w:xz") as archive:
        for path in paths:
            archive.add(path, arcname=path.name)
    return len(paths)


def carried_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / CARRIED)
    parser.add_argument("--python", action="append", help="version of Python there [3.12]")
    parser.add_argument("--arch", default=kernels.ARCH, help=f"architecture of its GPU [{kernels.ARCH}]")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    for python in arguments.python or ["3.12"]:
        download_wheels(folder, python)
    built = cache_folder().with_name(f"kernels-ahead-{arguments.arch}")
    made = kernels.fill(built, arguments.arch, kernels.wanted())
    count = pack_kernels(built, folder / KERNELS)
    print(f"{count} kernels for {arguments.arch}, {made} of them compiled now")
    native = files("vllm_lite") / "_native" / LIBRARY.name
    if cpu.available():  # a library of another ABI would be rebuilt there
        (folder / LIBRARY.name).write_bytes(native.read_bytes())
    else:
        print("no native library of this ABI is built here: call make -B venv first", file=sys.stderr)
    size = carried_bytes(folder)
    print(f"{folder}: {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        print(f"more than {MOST_BYTES / 1e6:.0f} MB", file=sys.stderr)
    return int(size > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
