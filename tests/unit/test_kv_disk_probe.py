"""The disk that KV is to be kept on, as plan and doctor see it."""

import json
from pathlib import Path

import pytest

from vllm_lite.kv_disk import probe
from vllm_lite.kv_disk.probe import DiskProbe, file_system, probe_disk
from vllm_lite.tools.cli import main
from vllm_lite.tools.doctor.disk import kv_disk


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe of two parts, as only its form is tested."""
    monkeypatch.setattr(probe, "PROBE_BYTES", 2 * probe.PART_BYTES)


def test_rates_are_measured_where_the_folder_would_be_made_and_nothing_is_left(tmp_path: Path) -> None:
    found = probe_disk(tmp_path / "not" / "yet")
    assert found.free_bytes > 0
    assert found.write_bytes_per_s > 1e6
    assert found.read_bytes_per_s > 1e6
    assert not list(tmp_path.iterdir())


def test_the_kind_is_taken_from_the_deepest_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a b" / "c").mkdir(parents=True)
    deep = str(tmp_path / "a b").replace(" ", "\\040")
    lines = (
        f"2 1 8:1 / {deep} rw shared:3 - nfs4 host:/x rw\n"
        f"3 1 8:1 / {tmp_path}/a rw - tmpfs none rw\n"
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda *_: lines)
    assert file_system(tmp_path / "a b" / "c") == "nfs4"
    assert file_system(tmp_path) == "ext4"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("ext4", None),
        ("xfs", None),
        ("tmpfs", "is memory"),
        ("overlay", "container's own layer"),
        ("nfs4", "over a network"),
        ("fuse.sshfs", "over a network"),
        ("cifs", "over a network"),
    ],
)
def test_places_that_are_no_disk_are_named(kind: str, says: str | None) -> None:
    warning = DiskProbe(kind, 10**12, 1e9, 1e9).warning
    assert (warning is None) if says is None else (warning is not None and says in warning)


def test_a_full_disk_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_BYTES", 1 << 60)
    found = probe_disk(tmp_path)
    assert (found.write_bytes_per_s, found.read_bytes_per_s) == (0.0, 0.0)


def test_the_doctor_measures_and_refuses_like_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "kv").mkdir()
    folder.chmod(0o755)
    levels = {line.text: line.level for line in kv_disk(str(folder))}
    assert any("0755" in text and level == "FAIL" for text, level in levels.items())
    assert any("MB/s written" in text for text in levels)
    slow = DiskProbe("tmpfs", 10, 1e6, 1e6)
    monkeypatch.setattr("vllm_lite.kv_disk.probe.probe_disk", lambda _: slow)
    folder.chmod(0o700)
    assert [line.level for line in kv_disk(str(folder))] == ["WARN", "WARN", "WARN"]


def test_the_plan_has_the_size_of_the_disk_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device", "cpu", "--memory", "16GiB", "--kv-cache-dir", str(tmp_path), "--kv-cache-dir-size", "4GiB"]
    assert main(["plan", "demo", *flags]) == 0
    out = capsys.readouterr().out
    assert "KV on disk" in out
    assert "MB/s" in out
    assert main(["plan", "demo", "--json", *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["disk"]["tokens"] == (4 << 30) // plan["kv_bytes_per_token"]
    assert main(["plan", "demo", *flags[:-1], "1000000GiB"]) == 0
    assert "less than --kv-cache-dir-size" in capsys.readouterr().out
