"""Images of LLaVA, LLaVA-NeXT and LLaVA-OneVision: squares, counts of vectors, vectors and tokens are transformers'."""

import random
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from tests.checkpoints import transformers_model
from tests.image_answers import (
    Answer,
    check_another_pixel,
    check_answers,
    check_forks,
    generated,
    tower_of,
    ways,
)
from tests.images import PINPOINTS, SQUARE, as_file, make_llava, make_onevision, picture
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.layer_specs import anyres
from vllm_lite.checkpoint.layer_specs.anyres import AnyresSpec
from vllm_lite.client.media.processors import GridSettings, grid_of
from vllm_lite.errors import RequestError

pytestmark = pytest.mark.usefixtures("images_cut_here")

WAYS = ways(19, 5)
SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 768, "single_process": True, "seed": 0}
RESOLUTIONS = tuple((height, width) for height, width in PINPOINTS)


class Kind(NamedTuple):
    make: Callable[[Path], Path]
    model: str
    processor: str
    sizes: dict[str, Any]
    pinpoints: bool = True


SHORTEST = {"size": {"shortest_edge": SQUARE}, "crop_size": {"height": SQUARE, "width": SQUARE}}
KINDS = {
    "onevision": Kind(
        make_onevision,
        "LlavaOnevisionForConditionalGeneration",
        "llava_onevision.image_processing_pil_llava_onevision:LlavaOnevisionImageProcessorPil",
        {"size": {"height": SQUARE, "width": SQUARE}, "image_grid_pinpoints": PINPOINTS},
    ),
    "next": Kind(
        partial(make_llava, family="LlavaNext"),
        "LlavaNextForConditionalGeneration",
        "llava_next.image_processing_pil_llava_next:LlavaNextImageProcessorPil",
        SHORTEST | {"image_grid_pinpoints": PINPOINTS},
    ),
    "llava": Kind(
        make_llava,
        "LlavaForConditionalGeneration",
        "clip.image_processing_pil_clip:CLIPImageProcessorPil",
        SHORTEST,
        pinpoints=False,
    ),
}


class Made(NamedTuple):
    kind: Kind
    path: Path
    model: Any

    def features(self, inputs: Any) -> Any:
        """The vectors of each image."""
        known = {name: inputs[name] for name in ("pixel_values", "image_sizes") if name in inputs}
        with torch.inference_mode():
            return self.model.get_image_features(**known).pooler_output


