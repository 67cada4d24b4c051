"""Fixtures that many tests share."""

import faulthandler
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import msgspec
import pytest

from tests.checkpoints import make_checkpoint
from tests.deadlines import scaled
from tests.few_reports import FewReports

# No example is late on a busy machine; how long something takes is a benchmark's matter.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

# Tiny models gain nothing from threads, and OpenMP's spinning threads are ten times slower on a busy machine. Child
# processes inherit the setting.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without bytecode, every process that a test starts compiles the package again: a fifth of a server's start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# If a shell starts the tests in the background, they and their child processes ignore Ctrl-C. A file's tests begin with
# it as well: one that calls `serve` in this process leaves another handler.
signal.signal(signal.SIGINT, signal.default_int_handler)


_GPU = Path(__file__).parent / "gpu"

STUCK_S = 600.0
"""Seconds after which a test that no signal can end prints its stack."""
WATCH_EVERY_S = 60.0


_stderr = 2
_watched_s = -WATCH_EVERY_S


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests except those of `pytest tests/gpu`: the others test the CPU, even on a machine with a
    GPU."""
    global _stderr
    _stderr = os.dup(2)  # while a test runs, descriptor 2 is pytest's capture
    if not all("tests/gpu" in arg for arg in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    if hasattr(config, "workerinput") and not config.getoption("xmlpath"):  # its file needs every report
        config.pluginmanager.register(FewReports())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore tests/gpu without a GPU, where each process would skip each of its hundreds of tests."""
    return True if collection_path == _GPU and not any("tests/gpu" in arg for arg in config.args) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Turn garbage collection off while files are imported and tests created: these objects stay, so it finds next to
    nothing, and it takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


_frozen_for: Path | None = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the first test of a file: freeze imported objects, so that garbage collections skip them, and restore the
    handler of Ctrl-C and the package's logs."""
    global _frozen_for
    _watch()
    if _frozen_for != item.path:
        _frozen_for = item.path
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.collect()
        gc.freeze()  # modules and thousands of tests stay, and would take half a second of every full collection
        _let_loggers_propagate()


def _watch() -> None:
    """Restart the watchdog, once a minute. faulthandler_timeout would start and join a thread for every test."""
    global _watched_s
    if (now_s := time.monotonic()) - _watched_s > WATCH_EVERY_S:
        _watched_s = now_s
        faulthandler.dump_traceback_later(STUCK_S + WATCH_EVERY_S, file=_stderr)


def _let_loggers_propagate() -> None:
    """Let all loggers propagate, because pytest adds six handlers per test to each logger that does not. torch has 40
    of these. The package's own logger becomes one when a test sets it up; a later test that makes it propagate would
    see records twice."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith(("torch", "vllm_lite")) and isinstance(logger, logging.Logger):
            logger.propagate = True


_FOLDERS = ["real", "e2e", "cpu", "kernels", "unit"]
_LONG = ("conversion", "cut_calls", "gpu_check", "recorded_process", "response_formats", "simulated", "torch_import")
"""Beginnings of the names of files in tests/unit that take seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow files first, so that several processes end at about the same time (with --no-loadscope-reorder)."""
    here = Path(__file__).parent

    def place(item: pytest.Item) -> tuple[int, bool]:
        folder = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        is_short = not item.path.name.removeprefix("test_").startswith(_LONG)
        return _FOLDERS.index(folder) if folder in _FOLDERS else len(_FOLDERS), folder == "unit" and is_short

    items.sort(key=place)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Scale the `timeout` of pyproject.toml or of a test's own mark, which is for an idle machine. scripts/gpu_check
    has neither the setting nor the plugin."""
    if item.config.pluginmanager.hasplugin("timeout") and item.config.getoption("timeout") is None:
        own = item.get_closest_marker("timeout")
        limit_s = own.args[0] if own else item.config.getini("timeout")
        if limit_s:
            item.add_marker(pytest.mark.timeout(scaled(float(limit_s))), append=False)
    return (yield)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run each coroutine test in an asyncio loop of its own. An exception that nobody awaits fails the test."""
    return "asyncio"


_rendered: dict[bytes, dict[str, str]] = {}
"""Template -> the rendered chats that show which token closes a message."""


@pytest.fixture
def images_cut_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preprocess images in this process, with the same messages, and reuse templates that were rendered for an earlier
    engine. Child processes would take a third and a tenth of a second to start, and an engine starts two for images and
    one for templates."""
    from vllm_lite.client.media import image_pool, image_process
    from vllm_lite.client.text.templates import closing_token
    from vllm_lite.client.text.templates.template_source import TemplateSource

    class Here:
        def __init__(self, _: int) -> None: ...

        def asked(self, job: image_process.ImageJob) -> image_process.Answer:
            sent = msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=image_process.ImageJob)
            answer = image_process.answer(bytes(sent.data), sent.processor)
            return msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=image_process.Answer)

        def end(self) -> None: ...

    render = closing_token.rendered_by

    def rendered_by(template: TemplateSource) -> dict[str, str]:
        key = msgspec.msgpack.encode(msgspec.structs.replace(template, name=""))
        if key not in _rendered:
            _rendered[key] = render(template)
        return _rendered[key]

    monkeypatch.setattr(image_pool, "_Process", Here)
    monkeypatch.setattr(closing_token, "rendered_by", rendered_by)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer random Llama in float32 and its tokenizer; do not write to it."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny-llama")
