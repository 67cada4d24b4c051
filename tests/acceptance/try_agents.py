"""Run published coding agents against a server with a scripted model, each for one whole task with a tool.

    python -m tests.acceptance.try_agents                                  # all, in environments that are thrown away
    python -m tests.acceptance.try_agents --only codex,claude --environments ENVS --record FOLDER
    python -m tests.acceptance.try_agents --environments ENVS --write      # all, and their table in docs/clients.md

An agent is given the address, a key and the name of the model, and leave to run a tool; everything else is at its
defaults. It is to write a file. The model calls the agent's own tool for that, and says in the end that it is done
(try_agents_turns.py). A turn is whole if the file is there, the text is shown, the agent ends well, and no request of
it was refused. What the server warned about is listed. The exit status is 1 if a turn is not whole.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from string import Template
from typing import NamedTuple

from tests.acceptance.try_agents_recorder import Recorder
from tests.acceptance.try_agents_table import AGENTS, Agent
from tests.acceptance.try_agents_turns import CONTENT, DONE, FILE, PROMPT, choice, scripts
from tests.acceptance.try_clients import PAGE, PROGRAMS, install, last_line
from tests.http_server import serving
from tests.scripted_turns import make_scripted

MODEL = "scripted"
FLAGS = ("--served-model-name", MODEL, "gpt-5.5", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
TIMEOUT_S = 180.0
NOBODY = "http://127.0.0.1:9"
"""Address of a proxy that does not exist, so that agents can reach only the server."""
BEGIN, END = "<!-- agents: written by tests/acceptance/try_agents.py -->\n", "<!-- end -->\n"
_COLORS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Turn(NamedTuple):
    """The result of a task. `error`: the reason for which it is incomplete, or ""; `warnings`: fields that the server
    ignored."""

    agent: Agent
    version: str
    error: str
    paths: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names or packages, with commas between them")
    parser.add_argument("--environments", type=Path, help="a folder where environments stay (default: none do)")
    parser.add_argument("--record", type=Path, help="a folder for what is sent and answered, and what agents print")
    parser.add_argument("--write", action="store_true", help="write the table in docs/clients.md")
    args = parser.parse_args()
    if args.write and args.only:
        parser.error("--write writes a table of all agents: leave out --only")
    words = [word for word in args.only.lower().split(",") if word]
    chosen = [each for each in AGENTS if not words or any(word in f"{each[:3]}".lower() for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        root = (args.environments or Path(folder, "environments")).absolute()
        checkpoint = make_scripted(Path(folder, "model"), scripts(), choice())
        with serving(str(checkpoint), *FLAGS, "--log-level", "error") as server:
            turns = [attempt(agent, root, server.url, args.record) for agent in chosen]
    if args.write:
        write(turns)
    return 1 if any(turn.error for turn in turns) else 0


def attempt(agent: Agent, root: Path, url: str, record: Path | None) -> Turn:
    """Install an agent unless it is there, and have it make its turn."""
    began_s = time.monotonic()
    place = root / re.sub(r"\W+", "-", agent.package).strip("-")
    why = install(place, (agent.package, *agent.more), is_node=agent.registry == "npm")
    turn = Turn(agent, "", f"not installed: {why}") if why else played(agent, place, url, record)
    print(f"{agent.name:20} {turn.version:10} {time.monotonic() - began_s:5.1f} s  {turn.error or 'whole'}", flush=True)
    for warning in turn.warnings:
        print(f"{'':20} {warning}", flush=True)
    return turn


# ---- one turn


def played(agent: Agent, place: Path, url: str, record: Path | None) -> Turn:
    with tempfile.TemporaryDirectory() as folder, Recorder(url).running() as recorder:
        home, work = Path(folder, "home"), Path(folder, "work")
        names = {"url": recorder.url, "model": MODEL, "prompt": PROMPT, "home": str(home), "programs": str(PROGRAMS)}
        home.mkdir()
        for path, text in agent.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(Template(text).substitute(names))
        repository(work)
        given = {name: Template(value).substitute(names) for name, value in agent.env.items()}
        env, output, error = environment(agent, place, home) | given, "", ""
        for words in (agent.setup, agent.command):
            if words and not error:
                output, error = ran([Template(word).substitute(names) for word in words], work, env)
        error = error or missing(output, work, recorder)
        if record is not None:
            recorder.write(record / place.name)
            (record / place.name / "output.txt").write_text(output)
        return Turn(agent, version_of(agent, place), error, *seen(recorder))


def repository(folder: Path) -> None:
    """A repository with one commit, as agents expect one."""
    folder.mkdir()
    who = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    for words in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "Begin"]):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


def environment(agent: Agent, place: Path, home: Path) -> dict[str, str]:
    """Environment of an agent: of this process's variables, only the path of programs."""
    programs = place / ("node_modules/.bin" if agent.registry == "npm" else "bin")
    path = f"{programs}:{os.environ['PATH']}"
    dead = dict.fromkeys(("https_proxy", "HTTPS_PROXY"), NOBODY)
    alive = dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost")
    return {"PATH": path, "HOME": str(home), "TERM": "xterm", "LANG": "C.UTF-8", **dead, **alive}


