"""Run an engine until SIGTERM or Ctrl-C: python scripts/launch_engine.py --config configs/demo.yaml --block-size 8

Flags take precedence over VLLM_LITE_* variables, and these over the file. When the engine is ready, one JSON line on
stdout has its address and capacity. An engine that dies later is replaced at the same address, with a line in the log.
Exit status: 0 if it was stopped, 1 if it died for good, 2 if a flag or the model is at fault.
"""

import argparse
import json
import signal
import sys
import threading
from typing import Any, NoReturn

from vllm_lite.client.engines.launch import LaunchedEngine, launch
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError, ModelError, VllmLiteError
from vllm_lite.runtime import log
from vllm_lite.runtime.settings import add_flags

_LOOK_S = 0.2


class Parser(argparse.ArgumentParser):
    """Prints errors of flags as one line, as all other errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parse_args() -> dict[str, Any]:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="YAML or TOML file with settings")
    add_flags(parser, EngineConfig)
    return vars(parser.parse_args())


def ready_line(launched: LaunchedEngine) -> str:
    engine = launched.engine
    return json.dumps(
        {
            "address": launched.address,
            "tcp_address": launched.config.tcp_address,
            "model": engine.model,
            "pid": launched.pid,
            "max_model_len": engine.max_model_len,
            "num_blocks": engine.num_blocks,
            "block_size": engine.block_size,
            "capacity_tokens": engine.kv_tokens,
        }
    )


def run(flags: dict[str, Any], stop: threading.Event) -> int:
    config = EngineConfig.load(flags, file=flags.pop("config"))
    log.setup("launcher", *config.logging)
    launched = launch(config, stop.is_set)
    try:
        print(ready_line(launched), flush=True)
        while not stop.is_set():
            if launched.wait(_LOOK_S):
                print(f"launch_engine: {launched.reason}", file=sys.stderr)
                return 1
    finally:
        launched.close()
    return 0


def main() -> int:
    flags = parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        return run(flags, stop)
    except VllmLiteError as error:
        if stop.is_set():
            return 0
        print(f"launch_engine: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, ModelError)) else 1


if __name__ == "__main__":
    sys.exit(main())
