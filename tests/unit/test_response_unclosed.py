"""Reasoning that nothing closes: complete calls at its end are calls, and everything else stays reasoning."""

import json
import random
from typing import Any

import pytest

from tests.response_transcripts import TOOLS, WRITERS, Message, ids_of, pieces_of, read
from vllm_lite.client.text.response import parser as parser_module
from vllm_lite.client.text.response import shipped
from vllm_lite.client.text.response.events import ReasoningDelta
from vllm_lite.client.text.response.parser import ResponseParser
from vllm_lite.client.text.response.template import Format

# A call of Muse Glimmer begins in the header of a message, which reasoning that nothing closes does not reach.
THINKING = [name for name, writer in WRITERS.items() if writer.think is not None and name != "muse_glimmer"]
PARIS: Any = ("get_weather", {"city": "Paris"})
NOW: Any = ("now", {})
PARIS_CALL, NOW_CALL = ["get_weather", {"city": "Paris"}], ["now", {}]


def formed(name: str) -> tuple[Format, dict[str, int], str]:
    """A format, the ids of its tokens, and reasoning that was begun."""
    writer = WRITERS[name]
    ids = ids_of(writer.tokens)
    assert writer.think is not None
    thought = writer.think("Let me see.")
    begun = thought[: thought.index("see.") + 4]
    return shipped.compose(*writer.names, ids, ids.values() if writer.special else ()), ids, begun


def message(name: str, text: str, **options: Any) -> Message:
    """Read `text` in several cuts, which have to agree."""
    response_format, ids, _ = formed(name)
    found = read(response_format, pieces_of(text, ids), **options)
    for most in (1, 3, 20):
        assert read(response_format, pieces_of(text, ids, random.Random(most), most), **options) == found
    return found


def called(found: Message) -> list[list[Any]]:
    return [[name, json.loads(arguments)] for name, arguments in found.calls]


@pytest.mark.parametrize("name", THINKING)
def test_calls_at_the_end_are_calls(name: str) -> None:
    _, _, begun = formed(name)
    calls = WRITERS[name].calls
    for text, expected in [
        (f"{begun}\n\n{calls([PARIS])}", [PARIS_CALL]),
        (f"{begun}{calls([PARIS])}\n", [PARIS_CALL]),
        (f"{begun}\n{calls([PARIS, NOW])}", [PARIS_CALL, NOW_CALL]),
    ]:
        found = message(name, text)
        assert (found.reasoning, found.content, called(found)) == ("Let me see.", "", expected)
        assert [kind for kind, _ in found.order] == ["reasoning", *["call"] * len(expected)]


@pytest.mark.parametrize("name", THINKING)
def test_nothing_else_is_a_call(name: str) -> None:
    _, _, begun = formed(name)
    writer = WRITERS[name]
    assert writer.think is not None
    one = writer.calls([PARIS])
    for text in [
        f"{begun} {one} Or not?",
        f"{begun} {one[: len(one) * 2 // 3]}",
        f"{begun} {one[: one.index('Paris') + 5]}",
        f"{begun} {writer.calls([('no_such_tool', {})])}",
        f"{begun} {one}{writer.calls([('no_such_tool', {})])}",
    ]:
        found = message(name, text)
        assert (found.content, found.calls) == ("", []), text
        assert found.reasoning.startswith("Let me see. ")
    found = message(name, f"{begun} {one}", tools=[])
    assert (found.content, found.calls) == ("", [])


def test_text_before_unclosed_thinking_decides_on_its_calls() -> None:
    call, think = WRITERS["hermes"].calls([PARIS]), "<think>Hm."
    assert message("hermes", f"Hello.{think} {call}").calls == []
    found = message("hermes", f"{call}{think} {call}")
    assert (called(found), found.reasoning) == ([PARIS_CALL], f"Hm. {call}")
    found = message("hermes", f"<think>A</think>{think}{call}")
    assert (called(found), found.reasoning) == ([PARIS_CALL], "AHm.")
    assert message("hermes", f"{think} {call}</think>").calls == [], "it was closed"
    assert message("hermes", f"{think} {call}</think>{call}").reasoning == f"Hm. {call}"


