"""A KV cache on disk in whole engines: after a restart or a kill, and in another engine, the tokens are the same and
the prompt is not recomputed. Files of another model or format are not used."""

import errno
import os
import shutil
import signal
import time
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.deadlines import scaled
from tests.e2e.test_hybrid import GREEDY, SERVED, SLOTS, words
from tests.e2e.test_processes import family
from tests.lora_adapters import make_adapter
from vllm_lite import LLM, LoRARequest, SamplingParams
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.client.engines.launch import LaunchedEngine
from vllm_lite.client.prompt import TokensPrompt
from vllm_lite.config import GIB
from vllm_lite.engine.blocks.disk_tier import DiskTier
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.errors import EngineDeadError, ModelError
from vllm_lite.kv_disk.folders import RankFolders
from vllm_lite.kv_disk.store import DiskStore
from vllm_lite.kv_disk.usage import held_files
from vllm_lite.tools.cli import main

SHORT = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPT = [5 + 7 * index % 2000 for index in range(300)]


def open_llm(folder: Path, **settings: Any) -> LLM:
    usual: dict[str, Any] = {"device": "cpu", "dtype": "float32", "single_process": True, "kv_cache_preload": 0}
    return LLM("demo", kv_cache_dir=str(folder), **{**usual, **settings})


