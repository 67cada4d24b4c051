"""EAGLE-3 heads: drafts equal those of the head in plain torch, and no token changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.cpu.test_mtp import DRAFTS, PROMPT, Watched, blocks
from tests.driver import WARM, Driver, new_request
from tests.eagle_heads import EagleTwin, make_eagle
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.models.decoder import Decoder
from vllm_lite.models.eagle_head import EagleHead
from vllm_lite.protocol.step import Continue, Draft, Finish
from vllm_lite.tools.plan import PlanConfig, make_plan
from vllm_lite.tools.plan_checkpoint import load

LAYERS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama", num_hidden_layers=LAYERS)


def eagle3(head: Path) -> dict[str, Any]:
    return {"speculative_config": {"method": "eagle3", "model": str(head), "num_speculative_tokens": DRAFTS}}


HEADS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "some tokens": ({}, (2, 3, 3)),
    "all tokens": ({"num_tokens": 384}, (2, 3, 3)),
    "newer names": ({"older": False}, (2, 3, 3)),
    "other layers": ({"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}, (1, 4, 5)),
}


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_the_heads(name: str, model: Path, tmp_path: Path) -> None:
    settings, before = HEADS[name]
    head = make_eagle(model, tmp_path / "head", **settings)
    watched = Watched(model, EagleTwin(model, head, before), **eagle3(head))
    watched.run(new_request(0, PROMPT, blocks(1), num_tokens=13), new_request(1, PROMPT[::-1], blocks(8)))
    watched.run(Continue(0, 17, []), Draft(1, DRAFTS, []))
    watched.draft(0, 1)
    watched.decode(0, count=2)
    watched.draft(1, 0)
    assert watched.num_drafts == DRAFTS * 13


def test_steps_with_a_head_are_recorded(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_eagle(model, tmp_path / "head")
    watched = Watched(model, EagleTwin(model, head, (2, 3, 3)), **eagle3(head))
    watched.run(new_request(0, PROMPT, blocks(1)), new_request(1, PROMPT[::-1], blocks(8)))

    def play() -> None:
        watched.decode(0, 1, count=6)
        watched.draft(0, 1, steps=2)

    play()

    def forbidden(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError

    for owner, name in ((Decoder, "forward"), (Decoder, "logits"), (EagleHead, "logits")):
        monkeypatch.setattr(owner, name, forbidden)
    play()


def test_a_head_writes_the_same_kv_by_recorded_passes(model: Path, tmp_path: Path) -> None:
    """Steps that decode and steps that verify are followed."""
    head, caches = make_eagle(model, tmp_path / "head"), []
    for eager in (True, False):
        driver = Driver(model, max_model_len=256, enforce_eager=eager, **eagle3(head))
        driver.run(new_request(0, PROMPT, blocks(1)))
        driver.decode(0, count=3)
        driver.run(Draft(0, DRAFTS, []))
        drafter: Any = driver.drafts.drafter
        (cache,) = drafter.other._eager.kv_caches
        caches.append(cache[1:4].clone())
    assert caches[0][2].any()
    torch.testing.assert_close(caches[1], caches[0], atol=1e-5, rtol=1e-4)


def test_a_prefix_hit(model: Path, tmp_path: Path) -> None:
    head = make_eagle(model, tmp_path / "head")
    watched = Watched(model, EagleTwin(model, head, (2, 3, 3)), **eagle3(head))
    watched.run(new_request(0, PROMPT, blocks(1)))
    watched.run(Finish(0))
    watched.unknown = (16,)
    prompt = [*PROMPT[:16], *PROMPT[:9]]
    watched.run(new_request(0, prompt, [1, *blocks(9)], num_computed=16, num_cached=16, num_tokens=9))
    watched.draft(0)


def test_tokens_are_those_without_drafts(model: Path, tmp_path: Path) -> None:
    found = []
    for settings in ({}, eagle3(make_eagle(model, tmp_path / "head"))):
        driver = Driver(model, **settings)
        driver.run(new_request(0, PROMPT, blocks(1), sampling=WARM), new_request(1, PROMPT[:5], blocks(8)))
        while min(len(driver.got[0]), len(driver.got[1])) < 20:
            driver.run(*(Draft(each, DRAFTS, []) if settings else Continue(each, 1, []) for each in (0, 1)))
        found.append([driver.got[0][:20], driver.got[1][:20]])
    assert found[0] == found[1]


def test_a_head_with_tokens_outside_the_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    head = make_eagle(model, tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    tensors["d2t"][-1] = 384
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"d2t names tokens \d+ to 423 of 384"):
        Driver(model, **eagle3(head))


def test_a_plan_counts_the_head(model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": str(model), "device": "cpu", "memory": "4GiB"}
    given = PlanConfig.load(settings | eagle3(make_eagle(model, tmp_path / "head")), env={})
    without = PlanConfig.load(settings, env={})
    alone, plan = make_plan(without, load(without)), make_plan(given, load(given))
    assert plan.weights_bytes > alone.weights_bytes
    assert plan.block_bytes > alone.block_bytes


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "method eagle3 drafts with a head of EAGLE-3, and"),
        (
            {"hidden_size": 32},
            "the EAGLE-3 head has hidden states of 32 and the model of 64; it is one of",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "what goes into layers 2, 4, 9 of the model, which has 6"),
        ({"norm_before_residual": True}, "norm_before_residual true is not supported"),
        ({"draft_vocab_size": 50}, "lm_head.weight"),
    ],
)
def test_heads_that_do_not_fit_say_why(settings: dict[str, Any], why: str, model: Path, tmp_path: Path) -> None:
    head = make_eagle(model, tmp_path / "head", **settings)
    with pytest.raises((ConfigError, ModelError), match=why):
        Driver(model, **eagle3(head))
