"""Adapters of LM heads, alone and with those of token vectors: logits equal PEFT's, row by row."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.cpu.test_lora import MAX_DIFFERENCE, load, reference
from tests.cpu.test_lora_tokens import adapted_logits, check_mixed, make_table
from tests.families.all import VARIANTS
from tests.lora_adapters import change_config, make_adapter
from tests.paged import Oracle
from vllm_lite import LLM, LoRARequest, SamplingParams
from vllm_lite.checkpoint.tensors.lora import read_lora
from vllm_lite.errors import ModelError
from vllm_lite.layers.weights.adapted_head import AdaptedHead
from vllm_lite.worker import forward

FAMILIES = ("gemma2", "llama-yarn")
"""Variants of tests/families: a tied head, whose table is not changed, with a soft cap; and a separate head."""


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_match_peft(name: str, tmp_path: Path) -> None:
    variant = next(each for each in VARIANTS if each.name == name)
    oracle = Oracle(variant.make(tmp_path / "base"), max_model_len=variant.max_model_len)
    paths = [
        make_adapter(oracle.path, tmp_path / "head", ["lm_head"], seed=1),
        make_table(oracle.path, tmp_path / "both", "embed_tokens", seed=2, rank=8, beside=["lm_head"], use_rslora=True),
    ]
    check_mixed(oracle, paths)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_rows_are_selected_where_logits_are_wanted_of_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """Through an engine: prompts with scored tokens beside others, in steps that compute logits of some rows only, a
    few at a time."""
    monkeypatch.setattr(forward, "HEAD_ROWS", 2)
    if kernels == "torch":
        monkeypatch.setattr("vllm_lite.layers.weights.lora.copies", lambda *_: False)
    base = make_checkpoint(tmp_path / "base")
    path = make_adapter(base, tmp_path / "one", ["lm_head", "q_proj"], seed=3)
    draw = np.random.default_rng(5)
    prompts = [draw.integers(3, 300, length).tolist() for length in (9, 5, 14, 7)]
    lora = [LoRARequest("one", 1, str(path)), None, LoRARequest("one", 1, str(path)), None]
    asked = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    unasked = asked.clone(prompt_logprobs=None)
    with LLM(str(base), dtype="float32", single_process=True, enable_lora=True, max_num_batched_tokens=16) as llm:
        made = llm.generate(prompts, [asked, asked, unasked, unasked], use_tqdm=False, lora_request=lora)
    for found, adapter in zip(made, lora, strict=True):
        tokens = torch.tensor([*found.prompt_token_ids, *found.outputs[0].token_ids])
        want = reference(base, "LlamaForCausalLM", tokens) if adapter is None else adapted_logits(base, path, tokens)
        scored = [None] * len(found.prompt_token_ids) if found.prompt_logprobs is None else found.prompt_logprobs
        for at, each in enumerate([*scored, *(found.outputs[0].logprobs or [])]):
            if each is not None:
                token = int(tokens[at])
                assert abs(each[token].logprob - want[at - 1, token].item()) < MAX_DIFFERENCE


def test_heads_that_are_not_served_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(make_checkpoint(tmp_path / "base"))
    path = make_adapter(oracle.path, tmp_path / "head", ["q_proj", "lm_head"])
    monkeypatch.setattr(AdaptedHead, "can_be", lambda _: False)
    _, without = load(oracle, [])
    with pytest.raises(ModelError, match=r"adapts lm_head: not layers .* be adapted here; LM heads are on CPUs$"):
        without.read(read_lora(path), "adapter")
    with pytest.raises(ModelError, match="ensure_weight_tying is set"):
        read_lora(change_config(path, {"ensure_weight_tying": True}))
