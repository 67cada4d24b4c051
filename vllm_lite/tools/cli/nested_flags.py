"""Flags for single keys of a JSON setting, as in vLLM: --speculative-config.method ngram. They are merged into the flag
for the whole object before the command line is parsed."""

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

MAX_DEPTH = 8


def joined(words: Sequence[str], known: Collection[str]) -> list[str]:
    """`words` with all keys of a flag merged into one object, at the place of the first. Flags in `known` are
    unchanged. Keys are added to an object that is also given. Raise ValueError for a key nested too deeply."""
    objects: dict[str, dict[str, Any]] = {}
    kept: list[str] = []
    for flag, keys, value in _read(words, known):
        if not keys:
            kept.append(value)
            continue
        if flag not in objects:
            objects[flag] = {}
            kept += [flag, ""]
        _put(objects[flag], keys, _value(value))
    for flag, found in objects.items():
        places = [place + 1 for place, word in enumerate(kept[:-1]) if word == flag]
        whole: dict[str, Any] = {}
        for place in places:
            whole |= _object(kept[place])
        for place in places:
            kept[place] = json.dumps(whole | found)
    return kept


def _read(words: Sequence[str], known: Collection[str]) -> Iterator[tuple[str, list[str], str]]:
    """Each unchanged word as ("", [], word), and each key as (flag, keys, value)."""
    rest = iter(words)
    for word in rest:
        name, has_value, value = word.partition("=")
        flag, dot, keys = name.partition(".")
        if not (dot and flag.startswith("-") and flag in known and name not in known):
            yield "", [], word
            continue
        path = keys.replace("-", "_").split(".")
        if len(path) > MAX_DEPTH:
            raise ValueError(f"{name} is {len(path)} keys deep; settings have at most {MAX_DEPTH}")
        yield flag, path, value if has_value else next(rest, "")


def _put(found: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = found.get(key)
        found[key] = found = inner if isinstance(inner, dict) else {}
    found[keys[-1]] = value


def _value(text: str) -> Any:
    """Parse JSON; any other text is kept."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _object(text: str) -> dict[str, Any]:
    value = _value(text)
    return value if isinstance(value, dict) else {}
