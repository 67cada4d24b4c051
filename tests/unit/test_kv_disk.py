"""KV in files: what is written is found again, by whom it may be, and whatever happens to a file costs hits only."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest

from tests.acceptance import kv_disk_faults
from tests.acceptance.kv_disk_faults import ITEM_BYTES, OWNERS, Memory, content, key_of, keys_of
from vllm_lite.errors import ConfigError
from vllm_lite.kv_disk.directory import SEED_BYTES, open_directory, read_seed
from vllm_lite.kv_disk.fingerprint import adapter_digest, file_digest
from vllm_lite.kv_disk.format import MAGIC, PAGE, Damaged, Foreign, RunHeader, checksum, name_of, pack, unpack
from vllm_lite.kv_disk.store import DiskStore
from vllm_lite.kv_disk.usage import held_files
from vllm_lite.worker.disk.opening import AdapterFiles
from vllm_lite.worker.disk.transfers import DiskTransfers

MODEL, PLACE = b"model", (0, 1)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def open_store(root: Path, model: bytes = MODEL, place: tuple[int, int] = PLACE, quota: int = 10**9) -> DiskStore:
    return DiskStore(root, model, place, quota, Clock())


def chain(count: int, number: int = 0) -> list[bytes]:
    return [key_of(number, index) for index in range(count)]


def write(store: DiskStore, keys: Sequence[bytes], model: bytes = MODEL) -> int:
    return store.write(keys, range(len(keys)), Memory([content(key, model, PLACE) for key in keys]))


def read(store: DiskStore, keys: Sequence[bytes], model: bytes = MODEL) -> list[bool]:
    """Whether each was served, and rightly."""
    memory = Memory([bytes(ITEM_BYTES)] * len(keys))
    failed, _ = store.read(keys, range(len(keys)), memory)
    for index, key in enumerate(keys):
        assert index in failed or memory.items[index] == content(key, model, PLACE)
    return [index not in failed for index in range(len(keys))]


def only_file(root: Path) -> Path:
    (held,) = held_files(root)
    return Path(held.path)


# ---- what is written


def test_a_run_is_found_by_the_store_that_wrote_it_and_after_a_restart(tmp_path: Path) -> None:
    store, keys = open_store(tmp_path), chain(8)
    assert write(store, keys) == PAGE + 8 * ITEM_BYTES
    assert all(read(store, keys))
    assert store.take_changes().added == keys
    again = open_store(tmp_path)
    assert not any(read(again, keys))
    again.look()
    assert all(read(again, keys))
    assert again.num_bytes == PAGE + 8 * ITEM_BYTES


def test_a_part_of_a_run_is_read_in_any_order(tmp_path: Path) -> None:
    store, keys = open_store(tmp_path), chain(20)
    write(store, keys)
    assert all(read(store, [keys[7], keys[3], keys[4], keys[19]]))


def test_the_second_engine_sees_written_and_removed_files_of_the_first(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path)
    write(first, chain(3))
    second.look()
    assert second.take_changes().added == chain(3)
    first.forget([chain(3)[1]])
    second.look()
    assert second.take_changes().removed == chain(3)
    assert not list(held_files(tmp_path))


@pytest.mark.parametrize(("model", "place"), [(b"another", (0, 1)), (MODEL, (1, 2)), (MODEL, (0, 2))])
def test_another_model_or_rank_finds_nothing(tmp_path: Path, model: bytes, place: tuple[int, int]) -> None:
    write(open_store(tmp_path), chain(3))
    other = open_store(tmp_path, model, place)
    other.look()
    assert not any(read(other, chain(3)))
    assert len(list(held_files(tmp_path))) == 1


def test_a_file_moved_to_another_rank_is_foreign_there(tmp_path: Path) -> None:
    write(open_store(tmp_path), chain(3))
    file, other = only_file(tmp_path), open_store(tmp_path, place=(1, 2))
    place = other.folders.path / file.parent.name / file.name
    place.parent.mkdir(parents=True)
    file.rename(place)
    other.look()
    assert not any(read(other, chain(3)))
    assert other.dropped == {"foreign": 1}
    assert not place.exists()


def test_items_of_another_size_are_not_read(tmp_path: Path) -> None:
    store, keys = open_store(tmp_path), chain(3)
    write(store, keys)
    memory = Memory([bytes(10)] * 3)
    memory.item_bytes = 10
    assert store.read(keys, range(3), memory) == ({0, 1, 2}, 0)


# ---- what is not as it was written


@pytest.mark.parametrize("at", [0, 7, 9, 30, 100, PAGE, PAGE + ITEM_BYTES, PAGE + 3 * ITEM_BYTES - 1])
def test_a_flipped_bit_costs_the_file(tmp_path: Path, at: int) -> None:
    store, keys = open_store(tmp_path), chain(3)
    write(store, keys)
    data = bytearray((file := only_file(tmp_path)).read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    assert not all(read(store, keys))
    assert not file.exists()
    assert sum(store.dropped.values()) == 1
    assert store.take_changes().removed == keys


@pytest.mark.parametrize(
    "size", [0, 100, PAGE, PAGE + ITEM_BYTES, PAGE + 3 * ITEM_BYTES - 1, PAGE + 3 * ITEM_BYTES + 1]
)
def test_a_file_of_another_length_is_dropped_when_it_is_seen(tmp_path: Path, size: int) -> None:
    write(open_store(tmp_path), chain(3))
    os.truncate(only_file(tmp_path), size)
    store = open_store(tmp_path)
    store.look()
    assert not any(read(store, chain(3)))
    assert store.dropped == {"damaged": 1}


def test_blocks_in_swapped_places_of_a_file_are_refused(tmp_path: Path) -> None:
    store, keys = open_store(tmp_path), chain(2)
    write(store, keys)
    data = (file := only_file(tmp_path)).read_bytes()
    file.write_bytes(data[:PAGE] + data[PAGE + ITEM_BYTES :] + data[PAGE : PAGE + ITEM_BYTES])
    assert not any(read(store, keys))


def test_a_whole_file_under_the_name_of_another_is_dropped(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, chain(3))
    file = only_file(tmp_path)
    wrong = file.with_name(file.name[:-1] + ("0" if file.name[-1] != "0" else "1"))
    file.rename(wrong)
    again = open_store(tmp_path)
    again.look()
    assert again.dropped == {"damaged": 1}
    assert not again.keys()
    assert not wrong.exists()


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_no_file_in_a_files_place_is_waited_for(tmp_path: Path, kind: str) -> None:
    store, keys = open_store(tmp_path), chain(3)
    write(store, keys)
    file = only_file(tmp_path)
    file.unlink()
    {"pipe": lambda: os.mkfifo(file), "link": lambda: file.symlink_to("/dev/zero"), "folder": file.mkdir}[kind]()
    assert not any(read(store, keys))
    again = open_store(tmp_path)
    again.look()
    assert not any(read(again, keys))


@pytest.mark.parametrize("is_known", [True, False], ids=["read before", "met when it is written"])
def test_a_folder_in_a_files_place_is_counted_once_and_disturbs_nothing(tmp_path: Path, is_known: bool) -> None:
    store, keys = open_store(tmp_path), chain(3)
    write(store, keys)
    file = only_file(tmp_path)
    file.unlink()
    (file / "somebody's").mkdir(parents=True)
    if is_known:
        assert not any(read(store, keys))
    else:
        store = open_store(tmp_path)
        assert write(store, keys) == 0
    for _ in range(3):
        os.utime(file.parent, (1, 1))  # it looks changed
        store.look()
        assert write(store, keys) == 0
        os.utime(file.parent, (2, 2))
        store.look()
    assert store.dropped == {"foreign": 1}
    assert not store.errors
    assert write(store, chain(3, number=1)), "the disk has refused nothing"
    assert (file / "somebody's").is_dir()
    shutil.rmtree(file)
    store.look()
    assert write(store, keys)
    assert all(read(store, keys))


def test_each_invalid_header_has_its_error() -> None:
    good = RunHeader(b"fp", 10, chain(2), [1, 2])
    assert unpack(pack(good), good.file_bytes, b"fp") == good
    for page, size, wrong in (
        (pack(good)[: PAGE - 1], good.file_bytes, Damaged),
        (pack(good), good.file_bytes - 1, Damaged),
        (pack(msgspec.structs.replace(good, checksums=[1])), good.file_bytes, Damaged),
        (pack(msgspec.structs.replace(good, fingerprint=b"other")), good.file_bytes, Foreign),
        (pack(good).replace(MAGIC, MAGIC[:-1] + b"\x01"), good.file_bytes, Foreign),
        (bytes(PAGE), good.file_bytes, Foreign),
    ):
        with pytest.raises(wrong):
            unpack(page, size, b"fp")
    assert checksum(b"a", b"item") != checksum(b"b", b"item")
    assert name_of([b"ab", b"c"]) != name_of([b"a", b"bc"])


def test_a_full_header_fits_into_its_page() -> None:
    keys = [bytes(37)] * 64
    assert len(pack(RunHeader(bytes(32), 2**32, keys, [2**64 - 1] * 64))) == PAGE


# ---- quota


def test_the_least_recently_used_files_are_removed_first_of_all_models(tmp_path: Path) -> None:
    size = PAGE + 4 * ITEM_BYTES
    other, store = open_store(tmp_path, b"another"), open_store(tmp_path, quota=5 * size)
    write(other, chain(4, 9), b"another")
    for number in range(4):
        write(store, chain(4, number))
    for held in held_files(tmp_path):  # the times of use, in the order in which they were written
        index = next((n for n in range(4) if name_of(chain(4, n)) in held.path), -1)
        os.utime(held.path, (1000 + index, 1000 + index))
    assert all(read(store, chain(4, 0)))  # used now
    assert write(store, chain(4, 5))
    assert sum(held.num_bytes for held in held_files(tmp_path)) <= 5 * size
    store.look()
    assert [all(read(store, chain(4, number))) for number in (0, 1, 3, 5)] == [True, False, True, True]
    assert not any(read(other, chain(4, 9), b"another"))
    assert store.dropped["evicted"] == 2


def test_a_full_quota_has_room_before_more_is_written(tmp_path: Path) -> None:
    size = PAGE + 4 * ITEM_BYTES
    store = open_store(
        tmp_path, quota=128 * size
    )  # one run is smaller than the amount after which a write counts the directory again
    for number in range(120):
        write(open_store(tmp_path), chain(4, number))
    store.sweep()
    assert store.num_bytes == 120 * size, "a sixteenth stays free"
    assert write(store, chain(4, 150))
    assert sum(held.num_bytes for held in held_files(tmp_path)) <= 120 * size


def test_a_run_larger_than_half_of_the_quota_is_not_written(tmp_path: Path) -> None:
    store = open_store(tmp_path, quota=2 * ITEM_BYTES)
    assert write(store, chain(4)) == 0
    assert not list(held_files(tmp_path))


def test_old_unfinished_files_are_removed_and_recent_ones_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, chain(2))
    folder = only_file(tmp_path).parent
    old, new = folder / ".draft-1-1-1", folder / ".draft-2-1-1"
    for draft, age_s in ((old, 3600.0), (new, 1.0)):
        draft.write_bytes(b"cut")
        os.utime(draft, (store.clock() - age_s,) * 2)
    store.sweep()
    assert (old.exists(), new.exists()) == (False, True)


def test_after_a_refusal_nothing_is_written_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert write(store, chain(2)) == 0
    assert not list(held_files(tmp_path))
    assert write(store, chain(2)) == 0
    assert store.errors == {"write": 1}
    store.clock.now_s += 11.0  # type: ignore[attr-defined]
    assert write(store, chain(2)) > 0


# ---- the directory


def test_a_directory_is_made_private_and_keeps_its_seed(tmp_path: Path) -> None:
    path = open_directory(str(tmp_path / "a" / "kv"))
    assert path.stat().st_mode & 0o777 == 0o700
    seed = read_seed(path)
    assert len(seed) == 2 * SEED_BYTES
    assert read_seed(open_directory(str(path))) == seed
    assert (path / "seed").stat().st_mode & 0o777 == 0o600
    assert os.listdir(path) == ["seed"]
    assert read_seed(open_directory(str(tmp_path / "other"))) != seed


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (open_one := tmp_path / "kv").mkdir(mode=0o755)
    open_one.chmod(0o750)
    with pytest.raises(ConfigError, match=r"mode 0750, so that others .* expected 0700: chmod 700"):
        open_directory(str(open_one))
    (tmp_path / "link").symlink_to(open_one)
    with pytest.raises(ConfigError, match="not a directory"):
        open_directory(str(tmp_path / "link"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        open_directory(str(tmp_path / "file"))


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = open_directory(str(tmp_path / "kv"))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"belongs to user \d+, not to 12345"):
        open_directory(str(path))


def test_a_seed_that_is_cut_or_open_to_others_is_refused(tmp_path: Path) -> None:
    path = open_directory(str(tmp_path / "kv"))
    read_seed(path)
    (path / "seed").chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644"):
        read_seed(path)
    (path / "seed").write_bytes(b"short")
    with pytest.raises(ConfigError, match="has 5 bytes, expected 32"):
        read_seed(path)


def test_weights_that_differ_in_one_tensor_have_another_digest(tmp_path: Path) -> None:
    shapes = {
        f"t{number}": {"dtype": "F32", "shape": [4096], "data_offsets": (16384 * number, 16384 * (number + 1))}
        for number in range(400)
    }
    header = msgspec.json.encode(shapes)
    data = bytearray(len(header).to_bytes(8, "little") + header + bytes(16384 * 400))
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    before = file_digest(file)
    data[8 + len(header) + 16384 * 123 + 8192 + 5] = 1
    file.write_bytes(data)
    assert file_digest(file) != before


def test_an_adapter_is_known_by_all_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (weights := tmp_path / "adapter_model.safetensors").write_bytes(bytes(3_000_000))
    digest = adapter_digest(str(tmp_path))
    assert len(digest) == 32
    renamed = shutil.copytree(tmp_path, tmp_path / "renamed")
    assert adapter_digest(str(renamed)) == digest
    for at in (0, 1_234_567, 2_999_999):
        data = bytearray(3_000_000)
        data[at] = 1
        weights.write_bytes(data)
        assert adapter_digest(str(tmp_path)) != digest
    weights.write_bytes(bytes(3_000_000))
    assert adapter_digest(str(tmp_path)) == digest
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    assert adapter_digest(str(tmp_path)) != digest


def test_an_adapter_with_files_replaced_during_its_load_has_no_digest(tmp_path: Path) -> None:
    (weights := tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    disk = cast(DiskTransfers, object())
    files = AdapterFiles(str(tmp_path), disk)
    assert files.digest() == adapter_digest(str(tmp_path))
    weights.write_bytes(b"two")
    assert files.digest() == b""
    assert AdapterFiles(str(tmp_path / "missing"), disk).digest() != AdapterFiles(str(tmp_path), disk).digest()
    assert AdapterFiles(str(tmp_path), None).digest() == b""


# ---- faults


def test_equal_prompts_of_other_owners_have_other_keys() -> None:
    keys = {key for chain in range(2 * len(OWNERS)) for key in keys_of(chain)}
    assert len(keys) == 2 * len(OWNERS) * len(keys_of(0))


def test_faults_cost_hits_only(tmp_path: Path) -> None:
    counts = kv_disk_faults.run(tmp_path, 200, seed=int(os.environ.get("KV_DISK_FAULTS_SEED", "0")))
    assert not counts["WRONG"]
    assert not counts["OVER QUOTA"]
    assert counts["right"] > 200
    assert counts["damaged"]
    assert counts["foreign"]
