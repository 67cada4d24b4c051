"""Parts that a template leaves out of a prompt are found, named by their places, and not looked for twice."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_message_forms import ANSWER, CALL, DROPS, ECHO, EITHER, FIRST_ONLY, LAST_WINS, SYSTEM, USER, said
from vllm_lite.client.chat import rendered as rendered_in_python
from vllm_lite.client.text.templates import left_out
from vllm_lite.client.text.templates.chat_template import ChatTemplate, Rendering
from vllm_lite.client.text.templates.left_out import LeftOut, LeftOutFinder, described
from vllm_lite.client.text.templates.template_source import TemplateSource

CALLING: dict[str, Any] = {"role": "assistant", "content": "I shall look.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "A fox sits there.", "tool_call_id": "call00001", "name": "look"}
FUNCTION = {"role": "function", "content": "7", "name": "look"}

EACH = "{% for message in messages %}"
CALLS = "{% for call in message.tool_calls %}({{ call.function.name }}){% endfor %}"
WITH_CALLS = DROPS.replace("{{ message.content }}", "{{ message.content }}" + CALLS)
CALLS_OR_TEXT = EACH + "{% if message.tool_calls %}" + CALLS + "{% else %}{{ message.content }}{% endif %}{% endfor %}"
ONE_CALL = ECHO.replace("{% endfor %}", "{{ message.tool_calls[0].function.name if message.tool_calls }}{% endfor %}")
CALLS_FIRST = EACH + CALLS + "{{ message.content }}{% endfor %}"
ESCAPED = EACH + "{{ message.content | tojson }}{% endfor %}"
UPPER = EACH + "{{ message.content | upper }}{% endfor %}"
NO_THOUGHTS = EACH + "{{ message.content.split('</think>')[-1] }}{% endfor %}"
BEFORE_THE_LAST = """{% for message in messages if message.role != 'system' %}
{%- if loop.last and messages[0].role == 'system' and message.role == 'user' %}{{ messages[0].content }}{% endif %}
{%- if message.role in ['user', 'assistant', 'tool'] %}<{{ message.role }}>{{ message.content }}{% endif %}
{%- for call in message.tool_calls %}({{ call.function.name }}){% endfor %}{% endfor %}"""
LAST_FOUR = EACH + "{% if loop.revindex <= 4 %}<{{ message.role }}>{{ message.content }}{% endif %}{% endfor %}"
SYSTEM_PART = EITHER.replace("{% if", "{% if message.role == 'system' %}{{ message.content[0].text }}{% elif", 1)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(TemplateSource(source))


def found(source: str, *messages: Any, **more: Any) -> list[tuple[int, str]]:
    return list(template(source).rendering(messages, **more).left_out)


def several_calls(*names: str) -> dict[str, Any]:
    calls = [{"id": f"c{name}", "type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize(
    ("source", "chat", "places"),
    [
        (DROPS, [SYSTEM, USER, ANSWER, RESULT], []),
        (DROPS, [USER, FUNCTION, USER, FUNCTION], [(1, ""), (3, "")]),
        (FIRST_ONLY, [SYSTEM, USER, ANSWER, SYSTEM, USER], [(3, "")]),
        (LAST_WINS, [SYSTEM, USER, ANSWER, SYSTEM, USER], [(0, "")]),
        (DROPS, [USER, CALLING, RESULT], [(1, "tool_calls")]),
        (DROPS, [USER, {**CALLING, "content": ""}, RESULT], [(1, "")]),
        (WITH_CALLS, [USER, CALLING, RESULT], []),
        (CALLS_OR_TEXT, [USER, CALLING, RESULT], [(1, "content")]),
        (CALLS_FIRST, [USER, CALLING, RESULT], []),
        (ONE_CALL, [USER, several_calls("look", "wait")], [(1, "tool_calls")]),
        (ESCAPED, [USER, {**USER, "content": 'a "quoted"\nword'}], []),
        (UPPER, [USER, ANSWER], []),
        (NO_THOUGHTS, [USER, {**ANSWER, "content": "<think>\nhm\n</think>\n\nSo."}], []),
        (EITHER, [said("one", "two"), ANSWER, said("three")], []),
        (BEFORE_THE_LAST, [SYSTEM, USER], []),
        (BEFORE_THE_LAST, [SYSTEM, USER, CALLING, RESULT], [(0, "")]),
        (LAST_FOUR, [USER, ANSWER] * 3, [(0, ""), (1, "")]),
        ("nothing", [USER], [(0, "")]),
    ],
)
def test_messages_left_out_are_named(source: str, chat: list[Any], places: list[tuple[int, str]]) -> None:
    one = template(source)
    for _ in range(3):  # the first time by marks, then by what is known
        assert list(one.rendering(chat).left_out) == places


@pytest.mark.parametrize("content", ["", " \n", [], [{"type": "text", "text": " "}]])
def test_a_blank_message_is_not_missed(content: Any) -> None:
    assert found(DROPS, USER, {**FUNCTION, "content": content}) == []
    assert found(DROPS, USER, FUNCTION) == [(1, "")]


def test_thoughts_are_not_missed() -> None:
    assert found(DROPS, USER, {**ANSWER, "reasoning_content": "a long thought, of many words"}, USER) == []


def test_parts_that_a_template_drops_are_given_as_one_text() -> None:
    chat = [said("one", "two", role="system"), said("three", "four")]
    made = template(SYSTEM_PART).rendering(chat)
    assert (made.left_out, "one\ntwo" in made.text) == ((), True)


def test_a_left_out_text_that_also_occurs_elsewhere_is_not_found() -> None:
    """The text left out, "7", is in the user's next message as well, so the rendering does not lack it."""
    chat = [USER, FUNCTION, {**USER, "content": "Is it 7? If 7, why 7?"}]
    one = template(DROPS)
    for _ in range(2):
        assert one.rendering(chat).left_out == ((1, ""),)


