"""Memory of several ranks on one machine, by the user's settings for all of them and for each."""

from typing import Any

import pytest

from vllm_lite.checkpoint.sizing import check_pool, check_sizes, configured_num_blocks
from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.errors import ConfigError
from vllm_lite.runtime.kv_dtypes import KVShape


def resolved(kv: KVShape | None = None, **values: Any) -> ResolvedConfig:
    config = EngineConfig.check(values)
    return config.resolve(max_position_embeddings=1000, dtype="float32", model_path="/m/name", kv=kv)


class TinyModel:
    """Two groups, and 40 bytes for each token, which ranks share."""

    kv_groups = ("full", "sliding")
    kv_cache_dtype: str | None = None

    def kv_block_bytes(self, block_size: int, dtype_bytes: int, tp: int = 1, scale_bytes: int = 0) -> int:
        return 10 * block_size * (dtype_bytes + scale_bytes) // tp


@pytest.mark.parametrize("tp", [2, 5])
def test_ranks_on_a_cpu_share_its_kv_cache(tp: int) -> None:
    """Each has a part of every block, so that all of them together hold as many blocks as one would."""
    config = resolved(kv=TinyModel(), device="cpu", tensor_parallel_size=tp)
    assert configured_num_blocks(config, 40 * 16 // tp) == 4 * 64 * 2 * 63  # 1000 tokens are 63 blocks
    config = resolved(device="cpu", tensor_parallel_size=tp, cpu_kvcache_space=1)
    assert config.cpu_kvcache_space == 1
    assert configured_num_blocks(config, 2**20) == 1024 // tp


def test_sizes_of_a_rank_are_counted_for_all_ranks() -> None:
    given: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 2**30, "swap_space": 0.75}
    one, two = (resolved(tensor_parallel_size=tp, **given) for tp in (1, 2))
    assert configured_num_blocks(two, 2**20) == 1024, "bytes of each worker"
    check_sizes(one, 2**20, 2**30)
    check_sizes(two, 2**20, 2**31)
    with pytest.raises(ConfigError, match=r"--swap-space 0\.75 asks for 1\.5 GiB for 2 workers, and .* 1\.0 GiB"):
        check_sizes(two, 2**20, 2**30)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes \d+ asks for 2\.0 GiB for 2 workers, and"):
        check_sizes(two, 2**20, 2**31 - 1)
    space = resolved(device="cpu", tensor_parallel_size=2, cpu_kvcache_space=1)
    check_sizes(space, 2**20, 2**30)


@pytest.mark.parametrize(("tp", "block_bytes"), [(1, 2**18), (2, 2**18), (3, 2**24), (4, 1)])
def test_a_pool_without_room_is_refused_with_a_size_that_would_do(tp: int, block_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"0 of {block_bytes} bytes fit, at least 2 are needed") as refused:
        check_pool(0, block_bytes, tp)
    advised = float(str(refused.value).split("--cpu-kvcache-space ")[1].split()[0])
    config = resolved(device="cpu", tensor_parallel_size=tp, cpu_kvcache_space=advised)
    num_blocks = configured_num_blocks(config, block_bytes)
    assert num_blocks is not None
    check_pool(num_blocks, block_bytes, tp)
