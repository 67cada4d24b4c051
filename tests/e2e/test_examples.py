"""The programs of examples/ against the demo model, as users start them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deadlines import scaled
from tests.decisions import write_decider
from tests.http_server import Server, serving
from vllm_lite import LLM

FOLDER = Path(__file__).parents[2] / "examples"
OF_SERVER = ("decide.py", "structured_output.py", "tool_calls.py")
OF_ENGINE = ("stream_completion.py",)
DEADLINE_S = scaled(60.0)


def run(name: str, *words: str) -> str:
    """Run an example to its end. Returns what it prints."""
    command = [sys.executable, str(FOLDER / name), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def test_every_example_is_run() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == {*OF_SERVER, *OF_ENGINE}


def test_decisions(tmp_path: Path) -> None:
    """By a model that has yes and no as single tokens, unlike the demo model."""
    with serving(str(write_decider(tmp_path / "decider", max_position_embeddings=4096))) as server:
        lines = run("decide.py", f"{server.url}/v1").splitlines()
    assert [line.split(":")[0] for line in lines] == ["team", "urgent", "tone"]


@pytest.mark.parametrize(("name", "shown"), [("structured_output.py", " years old, likes "), ("tool_calls.py", "add(")])
def test_programs_with_openais_client(server: Server, name: str, shown: str) -> None:
    pytest.importorskip("openai")
    assert shown in run(name, f"{server.url}/v1")


def test_a_streamed_completion() -> None:
    with LLM() as llm:
        text = run("stream_completion.py", llm.address, "Once upon a time", "--max-tokens", "8", "--temperature", "0")
    assert text.startswith("Once upon a time")
    assert "[8 tokens in " in text
