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

# No example is late on a busy machine; how long something takes is a benchmark's matter.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

# Tiny models gain nothing from threads, and OpenMP's spinning ones lose tenfold on a busy machine. Children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without bytecode every process that a test starts compiles the package anew: a fifth of what a server's start costs.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts the tests in the background has them ignore Ctrl-C, and the processes they start as well.
# A file's tests begin with it as well: one that calls `serve` in this process leaves another handler.
signal.signal(signal.SIGINT, signal.default_int_handler)


_GPU = Path(__file__).parent / "gpu"

STUCK_S = 600.0
"""A test that even a signal cannot end prints where it stands after so long."""
WATCH_EVERY_S = 60.0


_stderr = 2
_watched_s = -WATCH_EVERY_S


def pytest_configure(config: pytest.Config) -> None:
    """Only `pytest tests/gpu` sees a GPU: everything else is about the CPU, also where there is one."""
    global _stderr
    _stderr = os.dup(2)  # while a test runs, 2 is where its output is kept
    if not all("tests/gpu" in arg for arg in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without a GPU in sight each of its hundreds of tests would be skipped, in each process."""
    return True if collection_path == _GPU and not any("tests/gpu" in arg for arg in config.args) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Files are imported and tests made without garbage collections, which find next to nothing in what is there to
    stay: a quarter of what collecting costs."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


_frozen_for: Path | None = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the first test of a file: what it has imported is not to cost every test and every collection, and Ctrl-C
    is what it was, and so are the package's logs."""
    global _frozen_for
    _watch()
    if _frozen_for != item.path:
        _frozen_for = item.path
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.collect()
        gc.freeze()  # modules and thousands of tests are there to stay: half a second of every full collection
        _let_loggers_propagate()


def _watch() -> None:
    """Once a minute: faulthandler_timeout would start a thread and wait for the end of another one for every test."""
    global _watched_s
    if (now_s := time.monotonic()) - _watched_s > WATCH_EVERY_S:
        _watched_s = now_s
        faulthandler.dump_traceback_later(STUCK_S + WATCH_EVERY_S, file=_stderr)


def _let_loggers_propagate() -> None:
    """For every test pytest adds six handlers to each logger that does not propagate. torch has 40 of those; the
    package's own is one once a test has set it up, and a later one that has it propagate would see records twice."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith(("torch", "vllm_lite")) and isinstance(logger, logging.Logger):
            logger.propagate = True


_FOLDERS = ["real", "e2e", "cpu", "kernels", "unit"]
_LONG = ("conversion", "cut_calls", "gpu_check", "recorded_process", "response_formats", "simulated", "torch_import")
"""Beginnings of the names of files in tests/unit that take seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that several processes end together (with --no-loadscope-reorder)."""
    here = Path(__file__).parent

    def place(item: pytest.Item) -> tuple[int, bool]:
        folder = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        is_short = not item.path.name.removeprefix("test_").startswith(_LONG)
        return _FOLDERS.index(folder) if folder in _FOLDERS else len(_FOLDERS), folder == "unit" and is_short

    items.sort(key=place)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The `timeout` of pyproject.toml, or of a test's own mark, is for an idle machine. scripts/gpu_check has neither
    the setting nor the plugin."""
    if item.config.pluginmanager.hasplugin("timeout") and item.config.getoption("timeout") is None:
        own = item.get_closest_marker("timeout")
        limit_s = own.args[0] if own else item.config.getini("timeout")
        if limit_s:
            item.add_marker(pytest.mark.timeout(scaled(float(limit_s))), append=False)
    return (yield)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """A test that is a coroutine has an asyncio loop of its own. An exception that nobody awaits fails it."""
    return "asyncio"


_rendered: dict[bytes, dict[str, str]] = {}
"""By template, the chats that say which token closes a message."""


@pytest.fixture
def images_cut_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are cut in this process, with the same messages, and a template that was rendered for an earlier engine is
    not rendered again. Processes of their own take a third and a tenth of a second to start, and an engine starts two
    of the former and one of the latter."""
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
