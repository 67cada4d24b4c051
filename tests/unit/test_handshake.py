"""Beginning of a session: the handshake, and every way in which there is none."""

import threading
import time
from contextlib import closing

import pytest

from tests.deadlines import scaled
from tests.fakes import DEADLINE_S, FakeEngine, welcome
from vllm_lite.client.engines.session import Session
from vllm_lite.errors import EngineError, ModelError
from vllm_lite.protocol import PROTOCOL_VERSION
from vllm_lite.protocol.api import Dying, Hello, Refused


def test_hello_and_welcome() -> None:
    with FakeEngine() as engine, closing(Session.connect(engine.address, model="fake")) as session:
        assert session.welcome == welcome()
        assert engine.hellos == [Hello(PROTOCOL_VERSION, "fake")]


def test_a_refusal_gives_the_engines_reason() -> None:
    refusal = FakeEngine(answer=Refused("this engine speaks version 9"))
    with refusal as engine, pytest.raises(EngineError, match=r"^this engine speaks version 9$"):
        Session.connect(engine.address)


def test_a_refusal_for_a_bad_model_is_a_model_error() -> None:
    refusal = FakeEngine(answer=Refused("weights are missing: a, b", bad_input=True))
    with refusal as engine, pytest.raises(ModelError, match=r"^weights are missing: a, b$"):
        Session.connect(engine.address)


def test_no_engine_answers() -> None:
    with pytest.raises(EngineError, match=r"no engine answered at inproc://nobody within 0\.05 s"):
        Session.connect("inproc://nobody", timeout_s=0.05)


def test_something_else_answers() -> None:
    engine = FakeEngine(silent=True)

    def answer() -> str | None:
        if engine.hellos:
            engine.send_raw(b"HTTP/1.1 400 Bad Request")
        return None

    with engine, pytest.raises(EngineError, match="is not an engine of this version"):
        Session.connect(engine.address, timeout_s=DEADLINE_S, alive=answer)


def test_an_engine_that_dies_while_loading_is_reported_at_once() -> None:
    began = time.monotonic()
    with FakeEngine(silent=True) as engine, pytest.raises(EngineError, match="did not start: killed by SIGKILL"):
        Session.connect(engine.address, timeout_s=scaled(100), alive=lambda: "killed by SIGKILL")
    assert time.monotonic() - began < DEADLINE_S


@pytest.mark.parametrize("words", [None, Dying("worker 0 died", is_final=False)])
def test_an_engine_that_dies_while_loading_may_be_replaced(words: Dying | None) -> None:
    """The supervisor replaces such an engine by the next life. Only the last engine has to answer."""
    first = FakeEngine(silent=True)
    others: list[FakeEngine] = []

    def alive() -> str | None:
        if first.hellos and not others:
            if words is not None:
                first.send(words)
            first.die()
            others.append(FakeEngine(address=first.address))
        return None

    with closing(Session.connect(first.address, timeout_s=DEADLINE_S, alive=alive)) as session:
        assert session.welcome == welcome()
    others[0].die()


def test_an_engine_that_dies_for_good_while_loading_is_not_waited_for() -> None:
    with FakeEngine(answer=Dying("worker 0 died")) as engine, pytest.raises(EngineError, match=r"^worker 0 died$"):
        Session.connect(engine.address, timeout_s=DEADLINE_S)


def test_a_dying_engines_message_is_preferred_to_its_exit_status() -> None:
    engine = FakeEngine(silent=True)

    def alive() -> str | None:
        if not engine.hellos:
            return None
        threading.Timer(0.1, engine.send, [Refused("no memory for KV blocks")]).start()
        return "exit status 1"

    with engine, pytest.raises(EngineError, match=r"^no memory for KV blocks$"):
        Session.connect(engine.address, timeout_s=DEADLINE_S, alive=alive)


def test_an_engine_may_take_its_time_to_load() -> None:
    with FakeEngine(silent=True) as engine:
        asked = threading.Event()

        def alive() -> str | None:
            if engine.hellos:
                asked.set()
            return None

        def greet() -> None:
            asked.wait(DEADLINE_S)
            engine.greet()

        threading.Thread(target=greet, daemon=True).start()
        with closing(Session.connect(engine.address, timeout_s=DEADLINE_S, alive=alive)) as session:
            assert session.welcome.model == "fake"
