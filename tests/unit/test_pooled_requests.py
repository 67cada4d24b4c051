"""Requests that are pooled, in the scheduler: they share steps, blocks and faults with those that generate."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.recorded import Recorded
from tests.scheduler_rig import VOCAB, Rig
from vllm_lite.engine.intake import Intake, ModelFacts
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.engine.request import Request
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import ForkRequest, Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.pooling import PoolerInfo, Pooling, PoolingParams, PoolingTask

WHOLE, LAST = Pooling("embed"), Pooling("embed", reads_all=False)
PARAMS = SamplingParams(max_tokens=1, seed=0)


def pooled(rig: Rig, name: str, prompt: list[int], pooling: Pooling = WHOLE, **params: Any) -> Request:
    message = Generate(name, pack_tokens(prompt), msgspec.structs.replace(PARAMS, **params), pooling=pooling)
    request = Request(message, b"client", len(prompt) + 1, frozenset())
    rig.scheduler.add(request)
    return request


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def run(rig: Rig) -> dict[str, bytes]:
    """Step until nothing is left. The simulated worker pools a prompt to its own tokens."""
    found: dict[str, bytes] = {}
    for _ in range(500):
        if not rig.scheduler.requests:
            break
        for item in rig.step():
            if item.pooled is not None:
                assert item.reason == "stop"
                assert item.request.request_id not in found, "one terminal message each"
                found[item.request.request_id] = item.pooled
    assert not rig.scheduler.requests
    return found


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (6,), ()], ids=["full", "window", "no cache"])
def test_prompts_are_pooled_beside_streams(depth: int, windows: tuple[int | None, ...]) -> None:
    """Long prompts are computed in chunks, some with a last chunk of one token."""
    rig = Rig(num_blocks=60, depth=depth, windows=windows)
    prompts = {f"p{length}": prompt_of(length, length) for length in (1, 4, 15, 16, 17, 33, 40)}
    rig.add("stream", prompt_of(5), max_tokens=9)
    for name, prompt in prompts.items():
        pooled(rig, name, prompt, LAST if len(prompt) % 2 else WHOLE)
    assert run(rig) == {name: pack_tokens(prompt) for name, prompt in prompts.items()}
    assert len(rig.output("stream")) == 9
    assert rig.kv.pool.num_used == 0
    assert rig.scheduler.counters.ended_by == {"stop": 7, "length": 1, "abort": 0, "error": 0}


def test_only_pooling_of_all_tokens_skips_the_cache() -> None:
    rig = Rig(num_blocks=40)
    prompt = prompt_of(12)
    rig.add("first", prompt, max_tokens=1)
    run(rig)
    last, whole = pooled(rig, "last", prompt, LAST), pooled(rig, "whole", prompt, WHOLE)
    found = run(rig)
    assert found == dict.fromkeys(("last", "whole"), pack_tokens(prompt))
    assert (last.num_cached_at_start, whole.num_cached_at_start) == (11, 0)


@pytest.mark.parametrize("num_host_blocks", [0, 30])
@pytest.mark.parametrize("pooling", [WHOLE, LAST], ids=["whole", "last"])
def test_preempted_and_lost_prompts_are_pooled_once(pooling: Pooling, num_host_blocks: int) -> None:
    """Growing streams take the blocks of prompts that are computed in chunks; then the workers die."""
    preemption = "swap" if num_host_blocks else "recompute"
    rig = Rig(num_blocks=14, depth=2, num_host_blocks=num_host_blocks, preemption=preemption, max_num_batched_tokens=8)
    prompts = {f"p{index}": prompt_of(20 + index, index) for index in range(3)}
    for index in range(3):
        rig.add(f"s{index}", prompt_of(4, 50 + index), max_tokens=12)
    for name, prompt in prompts.items():
        pooled(rig, name, prompt, pooling)
    early: dict[str, bytes] = {}
    for _ in range(4):
        early |= {item.request.request_id: item.pooled for item in rig.step() if item.pooled is not None}
    rig.restart_workers()
    found = early | run(rig)
    assert found == {name: pack_tokens(prompt) for name, prompt in prompts.items()}
    assert all(len(rig.output(f"s{index}")) == 12 for index in range(3))


def test_aborted_while_its_result_is_on_its_way() -> None:
    rig = Rig(depth=2)
    pooled(rig, "p", prompt_of(5))
    output = rig.scheduler.schedule()
    assert output is not None
    rig.worker.submit(output)
    rig.abort("p")
    result = rig.worker.poll()
    assert result is not None
    assert rig.scheduler.update(result) == []
    rig.scheduler.check_integrity()


def test_a_trace_with_them_is_replayed(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "trace", 40)
    pooler = PoolerInfo(("embed", "token_embed"), size=8, reads_last=True)
    recorded.core.intake._model = ModelFacts(50, frozenset(), pooler)
    for index in range(6):
        task: PoolingTask = "token_embed" if index % 2 else "embed"
        message = Generate(f"p{index}", pack_tokens(prompt_of(3 + 5 * index)), PARAMS, pooling=Pooling(task))
        recorded.core.add(b"client", message)
        recorded.add(f"s{index}", prompt_of(4, index), max_tokens=6)
        recorded.loop()
    while recorded.core.scheduler.requests:
        recorded.loop()
    recorded.core.close()
    replay = Replay(str(tmp_path / "trace")).run()
    assert replay.divergence is None
    assert replay.num_ended == 12


@pytest.mark.parametrize(
    ("pooling", "length", "problem"),
    [
        (Pooling("classify"), 3, "cannot be asked to classify; it can be asked to embed or token_embed"),
        (Pooling("embed", dimensions=9), 3, "dimensions must be at most the 8 of the model, got 9"),
        (Pooling("embed"), 0, "the prompt is empty"),
        (Pooling("embed"), 41, "maximum context length is 40 tokens, but the text has 41 tokens"),
        (None, 3, "this model generates no text; it can be asked to embed or token_embed"),
    ],
)
def test_unsupported_pooling_is_refused(pooling: Pooling | None, length: int, problem: str) -> None:
    rig = Rig(num_blocks=40, max_model_len=40)
    pooler = PoolerInfo(("embed", "token_embed"), generates=False, size=8)
    intake = Intake(rig.scheduler, ModelFacts(VOCAB, frozenset(), pooler), lambda: 0.0)
    with pytest.raises(RequestError, match=problem):
        intake.add(b"client", Generate("r", pack_tokens(prompt_of(length)), PARAMS, pooling=pooling))
    assert not rig.scheduler.requests
    longest = Generate("r", pack_tokens(prompt_of(40)), PARAMS, pooling=Pooling("embed"))
    intake.add(b"client", longest)
    intake.add(b"client", longest)  # sent again
    with pytest.raises(RequestError, match="in use to pool otherwise"):
        intake.add(b"client", msgspec.structs.replace(longest, pooling=Pooling("token_embed")))
    with pytest.raises(RequestError, match="pooled and generates nothing that could be forked"):
        intake.fork(b"client", ForkRequest("r", "child", 0, SamplingParams()))
    assert run(rig) == {"r": pack_tokens(prompt_of(40))}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"dimensions": 0}, "dimensions: .*got 0"),
        ({"dimensions": "4"}, "dimensions: .*got '4'"),
        ({"task": "rank"}, "task: .*got 'rank'"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1, or -1"),
        ({"use_activation": 1}, "use_activation"),
    ],
)
def test_bad_params_are_named(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        PoolingParams(**fields)
