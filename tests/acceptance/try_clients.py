"""Run published clients against a server with the bundled model, and report which of them work.

    python -m tests.acceptance.try_clients                                 # all, in environments that are thrown away
    python -m tests.acceptance.try_clients --only openai,ollama --environments ENVS
    python -m tests.acceptance.try_clients --environments ENVS --write     # all, and docs/clients.md

Each is tried by a short program in tests/acceptance/clients that ends with an error if anything is missing. With
`--environments` what was installed stays there for the next time. `uv` installs it where there is one, pip elsewhere.
The exit status is 1 if a client fails.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.http_server import serving
from tests.images import make_smolvlm
from vllm_lite.config import demo_folder

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("clients")
DEMO = Path(demo_folder())
PAGE = ROOT / "docs" / "clients.md"
FLAGS = ("--served-model-name", "demo", "--dtype", "float32", "--convert", "embed")
SEEING_FLAGS = ("--served-model-name", "eyes", "--dtype", "float32", "--max-model-len", "1024")
SEEING = "images_seen.py"
"""The program for a server that accepts images."""
BEHIND = "\n## Agents\n"
"""End of this script's part of the page."""
TIMEOUT_S = 900.0
INSTALL_S = 600.0
NODE = "node"
PACKAGES: dict[str, tuple[str, ...]] = {
    "sdks": ("openai", "anthropic", "ollama", "langchain-openai", "langchain-anthropic", "langchain-ollama"),
    "agents": ("pydantic-ai-slim[openai]", "instructor"),
    "llamaindex": ("llama-index-llms-openai-like", "llama-index-embeddings-openai-like"),
    "dspy": ("dspy", "litellm"),
    "tools": ("llm", "cohere"),
    "typesafe": ("typesafe-sdk",),
    "inspect": ("inspect-ai", "openai"),
    "lmeval": ("lm_eval[api,hf]",),
    "load": ("locust",),
    "guidellm": ("guidellm",),
    "proxy": ("litellm[proxy]", "openai"),
    NODE: ("openai", "@anthropic-ai/sdk", "ollama", "ai", "@ai-sdk/openai-compatible", "zod"),
}
"""Packages that are installed together, by the name of the environment."""


class Client(NamedTuple):
    """A client: the package whose version is reported, its environment, and its program. `option` is an additional
    argument beside the address, the model's name and a key; empty: none."""

    name: str
    package: str
    environment: str
    program: str
    option: str = ""


CLIENTS = (
    Client("OpenAI's package for Python", "openai", "sdks", "openai_python.py"),
    Client("Anthropic's package for Python", "anthropic", "sdks", "anthropic_python.py"),
    Client("Ollama's package for Python", "ollama", "sdks", "ollama_python.py"),
    Client(
        "LangChain", "langchain-openai", "sdks", "langchain_chats.py", "`check_embedding_ctx_length=False` for vectors"
    ),
    Client("OpenAI's package for Python, images", "openai", "sdks", f"{SEEING} openai"),
    Client("Anthropic's package for Python, images", "anthropic", "sdks", f"{SEEING} anthropic"),
    Client("Ollama's package for Python, images", "ollama", "sdks", f"{SEEING} ollama"),
    Client("LangChain over three dialects, images", "langchain-openai", "sdks", f"{SEEING} langchain"),
    Client("LlamaIndex", "llama-index-llms-openai-like", "llamaindex", "llama_index_chats.py"),
    Client("LiteLLM", "litellm", "dspy", "litellm_calls.py"),
    Client("pydantic-ai", "pydantic-ai-slim", "agents", "pydantic_ai_agents.py"),
    Client("instructor", "instructor", "agents", "instructor_forms.py"),
    Client("DSPy", "dspy", "dspy", "dspy_programs.py", "`response_format` of its `LM` for typed programs"),
    Client("llm", "llm", "tools", "llm_prompts.py"),
    Client("Cohere's package for Python", "cohere", "tools", "cohere_ranks.py"),
    Client("TypeSafe's package for Python", "typesafe-sdk", "typesafe", "typesafe_decisions.py"),
    Client("inspect-ai", "inspect-ai", "inspect", "inspect_evals.py"),
    Client(
        "lm-evaluation-harness", "lm_eval", "lmeval", "lm_eval_tasks.py", "`add_bos_token=True`, as its own backend"
    ),
    Client("LiteLLM's proxy", "litellm", "proxy", "litellm_proxy.py"),
    Client("locust", "locust", "load", "locust_load.py"),
    Client("guidellm", "guidellm", "guidellm", "guidellm_load.py"),
    Client("OpenAI's package for Node", "openai", NODE, "node_clients.mjs openai"),
    Client("Anthropic's package for Node", "@anthropic-ai/sdk", NODE, "node_clients.mjs anthropic"),
    Client("Ollama's package for Node", "ollama", NODE, "node_clients.mjs ollama"),
    Client("Vercel's AI SDK", "ai", NODE, "node_clients.mjs ai"),
)


