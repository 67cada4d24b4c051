"""Images of Gemma 4 and Gemma 4 Unified: pixels, texts, vectors and tokens are those of transformers. The tokens of an
image attend to each other in both directions in sliding layers, or in no layer."""

import ast
import math
import random
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from tests.checkpoints import transformers_model
from tests.gemma_images import CHATS, GREEDY, KINDS, SMALL, Truth, check_answers, check_logprobs
from tests.image_answers import check_forks, tower_of
from tests.images import GEMMA_IDS, as_file, chat_of, make_gemma4, make_unified, picture
from vllm_lite import LLM
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.client.media.processors import FittedSettings, resized
from vllm_lite.client.media.prompt_images import PromptImages
from vllm_lite.errors import ModelError, RequestError

pytestmark = pytest.mark.usefixtures("images_cut_here")

UNIT, PATCH, BUDGET = 12, 4, 70
SHARED: dict[str, Any] = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 387,
    "num_kv_shared_layers": 2,
}


class Family(NamedTuple):
    make: Callable[[Path], Path]
    architecture: str
    unified: bool


FAMILIES = {
    "unified": Family(make_unified, "Gemma4UnifiedForConditionalGeneration", unified=True),
    "gemma4": Family(make_gemma4, "Gemma4ForConditionalGeneration", unified=False),
    "small": Family(
        lambda path: make_gemma4(path, {"use_clipped_linears": True}, use_bidirectional_attention=None, **SHARED),
        "Gemma4ForConditionalGeneration",
        unified=False,
    ),
}


def cutter(**settings: Any) -> Any:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil(patch_size=PATCH, max_soft_tokens=BUDGET, pooling_kernel_size=3, **settings)


