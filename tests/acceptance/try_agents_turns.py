"""Turns that the scripted model of try_agents.py plays for each agent: one call that writes a file, then a text.

tests/scripted_turns.py makes the checkpoint. Its chat template chooses the turn by a request's tools and last message,
so the model need not know which agent asks.
"""

import json

FILE = "hello.txt"
CONTENT = "hello"
PROMPT = f"Create a file {FILE} that says {CONTENT}."
DONE = f"The file {FILE} is there, and it says {CONTENT}."
_COMMAND = f"echo {CONTENT} > {FILE}"
_PATCH = f"*** Begin Patch\n*** Add File: {FILE}\n+{CONTENT}\n*** End Patch"
CALLS: dict[str, dict[str, object]] = {
    "apply_patch": {"input": _PATCH},
    "Bash": {"command": _COMMAND, "description": "Write the file"},
    "exec_command": {"cmd": _COMMAND},
    "run_shell_command": {"command": _COMMAND, "description": "Write it.", "is_background": False},
    "bash": {"command": _COMMAND, "description": "Write a file"},
    "execute": {"command": _COMMAND},
    "terminal": {"command": _COMMAND},
    "run_commands": {"commands": [_COMMAND]},
}
"""Tool -> arguments of the first call. The first tool in this order that a request has is called."""
_ENDS: dict[str, tuple[str, dict[str, object]]] = {
    "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT": (
        "bash",
        {"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo '{DONE}'"},
    ),
}
"""Calls that end a turn, where no text does, by words of the prompt."""
TEXTS: dict[str, str] = {
    "file listing": f"{DONE}\n\n{FILE}\n```\n{CONTENT}\n```\n",
    "using code blobs": f"Thought: one call.\n<code>\nwrite_greeting('{CONTENT}')\nfinal_answer('{DONE}')\n</code>",
    "gptme": f"I do it now.\n\n```shell\n{_COMMAND}\n```\n",
}
"""Words of the prompt -> answer to the task for agents without tools; later answers are DONE."""


def scripts() -> dict[str, str]:
    """Name in choice() -> text that is played."""
    calls = {name: _thought(name) + _called(name, arguments) for name, arguments in CALLS.items()}
    ends = {f"end {number}": _called(*call) for number, call in enumerate(_ENDS.values())}
    texts = {f"text {number}": text for number, text in enumerate(TEXTS.values())}
    return {**calls, **ends, **texts, "done": DONE, "title": "A new greeting"}


def _thought(name: str) -> str:
    return f"<think>\nThe tool {name} can do it.\n</think>\n\n"


def _called(name: str, arguments: dict[str, object]) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


_CHOICE = """
{%- set play = namespace(name='title') %}
{%- set names = (tools or []) | map(attribute='function.name') | list %}
{%- set said = messages | map(attribute='content') | join(' ') %}
{%- for words in TEXTS %}{% if words in said %}
{%- set play.name = 'text ' ~ loop.index0 if TASK in messages[-1].content else 'done' %}{% endif %}{% endfor %}
{%- for name in CALLS %}{% if name in names %}{% set play.name = name %}{% endif %}{% endfor %}
{%- if messages[-1].role == 'tool' %}{% set play.name = 'done' %}
{%- for words in ENDS %}{% if words in said %}{% set play.name = 'end ' ~ loop.index0 %}{% endif %}{% endfor %}
{%- endif %}{{ play.name }}"""


def choice() -> str:
    """A Jinja template that renders the name of a script. A request without tools gets a title."""
    lists: dict[str, list[str]] = {"TEXTS": [*TEXTS], "CALLS": [*reversed(CALLS)], "ENDS": [*_ENDS]}
    text = _CHOICE.replace("TASK", json.dumps(PROMPT))
    for name, values in lists.items():
        text = text.replace(f"in {name} ", f"in {json.dumps(values)} ")
    return text