def test_reasoning_that_the_prompt_began() -> None:
    call = WRITERS["hermes"].calls([PARIS])
    found = message("hermes", f"Hm.\n{call}", prefix="<|im_start|>assistant\n<think>\n")
    assert (found.reasoning, called(found)) == ("Hm.", [PARIS_CALL])
    found = message("hermes", " more.", prefix=f"<|im_start|>assistant\n<think>{call}")
    assert (found.reasoning, found.calls) == (" more.", []), "that of the prompt is none of this output"
    found = message("deepseek_v31", WRITERS["deepseek_v31"].calls([NOW]), prefix="<think>")
    assert (found.reasoning, called(found)) == ("", [NOW_CALL])


def test_a_call_behind_some_that_are_none() -> None:
    call = WRITERS["hermes"].calls([PARIS])
    talk = "I could write <tool_call> and {, or <tool_call>\n{no}</tool_call>."
    found = message("hermes", f"<think>{talk} So:{call}")
    assert (found.reasoning, called(found)) == (f"{talk} So:", [PARIS_CALL])
    found = message("hermes", f"<think>{call} No. {call}")
    assert (found.reasoning, called(found)) == (f"{call} No.", [PARIS_CALL])


def streamed(text: str) -> tuple[list[str], str]:
    """The deltas of reasoning when the text arrives letter by letter, and those at the end."""
    response_format, ids, _ = formed("hermes")
    parser = ResponseParser(response_format, "", TOOLS)
    events = [event for piece in pieces_of(text, ids, random.Random(1), 1) for event in parser.feed([piece])]
    ends = parser.finish()
    assert all(isinstance(event, ReasoningDelta) for event in [*events, *ends])
    return [event.text for event in events if isinstance(event, ReasoningDelta)], "".join(
        event.text for event in ends if isinstance(event, ReasoningDelta)
    )


def test_reasoning_streams_again_as_soon_as_it_is_no_call() -> None:
    sent, rest = streamed("<think>A <tool_call> is written so: <tool_call>{} and so on")
    assert (sent[-1], rest) == ("n", "")
    sent, rest = streamed('<think>A <tool_call>{"name": "now", "argum')
    assert "".join(sent) == "A"
    assert rest == ' <tool_call>{"name": "now", "argum'


def test_the_length_of_the_held_back_tail_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    call = WRITERS["hermes"].calls([("files.write-all", {"text": "x" * 300})])
    assert len(message("hermes", f"<think>A{call}").calls) == 1
    monkeypatch.setattr(parser_module, "MAX_TAIL_CHARS", 200)
    found = message("hermes", f"<think>A{call}{WRITERS['hermes'].calls([NOW])}")
    assert (found.reasoning, found.calls) == (f"A{call}{WRITERS['hermes'].calls([NOW])}", [])
    sent, _ = streamed(f"<think>A{call}")
    assert len("".join(sent)) > 200
    short = WRITERS["hermes"].calls([NOW])
    monkeypatch.setattr(parser_module, "MAX_TAILS", 3)
    assert len(message("hermes", f"<think>{'<tool_call>' * 2}{short}").calls) == 1
    assert message("hermes", f"<think>{'<tool_call>' * 3}{short}").calls == []


def test_the_end_does_not_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many calls that are never closed could be tried there, with all text behind it."""
    tried = []

    class Counted(parser_module.Tail):
        def finish(self) -> list[tuple[str, str]] | None:
            tried.append(self.text)
            return super().finish()

    monkeypatch.setattr(parser_module, "Tail", Counted)
    text = "<tool_call>\n<function=now>\n<parameter=text>x" * 10
    response_format, ids, _ = formed("qwen3_coder")
    found = read(response_format, pieces_of(f"<think>{text}", ids))
    assert (found.reasoning, found.calls) == (text, [])
    assert len(tried) == parser_module.MAX_TAILS_AT_END
