"""decide(): the decision which models are loaded, a function of their status without side effects.

A model is in one of these states; `op` is set while it changes from one to another:

    unloaded   no process
    loaded     its workers hold weights and KV
    sleeping   its server and engine run, with paused streams, but without weights. At level 1 a worker that has
               imported torch waits as well, so that it wakes sooner

Memory goes to the model that has waited longest. Others are evicted for it: first idle models, least recently used
first, then those whose time slice is over; these sleep, and their streams continue when they wake. Pinned models are
never evicted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

State = Literal["unloaded", "loaded", "sleeping"]
ASLEEP_BYTES = {1: 300 << 20, 2: 120 << 20}
"""Estimated memory of a sleeping model by level. Just after falling asleep it takes less: the worker that waits for its
wake has yet to start."""


@dataclass
class ModelStatus:
    """Input of a decision about one model. Times are in seconds of one clock."""

    name: str
    state: State = "unloaded"
    op: Literal["load", "sleep", "stop"] | None = None
    level: int = 0
    """Sleep level."""
    num_waiting: int = 0
    num_active: int = 0
    """Numbers of requests that wait for the model, and of requests that it is processing."""
    wanted_since_s: float = 0.0
    """Time since which a request waits or a stream is paused."""
    loaded_at_s: float = 0.0
    used_at_s: float = 0.0
    """Time at which the last request ended."""
    held_bytes: int = 0
    """Last measured memory of its processes."""
    expected_bytes: int = 0
    """Memory when loaded: the largest measured value, or an estimate before the first load."""
    asleep_bytes: int = ASLEEP_BYTES[1]
    """Memory when asleep at level 1: the largest measured value."""
    least_bytes: int = 0
    """Memory just after loading, before its KV cache had grown; 0 before the first load."""
    slice_s: float = 10.0
    pin: bool = False
    leaves_at_s: float | None = None
    """Time from which it is unloaded if unused; None: when its memory is needed."""

    @property
    def is_wanted(self) -> bool:
        return self.num_waiting > 0 or (self.state == "sleeping" and self.num_active > 0)

    @property
    def is_idle(self) -> bool:
        return not self.num_waiting and not self.num_active

    @property
    def counted_bytes(self) -> int:
        """Memory that the model takes, or is about to take."""
        if self.op == "load":
            return max(self.held_bytes, self.expected_bytes)
        rests = self.state == "sleeping" and self.level == 1 and self.op is None
        return max(self.held_bytes, self.asleep_bytes) if rests else self.held_bytes

    @property
    def has_weights(self) -> bool:
        return self.state == "loaded" or self.op == "load"


class Action(NamedTuple):
    """One operation: `load` loads or wakes a model, `sleep` pauses its streams, `stop` ends its processes, `refuse`
    fails its waiting requests."""

    do: Literal["load", "sleep", "stop", "refuse"]
    name: str
    level: int = 0
    why: str = ""


class PlacementRules(NamedTuple):
    memory_bytes: int
    max_loaded: int | None = None


@dataclass
class _Room:
    """Free memory and places for models: the rest while actions are chosen, or the shortage of one model."""

    free_bytes: int
    free_places: float


class Decision(NamedTuple):
    """Chosen actions. `closing` are loaded models that accept no new requests: their time slice is over, and others
    wait for their memory."""

    actions: list[Action]
    closing: frozenset[str]


def decide(models: Sequence[ModelStatus], rules: PlacementRules, now_s: float) -> Decision:
    """Choose the actions to start now. Called again after every change."""
    actions, closing = list[Action](), set[str]()
    room = _Room(
        rules.memory_bytes - sum(model.counted_bytes for model in models),
        float("inf") if rules.max_loaded is None else rules.max_loaded - sum(model.has_weights for model in models),
    )
    for model in models:
        if model.op is None and model.state != "unloaded" and model.is_idle and _has_left(model, now_s):
            actions.append(Action("stop", model.name, why="nobody uses it"))
    is_freeing = bool(actions) or any(model.op in ("sleep", "stop") for model in models)
    wanting = sorted(
        (model for model in models if model.is_wanted and model.op is None and model.state != "loaded"),
        key=lambda model: (model.wanted_since_s, model.name),
    )
    is_first = True
    for model in wanting:
        most_bytes = rules.memory_bytes - sum(
            other.counted_bytes for other in models if other.pin and other is not model
        )
        need = max(0, min(model.expected_bytes, most_bytes) - model.counted_bytes)
        if (why := _never(model, models, rules, most_bytes)) is not None:
            actions.append(Action("refuse", model.name, why=why))
            continue
        if need <= room.free_bytes and room.free_places >= 1:
            actions.append(Action("load", model.name))
        elif is_first:
            others = [other for other in models if other is not model and not other.pin]
            missing = _Room(need - room.free_bytes, 1 - room.free_places)
            chosen, waits_for = _make_room(model, others, missing, now_s)
            actions += [] if is_freeing else chosen  # measure the memory being freed first
            closing |= waits_for
            if not chosen and not is_freeing and not any(map(_will_go, others)):
                continue  # others' paused streams take the room: they continue first
        is_first = False  # others get only the remaining room
        room.free_bytes -= need
        room.free_places -= 1
    if not any(action.do != "refuse" for action in actions) and not is_freeing and not any(map(_will_go, models)):
        actions += _last_resort(models, [model for model in wanting if _is_open(model, actions)])
    over_bytes = sum(model.counted_bytes for model in models) - rules.memory_bytes
    if over_bytes > 0 and not is_freeing and all(action.do == "refuse" for action in actions):
        actions += _relieve(models, over_bytes)
    return Decision(actions, frozenset(closing))


def _is_open(model: ModelStatus, actions: Sequence[Action]) -> bool:
    """Whether no action has been chosen for a model."""
    return all(action.name != model.name for action in actions)


def _last_resort(models: Sequence[ModelStatus], wanting: Sequence[ModelStatus]) -> list[Action]:
    """Actions if no model fits beside the servers of paused streams, and none of those can continue: load the first
    model anyway, once all idle ones are gone."""
    idle = [model for model in models if model.is_idle and model.state != "unloaded" and not model.pin]
    if idle and wanting:
        return [Action("stop", model.name, why="paused streams need its memory") for model in idle]
    return [Action("load", model.name) for model in wanting[:1]]


def _will_go(model: ModelStatus) -> bool:
    """Whether the model's memory will become available: its requests will end, or its time slice."""
    return model.op == "load" or (model.state == "loaded" and not model.is_idle)


