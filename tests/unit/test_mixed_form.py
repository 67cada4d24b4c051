"""Matrices that have more bits with `--quantization int4_g32`, and that these are as many as llama.cpp takes."""

from dataclasses import dataclass
from typing import cast

import pytest

from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.quantization.mixed import MixedForm
from vllm_lite.checkpoint.quantization.on_load import Form, Quantization, quantized_bytes


@dataclass
class Sizes:
    """Fields of a ModelSpec that MixedForm reads, and the widths of its other matrices."""

    num_layers: int
    hidden_size: int
    kv_size: int
    inner_size: int

    def matrices(self, layer: int) -> dict[str, tuple[int, int]]:
        hidden, at = self.hidden_size, f"model.layers.{layer}."
        return {
            f"{at}self_attn.q_proj": (hidden, hidden),
            f"{at}self_attn.k_proj": (self.kv_size, hidden),
            f"{at}self_attn.v_proj": (self.kv_size, hidden),
            f"{at}self_attn.o_proj": (hidden, hidden),
            f"{at}mlp.gate_proj": (self.inner_size, hidden),
            f"{at}mlp.up_proj": (self.inner_size, hidden),
            f"{at}mlp.down_proj": (hidden, self.inner_size),
        }

    @property
    def mixed(self) -> MixedForm:
        found = MixedForm.of(cast("ModelSpec", self), "int4_g32", "cpu")
        assert found is not None
        return found


SMOLLM2 = Sizes(num_layers=30, hidden_size=576, kv_size=192, inner_size=1536)
LLAMA_1B = Sizes(num_layers=16, hidden_size=2048, kv_size=512, inner_size=8192)


def forms(sizes: Sizes) -> dict[str, Form]:
    names = [name for layer in range(sizes.num_layers) for name in sizes.matrices(layer)]
    return {name: sizes.mixed.form(name) for name in names}


def test_rows_of_whole_blocks_have_v_alone_in_8_bits() -> None:
    for name, form in forms(LLAMA_1B).items():
        assert form == ("int8" if name.endswith("v_proj") else "int4_g32"), name


def test_other_rows_have_5_bits_but_for_v_and_the_first_mlp_products_of_most_layers() -> None:
    sensitive = [0, 1, 2, 8, 14, 20, 26, 27, 28, 29]
    for name, form in forms(SMOLLM2).items():
        has_four = name.endswith(("gate_proj", "up_proj")) and int(name.split(".")[2]) not in sensitive
        assert form == ("int8" if name.endswith("v_proj") else "int4_g32" if has_four else "int5_g32"), name


@pytest.mark.parametrize(("sizes", "theirs"), [(SMOLLM2, 5.534), (LLAMA_1B, 4.802)])
def test_the_bits_per_weight_equal_those_of_q4_k_m(sizes: Sizes, theirs: float) -> None:
    """5.534 is counted in a file that llama.cpp has made of such a model; for rows of whole blocks it takes 4.5 bits,
    and 6.5625 of V and of the down projections in half of the layers."""
    bits = weights = 0
    for layer in range(sizes.num_layers):
        for name, shape in sizes.matrices(layer).items():
            bits += 8 * quantized_bytes(shape, sizes.mixed.form(name))
            weights += shape[0] * shape[1]
    assert 0.98 * theirs < bits / weights < 1.01 * theirs


@pytest.mark.parametrize("name", ["layers.3.self_attn.v_proj", "model.layers.11.self_attn.v_proj.weight"])
def test_names_may_be_of_a_layer_or_of_its_tensor(name: str) -> None:
    assert LLAMA_1B.mixed.form(name) == "int8"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.experts.7.down_proj",
        "model.layers.2.mlp.shared_experts.down_proj",
        "model.layers.3.self_attn.qkv_proj",
        "model.layers.3.self_attn.v_proj.bias",
        "model.layers.3.self_attn.kv_b_proj",
        "lm_head",
    ],
)
def test_all_else_has_4_bits(name: str) -> None:
    """Includes the other weights of layers whose own down projection has 8 bits."""
    assert Sizes(num_layers=4, hidden_size=100, kv_size=1, inner_size=1).mixed.form(name) == "int4_g32"


@pytest.mark.parametrize(
    ("quantization", "device"), [("int4", "cpu"), ("int8", "cpu"), ("int4_g32", "cuda"), (None, "cpu")]
)
def test_others_are_not_mixed(quantization: Quantization | None, device: str) -> None:
    assert MixedForm.of(cast("ModelSpec", SMOLLM2), quantization, device) is None
