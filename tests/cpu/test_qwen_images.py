"""Images of Qwen2-VL to Qwen3.5: pixels, vectors, positions and tokens equal transformers', including a hybrid."""

import random
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from tests.checkpoints import transformers_model
from tests.image_answers import check_forks, generated, tower_of
from tests.images import QWEN_VISION, as_file, chat_of, chats, make_qwen, picture
from vllm_lite import LLM, RequestOutput, SamplingParams
from vllm_lite.attention.step_batch import AXIS_BITS, AXIS_MASK, on_axes
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.client.media.processors import PatchSettings, resized
from vllm_lite.client.media.prompt_images import PromptImages
from vllm_lite.client.media.sources import GivenImage
from vllm_lite.client.spans import ShownMedia
from vllm_lite.engine import core
from vllm_lite.engine.encoder_cache import EncoderCache, EncoderSizes
from vllm_lite.errors import RequestError
from vllm_lite.kernels import cpu
from vllm_lite.kernels.ops import Rotation
from vllm_lite.layers.attention.rope import RotaryEmbedding
from vllm_lite.layers.vision import qwen
from vllm_lite.protocol.encoder import EncodeAside
from vllm_lite.protocol.spans import Media
from vllm_lite.worker.batch.steady import SteadyDecode
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.drafting import self_drafter
from vllm_lite.worker.step_parts import image_positions

pytestmark = pytest.mark.usefixtures("images_cut_here")

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
NUM_LONG = 32
SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "single_process": True, "seed": 0}
UNIT = 16
COLORS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}


@pytest.fixture(scope="module", params=list(QWEN_VISION))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, family: str) -> Path:
    return make_qwen(tmp_path_factory.mktemp("qwen") / "m", family)


@pytest.fixture(scope="module")
def model(checkpoint: Path, family: str) -> Any:
    return transformers_model(checkpoint, f"{family}ForConditionalGeneration").eval()


def processor(**settings: Any) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=8, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 256, "longest_edge": 4096}, **settings
    )


# ---- pixels


