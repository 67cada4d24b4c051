"""Adapters of token vectors give the logits that PEFT computes with them, row by row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.cpu.test_lora import MAX_DIFFERENCE, load, run_mixed
from tests.families.all import VARIANTS
from tests.lora_adapters import make_adapter, quiet
from tests.paged import Oracle
from tests.pooled import add_modules, write_pooled
from tests.thread_group import on_ranks
from vllm_lite import LLM, LoRARequest
from vllm_lite.checkpoint.tensors.lora import read_lora
from vllm_lite.errors import ModelError
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.program import Program
from vllm_lite.layers.weights import adapted_tokens

FAMILIES = {"qwen2-odd-tied": "embed_tokens", "gemma2": "embed_tokens", "gpt2": "wte", "neox": "embed_in"}
"""By variants of tests/families, the name of the table: tied ones, a scaled one, and one beside learned positions."""


@quiet
def adapted_logits(base: Path, adapter: Path, tokens: torch.Tensor) -> torch.Tensor:
    """By PEFT, without merging: a tied LM head keeps the base model's table."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = PeftModel.from_pretrained(model, adapter).eval()(tokens[None]).logits[0]
        return logits.log_softmax(-1)


@quiet
def make_table(base: Path, path: Path, table: str, *, seed: int, rank: int = 4, **options: Any) -> Path:
    """An adapter of the table and of some linear layers; PEFT begins with an A of zeros."""
    targets = [table, *options.pop("beside", [])]
    make_adapter(base, path, targets, seed=seed, rank=rank, **options)
    file = path / "adapter_model.safetensors"
    tensors, draw = load_file(file), torch.Generator().manual_seed(seed)
    changed = {
        name: torch.randn(tensor.shape, generator=draw) * 0.3 if "lora_embedding" in name else tensor
        for name, tensor in tensors.items()
    }
    assert any("lora_embedding" in name for name in changed)
    save_file(changed, file)
    return path


def check_mixed(oracle: Oracle, paths: list[Path]) -> None:
    """Rows of two adapters and of none, alone and on two ranks, give PEFT's logits."""
    expected = [adapted_logits(oracle.path, path, oracle.tokens[:40]) for path in paths]
    plain = oracle.logits.log_softmax(-1)
    assert all((each - plain[:40]).abs().max() > 0.1 for each in expected)
    for ours, theirs in zip(run_mixed(load(oracle, paths), oracle), [*expected, plain], strict=True):
        assert (ours - theirs[: len(ours)]).abs().max() < MAX_DIFFERENCE
    for ranks in on_ranks(2, lambda rank: run_mixed(load(oracle, paths, rank), oracle)):
        for ours, theirs in zip(ranks, [*expected, plain], strict=True):
            assert (ours - theirs[: len(ours)]).abs().max() < MAX_DIFFERENCE


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_match_peft(name: str, tmp_path: Path) -> None:
    variant = next(each for each in VARIANTS if each.name == name)
    oracle = Oracle(variant.make(tmp_path / "base"), max_model_len=variant.max_model_len)
    paths = [
        make_table(oracle.path, tmp_path / "one", FAMILIES[name], seed=1),
        make_table(oracle.path, tmp_path / "two", FAMILIES[name], seed=2, rank=8, use_rslora=True),
    ]
    check_mixed(oracle, paths)


def test_a_table_beside_linear_layers_and_a_slot_that_is_used_again(tmp_path: Path) -> None:
    oracle = Oracle(make_checkpoint(tmp_path / "base"))
    both = make_table(oracle.path, tmp_path / "both", "embed_tokens", seed=3, beside=["q_proj", "down_proj"])
    linear = make_adapter(oracle.path, tmp_path / "linear", ["q_proj"], seed=4)
    model, made = load(oracle, [both, linear])
    expected = [adapted_logits(oracle.path, path, oracle.tokens[:40]) for path in (both, linear)]
    for ours, theirs in zip(run_mixed((model, made), oracle), expected, strict=False):
        assert (ours - theirs[: len(ours)]).abs().max() < MAX_DIFFERENCE
    first, second = (made.read(read_lora(path), "") for path in (both, linear))
    made.put(0, second, first)
    made.put(1, first, second)
    for ours, theirs in zip(run_mixed((model, made), oracle), reversed(expected), strict=False):
        assert (ours - theirs[: len(ours)]).abs().max() < MAX_DIFFERENCE


