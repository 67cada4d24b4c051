"""Models with adapters give the logits of models into which PEFT has merged them, row by row."""

from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint, transformers_model
from tests.families.all import VARIANTS
from tests.gguf_files import write_gguf
from tests.lora_adapters import change_config, make_adapter, merge
from tests.paged import Oracle, Paged
from tests.quantized_tensors import FORMATS, LARGE, int8_tensors, quantized
from tests.thread_group import on_ranks
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.tensors.lora import read_lora
from vllm_lite.checkpoint.tensors.weight_bytes import adapted_elements
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.layers.weights.lora import AdapterLimits, Adapters
from vllm_lite.models.registry import Sizes, build
from vllm_lite.models.weights import load_weights
from vllm_lite.parallel.communicator import Communicator
from vllm_lite.tools.quantize.checkpoint import quantize_checkpoint
from vllm_lite.tools.quantize.schemes import SCHEMES

CPU = torch.device("cpu")
MAX_DIFFERENCE = 5e-4
"""Maximum difference of log-probabilities in float32; a model without its adapter differs by over 0.1."""
TARGETS: dict[str, list[Any]] = {
    "qwen2-odd-tied": [
        *(f".*{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")),
        "all-linear",
    ],
    "phi3-short": [".*qkv_proj", ".*o_proj", ".*gate_up_proj", ".*down_proj", "all-linear"],
    "gpt2": [".*c_attn", ".*c_fc", r".*attn\.c_proj", r".*mlp\.c_proj", "all-linear"],
    "glm4": ["all-linear"],  # interleaved rope: the rows of Q and K have another order
    "neox": ["all-linear"],  # Q, K and V by head
    "opt": ["all-linear"],
    "qwen3-moe": [["q_proj", "o_proj"]],
    "qwen3.5": ["all-linear"],  # six projections in one product of a recurrent layer, and a gate in that of Q
    "lfm3": ["all-linear"],  # a gate for each head, by a matrix of its own
    "deepseek-v2-groups": [["q_proj", "kv_a_proj_with_mqa", "o_proj"]],
}
"""By variants of tests/families, what is adapted: alone, and all together."""


def target_name(target: Any) -> str:
    return target if isinstance(target, str) else "+".join(target)


CASES = [
    pytest.param(name, target, id=f"{name}-{target_name(target)}")
    for name, targets in TARGETS.items()
    for target in targets
]


def load(
    oracle: Oracle,
    adapters: list[Path],
    communicator: Communicator | None = None,
    stored_as: Path | None = None,
    **options: Any,
) -> tuple[Any, Adapters]:
    """A model with adapters in slots, one after another. `stored_as`: another checkpoint of the same model."""
    limits = AdapterLimits(len(adapters) + 1, 8)
    made = Adapters(limits, 512, getattr(torch, oracle.dtype), CPU)
    sizes = Sizes(oracle.max_model_len, 512, made)
    spec = oracle.spec if stored_as is None else load_spec(stored_as)
    model = build(spec, oracle.dtype, "cpu", sizes, communicator=communicator, **options)
    load_weights(model, stored_as or oracle.path)
    for slot, path in enumerate(adapters):
        made.put(slot, made.read(read_lora(path), str(path)), None)
    return model, made


