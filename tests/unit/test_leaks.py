"""Leak audit: thousands of random requests over all features; afterwards no resource is held.

`VLLM_LITE_SOAK_REQUESTS=100000 pytest tests/unit/test_leaks.py` is the long version.
"""

import os
import random
from typing import Any

import pytest

from tests.scheduler_rig import VOCAB, Rig
from vllm_lite.engine.request import Request
from vllm_lite.engine.scheduling.policy import Fair
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.params import SamplingParams

NUM_REQUESTS = int(os.environ.get("VLLM_LITE_SOAK_REQUESTS", "2000"))
BATCH = 50


def submit(rig: Rig, rng: random.Random, name: str, prefixes: list[list[int]]) -> None:
    """Add one request of a random kind: plain, several samples, or a beam search; half of them share a prefix."""
    prompt = [*rng.choice(prefixes), *(rng.randrange(VOCAB) for _ in range(rng.randint(0, 6)))]
    kind = rng.random()
    params: dict[str, Any] = {}
    if kind < 0.15:
        params = {"n": rng.randint(2, 4)}
    elif kind < 0.2:
        params = {"n": rng.randint(2, 3), "use_beam_search": True}
    stop = frozenset(rng.sample(range(VOCAB), 2))
    rig.add(name, prompt, rng.randint(1, 12), stop, user=f"tenant{rng.randint(0, 2)}", **params)


def disturb(rig: Rig, rng: random.Random, name: str) -> None:
    """Abort or fork somebody."""
    requests = rig.scheduler.requests
    if not requests:
        return
    victim = requests[rng.choice(list(requests))]
    if rng.random() < 0.5:
        rig.abort(victim.request_id)
    elif victim.beam is None and victim.num_samples == 1:
        parent = victim.sequences[0]
        have = rng.randint(0, parent.num_output)
        tokens = parent.tokens[: parent.num_prompt + have]
        prompt, output = tokens[: parent.num_prompt].tobytes(), tokens[parent.num_prompt :].tobytes()
        message = Generate(name, prompt, SamplingParams(max_tokens=12), have, output)
        child = Request(message, b"client", victim.max_len, frozenset())
        rig.outputs[name, 0] = tokens[parent.num_prompt :].tolist()
        if child.num_tokens < child.max_len:
            rig.scheduler.branching.fork_request(victim, child)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("windows", "num_blocks"), [((None,), 24), ((7,), 11), ((None, 6), 30)])
@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_is_held_when_everybody_has_gone(windows: tuple[int | None, ...], num_blocks: int, depth: int) -> None:
    rng = random.Random(f"{windows} {depth}")
    rig = Rig(
        num_blocks,
        windows=windows,
        num_host_blocks=16,
        depth=depth,
        preemption="swap",
        policy=Fair(),
        num_drafts=2 if depth == 1 else 0,
        max_num_seqs=6,
        max_num_batched_tokens=24,
    )
    rig.decisions.clear()
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(5)]
    for number in range(NUM_REQUESTS // 6 + 1):
        submit(rig, rng, f"r{number}", prefixes)
        if rng.random() < 0.15:
            disturb(rig, rng, f"f{number}")
        for _ in range(rng.randint(0, 3)):
            rig.step()
        if number % BATCH == 0:  # so that outputs of the past do not pile up
            rig.drain()
            rig.outputs.clear()
            rig.reasons.clear()
            rig.decisions.clear()
            assert rig.worker.resident == set() or rig.scheduler.queues.entries
    rig.drain()
    counters = rig.scheduler.counters
    assert counters.preemptions > 0
    assert counters.swaps > 0
    assert rig.scheduler.requests == {}
    assert rig.scheduler.running == []
    assert rig.kv.pool.num_free == rig.kv.pool.num_usable
    assert rig.host is not None
    assert rig.host.pool.num_free == 16
