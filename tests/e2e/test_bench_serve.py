"""`vllm-lite bench serve|latency|throughput|engine` on the demo model: that their figures are there and agree."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http_server import Server, serving
from vllm_lite.config import demo_folder
from vllm_lite.tools import cli
from vllm_lite.tools.bench import engine

DEMO = demo_folder()
RUN = {"date", "backend", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency"}
COUNTS = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "total_token_throughput"}
RATES = {"request_throughput", "request_goodput", "output_throughput"}
LISTS = {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def bench(server: Server, *flags: str) -> int:
    return cli.main(["bench", "serve", "--base-url", server.url, "--disable-tqdm", *flags])


def test_random_ids(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [
        "--num-prompts",
        "24",
        "--random-input-len",
        "20",
        "--random-output-len",
        "9",
        "--random-prefix-len",
        "12",
    ]
    load = ["--max-concurrency", "6", "--ignore-eos", "--num-warmups", "2", "--metric-percentiles", "50,99"]
    files = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--plot", str(tmp_path / "plot.png")]
    more = ["--goodput", "e2el:60000", "--metadata", "place=here", "--result-filename", "result.json"]
    assert bench(server, *lengths, *load, *files, *more) == 0
    said = capsys.readouterr().out
    assert "Serving Benchmark Result" in said
    assert "us for each token" in said
    assert (tmp_path / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    result = json.loads((tmp_path / "result.json").read_text())
    kinds = ("mean", "median", "std", "p50", "p99")
    timed = {f"{kind}_{metric}_ms" for kind in kinds for metric in ("ttft", "tpot", "itl", "e2el")}
    assert RUN | COUNTS | RATES | LISTS | timed <= result.keys()
    assert (result["completed"], result["failed"], result["num_prompts"], result["request_rate"]) == (24, 0, 24, "inf")
    assert (result["model_id"], result["place"]) == ("demo_model", "here")
    assert result["input_lens"] == [32] * 24
    assert result["output_lens"] == [9] * 24
    assert result["total_output_tokens"] == 24 * 9
    assert result["request_goodput"] == result["request_throughput"] == pytest.approx(24 / result["duration"])
    assert all(0 < first <= result["p99_e2el_ms"] for first in result["ttfts"])
    assert all(len(gaps) < 9 for gaps in result["itls"])
    assert result["max_concurrent_requests"] <= 6


@pytest.mark.parametrize("backend", ["openai-chat", "vllm"])
def test_texts(server: Server, backend: str, tmp_path: Path) -> None:
    flags = ["--backend", backend, "--tokenizer", DEMO, "--dataset-name", "prefix_repetition", "--num-prompts", "8"]
    lengths = ["--prefix-repetition-num-prefixes", "2", "--prefix-repetition-output-len", "5", "--request-rate", "1000"]
    assert bench(server, *flags, *lengths, "--ignore-eos", "--save-result", "--result-dir", str(tmp_path)) == 0
    (file,) = tmp_path.iterdir()
    assert file.name.startswith(f"{backend}-1000.0qps-demo_model-")
    result = json.loads(file.read_text())
    assert (result["completed"], result["total_output_tokens"]) == (8, 40)
    assert result["tokenizer_id"] == DEMO
    assert result["total_input_tokens"] >= 8 * 512 - 8
    assert not result.keys() & LISTS


def test_chats_of_random_tokens_need_no_tokenizer(server: Server, tmp_path: Path) -> None:
    """The server converts the tokens to a text."""
    flags = ["--backend", "openai-chat", "--num-prompts", "3", "--random-input-len", "20", "--random-output-len", "4"]
    assert bench(server, *flags, "--ignore-eos", "--save-result", "--result-dir", str(tmp_path)) == 0
    (file,) = tmp_path.iterdir()
    result = json.loads(file.read_text())
    assert (result["completed"], result["total_output_tokens"]) == (3, 12)
    assert result["total_input_tokens"] > 3 * 10


def test_refusals_of_the_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(server, "--num-prompts", "2", "--model", "nobody") == 1
    said = capsys.readouterr()
    assert said.out == "", "no table of zeros"
    assert "2 requests failed, the first with: HTTP 404" in said.err
    assert bench(server, "--num-prompts", "2", "--url", "http://127.0.0.1:1") == 2


def test_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "latency.json"
    lengths = ["--input-len", "8", "--output-len", "4", "--batch-size", "3", "--n", "2", "--max-model-len", "64"]
    counts = ["--num-iters-warmup", "1", "--num-iters", "4", "--disable-tqdm", "--output-json", str(file)]
    assert cli.main(["bench", "latency", *lengths, *counts]) == 0
    figures = json.loads(file.read_text())
    assert len(figures["latencies"]) == 4
    assert figures["avg_latency"] == pytest.approx(sum(figures["latencies"]) / 4)
    assert list(figures["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert min(figures["latencies"]) <= figures["percentiles"]["10"] <= figures["percentiles"]["99"]
    assert "average latency" in capsys.readouterr().out
    assert cli.main(["bench", "latency", "--input-len", "60", "--output-len", "5", "--max-model-len", "64"]) == 2
    assert "65 together; the model has 64" in capsys.readouterr().err


def test_throughput_in_vllms_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "throughput.json"
    lengths = ["--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "4", "--repeats", "1"]
    assert cli.main(["bench", "throughput", *lengths, "--lora", "2", "--output-json", str(file), "--json"]) == 0
    figures, ours = json.loads(file.read_text()), json.loads(capsys.readouterr().out)
    assert (figures["num_requests"], figures["total_num_tokens"]) == (4, 48)
    assert figures["tokens_per_second"] == pytest.approx(3 * ours["together_tok_s"])
    assert figures["elapsed_time"] * figures["requests_per_second"] == pytest.approx(4)
    assert ours["adapted_ratios"] == [pytest.approx(ours["adapted_together_tok_s"] / ours["together_tok_s"], abs=0.01)]


def test_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts read these keys, and the numbers of sequences below them."""
    assert cli.main(["bench", "engine", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert all(figures[name] > 0 for name in ("import_s", "engine_ready_s", "round_trip_us", "block_alloc_free_us"))
    for name in ("schedule_update_us", "message_bytes", "codec_us"):
        assert [*figures[name]] == ["16", "64", "256", "1024"]
        assert min(figures[name].values()) > 0
    assert "OVER" in engine.table(figures | {"round_trip_us": 151.0})