def ask(llm: LLM, prompt: list[int], params: SamplingParams = SHORT) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of the prompt were cached."""
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


def until_written(llm: LLM, num_keys: int) -> None:
    """Wait until this number of blocks and states is on disk, and no write is in progress."""
    deadline_s = time.monotonic() + scaled(20.0)
    while (stats := llm.stats()).num_stored_keys < num_keys or stats.num_writing_blocks:
        assert time.monotonic() < deadline_s, f"{stats.num_stored_keys} are written, {stats.num_writing_blocks} are not"
        time.sleep(0.01)


def has_others(llm: LLM) -> bool:
    """Whether a dead engine, or dead workers, have been replaced, and the new ones have listed the files on disk."""
    try:
        stats = llm.stats()
    except EngineDeadError:
        return False
    return stats.life + stats.generation > 2 and stats.num_stored_keys > 0


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, list[int]]:
    """A directory with the KV of PROMPT and its answer, and that answer."""
    with closing(open_llm(tmp_path / "kv")) as llm:
        tokens, cached = ask(llm, PROMPT)
        assert cached == 0
        until_written(llm, (len(PROMPT) + 19) // 16)
    return tmp_path / "kv", tokens


def test_after_a_restart_the_next_turn_computes_only_new_tokens(
    written: tuple[Path, list[int]], tmp_path: Path
) -> None:
    folder, tokens = written
    turn = [*PROMPT, *tokens, 9, 8, 7]
    with closing(open_llm(tmp_path / "other")) as llm:
        expected, _ = ask(llm, turn)
    with closing(open_llm(folder)) as llm:
        until_written(llm, 19)
        assert ask(llm, turn) == (expected, 304)
        assert llm.stats().loaded_tokens == 304
        assert llm.stats().failed_loads == 0
    assert (folder / "seed").stat().st_mode & 0o777 == 0o600


def test_the_chat_is_in_memory_before_its_next_turn(written: tuple[Path, list[int]], tmp_path: Path) -> None:
    folder, tokens = written
    turn = [*PROMPT, *tokens, 9, 8, 7]
    trace = tmp_path / "trace"
    with closing(open_llm(folder, kv_cache_preload=0.5, record=str(trace))) as llm:
        deadline_s = time.monotonic() + scaled(20.0)
        while (disk := llm.stats().disk) is None or not disk.loaded_bytes:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        found = ask(llm, turn)
        assert llm.stats().loaded_tokens == 0
        again = llm.stats().disk
        assert again is not None
        assert again.loaded_bytes == disk.loaded_bytes, "nothing was loaded twice"
    with closing(open_llm(tmp_path / "other")) as llm:
        assert found == (ask(llm, turn)[0], 304)
    replay = Replay(str(trace)).run()
    assert replay.divergence is None


@pytest.mark.parametrize("victim", ["worker", "engine"])
def test_after_a_kill_the_chat_is_found_again(tmp_path: Path, victim: str) -> None:
    with closing(open_llm(tmp_path / "kv", single_process=False)) as llm:
        tokens, _ = ask(llm, PROMPT)
        until_written(llm, 19)
        assert isinstance(llm.launched, LaunchedEngine)
        engine = llm.launched.pid
        os.kill(engine if victim == "engine" else family(engine)[1], signal.SIGKILL)
        deadline_s = time.monotonic() + scaled(60.0)
        while not has_others(llm):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert ask(llm, PROMPT) == (tokens, 288)


def test_the_second_of_two_engines_computes_nothing_that_the_first_has(written: tuple[Path, list[int]]) -> None:
    folder, tokens = written
    with closing(open_llm(folder)) as first, closing(open_llm(folder)) as second:
        until_written(first, 19)
        other = [3, *PROMPT[:100]]
        answer, _ = ask(first, other)
        until_written(first, 19 + 7)
        until_written(second, 19 + 7)
        assert ask(second, other) == (answer, 96)
        assert ask(second, PROMPT) == (tokens, 288)


@pytest.mark.parametrize(
    ("settings", "params"),
    [
        ({"dtype": "bfloat16"}, {}),
        ({"kv_cache_dtype": "bfloat16"}, {}),
        ({"block_size": 32}, {}),
        ({"deterministic": True}, {}),
        ({"prefix_hash_seed": "another"}, {}),
        ({}, {"cache_salt": "another"}),
    ],
    ids=lambda value: "-".join(value) or "same",
)
def test_other_types_seeds_and_salts_find_nothing(
    written: tuple[Path, list[int]], settings: dict[str, Any], params: dict[str, Any]
) -> None:
    folder, _ = written
    with closing(open_llm(folder, **settings)) as llm:
        if not settings or "prefix_hash_seed" in settings:
            until_written(llm, 19)
        given = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, **params)
        assert ask(llm, PROMPT, given)[1] == 0
        assert llm.stats().failed_loads == 0


def test_damaged_files_are_computed_and_removed(written: tuple[Path, list[int]]) -> None:
    folder, tokens = written
    with closing(open_llm(folder)) as llm:
        until_written(llm, 19)
        for held in held_files(folder):
            data = bytearray(Path(held.path).read_bytes())
            data[-100] ^= 1
            Path(held.path).write_bytes(data)
        answer, cached = ask(llm, PROMPT)
        assert answer == tokens
        assert cached < 288
        stats = llm.stats()
        assert stats.failed_loads
        assert stats.disk is not None
        assert stats.disk.errors["damaged"]


def test_a_read_only_directory_is_read_and_logged(
    written: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, tokens = written

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(RankFolders, "make", refuse)
    with closing(open_llm(folder)) as llm:
        until_written(llm, 19)
        assert ask(llm, PROMPT) == (tokens, 288)
        disk = llm.stats().disk
        assert disk is not None
        assert disk.errors["write"]
    assert "nothing can be written to the KV cache on disk, what is there is still read" in caplog.text


def test_a_reset_includes_the_disk_on_request(written: tuple[Path, list[int]]) -> None:
    folder, _ = written
    with closing(open_llm(folder)) as llm:
        until_written(llm, 19)
        llm.reset_prefix_cache()
        assert ask(llm, PROMPT)[1] == 288
        llm.reset_prefix_cache(stored=True)
        assert ask(llm, PROMPT)[1] == 0


def test_sleep_and_wake_keep_the_kv(written: tuple[Path, list[int]]) -> None:
    folder, tokens = written
    with closing(open_llm(folder, single_process=False)) as llm:
        llm.sleep()
        llm.wake_up()
        assert ask(llm, PROMPT) == (tokens, 288)


def test_a_chat_that_waited_for_the_workers_finds_blocks_of_a_slow_directory(
    written: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start ends when the files on disk are listed; a chat that waited during it is scheduled at that moment."""
    folder, tokens = written
    look = DiskStore.look

    def slowly(self: DiskStore, *args: Any) -> None:
        time.sleep(0.5)
        look(self, *args)

    monkeypatch.setattr(DiskStore, "look", slowly)
    with closing(open_llm(folder)) as llm:
        assert ask(llm, PROMPT) == (tokens, 288)
        llm.sleep()
        llm.wake_up()
        assert ask(llm, PROMPT) == (tokens, 288)


