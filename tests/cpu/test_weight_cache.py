"""Packed weights that a start keeps on disk: the next one has the same bytes without packing, or packs them again."""

import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.cpu.test_ahead import bytes_of, config_of, made, model_of
from tests.cpu.test_ahead import packed_weights as weights_in
from tests.cpu.test_self_drafts import SELF, drafter_of, generate
from tests.deadlines import scaled
from tests.driver import GREEDY, Driver
from tests.http_server import until
from vllm_lite import LLM, SamplingParams
from vllm_lite.checkpoint.shard import SINGLE
from vllm_lite.checkpoint.tensors.headers import SINGLE_FILE
from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import ConfigError
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import library
from vllm_lite.kernels.cpu.weights import packed_file
from vllm_lite.models import four_bit_copy, weight_cache
from vllm_lite.models.registry import Model
from vllm_lite.models.weight_cache import SELF_COPY, CachedWeights, Keeper, WeightCache, kept_private, packed_weights
from vllm_lite.models.weights import load_weights

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")

Bytes = list[tuple[bytes | None, ...]]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a small model has many parts; and it is there when a start is over."""
    monkeypatch.setattr(packed_file, "PART_BYTES", 4096)
    monkeypatch.setattr(weight_cache, "KEEP_S", scaled(30))


def cached(model: Path, folder: Path, **settings: Any) -> ResolvedConfig:
    return config_of(model, **{"weight_cache": str(folder), "quantization": "int8"} | settings)


class Loaded(NamedTuple):
    weights: Bytes
    kept: bool
    """Whether they were packed, and are on disk now; else they came from there."""


def load(config: ResolvedConfig, rank: int = 0) -> Loaded:
    """Load like a worker's process."""
    model = model_of(config, rank)
    source = packed_weights(config, rank, num_threads=2)
    load_weights(model, config.model, ahead=source)
    if isinstance(source, Keeper):
        source.keep()
    if source is not None:
        source.close()
    return Loaded(all_bytes(model), isinstance(source, Keeper))


def plain(config: ResolvedConfig, rank: int = 0) -> Bytes:
    model = model_of(config, rank)
    load_weights(model, config.model)
    return all_bytes(model)


def all_bytes(model: Model) -> Bytes:
    return [bytes_of(weight) for weight in weights_in(model)]


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.packed"))


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"attention_bias": True}, {"quantization": "int4_g32", "dtype": "bfloat16"}),
    ("llama", {"tie_word_embeddings": True}, {"quantization": "int8"}),
    ("qwen3", {}, {"quantization": "fp8", "dtype": "bfloat16", "tensor_parallel_size": 2}),
    ("mixture", {}, {"quantization": "int4", "tensor_parallel_size": 2, "enable_expert_parallel": True}),
]


@pytest.mark.parametrize(("family", "overrides", "settings"), CASES)
def test_a_second_start_packs_nothing_and_has_the_same_bytes(
    tmp_path: Path, family: str, overrides: dict[str, Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    config = config_of(made(tmp_path, family, **overrides), weight_cache=str(folder), **settings)
    ranks = range(config.tensor_parallel_size)
    expected = [plain(config, rank) for rank in ranks]
    assert [load(config, rank) for rank in ranks] == [Loaded(each, True) for each in expected]
    assert len(files_in(folder)) == len(ranks)
    with monkeypatch.context() as patch:
        patch.setattr("vllm_lite.models.weight_cache.pack_ahead", lambda *_: pytest.fail("packed ahead"))
        if not overrides.get("tie_word_embeddings"):  # unless the head is made of the embedding, which is kept
            patch.setattr("vllm_lite.kernels.cpu.weights.linear.pack_quantized", lambda *_: pytest.fail("again"))
        assert [load(config, rank) for rank in ranks] == [Loaded(each, False) for each in expected]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files_in(folder))


def test_weights_that_were_not_packed_ahead_are_kept_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = cached(make_checkpoint(tmp_path, dtype="bfloat16"), tmp_path / "cache")
    monkeypatch.setattr(weight_cache, "pack_ahead", lambda *_: None)
    expected = plain(config)
    assert load(config) == Loaded(expected, True)
    monkeypatch.setattr("vllm_lite.kernels.cpu.weights.linear.pack_quantized", lambda *_: pytest.fail("packed again"))
    assert load(config) == Loaded(expected, False)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def flipped(at: int) -> Callable[[Path], None]:
    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)

    return flip


