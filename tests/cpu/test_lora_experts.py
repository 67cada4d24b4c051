"""Adapters of a layer's experts and of its router give the logits of models into which PEFT has merged them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cpu.test_experts_cpu import HIDDEN, INNER, TOLERANCE, make, pick
from tests.cpu.test_lora import MAX_DIFFERENCE, load, reference, run_mixed
from tests.families.all import VARIANTS
from tests.lora_adapters import change_config, make_adapter, merge
from tests.paged import Oracle
from tests.rows import random
from tests.thread_group import on_ranks
from vllm_lite import LLM, LoRARequest, SamplingParams
from vllm_lite.checkpoint.shard import Split
from vllm_lite.checkpoint.tensors.lora import read_lora
from vllm_lite.errors import ModelError
from vllm_lite.kernels import cpu
from vllm_lite.kernels.routing import Chosen
from vllm_lite.layers.mlp import GatedNames
from vllm_lite.layers.moe.adapted_experts import ExpertAdapters, ExpertLayout
from vllm_lite.layers.moe.expert_matmul import ExpertSizes, LoopedExperts
from vllm_lite.layers.moe.experts import make_expert_matmul
from vllm_lite.layers.weights.lora import AdapterLimits, Adapters

FAMILIES = ("qwen3-moe", "mixtral", "gpt-oss")
"""Variants of tests/families: experts stored one by one, under other names, and together with the rows of gate and up
in turn, with biases."""
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
PREFIX, WEIGHTS = "base_model.model.model.layers.", "adapter_model.safetensors"


def make_oracle(name: str, path: Path) -> Oracle:
    variant = next(each for each in VARIANTS if each.name == name)
    return Oracle(variant.make(path), max_model_len=variant.max_model_len)


def fused(oracle: Oracle, path: Path, *, seed: int, rank: int = 4, **options: Any) -> Path:
    targets = {"target_parameters": PARAMETERS} | options
    return make_adapter(oracle.path, path, ["q_proj"], seed=seed, rank=rank, **targets)


def one_by_one(adapter: Path, path: Path, num_experts: int) -> Path:
    """The same adapter with matrices for each expert, as it was written where experts were modules."""
    tensors, found = load_file(adapter / WEIGHTS), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        before, _, part = name.partition("experts.")
        if not part:
            found[name] = tensor
            continue
        names = ["gate_proj", "up_proj"] if part.startswith("base_layer.") else ["down_proj"]
        matrix = part.removeprefix("base_layer.")
        for expert in range(num_experts):
            if "lora_A" in matrix:
                parts = [tensor.unflatten(0, (num_experts, -1))[expert]] * len(names)
            else:
                parts = list(tensor.unflatten(1, (-1, num_experts))[:, :, expert].chunk(len(names)))
            for own, each in zip(names, parts, strict=True):
                found[f"{before}experts.{expert}.{own}.{matrix}"] = each.clone()
    path.mkdir()
    save_file(found, path / WEIGHTS)
    (path / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    return change_config(path, {"target_parameters": None, "target_modules": targets})


def merged(oracle: Oracle, adapter: Path, path: Path) -> torch.Tensor:
    """Log-probabilities of 40 tokens."""
    return reference(merge(oracle.path, adapter, path), oracle.spec.architecture, oracle.tokens[:40])


def check(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs[: len(ours)]).abs().max() < MAX_DIFFERENCE


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_match_merged_weights(name: str, tmp_path: Path) -> None:
    """On one rank, on two that share each expert, on two that share them out; one of the adapters has down alone."""
    oracle = make_oracle(name, tmp_path / "base")
    paths = [
        fused(oracle, tmp_path / "one", seed=1),
        fused(oracle, tmp_path / "two", seed=2, rank=8, target_parameters=PARAMETERS[1:], use_rslora=True),
    ]
    expected = [merged(oracle, path, tmp_path / f"merged-{path.name}") for path in paths]
    expected.append(oracle.logits.log_softmax(-1))
    assert (expected[0] - expected[2][:40]).abs().max() > 0.1
    check(run_mixed(load(oracle, paths), oracle), expected)
    for shares_out in (False, True):
        for found in on_ranks(2, lambda rank: run_mixed(load(oracle, paths, rank), oracle), expert_parallel=shares_out):
            check(found, expected)


def test_names_of_single_experts(tmp_path: Path) -> None:
    """Names in adapters made for experts that are separate modules; PEFT joins these."""
    oracle = make_oracle("qwen3-moe", tmp_path / "base")
    together = fused(oracle, tmp_path / "together", seed=1)
    single = one_by_one(together, tmp_path / "single", 5)
    expected = merged(oracle, single, tmp_path / "merged")
    plain = oracle.logits.log_softmax(-1)
    check(run_mixed(load(oracle, [single, together]), oracle), [expected, expected, plain])
    for found in on_ranks(
        2, lambda rank: run_mixed(load(oracle, [single, single], rank), oracle), expert_parallel=True
    ):
        check(found, [expected, expected, plain])


def test_targets_as_transformers_called_them_before(tmp_path: Path) -> None:
    """PEFT makes parameters of them, of gate and up one of twice the rank, which its patterns say."""
    oracle = make_oracle("qwen3-moe", tmp_path / "base")
    path = make_adapter(oracle.path, tmp_path / "one", ["gate_proj", "up_proj", "down_proj", "gate"], seed=1, rank=2)
    modules = read_lora(path).modules
    found = {
        (name.partition("mlp.")[2], each.rank, each.num_experts) for name, each in modules.items() if "mlp" in name
    }
    assert found >= {("experts.gate_up_proj", 4, 5), ("experts.down_proj", 2, 5), ("gate", 2, 0)}
    expected = merged(oracle, path, tmp_path / "merged")
    plain = oracle.logits.log_softmax(-1)
    assert (expected - plain[:40]).abs().max() > 0.1
    check(run_mixed(load(oracle, [path, path]), oracle), [expected, expected, plain])


def test_there_need_not_be_native_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make_oracle("qwen3-moe", tmp_path / "base")
    path = fused(oracle, tmp_path / "one", seed=1)
    expected, plain = merged(oracle, path, tmp_path / "merged"), oracle.logits.log_softmax(-1)
    monkeypatch.setattr(cpu, "available", lambda: False)
    check(run_mixed(load(oracle, [path, path]), oracle), [expected, expected, plain])


def test_recorded_steps_of_an_engine(tmp_path: Path) -> None:
    """Rows with an adapter and without decode together, before it is loaded and after."""
    oracle = make_oracle("qwen3-moe", tmp_path / "base")
    path = fused(oracle, tmp_path / "one", seed=1)
    merge(oracle.path, path, tmp_path / "merged")
    prompts = [oracle.tokens[:9].tolist(), oracle.tokens[20:25].tolist()]
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "single_process": True, "max_model_len": 64}

    def tokens(llm: LLM, adapters: list[Any] | None = None) -> list[tuple[int, ...]]:
        found = llm.generate(prompts, asked, use_tqdm=False, lora_request=adapters)
        return [tuple(each.outputs[0].token_ids) for each in found]

    with LLM(str(oracle.path), enable_lora=True, **options) as llm:
        plain = tokens(llm)
        mixed = tokens(llm, [LoRARequest("one", 1, str(path)), None])
    with LLM(str(tmp_path / "merged"), **options) as llm:
        adapted = tokens(llm)
    assert mixed == [adapted[0], plain[1]]
    assert adapted[0] != plain[0]


def adapted_experts(dtype: torch.dtype, num_experts: int) -> tuple[Adapters, ExpertAdapters]:
    """Three adapters: of all experts, of the second products of some, of a single matrix of one."""
    made = Adapters(AdapterLimits(4, 8), 700, dtype, torch.device("cpu"))
    layout = ExpertLayout("{}.", GatedNames(), GatedNames(), Split.whole(num_experts), Split.whole(INNER), True)
    parts: Any = SimpleNamespace(
        spec=SimpleNamespace(hidden_size=HIDDEN), dtype=dtype, device=made.device, adapters=made
    )
    experts = ExpertAdapters.of(parts, layout)
    assert experts is not None
    experts.join("experts.")
    sites = [*experts.gate_up, *experts.down]
    for slot, own in enumerate((sites, experts.down[1::2], experts.gate_up[2:3])):
        for number, site in enumerate(own):
            names = site.names[: 2 - slot // 2]
            rank = 3 + slot + number % 2
            down = {name: random(rank, site.shape.inputs.total, dtype=dtype) for name in names}
            up = {name: random(site.shape.outputs[0].total, rank) * 0.1 for name in names}
            site.put(slot, site.packed(down, up))
    return made, experts


@pytest.mark.skipif(not cpu.available(), reason="no native library")
@pytest.mark.usefixtures("each_product_isa", "two_threads")
def test_the_kernel_agrees_with_the_loop(dtype: torch.dtype) -> None:
    """One row, rows of several adapters and without one, and more pairs than one window."""
    sizes, weights = ExpertSizes(Split.whole(20), INNER, "silu"), make(20, dtype)
    made, experts = adapted_experts(dtype, 20)
    native = experts.over(make_expert_matmul(*weights, sizes))
    looped = experts.over(LoopedExperts(*weights, sizes))
    for num_tokens in (1, 40, 300):
        x, chosen = random(num_tokens, HIDDEN, dtype=dtype), pick(num_tokens, 20, 8)
        made.rows.begin_step(np.arange(num_tokens) % 5 - 1)  # slot 3 is empty
        ours, theirs, plain = torch.full_like(x, torch.nan), torch.empty_like(x), torch.empty_like(x)
        native.forward(x, chosen, ours)
        looped.forward(x, chosen, theirs)
        LoopedExperts(*weights, sizes).forward(x, chosen, plain)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE[dtype] * float(theirs.abs().max()))
        slots, same = torch.arange(num_tokens) % 5 - 1, (theirs == plain).all(1)
        assert same[(slots < 0) | (slots == 3)].all()
        assert not same[slots == 0].any()
        first = chosen.experts[:1], chosen.weights[:1]
        alone = torch.empty_like(x[:1])
        native.forward(x[:1], Chosen(*first), alone)  # a step that only warms up has fewer rows than the one before
        assert torch.equal(alone[0], ours[0])


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    oracle = make_oracle("qwen3-moe", tmp_path / "base")
    path = fused(oracle, tmp_path / "one", seed=1)
    _, made = load(oracle, [])
    tensors = load_file(path / WEIGHTS)
    down = f"{PREFIX}0.mlp.experts.lora_"
    less = {f"{down}A.weight": tensors[f"{down}A.weight"][4:], f"{down}B.weight": tensors[f"{down}B.weight"][:, 4:]}
    save_file(tensors | {name: part.contiguous() for name, part in less.items()}, path / WEIGHTS)
    with pytest.raises(ModelError, match=r"another base model: its matrices of .*experts\.down_proj are"):
        made.read(read_lora(path), "adapter")
    alone = {f"{PREFIX}0.mlp.experts.3.up_proj.lora_{part}.weight": torch.zeros(4, 4) for part in "AB"}
    save_file(tensors | alone, path / WEIGHTS)
    with pytest.raises(ModelError, match="of all experts of a layer together, and of some by themselves"):
        read_lora(path)
    lengths = {f"{down}magnitude_vector": torch.ones(4)}
    change_config(path, {"use_dora": True})
    save_file({name: part for name, part in tensors.items() if name.startswith(down)} | lengths, path / WEIGHTS)
    with pytest.raises(ModelError, match="DoRA of experts' parameters is not served"):
        read_lora(path)
