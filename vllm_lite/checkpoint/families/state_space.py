"""Common keys of families with Mamba-2 layers."""

import math
from typing import Annotated

from msgspec import Meta

from vllm_lite.errors import ModelError

ConvSize = Annotated[int, Meta(ge=2, le=16)]
Limit = float | dict[str, str]
"""A number, or transformers' spelling of one that JSON lacks: {"__float__": "Infinity"}."""
Limits = tuple[Limit, Limit] | None


def step_limits(given: Limits) -> tuple[float, float]:
    """Lower and upper bound of a time step, by `time_step_limit`. Raises ModelError for an empty range."""
    least, most = map(_limit, given or (0.0, math.inf))
    if not 0 <= least <= most:
        raise ModelError(f"time_step_limit {least} to {most} leaves no time step")
    return least, most


def _limit(value: Limit) -> float:
    if value in ({"__float__": "Infinity"}, {"__float__": "inf"}):
        return math.inf
    if isinstance(value, dict):
        raise ModelError(f"time_step_limit has {value}, which is not a number")
    return float(value)
