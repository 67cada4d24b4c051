"""Speculation through the ModelRunner: other steps, the same tokens, logprobs, bans and failures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.checkpoints import VOCAB_SIZE
from tests.driver import GREEDY, WARM, Driver, expected, make_prompt, new_request
from tests.families.hybrid import VARIANTS as HYBRIDS
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.step import Continue, Draft, Finish, Fork, Preempt, States, SureDrafts
from vllm_lite.worker.sampling.drafter import NO_PRICE, DraftBatch, Drafted, Drafter


class Parrot(Drafter):
    """Drafts the tokens that the test expects of a sequence, wrong at some positions."""

    def __init__(self, tokens: list[int], wrong: tuple[int, ...] = ()) -> None:
        self.tokens = [token + 1 if position in wrong else token for position, token in enumerate(tokens)]
        self.num_calls = 0

    def before(self, batch: DraftBatch) -> Sequence[Drafted]:
        self.num_calls += 1
        return [
            np.array(self.tokens[len(tokens) :][:max_drafts], np.int32)
            for tokens, max_drafts in zip(batch.tokens, batch.max_drafts, strict=True)
        ]


def speculate(
    driver: Driver,
    parrot: Parrot,
    prompt: list[int],
    sampling: Sampling,
    max_drafts: int = 4,
    states: tuple[States, ...] = (),
) -> list[int]:
    """20 tokens of a sequence beside another one, 1 to 5 a step: how many each step gave."""
    driver.drafts.drafter = parrot
    requests = new_request(1, prompt[:5], [20, 21, 22]), new_request(0, prompt, [1, 2, 3, 4], sampling=sampling)
    driver.run(*requests, *states)
    steps = []
    while len(driver.got[0]) < 20:
        before = len(driver.got[0])
        num_drafts = min(max_drafts, 19 - before)
        driver.run(Draft(0, num_drafts, []) if num_drafts else Continue(0, 1, []), Continue(1, 1, []))
        steps.append(len(driver.got[0]) - before)
    return steps


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "seeded"])
def test_drafts_change_the_number_of_steps_and_no_token(tiny_checkpoint: Path, sampling: Sampling) -> None:
    prompt = make_prompt(30, seed=11)
    driver = Driver(tiny_checkpoint)
    plain = speculate(driver, Parrot([]), prompt, sampling)
    tokens, company = driver.got[0][:20], driver.got[1]
    assert plain == [1] * 19
    for wrong, steps in (((), [5, 5, 5, 4]), ((33, 34, 41), [3, 1, 5, 2, 5, 3]), (tuple(range(60)), [1] * 19)):
        driver = Driver(tiny_checkpoint)
        got = speculate(driver, Parrot(prompt + tokens + [0] * 9, wrong), prompt, sampling)
        assert driver.got[0][:20] == tokens
        assert got == steps
        assert driver.got[1] == company[: len(driver.got[1])], "its neighbour notices nothing"


def test_states_take_up_the_drafts_that_prove_right_and_no_others(tmp_path: Path) -> None:
    path, prompt = HYBRIDS[0].make(tmp_path / "hybrid"), make_prompt(30, seed=11)
    prompt = [token % VOCAB_SIZE for token in prompt]
    places = States(0, 0, 1, []), States(1, 0, 2, [])
    found: list[tuple[list[int], torch.Tensor]] = []
    for wrong in (tuple(range(60)), (), (33, 34, 41)):
        driver = Driver(path)
        parrot = Parrot(prompt + (found[0][0] if found else []) + [0] * 9, wrong)
        speculate(driver, parrot, prompt, GREEDY, states=places)
        found.append((driver.got[0], driver.worker.runner.cache_engine.states[1]))
        assert driver.got[0] == found[0][0]
        torch.testing.assert_close(found[-1][1], found[0][1], atol=1e-5, rtol=1e-5)
    assert found[0][1].any()


def test_the_output_has_the_number_of_drafts_of_each_sequence(tiny_checkpoint: Path) -> None:
    prompt = make_prompt(30, seed=11)
    driver = Driver(tiny_checkpoint)
    driver.drafts.drafter = Parrot([*prompt, 0, 0, 0, 0])
    driver.run(new_request(1, prompt[:5], [20, 21, 22]), new_request(0, prompt, [1, 2, 3, 4]))
    assert driver.run(Draft(0, 3, []), Continue(1, 1, [])).drafted == [3, 0], "whether it was right or not"
    assert driver.run(Continue(0, 1, []), Continue(1, 1, [])).drafted is None


def test_the_drafter_is_asked_once_for_a_whole_step(driver: Driver) -> None:
    driver.run(new_request(0, make_prompt(5, seed=1), [1, 2]), new_request(1, make_prompt(6, seed=2), [3, 4]))
    driver.drafts.drafter = parrot = Parrot([9] * 40)
    assert driver.run(Draft(1, 2, []), Draft(0, 3, [])).drafted == [2, 3]
    assert parrot.num_calls == 1


def test_logprobs_come_with_every_token_that_counts(tiny_checkpoint: Path) -> None:
    prompt = make_prompt(30, seed=11)
    sampling = msgspec.structs.replace(GREEDY, logprobs=2)
    driver = Driver(tiny_checkpoint)
    reports = []
    for num_steps in (4, 2):
        driver.run(new_request(0, prompt, [1, 2, 3, 4], sampling=sampling))
        outputs = [driver.run(Draft(0, 3, [])) for _ in range(num_steps)]
        reports.append([report for output in outputs for report in output.logprobs or []])
        tokens = driver.got.pop(0)
        driver.run(Finish(0))
        driver.drafts.drafter = Parrot(prompt + tokens + [0] * 9, wrong=(33, 34))
    plain, speculated = reports
    for one, other in zip(plain, speculated, strict=True):  # 3 from the first step, 1 from the second
        assert one is not None
        assert other is not None
        assert other.logprob == pytest.approx(one.logprob, abs=1e-5)
        assert [token for token, _ in other.top] == [token for token, _ in one.top]


def test_nan_logits_after_a_draft_fail_only_once_their_position_is_sampled(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = make_prompt(30, seed=11)
    speculate(driver, Parrot([]), prompt, GREEDY)
    tokens = driver.got[0]
    driver.run(Finish(0), Finish(1))
    driver.drafts.drafter = Parrot(prompt + tokens)
    driver.got = {}
    driver.run(new_request(0, prompt, [1, 2, 3, 4]))
    logits = driver.worker.model.logits

    def poisoned(hidden: torch.Tensor, out: torch.Tensor | None = None, which: Any = None) -> torch.Tensor:
        result = logits(hidden, out, which)
        result[2 if len(result) > 2 else 0] = float("nan")
        return result

    monkeypatch.setattr(driver.worker.model, "logits", poisoned)
    output = driver.run(Draft(0, 4, []))
    assert (output.failed, output.counts, driver.got[0]) == (None, [2], tokens[:3])
    output = driver.run(Continue(0, 1, []))
    assert [handle for handle, _ in output.failed or ()] == [0]


def test_min_tokens_hold_at_every_drafted_position(driver: Driver, oracle: Any) -> None:
    """A stop id that the model would sample is banned up to a position after the drafts."""
    prompt = make_prompt(20, seed=8)
    free = expected(oracle, prompt, 4)
    ruled = msgspec.structs.replace(GREEDY, min_tokens_until=23, stop_ids=(free[2], free[3]))
    driver.run(new_request(0, prompt, [1, 2], sampling=ruled))
    driver.decode(0, count=4)
    plain = driver.got.pop(0)
    assert plain[:2] == free[:2]
    assert plain[2] != free[2], "banned at length 22, allowed from 23 on"
    driver.drafts.drafter = Parrot(prompt + plain)
    driver.run(Finish(0), new_request(1, prompt, [3, 4], sampling=ruled))
    assert driver.run(Draft(1, 3, [])).counts == [4]
    assert driver.got[1] == plain


def test_a_price_of_drafts_applies_to_its_step_only(driver: Driver) -> None:
    driver.run(new_request(0, make_prompt(5, seed=1), [1, 2]), new_request(1, make_prompt(6, seed=2), [3, 4]))
    driver.drafts.drafter = asked = Keeper()
    driver.run(Draft(1, 2, []), Draft(0, 3, []), SureDrafts(0.75, 0.5))
    driver.run(Draft(1, 2, []), Draft(0, 3, []))
    assert asked.prices == [SureDrafts(0.75, 0.5), NO_PRICE]


class Keeper(Drafter):
    """Records the ended answers, and what it is asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[bytes, list[int]]] = []
        self.asked: list[bytes] = []
        self.prices: list[SureDrafts] = []

    def before(self, batch: DraftBatch) -> Sequence[Drafted]:
        self.asked += batch.groups or []
        self.prices.append(batch.price)
        return super().before(batch)

    def ended(self, group: bytes, answer: NDArray[np.int32]) -> None:
        self.answers.append((group, answer.tolist()))


def test_answers_of_a_group_reach_the_drafter(driver: Driver) -> None:
    """Also of a sequence that ends preempted, and of a fork; not of a sequence without a group."""
    driver.drafts.drafter = keeper = Keeper()
    requests = [
        msgspec.structs.replace(
            new_request(handle, make_prompt(5, seed=handle), [3 * handle + 1, 3 * handle + 2]), draft_group=group
        )
        for handle, group in enumerate((b"one", b"", b"two"))
    ]
    driver.run(*requests)
    driver.run(Draft(0, 1, []), Draft(1, 1, []), Draft(2, 1, []))
    assert keeper.asked == [b"one", b"", b"two"]
    driver.run(Fork(0, 7, requests[0].sampling, 6, 5, 0), Continue(7, 1, []), Preempt(2))
    answers = [list(driver.got[handle]) for handle in range(3)]
    driver.run(Finish(0), Finish(1), Finish(2), Finish(7), new_request(9, make_prompt(4, seed=4), [1, 2]))
    assert (b"one", answers[0]) in keeper.answers
    assert (b"two", answers[2]) in keeper.answers
    assert [group for group, _ in keeper.answers] == [b"one", b"two", b"one"]
