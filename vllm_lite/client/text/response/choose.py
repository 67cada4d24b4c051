"""Chooses the format of a model's output: its own response_template, else the format that flags name, else the one
whose literals are in the chat template, else in the vocabulary, else the one of the architecture."""

import json
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_lite.client.text.response import shipped
from vllm_lite.client.text.response.parser import ResponseParser
from vllm_lite.client.text.response.shipped import Description
from vllm_lite.client.text.response.template import Format, read_template
from vllm_lite.client.text.templates.template_literals import stands_free, template_literals
from vllm_lite.client.text.templates.template_source import CONFIG_FILE, MAX_FILE_BYTES
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import ModelError
from vllm_lite.protocol.structured import MAX_MARK_TOKENS, Thinking
from vllm_lite.runtime.untrusted_files import read_bounded

NONE = "none"
"""Name of a parser that disables parsing, regardless of the checkpoint."""


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """The chosen format, the names of its two parts (None for a missing part), and the reason of the choice."""

    format: Format | None
    calls: str | None
    reasoning: str | None
    why: str


def choose(
    folder: str | Path | None,
    tokenizer: Tokenizer,
    *,
    names: tuple[str | None, str | None] = (None, None),
    template: str | None = None,
    architectures: Sequence[str] = (),
) -> FormatChoice:
    """Choose the format of the checkpoint in `folder`.

    `names` are those of --tool-call-parser and --reasoning-parser, `template` is the source of the chat template in
    force, `architectures` are those of config.json. A checkpoint's own response_template holds unless a name is given.
    Raises ConfigError for an unknown name, ModelError for a response_template that cannot be read.
    """
    spec = _own(folder) if folder is not None and names == (None, None) else None
    if spec is not None:
        own = read_template(spec, tokenizer.added_tokens, tokenizer.special_ids)
        name = "response_template"
        return FormatChoice(
            own, name if own.has_calls else None, name if own.has_reasoning else None, f"{CONFIG_FILE} has it"
        )
    texts = None if template is None else template_literals(template)
    evidence = _Evidence(texts, tokenizer.added_tokens, frozenset(architectures))
    found = [_part(part, name, evidence) for part, name in zip(_PARTS, names, strict=True)]
    (calls, calls_why), (reasoning, reasoning_why) = found
    if calls is None and reasoning is None:
        return FormatChoice(None, None, None, "; ".join(dict.fromkeys([calls_why, reasoning_why])))
    made = shipped.compose(calls, reasoning, tokenizer.added_tokens, tokenizer.special_ids)
    return FormatChoice(made, calls, reasoning, f"calls: {calls_why}; reasoning: {reasoning_why}")


_PARTS = ("tool_calls", "reasoning")
_TOKEN = re.compile(r"[<\[].*[>\]]")
_Weight = tuple[bool, int]
"""Evidence for a format: whether it is the format of the architecture, and the total length of its literals that were
found."""


class _Evidence(NamedTuple):
    """Evidence for the choice of a model's format: the texts of its chat template (None if there is none), the added
    tokens of its vocabulary, and its architectures."""

    template: str | None
    tokens: Container[str]
    architectures: frozenset[str]


def _part(part: str, name: str | None, evidence: _Evidence) -> tuple[str | None, str]:
    """Choose the format of calls or of reasoning. Returns its name and why."""
    if name == NONE:
        return None, "off by a flag"
    if name is not None:
        return shipped.description(name, part)[0], "named by a flag"
    candidates = {own: item for own, item in shipped.descriptions().items() if getattr(item, part) is not None}
    for weigh, why in (
        (_in_template, "the chat template has its literals"),
        (_in_vocabulary, "the vocabulary has its tokens"),
        (_of_architecture, f"the architecture is {', '.join(sorted(evidence.architectures))}"),
    ):
        weights = {own: weight for own, item in candidates.items() if (weight := weigh(item, evidence)) is not None}
        if weights:
            return max(weights, key=lambda own: weights[own]), why
    if evidence.template is None:
        return None, "there is no chat template, and no known format in the vocabulary or the architecture"
    return None, "no known format in the chat template, the vocabulary or the architecture"


def _in_template(item: Description, evidence: _Evidence) -> _Weight | None:
    """Weigh a format by its literals in the template; None if the template lacks some literal of each list."""
    template = evidence.template
    if template is None:
        return None
    found = [texts for texts in item.fingerprints if all(stands_free(text, template) for text in texts)]
    return (False, max(sum(map(len, texts)) for texts in found)) if found else None


def _in_vocabulary(item: Description, evidence: _Evidence) -> _Weight | None:
    """Weigh a format by its literals that are added tokens; None if the vocabulary lacks one that looks like one.

    If several formats have the same tokens, the architecture decides.
    """
    shaped = [[text for text in texts if _TOKEN.fullmatch(text)] for texts in item.fingerprints]
    found = [texts for texts in shaped if texts and all(text in evidence.tokens for text in texts)]
    is_own = not evidence.architectures.isdisjoint(item.architectures)
    return (is_own, max(sum(map(len, texts)) for texts in found)) if found else None


def _of_architecture(item: Description, evidence: _Evidence) -> _Weight | None:
    return None if evidence.architectures.isdisjoint(item.architectures) else (True, 0)


def _own(folder: str | Path) -> Any:
    """Read the checkpoint's own response_template; None if it has none."""
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        return None
    try:
        config = json.loads(read_bounded(path, MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return config.get("response_template") if isinstance(config, dict) else None


def thinking_of(response_format: Format, tokenizer: Tokenizer, prefix: str) -> Thinking | None:
    """Return the token ids that begin and end the thinking of an output after the prompt `prefix`. None if the format
    has no thinking, its literals are patterns, or the prompt has closed it already.
    """
    if response_format.thinking is None:
        return None
    opening, closing = response_format.thinking
    begin, end = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (opening, closing))
    if not 0 < len(end) <= MAX_MARK_TOKENS or len(begin) > MAX_MARK_TOKENS:
        return None
    parser = ResponseParser(response_format, prefix)
    if parser.has_reasoned:
        return None
    return Thinking(end=end, begin=begin, is_open=parser.is_reasoning or not opening)
