"""Several engines in `vllm-lite simulate`: behind the prefix router, each with the machine that it was recorded on."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_simulate import TIMES, load_at, made_up
from vllm_lite.tools.bench.serve_client import Outcome
from vllm_lite.tools.bench.serve_datasets import DatasetOptions
from vllm_lite.tools.simulate import fit
from vllm_lite.tools.simulate.cost import StepTimer
from vllm_lite.tools.simulate.load import LoadOptions, make_load
from vllm_lite.tools.simulate.recording import RecordedRequest
from vllm_lite.tools.simulate.simulation import Simulation
from vllm_lite.tools.simulate.variants import simulate, variants


def test_requests_are_sent_to_the_engine_with_their_prefix() -> None:
    """Four long prefixes. With two engines each computes about half of them, and first tokens come sooner than from
    one. If a pool holds one prefix only, each engine keeps its own."""
    names = ("prefix_len", "suffix_len", "num_prefixes", "output_len")
    sizes: dict[str, Any] = {f"prefix_repetition_{name}": n for name, n in zip(names, (640, 20, 4, 8), strict=True)}
    dataset = DatasetOptions(dataset_name="prefix_repetition", num_prompts=120, **sizes)
    load = make_load(LoadOptions(dataset, 40.0), None)
    one, two = (simulate(made_up(), each, load) for each in variants(["data_parallel_size=1,2"]))
    assert two.figures["completed"] == 120
    assert two.figures["mean_ttft_ms"] < 0.9 * one.figures["mean_ttft_ms"]
    assert two.figures["prefix_hit_rate"] > one.figures["prefix_hit_rate"] - 0.05
    tight = {"num_gpu_blocks_override": 110}
    one, two = (simulate(made_up(), {**tight, **each}, load) for each in variants(["data_parallel_size=1,2"]))
    assert two.figures["prefix_hit_rate"] > one.figures["prefix_hit_rate"] + 0.1, "what was evicted is known"
    assert simulate(made_up(), tight | {"data_parallel_size": 2}, load).figures == two.figures


def test_each_engine_may_have_its_own_machine() -> None:
    fast, slow = made_up(), made_up(times={name: 3 * seconds for name, seconds in TIMES.items()})
    load, two = load_at(10.0, 60), {"data_parallel_size": 2}
    both, mixed, neither = (simulate(each, two, load).figures for each in ([fast, fast], [fast, slow], slow))
    assert both["mean_tpot_ms"] < 0.8 * mixed["mean_tpot_ms"] < 0.8 * 0.8 * neither["mean_tpot_ms"]
    assert simulate(fast, two, load).figures == both


def test_a_routers_blocks_equal_those_of_its_engines_in_the_end() -> None:
    settings = {"data_parallel_size": 2, "num_gpu_blocks_override": 60}
    simulation = Simulation(made_up(), settings, lambda number: StepTimer(made_up(), number))
    simulation.run(load_at(20.0, 60))
    router = simulation.engines.router
    assert router is not None
    router.check_integrity()
    for number, engine in enumerate(simulation.engines.all):
        blocks = engine.core.kv.pool.blocks
        assert router.cached[number] == {each.block_hash[:-1] for each in blocks if each.block_hash}
        assert engine.core.scheduler.counters.cached_tokens


def test_the_clients_time_is_found_per_request_with_several_engines() -> None:
    def recording(*starts_s: float) -> Any:
        requests = {str(start_s): RecordedRequest(Outcome(1)) for start_s in starts_s}
        for start_s, request in zip(starts_s, requests.values(), strict=True):
            outcome = request.outcome
            outcome.start_s, outcome.chunks_s, outcome.output_len, outcome.is_complete = start_s, [2 * start_s], 1, True
        return SimpleNamespace(requests=requests)

    measured = {"median_ttft_ms": 1.0, "ttfts": [1.25, 2.25, 3.25, 4.25]}
    assert fit.client_time([recording(2, 3), recording(1, 4)], measured) == pytest.approx(0.25)
