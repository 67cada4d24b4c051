"""A request that kills its workers is found and ended; all others get the tokens that they have without it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import scaled
from tests.e2e.killed_worker import LIGHT
from tests.e2e.launched import launched
from tests.e2e.poisoned_worker import POISON, VARIABLE
from vllm_lite import AsyncClient, RequestOutput, SamplingParams
from vllm_lite.client.engines.launch import LaunchedEngine
from vllm_lite.errors import RequestError
from vllm_lite.protocol.stats import Stats

PATIENCE_S = scaled(90.0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
Tokens = list[list[int]]


class Poisonable:
    """An engine whose workers die of marked requests while `file` exists."""

    def __init__(self, launched: LaunchedEngine, file: Path) -> None:
        self.launched = launched
        self.file = file

    def serve(self, num: int, *bad: SamplingParams, forked: bool = False) -> tuple[list[Tokens], list[str], Stats]:
        """The tokens of `num` good requests, the errors of bad ones with these parameters, and the engine's
        counters."""
        return asyncio.run(asyncio.wait_for(self._serve(num, bad, forked), PATIENCE_S))

    async def _serve(
        self, num: int, bad: tuple[SamplingParams, ...], forked: bool
    ) -> tuple[list[Tokens], list[str], Stats]:
        async with AsyncClient(self.launched.address) as client:
            marked = [client.generate([POISON, 5, 6], params, f"bad{index}") for index, params in enumerate(bad)]
            if forked:  # while no worker dies yet
                await anext(marked[0])
                marked += await client.fork("bad0", 1, ENDLESS)
                await anext(marked[1])
                self.file.touch()
            good = [
                asyncio.ensure_future(read(client.generate([7 + n, *range(3, 5 + n % 9)], GREEDY))) for n in range(num)
            ]
            errors = [await fault(each) for each in marked]
            tokens = await asyncio.gather(*good)
            return tokens, errors, await client.stats()


async def read(outputs: AsyncIterator[RequestOutput]) -> Tokens:
    async for output in outputs:
        last = output
    return [list(sample.token_ids) for sample in last.outputs]


async def fault(outputs: AsyncIterator[RequestOutput]) -> str:
    with pytest.raises(RequestError) as caught:
        await read(outputs)
    return str(caught.value)


@contextmanager
def engine(model: Path, folder: Path, light: bool = False, **settings: Any) -> Iterator[Poisonable]:
    """`light`: its workers are simulated ones in real processes, which start fast."""
    file = folder / "poison"
    environment = {VARIABLE: str(file)} | ({LIGHT: "1"} if light else {})
    module = "tests.e2e.poisoned_worker"
    with launched(model, environment, worker_module=module, max_num_seqs=64, **settings) as running:
        yield Poisonable(running, file)


def num_deaths(stats: Stats) -> int:
    return sum(stats.restarts.values())


def test_one_of_64_is_found_in_four_deaths(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with engine(tiny_checkpoint, tmp_path) as poisonable:
        expected, _, stats = poisonable.serve(63)
        assert num_deaths(stats) == 0
        poisonable.file.touch()
        found, (error,), stats = poisonable.serve(63, GREEDY)
    assert found == expected
    assert num_deaths(stats) <= 4
    assert stats.restarts.keys() == {"died"}
    assert stats.poisoned_requests == 1
    assert stats.ended_by["error"] == 1
    assert "request 'bad0' was ended because the workers died 4 times in a row while they computed it" in error
    assert "SIGKILL" in error


@pytest.fixture(scope="module")
def light(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Poisonable]:
    folder = tmp_path_factory.mktemp("p")
    with engine(tiny_checkpoint, folder, light=True, num_gpu_blocks_override=400, max_restarts=100) as poisonable:
        yield poisonable


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=4, seed=3, max_tokens=40, ignore_eos=True),
        SamplingParams(n=3, use_beam_search=True, temperature=0.0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=40, prompt_logprobs=1),
    ],
    ids=["samples", "beams", "scored"],
)
def test_of_all_kinds_of_requests(light: Poisonable, params: SamplingParams) -> None:
    light.file.unlink(missing_ok=True)
    expected, _, before = light.serve(20)
    light.file.touch()
    found, errors, stats = light.serve(20, params)
    assert found == expected
    assert num_deaths(stats) - num_deaths(before) <= 4
    assert stats.poisoned_requests - before.poisoned_requests == 1
    assert "was ended because the workers died" in errors[0]


def test_a_fork_is_found_as_its_parent_is(light: Poisonable) -> None:
    light.file.unlink(missing_ok=True)
    expected, _, before = light.serve(20)
    found, errors, stats = light.serve(20, ENDLESS, forked=True)
    assert found == expected
    assert len(errors) == 2
    assert all("was ended because the workers died" in error for error in errors)
    assert num_deaths(stats) - num_deaths(before) <= 6


def test_a_lone_request_that_kills_workers_is_found(light: Poisonable) -> None:
    light.file.unlink(missing_ok=True)
    *_, before = light.serve(1)
    light.file.touch()
    *_, stats = light.serve(0, GREEDY)
    assert num_deaths(stats) - num_deaths(before) == 3
