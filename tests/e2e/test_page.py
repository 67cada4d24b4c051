"""The page at / in a real browser: from nothing to why a request waits in three clicks; hostile texts stay texts."""

import json
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import scaled
from tests.http_server import Server, client, serving
from tests.live_numbers import counts_of, mean_ms
from tests.pages import HOSTILE, check_with_axe, opened
from vllm_lite.server.pages import pages


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--num-gpu-blocks-override", "100", "--max-num-seqs", "2") as running:
        yield running


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    with opened(browser, server.url) as found:
        found.wait_for_selector("#served:has-text('context of')")
        yield found


def long_requests(server: Server, count: int) -> list[threading.Thread]:
    """Requests, by the ids cmpl-r0 and so on, that run until they are aborted, or their 1,500 tokens are there."""
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}

    def ask(number: int) -> None:
        with client(server) as http:
            http.post("/v1/completions", json=body | {"request_id": f"r{number}"}, timeout=scaled(60)).read()

    asked = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in asked:
        thread.start()
    return asked


def test_from_an_empty_page_to_why_a_request_waits_in_three_clicks(page: Any, server: Server) -> None:
    asked = long_requests(server, 8)
    page.click("text=Live")
    page.click("tr:has(td:text-is('waiting')) td button")
    sentence = page.inner_text("#why-sentence")
    assert re.match(r"It (waits: .*(queue|batch|blocks|turn|step|computed).*|runs)\.", sentence), sentence
    assert "prompt" in page.inner_text("#why-facts")
    page.click("#why button")
    assert page.is_hidden("#why")
    with client(server) as http:
        for number in range(len(asked)):
            http.delete(f"/v1/requests/cmpl-r{number}")
    for thread in asked:
        thread.join(scaled(60))
    page.wait_for_selector("#live p:has-text('no request is live')")


def test_numbers_match_metrics(page: Any, server: Server) -> None:
    page.click("text=Live")
    page.wait_for_selector("dt:text-is('running')")
    with client(server) as http:
        http.post("/v1/completions", json={"prompt": "Once upon a time " * 9, "max_tokens": 3}).raise_for_status()
        metrics = http.get("/metrics").text
    counts = counts_of(metrics)
    expected = {
        "running": f"{counts['num_running']:,.0f}",
        "waiting": f"{counts['num_waiting']:,.0f}",
        "tokens/s": "0",
        "first token": f"{mean_ms(metrics, 'first_token_s'):.1f} ms",
        "between tokens": f"{mean_ms(metrics, 'token_gap_s'):.1f} ms",
        "queue": f"{mean_ms(metrics, 'queue_s'):.1f} ms",
        "prompts cached": f"{100 * counts['cached_tokens'] / counts['prompt_tokens']:.0f} %",
        "preempted": f"{counts['preemptions']:,.0f}",
        "swapped": f"{counts['swaps']:,.0f}",
        "drafts right": "\N{EN DASH}",
        "blocks copied": f"{counts['copied_blocks']:,.0f}",
        "on the host": f"{counts['num_used_host_blocks']:,.0f}",
        "on disk": f"{counts['num_stored_keys']:,.0f}",
    }
    assert counts["draft_tokens"] == 0
    names = page.locator(".figures").first.locator("dt").all_inner_texts()
    assert set(names) == expected.keys(), "no number is left out"
    for name, value in expected.items():
        page.wait_for_selector(f"div:has(> dt:text-is('{name}')) > dd:text-is('{value}')")
    held, cached = counts["num_used_blocks"], counts["num_cached_blocks"]
    free = counts["num_blocks"] - cached - held
    for text in (f"free: {free:,.0f}", f"free, but cached: {cached:,.0f}", f"held by one: {held:,.0f}"):
        page.wait_for_selector(f".legend li:text-is('{text}')")


def test_a_conversation_has_the_cached_tokens_of_its_turns(page: Any, server: Server) -> None:
    first = "Tell me of a brave bear who lived in a warm cave with all of its friends, and of a small grey fox. " * 3
    with client(server) as http:
        for prompt in (first, first + "The bear was very tired."):
            answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).raise_for_status().json()
    page.click("text=Live")
    page.click(".talks summary")
    talk = f".talks tr:has(td:text-is('{answer['id']}')):has(td:nth-child(2):text-is('2'))"
    page.wait_for_selector(talk)
    row = page.locator(f"{talk} td").all_inner_texts()
    prompt_tokens, found = answer["usage"]["prompt_tokens"], int(row[3])
    assert int(row[2]) < 2 * prompt_tokens
    assert prompt_tokens // 2 < found < prompt_tokens
    assert row[4] == f"{100 * found / int(row[2]):.0f} %"


