"""A model on several ranks gives the tokens of one rank, and those of transformers, in float32.

One engine serves many features at once: prompts in chunks, cached prefixes, a pool so small that sequences are
preempted, samples, beams, penalties, logprobs. Ranks are threads here, but processes in
test_tensor_parallel_failures.py and in the last test below.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.e2e.reference import GREEDY, NUM_TOKENS, Reference, compare, make_prompts, start
from vllm_lite import LLM, RequestOutput, SamplingParams
from vllm_lite.errors import ConfigError
from vllm_lite.parallel.shared_memory import SharedMemoryCommunicator

PROMPTS = make_prompts([1, 7, 16, 33, 64, 90, 111, 150], seed=21)
MAX_DIFFERENCE = 1e-3
"""Between logprobs: ranks add up in another order than one rank does."""

ODD: dict[str, Any] = {
    "hidden_size": 80,
    "intermediate_size": 120,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 389,
}
"""Heads that do not divide, one KV head that every rank has, a prime number of tokens."""
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-tied-biases": {"family": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama-odd": {"family": "llama", **ODD},
    "qwen3": {"family": "qwen3"},
    "mistral-window": {"family": "mistral", "sliding_window": 13},
}
WORLDS = {
    "llama": (2, 4),
    "llama-tied-biases": (4,),
    "llama-odd": (2, 3, 5),
    "qwen3": (2,),
    "mistral-window": (4,),
}
CASES = [(name, world) for name, worlds in WORLDS.items() for world in worlds]
SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 64, "block_size": 8}
POOLS: list[dict[str, Any]] = [
    {"num_gpu_blocks_override": 44, "preemption_mode": "recompute"},
    {"num_gpu_blocks_override": 44, "preemption_mode": "swap", "swap_space": 0.05, "enforce_eager": True},
]


def mixture() -> list[tuple[list[int], SamplingParams]]:
    """Every prompt in greedy decoding, then one prompt for everything else that sampling knows."""
    common: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    others = [
        SamplingParams(temperature=1.3, seed=5, **common),
        SamplingParams(temperature=0.9, top_p=0.8, top_k=20, min_p=0.01, seed=6, **common),
        SamplingParams(temperature=1.0, seed=7, n=3, logprobs=3, **common),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, **common),
        SamplingParams(temperature=0.0, logit_bias={9: 4.0, 380: -3.0}, presence_penalty=0.5, logprobs=5, **common),
        SamplingParams(temperature=0.0, prompt_logprobs=2, **common),
        SamplingParams(use_beam_search=True, n=3, **common),
        SamplingParams(temperature=0.7, seed=8, min_tokens=9, stop_token_ids=tuple(range(3, 60)), max_tokens=20),
    ]
    asked = [(prompt, GREEDY) for prompt in PROMPTS]
    return asked + [(prompt, params) for params in others for prompt in PROMPTS[2:7:2]]


def generate(llm: LLM) -> list[RequestOutput]:
    asked = mixture()
    return llm.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)


class Served:
    """A shape's checkpoint, transformers' outputs for its prompts, and the outputs of one rank for the mixture."""

    def __init__(self, path: Path) -> None:
        self.path = path
        reference = Reference(path)
        self.cases = [reference.generate(prompt) for prompt in PROMPTS]
        with start(path, num_gpu_blocks_override=400, **SETTINGS) as llm:
            self.alone = generate(llm)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Served] = {}

    def of(name: str) -> Served:
        if name not in made:
            made[name] = Served(make_checkpoint(tmp_path_factory.mktemp("tp") / name, **SHAPES[name]))
        return made[name]

    return of


@pytest.mark.parametrize(("name", "world"), CASES)
def test_ranks_give_the_tokens_of_one_rank_and_of_transformers(served: Any, name: str, world: int) -> None:
    one = served(name)
    for pool in POOLS:
        with start(one.path, tensor_parallel_size=world, **SETTINGS, **pool) as llm:
            outputs = generate(llm)
            stats = llm.stats()
        assert not compare(one.cases, outputs[: len(one.cases)]).wrong
        for alone, output in zip(one.alone, outputs, strict=True):
            assert_alike(alone, output)
        assert stats.preemptions > 0
        assert (stats.swaps > 0) == ("swap_space" in pool)
        assert stats.cached_tokens > 0
        assert (stats.num_used_blocks, stats.num_used_host_blocks) == (0, 0)


def assert_alike(alone: RequestOutput, output: RequestOutput) -> None:
    assert [sample.token_ids for sample in output.outputs] == [sample.token_ids for sample in alone.outputs]
    assert [sample.finish_reason for sample in output.outputs] == [sample.finish_reason for sample in alone.outputs]
    assert numbers(output) == pytest.approx(numbers(alone), abs=MAX_DIFFERENCE)


def numbers(output: RequestOutput) -> list[float]:
    """Every logprob of an output."""
    rows = [row for sample in output.outputs for row in sample.logprobs or []]
    rows += [row for row in output.prompt_logprobs or [] if row is not None]
    found = [candidate.logprob for row in rows for candidate in row.values()]
    return found + [sample.cumulative_logprob or 0.0 for sample in output.outputs]


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}], ids=["recorded", "eager"])
def test_drafts_change_nothing_on_ranks(served: Any, settings: dict[str, Any]) -> None:
    one = served("llama")
    speculation = {"method": "ngram", "num_speculative_tokens": 4}
    drafting = {"speculative_config": speculation, "disable_adaptive_drafts": True}
    with start(one.path, tensor_parallel_size=2, **drafting, **SETTINGS, **settings) as llm:
        outputs = generate(llm)
        assert llm.stats().draft_tokens > 0
    for alone, output in zip(one.alone, outputs, strict=True):
        assert_alike(alone, output)


def test_quantized_weights_are_sharded_too(served: Any) -> None:
    """A rank's part of a row may begin within a group of 32 and then has other scales, so results are close but not
    equal."""
    one = served("llama")
    scores = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for world in (1, 2):
        with start(one.path, tensor_parallel_size=world, quantization="int8", **SETTINGS) as llm:
            outputs = llm.generate(PROMPTS[2:], scores, use_tqdm=False)
            found.append(torch.tensor([number for output in outputs for number in numbers(output)]))
    with start(one.path, **SETTINGS) as llm:
        exact = torch.tensor(
            [n for output in llm.generate(PROMPTS[2:], scores, use_tqdm=False) for n in numbers(output)]
        )
    errors = [(some - exact).abs().mean().item() for some in found]
    assert errors[1] < 1.2 * errors[0], errors


def test_a_partial_sum_that_is_lost_changes_tokens(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise equal tokens would prove little."""
    one = served("llama")
    add_up = SharedMemoryCommunicator.all_reduce

    def lose(self: SharedMemoryCommunicator, x: torch.Tensor) -> None:
        if self.shard.rank == 1:
            x.mul_(0.5)
        add_up(self, x)

    monkeypatch.setattr(SharedMemoryCommunicator, "all_reduce", lose)
    with start(one.path, tensor_parallel_size=2, enforce_eager=True, **SETTINGS) as llm:
        outputs = generate(llm)[: len(PROMPTS)]
    assert len(compare(one.cases, outputs).wrong) > len(PROMPTS) // 2


def test_gloo_gives_the_same(served: Any) -> None:
    one = served("qwen3")
    with start(one.path, tensor_parallel_size=2, tensor_parallel_backend="gloo", **SETTINGS) as llm:
        outputs = generate(llm)
    for alone, output in zip(one.alone, outputs, strict=True):
        assert_alike(alone, output)


def test_processes_give_the_same(served: Any) -> None:
    one = served("llama")
    with start(one.path, tensor_parallel_size=2, single_process=False, **SETTINGS) as llm:
        outputs = generate(llm)
    assert len(outputs[0].outputs[0].token_ids) == NUM_TOKENS
    for alone, output in zip(one.alone, outputs, strict=True):
        assert_alike(alone, output)


@pytest.mark.parametrize(
    ("world", "sentence"),
    [(3, "tensor_parallel_size 3 .*KV heads"), (8, "tensor_parallel_size 8 .*heads")],
)
def test_models_that_cannot_be_divided_are_refused_before_anything_starts(
    served: Any, world: int, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        start(served("llama").path, tensor_parallel_size=world)
