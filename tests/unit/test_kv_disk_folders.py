"""A KV cache's directory that has other contents, is removed under an engine, or is shared with other users."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.acceptance.kv_disk_faults import ITEM_BYTES
from tests.unit.test_kv_disk import chain, open_store, read, write
from vllm_lite.kv_disk.format import PAGE
from vllm_lite.kv_disk.usage import held_files, models_in
from vllm_lite.tools.cli import main

FILE_BYTES = PAGE + 4 * ITEM_BYTES


def other_things(root: Path) -> dict[Path, bytes]:
    """Files in a home, some of which lie nearly where a store would put its own."""
    model, digits = "ab" * 16, "cd" * 20
    found = dict[Path, bytes]()
    for name in (
        "letters/love.txt",
        "letters/.draft-1-1-1",
        f"{model}/notes",
        f"{model}/0-1/readme",
        f"{model}/0-1/ab/photo.jpg",
        f"{model}/0-1/ab/.draft-letter",
        f"{model}/first/ab/{digits}",
        f"{model}/0-1/abc/{digits}",
        f"{model[:-1]}/0-1/ab/{digits}",
        f"{digits}/0-1/ab/{digits}",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found.setdefault(path, name.encode() * 1000))
        os.utime(path, (1, 1))
    linked = root.parent / "elsewhere"
    (linked / "0-1" / "ab").mkdir(parents=True)
    path = linked / "0-1" / "ab" / digits
    path.write_bytes(found.setdefault(path, b"elsewhere" * 1000))
    (root / ("ef" * 16)).symlink_to(linked)
    return found


# ---- what is none of ours


def test_a_quota_does_not_remove_other_files_in_the_folder(tmp_path: Path) -> None:
    """Somebody may give a home as the directory."""
    (root := tmp_path / "home").mkdir()
    others = other_things(root)
    store = open_store(root, quota=5 * FILE_BYTES)
    for number in range(12):
        write(store, chain(4, number))
    store.look()
    store.sweep()
    store.clear()
    assert {path: path.read_bytes() for path in others} == others
    assert not list(held_files(root))


@pytest.mark.parametrize("which", ["", "ab", "model's"])
def test_rm_does_not_remove_other_files_in_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], which: str
) -> None:
    (root := tmp_path / "home").mkdir(mode=0o700)
    others = other_things(root)
    store = open_store(root)
    write(store, chain(4))
    name = {"": [], "ab": ["ab" * 16], "model's": [store.folders.path.parent.name]}[which]
    assert main(["cache", "rm", str(root), *name]) == 0
    assert {path: path.read_bytes() for path in others} == others
    assert len(list(held_files(root))) == (which == "ab")
    assert store.folders.path.exists() == (which == "ab"), "of ours nothing is left, no folder either"
    assert "removed" in capsys.readouterr().out


def test_foreign_files_in_a_folder_of_files_are_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, chain(3))
    (part,) = store.folders.parts()
    (odd := Path(store.folders.part(part), ".nfs0001")).write_bytes(b"open by somebody")
    again = open_store(tmp_path)
    again.look()
    assert all(read(again, chain(3)))
    assert odd.exists()
    assert not again.dropped


# ---- the directory under an engine


def test_a_directory_that_was_removed_is_not_made_anew(tmp_path: Path) -> None:
    """A new directory would have no seed, and be readable by others."""
    (root := tmp_path / "kv").mkdir(mode=0o700)
    store = open_store(root)
    write(store, chain(3))
    shutil.rmtree(root)
    assert write(store, chain(3, 1)) == 0
    assert not root.exists()
    assert store.errors == {"write": 1}
    assert isinstance(store.refusal, FileNotFoundError)
    store.look()
    assert not store.keys()
    assert store.take_changes().removed == chain(3)


@pytest.mark.parametrize("is_link", [False, True])
def test_nothing_is_written_to_another_directory_of_the_same_name(tmp_path: Path, is_link: bool) -> None:
    """As after the unmounting of a file system."""
    (root := tmp_path / "kv").mkdir(mode=0o700)
    store = open_store(root)
    away = root.rename(tmp_path / "away")
    (other := tmp_path / "other").mkdir()
    root.symlink_to(other) if is_link else root.mkdir()
    assert write(store, chain(3)) == 0
    assert not list(root.iterdir())
    root.unlink() if is_link else root.rmdir()
    away.rename(root)
    store.clock.now_s += 11.0  # type: ignore[attr-defined]
    assert write(store, chain(3)), "it is back"


def test_blocks_removed_by_rm_are_not_found_and_written_again(tmp_path: Path) -> None:
    (root := tmp_path / "kv").mkdir(mode=0o700)
    store = open_store(root)
    write(store, chain(3))
    store.look()
    store.take_changes()
    assert main(["cache", "rm", str(root)]) == 0
    store.look()
    assert store.take_changes().removed == chain(3)
    assert write(store, chain(3))
    assert store.take_changes().added == chain(3)
    assert (store.folders.path.parent / "about").exists()
    assert {path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_dir()} == {0o700}


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """Files behind it would not count."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (root := tmp_path / "kv").mkdir()
    store = open_store(root)
    store.folders.path.parent.symlink_to(elsewhere)
    assert write(store, chain(3)) == 0
    assert not list(elsewhere.iterdir())
    assert "a link or a file" in str(store.refusal)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM])
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_file_that_could_not_be_read_for_want_of_something_else_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    store = open_store(tmp_path)
    write(store, chain(3))
    os.utime(store.folders.part(store.folders.parts()[0]), (1, 1))  # it has not changed for long
    store.look()

    def refuse(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        assert not any(read(store, chain(3)))
    assert store.errors == {"read": 1}
    assert not store.dropped
    store.look()
    assert all(read(store, chain(3)))


def test_a_file_that_another_engine_has_evicted_is_no_error(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path)
    write(first, chain(3))
    second.look()
    first.forget(chain(3))
    assert not any(read(second, chain(3)))
    assert not second.errors
    assert not second.dropped


# ---- several engines


def test_engines_of_several_models_keep_to_one_quota(tmp_path: Path) -> None:
    quota = 100 * FILE_BYTES
    stores = {model: open_store(tmp_path, model, quota=quota) for model in (b"one", b"two", b"three", b"four")}
    most = 0
    for number in range(60):
        for model, store in stores.items():
            write(store, chain(4, number), model)
        most = max(most, sum(held.num_bytes for held in held_files(tmp_path)))
    assert 0.85 * quota < most <= quota


# ---- the command


def test_show_waits_for_no_pipe_and_follows_no_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root := tmp_path / "kv").mkdir(mode=0o700)
    store = open_store(root)
    for number in range(3):
        write(store, chain(3, number))
    pipe, link, _ = [Path(held.path) for held in held_files(root)]
    for path in (pipe, link):
        path.unlink()
    os.mkfifo(pipe)
    link.symlink_to("/dev/zero")
    (about := store.folders.path.parent / "about").unlink()
    os.mkfifo(about)
    assert main(["cache", "show", str(root)]) == 0
    found = capsys.readouterr().out
    assert "unknown" in found
    assert "3 of " in found
    assert "2 files cannot be read" in found


