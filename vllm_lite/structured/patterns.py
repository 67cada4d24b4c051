"""Regular expressions that repeat too much: llguidance writes counted parts out, as far as they are forced."""

import re

from vllm_lite.structured.limits import MAX_REPEATS

_STEP = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d{1,9})(?:,(\d{0,9}))?\}|.", re.DOTALL)


def too_many_repeats(pattern: str) -> int | None:
    """The column of the first count with which a part is repeated more than MAX_REPEATS times, all counts around it
    multiplied; None if there is none. Of a pattern that is not valid it says nothing reliable."""
    most_in = [1]  # of the groups that are open, the most repeated part in each
    last = 1
    for found in _STEP.finditer(pattern):
        step = found[0]
        if step == "(":
            most_in.append(1)
            last = 1
        elif step == ")" and len(most_in) > 1:
            last = most_in.pop()
            most_in[-1] = max(most_in[-1], last)
        elif found[1] is not None:
            last *= max(int(found[1]), int(found[2] or 0), 1)
            most_in[-1] = max(most_in[-1], last)
            if last > MAX_REPEATS:
                return found.start() + 1
        elif step not in "?*+":
            last = 1
    return None
