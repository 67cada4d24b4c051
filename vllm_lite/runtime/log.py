"""Logging to stderr: one line per record, with the name of the process."""

import json
import logging
import os
import sys
import time
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from vllm_lite.errors import ConfigError

MOMENTS_VARIABLE = "VLLM_LITE_MOMENTS"


class _SafeHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler that ignores write errors: a closed pipe or a full disk must not stop the service."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class _Json(logging.Formatter):
    """One JSON object per line: time (UTC, ISO 8601), process, level, logger, message, and exception if there is
    one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "process": self._process, "level": record.levelname.lower(), "logger": record.name}
        line["message"] = record.getMessage()
        if record.exc_info is not None:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def setup(process: str, level: str = "info", format: str = "text", config_file: str | None = None) -> None:  # noqa: A002
    """Send this process's records of `vllm_lite` to stderr, named `process` ("engine", "worker 0"). A `config_file`,
    JSON for logging.config.dictConfig, is applied last. Raises ConfigError."""
    handler = _SafeHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s {process:<8} %(levelname)-7s %(message)s", "%H:%M:%S")
    handler.setFormatter(_Json(process) if format == "json" else text)
    root = logging.getLogger("vllm_lite")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    if config_file is not None:
        _configure(config_file)


def _configure(path: str) -> None:
    import logging.config  # hardly ever needed, and slow

    try:
        with open(path, encoding="utf-8") as file:
            settings: dict[str, Any] = json.load(file)
        logging.config.dictConfig({"disable_existing_loggers": False, **settings})
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(f"log_config_file {path!r} cannot be used: {error}") from error


def get(name: str) -> logging.Logger:
    """Get the logger of a module; for `__main__`, the package's."""
    return logging.getLogger("vllm_lite" if name == "__main__" else name)


def moment(process: str, text: str) -> None:
    """Append a time stamp for `process` having done `text` to the file in VLLM_LITE_MOMENTS, for `python benchmarks
    startup`."""
    if path := os.environ.get(MOMENTS_VARIABLE):
        with suppress(OSError), open(path, "a") as file:  # one short line: lines of several writers do not mix
            file.write(f"{time.monotonic()}\t{process}\t{text}\n")
