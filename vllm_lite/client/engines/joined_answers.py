"""Joins the answers of several engines to one query into one."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import reduce
from itertools import zip_longest
from typing import Any, TypeVar

import msgspec

from vllm_lite.errors import EngineError
from vllm_lite.protocol.adapters import AdapterAnswer
from vllm_lite.protocol.operations import OperationDone
from vllm_lite.protocol.stats import DraftCounts, Histogram, Stats

_NAMES = ("running_adapters", "waiting_adapters")
_LARGEST = ("life", "generation")
"""Fields of Stats of which the largest value is taken instead of the sum."""

A = TypeVar("A")


def gathered(asked: "list[Future[A]]", join: Callable[[A, A], A], *, needs_all: bool = False) -> "Future[A]":
    """Join all answers into one; fails with the last error if there is no answer, or with any error if `needs_all`."""
    result: Future[A] = Future()
    lock, missing = threading.Lock(), [len(asked)]

    def finish(_: "Future[A]") -> None:
        with lock:
            missing[0] -= 1
            if missing[0]:
                return
        if not result.set_running_or_notify_cancel():
            return
        found = [each.result() for each in asked if not each.cancelled() and each.exception() is None]
        if found and (len(found) == len(asked) or not needs_all):
            result.set_result(reduce(join, found))
            return
        errors = [error for each in asked if not each.cancelled() and (error := each.exception()) is not None]
        result.set_exception(errors[-1] if errors else EngineError("no engine answered"))

    for each in asked:
        each.add_done_callback(finish)
    return result


def joined(one: Any, other: Any) -> Any:
    """Add two answers of one type; lists of requests are concatenated.

    Engines are `recovering` if both are, but paused or asleep if one is, since requests may go there. An operation is
    done if both have done it. `peak_used_blocks` adds the peaks of two different times.
    """
    if isinstance(one, OperationDone):
        return other if one.error is None else one
    if isinstance(one, AdapterAnswer):
        return one if one.error is not None else other
    if not isinstance(one, Stats) or not isinstance(other, Stats):
        return _add(one, other)
    values = {name: _add(getattr(one, name), getattr(other, name)) for name in Stats.__struct_fields__}
    values |= {name: max(getattr(one, name), getattr(other, name)) for name in _LARGEST}
    values |= {name: sorted({*getattr(one, name), *getattr(other, name)}) for name in _NAMES}
    values["recovering"] = one.recovering if other.recovering else ""
    levels = [stats.sleep_level for stats in (one, other) if stats.sleep_level is not None]
    values |= {"is_paused": one.is_paused or other.is_paused, "sleep_level": max(levels, default=None)}
    values["model"] = one.model
    if one.expert_tokens and other.expert_tokens:
        pairs = zip(one.expert_tokens, other.expert_tokens, strict=True)
        values["expert_tokens"] = [[a + b for a, b in zip(mine, theirs, strict=True)] for mine, theirs in pairs]
    return Stats(**values)


def _add(one: Any, other: Any) -> Any:
    """Add two statistics. If one side lacks a value, because it was not measured yet, the other's is used."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, Histogram):
        counts = [a + b for a, b in zip(one.counts, other.counts, strict=True)]
        return Histogram(one.bounds, counts, one.sum + other.sum)
    if isinstance(one, DraftCounts):
        places = [a + b for a, b in zip_longest(one.accepted_at, other.accepted_at, fillvalue=0)]
        sums = (one.drafts + other.drafts, one.tokens + other.tokens, one.accepted + other.accepted)
        return DraftCounts(*sums, places)
    if isinstance(one, msgspec.Struct):
        return type(one)(**{name: _add(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__})
    if isinstance(one, dict):
        return {name: _add(one.get(name), other.get(name)) for name in one.keys() | other.keys()}
    return one + other
