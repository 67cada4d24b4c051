"""Fits the times of steps to a recording: small relative errors of most messages, with no negative time."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vllm_lite.errors import ConfigError
from vllm_lite.runtime.least_squares import nonnegative
from vllm_lite.tools.bench.serve_result import percentile
from vllm_lite.tools.simulate.cost import NUM_QUANTILES, VERSION, StepTimes, kind_of, this_machine
from vllm_lite.tools.simulate.drafts import kept
from vllm_lite.tools.simulate.features import NAMES, told
from vllm_lite.tools.simulate.recording import Recording, TimedMessage
from vllm_lite.tools.simulate.weather import observe
from vllm_lite.trace.records import Header

MIN_MESSAGES = 200
MIN_NOISE = 20
"""Minimum number of messages of a kind for an estimate of its noise."""
PASSES = 10
NEAR = 0.05
"""Relative error above which a message counts less, since something unrelated to it caused its delay. This fits the
times to typical messages. Otherwise rare messages with a common feature, such as a new request, would have their delays
attributed to this feature."""
MIN_TOLD_S = 1e-6
SAME = ("options", "policy", "block_size", "caching", "windows", "tensor_parallel_size", "has_disk", "encoder")
"""Settings that must be equal in all recordings to which one set of times is fitted."""
HELD = 1e-6
"""Weight of the pull of each fitted time towards 0, relative to its weight in the messages."""


def fit(recordings: Sequence[Recording], model: str, client_s: float = 0.0) -> StepTimes:
    """Fit one set of times to recordings of the same engine. Raises ConfigError if they have too little data."""
    messages = [each for recording in recordings for each in recording.messages if each.took_s > 0]
    _check(recordings, len(messages))
    told_s = [message.took_s for message in messages]
    ratios, times = [1.0] * len(messages), [0.0] * len(NAMES)
    for _ in range(PASSES):
        weights = [min(1.0, NEAR / max(1e-9, abs(math.log(ratio)))) for ratio in ratios]
        times = _solve(messages, told_s, weights)
        told_s = _told_s(messages, times)
        ratios = [message.took_s / each_s for message, each_s in zip(messages, told_s, strict=True)]
    errors = [abs(1 - 1 / ratio) for ratio in ratios]
    observed = observe(told_s, [message.took_s for message in messages])
    gaps_s = [gap_s for recording in recordings for gap_s in recording.gaps_s]
    return StepTimes(
        version=VERSION,
        machine=this_machine(),
        date=time.strftime("%Y-%m-%d"),
        model=model,
        header=recordings[0].reader.header,
        times={name: seconds for name, seconds in zip(NAMES, times, strict=True) if seconds},
        noise=_noise(messages, observed.ratios),
        weather=observed.weather,
        drafts=kept(each for recording in recordings for each in recording.histories()),
        timings=recordings[0].timings,
        load_blocks_per_s=max(recording.scheduler.rates.load_blocks_per_s for recording in recordings),
        engine_s=max(0.0, statistics.median(gaps_s)) if gaps_s else 0.0,
        client_s=client_s,
        num_messages=len(messages),
        error=statistics.median(errors),
    )


def as_recorded(
    fitted: StepTimes, recordings: Sequence[Recording], measured: Mapping[str, Any] | None = None
) -> list[StepTimes]:
    """For the engine of each recording: the same times with its weather in its order, the drafts of its answers, and
    the client time of the result `measured`. Raises ConfigError."""
    client_s = fitted.client_s if measured is None else client_time(recordings, measured)
    found = list[StepTimes]()
    for recording in recordings:
        messages = [each for each in recording.messages if each.took_s > 0]
        told_s = _told_s(messages, fitted.values())
        weather = observe(told_s, [message.took_s for message in messages], in_pieces=False).weather
        drafts, timings = recording.histories(), recording.timings
        machine = msgspec.structs.replace(fitted, weather=weather, client_s=client_s, drafts=drafts, timings=timings)
        found.append(machine)
    return found


def client_time(recordings: Sequence[Recording], measured: Mapping[str, Any] | None) -> float:
    """The part of the time to the first token that is spent outside of the engines, from the result of `bench serve`
    for the same load. With a detailed result, it is the median over requests. Raises ConfigError."""
    if measured is None:
        return 0.0
    seen_ms, seen_s = measured.get("median_ttft_ms"), measured.get("ttfts")
    outcomes = sorted((o.outcome for each in recordings for o in each.requests.values()), key=lambda o: o.start_s)
    ended = [outcome for outcome in outcomes if outcome.is_complete]
    own_s = [outcome.ttft_s for outcome in ended if outcome.output_len and not outcome.error]
    if not isinstance(seen_ms, int | float):
        raise ConfigError("the measured result has no median_ttft_ms; `bench serve --save-result` writes it")
    if not own_s:
        raise ConfigError("no request of the trace was served to its end, so there is no first token to compare")
    if isinstance(seen_s, list) and len(seen_s) == len(own_s) and all(isinstance(each, float) for each in seen_s):
        differences_s: list[float] = [seen - own for seen, own in zip(seen_s, own_s, strict=True)]
        return max(0.0, statistics.median(differences_s))
    return max(0.0, seen_ms / 1000 - statistics.median(own_s))


def describe(fitted: StepTimes) -> str:
    count, error = fitted.num_messages, fitted.error
    return (
        f"times of {count} messages to the workers, half of them within {error:.1%} ({fitted.machine}, {fitted.date})"
    )


def _check(recordings: Sequence[Recording], num_messages: int) -> None:
    first, *others = (recording.reader.header for recording in recordings)
    for header, recording in zip(others, recordings[1:], strict=True):
        if differing := [name for name in SAME if _of(header, name) != _of(first, name)]:
            text = f"{recording.path} was recorded with other settings than {recordings[0].path}"
            raise ConfigError(f"{text} ({', '.join(differing)}); fit each alone")
    if num_messages < MIN_MESSAGES:
        text = f"the trace shows {num_messages} messages to the workers, of which {MIN_MESSAGES} are needed"
        raise ConfigError(f"{text}; record a minute under load")
    if first.encoder is not None:
        raise ConfigError("the engine that was recorded took images, whose times are not fitted; record without")
    if first.has_disk and not any(each.scheduler.rates.load_blocks_per_s for each in recordings):
        raise ConfigError("nothing was loaded from the disk, so the time of loads is unknown; record longer chats")


def _of(header: Header, name: str) -> object:
    """A field of the header, without the part that differs at each start of an engine."""
    value = getattr(header, name)
    return {key: each for key, each in value.items() if key != "generation"} if name == "options" else value


def _told_s(messages: Sequence[TimedMessage], times: Sequence[float]) -> list[float]:
    return [max(MIN_TOLD_S, told(message.features, times)) for message in messages]


def _solve(messages: Sequence[TimedMessage], told_s: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The best-fitting times. The error of each message is relative to `told_s`, its predicted time."""
    size = len(NAMES)
    matrix, right = [[0.0] * size for _ in range(size)], [0.0] * size
    for (features, took_s), each_s, weight in zip(messages, told_s, weights, strict=True):
        share = weight / each_s**2
        places = [place for place, value in enumerate(features) if value]
        for place in places:
            scaled, row = share * features[place], matrix[place]
            for other in places:
                row[other] += scaled * features[other]
            right[place] += scaled * took_s
    for place in range(size):
        matrix[place][place] += HELD * max(matrix[place][place], 1.0)
    return nonnegative(matrix, right)


def _noise(messages: Sequence[TimedMessage], ratios: Sequence[float]) -> dict[str, list[float]]:
    by_kind: dict[str, list[float]] = {}
    for message, ratio in zip(messages, ratios, strict=True):
        by_kind.setdefault(kind_of(message.features), []).append(ratio)
    return {kind: _quantiles(found) for kind, found in sorted(by_kind.items()) if len(found) >= MIN_NOISE}


def _quantiles(values: list[float]) -> list[float]:
    values.sort()
    return [percentile(values, 100 * step / (NUM_QUANTILES - 1)) for step in range(NUM_QUANTILES)]
