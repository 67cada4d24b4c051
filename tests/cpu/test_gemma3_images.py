"""Gemma 3's images: pixels, texts, vectors and tokens are those of transformers. The tokens of an image attend to each
other in both directions in all layers."""

import random
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.checkpoints import transformers_model
from tests.gemma_images import CHATS, GREEDY, KINDS, SMALL, Truth, check_answers, check_logprobs
from tests.image_answers import check_forks, check_upright, tower_of
from tests.images import GEMMA_IDS, TILE, as_file, chat_of, make_gemma3, picture
from vllm_lite import LLM
from vllm_lite.client.media.processors import PanAndScan, SquareSettings, squares_of
from vllm_lite.client.media.prompt_images import PromptImages
from vllm_lite.client.media.sources import GivenImage
from vllm_lite.errors import RequestError

pytestmark = pytest.mark.usefixtures("images_cut_here")

COLORS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
NUM_TOKENS = 16


def cutter(**settings: Any) -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil(size={"height": TILE, "width": TILE}, **settings)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma3(tmp_path_factory.mktemp("gemma3") / "m")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return transformers_model(checkpoint, "Gemma3ForConditionalGeneration").eval()


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer, Gemma3Processor

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return Gemma3Processor(cutter(**COLORS), tokenizer, image_seq_length=NUM_TOKENS)


# ---- pixels and texts


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_squares_match_the_processor(kind: tuple[str, str]) -> None:
    """Bit for bit, with pan and scan and without."""
    rng, plain = random.Random(repr(kind)), cutter(do_rescale=False, do_normalize=False)
    sizes = [(1, 1), (1, 4000), (3000, 1), *((rng.randint(1, 300), rng.randint(1, 300)) for _ in range(9))]
    for seed, (width, height) in enumerate(sizes):
        pan = (
            None if rng.random() < 0.4 else PanAndScan(rng.choice([8, 40]), rng.choice([2, 4]), rng.choice([1.2, 2.0]))
        )
        data = as_file(*kind, width, height, seed)
        asked = (
            {}
            if pan is None
            else {
                "do_pan_and_scan": True,
                "pan_and_scan_min_crop_size": pan.least_size,
                "pan_and_scan_max_num_crops": pan.most_crops,
                "pan_and_scan_min_ratio_to_activate": pan.least_ratio,
            }
        )
        theirs = plain([Image.open(BytesIO(data))], return_tensors="np", **asked)["pixel_values"]
        made = squares_of(data, SquareSettings(TILE, pan=pan)).squares
        mine = np.stack([np.frombuffer(each, np.uint8).reshape(TILE, TILE, 3) for each in made])
        assert np.array_equal(mine, theirs.transpose(0, 2, 3, 1)), f"{width} x {height}, {pan}"


def test_a_photo_is_turned_upright() -> None:
    check_upright(lambda data: squares_of(data, SquareSettings(TILE)))


@pytest.mark.parametrize("pan", [None, {"min_crop_size": 16, "max_num_crops": 4, "min_ratio_to_activate": 1.5}])
def test_texts_match_the_processor(tmp_path: Path, checkpoint: Path, processor: Any, pan: Any) -> None:
    import json
    import shutil

    folder, file = shutil.copytree(checkpoint, tmp_path / "m"), tmp_path / "m" / "preprocessor_config.json"
    asked = (
        {} if pan is None else {"do_pan_and_scan": True} | {f"pan_and_scan_{key}": value for key, value in pan.items()}
    )
    file.write_text(json.dumps(json.loads(file.read_text()) | asked))
    images = PromptImages.load(folder)
    assert images is not None
    text = "<user>one<start_of_image>two<start_of_image>\n<model>"
    shown = [Image.fromarray(picture(90, 33, 1)), Image.fromarray(picture(20, 30, 2))]
    files = [BytesIO() for _ in shown]
    for image, made in zip(shown, files, strict=True):
        image.save(made, "PNG")
    inputs = processor(text=text, images=shown, return_tensors="pt", add_special_tokens=False, **asked)
    encode = lambda written: processor.tokenizer(written, add_special_tokens=False)["input_ids"]  # noqa: E731
    given = [GivenImage(made.getvalue()) for made in files]
    plain = PromptImages.load(checkpoint)
    assert plain is not None
    try:
        found = images.pictured(text, given, encode)
        assert plain.pictured(text, given, encode, asked) == found, "by the request's mm_processor_kwargs"
    finally:
        images.pool.close()
        plain.pool.close()
    assert found.token_ids == inputs["input_ids"][0].tolist()
    assert found.token_ids.count(GEMMA_IDS["image"]) == NUM_TOKENS * (2 if pan is None else 2 + 3)


# ---- vectors


