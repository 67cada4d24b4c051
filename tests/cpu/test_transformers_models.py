"""Models that transformers computes over our attention give its logits, however their prompts are cut up and shared
out; those that cannot are refused by name before weights are loaded."""

import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint, write_checkpoint
from tests.cpu.test_families import MAX_DIFFERENCE, difference, give_its_logits, share_steps
from tests.driver import Driver, expected, make_prompt, new_request
from tests.families.all import VARIANTS as FAMILIES
from tests.families.through_transformers import FOREIGN, VARIANTS
from tests.families.variant import Variant
from tests.paged import Oracle, Paged
from tests.thread_group import on_ranks
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.models.registry import Sizes, build, examine
from vllm_lite.models.transformers.mlps import GatedModule
from vllm_lite.models.transformers.model import _Given
from vllm_lite.models.transformers.norms import NormModule
from vllm_lite.models.weights import load_weights

BY_NAME = {variant.name: variant for variant in VARIANTS}
NATIVE = {variant.name: variant for variant in FAMILIES}


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant.name)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    variant: Variant = request.param
    return Oracle(variant.make(tmp_path_factory.mktemp("model") / variant.name), model_impl="transformers")


def refusal(path: Path) -> str:
    """Why the checkpoint is not served through transformers."""
    with pytest.raises(ModelError) as error:
        examine(load_spec(path, "transformers"), torch.float32, 256)
    return str(error.value)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_logits_match_transformers(oracle: Oracle, chunk: int) -> None:
    give_its_logits(oracle, chunk)


def test_sequences_of_one_batch_do_not_disturb_each_other(oracle: Oracle) -> None:
    share_steps(oracle)


@pytest.mark.parametrize("name", ["seed-oss", "exaone4"])
def test_two_ranks_share_it(name: str, tmp_path: Path) -> None:
    oracle = Oracle(BY_NAME[name].make(tmp_path / name), model_impl="transformers")
    for logits in on_ranks(2, lambda rank: Paged(oracle, model=oracle.load(rank)).run(oracle.tokens, 64)):
        assert difference(oracle, logits) < 2 * MAX_DIFFERENCE


def test_models_without_a_plan_of_transformers_cannot_be_shared(tmp_path: Path) -> None:
    oracle = Oracle(BY_NAME["stablelm"].make(tmp_path / "model"), model_impl="transformers")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2: transformers has no plan .* 'stablelm'; give 1"):
        on_ranks(2, oracle.load)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_both_implementations_agree(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / family, family, max_shard_size="100KB")
    native, foreign = Oracle(path), Oracle(path, model_impl="transformers")
    assert (native.spec.implementation, foreign.spec.implementation) == ("native", "transformers")
    groups = [(group.layers, group.attention) for group in native.spec.kv_groups]
    assert groups == [(group.layers, group.attention) for group in foreign.spec.kv_groups]
    logits = Paged(foreign).run(foreign.tokens, 64)
    assert difference(foreign, logits) < MAX_DIFFERENCE
    loads = [oracle.load(quantization="int8") for oracle in (native, foreign)]
    errors = [(Paged(native, model=model).run(native.tokens, 64) - logits).abs().mean() for model in loads]
    assert 0.5 < errors[1] / errors[0] < 2, "int8 rounds weights and activations alike in both"
    assert errors[0] > 0.001


def test_a_worker_serves_a_model_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = BY_NAME["helium"].make(tmp_path / "model")
    driver = Driver(path, max_model_len=256)
    prompt = make_prompt(40)
    driver.run(new_request(0, prompt, [1, 2, 3, 4]))
    driver.run(new_request(1, [*prompt[:32], 9], [1, 2, 5, 6], num_computed=32, num_cached=32, num_tokens=1))
    driver.decode(0, 1, count=15)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert driver.got[0] == expected(model, prompt, 16)
    assert driver.got[1] == expected(model, [*prompt[:32], 9], 16)
    assert driver.worker.spec.implementation == "transformers", "auto takes it, as there is no native one"
    assert driver.worker.graph_sizes == ()


