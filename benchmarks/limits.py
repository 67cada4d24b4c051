"""Limits of this machine for a workload of peers.py, with which any engine's figures can be compared.

A step multiplies by weights, then attends. Each part takes the time of its arithmetic, at the speed of products in
registers, or the time of its bytes, at the speed of reading memory, whichever is longer. An engine can be faster where
a cache holds the data, where a common prefix is read once for several sequences, and where it attends for some
sequences while it multiplies for others.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 16
"""Tokens of a block. Common prefixes of a workload's prompts count once, in whole blocks."""
WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 0.5}
"""Scales are left out."""
KV_BYTES = 2
FIELDS = (
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
)
FAST_INTEGERS = ("avx512_bf16", "amx")
"""Instruction sets whose int8 products the measuring loop knows."""


@dataclass(frozen=True)
class Machine:
    """Operations (a multiplication and an addition are two) and bytes in a second, of all threads."""

    bfloat16: float
    integers: float
    bandwidth: float

    @classmethod
    def measured(cls, num_threads: int) -> "Machine | None":
        """Measure this machine. None if the native library is missing or has no products faster than float32's."""
        try:
            import torch  # here, as the rest of peers.py needs nothing to be installed
            from micro.kernels_timing import peak_tflop_s, read_bandwidth_gb_s

            from vllm_lite.kernels import cpu
        except ImportError:
            return None
        if not cpu.available() or cpu.isa() not in FAST_INTEGERS:
            return None
        kinds = (torch.bfloat16, torch.int8)
        bfloat16, integers = (peak_tflop_s(num_threads, kind) * 1e12 for kind in kinds)
        return cls(bfloat16, integers, read_bandwidth_gb_s(num_threads) * 1e9)


class Shape:
    """Cost of a token in a Llama with `dtype`'s weights."""

    def __init__(self, config: dict[str, Any], dtype: str, machine: Machine) -> None:
        heads, kv_heads, layers, hidden, inner, vocab = (int(config[field]) for field in FIELDS)
        head = int(config.get("head_dim") or hidden // heads)
        inside = layers * hidden * (2 * heads * head + 2 * kv_heads * head + 3 * inner)
        outside = hidden * vocab
        products = machine.bfloat16 if dtype == "bf16" else machine.integers
        self._token_s = 2 * inside / products
        self._logits_s = 2 * outside / products
        self._pair_s = 4 * layers * heads * head / machine.bfloat16
        self._weights_s = (inside + outside) * WEIGHT_BYTES[dtype] / machine.bandwidth
        self._context_s = 2 * layers * kv_heads * head * KV_BYTES / machine.bandwidth

    def prompts_s(self, prompts: list[list[int]]) -> float:
        """Seconds of the prompts' arithmetic alone. A short prompt, which is limited by the weights' bytes, takes
        longer."""
        known: set[tuple[int, ...]] = set()
        seconds = 0.0
        for prompt in prompts:
            begins = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt), BLOCK)]
            cached = max((len(begin) for begin in begins if begin in known), default=0)
            known.update(begins)
            tokens, pairs = len(prompt) - cached, (len(prompt) ** 2 - cached**2) / 2
            seconds += tokens * self._token_s + pairs * self._pair_s + self._logits_s
        return seconds

    def decode_s(self, contexts: list[int]) -> float:
        """Return the seconds of one step that decodes one token for each context."""
        products = max(len(contexts) * (self._token_s + self._logits_s), self._weights_s)
        return products + sum(contexts) * max(self._pair_s, self._context_s)


def least_seconds(shape: Shape, requests: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the seconds that all prompts take, and those of the decode steps that follow them."""
    prompts = shape.prompts_s([request["prompt"] for request in requests])
    decode = 0.0
    for step in range(1, max(request["n"] for request in requests)):
        contexts = [len(request["prompt"]) + step for request in requests if step < request["n"]]
        decode += shape.decode_s(contexts)
    return prompts, decode


def limit(machine: Machine, model: Path, dtype: str, requests: list[dict[str, Any]], *, alone: bool) -> float | None:
    """Tokens per second: with `alone`, those of one stream after its first token, else all tokens over the whole time.

    None if config.json is not that of a Llama, or if a single stream ends with its first token.
    """
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return None
    if config.get("model_type") != "llama" or (alone and requests[0]["n"] == 1):
        return None
    shape = Shape(config, dtype, machine)
    prompts, decode = least_seconds(shape, requests)
    tokens: int = sum(request["n"] for request in requests)
    return (tokens - len(requests)) / decode if alone else tokens / (prompts + decode)
