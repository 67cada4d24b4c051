"""Moving encoded messages between processes: one interface, ZeroMQ behind it, and an in-process fake.

interface.py  Listener (the engine's side of a wire), Connection (a client's or worker's side), Wakeup, wait()
zmq.py        ROUTER / DEALER over ipc
inproc.py     queues in one process: unit tests and --single-process
"""

from vllm_lite.transport.interface import Connection, Delivery, Listener, Wakeup, wait

__all__ = ["Connection", "Delivery", "Listener", "Wakeup", "bind", "connect", "finish", "wait"]


def bind(address: str) -> Listener:
    """Listen on `address` (ipc://PATH or inproc://NAME). Raises EngineError if it is taken."""
    if address.startswith("inproc://"):
        from vllm_lite.transport.inproc import InprocListener

        return InprocListener(address)
    from vllm_lite.transport.zmq import ZmqListener

    return ZmqListener(address)


def connect(address: str, identity: bytes) -> Connection:
    """Connect to `address` under `identity`, unique among its peers. Returns at once, answered or not."""
    if address.startswith("inproc://"):
        from vllm_lite.transport.inproc import InprocConnection

        return InprocConnection(address, identity)
    from vllm_lite.transport.zmq import ZmqConnection

    return ZmqConnection(address, identity)


def finish() -> None:
    """Before a process ends: wait, for a bounded time, until what its closed channels sent has left."""
    from vllm_lite.transport import zmq

    zmq.finish()
