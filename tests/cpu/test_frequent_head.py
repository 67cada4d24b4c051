"""Drafts of frequent words alone: the same tokens, and the drafts of a head that gives others no chance."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from tests.checkpoints import make_checkpoint
from tests.cpu.test_self_drafts import SELF, Drafts, drafter_of, generate, watch_drafts
from tests.driver import GREEDY, WARM, Driver, new_request
from vllm_lite.checkpoint.frequent_words import rest_of
from vllm_lite.layers.weights.embedding import Embedding, LMHead
from vllm_lite.layers.weights.frequent_head import FrequentHead
from vllm_lite.models import four_bit_copy
from vllm_lite.protocol.params import LogitRules, Sampling
from vllm_lite.protocol.step import Draft, Finish
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
    words = drafter_of(driver).chain.words
    assert words is not None
    return words


def hold(words: FrequentWords) -> None:
    """No token that is drawn is a reason to switch."""
    words.follow = lambda tokens: None  # type: ignore[method-assign] # noqa: ARG005


def mask(model: Any) -> None:
    """Have the whole head of a drafting model give no chance to tokens outside of WORDS."""
    logits = model.logits

    def of_words(hidden: torch.Tensor, out: torch.Tensor | None = None, which: Any = None) -> torch.Tensor:
        found: torch.Tensor = logits(hidden, out, which)
        for piece in rest_of(WORDS, found.shape[1]):
            found[:, piece.start : piece.stop] = -torch.inf
        return found

    model.logits = of_words


@pytest.mark.parametrize("eager", [False, True], ids=["programs", "eager"])
@pytest.mark.parametrize("sampling", [GREEDY, WARM, RULED], ids=["greedy", "seeded", "ruled"])
def test_drafts_equal_those_of_a_head_with_rare_words_masked(
    model: Path, sampling: Sampling, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[Drafts, dict[int, list[int]]]] = []
    for is_narrow in (True, False):
        if not is_narrow:
            monkeypatch.setattr(four_bit_copy, "frequent_words", lambda *_: ())
        driver = Driver(model, enforce_eager=eager or not is_narrow, **SELF)
        if is_narrow:
            hold(words_of(driver))
        else:
            mask(drafter_of(driver)._copy)
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


def test_a_prompt_decides_before_the_first_draft_whether_all_are_scored(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a prompt of infrequent words, drafts that score only frequent words are wrong, and the engine then makes
    none."""
    driver = Driver(model, **SELF)
    head = drafter_of(driver)._copy.lm_head
    monkeypatch.setattr(four_bit_copy, "frequent_words", lambda *_: ())
    whole = Driver(model, **SELF)
    assert not head.is_whole
    seen, of_whole = watch_drafts(driver), watch_drafts(whole)
    others, words = list(range(100, 130)), list(range(30))
    for each in (driver, whole):
        draft_behind(each, 2, others)
    assert head.is_whole
    assert seen == of_whole
    seen.clear()
    draft_behind(driver, 3, words, num_steps=1)
    assert not head.is_whole
    assert all(any(token in piece for piece in WORDS) for step in seen for drafts in step for token in drafts)


def test_a_switch_fills_no_more_memory_than_passes_use(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of 64 sequences over 262,144 tokens take as long as several passes to fill."""
    driver = Driver(model, **SELF)
    copy = drafter_of(driver)._copy
    empty_logits, sizes = copy.empty_logits, list[int]()

    def counted(count: int) -> torch.Tensor:
        sizes.append(count)
        return empty_logits(count)

    monkeypatch.setattr(copy, "empty_logits", counted)
    for _ in range(2):
        draft_behind(driver, 2, list(range(100, 130)), num_steps=1)
        assert copy.lm_head.is_whole
        draft_behind(driver, 3, list(range(30)), num_steps=1)
        assert not copy.lm_head.is_whole
    assert sizes == [1] * 4


def draft_behind(driver: Driver, handle: int, prompt: list[int], num_steps: int = 3) -> None:
    first = 10 * handle
    driver.run(new_request(handle, prompt, [first, first + 1, first + 2, first + 3]))
    for _ in range(num_steps):
        driver.run(Draft(handle, 3, []))
    driver.run(Finish(handle))


def frequent_words() -> FrequentWords:
    return FrequentWords(FrequentHead(untied(), WORDS, rest_of(WORDS, 384)), forward=None)  # type: ignore[arg-type]


def ids(*counts: tuple[int, int]) -> NDArray[np.int32]:
    return np.repeat(*np.array(counts).T).astype(np.int32)


def test_a_share_between_the_bounds_changes_nothing() -> None:
    words, alike = frequent_words(), ids((5, 100))
    for every, is_whole in ((12, False), (4, True), (12, True), (50, False)):
        mixed = np.where(np.arange(1000) % every == every // 2, 100, 5)
        words.follow([mixed])
        assert words._head.is_whole == is_whole, every
    words.follow([ids((100, 15)), *[alike] * 9])
    assert words._head.is_whole, "the mean of all sequences"
    words.follow([ids((100, 15)), *[alike] * 30])
    assert not words._head.is_whole


def test_an_answer_of_other_words_than_its_prompts_is_seen_soon() -> None:
    words = frequent_words()
    words.follow([ids((5, 1000), (100, 3))])
    assert not words._head.is_whole
    words.follow([ids((5, 1000), (100, 4))])
    assert words._head.is_whole


def untied() -> LMHead:
    from vllm_lite.checkpoint.shard import Split

    place: Any = {"dtype": torch.float32, "device": torch.device("cpu")}
    return LMHead(Embedding(Split.whole(384), 64, None, **place), tied=False)  # type: ignore[arg-type]


def test_the_soft_cap_leaves_the_others_without_a_chance(model: Path) -> None:
    """Logits are capped in place, again and again in the same memory."""
    driver = Driver(model, **SELF)
    copy = drafter_of(driver)._copy
    copy.spec = replace(copy.spec, logits_soft_cap=3.0)
    out = copy.empty_logits(2)
    hidden = torch.randn(2, 64)
    for _ in range(2):
        copy.logits(hidden, out)
        assert torch.isinf(out).sum() == 2 * (384 - 96)
        assert out[:, :64].abs().max() <= 3.0
