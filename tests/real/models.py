"""A real GGUF file beside transformers in float32, which reads the same blocks with gguf-py: texts, and comparisons."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from tests.e2e.reference import start
from tests.real.cache import ROOT
from vllm_lite import SamplingParams
from vllm_lite.client.outputs import RequestOutput

PAGE = (
    (ROOT / "LICENSE").read_text()[190:1500]
    + """
def merge(left: list[int], right: list[int]) -> list[int]:
    return sorted([*left, *right])  # 1234567 + 890 = 1235457

Am nächsten Morgen lag Schnee auf den Dächern; niemand hatte ihn kommen hören. Никто не знал, откуда он взялся.
昨日は雪が降りました。 🙂 The capital of France is Paris, and the capital of Italy is Rome.
"""
)
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a patient cat named Łucja. One windy day,",
)
NUM_TOKENS = 24
TIE = 2e-3
"""Logits nearer to each other than this are equal: both engines add up in float32, in other orders."""


class Answers(NamedTuple):
    """Output of this engine: the page with its log-probabilities, and greedy continuations."""

    page: RequestOutput
    continuations: list[RequestOutput]


def answers(file: Path) -> Answers:
    """Answers of an engine in float32, which does not quantize rows on any instruction set."""
    with closing(start(file, dtype="float32", max_model_len=2048)) as llm:
        page, *rest = llm.generate(
            [PAGE, *PROMPTS],
            [SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)]
            + [SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True) for _ in PROMPTS],
            use_tqdm=False,
        )
    return Answers(page, rest)


class PlainReader(gguf.GGUFReader):
    """gguf-py's reader, which takes half the time for the strings of a vocabulary when slices are plain arrays."""

    @property  # type: ignore[override]
    def data(self) -> "np.ndarray[Any, Any]":
        return self._data

    @data.setter
    def data(self, mapped: "np.memmap[Any, Any]") -> None:
        self._data = mapped.view(np.ndarray)


_reader = cache(PlainReader)
_name_map = cache(gguf.get_tensor_name_map)


@contextmanager
def read_once() -> Iterator[None]:
    """transformers reads a GGUF file for its config, its tensors and its tokenizer, and maps all names for each of
    its 400 modules; here all have one of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", _reader)
        patch.setattr(gguf, "get_tensor_name_map", _name_map)
        yield


class GgufOracle:
    """transformers' model and tokenizer of a GGUF file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForCausalLM

        with read_once():
            return AutoModelForCausalLM.from_pretrained(
                self.file.parent, gguf_file=self.file.name, dtype=torch.float32
            ).eval()

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        with read_once():
            return AutoTokenizer.from_pretrained(self.file.parent, gguf_file=self.file.name)

    def cut_digits(self) -> None:
        """Split digits before words, as SmolLM's own tokenizer.json does. transformers treats every
        `tokenizer.ggml.pre` of a GGUF file like GPT-2's."""
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        steps = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
        self.tokenizer.backend_tokenizer.pre_tokenizer = steps

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:  # float32 [len(tokens), vocab]
        logits: torch.Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits

    def page_differences(self, page: RequestOutput) -> torch.Tensor:  # float32 [len(prompt) - 1], nats
        """By how much the log-probability of each token of the page differs."""
        tokens = page.prompt_token_ids
        assert page.prompt_logprobs is not None
        assert tokens == self.tokenizer(PAGE)["input_ids"]
        given = [found[token].logprob for token, found in zip(tokens, page.prompt_logprobs, strict=True) if found]
        wanted = self.logits(tokens).log_softmax(dim=-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        return (torch.tensor(given) - wanted).abs()

    def behind_the_best(self, output: RequestOutput) -> torch.Tensor:  # float32 [len(tokens)]
        """Difference between the best logit and that of each chosen token."""
        prompt, chosen = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(chosen) == NUM_TOKENS
        logits = self.logits(prompt + chosen)[len(prompt) - 1 : -1]
        return logits.max(dim=-1).values - logits.gather(1, torch.tensor(chosen)[:, None])[:, 0]
