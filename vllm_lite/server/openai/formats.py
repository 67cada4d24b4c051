"""Formats: the served model's formats of tool calls and reasoning, applied to requests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vllm_lite.checkpoint.gguf.checkpoint import GgufCheckpoint
from vllm_lite.client.text.response import shipped
from vllm_lite.client.text.response.choose import FormatChoice, choose, thinking_of
from vllm_lite.client.text.response.parser import ResponseParser
from vllm_lite.client.text.response.template import Format
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import ModelError
from vllm_lite.protocol.structured import Thinking
from vllm_lite.runtime.untrusted_files import read_bounded
from vllm_lite.structured.calls.call_shape import CallShape

FALLBACK = "hermes"
"""Format for forced tool calls of a model without a known format of its own."""
TAIL_TOKENS = 4096
"""Number of last prompt tokens that are searched for the beginning of the assistant's message."""


def architectures_of(folder: str) -> list[str]:
    """The `architectures` of the config.json in `folder`, or of a GGUF model; [] if there are none."""
    try:
        if (gguf := GgufCheckpoint.find(Path(folder))) is not None:
            return [gguf.architecture.name]
        config = msgspec.json.decode(read_bounded(Path(folder) / "config.json"), type=_Config)
    except (OSError, ModelError, msgspec.MsgspecError, UnicodeDecodeError):  # the engine reports the error
        return []
    return config.architectures or []


class _Config(msgspec.Struct):
    architectures: list[str] | None = None


class Formats:
    """The model's format, chosen once for all requests. `choice` has the names and the reason."""

    def __init__(self, choice: FormatChoice, tokenizer: Tokenizer) -> None:
        self.choice = choice
        self.tokenizer = tokenizer
        self._fallback: Format | None = None

    @classmethod
    def of(
        cls,
        folder: str,
        tokenizer: Tokenizer,
        names: tuple[str | None, str | None],
        template: str | None,
        architectures: Sequence[str],
    ) -> "Formats":
        """Choose the format of the model in `folder`. Raises ConfigError for an unknown name, and ModelError."""
        choice = choose(folder, tokenizer, names=names, template=template, architectures=architectures)
        return cls(choice, tokenizer)

    @property
    def calls(self) -> str | None:
        return self.choice.calls

    @property
    def reasoning(self) -> str | None:
        return self.choice.reasoning

    def format(self, *, is_forced: bool) -> Format | None:
        """The format for a request; if a tool call `is_forced`, one that can write calls."""
        own = self.choice.format
        if not is_forced or (own is not None and own.shape is not None):
            return own
        if self._fallback is None:
            added, special = self.tokenizer.added_tokens, self.tokenizer.special_ids
            self._fallback = shipped.compose(FALLBACK, self.reasoning if own is not None else None, added, special)
        return self._fallback

    def shape(self) -> CallShape:
        found = self.format(is_forced=True)
        return msgspec.convert(dict(found.shape or {}) if found is not None else {}, CallShape)

    def tail(self, token_ids: Sequence[int]) -> str:
        """Decode the last TAIL_TOKENS of a prompt, with special tokens."""
        return self.tokenizer.decode(token_ids[-TAIL_TOKENS:], skip_special_tokens=False)

    def thinking(self, token_ids: Sequence[int], *, is_forced: bool) -> Thinking | None:
        """Rules for thinking in the output of a prompt; None if the model does not think."""
        found = self.format(is_forced=is_forced)
        return None if found is None else thinking_of(found, self.tokenizer, self.tail(token_ids))

    def finds(self, tools: Sequence[Mapping[str, Any]], *, is_forced: bool) -> bool:
        """Whether outputs can have reasoning or tool calls beside content."""
        found = self.format(is_forced=is_forced)
        return found is not None and (found.has_reasoning or (bool(tools) and found.has_calls))

    def parser(
        self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]], *, is_forced: bool
    ) -> ResponseParser | None:
        """Make a parser for one output of a prompt; None if all of it is content."""
        found = self.format(is_forced=is_forced)
        if found is None or not self.finds(tools, is_forced=is_forced):
            return None
        return ResponseParser(found, self.tail(token_ids), tools)

    def card(self) -> dict[str, str | None]:
        """The formats, as fields of /v1/models."""
        return {"tool_call_format": self.calls, "reasoning_format": self.reasoning, "format_because": self.choice.why}