def reference(path: Path, architecture: str, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = transformers_model(path, architecture)(tokens[None]).logits[0]
        return logits.log_softmax(-1)


def run_mixed(loaded: tuple[Any, Adapters], oracle: Oracle) -> list[torch.Tensor]:
    """The logits of three sequences that share their steps, prompts and decodes: of slot 0, of slot 1, of none."""
    model, made = loaded
    paged = Paged(oracle, seed=3, model=model)
    sequences = [paged.sequence(oracle.tokens[:length]) for length in (40, 33, 20)]
    for counts in ((30, 20, 19), (1, 1, 1), (9, 12, 0)):
        work = [(sequence, count) for sequence, count in zip(sequences, counts, strict=True) if count]
        made.rows.begin_step(np.repeat([0, 1, -1][: len(work)], [count for _, count in work]))
        paged.step(*work)
    return [torch.cat(sequence.logits).float().log_softmax(-1) for sequence in sequences]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    """Filled as they are needed."""
    return {}


def oracle_of(name: str, bases: dict[str, Oracle], tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    if name not in bases:
        variant = next(each for each in VARIANTS if each.name == name)
        bases[name] = Oracle(variant.make(tmp_path_factory.mktemp("lora") / name), max_model_len=variant.max_model_len)
    return bases[name]


@pytest.mark.parametrize(("name", "target"), CASES)
def test_logits_match_merged_weights(
    name: str, target: Any, bases: dict[str, Oracle], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    oracle = oracle_of(name, bases, tmp_path_factory)
    architecture = oracle.spec.architecture
    paths = [
        make_adapter(oracle.path, tmp_path / "one", target, seed=1),
        make_adapter(oracle.path, tmp_path / "two", target, seed=2, rank=8, use_rslora=True),
    ]
    expected = [
        reference(merge(oracle.path, path, tmp_path / f"merged-{path.name}"), architecture, oracle.tokens[:40])
        for path in paths
    ]
    expected.append(oracle.logits.log_softmax(-1))
    assert (expected[0] - expected[2][:40]).abs().max() > 0.1  # they change something
    for ours, theirs in zip(run_mixed(load(oracle, paths), oracle), expected, strict=True):
        assert (ours - theirs[: len(ours)]).abs().max() < MAX_DIFFERENCE
    if target == "all-linear" and name in {"qwen2-odd-tied", "phi3-short", "gpt2"}:
        for ranks in on_ranks(2, lambda rank: run_mixed(load(oracle, paths, rank), oracle)):
            for ours, theirs in zip(ranks, expected, strict=True):
                assert (ours - theirs[: len(ours)]).abs().max() < MAX_DIFFERENCE


@pytest.mark.parametrize("name", ["llama-yarn", "smollm3-tied", "neox", "falcon-two-norms", "gpt2"])
def test_the_base_may_be_a_gguf_file(
    name: str, bases: dict[str, Oracle], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The file has the rows of Q and K in another order than the adapter, or all Q before K and V, or no matrix
    transposed."""
    oracle = oracle_of(name, bases, tmp_path_factory)
    path = make_adapter(oracle.path, tmp_path / "adapter", seed=1)
    merged = merge(oracle.path, path, tmp_path / "merged")
    expected = reference(merged, oracle.spec.architecture, oracle.tokens[:40])
    file = write_gguf(tmp_path / "model.gguf", oracle.path)
    oracle = copy(oracle)
    oracle.spec = load_spec(file)  # attention by the file's config
    found: list[list[torch.Tensor]] = [run_mixed(load(oracle, [path, path], stored_as=file), oracle)]
    if name in {"llama-yarn", "neox"}:
        found += on_ranks(2, lambda rank: run_mixed(load(oracle, [path, path], rank, file), oracle))
    for ours in found:
        assert (ours[0] - expected).abs().max() < MAX_DIFFERENCE
        assert (ours[2] - oracle.logits[:20].log_softmax(-1)).abs().max() < MAX_DIFFERENCE


def test_patterns_of_ranks_and_alphas(tmp_path: Path) -> None:
    oracle = Oracle(make_checkpoint(tmp_path / "base", num_hidden_layers=3))
    path = make_adapter(
        oracle.path,
        tmp_path / "adapter",
        ["q_proj", "v_proj", "up_proj"],
        rank_pattern={"layers.1.self_attn.q_proj": 2, "up_proj": 8},
        alpha_pattern={r"layers\.[02]\.self_attn\.v_proj": 20, "model.layers.1.mlp.up_proj": 1},
        layers_to_transform=[0, 1],
    )
    modules = read_lora(path).modules
    assert {(module.rank, module.scale) for module in modules.values()} == {
        (4, 2.0),
        (2, 4.0),
        (4, 5.0),
        (8, 1.0),
        (8, 0.125),
    }
    expected = reference(merge(oracle.path, path, tmp_path / "merged"), oracle.spec.architecture, oracle.tokens[:40])
    ours = run_mixed(load(oracle, [path, path]), oracle)
    assert (ours[0] - expected).abs().max() < MAX_DIFFERENCE
    assert (ours[1] - expected[:33]).abs().max() < MAX_DIFFERENCE


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Path]:
    """A model as large as those of quantized checkpoints, and an adapter for it."""
    folder = tmp_path_factory.mktemp("large")
    oracle = Oracle(make_checkpoint(folder / "base", **LARGE))
    return oracle, make_adapter(oracle.path, folder / "adapter", ["q_proj", "k_proj", "v_proj"])


QUANTIZED = [*FORMATS, "bitsandbytes int8", "gguf Q4_K", *SCHEMES, "--quantization int8", "--quantization int4_g32"]


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_keep_theirs_and_the_difference_is_exact(
    kind: str, large: tuple[Oracle, Path], tmp_path: Path
) -> None:
    """Compared at the layer: the adapter's part of a quantized product equals that of A and B in float32."""
    oracle, path = large
    stored, option = None, None
    if kind in FORMATS:
        stored = quantized(tmp_path / "base", *FORMATS[kind])
    elif kind in SCHEMES:
        stored = tmp_path / "base"
        quantize_checkpoint(oracle.path, stored, kind)
    elif kind.startswith("gguf"):
        stored = write_gguf(tmp_path / "base.gguf", oracle.path, lambda name: "Q4_K" if "attn" in name else "Q8_0")
    elif kind.startswith("bitsandbytes"):
        stored = quantized(tmp_path / "base", int8_tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    else:
        option = kind.removeprefix("--quantization ")
    model, made = load(oracle, [path], stored_as=stored, quantization=option)
    tensors = load_file(path / "adapter_model.safetensors")
    qkv = model.layers[1].attention.qkv
    x, adapted, plain = torch.randn(5, 256), torch.zeros(5, 512), torch.zeros(5, 512)
    made.rows.begin_step(np.array([0, 0, -1, 0, 0]))
    qkv.forward(x, adapted)
    made.rows.begin_step(np.full(5, -1))
    qkv.forward(x, plain)
    prefix = "base_model.model.model.layers.1.self_attn.{}_proj.lora_{}.weight"
    exact = torch.cat([x @ tensors[prefix.format(p, "A")].T @ tensors[prefix.format(p, "B")].T * 2 for p in "qkv"], 1)
    exact[2] = 0
    assert (adapted - plain - exact).abs().max() < 1e-4
    assert exact.abs().max() > 1


REFUSED = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'; LORA is served"),
    ({"use_dora": True}, "use_dora is set, and "),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"init_lora_weights": "pissa_niter_4"}, "changes the base model as well"),
    ({"r": 0}, "r: Expected `int` >= 1"),
    ({"r": 1024}, "r and rank_pattern say 1024, but "),
    ({"r": 8, "rank_pattern": {"up_proj": 2}}, "say 2, 8, but "),
    ({"alpha_pattern": {"(": 3}}, "alpha_pattern is not a regular expression"),
    (
        {"alpha_pattern": {rf"(.+?)+?\1\1[!{index}]": 3 for index in range(9)}},
        "alpha_pattern take over 0.05 s to compile and match",
    ),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(make_checkpoint(tmp_path_factory.mktemp("small") / "base"))


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_configs_that_are_not_served_are_refused_by_name(
    changes: dict[str, Any], message: str, small: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_lite.checkpoint.tensors.lora.PATTERN_TIMEOUT_S", 0.05)
    path = change_config(make_adapter(small.path, tmp_path / "adapter", ["q_proj"]), changes)
    with pytest.raises(ModelError, match=r"adapter_config\.json") as error:
        read_lora(path)
    assert message in str(error.value)


def test_adapters_of_other_models_are_refused(small: Oracle, tmp_path: Path) -> None:
    _, made = load(small, [])
    other = make_checkpoint(tmp_path / "other", hidden_size=96, head_dim=24)
    for path, message in (
        (make_adapter(other, tmp_path / "shapes", ["q_proj"]), "was made for another base model"),
        (make_adapter(small.path, tmp_path / "rank", ["q_proj"], rank=9), "has rank 9, and max_lora_rank is 8"),
        (tmp_path / "nothing", "adapter_config.json: no such file; the folder of an adapter in PEFT's format has one"),
    ):
        with pytest.raises(ModelError, match=message):
            made.read(read_lora(path), f"adapter {path.name!r}")
    tensors = load_file(tmp_path / "rank" / "adapter_model.safetensors")
    file = tmp_path / "rank" / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if "lora_A" in name}, file)
    with pytest.raises(ModelError, match="has only lora_A of"):
        read_lora(tmp_path / "rank")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match="truncated"):
        read_lora(tmp_path / "rank")
    file.unlink()
    (tmp_path / "rank" / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"adapter_model\.bin cannot be used"):
        read_lora(tmp_path / "rank")


@pytest.mark.parametrize("name", TARGETS)
def test_a_plan_knows_the_size_of_an_adapter(
    name: str, bases: dict[str, Oracle], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """To the element; or all projections are thought to have an A of their own, also those that are one matrix in the
    checkpoint, which a plan does not know but of recurrent layers."""
    oracle = oracle_of(name, bases, tmp_path_factory)
    for world, (_, made) in ((1, load(oracle, [])), (2, on_ranks(2, lambda rank: load(oracle, [], rank))[0])):
        shapes = [(len(site.matrices), site.shape) for site in set(made.sites.values())]
        held = sum(count * own.inputs.size + sum(part.size for part in own.outputs) for count, own in shapes)
        shared = sum((len(own.outputs) - count) * own.inputs.size for count, own in shapes)
        assert adapted_elements(oracle.spec, world) in (held, held + shared)


def test_recurrent_layers_on_a_gpu_are_refused_in_a_sentence(
    bases: dict[str, Oracle], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = oracle_of("qwen3.5", bases, tmp_path_factory)
    monkeypatch.setattr("vllm_lite.layers.weights.lora.copies", lambda *_: False)
    monkeypatch.setattr("vllm_lite.layers.weights.lora.gpu_matmul.launcher_for", lambda *_: object())
    with pytest.raises(ConfigError, match=r"not for this model on a GPU, .* must have 1 to 3 projections, got [46]"):
        load(oracle, [])


def test_models_of_transformers_take_no_adapters(small: Oracle) -> None:
    sizes = Sizes(64, 64, Adapters(AdapterLimits(1, 8), 64, torch.float32, CPU))
    with pytest.raises(ConfigError, match="enable_lora is for models with a native implementation"):
        build(load_spec(small.path, "transformers"), "float32", "cpu", sizes)
