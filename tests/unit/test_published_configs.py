"""The config.json of known models, as they were published and as transformers 5 writes them, and damaged ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.errors import ModelError

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "fixtures" / "published.json").read_text())
"""Name -> its config.json without keys for training, and the number of parameters that transformers counts without
vision towers."""
WINDOWS = {"phi-4-mini": 262144, "phi-3.5-mini": 262144, "mistral-7b-v0.1": 4096, "starcoder2-3b": 4096}
HEADS_OF_64 = (
    *("qwen2.5-0.5b", "granite-3.3-2b", "llama-3.2-1b", "tinyllama", "gpt2", "pythia-160m", "falcon-7b", "falcon-40b"),
    *("opt-125m", "bloom-560m", "exaone4-1.2b", "granite-3.0-1b-a400m"),
)
HEADS = {"phi-3.5-mini": 96} | dict.fromkeys(HEADS_OF_64, 64)


def load(folder: Path, raw: Any) -> ModelSpec:
    (folder / "config.json").write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return load_spec(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_read(name: str, tmp_path: Path) -> None:
    spec = load(tmp_path, PUBLISHED[name]["config"])
    assert spec.num_parameters() == PUBLISHED[name]["parameters"]
    assert {layer.attention.window for layer in spec.layers} == {WINDOWS.get(name)}
    assert {layer.attention.head_size for layer in spec.layers} == {HEADS.get(name, 128)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_transformers_writes_it_it_means_the_same(name: str, tmp_path: Path) -> None:
    """Except for transformers' additions: defaults in a wrapper's text part."""
    from transformers import AutoConfig

    spec = load(tmp_path, PUBLISHED[name]["config"])
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "new")
    new = load_spec(tmp_path / "new")
    assert (new.layers, new.norm, new.dtype, new.activation) == (spec.layers, spec.norm, spec.dtype, spec.activation)
    assert new.max_position_embeddings == spec.max_position_embeddings
    if "text_config" not in PUBLISHED[name]["config"]:
        assert new == spec


LLAMA = PUBLISHED["llama-3.2-1b"]["config"]
YARN = {"type": "yarn", "factor": 1e308, "original_max_position_embeddings": 4096}
HOSTILE = {
    "a list of a million types": (LLAMA | {"layer_types": [f"x{i}" for i in range(10**6)]}, "layer_types x0, "),
    "too many types": (LLAMA | {"layer_types": ["full_attention"] * 10**6}, "1000000 entries for 16 layers"),
    "a long name": (LLAMA | {"architectures": ["A" * 10**6]}, "does not write text"),
    "a long number": (LLAMA | {"hidden_size": "7" * 10**6}, "hidden_size: Expected `int`, got `str`"),
    "many layers": (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers: Expected `int` <= 10000"),
    "a window without end": (LLAMA | {"sliding_window": 2**40}, "sliding_window: Expected `int` <= 2147483647"),
    "a part that is a list": (LLAMA | {"text_config": [1]}, "text_config [1] is not an object"),
    "an endless rope": (LLAMA | {"rope_scaling": YARN}, "rope_scaling.factor: Expected `float` <= 1000000.0"),
    "not a number": (json.dumps(LLAMA | {"rope_theta": float("nan")}), "not valid JSON"),
    "deep": ('{"a":' * 10**5, "not valid JSON"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_config_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    raw, reason = HOSTILE[name]
    with pytest.raises(ModelError) as error:
        load(tmp_path, raw)
    message = str(error.value)
    assert reason in message
    assert len(message) < 2500
    assert message.startswith(f"{tmp_path}/config.json: ")
