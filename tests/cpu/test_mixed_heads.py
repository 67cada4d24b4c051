"""Layers that differ in the number of heads, of KV heads and in head size, in one model over one pool."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from micro.step import step_bytes

from tests import mixed_heads
from tests.driver import BLOCK, NUM_BLOCKS, Driver, make_prompt, new_request
from tests.mixed_heads import FULL, MixedOracle, make_mixed
from tests.paged import BLOCK_SIZE, Paged
from tests.plays import graphs_of, run_both
from tests.scheduler_rig import Rig
from tests.thread_group import on_ranks
from vllm_lite.attention.select import select_backend
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.kernels import cpu
from vllm_lite.protocol.control import Start
from vllm_lite.protocol.step import BlockOp, Finish, ModelOutput, NewRequest, Preempt, Resume, SchedulerOutput
from vllm_lite.tools.plan import PlanConfig, _Sizes, make_plan
from vllm_lite.tools.plan_checkpoint import load
from vllm_lite.worker.memory.cache_engine import CacheEngine
from vllm_lite.worker.progress import Progress
from vllm_lite.worker.worker import Worker

MAX_DIFFERENCE = 1e-3
"""Maximum difference of logits of size 10 in float32 from those in float64."""


@pytest.fixture(autouse=True)
def known_family(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed_heads.install(monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixed(tmp_path_factory.mktemp("mixed") / "model")


@pytest.fixture
def oracle(checkpoint: Path) -> MixedOracle:
    return MixedOracle(checkpoint)


# ---- one pool


def test_groups_have_blocks_of_the_same_bytes(oracle: MixedOracle) -> None:
    """A full layer has 2 * 24 elements of a token's K, and two have 96; a sliding one has 40, and four have 160. A
    block of either group has as many, for 16 tokens' K and V in float32."""
    assert [group.layers for group in oracle.spec.kv_groups] == [(0, 2), (1, 3, 4, 5)]
    assert [group.kv_shape(16) for group in oracle.spec.kv_groups] == [(2, 2, 2, 16, 24), (4, 2, 1, 16, 40)]
    assert oracle.spec.kv_block_bytes(16, 4) == 160 * 2 * 16 * 4
    assert oracle.spec.kv_block_bytes(16, 4) == CacheEngine(oracle.spec, 16, 2, 0, *FLOAT32).pool[0].nbytes


FLOAT32 = torch.float32, torch.device("cpu")


def test_each_layer_has_its_shape_and_place_in_a_block(oracle: MixedOracle) -> None:
    """Elements are counted by hand: layer after layer of the group, then K and V, KV heads, tokens, elements."""
    cache = CacheEngine(oracle.spec, BLOCK_SIZE, 5, 0, *FLOAT32)
    views, pool = cache.layer_views(), cache.pool
    assert [tuple(view.shape) for view in views] == [
        (5, 2, kv_heads, BLOCK_SIZE, size) for _, kv_heads, size, _ in mixed_heads.LAYERS
    ]
    block, which, token, element = 3, 1, 5, 17
    for group in oracle.spec.kv_groups:
        for place, layer in enumerate(group.layers):
            _, kv_heads, size, _ = mixed_heads.LAYERS[layer]
            head = kv_heads - 1
            at = (((place * 2 + which) * kv_heads + head) * BLOCK_SIZE + token) * size + element
            pool[block, at] = 1 + layer
            assert views[layer][block, which, head, token, element] == 1 + layer
            assert views[layer].count_nonzero() == 1
            pool.zero_()


def test_writes_to_a_block_of_one_group_change_no_other_group(oracle: MixedOracle) -> None:
    """Layers of a group write only to the blocks of this group, and never to padding."""
    cache = CacheEngine(oracle.spec, BLOCK_SIZE, 7, 0, *FLOAT32)
    views = cache.layer_views()
    for index, group in enumerate(oracle.spec.kv_groups):
        for layer in group.layers:
            views[layer][2 * index + 1 : 2 * index + 3] = 1 + layer
    assert not cache.pool[0].any()
    for index, group in enumerate(oracle.spec.kv_groups):
        used = math.prod(group.kv_shape(BLOCK_SIZE))
        for block in cache.pool[2 * index + 1 : 2 * index + 3]:
            places = block[:used].view(len(group.layers), -1)
            assert [set(place.tolist()) for place in places] == [{1.0 + layer} for layer in group.layers]
            assert not block[used:].any()


# ---- logits


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_logits_match_plain_torch_whatever_the_chunk(oracle: MixedOracle, backend: str, chunk: int) -> None:
    if backend == "cpu" and not cpu.available():
        pytest.skip("needs the native library")
    paged = Paged(oracle)
    paged.backend = select_backend(paged.shape, backend)
    assert oracle.difference(paged.run(oracle.tokens, chunk)) < MAX_DIFFERENCE


def _shared_memory(views: list[torch.Tensor]) -> list[torch.Tensor]:
    """The second layer of the full group in the memory of the first."""
    return [views[0], views[1], views[0], *views[3:]]


