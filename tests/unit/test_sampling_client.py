"""Sampling parameters in clients before the engine sees them, and the logprobs of prompts."""

import asyncio
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests import tokenizers_for_tests as made
from tests.clients import TOKENIZER, collect, connected, expect, settle
from tests.fakes import welcome
from vllm_lite.client.outputs import RequestOutput
from vllm_lite.client.prompt import Prompt
from vllm_lite.client.streams.stream import StreamFactory
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.engine.client_port import Outbox
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import Finished, ForkRequest, Generate, PromptLogprobs, TokenLogprobs, Tokens
from vllm_lite.protocol.params import RequestOutputKind, SamplingParams
from vllm_lite.protocol.structured import StructuredOutputsParams, Thinking
from vllm_lite.structured.compile import compile_grammar

FACTORY = StreamFactory(welcome(vocab_size=TOKENIZER.vocab_size), TOKENIZER)


def sent(prompt: Any, factory: StreamFactory = FACTORY, **fields: Any) -> Generate:
    message = factory.make(prompt, SamplingParams(**fields), "r").message()
    assert isinstance(message, Generate)
    return message


# ---- the form of an output

CHOICE = StructuredOutputsParams(choice=["yes", "no"])
THINKING = Thinking(end=(7,), begin=(6,))


def test_a_form_travels_as_a_grammar() -> None:
    params = sent("x", structured_outputs=CHOICE).params
    assert params.grammar == compile_grammar(StructuredOutputsParams(choice=["yes", "no"]))
    assert (params.structured_outputs, params.thinking) == (None, None)


@pytest.mark.parametrize(
    ("fields", "n"),
    [({}, 1), ({"n": 2}, 2), ({"n": 1, "best_of": 3}, 3), ({"output_kind": RequestOutputKind.DELTA}, 1)],
)
def test_it_travels_with_several_samples_and_when_it_is_sent_again(fields: dict[str, Any], n: int) -> None:
    stream = FACTORY.make("x", SamplingParams(structured_outputs=CHOICE, **fields), "r")
    first, again = stream.message(), stream.message()
    assert isinstance(first, Generate)
    assert isinstance(again, Generate)
    assert (first.params.grammar, first.params.n) == (again.params.grammar, n)
    assert first.params.grammar


def test_a_fork_keeps_the_form_or_has_its_own() -> None:
    parent = FACTORY.make("x", SamplingParams(structured_outputs=CHOICE), "r")
    own = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["maybe"]))
    texts = [FACTORY.fork(parent, params, "f").params.grammar or "" for params in (None, own, SamplingParams())]
    assert ["yes" in text for text in texts] == [True, False, False]
    assert ["maybe" in text for text in texts] == [False, True, False]


def test_a_grammar_holds_behind_the_end_of_thinking() -> None:
    seen: list[str | None] = []

    def thinking(prompt: Prompt) -> Thinking:
        seen.append(prompt.text)
        return THINKING

    factory = StreamFactory(welcome(vocab_size=TOKENIZER.vocab_size), TOKENIZER, thinking)
    assert sent("a", factory, structured_outputs=CHOICE).params.thinking == THINKING
    assert sent("b", factory, grammar='start: "a"').params.thinking == THINKING
    budget = sent("c", factory, thinking_token_budget=3).params
    assert budget.thinking == Thinking(end=(7,), begin=(6,), budget=3)
    assert (budget.thinking_token_budget, budget.grammar) == (None, None)
    given = Thinking(end=(9,))
    assert sent("d", factory, grammar='start: "a"', thinking=given).params.thinking == given
    assert sent("e", factory).params.thinking is None
    assert seen == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"structured_outputs": {"json": {"not": {}}}}, "at #: the keyword 'not'"),
        ({"thinking_token_budget": 3}, "needs a model whose format of thinking is known"),
    ],
)
def test_a_form_that_cannot_be_held_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        sent("x", **fields)


def test_a_form_needs_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="structured_outputs need a tokenizer"):
        sent([1], StreamFactory(welcome(), None), structured_outputs=CHOICE)


# ---- bad words


def test_bad_words_are_spelled_with_and_without_a_space() -> None:
    params = sent("x", bad_words=["the", " thé"]).params
    spellings = ("the", " the", "thé", " thé")
    assert params.bad_words_token_ids == tuple(tuple(TOKENIZER.encode(text)) for text in spellings)
    assert params.bad_words == ()


