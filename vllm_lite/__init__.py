"""vllm_lite: an LLM inference engine in three kinds of process that share nothing but typed messages.

    client process(es)                engine process                    worker processes, one per rank
    LLM / AsyncClient                 scheduler + block manager         model shard + KV cache + kernels
    tokenize, detokenize, stops       no torch, no tokenizer            no scheduling decision
          |   Generate / Abort               |   SchedulerOutput (diffs)        |
          +----- DEALER -> ROUTER -----------+----- ROUTER -> DEALER -----------+
          |   OutputBatch                    |   ModelOutput (rank 0), Ready    |

Names are imported on first use, so that `import vllm_lite` costs a few milliseconds and no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_lite.client.async_client import AsyncClient
    from vllm_lite.client.beam import BeamSearchParams
    from vllm_lite.client.decisions.answers import DecisionOutput
    from vllm_lite.client.llm import LLM
    from vllm_lite.client.lora import LoRARequest
    from vllm_lite.client.outputs import BeamSearchOutput, CompletionOutput, Logprob, RequestOutput
    from vllm_lite.client.pooling import PoolingRequestOutput
    from vllm_lite.client.prompt import TextPrompt, TokensPrompt
    from vllm_lite.config import EngineConfig
    from vllm_lite.protocol.params import RequestOutputKind, SamplingParams
    from vllm_lite.protocol.pooling import PoolingParams

__version__ = "0.14.0"

_HOME = {
    "LLM": "vllm_lite.client.llm",
    "AsyncClient": "vllm_lite.client.async_client",
    "LoRARequest": "vllm_lite.client.lora",
    "RequestOutput": "vllm_lite.client.outputs",
    "CompletionOutput": "vllm_lite.client.outputs",
    "Logprob": "vllm_lite.client.outputs",
    "BeamSearchOutput": "vllm_lite.client.outputs",
    "BeamSearchParams": "vllm_lite.client.beam",
    "TextPrompt": "vllm_lite.client.prompt",
    "TokensPrompt": "vllm_lite.client.prompt",
    "SamplingParams": "vllm_lite.protocol.params",
    "RequestOutputKind": "vllm_lite.protocol.params",
    "DecisionOutput": "vllm_lite.client.decisions.answers",
    "PoolingParams": "vllm_lite.protocol.pooling",
    "PoolingRequestOutput": "vllm_lite.client.pooling",
    "StructuredOutputsParams": "vllm_lite.protocol.structured",
    "EngineConfig": "vllm_lite.config",
}

__all__ = [
    "LLM",
    "AsyncClient",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "DecisionOutput",
    "EngineConfig",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'vllm_lite' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
