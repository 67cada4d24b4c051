"""Positions of ranks on two axes, the layers of a stage, and who answers."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_multiproc import GENERATION, Host, step
from vllm_lite.checkpoint.shard import Shard, Stage, answering_rank, num_ranks
from vllm_lite.config import EngineConfig
from vllm_lite.protocol.step import ModelOutput


@given(st.integers(1, 200), st.integers(1, 9))
def test_stages_share_out_all_layers_in_order(num_layers: int, count: int) -> None:
    held = [Stage(index, count).layers(num_layers) for index in range(count)]
    assert [layer for each in held for layer in each] == list(range(num_layers))
    sizes = [len(each) for each in held]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_workers_are_numbered_stage_by_stage() -> None:
    config = EngineConfig.check({"tensor_parallel_size": 2, "enable_expert_parallel": True})
    shards = [Shard.of(config, rank, 3) for rank in range(6)]
    assert [(shard.stage.index, shard.rank, shard.world) for shard in shards] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 2),
        (1, 1, 2),
        (2, 0, 2),
        (2, 1, 2),
    ]
    assert [(shard.stage.is_first, shard.stage.is_last) for shard in shards[::2]] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    assert shards[3].all_ranks == (shards[2], shards[3])
    assert Shard.of(config, 1) == Shard(1, 2, expert_parallel=True)


@pytest.mark.parametrize(("world", "num_stages", "answers"), [(1, 1, 0), (4, 1, 0), (1, 3, 2), (2, 3, 4)])
def test_the_first_rank_of_the_last_stage_answers(world: int, num_stages: int, answers: int) -> None:
    config = EngineConfig.check({}).resolve(max_position_embeddings=64, dtype="float32", model_path="m")
    config = msgspec.structs.replace(config, tensor_parallel_size=world, num_stages=num_stages)
    assert (answering_rank(config), num_ranks(config)) == (answers, world * num_stages)
    last = Shard.of(config, answering_rank(config), num_stages)
    assert last.rank == 0
    assert last.stage.is_last


def test_the_executor_takes_the_answers_of_the_last_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host = Host(monkeypatch, 2, tmp_path, stages=3)
    host.begin()
    host.executor.submit(step(1))
    output = ModelOutput(GENERATION, 1, b"")
    assert [len(worker.heard()) for worker in host.workers] == [1] * 6
    for rank in (0, 1, 2, 3, 5):
        host.workers[rank].say(output)
    assert host.executor.poll() is None
    host.workers[4].say(output)
    assert host.executor.poll() == output
    host.executor.close()
    for worker in host.workers:
        worker.connection.close()


def test_layers_behind_the_models_are_kept_by_every_stage() -> None:
    assert [Stage(index, 2).kept((0, 2, 4, 6), 4) for index in range(2)] == [(0, 4, 6), (2, 4, 6)]
