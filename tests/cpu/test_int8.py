"""--quantization int8 and int4: how far weights are from the checkpoint, and what a model takes and answers."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.linear import quantize
from vllm_lite.layers.matmul import Int8Matmul, NativeMatmul, Quantization, make_matmul
from vllm_lite.models.registry import Sizes, build
from vllm_lite.models.weights import load_weights

CPU = torch.device("cpu")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize(dtype: torch.dtype) -> None:
    weight = random(20, 300).mul(torch.logspace(-6, 2, 20)[:, None]).to(dtype)
    weight[3] = 0
    integers, scales = quantize(weight)
    assert integers.dtype == torch.int8
    assert scales.dtype == torch.float32
    assert integers.abs().amax(dim=1).tolist() == [127 if row != 3 else 0 for row in range(20)]
    error = integers.double() * scales.double()[:, None] - weight.double()
    assert (error.abs() <= scales.double()[:, None] * 0.5001).all()


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


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.02), ("int4", 0.2), ("int4_g32", 0.2)])
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
