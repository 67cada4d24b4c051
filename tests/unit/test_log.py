"""Format of the log's lines, and the settings that change it."""

import json
import logging
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from vllm_lite.errors import ConfigError
from vllm_lite.runtime import log


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    root = logging.getLogger("vllm_lite")
    before = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def test_text_names_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("worker 0")
    log.get("vllm_lite.x").info("loaded %d", 3)
    log.get("vllm_lite.x").debug("hidden")
    assert capsys.readouterr().err.split()[1:] == ["worker", "0", "INFO", "loaded", "3"]


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("engine", "debug", "json")
    logger = log.get("vllm_lite.x")
    logger.debug("two\nlines: %s", "é")
    try:
        int("broken")
    except ValueError:
        logger.exception("failed")
    plain, failed = map(json.loads, capsys.readouterr().err.splitlines())
    assert datetime.fromisoformat(plain.pop("time")).tzinfo is not None
    assert plain == {"process": "engine", "level": "debug", "logger": "vllm_lite.x", "message": "two\nlines: é"}
    assert failed["message"] == "failed"
    assert failed["exception"].endswith("base 10: 'broken'\n")


def test_a_file_has_the_last_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = {"class": "logging.FileHandler", "filename": str(tmp_path / "log"), "delay": True}
    logger = {"handlers": ["file"], "level": "WARNING", "propagate": False}
    settings = {"version": 1, "handlers": {"file": handler}, "loggers": {"vllm_lite": logger}}
    (tmp_path / "log.json").write_text(json.dumps(settings))
    log.setup("server", "info", "text", str(tmp_path / "log.json"))
    log.get("vllm_lite.x").info("hidden")
    log.get("vllm_lite.x").warning("kept")
    assert (tmp_path / "log").read_text() == "kept\n"
    assert capsys.readouterr().err == ""
    for handler_ in logging.getLogger("vllm_lite").handlers:
        handler_.close()


@pytest.mark.parametrize(
    "text", [None, "{", "[]", '{"version": 2}', '{"version": 1, "handlers": {"a": {"class": "no"}}}']
)
def test_a_bad_file_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "log.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"log_config_file .*log\.json' cannot be used: "):
        log.setup("server", "info", "text", str(path))
