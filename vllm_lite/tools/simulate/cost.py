"""StepTimes: the time that workers take for a message, as fitted to a recording, and the file that keeps it."""

import os
import platform
import random
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_lite.errors import ConfigError
from vllm_lite.tools.simulate.drafts import DraftDraws, History
from vllm_lite.tools.simulate.features import NAMES, PLACE, TOKENS, Features, told
from vllm_lite.tools.simulate.weather import Walk, Weather
from vllm_lite.trace.records import Header

VERSION = 3
SHIPPED = Path(__file__).parent / "fitted"
"""Fitted files in the package, one for each pair of a machine and a model: MODEL_MACHINE.json."""
NUM_QUANTILES = 101

Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Time = Annotated[float, Meta(ge=0, le=1e6)]
Quantiles = Annotated[list[Time], Meta(min_length=2)]


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fitted times, and the engine that was recorded. All are in seconds."""

    version: int
    machine: str
    """The processor's name, and the number of its cores."""
    date: str
    model: str
    header: Header
    """The engine's settings, its pools and the measured rate of swaps."""
    times: dict[str, Time]
    """The time of one of each feature, by its name."""
    noise: dict[str, Quantiles]
    """Quantiles of messages' times without stalls, relative to the predicted times in the weather of that moment, by
    the kind of message, "decodes" or "prompts"."""
    weather: Weather | None
    """Speed of the machine over time; None: always the usual speed."""
    drafts: list[History]
    """Histories of the drafts of some answers."""
    timings: list[tuple[Count, Annotated[int, Meta(ge=0, le=1 << 20)], Annotated[float, Meta(gt=0, le=1e6)]]]
    """StepTimings from the start, if they decide the number of drafts."""
    load_blocks_per_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    """KV blocks, or states, loaded from the disk per second; 0: the engine had no disk tier."""
    engine_s: Time
    """Time of the engine itself between a result and the next step, if no step is in flight meanwhile."""
    client_s: Time
    """Part of the time to the first token outside of the engine: client, HTTP, tokenization."""
    num_messages: int
    error: float
    """Median relative error of single messages' predicted times."""

    def values(self) -> list[float]:
        return [self.times.get(name, 0.0) for name in NAMES]


class _Version(msgspec.Struct):
    """The field that all versions of a fitted file have."""

    version: int


class StepTimer:
    """Draws the times of an engine's messages. The draws depend on the seed; the weather of a seed is the same for all
    variants, so that these can be compared."""

    def __init__(self, fitted: StepTimes, seed: int, *, has_noise: bool = True) -> None:
        self._times = fitted.values()
        self._noise = fitted.noise if has_noise else {}
        noise, drafts, weather = (random.Random(f"{seed} {what}") for what in ("noise", "drafts", "weather"))
        self._random = noise.random
        as_recorded = fitted.weather is not None and fitted.weather.memory_s is None
        self.drafts = DraftDraws(fitted.drafts, drafts, in_order=as_recorded)
        self._walk = None if fitted.weather is None or not has_noise else Walk(fitted.weather, weather)

    def took_s(self, features: Features) -> float:
        """The time of the next message."""
        took_s = told(features, self._times)
        ratios = self._noise.get(kind_of(features))
        if ratios is not None:
            took_s *= self._draw(ratios)
        return took_s if self._walk is None else self._walk.took_s(took_s)

    def _draw(self, quantiles: Quantiles) -> float:
        place = self._random() * (len(quantiles) - 1)
        low = int(place)
        return quantiles[low] + (quantiles[low + 1] - quantiles[low]) * (place - low)


def kind_of(features: Features) -> str:
    """The kind of a message's noise. In a step that only decodes, all tokens are sampled, or verified as drafts."""
    has_chunks = features[PLACE["chunk_megapairs"]] and sum(features[TOKENS]) > features[PLACE["sampled"]]
    return "prompts" if has_chunks else "decodes"


def this_machine() -> str:
    """The processor's name, and the number of its cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, '') or platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def shipped() -> dict[str, Path]:
    """The fitted files in the package, by their names."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.json"))}


def shipped_for_this_machine() -> StepTimes | None:
    """The first of these that was fitted on a machine like this one. Raises ConfigError for a damaged file."""
    machine = this_machine()
    return next((times for path in shipped().values() if (times := read(str(path))).machine == machine), None)


def read(path: str) -> StepTimes:
    """Read a file by its path, or one in the package by its name. Raises ConfigError."""
    known = shipped()
    try:
        data = known.get(path, Path(path)).read_bytes()
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            raise ConfigError(f"{path} is of version {version}, this program reads {VERSION}; fit the trace again")
        found = msgspec.json.decode(data, type=StepTimes)
    except OSError as error:
        names = f"; with the program come {', '.join(known)}" if known else ""
        raise ConfigError(f"{path} cannot be read ({error.strerror}){names}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} holds no fitted times ({error}); `simulate --fit TRACE --save FILE` writes some"
        ) from error
    if unknown := found.times.keys() - set(NAMES):
        raise ConfigError(f"{path} has times of {', '.join(sorted(unknown))}, no features; fit the trace again")
    return found


def write(fitted: StepTimes, path: str) -> None:
    """Write a file with a line for each field. Raises ConfigError."""

    def encode(value: object) -> str:
        return msgspec.json.encode(value).decode()

    try:
        lines = (f"{encode(name)}: {encode(value)}" for name, value in msgspec.to_builtins(fitted).items())
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from error
