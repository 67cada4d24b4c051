"""Drafts are counted by their method and place, as the worker made them: in all, and of each sample."""

import typing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.unit.test_meter import Bench
from vllm_lite.engine.observe.counters import FORCED
from vllm_lite.protocol.stats import DraftCounts
from vllm_lite.protocol.step import ModelOutput
from vllm_lite.runtime.nested_settings import DRAFTS, WITH_MODEL, Speculation
from vllm_lite.trace.records import METHODS


def test_drafts_are_counted_as_the_worker_made_them() -> None:
    bench = Bench(speculative_config={"method": "ngram", "num_speculative_tokens": 3}, disable_adaptive_drafts=True)
    for name in range(3):
        bench.add(f"r{name}", [name, 2, 3], 12)
    bench.drain()
    stats = bench.stats
    assert (stats.draft_tokens, stats.accepted_tokens) == (bench.worker.num_drafted, bench.worker.num_accepted)
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert stats.draft_tokens / 3 <= stats.drafts <= stats.draft_tokens
    assert stats.drafts_by["forced"] == DraftCounts()
    counts = stats.drafts_by["ngram"]
    assert (counts.drafts, counts.tokens, counts.accepted) == (stats.drafts, stats.draft_tokens, stats.accepted_tokens)
    assert sum(counts.accepted_at) == stats.accepted_tokens
    assert counts.accepted_at == sorted(counts.accepted_at, reverse=True), (
        "a draft is right only if those before it are"
    )
    assert bench.worker.num_accepted > counts.accepted_at[0] > 0


def test_drafts_are_counted_by_their_method() -> None:
    """Forced drafts are in front of each sequence's others. Places are those among the drafts of one method."""
    meter = Bench(speculative_config={"method": "suffix", "num_speculative_tokens": 3}).core.meter
    sampling: list[Any] = [_Drafting(index) for index in (0, 1, 0, 0)]
    result = ModelOutput(1, 1, b"", [4, 2, 1, 6], drafted=[5, 3, 0, 5], forced=[2, 2, 0, 5])
    meter.stepped(sampling, sampling, result)
    forced, suffix = DraftCounts(3, 9, 2 + 1 + 5, [3, 2, 1, 1, 1]), DraftCounts(2, 4, 1, [1])
    assert meter.counters.drafts_by == {"forced": forced, "suffix": suffix}
    assert (meter.counters.drafts, meter.counters.draft_tokens, meter.counters.accepted_tokens) == (3, 13, 9)
    assert [each.request.drafts_by for each in sampling] == [
        {0: {"forced": DraftCounts(1, 2, 2, [1, 1]), "suffix": DraftCounts(1, 3, 1, [1])}},
        {1: {"forced": DraftCounts(1, 2, 1, [1]), "suffix": DraftCounts(1, 1, 0, [])}},
        {},
        {0: {"forced": DraftCounts(1, 5, 5, [1, 1, 1, 1, 1])}},
    ]


def test_every_method_has_its_number_in_a_trace() -> None:
    method = typing.get_type_hints(Speculation)["method"]
    names = {name for each in typing.get_args(method) for name in (typing.get_args(each) or (each,))}
    alone = {Speculation(method=name).method for name in names - set(WITH_MODEL)}
    assert set(METHODS) == {FORCED} | alone | set(WITH_MODEL)


class _Drafting:
    """A fake sequence with the fields that the meter reads."""

    def __init__(self, index: int) -> None:
        self.index, self.request = index, SimpleNamespace(drafts_by={})


def test_the_model_itself_drafts_more_than_others_by_default() -> None:
    assert Speculation().num_speculative_tokens == Speculation(method="mtp").num_speculative_tokens == 4
    assert Speculation(method="self").num_speculative_tokens == DRAFTS["self"] == 15
    assert Speculation(method="self", num_speculative_tokens=3).num_speculative_tokens == 3
    with pytest.raises(msgspec.ValidationError, match=">= 1"):
        msgspec.convert({"num_speculative_tokens": 0}, Speculation)
