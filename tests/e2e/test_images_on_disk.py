"""Images after a restart: where their KV is gone but their vectors are on disk, no tower runs again, and answers are
the same; vectors that are damaged, or of another type, are computed."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image

from tests.cpu.test_images import GREEDY, SMALL, Part, colors, prompt, words
from tests.deadlines import scaled
from tests.e2e.test_kv_on_disk import has_others, until_written
from tests.e2e.test_processes import family
from tests.http_server import until
from tests.images import chat_of, make_pixtral, make_qwen, make_smolvlm, picture
from vllm_lite import LLM
from vllm_lite.client.engines.launch import LaunchedEngine
from vllm_lite.engine.encoder_cache import EncoderCache
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.engine.stored_media import StoredMedia
from vllm_lite.kv_disk.format import PAGE, read_header
from vllm_lite.kv_disk.usage import held_files
from vllm_lite.layers.vision.siglip import SiglipTower
from vllm_lite.protocol.encoder import EncodeAside
from vllm_lite.protocol.transfers import MEDIUM

pytestmark = pytest.mark.usefixtures("images_cut_here")

PARTS: list[Part] = [words(5, 1), colors(1), words(30, 2), colors(2), words(3, 3)]
ELSEWHERE: list[Part] = [words(9, 4), colors(2), words(3, 5), colors(1), words(8, 6)]
NUM_BLOCKS = 3
"""Blocks that the first prompt and its answer fill."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_smolvlm(tmp_path_factory.mktemp("smolvlm") / "m")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The images that towers of this process compute from now on: a number for each."""
    numbers = list[int]()
    encode = SiglipTower.encode

    def encoding(self: SiglipTower, tiles: Sequence[torch.Tensor], progress: Any) -> list[torch.Tensor]:
        numbers.extend(int(tile.sum()) for tile in tiles)
        return encode(self, tiles, progress)

    monkeypatch.setattr(SiglipTower, "encode", encoding)
    return numbers


def open_llm(checkpoint: Path, folder: Path | None, **settings: Any) -> LLM:
    return LLM(
        str(checkpoint),
        num_gpu_blocks_override=64,
        kv_cache_dir=folder and str(folder),
        kv_cache_preload=0,
        **SMALL | settings,
    )


def ask(llm: LLM, parts: list[Part]) -> list[int]:
    (output,) = llm.generate([prompt(parts)], GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def files(folder: Path, *, of_media: bool) -> list[Path]:
    """Files that are whole; a draft gets its header last."""
    found = []
    for held in held_files(folder):
        if held.is_draft:
            continue
        header = read_header(Path(held.path).read_bytes()[:PAGE], held.num_bytes)
        if header.keys[0].endswith(MEDIUM) is of_media:
            found.append(Path(held.path))
    return found


Shown = tuple[Path, list[int], list[int]]


@pytest.fixture
def shown(checkpoint: Path, tmp_path: Path) -> Shown:
    """A directory with the vectors of two images but not their KV, and the answers of an engine without a directory."""
    with closing(open_llm(checkpoint, None)) as llm:
        expected = ask(llm, PARTS), ask(llm, ELSEWHERE)
    folder = tmp_path / "kv"
    with closing(open_llm(checkpoint, folder)) as llm:
        assert ask(llm, PARTS) == expected[0]
        until_written(llm, NUM_BLOCKS + 2)
    for file in files(folder, of_media=False):
        file.unlink()
    assert len(files(folder, of_media=True)) == 2
    return folder, *expected


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 8}], ids=["whole", "chunks"])
def test_no_tower_runs_again(
    checkpoint: Path,
    shown: Shown,
    seen: list[int],
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    folder, first, second = shown
    with closing(open_llm(checkpoint, folder, record=str(tmp_path / "trace"), **settings)) as llm:
        until_written(llm, 2)
        assert ask(llm, ELSEWHERE) == second
        assert ask(llm, PARTS) == first
        stats = llm.stats()
        assert (stats.loaded_media, stats.encoded_media, stats.loaded_tokens) == (2, 0, 0)
    assert not seen
    replay = Replay(str(tmp_path / "trace")).run()
    assert replay.divergence is None
    assert replay.scheduler.kv.part(StoredMedia).num_loaded == 2


def test_vectors_computed_beside_a_stream_are_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside, take_entries = list[EncodeAside](), EncoderCache.take_entries

    def taking(cache: EncoderCache) -> list[Any]:
        entries = take_entries(cache)
        aside.extend(entry for entry in entries if isinstance(entry, EncodeAside))
        return entries

    monkeypatch.setattr(EncoderCache, "take_entries", taking)
    with closing(open_llm(checkpoint, None)) as llm:
        expected = ask(llm, PARTS), ask(llm, ELSEWHERE)
    folder, prompts = tmp_path / "kv", [prompt([words(4, 9)]), prompt(PARTS)]
    stream = msgspec.structs.replace(GREEDY, max_tokens=100, ignore_eos=True)
    settings: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "max_itl_ms": 100}
    with closing(open_llm(checkpoint, folder, **settings)) as llm:
        outputs = llm.generate(prompts, [stream, GREEDY], use_tqdm=False)
        assert outputs[1].outputs[0].token_ids == expected[0]
        until(lambda: len(files(folder, of_media=True)) == 2, "the vectors on disk")
    assert len(aside) == 2
    for file in files(folder, of_media=False):
        file.unlink()
    with closing(open_llm(checkpoint, folder)) as llm:
        until_written(llm, 2)
        assert ask(llm, ELSEWHERE) == expected[1]
        assert (llm.stats().loaded_media, llm.stats().encoded_media) == (2, 0)


