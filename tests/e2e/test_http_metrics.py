"""/metrics of a really running server, read as Prometheus reads it: every name, every label, and values that move as
they must after requests that are known to the token."""

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.deadlines import scaled
from tests.fakes import DEADLINE_S, Sink
from tests.http_server import Server, serving, short_socket, until
from vllm_lite.client.engines.session import Session
from vllm_lite.protocol.api import Finished, Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams

KEY = "a-key-of-the-tests"
HEADERS = {"Authorization": f"Bearer {KEY}"}
NAME = 'org/a"name\\of-ours'
BLOCK_SIZE, NUM_BLOCKS = 16, 200
LONG = 1900
"""Output tokens of a request that is still running when the test reads the metrics."""
BOTH = {"model_name", "engine"}
GAUGES = {
    "vllm:num_requests_running": BOTH,
    "vllm:num_requests_waiting": BOTH,
    "vllm:kv_cache_usage_perc": BOTH,
    "vllm:gpu_cache_usage_perc": BOTH,
    "vllm:lora_requests_info": BOTH | {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
}
COUNTERS = {
    "vllm:prefix_cache_queries_total": BOTH,
    "vllm:prefix_cache_hits_total": BOTH,
    "vllm:external_prefix_cache_queries_total": BOTH,
    "vllm:external_prefix_cache_hits_total": BOTH,
    "vllm:num_preemptions_total": BOTH,
    "vllm:prompt_tokens_total": BOTH,
    "vllm:generation_tokens_total": BOTH,
    "vllm:request_success_total": BOTH | {"finished_reason"},
    "vllm:spec_decode_num_drafts_total": BOTH | {"method"},
    "vllm:spec_decode_num_draft_tokens_total": BOTH | {"method"},
    "vllm:spec_decode_num_accepted_tokens_total": BOTH | {"method"},
}
PER_REQUEST = (
    "vllm:time_to_first_token_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_params_n",
    "vllm:request_params_max_tokens",
)
HISTOGRAMS = (
    *PER_REQUEST,
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:iteration_tokens_total",
    "vllm_lite:iteration_tokens",
    "vllm:kv_block_lifetime_seconds",
    "vllm:kv_block_idle_before_evict_seconds",
    "vllm:kv_block_reuse_gap_seconds",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="vl") as folder:
        flags = ["--address", short_socket(Path(folder)), "--api-key", KEY, "--public-metrics"]
        flags += ["--served-model-name", NAME, "another", "--max-num-seqs", "2"]
        flags += ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(NUM_BLOCKS)]
        flags += ["--kv-cache-metrics", "--kv-cache-metrics-sample", "1"]
        with serving(*flags) as server:
            yield server


