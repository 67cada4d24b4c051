"""Images on a hybrid model, whose prefix cache needs states: chats continue from earlier messages, and from the end of
an image.

`python -m tests.acceptance.image_chats 32` has 32 chats at once.
"""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.image_chats import GREEDY, chat
from tests.images import make_qwen, picture
from vllm_lite import LLM

pytestmark = pytest.mark.usefixtures("images_cut_here")

SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 4096, "single_process": True, "seed": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen(tmp_path_factory.mktemp("qwen") / "m")


@pytest.mark.parametrize("num_users", [1, 4])
def test_a_long_chat_computes_each_image_once_and_finds_the_rest(checkpoint: Path, num_users: int) -> None:
    found = chat(checkpoint, num_users, **SMALL, num_gpu_blocks_override=1000)
    assert found.cached >= 0.98 * found.known
    assert found.num_towers == found.num_images
    assert found.changed <= found.before


def test_another_question_about_an_image_begins_at_its_end(checkpoint: Path) -> None:
    """From the last block boundary within an image, for the last two images."""
    images = [Image.fromarray(picture(64, 64, seed)) for seed in range(3)]
    shown = "".join(f"{number}: <|image_pad|> " for number in range(3))
    with LLM(str(checkpoint), num_gpu_blocks_override=64, **SMALL) as llm:

        def cached(text: str, count: int) -> tuple[int, list[int]]:
            data = {"image": images[:count]}
            [output] = llm.generate({"prompt": text, "multi_modal_data": data}, GREEDY, use_tqdm=False)
            ids = output.prompt_token_ids
            ends = [place for place in range(1, len(ids)) if ids[place - 1] == 386 != ids[place]]
            return output.num_cached_tokens or 0, [end // 16 * 16 for end in ends]

        found, ends = cached(f"{shown}what is it, and where was the page that it was on?", 3)
        assert found == 0
        assert cached(f"{shown}who, and when?", 3)[0] == ends[2]
        two = "0: <|image_pad|> 1: <|image_pad|>"
        assert cached(f"{two} and no third one", 2)[0] == ends[1]
