"""Importing vllm_lite brings along no module that is slow to load. `vllm-lite bench engine` has the times."""

import json
import subprocess
import sys

import pytest

from tests.deadlines import scaled

HEAVY = ["torch", "transformers", "numpy", "safetensors", "cupy", "huggingface_hub"]


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `statement`."""
    program = f"import sys, json\n{statement}\nprint(json.dumps([name.split('.')[0] for name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=scaled(60), check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_bare_import_loads_only_the_standard_library() -> None:
    before, after = loaded_by("import importlib, typing"), loaded_by("import vllm_lite")
    assert "vllm_lite" in after
    strangers = {name for name in after - before if name not in sys.stdlib_module_names}
    assert strangers == {"vllm_lite"}


@pytest.mark.parametrize(
    "statement",
    [
        "from vllm_lite import EngineConfig, SamplingParams",
        "from vllm_lite import AsyncClient",
        "from vllm_lite import LLM",
        "import vllm_lite.engine.process",
        "import vllm_lite.executor.multiproc",
        "import vllm_lite.tools.cli",
        "import vllm_lite.tools.cli.bench_serve, vllm_lite.tools.bench.serve, vllm_lite.tools.bench.serve_plot",
        "import vllm_lite.tools.cli.bench",
        "import vllm_lite.tools.cli.chat, vllm_lite.tools.chat.chat, vllm_lite.tools.chat.terminal",
        "import vllm_lite.tools.chat.remote_server",
        "import vllm_lite.tools.chat.private_server",
    ],
)
def test_clients_and_engines_load_nothing_heavy(statement: str) -> None:
    assert loaded_by(statement).isdisjoint(HEAVY)


def test_nothing_of_http_or_tls_is_loaded_before_the_engine_starts() -> None:
    assert loaded_by("import vllm_lite.server.processes.serve").isdisjoint(["ssl", "http", "email"])


def test_a_worker_loads_no_more_of_torch_than_torch_itself() -> None:
    """A single further module, torch.nn.attention.bias with torch._dynamo, once tripled the time of a worker's start,
    and left a folder in its TMPDIR."""
    loaded_by(
        """
from vllm_lite.runtime import torch_import
torch_import.put_off()
import torch
before = set(sys.modules)
import vllm_lite.worker.worker
more = [name for name in set(sys.modules) - before if name.startswith("torch.")]
assert not more, more
assert "activate_meta" not in vars(sys.modules[torch_import.PUT_OFF]), "somebody has needed what was put off"
"""
    )


def test_the_check_can_see_it() -> None:
    assert not loaded_by("import numpy").isdisjoint(HEAVY)


def test_public_names_are_all_there() -> None:
    loaded_by("import vllm_lite\nfor name in vllm_lite.__all__:\n    assert getattr(vllm_lite, name).__name__ == name")


def test_an_unknown_name_is_an_attribute_error() -> None:
    loaded_by("import vllm_lite\nassert not hasattr(vllm_lite, 'LLMs')\nassert 'LLM' in dir(vllm_lite)")
