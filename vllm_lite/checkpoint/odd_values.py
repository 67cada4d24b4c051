"""Values of a config.json that say that there is none, as several tools write them where they have nothing to say."""

from typing import Any

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DTYPES = ("dtype", "torch_dtype")


def without_blanks(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config in which token ids below 0, a window of less than one token and the dtype "auto" are null.

    "auto" means what no dtype means.
    """
    changed: dict[str, Any] = {}
    for key in IDS:
        value = raw.get(key)
        if _is_below(value, 0):
            changed[key] = None
        elif isinstance(value, list):
            changed[key] = [each for each in value if not _is_below(each, 0)] or None
    if _is_below(raw.get("sliding_window"), 1):
        changed["sliding_window"] = None
    changed |= {key: None for key in DTYPES if raw.get(key) == "auto"}
    return raw | changed if changed else raw


def _is_below(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value < least
