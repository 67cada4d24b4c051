"""LLM's argument `priority`, with a fake engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tokenizers_for_tests as made
from tests.fakes import FakeEngine, welcome
from tests.unit.test_llm import TEMPLATE, TOKENIZER, fake_launch, meanwhile
from vllm_lite.client.llm import LLM
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.params import SamplingParams


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    (tmp_path / "tokenizer.json").write_bytes(made.byte_level())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with FakeEngine(answer=welcome(vocab_size=TOKENIZER.vocab_size, tokenizer=str(tmp_path))) as engine:
        yield engine


@pytest.fixture
def llm(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    fake_launch(engine, monkeypatch)
    with LLM(tmp_path, tokenizer=tmp_path, generation_config="vllm") as llm:
        yield llm


@pytest.mark.parametrize(("priority", "expected"), [(None, [7, 0]), (3, [3, 3]), ([5, -1], [5, -1])])
def test_priorities_beside_the_params(llm: LLM, engine: FakeEngine, priority: Any, expected: list[int]) -> None:
    seen: list[int] = []

    def act() -> None:
        for _ in range(4):
            asked = engine.expect(Generate)
            seen.append(asked.params.priority)
            engine.finish(asked.request_id, 0, 1)

    meanwhile(act)
    params = [SamplingParams(priority=7), SamplingParams()]
    llm.generate(["a", "b"], params, use_tqdm=False, priority=priority)
    llm.chat([[{"role": "user", "content": "a"}]] * 2, params, use_tqdm=False, priority=priority)
    assert seen == expected * 2


@pytest.mark.parametrize(
    ("priority", "error"), [([1], "each of 2 prompts, got 1"), (2**40, "priority must"), ("high", "priority")]
)
def test_bad_priorities_are_refused(llm: LLM, priority: Any, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        llm.generate(["a", "b"], use_tqdm=False, priority=priority)
