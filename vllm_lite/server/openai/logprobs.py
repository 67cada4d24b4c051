"""Log-probabilities in answers: OpenAI's parallel lists for completions and objects for chats, vLLM's for token ids."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from vllm_lite.client.outputs import Logprob
from vllm_lite.client.text.detokenizer import ByteVocabulary, PieceVocabulary, TokenTexts, vocabulary
from vllm_lite.client.text.tokenizer import Tokenizer

LEAST = -9999.0
"""Replaces minus infinity, which JSON does not have."""

ALL = 2**31
"""A `top` larger than any number of candidates."""

Candidates = dict[int, Logprob]
"""Candidates of one token by id; the sampled token is first."""


class Spelling:
    """Text and bytes of single tokens. A token that is a part of a character has the text "bytes:\\xc3". `by_id` has
    the text "token_id:17" for all."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.by_id = SpellingById(self)
        self._vocabulary: TokenTexts | None = None if tokenizer is None else vocabulary(tokenizer)
        self._known: dict[int, tuple[str, bytes]] = {}

    def of(self, token_id: int) -> tuple[str, bytes]:
        """Text and bytes of a token in the middle of a text."""
        known = self._known.get(token_id)
        if known is None:
            data = self._bytes(token_id)
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            known = self._known[token_id] = text, data
        return known

    def _bytes(self, token_id: int) -> bytes:
        words = self._vocabulary
        if isinstance(words, ByteVocabulary):
            return words.bytes_of(token_id)
        if isinstance(words, PieceVocabulary):
            byte = words.byte_ids.get(token_id)
            return words.later_text([token_id]).encode() if byte is None else bytes([byte])
        return _named(token_id).encode()


class SpellingById:
    """The same bytes, with ids in place of texts, which need not be unique."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling

    def of(self, token_id: int) -> tuple[str, bytes]:
        return _named(token_id), self._spelling.of(token_id)[1]


AnySpelling = Spelling | SpellingById


def _named(token_id: int) -> str:
    return f"token_id:{token_id}"


class Offsets:
    """Computes the offset of each token of a choice in its text, in characters."""

    def __init__(self, start: int) -> None:
        self.place = start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, data: bytes) -> int:
        """Return the offset of the next token, whose bytes are `data`."""
        place = self.place
        self.place += len(self._utf8.decode(data))
        return place


def of_chat(entries: Sequence[Candidates], top: int, spelling: AnySpelling) -> dict[str, Any]:
    """The `choices[].logprobs` of a chat, with the `top` likeliest candidates of each token."""
    return {"content": [_chat_token(candidates, top, spelling) for candidates in entries], "refusal": None}


def _chat_token(candidates: Candidates, top: int, spelling: AnySpelling) -> msgspec.Raw:
    """Encode one token, so that its Python objects exist for one token at a time."""
    token_id = next(iter(candidates))
    return _encoded(
        {
            **candidate(token_id, candidates[token_id], spelling),
            "top_logprobs": [candidate(other, found, spelling) for other, found in likeliest(candidates, top)],
        }
    )


def of_token_ids(entries: Sequence[Candidates]) -> dict[str, Any]:
    """The `choices[].logprobs` with token ids, in vLLM's format: all candidates, the sampled token first."""
    return {"content": [_encoded(_with_candidates(candidates)) for candidates in entries]}


def _with_candidates(candidates: Candidates) -> dict[str, Any]:
    scored = [
        {"token_id": token_id, "logprob": _finite(found.logprob), "rank": found.rank}
        for token_id, found in candidates.items()
    ]
    return {**scored[0], "top_logprobs": scored}


def likeliest(candidates: Candidates, top: int) -> list[tuple[int, Logprob]]:
    """Return the `top` likeliest candidates of a token, best first."""
    return sorted((item for item in candidates.items() if item[1].rank <= top), key=lambda item: item[1].rank)


def candidate(token_id: int, found: Logprob, spelling: AnySpelling) -> dict[str, Any]:
    """Fields of one candidate, with its text and bytes."""
    text, data = spelling.of(token_id)
    return {"token": text, "logprob": _finite(found.logprob), "bytes": list(data)}


def of_completion(
    token_ids: Sequence[int], entries: Iterable[Candidates | None], offsets: Offsets, spelling: AnySpelling
) -> dict[str, list[Any]]:
    """The `choices[].logprobs` of a completion or of its prompt, whose first token has none; `offsets` continue from
    chunk to chunk."""
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, candidates in zip(token_ids, entries, strict=False):
        text, data = spelling.of(token_id)
        found["tokens"].append(text)
        found["text_offset"].append(offsets.next(data))
        if candidates is None:
            found["token_logprobs"].append(None)
            found["top_logprobs"].append(None)
            continue
        found["token_logprobs"].append(_finite(candidates[token_id].logprob))
        found["top_logprobs"].append({spelling.of(other)[0]: _finite(it.logprob) for other, it in candidates.items()})
    return found


def as_objects(entries: Iterable[Candidates | None] | None) -> list[msgspec.Raw | None] | None:
    """The `prompt_logprobs` in vLLM's format, by token id, each encoded."""
    return None if entries is None else [None if candidates is None else _by_id(candidates) for candidates in entries]


def _by_id(candidates: Candidates) -> msgspec.Raw:
    objects = {
        str(token_id): {"logprob": _finite(it.logprob), "rank": it.rank, "decoded_token": it.decoded_token}
        for token_id, it in candidates.items()
    }
    return _encoded(objects)


def _encoded(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
