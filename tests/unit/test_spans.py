"""Media within a prompt's tokens: hashes that depend on them, limits, and their way to the workers."""

from contextlib import nullcontext
from hashlib import blake2b
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import welcome
from tests.scheduler_rig import VOCAB, Rig
from vllm_lite.client.engines.data_parallel import prompt_hashes
from vllm_lite.client.prompt import PromptLike, read_prompt
from vllm_lite.client.spans import ShownMedia, Text
from vllm_lite.client.streams.stream import StreamFactory
from vllm_lite.engine.intake import Intake, ModelFacts
from vllm_lite.engine.request import Request
from vllm_lite.errors import ContextLengthError, ProtocolError, RequestError
from vllm_lite.protocol.api import ForkRequest, Generate
from vllm_lite.protocol.codec import client_to_engine, engine_to_worker, pack_tokens
from vllm_lite.protocol.encoder import MediaContent
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.pooling import PoolerInfo
from vllm_lite.protocol.spans import Media
from vllm_lite.protocol.step import NewRequest, SchedulerOutput
from vllm_lite.runtime.prefix_hash import PrefixHasher

BLOCK = 4
IMAGE = 49
"""The placeholder token."""
LIMITS = welcome(vocab_size=VOCAB, placeholders={"image": IMAGE})
TEXT_ONLY = welcome(vocab_size=VOCAB)
PARAMS = SamplingParams(max_tokens=3)


def picture(content: str, num_tokens: int, start: int = 0) -> Media:
    return Media("image", blake2b(content.encode(), digest_size=32).digest(), num_tokens, start)


def hashes_of(tokens: list[int], media: tuple[Media, ...] = ()) -> list[bytes]:
    hasher, hashes = PrefixHasher(BLOCK, "s"), list[bytes]()
    hasher.extend(hashes, hasher.root(), memoryview(pack_tokens(tokens)), len(tokens), media)
    return hashes


def message(name: str, tokens: list[int], media: tuple[Media, ...] = (), **fields: Any) -> Generate:
    return Generate(name, pack_tokens(tokens), PARAMS, media=media, **fields)


# ---- hashes


def test_the_hashes_of_text_are_stable() -> None:
    """A digest of the parent's digest and the block's tokens, and of nothing else."""
    hasher, tokens = PrefixHasher(BLOCK, "s"), list(range(1, 18))
    parent, expected = hasher.root(), list[bytes]()
    for start in range(0, 16, BLOCK):
        parent = blake2b(parent + pack_tokens(tokens[start : start + BLOCK]), digest_size=32).digest()
        expected.append(parent)
    assert hashes_of(tokens) == expected
    assert hashes_of(tokens, (picture("behind", 1, 16),))[:4] == expected
    with_picture = hashes_of(tokens, (picture("cat", 5, 1),))
    for index in (2, 3):  # behind it, only the parent differs
        parent = with_picture[index - 1]
        block = pack_tokens(tokens[index * BLOCK : (index + 1) * BLOCK])
        assert with_picture[index] == blake2b(parent + block, digest_size=32).digest()


@pytest.mark.parametrize(
    ("others", "num_equal"),
    [
        ([picture("cat", 6, 5), picture("sun", 2, 17)], 5),
        ([picture("dog", 6, 5), picture("sun", 2, 17)], 1),
        ([picture("cat", 6, 5), picture("moon", 2, 17)], 4),
        ([picture("cat", 6, 5)], 4),
        ([picture("cat", 5, 5), picture("sun", 2, 17)], 1),
        ([picture("cat", 6, 4), picture("sun", 2, 17)], 1),
        ([], 1),
    ],
)
def test_a_hash_depends_on_media_from_their_first_block_on(others: list[Media], num_equal: int) -> None:
    tokens = [1, 2, 3, 4, *[IMAGE] * 16]
    mine, theirs = hashes_of(tokens, (picture("cat", 6, 5), picture("sun", 2, 17))), hashes_of(tokens, tuple(others))
    assert [left == right for left, right in zip(mine, theirs, strict=True)] == [True] * num_equal + [False] * (
        5 - num_equal
    )


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], tuple[Media, ...]]:
    """Few tokens and few contents, so that two prompts have much in common."""
    tokens, media = list[int](), list[Media]()
    for count in draw(st.lists(st.integers(1, 5), max_size=6)):
        if draw(st.booleans()):
            media.append(picture(draw(st.sampled_from("ab")), count, len(tokens)))
        tokens += [IMAGE] * count
    return tokens, tuple(media)


@given(prompts(), prompts(), st.integers(0, 24))
def test_equal_hashes_mean_equal_content(first: Any, second: Any, cut: int) -> None:
    """Block by block, and in pieces as at once."""
    (mine, my_media), (theirs, their_media) = first, second
    content = [content_of(*each) for each in (first, second)]
    both = list(zip(hashes_of(mine, my_media), hashes_of(theirs, their_media), strict=False))
    for index, (left, right) in enumerate(both, 1):
        end = index * BLOCK
        assert (left == right) == (content[0][:end] == content[1][:end])
    hasher, hashes, tokens = PrefixHasher(BLOCK, "s"), list[bytes](), memoryview(pack_tokens(mine))
    for end in (min(cut, len(mine)), len(mine)):
        hasher.extend(hashes, hasher.root(), tokens, end, my_media)
    assert hashes == hashes_of(mine, my_media)


