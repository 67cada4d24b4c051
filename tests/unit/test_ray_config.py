"""RayServeConfig: the settings of replicas, and the parts of it that HTTP replicas and engines get."""

import pytest

from vllm_lite.errors import ConfigError
from vllm_lite.ray.config import RayServeConfig
from vllm_lite.server.config import ServeConfig
from vllm_lite.tools.cli import main


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"replicas": "0"}, "replicas: must be at least 1"),
        ({"replicas": "3", "max_replicas": "2"}, "max_replicas must be at least replicas .3., got 2"),
        ({"target_ongoing_requests": "0"}, "target_ongoing_requests: must be above 0"),
        ({"target_kv_cache_usage": "1.5"}, "target_kv_cache_usage: must be at most 1"),
        ({"routing": "random"}, "routing must be prefix or least-loaded, or module:Class, got 'random'"),
        ({"data_parallel_size": "2"}, "data_parallel_size is 2; give replicas instead"),
        ({"uds": "/tmp/socket"}, "uds is for one engine on this machine; leave it out"),
        ({"single_process": "true"}, "single_process is for one engine"),
        ({"replica": "2"}, "unknown setting 'replica'; did you mean 'replicas'"),
    ],
)
def test_wrong_settings(values: dict[str, str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        RayServeConfig.load(values, env={})


def test_words_as_ray_gives_them() -> None:
    config = RayServeConfig.load({"model": "demo", "replicas": "2", "cpu_threads": "1", "port": "9000"}, env={})
    assert (config.replicas, config.cpu_threads) == (2, 1)


def test_more_replicas_leave_http_replicas_and_engines_as_they_are() -> None:
    one, two = (RayServeConfig.load({"replicas": count, "max_num_seqs": 8}, env={}) for count in (1, 2))
    assert one.server() == two.server() == ServeConfig.load({"max_num_seqs": 8}, env={})
    assert one.engine() == two.engine()


def test_the_command_prints_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ray-serve", "--print-config", "--replicas", "3"]) == 0
    assert "replicas: 3" in capsys.readouterr().out
