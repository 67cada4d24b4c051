"""System messages without headers and counts that differ from request to request."""

import pytest

from vllm_lite.server.openai.bodies import ChatMessage, Part
from vllm_lite.server.openai.steady import steady, steady_message

HEADER = "x-anthropic-billing-header: cc_version=2.1.197.38b; cc_entrypoint=sdk-cli; cch=0a1b2;"
LEFT = "<total_tokens>199321 tokens left</total_tokens>"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("You are kind.", "You are kind."),
        (HEADER, ""),
        (HEADER + "\nYou are kind.\n", "You are kind.\n"),
        (HEADER + "\nmode=kind;", "mode=kind;"),
        (HEADER + " You are kind; be=brief.", "You are kind; be=brief."),
        (HEADER.removesuffix(";") + "\n\nmode=kind;", "mode=kind;"),
        ("  X-Anthropic-Billing-Header: cch=1;\r\nYou are kind.", "You are kind."),
        ("x-anthropic-billing-header: You are kind.", "You are kind."),
        ("Say x-anthropic-billing-header: a=b; aloud.", "Say x-anthropic-billing-header: a=b; aloud."),
        (f"A\n{LEFT}\nB", "A\nB"),
        (f"A\n\n  {LEFT} \r\n", "A\n\n"),
        (f"{HEADER}\n{LEFT}\nA", "A"),
        (LEFT, ""),
        ("<total_tokens>1_000,5 tokens left</total_tokens>\nA", "A"),
        (f"A {LEFT}", f"A {LEFT}"),
        (f"{LEFT} are many", f"{LEFT} are many"),
        ("<total_tokens>many tokens left</total_tokens>", "<total_tokens>many tokens left</total_tokens>"),
        ("", ""),
    ],
)
def test_only_the_header_and_lines_of_counts_go(given: str, expected: str) -> None:
    assert steady(given) == expected
    assert steady(expected) == expected


def test_parts_and_messages_that_say_nothing_else_go() -> None:
    for role in ("system", "developer"):
        parts: list[str | Part] = [Part("text", HEADER), LEFT, Part("text", f"A\n{LEFT}"), "B"]
        assert steady_message(ChatMessage(role, parts)) == ChatMessage(role, [Part("text", "A"), "B"])
        assert steady_message(ChatMessage(role, [Part("text", LEFT)])) is None
        assert steady_message(ChatMessage(role, f"{LEFT}\n")) is None
        for empty in (ChatMessage(role, ""), ChatMessage(role, [Part("text", "")]), ChatMessage(role, [])):
            assert steady_message(empty) == empty


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "function"])
def test_messages_of_other_roles_are_not_changed(role: str) -> None:
    parts: list[str | Part] = [Part("text", HEADER), LEFT]
    for content in (HEADER, LEFT, parts):
        message = ChatMessage(role, content)
        assert steady_message(message) is message
