"""An engine process without an engine, for the tests of whoever starts one: its served_model_name says what it does."""

import os
import signal
import time

from tests.fakes import DEADLINE_S, welcome
from vllm_lite import transport
from vllm_lite.config import EngineSettings
from vllm_lite.protocol.api import FromClient, Generate, Hello, Refused, ToClient
from vllm_lite.protocol.codec import client_to_engine, engine_to_client
from vllm_lite.runtime import supervise
from vllm_lite.runtime.wakeup import Wakeup

REASON = "weights are missing: lm_head.weight"


def main(settings: EngineSettings, stop: Wakeup) -> int:
    """serves, refuses (and ends), hangs (before it is ready), exits (at once), dies (at the first request)."""
    behaviour = settings.config.served_model_name
    if behaviour == "exits":
        return 3
    listener = transport.bind(settings.address)
    deadline_s = time.monotonic() + 6 * DEADLINE_S
    try:
        while not stop.is_set() and time.monotonic() < deadline_s:
            transport.wait(1.0, listener, stop)
            while (item := listener.recv()) is not None:
                message: FromClient = client_to_engine.decode(item[1])
                if behaviour == "hangs":
                    continue
                if isinstance(message, Hello):
                    refused = behaviour == "refuses"
                    answer: ToClient = Refused(REASON, bad_input=True) if refused else welcome(model=behaviour)
                    listener.send(item[0], engine_to_client.encode(answer))
                    if refused:
                        return 2
                elif isinstance(message, Generate) and behaviour == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
    finally:
        listener.close()
    return 0


if __name__ == "__main__":
    supervise.run_child(
        main, EngineSettings, graceful=True, cleanup=lambda settings: supervise.remove_dir(settings.run_dir)
    )
