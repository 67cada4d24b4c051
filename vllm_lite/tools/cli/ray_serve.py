"""Serve a model from a Ray cluster, at one address: replicas of the engine, each with its own workers, behind the HTTP
application of `serve`. RAY_ADDRESS is the cluster, by default this machine. Flags are those of `serve`, and the
replicas'."""

import argparse
import signal
import threading
from importlib.util import find_spec

from vllm_lite.errors import ConfigError
from vllm_lite.ray.config import RayServeConfig
from vllm_lite.tools.cli import vllm_flags

NAME = "vllm_lite"


def add_flags(parser: argparse.ArgumentParser) -> None:
    vllm_flags.add_settings(parser, RayServeConfig, "folder of a Hugging Face checkpoint, or org/model")


def run(arguments: argparse.Namespace) -> int:
    config = vllm_flags.load_settings(arguments, RayServeConfig)
    if arguments.print_config:
        print(config.to_yaml(), end="")
        return 0
    if find_spec("ray") is None:
        raise ConfigError("ray-serve needs the package ray: pip install 'vllm-lite[ray]'")
    return _serve(config)


def _serve(config: RayServeConfig) -> int:
    """Run the application until a signal, then remove it from the cluster. Raises EngineError if it cannot start."""
    from vllm_lite.ray.deploy import deployed  # ray takes a second to import

    try:
        with deployed(config, NAME, on_connected=_take_signals) as url:
            print(f"vllm-lite: ready at {url}, {config.replicas} replicas on Ray Serve", flush=True)
            threading.Event().wait()
    except _Stopped:
        pass
    return 0


class _Stopped(BaseException):
    """Raised by the first signal, after which the application ends."""


def _take_signals() -> None:
    def stop(*_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # ending takes some time
        raise _Stopped

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
