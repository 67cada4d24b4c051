"""Assistants of Gemma 4: drafts equal those of transformers' assistant, and no token changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import transformers_model, write_checkpoint
from tests.cpu.test_frequent_head import hold
from tests.cpu.test_mtp import DRAFTS, PROMPT, Watched
from tests.cpu.test_self_drafts import watch_drafts
from tests.driver import GREEDY, WARM, Driver, new_request
from tests.families.gemma_like import VARIANTS as GEMMAS
from tests.families.variant import Variant
from vllm_lite.errors import ConfigError
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.step import Continue, Draft, NewRequest
from vllm_lite.tools.plan import PlanConfig, make_plan
from vllm_lite.tools.plan_checkpoint import load
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.drafting import frequent

TARGETS = {each.name: each for each in GEMMAS if each.name in ("gemma4", "gemma4-per-layer", "gemma4-unified-shared")}
USUAL: dict[str, Any] = {"vocab_size": 384, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim", "num_global_key_value_heads")
SHARED = (*HEADS, "attention_k_eq_v", "sliding_window", "vocab_size")


def make_assistant(variant: Variant, folder: Path, **settings: Any) -> Path:
    """Write a random assistant of three layers for a model of the variant, as transformers has it."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    text = USUAL | dict(variant.settings.get("text_config", variant.settings))
    own: dict[str, Any] = {name: text[name] for name in SHARED if name in text}
    own |= {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "initializer_range": 0.3}
    own |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "tie_word_embeddings": True}
    own |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3}
    own |= {"model_type": "gemma4_text", "max_position_embeddings": 512}
    given = {"text_config": own | settings, "backbone_hidden_size": text["hidden_size"], "tie_word_embeddings": True}
    return write_checkpoint(folder, Gemma4AssistantConfig, Gemma4AssistantForCausalLM, given)


class AssistantTwin:
    """Drafts as transformers makes them."""

    def __init__(self, target: Any, folder: Path, variant: Variant) -> None:
        self.target, self.variant = target, variant
        self.assistant = transformers_model(folder, "Gemma4AssistantForCausalLM").eval()
        self.assistant.config.text_config.sliding_window -= 2  # there it is the distance of the last token it sees

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int, unknown: tuple[int, ...] = ()) -> list[int]:  # noqa: ARG002
        known = torch.tensor([tokens[:-1]])
        wanted = {"output_hidden_states": True, "return_shared_kv_states": True, "use_cache": True}
        found = self.target(known, attention_mask=torch.ones_like(known), **wanted)
        hidden, token, drafts = found.hidden_states[-1][:, -1:], tokens[-1], list[int]()
        for _ in range(count):
            vector = self.target.get_input_embeddings()(torch.tensor([[token]]))
            out = self.assistant(
                inputs_embeds=torch.cat((vector, hidden), -1),
                position_ids=torch.tensor([[len(tokens) - 1]]),
                shared_kv_states=found.shared_kv_states,
                use_cache=False,
            )
            hidden, token = out.last_hidden_state, int(out.logits[0, -1].argmax())
            drafts.append(token)
        return drafts


Pair = tuple[Path, Path, AssistantTwin]
"""A model, an assistant, and how transformers runs the two."""


@pytest.fixture(scope="module", params=TARGETS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    variant, folder = TARGETS[request.param], tmp_path_factory.mktemp("pair")
    target, assistant = variant.make(folder / "model"), make_assistant(variant, folder / "assistant")
    model = transformers_model(target, variant.model).eval()
    return target, assistant, AssistantTwin(model, assistant, variant)


def settings_of(assistant: Path) -> dict[str, Any]:
    return {"speculative_config": {"model": str(assistant), "num_speculative_tokens": DRAFTS}}


def request_of(driver: Driver, handle: int, prompt: list[int], sampling: Sampling = GREEDY) -> NewRequest:
    """The request of a prompt, with blocks in each group."""
    count = len(driver.ready.groups)
    request = new_request(handle, prompt, [], sampling=sampling)
    request.block_ids[:] = [[1 + 5 * (count * handle + group) + place for place in range(5)] for group in range(count)]
    return request


@pytest.mark.parametrize("eager", [False, True], ids=["programs", "eager"])
def test_drafts_are_the_assistants(pair: Pair, eager: bool) -> None:
    model, assistant, twin = pair
    watched = Watched(model, twin, enforce_eager=eager, num_gpu_blocks_override=64, **settings_of(assistant))
    watched.run(request_of(watched, 0, PROMPT * 2), request_of(watched, 1, PROMPT[::-1]))
    watched.draft(0, 1)
    watched.decode(0, count=1)
    watched.run(Draft(0, 2, []), Draft(1, 3, []))
    assert watched.num_drafts == DRAFTS * 6 + 5


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "seeded"])
def test_tokens_are_those_without_drafts(pair: Pair, sampling: Sampling) -> None:
    model, assistant, _ = pair
    found = []
    for settings in ({}, settings_of(assistant)):
        driver = Driver(model, max_model_len=256, num_gpu_blocks_override=64, **settings)
        driver.run(request_of(driver, 0, PROMPT, sampling))
        while len(driver.got[0]) < 12:
            driver.run(Draft(0, 3, []) if settings else Continue(0, 1, []))
        found.append(driver.got[0][:12])
    assert found[0] == found[1]