def _has_left(model: ModelStatus, now_s: float) -> bool:
    return model.leaves_at_s is not None and now_s >= model.leaves_at_s


def _never(model: ModelStatus, models: Sequence[ModelStatus], rules: PlacementRules, most_bytes: int) -> str | None:
    """The reason why a model can never be loaded; None if it can. `most_bytes`: memory that pinned models leave."""
    takes = model.least_bytes or model.expected_bytes
    if takes > most_bytes:
        return f"it takes {_gib(takes)}, and beside pinned models there is room for {_gib(max(0, most_bytes))}"
    num_pinned = sum(other.pin and other.has_weights for other in models if other is not model)
    if rules.max_loaded is not None and num_pinned >= rules.max_loaded:
        return f"{rules.max_loaded} models may be loaded at once (models_max), and as many are pinned"
    return None


def _make_room(
    wanted: ModelStatus, others: Sequence[ModelStatus], missing: _Room, now_s: float
) -> tuple[list[Action], set[str]]:
    """Choose the models to evict for `wanted`, or those that must finish their time slice first."""
    others = [model for model in others if model.op is None]
    idle = sorted((model for model in others if model.is_idle and model.state != "unloaded"), key=_recency)
    paused = [model for model in others if model.state == "sleeping" and not model.is_idle and model.level == 1]
    busy = sorted((model for model in others if model.state == "loaded" and not model.is_idle), key=_age)
    late = [model for model in busy if now_s >= model.loaded_at_s + model.slice_s]
    over = [model for model in late if not model.num_active or now_s >= wanted.wanted_since_s + model.slice_s]
    for candidates in (idle, [*idle, *over, *paused]):
        if chosen := list(_least(candidates, missing)):
            return [action for _, action in chosen], set()
    return [], {model.name for model in late}


def _recency(model: ModelStatus) -> tuple[float, str]:
    return model.used_at_s, model.name


def _age(model: ModelStatus) -> tuple[float, str]:
    return model.loaded_at_s, model.name


def _least(candidates: Sequence[ModelStatus], missing: _Room) -> Iterator[tuple[ModelStatus, Action]]:
    """Yield the fewest models whose eviction frees enough: asleep at level 1 if that suffices, else deeper from the
    first on; none if all together do not suffice."""
    light: list[tuple[ModelStatus, Action]] = []
    for model in candidates:
        if model.state == "loaded":
            light.append((model, Action("sleep", model.name, 1)))
            if _is_enough(light, missing):
                yield from light
                return
    deep: list[tuple[ModelStatus, Action]] = []
    for model in sorted(candidates, key=lambda model: model.state != "sleeping"):
        action = Action("stop", model.name) if model.is_idle else Action("sleep", model.name, 2)
        deep.append((model, action))
        rest = [pair for pair in light if all(pair[0] is not other for other, _ in deep)]
        if _is_enough([*deep, *rest], missing):
            yield from [*deep, *rest]
            return


def _is_enough(chosen: Sequence[tuple[ModelStatus, Action]], missing: _Room) -> bool:
    frees = sum(freed_bytes(model, action) for model, action in chosen)
    return frees >= missing.free_bytes and sum(model.has_weights for model, _ in chosen) >= missing.free_places


def freed_bytes(model: ModelStatus, action: Action) -> int:
    """Estimate the memory that an action frees."""
    left = 0 if action.do == "stop" else model.asleep_bytes if action.level == 1 else ASLEEP_BYTES[2]
    return max(0, model.counted_bytes - left)


def _relieve(models: Sequence[ModelStatus], over_bytes: int) -> list[Action]:
    """Choose models to evict when loaded models have outgrown the memory, whatever their time slice. The last busy
    model stays."""
    others = [model for model in models if not model.pin and model.op is None and model.state != "unloaded"]
    others = [model for model in others if model.op is None]
    idle = sorted((model for model in others if model.is_idle), key=_recency)
    busy = sorted((model for model in others if not model.is_idle and model.state == "loaded"), key=_age)
    actions = list[Action]()
    for model in [*idle, *busy[:-1]]:
        if over_bytes <= 0:
            break
        action = Action("stop" if model.is_idle else "sleep", model.name, 0 if model.is_idle else 2, "memory is full")
        actions.append(action)
        over_bytes -= freed_bytes(model, action)
    return actions


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
