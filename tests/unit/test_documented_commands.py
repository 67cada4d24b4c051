"""Commands in the documents: their flags exist, their bodies fit their routes, and the names in Python can be imported.

Nothing is started. `tests/e2e` runs the examples of docs/python-api.md and docs/connecting.md.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from itertools import count
from pathlib import Path

import msgspec
import pytest

from vllm_lite.server.route_table import ROUTES
from vllm_lite.tools import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"])
INDENT = r"^(?:    )?(?:\$ )?"
IN_A_SHELL = {"&", "|", "<", ">", ">>", "&&", ";"}
MAX_LINES = 30


def commands(text: str, program: str) -> Iterator[list[str]]:
    """The words after each `program` that begins a line of `text`; quotes and backslashes may continue the line."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if not re.match(rf"{INDENT}(?:\.venv/bin/)?{program} ", line):
            continue
        for end in count(at + 1):
            command = re.sub(INDENT, "", "\n".join(lines[at:end])).rstrip().replace("\\\n", " ")
            try:
                words = [] if command.endswith("\\") else shlex.split(command, comments=True)
            except ValueError:  # a quotation goes on
                words = []
            assert end - at < MAX_LINES, f"no end of {line!r}"
            if words:
                stop = next((place for place, word in enumerate(words) if word in IN_A_SHELL), len(words))
                yield words[1:stop]
                break


def wrong_flags(text: str) -> Iterator[str]:
    for words in commands(text, "vllm-lite"):
        if not is_accepted(words):
            yield shlex.join(words)
    for flag in re.findall(r"`(--[a-z-]+ '\{[^`]+\}')`", text):  # in a sentence
        if not is_accepted(["serve", *shlex.split(flag)]):
            yield flag


def is_accepted(words: list[str]) -> bool:
    """Whether a command has these flags and, if it is `serve`, accepts their values, those of JSON settings as well."""
    try:
        if words[0] == "serve":
            return cli.main([*words, "--print-config"]) == 0
        cli.parse(words)
    except SystemExit as exit_:  # --help ends with 0
        return not exit_.code
    return True


def route_of(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{\w+\}", "[^/]+", path))


def wrong_bodies(text: str) -> Iterator[str]:
    for words in commands(text, "curl"):
        address = next(word for word in words if re.match(r"(http://)?(localhost|127\.0\.0\.1):\d+/", word))
        path = re.sub(r"^(http://)?[^/]+", "", address).partition("?")[0]
        found = [route for route in ROUTES if route_of(route.path).fullmatch(path)]
        if not found:
            yield f"there is no route {path}"
        elif "-d" in words:
            if "Content-Type: application/json" not in words:
                yield f"curl {path} sends no Content-Type"
            (body,) = (route.body for route in found if route.method == "post")
            try:
                msgspec.json.decode(words[words.index("-d") + 1], type=body or dict)
            except msgspec.MsgspecError as error:
                yield f"the body for {path}: {error}"


def wrong_imports(text: str) -> Iterator[str]:
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block, type_comments=False)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm_lite":
                module = import_module(node.module)
                yield from (
                    f"{node.module} has no {name.name}" for name in node.names if not hasattr(module, name.name)
                )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_are_accepted(page: Path) -> None:
    text = page.read_text()
    found = [*wrong_flags(text), *wrong_bodies(text), *wrong_imports(text)]
    assert not found, "\n".join([page.name, *found])


def test_the_page_of_commands_has_all_of_them() -> None:
    page = (ROOT / "docs/command-line.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \|", page.split("| command | |")[1].split("\n\n")[0], re.MULTILINE)
    named = {word for row in rows for words in re.findall(r"`([^`]+)`", row) for word in words.split()}
    assert cli.COMMANDS.keys() <= named


def test_wrong_commands_are_seen(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(wrong_flags("    vllm-lite serve MODEL --no-such-flag 3 &\n")) == ["serve MODEL --no-such-flag 3"]
    assert "unknown argument '--no-such-flag'" in capsys.readouterr().err
    assert list(wrong_flags("text\n$ vllm-lite plan MODEL \\\n    --gpus 24GiB  # one\n")) == [
        "plan MODEL --gpus 24GiB"
    ]
    assert not list(wrong_flags(".venv/bin/vllm-lite serve MODEL -tp 2 &\nvllm-lite serve --help\n"))
    assert list(wrong_flags('`--speculative-config \'{"methods": "ngram"}\'`')), "a key that there is not"
    assert not list(wrong_flags('`--speculative-config \'{"method": "ngram"}\'`'))
    assert list(wrong_bodies("    curl localhost:8000/gone\n")) == ["there is no route /gone"]
    sent = "curl http://localhost:8000/v1/completions -H 'Content-Type: {}' -d '{{\n  \"prompt\": {}}}'\n"
    assert not list(wrong_bodies(sent.format("application/json", '"a"')))
    assert list(wrong_bodies(sent.format("text/plain", '"a"'))) == ["curl /v1/completions sends no Content-Type"]
    assert list(wrong_bodies(sent.format("application/json", "[[1.5]]")))
    assert list(wrong_imports("```python\nfrom vllm_lite import LLM, Gone\n```\n")) == ["vllm_lite has no Gone"]
