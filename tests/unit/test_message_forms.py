"""Messages come to a template in a form that it takes: a developer's under a role that it writes, and lists of parts
where it writes the parts. What a template takes as it is given is rendered as transformers does it."""

from collections.abc import Sequence
from typing import Any

import jinja2
import pytest

from tests.checkpoints import make_checkpoint
from vllm_lite.client.text.templates import template_trials
from vllm_lite.client.text.templates.chat_template import ChatTemplate
from vllm_lite.client.text.templates.message_forms import fitted
from vllm_lite.client.text.templates.template_source import TemplateSource
from vllm_lite.client.text.templates.template_syntax import looks_into_content, names_role
from vllm_lite.errors import RequestError

USER = {"role": "user", "content": "Who is there?"}
ANSWER = {"role": "assistant", "content": "A fox."}
SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Use rhymes."}
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

EACH = "{% for message in messages %}"
ECHO = EACH + "<{{ message.role }}>{{ message.content }}{% endfor %}"
KNOWN = EACH + "{% if message.role in ['system', 'user', 'assistant', 'tool'] %}<{{ message.role }}>"
DROPS = KNOWN + "{{ message.content }}{% endif %}{% endfor %}"
REFUSES = KNOWN + "{{ message.content }}{% else %}{{ raise_exception('no ' + message.role) }}{% endif %}{% endfor %}"
NAMES = DROPS.replace("'tool']", "'tool', 'developer']")
LATER = "{% if message.role == 'system' and not loop.first %}"
FIRST_ONLY = DROPS.replace("<{{", LATER + "{% continue %}{% endif %}<{{")
FIRST_OR_ERROR = FIRST_ONLY.replace("{% continue %}", "{{ raise_exception('The system speaks first') }}")
LAST_WINS = """{% set ns = namespace(system='') %}{% for message in messages if message.role == 'system' %}
{%- set ns.system = message.content %}{% endfor %}{{ ns.system }}
{%- for message in messages if message.role in ['user', 'assistant'] %}<{{ message.role }}>{{ message.content }}
{%- endfor %}"""
NO_SYSTEM = EACH + "{% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ message.content }}"
NO_SYSTEM += "{% endfor %}"

WORDS = "{% for part in message.content %}[{{ part.text }}]{% endfor %}"
EITHER = EACH + "<{{ message.role }}>{% if message.content is string %}{{ message.content }}{% else %}" + WORDS
EITHER += "{% endif %}{% endfor %}"
ONLY_LISTS = (
    EACH + "<{{ message.role }}>{% for part in message['content'] if part.type == 'text' %}[{{ part['text'] }}]"
)
ONLY_LISTS += "{% endfor %}{% endfor %}"
MACRO = """{% macro show(it) %}{% if it is string %}{{ it }}{% else %}{% for part in it %}[{{ part.text }}]{% endfor %}
{%- endif %}{% endmacro %}{% for message in messages %}<{{ message.role }}>{{ show(message.content) }}{% endfor %}"""
VARIABLE = """{% for message in messages %}{% set ns = namespace() %}{% set ns.it = message.get('content') %}
{%- set it = ns.it %}{% if it is string %}{{ it }}{% else %}{% for part in it %}[{{ part.text }}]{% endfor %}{% endif %}
{%- endfor %}"""
FIRST_PART = EACH + "{{ message.content[0].text }}{% endfor %}"
AS_JSON = (
    EACH + "{% if message.role == 'tool' %}{{ message.content | tojson }}{% else %}" + WORDS + "{% endif %}{% endfor %}"
)
SYSTEM_IS_TEXT = (
    "{% if messages[0].role == 'system' %}{{ 'system: ' + messages[0].content }}{% set rest = messages[1:] %}"
)
SYSTEM_IS_TEXT += "{% else %}{% set rest = messages %}{% endif %}" + EITHER.replace("in messages", "in rest")
LINES = EACH + "{% for line in message.content.split('\\n') %}{{ line }};{% endfor %}{% endfor %}"
ONCE_ONLY = EITHER.replace("{% else %}", "{% elif loop.length > 2 %}{{ 'x' + message.content }}{% else %}", 1)

