"""How large a step may be: what the sizes of one must be to each other."""

import pytest

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
