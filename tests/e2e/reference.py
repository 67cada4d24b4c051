"""Outputs of transformers for a checkpoint: the truth that the engine's tokens and logprobs are held against."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.checkpoints import VOCAB_SIZE, make_checkpoint, transformers_model
from tests.deadlines import scaled
from vllm_lite import LLM, RequestOutput, SamplingParams
from vllm_lite.checkpoint.config_json import load_spec

NUM_TOKENS = 32
"""Generated for each prompt."""
TIE = 1e-3
"""If the best two float32 logits differ by less than this, either token may be taken."""
LENGTHS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 63, 64, 65, 80]
LENGTHS += [96, 111, 128, 129, 150, 176, 200, 240, 272, 300]
"""Lengths of the prompts. Many of them fill or just miss their last block of 8 or 16."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
DEADLINE_S = scaled(100.0)


def make_prompts(lengths: Sequence[int] = LENGTHS, seed: int = 14) -> list[list[int]]:
    """Random prompts. Every second one shares a prefix of up to 100 tokens with the others of its kind. With the
    default seed no continuation of either family has a tie."""
    source = random.Random(seed)
    stem = [source.randrange(3, VOCAB_SIZE) for _ in range(100)]
    prompts = []
    for place, length in enumerate(lengths):
        tokens = [source.randrange(3, VOCAB_SIZE) for _ in range(length)]
        prompts.append((stem + tokens[100:])[:length] if place % 2 else tokens)
    return prompts


@dataclass(frozen=True)
class Case:
    """A prompt, its greedy continuation, and the logits that led to each of its tokens."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor  # float32 [NUM_TOKENS, vocab]

    @cached_property
    def margins(self) -> list[float]:
        """By how much each token was the best."""
        best = self.logits.topk(2).values
        margins: list[float] = (best[:, 0] - best[:, 1]).tolist()
        return margins


class Reference:
    """A checkpoint in transformers. Prompts run one by one, so that no padding has a part in it."""

    def __init__(self, path: Path, dtype: str = "float32") -> None:
        self.path = path
        self.model = transformers_model(path, load_spec(path).architecture, dtype).eval()

    def generate(self, prompt: list[int], **options: Any) -> Case:
        """The greedy continuation; no token ends it unless `options` say so."""
        ids = torch.tensor([prompt])
        done = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **({"eos_token_id": None} | options),
            pad_token_id=0,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return Case(prompt, done.sequences[0, len(prompt) :].tolist(), torch.cat(done.logits).float())

    @torch.inference_mode()
    def logits(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:  # float32 [len(tokens), vocab]
        """The logits that predict each of `tokens`, given the prompt and the tokens before it."""
        logits: torch.Tensor = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        return logits

    @cached_property
    def cases(self) -> list[Case]:
        return [self.generate(prompt) for prompt in make_prompts()]


class Comparison(NamedTuple):
    """Outputs that differ from the reference, and those of them whose first difference is at a tie."""

    wrong: list[int]
    excused: list[int]


def compare(cases: Sequence[Case], outputs: Sequence[RequestOutput]) -> Comparison:
    """Compare token by token. After a tie that was decided the other way the contexts differ, so the comparison ends
    there."""
    comparison = Comparison([], [])
    for index, (case, output) in enumerate(zip(cases, outputs, strict=True)):
        assert output.prompt_token_ids == case.prompt
        tokens = output.outputs[0].token_ids
        at = first_difference(case.tokens, tokens)
        if at is None:
            continue
        second = case.logits[at].topk(2).indices[1] if at < len(case.tokens) else None
        tied = at < len(tokens) and second == tokens[at] and case.margins[at] < TIE
        (comparison.excused if tied else comparison.wrong).append(index)
    return comparison


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index at which two sequences part, None if they are equal."""
    for at, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one != other:
            return at
    return None if len(expected) == len(got) else min(len(expected), len(got))


def start(path: str | Path, **settings: Any) -> LLM:
    """A small, quiet engine with one compute thread, which has to be ready in time.

    It runs in threads of this process unless `single_process` is False: that saves importing torch for every variation
    of settings.
    """
    small: dict[str, Any] = {"cpu_threads": 1, "num_gpu_blocks_override": 1024, "single_process": True}
    small |= {"log_level": "error", "ready_timeout_s": DEADLINE_S, "heartbeat_timeout_s": DEADLINE_S}
    return LLM(path, **(small | settings))


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def make_reference(folder: Path, family: str, dtype: str = "float32") -> Reference:
    return Reference(make_checkpoint(folder / f"{family}-{dtype}", family, dtype=dtype))
