"""LLM.generate with a fake engine: order, errors, interruption. The real thing is in tests/e2e."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import tokenizers_for_tests as made
from tests.fakes import DEADLINE_S, FakeEngine, welcome
from vllm_lite.client.llm import LLM
from vllm_lite.client.session import Session
from vllm_lite.client.tokenizer import Tokenizer
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError, EngineDeadError, RequestError
from vllm_lite.protocol.api import Abort, Dying, Generate, Stats, Welcome
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.protocol.params import SamplingParams

TOKENIZER = Tokenizer(made.byte_level())


@dataclass
class FakeLaunched:
    """Stands for a started engine."""

    session: Session
    config: EngineConfig
    closed: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.session.address

    @property
    def engine(self) -> Welcome:
        return self.session.welcome

    def close(self) -> None:
        self.closed.append("closed")
        self.session.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    (tmp_path / "tokenizer.json").write_bytes(made.byte_level())
    with FakeEngine(answer=welcome(vocab_size=TOKENIZER.vocab_size, tokenizer=str(tmp_path))) as engine:
        yield engine


@pytest.fixture
def llm(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    def launch(config: EngineConfig, meanwhile: Callable[[EngineConfig], None]) -> FakeLaunched:
        meanwhile(EngineConfig(model=config.model, tokenizer=str(tmp_path)))
        return FakeLaunched(Session.connect(engine.address, timeout_s=DEADLINE_S), config)

    monkeypatch.setattr("vllm_lite.client.llm.launch", launch)
    with LLM("some/model") as llm:
        yield llm


def meanwhile(act: Callable[[], None]) -> threading.Thread:
    """Let the engine's side of a conversation run while the test waits in generate()."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def echo(engine: FakeEngine, count: int) -> Callable[[], None]:
    """Answer `count` requests, the last first, each with its own prompt."""

    def act() -> None:
        for asked in reversed([engine.expect(Generate) for _ in range(count)]):
            engine.finish(asked.request_id, 0, *unpack_tokens(asked.prompt))

    return act


