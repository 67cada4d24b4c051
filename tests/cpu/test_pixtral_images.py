"""Images of Mistral 3 and Pixtral: pixels, vectors and tokens equal transformers', including row ends."""

import random
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from tests.checkpoints import transformers_model
from tests.image_answers import Answer, check_another_pixel, check_answers, check_forks, generated, tower_of, ways
from tests.images import as_file, chats, make_mistral3, make_pixtral, picture
from vllm_lite.client.media.processors import RowSettings, resized
from vllm_lite.errors import RequestError

pytestmark = pytest.mark.usefixtures("images_cut_here")

WAYS = ways(9, 2)
SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "single_process": True, "seed": 0}


class Kind(NamedTuple):
    make: Callable[..., Path]
    model: str
    unit: int
    """Pixels along the edges of a vector's part of an image."""


KINDS = {
    "mistral3": Kind(make_mistral3, "Mistral3ForConditionalGeneration", 16),
    "pixtral": Kind(make_pixtral, "LlavaForConditionalGeneration", 8),
}


class Made(NamedTuple):
    kind: Kind
    path: Path
    model: Any


@pytest.fixture(scope="module", params=list(KINDS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    kind = KINDS[request.param]
    path = kind.make(tmp_path_factory.mktemp(request.param) / "m")
    return Made(kind, path, transformers_model(path, kind.model).eval())


def processor(unit: int, **settings: Any) -> Any:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    return PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": unit, "width": unit}, **settings)


# ---- pixels


MODES = [("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "P"), ("PNG", "I;16"), ("PNG", "1"), ("PNG", "LA"), ("JPEG", "CMYK")]
MODES += [("JPEG", "L"), ("WEBP", "RGBA"), ("GIF", "P")]


@pytest.mark.parametrize("kind", MODES, ids="-".join)
def test_rows_match_the_processor(kind: tuple[str, str]) -> None:
    """Bit for bit, whatever the size."""
    rng = random.Random(repr(kind))
    sizes = [
        (1, 1),
        (1, 64),
        (60, 1),
        (64, 64),
        (65, 64),
        *((rng.randint(4, 200), rng.randint(4, 200)) for _ in range(15)),
    ]
    for seed, (width, height) in enumerate(sizes):
        unit, data = rng.choice([8, 16, 28]), as_file(*kind, width, height, seed)
        mine = resized(data, RowSettings(unit, 64, 64))
        theirs = processor(unit, do_rescale=False, do_normalize=False)([Image.open(BytesIO(data))], return_tensors="np")
        expected = theirs["pixel_values"][0].transpose(1, 2, 0)
        own = np.frombuffer(mine.colors, np.uint8).reshape(mine.height, mine.width, 3)
        assert np.array_equal(own, expected), f"{width} x {height}"


@pytest.mark.parametrize("size", [(1, 4000), (300, 2)])
def test_images_that_would_lose_an_edge_are_refused(size: tuple[int, int]) -> None:
    """The processor itself fails."""
    width, height = size
    data = as_file("PNG", "RGB", width, height, 0)
    with pytest.raises(RequestError, match=f"has {width} x {height} pixels; shrunk to at most 64 x 64 one edge would"):
        resized(data, RowSettings(16, 64, 64))
    with pytest.raises(ValueError, match="Size must contain"):
        processor(16)([Image.open(BytesIO(data))])


# ---- vectors


def test_the_tower_gives_the_vectors_of_transformers(made: Made) -> None:
    mine = tower_of(made.path)
    unit = made.kind.unit
    images = [picture(width, height, 3) for width, height in ((48, 48), (16, 64), (64, 32), (16, 16))]
    inputs = processor(unit)([Image.fromarray(image) for image in images], return_tensors="pt")
    with torch.inference_mode():
        theirs = made.model.get_image_features(inputs["pixel_values"], image_sizes=inputs["image_sizes"]).pooler_output
        vectors = mine.encode([torch.from_numpy(image.copy()) for image in images])
    for own, expected, (height, width) in zip(vectors, theirs, inputs["image_sizes"].tolist(), strict=True):
        assert own.shape == (height * width // unit**2, 64)
        assert (own - expected).abs().max() <= 1e-5 * max(10.0, float(expected.abs().max()))


# ---- tokens


CHATS = [*chats(), ["ends with one", Image.fromarray(picture(9, 70, 5))]]


def answer(made: Made, parts: list[Any]) -> Answer:
    """The prompt's tokens and the answer, by transformers."""
    from transformers import AutoTokenizer

    tokenizer, unit = AutoTokenizer.from_pretrained(made.path), made.kind.unit
    images = [part for part in parts if not isinstance(part, str)]
    seen = dict(processor(unit)(images, return_tensors="pt")) if images else {}
    sizes, text = iter(seen["image_sizes"].tolist() if images else ()), "[INST]"
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        height, width = next(sizes)
        rows = [["[IMG]"] * (width // unit) + ["[IMG_BREAK]"]] * (height // unit)
        text += "".join([*(token for row in rows for token in row)][:-1]) + "[IMG_END]"
    ids = tokenizer(text + "[/INST]", add_special_tokens=False, return_tensors="pt")["input_ids"]
    return generated(made.model, ids, seen)


@pytest.fixture(scope="module")
def answers(made: Made) -> list[Answer]:
    found = [answer(made, parts) for parts in CHATS]
    assert len({tuple(tokens) for _, tokens in found}) == len(CHATS)
    return found


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_answers_match_transformers(made: Made, answers: list[Answer], settings: dict[str, Any]) -> None:
    check_answers(made.path, CHATS, answers, SMALL | settings)


def test_samples_of_a_prompt_are_forks(made: Made, answers: list[Answer]) -> None:
    check_forks(made.path, SMALL, CHATS[3], answers[3][1])


def test_a_pixel_makes_another_image(made: Made) -> None:
    check_another_pixel(made.path, SMALL, partial(answer, made))
