"""Serve a model from a Ray cluster, at one address: replicas of the engine, each with its own workers, behind the HTTP
application of `serve`. RAY_ADDRESS is the cluster, by default this machine. Flags are those of `serve`, and the
replicas'."""

import argparse
import signal
import threading
from importlib.util import find_spec

from vllm_lite.errors import ConfigError
from vllm_lite.ray.config import RayServeConfig
from vllm_lite.runtime.settings import add_flags as add_config_flags
from vllm_lite.tools.cli import vllm_flags

NAME = "vllm_lite"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="MODEL", nargs="?", help="folder of a Hugging Face checkpoint, or org/model")
    parser.add_argument("--config", metavar="FILE", help="YAML or TOML file with settings")
    parser.add_argument("--print-config", action="store_true", help="print all settings as such a file, and exit")
    add_config_flags(parser, RayServeConfig)
    vllm_flags.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    flags = {name: getattr(arguments, name) for name in RayServeConfig.__struct_fields__}
    flags["model"] = arguments.model if arguments.folder is None else arguments.folder
    config = RayServeConfig.load(flags, file=arguments.config, of_vllm=arguments.of_vllm, notice=vllm_flags.say)
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
