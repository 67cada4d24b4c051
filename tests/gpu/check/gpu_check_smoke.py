"""Part of `gpu_check`: runs everything that must work once, in half a minute. If it fails, later stages do not run.

- one launch of each file of csrc/cuda, held against plain torch in float64 (a case of tests/kernels)
- one kernel captured in a CUDA graph, and replayed with other lengths
- the demo model's greedy tokens by five roads: on the CPU, and on the GPU eagerly, with graphs of decode steps, with
  steps in pieces as well, and with steps launched ahead; in float32 and in bfloat16

In float32 all roads must give the CPU's tokens. In bfloat16 a token may differ only if the CPU's float32 logprobs of
the two best tokens are nearly equal.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from gpu_check_cases import open_launcher, usable
from gpu_check_parts import parser_of, run_checks

CASES = {
    "attention_simple.cuh": ("decode_attention_cases", "simple, "),
    "cache_ops.cuh": ("cache_ops_cases", ""),
    "cascade_attention.cuh": ("cascade_attention_cases", ""),
    "decode_attention.cuh": ("decode_attention_cases", ""),
    "experts.cuh": ("experts_cases", ""),
    "fused.cuh": ("fused_cases", ""),
    "gather_kv.cuh": ("prefill_attention_cases", "gather takes"),
    "latent_attention.cuh": ("latent_attention_cases", ""),
    "lora.cuh": ("lora_cases", ""),
    "masks.cuh": ("masks_cases", ""),
    "packed_experts.cuh": ("packed_experts_cases", ""),
    "packed_linear.cuh": ("packed_linear_cases", ""),
    "packed_tiles.cuh": ("packed_tiles_cases", ""),
    "paged_attention.cuh": ("paged_attention_cases", ""),
    "prefill_attention.cuh": ("prefill_attention_cases", ""),
    "recurrent.cuh": ("recurrent_cases", ""),
    "recurrent_chunks.cuh": ("recurrent_chunks_cases", ""),
    "routing.cuh": ("routing_cases", ""),
    "sampler.cuh": ("sampler_cases", ""),
}
"""File of csrc/cuda -> a file of cases, and a part of the name of its first case that launches the kernel."""
PROMPTS = ("The", "Once upon a time", "Every rank", "1, 2, 3, 4")
NEAR_TIE = 0.1
"""Logprobs that differ by less may change their order in bfloat16."""
ROADS: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu", "async_scheduling": False},
    "eager": {"enforce_eager": True, "async_scheduling": False},
    "graphs": {"cudagraph_piece_sizes": (0,), "async_scheduling": False},
    "pieces": {"async_scheduling": False},
    "overlap": {},
}


def case_of(source: str) -> Callable[..., None]:
    """The case that represents a file of csrc/cuda."""
    module, part = CASES[source]
    cases = import_module(f"tests.kernels.{module}").CASES
    return next(case for name, case in cases if part in name)  # type: ignore[no-any-return]


class Road(NamedTuple):
    """Result of one road for each prompt."""

    tokens: list[list[int]]
    gaps: list[list[float]]
    """Difference of the logprobs of the best and the second-best token; only for the CPU's road in float32."""


class Roads:
    """Runs the demo model by all roads, each with a separate engine in this process."""

    def __init__(self, *, emulate: bool) -> None:
        self.emulate = emulate
        self.truth: Road | None = None
        self.num_tokens = 6 if emulate else 24
        if emulate:
            self._use_emulator()

    @staticmethod
    def _use_emulator() -> None:
        """Give workers of a GPU's roads a device of the emulator."""
        from dataclasses import replace

        from gpu_check_models import emulated_device

        from vllm_lite.config import ResolvedConfig
        from vllm_lite.worker import worker
        from vllm_lite.worker.device import Device

        device = emulated_device()

        def opened(config: ResolvedConfig, rank: int) -> Device:
            return replace(device, capture=None if config.enforce_eager else device.capture)

        for name, value in {"open_device": opened}.items():
            setattr(worker, name, value)

    def run(self, name: str, dtype: str, *, explained: bool = False) -> Road:
        from vllm_lite import LLM, SamplingParams

        settings: dict[str, Any] = {"device": "cuda", "gpu_memory_utilization": 0.2, "heartbeat_timeout_s": 120.0}
        settings |= ROADS[name]
        if self.emulate or settings["device"] == "cpu":
            settings |= {"device": "cpu", "cpu_kvcache_space": 0.01}
            del settings["gpu_memory_utilization"]
        if self.emulate:
            settings |= {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
        params = SamplingParams(
            temperature=0, max_tokens=self.num_tokens, ignore_eos=True, logprobs=2 if explained else None
        )
        with LLM("demo", dtype=dtype, single_process=True, **settings) as llm:
            outputs = [one.outputs[0] for one in llm.generate(list(PROMPTS), params, use_tqdm=False)]
        gaps = []
        for output in outputs if explained else ():
            ranked = [sorted((one.logprob for one in place.values()), reverse=True) for place in output.logprobs or ()]
            gaps.append([best - second for best, second, *_ in ranked])
        return Road([list(output.token_ids) for output in outputs], gaps)

    def check(self, name: str, dtype: str) -> str | None:
        if name == "cpu":
            self.truth = self.run(name, dtype, explained=True)
            return None
        truth = self.truth or self.run("cpu", "float32", explained=True)
        self.truth = truth
        return difference(truth, self.run(name, dtype), 0.0 if dtype == "float32" else NEAR_TIE)


def difference(truth: Road, found: Road, near_tie: float) -> str | None:
    """Find the first token that differs from the truth although its logprobs are no near tie; None if none does."""
    for number, (expected, got) in enumerate(zip(truth.tokens, found.tokens, strict=True)):
        if len(expected) != len(got):
            return f"prompt {number}: {len(got)} tokens instead of {len(expected)}"
        place = next((i for i, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1]), None)
        if place is not None and not truth.gaps[number][place] < near_tie:
            return (
                f"prompt {number}: token {place} is {got[place]} instead of {expected[place]}, whose logprob is ahead "
                f"by {truth.gaps[number][place]:.3f}"
            )
    return None


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    launcher, device = open_launcher(arguments.emulate)
    checks: dict[str, Callable[[], str | None]] = {}
    for source in CASES:
        checks[source] = lambda source=source: case_of(source)(launcher, device)  # type: ignore[misc]

    def replayed() -> str | None:
        from gpu_check_graphs import decode_attention

        return decode_attention(launcher, device, 64)

    checks["a captured replay"] = replayed
    roads = Roads(emulate=arguments.emulate)
    checks["demo model, cpu, float32"] = partial(roads.check, "cpu", "float32")
    for dtype in ("float32", "bfloat16"):
        for name in list(ROADS)[1:]:
            checks[f"demo model, {name}, {dtype}"] = partial(roads.check, name, dtype)
    run_checks(checks, arguments.first, lambda: usable(device))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
