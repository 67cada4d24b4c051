"""Images in prompts: all is as transformers makes it, from a file's pixels to the tokens of the answer."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from io import BytesIO
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

from tests.checkpoints import transformers_model
from tests.image_answers import check_upright, tower_of
from tests.images import IMAGE_TOKEN, TEMPLATE, TILE, Colors, as_file, make_smolvlm, picture
from tests.lora_adapters import adapt
from vllm_lite import LLM, AsyncClient, LoRARequest, RequestOutput, SamplingParams, StructuredOutputsParams
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.client.media.image_pool import ImagePool
from vllm_lite.client.media.processors import TileSettings, tiles_of
from vllm_lite.client.media.sources import GivenImage
from vllm_lite.client.prompt import PromptLike
from vllm_lite.client.spans import ShownMedia, Text
from vllm_lite.config import EngineConfig
from vllm_lite.engine import core
from vllm_lite.engine.encoder_cache import EncoderSizes
from vllm_lite.errors import RequestError
from vllm_lite.layers.vision.siglip import SiglipTower
from vllm_lite.protocol.spans import Media

Part = list[int] | Colors
END, FORM = 2, re.compile('"[a-z]{0,5}|"[a-z]{5}"')
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 400, "single_process": True, "seed": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_smolvlm(tmp_path_factory.mktemp("smolvlm") / "m")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return transformers_model(checkpoint, "SmolVLMForConditionalGeneration").eval()


# ---- pixels


def reference_tiles(data: bytes, settings: TileSettings) -> tuple[Colors, int, int]:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    processor: Any = SmolVLMImageProcessorPil(
        size={"longest_edge": settings.longest_edge},
        max_image_size={"longest_edge": settings.tile},
        do_image_splitting=settings.splits,
        do_rescale=False,
        do_normalize=False,
    )
    made = processor([[Image.open(BytesIO(data))]], return_tensors="np", return_row_col_info=True)
    return made["pixel_values"][0].transpose(0, 2, 3, 1).astype(np.uint8), made["rows"][0][0], made["cols"][0][0]


KINDS = [("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "L"), ("PNG", "P"), ("PNG", "LA"), ("PNG", "1"), ("JPEG", "RGB")]
KINDS += [("JPEG", "CMYK"), ("JPEG", "L"), ("WEBP", "RGB"), ("WEBP", "RGBA"), ("GIF", "P")]


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_tiles_match_the_processor(kind: tuple[str, str]) -> None:
    """Bit for bit, also of 1 x 1 pixels and of 1 x 4000."""
    rng = random.Random(repr(kind))
    sizes = [(1, 1), (1, 4000), (3000, 1), *((rng.randint(1, 300), rng.randint(1, 300)) for _ in range(9))]
    for seed, (width, height) in enumerate(sizes):
        tile = rng.choice([32, 64])
        settings = TileSettings(tile, rng.choice([1, 2, 3, 4]) * tile, splits=rng.random() < 0.8)
        data = as_file(*kind, width, height, seed)
        made, (expected, rows, cols) = tiles_of(data, settings), reference_tiles(data, settings)
        mine = np.stack([np.frombuffer(each, np.uint8).reshape(tile, tile, 3) for each in made.tiles])
        assert (made.rows, made.cols) == (rows, cols)
        assert np.array_equal(mine, expected), f"{width} x {height}, {settings}"


def test_a_photo_is_turned_upright() -> None:
    check_upright(lambda data: tiles_of(data, TileSettings(32, 64)))


def black_png(width: int, height: int) -> bytes:
    made = BytesIO()
    Image.new("1", (width, height)).save(made, "PNG")
    return made.getvalue()


PNG, SMALL_PNG = as_file("PNG", "RGB", 60, 50, 1), as_file("PNG", "RGB", 10, 10, 3)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "must be a PNG, JPEG, GIF, WEBP file"),
        (b"GIF", "its first bytes are 474946"),
        (b"\x00\x00\x00\x0cjP  \r\n\x87\n", "must be a PNG"),  # JPEG 2000
        (b"%!PS-Adobe-3.0 EPSF-3.0", "must be a PNG"),
        (PNG[:100], "the PNG image is damaged or cut off"),
        (PNG[:40], "the PNG image is damaged or cut off"),
        (b"\xff\xd8\xff" + bytes(100), "the JPEG image is damaged or cut off"),
        (b"RIFF\x00\x00\x00\x00WEBP" + bytes(30), "the WEBP image is damaged or cut off"),
        (
            black_png(9000, 9000),
            "has 81000000 pixels, of which each counts 1.25 times .*; at most 25000000 are decoded",
        ),
    ],
)
def test_files_that_are_no_images_are_refused_in_one_sentence(data: bytes, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        tiles_of(data, TileSettings(32, 64))
    assert "PIL" not in str(caught.value)


def test_a_process_that_dies_costs_its_own_image_alone() -> None:
    settings = TileSettings(32, 64)
    pool = ImagePool(settings)
    try:
        assert pool.made(GivenImage(PNG)) == tiles_of(PNG, settings)
        (process,) = pool._idle
        process.child.stop(0.0)
        with pytest.raises(RequestError, match="takes too long or breaks its decoder"):
            pool.made(GivenImage(SMALL_PNG))
        assert pool.made(GivenImage(SMALL_PNG)) == tiles_of(SMALL_PNG, settings)
        with pytest.raises(RequestError, match="must be a PNG"):
            pool.made(GivenImage(b"text"))
        num_cut = pool.num_cut
        assert pool.made(GivenImage(PNG)) == tiles_of(PNG, settings)
        assert pool.num_cut == num_cut, "it was kept"
    finally:
        pool.close()


# ---- vectors


@pytest.mark.parametrize(("family", "tile", "patch", "merge"), [("SmolVLM", 32, 8, 2), ("Idefics3", 42, 6, 1)])
def test_the_tower_gives_the_vectors_of_transformers(
    tmp_path: Path, family: str, tile: int, patch: int, merge: int
) -> None:
    """Rounding puts some of 7 x 7 patches a row too low, as in transformers."""
    vision: dict[str, Any] = {"image_size": tile, "patch_size": patch, "hidden_size": 48, "intermediate_size": 80}
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
    path = make_smolvlm(tmp_path / "m", family, vision_config=vision, scale_factor=merge)
    mine = tower_of(path)
    tiles = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, tile, tile, 3), dtype=np.uint8))
    colors = ((tiles.float() / 255 - 0.5) / 0.5).permute(0, 3, 1, 2)[None]
    with torch.inference_mode():
        theirs = transformers_model(path, f"{family}ForConditionalGeneration").eval().get_image_features(colors)
        vectors = torch.stack(mine.encode(list(tiles)))
    expected = torch.stack(theirs.pooler_output[0].split(vectors.shape[1]))
    assert torch.allclose(vectors, expected, atol=1e-4), (vectors - expected).abs().max()


# ---- tokens


def colors(seed: int) -> Colors:
    return np.random.default_rng([seed, 9]).integers(0, 256, (TILE, TILE, 3), dtype=np.uint8)


def words(count: int, seed: int) -> list[int]:
    return np.random.default_rng([seed, count]).integers(3, 384, count).tolist()  # type: ignore[no-any-return]


def prompt(parts: Sequence[Part]) -> PromptLike:
    spans = list[Text | ShownMedia]()
    for part in parts:
        if isinstance(part, list):
            spans.append(Text(part))
        else:
            data = part.tobytes()
            spans.append(ShownMedia(Media("image", blake2b(data, digest_size=32).digest(), 4), data))
    return {"spans": spans}


def answer(model: Any, parts: Sequence[Part], allowed: Callable[[list[int]], list[int]] | None = None) -> list[int]:
    """An answer by transformers. `allowed` returns the permitted next tokens, given those of the answer so far."""
    ids, tiles = list[int](), []
    for part in parts:
        ids += part if isinstance(part, list) else [IMAGE_TOKEN] * 4
        tiles += [] if isinstance(part, list) else [torch.from_numpy(part)]
    seen = {}
    if tiles:
        seen["pixel_values"] = ((torch.stack(tiles).float() / 255 - 0.5) / 0.5).permute(0, 3, 1, 2)[None]
    with torch.inference_mode():
        made = model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            **seen,
            max_new_tokens=10,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            prefix_allowed_tokens_fn=None
            if allowed is None
            else lambda _, so_far: allowed(so_far[len(ids) :].tolist()),
        )
    return made[0, len(ids) :].tolist()  # type: ignore[no-any-return]


PROMPTS: list[list[Part]] = [
    [words(5, 1), colors(1), words(7, 2)],
    [words(5, 1), colors(1), colors(2), words(3, 3)],
    [colors(3), words(6, 5), colors(4), words(4, 6), colors(3), words(1, 7)],
    [words(20, 8)],
    [words(17, 9), colors(5), words(16, 9)],
]


@pytest.fixture(scope="module")
def answers(model: Any) -> list[list[int]]:
    found = [answer(model, parts) for parts in PROMPTS]
    assert len({tuple(each) for each in found}) == len(PROMPTS)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 8, "max_num_seqs": 4},
        {"max_num_batched_tokens": 5, "max_num_seqs": 2, "async_scheduling": False},
        {"enable_prefix_caching": False},
        {"num_gpu_blocks_override": 8, "preemption_mode": "recompute", "block_size": 8},
        {"num_gpu_blocks_override": 8, "preemption_mode": "swap", "block_size": 8, "swap_space": 0.01},
        {"tensor_parallel_size": 2, "single_process": False},
    ],
    ids=["whole", "chunks of 8", "chunks of 5", "no cache", "recompute", "swap", "two ranks"],
)
def test_answers_match_transformers(checkpoint: Path, answers: list[list[int]], settings: dict[str, Any]) -> None:
    """Alone, batched, cut up anywhere, preempted and found in the cache."""
    with LLM(str(checkpoint), **{"num_gpu_blocks_override": 64, **SMALL, **settings}) as llm:
        for turn in range(2):
            outputs = llm.generate([prompt(parts) for parts in PROMPTS], GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == answers, f"turn {turn}"
        if settings.get("num_gpu_blocks_override") == 8:
            assert llm.stats().preemptions > 0


def test_adapters_and_schemas(checkpoint: Path, model: Any, answers: list[list[int]], tmp_path: Path) -> None:
    """Adapters, schemas, plain requests, drafts, chunks and cache hits together: the answers equal transformers' with
    the adapter and masked tokens."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    written = {token: tokenizer.decode([token]) for token in range(3, 384)}

    def allowed(tokens: list[int]) -> list[int]:
        so_far = "".join(written.get(token, "") for token in tokens)
        return [token for token, text in written.items() if text and FORM.fullmatch(so_far + text)] or [END]

    def masked(seeing: Any) -> list[str]:
        return [tokenizer.decode(answer(seeing, parts, allowed)) for parts in PROMPTS]

    adapted = adapt(model, r".*text_model.*(q_proj|v_proj|down_proj)", seed=1)
    adapted.save_pretrained(str(tmp_path))
    own = [answer(adapted, parts) for parts in PROMPTS], masked(adapted)
    adapted.unload()
    plain = answers, masked(model)
    schema = StructuredOutputsParams(json={"type": "string", "pattern": "^[a-z]{5}$"})
    form = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=schema)
    asked = [prompt(parts) for parts in PROMPTS] * 2, [GREEDY] * len(PROMPTS) + [form] * len(PROMPTS)
    drafts: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    sizes = SMALL | {"max_num_batched_tokens": 9, "max_num_seqs": 5, "num_gpu_blocks_override": 64} | drafts
    with LLM(str(checkpoint), enable_lora=True, **sizes) as llm:
        for request, (tokens, texts) in ((None, plain), (LoRARequest("own", 1, str(tmp_path)), own)) * 2:
            found = [output.outputs[0] for output in llm.generate(*asked, use_tqdm=False, lora_request=request)]
            assert [each.token_ids for each in found[: len(PROMPTS)]] == tokens
            assert [each.text for each in found[len(PROMPTS) :]] == texts
    assert len(set(plain[1] + own[1])) > len(PROMPTS), "images and adapters tell answers apart"