def test_a_directory_that_does_not_answer_delays_a_start_and_does_not_prevent_it(
    written: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tokens = written
    answers = Event()
    monkeypatch.setattr(DiskStore, "look", lambda *_: answers.wait(scaled(60.0)))
    monkeypatch.setattr("vllm_lite.worker.disk.transfers.FIRST_LOOK_S", 0.1)
    try:
        with closing(open_llm(folder)) as llm:
            assert ask(llm, PROMPT) == (tokens, 0)
            answers.set()
    finally:
        answers.set()


def test_two_ranks_have_a_part_each(tmp_path: Path) -> None:
    with closing(open_llm(tmp_path / "kv", tensor_parallel_size=2, single_process=False, cpu_threads=1)) as llm:
        tokens, _ = ask(llm, PROMPT)
        until_written(llm, 19)
    ranks = sorted(path.name for path in next(p for p in (tmp_path / "kv").iterdir() if p.is_dir()).iterdir())
    assert ranks == ["0-2", "1-2", "about"]
    with closing(open_llm(tmp_path / "kv", tensor_parallel_size=2, single_process=False, cpu_threads=1)) as llm:
        until_written(llm, 19)
        assert ask(llm, PROMPT) == (tokens, 288)


@pytest.mark.parametrize("variant", SERVED[:1], ids=lambda variant: variant.name)
def test_states_of_hybrids_survive(variant: Any, tmp_path: Path) -> None:
    path = variant.make(tmp_path / variant.name)
    space = SLOTS * load_spec(path).state_bytes() / GIB
    settings: dict[str, Any] = {"max_model_len": 512, "state_cache_space": space, "kv_cache_dir": str(tmp_path / "kv")}
    prompt = words(3, 150)
    with closing(LLM(str(path), single_process=True, **settings)) as llm:
        tokens, _ = ask(llm, prompt, GREEDY)
        until_written(llm, 10 + 2)
    turn = [*prompt, *tokens, *words(4, 20)]
    with closing(LLM(str(path), single_process=True, **settings)) as llm:
        until_written(llm, 10 + 2)
        found, cached = ask(llm, turn, GREEDY)
        assert cached == 160
    with closing(LLM(str(path), single_process=True, **(settings | {"kv_cache_dir": None}))) as llm:
        assert ask(llm, turn, GREEDY) == (found, 0)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is slower than a chat; stopping the engine waits for its writes."""
    write = DiskStore.write

    def slowly(self: DiskStore, *run: Any) -> int:
        time.sleep(0.03)
        return write(self, *run)

    monkeypatch.setattr(DiskStore, "write", slowly)
    for name in ("engine.process.LAST_WRITES_S", "engine.transfers.STALLED_S", "worker.process.DISK_GRACE_S"):
        monkeypatch.setattr(f"vllm_lite.{name}", scaled(20.0))


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("end", ["stop", "sleep"])
def test_the_end_of_an_answer_is_written_before_the_workers_end(tmp_path: Path, end: str) -> None:
    with closing(open_llm(tmp_path / "kv", num_gpu_blocks_override=50)) as llm:
        tokens, _ = ask(llm, PROMPT)
        if end == "sleep":
            llm.sleep()
    with closing(open_llm(tmp_path / "kv")) as llm:
        until_written(llm, 19)
        assert ask(llm, [*PROMPT, *tokens, 9])[1] == 304


@pytest.mark.parametrize("variant", SERVED[:1], ids=lambda variant: variant.name)
def test_the_second_engine_finds_of_a_hybrid_all_that_the_first_has(variant: Any, tmp_path: Path) -> None:
    path = variant.make(tmp_path / variant.name)
    space = SLOTS * load_spec(path).state_bytes() / GIB
    settings: dict[str, Any] = {"max_model_len": 512, "state_cache_space": space, "kv_cache_dir": str(tmp_path / "kv")}
    prompt = words(3, 150)
    with (
        closing(LLM(str(path), single_process=True, **settings)) as first,
        closing(LLM(str(path), single_process=True, **settings)) as second,
    ):
        tokens, _ = ask(first, prompt, GREEDY)
        until_written(first, 10 + 2)
        until_written(second, 10 + 2)
        turn = [*prompt, *tokens, *words(4, 20)]
        found, cached = ask(second, turn, GREEDY)
        assert cached == 160
        again, in_memory = ask(first, turn, GREEDY)
        assert again == found
        assert in_memory >= cached, "it finds as much in its memory, and more once it knows of the other's files"


# ---- adapters


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A checkpoint and two adapters of it."""
    folder = tmp_path_factory.mktemp("adapters")
    base = make_checkpoint(folder / "base")
    return base, make_adapter(base, folder / "one", seed=1), make_adapter(base, folder / "two", seed=2)


def with_adapters(base: Path, folder: Path | None, record: Path | None = None, **names: Path) -> LLM:
    """An engine that has adapters by these names from its start."""
    modules = tuple({"name": name, "path": str(path)} for name, path in names.items())
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "single_process": True, "enable_lora": True}
    settings |= {"kv_cache_dir": folder and str(folder), "record": record and str(record)}
    return LLM(base, lora_modules=modules, **settings)


