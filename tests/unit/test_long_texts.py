"""Texts far too long for the context: how much of them is tokenized, by how many threads, and for whom."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from tests.deadlines import scaled
from tests.tokenizers_for_tests import KINDS, byte_level
from vllm_lite.client import prompt as prompts
from vllm_lite.client.prompt import BYTES_PER_TOKEN, check_text, max_text_bytes, read_prompt
from vllm_lite.client.text import tokenizer as tokenizers
from vllm_lite.client.text.tokenizer import SLICE_CHARS, Tokenizer
from vllm_lite.errors import ContextLengthError, RequestError
from vllm_lite.protocol.api import Welcome
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.http.disconnect import Threads
from vllm_lite.server.openai.errors import ApiError

DEADLINE_S = scaled(30.0)
CONTEXT = 512
LIMITS = Welcome(1, 1, "x", CONTEXT, 2048, (1, 4), 100, 16)
PLAIN = SamplingParams()
KINDS_OF_TEXT = {
    "words": lambda count: ("the cat sat. " * count)[:count],
    "one word": lambda count: "a" * count,
    "spaces": lambda count: " " * count,
    "lines": lambda count: ("\n" * 7 + "été 🙂 猫 " * 3) * (count // 30),
    "noise": lambda count: "".join(chr(33 + place * 7919 % 90) for place in range(count)),
}


class Counting:
    """The library behind a tokenizer, and how many characters it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.library = tokenizer.library
        self.chars: list[int] = []
        tokenizer.library = cast(Any, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)

    def encode(self, text: str, **settings: Any) -> Any:
        self.chars.append(len(text))
        return self.library.encode(text, **settings)

    def encode_batch_fast(self, texts: list[str], **settings: Any) -> Any:
        self.chars += map(len, texts)
        return self.library.encode_batch_fast(texts, **settings)


def counting() -> Counting:
    return Counting(Tokenizer(byte_level()))


