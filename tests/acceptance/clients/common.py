"""Common parts of these programs. try_clients.py sets TRY_URL, the server, and TRY_MODEL, the folder that it serves."""

import os

URL = os.environ["TRY_URL"]
MODEL = os.environ["TRY_MODEL"]
PROMPT = "Tell me a story."
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tom", "Mia"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "feed", "description": "Feed a cat.", "parameters": SCHEMA}}


def check(what: object) -> None:
    """End the program with an error if `what` is empty."""
    if not what:
        raise SystemExit(f"nothing came: {what!r}")
