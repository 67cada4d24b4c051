"""A fake engine process, for tests of code that starts engines. Its served_model_name names its behaviour.

"dies,serves" has a behaviour for each life; the last one also applies to all later lives.
"""

import os
import signal
import time

import msgspec

from tests.fakes import DEADLINE_S, welcome
from vllm_lite import transport
from vllm_lite.process_settings import EngineSettings
from vllm_lite.protocol.api import Dying, FromClient, Generate, GetStats, Heartbeat, Hello, Ping, Refused, ToClient
from vllm_lite.protocol.codec import client_to_engine, engine_to_client
from vllm_lite.protocol.stats import Stats
from vllm_lite.runtime import supervise
from vllm_lite.runtime.wakeup import Wakeup

REASON = "weights are missing: lm_head.weight"


def main(settings: EngineSettings, stop: Wakeup) -> int:
    """serves, stays (serves, whatever asks it to end), recovers (always), refuses (and ends), hangs (before it is
    ready), exits (at once), ends (with status 1 before it is ready), dies, freezes, fails or gives-up (at the first
    request). The last two say why to all peers, and wait until one of them is a supervisor, which comes late."""
    behaviours = settings.config.served_model_name.split(",")
    behaviour = behaviours[min(settings.life, len(behaviours)) - 1]
    if behaviour == "exits":
        return 3
    listener, peers = transport.bind(settings.address), set[bytes]()
    last_words: tuple[Dying, int] | None = None
    deadline_s = time.monotonic() + 6 * DEADLINE_S
    try:
        while (behaviour == "stays" or not stop.is_set()) and time.monotonic() < deadline_s:
            transport.wait(1.0, listener, stop)
            while (item := listener.recv()) is not None:
                message: FromClient = client_to_engine.decode(item[1])
                if behaviour == "hangs":
                    continue
                peers.add(item[0])
                answer, status = respond(message, behaviour, settings)
                if isinstance(answer, Dying):
                    last_words, status = (answer, status or 0), None
                elif answer is not None:
                    listener.send(item[0], engine_to_client.encode(answer))
                if last_words is not None and any(b"supervisor" in peer for peer in peers):
                    for peer in peers:
                        listener.send(peer, engine_to_client.encode(last_words[0]))
                    return last_words[1]
                if status is not None and (settings.life == 1 or behaviour != "refuses" or b"supervisor" in item[0]):
                    return status
    finally:
        listener.close()
        if not settings.config.single_process:
            transport.finish()
    return 0


def respond(message: FromClient, behaviour: str, settings: EngineSettings) -> tuple[ToClient | None, int | None]:
    """The answer to a message, and the exit status with which the process ends after it, or None."""
    if isinstance(message, Ping):
        return Heartbeat(settings.life, 0), None
    if isinstance(message, GetStats) and behaviour == "recovers":
        return Stats(recovering="worker 0 died", restarts={"died": 2, "engine": 1}, life=2), None
    if isinstance(message, Hello):
        if behaviour in ("refuses", "ends"):
            is_bad = behaviour == "refuses"
            return Refused(REASON, bad_input=is_bad), 2 if is_bad else 1
        served = settings.config.served_model_name
        return msgspec.structs.replace(welcome(model=served), epoch=settings.life), None
    if isinstance(message, GetStats) and behaviour == "recovers":
        return Stats(recovering="worker 0 died", restarts={"died": 2, "engine": 1}, life=2), None
    if isinstance(message, Generate):
        if behaviour == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif behaviour == "freezes":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif behaviour == "fails":
            return Dying("the engine failed: KeyError(7)", is_final=False), 1
        elif behaviour == "gives-up":
            return Dying("worker 0 died: killed by SIGKILL"), 3
    return None, None


if __name__ == "__main__":
    supervise.run_child(
        main, EngineSettings, graceful=True, cleanup=lambda settings: supervise.remove_dir(settings.run_dir)
    )
