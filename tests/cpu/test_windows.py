"""Sliding windows through whole models: transformers' logits, while KV outside of the windows is NaN."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.paged import BLOCK_SIZE, Oracle, Paged, check_mixed

MAX_DIFFERENCE = 3e-4
"""Maximum difference of logits of size 10 in float32."""
MIXED = {"family": "qwen3", "use_sliding_window": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "mistral-13": {"family": "mistral", "sliding_window": 13},
    "mistral-16": {"family": "mistral", "sliding_window": 16},
    "mistral-1": {"family": "mistral", "sliding_window": 1},
    "qwen3-11-mixed": MIXED | {"sliding_window": 11, "max_window_layers": 1},
    "qwen3-20-split": MIXED | {"sliding_window": 20, "max_window_layers": 3, "num_hidden_layers": 4},
    "qwen3-9-padded": MIXED
    | {
        "sliding_window": 9,
        "num_hidden_layers": 5,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full", "sliding")],
    },
}
GROUPS = {
    "mistral-13": [(13, 2)],
    "mistral-16": [(16, 2)],
    "mistral-1": [(1, 2)],
    "qwen3-11-mixed": [(None, 1), (11, 1)],
    "qwen3-20-split": [(None, 1), (None, 1), (None, 1), (20, 1)],
    "qwen3-9-padded": [(None, 2), (9, 3)],
}


@pytest.fixture(scope="module", params=VARIANTS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    name: str = request.param
    folder: Path = tmp_path_factory.mktemp("windows") / name
    oracle = Oracle(make_checkpoint(folder, **VARIANTS[name]))
    assert [(group.window, len(group.layers)) for group in oracle.spec.kv_groups] == GROUPS[name]
    return oracle


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_logits_match_transformers_whatever_the_chunk(oracle: Oracle, chunk: int) -> None:
    """150 tokens are many windows; chunks of 64 and more are longer than each."""
    logits = Paged(oracle).run(oracle.tokens, chunk)
    assert oracle.difference(logits) < MAX_DIFFERENCE
    assert torch.equal(logits.argmax(-1), oracle.logits.argmax(-1))


def test_a_window_needs_few_blocks(oracle: Oracle) -> None:
    """A pool with room for the full groups' blocks and the windows'; blocks that windows leave are reused at once."""
    total = -(-len(oracle.tokens) // BLOCK_SIZE)
    held = [
        total if group.window is None else -(-(group.window + 8) // BLOCK_SIZE) + 1 for group in oracle.spec.kv_groups
    ]
    logits = Paged(oracle, num_blocks=1 + sum(held)).run(oracle.tokens, 8)
    assert oracle.difference(logits) < MAX_DIFFERENCE


def test_several_sequences_in_one_step(oracle: Oracle) -> None:
    check_mixed(Paged(oracle, seed=3, num_blocks=400), oracle, MAX_DIFFERENCE)


@pytest.mark.parametrize("off_by", [-1, 1])
def test_a_window_of_another_size_shows(oracle: Oracle, off_by: int) -> None:
    paged = Paged(oracle)
    paged.set_windows([window and (window + off_by or 3) for window in (group.window for group in paged.groups)])
    assert oracle.difference(paged.run(oracle.tokens, 1000)) > 0.01


def test_logits_depend_on_the_windows(oracle: Oracle) -> None:
    paged = Paged(oracle)
    paged.set_windows([None] * len(oracle.spec.kv_groups))
    logits = paged.run(oracle.tokens, 1000)
    first = min(group.window for group in oracle.spec.kv_groups if group.window is not None)
    assert oracle.difference(logits[:first]) < MAX_DIFFERENCE, "up to there nobody looks back further"
    assert oracle.difference(logits[first:], first) > 0.1
