"""The formats that come with this package: one JSON file each, named as vLLM names its parsers.

A format describes calls, reasoning, or both. One of calls and one of reasoning compose into the Format of a model.
"""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from vllm_lite.client.text.response.marks import Marks
from vllm_lite.client.text.response.template import Field, Format, delimiter, field_of, texts_in, thinking_literals
from vllm_lite.errors import ConfigError


class Description(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of formats/.

    `tool_calls`, `reasoning` and `skip` are fields as in a response_template; what opens `skip` is dropped. `anchors`
    are what a prompt may have before the message. `fingerprints`: a chat template that contains all texts of one of
    these lists is of this format, and so is a vocabulary that has those of them that look like tokens. `thinking` has
    the literals for a budget of reasoning where they are not those of the field. `shape` is what a grammar of calls
    needs: structured/calls/tools.py's CallShape.
    """

    models: str
    aliases: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    fingerprints: tuple[tuple[str, ...], ...] = ()
    anchors: tuple[str, ...] = ()
    starts_in_reasoning: bool = False
    tool_calls: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    skip: dict[str, Any] | None = None
    thinking: dict[str, str] | None = None
    shape: dict[str, Any] | None = None


@cache
def descriptions() -> dict[str, Description]:
    """Read all files, by name."""
    folder = resources.files(__package__) / "formats"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    return {file.name.removesuffix(".json"): msgspec.json.decode(file.read_bytes(), type=Description) for file in files}


def names_of(part: str) -> list[str]:
    """List the names that --tool-call-parser (`part` is "tool_calls") or --reasoning-parser ("reasoning") accepts."""
    found = {name: item for name, item in descriptions().items() if getattr(item, part) is not None}
    return sorted({*found, *(alias for item in found.values() for alias in item.aliases)})


def description(name: str, part: str) -> tuple[str, Description]:
    """Find a format by its name or an alias. Raises ConfigError, which lists all names."""
    for own, item in descriptions().items():
        if getattr(item, part) is not None and name in (own, *item.aliases):
            return own, item
    flag = "--tool-call-parser" if part == "tool_calls" else "--reasoning-parser"
    raise ConfigError(f"{flag} is {name!r}; it must be one of {', '.join(names_of(part))}")


def compose(calls: str | None, reasoning: str | None, added_tokens: Mapping[str, int], special_ids: Any = ()) -> Format:
    """Create the Format of a model from the names for calls and reasoning. Raises ConfigError for an unknown name."""
    parts: list[tuple[str, Description, str]] = []
    if reasoning is not None:
        parts.append((*description(reasoning, "reasoning"), "reasoning"))
    if calls is not None:
        parts.append((*description(calls, "tool_calls"), "tool_calls"))
    anchors = [anchor for _, item, _ in parts for anchor in item.anchors]
    specs = [(name, part, getattr(item, part)) for name, item, part in parts]
    skips = {f"{name} skip": item.skip for name, item, _ in parts if item.skip is not None}
    specs += [(name, "skip", skip) for name, skip in skips.items()]
    thinking = [_thinking(item) for _, item, part in parts if part == "reasoning"]
    named = [*texts_in([spec for _, _, spec in specs]), *anchors, *(text for pair in thinking if pair for text in pair)]
    marks = Marks(named, added_tokens, special_ids)
    fields = [Field("content", "content")]
    for name, part, spec in specs:
        fields.append(field_of(name if part == "skip" else part, spec, marks, _ROLES[part]))
    starts = [item.starts_in_reasoning for _, item, part in parts if part == "reasoning"]
    return Format(
        name="+".join(dict.fromkeys(name for name, _, _ in parts)),
        fields=tuple(fields),
        marks=marks,
        anchor=delimiter({"anchor": anchors}, "anchor", marks, "anchors") if anchors else None,
        starts_in=next((field for field in fields if field.role == "reasoning"), None) if any(starts) else None,
        thinking=thinking[0] if thinking else None,
        shape=next((item.shape for _, item, part in parts if part == "tool_calls"), None),
    )


_ROLES = {"tool_calls": "calls", "reasoning": "reasoning", "skip": "skipped"}


def _thinking(item: Description) -> tuple[str, str] | None:
    if item.thinking is not None:
        return item.thinking["begin"], item.thinking["end"]
    return thinking_literals({"reasoning": item.reasoning}) if item.reasoning is not None else None
