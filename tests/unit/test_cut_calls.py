"""Calls that are cut in their arguments: no dialect says that the answer ends in a call, and why it ended is honest."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.groupings import Case, Item, chat, chat_whole, messages, messages_whole, ollama, ollama_whole, responses, rig
from tests.response_transcripts import WRITERS

PARIS: Any = ("get_weather", {"city": "Paris"})
REASONS = {"stop": ("stop", "end_turn"), "length": ("length", "max_tokens")}
"""The engine's finish reason -> those of chats and of Ollama, and of messages."""


def case(name: str, text: str, reason: str = "stop", **fields: Any) -> tuple[Case, list[int]]:
    """An output, and a way to group its tokens."""
    ids = rig(name).tokenizer.encode(text, add_special_tokens=False)
    rng = random.Random(text)
    return Case(name, ids, reason, **fields), sorted(rng.sample(range(1, len(ids)), min(5, len(ids) - 1)))


Answers = dict[Callable[..., list[Item]], list[Item]]
"""Items by the function that makes them."""


def answers(*how: Any) -> Answers:
    return {write: write(*how) for write in (chat, chat_whole, messages, messages_whole, ollama, ollama_whole)}


def ends(made: Answers) -> tuple[Any, ...]:
    """Endings of the answers of each dialect: a chat, a message with its stop sequence, Ollama's."""
    assert made[chat][-1][1] == made[chat_whole][-1][1]
    assert made[messages][-1] == made[messages_whole][-1]
    assert made[ollama][-1][1] == made[ollama_whole][-1][1]
    return made[chat][-1][1], *made[messages][-1][1:], made[ollama][-1][1]


def calls(items: list[Item]) -> list[Item]:
    return [item for item in items if item[0] == "call"]


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_call_that_the_end_cuts(name: str, reason: str) -> None:
    """Wherever the call is cut: where its arguments are not whole, it is no reason to stop."""
    text = WRITERS[name].calls([PARIS])
    ids = case(name, text)[0].ids
    seen = set()
    for count in range(1, len(ids) + 1, 3 if reason == "stop" else 7):
        how = Case(name, ids[:count], reason), [count // 2] if count > 1 else []
        made = answers(*how)
        item = next(iter(calls(responses(*how))), None)
        whole = calls(made[messages_whole])
        is_whole = item is not None and item[3] == "completed"
        expected, of_message = REASONS[reason]
        if reason == "stop" and is_whole:
            expected, of_message = "tool_calls", "tool_use"
        assert ends(made) == (expected, of_message, None, reason)
        assert bool(whole) is (item is not None and item[2].endswith("}"))
        assert calls(made[ollama]) == calls(made[ollama_whole]) == [each[:3] for each in whole]
        assert reason == "length" or is_whole is bool(whole)
        seen.add(None if item is None else item[3])
    assert seen >= ({None, "incomplete"} if name not in ("pythonic", "lfm2", "functiongemma", "minimax_m3") else {None})


def test_a_call_that_a_stop_string_cuts() -> None:
    text = f"I look.\n{WRITERS['hermes'].calls([PARIS])}"
    how = case("hermes", text, stop="ris")
    assert ends(answers(*how)) == ("stop", "stop_sequence", "ris", "stop")
    assert [item[0] for item in messages_whole(*how)] == ["text", "end"]
    assert calls(chat(*how)) == [("call", "get_weather", '{"city": "Pa')], "what was streamed stays"
    assert calls(chat_whole(*how)) == calls(chat(*how))
    assert calls(responses(*how)) == [("call", "get_weather", '{"city": "Pa', "incomplete")]
    assert calls(ollama(*how)) == []
    whole = case("hermes", text, stop="</tool")
    assert ends(answers(*whole)) == ("tool_calls", "tool_use", None, "stop")


def test_the_last_call_counts() -> None:
    one = WRITERS["hermes"].calls([PARIS])
    cut_last = case("hermes", f"{one}\n{one[: one.index('aris')]}")
    assert ends(answers(*cut_last)) == ("stop", "end_turn", None, "stop")
    assert [item[3] for item in calls(responses(*cut_last))] == ["completed", "incomplete"]
    cut_first = case("hermes", f"{one.replace('Paris', chr(92) + 'x')}\n{one}")
    assert ends(answers(*cut_first)) == ("tool_calls", "tool_use", None, "stop")
    assert [item[3] for item in calls(responses(*cut_first))] == ["incomplete", "completed"]


def test_a_call_cut_within_its_first_argument_is_dropped() -> None:
    """The call's name was sent, and none of its arguments. This must not become a call without arguments."""
    how = case("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=ci")
    assert ends(answers(*how)) == ("stop", "end_turn", None, "stop")
    assert calls(messages_whole(*how)) == calls(ollama(*how)) == []


def test_half_a_surrogate_pair_is_no_cut() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"text": "a\\ud83d", "b": "\\ud83d\\ude00"}}</tool_call>'
    how = case("hermes", text)
    assert ends(answers(*how)) == ("tool_calls", "tool_use", None, "stop")
    (call,) = calls(messages_whole(*how))
    assert call[2] == '{"text": "a\\ufffd", "b": "\\ud83d\\ude00"}'
