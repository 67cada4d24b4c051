"""Decisions on the models to load, and properties of all decisions."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vllm_lite.server.router.placement import ASLEEP_BYTES, Action, ModelStatus, PlacementRules, decide, freed_bytes

GIB = 1 << 30


def loaded(name: str, size: float = 2, **more: object) -> ModelStatus:
    return replace(ModelStatus(name, "loaded", held_bytes=int(size * GIB), expected_bytes=int(size * GIB)), **more)  # type: ignore[arg-type]


def wanted(name: str, size: float = 2, since_s: float = 0.0, **more: object) -> ModelStatus:
    status = ModelStatus(name, num_waiting=1, wanted_since_s=since_s, expected_bytes=int(size * GIB))
    return replace(status, **more)  # type: ignore[arg-type]


def actions(
    models: list[ModelStatus], memory: float, now_s: float = 100.0, most: int | None = None
) -> list[tuple[str, str, int]]:
    decided = decide(models, PlacementRules(int(memory * GIB), most), now_s).actions
    return [(action.do, action.name, action.level) for action in decided]


def test_a_model_is_loaded_where_there_is_room() -> None:
    assert actions([loaded("a"), wanted("b")], 4) == [("load", "b", 0)]
    assert actions([loaded("a"), ModelStatus("b", expected_bytes=GIB)], 4) == [], "nobody wants it"


def test_the_idle_model_that_was_used_least_recently_sleeps() -> None:
    models = [loaded("a", used_at_s=50), loaded("b", used_at_s=20), wanted("c", 1.5)]
    assert actions(models, 4.5) == [("sleep", "b", 1)]


def test_it_is_stopped_where_sleep_leaves_too_little() -> None:
    assert actions([loaded("a"), wanted("b")], 2.1) == [("stop", "a", 0)]


def test_models_that_sleep_are_ended_before_requests_are_paused() -> None:
    asleep = ModelStatus("a", "sleeping", level=1, held_bytes=ASLEEP_BYTES[1])
    models = [asleep, loaded("b", 2, num_active=1), wanted("c", 1)]
    assert actions(models, 3.1) == [("stop", "a", 0)]


def test_a_model_that_has_just_gone_to_sleep_is_counted_with_the_worker_that_is_to_wait() -> None:
    """Its memory is measured before the waiting worker starts, and would grow into that of another model."""
    asleep = ModelStatus("a", "sleeping", level=1, held_bytes=100 << 20, asleep_bytes=GIB // 2)
    assert actions([asleep, wanted("b", 2)], 2.3) == [("stop", "a", 0)]
    assert actions([asleep, wanted("b", 2)], 2.6) == [("load", "b", 0)]
    deep = replace(asleep, level=2)
    assert actions([deep, wanted("b", 2)], 2.3) == [("load", "b", 0)], "it has no such worker"
    waking = replace(asleep, num_waiting=1, expected_bytes=2 * GIB)
    assert actions([waking, loaded("b", 1)], 3.1) == [("load", "a", 0)], "it is part of what it will take"


def test_a_busy_model_keeps_its_memory_for_its_slice() -> None:
    busy = loaded("a", num_active=1, loaded_at_s=95.0, slice_s=10.0)
    early = decide([busy, wanted("b", since_s=96.0)], PlacementRules(3 * GIB), 100.0)
    assert early.actions == []
    assert early.closing == set()
    closing = decide([busy, wanted("b", since_s=99.0)], PlacementRules(3 * GIB), 106.0)
    assert closing.actions == []
    assert closing.closing == {"a"}, "new requests wait, those that it has go on"
    drained = decide(
        [replace(busy, num_active=0, num_waiting=1), wanted("b", since_s=105.0)], PlacementRules(3 * GIB), 106.0
    )
    assert drained.actions == [Action("sleep", "a", 1)], "those that wait for it have not begun"
    over = decide([busy, wanted("b", since_s=96.0)], PlacementRules(3 * GIB), 106.5)
    assert over.actions == [Action("sleep", "a", 1)]


def test_a_pinned_model_stays_and_models_that_do_not_fit_beside_it_are_refused() -> None:
    pinned = loaded("a", pin=True, used_at_s=-100.0)
    assert actions([pinned, loaded("b", 1), wanted("c", 1)], 3.9) == [("sleep", "b", 1)]
    decision = decide([pinned, wanted("b")], PlacementRules(3 * GIB), 100.0)
    assert [(each.do, each.name) for each in decision.actions] == [("refuse", "b")]
    assert "2.00 GiB" in decision.actions[0].why
    assert "1.00 GiB" in decision.actions[0].why


def test_a_model_that_has_grown_is_loaded_if_it_fitted_when_it_was_loaded() -> None:
    grown = wanted("a", 5, least_bytes=GIB)
    assert actions([grown], 4) == [("load", "a", 0)]
    assert actions([wanted("a", 5, least_bytes=5 * GIB)], 4) == [("refuse", "a", 0)]


def test_the_model_that_waits_longest_is_first_and_others_use_the_rest() -> None:
    models = [loaded("a", 2, num_active=1, loaded_at_s=99.0), wanted("b", 3, since_s=1.0), wanted("c", 1, since_s=2.0)]
    assert actions(models, 4) == [], "c would take what b waits for"
    assert actions(models, 6) == [("load", "b", 0), ("load", "c", 0)]
    assert actions([models[1], replace(models[2], expected_bytes=4 * GIB)], 4) == [("load", "b", 0)]


def test_the_number_of_loaded_models_is_limited() -> None:
    assert actions([loaded("a", 1), wanted("b", 1)], 100, most=1) == [("sleep", "a", 1)]
    assert actions([loaded("a", 1), wanted("b", 1)], 100, most=2) == [("load", "b", 0)]


def test_pinned_models_may_take_all_places() -> None:
    assert actions([loaded("a", 1, pin=True), wanted("b", 1)], 100, most=1) == [("refuse", "b", 0)]
    assert actions([wanted("a", 1, pin=True), wanted("b", 1, since_s=1.0, pin=True)], 100, most=1) == [("load", "a", 0)]


def test_paused_streams_that_block_each_other_still_continue() -> None:
    paused = [
        ModelStatus(name, "sleeping", num_active=1, level=2, held_bytes=GIB // 4, expected_bytes=2 * GIB)
        for name in "ab"
    ]
    assert actions([*paused, loaded("c", 1)], 2.1) == [("stop", "c", 0)]
    assert actions(paused, 2.1) == [("load", "a", 0)]


def test_unused_models_are_stopped_at_their_time() -> None:
    assert actions([loaded("a", leaves_at_s=99.0)], 4) == [("stop", "a", 0)]
    assert actions([loaded("a", leaves_at_s=101.0)], 4) == []
    assert actions([loaded("a", leaves_at_s=99.0, num_active=1)], 4) == []


def test_models_that_have_grown_too_large_together_make_room() -> None:
    models = [loaded("a", 3, used_at_s=1.0), loaded("b", 3, num_active=1)]
    assert actions(models, 5) == [("stop", "a", 0)]
    busy = [loaded("a", 3, num_active=1, loaded_at_s=1.0), loaded("b", 3, num_active=1, loaded_at_s=2.0)]
    assert actions(busy, 5) == [("sleep", "a", 2)]
    assert actions(busy[:1], 2) == [], "the last one stays while it has requests"
    fresh = [replace(model, loaded_at_s=99.0) for model in busy]
    assert actions([*fresh, wanted("c", 1)], 5) == [("sleep", "a", 2)], "whatever their slices"


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[ModelStatus], PlacementRules]:
    models = []
    for number in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 40)) * GIB // 10
        state = draw(st.sampled_from(["unloaded", "loaded", "sleeping"]))
        op = draw(st.sampled_from([None, None, None, "load", "sleep", "stop"]))
        held = {"unloaded": 0, "loaded": size, "sleeping": min(size, ASLEEP_BYTES[1])}[state]
        status = ModelStatus(
            str(number),
            state,  # type: ignore[arg-type]
            op,  # type: ignore[arg-type]
            level=1 if state == "sleeping" else 0,
            num_waiting=draw(st.integers(0, 2)),
            num_active=0 if state == "unloaded" else draw(st.integers(0, 2)),
            wanted_since_s=draw(st.floats(0, 100)),
            loaded_at_s=draw(st.floats(0, 100)),
            held_bytes=held,
            expected_bytes=size,
            pin=draw(st.booleans()) and draw(st.booleans()),
        )
        models.append(status)
    return models, PlacementRules(draw(st.integers(5, 80)) * GIB // 10, draw(st.sampled_from([None, None, 1, 2])))


@settings(max_examples=examples(300))
@given(fleets(), st.floats(100, 200))
def test_invariants_of_every_decision(fleet: tuple[list[ModelStatus], PlacementRules], now_s: float) -> None:
    models, rules = fleet
    by_name = {model.name: model for model in models}
    decision = decide(models, rules, now_s)
    done = [action.name for action in decision.actions if action.do != "refuse"]
    assert len(set(done)) == len(done)
    for action in decision.actions:
        model = by_name[action.name]
        assert model.op is None
        if action.do in ("sleep", "stop"):
            assert not model.pin
        if action.do == "stop":
            assert model.is_idle, "nobody's requests are ended"
        wanting = [each for each in models if each.is_wanted and each.op is None and each.state != "loaded"]
        is_over = sum(each.counted_bytes for each in models) > rules.memory_bytes
        if action.do == "sleep" and not model.is_idle and wanting and not is_over:
            assert model.state == "sleeping" or now_s >= model.loaded_at_s + model.slice_s
    loads = [by_name[action.name] for action in decision.actions if action.do == "load"]
    is_last_resort = len(loads) == 1 and not any(each.state == "loaded" and not each.pin for each in models)
    if loads and not is_last_resort:
        used = sum(model.counted_bytes for model in models)
        assert used + sum(min(each.expected_bytes, rules.memory_bytes) - each.counted_bytes for each in loads) <= max(
            used, rules.memory_bytes
        )
        if rules.max_loaded is not None:
            assert sum(model.has_weights for model in models) + len(loads) <= rules.max_loaded
    for name in decision.closing:
        assert by_name[name].state == "loaded"
        assert not by_name[name].pin


@settings(max_examples=examples(300))
@given(fleets())
def test_every_model_that_is_wanted_is_loaded_or_refused_in_the_end(
    fleet: tuple[list[ModelStatus], PlacementRules],
) -> None:
    """Operations take no time here, and requests are done once their model is loaded."""
    models, rules = fleet
    now_s, left = 200.0, {model.name: model for model in models}
    for model in models:
        model.op = None
    refused: set[str] = set()
    for _ in range(100):
        wanting = [
            model for model in models if model.is_wanted and model.state != "loaded" and model.name not in refused
        ]
        if not wanting:
            return
        now_s += 20.0
        for action in decide(models, rules, now_s).actions:
            carry_out(left[action.name], action, now_s, refused)
        for model in models:
            if model.state == "loaded" or model.name in refused:
                model.num_waiting = model.num_active = 0
    raise AssertionError(f"{[model.name for model in wanting]} were never loaded")


def carry_out(model: ModelStatus, action: Action, now_s: float, refused: set[str]) -> None:
    if action.do == "load":
        model.state, model.level, model.held_bytes, model.loaded_at_s = "loaded", 0, model.expected_bytes, now_s
    elif action.do == "sleep":
        model.held_bytes -= freed_bytes(model, action)
        model.state, model.level, model.wanted_since_s = "sleeping", action.level, now_s
    elif action.do == "stop":
        model.state, model.held_bytes = "unloaded", 0
    else:
        refused.add(model.name)
