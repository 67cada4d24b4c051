"""The text of /metrics; its documentation and its dashboard know the same names."""

import asyncio
import json
import re
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request

from tests.fakes import STATS, welcome
from vllm_lite.client.engines.any_session import AnySession, Member
from vllm_lite.client.media.image_pool import ImagePool
from vllm_lite.config import EngineConfig
from vllm_lite.errors import EngineDeadError
from vllm_lite.protocol.stats import BlockHistograms, DraftCounts, Histogram, RequestHistograms, Stats
from vllm_lite.protocol.transfers import TierUsage
from vllm_lite.server.calls.dispatcher import Dispatcher
from vllm_lite.server.calls.registry import Calls, QueueLimits
from vllm_lite.server.metrics import METRICS, Metrics, table
from vllm_lite.server.openai.errors import ApiError

ROOT = Path(__file__).parents[2]
SERIES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
EXPORTED = {metric.name + suffix for metric in METRICS for suffix in SERIES[metric.kind]}
HISTOGRAM = Histogram((1.0, 2.5), [3, 0, 1], 7.5)
ENDED_BY = {"stop": 4, "length": 3, "abort": 2, "error": 1}
MEASURED = RequestHistograms(*[HISTOGRAM] * 17)

BLOCKS = BlockHistograms(*(Histogram((1.0,), [1, 0], total) for total in (1.0, 2.0, 3.0)))


class Engine:
    """A fake session."""

    def __init__(self, stats: Stats | None, *others: Stats | None) -> None:
        self.stats = stats
        self.welcome = welcome()
        self._members = (self, *map(Engine, others))

    def ask_each(self) -> list[Member]:
        answering = [(number, each) for number, each in enumerate(self._members) if each.stats is not None]
        return [Member(number, each.welcome, each.request_stats()) for number, each in answering]

    def request_stats(self) -> Any:
        if self.stats is None:
            raise EngineDeadError("the engine died: killed by SIGKILL, at ipc:///tmp/secret/e")
        future: Future[Stats] = Future()
        future.set_result(self.stats)
        return future


async def not_found(_: Any, __: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 404})


async def ignore(*_: Any) -> Any: ...


async def look(stats: Stats | None, *others: Stats | None, **settings: int) -> str:
    dispatcher = Dispatcher(cast(AnySession, Engine(stats, *others)), asyncio.get_running_loop())
    calls = Calls(dispatcher, QueueLimits(1, 1, 1))
    calls.scoreboard.count_rejection("max_num_queued_tokens")
    calls.is_draining = True  # one that shuts down can still be watched
    config = EngineConfig.check(settings).resolve(max_position_embeddings=100, dtype="float32", model_path="m")
    images = cast(ImagePool, SimpleNamespace(num_asked=7, num_found=3))
    metrics = Metrics(calls, config, "name", server="3", images=images)
    await metrics.counting(not_found)({"path": "/x"}, ignore, ignore)
    answer = await metrics.get(Request({"type": "http", "headers": []}))
    return bytes(answer.body).decode()


def full(**values: Any) -> Stats:
    fields = {name: getattr(STATS, name) for name in Stats.__struct_fields__}
    return Stats(**{**fields, **values, "ended_by": ENDED_BY, "requests": MEASURED})


