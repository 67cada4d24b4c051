"""Every kind of rope turns as in transformers, and the order of the kernels changes nothing that a checkpoint means."""

import logging
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.driver import Driver
from vllm_lite.checkpoint.layer_specs.rope import Dynamic, LongRope, Rope, RopeContext, Yarn, read_rope
from vllm_lite.errors import ModelError
from vllm_lite.kernels.ops import Rotation, TorchOps
from vllm_lite.layers.attention.rope import RotaryEmbedding, inverse_frequencies

CPU = torch.device("cpu")
POSITIONS = 512
"""max_position_embeddings of every model here."""
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 128}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 64},
    "llama3 of its own length": LLAMA3,
    "yarn": YARN,
    "yarn of its own factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
    "yarn with betas": YARN | {"beta_fast": 24.0, "beta_slow": 2.0},
    "yarn not truncated": YARN | {"truncate": False, "rope_theta": 150000.0},
    "yarn in one pair": YARN | {"beta_fast": 1.5, "beta_slow": 1.5, "truncate": False},
    "yarn that shrinks": YARN | {"factor": 0.5},
    "yarn mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn mscale alone": YARN | {"mscale": 0.7},
    "yarn attention_factor": YARN | {"attention_factor": 1.7},
    "longrope": LONG,
    "longrope factor": LONG | {"factor": 32.0},
    "longrope that shrinks": LONG | {"factor": 1.0},
    "longrope attention_factor": LONG | {"attention_factor": 1.3},
    "proportional": {"rope_type": "proportional"},
    "proportional factor": {"rope_type": "proportional", "factor": 8.0},
}


def rope_and_theirs(kind: str, head_size: int, share: float, length: int) -> tuple[Rope, torch.Tensor, float]:
    """Our rope, and transformers' frequencies and factor where a sequence has `length` tokens."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = {"rope_theta": 10000.0, "partial_rotary_factor": share} | KINDS[kind]
    if values["rope_type"] == "longrope":
        pairs = int(head_size * share) // 2
        values["short_factor"] = [1.0 + 0.05 * pair for pair in range(pairs)]
        values["long_factor"] = [1.5 + 0.4 * pair for pair in range(pairs)]
    raw = LlamaConfig(rope_parameters=dict(values), head_dim=head_size, max_position_embeddings=POSITIONS)
    frequencies, factor = ROPE_INIT_FUNCTIONS[values["rope_type"]](raw, CPU, seq_len=length)
    rope = read_rope(values, "rope_parameters", RopeContext(head_size, max_position_embeddings=POSITIONS))
    return rope, frequencies, factor


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_match_transformers(kind: str) -> None:
    for head_size, share, length in product((24, 64, 80, 96, 128, 256), (1.0, 0.75, 0.5), (100, 1500)):
        rope, expected, factor = rope_and_theirs(kind, head_size, share, length)
        ours = inverse_frequencies(rope, head_size, length)
        assert torch.allclose(ours, expected, rtol=1e-6, atol=0), (head_size, share, length)
        assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


def test_each_of_these_turns_otherwise() -> None:
    """Otherwise the test above could not detect that one kind is read as another."""
    half = Rope(10000.0, rotary_size=32)
    turned = {"default": (1.0, *inverse_frequencies(half, 64, 1500).tolist())}
    for kind in KINDS.keys() - {"yarn mscale alone"}:  # which counts with mscale_all_dim only
        rope, _, _ = rope_and_theirs(kind, 64, 0.5, 1500)
        turned[kind] = (rope.attention_factor, *inverse_frequencies(rope, 64, 1500).tolist())
    assert len(set(turned.values())) == len(turned)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_size", [None, 8, 18])
def test_the_kernels_order_rotates_the_checkpoints_pairs(interleaved: bool, rotary_size: int | None) -> None:
    """Against the plain rotation of pairs as complex numbers, in the checkpoint's own order."""
    size, rope = 24, Rope(100.0, rotary_size=rotary_size, interleaved=interleaved, attention_factor=1.5)
    turning = rotary_size or size
    heads = torch.randn(5, 3, size, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([0, 3, 17, 90, 4])
    expected = heads.clone()
    for pair in range(turning // 2):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + turning // 2)
        number = torch.complex(heads[..., first], heads[..., second]).to(torch.complex128)
        angle = positions.double() * 100.0 ** (-2 * pair / turning)
        turned = 1.5 * number * torch.polar(torch.ones_like(angle), angle)[:, None]
        expected[..., first], expected[..., second] = turned.real.float(), turned.imag.float()

    order = rope.order(size)
    assert (order is None) == (rotary_size is None and not interleaved)
    order = order or tuple(range(size))
    assert sorted(order) == list(range(size))
    ours = heads[..., order].contiguous()
    rotation = Rotation(torch.empty(5, size), torch.empty(5, size))
    RotaryEmbedding(rope, size, 100, device=CPU).select(positions, rotation)
    TorchOps().rotate(ours, rotation)
    assert torch.allclose(ours, expected[..., order], atol=1e-5)


@pytest.mark.parametrize(
    ("scaling", "reach"),
    [
        (None, 512),
        (Dynamic(3.0, 512), 1536),
        (Yarn(8.0, 128), 1024),
        (Yarn(2.0, 128), 512),
        (LongRope((1.0,), (2.0,), 64), 512),
    ],
)
def test_a_sequence_may_become_as_long_as_the_rope_was_extended_to(scaling: Any, reach: int) -> None:
    assert Rope(1e4, scaling).reach(512) == reach


def test_the_effect_of_max_model_len_is_described() -> None:
    longrope, dynamic = Rope(1e4, LongRope((1.0,), (2.0,), 64)), Rope(1e4, Dynamic(2.0, 64))
    assert "max_model_len 64 fits the 64" in str(longrope.pinned(64))
    assert "short factors" in str(longrope.pinned(64))
    assert "max_model_len 65 exceeds the 64" in str(longrope.pinned(65))
    assert "long factors" in str(longrope.pinned(65))
    assert "theta is not changed" in str(dynamic.pinned(64))
    assert "theta is made for 65 positions" in str(dynamic.pinned(65))
    assert Rope(1e4).pinned(64) is None
    assert Rope(1e4, Yarn(8.0, 128)).pinned(4096) is None


def test_longrope_needs_a_factor_for_each_pair() -> None:
    values = LONG | {"short_factor": [1.0] * 12, "long_factor": [1.0] * 11}
    with pytest.raises(ModelError, match="12 and 11 numbers; they must have 12"):
        read_rope(values, "rope_scaling", RopeContext(24, max_position_embeddings=POSITIONS))


@pytest.mark.parametrize(("max_model_len", "said"), [(64, "short factors"), (200, "long factors")])
def test_a_worker_logs_the_effect_of_max_model_len(
    tmp_path: Path, max_model_len: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    values = LONG | {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    with caplog.at_level(logging.INFO, "vllm_lite"):
        Driver(make_checkpoint(tmp_path, rope_parameters=values), max_model_len=max_model_len)
    (line,) = [record.getMessage() for record in caplog.records if "factors are used" in record.getMessage()]
    assert said in line