def test_bad_words_come_beside_token_ids_that_are_given() -> None:
    tokens = tuple(TOKENIZER.encode("the"))
    params = sent("x", bad_words=["the"], bad_words_token_ids=[[5, 6], tokens]).params
    assert params.bad_words_token_ids == ((5, 6), tokens, tuple(TOKENIZER.encode(" the")))


def test_bad_words_have_no_special_tokens() -> None:
    tokenizer = Tokenizer(made.byte_fallback())
    factory = StreamFactory(welcome(vocab_size=tokenizer.vocab_size), tokenizer)
    words = sent("a", factory, bad_words=["the"]).params.bad_words_token_ids
    spelled = [tokenizer.token_id(name) for name in ("▁", "<0x74>", "<0x68>", "<0x65>")]  # BPE without merges
    assert words == (tuple(spelled), (spelled[0], *spelled))
    assert tokenizer.special_ids.isdisjoint(chain.from_iterable(words))


def test_too_many_tokens_are_refused_like_any_other_request() -> None:
    with pytest.raises(RequestError, match="bad_words have at most 64 tokens each, got 100"):
        sent("x", bad_words=["x" * 100])
    many = [f"w{number}" for number in range(256)]
    assert len(sent("x", bad_words=many).params.bad_words_token_ids) == 512
    with pytest.raises(RequestError, match="bad_words: bad_words_token_ids takes at most 512 entries, got 513"):
        sent("x", bad_words=many, bad_words_token_ids=[[1, 2]])


def test_bad_words_need_a_tokenizer() -> None:
    factory = StreamFactory(welcome(), None)
    with pytest.raises(RequestError, match=r"bad_words need a tokenizer.*use bad_words_token_ids"):
        sent([1], factory, bad_words=["the"])
    assert sent([1], factory, bad_words_token_ids=[[1, 2]]).params.bad_words_token_ids == ((1, 2),)


@pytest.mark.parametrize("fields", [{"logit_bias": {5000: 1}}, {"allowed_token_ids": [5000]}])
def test_ids_outside_the_vocabulary_are_not_sent(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(fields))} must be between 0 and 2.., got 5000"):
        sent("x", **fields)


# ---- truncation


def kept(prompt: Any, factory: StreamFactory = FACTORY, **fields: Any) -> list[int]:
    return factory.make(prompt, SamplingParams(**fields), "r").prompt.token_ids


def test_the_last_tokens_of_a_prompt_are_kept() -> None:
    tokens = list(range(3, 23))
    for count in (1, 7, 20, 21, 1000):
        assert kept(tokens, truncate_prompt_tokens=count) == tokens[-count:]
    text = "the cat sat"
    assert kept(text, truncate_prompt_tokens=4) == TOKENIZER.encode(text)[-4:]


def test_the_first_tokens_of_a_prompt_are_kept_if_it_is_cut_at_the_right() -> None:
    tokens = list(range(3, 23))
    for count in (1, 7, 20, 1000):
        assert kept(tokens, truncate_prompt_tokens=count, truncation_side="right") == tokens[:count]
    assert len(kept([5] * 100, truncate_prompt_tokens=-1, max_tokens=10, truncation_side="right")) == 54
    text = "the cat sat"
    assert kept(text, truncate_prompt_tokens=4, truncation_side="right") == TOKENIZER.encode(text)[:4]
    with pytest.raises(TypeError, match="truncation_side must be left or right, got 'up'"):
        SamplingParams(truncation_side="up")  # type: ignore[arg-type]


def test_a_truncated_prompt_leaves_room_for_max_tokens() -> None:
    tokens = [5] * 100  # of a context of 64
    assert len(kept(tokens, truncate_prompt_tokens=-1, max_tokens=10)) == 54
    assert len(kept(tokens, truncate_prompt_tokens=-1, max_tokens=None)) == 63
    assert len(kept(tokens[:20], truncate_prompt_tokens=-1)) == 20
    with pytest.raises(RequestError, match="at least 100 input tokens"):
        kept(tokens)


