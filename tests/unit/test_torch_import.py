"""A part of torch is put off until somebody needs it; then it is there."""

import subprocess
import sys

import pytest

from tests.deadlines import scaled

SCRIPT = """
import importlib, inspect, sys
from vllm_lite.runtime import torch_import
torch_import.put_off()
torch_import.put_off()
import torch
module = sys.modules[torch_import.PUT_OFF]
is_put_off = lambda: "activate_meta" not in vars(module)
assert sum(type(finder).__name__ == "_PutOff" for finder in sys.meta_path) == 1
assert is_put_off() and "torch._meta_registrations" in repr(module)
inspect.getmodule(sys._getframe())  # looks at all modules
torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
assert is_put_off(), "nobody has needed it"
{use}
assert not is_put_off() and type(module) is type(sys)
torch.empty(2, 3, device="meta").cumsum(0)
torch_import.complete()
"""


def run(use: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(use=use)], capture_output=True, text=True, timeout=scaled(120), check=False
    )
    assert done.returncode == 0, done.stderr


def test_it_runs_when_it_is_asked_for() -> None:
    run("torch_import.complete()")


def test_it_runs_when_something_in_it_is_used() -> None:
    run("assert callable(torch._meta_registrations.register_meta)")


@pytest.mark.parametrize("name", ["torch._decomp", "torch.utils._content_store"])
def test_it_runs_before_more_of_torch_is_imported(name: str) -> None:
    """It imports these itself, while they wait for it; they run once all the same."""
    run(
        f"imported = importlib.import_module({name!r})\n"
        f"assert imported is sys.modules[{name!r}]\n"
        f"assert type(imported.__spec__.loader).__module__ != torch_import.__name__"
    )


def test_tracing_and_profiling_work() -> None:
    run(
        "with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):\n"
        "    torch.compile(lambda x: x.cumsum(0), backend='eager')(torch.ones(2, 2))"
    )


def test_it_runs_before_transformers() -> None:
    run("import transformers")


def test_it_runs_before_weights_are_drawn() -> None:
    run(
        "from vllm_lite.layers.weight_slot import whole_slot\n"
        "from vllm_lite.models.weights import _random\n"
        "assert is_put_off()\n"
        "assert _random(0, whole_slot('a.weight', 2, 3)).shape == (2, 3)"
    )
