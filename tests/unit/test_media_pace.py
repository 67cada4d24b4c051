"""The rate of streams beside images, from the engine's core to the workers' steps: the time that a step spends on
images is limited to a share of a decode step's time, as measured lately."""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import pytest

from tests.unit.test_rates import COST, Latencies
from vllm_lite.executor.simulated import CostModel, SimulatedExecutor, VirtualClock
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.control import Ready
from vllm_lite.protocol.encoder import GROWTH_ASIDE, EncodeAside, MediaContent
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.spans import Media
from vllm_lite.protocol.step import Continue, NewRequest, SchedulerOutput

PIECE_S = 0.001
STREAMS = 4
IMAGE = 400
ALWAYS_DRAFTING = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    "disable_adaptive_drafts": True,
}


class Towers(SimulatedExecutor):
    """Computes one image at a time, in pieces beside its steps, and counts the tokens of images in each."""

    def __init__(self, ready: Ready, clock: VirtualClock, cost: CostModel) -> None:
        super().__init__(ready, clock, cost)
        self.pieces = 12
        """Steps beside which an image is computed."""
        self.left: dict[bytes, int] = {}
        """Pieces of each image that are to be computed."""
        self.media: dict[int, tuple[Media, ...]] = {}
        self.image_tokens: list[dict[int, int]] = []
        """Image tokens of each step, by handle."""
        self.was_aside: list[bool] = []
        """Whether an image was being computed when each step came."""
        self.counts: list[int] = []
        """Tokens of each entry of a running sequence."""

    def submit(self, *steps: SchedulerOutput) -> None:
        for step in steps:
            self.was_aside.append(bool(self.left))
            self.counts += [each.num_tokens for each in step.entries if isinstance(each, Continue)]
            self.left |= {each.digest: self.pieces for each in step.entries if isinstance(each, EncodeAside)}
            self.media |= {each.handle: each.media for each in step.entries if isinstance(each, NewRequest)}
            before = {handle: each.num_computed for handle, each in self._sequences.items()}
            super().submit(step)
            counts = {
                handle: _overlap(self.media[handle], before.get(handle, 0), each.num_computed)
                for handle, each in self._sequences.items()
            }
            self.image_tokens.append({handle: count for handle, count in counts.items() if count})
            if self.left:
                self._compute_piece()

    def _compute_piece(self) -> None:
        digest = next(iter(self.left))
        self.left[digest] -= 1
        ended = [] if self.left[digest] else [digest]
        for each in ended:
            del self.left[each]
        at_s, output = self._results.pop()
        self._free_at_s = at_s + PIECE_S
        output = msgspec.structs.replace(output, encoded=ended or None, other_s=PIECE_S)
        self._results.append((self._free_at_s, output))


def _overlap(media: tuple[Media, ...], start: int, end: int) -> int:
    return sum(max(0, min(end, each.end) - max(start, each.start)) for each in media)


class Images(Latencies):
    """Streams that decode, and images beside them."""

    executor_type: ClassVar[type[SimulatedExecutor]] = Towers
    executor: Towers
    facts: ClassVar[Mapping[str, Any]] = {"placeholders": {"image": 1}, "media_token_bytes": 3}

    def __init__(self, **settings: Any) -> None:
        super().__init__(20_000, **settings)
        for index in range(STREAMS):
            self.add("s" * (index + 1), 20, 4000)
        self.run(60)

    def show(self, seed: int, num_words: int = 3, name: str = "image") -> None:
        medium = Media("image", bytes([seed]) * 32, IMAGE, num_words)
        tokens = pack_tokens([100 + seed] * num_words + [1] * IMAGE + [2] * num_words)
        contents = (MediaContent(medium.digest, bytes(3 * IMAGE)),)
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        self.core.add(b"client", Generate(f"{name} {seed}", tokens, params, media=(medium,), contents=contents))

    def totals(self, first: int = 0, *, beside: bool | None = None) -> list[int]:
        """Tokens of images of each step from the first on, `beside` a tower or not."""
        steps = zip(self.executor.image_tokens, self.executor.was_aside, strict=True)
        return [sum(counts.values()) for counts, was in list(steps)[first:] if beside in (None, was)]


def most_beside(num_next: int, factor: float = 1.0) -> int:
    """Tokens of images that lengthen a step of so many next tokens by their share, where it takes `factor` as long."""
    return int(GROWTH_ASIDE * factor * (COST.step_s + num_next * COST.token_s) / COST.token_s)


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("drafts", [{}, ALWAYS_DRAFTING], ids=["plain", "always drafting"])
def test_tokens_of_images_keep_to_their_share_of_a_step(overlapped: bool, drafts: dict[str, Any]) -> None:
    bench = Images(async_scheduling=overlapped, **drafts)
    for seed in range(4):
        bench.show(seed)
    bench.run(600)
    assert sum(bench.totals()) == 4 * IMAGE
    most = most_beside(STREAMS * (4 if drafts else 1))
    assert 0.9 * most <= max(bench.totals(beside=False)) <= most + 1
    assert 0.4 * most <= max(bench.totals(beside=True)) <= most // 2 + 1, "a tower has the other half"


def test_two_images_share_the_image_tokens_of_a_step() -> None:
    bench = Images()
    for seed in range(2):
        bench.show(seed)
    bench.run(600)
    shared = [counts for counts in bench.executor.image_tokens if len(counts) > 1]
    assert len(shared) > 5
    most = most_beside(STREAMS)
    assert all(max(counts.values()) - min(counts.values()) <= 1 for counts in shared if sum(counts.values()) >= most)


def test_the_pace_is_measured_while_towers_compute() -> None:
    """In a long burst every step has image work. When all steps take four times as long, the estimate follows."""
    bench = Images()
    bench.executor.pieces = 1000
    bench.show(0)
    bench.run(100)
    alone_s = bench.core.scheduler.rates.alone_s
    assert alone_s == pytest.approx(COST.step_s + STREAMS * COST.token_s, rel=0.02)
    bench.executor.cost = CostModel(4 * COST.step_s, 4 * COST.token_s)
    bench.run(200)
    assert all(bench.executor.was_aside[70:])
    assert bench.core.scheduler.rates.alone_s == pytest.approx(4 * alone_s, rel=0.1)


def test_text_beside_images_is_not_limited() -> None:
    bench = Images()
    bench.show(1, num_words=300)
    bench.run(70)
    sizes = bench.budgets[60:70]
    assert max(sizes) >= 300


def test_prompts_that_come_in_leave_the_first_one_a_token() -> None:
    """Many ask about one image at once, and begin within it: each has a token of it at least."""
    bench = Images()
    for number in range(40):
        bench.show(1, num_words=16, name=f"question {number}")
    bench.run(120)
    assert len(bench.executor.counts) > 500
    assert min(bench.executor.counts) == 1
