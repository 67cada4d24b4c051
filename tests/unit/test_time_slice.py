"""Time slices of threads, as the kernel reports them."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deadlines import scaled
from vllm_lite.client.text.templates.closing_token import rendered_by
from vllm_lite.client.text.templates.template_source import TemplateSource
from vllm_lite.client.text.tokenizer_formats.conversion import ForeignTokenizer, convert
from vllm_lite.runtime import supervise
from vllm_lite.server.openai.rendering import Renderer
from vllm_lite.transport.time_slice import SHORTEST_NS, reset_slice, short_slices, shorten_slice


def slice_of(task: Path) -> int:
    """The slice of a thread, given by its folder in /proc; 0 if the kernel does not report it."""
    try:
        lines = (task / "sched").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[-1]) for line in lines if line.startswith("se.slice")), 0)


def own_slice_ns() -> int:
    return slice_of(Path("/proc/thread-self"))


def on_a_thread(run: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(scaled(10))
    if failures:
        raise failures[0]


def skip_without_slices() -> None:
    """Skip a test where a thread cannot have a slice of its own, or the kernel does not report it."""
    found: list[int] = []

    def shorten() -> None:
        shorten_slice()
        found.append(own_slice_ns())

    on_a_thread(shorten)
    if found != [SHORTEST_NS]:
        pytest.skip("this system has no slices of a thread's own, or does not report them")


@pytest.fixture(autouse=True)
def needs_own_slices() -> None:
    skip_without_slices()


def test_threads_started_inside_get_a_short_slice_and_the_caller_keeps_its_own() -> None:
    def run() -> None:
        reset_slice()  # an earlier test may have run an engine's loop on the thread that started this one
        before_ns, inside = own_slice_ns(), list[int]()
        with short_slices():
            on_a_thread(lambda: inside.append(own_slice_ns()))
        assert inside == [SHORTEST_NS]
        assert own_slice_ns() == before_ns > SHORTEST_NS

    on_a_thread(run)


def test_a_reset_gives_the_default_again() -> None:
    def run() -> None:
        reset_slice()
        before_ns = own_slice_ns()
        shorten_slice()
        reset_slice()
        assert own_slice_ns() == before_ns

    on_a_thread(run)


class _StartedError(Exception):
    """A process would be started now."""


@pytest.mark.parametrize(
    "start",
    [
        lambda: Renderer(TemplateSource("plain")),
        lambda: rendered_by(TemplateSource("plain")),
        lambda: convert(ForeignTokenizer("tekken", Path("tekken.json")), Path()),
    ],
)
def test_processes_of_templates_and_tokenizers_inherit_no_short_slice(
    start: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def spawn(*_: object, **__: object) -> None:
        found.append(own_slice_ns())
        raise _StartedError

    def run() -> None:
        reset_slice()
        usual_ns = own_slice_ns()
        shorten_slice()
        with pytest.raises(_StartedError):
            start()
        assert found == [usual_ns]
        assert own_slice_ns() == SHORTEST_NS

    monkeypatch.setattr(supervise, "spawn", spawn)
    on_a_thread(run)
