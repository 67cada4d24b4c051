"""Greedy tokens in float32 equal transformers', however the scheduler splits and mixes the requests.

The last tests break the KV cache and the positions on purpose, to show that the other tests would fail.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.e2e.reference import (
    GREEDY,
    LENGTHS,
    NUM_TOKENS,
    TIE,
    Case,
    Reference,
    compare,
    start,
    tokens_of,
)
from vllm_lite.protocol.step import ModelOutput, NewRequest, SchedulerOutput
from vllm_lite.worker.batch.input_batch import InputBatch
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.memory.cache_engine import NULL_BLOCK
from vllm_lite.worker.model_runner import ModelRunner

MAX_EXCUSED = 1
"""Prompts of the 30 that may part from the reference at a tie."""
UNLIMITED = 8192


@dataclass(frozen=True)
class Row:
    """Settings of one engine. The rows of Llama contain every pair of values, those of Qwen3 every value. A tiny pool
    causes preemptions. With a budget of one token only one sequence runs at a time, so nothing can be preempted.
    """

    family: str
    budget: int
    caching: bool
    block_size: int
    tiny_pool: bool = False
    alone: bool = False  # also run every prompt alone
    chunked: bool = True
    world: int = 1  # ranks that share the model

    def __str__(self) -> str:
        parts = [
            self.family,
            *[f"tp{self.world}"] * (self.world > 1),
            f"budget{self.budget}",
            f"block{self.block_size}",
            "cache" if self.caching else "nocache",
        ]
        return "-".join(parts + ["tiny"] * self.tiny_pool)

    @property
    def settings(self) -> dict[str, Any]:
        longest = max(LENGTHS) + NUM_TOKENS
        return {
            "tensor_parallel_size": self.world,
            "max_num_batched_tokens": self.budget,
            "enable_prefix_caching": self.caching,
            "block_size": self.block_size,
            "enable_chunked_prefill": self.chunked,
            # Room for the longest sequence, and the null block.
            "num_gpu_blocks_override": -(-longest // self.block_size) + 3
            if self.tiny_pool
            else 4096 // self.block_size,
        }


ROWS = [
    Row("llama", UNLIMITED, caching=True, block_size=16, alone=True),
    Row("llama", UNLIMITED, caching=False, block_size=8, tiny_pool=True, chunked=False),
    Row("llama", 64, caching=True, block_size=8, tiny_pool=True),
    Row("llama", 64, caching=False, block_size=16, alone=True),
    Row("llama", 7, caching=True, block_size=16, tiny_pool=True),
    Row("llama", 7, caching=False, block_size=8),
    Row("llama", 1, caching=True, block_size=8),
    Row("llama", 1, caching=False, block_size=16),
    Row("qwen3", UNLIMITED, caching=True, block_size=16, alone=True),
    Row("qwen3", 64, caching=True, block_size=8, tiny_pool=True),
    Row("qwen3", 7, caching=False, block_size=8),
    Row("qwen3", 1, caching=False, block_size=16),
    Row("llama", UNLIMITED, caching=False, block_size=8, tiny_pool=True, chunked=False, world=2),
    Row("llama", 64, caching=True, block_size=8, tiny_pool=True, world=4),
    Row("llama", 7, caching=False, block_size=16, world=2),
    Row("qwen3", UNLIMITED, caching=True, block_size=16, alone=True, world=2),
    Row("qwen3", 64, caching=True, block_size=8, tiny_pool=True, world=4),
]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_reference_depends_on_its_context(references, family):
    """Otherwise equal tokens would prove little."""
    cases = references[family].cases
    assert len(cases) == 30
    distinct = [len(set(case.tokens)) for case in cases]
    assert sum(distinct) / len(distinct) >= 20
    assert len({tuple(case.tokens) for case in cases}) == len(cases)
    ties = sum(min(case.margins) < TIE for case in cases)
    assert ties <= MAX_EXCUSED
    print(f"{family}: {sum(distinct) / len(distinct):.1f} distinct tokens of {NUM_TOKENS}, {ties} prompts with a tie")


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_tokens_match_transformers(references, row):
    cases = references[row.family].cases
    prompts = [case.prompt for case in cases]
    outputs = []
    with start(references[row.family].path, **row.settings) as llm:
        if row.alone:
            outputs += [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
            assert_equal(cases, outputs)
        outputs += llm.generate(prompts, GREEDY, use_tqdm=False)
        assert_equal(cases, outputs[-len(cases) :])
        stats = llm.stats()
    print(f"{row}: {stats}")
    assert (stats.preemptions > 0) == row.tiny_pool
    assert (stats.cached_tokens > 0) == row.caching
    # Blocks that a preempted request finds again are not hits.
    assert stats.cached_tokens == sum(output.num_cached_tokens or 0 for output in outputs)
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    if row.budget == 1:
        # One position a step; the position of a sequence's last token is never computed.
        assert stats.steps >= sum(len(prompt) + NUM_TOKENS - 1 for prompt in prompts) - stats.cached_tokens


def assert_equal(cases, outputs):
    wrong, excused = compare(cases, outputs)
    assert not wrong, [(index, cases[index].tokens, outputs[index].outputs[0].token_ids) for index in wrong]
    assert len(excused) <= MAX_EXCUSED
    if excused:
        print(f"excused by a tie: prompts {excused}")


@pytest.fixture
def one_thread():
    """A worker in this process sets the number of torch's threads for all of it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run_here(reference: Reference, cases: Sequence[Case], **settings: Any) -> list[list[int]]:
    """The tokens for `cases`, one after another: prefilled in one step, then a token a step. KV blocks of 8."""
    settings = {"block_size": 8, "num_gpu_blocks_override": 100, "enable_prefix_caching": False} | settings
    with start(reference.path, **settings) as llm:
        return [tokens_of(llm.generate(case.prompt, GREEDY, use_tqdm=False))[0] for case in cases]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tokens_of_processes(references, family):
    cases = references[family].cases[8:20]
    with start(references[family].path, single_process=False, max_num_batched_tokens=64) as llm:
        assert_equal(cases, llm.generate([case.prompt for case in cases], GREEDY, use_tqdm=False))