def test_a_message_known_to_be_left_out_is_looked_for_if_its_text_occurs() -> None:
    """The marks say the same again, as they have no words for a template to go by."""
    source = EACH + "{% if message.role != 'function' or 'show' in messages[0].content %}{{ message.content }}"
    one = template(source + "{% endif %}{% endfor %}")
    long = {**FUNCTION, "content": "a result of many words, all of them long"}
    assert one.rendering([USER, long, USER]).left_out == ((1, ""),)
    shown = {**USER, "content": "Please show it."}
    assert "a result of many words" in one.rendering([shown, long, USER]).text
    renderings = one.plain.finder.num_renderings
    assert one.rendering([shown, long, USER]).left_out == ((1, ""),)
    assert one.plain.finder.num_renderings > renderings


def test_the_last_role_is_part_of_the_context() -> None:
    """The template writes the system's message before the last of the user, and not where the assistant has that."""
    one, chat = template(BEFORE_THE_LAST), [SYSTEM, *([USER, ANSWER] * 2)]
    for _ in range(2):
        assert one.rendering([*chat, USER]).left_out == ()
        assert one.rendering(chat).left_out == ((0, ""),)


def test_marks_that_a_template_refuses_are_no_verdict() -> None:
    source = EACH + "{% if message.content.startswith('qz') %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    assert found(source, USER) == []


def test_a_continued_message_is_there() -> None:
    settings: Any = {"continue_final_message": True, "add_generation_prompt": False}
    assert found(DROPS, USER, FUNCTION, ANSWER, **settings) == [(1, "")]


# ---- costs


class Counting:
    """Counts how often a template is rendered."""

    def __init__(self, source: str) -> None:
        self.template = template(source)
        self.count = 0
        variant = self.template.plain
        render = variant._render

        def counted(*args: Any, **more: Any) -> str:
            self.count += 1
            return render(*args, **more)

        variant._render = counted  # type: ignore[method-assign]

    def __call__(self, chat: Sequence[Any]) -> int:
        """The number of renderings for `chat`."""
        before = self.count
        self.template.rendering(chat)
        return self.count - before