TURNS = """{%- for message in messages MINUS -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif -%}
{%- endfor -%}"""
CALLS = "{% for call in message.tool_calls or [] %}({{ call.function.name }}){% endfor %}"
ECHO_CALLS = ECHO.replace("{% endfor %}", CALLS + "{% endfor %}")
TURNS_WITHOUT_TOOLS = TURNS.replace("MINUS", "") + ECHO
BESIDE_TOOLS = "| rejectattr('role', 'equalto', 'tool') | selectattr('tool_calls', 'undefined')"
TURNS_BESIDE_TOOLS = TURNS.replace("MINUS", BESIDE_TOOLS) + ECHO_CALLS


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def said(*texts: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": parts(*texts)}


def rendered(source: str, *messages: Any, **settings: Any) -> str:
    return ChatTemplate(TemplateSource(source)).render(messages, **settings)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(tmp_path_factory.mktemp("forms") / "model"))

    def render(source: str, messages: Sequence[Any], **settings: Any) -> str:
        given = {"tokenize": False, "add_generation_prompt": True, **settings}
        return str(tokenizer.apply_chat_template(list(messages), chat_template=source, **given))

    return render


# ---- roles


@pytest.mark.parametrize("source", [ECHO, DROPS, REFUSES], ids=["echo", "drops", "refuses"])
def test_a_developer_speaks_as_the_system_where_the_template_does_not_name_it(source: str) -> None:
    assert rendered(source, DEVELOPER, USER) == "<system>Use rhymes.<user>Who is there?"
    assert rendered(source, USER, ANSWER, DEVELOPER, USER).endswith("<system>Use rhymes.<user>Who is there?")


def test_a_developer_stays_one_where_the_template_names_it(oracle: Any) -> None:
    for chat in ([DEVELOPER, USER], [SYSTEM, DEVELOPER, USER], [USER, ANSWER, DEVELOPER, USER]):
        assert rendered(NAMES, *chat) == oracle(NAMES, chat)
    assert "<developer>Use rhymes." in rendered(NAMES, DEVELOPER, USER)


def test_a_developer_that_is_named_only_to_be_refused_speaks_as_the_system() -> None:
    named = "{% if messages[0].role == 'developer' %}{{ raise_exception('no developer') }}{% endif %}" + DROPS
    assert rendered(named, DEVELOPER, USER) == "<system>Use rhymes.<user>Who is there?"


@pytest.mark.parametrize("source", [FIRST_ONLY, FIRST_OR_ERROR, LAST_WINS], ids=["drops", "refuses", "last wins"])
def test_a_developer_in_the_middle_speaks_as_a_user_where_no_system_does(source: str) -> None:
    """The first system message stays in the prompt."""
    text = rendered(source, SYSTEM, USER, ANSWER, DEVELOPER, USER)
    assert "Be brief." in text
    assert text.endswith("<assistant>A fox.<user>Use rhymes.<user>Who is there?")


@pytest.mark.parametrize("source", [FIRST_ONLY, FIRST_OR_ERROR, LAST_WINS], ids=["drops", "refuses", "last wins"])
def test_instructions_at_the_beginning_are_one_message_where_only_one_is_written(source: str) -> None:
    for chat in ([SYSTEM, DEVELOPER, USER], [DEVELOPER, SYSTEM, USER]):
        texts = [each["content"] for each in chat[:-1]]
        assert "\n\n".join(texts) in rendered(source, *chat)
    assert "Be brief.\n\nBe kind." in rendered(
        source, said("Be brief.", role="system") | SYSTEM, _system("Be kind."), USER
    )


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def test_instructions_of_texts_and_parts_become_one_list() -> None:
    source = EITHER.replace("<{{", "{% if message.role == 'system' and not loop.first %}{% continue %}{% endif %}<{{")
    chat = [SYSTEM, said("Be kind.", "Be quick.", role="system"), USER]
    assert rendered(source, *chat) == "<system>[Be brief.][Be kind.][Be quick.]<user>Who is there?"


def test_several_instructions_stay_apart_where_the_template_writes_each(oracle: Any) -> None:
    chat = [SYSTEM, _system("Be kind."), USER]
    assert rendered(DROPS, *chat) == oracle(DROPS, chat)


def test_messages_that_a_template_refuses_stay_refused() -> None:
    """A later system message is as the user gave it, and so is one where the template knows none."""
    with pytest.raises(RequestError, match="The system speaks first"):
        rendered(FIRST_OR_ERROR, SYSTEM, USER, SYSTEM, USER)
    with pytest.raises(RequestError, match="no system"):
        rendered(NO_SYSTEM, SYSTEM, USER)


# ---- results of tools

CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "a fox"}
LATER_USER = {"role": "user", "content": "Go on."}


