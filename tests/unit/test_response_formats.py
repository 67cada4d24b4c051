"""Every shipped format: its models' output is parsed to the same message, however it is divided into deltas."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.response_transcripts import MESSAGES, TOOLS, WRITERS, Message, ids_of, pieces_of, read
from vllm_lite.client.text.response import shipped
from vllm_lite.client.text.response.events import CallDelta
from vllm_lite.client.text.response.parser import ResponseParser
from vllm_lite.client.text.response.template import Format

NUM_CHUNKINGS = 6


@cache
def format_of(name: str) -> tuple[Format, dict[str, int]]:
    writer = WRITERS[name]
    ids = ids_of(writer.tokens)
    return shipped.compose(*writer.names, ids, ids.values() if writer.special else ()), ids


def expected(message: list[tuple[str, Any]]) -> tuple[str, str, list[tuple[str, Any]]]:
    def joined(kind: str) -> str:
        return "".join(value for part, value in message if part == kind).strip()

    return joined("think"), joined("text"), [call for kind, value in message if kind == "calls" for call in value]


def plain(message: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    return message.reasoning, message.content, [(name, json.loads(text)) for name, text in message.calls]


CASES = [
    pytest.param(name, title, text, id=f"{name}-{title}")
    for name, writer in WRITERS.items()
    for title, message in MESSAGES.items()
    if (text := writer.write(message)) is not None
]


@pytest.mark.parametrize(("name", "title", "text"), CASES)
def test_the_message_is_the_same_however_it_is_cut(name: str, title: str, text: str) -> None:
    response_format, ids = format_of(name)
    rng = random.Random(f"{name} {title}")
    whole = read(response_format, pieces_of(text, ids))
    assert plain(whole) == expected(MESSAGES[title])
    for most in [1, *[rng.choice([2, 3, 5, 8, 40]) for _ in range(NUM_CHUNKINGS)]]:
        assert read(response_format, pieces_of(text, ids, rng, most)) == whole


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("title", ["reasoning, text, calls", "parallel", "unicode call"])
def test_truncated_output_is_closed_as_it_is(name: str, title: str) -> None:
    """Truncated anywhere, an output causes no error, its arguments are a prefix of the complete ones, and all divisions
    agree."""
    text = WRITERS[name].write(MESSAGES[title])
    if text is None:
        pytest.skip("the format has no reasoning")
    response_format, ids = format_of(name)
    complete = read(response_format, pieces_of(text, ids))
    pieces = pieces_of(text, ids, random.Random(7), 4)
    for end in range(0, len(pieces), 2):
        cut = read(response_format, pieces[:end])
        joined = "".join(piece.text for piece in pieces[:end])
        assert cut == read(response_format, pieces_of(joined, ids))
        both = sorted([cut.reasoning, complete.reasoning], key=len)  # the beginning of a literal in text is text
        assert both[1].startswith(both[0])
        assert len(cut.calls) <= len(complete.calls)
        for (called, arguments), (name_of_all, all_arguments) in zip(cut.calls, complete.calls, strict=False):
            assert called == name_of_all
            assert all_arguments.startswith(arguments)


def test_arguments_stream() -> None:
    """A long string is streamed in many deltas, not sent at the end of its call."""
    waits = {"pythonic", "lfm2", "functiongemma", "minimax_m3"}  # they send a value, or a call, when it is complete
    for name in WRITERS.keys() - waits:
        text = WRITERS[name].write(MESSAGES["long string"])
        assert text is not None
        response_format, ids = format_of(name)
        parser = ResponseParser(response_format, "", TOOLS)
        deltas = [parser.feed([piece]) for piece in pieces_of(text, ids, random.Random(1), 12)]
        assert sum(any(isinstance(event, CallDelta) for event in events) for events in deltas) > 50, name


@pytest.mark.parametrize("name", [name for name, writer in WRITERS.items() if writer.tokens])
def test_text_that_spells_a_token_is_content(name: str) -> None:
    """In formats whose calls open with a token, the same text made of other tokens is content."""
    writer = WRITERS[name]
    response_format, _ = format_of(name)
    if name in ("llama3_json", "muse_glimmer"):
        pytest.skip("calls need no token")
    if name in ("granite", "deepseek_v3", "kimi_k2", "nemotron"):
        message: list[tuple[str, Any]] = [("calls", [("now", {})])]  # their reasoning may be between texts
    else:
        message = MESSAGES["reasoning, text, calls"] if writer.think else MESSAGES["one call"]
    text = writer.write(message)
    assert text is not None
    spelled = read(response_format, pieces_of(text, {}, random.Random(3), 5))
    assert spelled.calls == []
    assert spelled.content == text.strip()


@pytest.mark.parametrize("name", WRITERS)
def test_without_tools_calls_are_content(name: str) -> None:
    text = WRITERS[name].write(MESSAGES["one call"])
    assert text is not None
    response_format, ids = format_of(name)
    message = read(response_format, pieces_of(text, ids), tools=None)
    assert message.calls == []
    assert "Paris" in message.content


# ---- the same as transformers

SAME = ("hermes", "hermes, text", "qwen3_coder", "glm45", "deepseek_v3", "deepseek_v31", "kimi_k2", "gemma4", "granite")


@pytest.mark.parametrize("name", SAME)
def test_transformers_makes_the_same_message(name: str) -> None:
    oracle = pytest.importorskip("transformers.utils.chat_parsing")
    writer = WRITERS[name]
    calls, reasoning = writer.names
    assert calls is not None
    assert reasoning is not None
    described = shipped.descriptions()
    fields: dict[str, Any] = {"content": {}, "tool_calls": described[calls].tool_calls}
    fields["thinking"] = described[reasoning].reasoning
    if described[calls].skip:
        fields["skipped"] = {**(described[calls].skip or {}), "close_pattern": "(?=.)|$", "repeats": True}
    template = {"start_anchor": "\x00", "fields": fields}
    response_format, ids = format_of(name)
    for title, message in MESSAGES.items():
        text = writer.write(message)
        if text is None or title in ("literals in a string", "unicode call", "scalars"):
            continue  # theirs ends a value at the first quote or closing literal, and reads "3" as a number
        theirs = oracle.parse_response(text, template, prefix="", tools=TOOLS)
        found = theirs.get("tool_calls", [])
        flat = [item for call in found for item in (call if isinstance(call, list) else [call])]
        theirs_plain = (
            theirs.get("thinking", ""),
            theirs.get("content", ""),
            [(call["function"]["name"], call["function"]["arguments"]) for call in flat],
        )
        ours = plain(read(response_format, pieces_of(text, ids)))
        assert ours[2] == theirs_plain[2], title
        assert ours[0] == theirs_plain[0], title
        if theirs_plain[1]:  # theirs forgets content before a region that has none
            assert ours[1] == theirs_plain[1], title


# ---- garbage


@pytest.mark.parametrize("name", WRITERS)
def test_garbage_is_the_same_however_it_is_cut(name: str) -> None:
    """Parts of real outputs in any order: all cuts agree."""
    response_format, ids = format_of(name)
    rng = random.Random(f"garbage {name}")
    texts = [text for message in MESSAGES.values() if (text := WRITERS[name].write(message))]
    for _ in range(NUM_GARBAGE):
        pieces = [piece for text in rng.sample(texts, 3) for piece in pieces_of(text, ids, rng, 12)]
        rng.shuffle(pieces)
        soup = "".join(piece.text for piece in pieces[:40])
        whole = read(response_format, pieces_of(soup, ids))
        for most in (1, 3, 9):
            assert read(response_format, pieces_of(soup, ids, rng, most)) == whole, soup


NUM_GARBAGE = 4


def test_the_table_in_the_documents_is_the_data() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tools-and-reasoning.md").read_text()
    rows = {line.split("|")[1].strip().strip("`"): line for line in page.splitlines() if line.startswith("| `")}
    described = shipped.descriptions()
    assert set(rows) == set(described)
    for name, item in described.items():
        _, _, aliases, parts, models, _ = (cell.strip() for cell in rows[name].split("|"))
        assert aliases == ", ".join(f"`{alias}`" for alias in item.aliases)
        has = {"calls": item.tool_calls, "reasoning": item.reasoning}
        assert parts == ", ".join(part for part, spec in has.items() if spec)
        assert models == item.models
