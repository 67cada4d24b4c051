"""The live page and /v1/live of a router with several models: they load no model, and names cannot inject HTML."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deadlines import scaled
from tests.e2e.test_http_models import PROMPT, Stream, complete, routing, states, write
from tests.http_server import Server, client, until
from tests.pages import HOSTILE, check_with_axe, opened
from vllm_lite.tools.chat.remote_server import lines_of
from vllm_lite.tools.top.watched import ServerLook, events, looks

KEY = {"authorization": "Bearer its-own"}
LOOKED_S = scaled(20.0)
MODEL_COUNTS = {
    "memory_bytes": "vllm_lite:model_memory_bytes",
    "active": "vllm_lite:model_active_requests",
    "waiting": "vllm_lite:model_waiting_requests",
    "loads": "vllm_lite:model_loads_total",
    "wakes": "vllm_lite:model_wakes_total",
    "sleeps": "vllm_lite:model_sleeps_total",
    "stops": "vllm_lite:model_stops_total",
    "deaths": "vllm_lite:model_deaths_total",
    "failures": "vllm_lite:model_load_failures_total",
    "refusals": "vllm_lite:model_refused_requests_total",
}
ENGINE_COUNTS = {
    "num_blocks": "vllm_lite:kv_blocks",
    "num_cached_blocks": "vllm_lite:kv_blocks_cached",
    "generated_tokens": "vllm:generation_tokens_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "steps": "vllm_lite:steps_total",
}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two models, of which one is loaded at a time, one with a separate key, and entries with faults and hostile
    names."""
    hostile = "".join(f"  {json.dumps(name)}: {{model: demo}}\n" for name in HOSTILE[:150])
    faulty = "".join(f"  bad{number}: {json.dumps({'model': text})}\n" for number, text in enumerate(HOSTILE[150:]))
    text = f"""
models_max: 1
models_slice_s: 0.1
defaults: {{dtype: float32, max_num_seqs: 2, num_gpu_blocks_override: 400}}
models:
  red: {{model: demo, aliases: [gpt-4o]}}
  blue: {{model: demo, max_model_len: 600}}
  locked: {{model: demo, api_key: [its-own]}}
{hostile}{faulty}"""
    with routing(write(tmp_path_factory.mktemp("live"), text)) as server:
        yield server


@pytest.fixture
def slow_router(tmp_path: Path) -> Iterator[Server]:
    """The same with models that take a second to load, in new interpreters: the other one sleeps meanwhile."""
    text = """
models_max: 1
models_slice_s: 0.1
defaults: {dtype: float32, max_num_seqs: 2, num_gpu_blocks_override: 400}
models:
  red: {model: demo}
  locked: {model: demo, api_key: [its-own]}
"""
    with routing(write(tmp_path, text), fresh=True) as server:
        yield server


@contextmanager
def watching(http: httpx.Client, path: str = "/v1/live") -> Iterator[Iterator[ServerLook]]:
    with http.stream("GET", path) as answer:
        assert answer.status_code == 200, answer.read()
        yield looks(events(lines_of(answer)))


def seen(looks: Iterator[ServerLook], condition: Any) -> ServerLook:
    """The first look that fulfils the condition."""
    deadline_s = time.monotonic() + LOOKED_S
    for look in looks:
        if look.is_whole and condition(look):
            return look
        assert time.monotonic() < deadline_s, f"it did not hold in {LOOKED_S:.0f} s"
    raise AssertionError("the stream has ended")


def samples(http: httpx.Client) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        (each.name, each.labels["model_name"]): each.value
        for family in families
        for each in family.samples
        if "model_name" in each.labels and len(each.labels) <= 2
    }


def test_watching_loads_no_model(router: Server) -> None:
    with client(router) as http, watching(http) as looks:
        look = next(looks)
        assert look.models["red"]["aliases"] == ["gpt-4o"]
        assert look.models["red"]["state"] == look.models["blue"]["state"] == "unloaded"
        assert look.models["bad0"]["state"] == "failed"
        assert HOSTILE[0] in look.models
        for path in ("/", "/page.js", "/page.css", "/docs", "/openapi.json", "/v1/models"):
            assert http.get(path).status_code == 200, path
        assert http.get("/v1/requests/cmpl-1").status_code == 404
        for path in ("/v1/live?model=red", "/v1/live?model=gpt-4o"):
            with watching(http, path) as others:
                assert next(others).engines == {}
        assert http.get("/v1/live?model=green").status_code == 404
        for path in ("/v1/live/settings?model=red", "/v1/live/blocks/1?model=red"):
            answer = http.get(path)
            assert (answer.status_code, "unloaded" in answer.text) == (404, True), path
        for _ in range(3):
            look = seen(looks, lambda _: True)
        assert look.models["red"]["counts"]["loads"] == 0
        assert states(http)["red"] == states(http)["blue"] == "unloaded"


