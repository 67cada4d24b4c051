"""Small batch files for tests of run-batch."""

import json
from pathlib import Path
from typing import Any

from vllm_lite.tools.batch import rows

URL = "/v1/completions"


def line(custom_id: object = "a", **more: object) -> str:
    """One line of an input."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": "x"}, **more})


def write(path: Path, *lines: str) -> str:
    path.write_text("".join(f"{text}\n" for text in lines))
    return str(path)


def answered(name: str, status: int = 200) -> dict[str, Any]:
    """The output's line for an answer."""
    return rows.answer(name, status, "id", {"usage": {"prompt_tokens": 1, "completion_tokens": 2}})


def ids(path: Path) -> list[str]:
    return [json.loads(text)["custom_id"] for text in path.read_text().splitlines()]