@pytest.mark.parametrize("text", KINDS_OF_TEXT)
@pytest.mark.parametrize("kind", KINDS)
def test_the_lower_bound_of_a_text_holds_for_all_cuts(kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lower bound on a text's tokens holds wherever it is cut; and for long texts the bound exceeds half of the
    tokens."""
    monkeypatch.setattr(tokenizers, "SLICE_CHARS", 4096)
    tokenizer = Tokenizer(KINDS[kind]())
    long = KINDS_OF_TEXT[text](40_000)
    length = len(tokenizer.encode(long, add_special_tokens=False))
    assert not tokenizer.is_longer(long, length)
    if length > 20_000:
        assert tokenizer.is_longer(long, length // 2)


@pytest.mark.parametrize("num_bytes", [100_000, 500_000, 10_000_000])
def test_a_text_that_is_too_long_is_hardly_looked_at(num_bytes: int) -> None:
    library = counting()
    least = num_bytes // BYTES_PER_TOKEN if num_bytes > max_text_bytes(CONTEXT) else CONTEXT + 1
    says = (
        f"length is {CONTEXT} tokens, but you requested 7 output .* at least {least} input tokens; .*shorten it to 511"
    )
    with pytest.raises(ContextLengthError, match=says):
        read_prompt("the cat " * (num_bytes // 8), library.tokenizer, LIMITS, SamplingParams(max_tokens=7))
    assert sum(library.chars) <= SLICE_CHARS


@pytest.mark.parametrize(
    ("num_chars", "context"), [(1000, 2048), (60_000, 16_384), (240_000, 60_001), (500_000, 150_000)]
)
def test_a_text_of_a_usual_length_is_tokenized_once(num_chars: int, context: int) -> None:
    library = counting()
    limits = Welcome(1, 1, "x", context, 2048, (1, 4), 100, 16)
    text = " the" * (num_chars // 4)
    assert len(read_prompt(text, library.tokenizer, limits, PLAIN).token_ids) < context
    assert library.chars == [num_chars]


def test_a_text_of_long_tokens_fits() -> None:
    """A text with more bytes than usual for its tokens is counted first, and then tokenized."""
    library = counting()
    text = "two words" * 10_000  # one token each
    limits = Welcome(1, 1, "x", 10_001, 2048, (1, 4), 100, 16)
    assert len(read_prompt(text, library.tokenizer, limits, PLAIN).token_ids) == 10_000
    assert sum(library.chars) == 2 * len(text)


def test_a_text_that_is_cut_may_be_longer_than_the_context() -> None:
    library = counting()
    text, token = " the" * 50_000, library.tokenizer.token_id("Ġthe")
    cut = SamplingParams(truncate_prompt_tokens=5)
    assert read_prompt(text, library.tokenizer, LIMITS, cut).token_ids == [token] * 5
    for asked in (cut, None):
        with pytest.raises(RequestError, match="4000000 bytes; at most") as caught:
            check_text(text * 20, library.tokenizer, CONTEXT, asked)
        assert not isinstance(caught.value, ContextLengthError)


def test_memory_limits_texts_that_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    library = counting()
    monkeypatch.setattr(prompts, "MIN_TEXT_BYTES", SLICE_CHARS)
    monkeypatch.setattr(prompts, "BYTES_PER_TOKEN", 10_000)
    for asked in (SamplingParams(truncate_prompt_tokens=-1), None):
        with pytest.raises(RequestError, match=f"more than {SLICE_CHARS} tokens, too many to keep"):
            check_text("x" * 1_000_000, library.tokenizer, CONTEXT, asked)
    assert sum(library.chars) <= 4 * SLICE_CHARS


def test_token_ids_that_are_too_many_are_not_looked_at() -> None:
    class Ids(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError

    with pytest.raises(ContextLengthError, match=r"512 tokens, but .* at least 600 input tokens"):
        read_prompt(Ids([1] * 600), None, LIMITS, PLAIN)


def test_counting_stops_for_a_client_that_has_gone() -> None:
    library = counting()
    checks: list[int] = []

    def check() -> None:
        checks.append(1)
        if len(checks) == 3:
            raise ApiError(400, "gone")

    with pytest.raises(ApiError):
        library.tokenizer.is_longer("x" * 10 * SLICE_CHARS, 10**9, check)
    assert len(library.chars) == 2


# ---- threads


class Client:
    """A client, as a request's `receive` shows it."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what a thread does
            await asyncio.sleep(0.001)


async def test_the_number_of_running_threads_is_limited() -> None:
    workers, may_go, lock = Threads(2, "test"), threading.Event(), threading.Lock()
    running = most = 0

    def work(check: Callable[[], None]) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        assert may_go.wait(DEADLINE_S)
        check()
        with lock:
            running -= 1
        return 7

    tasks = [asyncio.create_task(workers.run(work, Client().receive)) for _ in range(6)]
    await until(lambda: running == 2)
    may_go.set()
    async with asyncio.timeout(DEADLINE_S):
        assert await asyncio.gather(*tasks) == [7] * 6
    assert most == 2


async def test_work_for_a_client_that_has_gone_stops_or_is_not_begun() -> None:
    workers, may_go = Threads(1, "test"), threading.Event()
    begun, ended = [], []

    def work(name: str) -> Callable[[Callable[[], None]], str]:
        def steps(check: Callable[[], None]) -> str:
            begun.append(name)
            assert may_go.wait(DEADLINE_S)
            check()
            ended.append(name)
            return name

        return steps

    clients = {name: Client() for name in ("first", "second", "third")}
    tasks = {name: asyncio.create_task(workers.run(work(name), it.receive)) for name, it in clients.items()}
    await until(lambda: begun == ["first"])
    for name in ("first", "second"):
        clients[name].left.set()
        with pytest.raises(ApiError, match="gone"):
            async with asyncio.timeout(DEADLINE_S):
                await tasks[name]
    may_go.set()
    async with asyncio.timeout(DEADLINE_S):
        assert await tasks["third"] == "third"
    assert (begun, ended) == (["first", "third"], ["third"])


@pytest.mark.parametrize("num_chars", [tokenizers.SHORT_TEXT_CHARS + 1, 4000])
def test_all_but_short_texts_are_tokenized_without_the_interpreters_lock(num_chars: int) -> None:
    """encode() keeps the interpreter's lock, so tokenizing a long text with it would block the loop of a server."""
    library = counting()
    library.encode = None  # type: ignore[assignment, method-assign]
    assert library.tokenizer.encode("a b " * (num_chars // 4 + 1))
    with pytest.raises(TypeError):
        library.tokenizer.encode("a b")
