"""Moving encoded messages between processes: one interface, ZeroMQ behind it, and an in-process fake.

interface.py  Listener (the engine's side of a wire), Connection (a client's or worker's side), Wakeup, wait()
zmq.py        ROUTER / DEALER over ipc, and over tcp with CURVE keys
keys.py       files of CURVE keys
authenticator.py  checks the keys of tcp clients
publisher.py  publishes numbered batches, and replays missed ones
subscriber.py  receives them
inproc.py     queues in one process: unit tests and --single-process
time_slice.py  short time slices for threads that pass messages on
"""

from vllm_lite.protocol.codec import MAX_CLIENT_BYTES
from vllm_lite.transport.interface import Connection, Delivery, Listener, Tcp, Wakeup, wait
from vllm_lite.transport.keys import KeysOption, load_client_keys

__all__ = ["Connection", "Delivery", "KeysOption", "Listener", "Tcp", "Wakeup", "bind", "connect", "finish", "wait"]


def bind(address: str, tcp: Tcp | None = None, max_bytes: int = MAX_CLIENT_BYTES) -> Listener:
    """Listen on `address` (ipc://PATH or inproc://NAME), and on `tcp` beside an ipc one.

    A peer that sends a message of more than `max_bytes` is disconnected, except over inproc. Raises EngineError if an
    address is taken, ConfigError if keys are missing.
    """
    if address.startswith("inproc://"):
        from vllm_lite.transport.inproc import InprocListener

        return InprocListener(address)
    from vllm_lite.transport.zmq import ZmqListener

    return ZmqListener(address, tcp, max_bytes)


def connect(address: str, identity: bytes, keys: KeysOption = None) -> Connection:
    """Connect to `address` under `identity`, unique among its peers. Returns at once, without waiting for the peer.

    Raises ConfigError if `keys` are missing for a tcp address.
    """
    if address.startswith("inproc://"):
        from vllm_lite.transport.inproc import InprocConnection

        return InprocConnection(address, identity)
    from vllm_lite.transport.zmq import ZmqConnection

    return ZmqConnection(address, identity, load_client_keys(address, keys))


def finish() -> None:
    """Called before a process ends: wait, for a bounded time, until the messages of closed channels have been sent."""
    from vllm_lite.transport import zmq

    zmq.finish()
