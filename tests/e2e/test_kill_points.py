"""Processes are killed at each critical moment: every stream gets the tokens that it would have had, and no process or
file is left at the end.

One engine survives many deaths of its workers. If a test does not depend on the tokens, the worker is a simulated one
in a real process. It starts fast, and checks that every block that a sequence reads has the history of this sequence.
"""

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import scaled
from tests.e2e.kill_plan import VARIABLE, Death, Plan
from tests.e2e.killed_worker import LIGHT
from tests.e2e.launched import launched
from vllm_lite import AsyncClient, SamplingParams
from vllm_lite.client.engines.launch import LaunchedEngine
from vllm_lite.errors import EngineDeadError

LOAD_S = scaled(60.0)
NUM_BLOCKS, NUM_TOKENS = 34, 60
Tokens = dict[str, list[list[int]]]

LOOP = [
    Death("worker 0", "got SchedulerOutput", 3),
    Death("worker 0", "beginning of a message", 4),
    Death("worker 0", "between two steps of a message"),
    Death("worker 0", "before ModelOutput", 3),
    Death("worker 0", "after ModelOutput", 40),
]
STEP = [
    Death("worker 0", "in a layer", 5),
    Death("worker 0", "before a draw", 4),
    Death("worker 0", "in a swap_out"),
    Death("worker 0", "in a swap_in"),
    Death("worker 0", "in a copy"),
    Death("worker 0", "before scores of a prompt"),
    Death("worker 0", "after scores of a prompt"),
]
RANKS = [
    Death("worker 1", "beginning of a message", 6),
    Death("worker 0", "before a draw", 6),
]
START = [
    Death("worker 0", "after ModelOutput", 2),  # so that there is another start
    *(
        Death("worker 0", where)
        for where in (
            "before WorkerHello",
            "after WorkerHello",
            "before Ready",
            "after Ready",
            "got Start",
            "before Started",
            "after Started",
        )
    ),
]
ENGINE = [
    Death("engine", "after a request was accepted", 3),
    Death("engine", "after a fork was accepted"),
    Death("engine", "after an abort"),
    Death("engine", "between schedule and submit", 4),
    Death("engine", "after submit", 40),
    Death("engine", "between results and publish", 50),
    Death("engine", "in the middle of publishing", 200),
    Death("engine", "between publish and the next step", 6),
]
RECOVERY = [
    Death("engine", "before the loss of workers"),
    Death("engine", "after the loss of workers"),
    Death("engine", "before a worker is started"),
    Death("engine", "after a worker was started"),
    Death("engine", "before workers are back"),
    Death("engine", "after workers are back"),
]
"""Points at which an engine dies while it replaces its workers."""
END = [Death("engine", "before the workers end")]


def prompt(number: int, length: int) -> list[int]:
    return random.Random(number).choices(range(3, 384), k=length)


LOAD = {f"greedy {n}": (prompt(n, 9 + 8 * n), SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)) for n in range(4)}
LOAD["pair"] = (prompt(4, 21), SamplingParams(n=2, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True))
LOAD["long"] = (prompt(6, 5), SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True))
SCORED = {"scored": (prompt(5, 70), SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=12))}
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
BRANCH = SamplingParams(temperature=0.0, max_tokens=200)  # more tokens than the parent has when a busy client forks it


class Killed:
    """An engine, its plan of deaths, and the outputs of its load without deaths."""

    def __init__(self, launched: LaunchedEngine, plan: Plan, load: dict[str, tuple[list[int], SamplingParams]]) -> None:
        self.launched = launched
        self.plan = plan
        self.load = load
        self.expected = self.serve()

    def serve(self) -> Tokens:
        return asyncio.run(asyncio.wait_for(self._serve(), LOAD_S))

    async def _serve(self) -> Tokens:
        """All of the load at once, with a fork of its first request and with one that is aborted."""
        async with AsyncClient(self.launched.address) as client:

            async def read(asked: Any) -> Any:
                tokens: dict[int, list[int]] = {}
                async for output in asked:
                    for sample in output.outputs:
                        had = tokens.setdefault(sample.index, [])
                        assert sample.token_ids[: len(had)] == had, "a token that was shown has changed"
                        tokens[sample.index] = list(sample.token_ids)
                return output

            async def fork() -> Any:
                async for _ in (parent := client.generate(prompt(9, 12), ENDLESS, "parent")):
                    (branch,) = await client.fork("parent", 1, BRANCH)
                    output = await read(branch)
                    break
                await parent.aclose()
                return output

            names = [*self.load, "fork"]
            streams = [read(client.generate(*self.load[name])) for name in self.load]
            outputs = await asyncio.gather(*streams, fork())
            await idle(client)
        for name, output in zip(names, outputs, strict=True):
            wants_scores = name in self.load and self.load[name][1].prompt_logprobs is not None
            assert not wants_scores or len(output.prompt_logprobs) == len(output.prompt_token_ids)
        return {
            name: [sample.token_ids for sample in output.outputs] for name, output in zip(names, outputs, strict=True)
        }

    def check(self, *deaths: Death) -> None:
        """Serve the load while processes die as said."""
        self.plan.write(deaths)
        found = self.serve()
        assert self.plan.read() == [], "nobody came there"
        assert found == self.expected


