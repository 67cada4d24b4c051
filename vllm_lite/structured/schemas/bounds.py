"""Moves bounds of numbers inwards to values that llguidance can enforce.

llguidance reads bounds as float64 and writes them out digit by digit, so 1e308 and the ends of int64 exceed its range.
A bound moved inwards keeps every output valid; the numbers lost are beyond 9e18, or closer to 0 than 1e-60.
"""

import math
from typing import Any

from vllm_lite.structured.findings import Findings
from vllm_lite.structured.schemas.schema import Schema

OUTWARDS = 9.2e18
"""Largest supported bound that allows 0: a maximum above 0, a minimum below it."""
OUTWARDS_OF_INTEGERS = {1: 2**63 - 1024, -1: 2**63 - 1}
"""The same for minima (1) and maxima (-1) of integers."""
INWARDS = 9e17
"""Largest supported bound that excludes 0."""
CLOSEST = 1e-60
"""Smallest supported bound other than 0."""

_KEYS = (
    *(("minimum", "minimum", 1), ("exclusiveMinimum", "minimum", 1)),
    *(("maximum", "maximum", -1), ("exclusiveMaximum", "maximum", -1)),
)


def hold_bounds(pointer: str, part: Schema, findings: Findings) -> None:
    """Move the bounds of `part` to supported values. Raises RequestError if there is none, unless the findings are
    lenient."""
    kinds = part.get("type")
    is_integer = "integer" in kinds and "number" not in kinds if isinstance(kinds, list) else kinds == "integer"
    if is_integer:
        _close(part)
    for key, inclusive, sign in _KEYS:
        if key not in part:
            continue
        value = part[key]
        moved = _moved(value, sign, OUTWARDS_OF_INTEGERS[sign] if is_integer else OUTWARDS)
        if moved is not None and not is_integer and abs(moved) > 2**53:
            moved = _rounded(moved, sign)
        if moved is None:
            most = f"{sign * INWARDS:g}"
            findings.cannot(pointer, key, f"{key} {value} is too far from 0 to be held; the farthest is {most}")
            del part[key]
        elif moved == 0 and value != 0 and key != inclusive:
            del part[key]
            part[inclusive] = sign * max(sign * part.get(inclusive, 0), 0)
        else:
            part[key] = moved


def _rounded(value: float, sign: int) -> int:
    """Round a bound inwards to 15 digits: llguidance replaces further digits by zeros."""
    unit: int = 10 ** (len(str(abs(int(value)))) - 15)
    return sign * -(-sign * int(value) // unit) * unit


def _close(part: Schema) -> None:
    """Convert exclusive bounds of an integer to inclusive ones, as float64 may not represent their neighbours."""
    for key, inclusive, sign in _KEYS:
        if key == inclusive or key not in part or not math.isfinite(_as_float64(part[key], sign)):
            continue
        value = part.pop(key)
        closed = math.floor(value) + 1 if sign == 1 else math.ceil(value) - 1
        part[inclusive] = sign * max(sign * part[inclusive], sign * closed) if inclusive in part else closed


def _moved(value: Any, sign: int, outwards: float) -> Any:
    """The supported bound for `value`: for a minimum (`sign` 1) not below it, for a maximum not above. None if there is
    none."""
    if value * sign <= -outwards:
        return -sign * outwards
    found = _as_float64(value, sign)
    above = found * sign
    if above > INWARDS:
        return None
    if 0 < above < CLOSEST:
        return sign * CLOSEST
    if -CLOSEST < above < 0:
        return 0
    return int(found) if found.is_integer() else value  # llguidance reads 9007199254740991.0 as one less


def _as_float64(value: Any, sign: int) -> float:
    try:
        found = float(value)
    except OverflowError:  # an integer of 309 digits
        return math.inf if value > 0 else -math.inf
    return math.nextafter(found, sign * math.inf) if found * sign < value * sign else found
