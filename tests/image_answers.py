"""Answers about images: chats as users write them, and settings under which an answer must be the same."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import torch
from PIL import Image

from tests.images import chat_of, picture
from vllm_lite import LLM, SamplingParams
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.models.registry import Sizes, build
from vllm_lite.models.weights import load_weights

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
LONGER = msgspec.structs.replace(GREEDY, max_tokens=30)
Answer = tuple[list[int], list[int]]
"""Tokens of a prompt, and tokens of its answer."""


def ways(chunk: int, short: int) -> dict[str, dict[str, Any]]:
    """Name -> settings, with chunks of `chunk` tokens."""
    return {
        "whole": {},
        f"chunks of {chunk}": {"max_num_batched_tokens": chunk, "max_num_seqs": 4},
        f"chunks of {short}": {"max_num_batched_tokens": short, "max_num_seqs": 2, "async_scheduling": False},
        "no cache": {"enable_prefix_caching": False},
        "recompute": {"preemption_mode": "recompute", "block_size": 8},
        "swap": {"preemption_mode": "swap", "block_size": 8, "swap_space": 0.01},
        "two ranks": {"tensor_parallel_size": 2},
    }


def check_answers(path: Path, chats: Sequence[Any], answers: Sequence[Answer], settings: dict[str, Any]) -> None:
    """Compare prompts and answers of all chats at once, twice. With a mode of preemption there is room for the prompts
    and not for what follows them, so that some are preempted."""
    preempts = "preemption_mode" in settings
    blocks = 3 + sum(1 + len(prompt_ids) // 8 for prompt_ids, _ in answers) if preempts else 64
    with LLM(str(path), **{"num_gpu_blocks_override": blocks, **settings}) as llm:
        for turn in range(2):
            outputs = llm.chat([chat_of(parts) for parts in chats], LONGER if preempts else GREEDY, use_tqdm=False)
            for output, (prompt_ids, tokens) in zip(outputs, answers, strict=True):
                assert output.prompt_token_ids == prompt_ids
                assert output.outputs[0].token_ids[: len(tokens)] == tokens, f"turn {turn}"
        assert (llm.stats().preemptions > 0) == preempts


def check_another_pixel(path: Path, settings: dict[str, Any], answer: Callable[[list[Any]], Answer]) -> None:
    """Check that an image with some other pixels finds no cached tokens from its position on, and gets its own
    answer."""
    first, other = picture(64, 64, 6), picture(64, 64, 6).copy()
    other[30:40, 30:40] ^= 255
    shown = [[Image.fromarray(each), "a page of words"] for each in (first, first, other)]
    with LLM(str(path), num_gpu_blocks_override=64, block_size=4, **settings) as llm:
        outputs = [llm.chat(chat_of(parts), GREEDY, use_tqdm=False)[0] for parts in shown]
    cached = [output.num_cached_tokens or 0 for output in outputs]
    assert cached[1] >= len(outputs[1].prompt_token_ids or ()) - 4
    assert cached[0] == 0
    assert cached[2] < 8 + 4, "what stands before the image"
    assert [output.outputs[0].token_ids for output in outputs] == [answer(parts)[1] for parts in shown]


def generated(model: Any, ids: torch.Tensor, seen: dict[str, Any], num_tokens: int = 10) -> Answer:
    """The answer of a model of transformers to the prompt `ids`, [1, n], with images that it has `seen`."""
    settings = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        said = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **seen, **settings)
    return ids[0].tolist(), said[0, ids.shape[1] :].tolist()


def check_forks(path: Path, settings: dict[str, Any], parts: list[Any], tokens: list[int]) -> None:
    """Check that three samples of a prompt, forks of the first, are each the answer `tokens`."""
    params = SamplingParams(n=3, temperature=0.0, max_tokens=len(tokens), ignore_eos=True)
    with LLM(str(path), num_gpu_blocks_override=128, **settings) as llm:
        (output,) = llm.chat(chat_of(parts), params, use_tqdm=False)
    assert [sample.token_ids for sample in output.outputs] == [tokens] * 3


def check_upright(made: Callable[[bytes], Any]) -> None:
    """Check that an image whose EXIF data say that it lies on its side is turned before anything is `made` of it."""
    image, exif = Image.fromarray(picture(40, 20, 5)), Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned, upright = BytesIO(), BytesIO()
    image.save(turned, "PNG", exif=exif)
    image.transpose(Image.Transpose.ROTATE_270).save(upright, "PNG")
    assert made(turned.getvalue()) == made(upright.getvalue())


def tower_of(path: Path) -> Any:
    """The vision tower of the model at `path`, with its weights."""
    model = build(load_spec(path), "float32", "cpu", Sizes(256, 64))
    load_weights(model, path)
    assert model.tower is not None
    return model.tower