async def test_every_definition_is_exposed_once_with_its_own_value() -> None:
    counts: dict[str, Any] = {"cached_tokens": 9, "host_hits": 4, "preemptions": 7, "swaps": 2, "prompt_tokens": 30}
    counts |= {
        "num_deferred": STATS.num_waiting - 1,
        "drafts_by": {"forced": DraftCounts(), "mtp": DraftCounts(7, 14, 8, [6, 2])},
    }
    disk = TierUsage(10, 20, 30, 0.5, 1.5, 3, {"damaged": 2})
    counts |= {"loaded_tokens": 3, "disk": disk}
    text = await look(full(**counts, blocks=BLOCKS, expert_tokens=[[], [31, 37]]))
    families = list(text_string_to_metric_families(text))
    assert 'vllm_lite:expert_tokens_total{engine="0",expert="1",layer="1",model_name="name"} 37.0' in text
    assert max(Counter(family.name for family in families).values()) == 1
    samples = [sample for family in families for sample in family.samples]
    assert {sample.name for sample in samples} == EXPORTED
    for sample in samples:
        assert sample.labels["model_name"] == "name"
        assert sample.labels["engine"] == "0"
        assert sample.labels.get("server") == ("3" if "server" in sample.labels else None)
    values = {
        (s.name, s.labels.get("mode") or s.labels.get("finished_reason") or s.labels.get("le")): s.value
        for s in samples
    }
    assert values["vllm:num_requests_running", None] == STATS.num_running
    assert values["vllm:kv_cache_usage_perc", None] == STATS.num_used_blocks / STATS.num_blocks
    assert values["vllm:prefix_cache_hits_total", None] == 5

    def by(name: str, label: str) -> dict[str, float]:
        return {s.labels[label]: s.value for s in samples if s.name == name}

    sources = by("vllm:prompt_tokens_by_source_total", "source")
    assert sources == {"local_compute": 21, "local_cache_hit": 5, "external_kv_transfer": 4}
    tiers = by("vllm:prompt_tokens_cached_by_source_total", "source")
    assert tiers == {"device": 2, "host": 4, "disk": 3, "p2p": 0, "external_unspecified": 0}
    assert by("vllm_lite:disk_moved_bytes_total", "what") == {"loaded": 20, "stored": 30}
    assert by("vllm_lite:disk_seconds_total", "what") == {"load": 0.5, "store": 1.5}
    assert by("vllm_lite:disk_errors_total", "reason") == {"damaged": 2}
    waiting = by("vllm:num_requests_waiting_by_reason", "reason")
    assert waiting == {"capacity": 1, "deferred": STATS.num_waiting - 1}
    assert by("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position") == {"0": 6, "1": 2}
    assert set(by("vllm:spec_decode_num_accepted_tokens_per_pos_total", "method")) == {"mtp"}
    assert by("vllm:spec_decode_num_drafts_total", "method") == {"forced": 0, "mtp": 7}
    assert by("vllm:spec_decode_num_draft_tokens_total", "method") == {"forced": 0, "mtp": 14}
    assert by("vllm:spec_decode_num_accepted_tokens_total", "method") == {"forced": 0, "mtp": 8}
    assert by("vllm:mm_cache_queries_total", "server") == {"3": 7}
    assert by("vllm:mm_cache_hits_total", "server") == {"3": 3}
    refused = by("vllm:admission_rejections_total", "reason")
    assert refused == {"max_num_queued_reqs": 0, "max_num_queued_tokens": 1}
    assert (values["vllm_lite:preemptions_total", "recompute"], values["vllm_lite:preemptions_total", "swap"]) == (5, 2)
    assert values["vllm:request_success_total", "abort"] == 2
    name = "vllm:time_to_first_token_seconds_bucket"
    assert [values[name, bound] for bound in ("1.0", "2.5", "+Inf")] == [3, 3, 4]
    assert values["vllm:time_to_first_token_seconds_sum", None] == 7.5


async def test_blocks_are_in_it_only_where_the_engine_follows_them() -> None:
    with_blocks, without = await look(full(blocks=BLOCKS)), await look(full())
    names = (
        "vllm:kv_block_lifetime_seconds",
        "vllm:kv_block_idle_before_evict_seconds",
        "vllm:kv_block_reuse_gap_seconds",
    )
    for number, name in enumerate(names, 1):
        assert f'{name}_sum{{engine="0",model_name="name"}} {number}.0' in with_blocks
    assert "kv_block_" not in without
    assert without == "".join(line for line in with_blocks.splitlines(keepends=True) if "vllm:kv_block_" not in line)