@pytest.fixture(scope="module", params=list(KINDS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    kind = KINDS[request.param]
    path = kind.make(tmp_path_factory.mktemp(request.param) / "m")
    return Made(kind, path, transformers_model(path, kind.model).eval())


def vision_of(path: Path) -> AnyresSpec:
    found = load_spec(path).vision
    assert isinstance(found, AnyresSpec)
    return found


def processor(kind: Kind, **settings: Any) -> Any:
    return resolve_name(f"transformers.models.{kind.processor}")(**kind.sizes, **settings)


# ---- pixels and counts


MODES = [("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "P"), ("PNG", "I;16"), ("PNG", "L"), ("JPEG", "CMYK"), ("GIF", "P")]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_squares_match_the_processor(mode: tuple[str, str], name: str) -> None:
    """Bit for bit, whatever the size."""
    rng, plain = random.Random(repr(mode)), processor(KINDS[name], do_rescale=False, do_normalize=False)
    settings = GridSettings(SQUARE, RESOLUTIONS if KINDS[name].pinpoints else ())
    sizes = [(1, 1), (1, 4000), (3000, 1), (28, 28), *((rng.randint(1, 200), rng.randint(1, 200)) for _ in range(15))]
    for seed, (width, height) in enumerate(sizes):
        data = as_file(*mode, width, height, seed)
        mine = grid_of(data, settings)
        theirs = plain([Image.open(BytesIO(data))], return_tensors="np")["pixel_values"]
        own = np.frombuffer(mine.colors, np.uint8).reshape(-1, SQUARE, SQUARE, 3)
        assert np.array_equal(own, theirs.reshape(-1, 3, SQUARE, SQUARE).transpose(0, 2, 3, 1)), f"{width} x {height}"
        assert (mine.height, mine.width) == (height, width)


def test_narrow_images_that_would_lose_their_middle_are_refused() -> None:
    """Resized to the tower's edge they would have any number of pixels."""
    far = as_file("PNG", "RGB", 1, 20_000, 0)
    with pytest.raises(RequestError, match="has 1 x 20000 pixels; one edge may be 10204 times the other"):
        grid_of(far, GridSettings(SQUARE, ()))


def test_vectors_are_counted_as_by_the_processor(tmp_path: Path) -> None:
    """With the published sizes: 36 resolutions of squares of 384 pixels, with 27 x 27 patches each."""
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    vision = vision_of(make_onevision(tmp_path / "m"))
    spec = msgspec.structs.replace(
        vision, image_size=384, patch_size=14, pinpoints=anyres.checked_pinpoints(anyres.PINPOINTS), max_squares=9
    )
    theirs: Any = object.__new__(LlavaOnevisionProcessor)
    theirs.image_processor = SimpleNamespace(image_grid_pinpoints=anyres.PINPOINTS)
    theirs.num_image_tokens, theirs.vision_aspect_ratio = 729, "anyres_max_9"
    rng = random.Random(5)
    edges = [1, 2, 27, 383, 384, 385, 769, 2304, 2305, 5000]
    sizes = [(height, width) for height in edges for width in edges]
    sizes += [(rng.randint(1, 4000), rng.randint(1, 4000)) for _ in range(300)]
    most = 0
    for height, width in sizes:
        counted = spec.num_tokens(height, width)
        assert counted == theirs._get_number_of_features(height, width, 384, 384), f"{width} x {height}"
        rows, cols = spec.grid(height, width)[:2]
        most = max(most, counted)
        assert (1 + rows * cols) * 3 * 384**2 <= counted * spec.token_bytes
    assert 7000 < most < 9000


# ---- vectors


def test_the_tower_gives_the_vectors_of_transformers(made: Made) -> None:
    mine, vision = tower_of(made.path), vision_of(made.path)
    assert vision.num_parameters == sum(slot.num_elements for group in mine.weight_groups() for slot in group.slots)
    shown = set()
    for width, height in ((28, 28), (90, 60), (20, 84), (84, 84), (500, 400), (1, 4000), (84, 3)):
        file = BytesIO()
        Image.fromarray(image := picture(width, height, 3)).save(file, "PNG")
        cut = grid_of(file.getvalue(), GridSettings(SQUARE, vision.pinpoints))
        squares = torch.from_numpy(np.frombuffer(cut.colors, np.uint8).copy()).view(-1, SQUARE, 3)
        (expected,) = made.features(processor(made.kind)([Image.fromarray(image)], return_tensors="pt"))
        num_tokens, grid = vision.num_tokens(height, width), (1, height, width)
        assert mine.shape(num_tokens, grid) == squares.shape[:2]
        with torch.inference_mode():
            own = mine.arranged(mine.encode([squares])[0], grid)
        assert own.shape == expected.shape == (num_tokens, 64)
        assert (own - expected).abs().max() <= 1e-5 * max(10.0, float(expected.abs().max()))
        if made.kind.pinpoints:
            found = vision.grid(height, width)
            shown.add((found.kept == (3 * found.rows, 3 * found.cols), found.shown == found.kept))
    most = {True, False} if made.kind.model.startswith("LlavaOne") else {True}
    assert not made.kind.pinpoints or shown == {(whole, all_of) for whole in (True, False) for all_of in most}


# ---- tokens


CHATS: list[list[Any]] = [
    [Image.fromarray(picture(90, 60, 1)), "a page"],
    [Image.fromarray(picture(20, 30, 2)), Image.fromarray(picture(120, 17, 3)), "two, three"],
    ["no image at all, only words"],
    [Image.fromarray(picture(84, 84, 4)), Image.fromarray(picture(84, 84, 4)), "and once more"],
]


def answer(made: Made, parts: list[Any]) -> Answer:
    """The prompt's tokens and the answer, by transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made.path)
    images = [part for part in parts if not isinstance(part, str)]
    seen = dict(processor(made.kind)(images, return_tensors="pt")) if images else {}
    found = made.features(seen) if images else ()
    words = "".join(part for part in parts if isinstance(part, str))
    text = f"<|im_start|>user{''.join('<image>' * len(each) for each in found)}{words}<|im_end|><|im_start|>assistant"
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
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