def content_of(tokens: list[int], media: tuple[Media, ...]) -> list[object]:
    """All that each token's KV depends on, at its place."""
    content: list[object] = list(tokens)
    for medium in media:
        for place in range(medium.start, medium.end):
            content[place] = medium.digest, medium.start, medium.end
    return content


def test_a_router_hashes_media_as_the_engine_does() -> None:
    rig, asked = Rig(), message("r", [1, *[IMAGE] * 11], (picture("cat", 6, 3),))
    request = Request(asked, b"c", 20, frozenset())
    rig.scheduler.add(request)
    rig.kv.find_cached(request.sequences[0])
    assert prompt_hashes(rig.kv.hasher, asked) == request.sequences[0].block_hashes
    assert prompt_hashes(rig.kv.hasher, message("r", [1, *[IMAGE] * 11])) != request.sequences[0].block_hashes


# ---- through the engine


def test_another_picture_hits_only_the_text_before_it() -> None:
    rig, tokens = Rig(), [1, 2, 3, 4, *[IMAGE] * 6, 5, 6, 7]
    intake = Intake(rig.scheduler, ModelFacts(VOCAB, frozenset(), media_kinds=frozenset(["image"])), lambda: 0.0)
    found = []
    for name, content in (("first", "cat"), ("other", "dog"), ("same", "cat")):
        intake.add(b"c", message(name, tokens, (picture(content, 6, 4),)))
        step = rig.scheduler.schedule()
        assert step is not None
        (entry,) = (each for each in step.entries if isinstance(each, NewRequest))
        assert entry.media == (picture(content, 6, 4),)
        assert engine_to_worker.decode(engine_to_worker.encode(step)) == step
        found.append(entry.num_cached)
        rig.scheduler.update(rig.worker.execute(step))
        while (step := rig.scheduler.schedule()) is not None:
            rig.scheduler.update(rig.worker.execute(step))
        assert not rig.scheduler.requests
    assert found == [0, 4, 12]


def test_a_fork_has_the_media_of_its_parent() -> None:
    rig, tokens = Rig(), [1, *[IMAGE] * 3]
    intake = Intake(rig.scheduler, ModelFacts(VOCAB, frozenset(), media_kinds=frozenset(["image"])), lambda: 0.0)
    intake.add(b"c", message("parent", tokens, (picture("cat", 3, 1),)))
    rig.step()
    child = intake.fork(b"c", ForkRequest("parent", "child", 1, PARAMS))
    assert child.media == (picture("cat", 3, 1),)


@pytest.mark.parametrize(
    ("media", "kinds", "problem"),
    [
        ([picture("cat", 2, 1)], [], "a medium of kind 'image'; this model takes text only"),
        ([picture("cat", 2, 1)], ["video", "audio"], "kind 'image'; this model takes text and audio, video"),
        ([picture("cat", 2, 3)], ["image"], "in the prompt's 4 tokens, .*got one from 3 to 5"),
        ([picture("cat", 2, 1), picture("dog", 1, 2)], ["image"], "one from 2 to 3 behind one that ends at 3"),
        ([picture("cat", 1, 2), picture("dog", 1, 0)], ["image"], "one from 0 to 1 behind one that ends at 3"),
    ],
)
def test_media_that_cannot_be_are_refused(media: list[Media], kinds: list[str], problem: str) -> None:
    rig = Rig()
    intake = Intake(rig.scheduler, ModelFacts(VOCAB, frozenset(), media_kinds=frozenset(kinds)), lambda: 0.0)
    with pytest.raises(RequestError, match=problem):
        intake.add(b"c", message("r", [IMAGE] * 4, tuple(media)))
    assert not rig.scheduler.requests


@pytest.mark.parametrize(
    ("num_bytes", "vary", "problem"),
    [
        (20, False, None),
        (20, True, None),
        (1, True, None),
        (19, False, "a medium of 2 tokens needs 20 bytes of content, got 19"),
        (21, False, "needs 20 bytes of content, got 21"),
        (21, True, "needs at most 20 bytes of content, got 21"),
        (0, True, "needs at most 20 bytes of content, got 0"),
        (0, False, "needs 20 bytes of content, got 0"),
    ],
)
def test_the_bytes_of_contents_match_their_tokens(num_bytes: int, vary: bool, problem: str | None) -> None:
    """Fewer bytes are allowed for a tower whose images have tokens without a part of the image."""
    rig, image = Rig(), picture("cat", 2, 1)
    facts = ModelFacts(VOCAB, frozenset(), PoolerInfo(), frozenset(["image"]), 10, vary)
    asked = message("r", [IMAGE] * 4, (image,), contents=(MediaContent(image.digest, bytes(num_bytes)),))
    with pytest.raises(RequestError, match=problem) if problem else nullcontext():
        Intake(rig.scheduler, facts, lambda: 0.0).add(b"c", asked)
    assert bool(rig.scheduler.requests) == (problem is None)


