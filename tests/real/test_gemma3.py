"""Gemma 3 270M (Q4_K_M, 262,144 tokens, windows of 512) beside transformers: log-probabilities, greedy tokens, ids."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.models import PROMPTS, TIE, Answers, GgufOracle, answers
from vllm_lite.client.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def oracle(real: Callable[[str], Path]) -> GgufOracle:
    return GgufOracle(real("gemma3-270m") / "gemma-3-270m-q4_k_m.gguf")


@pytest.fixture(scope="module")
def exact(oracle: GgufOracle) -> Answers:
    return answers(oracle.file)


@pytest.mark.timeout(900)
def test_a_page_is_as_likely_as_in_transformers(oracle: GgufOracle, exact: Answers) -> None:
    assert oracle.page_differences(exact.page).max() < 1e-3


@pytest.mark.timeout(900)
def test_greedy_tokens_are_those_of_transformers(oracle: GgufOracle, exact: Answers) -> None:
    for output in exact.continuations:
        assert oracle.behind_the_best(output).max() < TIE, output.outputs[0].text


@pytest.mark.timeout(900)
def test_texts_are_tokenized_as_in_transformers(oracle: GgufOracle) -> None:
    tokenizer = Tokenizer.load(oracle.file)
    for text in (*PROMPTS, "", " ", "\n\n  x", "1234567", "don't", "ﬁ é", "<start_of_turn>user"):
        assert tokenizer.encode(text) == oracle.tokenizer(text)["input_ids"]
