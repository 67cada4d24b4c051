"""The command line of a worker: an engine's settings, named as for `vllm-lite serve`, and Dynamo's own."""

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.utils.runtime import parse_endpoint

from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError
from vllm_lite.runtime.settings import add_flags
from vllm_lite.server.config import ServeConfig

FIELDS = (*EngineConfig.__struct_fields__, "generation_config", "override_generation_config")
"""The settings of `serve` that apply to a worker; chats, HTTP and API keys are the frontend's."""
COMPONENT = "backend"


def read(argv: Sequence[str] | None) -> tuple[ServeConfig, DynamoRuntimeConfig]:
    """Read the command line, and the environment as `serve` does. Raises ConfigError.

    Workers of one component share a prefix_hash_seed, the user's or one made from the component's name: the router's
    index has one hash for a block, and ignores a worker's events after a common block that has another hash.
    """
    parser = argparse.ArgumentParser("python -m vllm_lite.dynamo", allow_abbrev=False)
    DynamoRuntimeArgGroup().add_arguments(parser)
    add_flags(parser, ServeConfig, only=FIELDS)
    flags: Any = parser.parse_args(argv)
    config = ServeConfig.load({name: getattr(flags, name) for name in FIELDS})
    if config.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size is {config.data_parallel_size}, and a worker of Dynamo has one engine; start as many "
            "workers"
        )
    runtime = DynamoRuntimeConfig.from_cli_args(flags)
    try:
        runtime.validate()
        endpoint = runtime.endpoint or f"dyn://{runtime.namespace}.{COMPONENT}.generate"
        runtime.namespace, runtime.component, runtime.endpoint = parse_endpoint(endpoint)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.prefix_hash_seed is None:
        config = msgspec.structs.replace(config, prefix_hash_seed=f"{runtime.namespace}.{runtime.component}")
    return config, runtime
