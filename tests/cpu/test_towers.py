"""Towers of all families: int8 where the rest of the model is, in pieces as at once, and counted as it is held."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.images import (
    make_gemma3,
    make_gemma4,
    make_llava,
    make_mistral3,
    make_onevision,
    make_qwen,
    make_smolvlm,
    make_unified,
)
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.tensors.headers import read_headers
from vllm_lite.checkpoint.tensors.tensor_names import is_of_tower
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint, is_quantized
from vllm_lite.layers.vision.gemma import Gemma3Tower, UnifiedTower
from vllm_lite.layers.vision.tower import drained
from vllm_lite.models.registry import Sizes, build
from vllm_lite.models.weights import load_weights

FAMILIES = [make_smolvlm, make_qwen, make_mistral3, make_gemma3, make_gemma4, make_unified, make_onevision, make_llava]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda make: make.__name__[5:])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: Callable[[Path], Path] = request.param
    return make(tmp_path_factory.mktemp("tower") / "m")


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def tower_of(folder: Path, quantization: Any = None) -> Any:
    model: Any = build(load_spec(folder), "float32", "cpu", Sizes(64, 64), quantization)
    load_weights(model, folder)
    if isinstance(model.tower, Gemma3Tower):  # its projection is initialised with zeros
        model.tower.table("projection").copy_(torch.eye(*model.tower.table("projection").shape))
    return model.tower


def picture_for(tower: Any) -> torch.Tensor:
    [first, *_] = tower.largest(16)
    return torch.randint(0, 256, first.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_vectors_in_pieces_are_those_at_once(folder: Path) -> None:
    tower = tower_of(folder)
    image = picture_for(tower)
    pauses = list[None]()
    made = drained(tower.in_pieces(image), lambda: pauses.append(None))
    assert len(pauses) >= (1 if isinstance(tower, UnifiedTower) else tower.spec.num_layers)
    torch.testing.assert_close(made, tower.encode([image])[0], rtol=0, atol=0)


def test_a_tower_becomes_int8_with_the_model(folder: Path) -> None:
    dense, small = tower_of(folder), tower_of(folder, "int8")
    image = picture_for(dense)
    (exact,), (made,) = dense.encode([image]), small.encode([image])
    error = float((made - exact).norm() / exact.norm())
    assert 0 < error < 0.08  # of Mistral 3's random tower 0.041 with AMX and 0.060 with AVX512, of most others 0.01


def test_a_plan_counts_the_matrices_that_become_int8(folder: Path) -> None:
    """No other tensor of the tower than the kernels multiply is counted so."""
    checkpoint = Checkpoint(load_spec(folder), read_headers(folder))
    made = tower_of(folder)._matrices.values()
    own = {slot.name for each in made for stack in each.stored.stacks for slot in stack.slots}
    counted = {name for name, shape in checkpoint.shapes.items() if is_quantized(name, shape, checkpoint.spec)}
    assert {name for name in counted if is_of_tower(name)} == own
