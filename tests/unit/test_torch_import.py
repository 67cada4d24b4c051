"""A part of torch is put off until somebody needs it; then it is there."""

import json
import subprocess
import sys

from tests.deadlines import scaled

SCRIPT = """
import importlib, inspect, json, os, sys, traceback
from vllm_lite.runtime import torch_import
torch_import.put_off()
torch_import.put_off()
import torch
module = sys.modules[torch_import.PUT_OFF]
is_put_off = lambda: "activate_meta" not in vars(module)
assert sum(type(finder).__name__ == "_PutOff" for finder in sys.meta_path) == 1
assert "cuda.bindings" not in sys.modules
assert is_put_off() and "torch._meta_registrations" in repr(module)
inspect.getmodule(sys._getframe())  # looks at all modules
torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
assert is_put_off(), "nobody has needed it"
class Wanted(BaseException): pass
def run_it(_): raise Wanted
def whole(use):
    exec(use)
    assert not is_put_off() and type(module) is type(sys)
    torch.empty(2, 3, device="meta").cumsum(0)
    torch_import.complete()
def begins(use):
    torch_import._run = run_it
    try:
        exec(use)
    except Wanted:
        return
    raise AssertionError("it was not wanted")
for name, (how, use) in json.loads(sys.argv[1]).items():
    print(name, flush=True)
    if (pid := os.fork()) == 0:
        try:
            {"whole": whole, "begins": begins}[how](use)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, name
"""

IMPORTED = """
imported = importlib.import_module({name!r})
assert imported is sys.modules[{name!r}]
assert type(imported.__spec__.loader).__module__ != torch_import.__name__
"""

USES = {
    "it is asked for, and CUDA's bindings by somebody else": """
if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings"):
    importlib.import_module("cuda.bindings.nvrtc")
torch_import.complete()
""",
    "something in it is used": "assert callable(torch._meta_registrations.register_meta)",
    # The delayed module imports this one itself; it is executed only once all the same.
    "torch._decomp is imported": IMPORTED.format(name="torch._decomp"),
    "something is profiled": """
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
    torch.ones(2, 2).cumsum(0)
""",
    "transformers is imported": "import transformers",
    "weights are drawn": """
from vllm_lite.layers.weights.weight_slot import whole_slot
from vllm_lite.models.weights import _random
assert is_put_off()
assert _random(0, whole_slot('a.weight', 2, 3)).shape == (2, 3)
""",
}
"""Programs that need the delayed import, one for each way in which that is detected."""
WHOLE = {"torch._decomp is imported", "transformers is imported"}
"""Programs that run the import to its end, which takes two seconds of processor time. For the others the test checks
that it begins; a worker that profiles is in tests/e2e/test_http_operations.py."""


def run(uses: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Each use in a process of its own, forked from one that has imported torch."""
    asked = {name: ("whole" if name in WHOLE else "begins", use) for name, use in uses.items()}
    command = [sys.executable, "-c", SCRIPT, json.dumps(asked)]
    return subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), check=False)


def test_the_delayed_import_runs_at_its_first_use() -> None:
    done = run(USES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == list(USES)


def test_a_use_that_does_not_need_it_would_show() -> None:
    done = run({"one": "pass"})
    assert done.returncode == 1
    assert "AssertionError: one" in done.stderr
