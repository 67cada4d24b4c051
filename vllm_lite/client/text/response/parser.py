"""ResponseParser: the pieces of one output in, the deltas of its message out."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_lite.client.text.response.pieces import Delta, Piece


class ResponseParser:
    """Take one output apart. One per sample; it is fed everything in order and then finished once."""

    def __init__(self, format: Any, prefix: str = "", tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        """`prefix` is the rendered prompt, whose end may have begun the message. `tools` are those of the request
        ({"type": "function", "function": {...}}); without any, calls stay content."""
        raise NotImplementedError

    def feed(self, pieces: Sequence[Piece]) -> Delta:
        raise NotImplementedError

    def finish(self) -> Delta:
        raise NotImplementedError
