"""One LLM in several threads, and in signal handlers."""

import os
import signal
import sys
from typing import Any

import pytest

from tests.fakes import DEADLINE_S, FakeEngine
from tests.unit.test_llm import engine, llm, meanwhile
from vllm_lite.client.llm import LLM
from vllm_lite.errors import EngineError, RequestError

__all__ = ["engine", "llm"]  # fixtures


def test_threads_share_the_request_ids(llm: LLM, engine: FakeEngine) -> None:
    """A generator of ids raises ValueError when two threads ask at once, as they do within microseconds here."""
    failures: list[Exception] = []

    def ask() -> None:
        try:
            for _ in range(200):
                with pytest.raises(RequestError, match=r"^prompt 99: the prompt is empty"):
                    llm.generate([*([[1]] * 99), []], use_tqdm=False)
        except Exception as error:
            failures.append(error)

    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [meanwhile(ask) for _ in range(4)]
        for thread in threads:
            thread.join(DEADLINE_S)
    finally:
        sys.setswitchinterval(usual_s)
    assert not failures


def test_a_signal_handler_may_close_in_the_middle_of_a_call(
    llm: LLM, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = llm.launched.session
    add = session._streams.add

    def interrupted(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)  # its handler runs here, while the session is locked
        add(*args)

    usual = signal.signal(signal.SIGUSR1, lambda *_: llm.close())
    monkeypatch.setattr(session._streams, "add", interrupted)
    try:
        with pytest.raises(EngineError, match=r"^the client was closed$"):
            llm.generate("a", use_tqdm=False)
    finally:
        signal.signal(signal.SIGUSR1, usual)
