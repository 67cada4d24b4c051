"""Check whether transformers' code for a model can be served, as a worker does before it loads weights. A process of
its own, as `plan` imports no torch. Reads an EngineConfig as JSON, prints {"kind": ..., "error": ...} or {}.
"""

import sys

import msgspec
import torch

from vllm_lite.checkpoint.config_json import load_spec, resolve_dtype
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError, VllmLiteError
from vllm_lite.models.registry import Sizes, build, examine
from vllm_lite.parallel.communicator import SingleRank


def check(config: EngineConfig) -> None:
    """Raise ModelError or ConfigError with the message that `serve` would give. `config.model` is a folder."""
    spec = load_spec(config.model, config.model_impl, config.pooling)
    dtype = getattr(torch, resolve_dtype(config.dtype, spec))
    max_model_len = config.max_model_len or spec.max_position_embeddings
    seen = examine(spec, dtype, max_model_len)
    if config.tensor_parallel_size > 1:
        communicator = SingleRank(torch.device("cpu"))
        communicator.shard = Shard.of(config)  # nothing is exchanged on the meta device
        build(seen, dtype, "cpu", Sizes(max_model_len, 1), communicator=communicator)


def main() -> int:
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    answer = {}
    try:
        check(config)
    except VllmLiteError as error:
        answer = {"kind": "config" if isinstance(error, ConfigError) else "model", "error": str(error)}
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
