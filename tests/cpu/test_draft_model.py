"""A draft model: if a model drafts for itself, every draft is right as long as the KV of drafts is right, so any fault
shows as a rejected draft. With another draft model the tokens are those of a run without drafts."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.batches import part_of
from tests.checkpoints import make_checkpoint, make_kin
from tests.driver import GREEDY, NUM_BLOCKS, WARM, Driver, make_prompt, new_request
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.step import BlockOp, Continue, Draft, Finish, Fork, Preempt, ReplaceBlock, Resume, SetToken
from vllm_lite.worker.drafting.draft_model import ModelDrafter
from vllm_lite.worker.sampling.drafter import DraftBatch, Drafted, GrammarDrafter, on_host
from vllm_lite.worker.step_parts.drafts import Drafts

DRAFTS = 4
PROMPT = make_prompt(30, seed=11)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def drafting(model: Path, drafter: Path, **settings: Any) -> Driver:
    speculation = {"model": str(drafter), "num_speculative_tokens": DRAFTS}
    return Driver(model, speculative_config=speculation, **settings)


def draft(driver: Driver, handle: int, steps: int, blocks: dict[int, list[list[int]]] | None = None) -> list[int]:
    """Return the number of tokens of each step."""
    given = []
    for step in range(steps):
        before = len(driver.got.get(handle, []))
        driver.run(Draft(handle, DRAFTS, (blocks or {}).get(step, [])))
        given.append(len(driver.got[handle]) - before)
    return given


def plain(model: Path, prompt: list[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    driver = Driver(model)
    driver.run(new_request(0, prompt, list(range(1, 9)), sampling=sampling))
    driver.decode(0, count=count - 1)
    return driver.got[0]


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "seeded"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "programs"])
def test_a_twin_is_always_right(model: Path, sampling: Sampling, eager: bool) -> None:
    """Includes steps in which all drafts are right, so that the last one and the token after it are computed
    together."""
    driver = drafting(model, model, enforce_eager=eager)
    driver.run(new_request(0, PROMPT, list(range(1, 9)), sampling=sampling))
    assert draft(driver, 0, 8) == [1 + DRAFTS] * 8
    assert driver.got[0] == plain(model, PROMPT, 41, sampling)


# ---- drafts are the draft model's own tokens, whatever happened to its KV


class Watched:
    """Drafts of a model that differs from the verifying one in its last layer, each with the right draft."""

    def __init__(self, model: Path, drafter: Path, **settings: Any) -> None:
        self.model, self.driver = model, drafting(model, drafter, **settings)
        outer = part_of(self.driver.worker.runner, Drafts).drafter
        assert isinstance(outer, GrammarDrafter)
        assert isinstance(outer.other, ModelDrafter)
        self.drafter = outer.other
        self.before, outer.before = outer.before, self.watch  # type: ignore[method-assign]
        self.oracle = LlamaForCausalLM.from_pretrained(drafter, dtype=torch.float32)
        self.num_right: list[int] = []
        self.num_tokens = 0
        self.prompts: dict[int, list[int]] = {}

    def watch(self, batch: DraftBatch) -> Sequence[Drafted]:
        drafts = self.before(batch)
        for tokens, drafted in zip(batch.tokens, drafts, strict=True):
            self.num_tokens += len(drafted)
            assert on_host(drafted).tolist() == self.should_be(tokens.tolist(), len(drafted))
        return drafts

    def should_be(self, tokens: list[int], count: int) -> list[int]:
        for _ in range(count):
            logits = self.oracle(torch.tensor([tokens])).logits[0, -1]
            tokens = [*tokens, int(logits.argmax())]
        return tokens[len(tokens) - count :]

    def draft(self, *handles: int, steps: int = 3) -> None:
        for _ in range(steps):
            before = {handle: len(self.driver.got.get(handle, [])) for handle in handles}
            self.driver.run(*(Draft(handle, DRAFTS, []) for handle in handles))
            self.num_right += [len(self.driver.got[handle]) - 1 - before[handle] for handle in handles]
            self.drafter.coverage.check()

    def new(self, handle: int, prompt: list[int], first: int, **fields: Any) -> None:
        self.prompts[handle] = prompt
        self.driver.run(new_request(handle, prompt, list(range(first, first + 8)), **fields))

    def check(self) -> None:
        """Assert that all tokens are those of a run without drafts."""
        assert 0 < sum(self.num_right) < self.num_tokens, "all right or all wrong proves little"
        for handle, tokens in self.driver.got.items():
            assert tokens == plain(self.model, self.prompts[handle], len(tokens)), handle


@pytest.fixture(scope="module")
def kin(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kin(model, tmp_path_factory.mktemp("kin") / "model")


@pytest.fixture
def watched(model: Path, kin: Path) -> Iterator[Watched]:
    found = Watched(model, kin)
    yield found
    found.check()


def test_some_right_some_wrong(watched: Watched) -> None:
    watched.new(0, PROMPT, 1)
    watched.draft(0, steps=12)


def test_chunks_and_steps_without_drafts_are_made_up_for(watched: Watched) -> None:
    watched.new(0, PROMPT, 1, num_tokens=13)
    watched.new(1, PROMPT[::-1], 9)
    watched.driver.run(Continue(0, 17, []), Draft(1, DRAFTS, []))
    watched.driver.decode(0, 1, count=3)
    watched.draft(0, 1)
    watched.driver.decode(1, count=2)
    watched.draft(0, steps=2)
    watched.draft(0, 1)


@pytest.mark.parametrize("drafted_before", [False, True])
def test_a_prefix_hit(watched: Watched, drafted_before: bool) -> None:
    """Whether or not the sequence that left the blocks had drafts."""
    watched.new(0, PROMPT, 1)
    if drafted_before:
        watched.draft(0)
    watched.driver.run(Finish(0))
    prompt = watched.prompts[1] = [*PROMPT[:16], *PROMPT[:9]]
    hit = {"num_computed": 16, "num_cached": 16, "num_tokens": 9}
    watched.driver.run(new_request(1, prompt, [1, *range(9, 16)], **hit))
    watched.draft(1, steps=4)


def test_a_hit_of_the_whole_prompt(watched: Watched) -> None:
    watched.new(0, PROMPT[:16], 1)
    watched.driver.decode(0, count=1)
    watched.prompts[1] = PROMPT[:16]
    hit = {"num_computed": 15, "num_cached": 16, "num_tokens": 1}
    watched.driver.run(new_request(1, PROMPT[:16], [1, *range(9, 16)], **hit))
    watched.draft(0, 1, steps=4)


def test_blocks_that_were_others(watched: Watched) -> None:
    watched.new(0, PROMPT, 1)
    watched.draft(0)
    watched.driver.run(Finish(0))
    watched.new(1, PROMPT[::-1], 1)
    watched.draft(1, steps=5)


def test_a_prompt_is_made_up_for_in_several_steps(model: Path, kin: Path) -> None:
    """As many tokens as a step may have, in blocks that had another sequence's KV; then no drafts are requested."""
    watched = Watched(model, kin, max_num_batched_tokens=16)
    prompt = make_prompt(60, seed=2)
    for handle, tokens in ((0, prompt), (1, prompt[::-1])):
        watched.new(handle, tokens, 1, num_tokens=16)
        for count in (16, 16, 12):
            watched.driver.run(Continue(handle, count, []))
        watched.draft(handle, steps=9)
        watched.driver.run(Finish(handle))
    assert watched.num_right[:3] == [0, 0, 0]
    watched.check()