def unified_function(name: str) -> Any:
    """Take a function from the Unified model's processor in transformers, whose module cannot be imported without
    torchvision."""
    import transformers

    folder = Path(transformers.__file__).parent / "models" / "gemma4_unified"
    tree = ast.parse((folder / "image_processing_gemma4_unified.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    found: dict[str, Any] = {"torch": torch, "math": math}
    exec(compile(tree, name, "exec"), found)
    return found[name]


def inputs_of(images: list[Image.Image], *, unified: bool, **settings: Any) -> dict[str, Any]:
    """Inputs made by transformers' image processors."""
    made = dict(cutter(**settings)(images, return_tensors="pt"))
    if unified:
        merge = unified_function("patches_merge")
        pixels, places = made["pixel_values"], made["image_position_ids"]
        both = []
        for patches, place, count in zip(pixels, places, made["num_soft_tokens_per_image"], strict=True):
            merged, merged_place = merge(patches[None, : count * 9], place[None, : count * 9], int(count))
            both.append((merged[0], merged_place[0]))
        longest = BUDGET
        pad = torch.nn.functional.pad
        made["pixel_values"] = torch.stack([pad(each, (0, 0, 0, longest - len(each))) for each, _ in both])
        made["image_position_ids"] = torch.stack(
            [pad(each, (0, 0, 0, longest - len(each)), value=-1) for _, each in both]
        )
    return made


# ---- pixels


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_pixels_match_the_processor(kind: tuple[str, str]) -> None:
    """Bit for bit, whatever the size; merged patches are rows of a larger one."""
    rng = random.Random(repr(kind))
    sizes = [
        (1, 1),
        (1, 4000),
        (3000, 1),
        (UNIT * 7, UNIT * 10),
        *((rng.randint(1, 300), rng.randint(1, 300)) for _ in range(9)),
    ]
    for seed, (width, height) in enumerate(sizes):
        data = as_file(*kind, width, height, seed)
        made = resized(data, FittedSettings(UNIT, BUDGET, BUDGET))
        own = np.frombuffer(made.colors, np.uint8).reshape(made.height, made.width, 3)
        image: list[Image.Image] = [Image.open(BytesIO(data))]
        for size, unified in ((PATCH, False), (UNIT, True)):
            theirs = inputs_of(image, unified=unified, do_rescale=False)
            rows, cols = made.height // size, made.width // size
            mine = own.reshape(rows, size, cols, size, 3).transpose(0, 2, 1, 3, 4).reshape(rows * cols, -1)
            assert np.array_equal(mine, theirs["pixel_values"][0, : rows * cols].numpy()), f"{width} x {height}"
            places = theirs["image_position_ids"][0, : rows * cols].tolist()
            assert places == [[col, row] for row in range(rows) for col in range(cols)]
        assert theirs["num_soft_tokens_per_image"].tolist() == [len(mine)]


@pytest.mark.parametrize("budget", [70, 280, 1120])
def test_sizes_match_the_processor(budget: int) -> None:
    theirs, rng = unified_function("get_aspect_ratio_preserving_size"), random.Random(budget)
    settings = FittedSettings(48, budget, 10**9)

    for _ in range(3000):
        height, width = (int(2 ** rng.uniform(0, 13)) for _ in range(2))
        assert settings.size(height, width) == theirs(height, width, 16, budget * 9, 3)


def test_an_image_longer_than_there_are_positions_is_refused() -> None:
    with pytest.raises(
        RequestError, match="has 4000 x 1 pixels, which makes 70 x 1 tokens; the model has positions for 60"
    ):
        resized(as_file("PNG", "RGB", 4000, 1, 0), FittedSettings(UNIT, BUDGET, 60))


def test_a_budget_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    path = make_unified(tmp_path / "m")
    file = path / "processor_config.json"
    file.write_text(file.read_text().replace(f": {BUDGET}", ": 71"))
    with pytest.raises(ModelError, match=r"max_soft_tokens must be one of 70, 140, 280, 560, 1120, got 71"):
        PromptImages.load(path)


def test_a_request_may_ask_for_another_budget(tmp_path: Path) -> None:
    images = PromptImages.load(make_gemma4(tmp_path / "m", {"position_embedding_size": 420}))
    assert images is not None
    writer = images._writer
    assert writer.changed({"max_soft_tokens": 140}) == FittedSettings(
        UNIT, 140, 140, max_pixels=writer.settings.max_pixels
    )
    with pytest.raises(RequestError, match=r"max_soft_tokens must be one of 70, 140, 280, 560, 1120, got 71"):
        writer.changed({"max_soft_tokens": 71})
    with pytest.raises(RequestError, match="mm_processor_kwargs has size; the processor of this model takes max_soft_"):
        writer.changed({"size": 5})


# ---- vectors


TOWERS: dict[str, Any] = {
    "unified": (make_unified, FAMILIES["unified"]),
    "plain": (make_gemma4, FAMILIES["gemma4"]),
    "clipped": (lambda path: make_gemma4(path, {"use_clipped_linears": True}), FAMILIES["gemma4"]),
    "standardized": (lambda path: make_gemma4(path, {"standardize": True, "head_dim": 16}), FAMILIES["gemma4"]),
}


@pytest.mark.parametrize("name", TOWERS)
def test_vectors_match_transformers(tmp_path: Path, name: str) -> None:
    make, family = TOWERS[name]
    path = make(tmp_path / "m")
    if name in ("clipped", "standardized"):
        shake_buffers(path)
    theirs, mine = transformers_model(path, family.architecture).eval(), tower_of(path)
    images = [picture(width, height, 3) for width, height in ((84, 120), (12, 840), (120, 84), (96, 96))]
    inputs = inputs_of([Image.fromarray(image) for image in images], unified=family.unified)
    with torch.inference_mode():
        expected = theirs.model.get_image_features(inputs["pixel_values"], inputs["image_position_ids"]).pooler_output
        vectors = mine.encode([torch.from_numpy(image.copy()) for image in images])
    for own, other, image in zip(vectors, expected, images, strict=True):
        assert own.shape == (image.shape[0] * image.shape[1] // UNIT**2, 64)
        assert torch.allclose(own, other, atol=1e-4), (own - other).abs().max()


def shake_buffers(path: Path) -> None:
    """Limits that cut something off, and numbers to standardize by: transformers leaves them infinite and empty."""
    from safetensors.torch import load_file, save_file

    data = torch.Generator().manual_seed(3)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("_min", "_max")):
            tensors[name] = torch.tensor((1.5 if "output" in name else 0.9) * (-1 if name.endswith("min") else 1))
        if name.endswith(("std_bias", "std_scale")):
            tensors[name] = torch.rand(tensor.shape, generator=data) + 0.5
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_published_names_are_understood(tmp_path: Path) -> None:
    """The Unified model's files and transformers' modules differ."""
    from safetensors.torch import load_file, save_file

    path = make_unified(tmp_path / "m")
    image = torch.from_numpy(picture(84, 120, 1).copy())
    expected = tower_of(path).encode([image])[0]
    tensors = load_file(path / "model.safetensors")
    spelled = []
    for old, new in (
        ("vision_embedder.", "embed_vision."),
        ("embed_vision.embedding", "embed_vision.multimodal_embedder.embedding"),
    ):
        spelled.append(any(old in name for name in tensors))
        tensors = {name.replace(old, new) if "multimodal" not in name else name: each for name, each in tensors.items()}
    save_file(tensors, path / "model.safetensors")
    assert any(spelled), "transformers writes the published names"
    assert torch.equal(tower_of(path).encode([image])[0], expected)


# ---- tokens


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def checkpoint(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.make(tmp_path_factory.mktemp("gemma4") / "m")


@pytest.fixture(scope="module")
def truths(family: Family, checkpoint: Path) -> list[Truth]:
    from transformers import AutoTokenizer
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    model = transformers_model(checkpoint, family.architecture).eval()
    tokenizer, found = AutoTokenizer.from_pretrained(checkpoint), []
    names: Any = SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")
    for parts in CHATS:
        images = [part for part in parts if not isinstance(part, str)]
        seen = inputs_of(images, unified=family.unified) if images else {}
        text, shown = "<user>", 0
        for part in parts:
            text += part if isinstance(part, str) else Gemma4Processor.replace_image_token(names, seen, shown)
            shown += not isinstance(part, str)
        ids = tokenizer(text + "\n<model>", add_special_tokens=False, return_tensors="pt")["input_ids"]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs["mm_token_type_ids"] = (ids == GEMMA_IDS["image"]).int()
        inputs |= {name: seen[name] for name in ("pixel_values", "image_position_ids") if images}
        found.append(Truth.of(model, inputs, by_masks=family.unified))
    assert len({tuple(each.answer) for each in found}) == len(CHATS)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": BUDGET + 3, "max_num_seqs": 4},
        {"max_num_batched_tokens": 80, "max_num_seqs": 2, "attention_backend": "reference", "async_scheduling": False},
        {"enable_prefix_caching": False},
        {"num_gpu_blocks_override": 80, "preemption_mode": "recompute"},
        {"num_gpu_blocks_override": 80, "preemption_mode": "swap", "swap_space": 0.01},
        {"tensor_parallel_size": 2},
    ],
    ids=["whole", "chunks", "reference", "no cache", "recompute", "swap", "two ranks"],
)
def test_answers_match_transformers(checkpoint: Path, truths: list[Truth], settings: dict[str, Any]) -> None:
    check_answers(checkpoint, truths, settings)


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 75, "max_num_seqs": 2}], ids=str)
def test_every_token_of_a_prompt_is_as_likely_as_in_transformers(
    checkpoint: Path, truths: list[Truth], settings: dict[str, Any]
) -> None:
    check_logprobs(checkpoint, truths, settings)