def test_a_medium_may_have_tokens_of_its_own() -> None:
    """Such as the row ends in Pixtral's images; the other tokens are placeholders."""
    one, other = picture("cat", 3), picture("dog", 2)
    given = spans(ShownMedia(one, b"c", [IMAGE, 7, IMAGE]), Text([1]), ShownMedia(other, b"d"))
    prompt = read_prompt(given, None, LIMITS, PARAMS)
    assert prompt.token_ids == [IMAGE, 7, IMAGE, 1, IMAGE, IMAGE]
    assert [medium.start for medium in prompt.media] == [0, 4]
    with pytest.raises(RequestError, match="a medium of 3 tokens has 2 token ids"):
        read_prompt(spans(ShownMedia(one, b"c", [IMAGE, 7])), None, LIMITS, PARAMS)
    with pytest.raises(RequestError, match="token"):
        read_prompt(spans(ShownMedia(one, b"c", [IMAGE, VOCAB, IMAGE])), None, LIMITS, PARAMS)


def test_a_request_sent_again_has_the_same_media() -> None:
    rig = Rig()
    intake = Intake(rig.scheduler, ModelFacts(VOCAB, frozenset(), media_kinds=frozenset(["image"])), lambda: 0.0)
    asked = message("r", [IMAGE] * 4, (picture("cat", 2, 1),))
    intake.add(b"c", asked)
    intake.add(b"c", asked)
    with pytest.raises(RequestError, match="in use for other media"):
        intake.add(b"c", msgspec.structs.replace(asked, media=(picture("dog", 2, 1),)))


@pytest.mark.parametrize(
    "wrong", [{"digest": b"short"}, {"num_tokens": 0}, {"start": -1}, {"kind": ""}, {"grid": (1, 2, 3, 4)}]
)
def test_invalid_media_are_refused_by_the_decoder(wrong: dict[str, Any]) -> None:
    asked = message("r", [IMAGE], (msgspec.structs.replace(picture("cat", 1), **wrong),))
    with pytest.raises(ProtocolError, match="could not be decoded"):
        client_to_engine.decode(client_to_engine.encode(asked))


def test_messages_of_text_hold_no_media() -> None:
    rig = Rig()
    rig.add("r", [1, 2, 3])
    step = rig.scheduler.schedule()
    assert isinstance(step, SchedulerOutput)
    assert isinstance(step.entries[0], NewRequest)
    assert step.entries[0].media == ()


# ---- in the client


def spans(*parts: Any) -> PromptLike:
    return {"spans": parts}


def test_a_prompt_of_spans_travels_flat() -> None:
    prompt = spans(Text([1, 2]), picture("cat", 3), Text([4]), picture("dog", 1))
    sent = StreamFactory(LIMITS, None).make(prompt, PARAMS, "r").message()
    assert isinstance(sent, Generate)
    assert sent.prompt == pack_tokens([1, 2, IMAGE, IMAGE, IMAGE, 4, IMAGE])
    assert sent.media == (picture("cat", 3, 2), picture("dog", 1, 6))
    assert client_to_engine.decode(client_to_engine.encode(sent)) == sent
    text = StreamFactory(TEXT_ONLY, None).make(spans(Text([1, 2])), PARAMS, "r").message()
    plain = StreamFactory(TEXT_ONLY, None).make([1, 2], PARAMS, "r").message()
    assert msgspec.structs.replace(text, params=PARAMS) == msgspec.structs.replace(plain, params=PARAMS)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (spans(picture("cat", 2)), "this model takes text only"),
        (spans("text"), "a span of a prompt must be a Text or a Media, got str"),
        (spans(), "the prompt is empty"),
        (spans(Text([1, 300])), "got 300 at position 1, which is out of vocabulary"),
        ({"spans": "text"}, "a prompt of spans must be"),
        ({"spans": [Text([1])], "prompt": "text"}, "a prompt of spans must be"),
    ],
)
def test_spans_that_are_no_prompt_are_refused(prompt: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        read_prompt(prompt, None, TEXT_ONLY, PARAMS)


def test_spans_are_bounded_and_not_cut() -> None:
    with pytest.raises(ContextLengthError):
        read_prompt(spans(*[picture("cat", 2**31 - 1)] * 1000), None, LIMITS, PARAMS)
    with pytest.raises(RequestError, match="cannot be truncated"):
        read_prompt(spans(Text([1])), None, LIMITS, SamplingParams(truncate_prompt_tokens=1))
    many = welcome(vocab_size=VOCAB, placeholders={"image": IMAGE}, max_model_len=4096)
    with pytest.raises(RequestError, match="at most 1024 media, got 1025"):
        read_prompt(spans(*[picture("cat", 1)] * 1025), None, many, PARAMS)