def test_little_room_for_vectors_changes_nothing(
    checkpoint: Path, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for one tile alone, so that prompts wait for each other, and are cut at tiles."""
    monkeypatch.setattr(core, "encoder_sizes", lambda *_: EncoderSizes(4, 4))
    with LLM(str(checkpoint), num_gpu_blocks_override=64, **SMALL) as llm:
        for _ in range(2):
            outputs = llm.generate([prompt(parts) for parts in PROMPTS], GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == answers


def test_a_pixel_makes_another_image(checkpoint: Path, model: Any) -> None:
    """The image with another pixel hits nothing from its position on, and gets its own answer."""
    first, other = colors(6), colors(6)
    other[3, 4, 1] ^= 255
    parts: list[list[Part]] = [[words(16, 3), each, words(30, 4)] for each in (first, first, other)]
    with LLM(str(checkpoint), num_gpu_blocks_override=64, **SMALL) as llm:
        outputs = [llm.generate([prompt(each)], GREEDY, use_tqdm=False)[0] for each in parts]
    assert [output.num_cached_tokens for output in outputs] == [0, 48, 16]
    assert [output.outputs[0].token_ids for output in outputs] == [answer(model, each) for each in parts]


# ---- chats


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), num_gpu_blocks_override=64, **SMALL) as llm:
        yield llm


def image(value: Any) -> dict[str, Any]:
    return {"type": "image", "image": value}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def chat_of(model: Any, checkpoint: Path, chat: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """The prompt's tokens and the answer, by transformers' processor."""
    from transformers import AutoTokenizer, Idefics3Processor
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    cutter = SmolVLMImageProcessorPil(size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE})
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    processor = Idefics3Processor(cutter, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    written = processor.apply_chat_template(chat, add_generation_prompt=True)
    images = [part["image"] for message in chat for part in message["content"] if part["type"] == "image"]
    inputs = processor(text=written, images=images, return_tensors="pt", add_special_tokens=False)
    taken = {name: inputs[name] for name in ("input_ids", "attention_mask", "pixel_values", "pixel_attention_mask")}
    with torch.inference_mode():
        made = model.generate(**taken, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    prompt_ids = inputs["input_ids"][0].tolist()
    return prompt_ids, made[0, len(prompt_ids) :].tolist()


WIDE, SMALL_ONE = Image.fromarray(picture(90, 60, 1)), Image.fromarray(picture(20, 30, 2))


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "user", "content": [image(WIDE), text("The quick fox")]}],
        [{"role": "user", "content": [text("One, two"), image(WIDE), text("three"), image(SMALL_ONE)]}],
        [
            {"role": "user", "content": [image(SMALL_ONE), text("hi")]},
            {"role": "assistant", "content": [text("A page.")]},
            {"role": "user", "content": [text("and"), image(WIDE), image(WIDE)]},
        ],
    ],
    ids=["one", "two among words", "three in turns"],
)
def test_chats_match_transformers(checkpoint: Path, model: Any, llm: LLM, chat: list[dict[str, Any]]) -> None:
    ids, expected = chat_of(model, checkpoint, chat)
    output = llm.chat(chat, GREEDY, use_tqdm=False)[0]
    assert output.prompt_token_ids == ids
    assert output.outputs[0].token_ids == expected


def test_a_long_chat_computes_each_image_once_and_finds_the_rest(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 turns with five images, of two concurrent users with the same images: earlier tokens are found to the last
    whole block, and towers run once for each different tile."""
    seen = list[bytes]()
    encode = SiglipTower.encode

    def encoding(self: SiglipTower, tiles: Sequence[torch.Tensor], progress: Any) -> list[torch.Tensor]:
        seen.extend(tile.numpy().tobytes() for tile in tiles)
        return encode(self, tiles, progress)

    monkeypatch.setattr(SiglipTower, "encode", encoding)
    shown = {turn: Image.fromarray(picture(90, 60, turn)) for turn in (0, 1, 5, 9, 14)}
    chats: list[list[dict[str, Any]]] = [[], []]
    before, known, found = [list[int](), list[int]()], 0, 0
    with LLM(str(checkpoint), **{**SMALL, "max_model_len": 2048, "num_gpu_blocks_override": 300}) as llm:
        for turn in range(20):
            for user, chat in enumerate(chats):
                parts = [image(shown[turn])] if turn in shown else []
                chat.append({"role": "user", "content": [*parts, text(f"{user} asks for the turn {turn}, once more")]})
            for user, output in enumerate(llm.chat(chats, GREEDY, use_tqdm=False)):
                pairs = zip(before[user], output.prompt_token_ids, strict=False)
                known += len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
                found += output.num_cached_tokens or 0
                before[user] = output.prompt_token_ids
                chats[user].append({"role": "assistant", "content": [text("So it is, and so it was before.")]})
    assert found / known >= 0.98
    assert len(seen) == len(set(seen)) == 5 * len(shown)


def test_an_image_may_be_a_file_its_bytes_or_a_url(tmp_path: Path, llm: LLM) -> None:
    import base64

    file = tmp_path / "a.png"
    WIDE.save(file)
    url = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    forms = [image(WIDE), image(file), image(str(file)), image(file.read_bytes()), image(url)]
    forms += [{"type": "image_url", "image_url": {"url": url}}, {"type": "image_pil", "image_pil": WIDE}]
    chats = [[{"role": "user", "content": [form, text("hi")]}] for form in forms]
    outputs = llm.chat(chats, GREEDY, use_tqdm=False)
    assert len({(*output.prompt_token_ids, *output.outputs[0].token_ids) for output in outputs}) == 1
    assert outputs[0].prompt == "User:<image>hi<end_of_utterance>\nAssistant:"


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([image(b"junk"), text("x")], "must be a PNG"),
        ([image("/no/such/file"), text("x")], "/no/such/file cannot be read: No such file"),
        ([image(5), text("x")], "an image of type int; give bytes, a path or a Pillow image"),
        ([image("data:text/plain;base64,AAAA"), text("x")], "must be data:image/...;base64"),
        ([image("data:image/png;base64,A"), text("x")], "not valid base64"),
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}], "has an image at 'http://127.0.0.1/"),
        ([{"type": "image_url"}], "an image without a URL"),
        ([image(WIDE), text("an <image> more")], "has 2 placeholders '<image>' for 1 images"),
        ([{"type": "input_audio"}, image(WIDE)], "holds 'input_audio'; only text"),
    ],
)
def test_images_that_cannot_be_taken_are_refused(llm: LLM, parts: list[Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)


def test_a_model_of_text_takes_no_images(tiny_checkpoint: Path) -> None:
    with LLM(str(tiny_checkpoint), num_gpu_blocks_override=16, **SMALL) as llm:
        chat = [{"role": "user", "content": [image(WIDE)]}]
        with pytest.raises(RequestError, match="is 'image'; no images are supported here"):
            llm.chat(chat, GREEDY, use_tqdm=False, chat_template=TEMPLATE)


def test_a_model_that_sees_images_may_be_served_as_one_of_text(checkpoint: Path, answers: list[list[int]]) -> None:
    with LLM(str(checkpoint), num_gpu_blocks_override=64, language_model_only=True, **SMALL) as llm:
        assert llm.engine.placeholders == {}
        assert llm.generate([prompt(PROMPTS[3])], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == answers[3]
        with pytest.raises(RequestError, match="this model takes text only"):
            llm.generate([prompt(PROMPTS[0])], GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match="is 'image'; no images are supported here"):
            llm.chat([{"role": "user", "content": [image(WIDE)]}], GREEDY, use_tqdm=False)
    spec = load_spec(checkpoint, options=EngineConfig(language_model_only=True, hf_overrides={"vocab": 1}).pooling)
    assert (spec.vision, load_spec(checkpoint).vision is None) == (None, False)


# ---- prompts that are not chats


def test_generate_takes_images_beside_a_text(checkpoint: Path) -> None:
    """The text has the placeholders; images may be Pillow's, files or bytes."""
    image = Image.fromarray(picture(60, 40, 3))
    made = BytesIO()
    image.save(made, "PNG")
    text = "User:<image>a page<end_of_utterance>\nAssistant:"
    with LLM(checkpoint, **SMALL, limit_mm_per_prompt={"image": 1}) as llm:
        chat = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "a page"}]}]
        special = llm.get_tokenizer().encode("", add_special_tokens=True)
        [said] = llm.chat(chat, GREEDY, use_tqdm=False)
        for given in (image, [image], made.getvalue(), [made.getvalue()]):
            prompt: PromptLike = {"prompt": text, "multi_modal_data": {"image": given}}
            [found] = llm.generate(prompt, GREEDY, use_tqdm=False)
            assert found.prompt_token_ids == [*special, *said.prompt_token_ids]
            assert found.prompt == text
        wrong: list[tuple[Any, str]] = [
            ({"prompt": text, "multi_modal_data": {"video": []}}, r"has \['video'\]; 'image' is all"),
            (
                {"prompt": text, "multi_modal_data": {"image": 7}},
                r"multi_modal_data\['image'\]\[0\] has an image of type",
            ),
            ({"prompt": [1], "multi_modal_data": {}}, "a prompt with images must be"),
            ({"prompt": text, "multi_modal_data": {}}, "1 placeholders '<image>' for 0 images"),
            ({"prompt": text, "multi_modal_data": {"image": [image] * 2}}, "at most 1 images, got 2"),
        ]
        for bad, problem in wrong:
            with pytest.raises(RequestError, match=problem):
                llm.generate(bad, GREEDY, use_tqdm=False)


async def test_an_async_client_sends_images(checkpoint: Path) -> None:
    image = Image.fromarray(picture(60, 40, 3))
    text = "User:<image>a page<end_of_utterance>\nAssistant:"
    prompt: PromptLike = {"prompt": text, "multi_modal_data": {"image": image}}

    async def asked(address: str) -> RequestOutput:
        async with AsyncClient(address) as client:
            return [output async for output in client.generate(prompt, GREEDY)][-1]

    with LLM(checkpoint, **SMALL) as llm:
        [found] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert (await asked(llm.address)).outputs[0].token_ids == found.outputs[0].token_ids