def test_catching_up_with_a_prompt_that_fills_its_blocks(model: Path, kin: Path) -> None:
    """The next block has the KV of another sequence, which was there before."""
    watched, prompt = Watched(model, kin, max_num_batched_tokens=40), make_prompt(60, seed=2)
    watched.new(0, prompt[::-1], 1, num_tokens=40)
    watched.driver.run(Continue(0, 20, []))
    watched.draft(0, steps=4)
    watched.driver.run(Finish(0))
    watched.new(1, prompt, 1, num_tokens=40)
    watched.driver.run(Continue(1, 20, []))
    watched.new(2, PROMPT[:24], 9)
    watched.draft(2, 1, steps=6)
    watched.check()


def test_forks(watched: Watched) -> None:
    """Forks at the end, and at an earlier token of the parent, in a block that is copied for the child."""
    driver = watched.driver
    watched.prompts |= {1: PROMPT, 2: PROMPT}
    watched.new(0, PROMPT, 1)
    watched.draft(0, steps=2)
    length = driver.lengths[0]
    driver.got[1] = driver.got[0][:]
    driver.run(
        Fork(0, 1, GREEDY, length, length - 1, 0),
        ReplaceBlock(1, 0, (length - 1) // 16, 20),
        Draft(1, DRAFTS, [[21, 22]]),
        Draft(0, DRAFTS, []),
        ops=((int(BlockOp.COPY), 1 + (length - 1) // 16, 20),),
    )
    early = len(PROMPT) + 1
    driver.got[2] = driver.got[0][:1]
    driver.run(
        Fork(0, 2, GREEDY, early, early - 1, 0),
        ReplaceBlock(2, 0, (early - 1) // 16, 25),
        Draft(2, DRAFTS, [[26, 27]]),
        ops=((int(BlockOp.COPY), 1 + (early - 1) // 16, 25),),
    )
    watched.draft(0, 1, 2, steps=3)


def test_a_block_that_parent_and_child_begin_at_different_places(watched: Watched) -> None:
    """The block had another sequence's KV. In the same step the parent writes a token there, and the child none."""
    driver, prompt = watched.driver, [*PROMPT[:16], PROMPT[0]]
    watched.new(0, PROMPT, 1)
    watched.draft(0)
    driver.run(Finish(0))
    watched.prompts |= {0: PROMPT, 1: prompt, 2: prompt}
    hit = new_request(1, prompt, [1, 2], num_computed=16, num_cached=16, num_tokens=1)
    driver.run(hit, Fork(1, 2, GREEDY, 17, 16, 17), Continue(2, 1, []))
    copied = ReplaceBlock(1, 0, 1, 20), Draft(1, DRAFTS, [[21]])
    driver.run(*copied, Draft(2, DRAFTS, [[22]]), ops=((int(BlockOp.COPY), 2, 20),))
    watched.draft(1, 2, steps=3)


def test_a_child_in_its_parents_own_block(watched: Watched) -> None:
    """The parent has ended: the child writes other tokens where the parent's drafts were right."""
    driver = watched.driver
    prompt = PROMPT[:18]
    watched.new(0, prompt, 1)
    watched.draft(0, steps=3)
    early, other = len(prompt) + 1, 5
    assert driver.got.pop(0)[0] != other
    watched.prompts[1] = [*prompt, other]
    ended = Fork(0, 1, GREEDY, early, early - 1, 0), SetToken(1, other), Finish(0)
    driver.run(*ended, Continue(1, 1, [[20, 21]]))
    watched.draft(1, steps=3)


@pytest.mark.parametrize(("by", "drafted_before"), [("swap", True), ("swap", False), ("recompute", True)])
def test_preemption(model: Path, kin: Path, by: str, drafted_before: bool) -> None:
    watched = Watched(model, kin, num_host_blocks=4)
    driver = watched.driver
    watched.new(0, PROMPT, 1)
    if drafted_before:
        watched.draft(0)
    length = driver.lengths[0]
    used = -(-(length - 1) // 16)
    pairs = [(1 + index, NUM_BLOCKS + 3 - index) for index in range(used)]
    if by == "swap":
        driver.run(Preempt(0), ops=tuple((int(BlockOp.SWAP_OUT), *pair) for pair in pairs))
    else:
        driver.run(Preempt(0))
    watched.new(1, PROMPT[::-1], 1)  # in the blocks that are free now
    watched.draft(1, steps=2)
    blocks = list(range(20, 28))
    if by == "swap":
        ops = tuple((int(BlockOp.SWAP_IN), host, blocks[index]) for index, (_, host) in enumerate(pairs))
        driver.run(Resume(0, length - 1, 0, 1, [blocks]), ops=ops)
    else:
        driver.run(Resume(0, 0, 0, length, [blocks]))
    row = driver.worker.runner.batch.rows.row_of(0, "the test")
    assert watched.drafter.coverage.of(row, length - 1) == (length - 1 if drafted_before and by == "swap" else 0)
    watched.draft(0, 1, steps=3)
    watched.check()
