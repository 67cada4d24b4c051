"""A support archive without secrets: doctor's report, and the relevant environment.

Only variables of known kinds are included, and no value of a variable whose name suggests a secret. These values,
strings that look like tokens, user names in URLs and the home folder are then removed everywhere in the text.
"""

import io
import json
import os
import re
import resource
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from vllm_lite.tools.doctor.checks import Line, as_json

HIDDEN = "[hidden]"
TAKEN = re.compile(
    r"(VLLM_LITE|HF|HUGGING_FACE|CUDA|NVIDIA|NCCL|OMP|MKL|KMP|TORCH|CUPY|PYTHON|LD|LC|XDG)_|"
    r"(PATH|TMPDIR|LANG|VIRTUAL_ENV|CONDA_PREFIX|MALLOC_\w+|(https?|no|all)_proxy)$",
    re.IGNORECASE,
)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE|DSN", re.IGNORECASE)
LOOKS_SECRET = re.compile(r"\b(hf_\w{6,}|sk-[\w-]{6,}|gh[pousr]_\w{6,}|(?<=Bearer )\S+)|(?<=//)[^/@\s]+(?=@)")
SHORTEST, SHORTEST_PIECE = 4, 8
"""Minimum length of a secret that is removed, and of one of several in a variable; shorter ones are ordinary words."""
ORDINARY = {"true", "false", "none", "null", "auto"}


class Redactor:
    """Removes secrets and the home folder from a text."""

    def __init__(self, env: Mapping[str, str], home: Path, token_file: Path | None = None) -> None:
        values = [value for name, value in env.items() if SECRET.search(name) and not value.isdigit()]
        if token_file is not None and token_file.is_file():
            values.append(token_file.read_text(errors="replace"))
        wholes = {value.strip() for value in values}
        pieces = {piece for value in values for piece in re.split(r"[\s,;]+", value) if len(piece) >= SHORTEST_PIECE}
        found = {text for text in wholes | pieces if len(text) >= SHORTEST and text.lower() not in ORDINARY}
        found = {text for text in found if not text.startswith("/")}  # a path of a secret is not secret
        self._secrets = sorted(found | {json.dumps(text)[1:-1] for text in found}, key=len, reverse=True)
        self._home = str(home)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        text = LOOKS_SECRET.sub(HIDDEN, text)
        return text.replace(self._home, "~") if len(self._home) > 1 else text

    def variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """The variables for the archive."""
        taken = {name: value for name, value in sorted(env.items()) if TAKEN.match(name)}
        return {name: HIDDEN if SECRET.search(name) else self(value) for name, value in taken.items()}


def redactor() -> Redactor:
    """Make the redactor for this user's environment."""
    home = Path(os.environ.get("HOME") or os.path.expanduser("~"))
    hub = Path(os.environ.get("HF_HOME") or home / ".cache" / "huggingface")
    return Redactor(os.environ, home, Path(os.environ.get("HF_TOKEN_PATH") or hub / "token"))


def write_bundle(path: Path, lines: list[Line]) -> None:
    """Write the archive, readable only by this user. Raises OSError."""
    hide = redactor()
    with (
        open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file,
        tarfile.open(fileobj=file, mode="w:gz") as archive,
    ):
        for name, text in _parts(lines, hide):
            data = hide(text).encode()
            entry = tarfile.TarInfo(f"vllm-lite-doctor/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))


def _parts(lines: list[Line], hide: Redactor) -> Iterator[tuple[str, str]]:
    yield "doctor.json", json.dumps(as_json(lines), indent=1, ensure_ascii=False)
    yield "environment.json", json.dumps(hide.variables(os.environ), indent=1, ensure_ascii=False)
    found = sorted({f"{package.metadata['Name']}=={package.version}" for package in metadata.distributions()})
    yield "packages.txt", "\n".join(found) + "\n"
    for name, path in (("cpuinfo.txt", "/proc/cpuinfo"), ("meminfo.txt", "/proc/meminfo")):
        yield name, _read(path).partition("\n\n")[0]
    cgroup = {name: _read(f"/sys/fs/cgroup/{name}").strip() for name in ("cpu.max", "memory.max", "memory.current")}
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in names}
    yield "limits.json", json.dumps({"kernel": list(os.uname())[2:], "cgroup": cgroup, "ulimit": limits}, indent=1)
    yield "nvidia-smi.txt", _output("nvidia-smi")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError as error:
        return f"{error.strerror}\n"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{error}\n"
    return done.stdout + done.stderr
