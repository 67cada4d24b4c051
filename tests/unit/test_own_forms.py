"""--quantization and --load-format with the names of checkpoints' own forms."""

from typing import Any

import pytest
from msgspec.structs import replace

from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.fitting import check_settings, on_load
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.quantization.spec import AnyQuantization, Awq, BlockScaled, Gguf, Gptq, PackedInts
from vllm_lite.config import EngineConfig, demo_folder
from vllm_lite.errors import ConfigError

AWQ, GPTQ, PACKED = Awq(group_size=128), Gptq(bits=4, group_size=128), PackedInts(bits=4, group_size=128)
FP8 = BlockScaled(numbers="float8", block=(128, 128), scale="weight_scale_inv")
GGUF = Gguf(kinds={"model.layers.0.mlp.up_proj": "Q4_0"})


def stored_as(form: AnyQuantization | None) -> ModelSpec:
    return replace(load_spec(demo_folder()), quantization=form)


def config(**settings: Any) -> EngineConfig:
    return EngineConfig.check(settings)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("awq", AWQ),
        ("gptq", GPTQ),
        ("compressed-tensors", PACKED),
        ("compressed-tensors", FP8),
        ("fp8", FP8),
        ("gguf", GGUF),
        (None, AWQ),
        (None, None),
    ],
)
def test_the_name_of_the_own_form_changes_nothing(name: str | None, form: AnyQuantization | None) -> None:
    assert on_load(config(quantization=name), stored_as(form)) is None


def test_dense_weights_get_the_form() -> None:
    assert on_load(config(quantization="fp8"), stored_as(None)) == "fp8"
    assert on_load(config(quantization="int8"), stored_as(FP8)) == "int8", "refused where weights get their forms"


@pytest.mark.parametrize(
    ("name", "form", "found"),
    [("awq", None, "not quantized"), ("gguf", AWQ, "AWQ with 4 bits"), ("gptq", AWQ, "AWQ with 4 bits")],
)
def test_the_name_of_another_form_is_refused(name: str, form: AnyQuantization | None, found: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization {name} is a form of checkpoints, and this one is {found};"):
        on_load(config(quantization=name), stored_as(form))


def test_the_format_of_files() -> None:
    check_settings(config(load_format="gguf"), stored_as(GGUF))
    check_settings(config(load_format="safetensors"), stored_as(FP8))
    with pytest.raises(ConfigError, match="load_format gguf is not this checkpoint's, which is in safetensors;"):
        check_settings(config(load_format="gguf"), stored_as(None))
    with pytest.raises(ConfigError, match="load_format safetensors is not this checkpoint's, which is in GGUF;"):
        check_settings(config(load_format="safetensors"), stored_as(GGUF))
