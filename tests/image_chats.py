"""Chats of many turns with images, of several users at once: numbers of cached tokens and of runs of the tower."""

from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from PIL import Image

from tests.images import picture
from vllm_lite import LLM, SamplingParams
from vllm_lite.engine.encoder_cache import EncoderCache

NUM_TURNS = 20
SHOWN = (0, 1, 5, 9, 14)
"""The turns that show an image."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ASKED = (
    "user {} asks for the turn {}, once more and in a few words, which say the same as those before but for a number"
)
SAID = "So it is, and so it was before, as anybody can see who looks at the page of turn {} with open eyes for a while."


class Found(NamedTuple):
    """Numbers of tokens. `known`: tokens that a prompt shares with the previous one of its chat; `cached` of them were
    found. `changed`: tokens found of the last prompt with one pixel of its first image changed; `before`: those before
    that image."""

    known: int
    cached: int
    num_towers: int
    num_images: int
    changed: int
    before: int


def shown_to(user: int, turn: int) -> Image.Image:
    """Images of a user's turn. Every second user has an image that others have, too."""
    return Image.fromarray(picture(90, 60, turn + (0 if user % 2 else 100 * user)))


def chat(checkpoint: Path, num_users: int, **settings: Any) -> Found:
    """Run the chats: in each turn, all users ask at once."""
    chats: list[list[dict[str, Any]]] = [[] for _ in range(num_users)]
    before, known, cached = [list[int]() for _ in range(num_users)], 0, 0
    images, caches = set[bytes](), list[EncoderCache]()
    begin_step = EncoderCache.begin_step

    def beginning(cache: EncoderCache) -> None:
        caches[:] = [cache]
        begin_step(cache)

    with mock.patch.object(EncoderCache, "begin_step", beginning), LLM(str(checkpoint), **settings) as llm:
        for turn in range(NUM_TURNS):
            for user, messages in enumerate(chats):
                parts: list[dict[str, Any]] = []
                if turn in SHOWN:
                    image = shown_to(user, turn)
                    images.add(image.tobytes())
                    parts.append({"type": "image", "image": image})
                parts.append({"type": "text", "text": ASKED.format(user, turn)})
                messages.append({"role": "user", "content": parts})
            for user, output in enumerate(llm.chat(chats, GREEDY, use_tqdm=False)):
                pairs = zip(before[user], output.prompt_token_ids, strict=False)
                known += len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
                cached += output.num_cached_tokens or 0
                before[user] = output.prompt_token_ids
                chats[user].append({"role": "assistant", "content": SAID.format(turn)})
        num_towers = caches[0].num_encoded
        chats[0].pop()
        [output] = llm.chat(_changed(chats[0]), GREEDY, use_tqdm=False)
    first = output.prompt_token_ids.index(386)
    return Found(known, cached, num_towers, len(images), output.num_cached_tokens or 0, first)


def _changed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat with one pixel of its first image changed."""
    first, *others = messages
    image = first["content"][0]["image"].copy()
    red, *rest = image.getpixel((40, 30))
    image.putpixel((40, 30), (red ^ 128, *rest))
    content = [{"type": "image", "image": image}, *first["content"][1:]]
    return [{"role": "user", "content": content}, *others]
