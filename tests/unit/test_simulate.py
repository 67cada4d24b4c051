"""`vllm-lite simulate`: times are found again in a recording, loads are bench serve's, questions are answered."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lite.engine.observe.replay import Replay
from vllm_lite.errors import ConfigError
from vllm_lite.protocol.step import Continue, Draft, Finish, Fork, NewRequest, Resume, SchedulerOutput
from vllm_lite.runtime.least_squares import nonnegative
from vllm_lite.tools.bench.serve_client import Outcome
from vllm_lite.tools.bench.serve_datasets import DatasetOptions
from vllm_lite.tools.bench.serve_result import percentile
from vllm_lite.tools.cli import main
from vllm_lite.tools.simulate import cost, fit
from vllm_lite.tools.simulate.cost import StepTimer, StepTimes, kind_of
from vllm_lite.tools.simulate.features import NAMES, PLACE, StepDone, StepReader, told
from vllm_lite.tools.simulate.load import LoadOptions, SimulatedRequest, load_of, make_load
from vllm_lite.tools.simulate.recording import RecordedRequest, Recording
from vllm_lite.tools.simulate.variants import (
    Limit,
    RunOptions,
    Simulated,
    encoded,
    highest_rate,
    simulate,
    variants,
)
from vllm_lite.tools.simulate.weather import Stall, Weather
from vllm_lite.trace.records import Header

TIMES = {
    "message": 4e-4,
    "idle": 2e-4,
    "step": 3e-3,
    "token_to_1": 1e-4,
    "token_to_4": 5e-5,
    "token_to_64": 2e-5,
    "token_to_512": 1e-5,
    "decode_kilotokens": 1e-4,
    "chunk_megapairs": 2e-2,
    "request": 3e-4,
}
OPTIONS = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 2048,
    "chunked_prefill": True,
    "preemption": "auto",
    "max_itl_s": 0.0,
    "draft_method": "",
    "num_drafts": 0,
    "adaptive_drafts": True,
}
HEADER = Header("", 0.0, 0.0, OPTIONS, "fcfs", 400, 0, 16, True, (None,), 0.01, 256, 0.0, 1, "", 1)


def made_up(**changes: Any) -> StepTimes:
    values: dict[str, Any] = {"times": TIMES, "noise": {}, "weather": None, "drafts": [], "header": HEADER}
    values |= {"timings": [], "engine_s": 0.0, "client_s": 0.0}
    values |= {"version": cost.VERSION, "machine": "", "date": "", "model": "", "num_messages": 1, "error": 0.0}
    return StepTimes(**values | changes)


def load_at(rate: float, count: int = 120, seed: int = 1) -> list[SimulatedRequest]:
    lengths: dict[str, Any] = {
        "random_input_len": 200,
        "random_output_len": 20,
        "random_range_ratio": 0.9,
        "random_prefix_len": 32,
    }
    dataset = DatasetOptions(num_prompts=count, seed=seed, **lengths)
    return make_load(LoadOptions(dataset, rate), None)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Simulated, Recording]:
    """A simulation with known times, and the trace of it."""
    path = str(tmp_path_factory.mktemp("simulated") / "trace")
    done = simulate(made_up(), {}, load_at(12.0), RunOptions(record=path))
    return done, Recording(path).read()


# ---- features


def output(*entries: Any, ops: int = 0) -> SchedulerOutput:
    return SchedulerOutput(1, 1, [(1, 2, 3)] * ops, list(entries))


def done(*entries: Any, sampled: int = 2, ops: int = 0, drafts: dict[int, tuple[int, int]] | None = None) -> StepDone:
    return StepDone(output(*entries, ops=ops), sampled, drafts or {})


def new(handle: int, num_computed: int, num_tokens: int) -> NewRequest:
    values = {"handle": handle, "tokens": b"", "num_prompt_tokens": 0, "sampling": None, "num_cached": 0}
    return NewRequest(**values, num_computed=num_computed, num_tokens=num_tokens, block_ids=[])  # type: ignore[arg-type]


def test_features_count_the_work_of_a_message() -> None:
    reader = StepReader()
    found = dict(zip(NAMES, reader.message([done(new(1, 0, 100), new(2, 32, 10))], was_idle=True), strict=True))
    assert {name: value for name, value in found.items() if value} == {
        "message": 1,
        "idle": 1,
        "step": 1,
        "token_to_1": 1,
        "token_to_2": 1,
        "token_to_4": 2,
        "token_to_8": 4,
        "token_to_16": 8,
        "token_to_32": 16,
        "token_to_64": 32,
        "token_to_128": 46,
        "chunk_megapairs": pytest.approx((100 * 50.5 + 10 * 37.5) / 1e6),
        "sampled": 2,
        "request": 2,
    }
    steps = [
        done(Continue(1, 1, []), Draft(2, 5, []), ops=2, drafts={2: (3, 1)}),
        done(Draft(2, 5, []), Continue(1, 1, []), drafts={2: (0, 0)}),
        done(Finish(2), Continue(1, 1, []), sampled=1),
    ]
    found = dict(zip(NAMES, reader.message(steps, was_idle=False), strict=True))
    assert (found["step"], found["sampled"], found["block_op"], found["request"], found["idle"]) == (3, 8, 2, 0, 0)
    assert (found["lookup"], found["verify"], found["draft"]) == (2, 1, 3)
    assert found["decode_kilotokens"] == pytest.approx((101 + 102 + 103 + 42 + 45) / 1e3), (
        "42 tokens, and 2 that were right"
    )
    assert found["chunk_megapairs"] == pytest.approx(4 * 44.5 / 1e6)
    assert found["token_to_1"] == 3
    assert found["token_to_8"] == 1, "a draft that is made is a token"
    steps = [done(Resume(1, 64, 0, 2, []), Fork(1, 5, None, 66, 40, 0), Continue(5, 1, []))]  # type: ignore[arg-type]
    found = dict(zip(NAMES, reader.message(steps, was_idle=False), strict=True))
    assert found["decode_kilotokens"] == pytest.approx(41 / 1e3)
    assert found["chunk_megapairs"] == pytest.approx(2 * 65.5 / 1e6)


def test_drafts_that_are_verified_are_no_prompt() -> None:
    reader = StepReader()

    def kind(*entries: Any, sampled: int) -> str:
        return kind_of(reader.message([done(*entries, sampled=sampled, drafts={2: (3, 1)})], was_idle=False))

    assert kind(new(1, 0, 100), new(2, 0, 9), sampled=1) == "prompts"
    assert kind(Draft(2, 5, []), Continue(1, 1, []), sampled=2) == "decodes"
    assert kind(Draft(2, 5, []), new(3, 0, 2), sampled=2) == "prompts"
    assert kind(Continue(2, 1, []), Continue(1, 1, []), sampled=1) == "decodes"


@given(
    rows=st.lists(
        st.lists(st.floats(-5, 5).map(lambda x: round(x, 2)), min_size=4, max_size=4), min_size=6, max_size=9
    ),
    goals=st.lists(st.floats(-5, 5).map(lambda x: round(x, 2)), min_size=9, max_size=9),
)
def test_least_squares_are_the_best_without_a_negative_number(rows: list[list[int]], goals: list[int]) -> None:
    """Karush, Kuhn and Tucker: no number that is 0 would help, and none that is more would help by a change."""
    matrix = [
        [sum(r[i] * r[j] for r in rows) + (1e-3 if i == j else 0.0) for j in range(4)] for i in range(4)
    ]  # limited to stay positive
    right = [float(sum(r[i] * goal for r, goal in zip(rows, goals, strict=False))) for i in range(4)]
    found = nonnegative(matrix, right)
    for place, number in enumerate(found):
        gain = right[place] - sum(a * b for a, b in zip(matrix[place], found, strict=True))
        assert number >= 0
        assert gain == pytest.approx(0, abs=1e-5) if number > 0 else gain <= 1e-5


# ---- fitting


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_the_times_of_a_recording_are_found_again(share: float, tmp_path: Path) -> None:
    """Steps of a tenth of the time travel several together."""
    real = made_up(times={name: share * seconds for name, seconds in TIMES.items()})
    path = str(tmp_path / "trace")
    simulate(real, {}, load_at(12.0 / share), RunOptions(record=path))
    fitted = fit.fit([Recording(path).read()], "made up")
    assert fitted.error < 1e-3
    assert fitted.engine_s == pytest.approx(0, abs=1e-9)
    assert share == 1.0 or fitted.num_messages < 0.9 * simulate(real, {}, load_at(120.0)).figures["steps"]
    expected, again = (simulate(each, {}, load_at(9.0 / share, seed=7)) for each in (real, fitted))
    for name in ("request_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms"):
        assert again.figures[name] == pytest.approx(expected.figures[name], rel=0.01), name


def test_delays_of_some_prompts_are_not_fitted(
    run: tuple[Simulated, Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third message with a new request takes 1.7 times as long."""
    _, recording = run
    prompts = itertools.count()
    delays = [1.7 if m.features[PLACE["request"]] and next(prompts) % 3 == 0 else 1.0 for m in recording.messages]
    delayed = [m._replace(took_s=m.took_s * delay) for m, delay in zip(recording.messages, delays, strict=True)]
    monkeypatch.setattr(recording, "messages", delayed)
    fitted = fit.fit([recording], "delayed")
    assert fitted.times["request"] == pytest.approx(TIMES["request"], rel=0.05), "three times that by least squares"
    others = [m for m, delay in zip(delayed, delays, strict=True) if delay == 1.0]
    assert all(told(m.features, fitted.values()) == pytest.approx(m.took_s, rel=0.1) for m in others)


