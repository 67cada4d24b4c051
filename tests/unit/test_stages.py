"""Positions of ranks on two axes, the layers of a stage, and the rank that answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.test_multiproc import GENERATION, Host, step
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.fitting import check_staged_settings, check_stages
from vllm_lite.checkpoint.model_spec import EncoderSpec, ModelSpec
from vllm_lite.checkpoint.shard import Shard, Stage, answering_rank, num_ranks
from vllm_lite.checkpoint.sizing import configured_num_blocks
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError
from vllm_lite.protocol.step import ModelOutput

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"


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
    config = replace(config, tensor_parallel_size=world, num_stages=num_stages)
    assert (answering_rank(config), num_ranks(config)) == (answers, world * num_stages)
    last = Shard.of(config, answering_rank(config), num_stages)
    assert last.rank == 0
    assert last.stage.is_last


def test_the_executor_uses_the_answers_of_the_last_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    (tmp_path / "config.json").write_text((CONFIGS / "llama_new.json").read_text())
    return load_spec(tmp_path)


def changed_layer(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The model with another second layer."""
    first, second, *others = spec.layers
    return replace(spec, layers=(first, replace(second, **changes), *others))


REFUSED: dict[str, Callable[[ModelSpec], ModelSpec]] = {
    "its code is that of transformers": lambda spec: replace(spec, implementation="transformers"),
    "it makes vectors or scores": lambda spec: replace(spec, encoder=EncoderSpec()),
    "some of its layers attend to K and V of others": lambda spec: changed_layer(spec, kv_layer=0),
    "some of its layers attend to what others have chosen": lambda spec: changed_layer(
        spec, attention=replace(spec.layers[1].attention, index_size=8)
    ),
    "each of its layers has vectors of its own for each token": lambda spec: replace(spec, per_layer_size=8),
}


@pytest.mark.parametrize("why", REFUSED)
def test_models_that_stages_cannot_share_are_refused(model: ModelSpec, why: str) -> None:
    spec = REFUSED[why](model)
    expected = (
        "the layers of LlamaForCausalLM cannot be shared out over 2 stages, which send each other the residual stream "
        f"alone: {why}"
    )
    with pytest.raises(ConfigError, match=f"^{expected}$"):
        check_stages(spec, Stage(1, 2))
    check_stages(spec, Stage())


def test_there_are_not_more_stages_than_layers(model: ModelSpec) -> None:
    check_stages(model, Stage(0, 32))
    with pytest.raises(ConfigError, match=r"^the model's 32 layers cannot be shared out over 33 stages$"):
        check_stages(model, Stage(0, 33))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"enable_lora": True}, "enable_lora"),
        ({"expert_load_metrics": True}, "expert_load_metrics"),
        ({"speculative_config": {"method": "self"}}, "speculative_config's method self"),
        ({"speculative_config": {"method": "mtp"}}, "speculative_config's method mtp"),
    ],
)
def test_settings_that_need_all_layers_in_one_stage(settings: dict[str, Any], what: str) -> None:
    config = EngineConfig.check(settings).resolve(max_position_embeddings=64, dtype="float32", model_path="m")
    check_staged_settings(config)
    with pytest.raises(ConfigError, match=f"^{what} needs all layers in one stage, and 2 share them; leave it off$"):
        check_staged_settings(replace(config, num_stages=2))
    check_staged_settings(replace(config, enable_lora=False, expert_load_metrics=False, speculative_config=None))


def test_the_kv_cache_space_of_an_engine_is_shared_by_its_stages() -> None:
    config = EngineConfig.check({"device": "cpu", "cpu_kvcache_space": 1.0, "tensor_parallel_size": 2})
    resolved = config.resolve(max_position_embeddings=64, dtype="float32", model_path="m")
    blocks = [configured_num_blocks(replace(resolved, num_stages=count), 1 << 20) for count in (1, 2, 4)]
    assert blocks == [512, 256, 128]