class Outcome(NamedTuple):
    client: Client
    version: str
    error: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names or programs, with commas between them")
    parser.add_argument("--environments", type=Path, help="a folder where environments stay (default: none do)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    if args.write and args.only:
        parser.error("--write writes a page of all clients: leave out --only")
    words = [word for word in args.only.lower().split(",") if word]
    chosen = [each for each in CLIENTS if not words or any(word in " ".join(each).lower() for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        root = (args.environments or Path(folder)).absolute()
        names = dict.fromkeys(each.environment for each in chosen)
        missing = {name: install(root / name, PACKAGES[name], is_node=name == NODE) for name in names}
        for name in (name for name, why in missing.items() if why):
            print(f"not tried, those of {name}: {missing[name]}", flush=True)
        there = [each for each in chosen if not missing[each.environment]]
        seeing = {each for each in there if each.program.startswith(SEEING)}
        model = make_smolvlm(Path(folder) / "eyes") if seeing else DEMO
        with serving(str(DEMO), *FLAGS) as server, serving(str(model), *SEEING_FLAGS) as eyes:
            urls = {each: eyes.url if each in seeing else server.url for each in there}
            outcomes = [attempt(each, root / each.environment, urls[each]) for each in there]
    if args.write:
        PAGE.write_text(page(outcomes) + "".join(PAGE.read_text().partition(BEHIND)[1:]))
    return 1 if any(missing.values()) or any(outcome.error for outcome in outcomes) else 0


# ---- environments


def install(folder: Path, packages: tuple[str, ...], *, is_node: bool) -> str:
    """Create an environment with these packages if it is missing. Returns the reason of a failure, or ""."""
    if (folder / "done").exists():
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    if is_node:
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        commands = [["npm", "install", "--silent", *packages]]
    else:
        python = str(folder / "bin" / "python")
        installer = (
            ["uv", "pip", "install", "--python", python] if shutil.which("uv") else [python, "-m", "pip", "install"]
        )
        commands = [[sys.executable, "-m", "venv", str(folder)], [*installer, "-q", *packages]]
    for command in commands:
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode:
            return last_line(done.stderr)
    (folder / "done").touch()
    return ""


def version_of(client: Client, folder: Path) -> str:
    if client.environment == NODE:
        path = folder / "node_modules" / client.package / "package.json"
        return str(json.loads(path.read_text())["version"])
    code = f"from importlib.metadata import version; print(version({client.package!r}))"
    done = subprocess.run([folder / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


# ---- one client


def attempt(client: Client, folder: Path, url: str) -> Outcome:
    """Run a client's program, in a folder of its own."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as here:
        error = run(client, folder, url, Path(here))
    outcome = Outcome(client, version_of(client, folder), error)
    took_s = time.monotonic() - began_s
    print(f"{client.name:32} {outcome.version:12} {took_s:5.1f} s  {error or 'works'}", flush=True)
    return outcome


def run(client: Client, folder: Path, url: str, here: Path) -> str:
    """Run a client's program. Returns the reason of a failure, or ""."""
    name, *words = client.program.split()
    command = [str(folder / "bin" / "python"), str(PROGRAMS / name), *words]
    if client.environment == NODE:
        shutil.copy(PROGRAMS / name, folder)  # beside its packages, where node looks for them
        command = ["node", str(folder / name), *words]
    env = {**os.environ, "TRY_URL": url, "TRY_MODEL": str(DEMO), "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, cwd=here, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return last_line(done.stdout + done.stderr) if done.returncode else ""


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it says nothing")


# ---- the page

INTRODUCTION = f"""\
# Clients that were tried

These third-party clients were tested against a server with the bundled model:

    vllm-lite serve vllm_lite/demo_model {" ".join(FLAGS)}

`python -m tests.acceptance.try_clients` starts the server, installs each client into an environment and runs a short
program, which fails if anything is missing; `--only llamaindex,openai` chooses some, `--write` writes this page.
"Unchanged" means that a client was given only the address, the name of the model and any key. The content of answers is
not judged. Images are sent to a second server, with a random model that accepts images. DSPy sends no schema to a model
that it does not know.

| client | package | works | what was called |
| --- | --- | --- | --- |
"""


def page(outcomes: list[Outcome]) -> str:
    rows = []
    for client, version, error in outcomes:
        name, *_ = client.program.split()
        works = f"not: {error}" if error else f"with {client.option}" if client.option else "unchanged"
        program = f"[{called(name)}](../tests/acceptance/clients/{name})"
        rows.append(f"| {client.name} | {client.package} {version} | {works} | {program} |\n")
    return INTRODUCTION + "".join(rows)


def called(name: str) -> str:
    """Read the calls that the first line of a program names."""
    first = (PROGRAMS / name).read_text().splitlines()[0].strip('/" ').rstrip(".")
    return first.partition(": ")[2]


if __name__ == "__main__":
    sys.exit(main())