async def test_the_ranks_of_the_engine() -> None:
    assert 'vllm_lite:workers{engine="0",model_name="name"} 1.0' in await look(full())
    assert 'vllm_lite:workers{engine="0",model_name="name"} 4.0' in await look(full(), tensor_parallel_size=4)


def test_a_set_of_adapters_is_bounded() -> None:
    """Each set is a separate series in a monitor. So its length is bounded, and order does not matter."""
    (adapters,) = (each for each in METRICS if each.name == "vllm:lora_requests_info")
    names = [f"a{number:03}" for number in range(200)]
    stats = full(running_adapters=names[2:0:-1], waiting_adapters=names[::-1])
    at: Any = SimpleNamespace(stats=stats, engine=SimpleNamespace(max_loras=2))
    assert adapters.read(at) == {("2", "a001,a002", "a000,a001"): 1}


async def test_restarts_by_cause() -> None:
    text = await look(full(life=3, generation=5, restarts={"died": 2, "stuck": 1}, recovering="", lost_s=2.5))
    causes = {"died": 2, "failed": 0, "unreachable": 0, "silent": 0, "stuck": 1, "engine": 2}
    for cause, count in causes.items():
        assert f'vllm_lite:restarts_total{{cause="{cause}",engine="0",model_name="name"}} {count}.0' in text
    assert 'vllm_lite:recovery_seconds_total{engine="0",model_name="name"} 2.5' in text
    assert 'vllm_lite:recovering{engine="0",model_name="name"} 0.0' in text
    assert 'vllm_lite:recovering{engine="0",model_name="name"} 1.0' in await look(full(recovering="worker 0 died"))


async def test_no_pool_is_no_fault() -> None:
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="name"} 0.0' in await look(full(num_blocks=0))


async def test_a_dead_engine_has_no_metrics() -> None:
    with pytest.raises(ApiError) as caught:
        await look(None)
    assert caught.value.status == 503
    assert "killed by SIGKILL" in caught.value.message
    assert "secret" not in caught.value.message


def test_the_documentation_has_the_table() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert table() in text, "put what vllm_lite.server.metrics.table() returns into docs/metrics.md"


def test_pages_name_metrics_as_prometheus_knows_them() -> None:
    """Counters with _total, histograms without what follows their names. Those of a router are in another module."""
    known = EXPORTED | {metric.name for metric in METRICS if metric.kind == "histogram"}
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        named = set(re.findall(r"\bvllm(?:_lite)?:\w+[a-z]\b", page.read_text()))
        assert {name for name in named if not name.startswith("vllm_lite:model_")} <= known, page.name


def test_the_dashboard_has_existing_metrics_only() -> None:
    text = (ROOT / "configs" / "grafana.json").read_text()
    dashboard = json.loads(text)
    asked = set(re.findall(r"vllm(?:_lite)?:\w+", text))
    assert asked <= EXPORTED
    assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds_bucket"} <= asked
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels:
        assert panel["targets"], panel["title"]
        assert panel["description"]
        for target in panel["targets"]:
            assert re.search(r'model_name=~"\$model_name"', target["expr"]), "each panel follows the chosen model"
            assert target["expr"].count("(") == target["expr"].count(")")
    taken = [
        (place["x"] + x, place["y"] + y)
        for p in panels
        for place in [p["gridPos"]]
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(set(taken)) == len(taken), "two panels overlap"


async def test_each_of_several_engines_has_its_own_values() -> None:
    text = await look(full(num_running=3), None, full(num_running=5))  # the second one is being replaced
    labels = 'vllm:num_requests_running{engine="%s",model_name="name"} %s'
    assert labels % (0, "3.0") in text
    assert labels % (2, "5.0") in text
    assert 'engine="1"' not in text
    assert text.count("\nvllm_lite:server_load{") == 1