def test_passes_of_an_assistant_are_recorded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_lite.models.gemma4_assistant import Gemma4Assistant

    model, assistant, twin = pair
    watched = Watched(model, twin, num_gpu_blocks_override=64, **settings_of(assistant))
    watched.run(request_of(watched, 0, PROMPT))
    watched.draft(0, steps=1)

    def forbidden(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError

    for name in ("forward", "logits"):
        monkeypatch.setattr(Gemma4Assistant, name, forbidden)
    watched.draft(0, steps=2)


def test_an_assistant_writes_nothing(pair: Pair) -> None:
    model, assistant, _ = pair
    driver = Driver(model, max_model_len=256, num_gpu_blocks_override=64, **settings_of(assistant))
    chain: Any = driver.worker.drafter.with_model.chain  # type: ignore[attr-defined]
    chain._recorded, seen = None, list[tuple[int, ...]]()
    made = chain.inputs

    def watched(*args: Any, **named: Any) -> StepInputs:
        inputs: StepInputs = made(*args, **named)
        seen.extend(tuple(slots.tolist()) for slots in inputs.slot_mapping)
        return inputs

    chain.inputs = watched
    driver.run(request_of(driver, 0, PROMPT))
    driver.run(Draft(0, 3, []))
    assert set(seen) == {(-1,)}


def test_another_models_assistant_is_refused(pair: Pair, tmp_path: Path) -> None:
    model, _, twin = pair
    for settings, why in (
        ({"vocab_size": 400}, "the assistant is one of a model with hidden states of"),
        ({"head_dim": 64}, "the model's last layer of the kind has others"),
    ):
        other = make_assistant(twin.variant, tmp_path / str(len(settings)) / why[:3], **settings)
        with pytest.raises(ConfigError, match=why):
            Driver(model, max_model_len=256, **settings_of(other))


def test_an_assistant_drafts_frequent_words(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model, assistant, _ = pair
    monkeypatch.setattr(frequent, "frequent_words", lambda *_: (range(128),))
    found = []
    for settings in ({}, settings_of(assistant)):
        driver = Driver(model, max_model_len=256, num_gpu_blocks_override=64, **settings)
        driver.run(request_of(driver, 0, PROMPT))
        seen: list[list[list[int]]] = []
        if settings:
            words: Any = driver.worker.drafter
            hold(words.with_model.chain.words)
            seen = watch_drafts(driver)
        while len(driver.got[0]) < 12:
            driver.run(Draft(0, 3, []) if settings else Continue(0, 1, []))
        found.append(driver.got[0][:12])
    assert found[0] == found[1]
    drafted = [token for step in seen for drafts in step for token in drafts]
    assert len(drafted) > 10
    assert max(drafted) < 128


def test_a_plan_counts_an_assistant(pair: Pair) -> None:
    model, assistant, _ = pair
    given: dict[str, Any] = {"model": str(model), "device": "cpu", "memory": "4GiB", "max_model_len": 256}
    alone = PlanConfig.load(given, env={})
    config = PlanConfig.load(given | settings_of(assistant), env={})
    plan, plain = make_plan(config, load(config)), make_plan(alone, load(alone))
    own = sum(
        parameter.numel() for parameter in transformers_model(assistant, "Gemma4AssistantForCausalLM").parameters()
    )
    assert plan.weights_bytes - plain.weights_bytes == pytest.approx(4 * own, rel=0.05)
