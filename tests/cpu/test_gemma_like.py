"""Needs of Gemma, GLM-4, OLMo and Cohere 2 beside the table of families: roundings, spellings, uneven ranks."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.attention_steps import step_batch
from tests.families import gemma_like_configs
from tests.families.gemma_like import VARIANTS
from tests.families.variant import Variant
from tests.paged import Oracle, Paged
from tests.thread_group import on_ranks
from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.tensors.headers import SINGLE_FILE, read_headers
from vllm_lite.checkpoint.tensors.tensor_names import canonical
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint, weights_bytes
from vllm_lite.errors import ModelError
from vllm_lite.kernels.cpu.program import Program
from vllm_lite.models.gemma import Gemma

PUBLISHED = [name for name in dir(gemma_like_configs) if name.isupper()]


def variant(name: str) -> Variant:
    return next(each for each in VARIANTS if each.name == name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_written_by_transformers_mean_the_same_as_published_ones(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    published: dict[str, Any] = getattr(gemma_like_configs, name)
    (tmp_path / "config.json").write_text(json.dumps(published))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "written")
    assert load_spec(tmp_path / "written") == load_spec(tmp_path)


@pytest.mark.parametrize("name", ["gemma2", "glm4", "olmo3", "cohere2"])
def test_bfloat16_is_no_further_from_the_truth_than_transformers(name: str, tmp_path: Path) -> None:
    path = variant(name).make(tmp_path / name)
    truth, rounded = Oracle(path), Oracle(path, "bfloat16")
    ours = Paged(rounded).run(rounded.tokens, 1000).float()
    assert (ours - truth.logits).abs().mean() < 1.2 * (rounded.logits - truth.logits).abs().mean()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gemma_rounds_the_scale_of_its_token_vectors(dtype: str, tmp_path: Path) -> None:
    """sqrt(96) = 9.798 is 9.8125 in bfloat16."""
    from transformers import GemmaForCausalLM

    oracle = Oracle(variant("gemma").make(tmp_path / "gemma"), dtype)
    model = oracle.model
    assert isinstance(model, Gemma)
    rows = model.buffers.rows(len(oracle.tokens))
    nothing = torch.empty(0, dtype=torch.int64)
    length = len(oracle.tokens)
    model.embed(step_batch([(length, length)], [torch.zeros(1, 1)], [nothing], oracle.tokens, nothing), rows)
    reference = GemmaForCausalLM.from_pretrained(oracle.path, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        assert torch.equal(rows.residual, reference.model.embed_tokens(oracle.tokens))


def test_a_nested_checkpoint_may_have_the_names_of_its_modules(tmp_path: Path) -> None:
    """Published names begin with the text part, those of transformers' modules with the whole model."""
    oracle = Oracle(variant("gemma3-nested").make(tmp_path / "nested"))
    tensors, renamed = load_file(oracle.path / SINGLE_FILE), {}
    assert any(name.startswith("language_model.model.") for name in tensors)
    for name, tensor in tensors.items():
        text = name.removeprefix("language_model.model.")
        renamed[f"model.language_model.{text}" if text != name else f"model.{name}"] = tensor
    renamed["lm_head.weight"] = renamed["model.language_model.embed_tokens.weight"].clone()
    save_file(renamed, oracle.path / SINGLE_FILE)
    assert oracle.difference(Paged(oracle, model=oracle.load()).run(oracle.tokens, 1000)) < 3e-4


def test_a_plan_knows_the_table_of_a_nested_checkpoint(tmp_path: Path) -> None:
    """With int8 it is kept beside the head that is tied to it."""
    path = variant("gemma3-nested").make(tmp_path / "nested")
    spec, stored = load_spec(path), read_headers(path)
    named = {canonical(name): tensor for name, tensor in stored.items()}
    assert weights_bytes(Checkpoint(spec, stored), 4, "int8") == weights_bytes(Checkpoint(spec, named), 4, "int8")


def test_olmo_needs_its_norms_over_all_heads(tmp_path: Path) -> None:
    oracle = Oracle(variant("olmo2").make(tmp_path / "olmo2"))
    oracle.spec = msgspec.structs.replace(oracle.spec, qk_norm=None)
    with pytest.raises(ModelError, match=r"4 unexpected: .*self_attn\.[kq]_norm\.weight"):
        oracle.load()


@pytest.mark.parametrize(("name", "world"), [("olmo2", 4), ("olmo2-one-kv-head", 3)])
def test_norms_over_all_heads_count_a_shared_kv_head_once(name: str, world: int, tmp_path: Path) -> None:
    oracle = Oracle(variant(name).make(tmp_path / name))
    for logits in on_ranks(world, lambda rank: Paged(oracle, model=oracle.load(rank)).run(oracle.tokens, 64)):
        assert oracle.difference(logits) < 3e-4


@pytest.mark.parametrize("name", ["gemma2", "glm4", "olmo3", "cohere2"])
def test_a_decode_step_of_one_rank_is_recorded(name: str, tmp_path: Path) -> None:
    paged = Paged(Oracle(variant(name).make(tmp_path / name)))
    sequence, forward = paged.sequence(torch.arange(3, 12)), paged.model.forward
    paged.step((sequence, 8))
    programs: list[Program] = []

    def recorded(batch: StepBatch, kv_caches: list[torch.Tensor], backend: AttentionBackend) -> torch.Tensor:
        hidden = forward(batch, kv_caches, backend)  # what is made once, like views, is made

        def again() -> None:
            forward(batch, kv_caches, backend)

        programs.append(Program())
        programs[0].record(again)
        return hidden

    paged.model.forward = recorded  # type: ignore[method-assign, assignment]
    paged.step((sequence, 1))
    assert len(programs[0]) > 5 * len(paged.kv)
