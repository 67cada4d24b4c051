"""ALiBi's slopes compared with transformers'."""

import pytest
import torch

from vllm_lite.checkpoint.families.bloom import alibi_slopes


@pytest.fixture(scope="module")
def oracle():
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    return build_alibi_tensor


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 6, 7, 8, 12, 14, 16, 24, 32, 71, 96, 112, 128])
def test_slopes_match_transformers(oracle, num_heads):
    """The second of two tokens has the slopes themselves. Powers are rounded once here, and there where it likes."""
    expected = oracle(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    slopes = torch.tensor(alibi_slopes(num_heads))
    assert slopes.shape == (num_heads,)
    assert torch.allclose(slopes, expected, rtol=2.0**-22, atol=0)


def test_a_model_without_heads_has_none():
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        alibi_slopes(0)
