"""The stages of `gpu_check`. Each runs in separate processes, and its findings are collected in one place."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import gpu_check_tools as tools
from gpu_check_parts import PATIENCE, CaseResults, Event, Part, python_path, run_cases, run_restarted
from gpu_check_prepare import CARRIED, KERNELS, NativeBuild, unpack_kernels, unpack_wheels, wheel_folder
from gpu_check_worker import WORKER_TESTS, run_tests

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(__file__).resolve().parent
END_TO_END_MODEL = "random-500m"
NEEDED = ("msgspec", "zmq", "llguidance", "xxhash", "regex", "tokenizers", "safetensors", "tqdm", "jinja2", "yaml")
"""Modules that serving needs beside torch and numpy."""
IMPORTS = "import vllm_lite.worker.worker, vllm_lite.client.llm, vllm_lite.engine.process"
"""Imports that succeed if no package is missing; the stage `wheels` tries them."""
TOKENS_S = "together_tok_s"
"""Name that `bench throughput` gives to the tokens per second of all requests together."""
VLLM_FOLDERS = ("../vllm-venv", "../vllm/.venv", ".vllm")


class Stage(NamedTuple):
    """One stage. `seconds` is the maximum time of the stage; it is shorter if less time is left."""

    seconds: float
    what: str


STAGES = {
    "wheels": Stage(60, "unpack wheels of a folder beside the checkout, for what this Python lacks"),
    "kernels": Stage(30, "put kernels that were compiled ahead into the cache"),
    "native": Stage(150, "the native library: carried along, or built while the next stages run"),
    "smoke": Stage(75, "each file of csrc/cuda once, a captured replay, the demo model's tokens by five roads"),
    "worker": Stage(120, "tests/gpu/test_worker_on_device.py, in a new process behind each test that fails"),
    "graphs": Stage(40, "kernels captured in a CUDA graph, replayed, compared bit for bit"),
    "step_1b": Stage(75, "steps of a worker with a 1B model: wall against device time, mixed steps, memory"),
    "speed": Stage(100, "copy, decode attention, linear layers and experts measured"),
    "cases": Stage(150, "every case of tests/kernels/*_cases.py on the device, each file in a process of its own"),
    "throughput": Stage(80, "tokens a second of a random model through all processes, with graphs and without"),
    "step_8b": Stage(90, "as step_1b, with an 8B model"),
    "prefill": Stage(75, "our prefill next to torch's FlashAttention; a table of it, which workers follow"),
    "bench": Stage(100, "the other measurements of the kernels"),
    "parallel": Stage(90, "ranks that share a model: world 1 over NCCL, world 2 over gloo on one device"),
    "recovery": Stage(90, "a worker and an engine that are killed: streams go on with the same tokens"),
    "profile": Stage(60, "ncu's sections for the kernels that most depends on"),
    "sanitize": Stage(90, "memcheck and racecheck on four cases of a file: those that failed, or of three files"),
    "engines": Stage(150, "the same prompts through this engine and through a vLLM installation beside it"),
}
"""Stages in their order: first those that have never run on a GPU, then the most informative ones."""
SMOKE = "smoke"
"""If this stage fails, no later stage runs."""
PREPARING = ("wheels", "kernels", "native")
CALLS = {
    "first": (*PREPARING, SMOKE, "worker", "graphs", "step_1b", "speed"),
    "second": (*PREPARING, SMOKE, "cases", "throughput", "step_8b", "prefill", "bench"),
    "third": (*PREPARING, SMOKE, "parallel", "recovery", "profile", "sanitize", "engines"),
}
"""Stages that fit into one call, on a machine that is lent for some minutes at a time."""
EMULATED = (
    *("wheels", "kernels", "native", SMOKE, "worker", "graphs", "step_1b", "speed", "cases", "throughput"),
    *("prefill", "bench", "parallel", "recovery", "engines"),
)
"""Stages that also run without a GPU, on the emulator or on a CPU, to test the script."""


class Check:
    """The findings so far, and the time that is left."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.deadline_s = time.monotonic() + arguments.limit_s
        self.stage_deadline_s = self.deadline_s
        self.mode = ["--emulate"] if arguments.emulate else []
        self.found: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.results: list[CaseResults] = []
        self.site = tempfile.mkdtemp(prefix="gpu_check")
        self.build = NativeBuild()

    @property
    def failed(self) -> bool:
        return bool(self.problems)

    @property
    def seconds(self) -> float:
        """Seconds that are left for the stage."""
        return float(min(self.stage_deadline_s, self.deadline_s) - time.monotonic())

    def run(self, names: Iterable[str]) -> None:
        """Run these stages. An exception in one is reported as a problem, and the next one runs."""
        waiting = list(names)
        while waiting:
            name = waiting.pop(0)
            if self.deadline_s - time.monotonic() <= 1:
                self.skip(name, "no time left")
                continue
            start_s, before, problems = time.monotonic(), num_kernels(), len(self.problems)
            # The emulator's time depends on this machine.
            self.stage_deadline_s = self.deadline_s if self.arguments.emulate else start_s + STAGES[name].seconds
            print(f"== {name}: {STAGES[name].what}", flush=True)
            try:
                stage: Callable[[], None] = getattr(self, name)
                stage()
            except Exception as error:
                self.problem(f"{name}: the script itself: {type(error).__name__}: {error}")
            seconds = round(time.monotonic() - start_s, 1)
            self.found.setdefault("seconds", {})[name] = seconds
            if name != "kernels" and (compiled := num_kernels() - before) > 0:
                self.found.setdefault("compiled", {})[name] = compiled
            self.note(stage=name, seconds=seconds)
            if name == SMOKE and any(text.startswith(SMOKE) for text in self.problems[problems:]):
                print("smoke: something that must work does not, so what is left is not run", flush=True)
                self.found["left out"] = waiting
                return

    def close(self) -> None:
        shutil.rmtree(self.site, ignore_errors=True)

    # ---- the stages

    def describe(self) -> str | None:
        """Print the machine. Returns the device's name, None if there is none. Raises ImportError."""
        import numpy as np
        import torch

        self.found |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": _commit()}
        self.found["versions"] = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "numpy": np.__version__,
        }
        if self.arguments.emulate:
            self.found["device"] = "emulator"
        elif torch.cuda.is_available():
            self.found["device"] = torch.cuda.get_device_name()
            properties = torch.cuda.get_device_properties(0)
            self.found["memory_gib"] = round(properties.total_memory / 2**30, 1)
            self.found["sm"] = f"{properties.major}.{properties.minor} x {properties.multi_processor_count}"
            self.found["versions"] |= {"cuda": torch.version.cuda, "cupy": _version("cupy")}
            self.found["tools"] = {name: tools.installed(name) for name in (tools.SANITIZER, tools.PROFILER)}
            if find_spec("cupy") is None:
                self.problem("cupy is not installed: no kernel can run; pip install cupy-cuda12x or cupy-cuda13x")
        else:
            return None
        print(json.dumps(self.found, indent=1), flush=True)
        return str(self.found["device"])

    def wheels(self) -> None:
        """Unpack the wheels of a folder; one is used only where this Python has no such module already."""
        if not self._lacking() and not self.arguments.wheels:
            self.skip("wheels", "nothing is lacking")
            self._imports()
            return
        if (folder := wheel_folder(self.arguments.wheels)) is None:
            self.skip("wheels", f"no folder with wheels; lacking: {self._lacking() or 'nothing'}")
            return
        taken, left = unpack_wheels(folder, Path(self.site))
        sys.path.append(self.site)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), self.site]))
        self.found["wheels"] = {"taken": taken, "left": left}
        print(f"wheels: {len(taken)} unpacked, {len(left)} are for another Python or machine", flush=True)
        if lacking := self._lacking():
            self.problem(f"wheels: behind those of {folder} there is still no {lacking}")
        else:
            self._imports()

    def _imports(self) -> None:
        done = self._command([sys.executable, "-c", IMPORTS], self.seconds)
        if done["status"] != 0:
            self.problem(f"wheels: a worker cannot be imported: {done['tail'][-1] if done['tail'] else done['status']}")

    def kernels(self) -> None:
        archive = ROOT / CARRIED / KERNELS
        if not archive.exists():
            self.skip("kernels", f"no {CARRIED}/{KERNELS}: what is needed is compiled here")
            return
        self.found["kernels"] = count = unpack_kernels(archive, kernel_cache())
        print(f"kernels: {count} were compiled ahead", flush=True)

    def native(self) -> None:
        self.found["native"] = said = self.build.start(STAGES["native"].seconds)
        print(f"native: {said}", flush=True)

    def cases(self) -> None:
        """Run the cases of several files at a time, because compiling takes longer than running."""
        names = sorted(path.stem for path in (ROOT / "tests" / "kernels").glob("*_cases.py"))
        names = [name for name in names if self.arguments.cases in name]
        deadline_s = time.monotonic() + self.seconds
        at_once = 1 if self.arguments.emulate else max(1, min(6, (os.cpu_count() or 2) // 2))
        options = [*self.mode, *(["--max-cases", str(self.arguments.max_cases)] if self.arguments.max_cases else [])]
        with ThreadPoolExecutor(at_once) as pool:
            self.results = list(pool.map(lambda name: run_cases(name, options, deadline_s), names))
        found = {result.name: {"passed": result.passed, "failed": result.failures} for result in self.results}
        self.found["cases"] = found
        for result in self.results:
            if result.skipped:
                self.found["cases"][result.name]["skipped"] = result.skipped
            for case, message in result.failures.items():
                self.problem(f"{result.name}: {case}: {message}")
            for message in result.problems:
                self.problem(f"{result.name}: {message}")

    def smoke(self) -> None:
        if why := self._engineless("engines"):
            self.problem(f"smoke: {why}")
            return
        self._events("smoke", "gpu_check_smoke.py")

    def graphs(self) -> None:
        self._events("graphs", "gpu_check_graphs.py")

    def sanitize(self) -> None:
        if not tools.installed(tools.SANITIZER):
            self.skip("sanitize", f"no {tools.SANITIZER}")
            return
        failed = {result.name: sorted(result.numbers.values())[:4] for result in self.results if result.numbers}
        chosen = failed or {name: list(range(4)) for name in tools.SOUND}
        seconds = self.seconds / len(chosen)
        for name, numbers in chosen.items():
            self.take("sanitize", tools.sanitize(name, numbers, seconds, self.mode))

    def step_1b(self) -> None:
        self._step("tiny" if self.arguments.emulate else "1b")

    def step_8b(self) -> None:
        self._step("8b")

    def _step(self, model: str) -> None:
        if why := self._engineless("steps"):
            self.skip(f"step_{model}", why)
            return
        self._events("step", "gpu_check_step.py", model)

    def speed(self) -> None:
        self._events("speed", "gpu_check_bench.py", "first")

    def bench(self) -> None:
        self._events("bench", "gpu_check_bench.py", "second")

    def prefill(self) -> None:
        self._events("prefill", "gpu_check_prefill.py")

    def parallel(self) -> None:
        if why := self._engineless("ranks"):
            self.skip("parallel", why)
            return
        self._events("parallel", "gpu_check_parallel.py")

    def recovery(self) -> None:
        if why := self._engineless("an engine"):
            self.skip("recovery", why)
            return
        self._events("recovery", "gpu_check_recovery.py")

    def profile(self) -> None:
        if not tools.installed(tools.PROFILER):
            self.skip("profile", f"no {tools.PROFILER}")
            return
        self.take("profile", tools.profile(self.seconds, self.mode))

    def worker(self) -> None:
        if lacking := self._lacking("pytest", "transformers"):
            self.skip("worker", f"{WORKER_TESTS} needs {lacking}")
            return
        found = run_tests(WORKER_TESTS, self._command, self.seconds)
        self.found["worker"] = {"passed": found.passed, "skipped": found.skipped}
        print(f"worker: {len(found.passed)} passed, {len(found.skipped)} skipped", flush=True)
        for problem in found.problems:
            self.problem(f"worker: {problem}")

    def throughput(self) -> None:
        """Tokens a second of a random Llama through all processes."""
        if why := self._engineless("end to end"):
            self.skip("throughput", why)
            return
        model, sizes, device = END_TO_END_MODEL, ("128", "128", "128"), "cuda"
        if self.arguments.emulate:
            model, sizes, device = "demo", ("4", "16", "8"), "cpu"
        for name in ("graphs", "eager"):
            environment = {"VLLM_LITE_ENFORCE_EAGER": str(name == "eager").lower(), "VLLM_LITE_DEVICE": device}
            command = [sys.executable, "-m", "vllm_lite", "bench", "throughput", "--model", model, "--json"]
            for flag, value in zip(("--num-prompts", "--input-len", "--output-len"), sizes, strict=True):
                command += [flag, value]
            done = self._command(command, self.seconds / (2 if name == "graphs" else 1), environment)
            figures = last_json(done["out"])
            self.found.setdefault("throughput", {})[name] = figures or done["tail"]
            if figures is None:
                self.problem(f"throughput ({name}): {' '.join(done['tail'][-2:])}")
                continue
            print(f"throughput, {name}: {json.dumps(figures)}", flush=True)
            row = {
                "kernel": f"throughput, {name}",
                "shape": "{} x {} + {}".format(*sizes),
                "tokens_s": figures.get(TOKENS_S),
            }
            self.take("throughput", [{"row": row}])

    def engines(self) -> None:
        """The same prompts through this engine and through vLLM, each in its own Python."""
        pythons = {"ours": sys.executable}
        if (other := self._vllm_python()) is not None:
            pythons["vllm"] = other
        else:
            self.found["vllm"] = f"not found: no module vllm here, and none in {', '.join(VLLM_FOLDERS)} or --vllm"
        model = "tiny" if self.arguments.emulate else "1b"
        with tempfile.TemporaryDirectory() as folder:
            # A separate process writes it, because the module with the configuration imports torch.
            code = f"import gpu_check_models; gpu_check_models.write_model({model!r}, {folder!r})"
            if self._engineless("") or self._command([sys.executable, "-c", code], 60)["status"] != 0:
                self.skip("engines", self._engineless("an engine") or "no model could be written")
                return
            for engine, python in pythons.items():
                command = [python, str(FOLDER / "gpu_check_engines.py"), engine, folder, *self.mode]
                done = self._command(command, self.seconds / (2 if engine == "ours" else 1))
                figures = last_json(done["out"])
                if figures is None or done["status"] != 0:
                    self.problem(f"engines: {engine}: {' | '.join(done['tail'][-3:])}")
                for load, rate in (figures or {}).items():
                    if load.endswith("tokens/s"):
                        shape = f"{load.partition(',')[0]} {model}"
                        self.take(
                            "engines", [{"row": {"kernel": f"engine: {engine}", "shape": shape, "tokens_s": rate}}]
                        )

    def _vllm_python(self) -> str | None:
        """The Python of a vLLM installation; None if there is none."""
        if self.arguments.vllm:
            return str(self.arguments.vllm)
        if find_spec("vllm") is not None:
            return sys.executable
        found = (ROOT / folder / "bin" / "python" for folder in VLLM_FOLDERS)
        return next((str(python) for python in found if python.exists()), None)

    def _lacking(self, *more: str) -> str:
        lacking = [name for name in (*NEEDED, *more) if find_spec(name) is None]
        return ", ".join({"zmq": "pyzmq"}.get(name, name) for name in lacking)

    def _engineless(self, what: str) -> str:
        """A sentence that says why no engine can run here, or "". Before the first engine it waits for the build of the
        native library."""
        if failed := self.build.wait():
            self.problem(f"native: {failed}")
            self.build = NativeBuild()
        return f"{what} need{'s' * (what[:2] == 'an')} {lacking}" if (lacking := self._lacking()) else ""

    # ---- how they run

    def _events(self, name: str, script: str, *options: str) -> None:
        part = Part(name, [str(FOLDER / script), *options, *self.mode])
        self.take(name, run_restarted(part, time.monotonic() + self.seconds))
        for problem in part.problems:
            self.problem(f"{name}: {problem}")

    def take(self, name: str, events: Iterable[Event]) -> None:
        """Store the events of a part as they arrive."""
        for event in events:
            if "row" in event:
                self.rows.append(event["row"])
                self.note(part=name, **event["row"])
            elif "failed" in event:
                self.problem(f"{name}: {event['failed']}")
            elif "ended" in event:
                self.problem(f"{name}: {event['case']}: {event['ended']}")
            elif "fact" in event:
                self.found.setdefault(name, {}).update(event["fact"])
                self.note(part=name, fact=event["fact"])

    def _command(self, command: list[str], most_s: float, environment: dict[str, str] | None = None) -> dict[str, Any]:
        seconds = min(most_s, self.deadline_s - time.monotonic())
        if seconds <= 1:
            return {"status": None, "out": "", "tail": ["no time left"]}
        print(f"$ {' '.join(command[1:])}", flush=True)
        with tempfile.TemporaryFile("w+") as out:
            try:
                status: int | None = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=os.environ | PATIENCE | {"PYTHONPATH": python_path(ROOT, FOLDER)} | (environment or {}),
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=seconds,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = None
            out.seek(0)
            text = out.read()
        tail = text.splitlines()[-15:] + ([f"stopped after {seconds:.0f} s"] if status is None else [])
        if status != 0:
            print("\n".join(tail), flush=True)
        return {"status": status, "out": text, "tail": tail}

    def note(self, **found: Any) -> None:
        """Append a line to the file with the findings of all runs."""
        folder = Path(self.arguments.out)
        folder.mkdir(parents=True, exist_ok=True)
        header = {name: self.found.get(name) for name in ("date", "commit", "device")}
        with (folder / "gpu_check.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(header | found) + "\n")

    def problem(self, text: str) -> None:
        self.problems.append(text)
        self.note(problem=text)
        print(f"FAILED {text}", flush=True)

    def skip(self, name: str, why: str) -> None:
        self.found[name] = {"skipped": why}
        print(f"skipped {name}: {why}", flush=True)


def kernel_cache() -> Path:
    """Folder in which workers look for compiled kernels."""
    from vllm_lite.kernels.cuda.compiler import cache_folder

    return cache_folder()


def num_kernels() -> int:
    """Number of kernels in the cache. The increase during a stage is the number that it compiled."""
    return sum(1 for _ in kernel_cache().glob("*.cubin"))


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _version(module: str) -> str:
    try:
        return str(__import__(module).__version__)
    except ImportError as error:
        return f"none ({error})"


def last_json(text: str) -> dict[str, Any] | None:
    """The last JSON object in `text` that has lines to itself."""
    start = text.rfind("\n{") + 1 if "\n{" in text else text.find("{")
    try:
        value = json.loads(text[start:]) if start >= 0 else None
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
