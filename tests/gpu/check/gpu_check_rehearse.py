"""Rehearses all of `gpu_check` for a machine that is lent for minutes, on this machine's CPU: gpu_check_rehearse.py

It makes an environment with only the packages that such a machine's Python has (torch is this Python's own CPU build),
and a clean clone of the commit with the folder .carry (gpu_check_carry.py). Then it runs `scripts/gpu_check --emulate`
there, with an empty cache of kernels. It uses nothing of this checkout's environment, and prints the time of each stage
and the bytes of .carry.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from gpu_check_carry import MOST_BYTES, carried_bytes
from gpu_check_prepare import CARRIED, ROOT

IMAGE = (
    *("numpy>=2", "cupy-cuda13x==14.2.0", "nvidia-cuda-nvrtc==13.0.*", "transformers==5.17.0", "safetensors==0.8.0"),
    *("tokenizers", "huggingface-hub", "tqdm", "jinja2", "pyyaml", "regex", "rich", "httpx", "prometheus-client"),
    *("uvicorn", "uvloop", "psutil", "pytest", "hypothesis", "sentencepiece", "packaging"),
)
"""Packages of the machine's Python that this package or its tests import; it lacks msgspec, pyzmq, llguidance and
xxhash."""
KEPT = ("PATH", "LANG", "TMPDIR", "VLLM_LITE_EMULATOR_CACHE", "CXX")
"""Variables of this environment that the rehearsal sees."""
LIMIT_S = 7200.0


def make_environment(folder: Path, python: str) -> Path:
    """Make a virtual environment, unless it exists. Returns its Python."""
    own = folder / "bin" / "python"
    if not own.exists():
        if "+cpu" not in torch.__version__:
            raise SystemExit(f"torch {torch.__version__} is not a CPU build: several GB of CUDA would be fetched")
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        pip = [str(own), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, f"torch=={torch.__version__}", *IMAGE], check=True)
    return own


def clone(into: Path) -> None:
    """Clone the tracked files of the commit, and fill the folder .carry."""
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(into)], check=True)
    shutil.copytree(ROOT / CARRIED, into / CARRIED)


def rehearse(python: Path, folder: Path, limit_s: float, options: list[str]) -> int:
    """Returns the exit status of the check."""
    checkout, out = folder / "checkout", folder / "out"
    clone(checkout)
    variables = {name: os.environ[name] for name in KEPT if name in os.environ}
    variables |= {"HOME": str(folder), "VLLM_LITE_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    start_s = time.monotonic()
    command = [str(python), "scripts/gpu_check", "--emulate", "--out", str(out), "--limit-s", f"{limit_s:g}", *options]
    status = subprocess.run(command, cwd=checkout, env=variables, check=False).returncode
    seconds = time.monotonic() - start_s
    found = json.loads((out / "emulator-check.json").read_text())
    carried = carried_bytes(checkout / CARRIED)
    print(f"\nrehearsal of {found['commit']}: status {status}, {len(found['problems'])} problems, {seconds:.0f} s")
    print(f"carried {carried / 1e6:.1f} MB of {MOST_BYTES / 1e6:.0f}; versions {found['versions']}")
    for name, taken in found.get("seconds", {}).items():
        said = found.get(name, {}) if isinstance(found.get(name), dict) else {}
        why = said.get("skipped", "")
        print(f"{name:<12} {taken:>7.1f} s  {f'{len(why)} skipped' if isinstance(why, list) else why}")
    return status or int(carried > MOST_BYTES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, help="folder of the virtual environment, kept [a temporary one]")
    parser.add_argument("--python", default=sys.executable, help="the Python that it is made of [this one]")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    arguments, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="gpu_check_rehearsal_") as name:
        python = make_environment(arguments.environment or Path(name, "environment"), arguments.python)
        return rehearse(python.absolute(), Path(name), arguments.limit_s, options)


if __name__ == "__main__":
    sys.exit(main())