def _in_its_own_keys(views: list[torch.Tensor]) -> list[torch.Tensor]:
    """Give a sliding layer a V that begins in the last token of its K."""
    view = views[3]
    strides = (view.stride(0), view.stride(1) - view.stride(3), *view.stride()[2:])
    views[3] = view.as_strided(view.shape, strides, view.storage_offset())
    return views


def _other_kinds_shape(views: list[torch.Tensor]) -> list[torch.Tensor]:
    """A sliding layer with the strides of a full one: its tokens' rows overlap."""
    view = views[4]
    views[4] = view.as_strided(view.shape, (*view.stride()[:3], 24, 1), view.storage_offset())
    return views


@pytest.mark.parametrize("damage", [_shared_memory, _in_its_own_keys, _other_kinds_shape])
def test_a_wrong_view_shows(oracle: MixedOracle, damage: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
    paged = Paged(oracle)
    paged.kv = damage(paged.kv)
    assert not oracle.difference(paged.run(oracle.tokens, 7)) < 0.01


@pytest.mark.parametrize("num_heads", [1, 2])
def test_heads_of_512_beside_heads_of_256(tmp_path: Path, num_heads: int) -> None:
    """The sizes of Gemma 4's layers."""
    layers = ((2 * num_heads, num_heads, 512, None), (2, 2, 256, 19), (2, 2, 256, 19))
    oracle = MixedOracle(make_mixed(tmp_path / "model", layers))
    assert oracle.difference(Paged(oracle).run(oracle.tokens, 64)) < MAX_DIFFERENCE


# ---- ranks


@pytest.mark.parametrize(
    ("layers", "groups", "elements"),
    [
        (mixed_heads.LAYERS, [(0, 2), (1, 3), (4, 5)], 2 * 40),
        ((FULL, (4, 4, 40, 11), FULL), [(0, 2), (1,)], 80),
    ],
    ids=["fewer KV heads than ranks", "more"],
)
def test_two_ranks(
    tmp_path: Path, layers: tuple[mixed_heads.Heads, ...], groups: list[tuple[int, ...]], elements: int
) -> None:
    """Each rank has one of 2 KV heads of the full layers, 24 elements; of the others the only one, 40 elements, or 2 of
    4."""
    oracle = MixedOracle(make_mixed(tmp_path / "model", layers), world=2)
    assert [group.layers for group in oracle.spec.kv_groups] == groups
    ranks = [oracle.spec.per_rank(Shard(rank, 2)) for rank in range(2)]
    assert {rank.kv_block_bytes(BLOCK_SIZE, 4) for rank in ranks} == {elements * 2 * BLOCK_SIZE * 4}
    assert oracle.spec.kv_block_bytes(BLOCK_SIZE, 4, tp=2) == elements * 2 * BLOCK_SIZE * 4
    for logits in on_ranks(2, lambda rank: Paged(oracle, model=oracle.load(rank)).run(oracle.tokens, 7)):
        assert oracle.difference(logits) < MAX_DIFFERENCE


# ---- a plan


@pytest.mark.parametrize("tp", [1, 2])
def test_a_plan_has_the_blocks_and_buffers_of_a_worker(checkpoint: Path, tp: int) -> None:
    config = PlanConfig.check({"model": str(checkpoint), "memory": "8GiB", "tensor_parallel_size": tp})
    plan = make_plan(config, load(config))
    worker = Worker(_Sizes(config, load(config)).config, 0, Progress())
    assert plan.block_bytes == tp * worker.block_bytes
    groups = worker.spec.kv_groups
    assert plan.kv_bytes_per_token == len(groups) * plan.block_bytes // config.block_size
    assert plan.kv_tokens == (plan.num_blocks - 1) // len(groups) * config.block_size
    if tp == 1:
        worker.load()
        buffers: Any = worker.model.buffers  # type: ignore[attr-defined]
        tensors = [buffers.residual, buffers.hidden, buffers.qkv, buffers.attended, buffers.gate_up, buffers.activated]
        tensors += [tensor for pair in buffers.rotations for tensor in pair] + [table.table for table in buffers.tables]
        needed = sum(tensor.nbytes for tensor in tensors)
        assert needed <= plan.activations_bytes - 3 * 4 * plan.max_num_seqs * 384 < 1.5 * needed


@pytest.mark.parametrize(("cached", "element", "scale"), [("auto", 2, 0), ("fp8_e4m3", 1, 0), ("int8", 1, 4)])
def test_a_decode_step_reads_the_kv_of_all_groups(checkpoint: Path, cached: str, element: int, scale: int) -> None:
    """Two full layers read K and V of 2 heads of 24 elements for 30 tokens, four sliding ones one of 40 for the last
    11; and the scale of each head of a token, where there is one."""
    given = {"model": str(checkpoint), "memory": "8GiB", "dtype": "bfloat16", "kv_cache_dtype": cached}
    config = PlanConfig.check(given)
    resolved = _Sizes(config, load(config)).config
    one, three = (step_bytes(resolved, load(config), num_streams, 30) for num_streams in (1, 3))
    full, sliding = 24 * element + scale, 40 * element + scale
    assert three - one == 2 * (2 * 2 * 2 * full * 30 + 4 * 2 * sliding * 11)


# ---- a worker


def test_the_worker_tells_the_engine_its_groups(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    assert [(group.kind, group.num_layers, group.window) for group in driver.ready.groups] == [
        ("full", 2, None),
        ("sliding", 4, 11),
    ]
    assert driver.ready.block_bytes == driver.pool[0].nbytes == 160 * 2 * BLOCK * 4


@pytest.mark.skipif(not cpu.available(), reason="needs the native library")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_steps_have_the_bits_of_eager_ones(checkpoint: Path, dtype: str) -> None:
    eager, graphed = run_both(checkpoint, seed=5, num_steps=60, on=None, dtype=dtype)
    assert graphs_of(graphed).num_replays > 15
    assert eager.got == graphed.got


@pytest.mark.parametrize("swapped", [True, False], ids=["swapped", "control: overwritten"])
def test_blocks_of_every_shape_survive_a_swap(checkpoint: Path, oracle: MixedOracle, swapped: bool) -> None:
    """By value in the views of each group, and by the tokens that follow."""
    driver = Driver(checkpoint, num_host_blocks=8)
    views, groups = driver.worker.runner.cache_engine.layer_views(), oracle.spec.kv_groups
    prompt, tables = make_prompt(20, seed=4), [[1, 2], [3, 4]]
    request = new_request(0, prompt, [])
    request.block_ids[:] = tables
    driver.run(request)
    driver.decode(0, count=2)
    held = {
        layer: views[layer][table].clone()
        for group, table in zip(groups, tables, strict=True)
        for layer in group.layers
    }
    assert all(value.count_nonzero() for value in held.values())
    out = tuple((int(BlockOp.SWAP_OUT), block, NUM_BLOCKS + 7 - block) for block in range(1, 5))
    other = new_request(1, make_prompt(20, seed=5), [])
    other.block_ids[:] = [[4, 1], [2, 3]]
    driver.run(Preempt(0), other, ops=out)
    driver.run(Finish(1))
    back = tuple((int(BlockOp.SWAP_IN), NUM_BLOCKS + 7 - block, 20 - block) for block in range(1, 5))
    tables = [[20 - block for block in table] for table in tables] if swapped else tables
    driver.run(Resume(0, 22, 22, 1, tables), ops=back)
    for group, table in zip(groups, tables, strict=True):
        for layer in group.layers:
            now, before = views[layer][table].clone(), held[layer]
            now[1, :, :, 22 % BLOCK] = before[1, :, :, 22 % BLOCK]  # which the last step has written
            assert torch.equal(now, before) is swapped, layer
    driver.decode(0, count=2)
    assert (driver.got[0] == oracle.greedy(prompt, 6)) is swapped


# ---- an engine's scheduler over a worker's blocks


@dataclass
class RealWorker:
    """A real worker for a Rig: its steps run at once."""

    worker: Worker
    num_scheduled: list[int] = field(default_factory=list)
    ops: list[tuple[int, int, int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    outputs: list[ModelOutput] = field(default_factory=list)

    def submit(self, step: SchedulerOutput) -> None:
        counts = [getattr(entry, "num_tokens", 0) for entry in step.entries]
        self.num_scheduled.append(sum(counts))
        self.cached += [entry.num_cached for entry in step.entries if isinstance(entry, NewRequest)]
        self.ops += step.block_ops
        self.outputs.append(self.worker.execute(step))

    def poll(self) -> ModelOutput | None:
        return self.outputs.pop(0) if self.outputs else None


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_hits_preemptions_and_swaps_change_no_token(checkpoint: Path, oracle: MixedOracle, preemption: str) -> None:
    """Prompts that share prefixes, in a pool with room for about two of them; blocks go from group to group."""
    windows = [group.window for group in oracle.spec.kv_groups]
    rig = Rig(27, 4, windows=windows, num_host_blocks=40, preemption=preemption, max_model_len=64)
    driver = Driver(checkpoint, block_size=4, num_gpu_blocks_override=27, max_model_len=64, max_num_batched_tokens=16)
    driver.worker.start(Start(rig.scheduler.generation, 27, 40))
    rig.worker = worker = RealWorker(driver.worker)  # type: ignore[assignment]
    shared = make_prompt(21, seed=1)
    prompts = {f"r{index}": shared[: 21 - 4 * (index % 3)] + make_prompt(3 + index, seed=2) for index in range(6)}
    for index, (name, prompt) in enumerate(prompts.items()):
        rig.add(name, prompt, max_tokens=10, temperature=0.0)
        for _ in range(3 * (index % 2)):
            rig.step()
    rig.drain()
    for name, prompt in prompts.items():
        assert rig.output(name) == oracle.greedy(prompt, 10), name
    assert any(worker.cached), "there were hits"
    happened = {code for code, _ in rig.decisions}
    assert "preempted" in happened
    assert ("swapped_in" in happened) is (preemption == "swap")
    assert {BlockOp(op) for op, _, _ in worker.ops} >= {BlockOp.SWAP_OUT, BlockOp.SWAP_IN}
