"""Resources that a group of workers asks of a Ray cluster, and the sentence while they are missing. No ray."""

import msgspec

from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.executor.ray.placement import bundle_of, missing, strategy


def config(**changes: object) -> ResolvedConfig:
    made = EngineConfig(device="cpu").resolve(max_position_embeddings=8, dtype="float32", model_path="m")
    return msgspec.structs.replace(made, **changes)


def test_a_rank_takes_a_gpu_or_its_threads() -> None:
    assert bundle_of(config()) == {"CPU": 1.0}
    assert bundle_of(config(cpu_threads=4)) == {"CPU": 4.0}
    assert bundle_of(config(device="cuda", cpu_threads=4)) == {"GPU": 1.0}


def test_one_node_is_taken_where_one_is_large_enough() -> None:
    nodes = [{"CPU": 8.0}, {"CPU": 64.0, "GPU": 2.0}, {"CPU": 64.0, "GPU": 1.0}]
    assert strategy({"GPU": 1.0}, 2, nodes) == "STRICT_PACK"
    assert strategy({"GPU": 1.0}, 3, nodes) == "SPREAD"
    assert strategy({"CPU": 32.0}, 2, nodes) == "STRICT_PACK"
    assert strategy({"CPU": 1.0}, 1, []) == "SPREAD"


def test_missing_resources_are_named() -> None:
    said = missing({"GPU": 1.0}, 4, {"CPU": 3.0}, {"GPU": 2.0, "CPU": 8.0})
    assert said == "4 times 1 GPU are wanted; in the whole cluster 0 of 2 GPU are free"
