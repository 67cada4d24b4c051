"""Gemma 3 270M (Q4_K_M, 262,144 tokens, windows of 512) beside transformers: log-probabilities, greedy tokens, ids.

Its answers are recorded (tests/real/record_gemma3.py): the file is always the same.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.real.models import TIE, Answers, answers
from tests.real.record_gemma3 import FILE, RECORDED
from vllm_lite.client.text.tokenizer import Tokenizer

TRUTH: dict[str, Any] = json.loads(RECORDED.read_text())


@pytest.fixture(scope="module")
def file(real: Callable[[str], Path]) -> Path:
    return real("gemma3-270m") / FILE


@pytest.fixture(scope="module")
def exact(file: Path) -> Answers:
    return answers(file)


def test_a_page_is_as_likely_as_in_transformers(exact: Answers) -> None:
    tokens, page = TRUTH["page"], exact.page
    assert page.prompt_token_ids == tokens
    assert page.prompt_logprobs is not None
    given = [found[token].logprob for token, found in zip(tokens, page.prompt_logprobs, strict=True) if found]
    assert given == pytest.approx(TRUTH["page_logprobs"], rel=0, abs=1e-3)


def test_greedy_tokens_match_transformers(exact: Answers) -> None:
    """Compared up to the first tie."""
    for output, wanted in zip(exact.continuations, TRUTH["continuations"], strict=True):
        sure = next((place for place, (_, margin) in enumerate(wanted) if margin < TIE), len(wanted))
        assert sure > 10
        assert output.outputs[0].token_ids[:sure] == [token for token, _ in wanted[:sure]], output.outputs[0].text


def test_texts_are_tokenized_as_in_transformers(file: Path) -> None:
    tokenizer = Tokenizer.load(file)
    for text, tokens in TRUTH["tokens"].items():
        assert tokenizer.encode(text) == tokens
