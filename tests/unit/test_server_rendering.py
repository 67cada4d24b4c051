"""Chats rendered in the template's own process: the same text, and no template takes more than it may."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

from tests.deadlines import scaled
from tests.unit.test_chat_template import CHATML, CHATS, FAMILIES, QWEN, TOKENS, USER
from vllm_lite.client.text.templates import template_process
from vllm_lite.client.text.templates.chat_template import ChatTemplate
from vllm_lite.client.text.templates.template_process import Render
from vllm_lite.client.text.templates.template_source import TemplateSource
from vllm_lite.errors import EngineError, ModelError, RequestError
from vllm_lite.runtime import frames
from vllm_lite.server.openai.rendering import Renderer

DEADLINE_S = scaled(60.0)
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
FILTERS = LOOPS.replace("{% endfor %}", "{% if messages | map(attribute='content') | join %}{% endif %}{% endfor %}", 1)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time limits, which most tests here use up."""
    monkeypatch.setattr(template_process, "__name__", "tests.unit.hasty_template_process")


@contextmanager
def rendering(source: str) -> Iterator[Renderer]:
    renderer = Renderer(TemplateSource(source, TOKENS))
    try:
        yield renderer
    finally:
        renderer.close()


def chat(messages: list[dict[str, Any]], **settings: Any) -> Render:
    defaults = {"add_generation_prompt": True, "continue_final_message": False, "variables": {}, "max_chars": 10_000}
    return Render(messages, **{**defaults, **settings})


async def wanted() -> bool:
    return True


async def text_of(renderer: Renderer, asked: Render) -> str:
    async with asyncio.timeout(DEADLINE_S):
        return (await renderer.render(asked, wanted)).text


async def test_chats_with_tools_get_their_template() -> None:
    renderer = Renderer(TemplateSource("plain", for_tools="{{ tools[0].name }}"))
    try:
        assert renderer.takes_tools
        assert await text_of(renderer, chat([USER])) == "plain"
        assert await text_of(renderer, chat([USER], tools=[{"name": "add"}])) == "add"
    finally:
        renderer.close()


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_text_is_the_same(family: str) -> None:
    template = ChatTemplate(TemplateSource(FAMILIES[family], TOKENS))
    with rendering(FAMILIES[family]) as renderer:
        for messages in CHATS:
            assert await text_of(renderer, chat(messages)) == template.render(messages)
        continued = chat([USER, {"role": "assistant", "content": "It is  "}], continue_final_message=True)
        continued = Render(continued.messages, False, True, {}, 10_000)
        settings = {"add_generation_prompt": False, "continue_final_message": True}
        assert await text_of(renderer, continued) == template.render(continued.messages, **settings)
        assert renderer.num_starts == 1


async def test_variables_and_errors_of_the_template() -> None:
    with rendering(QWEN + "{% if no is defined %}{{ raise_exception('no: ' ~ no) }}{% endif %}") as renderer:
        assert "<think>" in await text_of(renderer, chat([USER], variables={"enable_thinking": False}))
        for name, message in (("no", "no: 5"), ("messages", "cannot set 'messages'")):
            with pytest.raises(RequestError, match=message):
                await text_of(renderer, chat([USER], variables={name: 5}))
        with pytest.raises(RequestError, match="64 bits"):
            await text_of(renderer, chat([USER], variables={"big": 2**70}))
        assert renderer.num_starts == 1


@pytest.mark.parametrize(
    "source",
    [
        LOOPS,
        "{% macro again(n) %}{% for i in range(n) %}{{ again(n - 1) }}{% endfor %}{% endmacro %}{{ again(50) }}",
        FILTERS,
        "{% set n = 9 * (messages | length) %}{{ n ** (n ** n) }}",
    ],
    ids=["loops", "macros", "filters", "power"],
)
async def test_a_template_has_only_so_much_time(source: str) -> None:
    """The loop continues meanwhile. The process is killed, and a new one renders the next chat."""

    with rendering("{% if messages[0].role == 'bad' %}" + source + "{% endif %}ok") as renderer:
        bad = asyncio.create_task(text_of(renderer, chat([{"role": "bad", "content": "x"}])))
        turns = 0
        while not bad.done():
            await asyncio.sleep(0.001)
            turns += 1
        with pytest.raises(RequestError, match=r"takes too much: a rendering may take 1 s of processor time"):
            await bad
        assert turns > 10
        assert await text_of(renderer, chat([USER])) == "ok"
        assert renderer.num_starts == 2


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content * 10**10 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ messages[0].content.center(10**10) }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(50) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    ],
    ids=["times", "format", "center", "lists"],
)
async def test_a_template_has_only_so_much_memory(source: str) -> None:
    with rendering("{% if messages[0].role == 'bad' %}" + source + "{% endif %}ok") as renderer:
        with pytest.raises(RequestError, match=r"takes too much: .* 512 MiB of memory"):
            await text_of(renderer, chat([{"role": "bad", "content": "x"}]))
        with suppress(psutil.NoSuchProcess):  # on a slow machine it takes too much time before
            assert psutil.Process(renderer.pid).memory_info().rss < template_process.MAX_MEMORY_BYTES
        assert await text_of(renderer, chat([USER])) == "ok"