def test_the_engines_own_time_counts_where_nothing_is_under_way_meanwhile() -> None:
    times = [
        simulate(made_up(engine_s=engine_s), {"async_scheduling": ahead}, load_at(2.0, 20)).figures["median_tpot_ms"]
        for ahead in (False, True)
        for engine_s in (0.0, 0.002)
    ]
    assert times[1] - times[0] == pytest.approx(2, abs=0.3)
    assert times[3] - times[2] < 0.5


def test_prompts_that_were_recorded_without_a_cache_have_nothing_in_common(tmp_path: Path) -> None:
    path = str(tmp_path / "trace")
    simulate(made_up(), {"enable_prefix_caching": False}, load_at(10.0, 20), RunOptions(record=path))
    again = simulate(made_up(), {}, load_of(Recording(path).read()))
    assert again.figures["prefix_hit_rate"] == 0


def test_the_load_of_a_recording_finds_the_same_prefixes(run: tuple[Simulated, Recording]) -> None:
    done, recording = run
    again = simulate(made_up(), {}, load_of(recording))
    assert done.figures["prefix_hit_rate"] > 0.05
    for name in ("prefix_hit_rate", "total_input_tokens", "total_output_tokens", "median_ttft_ms", "p99_tpot_ms"):
        assert again.figures[name] == pytest.approx(done.figures[name], rel=1e-6), name