def test_usual_parts_become_ours(tmp_path: Path) -> None:
    """Norms are replaced if a trial shows the same rounding, MLPs if their code is the usual line."""
    for dtype, name, num_norms, num_mlps in [
        ("bfloat16", "llama", 5, 2),
        ("bfloat16", "helium", 0, 2),  # its norms multiply before they round
        ("float32", "helium", 5, 2),
        ("float32", "nemotron", 0, 0),
    ]:
        folder = tmp_path / dtype / name
        path = make_checkpoint(folder) if name == "llama" else BY_NAME[name].make(folder)
        oracle = Oracle(path, dtype, model_impl="transformers")
        modules = list(oracle.model.causal.modules()) + list(oracle.model.body.modules())  # type: ignore[attr-defined]
        assert sum(isinstance(module, NormModule) for module in modules) == num_norms
        assert sum(isinstance(module, GatedModule) for module in modules) == num_mlps
        bfloat = dtype == "bfloat16"
        assert oracle.difference(Paged(oracle).run(oracle.tokens, 64)) < (0.5 if bfloat else MAX_DIFFERENCE)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gemma3-nested"])
def test_heads_that_look_at_more_than_hidden_states(name: str, tmp_path: Path) -> None:
    """GPT-2 gives its body ids by place and wants cross attentions of it, OPT calls the decoder within it, and whether
    Gemma 3's head is tied is said outside of text_config."""
    oracle = Oracle(NATIVE[name].make(tmp_path / name), model_impl="transformers")
    assert difference(oracle, Paged(oracle).run(oracle.tokens, 64)) < MAX_DIFFERENCE


def test_a_head_that_cannot_be_run_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = NATIVE["opt"].make(tmp_path / "opt")
    monkeypatch.delattr(_Given, "decoder")
    assert "'opt' cannot be served through transformers: its code failed in a dry run" in refusal(path)


@pytest.mark.parametrize("name", FOREIGN)
def test_models_that_cannot_be_served_are_refused_by_name(name: str, tmp_path: Path) -> None:
    variant, reason = FOREIGN[name]
    text = refusal(variant.make(tmp_path / name))
    assert name in text
    assert reason in text


def test_unsupported_models_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    path = FOREIGN["diffllama"][0].make(tmp_path / "model")
    (path / "model.safetensors").unlink()
    assert "layer 0 attends 2 times" in refusal(path)


def test_a_config_that_contradicts_the_code_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "mistral", sliding_window=20)
    config = msgspec.json.decode((path / "config.json").read_bytes())
    (path / "config.json").write_bytes(msgspec.json.encode(config | {"use_sliding_window": False}))
    assert "layer 0 has 20 as window, and by its config.json None" in refusal(path)


def test_missing_and_unexpected_tensors_are_listed(tmp_path: Path) -> None:
    path = BY_NAME["helium"].make(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.extra.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    spec = examine(load_spec(path), torch.float32, 256)
    model = build(spec, "float32", "cpu", Sizes(256, 512))
    with pytest.raises(ModelError, match=r"1 missing: model.layers.1.mlp.up_proj.weight. 1 unexpected: .*extra.weight"):
        load_weights(model, path)


def test_a_model_within_a_larger_one(tmp_path: Path) -> None:
    """The names and the config of a wrapper: text_config, and weights under language_model."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    inner = {"sliding_window": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    plain = write_checkpoint(tmp_path / "plain", Gemma3TextConfig, Gemma3ForCausalLM, dict(inner))
    oracle = Oracle(plain, model_impl="transformers")
    tensors = load_file(plain / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    renamed["vision_tower.x.weight"] = torch.zeros(2, 2)
    save_file(renamed, plain / "model.safetensors", {"format": "pt"})
    config = msgspec.json.decode((plain / "config.json").read_bytes())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config}
    (plain / "config.json").write_bytes(msgspec.json.encode(outer))
    oracle.spec = examine(load_spec(plain, "transformers"), torch.float32, 256)
    assert difference(oracle, Paged(oracle, model=oracle.load()).run(oracle.tokens, 64)) < MAX_DIFFERENCE


def test_a_missing_package_is_named_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec(make_checkpoint(tmp_path / "model"), "transformers")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ConfigError, match=r"this model needs transformers 5, .* pip install 'vllm_lite\[transformers\]'"
    ):
        examine(spec, torch.float32, 256)