def test_a_block_shows_its_requests_its_hash_and_its_copies(page: Any, server: Server) -> None:
    page.click("text=Live")
    page.wait_for_selector(".engine .legend")
    prompt = "Once there was a small red fox who wanted to see what is behind the hill, and went. " * 3
    with client(server) as http:
        http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).raise_for_status()
    page.wait_for_selector(".legend .evictable:not(:has-text(': 0'))")
    page.wait_for_function("() => [...engines.values()][0].kinds.includes(1)")
    block = page.evaluate("[...engines.values()][0].kinds.indexOf(1)")
    page.focus(".blocks")
    page.keyboard.press("ArrowRight")
    for _ in range(block - 1):
        page.keyboard.press("ArrowRight")
    said = page.wait_for_selector(f".block:has-text('block {block}: 0 references, a later prompt'):has-text('; hash ')")
    with client(server) as http:
        found = http.get(f"/v1/live/blocks/{block}").json()
    assert said.inner_text().endswith(f"; hash {found['hash']}")


def test_the_host_has_a_map_of_its_own(page: Any) -> None:
    page.click("text=Live")
    page.wait_for_selector(".engine .legend")
    page.evaluate(
        """() => {
          watching.abort()
          const [engine] = engines.values(), {head} = engine
          Object.assign(head, {first_host_block: 4, disk_bytes: 3 << 20})
          Object.assign(head.counts, {num_host_blocks: 3, num_used_host_blocks: 1, num_stored_keys: 9})
          engine.blocks = new Uint8Array([0, 1, 2, 0, 1, 128, 0])
          engine.requests.set("r", {id: "r", state: "swapped", reason: null, table: [1, 4], since: 0, host_blocks: 1})
          drawEngine(engine)
        }"""
    )
    page.wait_for_selector(".legend li:text-is('held on the host: 1')")
    page.wait_for_selector(
        ".block:text-is('on the host: 1 of 3 blocks held, 1 cached · on disk: 9 blocks and states, 3 MiB')"
    )
    host = page.locator(".blocks >> nth=1")
    assert "free, but cached: 1" in host.get_attribute("aria-label")
    host.focus()
    page.keyboard.press("ArrowRight")
    text = page.inner_text(".block >> nth=1")
    assert text.startswith("block 0 on the host: 1 reference, no prompt can find it; tokens 16 to 31 of r")


def test_a_step_shows_its_drafts_and_moves(page: Any) -> None:
    page.click("text=Live")
    page.wait_for_selector(".step")
    counts = {"number": 7, "tokens": 20, "prefill": 8, "sequences": 4, "drafts": 6, "copies": 2, "swapped_out": 3}
    page.evaluate(
        """async step => {
          watching.abort()
          while (watching || due) await new Promise(requestAnimationFrame)  // a frame that is due would draw another
          drawStep([...engines.values()][0].parts, step)
        }""",
        counts | {"swapped_in": 0, "drafted": 4, "right": 3},
    )
    text = page.inner_text("p:has-text('step 7:')")
    assert text.startswith("step 7: 4 sequences, 6 tokens of outputs, up to 6 drafts, 8 of prompts, 2 blocks copied")
    assert text.endswith("3 blocks to the host; of the latest drafts 3 were accepted, 1 refused")
    widths = page.evaluate("[...document.querySelectorAll('.step:not(.moves) > div')].map(d => d.style.flexGrow)")
    assert widths == ["6", "4.5", "1.5", "0", "8"]


def wait_for_the_answer(page: Any) -> None:
    page.wait_for_selector("#gauge:has-text('prompt tokens were cached')")
    page.wait_for_selector("#send:text-is('Send')")


def test_a_chat_streams_stops_is_edited_and_is_there_again(page: Any, server: Server) -> None:
    page.fill("#question", "Tell me a story.")
    page.press("#question", "Enter")
    wait_for_the_answer(page)
    story = page.inner_text(".assistant .text")
    assert len(story) > 20
    page.reload()
    page.wait_for_selector(".assistant .text")
    assert page.inner_text(".assistant .text") == story, "the browser keeps it"
    page.click("text=Retry")
    wait_for_the_answer(page)
    page.click("text=Edit")
    assert page.input_value("#question") == "Tell me a story."
    assert page.locator("#messages article").count() == 0
    page.click("summary")
    page.fill("#max_tokens", "3")
    page.press("#question", "Enter")
    wait_for_the_answer(page)
    assert "· 3 tokens" in page.inner_text("#gauge")
    page.fill("#max_tokens", "0")
    page.fill("#question", "More?")
    page.click("#send")
    assert "max_tokens" in page.inner_text("#messages .error")
    assert page.locator("#messages .user").count() == 1, (
        "what was refused is not said again with each question after it"
    )
    assert page.input_value("#question") == "More?"
    page.click("#new")
    assert page.locator("#messages article").count() == 0


DROP = """count => {
  const dropped = new DataTransfer()
  for (let each = 0; each < count; each++) dropped.items.add(new File(["GIF89a"], "x.gif", {type: "image/gif"}))
  $("chat").dispatchEvent(new DragEvent("drop", {dataTransfer: dropped, bubbles: true, cancelable: true}))
}"""