def test_vectors_that_are_damaged_are_computed_and_written_anew(
    checkpoint: Path, shown: Shown, seen: list[int]
) -> None:
    folder, _, second = shown
    victim = files(folder, of_media=True)[0]
    with closing(open_llm(checkpoint, folder)) as llm:
        until_written(llm, 2)
        data = bytearray(victim.read_bytes())
        data[-5] ^= 1
        victim.write_bytes(data)
        assert ask(llm, ELSEWHERE) == second
        stats = llm.stats()
        assert (stats.loaded_media, stats.encoded_media, stats.failed_loads) == (1, 1, 1)
        until(lambda: len(files(folder, of_media=True)) == 2, "the vectors on disk again")
    assert len(seen) == 1


def test_vectors_of_another_type_are_not_found(checkpoint: Path, shown: Shown, seen: list[int]) -> None:
    folder, _, _ = shown
    with closing(open_llm(checkpoint, folder, dtype="bfloat16")) as llm:
        ask(llm, ELSEWHERE)
        assert llm.stats().failed_loads == 0
    assert len(seen) == 2


def test_two_ranks_load_a_copy_each(checkpoint: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "single_process": False, "cpu_threads": 1}
    folder = tmp_path / "kv"
    with closing(open_llm(checkpoint, folder, **settings)) as llm:
        expected = ask(llm, ELSEWHERE)
        until_written(llm, NUM_BLOCKS)
        until(lambda: len(files(folder, of_media=True)) == 4, "the vectors of both ranks")
    for file in files(folder, of_media=False):
        file.unlink()
    with closing(open_llm(checkpoint, folder, **settings)) as llm:
        until_written(llm, 2)
        assert ask(llm, ELSEWHERE) == expected
        stats = llm.stats()
        assert (stats.loaded_media, stats.encoded_media) == (2, 0)


def test_no_vectors_are_lost_when_a_worker_dies(checkpoint: Path, shown: Shown) -> None:
    folder, _, second = shown
    with closing(open_llm(checkpoint, folder, single_process=False)) as llm:
        until_written(llm, 2)
        assert ask(llm, ELSEWHERE) == second
        until_written(llm, 2 + 2)
        for file in files(folder, of_media=False):
            file.unlink()
        assert isinstance(llm.launched, LaunchedEngine)
        os.kill(family(llm.launched.pid)[1], signal.SIGKILL)
        deadline_s = time.monotonic() + scaled(60.0)
        while not has_others(llm):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert ask(llm, ELSEWHERE) == second
        assert (llm.stats().loaded_media, llm.stats().encoded_media) == (4, 0)


@pytest.mark.parametrize("make", [make_pixtral, partial(make_qwen, family="Qwen3VL")], ids=["Pixtral", "Qwen3-VL"])
def test_all_of_an_image_is_known_to_a_restarted_server(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """Pixtral's rows end in tokens that are words; Qwen3-VL's tokens have further vectors."""
    path, folder = make(tmp_path / "m"), tmp_path / "kv"
    content = ["one", Image.fromarray(picture(20, 30, 2)), "two", Image.fromarray(picture(60, 17, 3)), "three"]
    with closing(open_llm(path, folder, max_model_len=512)) as llm:
        expected = llm.chat(chat_of(content), GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        until_written(llm, 2 + 1)
    for file in files(folder, of_media=False):
        file.unlink()
    with closing(open_llm(path, folder, max_model_len=512)) as llm:
        until_written(llm, 2)
        assert llm.chat(chat_of(content), GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
        stats = llm.stats()
        assert (stats.loaded_media, stats.encoded_media) == (2, 0)
