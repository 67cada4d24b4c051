"""`vllm-lite replay --page` in a real browser: through a trace by slider, keys and links; hostile texts stay texts."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import scaled
from tests.pages import HOSTILE, check_with_axe, opened
from tests.recorded import Recorded
from tests.unit.test_cli_trace import make_trace

NAMES = [*HOSTILE[::4], "x" * 200]
"""A part of them: a trace says them as request ids, in sentences and as causes of death."""


@contextmanager
def shown(trace: Path) -> Iterator[str]:
    """The address of the trace's page."""
    command = [sys.executable, "-m", "vllm_lite", "replay", str(trace), "--page", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"is shown at (\S+)/ until", line)
            assert found, line
            yield found.group(1)
        finally:
            process.terminate()
            assert process.wait(scaled(30.0)) == 0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with shown(make_trace(tmp_path_factory.mktemp("traces") / "trace")) as address:
        yield address


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    with opened(browser, url) as found:
        found.wait_for_selector("#connection:text-is('recorded: 37 moments')")
        found.wait_for_selector("#at:has-text('step 1:')")
        yield found


def step(page: Any) -> int:
    return int(re.search(r"step (\d+)", page.inner_text("#at")).group(1))  # type: ignore[union-attr]


def test_keys_buttons_and_the_slider_move_through_the_trace(page: Any) -> None:
    assert page.is_hidden("#chat")
    assert page.is_hidden("#access")
    arrows = ("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2)
    for key, wanted in (*arrows, ("PageDown", 12), ("PageUp", 2), ("End", 36), ("Home", 1)):
        page.keyboard.press(key)
        page.wait_for_selector(f"#at:has-text('step {wanted}:')")
    page.click("#later")
    page.wait_for_selector("#at:has-text('step 2:')")
    page.click("#earlier")
    page.wait_for_selector("#at:has-text('step 1:')")
    page.focus("#moment")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#at:has-text('step 2:')")
    assert page.get_attribute("#moment", "aria-valuetext") == page.inner_text("#at")
    page.focus("#tab-live")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#model"), "there the arrows are the tabs'"
    assert step(page) == 2
    assert "fcfs" in page.inner_text("#card")
    assert page.is_hidden("#curl")


def test_a_link_points_at_a_moment(page: Any, url: str) -> None:
    page.evaluate("location.hash = 'step=9'")
    page.wait_for_selector("#at:has-text('step 9:')")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**/#step=10")
    page.reload()
    page.wait_for_selector("#at:has-text('step 10:')")
    for wrong, wanted in (("step=99999", "the end, behind step 36:"), ("step=0", "step 1:"), ("step=<b>", "step 1:")):
        page.goto(f"{url}/?{wanted}#{wrong}")
        page.wait_for_selector(f"#at:has-text('{wanted}')")


def test_a_step_has_its_requests_reasons_and_blocks(page: Any, url: str) -> None:
    page.evaluate("location.hash = 'step=7'")
    page.wait_for_selector("#at:has-text('step 7:')")
    page.wait_for_selector("tr:has(td:text-is('waiting')) td.why:text-is('it needs 6 KV blocks and 3 of 9 are free')")
    assert page.locator(".rows tbody tr:has(button)").count() == 3
    page.wait_for_selector(".engine .legend li:text-is('held by one: 6')")
    page.wait_for_selector(".engine p:text-is('step 7: 2 sequences, 2 tokens of outputs, 0 of prompts')")
    page.click("tr:has(td:text-is('waiting')) td button")
    assert page.inner_text("#why-sentence") == "It waits: it needs 6 KV blocks and 3 of 9 are free."
    page.wait_for_selector("#why-story li:has-text('Sample 0 was admitted, to compute 16 tokens in 6 blocks.')")
    page.click("#why button")
    page.keyboard.press("Home")
    page.wait_for_selector("tr:has(button:text-is('third'))", state="detached")
    assert page.locator(".rows tbody tr:has(button)").count() == 2, "a moment has what was there, and no more"
    page.keyboard.press("End")
    page.wait_for_selector("#live p:has-text('no request is live')")


def test_the_replay_page_plays_to_the_end_and_stops(page: Any) -> None:
    page.select_option("#speed", "100")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Space")
    page.wait_for_selector("#play:text-is('Pause')")
    page.wait_for_selector("#at:has-text('the end, behind step 36:')")
    page.wait_for_selector("#play:text-is('Play')")
    page.select_option("#speed", "1")
    page.click("#play")
    page.wait_for_selector("#at:has-text('step 1:')")
    page.click("#play")
    page.wait_for_selector("#play:text-is('Play')")
    assert step(page) < 36


def test_sparklines_lead_to_the_moment(page: Any) -> None:
    page.keyboard.press("End")
    page.wait_for_selector("#at:has-text('the end')")
    page.wait_for_selector("#live p:has-text('no request is live')")
    lengths = page.evaluate("Object.values(engines.get('0').series).map(each => each.length)")
    assert lengths == [37] * len(lengths)
    waiting = page.evaluate("engines.get('0').series['waiting']")
    assert (waiting[0], max(waiting), waiting[-1]) == (0, 2, 0)
    page.keyboard.press("Home")
    page.wait_for_selector("#at:has-text('step 1:')")
    assert page.evaluate("engines.get('0').series['waiting']") == [0]


def test_a_screen_reader_finds_its_way(page: Any) -> None:
    page.evaluate("location.hash = 'step=7'")
    page.wait_for_selector("#at:has-text('step 7:')")
    check_with_axe(page)
    page.click("tr td button >> nth=0")
    page.wait_for_selector("#why-story li")
    check_with_axe(page)
    page.click("#why button")
    page.click("[role=tab]:text-is('Trace')")
    check_with_axe(page)


def hostile_trace(path: Path) -> Path:
    recorded = Recorded(path, 200, max_num_seqs=60, max_num_batched_tokens=400)
    for number, name in enumerate(NAMES):
        recorded.add(name, [number % 50, 1, 2, 3, 4], max_tokens=9, ignore_eos=True)
    recorded.loop()
    recorded.lose_workers(HOSTILE[1])
    recorded.replace_workers()
    for _ in range(3):
        recorded.loop()
    recorded.core.close()
    return path


def test_hostile_texts_in_a_trace_stay_texts(browser: Any, tmp_path: Path) -> None:
    trace = hostile_trace(tmp_path / '<img src=x onerror="window.pwned=1">')
    with shown(trace) as address, opened(browser, f"{address}/#step=2") as page:
        page.wait_for_selector("#at:has-text('step 2:')")
        page.wait_for_selector(f".rows tbody tr:has(button) >> nth={len(NAMES) - 1}")
        assert {text.strip() for text in page.locator(".rows tbody td:first-child").all_inner_texts()} >= {"x" * 200}
        for place in (0, 7, 31):
            page.click(f".rows tbody tr button >> nth={place}")
            page.wait_for_selector("#why-story li:has-text('the workers died')")
            page.click("#why button")
        page.click(".talks summary")
        page.keyboard.press("ArrowRight")
        page.click("[role=tab]:text-is('Trace')")
        assert page.evaluate("document.querySelectorAll('#live img, #why img, #why script, header img').length") == 0
        assert "onerror" in page.title()
