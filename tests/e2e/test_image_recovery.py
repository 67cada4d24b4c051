"""Processes are killed while an image is encoded, before and after its vectors are used: every stream has the same
tokens as without deaths."""

import asyncio
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

from tests.deadlines import scaled
from tests.e2e.kill_plan import VARIABLE, Death, Plan
from tests.e2e.launched import launched
from tests.images import TILE, make_smolvlm
from vllm_lite import AsyncClient, SamplingParams
from vllm_lite.client.engines.launch import LaunchedEngine
from vllm_lite.client.prompt import PromptLike
from vllm_lite.client.spans import ShownMedia, Text
from vllm_lite.protocol.spans import Media

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TEXT = list(range(10, 30))


def prompt(seed: int, num_tiles: int = 3) -> PromptLike:
    tiles = np.random.default_rng(seed).integers(0, 256, (num_tiles, TILE, TILE, 3), dtype=np.uint8)
    spans = list[Text | ShownMedia]()
    for tile in tiles:
        data = tile.tobytes()
        media = Media("image", blake2b(data, digest_size=32).digest(), 4)
        spans += [Text(TEXT[: seed % 5 + 2]), ShownMedia(media, data)]
    return {"spans": [*spans, Text(TEXT)]}


PROMPTS: list[PromptLike] = [prompt(1), prompt(2), TEXT, prompt(3, 1)]


class Killed:
    def __init__(self, engine: LaunchedEngine, plan: Plan) -> None:
        self.engine = engine
        self.plan = plan
        self.expected = self.serve()

    def serve(self) -> list[list[int]]:
        """The tokens of all prompts, computed together with empty caches."""
        return asyncio.run(asyncio.wait_for(self._serve(), scaled(60.0)))

    async def _serve(self) -> list[list[int]]:
        async with AsyncClient(self.engine.address) as client:
            await client.reset_prefix_cache()

            async def read(prompt: PromptLike) -> list[int]:
                tokens = list[int]()
                async for output in client.generate(prompt, GREEDY):
                    shown = list(output.outputs[0].token_ids)
                    assert shown[: len(tokens)] == tokens, "a token that was shown has changed"
                    tokens = shown
                return tokens

            return await asyncio.gather(*map(read, PROMPTS))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    folder = tmp_path_factory.mktemp("images")
    plan = Plan(folder / "plan")
    plan.write([])
    path = make_smolvlm(folder / "m")
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": 64,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "max_model_len": 256,
    }
    with launched(path, {VARIABLE: str(plan.path)}, engine_module="tests.e2e.killed_engine", **settings) as engine:
        killed = Killed(engine, plan)
        assert len({tuple(each) for each in killed.expected}) == len(PROMPTS)
        yield killed


@pytest.mark.parametrize(
    "death",
    [
        Death("worker 0", "in a layer", 1),
        Death("worker 0", "in a layer", 3),
        Death("worker 0", "got SchedulerOutput", 2),
        Death("worker 0", "before ModelOutput", 3),
        Death("engine", "after submit", 2),
        Death("engine", "between results and publish", 3),
    ],
    ids=lambda death: f"{death.who} {death.where} {death.times}",
)
def test_streams_with_images_continue(killed: Killed, death: Death) -> None:
    killed.plan.write([death])
    assert killed.serve() == killed.expected
    assert not killed.plan.read(), "nobody has died"
