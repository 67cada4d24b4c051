"""--quantization int8 and int4: rounding of weights, and a model's memory and outputs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.families.mixtures import qwen3
from tests.paged import Oracle, Paged
from tests.rows import random
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.quantization.mixed import MixedForm
from vllm_lite.checkpoint.quantization.on_load import Form, Quantization
from vllm_lite.checkpoint.shard import Split
from vllm_lite.checkpoint.tensors.headers import SINGLE_FILE
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.weights.linear import PackedWeight
from vllm_lite.layers.weights.matmul import Int8Matmul, NativeMatmul, make_matmul
from vllm_lite.layers.weights.weight_form import DenseForm, LinearShape
from vllm_lite.models.registry import Sizes, build
from vllm_lite.models.weights import load_weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_against_the_unquantized_product(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Rounding to 127 steps of a normal row's largest, about 3.3 sigma, is an error of 0.0075 sigma a weight, and about
    as much an input where rows are quantized, too."""
    weight, x = random(256, 512, dtype=dtype), random(16, 512, dtype=dtype)
    expected = x.double() @ weight.double().t()
    for native in (True, False):
        if native and not cpu.available():
            continue
        if not native:
            monkeypatch.setattr(cpu, "available", lambda: False)
        form = make_matmul(weight, None, "int8")
        assert isinstance(form, NativeMatmul if native else Int8Matmul)
        out = torch.empty(16, 256)
        form.forward(x, out)
        relative = ((out - expected).norm() / expected.norm()).item()
        assert 0.004 < relative < 0.013


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("int8") / "model")


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.02), ("fp8", 0.06), ("int4", 0.2), ("int4_g32", 0.2)])
def test_a_quantized_model_gives_nearly_the_same_logits(checkpoint: Path, kind: Quantization, most: float) -> None:
    spec = load_spec(checkpoint)
    hidden = random(4, spec.hidden_size)
    logits = []
    quantizations: tuple[Quantization | None, ...] = (None, kind)
    for quantization in quantizations:
        model = build(spec, torch.float32, CPU, Sizes(16, 4), quantization)
        load_weights(model, checkpoint)
        ids, table = torch.tensor([1, 5]), torch.empty(2, spec.hidden_size)
        model.embedding.forward(ids, table)  # type: ignore[attr-defined]
        logits.append((model.logits(hidden), table))
    (exact, rows), (quantized, same_rows) = logits
    assert torch.equal(rows, same_rows)  # embeddings are not quantized
    assert 0 < (quantized - exact).norm() < most * exact.norm()


def rounded(weight: torch.Tensor, form: Form) -> torch.Tensor:
    """Dequantized values of a quantized weight."""
    out = torch.empty(weight.shape)
    PackedWeight(weight, form=form).rows(torch.arange(len(weight)), out)
    return out


def mixture(folder: Path, kind: Quantization) -> tuple[Path, Path]:
    """A checkpoint with experts, and the same one with the rounded weights."""
    made = [qwen3("mixture", {}, mlp_only_layers=[1]).make(folder / name) for name in ("dense", "rounded")]
    weights = load_file(made[1] / SINGLE_FILE)
    mixed = MixedForm.of(load_spec(made[0]), kind, "cpu")
    for name, weight in weights.items():
        if name.endswith("_proj.weight") or name == "lm_head.weight":
            of_layer = kind if mixed is None else mixed.form(name)
            weights[name] = rounded(weight, "int8" if name == "lm_head.weight" else of_layer)
    save_file(weights, made[1] / SINGLE_FILE)
    return made[0], made[1]


def answers(folder: Path, kind: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of such a model at 150 positions, and transformers' logits with the rounded weights."""
    dense, same = mixture(folder, kind)
    oracle = Oracle(same)
    model = build(load_spec(dense), torch.float32, CPU, Sizes(oracle.max_model_len, 512), kind)
    load_weights(model, dense)
    return Paged(oracle, model=model).run(oracle.tokens, 64), oracle.logits


@pytest.mark.parametrize("kind", ["int8", "int4", "int4_g32"])
def test_a_mixture_in_float32_agrees_with_its_dequantized_weights(tmp_path: Path, kind: Quantization) -> None:
    logits, expected = answers(tmp_path, kind)
    torch.testing.assert_close(logits, expected, rtol=0, atol=3e-4)
    assert torch.equal(logits.argmax(1), expected.argmax(1))


def test_projections_of_two_forms_have_each_its_bias() -> None:
    shape = LinearShape(Split.whole(64), (Split.whole(32), Split.whole(40)), torch.float32, CPU)
    form = DenseForm("int4_g32", MixedForm(num_layers=1, gives_more=False))
    stored = form.stored(["layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj"], shape)
    weights, bias = [random(32, 64), random(40, 64)], random(72)
    out = torch.empty(3, 72)
    stored.matmul(weights, bias).forward(torch.zeros(3, 64), out)
    torch.testing.assert_close(out, bias.expand(3, 72))
    stored.matmul(weights, None).forward(torch.eye(64)[:3], out)
    expected = torch.cat([rounded(weights[0], "int4_g32"), rounded(weights[1], "int8")])
    torch.testing.assert_close(out, expected[:, :3].t(), rtol=0.02, atol=0.02)