class Scrape:
    """Values of one look at /metrics."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples: dict[str, list[Sample]] = {}
        for family in self.families.values():
            for sample in family.samples:
                self.samples.setdefault(sample.name, []).append(sample)

    def __call__(self, name: str, **labels: str) -> float:
        """The value of the one series that has these labels."""
        (sample,) = (s for s in self.samples.get(name, []) if labels.items() <= s.labels.items())
        return float(sample.value)


def scrape(server: Server) -> Scrape:
    answer = httpx.get(server.url + "/metrics", timeout=scaled(30.0))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Scrape(answer.text)


def settled(server: Server) -> Scrape:
    """Once nothing runs."""
    until(lambda: scrape(server)("vllm:num_requests_running") == 0, "the end of what runs")
    return scrape(server)


def complete(http: httpx.Client, prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def moved(before: Scrape, after: Scrape, name: str, **labels: str) -> float:
    return after(name, **labels) - before(name, **labels)


def test_every_name_is_there_with_its_labels(server: Server) -> None:
    seen = scrape(server)
    for name, labels in {**GAUGES, **COUNTERS}.items():
        for sample in seen.samples[name]:
            assert set(sample.labels) == labels, name
            assert (sample.labels["model_name"], sample.labels["engine"]) == (NAME, "0")
    for name in HISTOGRAMS:
        family = seen.families[name]
        assert family.type == "histogram"
        assert {sample.name.removeprefix(name) for sample in family.samples} == {"_bucket", "_count", "_sum"}
        assert all(set(sample.labels) - {"le"} == BOTH for sample in family.samples)
    (config,) = seen.samples["vllm:cache_config_info"]
    wanted = {"block_size": str(BLOCK_SIZE), "num_gpu_blocks": str(NUM_BLOCKS), "enable_prefix_caching": "True"}
    assert {**wanted, "cache_dtype": "bfloat16", "gpu_memory_utilization": "0.9"}.items() <= config.labels.items()
    assert config.labels["kv_cache_size_tokens"] == str((NUM_BLOCKS - 1) * BLOCK_SIZE)
    assert config.value == 1
    reasons = {sample.labels["finished_reason"] for sample in seen.samples["vllm:request_success_total"]}
    assert reasons == {"stop", "length", "abort", "error"}


def test_buckets_are_those_that_dashboards_know(server: Server) -> None:
    seen = scrape(server)

    def bounds(name: str) -> list[str]:
        return [sample.labels["le"] for sample in seen.samples[name + "_bucket"]]

    assert bounds("vllm:time_to_first_token_seconds")[:5] == ["0.001", "0.005", "0.01", "0.02", "0.04"]
    assert bounds("vllm:time_to_first_token_seconds")[-2:] == ["2560.0", "+Inf"]
    assert bounds("vllm:inter_token_latency_seconds")[0] == "0.01"
    assert bounds("vllm:e2e_request_latency_seconds")[0] == "0.3"
    assert bounds("vllm:request_prompt_tokens") == [
        *("1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "500.0", "1000.0", "2000.0", "+Inf")
    ]
    assert bounds("vllm:request_params_n") == ["1.0", "2.0", "5.0", "10.0", "20.0", "+Inf"]


def test_values_move_as_the_requests_say(server: Server, http: httpx.Client) -> None:
    before = settled(server)
    prompt = list(range(100, 140))
    usages = [complete(http, prompt, 7), complete(http, prompt, 5), complete(http, [*prompt[:20], 7], 3, n=2)]
    after = settled(server)
    assert moved(before, after, "vllm:prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages) == 101
    assert moved(before, after, "vllm:generation_tokens_total") == 7 + 5 + 6
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached == [0, 32, 16]
    assert moved(before, after, "vllm:prefix_cache_hits_total") == sum(cached)
    assert moved(before, after, "vllm:prefix_cache_queries_total") == 101
    assert moved(before, after, "vllm:kv_block_reuse_gap_seconds_count") >= sum(cached) // BLOCK_SIZE
    assert moved(before, after, "vllm:request_success_total", finished_reason="length") == 3
    for name in PER_REQUEST:
        assert moved(before, after, name + "_count") == 3, name
        assert after(name + "_bucket", le="+Inf") == after(name + "_count")
    assert moved(before, after, "vllm:inter_token_latency_seconds_count") == 6 + 4 + 2 * 2
    assert moved(before, after, "vllm:request_prompt_tokens_sum") == 101
    assert moved(before, after, "vllm:request_prompt_tokens_bucket", le="20.0") == 0
    assert moved(before, after, "vllm:request_prompt_tokens_bucket", le="50.0") == 3
    assert moved(before, after, "vllm:request_generation_tokens_sum") == 18
    assert moved(before, after, "vllm:request_params_n_sum") == 4
    assert moved(before, after, "vllm:request_params_max_tokens_sum") == 15
    steps = moved(before, after, "vllm_lite:steps_total")
    assert moved(before, after, "vllm_lite:iteration_tokens_count") == steps >= 7 + 5 + 3
    # Uncached prompt tokens are computed once, and all tokens of a sample but the last; a step sent ahead may add one.
    computed = 101 - sum(cached) + 6 + 4 + 2 * 2
    assert computed <= moved(before, after, "vllm_lite:iteration_tokens_sum") <= computed + 8
    assert 7 + 5 + 3 <= moved(before, after, "vllm:iteration_tokens_total_count") <= steps
    assert moved(before, after, "vllm:iteration_tokens_total_sum") == 101 + 18
    longest = moved(before, after, "vllm:e2e_request_latency_seconds_sum")
    parts = ("queue", "prefill", "decode")
    assert sum(moved(before, after, f"vllm:request_{part}_time_seconds_sum") for part in parts) == pytest.approx(
        longest
    )
    assert 0 < moved(before, after, "vllm:time_to_first_token_seconds_sum") < longest
    assert after("vllm:kv_cache_usage_perc") == after("vllm:gpu_cache_usage_perc") == 0


def test_a_stop_string_counts_as_stop_and_a_disconnect_as_abort(server: Server, http: httpx.Client) -> None:
    def choice(**more: Any) -> dict[str, Any]:
        answer = http.post("/v1/completions", json={**body, **more})
        found: dict[str, Any] = answer.json()["choices"][0]
        return found

    before = settled(server)
    body = {"prompt": "Once upon", "max_tokens": LONG, "ignore_eos": True, "temperature": 0}
    text = choice(max_tokens=30)["text"]
    assert choice(stop=text[10:14])["finish_reason"] == "stop"
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answered:
        assert next(answered.iter_lines()).startswith("data:")
    after = settled(server)
    reasons = ("stop", "length", "abort", "error")
    counts = [moved(before, after, "vllm:request_success_total", finished_reason=reason) for reason in reasons]
    assert counts == [1, 1, 1, 0]


def test_requests_of_other_clients_are_counted_and_leave_at_once(server: Server, session: Session) -> None:
    """They use the engine's own socket: two run, one waits, and their blocks are free without another step."""
    before = during = settled(server)
    sinks = [Sink() for _ in range(3)]
    for number, sink in enumerate(sinks):
        params = SamplingParams(max_tokens=LONG, ignore_eos=True)
        session.submit(Generate(f"raw-{number}", pack_tokens([number + 5] * 64), params), sink)
    deadline_s = time.monotonic() + DEADLINE_S
    while during("vllm:num_requests_running") + during("vllm:num_requests_waiting") < 3:
        assert time.monotonic() < deadline_s
        during = scrape(server)
    for number in (2, 1, 0):  # the one that waits before it gets a place
        session.abort(f"raw-{number}")
    assert during("vllm:kv_cache_usage_perc") >= 2 * 4 / (NUM_BLOCKS - 1)
    assert during("vllm_lite:kv_blocks_used") / (NUM_BLOCKS - 1) == pytest.approx(during("vllm:kv_cache_usage_perc"))
    assert (during("vllm:num_requests_running"), during("vllm:num_requests_waiting")) == (2, 1)
    for sink in sinks:
        while not isinstance(event := sink.next(), Finished):
            pass
        assert event.reason == "abort"
    after = scrape(server)
    assert (after("vllm:num_requests_running"), after("vllm:kv_cache_usage_perc")) == (0, 0)
    assert moved(before, after, "vllm:request_success_total", finished_reason="abort") == 3
    assert moved(before, after, "vllm:prompt_tokens_total") == 128, "the one that waited was never computed"