async def idle(client: AsyncClient) -> None:
    """Wait until nothing is in use. The whole load has a deadline."""
    in_use = 1
    while in_use:
        try:
            stats = await client.stats()
        except EngineDeadError:  # no answer while an engine is being replaced
            await asyncio.sleep(0.01)  # before the next question
        else:
            in_use = stats.num_running + stats.num_waiting + stats.num_used_blocks


@contextmanager
def engine(model: Path, folder: Path, light: bool = False, **settings: Any) -> Iterator[tuple[LaunchedEngine, Plan]]:
    """An engine that kills itself by plan; `light`: its workers are simulated ones."""
    plan = Plan(folder / "plan")
    plan.write([])
    environment = {VARIABLE: str(plan.path)} | ({LIGHT: "1"} if light else {})
    small: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_restarts": 1000,
        "log_level": "error",
    }
    small |= {"num_gpu_blocks_override": NUM_BLOCKS, "swap_space": 0.001, "preemption_mode": "swap"}
    with launched(model, environment, engine_module="tests.e2e.killed_engine", **(small | settings)) as running:
        yield running, plan


@pytest.fixture(scope="module")
def alone(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    with engine(tiny_checkpoint, tmp_path_factory.mktemp("k")) as (running, plan):
        yield Killed(running, plan, LOAD | SCORED)


@pytest.fixture(scope="module")
def light(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    with engine(tiny_checkpoint, tmp_path_factory.mktemp("k"), light=True) as (running, plan):
        yield Killed(running, plan, LOAD)


def where(death: Death) -> str:
    return f"{death.who}, {death.where}"


@pytest.mark.parametrize("death", STEP, ids=where)
def test_a_worker_dies_in_a_step(alone: Killed, death: Death) -> None:
    alone.check(death)


@pytest.mark.parametrize("death", LOOP, ids=where)
def test_a_worker_dies(light: Killed, death: Death) -> None:
    light.check(death)


def num_held(pid: int) -> tuple[int, int]:
    """The descriptors and the threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def test_a_worker_dies_at_every_moment_of_its_start(light: Killed) -> None:
    """The new engine has nothing of the dead groups, except that a client's connection may still be closing."""
    pid = light.launched.pid
    before = num_held(pid)
    light.check(*START)
    now = num_held(pid)
    assert all(held < had + len(START) for held, had in zip(now, before, strict=True)), (before, now)


@pytest.mark.parametrize("death", ENGINE, ids=where)
def test_an_engine_dies(light: Killed, death: Death) -> None:
    light.check(death)


@pytest.mark.parametrize("death", RECOVERY, ids=where)
def test_an_engine_dies_while_it_replaces_its_workers(light: Killed, death: Death) -> None:
    light.check(Death("worker 0", "before ModelOutput", 3), death)


def test_an_engine_dies_again_as_soon_as_it_serves(light: Killed) -> None:
    light.check(Death("engine", "after submit", 3), Death("engine", "after Welcome"))


def test_one_of_two_ranks_dies(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The other one is in a collective of the same step, and waits for it."""
    with engine(tiny_checkpoint, tmp_path, tensor_parallel_size=2) as (running, plan):
        killed = Killed(running, plan, LOAD | SCORED)
        killed.check(*RANKS)


@pytest.mark.parametrize("death", END, ids=where)
def test_one_dies_while_all_end(tiny_checkpoint: Path, tmp_path: Path, death: Death) -> None:
    with engine(tiny_checkpoint, tmp_path, light=True) as (_, plan):
        plan.write([death])
    assert plan.read() == [], "nobody came there"
