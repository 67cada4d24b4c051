"""The two halves of a drafter: drafts that stay on the device, steps that it follows, and its own KV."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.cpu.test_model_runner_drafts import Parrot
from tests.driver import GREEDY, WARM, Driver, make_prompt, new_request
from tests.parity_mask import ParityMask
from vllm_lite.config import ResolvedConfig
from vllm_lite.protocol.params import LogitRules, Sampling
from vllm_lite.protocol.step import Continue, Draft, Finish, NewRequest
from vllm_lite.worker import worker as worker_module
from vllm_lite.worker.sampling.drafter import DraftBatch, Drafted, Drafter, DrawnStep, GrammarDrafter, on_host

PROMPT = make_prompt(30, seed=11)
RULED = msgspec.structs.replace(GREEDY, rules=LogitRules(bad_words=((7, 9), (11,))))
MASKED = msgspec.structs.replace(GREEDY, rules=LogitRules())


class OnDevice(Parrot):
    """Parrot's drafts, where only the device has them."""

    def before(self, batch: DraftBatch) -> list[Drafted]:
        return [torch.from_numpy(on_host(drafts).astype(np.int64)) for drafts in super().before(batch)]


def generate(driver: Driver, drafter: Drafter | None, sampling: Sampling, count: int = 20) -> list[tuple[int, ...]]:
    """Return the tokens that each step gave two sequences, the second without drafts."""
    driver.drafts.drafter, driver.got, given = drafter, {}, list[tuple[int, ...]]()
    driver.run(new_request(1, PROMPT[:5], [20, 21, 22, 23]), new_request(0, PROMPT, [1, 2, 3, 4], sampling=sampling))
    while len(driver.got[0]) < count:
        before = len(driver.got[0])
        driver.run(Continue(1, 1, []), Draft(0, 4, []))
        given.append(tuple(driver.got[0][before:]))
    driver.run(Finish(0), Finish(1))
    return given


@pytest.mark.parametrize("sampling", [GREEDY, WARM, RULED, MASKED], ids=["greedy", "seeded", "ruled", "masked"])
def test_drafts_on_the_device_are_those_on_the_host(tiny_checkpoint: Path, sampling: Sampling) -> None:
    driver = Driver(tiny_checkpoint)
    if sampling is MASKED:
        driver.rules.mask_source_of = lambda _: ParityMask(384)
    plain = [token for step in generate(driver, None, sampling) for token in step]
    tokens = PROMPT + driver.got[0] + [0] * 9
    company = driver.got[1]
    for wrong in ((), (33, 36, 41)):
        on_host = generate(driver, GrammarDrafter(Parrot(tokens, wrong)), sampling)
        assert len(on_host) < len(plain)
        assert generate(driver, GrammarDrafter(OnDevice(tokens, wrong)), sampling) == on_host
        assert [token for step in on_host for token in step][:19] == plain[:19]
        assert driver.got[1] == company[: len(driver.got[1])]


class Following(Parrot):
    """Keeps the steps that it followed."""

    follows = reads_hidden = True

    def __init__(self, tokens: list[int], wrong: tuple[int, ...] = ()) -> None:
        super().__init__(tokens, wrong)
        self.steps: list[DrawnStep] = []

    def after(self, step: DrawnStep) -> None:
        self.steps.append(step)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "programs"])
def test_a_drafter_follows_each_step(tiny_checkpoint: Path, eager: bool) -> None:
    """A drafter gets the last token of each sequence, and the hidden state from which the model makes this token."""
    driver = Driver(tiny_checkpoint, enforce_eager=eager)
    plain = [token for step in generate(driver, None, GREEDY) for token in step]
    first = driver.got[0][0]
    drafter = Following([*PROMPT, first, *plain, *[0] * 9], wrong=(33, 36, 41))
    given = generate(driver, GrammarDrafter(drafter), GREEDY)
    assert len(drafter.steps) == 1 + len(given)
    lengths = {0: len(PROMPT), 1: 5}
    for number, step in enumerate(drafter.steps):
        assert sorted(step.handles) == [0, 1]
        assert step.hidden is not None
        logits = driver.worker.model.logits(step.hidden.clone())
        assert logits.argmax(1).tolist() == step.tokens.tolist()
        for handle, length, token in zip(step.handles, step.lengths.tolist(), step.tokens.tolist(), strict=True):
            lengths[handle] += 1 if handle or not number else len(given[number - 1])
            assert length == lengths[handle]
            assert token == driver.got[handle][length - (5 if handle else len(PROMPT)) - 1]


def test_prompts_in_chunks_are_followed_when_they_draw(tiny_checkpoint: Path) -> None:
    driver = Driver(tiny_checkpoint)
    driver.drafts.drafter = drafter = Following([])
    driver.run(new_request(0, PROMPT, [1, 2, 3], num_tokens=20))
    driver.run(Continue(0, 10, []))
    assert [step.handles for step in drafter.steps] == [[], [0]]


class Keeping(Drafter):
    """Keeps KV in a separate layer, and overwrites all of it in every step."""

    blocks = slice(1, None)

    def __init__(self) -> None:
        self.largest: list[tuple[int, ...]] = []

    def begin(self, own: Sequence[torch.Tensor], of_model: Sequence[torch.Tensor]) -> None:
        (self.cache,) = own
        self.num_of_model = len(of_model)

    def run_largest(self, own: Sequence[torch.Tensor], of_model: Sequence[torch.Tensor]) -> None:
        assert len(of_model) == self.num_of_model
        self.largest += [tuple(cache.shape) for cache in own]

    def before(self, batch: DraftBatch) -> list[Drafted]:
        self.cache[self.blocks] = float("nan")
        return [tokens[:0] for tokens in batch.tokens]


def test_a_drafter_has_kv_of_its_own(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a separate group, or in a group with layers of the model, whose results do not change."""
    plain = Driver(tiny_checkpoint)
    expected = generate(plain, None, GREEDY)
    layer = plain.worker.spec.layers[0]
    attention = msgspec.structs.replace(layer.attention, window=8)
    for own in (msgspec.structs.replace(layer, attention=attention), layer):
        drafter = Keeping()
        drafter.kv_layers = (own,)

        def make(_: ResolvedConfig, drafter: Drafter = drafter) -> Drafter:
            return GrammarDrafter(drafter)

        monkeypatch.setattr(worker_module, "drafter_of", make)
        driver = Driver(tiny_checkpoint)
        groups = driver.ready.groups
        assert driver.worker.model.spec.num_layers == plain.worker.spec.num_layers
        assert sum(group.num_layers for group in groups) == plain.worker.spec.num_layers + 1
        assert (groups[-1].window, len(groups)) in ((8, len(groups)), (None, 1))
        if own is not layer:  # a block of another group has a layer of the model in the same place
            drafter.blocks = slice(4 * len(groups) - 3, 4 * len(groups) + 1)
        shape = drafter.cache.shape
        driver.worker.run_largest_step()
        assert drafter.largest == [(1, *shape[1:])]
        driver.run(_request(len(groups)))
        given = []
        while len(driver.got[0]) < 21:
            before = len(driver.got[0])
            driver.run(Draft(0, 4, []))
            given.append(tuple(driver.got[0][before:]))
        assert given[: len(expected)] == expected


def _request(num_groups: int) -> NewRequest:
    request = new_request(0, PROMPT, [])
    request.block_ids[:] = [list(range(1 + 4 * group, 5 + 4 * group)) for group in range(num_groups)]
    return request