def test_refusals_of_the_engine_are_counted(server: Server, session: Session) -> None:
    before, sink = scrape(server), Sink()
    session.submit(Generate("bad", pack_tokens([10**6]), SamplingParams()), sink)
    event = sink.next()
    assert isinstance(event, Finished)
    assert event.reason == "error"
    after = scrape(server)
    assert moved(before, after, "vllm_lite:rejected_requests_total") == 1
    assert moved(before, after, "vllm:request_success_total", finished_reason="error") == 0


def test_many_look_at_once(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        looks = [look.result(DEADLINE_S) for look in [pool.submit(scrape, server) for _ in range(16)]]
    assert {look("vllm:num_requests_running") for look in looks} == {0.0}
    assert len({frozenset(look.samples) for look in looks}) == 1


def test_responses_are_counted_by_route_and_status(server: Server, http: httpx.Client) -> None:
    before = scrape(server)
    assert http.get("/v1/models/none").status_code == 404
    assert http.get("/v1/models").status_code == 200
    assert httpx.get(server.url + "/v1/models").status_code == 401
    assert http.get("/no/such/route").status_code == 404
    after = scrape(server)
    counted = {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for sample in after.samples["vllm_lite:http_responses_total"]
    }
    earlier = {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for sample in before.samples["vllm_lite:http_responses_total"]
    }
    news = {key: value - earlier.get(key, 0) for key, value in counted.items() if value != earlier.get(key, 0)}
    assert news == {
        ("/v1/models/{model:path}", "404"): 1,
        ("/v1/models", "200"): 1,
        ("/v1/models", "401"): 1,
        ("other", "404"): 1,
        ("/metrics", "200"): 1,
    }
    assert after("vllm_lite:server_load") == 0
