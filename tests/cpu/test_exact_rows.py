"""--exact-activations, and float32: no product with a quantized weight rounds its rows, in whatever part of a model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.cpu.test_gguf import KINDS_OF_PARTS
from tests.driver import Driver, make_prompt, new_request
from tests.families.mixtures import qwen3
from tests.gguf_files import write_gguf
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.weights.linear import PackedWeight
from vllm_lite.layers.weights.lora import AdapterLimits, Adapters
from vllm_lite.models.registry import Sizes, build
from vllm_lite.models.weights import load_weights

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no native library")
CPU = torch.device("cpu")
FORMS: tuple[Quantization, ...] = ("int8", "fp8", "int4", "int4_g32")


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[PackedWeight]:
    """All packed weights that are made from here on."""
    made: list[PackedWeight] = []
    init = PackedWeight.__init__

    def keep(self: PackedWeight, *args: Any, **settings: Any) -> None:
        init(self, *args, **settings)
        made.append(self)

    monkeypatch.setattr(PackedWeight, "__init__", keep)
    return made


def exact(made: list[PackedWeight]) -> set[bool]:
    """Whether the quantized ones leave their rows as they are: both, if they differ in that."""
    return {bool(weight._record.exact_rows) for weight in made if weight.kind[0] > 100}


def load(path: Path, dtype: torch.dtype, form: Quantization | None, **settings: Any) -> None:
    model = build(load_spec(path), dtype, CPU, Sizes(16, 4, **settings), form)
    load_weights(model, path)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_weights_that_are_quantized_when_they_are_loaded(
    tmp_path: Path, packed: list[PackedWeight], form: Quantization, tied: bool
) -> None:
    path = make_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    for settings, dtype, wanted in (
        ({}, torch.bfloat16, False),
        ({"exact_activations": True}, torch.bfloat16, True),
        ({"exact_activations": True}, torch.float16, True),
        ({}, torch.float32, True),
    ):
        packed.clear()
        load(path, dtype, form, **settings)
        assert exact(packed) == {wanted}


@pytest.mark.parametrize("form", ["int8", "int4_g32"])
def test_experts(tmp_path: Path, packed: list[PackedWeight], form: Quantization) -> None:
    path = qwen3("mixture", {}, mlp_only_layers=[1]).make(tmp_path / "model")
    load(path, torch.bfloat16, form, exact_activations=True)
    assert exact(packed) == {True}
    assert len(packed) > 8


def test_blocks_of_a_gguf_file(tmp_path: Path, packed: list[PackedWeight]) -> None:
    """V is of another type than Q and K, so that they are products side by side; the embedding is the head."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
    folder = make_checkpoint(tmp_path / "checkpoint", num_key_value_heads=4, **sizes)
    file = write_gguf(tmp_path / "blocks.gguf", folder, lambda name: KINDS_OF_PARTS[name.split(".")[-2]])
    load(file, torch.bfloat16, None)
    assert exact(packed) == {False}
    packed.clear()
    load(file, torch.bfloat16, None, exact_activations=True)
    assert exact(packed) == {True}


def test_layers_that_have_adapters(tmp_path: Path, packed: list[PackedWeight]) -> None:
    adapters = Adapters(AdapterLimits(1, 4), 4, torch.bfloat16, CPU)
    load(make_checkpoint(tmp_path / "model"), torch.bfloat16, "int8", adapters=adapters, exact_activations=True)
    assert exact(packed) == {True}


def test_weights_of_a_dense_model_are_not_changed_by_exact_activations(
    tmp_path: Path, packed: list[PackedWeight]
) -> None:
    load(make_checkpoint(tmp_path / "model"), torch.bfloat16, None, exact_activations=True)
    assert packed
    assert not exact(packed)


@pytest.mark.parametrize("setting", [False, True])
def test_the_setting_reaches_the_worker(tmp_path: Path, packed: list[PackedWeight], setting: bool) -> None:
    model = make_checkpoint(tmp_path / "model")
    driver = Driver(model, dtype="bfloat16", quantization="int4_g32", exact_activations=setting)
    assert exact(packed) == {setting}
    assert "x 4 bits (a scale for 32 inputs)" in driver.ready.kernels["matrices"]
    driver.run(new_request(0, make_prompt(9), [1, 2]))
    driver.decode(0, count=3)
    assert len(driver.got[0]) == 4
