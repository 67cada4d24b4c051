"""Features of an engine in `vllm-lite simulate`: adapters, preemption by swap, KV on a disk, and forks."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.recorded import Recorded
from tests.unit.test_simulate import HEADER, OPTIONS, TIMES, load_at, made_up
from vllm_lite.errors import ConfigError
from vllm_lite.protocol.api import ForkRequest
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.tools.bench.serve_datasets import DatasetOptions
from vllm_lite.tools.simulate import cost, fit
from vllm_lite.tools.simulate.load import LoadOptions, SimulatedRequest, load_of, make_load
from vllm_lite.tools.simulate.recording import Recording
from vllm_lite.tools.simulate.variants import RunOptions, simulate

TOLD = ("request_throughput", "prefix_hit_rate", "mean_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")


def serving(times: dict[str, float], options: dict[str, Any] | None = None, **changes: Any) -> cost.StepTimes:
    header = msgspec.structs.replace(HEADER, options=OPTIONS | (options or {}), **changes)
    return made_up(header=header, times=TIMES | times)


def test_adapters_of_a_recording_come_back_and_take_their_time(tmp_path: Path) -> None:
    """Three adapters and none, of which a step takes two at most."""
    real = serving({"adapted": 2e-5, "adapter": 1e-3}, {"max_loras": 2, "max_cpu_loras": 2})
    path = str(tmp_path / "trace")
    load = [each._replace(adapter=number % 4) for number, each in enumerate(load_at(10.0, 150))]
    expected = simulate(real, {}, load, RunOptions(record=path))
    assert expected.figures["completed"] == 150
    recording = Recording(path).read()
    assert {each.adapter for each in recording.requests.values()} == {0, 1, 2, 3}
    fitted = fit.fit([recording], "adapters")
    assert fitted.error < 1e-3
    assert fitted.times["adapter"] == pytest.approx(1e-3, rel=0.05)
    again = simulate(fitted, {}, load_of(recording))
    plain = simulate(real, {}, load_at(10.0, 150))
    for name in TOLD:
        assert again.figures[name] == pytest.approx(expected.figures[name], rel=0.02), name
    assert expected.figures["mean_tpot_ms"] > 1.2 * plain.figures["mean_tpot_ms"]
    assert expected.figures["prefix_hit_rate"] < plain.figures["prefix_hit_rate"], "what one has is no other's"


def test_preempted_sequences_are_swapped_if_that_is_quicker(tmp_path: Path) -> None:
    real = serving({"block_op": 1e-5}, num_host_blocks=400, swap_blocks_per_s=1e5)
    path, tight = str(tmp_path / "trace"), {"num_gpu_blocks_override": 80}
    load = load_at(40.0, 120)
    swapped = simulate(real, tight, load, RunOptions(record=path)).figures
    assert swapped["swaps"] > 0
    assert swapped["completed"] == 120
    fitted = fit.fit([Recording(path).read()], "swaps")
    assert fitted.times["block_op"] == pytest.approx(1e-5, rel=0.1)
    again = simulate(fitted, tight, load).figures
    assert again["swaps"] == pytest.approx(swapped["swaps"], rel=0.1)
    computed = simulate(real, tight | {"preemption_mode": "recompute"}, load).figures
    assert computed["swaps"] == 0 < computed["preemptions"]


def chats(count: int) -> list[SimulatedRequest]:
    chat: dict[str, Any] = {"chat_message_len": 150, "chat_output_len": 30, "chat_wait": 2.0}
    dataset = DatasetOptions(dataset_name="chats", num_prompts=count, seed=3, **chat)
    return make_load(LoadOptions(dataset, 4.0), None)


def test_chats_that_memory_forgot_are_loaded_from_the_disk(tmp_path: Path) -> None:
    real = serving({}, {"max_num_seqs": 4}, has_disk=True, num_blocks=120)
    real = msgspec.structs.replace(real, load_blocks_per_s=5e4)
    path, load = str(tmp_path / "trace"), chats(80)
    found = simulate(real, {}, load, RunOptions(record=path)).figures
    without = simulate(real, {"kv_cache_dir": None}, load).figures
    assert found["completed"] == without["completed"] == 80
    assert found["loaded_tokens"] > 1000 > without["loaded_tokens"] == 0
    assert found["mean_ttft_ms"] < 0.9 * without["mean_ttft_ms"]
    fitted = fit.fit([Recording(path).read()], "disk")
    assert fitted.load_blocks_per_s == pytest.approx(5e4, rel=0.2)
    again = simulate(fitted, {}, load).figures
    assert again["loaded_tokens"] == pytest.approx(found["loaded_tokens"], rel=0.05)
    assert again["mean_ttft_ms"] == pytest.approx(found["mean_ttft_ms"], rel=0.05)


@pytest.mark.parametrize("seed", range(6))
def test_recordings_of_all_that_may_happen_are_read(seed: int, tmp_path: Path) -> None:
    """Forks, aborts, deaths, requests that are sent again."""
    rng, path = random.Random(seed), tmp_path / "trace"
    recorded = Recorded(path, 30, num_host_blocks=12, speculative_config={"num_speculative_tokens": 3})
    recorded.random_work(rng, death_rate=rng.choice([0.0, 0.1]))
    recorded.drain()
    recorded.core.close()
    assert Recording(str(path)).read().requests


def test_a_fork_is_a_request_whose_prompt_has_the_output_before_it(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    recorded = Recorded(path)
    recorded.add("parent", [1, 2, 3, 4, 5], max_tokens=12, ignore_eos=True)
    while recorded.scheduler.requests["parent"].sequences[0].num_output < 4:
        recorded.loop()
    recorded.core.fork(b"client", ForkRequest("parent", "child", 3, SamplingParams(max_tokens=9, ignore_eos=True)))
    recorded.drain()
    recorded.core.close()
    load = load_of(Recording(str(path)).read())
    assert [(len(each.tokens) // 4, each.output_len) for each in load] == [(5, 12), (8, 6)]


def test_each_sample_is_a_request_with_the_same_prompt(tmp_path: Path) -> None:
    """Together they have more tokens than a sequence may have, and one request cannot."""
    path = tmp_path / "trace"
    recorded = Recorded(path)
    prompt = list(range(1, 18))
    length = recorded.core.max_model_len - len(prompt)
    recorded.add("samples", prompt, max_tokens=length, ignore_eos=True, n=2)
    recorded.add("beams", prompt, max_tokens=4, ignore_eos=True, use_beam_search=True, n=2, temperature=0.0)
    recorded.drain()
    recorded.core.close()
    load = load_of(Recording(str(path)).read())
    assert [(len(each.tokens) // 4, each.output_len) for each in load] == [(17, length)] * 2 + [(17, 4)] * 2
    assert len({each.tokens[:64] for each in load}) == 1, "but for the part of a block at the end"


def test_a_prompt_that_was_cached_but_for_its_last_token_is_known_by_its_blocks(tmp_path: Path) -> None:
    """The step that completes it has a token for each sequence, like one that only decodes."""
    path = tmp_path / "trace"
    recorded = Recorded(path)
    for name in ("first", "again"):
        recorded.add(name, list(range(1, 17)), max_tokens=4, ignore_eos=True)
        recorded.drain()
    recorded.core.close()
    first, again = load_of(Recording(str(path)).read())
    assert first.tokens == again.tokens


def test_no_disk_is_made_up() -> None:
    with pytest.raises(ConfigError, match="kept nothing on a disk"):
        simulate(made_up(), {"kv_cache_dir": "/somewhere"}, load_at(5.0, 3))
