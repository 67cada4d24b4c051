"""Log-probabilities in OpenAI's format: tokens that are parts of characters, offsets, and numbers that JSON cannot
express."""

import math
from typing import Any

import msgspec
import pytest

from tests.tokenizers_for_tests import byte_fallback, byte_level
from vllm_lite.client.outputs import Logprob
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.server.openai import logprobs
from vllm_lite.server.openai.logprobs import Offsets, Spelling

TEXT = "the 🙂ł é the"


@pytest.mark.parametrize("data", [byte_level(), byte_fallback()])
def test_the_bytes_of_all_tokens_match_the_text(data: bytes) -> None:
    tokenizer = Tokenizer(data)
    spelling = Spelling(tokenizer)
    spelled = [spelling.of(token) for token in tokenizer.encode(TEXT, add_special_tokens=False)]
    assert b"".join(data for _, data in spelled).decode().lstrip() == TEXT
    for text, piece in spelled:
        try:
            assert text == piece.decode()
        except UnicodeDecodeError:
            assert text == "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
    assert any(text.startswith("bytes:") for text, _ in spelled)


def test_without_a_tokenizer_a_token_is_its_number() -> None:
    assert Spelling(None).of(7) == ("token_id:7", b"token_id:7")


def test_tokens_may_be_reported_by_id_and_keep_their_bytes() -> None:
    spelling = Spelling(Tokenizer(byte_level()))
    assert spelling.by_id.of(70) == ("token_id:70", spelling.of(70)[1])
    entries = [candidates(3, 1)]
    assert _decoded(logprobs.of_chat(entries, 1, spelling.by_id))["content"][0]["token"] == "token_id:3"
    told = logprobs.of_completion([3], entries, Offsets(0), spelling.by_id)
    assert (told["tokens"], list(told["top_logprobs"][0])) == (["token_id:3"], ["token_id:3", "token_id:1"])


def test_offsets_count_characters() -> None:
    offsets = Offsets(5)
    pieces = [b"a", "é".encode()[:1], "é".encode()[1:], b"bc", b""]
    assert [offsets.next(piece) for piece in pieces] == [5, 6, 6, 7, 9]


def candidates(*ids: int) -> dict[int, Logprob]:
    """The first is the sampled one; ranks are by id."""
    return {token: Logprob(-float(token), token, None) for token in ids}


def _decoded(told: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(told))


def test_a_chat_has_the_likeliest_in_order() -> None:
    spelling = Spelling(None)
    entries = [candidates(3, 1, 2), candidates(1, 2)]
    content = _decoded(logprobs.of_chat(entries, 2, spelling))["content"]
    assert [entry["logprob"] for entry in content] == [-3, -1]
    assert [[top["logprob"] for top in entry["top_logprobs"]] for entry in content] == [[-1, -2], [-1, -2]]
    assert [entry["top_logprobs"] for entry in _decoded(logprobs.of_chat(entries, 0, spelling))["content"]] == [[], []]


def test_a_completion_has_lists_side_by_side() -> None:
    entries = [None, candidates(3, 1), {4: Logprob(-math.inf, 9, None)}]
    found = logprobs.of_completion([5, 3, 4], entries, Offsets(0), Spelling(None))
    assert found["tokens"] == ["token_id:5", "token_id:3", "token_id:4"]
    assert found["token_logprobs"] == [None, -3.0, logprobs.LEAST]
    assert found["top_logprobs"] == [None, {"token_id:3": -3.0, "token_id:1": -1.0}, {"token_id:4": logprobs.LEAST}]
    assert found["text_offset"] == [0, 10, 20]


def test_prompt_logprobs_are_keyed_by_token_id() -> None:
    told = _decoded(logprobs.as_objects([None, candidates(2)]))
    assert told == [None, {"2": {"logprob": -2.0, "rank": 2, "decoded_token": None}}]
    assert logprobs.as_objects(None) is None