def ran(command: list[str], work: Path, env: dict[str, str]) -> tuple[str, str]:
    """Run an agent. Returns its output, and the reason of a failure, or ""."""
    program = shutil.which(command[0], path=env["PATH"]) or command[0]
    try:
        done = subprocess.run(
            [program, *command[1:]],
            cwd=work,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), f"it did not end in {TIMEOUT_S:.0f} s"
    except OSError as error:
        return "", str(error)
    output = _COLORS.sub("", done.stdout.decode(errors="replace"))
    return output, f"exit status {done.returncode}: {last_line(output)}" if done.returncode else ""


def missing(output: str, work: Path, recorder: Recorder) -> str:
    """Name the missing part of a task that ended successfully; None if it is complete."""
    refused = [each for each in recorder.exchanges if each.status >= 400 and each.method == "POST"]
    if refused:
        return f"{refused[0].path} answered {refused[0].status}: {refused[0].answer[:200].decode(errors='replace')}"
    path = work / FILE
    if not path.exists() or path.read_text().strip() != CONTENT:
        return f"{FILE} was not written: {last_line(output)}"
    if " ".join(DONE.split()) not in " ".join(output.split()):
        return "the text at the end was not shown"
    return ""


def seen(recorder: Recorder) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The generating paths that were called, and the warnings, each once."""
    posts = [each for each in recorder.exchanges if each.method == "POST"]
    paths = dict.fromkeys(each.path.partition("?")[0] for each in posts)
    found = [warning for each in posts for warning in re.findall(r'vllm-lite "([^"]*)"', each.warning)]
    return tuple(paths), tuple(dict.fromkeys(found))


def version_of(agent: Agent, place: Path) -> str:
    if agent.registry == "npm":
        return str(json.loads((place / "node_modules" / agent.package / "package.json").read_text())["version"])
    code = f"from importlib.metadata import version; print(version({agent.package!r}))"
    return subprocess.run(
        [place / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


# ---- the table


def write(turns: list[Turn]) -> None:
    """Replace the table in the page, or begin one."""
    rows = [
        "| agent | package | API | a task with a tool | not taken, with a `Warning` |\n",
        "| --- | --- | --- | --- | --- |\n",
    ]
    for turn in turns:
        agent, given = turn.agent, turn.agent.permitted and f", with {turn.agent.permitted}"
        whole = f"not: {turn.error}" if turn.error else f"done{given}"
        paths, warnings = (", ".join(f"`{each}`" for each in some) for some in (turn.paths, turn.warnings))
        rows.append(f"| {agent.name} | {agent.package} {turn.version} | {paths} | {whole} | {warnings} |\n")
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "".join(rows) + END + after)


if __name__ == "__main__":
    sys.exit(main())
