"""Drafts of frequent words alone by MTP heads and draft models: a 4-bit head for these words stands beside the whole
one, and no token changes."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.cpu.test_frequent_head import RULED, WORDS, draft_behind, hold, mask
from tests.cpu.test_self_drafts import Drafts, generate, watch_drafts
from tests.driver import GREEDY, WARM, Driver
from tests.gguf_files import write_gguf
from tests.mtp_heads import add_head
from vllm_lite.checkpoint.quantization.on_load import quantized_bytes
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.checkpoint.tensors import weight_bytes
from vllm_lite.layers.weights.frequent_head import FrequentHead
from vllm_lite.protocol.params import Sampling
from vllm_lite.tools.plan import PlanConfig, make_plan
from vllm_lite.tools.plan_checkpoint import load
from vllm_lite.worker.drafting import frequent

Settings = dict[str, Any]


def with_mtp(folder: Path, *, tied: bool) -> tuple[Path, Settings]:
    model = add_head(make_checkpoint(folder / "model", tie_word_embeddings=tied))
    return model, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}


def with_draft_model(folder: Path, *, tied: bool) -> tuple[Path, Settings]:
    model = make_checkpoint(folder / "model", tie_word_embeddings=tied)
    drafter = make_checkpoint(folder / "drafter", tie_word_embeddings=tied, seed=3)
    return model, {"speculative_config": {"model": str(drafter), "num_speculative_tokens": 3}}


@pytest.fixture(params=[True, False], ids=["tied", "own head"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[with_mtp, with_draft_model], ids=["mtp", "draft model"])
def case(request: pytest.FixtureRequest, tmp_path: Path, tied: bool) -> tuple[Path, Settings]:
    make: Callable[..., tuple[Path, Settings]] = request.param
    return make(tmp_path, tied=tied)


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the frequent words of the engines to come."""
    return lambda *words: monkeypatch.setattr(frequent, "frequent_words", lambda *_: words)


def drafter_of(driver: Driver) -> Any:
    drafter: Any = driver.worker.drafter
    return drafter.with_model


@pytest.mark.parametrize("eager", [False, True], ids=["programs", "eager"])
@pytest.mark.parametrize("sampling", [GREEDY, WARM, RULED], ids=["greedy", "seeded", "ruled"])
def test_drafts_have_the_noise_of_their_own_ids_and_change_no_token(
    case: tuple[Path, Settings], choose: Callable[..., None], sampling: Sampling, eager: bool
) -> None:
    model, settings = case
    found: list[tuple[Drafts, dict[int, list[int]]]] = []
    for words in (WORDS, (range(384),)):
        choose(*words)
        driver = Driver(model, enforce_eager=eager or words != WORDS, **settings)
        hold(drafter_of(driver).chain.words)
        if words != WORDS:
            mask(drafter_of(driver)._model)
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


def test_behind_other_words_the_whole_head_drafts(case: tuple[Path, Settings], choose: Callable[..., None]) -> None:
    """Its drafts are those of a drafter without frequent words, and it takes no further memory."""
    model, settings = case
    choose()
    plain = Driver(model, **settings)
    assert not isinstance(drafter_of(plain)._model.lm_head, FrequentHead)
    choose(*WORDS)
    driver = Driver(model, **settings)
    head = drafter_of(driver)._model.lm_head
    assert list(head._pieces) == list(WORDS)
    assert not head.is_whole
    seen, of_plain = watch_drafts(driver), watch_drafts(plain)
    for each in (driver, plain):
        draft_behind(each, 2, list(range(100, 130)))
    assert head.is_whole
    assert seen == of_plain
    seen.clear()
    draft_behind(driver, 3, list(range(30)), num_steps=1)
    assert not head.is_whole
    assert all(any(token in piece for piece in WORDS) for step in seen for drafts in step for token in drafts)


def test_the_verifying_model_keeps_its_own_head(tmp_path: Path, tied: bool, choose: Callable[..., None]) -> None:
    choose(*WORDS)
    model, settings = with_mtp(tmp_path, tied=tied)
    driver = Driver(model, **settings)
    whole: Any = driver.worker.runner.model
    assert not isinstance(whole.lm_head, FrequentHead)
    assert drafter_of(driver)._model.lm_head.whole is whole.lm_head


@pytest.mark.parametrize(("kind", "narrow"), [("BF16", True), ("Q8_0", False)])
def test_a_head_that_its_file_has_quantized_scores_all_words(
    tmp_path: Path, kind: str, narrow: bool, choose: Callable[..., None]
) -> None:
    choose(*WORDS)
    model, settings = with_draft_model(tmp_path, tied=True)
    drafter = Path(settings["speculative_config"]["model"])
    settings["speculative_config"]["model"] = str(write_gguf(tmp_path / "drafter.gguf", drafter, lambda _: kind))
    driver = Driver(model, **settings)
    assert isinstance(drafter_of(driver)._model.lm_head, FrequentHead) == narrow
    generate(driver, GREEDY)
    plain = Driver(model)
    generate(plain, GREEDY, num_drafts=0)
    assert driver.got[0][:20] == plain.got[0][:20]


def test_several_ranks_score_all_words(case: tuple[Path, Settings], choose: Callable[..., None]) -> None:
    """Each has a part of the whole head."""
    choose()
    model, settings = case
    drafter = drafter_of(Driver(model, **settings))
    choose(*WORDS)
    owner, head = drafter._model, drafter._model.lm_head
    for world, narrow in ((2, False), (1, True)):
        owner.communicator = SimpleNamespace(shard=Shard(0, world))
        frequent.add_frequent_head(
            owner, owner, drafter._place, settings["speculative_config"].get("model", model), "auto"
        )
        assert (owner.lm_head is not head) == narrow


@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "GGUF"])
def test_a_plan_counts_the_head_for_frequent_words(
    case: tuple[Path, Settings], quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, settings = case
    given: Settings = {"model": str(model), "device": "cpu", "memory": "4GiB"} | settings
    config = PlanConfig.load(given, env={})
    checkpoint, plans = load(config), []
    if quantized:
        monkeypatch.setattr(weight_bytes, "FLOAT_BYTES", {})
    for large in (1 << 16, 64):
        monkeypatch.setattr(weight_bytes, "LARGE", large)
        plans.append(make_plan(config, checkpoint).weights_bytes)
    assert plans[1] - plans[0] == (0 if quantized else quantized_bytes((192, 64), "int4_g32"))
