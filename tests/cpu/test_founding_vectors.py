"""Test vectors of the founding documents that need a worker: slots, padding, grouped-query heads, pool sizes."""

import torch

from tests.attention_steps import attention_shape, step_batch
from tests.cpu.test_input_batch import new_batch, new_request, run
from vllm_lite.attention.reference import ReferenceBackend
from vllm_lite.attention.step_batch import PAD_SLOT
from vllm_lite.checkpoint.sizing import num_host_blocks
from vllm_lite.config import GIB
from vllm_lite.engine.blocks.groups import KVGroup
from vllm_lite.worker.memory.profile import MemoryProfile


def test_slots_follow_the_block_table() -> None:
    inputs = run(new_batch(), new_request(0, [1, 2, 3, 4, 5, 6], block_ids=[[7, 2]]))
    assert inputs.slot_mapping[0].tolist() == [28, 29, 30, 31, 8, 9]


def test_a_cached_position_is_padding_and_is_not_written() -> None:
    entry = new_request(0, [1, 2, 3, 4], block_ids=[[7]], num_computed=3, num_cached=4, num_tokens=1)
    assert run(new_batch(), entry).slot_mapping[0].tolist() == [PAD_SLOT] == [-1]


def test_head_13_of_32_reads_kv_head_3_of_8() -> None:
    backend = ReferenceBackend(attention_shape((32, 8, 8), 4, torch.float32))
    kv = torch.zeros(3, 2, 8, 4, 8)
    kv[2, 1] = torch.arange(8.0)[:, None, None]  # the values of KV head h are h
    batch = step_batch([(1, 4)], [torch.tensor([[2]], dtype=torch.int32)], [torch.tensor([PAD_SLOT])])
    backend.prepare(batch)
    out = torch.empty(1, 32, 8)
    backend.attend(torch.ones(1, 32, 8), kv, batch, 0, out)
    assert out[0, 13].tolist() == [3.0] * 8


def test_blocks_from_memory() -> None:
    """A device of 24 GiB, of which 90 % may be used; a peak of 15 GiB; blocks of 2 MiB; swap space of 4 GiB."""
    sizes = {"total_bytes": 24 * GIB, "block_bytes": 2 * 1024 * 1024, "peak_framework_bytes": 15 * GIB}
    used = {"used_at_step_bytes": 15 * GIB, "used_bytes": 13 * GIB, "framework_bytes": 13 * GIB}
    profile = MemoryProfile(utilization=0.9, initial_used_bytes=0, weights_bytes=13 * GIB, **sizes, **used)
    assert profile.num_blocks == int((21.6 - 15) * 512) == 3379
    assert profile.device_wide_num_blocks(4 * GIB) == (3379, 2048), "the older formula"


def test_swap_space_in_blocks() -> None:
    assert num_host_blocks(4.0, 2 * 1024 * 1024) == 4 * GIB // (2 * 1024 * 1024) == 2048


def test_blocks_behind_a_window() -> None:
    assert KVGroup(0, 4, 8).first_needed(20) == 3, "positions below 13, so blocks 0 to 2"
