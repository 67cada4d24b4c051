"""Steps with few tokens of images, replayed as programs of decodes: they must have the bits of eager ones."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.driver import Driver, make_prompt, new_request
from tests.images import PATCH, QWEN_VISION, make_qwen
from tests.plays import Recorder, graphs_of, without_step
from vllm_lite.kernels import cpu
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.encoder import Encode
from vllm_lite.protocol.spans import Media
from vllm_lite.protocol.step import Continue, Entry

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the native library")

PLACEHOLDER = 386
ROWS, COLS = 4, 6
"""Rows and columns of image tokens, each of 2 x 2 patches."""
IMAGE = Media("image", b"i" * 32, ROWS * COLS, 3, grid=(1, 2 * ROWS, 2 * COLS))
COUNTS = [5, 4, 1, 3, 7, 6, 1, 1]
"""Tokens of the prompt that each step computes: three words and two of the image, then the rest of it, and a word."""
ALONE = 3
"""A step without a token of the stream, so without sampling."""


def steps() -> list[list[Entry]]:
    """A stream of text beside a prompt with an image, step by step."""
    colors = np.random.default_rng(1).integers(0, 256, ROWS * COLS * 4 * PATCH**2 * 3, dtype=np.uint8).tobytes()
    prompt = [7, 8, 9] + [PLACEHOLDER] * IMAGE.num_tokens + [10]
    shown = msgspec.structs.replace(
        new_request(1, prompt, [4, 5, 6], num_tokens=COUNTS[0]), tokens=pack_tokens(prompt), media=(IMAGE,)
    )
    made: list[list[Entry]] = [[new_request(0, make_prompt(9, seed=2), [1, 2, 3])]]
    made.append([Continue(0, 1, []), Encode(IMAGE.digest, IMAGE.num_tokens, colors, IMAGE.grid), shown])
    made += [[Continue(0, 1, []), Continue(1, count, [])] for count in COUNTS[1:]]
    del made[ALONE][0]
    return made


@pytest.mark.parametrize("family", [family for family in QWEN_VISION if family != "Qwen3_5"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_tokens_of_images_are_replayed(family: str, dtype: str, tmp_path: Path) -> None:
    """Vectors of the tower, in layers, too, and positions along three axes go into a program."""
    replay(make_qwen(tmp_path / "m", family), dtype=dtype)


def test_programs_may_have_more_rows_than_the_step(tmp_path: Path) -> None:
    replay(make_qwen(tmp_path / "m", "Qwen3VL"), cudagraph_capture_sizes=[8])


def replay(checkpoint: Path, **settings: Any) -> None:
    eager, graphed = (Driver(checkpoint, enforce_eager=no, **settings) for no in (True, False))
    expected, got = Recorder(eager), Recorder(graphed)
    graphs, replayed = graphs_of(graphed), list[int]()
    for number, entries in enumerate(steps()):
        before = graphs.num_replays
        outputs = [without_step(driver.run(*entries)) for driver in (eager, graphed)]
        replayed.append(graphs.num_replays - before)
        assert outputs[0] == outputs[1], number
        assert torch.equal(expected.logits[-1], got.logits[-1]), number
        assert torch.equal(eager.pool, graphed.pool), f"step {number} left another cache"
    assert replayed == [0] + [1] * len(COUNTS)