@pytest.mark.parametrize("kind", [("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "P"), ("JPEG", "CMYK"), ("WEBP", "RGB")])
def test_patches_match_the_processor(kind: tuple[str, str]) -> None:
    """Bit for bit, whatever the size: too small, too large, narrow."""
    rng, plain = random.Random(repr(kind)), processor(do_rescale=False, do_normalize=False)
    sizes = [(1, 1), (1, 200), (190, 1), (16, 16), *((rng.randint(1, 200), rng.randint(1, 200)) for _ in range(12))]
    for seed, (width, height) in enumerate(sizes):
        data = as_file(*kind, width, height, seed)
        made = resized(data, PatchSettings(UNIT, 256, 4096))
        theirs = plain([Image.open(BytesIO(data))], return_tensors="np")
        (grid,) = theirs["image_grid_thw"]
        assert grid.tolist() == [1, made.height // 8, made.width // 8]
        own = np.frombuffer(made.colors, np.uint8).reshape(made.height // UNIT, 2, 8, made.width // UNIT, 2, 8, 3)
        blocks = own.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, 8, 8)
        assert np.array_equal(
            np.broadcast_to(blocks, (len(blocks), 3, 2, 8, 8)).reshape(len(blocks), -1), theirs["pixel_values"]
        )


def test_narrow_images_are_refused() -> None:
    with pytest.raises(RequestError, match="the image has 1 x 201 pixels; one edge may be 200 times the other"):
        resized(as_file("PNG", "RGB", 1, 201, 0), PatchSettings(UNIT, 256, 4096))


# ---- vectors and positions


def test_the_tower_gives_the_vectors_of_transformers(checkpoint: Path, model: Any) -> None:
    mine = tower_of(checkpoint)
    images = [picture(width, height, 3) for width, height in ((48, 48), (16, 96), (64, 32), (16, 16), (80, 48))]
    inputs = processor(**COLORS)([Image.fromarray(image) for image in images], return_tensors="pt")
    with torch.inference_mode():
        found = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        deep = getattr(found, "deepstack_features", ())
        theirs = [torch.cat(each, 1) for each in zip(found.pooler_output, *deep, strict=True)]
        vectors = mine.encode([torch.from_numpy(image.copy()) for image in images])
    for own, expected, (_, rows, cols) in zip(vectors, theirs, inputs["image_grid_thw"].tolist(), strict=True):
        assert own.shape == (rows * cols // 4, 64 * (1 + mine.spec.num_deep))
        assert torch.allclose(own, expected, atol=1e-4, rtol=5e-5), (own - expected).abs().max()


@pytest.mark.parametrize("seed", range(6))
def test_positions_match_transformers(model: Any, seed: int) -> None:
    rng, images, kinds, start = random.Random(seed), list[Media](), list[int](), 0
    for _ in range(rng.randint(1, 4)):
        start += (gap := rng.randint(0, 5) if not images else rng.randint(1, 5))
        grid = 1, 2 * rng.randint(1, 5), 2 * rng.randint(1, 5)
        images.append(Media("image", bytes(32), grid[1] * grid[2] // 4, start, grid=grid))
        kinds += [0] * gap + [1] * images[-1].num_tokens
        start = images[-1].end
    kinds += [0] * rng.randint(1, 5)
    ids = torch.zeros(1, len(kinds), dtype=torch.long)
    expected, delta = model.model.get_rope_index(
        ids, torch.tensor([kinds], dtype=torch.int32), image_grid_thw=torch.tensor([medium.grid for medium in images])
    )
    part = image_positions.ImagePositions(2)
    found = image_positions.counted(np.arange(len(kinds) + 3), [part.image(medium) for medium in images])
    time, down, across = (found >> AXIS_BITS * axis & AXIS_MASK for axis in range(3))
    axes = np.stack([time, time + down, time + across])
    assert np.array_equal(axes[:, : len(kinds)], expected[:, 0].numpy())
    assert axes[:, len(kinds) :].tolist() == [[len(kinds) + int(delta) + step for step in range(3)]] * 3
    first = rng.randrange(len(kinds))
    some = image_positions.counted(np.arange(first, len(kinds)), [part.image(medium) for medium in images])
    assert np.array_equal(some, found[first : len(kinds)])


def test_each_pair_is_rotated_along_its_axis(checkpoint: Path, model: Any) -> None:
    axes = torch.randint(0, 200, (3, 40), generator=torch.Generator().manual_seed(1))
    axes[1:] += axes[0]
    cos, sin = model.model.language_model.rotary_emb(torch.zeros(1), axes[:, None])
    own = next(layer for layer in load_spec(checkpoint).layers if layer.rope is not None)
    assert own.rope is not None
    size = own.attention.head_size
    out = Rotation(torch.zeros(40, size), torch.zeros(40, size))
    packed = on_axes(axes[0].numpy(), *(axes[1:] - axes[0]).numpy())
    RotaryEmbedding(own.rope, size, 512, device=torch.device("cpu")).select_axes(torch.from_numpy(packed), out)
    assert torch.allclose(out.cos[:, :8], cos[0, :, :8], atol=1e-6)
    assert torch.allclose(out.sin[:, size // 2 : size // 2 + 8], sin[0, :, :8], atol=1e-6)
    assert torch.all(out.cos[:, 8 : size // 2] == 1)


# ---- tokens


CHATS = chats()


def written(parts: list[Any]) -> str:
    """The prompt with a placeholder for each image."""
    return "".join(part if isinstance(part, str) else "<|image_pad|>" for part in parts)


def chat_text(parts: list[Any]) -> list[Any]:
    """A user's message as the template writes it."""
    around: list[Any] = ["<user>"]
    for part in parts:
        around += [part] if isinstance(part, str) else ["<|vision_start|>", part, "<|vision_end|>"]
    return [*around, "\n<assistant>"]


def answer(model: Any, checkpoint: Path, parts: list[Any], num_tokens: int = 10) -> tuple[list[int], list[int]]:
    """The tokens of the prompt and the answer, by transformers."""
    from transformers import AutoTokenizer

    tokenizer, cutter = AutoTokenizer.from_pretrained(checkpoint), processor(**COLORS)
    images = [part for part in parts if not isinstance(part, str)]
    inputs = cutter(images, return_tensors="pt") if images else {}
    grids = iter(inputs["image_grid_thw"].tolist() if images else ())
    pads = (part if isinstance(part, str) else "<|image_pad|>" * (int(np.prod(next(grids))) // 4) for part in parts)
    ids = tokenizer("".join(pads), add_special_tokens=False, return_tensors="pt")["input_ids"]
    seen = {}
    if images:
        kinds = (ids == model.config.image_token_id).int()
        seen = {
            "pixel_values": inputs["pixel_values"],
            "image_grid_thw": inputs["image_grid_thw"],
            "mm_token_type_ids": kinds,
        }
    model.model.rope_deltas = None
    return generated(model, ids, seen, num_tokens)


def answer_by_forward(model: Any, checkpoint: Path, parts: list[Any]) -> tuple[list[int], list[int]]:
    """The same as `answer`, but with a forward pass over all tokens for each new one. After a prompt that ends with an
    image, `generate` counts positions differently."""
    ids, _ = answer(model, checkpoint, parts)
    inputs = processor(**COLORS)([part for part in parts if not isinstance(part, str)], return_tensors="pt")
    tokens = list[int]()
    while len(tokens) < 10:
        given = torch.tensor([ids + tokens])
        model.model.rope_deltas = None
        with torch.inference_mode():
            made = model(
                input_ids=given,
                mm_token_type_ids=(given == model.config.image_token_id).int(),
                pixel_values=inputs["pixel_values"],
                image_grid_thw=inputs["image_grid_thw"],
                use_cache=False,
            )
        logits = made.logits[0, -1].clone()
        logits[386] = -100.0
        tokens.append(int(logits.argmax()))
    return ids, tokens


@pytest.fixture(scope="module")
def long_answers(model: Any, checkpoint: Path) -> list[tuple[list[int], list[int]]]:
    return [answer(model, checkpoint, chat_text(parts), NUM_LONG) for parts in CHATS]


@pytest.fixture(scope="module")
def answers(long_answers: list[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
    found = [(prompt_ids, tokens[:10]) for prompt_ids, tokens in long_answers]
    assert len({tuple(tokens) for _, tokens in found}) == len(CHATS)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 9, "max_num_seqs": 4},
        {"max_num_batched_tokens": 5, "max_num_seqs": 2, "async_scheduling": False},
        {"enable_prefix_caching": False, "async_scheduling": False},
        {"num_gpu_blocks_override": 8, "kv_watermark": 0.0, "preemption_mode": "recompute"},
        {"num_gpu_blocks_override": 8, "kv_watermark": 0.0, "preemption_mode": "swap", "swap_space": 0.01},
        {"tensor_parallel_size": 2},
    ],
    ids=["whole", "chunks of 9", "chunks of 5", "no cache", "recompute", "swap", "two ranks"],
)
def test_answers_match_transformers(
    checkpoint: Path, long_answers: list[tuple[list[int], list[int]]], settings: dict[str, Any]
) -> None:
    preempts = "preemption_mode" in settings
    # Two that run at once are to grow out of the pool, whenever the others come: chats are as slow as their images.
    params, times = (msgspec.structs.replace(GREEDY, max_tokens=NUM_LONG), 2) if preempts else (GREEDY, 1)
    with LLM(str(checkpoint), **{"num_gpu_blocks_override": 64, **SMALL, **settings}) as llm:
        for turn in range(2):
            outputs = llm.chat([chat_of(parts) for parts in CHATS * times], params, use_tqdm=False)
            for output, (prompt_ids, tokens) in zip(outputs, long_answers * times, strict=True):
                assert output.prompt_token_ids == prompt_ids
                assert output.outputs[0].token_ids == tokens[: params.max_tokens], f"turn {turn}"
        assert (llm.stats().preemptions > 0) == preempts


def test_images_are_computed_beside_a_stream(
    checkpoint: Path, answers: list[tuple[list[int], list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of a few patches. The stream gets a token in each step, and images have the same vectors as alone."""
    monkeypatch.setattr(qwen, "PIECE_ROWS", 7)
    entries, take_entries = list[Any](), EncoderCache.take_entries

    def taking(cache: EncoderCache) -> list[Any]:
        taken = take_entries(cache)
        entries.extend(taken)
        return taken

    monkeypatch.setattr(EncoderCache, "take_entries", taking)
    chats = [chat_of(CHATS[index]) for index in (2, 0, 1, 3)]
    long = msgspec.structs.replace(GREEDY, max_tokens=400)
    sizes: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "max_itl_ms": 100}
    with LLM(str(checkpoint), num_gpu_blocks_override=64, **SMALL, **sizes) as llm:
        outputs = llm.chat(chats, [long, GREEDY, GREEDY, GREEDY], use_tqdm=False)
    assert outputs[0].outputs[0].token_ids[:10] == answers[2][1]
    assert [output.outputs[0].token_ids for output in outputs[1:]] == [answers[index][1] for index in (0, 1, 3)]
    assert sum(isinstance(entry, EncodeAside) for entry in entries) >= 3


def test_samples_of_a_prompt_count_as_it_does(checkpoint: Path, answers: list[tuple[list[int], list[int]]]) -> None:
    """The samples are forks of the first."""
    check_forks(checkpoint, SMALL, CHATS[3], answers[3][1])


def test_drafts_behind_images_count_as_the_model_does(
    checkpoint: Path, answers: list[tuple[list[int], list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that is the model itself has all its drafts accepted."""
    monkeypatch.setattr(self_drafter, "load_copy", lambda model, *_, **__: model)
    drafts: dict[str, Any] = {
        "speculative_config": {"method": "self", "num_speculative_tokens": 3},
        "disable_adaptive_drafts": True,
    }
    with LLM(str(checkpoint), num_gpu_blocks_override=64, **SMALL, **drafts) as llm:
        for number in (3, 0):
            before = llm.stats()
            (output,) = llm.chat(chat_of(CHATS[number]), msgspec.structs.replace(GREEDY, max_tokens=9), use_tqdm=False)
            assert output.outputs[0].token_ids == answers[number][1][:9]
            after = llm.stats()
            assert after.draft_tokens - before.draft_tokens == after.accepted_tokens - before.accepted_tokens > 4


def asked(llm: LLM, parts: list[Any], params: SamplingParams = GREEDY) -> RequestOutput:
    data = {"image": [part for part in parts if not isinstance(part, str)]}
    return llm.generate({"prompt": written(parts), "multi_modal_data": data}, params, use_tqdm=False)[0]


LAST: list[list[Any]] = [
    ["a page of words, and then ", Image.fromarray(picture(64, 48, 6))],
    ["one token ", Image.fromarray(picture(16, 16, 7))],
    [Image.fromarray(picture(64, 64, 8))],
    ["a", Image.fromarray(picture(32, 32, 9)), "b", Image.fromarray(picture(32, 32, 9))],
]
"""Prompts that end with an image; the third fills a block, so that all of it can be found."""


@pytest.mark.parametrize(("chunk", "room"), [(3, None), (7, None), (15, None), (400, 16)])
def test_prompts_may_end_with_an_image(
    checkpoint: Path, model: Any, monkeypatch: pytest.MonkeyPatch, chunk: int, room: int | None
) -> None:
    """Such prompts are split anywhere (steps of 7 tokens leave one token of an image alone), found in the cache, and
    sampled twice."""
    if room is not None:
        monkeypatch.setattr(core, "encoder_sizes", lambda *_: EncoderSizes(room, room, 3 * room))
    sizes: dict[str, Any] = {"max_num_batched_tokens": chunk, "max_num_seqs": 3}
    once = msgspec.structs.replace(GREEDY, logit_bias={386: -100.0})  # which would be another image for transformers
    with LLM(str(checkpoint), num_gpu_blocks_override=64, **SMALL, **sizes) as llm:
        found = [[asked(llm, parts, msgspec.structs.replace(once, n=n)) for n in (1, 2)] for parts in LAST]
    for parts, outputs in zip(LAST, found, strict=True):
        prompt_ids, tokens = answer_by_forward(model, checkpoint, parts)
        for output in outputs:
            assert output.prompt_token_ids == prompt_ids
            assert {tuple(sample.token_ids) for sample in output.outputs} == {tuple(tokens)}


def test_a_hit_that_ends_inside_an_image_reads_the_rest_of_it(
    checkpoint: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hit that covers an image needs no tower, although its vectors are gone."""
    monkeypatch.setattr(core, "encoder_sizes", lambda *_: EncoderSizes(16, 16))
    first, other, third = (Image.fromarray(picture(64, 64, seed)) for seed in (11, 12, 13))
    words = " and the rest of the words, which go on for a while"
    prompts: list[list[Any]] = [[first, words], [other, "!"], ["a page ", first, words], [third, "!"]]
    prompts += [[first, words, " more"], ["a page ", first, "?"]]
    encoded, take_entries = [0], EncoderCache.take_entries

    def taking(cache: EncoderCache) -> list[Any]:
        encoded[0] = cache.num_encoded
        return take_entries(cache)

    monkeypatch.setattr(EncoderCache, "take_entries", taking)
    with LLM(str(checkpoint), num_gpu_blocks_override=64, **SMALL) as llm:
        towers, cached, starts = list[int](), list[int](), list[int]()
        for parts in prompts:
            before = encoded[0]
            output = asked(llm, parts)
            assert (output.prompt_token_ids, output.outputs[0].token_ids) == answer(model, checkpoint, parts)
            towers.append(encoded[0] - before)
            cached.append(output.num_cached_tokens or 0)
            starts.append(output.prompt_token_ids.index(386))
    assert towers == [1, 1, 1, 1, 0, 1]
    assert cached[4] >= 16, "the image is found"
    assert starts[5] < cached[5] == 16 < starts[5] + 16, "also on a hybrid, whose states are saved at ends of images"


def test_steps_behind_images_are_steady(
    checkpoint: Path, answers: list[tuple[list[int], list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of such steps are prepared like those of text, by two native calls and one addition."""
    if not cpu.available():
        pytest.skip("steady steps are native")
    steps = list[bool]()
    prepare = SteadyDecode.prepare

    def preparing(self: SteadyDecode, scheduled: dict[int, int]) -> StepInputs | None:
        made = prepare(self, scheduled)
        steps.append(made is not None)
        return made

    monkeypatch.setattr(SteadyDecode, "prepare", preparing)
    with LLM(str(checkpoint), num_gpu_blocks_override=64, **SMALL) as llm:
        for parts, (_, tokens) in zip(CHATS, answers, strict=True):
            steps.clear()
            [output] = llm.chat(chat_of(parts), GREEDY, use_tqdm=False)
            assert output.outputs[0].token_ids == tokens
            assert steps.count(True) >= 7, steps


@pytest.fixture(scope="module")
def images(checkpoint: Path) -> Iterator[PromptImages]:
    images = PromptImages.load(checkpoint)
    assert images is not None
    yield images
    images.pool.close()


def _pads(text: str) -> list[int]:
    return [386] * text.count("<")


def test_the_same_colors_in_another_shape_are_another_image(images: PromptImages) -> None:
    colors, digests = bytes(range(256)) * 12, set()
    for size in ((32, 32), (16, 64), (64, 16)):
        made = BytesIO()
        Image.frombytes("RGB", size, colors).save(made, "PNG")
        spans = images.pictured("<|image_pad|>", [GivenImage(made.getvalue())], _pads).spans
        digests |= {span.media.digest for span in spans if isinstance(span, ShownMedia)}
    assert len(digests) == 3