@pytest.mark.parametrize("form", [str, list])
def test_a_text_after_a_result_is_a_part_of_it_where_the_template_refuses_the_two(form: type) -> None:
    """As Mistral's templates and vLLM's for Gemma 3 do; clients of /v1/messages send both in one message."""
    text = LATER_USER if form is str else said("Go on.")
    chat = [USER, CALLING, RESULT, text, text, ANSWER, USER]
    before = "<user>Who is there?<assistant>(look)<tool>a fox\n\nGo on.\n\nGo on."
    before = before if form is str else before.replace("\n\n", "\n")
    assert rendered(TURNS_BESIDE_TOOLS, *chat) == f"{before}<assistant>A fox.<user>Who is there?"
    several = rendered(TURNS_BESIDE_TOOLS, USER, CALLING, RESULT, RESULT, LATER_USER)
    assert several.endswith("(look)<tool>a fox<tool>a fox\n\nGo on.")


def test_results_are_a_users_where_the_template_refuses_tools() -> None:
    """As Gemma's own does."""
    chat: list[Any] = [USER, CALLING, RESULT, {**RESULT, "content": "an owl"}, LATER_USER, ANSWER, USER]
    after = "<user>a fox\n\nan owl\n\nGo on.<assistant>A fox.<user>Who is there?"
    assert rendered(TURNS_WITHOUT_TOOLS, *chat) == f"<user>Who is there?<assistant>{after}"
    found = ChatTemplate(TemplateSource(TURNS_WITHOUT_TOOLS)).rendering(chat)
    assert [each.place for each in found.left_out] == [1]
    lists = ONLY_LISTS.replace("{% for message", TURNS.replace("MINUS", "") + "{% for message", 1)
    assert rendered(lists, *chat).endswith("<user>[a fox\n\nan owl\n\nGo on.]<assistant>[A fox.]<user>[Who is there?]")


def test_results_stay_as_they_are_where_the_template_writes_or_drops_them(oracle: Any) -> None:
    chat = [USER, CALLING, RESULT, RESULT, LATER_USER]
    no_tool = DROPS.replace(", 'tool'", "")
    for source in (ECHO_CALLS, DROPS, no_tool, EITHER):
        assert rendered(source, *chat) == oracle(source, chat)
    with pytest.raises(RequestError, match="Roles must alternate"):
        rendered(TURNS_BESIDE_TOOLS, USER, USER)


# ---- contents


@pytest.mark.parametrize("source", [EITHER, ONLY_LISTS, MACRO, VARIABLE], ids=["either", "lists", "macro", "variable"])
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_a_template_that_writes_parts_gets_the_list(oracle: Any, source: str, role: str) -> None:
    before: dict[str, list[Any]] = {"assistant": [USER], "tool": [USER, {**ANSWER, "tool_calls": [CALL]}]}
    chat = [*before.get(role, []), said("one ", " two", "", role=role), said("end")]
    text = rendered(source, *chat)
    assert text == oracle(source, _lists(chat) if source == ONLY_LISTS else chat)
    assert "[one ][ two][]" in text


def _lists(chat: Sequence[Any]) -> list[Any]:
    return [each if isinstance(each["content"], list) else said(each["content"], role=each["role"]) for each in chat]


@pytest.mark.parametrize("source", [ECHO, DROPS, LINES], ids=["echo", "drops", "lines"])
def test_any_other_template_gets_one_text(source: str, oracle: Any) -> None:
    joined = {"role": "user", "content": "one\ntwo"}
    assert rendered(source, said("one", "two")) == oracle(source, [joined]) == rendered(source, joined)


@pytest.mark.parametrize("source", [EITHER, MACRO, VARIABLE, ECHO], ids=["either", "macro", "variable", "echo"])
def test_a_text_stays_a_text(source: str, oracle: Any) -> None:
    chat = [SYSTEM, USER, ANSWER, USER]
    assert rendered(source, *chat) == oracle(source, chat)


def test_a_template_for_lists_only_gets_a_text_as_a_list(oracle: Any) -> None:
    chat = [SYSTEM, USER, {"role": "assistant", "content": ""}, USER]
    assert rendered(ONLY_LISTS, *chat) == oracle(ONLY_LISTS, [*_lists(chat[:2]), chat[2], *_lists(chat[3:])])
    assert "[Who is there?]" in rendered(ONLY_LISTS, USER)