def test_images_that_are_refused_can_be_taken_away(page: Any) -> None:
    page.evaluate(DROP, 2)
    page.wait_for_selector("#images img >> nth=1", state="attached")
    page.fill("#question", "What is this?")
    page.press("#question", "Enter")
    page.wait_for_selector("#messages .error:has-text('no images are supported here')")
    assert page.locator("#messages .user").count() == 0
    for left in (1, 0):
        page.click("#images button")
        assert page.locator("#images img").count() == left
    page.press("#question", "Enter")
    wait_for_the_answer(page)


def test_the_keyboard_is_enough(page: Any) -> None:
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#live")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#model")
    assert "from openai import OpenAI" in page.inner_text("#python")
    page.wait_for_selector("#command:has-text('--num-gpu-blocks-override 100')")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#chat")
    assert page.evaluate("document.activeElement.id") == "tab-chat"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_screen_reader_finds_its_way(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    for tab, shown in (("Chat", "#gauge"), ("Live", ".engine .legend"), ("Model", "#command")):
        page.click(f"[role=tab]:text-is('{tab}')")
        page.wait_for_selector(shown, state="attached")
        check_with_axe(page)


def hostile_live() -> bytes:
    """A look in which every text is hostile."""
    numbers = dict.fromkeys(("place", "samples", "prompt", "cached", "computed", "output", "preemptions", "since"), 1)
    row = {**numbers, "state": "waiting", "blocks": 1, "host_blocks": 0, "table": [1]}
    requests = {text: {**row, "id": text, "reason": text, "why": text} for text in HOSTILE}
    counts = dict.fromkeys(re.findall(r"counts\.(\w+)", PAGE_JS.read_text()), 1) | {"generated_tokens": 1}
    step = dict.fromkeys(re.findall(r"step\.(\w+)", PAGE_JS.read_text()), 1)
    talk = dict.fromkeys(("number", "requests", "prompt", "cached", "at"), 1)
    engine = {
        "model": HOSTILE[0], "state": HOSTILE[1], "max_model_len": 9, "block_size": 16, "num_requests": len(HOSTILE),
        "step": step, "counts": counts, "times": {}, "requests": requests, "blocks": {"first": 0, "bytes": "AAE="},
        "conversations": [{**talk, "id": text} for text in HOSTILE],
    }  # fmt: skip
    return b"event: snapshot\ndata: " + json.dumps({"time": 1.0, "engines": {"0": engine}}).encode() + b"\n\n"


def fulfil(body: Any, route: Any) -> None:
    route.fulfill(body=json.dumps(body))


SAID = """text => [{role: "user", content: text}, {
    role: "assistant", content: text, reasoning: text, tool_calls: [{function: {name: text, arguments: text}}]}]"""
PAGE_JS = Path(pages.__file__).with_name("page.js")


def test_hostile_texts_stay_texts(browser: Any, server: Server) -> None:
    assert len(HOSTILE) == 200
    calls = [{"index": 0, "function": {"name": HOSTILE[3], "arguments": HOSTILE[4]}}]
    said = {"content": HOSTILE[1], "reasoning": HOSTILE[2], "tool_calls": calls}
    event = json.dumps({"choices": [{"delta": said}]})
    card = {"id": HOSTILE[0], "max_model_len": 9, "root": HOSTILE[1], "chat_template": HOSTILE[2]}
    block = {"block": 1, "references": 1, "hash": HOSTILE[5], "group": 0, "tiers": HOSTILE[6:9]}
    settings = {"command": HOSTILE[9], "kernels": {HOSTILE[10]: HOSTILE[11]}, "computed": {HOSTILE[12]: HOSTILE[13]}}
    bodies = {"v1/models": {"data": [card]}, "v1/live/blocks/**": block, "v1/live/settings": settings}

    def prepare(page: Any) -> None:
        stream = {"content_type": "text/event-stream"}
        answered = f"data: {event}\n\ndata: [DONE]\n\n"
        page.route("**/v1/chat/completions", lambda route: route.fulfill(body=answered, **stream))
        page.route("**/v1/live", lambda route: route.fulfill(body=hostile_live(), **stream))
        refusal = json.dumps({"error": {"message": HOSTILE[1]}})
        page.route("**/v1/requests/**", lambda route: route.fulfill(status=400, body=refusal))
        for path, body in bodies.items():
            page.route(f"**/{path}", partial(fulfil, body))

    with opened(browser, server.url, prepare=prepare) as page:
        page.evaluate(f"texts => {{ messages = texts.flatMap({SAID}); draw() }}", HOSTILE)
        page.fill("#question", HOSTILE[0])
        page.press("#question", "Enter")
        page.wait_for_selector("#messages article >> nth=401", state="attached")
        page.click("text=Live")
        page.wait_for_selector("tbody tr >> nth=199")
        page.hover(".blocks >> nth=0", position={"x": 2, "y": 2})
        page.wait_for_selector(".block:has-text('; hash ')")
        page.click("tbody tr button >> nth=0")
        page.click("#why button")
        page.click("text=Model")
        page.wait_for_selector("#command:has-text('window')", state="attached")
        assert page.title() == "vllm_lite"