@pytest.mark.parametrize("changes", [{}, {"mm_tokens_per_image": 64}, {"mm_tokens_per_image": 4}], ids=str)
def test_the_tower_gives_the_vectors_of_transformers(tmp_path: Path, changes: dict[str, int]) -> None:
    path = make_gemma3(tmp_path / "m", **changes)
    theirs, mine = transformers_model(path, "Gemma3ForConditionalGeneration").eval(), tower_of(path)
    colors = [picture(TILE, TILE, seed) for seed in range(5)]
    pixels = cutter(**COLORS)([Image.fromarray(each) for each in colors], return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        expected = theirs.model.get_image_features(pixels).pooler_output
        vectors = torch.stack(mine.encode([torch.from_numpy(each.copy()) for each in colors]))
    assert vectors.shape == (5, changes.get("mm_tokens_per_image", NUM_TOKENS), 64)
    assert torch.allclose(vectors, expected, atol=1e-4), (vectors - expected).abs().max()


def test_published_names_are_understood(tmp_path: Path, checkpoint: Path) -> None:
    """Names may be those of transformers' modules, or contain the tower's class."""
    import shutil

    from safetensors.torch import load_file, save_file

    expected = tower_of(checkpoint).encode([torch.from_numpy(picture(TILE, TILE, 1).copy())])[0]
    for prefix in ("model.vision_tower.", "model.vision_tower.vision_model.", "vision_tower.vision_model."):
        folder = shutil.copytree(checkpoint, tmp_path / prefix)
        renamed = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            own = name.removeprefix("model.").removeprefix("vision_tower.").removeprefix("vision_model.")
            renamed[f"{prefix}{own}" if "vision_tower." in name else name] = tensor
        save_file(renamed, folder / "model.safetensors")
        found = tower_of(folder).encode([torch.from_numpy(picture(TILE, TILE, 1).copy())])[0]
        assert torch.equal(found, expected)


# ---- tokens


@pytest.fixture(scope="module")
def truths(model: Any, processor: Any, checkpoint: Path) -> list[Truth]:
    template = (checkpoint / "chat_template.jinja").read_text()
    found = []
    for parts in CHATS:
        written = processor.apply_chat_template(chat_of(parts), chat_template=template, add_generation_prompt=True)
        images = [part for part in parts if not isinstance(part, str)] or None
        inputs = processor(text=written, images=images, return_tensors="pt", add_special_tokens=False)
        found.append(Truth.of(model, dict(inputs)))
    assert len({tuple(each.answer) for each in found}) == len(CHATS)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": NUM_TOKENS + 3, "max_num_seqs": 4},
        {"max_num_batched_tokens": NUM_TOKENS, "max_num_seqs": 1, "async_scheduling": False},
        {"max_num_batched_tokens": 25, "max_num_seqs": 2, "attention_backend": "reference"},
        {"enable_prefix_caching": False, "block_size": 16},
        {"num_gpu_blocks_override": 36, "preemption_mode": "recompute"},
        {"num_gpu_blocks_override": 36, "preemption_mode": "swap", "swap_space": 0.01},
        {"tensor_parallel_size": 2},
        {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
    ],
    ids=["whole", "chunks", "an image a step", "reference", "no cache", "recompute", "swap", "two ranks", "drafts"],
)
def test_answers_match_transformers(checkpoint: Path, truths: list[Truth], settings: dict[str, Any]) -> None:
    check_answers(checkpoint, truths, settings)


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 20, "max_num_seqs": 2}, {"attention_backend": "reference"}], ids=str
)
def test_every_token_of_a_prompt_is_as_likely_as_in_transformers(
    checkpoint: Path, truths: list[Truth], settings: dict[str, Any]
) -> None:
    check_logprobs(checkpoint, truths, settings)


def test_samples_of_a_prompt_are_forks_of_it(checkpoint: Path, truths: list[Truth]) -> None:
    check_forks(checkpoint, SMALL, CHATS[3], truths[3].answer)


def test_a_hit_may_end_inside_an_image(checkpoint: Path, truths: list[Truth]) -> None:
    """The cached blocks of the image's beginning were computed with the whole image. The rest is computed in one step
    that reads these blocks."""
    ids, other = truths[0].ids, truths[4].ids
    first = ids.index(GEMMA_IDS["image"])
    with LLM(str(checkpoint), **{**SMALL, "num_gpu_blocks_override": 64, "block_size": 16}) as llm:
        (output,) = llm.chat(chat_of(CHATS[0]), GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == truths[0].answer
        (output,) = llm.chat(chat_of(CHATS[4]), GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == truths[4].answer
    assert output.num_cached_tokens == 16
    assert first < 16 < first + NUM_TOKENS
    assert ids[: first + NUM_TOKENS] == other[: first + NUM_TOKENS]


@pytest.mark.parametrize(
    ("settings", "need"),
    [({"max_num_batched_tokens": 16, "max_num_seqs": 2}, 17), ({"max_num_batched_tokens": 12, "max_num_seqs": 1}, 16)],
)
def test_an_image_that_fits_into_no_step_is_refused(checkpoint: Path, settings: dict[str, Any], need: int) -> None:
    budget, others = settings["max_num_batched_tokens"], settings["max_num_seqs"] - 1
    problem = (
        f"an image of 16 tokens is computed in one step, which has {budget} tokens, of which up to {others} are for "
        f"other sequences; --max-num-batched-tokens must be at least {need} for it"
    )
    with LLM(str(checkpoint), num_gpu_blocks_override=64, **SMALL, **settings) as llm:
        with pytest.raises(RequestError, match=problem):
            llm.chat(chat_of(CHATS[0]), GREEDY, use_tqdm=False)
        assert llm.chat(chat_of(CHATS[2]), GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_a_text_with_the_token_of_a_vector_is_refused(checkpoint: Path) -> None:
    with (
        LLM(str(checkpoint), num_gpu_blocks_override=64, **SMALL) as llm,
        pytest.raises(RequestError, match="no text of a prompt with images may contain '<image_soft_token>'"),
    ):
        llm.chat(chat_of([CHATS[0][0], "<image_soft_token>"]), GREEDY, use_tqdm=False)
