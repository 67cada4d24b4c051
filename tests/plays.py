"""Random sequences of steps, run by two workers of which one replays graphs: their bits must be the same."""

from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.driver import WARM, Driver, make_prompt, new_request
from vllm_lite.protocol.step import Continue, Entry, Finish, ModelOutput
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.device import Device
from vllm_lite.worker.graphs import DecodeGraphs


def graphs_of(driver: Driver) -> DecodeGraphs:
    graphs = driver.worker.runner.forward
    assert isinstance(graphs, DecodeGraphs)
    return graphs


class Play:
    """A random sequence of steps for at most eight sequences, four with two groups, each with blocks of its own."""

    def __init__(self, seed: int, num_groups: int) -> None:
        self.random = Random(seed)
        self.left: dict[int, int] = {}  # handle -> prompt tokens not computed
        self.lengths: dict[int, int] = {}
        self.tables = [
            [list(range(first + 4 * group, first + 4 * group + 4)) for group in range(num_groups)]
            for first in range(1, 33, 4 * num_groups)
        ]
        self.owned: dict[int, list[list[int]]] = {}
        self.num_handles = 0

    def step(self) -> list[Entry]:
        entries: list[Entry] = []
        for handle in [h for h in self.lengths if self.lengths[h] > 60 or self.random.random() < 0.04]:
            entries.append(Finish(handle))
            self.tables.append(self.owned.pop(handle))
            del self.lengths[handle], self.left[handle]
        for handle in self.lengths:
            left = self.left[handle]
            count = 1 if left <= 1 else self.random.choice([1, left, self.random.randint(1, left)])
            self.left[handle] = max(left - count, 0)
            self.lengths[handle] += count
            entries.append(Continue(handle, count, []))
        if self.tables and self.random.random() < 0.4:
            entries.append(self.arrival())
        return entries

    def arrival(self) -> Entry:
        handle, self.num_handles = self.num_handles, self.num_handles + 1
        length = self.random.randint(1, 24)
        count = self.random.randint(1, length)
        table = self.owned[handle] = self.tables.pop(0)
        self.left[handle], self.lengths[handle] = length - count, count
        entry = new_request(handle, make_prompt(length, seed=handle), [], num_tokens=count, sampling=WARM)
        entry.block_ids[:] = table
        return entry


class Recorder:
    """Keeps a copy of the logits of every step."""

    def __init__(self, driver: Driver) -> None:
        self.logits: list[torch.Tensor] = []
        runner = driver.worker.runner
        inner = runner.forward.logits

        def logits(inputs: StepInputs) -> torch.Tensor:
            self.logits.append(inner(inputs).clone())
            return self.logits[-1].clone()

        runner.forward.logits = logits  # type: ignore[method-assign]


def run_both(model: Path, seed: int, num_steps: int, on: Device | None, **settings: Any) -> tuple[Driver, Driver]:
    """Run the same steps eagerly and with graphs, on a device made by the test or (None) on the one that a worker
    opens. Fails at the first step whose bits differ."""
    eager, graphed = Driver(model, enforce_eager=True, **settings), Driver(model, on=on, **settings)
    expected, got = Recorder(eager), Recorder(graphed)
    play = Play(seed, len(eager.ready.groups))
    for number in range(num_steps):
        entries = play.step()
        outputs = [without_step(driver.run(*entries)) for driver in (eager, graphed)]
        assert outputs[0] == outputs[1], number
        assert len(expected.logits) == len(got.logits)
        if got.logits:
            assert torch.equal(expected.logits[-1], got.logits[-1]), number
        assert torch.equal(eager.pool, graphed.pool), f"step {number} left another cache"
    return eager, graphed


def without_step(output: ModelOutput) -> tuple[Any, ...]:
    return (output.tokens, output.counts, output.failed)
