"""SmolLM2-135M-Instruct (Q4_1) beside transformers: log-probabilities, greedy tokens, prompts of chats."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.real.models import PROMPTS, TIE, Answers, GgufOracle, answers
from vllm_lite.client.chat import ChatTokenizer
from vllm_lite.client.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "What is the capital of France?"}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "  And of <|im_end|> Italy? 🙂\n"}],
]


@pytest.fixture(scope="module")
def oracle(real: Callable[[str], Path]) -> GgufOracle:
    found = GgufOracle(real("smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf")
    found.cut_digits()
    return found


@pytest.fixture(scope="module")
def exact(oracle: GgufOracle) -> Answers:
    return answers(oracle.file)


def test_a_page_is_as_likely_as_in_transformers(oracle: GgufOracle, exact: Answers) -> None:
    assert oracle.page_differences(exact.page).max() < 1e-3


def test_greedy_tokens_match_transformers(oracle: GgufOracle, exact: Answers) -> None:
    for output in exact.continuations:
        assert oracle.behind_the_best(output).max() < TIE, output.outputs[0].text
    assert exact.continuations[0].outputs[0].text.startswith(" Paris")


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("chat", CHATS, ids=len)
def test_prompts_of_chats_match_transformers(oracle: GgufOracle, chat: list[dict[str, Any]], generate: bool) -> None:
    chats = ChatTokenizer(Tokenizer.load(oracle.file), oracle.file, ())
    settings: dict[str, Any] = {"add_generation_prompt": generate}
    text = oracle.tokenizer.apply_chat_template(chat, tokenize=False, **settings)
    assert chats.apply_chat_template(chat, tokenize=False, **settings) == text
    wanted = oracle.tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False, **settings)
    assert chats.apply_chat_template(chat, **settings) == wanted


def test_texts_are_tokenized_as_in_transformers(oracle: GgufOracle) -> None:
    tokenizer = Tokenizer.load(oracle.file)
    for text in (*PROMPTS, "", " ", "\n\n  x", "1234567", "\n\n  12", "don't", "ﬁ é", "<|im_start|>user"):
        ids = tokenizer.encode(text)
        assert ids == oracle.tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