def test_the_tokens_that_begin_every_text_are_kept_too() -> None:
    tokenizer = Tokenizer(made.byte_fallback())
    factory = StreamFactory(welcome(vocab_size=tokenizer.vocab_size), tokenizer)
    whole = tokenizer.encode("a the a")
    assert whole[0] == 0
    assert kept("a the a", factory, truncate_prompt_tokens=3) == [0, *whole[-2:]]
    assert kept("a the a", factory, truncate_prompt_tokens=1) == whole[-1:]
    assert kept("a the a", factory, truncate_prompt_tokens=len(whole)) == whole


# ---- logprobs of the prompt


def entry(logprob: float, rank: int = 1, top: int | None = None) -> TokenLogprobs:
    return TokenLogprobs(logprob, rank, () if top is None else ((top, -0.5),))


def piece(start: int, *entries: TokenLogprobs) -> Tokens:
    return Tokens("r", 0, [], prompt=PromptLogprobs(start, list(entries)))


def shape(output: RequestOutput) -> list[dict[int, tuple[float, int]] | None]:
    return [
        None if place is None else {token: (one.logprob, one.rank) for token, one in place.items()}
        for place in output.prompt_logprobs or []
    ]


async def test_they_come_in_pieces_and_are_shown_with_the_first_token(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        first = asyncio.ensure_future(anext(client.generate([5, 6, 7, 8], SamplingParams(prompt_logprobs=1), "r")))
        assert (await expect(engine, Generate)).params.prompt_logprobs == 1
        engine.send_outputs(piece(1, entry(-1.0, 2, top=9)))
        await settle(client, engine)
        assert not first.done(), "there is nothing to read yet"
        engine.send_outputs(piece(1, entry(-1.0, 2, top=9), entry(-2.0)))  # as after a restart
        engine.send_outputs(Tokens("r", 0, [3], prompt=PromptLogprobs(3, [entry(-3.0, 1, top=8)])))
        output = await first
        assert output.outputs[0].token_ids == [3]
        assert shape(output) == [None, {6: (-1.0, 2), 9: (-0.5, 1)}, {7: (-2.0, 1)}, {8: (-3.0, 1)}]
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[1] is not None
        assert output.prompt_logprobs[1][6].decoded_token == TOKENIZER.decode([6])


async def test_prompt_logprobs_that_were_not_asked_for_and_of_one_token(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        for asked, expected in ((None, None), (0, [None])):
            task = asyncio.ensure_future(collect(client.generate([5], SamplingParams(prompt_logprobs=asked), "r")))
            await expect(engine, Generate)
            engine.finish("r", 0, 3)
            assert (await task)[-1].prompt_logprobs == expected


async def test_a_fork_has_its_parents_prompt_logprobs(folder: Path) -> None:
    async with connected(folder) as (client, engine):
        parent = client.generate([5, 6], SamplingParams(prompt_logprobs=0), "r")
        first = asyncio.ensure_future(anext(parent))
        await expect(engine, Generate)
        engine.send_outputs(Tokens("r", 0, [3], prompt=PromptLogprobs(1, [entry(-1.0)])))
        await first
        (fork,) = await client.fork("r")
        asked = await expect(engine, ForkRequest)
        assert asked.params.prompt_logprobs is None
        engine.finish(asked.child_id, 1, 4)
        assert shape((await collect(fork))[-1]) == [None, {6: (-1.0, 1)}]
        engine.finish("r", 1)
        await collect(parent)
        plain = client.generate([5, 6], SamplingParams(), "r")
        first = asyncio.ensure_future(anext(plain))
        await expect(engine, Generate)
        engine.tokens("r", 0, 3)
        await first
        with pytest.raises(RequestError, match="a fork can have prompt_logprobs only if"):
            await client.fork("r", 1, SamplingParams(prompt_logprobs=1))
        engine.finish("r", 1)
        await collect(plain)


def test_pieces_for_a_slow_reader_go_together() -> None:
    outbox = Outbox()
    for output in (piece(1, entry(-1.0)), piece(2, entry(-2.0), entry(-3.0)), Finished("r", 0, [4], "length")):
        outbox.add(output)
    (merged,) = outbox.take()
    assert (merged.start, merged.token_ids) == (0, [4])
    assert merged.prompt == PromptLogprobs(1, [entry(-1.0), entry(-2.0), entry(-3.0)])
    outbox.sent(0.0)
    outbox.add(piece(1, entry(-1.0)))
    outbox.add(Tokens("r", 0, [4]))
    assert outbox.take() == [Tokens("r", 0, [4], prompt=PromptLogprobs(1, [entry(-1.0)]))]
