"""An API server beside the first one: a process of its own with a session of its own. Entry point of a child."""

import asyncio
import socket

import uvloop

from vllm_lite import transport
from vllm_lite.client.session import Session
from vllm_lite.runtime import log, supervise
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.server.processes.api_servers import ApiSettings, Family
from vllm_lite.server.processes.loaded import Loaded
from vllm_lite.server.processes.service import Engine, Place, Service


def main(settings: ApiSettings, stop: Wakeup) -> int:
    """Serve until `stop` is set, or a signal comes."""
    config = settings.config
    log.setup(f"server {settings.number}", *config.logging)
    session = Session.connect(settings.address, heartbeat_timeout_s=settings.engine.heartbeat_timeout_s)
    loaded = Loaded(config)
    try:
        loaded.load(settings.engine)
        engine = Engine(session, settings.engine, lambda: str(session.dead))
        place = Place(settings.number, config.api_server_count, settings.run_dir)
        with socket.socket(fileno=settings.listener) as listener:
            service = Service(config, settings.keys, engine, loaded, place, listener)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(service.run(stop, Family()))
    finally:
        loaded.close()
        session.close()
        transport.finish()


if __name__ == "__main__":
    supervise.run_child(main, ApiSettings, graceful=True)