def test_numbers_are_those_of_metrics_by_model(router: Server) -> None:
    with client(router) as http, watching(http) as looks:
        complete(http, "red", prompt=PROMPT * 20)
        look = seen(looks, lambda look: "red/0" in look.engines and not look.models["red"]["active"])
        until(lambda: samples(http)["vllm_lite:model_active_requests", "red"] == 0, "the request's end")
        for _ in range(3):
            look = seen(looks, lambda _: True)
        values = samples(http)
        row = look.models["red"]
        shown = {name: row["counts"].get(name, row.get(name)) for name in MODEL_COUNTS}
        del shown["memory_bytes"]  # it moves while one looks
        assert shown == {name: values[said, "red"] for name, said in MODEL_COUNTS.items() if name in shown}
        assert row["memory_bytes"] == pytest.approx(values["vllm_lite:model_memory_bytes", "red"], rel=0.3)
        counts = look.engines["red/0"].head["counts"]
        of_engine = engine_samples(http, "red")
        assert {name: counts[name] for name in ENGINE_COUNTS} == {
            name: of_engine[said] for name, said in ENGINE_COUNTS.items()
        }
        assert row["used"] == pytest.approx(look.time_s, abs=scaled(60))


def engine_samples(http: httpx.Client, model: str) -> dict[str, float]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    found = [each for family in families for each in family.samples if each.labels.get("model_name") == model]
    return {each.name: each.value for each in found if set(each.labels) == {"model_name", "engine"}}


def test_a_model_that_sleeps_is_seen_and_not_woken(slow_router: Server) -> None:
    with client(slow_router) as http, client(slow_router) as others, watching(http) as looks:
        stream = Stream(others, "red", max_tokens=1800)
        with client(slow_router, headers=KEY) as third:
            locked = Stream(third, "locked", max_tokens=60)  # one turn: red need not sleep again
            look = seen(looks, lambda look: look.models["red"]["state"] == "sleeping" and look.models["red"]["active"])
            look = seen(looks, lambda look: any(row["reason"] for row in requests(look, "red/0")))
            assert look.engines["red/0"].head["state"].startswith(("asleep", "paused"))
            [row] = requests(look, "red/0")
            with client(slow_router) as fourth:
                answer = fourth.get(f"/v1/requests/{row['id']}")
                assert answer.status_code == 200, answer.text
            locked.result()
        stream.result()


def requests(look: ServerLook, engine: str) -> list[dict[str, Any]]:
    return list(look.engines[engine].requests.values()) if engine in look.engines else []


def test_a_model_with_a_key_of_its_own_shows_its_state_alone(router: Server) -> None:
    with client(router) as http, watching(http) as looks:
        body = {"model": "locked", "prompt": PROMPT, "max_tokens": 2}
        http.post("/v1/completions", json=body, headers=KEY).raise_for_status()
        look = seen(looks, lambda look: look.models["locked"]["hidden"])
        assert "key" in look.models["locked"]["hidden"]
        assert look.models["locked"]["state"] == "loaded"
        assert "locked/0" not in look.engines
        for headers in (
            {"origin": "http://localhost:3000"},
            {"x-forwarded-for": "1"},
            {"sec-fetch-site": "cross-site"},
        ):
            assert http.get("/v1/live", headers=headers).status_code == 403, headers


def test_with_keys_an_admin_sees_all_and_a_user_nothing(tmp_path: Path) -> None:
    flags = ("--api-key", "a-users-key", "--admin-api-key", "an-admins-key")
    with routing(write(tmp_path, "models: {red: {model: demo}}"), *flags) as server, client(server) as http:
        assert http.get("/v1/live").status_code == http.get("/").status_code == 401
        user, admin = ({"authorization": f"Bearer {key}"} for key in ("a-users-key", "an-admins-key"))
        assert http.get("/v1/live", headers=user).status_code == 403
        with http.stream("GET", "/v1/live", headers=admin) as answer:
            assert list(next(looks(events(lines_of(answer)))).models) == ["red"]


# ---- the page