def test_ls_prints_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root := tmp_path / "kv").mkdir(mode=0o700)
    store = open_store(root)
    write(store, chain(3))
    (store.folders.path.parent / "about").write_text("evil\x1b[2Jmodel\n")
    assert main(["cache", "ls", str(root)]) == 0
    assert "evil?[2Jmodel?" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["ls", "show", "rm"])
def test_files_that_vanish_during_a_scan_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    """Another one removes all, at each moment at which this one looks."""
    scandir = os.scandir
    for moment in range(6):
        (root := tmp_path / str(moment)).mkdir(mode=0o700)
        write(open_store(root), chain(3))
        (model,) = models_in(root)
        left = moment

        def scan(path: object, model: Path = model) -> object:
            nonlocal left
            found = scandir(path)  # type: ignore[call-overload]
            left -= 1
            if left == -1:
                shutil.rmtree(model)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", scan)
            assert main(["cache", action, str(root)]) == 0
        capsys.readouterr()


def test_files_that_cannot_be_listed_for_a_moment_are_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    keys = chain(2)
    write(store, keys)
    store.take_changes()

    def no_descriptors(path: object) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files", path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", no_descriptors)
        with pytest.raises(OSError, match="Too many open files"):
            store.look()
    assert not store.take_changes().removed
    assert set(keys) <= set(store.keys())
