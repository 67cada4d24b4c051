"""A whole worker on the device: the tokens of the CPU, the memory it measured, graphs against eager steps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.driver import GENERATION, Driver, make_prompt, new_request
from tests.plays import Play, graphs_of
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.control import Start
from vllm_lite.protocol.params import LogitRules, Sampling
from vllm_lite.protocol.step import Preempt, Resume, SchedulerOutput
from vllm_lite.worker.progress import Progress
from vllm_lite.worker.worker import Worker

PROMPTS = [(0, 30, [1, 2, 3]), (1, 7, [4, 5]), (2, 50, [6, 7, 8, 9])]


def on_gpu(checkpoint: Path, **settings: Any) -> Driver:
    given: dict[str, Any] = {"device": "cuda", "enforce_eager": True}
    return Driver(checkpoint, **(given | settings))


def play(driver: Driver, count: int = 8) -> dict[int, list[int]]:
    for handle, length, blocks in PROMPTS:
        driver.run(new_request(handle, make_prompt(length, seed=handle), blocks))
    driver.decode(0, 1, 2, count=count)
    return driver.got


# ---- the same tokens


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_float32_tokens_match_the_cpu(tiny_checkpoint: Path, backend: str) -> None:
    """Kernels that do not take float32 leave it to the reference, also where nothing is asked for."""
    expected = play(Driver(tiny_checkpoint, device="cpu", attention_backend="reference"))
    assert play(on_gpu(tiny_checkpoint, attention_backend=backend)) == expected


def test_the_kernels_give_the_logits_of_the_reference(bf16_checkpoint: Path) -> None:
    """bfloat16: near ties may fall otherwise, so the logits of one and the same sequence are compared."""
    ours, truth = (on_gpu(bf16_checkpoint, attention_backend=name, dtype="bfloat16") for name in ("cuda", "reference"))
    differences = []
    for driver in (ours, truth):
        kept: list[torch.Tensor] = []
        inner = driver.worker.runner.forward.logits
        driver.worker.runner.forward.logits = lambda inputs, inner=inner, kept=kept: (  # type: ignore[method-assign, misc]
            kept.append(inner(inputs).clone()) or kept[-1].clone()
        )
        for handle, length, blocks in PROMPTS:
            driver.run(new_request(handle, make_prompt(length, seed=handle), blocks))
        driver.worker.runner.batch.rows.token_ids[:3, 50:60] = 0
        driver.decode(0, 1, 2, count=1)
        differences.append(kept)
    for got, expected in zip(*differences, strict=True):
        assert (got - expected).abs().max() < 0.05 * expected.abs().max()


def test_preempted_swapped_and_resumed(tiny_checkpoint: Path) -> None:
    def run(driver: Driver) -> list[int]:
        driver.run(new_request(0, make_prompt(30), [1, 2, 3]))
        driver.run(Preempt(0), ops=((2, 1, 40), (2, 2, 41)))
        driver.run(new_request(1, make_prompt(40, seed=1), [1, 2, 3]))
        driver.run(Resume(0, 30, 30, 1, [[9, 8]]), ops=((3, 40, 9), (3, 41, 8)))
        driver.decode(0, count=1)
        return driver.got[0]

    assert run(on_gpu(tiny_checkpoint, num_host_blocks=4)) == run(Driver(tiny_checkpoint, 4, device="cpu"))


def test_rules_and_prompt_logprobs_equal_the_cpu(tiny_checkpoint: Path) -> None:
    rules = LogitRules(1.0, 0.5, 1.2, ((5, 2.0),), pack_tokens(range(3, 300)), ((7, 8), (9,)))
    sampling = Sampling(0.0, 0, 1.0, 0.0, 0, min_tokens_until=34, stop_ids=(11,), rules=rules, prompt_logprobs=2)
    results = []
    for driver in (on_gpu(tiny_checkpoint), Driver(tiny_checkpoint, device="cpu", attention_backend="reference")):
        output = driver.run(new_request(0, make_prompt(30), [1, 2, 3], sampling=sampling))
        driver.decode(0, count=8)
        assert output.prompts is not None
        results.append((driver.got, output.prompts[0][1]))
    (got, scores), (expected, truth) = results
    assert got == expected
    assert (scores.start, len(scores.entries)) == (1, 29)
    for one, other in zip(scores.entries, truth.entries, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


# ---- graphs


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("bfloat16", None), ("float32", None), ("bfloat16", "int4"), ("float16", "int8"), ("bfloat16", "fp8")],
)
def test_graphs_give_the_tokens_of_eager_steps(bf16_checkpoint: Path, dtype: str, quantization: str | None) -> None:
    """Lengths, tables and batch sizes change from step to step. A batch is padded to a bucket of the same size, so that
    matrix products have the same number of rows, and the bits are the same.
    """
    settings: dict[str, Any] = {"attention_backend": "cuda", "dtype": dtype, "quantization": quantization}
    settings["cudagraph_capture_sizes"] = [*range(1, 9)]
    eager = on_gpu(bf16_checkpoint, **settings)
    graphed = on_gpu(bf16_checkpoint, **settings, enforce_eager=False)
    steps = Play(1, 1)
    for number in range(150):
        entries = steps.step()
        assert eager.run(*entries).tokens == graphed.run(*entries).tokens, number
        assert torch.equal(eager.pool, graphed.pool), number
    assert graphs_of(graphed).num_replays > 40


def test_a_replayed_step_waits_for_nothing_but_its_tokens(bf16_checkpoint: Path) -> None:
    driver = on_gpu(bf16_checkpoint, enforce_eager=False, dtype="bfloat16")
    play(driver, count=2)
    runner = driver.worker.runner
    kept: list[Any] = []
    inner = runner.forward.logits
    runner.forward.logits = lambda inputs: kept.append(inputs) or inner(inputs)  # type: ignore[method-assign, func-returns-value]
    driver.decode(0, 1, 2, count=1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        inner(kept[-1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- memory


def profiled(checkpoint: Path, **settings: Any) -> Worker:
    config = EngineConfig.check({"device": "cuda", "max_num_seqs": 16, "gpu_memory_utilization": 0.1} | settings)
    spec = load_spec(checkpoint)
    resolved = config.resolve(
        max_position_embeddings=spec.max_position_embeddings, dtype=spec.dtype, model_path=str(checkpoint)
    )
    return Worker(resolved, 0, Progress())


def test_the_profiled_memory_is_available(bf16_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResolvedConfig, "enough_blocks", lambda *_: 10**12)  # or the model is too small for the device
    worker = profiled(bf16_checkpoint)
    ready = worker.load()
    total = torch.cuda.mem_get_info()[1]
    assert 0.02 * total < ready.num_blocks * ready.block_bytes < 0.1 * total
    worker.start(Start(GENERATION, ready.num_blocks, 16))
    assert worker.execute(
        SchedulerOutput(GENERATION, 1, [], [new_request(0, make_prompt(400), list(range(1, 27)))])
    ).tokens
    free = torch.cuda.mem_get_info()[0]
    assert total - free < 0.15 * total


def test_a_model_that_does_not_fit_is_an_error_with_numbers(bf16_checkpoint: Path) -> None:
    from vllm_lite.errors import ConfigError

    with pytest.raises(ConfigError, match="no memory for KV blocks"):
        profiled(bf16_checkpoint, gpu_memory_utilization=0.001).load()
