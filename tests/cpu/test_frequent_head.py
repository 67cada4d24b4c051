"""Drafts of frequent words alone: the same tokens, and the drafts of a head that gives others no chance."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.checkpoints import make_checkpoint
from tests.cpu.test_self_drafts import PROMPT, SELF, Drafts, drafter_of, generate, watch_drafts
from tests.driver import GREEDY, WARM, Driver, new_request
from vllm_lite.checkpoint.frequent_words import rest_of
from vllm_lite.layers.weights.embedding import Embedding, LMHead
from vllm_lite.layers.weights.frequent_head import FrequentHead
from vllm_lite.models import four_bit_copy
from vllm_lite.protocol.params import LogitRules, Sampling
from vllm_lite.protocol.step import Draft
from vllm_lite.worker.drafting.frequent import FrequentWords

WORDS = (range(64), range(200, 232))
RULED = replace(WARM, rules=LogitRules(bad_words=((7, 9), (11,)), bias=((5, 3.0), (150, 2.0))))


@pytest.fixture(params=[True, False], ids=["tied", "own head"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", tie_word_embeddings=request.param)


@pytest.fixture(autouse=True)
def _words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(four_bit_copy, "frequent_words", lambda *_: WORDS)


def words_of(driver: Driver) -> FrequentWords:
    words = drafter_of(driver)._words
    assert words is not None
    words.share = -100.0  # no token that these tests draw is a reason to switch
    return words


def masked(driver: Driver) -> None:
    """Have the whole head of a copy give other words no chance."""
    copy: Any = drafter_of(driver)._copy
    logits = copy.logits

    def of_words(hidden: torch.Tensor, out: torch.Tensor | None = None, which: Any = None) -> torch.Tensor:
        found: torch.Tensor = logits(hidden, out, which)
        for piece in rest_of(WORDS, found.shape[1]):
            found[:, piece.start : piece.stop] = -torch.inf
        return found

    copy.logits = of_words


@pytest.mark.parametrize("eager", [False, True], ids=["programs", "eager"])
@pytest.mark.parametrize("sampling", [GREEDY, WARM, RULED], ids=["greedy", "seeded", "ruled"])
def test_drafts_are_those_of_a_head_that_gives_others_no_chance(
    model: Path, sampling: Sampling, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[Drafts, dict[int, list[int]]]] = []
    for is_narrow in (True, False):
        if not is_narrow:
            monkeypatch.setattr(four_bit_copy, "frequent_words", lambda *_: ())
        driver = Driver(model, enforce_eager=eager or not is_narrow, **SELF)
        if is_narrow:
            words_of(driver)
        else:
            masked(driver)
        drafts = watch_drafts(driver)
        generate(driver, sampling)
        found.append((drafts, driver.got))
    assert found[0] == found[1]
    drafted = {token for step in found[0][0] for drafts in step for token in drafts}
    assert len(drafted) > 5
    assert all(any(token in piece for piece in WORDS) for token in drafted)
    plain = Driver(model, enforce_eager=eager)
    generate(plain, sampling, num_drafts=0)
    assert found[0][1][0][:20] == plain.got[0][:20]


def test_all_are_scored_while_many_tokens_are_infrequent(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(model, **SELF)
    words, head = words_of(driver), drafter_of(driver)._copy.lm_head
    monkeypatch.setattr(four_bit_copy, "frequent_words", lambda *_: ())
    whole = Driver(model, **SELF)
    seen, of_whole = watch_drafts(driver), watch_drafts(whole)
    words.share = 0.0
    assert not head.is_whole
    for _ in range(20):
        words.follow(np.array([100, 5]))
    assert head.is_whole
    for each in (driver, whole):
        generate(each, WARM, count=8)
    assert seen == of_whole
    words.share = 0.2
    for _ in range(200):
        words.follow(np.array([5]))
    assert not head.is_whole
    seen.clear()
    generate_again(driver)
    assert all(any(token in piece for piece in WORDS) for step in seen for drafts in step for token in drafts)


def generate_again(driver: Driver) -> None:
    driver.run(new_request(2, PROMPT, [30, 31, 32, 33]))
    for _ in range(3):
        driver.run(Draft(2, 3, []))


def test_a_share_between_the_bounds_changes_nothing() -> None:
    head = FrequentHead(untied(), WORDS, rest_of(WORDS, 384))
    words = FrequentWords(head, forward=None)  # type: ignore[arg-type]
    for share, is_whole in ((0.09, False), (0.11, True), (0.06, True), (0.04, False)):
        words.share = share
        words.follow(np.array([100] * round(100 * share) + [5] * (100 - round(100 * share))))
        assert head.is_whole == is_whole


def untied() -> LMHead:
    from vllm_lite.checkpoint.shard import Split

    place: Any = {"dtype": torch.float32, "device": torch.device("cpu")}
    return LMHead(Embedding(Split.whole(384), 64, None, **place), tied=False)  # type: ignore[arg-type]


def test_the_soft_cap_leaves_the_others_without_a_chance(model: Path) -> None:
    """Logits are capped in place, again and again in the same memory."""
    driver = Driver(model, **SELF)
    words_of(driver)
    copy = drafter_of(driver)._copy
    copy.spec = replace(copy.spec, logits_soft_cap=3.0)
    out = copy.empty_logits(2)
    hidden = torch.randn(2, 64)
    for _ in range(2):
        copy.logits(hidden, out)
        assert torch.isinf(out).sum() == 2 * (384 - 96)
        assert out[:, :64].abs().max() <= 3.0
