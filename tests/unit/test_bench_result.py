"""The figures of `bench serve`, against cases computed by hand; its table, file and picture."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_lite.errors import ConfigError
from vllm_lite.tools import cli, plotting
from vllm_lite.tools.bench import serve, serve_plot
from vllm_lite.tools.bench.serve_client import Outcome
from vllm_lite.tools.bench.serve_result import (
    DETAILS,
    percentile,
    running_over_time,
    summarize,
    table,
    tokens_over_time,
)
from vllm_lite.tools.cli import bench_serve


def outcome(start_s: float, chunks_s: list[float], output_len: int, input_len: int = 10) -> Outcome:
    one = Outcome(input_len)
    one.start_s, one.chunks_s, one.output_len, one.texts = start_s, chunks_s, output_len, ["te", "xt"]
    return one


@pytest.fixture
def outcomes() -> list[Outcome]:
    """Two streams of 5 and 3 tokens, one of a single token, and one that failed in the middle."""
    failed = outcome(100.0, [100.1, 100.2], 0, 99)
    failed.error = "error in the stream: gone"
    return [
        outcome(100.0, [100.1, 100.3, 100.5], 5),  # TTFT 100, TPOT 400 / 4, ITL 200 200, E2EL 500 ms
        outcome(100.2, [100.5, 100.6], 3),  # TTFT 300, TPOT 100 / 2, ITL 100, E2EL 400 ms
        outcome(100.4, [101.4], 1),  # TTFT and E2EL 1000 ms
        failed,
    ]


EXPECTED: dict[str, Any] = {
    "duration": 2.0,
    "completed": 3,
    "failed": 1,
    "total_input_tokens": 30,
    "total_output_tokens": 9,
    "request_throughput": 1.5,
    "output_throughput": 4.5,
    "total_token_throughput": 19.5,
    "max_concurrent_requests": 3,
    "mean_ttft_ms": 1400 / 3,
    "median_ttft_ms": 300,
    "std_ttft_ms": ((366.667**2 + 166.667**2 + 533.333**2) / 3) ** 0.5,
    "p90_ttft_ms": 300 + 0.8 * 700,
    "mean_tpot_ms": 75,
    "median_tpot_ms": 75,
    "std_tpot_ms": 25,
    "p99.9_tpot_ms": 50 + 0.999 * 50,
    "mean_itl_ms": 500 / 3,
    "median_itl_ms": 200,
    "mean_e2el_ms": 1900 / 3,
    "median_e2el_ms": 500,
    "p90_e2el_ms": 500 + 0.8 * 500,
}


def test_every_figure(outcomes: list[Outcome]) -> None:
    figures = summarize(outcomes, 2.0, (90.0, 99.9), {})
    assert {name: figures[name] for name in EXPECTED} == pytest.approx(EXPECTED, rel=1e-5)
    assert figures["max_output_tokens_per_s"] == pytest.approx(8.0)  # 5 + 3 in the first second, 1 in the next
    assert summarize(outcomes[:1], 0.625, (), {})["max_output_tokens_per_s"] == pytest.approx(8.0)  # a short run
    assert figures["request_goodput"] is None
    assert figures["input_lens"] == [10, 10, 10, 99]
    assert figures["output_lens"] == [5, 3, 1, 0]
    assert figures["itls"][0] == pytest.approx([0.2, 0.2])
    assert figures["ttfts"][:3] == pytest.approx([0.1, 0.3, 1.0])
    assert figures["errors"] == ["", "", "", "error in the stream: gone"]
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for kind in ("mean", "median", "std", "p90", "p99.9"):
            assert f"{kind}_{metric}_ms" in figures


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 300.001}, 2),
        ({"ttft": 299.0}, 1),
        ({"tpot": 60.0}, 2),  # a single token has none to be late
        ({"ttft": 500.0, "tpot": 60.0}, 1),
        ({"e2el": 400.001, "ttft": 1e6}, 1),
        ({"e2el": 0.0}, 0),
    ],
)
def test_goodput_counts_requests_within_all_limits(
    outcomes: list[Outcome], limits: dict[str, float], good: int
) -> None:
    assert summarize(outcomes, 2.0, (), limits)["request_goodput"] == good / 2


def test_a_limit_may_be_reached() -> None:
    assert summarize([outcome(1.0, [1.25], 1)], 1.0, (), {"ttft": 250.0, "e2el": 250.0})["request_goodput"] == 1


def test_nothing_served() -> None:
    figures = summarize([], 1.0, (99.0,), {"ttft": 1.0})
    assert figures["completed"] == figures["p99_ttft_ms"] == figures["request_goodput"] == 0


def test_percentiles_are_interpolated() -> None:
    assert [percentile([1, 2, 4], wanted) for wanted in (0, 25, 50, 75, 100)] == [1, 1.5, 2, 3, 4]
    assert percentile([], 50) == 0


def test_tokens_and_requests_over_time(outcomes: list[Outcome]) -> None:
    served = outcomes[:3]
    rates = tokens_over_time(served, 0.25)
    assert len(rates) == 6
    assert sum(rates) * 0.25 == pytest.approx(9)
    assert rates[0] * 0.25 == pytest.approx(5 / 3)
    steps = running_over_time(served)
    assert [count for _, count in steps] == [1, 2, 3, 2, 1, 0]
    assert [time_s for time_s, _ in steps] == pytest.approx([0, 0.2, 0.4, 0.5, 0.6, 1.4])


def test_the_table(outcomes: list[Outcome]) -> None:
    figures = summarize(outcomes, 2.0, (50.0, 99.9), {}) | {"request_rate": "inf", "max_concurrency": 4}
    lines = table(figures, ["ttft", "e2el"], (50.0, 99.9)).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    rows = {line[:39].rstrip(): line[39:].strip() for line in lines}
    assert rows["Successful requests:"] == "3"
    assert rows["Maximum request concurrency:"] == "4"
    assert rows["Output token throughput (tok/s):"] == "4.50"
    assert rows["Mean TTFT (ms):"] == "466.67"
    assert rows["P99.9 E2EL (ms):"] == "999.00"
    assert "Request goodput (req/s):" not in rows
    assert not any("TPOT" in line for line in lines)


def test_the_file(tmp_path: Path, outcomes: list[Outcome]) -> None:
    figures = summarize(outcomes, 2.0, (99.0,), {})
    place = tmp_path / "new" / "result.json"
    serve.save(figures, str(place), detailed=False)
    kept = json.loads(place.read_text())
    assert kept.keys() == figures.keys() - set(DETAILS)
    serve.save(figures, str(place), detailed=True)
    assert json.loads(place.read_text()).keys() == figures.keys()
    with pytest.raises(ConfigError, match="cannot be written"):
        serve.save(figures, str(place / "x"), detailed=False)
    result = {"backend": "openai", "request_rate": "inf", "max_concurrency": 8, "model_id": "a/b", "date": "now"}
    assert serve.file_name(result, None) == "openai-infqps-concurrency8-b-now.json"
    assert serve.file_name(result | {"max_concurrency": None, "request_rate": 2.5}, "mine") == "mine-2.5qps-b-now.json"


def test_the_picture(tmp_path: Path, outcomes: list[Outcome]) -> None:
    place = tmp_path / "new" / "picture.png"
    plotting.check(str(place))
    serve_plot.plot(outcomes[:3], "three", str(place))
    assert place.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    serve_plot.plot([], "none", str(place))
    with pytest.raises(ConfigError, match=r"\.png"):
        plotting.check(str(tmp_path / "picture.jpg"))


def test_a_missing_matplotlib_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"vllm-lite\[plot\]"):
        plotting.check("x.png")
    assert importlib.util.find_spec("torch") is not None


def test_flags_become_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    parser = argparse.ArgumentParser()
    bench_serve.add_flags(parser)
    options = bench_serve._options(parser.parse_args([]))
    assert options == serve.ServeOptions(
        sampling={"temperature": 0.0}, headers={"Authorization": "Bearer secret"}, show_progress=True, fit_s=60.0
    )
    words = "--host ::1 --port 9 --header A=b=c --top-k 3 --ignore-eos --num-prompts 4 --disable-tqdm --insecure"
    load = "--request-rate 2 --goodput ttft:200 e2el:1e3 --metric-percentiles 50,99.9 --max-concurrency 8"
    given = [*words.split(), *load.split(), "--extra-body", '{"temperature": 0.7, "min_tokens": 2}']
    options = bench_serve._options(parser.parse_args(given))
    assert options.base_url == "http://[::1]:9"
    assert options.headers == {"Authorization": "Bearer secret", "A": "b=c"}
    assert options.sampling == {"temperature": 0.7, "top_k": 3, "ignore_eos": True, "min_tokens": 2}
    assert (options.request_rate, options.max_concurrency, options.dataset.num_prompts) == (2.0, 8, 4)
    assert (options.goodput, options.percentiles) == ({"ttft": 200.0, "e2el": 1000.0}, (50.0, 99.9))
    assert (options.insecure, options.show_progress, options.fit_s) == (True, False, None)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--random-input-len", "-1"], "--random-input-len"),
        (["--random-prefix-len", "-1"], "--random-prefix-len"),
        (["--chat-wait", "inf"], "--chat-wait must be a number of at least 0, got inf"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--request-rate", "nan"], "--request-rate must be above 0"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--random-range-ratio", "1"], "--random-range-ratio"),
        (["--goodput", "itl:3"], "ttft, tpot, e2el"),
        (["--goodput", "ttft"], "ttft:200"),
        (["--percentile-metrics", "ttft,tfft"], "tfft"),
        (["--metric-percentiles", "101"], "between 0 and 100"),
        (["--metric-percentiles", "p99"], "numbers like"),
        (["--header", "Name"], "NAME=VALUE"),
        (["--header", "Name=a\r\nb"], "cannot be sent"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--base-url", "localhost:8000"], "http://"),
        (["--base-url", "http://127.0.0.1:99999"], "port"),
        (["--backend", "openai-chat"], "--tokenizer"),
        (["--tokenizer", "/no/such/folder"], "/no/such/folder"),
        (["--plot", "a.pdf"], ".png"),
        (["--num-prompt", "3"], "did you mean --num-prompts"),
    ],
)
def test_bad_flags_are_one_line(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cli.main(["bench", "serve", "--base-url", "http://127.0.0.1:9", "--model", "m", *flags])
    except SystemExit as exit_:
        status = int(str(exit_.code))
    said = capsys.readouterr().err
    assert status == 2
    assert said.count("\n") == 1
    assert text in said
