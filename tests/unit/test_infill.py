"""Prompts with a gap, in the words of each family of code models."""

from typing import Any

import pytest
from starlette.requests import Request
from tokenizers import Tokenizer as Library

from tests import tokenizers_for_tests as made
from vllm_lite.client.text.infill import Infill
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.openai.bodies import CompletionBody
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.prompts import PromptRenderer

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
DEEPSEEK = ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"]  # noqa: RUF001
LLAMA = ["▁<PRE>", "▁<SUF>", "▁<MID>"]
REQUEST = Request({"type": "http", "method": "POST", "headers": []})


def with_tokens(data: bytes, *tokens: str) -> Tokenizer:
    library = Library.from_str(data.decode())
    library.add_special_tokens(list(tokens))
    return Tokenizer(library.to_str().encode())


def names(tokenizer: Tokenizer, ids: list[int]) -> list[str | None]:
    return [tokenizer.token(token) for token in ids]


@pytest.mark.parametrize(
    ("data", "tokens", "ends", "expected"),
    [
        (made.byte_level(), QWEN, ["<|endoftext|>", "<|file_sep|>"], [QWEN[0], "a", QWEN[1], "s", QWEN[2]]),
        (made.byte_level(), ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], ["<file_sep>"], None),
        (made.byte_level(), DEEPSEEK, [], [DEEPSEEK[0], "a", DEEPSEEK[1], "s", DEEPSEEK[2]]),
        (made.byte_fallback(), LLAMA, ["▁<EOT>"], ["<s>", LLAMA[0], "▁", "a", LLAMA[1], "s", LLAMA[2]]),
        (made.byte_fallback(), ["[PREFIX]", "[SUFFIX]"], [], ["<s>", "[SUFFIX]", "▁", "s", "[PREFIX]", "▁", "a"]),
    ],
)
def test_families(data: bytes, tokens: list[str], ends: list[str], expected: list[str] | None) -> None:
    tokenizer = with_tokens(data, *tokens, *ends)
    infill = Infill.of(tokenizer)
    assert infill is not None
    expected = expected or [tokens[0], "a", tokens[1], "s", tokens[2]]
    assert names(tokenizer, infill.prompt(tokenizer.encode("a", add_special_tokens=False), "s")) == expected
    assert names(tokenizer, infill.ends) == ends


def test_other_files_come_first_and_are_cut_to_the_room() -> None:
    tokenizer = with_tokens(made.byte_level(), *QWEN, "<|file_sep|>")
    infill = Infill.of(tokenizer)
    assert infill is not None
    before, end = tokenizer.encode("a", add_special_tokens=False), made_names(tokenizer, "\n")
    files = infill.file(tokenizer.encode("b", add_special_tokens=False))
    gap = [QWEN[0], "a", QWEN[1], "s", QWEN[2]]
    assert names(tokenizer, infill.prompt(before, "s", files)) == ["<|file_sep|>", "b", *end, "<|file_sep|>", *gap]
    assert names(tokenizer, infill.prompt(before, "s", files, most=8)) == ["b", *end, "<|file_sep|>", *gap]
    assert names(tokenizer, infill.prompt(before, "s", files, most=6)) == gap
    plain = Infill.of(with_tokens(made.byte_level(), *QWEN))
    assert plain is not None
    assert names(tokenizer, plain.prompt(before, "s", plain.file([*before])))[:3] == ["a", *end, QWEN[0]]


def made_names(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return names(tokenizer, tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("tokens", [[], QWEN[:2], ["[PREFIX]"]])
def test_a_vocabulary_without_the_tokens(tokens: list[str]) -> None:
    assert Infill.of(with_tokens(made.byte_level(), *tokens)) is None


async def prompts_of(tokenizer: Tokenizer, **fields: Any) -> list[Any]:
    prompts = PromptRenderer(tokenizer, None, 64)
    return await prompts.of_completion(CompletionBody(**fields), SamplingParams(), REQUEST)


async def test_texts_and_token_ids_get_a_suffix() -> None:
    tokenizer = with_tokens(made.byte_level(), *QWEN)
    (one,) = await prompts_of(tokenizer, prompt="a", suffix="the")
    assert names(tokenizer, one) == [QWEN[0], "a", QWEN[1], "the", QWEN[2]]
    assert await prompts_of(tokenizer, prompt=["a", "a"], suffix="the") == [one, one]
    assert await prompts_of(tokenizer, prompt=tokenizer.encode("a"), suffix="the") == [one]
    assert await prompts_of(tokenizer, prompt="a", suffix="") == ["a"]


@pytest.mark.parametrize(
    ("fields", "tokens", "message"),
    [
        ({"suffix": "the"}, [], "no token for it"),
        ({"suffix": "the", "echo": True}, QWEN, "echo shows a prompt"),
        ({"suffix": "x" * 600_000}, QWEN, "context length is 64 tokens"),
    ],
)
async def test_invalid_requests_are_refused(fields: dict[str, Any], tokens: list[str], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        await prompts_of(with_tokens(made.byte_level(), *tokens), prompt="a", **fields)
