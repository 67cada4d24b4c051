"""Number of random examples for a property: a share of what its test names, all of them where EXAMPLES=1.

    @settings(max_examples=examples(300))

Every run draws other examples, so the coverage adds up over runs.
"""

import os

SHARE = float(os.environ.get("EXAMPLES", "0.25"))


def examples(number: int) -> int:
    return max(1, round(number * SHARE))