def test_the_time_to_the_first_token_includes_the_clients(run: tuple[Simulated, Recording]) -> None:
    _, recording = run
    seen_ms = 1000 * percentile(sorted(each.outcome.ttft_s for each in recording.requests.values()), 50)
    assert fit.client_time([recording], {"median_ttft_ms": seen_ms + 12}) == pytest.approx(0.012)
    each_s = [each.outcome.ttft_s + 0.008 for each in recording.requests.values()]
    detailed = {"median_ttft_ms": seen_ms + 12, "ttfts": [each_s[0] + 10, *each_s[1:]]}
    assert fit.client_time([recording], detailed) == pytest.approx(0.008)
    assert fit.client_time([recording], detailed | {"ttfts": each_s[1:]}) == pytest.approx(0.012), "not of this load"
    plain, late = (simulate(made_up(client_s=seconds), {}, load_at(2.0, 30)) for seconds in (0.0, 0.012))
    assert late.figures["median_ttft_ms"] - plain.figures["median_ttft_ms"] == pytest.approx(12, abs=0.5)


def test_failed_requests_have_no_first_token() -> None:
    served, failed, silent, cut = (RecordedRequest(Outcome(1)) for _ in range(4))
    for request in (served, failed, silent, cut):
        request.outcome.is_complete = request is not cut
    for request in (served, failed, cut):
        request.outcome.chunks_s, request.outcome.output_len = [0.1 if request is served else 5.0], 1
    failed.outcome.error = "aborted"
    requests = {"served": served, "failed": failed, "silent": silent, "cut": cut}
    recording: Any = SimpleNamespace(requests=requests)
    assert fit.client_time([recording], {"median_ttft_ms": 112}) == pytest.approx(0.012)
    del requests["served"]
    with pytest.raises(ConfigError, match="no request of the trace was served to its end"):
        fit.client_time([recording], {"median_ttft_ms": 112})
    with pytest.raises(ConfigError, match="the measured result has no median_ttft_ms"):
        fit.client_time([recording], {})