def test_a_chat_that_memory_has_no_room_for_is_the_only_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process continues, because its end would be a 503 for other requests, too."""
    large = "x" * 3_000_000

    def bounded(size: int = 0) -> bytearray:
        if size > 2_000_000:
            raise MemoryError
        return bytearray(size)

    monkeypatch.setattr(frames, "bytearray", bounded, raising=False)
    monkeypatch.setattr(template_process, "limit_cpu", lambda _: None)
    ours, theirs = socket.socketpair()
    template = ChatTemplate(TemplateSource("{{ messages[0].content | length }}", TOKENS))
    with theirs, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(template_process.serve, theirs, template)
        with ours:
            ours.settimeout(DEADLINE_S)
            for content, answer in ((large, "takes too much"), ("hello", "5"), (large, "takes too much"), ("hi", "2")):
                ours.sendall(frames.frame(chat([{"role": "user", "content": content}])))
                assert answer in bytes(frames.read_frame(ours)).decode(errors="replace")
        serving.result(DEADLINE_S)


async def test_the_characters_of_a_text_are_limited() -> None:
    says = "a prompt of 10035 characters; at most 10000"
    with rendering(CHATML) as renderer, pytest.raises(RequestError, match=says):
        await text_of(renderer, chat([{"role": "user", "content": "x" * 10_000}]))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "cannot be read: Expected an expression"),
        ("(" * 10 + "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be read"),
        ("{% for i in range(2) %}" * 30 + "{% endfor %}" * 30, "cannot be read"),
    ],
)
def test_a_template_that_cannot_be_compiled(source: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Renderer(TemplateSource(source))


def test_compiling_has_a_limit_as_well() -> None:
    with pytest.raises(ModelError, match="compiling it takes too long"):
        Renderer(TemplateSource("{{ 9 ** (9 ** 9) }}"))


async def test_nothing_is_rendered_for_a_client_that_has_gone() -> None:
    async def gone() -> bool:
        return False

    with rendering("{% if messages[0].role == 'bad' %}" + LOOPS + "{% endif %}ok") as renderer:
        first = asyncio.create_task(text_of(renderer, chat([USER])))
        left = [asyncio.create_task(renderer.render(chat([{"role": "bad", "content": ""}]), gone)) for _ in range(50)]
        last = asyncio.create_task(text_of(renderer, chat([USER])))
        assert [await first, await last] == ["ok", "ok"]
        for task in left:
            with pytest.raises(RequestError, match="gone"):
                await task
        assert renderer.num_starts == 1


async def test_a_process_that_was_killed_is_started_again() -> None:
    with rendering("{% if messages[0].role == 'bad' %}" + LOOPS + "{% endif %}ok") as renderer:
        os.kill(renderer.pid, signal.SIGSTOP)
        asked = asyncio.create_task(text_of(renderer, chat([USER])))
        await asyncio.sleep(0)
        os.kill(renderer.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="killed by SIGKILL"):  # in the middle of it
            await asked
        assert await text_of(renderer, chat([USER])) == "ok"
        first = psutil.Process(renderer.pid)
        first.kill()
        first.wait(DEADLINE_S)  # between two
        assert await text_of(renderer, chat([USER])) == "ok"
        assert renderer.num_starts == 3


async def test_a_cancelled_rendering_is_not_the_next_ones_answer() -> None:
    with rendering("{{ messages[0].content }}") as renderer:
        os.kill(renderer.pid, signal.SIGSTOP)
        asked = asyncio.create_task(text_of(renderer, chat([{"role": "user", "content": "secret"}])))
        for _ in range(5):
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert await text_of(renderer, chat([{"role": "user", "content": "mine"}])) == "mine"


def test_it_ends_when_it_is_closed() -> None:
    with rendering("ok") as renderer:
        process = psutil.Process(renderer.pid)
    process.wait(DEADLINE_S)


async def test_waiting_calls_get_an_error_when_it_is_closed() -> None:
    with rendering(LOOPS) as renderer:
        waiting = [asyncio.create_task(text_of(renderer, chat([USER]))) for _ in range(3)]
        for _ in range(5):
            await asyncio.sleep(0)
        renderer.close()
        for task in waiting:
            with pytest.raises(EngineError, match="shutting down"):
                await task
        assert renderer.num_starts == 1