@pytest.fixture
def middle(llama) -> list[Case]:
    """Prompts of 24 to 48 tokens without ties: any difference counts."""
    cases = [case for case in llama.cases if 24 <= len(case.prompt) <= 48 and min(case.margins) > TIE]
    assert len(cases) >= 4
    return cases


def own_blocks(runner: ModelRunner) -> list[int]:
    """Blocks of the only sequence."""
    batch = runner.batch
    assert len(batch.rows) == 1
    blocks: list[int] = batch.tables.ids[0][0, : batch.tables.lens[0, 0]].tolist()
    return blocks


def lose_a_block(runner: ModelRunner) -> None:
    runner.cache_engine.pool[own_blocks(runner)[1]] = 0


def repeat_a_block(runner: ModelRunner) -> None:
    """Note that two blocks that change places would not show: keys carry their positions."""
    one, other = own_blocks(runner)[:2]
    runner.cache_engine.pool[other] = runner.cache_engine.pool[one]


def lose_every_other_block(runner: ModelRunner) -> None:
    mine = {NULL_BLOCK, *own_blocks(runner)}
    pool = runner.cache_engine.pool
    pool[[block for block in range(len(pool)) if block not in mine]] = float("nan")


def spoil_after_prefill(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[ModelRunner], None]) -> list[int]:
    """Have `spoil` called once for each sequence, when its prompt is in the cache; the steps after which it was."""
    steps: list[int] = []
    execute = ModelRunner.execute

    def spoiling(runner: ModelRunner, step: SchedulerOutput) -> ModelOutput:
        output = execute(runner, step)
        if any(isinstance(entry, NewRequest) for entry in step.entries):
            with torch.inference_mode():
                spoil(runner)
            steps.append(step.step)
        return output

    monkeypatch.setattr(ModelRunner, "execute", spoiling)
    return steps


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("spoil", [lose_a_block, repeat_a_block])
def test_a_spoiled_block_shows(monkeypatch, llama, middle, spoil):
    steps = spoil_after_prefill(monkeypatch, spoil)
    tokens = run_here(llama, middle)
    assert len(steps) == len(middle)
    for case, got in zip(middle, tokens, strict=True):
        assert got[0] == case.tokens[0], "sampled before"
        assert got != case.tokens


@pytest.mark.usefixtures("one_thread")
def test_contents_of_unused_blocks_do_not_matter(monkeypatch, llama, middle):
    """Not even NaN in unused blocks changes a token, so sequences read only their own blocks."""
    steps = spoil_after_prefill(monkeypatch, lose_every_other_block)
    assert run_here(llama, middle) == [case.tokens for case in middle]
    assert len(steps) == len(middle)


@pytest.mark.usefixtures("one_thread")
def test_a_spoiled_block_of_the_prefix_cache_shows(monkeypatch, llama, middle):
    """A second request of the same prompt reads the blocks that the first one wrote."""
    steps = spoil_after_prefill(monkeypatch, lose_a_block)
    case = middle[0]
    once, again = run_here(llama, [case, case], enable_prefix_caching=True)
    assert len(steps) == 2
    assert once != case.tokens
    assert again[0] != case.tokens[0], "this time even the first token comes from what was spoiled before"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("where", ["prompt", "output"])
def test_a_shifted_position_shows(monkeypatch, llama, middle, where):
    build = InputBatch.build

    def shifting(batch: InputBatch) -> StepInputs:
        inputs = build(batch)
        positions = inputs.positions.copy()
        if len(positions) > 1 and where == "prompt":
            positions[len(positions) // 2] += 1
        elif len(positions) == 1 and where == "output":
            positions += 1
        return replace(inputs, positions=positions)

    monkeypatch.setattr(InputBatch, "build", shifting)
    for case, got in zip(middle, run_here(llama, middle), strict=True):
        assert got != case.tokens