def test_there_need_not_be_native_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(make_checkpoint(tmp_path / "base"))
    path = make_table(oracle.path, tmp_path / "one", "embed_tokens", seed=3)
    monkeypatch.setattr(cpu, "available", lambda: False)
    monkeypatch.setattr(adapted_tokens, "look_up", lambda *_: pytest.fail("there is none"))
    ours = run_mixed(load(oracle, [path]), oracle)[0]
    expected = adapted_logits(oracle.path, path, oracle.tokens[:40])
    assert (ours - expected[: len(ours)]).abs().max() < MAX_DIFFERENCE


@pytest.mark.skipif(not cpu.available(), reason="no native library")
def test_a_recorded_step_reads_slots_at_its_replay(tmp_path: Path) -> None:
    oracle = Oracle(make_checkpoint(tmp_path / "base"))
    path = make_table(oracle.path, tmp_path / "one", "embed_tokens", seed=3)
    model, made = load(oracle, [])
    tokens, out = torch.tensor([5, 7, 9]), torch.zeros(3, oracle.spec.hidden_size)
    made.rows.begin_step(np.array([0, -1, 0]))
    program = Program()
    program.record(lambda: model.adapted_tokens.add(tokens, out))
    program.replay()
    assert not out.any()
    made.put(0, made.read(read_lora(path), ""), None)
    program.replay()
    tensors = load_file(path / "adapter_model.safetensors")
    down, up = (next(tensor for key, tensor in tensors.items() if key.endswith(end)) for end in ("_A", "_B"))
    exact = down[:, tokens].t() @ up.t() * 2
    exact[1] = 0
    assert (out - exact).abs().max() < 1e-5


def test_tables_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(make_checkpoint(tmp_path / "base"))
    _, made = load(oracle, [])
    path = make_table(oracle.path, tmp_path / "one", "embed_tokens", seed=3)
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith("_A"))
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, file)
    with pytest.raises(ModelError, match=r"another base model: its matrices of model\.embed_tokens are"):
        made.read(read_lora(path), "adapter")
    save_file(tensors, file)
    with monkeypatch.context() as patched:
        patched.setattr(adapted_tokens, "MAX_TABLE_BYTES", 1000)
        _, without = load(oracle, [])
    with pytest.raises(ModelError, match=r"embed_tokens: not layers .* take at most 1 GiB$"):
        without.read(read_lora(path), "adapter")
    save_file({name: tensors[name]}, file)
    with pytest.raises(ModelError, match="has only lora_embedding_A of"):
        read_lora(path)


@quiet
def test_an_encoder_has_an_adapted_table_too(tmp_path: Path) -> None:
    """Vectors of texts equal those of PEFT's model; the adapted table precedes types, positions and a norm."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel

    base = add_modules(write_pooled(tmp_path / "base", "BertModel", {}), "mean")
    plain = AutoModel.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=4, target_modules=["word_embeddings", "query"], task_type="FEATURE_EXTRACTION")
    adapted = get_peft_model(plain, config)
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, 0, 0.3)
    adapted.save_pretrained(str(tmp_path / "one"))
    prompts = [[2, 7, 9, 300, 3], [2, 40, 3]]
    with LLM(str(base), dtype="float32", single_process=True, enable_lora=True) as llm:
        one = LoRARequest("one", 1, str(tmp_path / "one"))
        found = [each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False, lora_request=[one, None])]
    with torch.inference_mode():
        want = adapted.eval()(torch.tensor(prompts[:1])).last_hidden_state.mean(1)
        with adapted.disable_adapter():
            other = adapted(torch.tensor(prompts[1:])).last_hidden_state.mean(1)
    for ours, theirs in zip(found, (want, other), strict=True):
        assert (torch.tensor(ours) - torch.nn.functional.normalize(theirs)[0]).abs().max() < 1e-5