@pytest.mark.parametrize("source", [WITH_CALLS, CALLS_OR_TEXT, CALLS_FIRST], ids=["all", "no text", "calls first"])
def test_a_chat_that_grows_is_rendered_once_each_time(source: str) -> None:
    """A chat that has grown is rendered once, even if a part of it is left out each time."""
    render, chat = Counting(source), [SYSTEM, USER]
    counts = []
    for turn in range(12):
        text = f"{turn} words of some length, which the tool has answered"
        chat = [*chat, {**CALLING, "content": f"I look for the time no. {turn}."}, {**RESULT, "content": text}]
        counts.append(render(chat))
    assert counts[0] == 2, "the marks, once"
    assert counts[4:] == [1] * 8
    assert render([USER]) == 2
    assert [render([{**USER, "content": text}]) for text in ("Hi", "x" * 100_000, "好")] == [1, 1, 1]


def test_other_settings_are_other_prompts() -> None:
    one = template("{% if not quiet %}" + ECHO + "{% endif %}")
    for _ in range(2):
        assert one.rendering([USER]).left_out == ()
        assert one.rendering([USER], variables={"quiet": True}).left_out == ((0, ""),)


def test_a_rendering_that_took_long_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_lite.client.text.templates.chat_template.MAX_LOOKED_AT_S", -1.0)
    assert found(DROPS, USER, FUNCTION) == []


def test_remembered_contexts_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_out, "MAX_CONTEXTS", 16)
    one = template(DROPS)
    for count in range(1, 40):
        chat = [USER, FUNCTION] * count
        assert len(one.rendering(chat, variables={"number": count}).left_out) == min(count, left_out.MAX_LEFT_OUT)
        assert len(one.plain.finder._known) <= 16


def test_named_messages_are_limited() -> None:
    places = found(DROPS, *([FUNCTION] * 1000))
    assert len(places) == left_out.MAX_LEFT_OUT
    text = described([LeftOut(place) for place, _ in places])
    assert text.startswith("messages[0], messages[1], ")
    assert "messages[7] and others are not in the prompt" in text


def test_the_warning_names_the_messages_left_out() -> None:
    assert described([LeftOut(1)]) == "messages[1] is not in the prompt: the model's chat template leaves it out"
    several = described([LeftOut(1, "content"), LeftOut(3, "tool_calls")])
    assert several.startswith("messages[1].content and messages[3].tool_calls are not in the prompt: the model's chat ")
    assert several.endswith(" leaves them out")
    assert described([LeftOut(0)], "input {}".format).startswith("input 0 is not in the prompt")


def test_python_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm_lite"):
        assert rendered_in_python(template(DROPS), [USER]) == "<user>Who is there?"
        assert caplog.text == ""
        rendered_in_python(template(DROPS), [USER, FUNCTION])
    assert "messages[1] is not in the prompt" in caplog.text


# ---- remembered results equal those of marks


TEXTS = st.sampled_from(["ok", "5", "a text of more words than five", '{"x": "a\\nb"}', "line\nanother line", " "])


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = [{"role": "system", "content": draw(TEXTS)} for _ in range(draw(st.integers(0, 2)))]
    for place in range(draw(st.integers(1, 4))):
        chat.append({"role": "user", "content": draw(TEXTS)})
        if draw(st.booleans()):
            chat.append({"role": draw(st.sampled_from(["system", "developer", "function"])), "content": draw(TEXTS)})
        if draw(st.booleans()):
            call = {**CALL, "id": f"call{place:05d}"}
            chat.append({"role": "assistant", "content": draw(TEXTS), "tool_calls": [call]})
            chat.append({"role": "tool", "content": draw(TEXTS), "tool_call_id": call["id"]})
        chat.append({"role": "assistant", "content": draw(TEXTS)})
    return chat


KINDS = [DROPS, FIRST_ONLY, LAST_WINS, WITH_CALLS, CALLS_OR_TEXT, CALLS_FIRST, ESCAPED, NO_THOUGHTS, BEFORE_THE_LAST]


@given(source=st.sampled_from(KINDS), several=st.lists(chats(), min_size=2, max_size=12))
@settings(max_examples=60)
def test_remembered_results_agree_with_marks(source: str, several: list[list[dict[str, Any]]]) -> None:
    one = template(source)
    for chat in several:
        made: Rendering = one.rendering(chat)
        variant = one.plain
        known, variant.finder = variant.finder, LeftOutFinder()
        given_settings = {"tools": None, "add_generation_prompt": True}
        assert made.left_out == variant.left_out(chat, made.text, given_settings)
        variant.finder = known
