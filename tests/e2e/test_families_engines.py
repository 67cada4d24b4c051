"""Two rows of tests/acceptance/families_check.py, for the families that differ most: with prefix hits and after swaps,
tokens and log-probabilities equal transformers'."""

from collections import Counter

from tests.acceptance.families_check import ROWS, check_variant
from tests.families.all import VARIANTS

NAMES = ("phi3-window", "gemma3", "olmo3", "cohere2", "gpt2", "falcon-alibi", "deepseek-v3")
"""A window, windows beside full attention, norms after blocks, layers without rope, learned positions, ALiBi,
latents."""
LENGTHS = (31, 65, 129, 160, 200)


def test_prefix_hits_and_swapping_change_nothing() -> None:
    rows = [row for row in ROWS if row.name in ("prefix hits", "preempted, swapped")]
    happened = Counter[str]()
    failed = {
        variant.name: check_variant(variant, rows, happened, LENGTHS) for variant in VARIANTS if variant.name in NAMES
    }
    assert failed == dict.fromkeys(failed, 0)
    assert set(failed) == set(NAMES)
    assert set(happened) == {row.name for row in rows}
    assert min(happened.values()) > 0
