"""/metrics of the router: the metrics of all models with processes, each labelled `model_name`, and its own."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from vllm_lite.server.router.fleet import Fleet
from vllm_lite.server.router.member import FleetModel

STATES = ("unloaded", "loading", "loaded", "sleeping", "unloading", "failed")
LABELS = ("model_name",)
_COUNTERS = (  # name, field of ModelCounts, text
    ("vllm_lite:model_loads", "loads", "Times that the model's processes were started."),
    ("vllm_lite:model_wakes", "wakes", "Times that the model was loaded again by processes that slept."),
    ("vllm_lite:model_sleeps", "sleeps", "Times that the model gave its memory to others."),
    ("vllm_lite:model_stops", "stops", "Times that the model's processes were ended."),
    ("vllm_lite:model_deaths", "deaths", "Times that the model's processes ended by themselves."),
    ("vllm_lite:model_load_failures", "failures", "Loads that failed."),
    ("vllm_lite:model_refused_requests", "refusals", "Requests that were refused because the model was not loaded."),
    ("vllm_lite:model_load_seconds", "load_s", "Time that all loads of the model took together."),
)
_GAUGES = (
    ("vllm_lite:model_memory_bytes", "held_bytes", "Memory of the model's processes, as measured."),
    ("vllm_lite:model_waiting_requests", "num_waiting", "Requests that wait for the model to be loaded."),
    ("vllm_lite:model_active_requests", "num_active", "Requests that the model's processes have, paused ones too."),
)
_FAMILY = re.compile(r"# HELP (\S+) ")


class RouterMetrics(Collector):
    """The router's own metrics, for prometheus_client."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        members = list(self._fleet.members.values())
        state = GaugeMetricFamily("vllm_lite:model_state", "1 for the model's state.", labels=(*LABELS, "state"))
        for member in members:
            for name in STATES:
                state.add_metric((member.entry.name, name), float(member.state == name))
        yield state
        for name, field, text in _GAUGES:
            yield _filled(
                GaugeMetricFamily(name, text, labels=LABELS), members, lambda each, f=field: getattr(each.status, f)
            )
        for name, field, text in _COUNTERS:
            yield _filled(
                CounterMetricFamily(name, text, labels=LABELS), members, lambda each, f=field: getattr(each.counts, f)
            )
        limit = GaugeMetricFamily("vllm_lite:models_memory_limit_bytes", "The most that all models may take together.")
        limit.add_metric((), self._fleet.config.memory_bytes)
        yield limit


def _filled(family: Any, members: Iterable[FleetModel], read: Any) -> Any:
    for member in members:
        family.add_metric((member.entry.name,), float(read(member)))
    return family


def merged(own: Fleet, texts: Iterable[str]) -> bytes:
    """Merge expositions into one, with all samples of a metric together."""
    families: dict[str, list[str]] = {}
    for text in texts:
        for name, lines in _families(text):
            held = families.setdefault(name, [])
            held += [line for line in lines if not held or not line.startswith("#")]
    of_models = "".join(f"{line}\n" for lines in families.values() for line in lines)
    return of_models.encode() + generate_latest(RouterMetrics(own))


def _families(text: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in text.split("\n"):
        if (found := _FAMILY.match(line)) is not None:
            if lines:
                yield name, lines
            name, lines = found[1], []
        if line:
            lines.append(line)
    if lines:
        yield name, lines
