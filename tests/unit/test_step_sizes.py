"""Size limits of a step, and how they must relate to each other."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_lite.client.engines.launch import resolve
from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.errors import ConfigError


def resolved(**values: object) -> ResolvedConfig:
    config = EngineConfig.check({"device": "cpu", **values})
    return config.resolve(max_position_embeddings=1000, dtype="float32", model_path="m")


def test_a_step_has_a_token_for_every_sequence() -> None:
    assert resolved(max_num_batched_tokens=20).max_num_seqs == 20, "the default is lowered"
    assert resolved(max_num_batched_tokens=20, max_num_seqs=20).max_num_seqs == 20
    with pytest.raises(ConfigError, match=r"at least max_num_seqs \(21\), one for every sequence of a step, got 20"):
        resolved(max_num_batched_tokens=20, max_num_seqs=21)


def test_without_chunks_a_step_holds_a_whole_context() -> None:
    assert resolved(enable_chunked_prefill=False).max_num_batched_tokens == 1000
    with pytest.raises(ConfigError, match=r"at least max_model_len \(1000\), got 999"):
        resolved(enable_chunked_prefill=False, max_num_batched_tokens=999)
    with pytest.raises(ConfigError, match="max_itl_ms cuts prompts into chunks, and needs enable_chunked_prefill"):
        resolved(enable_chunked_prefill=False, max_itl_ms=20)


def step_tokens(folder: Path, config: dict[str, Any], *, streams: bool = False, **settings: Any) -> int:
    """The most tokens of a step of a model with such a config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    given = EngineConfig.check({"model": str(folder), "device": "cpu", **settings})
    return resolve(given, streams=streams).max_num_batched_tokens


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1000,
    "rms_norm_eps": 1e-5,
}
BERT: dict[str, Any] = LLAMA | {"architectures": ["BertModel"], "hidden_act": "gelu", "type_vocab_size": 2}


@pytest.mark.parametrize(
    ("config", "settings", "tokens"),
    [
        ({}, {}, 4096),
        ({}, {"streams": True}, 512),
        ({}, {"max_num_batched_tokens": 100}, 100),
        ({}, {"max_itl_ms": 50}, 512),
        ({}, {"enable_chunked_prefill": False}, 1000),
        ({"vocab_size": 1 << 23}, {}, (2 << 40) // (2 * 64 * (1 << 23) + 2 * (4 * 64 + 3 * 128 + 2) * 64 + 64)),
        ({"vocab_size": 1 << 26}, {}, 512),
        ({"max_position_embeddings": 1 << 17}, {}, 1024),
        ({"max_position_embeddings": 1 << 20}, {}, 512),
        ({"max_position_embeddings": 1 << 20}, {"max_model_len": 1000}, 4096),
    ],
)
def test_steps_are_larger_where_no_next_token_waits(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, Any], tokens: int
) -> None:
    """Up to the size at which a layer takes long, and unless the size is set."""
    assert step_tokens(tmp_path, LLAMA | config, **settings) == tokens


@pytest.mark.parametrize(("longest", "tokens"), [(512, 2048), (8192, 8192)])
def test_steps_of_encoders_hold_their_longest_text(tmp_path: Path, longest: int, tokens: int) -> None:
    assert step_tokens(tmp_path, BERT | {"max_position_embeddings": longest}) == tokens