@pytest.fixture
def page(browser: Any, router: Server) -> Iterator[Any]:
    with opened(browser, router.url) as found:
        yield found
        assert (found.title(), found.url) == ("vllm_lite", f"{router.url}/")


def test_a_model_is_chosen_and_talked_to(page: Any, router: Server) -> None:
    with client(router, headers=KEY) as http:
        complete(http, "red", max_tokens=2)
        complete(http, "locked", max_tokens=2)  # so that red sleeps
    page.reload()
    page.wait_for_selector("#pick option:checked:has-text('locked (loaded)')", state="attached")
    page.click("text=Live")
    page.click("#models button:text-is('red')")
    page.wait_for_selector(".engine:visible h2:has-text('red · asleep')")
    page.click("#models button:text-is('locked')")
    page.wait_for_selector("#hint:has-text('locked does not show what it does: ')")
    assert page.locator(".engine:visible").count() == 0
    page.click("#models button:text-is('bad0')")
    page.wait_for_selector("#hint:has-text('bad0 is failed, so it has no requests and no blocks.')")
    page.click("text=Chat")
    page.select_option("#pick", "red")
    assert page.inner_text("#served") == "with a context of 2,048 tokens"
    assert '"model": "red"' in page.text_content("#curl")
    page.evaluate(
        """() => {
          window.said = []
          new MutationObserver(() => said.push($("gauge").textContent)).observe($("gauge"), {childList: true})
        }"""
    )
    page.fill("#question", "Tell me a story.")
    page.press("#question", "Enter")
    page.wait_for_selector("#gauge:has-text('prompt tokens were cached')")
    assert "red is sleeping: it is loaded first" in page.evaluate("said.join()")
    page.wait_for_selector("#pick option:checked:has-text('red (loaded)')", state="attached")
    page.reload()
    page.wait_for_selector("#pick option:checked:has-text('red')", state="attached")
    page.click("text=Live")
    page.wait_for_selector("#models tr.chosen:has-text('red'):has-text('loaded')")
    page.wait_for_selector(".engine h2:has-text('red · serving')")
    assert page.locator(".engine:visible").count() == 1
    page.click("[role=tab]:text-is('Model')")
    page.wait_for_selector("#computed:has-text('instruction set')")
    with client(router) as http:
        assert states(http)["blue"] == "unloaded", "to watch it does not load it"


def test_hostile_names_and_errors_stay_texts(page: Any, router: Server) -> None:
    """Hostile names of models and adapters, errors, prompts, ids and user agents, through the router."""
    with client(router) as http:
        for number, text in enumerate(HOSTILE[::3]):
            headers = {"user-agent": ascii(text), "x-request-id": re.sub(r"[^!-~]", "", text)}
            body = {"model": ("red", text)[number % 2], "prompt": text, "max_tokens": 1}
            http.post("/v1/completions", json=body, headers=headers)
        http.post("/v1/load_lora_adapter", json={"model": "red", "lora_name": HOSTILE[0], "lora_path": HOSTILE[1]})
    page.reload()
    page.click("text=Live")
    page.wait_for_selector("#models tbody tr >> nth=202")
    names = page.evaluate("[...document.querySelectorAll('#models button')].map(each => each.textContent)")
    assert set(HOSTILE[:150]) <= set(names)
    page.click("#models tbody button >> nth=9")
    page.click("text=Model")
    page.click("text=Chat >> nth=0")
    assert page.locator("#pick option").count() >= 200


def test_a_screen_reader_finds_its_way_among_models(page: Any) -> None:
    page.click("text=Live")
    page.wait_for_selector("#models tbody tr >> nth=202")
    check_with_axe(page)


def test_top_shows_models_and_one_of_them(router: Server) -> None:
    with client(router) as http:
        complete(http, "red", max_tokens=2)
    command = [sys.executable, "-m", "vllm_lite", "top", "--url", router.url, "--once"]
    run = {"capture_output": True, "text": True, "timeout": scaled(60), "check": True}
    env = {**os.environ, "COLUMNS": "80", "LINES": "24"}
    text = subprocess.run(command, env=env, **run).stdout  # type: ignore[call-overload]
    assert "203 models" in text
    assert "red/0" not in text
    assert "red  serving" in text
    assert len(text.splitlines()) <= 24
    shown = json.loads(subprocess.run([*command, "--json", "--model", "red"], env=env, **run).stdout)  # type: ignore[call-overload]
    assert list(shown["engines"]) == ["red/0"]
    assert shown["models"]["red"]["state"] == "loaded"
