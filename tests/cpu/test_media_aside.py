"""Media that a worker computes aside: in pieces beside steps, and at once where somebody asks for the vectors."""

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_lite.layers.vision.tower import Pieces
from vllm_lite.protocol.encoder import DemoteEncoded, EncodeAside, FreeEncoded, PromoteEncoded
from vllm_lite.worker.step_parts.media import MediaVectors

NUM_PIECES = 5
DIGESTS = [bytes([number]) * 32 for number in range(2)]


class Tower:
    """Computes a medium of one pixel in some pieces, and counts them."""

    spec = SimpleNamespace(whole_in="no layers")
    device = torch.device("cpu")
    num_pieces = 0

    def shape(self, num_tokens: int, grid: Any) -> tuple[int, int]:  # noqa: ARG002
        return 1, num_tokens

    def places(self, num_tokens: int, grid: Any) -> None:
        pass

    def arranged(self, vectors: torch.Tensor, grid: Any) -> torch.Tensor:  # noqa: ARG002
        return vectors

    def in_pieces(self, image: torch.Tensor) -> Pieces:
        for _ in range(NUM_PIECES):
            self.num_pieces += 1
            yield
        return image[0].float()


@pytest.fixture
def part() -> MediaVectors:
    """A part that has been told to compute two media aside."""
    tower: Any = Tower()
    part = MediaVectors(tower, lambda: None, 1e-6)
    rows: Any = SimpleNamespace(changed=False)
    part.attach(rows)
    for number, digest in enumerate(DIGESTS):
        apply(part, EncodeAside(digest, 1, bytes([number] * 3)))
    return part


def apply(part: MediaVectors, entry: Any) -> None:
    part.handlers()[type(entry)](entry)


def nothing() -> Any:
    """The inputs of a step without a token."""
    return SimpleNamespace(handles=[], num_tokens=0, num_samples=np.zeros(0, np.int64))


def step(part: MediaVectors) -> list[bytes]:
    """Run a step that reads no medium. Returns the media that it reports as computed."""
    inputs = nothing()
    fields: dict[str, Any] = {}
    part.build(inputs)
    part.answer(inputs, fields)
    return list(fields.get("encoded", []))


def test_a_step_computes_a_piece_at_least_and_one_medium_after_another(part: MediaVectors) -> None:
    said, tower = [step(part)], part.tower
    assert tower.num_pieces == 1  # type: ignore[attr-defined]
    said += [step(part) for _ in range(2 * NUM_PIECES + 1)]
    assert [digest for each in said for digest in each] == DIGESTS
    assert said[NUM_PIECES - 1] == [], "each piece has had a step"
    assert part.num_encoded == 2
    assert part.can_run_ahead([])


def test_a_step_has_as_many_pieces_as_the_goal_leaves_time_for(
    part: MediaVectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second passes with each look at the clock, and so with each piece: a step that took 2 of 10 s leaves 7, the
    last of which could be missed. Beside tokens of a prompt it is known from the second such step on."""
    seconds = itertools.count(1)
    monkeypatch.setattr("vllm_lite.worker.step_parts.media.time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    inputs = nothing()
    monkeypatch.setattr(sys.modules[__name__], "NUM_PIECES", 30)
    part.max_itl_s = 10.0
    pieces = list[int]()
    tower: Any = part.tower
    for took_s, num_tokens in ((2, 0), (6, 0), (11, 0), (5, 1), (2, 0)):
        inputs.num_tokens = num_tokens
        before = tower.num_pieces
        part.build(inputs)
        pieces.append(tower.num_pieces - before)
        part.prepare(inputs)
        for _ in range(took_s - 1):
            next(seconds)
        part.commit(inputs, np.empty(0, np.int64), None)
    inputs.num_tokens = 1
    before = tower.num_pieces
    part.build(inputs)
    pieces.append(tower.num_pieces - before)
    assert pieces == [8, 6, 2, 1, 1, 3]  # one is computed whatever the goal


@pytest.mark.parametrize("ask", ["store", "move"])
def test_reading_vectors_computes_the_remaining_pieces_at_once(part: MediaVectors, ask: str) -> None:
    """Ranks progress at different speeds: a rank may still compute a medium that another one has reported."""
    first, second = DIGESTS
    step(part)
    assert not part.can_run_ahead([])
    if ask == "store":
        found = part.get(second)
    else:
        apply(part, DemoteEncoded([second]))
        apply(part, PromoteEncoded([second]))
        found = part.get(second)
    assert found is not None
    assert found.tolist() == [[1.0, 1.0, 1.0]]
    assert step(part)[0] == second
    assert part.get(first) is not None


def test_freed_media_are_not_computed_further(part: MediaVectors) -> None:
    step(part)
    apply(part, FreeEncoded(DIGESTS))
    tower: Any = part.tower
    before = tower.num_pieces
    assert step(part) == []
    assert tower.num_pieces == before
    assert part.get(DIGESTS[0]) is None


@pytest.mark.parametrize(("num_tokens", "num_pieces"), [(0, 5), (1, 2)])
def test_without_a_latency_goal_media_take_a_share_of_the_time_of_next_tokens(
    part: MediaVectors, monkeypatch: pytest.MonkeyPatch, num_tokens: int, num_pieces: int
) -> None:
    """Next tokens took 40 s. Of the 6 s, or the 3 s beside tokens of prompts, the last could be missed."""
    seconds = itertools.count(1)
    monkeypatch.setattr("vllm_lite.worker.step_parts.media.time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    inputs = nothing()
    part.max_itl_s, tower = 0.0, part.tower
    part.prepare(inputs)
    for _ in range(39):
        next(seconds)
    part.commit(inputs, np.empty(0, np.int64), None)
    inputs.num_tokens = num_tokens
    part.build(inputs)
    assert tower.num_pieces == num_pieces  # type: ignore[attr-defined]
    fields: dict[str, Any] = {}
    part.answer(inputs, fields)
    assert fields["other_s"] == num_pieces
    part.rows.changed = False
    part.get(DIGESTS[0])
    assert part.rows.changed, "a steady step would not say it"
    part.answer(inputs, fields)
    assert fields["other_s"] == 1, "one look at the clock before the rest, and one behind it"
    part.answer(inputs, fields)
    assert fields["other_s"] == 0