def test_samples_of_a_prompt_are_forks_of_it(checkpoint: Path, truths: list[Truth]) -> None:
    check_forks(checkpoint, SMALL, CHATS[3], truths[3].answer)


def test_small_models_cut_images_anywhere(tmp_path: Path) -> None:
    """With attention to earlier tokens only, steps may end inside an image."""
    small, large = FAMILIES["small"].make(tmp_path / "s"), make_gemma4(tmp_path / "l")
    assert [layer.attention.whole_images for layer in load_spec(small).layers] == [0] * 4
    assert [layer.attention.whole_images for layer in load_spec(large).layers] == [1120, 0, 1120, 0]
    settings = {"num_gpu_blocks_override": 128, **SMALL, "max_num_batched_tokens": 16, "max_num_seqs": 2}
    with LLM(str(small), **settings) as llm:
        cut = llm.chat(chat_of(CHATS[0]), GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(str(small), **{**settings, "max_num_batched_tokens": 256}) as llm:
        assert llm.chat(chat_of(CHATS[0]), GREEDY, use_tqdm=False)[0].outputs[0].token_ids == cut
    with LLM(str(large), **settings) as llm, pytest.raises(RequestError, match="is computed in one step, which has 16"):
        llm.chat(chat_of(CHATS[0]), GREEDY, use_tqdm=False)
