"""Moving encoded messages between processes: one interface, ZeroMQ behind it, and an in-process fake.

interface.py  Listener (the engine's side of a wire), Connection (a client's or worker's side), Wakeup, wait()
zmq.py        ROUTER / DEALER over ipc, and over tcp with CURVE keys
keys.py       their files
authenticator.py  who is let in over tcp
publisher.py  numbered batches for all who subscribe, and again what was missed
subscriber.py  who gets them
inproc.py     queues in one process: unit tests and --single-process
"""

from vllm_lite.protocol.codec import MAX_CLIENT_BYTES
from vllm_lite.transport.interface import Connection, Delivery, Listener, Tcp, Wakeup, wait
from vllm_lite.transport.keys import KeysOption, load_client_keys

__all__ = ["Connection", "Delivery", "KeysOption", "Listener", "Tcp", "Wakeup", "bind", "connect", "finish", "wait"]


def bind(address: str, tcp: Tcp | None = None, max_bytes: int = MAX_CLIENT_BYTES) -> Listener:
    """Listen on `address` (ipc://PATH or inproc://NAME), and on `tcp` beside an ipc one.

    Who sends a message of more than `max_bytes` loses the connection, but for an inproc one. Raises EngineError if an
    address is taken, ConfigError if keys are missing.
    """
    if address.startswith("inproc://"):
        from vllm_lite.transport.inproc import InprocListener

        return InprocListener(address)
    from vllm_lite.transport.zmq import ZmqListener

    return ZmqListener(address, tcp, max_bytes)


def connect(address: str, identity: bytes, keys: KeysOption = None) -> Connection:
    """Connect to `address` under `identity`, unique among its peers. Returns at once, answered or not.

    Raises ConfigError where `keys` are missing for a tcp address.
    """
    if address.startswith("inproc://"):
        from vllm_lite.transport.inproc import InprocConnection

        return InprocConnection(address, identity)
    from vllm_lite.transport.zmq import ZmqConnection

    return ZmqConnection(address, identity, load_client_keys(address, keys))


def finish() -> None:
    """Before a process ends: wait, for a bounded time, until what its closed channels sent has left."""
    from vllm_lite.transport import zmq

    zmq.finish()
