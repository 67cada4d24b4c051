"""Images by their uuids, and the sizes that they are made with, as programs ask for them."""

from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from tests.images import IMAGE_TOKEN, TILE, as_file, make_smolvlm, picture
from tests.unit.test_time_slice import own_slice_ns, slice_of
from vllm_lite import LLM, SamplingParams
from vllm_lite.client.media import image_pool
from vllm_lite.client.media.image_pool import ImagePool
from vllm_lite.client.media.processors import TileSettings, tiles_of
from vllm_lite.client.media.prompt_images import PromptImages
from vllm_lite.client.media.sources import GivenImage
from vllm_lite.client.prompt import PromptLike
from vllm_lite.errors import ConfigError, RequestError
from vllm_lite.transport.time_slice import short_slices

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 400, "single_process": True, "seed": 0}
PNG, SMALL_PNG = as_file("PNG", "RGB", 60, 50, 1), as_file("PNG", "RGB", 10, 10, 3)


def test_a_uuid_is_known_for_its_key_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """To no other key, for the sizes that the image was made with, and until so many others are known. Images are made
    by processes that let threads which pass messages on go first."""
    monkeypatch.setattr(image_pool, "MAX_UUIDS", 2)
    settings, whole = TileSettings(32, 64), TileSettings(32, 64, splits=False)
    pool = ImagePool(settings)

    def refuses(image: GivenImage, by: TileSettings = settings) -> bool:
        try:
            pool.made(image, by)
        except RequestError as error:
            return "not held here, or not any more; send it once more" in str(error)
        return False

    try:
        assert refuses(GivenImage(None, "a", "me"))
        with short_slices():
            pool.made(GivenImage(PNG, "a", "me"))
        assert pool.made(GivenImage(None, "a", "me")) == tiles_of(PNG, settings)
        children = [each for each in psutil.Process().children() if each.nice() > psutil.Process().nice()]
        assert children or psutil.Process().nice() == 19, "streams go before images that are cut"
        assert {slice_of(Path(f"/proc/{each.pid}")) for each in children} <= {own_slice_ns()}
        assert refuses(GivenImage(None, "a", "you"))
        assert refuses(GivenImage(None, "a"))
        assert refuses(GivenImage(None, "a", "me"), whole)
        assert pool.made(GivenImage(PNG, "a", "me"), whole) == tiles_of(PNG, whole)
        assert pool.made(GivenImage(None, "a", "me")) == tiles_of(PNG, settings)
        pool.made(GivenImage(SMALL_PNG, "a", "me"))
        assert pool.made(GivenImage(None, "a", "me")) == tiles_of(SMALL_PNG, settings)
        for name in ("b", "c"):
            pool.made(GivenImage(PNG, name, "me"))
        assert [refuses(GivenImage(None, name, "me")) for name in "abc"] == [True, False, False]
        with pytest.raises(RequestError, match="must be a PNG"):
            pool.made(GivenImage(b"text", "d", "me"))
        assert refuses(GivenImage(None, "d", "me")), "nothing was made of it"
    finally:
        pool.close()


def test_programs_name_images_and_change_sizes(tmp_path: Path) -> None:
    """As in vLLM, an image that was sent with its uuid may be None afterwards."""
    checkpoint = make_smolvlm(tmp_path / "m")
    image = Image.fromarray(picture(60, 40, 3))
    text = "User:<image>a page<end_of_utterance>\nAssistant:"

    def given(value: Any, uuids: Any = None, **more: Any) -> PromptLike:
        named = {} if uuids is None else {"multi_modal_uuids": {"image": uuids}}
        made: Any = {"prompt": text, "multi_modal_data": {"image": value}, **named, **more}
        prompt: PromptLike = made
        return prompt

    with LLM(checkpoint, **SMALL, mm_processor_kwargs={"size": {"longest_edge": TILE}}) as llm:
        first, again, alone = (
            llm.generate(each, GREEDY, use_tqdm=False)[0]
            for each in (given(image), given([image], ["a"]), given([None], "a"))
        )
        assert again.prompt_token_ids == alone.prompt_token_ids == first.prompt_token_ids
        assert alone.outputs[0].token_ids == first.outputs[0].token_ids
        assert first.prompt_token_ids.count(IMAGE_TOKEN) == 4, "one tile, as the program asked for all prompts"
        more: dict[str, Any] = {"mm_processor_kwargs": {"size": {"longest_edge": 2 * TILE}}}
        assert llm.generate(given(image, **more), GREEDY)[0].prompt_token_ids.count(IMAGE_TOKEN) == 5 * 4
        content = [{"type": "image", "image": image, "uuid": "b"}, {"type": "text", "text": "a page"}]
        [said] = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False, **more)
        assert said.prompt_token_ids.count(IMAGE_TOKEN) == 5 * 4
        for bad, problem in (
            (given([None], ["c"]), "the image with the uuid 'c' is not held here"),
            (given([image], ["a", "b"]), "multi_modal_uuids has 2 for 1 images"),
            (given([image], [7]), "a uuid that is not a text"),
            (given(image, mm_processor_kwargs={"fps": 1}), "mm_processor_kwargs has fps; the processor of this model"),
        ):
            with pytest.raises(RequestError, match=problem):
                llm.generate(bad, GREEDY, use_tqdm=False)
    with pytest.raises(ConfigError, match="mm_processor_kwargs has patch"):
        PromptImages.load(checkpoint, changes={"patch": 3})