@pytest.mark.parametrize(
    "harm",
    [cut, emptied, flipped(3), flipped(12), flipped(5000), flipped(-5000), flipped(-1)],
    ids=lambda harm: harm.__name__,
)
def test_a_torn_file_is_not_used_and_is_replaced(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    folder = tmp_path / "cache"
    config = config_of(make_checkpoint(tmp_path, dtype="bfloat16"), weight_cache=str(folder), quantization="int4_g32")
    expected = load(config).weights
    (file,) = files_in(folder)
    whole = file.read_bytes()
    harm(file)
    assert load(config).weights == expected
    if not files_in(folder):  # it was found out when it was being read
        assert load(config) == Loaded(expected, True)
    assert file.read_bytes() == whole


def other_isa(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(weight_cache, "isa", lambda: "another")


def other_library(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(library, "digest", lambda: b"another")


def other_groups(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(weight_cache, "GROUPS", {"int8": 64})


def touched(_: pytest.MonkeyPatch, model: Path) -> None:
    file, status = model / SINGLE_FILE, (model / SINGLE_FILE).stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def other_weights(_: pytest.MonkeyPatch, model: Path) -> None:
    """Weights of the same size and time."""
    file, status = model / SINGLE_FILE, (model / SINGLE_FILE).stat()
    save_file({name: tensor * 2 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    assert file.stat().st_size == status.st_size
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [other_isa, other_library, other_groups, touched, other_weights])
def test_weights_packed_in_another_way_are_not_used(
    tmp_path: Path, change: Callable[[pytest.MonkeyPatch, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = tmp_path / "cache", make_checkpoint(tmp_path / "model", dtype="bfloat16")
    config = cached(model, folder)
    before = load(config)
    (file,) = files_in(folder)
    change(monkeypatch, model)
    cache = WeightCache.of(config, SINGLE, weight_cache.MODEL)
    assert cache is not None
    shutil.copy(file, folder / "copy")
    (folder / "copy").replace(cache.path)  # of another instruction set it has another name
    after = load(config)
    assert after == Loaded(plain(config), True)
    assert (after.weights != before.weights) == (change is other_weights)


def test_the_weights_of_another_rank_are_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    model = make_checkpoint(tmp_path, dtype="bfloat16")
    config = cached(model, folder, tensor_parallel_size=2)
    first = load(config, 0)
    (file,) = files_in(folder)
    second = load(config, 1)
    (other,) = {*files_in(folder)} - {file}
    shutil.copy(file, other)
    assert load(config, 1) == second == Loaded(plain(config, 1), True)
    assert load(config, 0) == Loaded(first.weights, False)


def test_each_form_and_the_copy_that_drafts_have_files_of_their_own(tmp_path: Path) -> None:
    folder, model = tmp_path / "cache", make_checkpoint(tmp_path, dtype="bfloat16")
    ways: list[dict[str, Any]] = [
        {},
        {"quantization": "int4"},
        {"language_model_only": True},
        {"hf_overrides": {"rope_theta": 2.0}},
    ]
    configs = [cached(model, folder, **way) for way in ways]
    caches = [WeightCache.of(config, SINGLE, part) for config in configs for part in (weight_cache.MODEL, SELF_COPY)]
    assert len({cache.path for cache in caches if cache is not None}) == 8
    assert [load(config).kept for config in (*configs, *configs)] == 4 * [True] + 4 * [False]


def refused(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Full(NamedTuple):
    f_bavail: int = 10
    f_frsize: int = 4096


@pytest.mark.parametrize(("name", "stand_in"), [("pwrite", refused), ("statvfs", lambda *_: Full()), ("open", None)])
def test_a_disk_that_cannot_be_written_disables_only_the_cache(
    tmp_path: Path, name: str, stand_in: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    config = cached(make_checkpoint(tmp_path, dtype="bfloat16"), folder)
    expected, opened = plain(config), os.open

    def read_only(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, name, stand_in or read_only)
    assert load(config).weights == expected
    monkeypatch.undo()
    assert [*folder.iterdir()] == []
    assert [record.levelname for record in caplog.records if "weight_cache" in record.getMessage()] == ["WARNING"]


def test_a_folder_that_cannot_be_made_costs_the_cache_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    model = make_checkpoint(tmp_path / "model", dtype="bfloat16")
    config = cached(model, tmp_path / "file" / "cache")
    assert load(config) == Loaded(plain(config), False)
    assert f"weight_cache {config.weight_cache} is not used: " in caplog.text


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (folder := tmp_path / "cache").mkdir(mode=0o755)
    folder.chmod(0o755)
    config = cached(make_checkpoint(tmp_path, dtype="bfloat16"), folder)
    with pytest.raises(ConfigError, match="others may change what a model answers; expected 0700"):
        load(config)


def test_a_worker_that_replaces_another_continues_without_a_folder_that_was_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder := tmp_path / "cache").mkdir(mode=0o700)
    config = cached(make_checkpoint(tmp_path, dtype="bfloat16"), folder)
    assert kept_private(config) is config
    folder.chmod(0o755)
    left = kept_private(config)
    assert left.weight_cache is None
    assert "0755" in caplog.text
    assert kept_private(left) is left


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"quantization": None}, "only weights quantized on load take longer to pack than to read"),
        ({"load_format": "dummy"}, None),
    ],
)
def test_weights_not_worth_caching_are_not_cached(
    tmp_path: Path, settings: dict[str, Any], why: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", weight_cache.__name__)
    folder = tmp_path / "cache"
    config = cached(make_checkpoint(tmp_path, dtype="bfloat16"), folder, **settings)
    source = packed_weights(config, 0, num_threads=1)
    if source is not None:
        source.close()
    assert not isinstance(source, Keeper | CachedWeights)
    assert not folder.exists()
    assert [record.getMessage() for record in caplog.records] == ([f"weight_cache is not used: {why}"] if why else [])


def test_only_what_is_its_own_and_of_no_use_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    long_ago = time.time() - weight_cache.UNUSED_S - 60
    names = {
        "old": f"{'a' * 40}.packed",
        "used": f"{'b' * 40}.packed",
        "left": ".draft-1-0",
        "written": ".draft-1-1",
        "foreign": "model.safetensors",
    }
    for name in names.values():
        (folder / name).touch(mode=0o600)
    for name in ("old", "left", "written", "foreign"):
        os.utime(folder / names[name], (long_ago, long_ago))
    (folder / f"{'c' * 40}.packed").symlink_to(folder / names["foreign"])
    config = cached(make_checkpoint(tmp_path, dtype="bfloat16"), folder)
    with (folder / names["written"]).open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert load(config).kept
    left = {file.name for file in folder.iterdir()}
    assert not left & {names["old"], names["left"]}
    assert left >= {names["used"], names["written"], names["foreign"], f"{'c' * 40}.packed"}
    assert not load(config).kept


def test_two_starts_at_once_both_keep_what_they_packed(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    config = cached(make_checkpoint(tmp_path, dtype="bfloat16"), folder)
    sources = [packed_weights(config, 0, num_threads=1) for _ in range(2)]
    for source in sources:
        assert isinstance(source, Keeper)
        load_weights(model_of(config, 0), config.model, ahead=source)
    for source in sources:
        assert isinstance(source, Keeper)
        source.keep()
        source.close()
    assert load(config) == Loaded(plain(config), False)
    assert len([*folder.iterdir()]) == 1


def test_a_checkpoint_that_changes_while_it_is_loaded_is_not_kept(tmp_path: Path) -> None:
    folder, model = tmp_path / "cache", make_checkpoint(tmp_path / "model", dtype="bfloat16")
    config = cached(model, folder)
    source = packed_weights(config, 0, num_threads=1)
    assert isinstance(source, Keeper)
    load_weights(model_of(config, 0), config.model, ahead=source)
    os.utime(model / SINGLE_FILE)
    source.keep()
    source.close()
    assert [*folder.iterdir()] == []


def test_weights_of_a_checkpoint_that_changes_before_it_is_loaded_are_not_taken(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", dtype="bfloat16")
    config = cached(model, tmp_path / "cache")
    load(config)
    source = packed_weights(config, 0, num_threads=1)
    assert isinstance(source, CachedWeights)
    others = {name: tensor * 2 for name, tensor in load_file(model / SINGLE_FILE).items()}
    save_file(others, model / "next", {"format": "pt"})
    (model / "next").replace(model / SINGLE_FILE)
    loaded = model_of(config, 0)
    load_weights(loaded, config.model, ahead=source)
    source.close()
    assert all_bytes(loaded) == plain(config)


def test_drafts_that_another_process_of_this_number_has_just_left_are_in_nobodys_way(tmp_path: Path) -> None:
    (folder := tmp_path / "cache").mkdir(mode=0o700)
    for number in range(1000):
        (folder / f".draft-{os.getpid()}-{number}").touch(mode=0o600)
    load(cached(make_checkpoint(tmp_path, dtype="bfloat16"), folder))
    assert len(files_in(folder)) == 1


def test_a_model_that_could_not_be_loaded_is_not_kept(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    config = cached(make_checkpoint(tmp_path, dtype="bfloat16"), folder)
    source = packed_weights(config, 0, num_threads=1)
    assert isinstance(source, Keeper)
    load_weights(model_of(config, 0), config.model, ahead=source)
    source.close()
    for thread in threading.enumerate():
        if thread.name == "weight cache":
            thread.join(scaled(30))
    assert [*folder.iterdir()] == []


def test_weights_that_the_model_does_not_want_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    config = cached(make_checkpoint(tmp_path, dtype="bfloat16"), folder)
    expected = load(config).weights
    name_of = weight_cache.name_of
    monkeypatch.setattr(weight_cache, "name_of", lambda key: name_of((key, "of another version")))
    assert load(config).weights == expected
    assert files_in(folder) == []


def test_a_closed_reader_frees_weights_that_were_not_taken(tmp_path: Path) -> None:
    config = cached(make_checkpoint(tmp_path, dtype="bfloat16"), tmp_path / "cache")
    load(config)
    source = packed_weights(config, 0, num_threads=1)
    assert isinstance(source, CachedWeights)
    source.close()
    assert source.take("nothing") is None


@pytest.mark.parametrize("divides", [True, False], ids=["frequent words", "one head"])
def test_the_copy_that_drafts_comes_from_its_own_file(
    tmp_path: Path, divides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (range(64), range(200, 232)) if divides else ()
    monkeypatch.setattr(four_bit_copy, "frequent_words", lambda *_: words)
    folder, model = tmp_path / "cache", make_checkpoint(tmp_path / "model", dtype="bfloat16")

    def drafted(**settings: Any) -> tuple[Bytes, dict[int, list[int]]]:
        driver = Driver(model, **SELF, **settings)
        copy = drafter_of(driver)._copy
        generate(driver, GREEDY)
        heads = [*getattr(copy.lm_head, "_pieces", {}).values()]
        return [bytes_of(weight) for weight in (*weights_in(copy), *weights_in(heads))], driver.got

    expected = drafted()
    assert drafted(weight_cache=str(folder)) == expected
    assert len(files_in(folder)) == 1
    monkeypatch.setattr(weight_cache, "pack_wanted", lambda *_: pytest.fail("packed from files"))
    monkeypatch.setattr("vllm_lite.kernels.cpu.weights.linear.pack_quantized", lambda *_: pytest.fail("packed again"))
    assert drafted(weight_cache=str(folder)) == expected


def test_an_engine_answers_alike_from_the_cache(tmp_path: Path) -> None:
    folder, answers = tmp_path / "cache", []
    for cached in (None, str(folder), str(folder)):
        settings: dict[str, Any] = {"max_model_len": 256, "quantization": "int4_g32", "weight_cache": cached}
        with closing(LLM("demo", **settings)) as llm:
            parameters = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, ignore_eos=True)
            (output,) = llm.generate("Once upon a time", parameters, use_tqdm=False)
            answers.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
            if cached:
                until(lambda: len(files_in(folder)) == 1, "a file")
        names = [entry.name for entry in folder.glob("*")]
        assert len(names) == (cached is not None)
    assert answers[0] == answers[1] == answers[2]