def test_results_are_in_the_order_of_the_prompts(llm: LLM, engine: FakeEngine) -> None:
    meanwhile(echo(engine, 4))
    prompts: list[Any] = ["one", ids("two"), {"prompt": "three"}, {"prompt_token_ids": ids("four")}]
    outputs = llm.generate(prompts, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["one", "two", "three", "four"]
    assert [output.prompt for output in outputs] == ["one", None, "three", None]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize("prompt", ["one", ids("one"), {"prompt": "one"}, {"prompt_token_ids": ids("one")}])
def test_one_prompt_needs_no_list(llm: LLM, engine: FakeEngine, prompt: Any) -> None:
    meanwhile(echo(engine, 1))
    assert [output.outputs[0].text for output in llm.generate(prompt, use_tqdm=False)] == ["one"]


def test_no_prompts_no_results(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


def test_parameters_for_each_prompt(llm: LLM, engine: FakeEngine) -> None:
    seen: list[int | None] = []

    def act() -> None:
        for _ in range(2):
            asked = engine.expect(Generate)
            seen.append(asked.params.max_tokens)
            engine.finish(asked.request_id, 0, 1)

    meanwhile(act)
    llm.generate(["a", "b"], [SamplingParams(max_tokens=3), SamplingParams(max_tokens=4)], use_tqdm=False)
    assert seen == [3, 4]
    with pytest.raises(RequestError, match="one for each of 3 prompts, got 2"):
        llm.generate(["a", "b", "c"], [SamplingParams()] * 2, use_tqdm=False)


def test_a_bad_prompt_is_named_before_anything_is_sent(llm: LLM, engine: FakeEngine) -> None:
    with pytest.raises(RequestError, match=r"^prompt 2: the prompt is empty"):
        llm.generate(["a", "b", ""], use_tqdm=False)
    with pytest.raises(RequestError, match=r"^prompt 1: token ids must be between"):
        llm.generate([[1], [10**9]], use_tqdm=False)
    with pytest.raises(RequestError, match=r"^the prompt is empty"):
        llm.generate("", use_tqdm=False)
    engine.expect_nothing_more()


def test_a_failed_request_is_raised_after_the_others_ended(llm: LLM, engine: FakeEngine) -> None:
    ended: list[str] = []

    def act() -> None:
        first, second, third = (engine.expect(Generate).request_id for _ in range(3))
        engine.finish(second, 0, reason="error", error="the logits are not finite")
        engine.finish(first, 0, 1)
        engine.finish(third, 0, 1)
        ended.append(third)

    thread = meanwhile(act)
    with pytest.raises(RequestError, match=r"^prompt 1: the logits are not finite$"):
        llm.generate(["a", "b", "c"], use_tqdm=False)
    thread.join(DEADLINE_S)
    assert ended
    engine.expect_nothing_more()


def test_the_engines_death_is_raised_as_such(llm: LLM, engine: FakeEngine) -> None:
    def act() -> None:
        first = engine.expect(Generate)
        engine.expect(Generate)
        engine.finish(first.request_id, 0, 1)
        engine.send(Dying("worker 0 died: killed by SIGKILL"))

    meanwhile(act)
    with pytest.raises(EngineDeadError, match=r"^worker 0 died: killed by SIGKILL$"):
        llm.generate(["a", "b"], use_tqdm=False)
    with pytest.raises(EngineDeadError, match="worker 0"):
        llm.generate("a", use_tqdm=False)


def test_ctrl_c_aborts_everything_in_flight(llm: LLM, engine: FakeEngine) -> None:
    started: list[str] = []

    def act() -> None:
        started.extend(engine.expect(Generate).request_id for _ in range(3))
        os.kill(os.getpid(), signal.SIGINT)

    meanwhile(act)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], use_tqdm=False)
    aborted = {engine.expect(Abort).request_id for _ in range(3)}
    assert set(started) == aborted
    for request_id in aborted:
        engine.finish(request_id, 0, reason="abort")
    meanwhile(echo(engine, 1))
    assert llm.generate("again", use_tqdm=False)[0].outputs[0].text == "again"


def test_stop_strings(llm: LLM, engine: FakeEngine) -> None:
    def act() -> None:
        engine.tokens(engine.expect(Generate).request_id, 0, *ids("one END two"))

    meanwhile(act)
    (output,) = llm.generate("a", SamplingParams(stop=("END",)), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("one ", "END")
    engine.expect(Abort)


def test_stats(llm: LLM, engine: FakeEngine) -> None:
    def act() -> None:
        engine.expect(object)
        engine.send(Stats(*range(11)))

    meanwhile(act)
    assert llm.stats() == Stats(*range(11))


@pytest.mark.parametrize("shown", [True, False])
def test_progress(llm: LLM, engine: FakeEngine, capsys: pytest.CaptureFixture[str], shown: bool) -> None:
    meanwhile(echo(engine, 2))
    llm.generate(["one", "two"], use_tqdm=shown)
    seen = capsys.readouterr()
    assert seen.out == ""
    assert ("2/2" in seen.err and "tokens/s" in seen.err) is shown
    assert shown or not seen.err


def test_close_ends_the_engine_once(llm: LLM) -> None:
    launched: Any = llm._launched
    llm.close()
    llm.close()
    assert launched.closed == ["closed"]


def test_the_engine_ends_with_the_last_reference(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[FakeLaunched] = []

    def launch(config: EngineConfig, meanwhile: Callable[[EngineConfig], None]) -> FakeLaunched:
        launched.append(FakeLaunched(Session.connect(engine.address, timeout_s=DEADLINE_S), config))
        return launched[0]

    monkeypatch.setattr("vllm_lite.client.llm.launch", launch)
    llm = LLM("some/model", block_size=8, max_model_len="1k")
    assert (llm.config.model, llm.config.block_size, llm.config.max_model_len) == ("some/model", 8, 1000)
    del llm
    assert launched[0].closed == ["closed"]


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="'block_sise'; did you mean 'block_size'"):
        LLM("some/model", block_sise=8)