def ask_adapter(llm: LLM, name: str | None, path: Path | None = None) -> tuple[list[int], int]:
    request = LoRARequest(name, 1, str(path or "")) if name else None
    prompt = TokensPrompt(prompt_token_ids=[5 + 7 * index % 300 for index in range(100)])
    (output,) = llm.generate([prompt], SHORT, use_tqdm=False, lora_request=request)
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


@pytest.fixture(scope="module")
def adapted(adapters: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A directory with KV of a prompt by the first adapter, and the answers with both adapters."""
    base, one, two = adapters
    folder = tmp_path_factory.mktemp("adapted") / "kv"
    with closing(with_adapters(base, None, two=two)) as llm:
        other = ask_adapter(llm, "two")
    with closing(with_adapters(base, folder, first=one)) as llm:
        answer = ask_adapter(llm, "first")
        until_written(llm, 7)
    assert answer[0] != other[0]
    return folder, answer[0], other[0]


def test_an_adapter_of_the_start_finds_its_kv_under_another_name(adapters: Any, adapted: Any, tmp_path: Path) -> None:
    base, one, two = adapters
    folder, tokens, _ = adapted
    folder = Path(shutil.copytree(folder, tmp_path / "kv"))
    with closing(with_adapters(base, folder, tmp_path / "trace", renamed=one, two=two)) as llm:
        until_written(llm, 7)
        assert ask_adapter(llm, "renamed") == (tokens, 96)
        ask_adapter(llm, "two")
        until_written(llm, 14)
    replay = Replay(str(tmp_path / "trace")).run()
    assert replay.divergence is None
    assert replay.scheduler.kv.part(DiskTier).writes.next_ticket() == 4, "a load and two writes, as it was"


def test_an_adapter_that_is_loaded_later_finds_the_same(adapters: Any, adapted: Any) -> None:
    base, one, _ = adapters
    folder, tokens, _ = adapted
    with closing(with_adapters(base, folder)) as llm:
        until_written(llm, 7)
        assert ask_adapter(llm, "late", one) == (tokens, 96)


def test_another_adapter_of_the_same_name_finds_nothing(adapters: Any, adapted: Any, tmp_path: Path) -> None:
    base, one, two = adapters
    folder, _, other = adapted
    with closing(with_adapters(base, folder, first=two)) as llm:
        until_written(llm, 7)
        assert ask_adapter(llm, "first") == (other, 0)
        assert ask_adapter(llm, None)[1] == 0
    path = Path(shutil.copytree(one, tmp_path / "edited"))
    weights = bytearray((path / "adapter_model.safetensors").read_bytes())
    weights[-200] ^= 1
    (path / "adapter_model.safetensors").write_bytes(weights)
    with closing(with_adapters(base, folder, first=path)) as llm:
        until_written(llm, 7)
        assert ask_adapter(llm, "first")[1] == 0


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o755)
    with pytest.raises(ModelError, match="mode 0755, so that others may read"):
        open_llm(tmp_path / "kv")


def test_the_command_line_shows_and_removes(
    written: tuple[Path, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = written
    assert main(["cache", "ls", str(folder)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "demo_model (float32, KV float32)" in listed[1]
    assert main(["cache", "show", str(folder)]) == 0
    assert "rank 0 of 1: 19 of 32.0 KiB blocks or states" in capsys.readouterr().out
    assert main(["cache", "rm", str(folder), "nothing"]) == 2
    assert "is the beginning of 0 names" in capsys.readouterr().err
    assert main(["cache", "rm", str(folder), listed[1][:8]]) == 0
    assert not list(held_files(folder))