def test_few_messages_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "trace")
    simulate(made_up(), {}, load_at(10.0, 3), RunOptions(record=path))
    with pytest.raises(ConfigError, match="of which 200 are needed; record a minute under load"):
        fit.fit([Recording(path).read()], "short")


def test_several_recordings_of_one_engine_are_fitted_together(tmp_path: Path) -> None:
    def recorded(name: str, settings: dict[str, Any], seed: int) -> Recording:
        simulate(made_up(), settings, load_at(10.0, 8, seed), RunOptions(record=str(tmp_path / name)))
        return Recording(str(tmp_path / name)).read()

    first, second, other = recorded("a", {}, 1), recorded("b", {}, 2), recorded("other", {"max_num_seqs": 8}, 2)
    assert len(first.messages) < fit.MIN_MESSAGES > len(second.messages)
    second.reader.header.options["generation"] = 2  # of workers, which others had replaced
    fitted = fit.fit([first, second], "both")
    assert fitted.num_messages == len(first.messages) + len(second.messages)
    assert fitted.error < 1e-3
    with pytest.raises(
        ConfigError, match=r"other was recorded with other settings than .*a \(options\); fit each alone"
    ):
        fit.fit([first, other], "both")


@pytest.mark.parametrize(("changes", "what"), [({"encoder": (1, 1, 1)}, "images")])
def test_unfitted_settings_are_refused_by_name(
    run: tuple[Simulated, Recording], changes: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, recording = run
    monkeypatch.setattr(recording.reader, "header", msgspec.structs.replace(recording.reader.header, **changes))
    with pytest.raises(ConfigError, match=f"took {what}, whose times are not fitted"):
        fit.fit([recording], "other")


# ---- simulating


def test_the_same_seed_has_the_same_bytes() -> None:
    weather = Weather(0.05, [1.0, 1.0, 3.0], [Stall(0.1, 0.01)], 0.2)
    noisy = made_up(noise={"decodes": [0.5, 1.0, 2.0]}, weather=weather)
    made = [encoded([simulate(noisy, {}, load_at(10.0, 40), RunOptions(seed))]) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


def test_no_more_run_at_once_than_may() -> None:
    done = simulate(made_up(), {}, load_at(float("inf"), 50), RunOptions(max_concurrency=3))
    assert done.figures["max_concurrent_requests"] == 3
    assert done.figures["completed"] == 50
    starts = sorted(outcome.start_s for outcome in done.outcomes)
    ends = sorted(outcome.chunks_s[-1] for outcome in done.outcomes)
    assert starts[3:] == ends[:-3], "each begins when another has ended"


def test_settings_change_the_simulation() -> None:
    load = load_at(40.0, 100)
    few, many = (simulate(made_up(), each, load) for each in variants(["max_num_seqs=2,64"]))
    assert few.figures["median_ttft_ms"] > 5 * many.figures["median_ttft_ms"]
    uncached = simulate(made_up(), {"enable_prefix_caching": False}, load)
    assert uncached.figures["prefix_hit_rate"] == 0 < many.figures["prefix_hit_rate"]
    small = simulate(made_up(), {"num_gpu_blocks_override": 60}, load)
    assert small.figures["preemptions"] > 0 == many.figures["preemptions"]
    assert small.figures["peak_kv_usage"] > 0.9 > many.figures["peak_kv_usage"]


def test_variants_are_all_combinations() -> None:
    found = variants(["--max-num-seqs=1,2", "enable_prefix_caching=true,false"])
    assert found == [
        {"max_num_seqs": seqs, "enable_prefix_caching": cached}
        for seqs, cached in itertools.product((1, 2), (True, False))
    ]
    assert variants([]) == [{}]
    for word, message in (
        ("block_size=8,16", "NAME one of max_num_seqs, "),
        ("max_num_seqs", "takes NAME=VALUE,VALUE"),
        ("max_num_seqs=x", "max_num_seqs"),
        (f"max_num_seqs={','.join(map(str, range(1, 1002)))}", "makes 1001 variants; at most 1000"),
    ):
        with pytest.raises(ConfigError, match=message):
            variants([word])


def test_the_highest_rate_holds_and_a_higher_one_does_not() -> None:
    limits = [Limit("ttft", 99.0, 500.0), Limit("tpot", 50.0, 50.0)]

    def at(rate: float) -> list[Any]:
        return simulate(made_up(), {}, load_at(rate)).outcomes

    rate = highest_rate(limits, at)
    assert rate > 1
    assert all(limit.holds(at(rate)) for limit in limits)
    assert not all(limit.holds(at(1.3 * rate)) for limit in limits)
    assert highest_rate([Limit("ttft", 50.0, 1e-6)], at) == 0
    assert (
        highest_rate([Limit("ttft", 99.0, 1e9)], lambda rate: simulate(made_up(), {}, load_at(rate, 3)).outcomes) > 1e9
    )


def test_a_request_that_does_not_fit_is_named() -> None:
    load = [SimulatedRequest(0.0, bytes(4 * 3000), 5)]
    with pytest.raises(ConfigError, match="a request has 3005 tokens with its answer, the engine takes 2048"):
        simulate(made_up(), {}, load)


def test_noise_is_drawn_between_quantiles() -> None:
    timer = StepTimer(made_up(noise={"decodes": [1.0, 3.0]}), 5)
    features = [0.0] * len(NAMES)
    features[PLACE["message"]] = 1.0
    drawn = [timer.took_s(features) / TIMES["message"] for _ in range(400)]
    assert 1 <= min(drawn) < 1.05
    assert 2.95 < max(drawn) <= 3
    assert sum(drawn) / len(drawn) == pytest.approx(2, abs=0.1)


# ---- the command


def test_the_command_fits_keeps_compares_and_records(
    run: tuple[Simulated, Recording], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done, recording = run
    trace, times, again = recording.path, str(tmp_path / "times.json"), str(tmp_path / "again")
    measured = tmp_path / "result.json"
    measured.write_text(
        json.dumps({name: value for name, value in done.figures.items() if not isinstance(value, list)})
    )
    assert main(["simulate", "--fit", trace, "--load", trace, "--measured", str(measured), "--save", times]) == 0
    out = capsys.readouterr().out
    assert "times of " in out
    errors = [float(line.split()[-1].rstrip("%")) for line in out.splitlines() if line.endswith("%") and "," in line]
    assert len(errors) >= 6
    assert max(map(abs, errors)) < 1
    assert main(["simulate", times, "--load", trace, "--json", "--record", again]) == 0
    assert json.loads(capsys.readouterr().out)[0]["completed"] == 120
    assert Replay(again).run().report()[-1] == "every decision is the one recorded"
    words = ["--num-prompts", "40", "--input-len", "100", "--output-len", "8", "--target", "ttft_p99=300ms"]
    assert main(["simulate", times, *words, "--vary", "max_num_seqs=1,16"]) == 0
    printed = capsys.readouterr()
    assert [line.split(":")[0] for line in printed.out.splitlines()] == ["max_num_seqs=16", "max_num_seqs=1"]
    assert printed.err == "", "a file gets no progress bars"
    assert main(["simulate", times, "--num-prompts", "3", "--output-len", "8", "--target", "ttft_p99=300s"]) == 0
    assert "all requests may come at once; simulate more of them (--num-prompts)" in capsys.readouterr().out
    few = ["simulate", times, "--num-prompts", "3", "--output-len", "8", "--json", "--target"]
    assert [main([*few, f"ttft_p99={most}"]) for most in ("300s", "0.001ms")] == [0, 1]
    rates = [json.loads(line)[0]["request_rate"] for line in capsys.readouterr().out.splitlines()]
    assert rates == ["inf", 0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the program has no times of a machine like this one"),
        (["FILE", "--fit", "x"], "give either FILE, which --save wrote, or --fit TRACE"),
        (["missing"], "missing cannot be read"),
        ([__file__], "holds no fitted times"),
        (["--fit", __file__], "not a trace"),
        (["FILE", "--target", "ttft=500"], "--target must look like ttft_p99=500ms,tpot_p50=50ms, got 'ttft=500'"),
        (["FILE", "--target", "speed_p9=1s"], "--target takes ttft, tpot, itl, e2el"),
        (["FILE", "--measured", __file__], "is not a result of `bench serve`"),
        (["FILE", "--record", "x", "--vary", "max_num_seqs=1,2"], "--record writes the trace of one simulation"),
        (
            ["FILE", "--target", "ttft_p99=1s", "--record", "x"],
            "--record shows one simulation, and --target makes",
        ),
        (
            ["FILE", "--target", "ttft_p99=1s", "--plot", "x.png"],
            "--plot shows one simulation, and --target makes",
        ),
        (["FILE", "--save", "x"], "--save writes the times that --fit finds; give --fit TRACE with it"),
        (["FILE", "--as-recorded"], "--as-recorded takes the machine's speed from the TRACE of --load; give one"),
        (["FILE", "--request-rate", "0"], "--request-rate must be above 0"),
    ],
)
def test_bad_words_are_refused_in_a_sentence(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cost, "SHIPPED", tmp_path / "none")
    file = tmp_path / "times.json"
    cost.write(made_up(), str(file))
    assert main(["simulate", *(str(file) if word == "FILE" else word for word in words)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"engine_s": 1e300},
        {"weather": Weather(1e-5, [1e300], [], 1.0)},
        {"weather": Weather(5e-324, [1.0], [], 1.0)},
        {"weather": Weather(1.0, [1.0], [], 1e308)},
    ],
)
def test_times_that_no_machine_takes_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = str(tmp_path / "times.json")
    cost.write(made_up(**changes), path)
    with pytest.raises(ConfigError, match="holds no fitted times"):
        cost.read(path)


def test_the_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "times.json")
    cost.write(made_up(version=99), path)
    with pytest.raises(ConfigError, match="is of version 99, this program reads"):
        cost.read(path)
    Path(path).write_text('{"version": 2, "drafts": [[[1, 1, false]]]}')  # in its form
    with pytest.raises(ConfigError, match="is of version 2, this program reads"):
        cost.read(path)
    cost.write(made_up(times={"pizza": 1.0}), path)
    with pytest.raises(ConfigError, match="has times of pizza, no features"):
        cost.read(path)
    cost.write(made_up(), path)
    assert cost.read(path) == made_up()
