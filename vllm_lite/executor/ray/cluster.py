"""The connection of an engine's process to the Ray cluster, which it makes once and keeps to its end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from vllm_lite.errors import ConfigError

NAMESPACE = "vllm_lite"


def connect() -> str:
    """Connect to the cluster that RAY_ADDRESS names, or the one of this machine. Returns this node's address there.

    Raises ConfigError if there is none.
    """
    with _own_signals():
        if not ray.is_initialized():
            try:
                ray.init(
                    address="auto",
                    namespace=NAMESPACE,
                    log_to_driver=False,
                    configure_logging=False,
                    logging_level="warning",
                )
            except ConnectionError as error:
                raise ConfigError(
                    f"distributed_executor_backend is ray, and there is no Ray cluster: {error}; run `ray start "
                    "--head` here, or set RAY_ADDRESS"
                ) from error
        return str(ray.util.get_node_ip_address())


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray sets handlers of its own, which would end the process in the middle of its work."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
