"""A KV cache on disk through whole engines: after a restart, a kill or beside another engine the same tokens come, and
the prompt is not computed again; of what does not fit nothing is found."""

import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import scaled
from tests.e2e.test_hybrid import GREEDY, SERVED, SLOTS, words
from tests.e2e.test_processes import family
from vllm_lite import LLM, SamplingParams
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.client.engines.launch import LaunchedEngine
from vllm_lite.client.prompt import TokensPrompt
from vllm_lite.config import GIB
from vllm_lite.errors import EngineDeadError, ModelError
from vllm_lite.kv_disk.usage import held_files
from vllm_lite.tools.cli import main

SHORT = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPT = [5 + 7 * index % 2000 for index in range(300)]


def open_llm(folder: Path, **settings: Any) -> LLM:
    usual: dict[str, Any] = {"device": "cpu", "dtype": "float32", "single_process": True}
    return LLM("demo", kv_cache_dir=str(folder), **{**usual, **settings})


def ask(llm: LLM, prompt: list[int], params: SamplingParams = SHORT) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of the prompt were cached."""
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


def until_written(llm: LLM, num_keys: int) -> None:
    """Wait until so many blocks and states can be found on disk, and none is on its way."""
    deadline_s = time.monotonic() + scaled(20.0)
    while (stats := llm.stats()).num_stored_keys < num_keys or stats.num_writing_blocks:
        assert time.monotonic() < deadline_s, f"{stats.num_stored_keys} are written, {stats.num_writing_blocks} are not"
        time.sleep(0.01)


def has_others(llm: LLM) -> bool:
    """Whether others have taken the place of an engine or workers that died, and know what is on disk."""
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


def test_after_a_restart_the_next_turn_computes_what_is_new(written: tuple[Path, list[int]], tmp_path: Path) -> None:
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


@pytest.mark.parametrize("victim", ["worker", "engine"])
def test_after_a_kill_the_chat_is_found_again(tmp_path: Path, victim: str) -> None:
    with closing(open_llm(tmp_path / "kv", single_process=False)) as llm:
        tokens, _ = ask(llm, PROMPT)
        until_written(llm, 19)
        assert isinstance(llm._launched, LaunchedEngine)
        engine = llm._launched.pid
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


def test_a_reset_takes_the_disk_along_when_asked(written: tuple[Path, list[int]]) -> None:
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
        until_written(llm, 19)
        assert ask(llm, PROMPT) == (tokens, 288)


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