def test_a_template_that_reads_one_part_gets_all_texts_in_it() -> None:
    assert rendered(FIRST_PART, said("one", "two")) == "one\ntwo"
    assert rendered(FIRST_PART, USER) == "Who is there?"


def test_each_role_has_a_form_of_its_own() -> None:
    """The parts of a role are not written as the Python or JSON of a list, and no list is added to a text."""
    tool = said("one", "two", role="tool")
    chat = [said("a", "b"), {**said("c", role="assistant"), "tool_calls": [CALL]}, tool]
    assert rendered(AS_JSON, *chat) == '[a][b][c]"one\\ntwo"'
    chat = [said("a", "b", role="system"), said("c", "d")]
    assert rendered(SYSTEM_IS_TEXT, *chat) == "system: a\nb<user>[c][d]"


def test_a_list_that_is_refused_in_its_place_is_joined() -> None:
    assert rendered(ONCE_ONLY, said("a", "b")) == "<user>[a][b]"
    assert rendered(ONCE_ONLY, said("a", "b"), ANSWER, said("c", "d")) == "<user>a\nb<assistant>A fox.<user>c\nd"


def test_a_template_that_refuses_trial_messages_gets_the_given_form() -> None:
    """If nothing of it gets through alone, a template that looks into contents gets lists, and others texts."""
    picky = "{% if messages | length != 5 %}{{ raise_exception('five') }}{% endif %}"
    chat = [said("a", "b")] * 5
    assert rendered(picky + EITHER, *chat) == "<user>[a][b]" * 5
    assert rendered(picky + ECHO, *chat) == "<user>a\nb" * 5


def test_a_slow_template_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it gets what is given; a developer is the system to it."""
    attempts = []

    def attempt(chat: Sequence[Any]) -> str:
        attempts.append(chat)
        return "nothing"

    monkeypatch.setattr(template_trials, "MAX_TRIAL_S", -1.0)
    trials = template_trials.TemplateTrials(lambda: jinja2.Environment().parse(EITHER), attempt)
    chat = [DEVELOPER, said("a", "b"), ANSWER, USER]
    for _ in range(2):
        assert fitted(chat, trials) == [{**DEVELOPER, "role": "system"}, *chat[1:]]
        assert len(attempts) == 1


def test_tools_are_there_when_forms_are_tried() -> None:
    source = "{% if tools | length != 1 %}{{ raise_exception('tools') }}{% endif %}" + EITHER
    assert rendered(source, said("a", "b"), tools=TOOLS) == "<user>[a][b]"


@pytest.mark.parametrize("text", ["It is", "It is  \n"])
def test_a_list_can_be_continued(oracle: Any, text: str) -> None:
    chat = [USER, said("So.", text, role="assistant")]
    settings = {"continue_final_message": True, "add_generation_prompt": False}
    assert rendered(EITHER, *chat, **settings) == oracle(EITHER, [dict(each) for each in chat], **settings)
    assert chat[-1] == said("So.", text, role="assistant")


# ---- the syntax tree


@pytest.mark.parametrize(
    ("source", "looks"),
    [
        (EITHER, True),
        (ONLY_LISTS, True),
        (MACRO, True),
        (MACRO.replace("show(message.content)", "show(it=message.content)"), True),
        (VARIABLE, True),
        (FIRST_PART, True),
        (EACH + "{{ message.content[:2] }}{% endfor %}", True),
        (ECHO, False),
        (DROPS, False),
        (
            EACH + "{% for call in message.tool_calls %}{{ message.content['x'] }}{{ call }}{% endfor %}{% endfor %}",
            False,
        ),
        ("{% for part in parts %}{{ part }}{% endfor %}", False),
    ],
)
def test_whether_a_template_looks_into_contents(source: str, looks: bool) -> None:
    assert looks_into_content(jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)) is looks


def test_a_role_is_named_by_a_literal() -> None:
    parse = jinja2.Environment().parse
    assert names_role(parse("{% if role in ['system', 'developer'] %}{% endif %}"), "developer")
    assert not names_role(parse("the developer {{ 'a developer' }}{{ developer }}"), "developer")


def test_templates_that_read_the_first_part_of_all_messages() -> None:
    """SmolVLM's template reads the type of the first part of every message, including calls without text and tools'
    results."""
    source = EACH + "{% if message.content[0].type == 'text' %}" + WORDS + "{% endif %}{% endfor %}"
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert rendered(source, USER, calling, {"role": "tool", "content": "a fox"}) == "[Who is there?][][a fox]"
