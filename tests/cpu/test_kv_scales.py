"""The scales of a float8 KV cache in a checkpoint: their names, errors and effects."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.cpu.test_int8_cache import last_logits
from tests.driver import Driver
from tests.quantized_tensors import say_quantized
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.tensors.headers import SINGLE_FILE
from vllm_lite.checkpoint.tensors.kv_scales import KVScales, has_kv_scales, read_kv_scales
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ModelError

NUM_LAYERS = 2
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", num_hidden_layers=NUM_LAYERS)


def add(model: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = model / SINGLE_FILE
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def add_scales(model: Path, *scales: tuple[float, float], names: tuple[str, str] = ("k_scale", "v_scale")) -> None:
    """A pair for each layer."""
    for which, name in enumerate(names):
        each = {f"model.layers.{i}.self_attn.{name}": torch.tensor(pair[which]) for i, pair in enumerate(scales)}
        add(model, each)


SPELLINGS = [
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
]


@pytest.mark.parametrize("names", SPELLINGS, ids=str)
def test_spellings(model: Path, names: tuple[str, str]) -> None:
    assert not has_kv_scales(model)
    assert read_kv_scales(model, NUM_LAYERS) == ()
    add_scales(model, (0.5, 2.0), (0.25, 4.0), names=names)
    assert has_kv_scales(model)
    assert read_kv_scales(model, NUM_LAYERS) == (KVScales(0.5, 2.0), KVScales(0.25, 4.0))
    Driver(model, kv_cache_dtype="fp8")  # which finds no tensor unexpected


def test_one_scale_for_both(model: Path) -> None:
    add(model, {f"model.layers.{i}.self_attn.kv_scale": torch.tensor([0.5 + i]) for i in range(NUM_LAYERS)})
    assert read_kv_scales(model, NUM_LAYERS) == (KVScales(0.5, 0.5), KVScales(1.5, 1.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_of_numbers(model: Path, dtype: torch.dtype) -> None:
    for name in ("k_scale", "v_scale"):
        add(model, {f"model.layers.{i}.self_attn.{name}": torch.tensor([0.40625], dtype=dtype) for i in range(2)})
    assert read_kv_scales(model, NUM_LAYERS) == (KVScales(0.40625, 0.40625),) * NUM_LAYERS


def k_scale(numbers: Any) -> dict[str, torch.Tensor]:
    return {"model.layers.1.self_attn.k_scale": torch.tensor(numbers)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            k_scale([1.0, 2.0]),
            r"layers\.1\.self_attn\.k_scale has 2 numbers; a KV cache has one scale a layer, not",
        ),
        (k_scale(0.0), "k_scale is 0; a scale must be a positive number; give --kv-cache-dtype bfloat16 or int8"),
        (k_scale(-1.0), "k_scale is -1; a scale must be"),
        (k_scale(float("nan")), "k_scale is nan"),
        (k_scale(float("inf")), "k_scale is inf"),
        ({"model.layers.1.self_attn.attn.k_scale": torch.tensor(3.0)}, "layer 1 has several scales of K"),
    ],
)
def test_invalid_scales_are_refused(model: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    add_scales(model, (1.0, 1.0), (1.0, 1.0))
    add(model, tensors)
    with pytest.raises(ModelError, match=message):
        Driver(model, kv_cache_dtype="fp8")
    Driver(model, kv_cache_dtype="int8")


def test_layers_have_both_or_none_has_any(model: Path) -> None:
    add_scales(model, (1.0, 1.0))
    with pytest.raises(ModelError, match="layer 1 has no k_scale and others have"):
        read_kv_scales(model, NUM_LAYERS)
    add(model, k_scale(1.0))
    with pytest.raises(ModelError, match="layer 1 has no v_scale and others have"):
        read_kv_scales(model, NUM_LAYERS)
    add_scales(model, *[(1.0, 1.0)] * 3)
    assert len(read_kv_scales(model, NUM_LAYERS)) == NUM_LAYERS, "layers that are not read have some, too"


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_attention_has_the_scales_of_its_layer(model: Path, implementation: str) -> None:
    """In the kernels and in the reference. One layer's scales are so small that nearly all of its K and V are clipped;
    swapped with the other layer's, they give another result."""
    options = {"model_impl": implementation, "kv_cache_dtype": "fp8"}
    plain = last_logits(model, **options)
    add_scales(model, (0.01, 0.02), (1e-5, 2e-5))
    ours, reference = (last_logits(model, attention_backend=name, **options) for name in ("auto", "reference"))
    assert torch.allclose(ours, reference, rtol=0, atol=1e-3)
    assert not torch.allclose(ours, plain, rtol=0, atol=1e-2)
    add_scales(model, (1e-5, 2e-5), (0.01, 0.02))
    assert not torch.allclose(last_logits(model, **options), ours, rtol=0, atol=1e-2)


def test_powers_of_two_that_fit_change_next_to_nothing(model: Path) -> None:
    """K and V of this model are far from float8's limits on both sides."""
    plain = last_logits(model, kv_cache_dtype="fp8")
    add_scales(model, (0.25, 0.5), (0.5, 0.125))
    assert (last_logits(model, kv_cache_dtype="fp8") - plain).abs().max() < plain.std() * 0.1


@pytest.mark.parametrize(
    ("kind", "said"),
    [("int8", "in int8 has its own for each token and head"), ("fp8_e5m2", "in fp8_e5m2 has none"), ("auto", None)],
)
def test_other_caches_do_not_take_them(
    model: Path, kind: str, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    plain = last_logits(model, kv_cache_dtype=kind)
    add_scales(model, (1e-5, 1e-5), (1e-5, 1e-5))
    caplog.clear()
    with caplog.at_level("INFO"):
        assert torch.equal(last_logits(model, kv_cache_dtype=kind), plain)
    lines = [record.getMessage() for record in caplog.records if "KV scales" in record.getMessage()]
    assert len(lines) == (said is not None)
    assert said is None or said in lines[0]


def test_a_checkpoint_says_which_cache_auto_is(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    def resolve(config: EngineConfig) -> str:
        kv = load_spec(model)
        return config.resolve(max_position_embeddings=512, dtype="float32", model_path=str(model), kv=kv).kv_cache_dtype

    def resolved(**scheme: Any) -> str:
        config = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME | scheme}
        say_quantized(model, config)
        assert load_spec(model).quantization is None
        return resolve(EngineConfig())

    for other in ({"type": "int"}, {"num_bits": 4}, {"strategy": "attn_head"}, {"symmetric": False}):
        assert resolved(**other) == "float32"
    assert resolved() == "fp8_e4m3"
    assert resolve(EngineConfig.check({"kv_cache_dtype": "bfloat16"})) == "bfloat16"
    Driver(model, kv_cache_dtype="fp8")
    assert [line for line in caplog.messages if "asks for an fp8 KV cache and has no scales" in line]


def test_a_config_without_any_scheme_is_refused(model: Path) -> None:
    say_quantized(model, {"quant_method": "compressed-tensors", "config_groups": {}})
    with pytest.raises(ModelError, match="has no scheme for weights"):
        load_spec(model)
