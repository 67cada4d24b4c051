"""The cache operations through the emulator, and the errors of their Python side."""

import pytest
import torch

from tests.kernels.emulator import EmulatorLauncher
from vllm_lite.kernels.cuda import cache_ops
from vllm_lite.kernels.cuda.cache_ops import CacheSlots
from vllm_lite.kernels.ops import Rotation

CPU = torch.device("cpu")
SLOTS = torch.arange(3)


def refused(words: str, kv: torch.Tensor, key: torch.Tensor | None = None, slots: torch.Tensor = SLOTS) -> None:
    key = torch.zeros(3, 2, 8, dtype=torch.bfloat16) if key is None else key
    to = CacheSlots(kv, slots)
    with pytest.raises(ValueError, match=words):
        cache_ops.reshape_and_cache(EmulatorLauncher(), key, torch.zeros_like(key), to)
    rotation = Rotation(key[:, 0], key[:, 0])
    with pytest.raises(ValueError, match=words):
        cache_ops.rope_and_cache(EmulatorLauncher(), key, key, torch.zeros_like(key), rotation, to)


def test_wrong_shapes_are_refused() -> None:
    kv = torch.zeros(4, 2, 2, 16, 8, dtype=torch.bfloat16)
    refused(r"kv must be \[num_blocks, 2, 2, block_size, 8\]", kv[..., :4])
    refused("kv must be", kv[:, :, :1])
    refused("kv must be", kv.transpose(3, 4))
    refused("kv must be", kv[0])
    refused(r"slots must be torch.int64 \[3\]", kv, slots=SLOTS[:2])
    refused(r"slots must be torch.int64 \[3\]", kv, slots=SLOTS.int())
    refused("cannot take K and V of torch.bfloat16", kv.half())
    refused("must be adjacent", kv, torch.zeros(3, 2, 16, dtype=torch.bfloat16)[:, :, :8])


def test_wrong_arguments_of_rope_and_cache_are_refused() -> None:
    key = torch.zeros(3, 2, 8)
    to = CacheSlots(torch.zeros(4, 2, 2, 16, 8), SLOTS)
    rotation = Rotation(torch.zeros(3, 8), torch.zeros(3, 8))
    for query in (key[:2], key.half(), torch.zeros(3, 2, 4)):
        with pytest.raises(ValueError, match="query must be like key"):
            cache_ops.rope_and_cache(EmulatorLauncher(), query, key, key, rotation, to)
    with pytest.raises(ValueError, match="value must be"):
        cache_ops.rope_and_cache(EmulatorLauncher(), key, key, key.half(), rotation, to)
    with pytest.raises(ValueError, match="sin must be"):
        cache_ops.rope_and_cache(EmulatorLauncher(), key, key, key, Rotation(rotation.cos, rotation.sin[:2]), to)


def test_wrong_arguments_of_the_others_are_refused() -> None:
    key = torch.zeros(3, 2, 8)
    caches = (torch.zeros(4, 2, 2, 16, 4), torch.zeros(4, 2, 8, 16))
    with pytest.raises(ValueError, match=r"key_cache must be .*\[4, 2, 2, 16, 4\]"):
        cache_ops.reshape_and_cache_x(EmulatorLauncher(), key, key, (caches[1], caches[1]), SLOTS)
    with pytest.raises(ValueError, match="multiple of 4, got 6"):
        cache_ops.reshape_and_cache_x(EmulatorLauncher(), key[..., :6], key[..., :6], caches, SLOTS)
    pool = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="the pool must be contiguous"):
        cache_ops.copy_blocks(EmulatorLauncher(), pool[:, :4], torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="pairs must be"):
        cache_ops.copy_blocks(EmulatorLauncher(), pool, torch.zeros(1, 2, dtype=torch.int32))
