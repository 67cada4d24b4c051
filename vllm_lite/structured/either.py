"""Two grammars of which an output follows one."""

from typing import Any

import msgspec

from vllm_lite.structured.check import check_lark

_NAMES = ("first", "second")


def either(first: str, second: str) -> str:
    """Make the grammar of what follows `first` or `second`, each in the form in which grammars travel.

    Raises RequestError if both together are beyond the limits.
    """
    named: list[dict[str, Any]] = [{"lark_grammar": f"start: @{_NAMES[0]} | @{_NAMES[1]}\n"}]
    for name, text in zip(_NAMES, (first, second), strict=True):
        if not text.startswith("{"):
            named.append({"name": name, "lark_grammar": text})
            continue
        grammars = msgspec.json.decode(text, type=dict[str, list[dict[str, Any]]])["grammars"]
        named += [{**grammars[0], "name": name}, *grammars[1:]]
    return check_lark(msgspec.json.encode({"grammars": named}).decode(), "the grammar of calls or an answer")
