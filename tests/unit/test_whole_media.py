"""Media that a step computes as a whole or not at all: no step ends inside one, and every prompt gets on."""

import random
from typing import Any, cast

import pytest

from tests.scheduler_rig import Rig
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.blocks.part import Growth
from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.encoder_cache import EncoderCache, encoder_sizes
from vllm_lite.engine.request import Request
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.encoder import MediaContent
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.spans import Media

BUDGET = 16
PLACEHOLDER = 49


class SmallSteps:
    """Asks for steps of four tokens."""

    def budget(self, view: object) -> int:  # noqa: ARG002
        return 4


class WholeRig(Rig):
    """A rig whose media must be computed whole. `ended_inside` counts steps that ended inside one."""

    def __init__(self, **options: Any) -> None:
        encoder = EncoderCache(cast(BlockPool, None), encoder_sizes(BUDGET), whole_media=True)
        usual: dict[str, Any] = {"num_blocks": 60, "max_num_batched_tokens": BUDGET, "more_parts": [encoder]}
        super().__init__(**(usual | options))

    def show(self, name: str, parts: list[int], max_tokens: int = 3, seed: int = 0) -> Request:
        """Queue a prompt of words and media in turn, of so many tokens each."""
        rng, tokens, media = random.Random(seed), list[int](), list[Media]()
        for index, count in enumerate(parts):
            if index % 2 and count:
                media.append(Media("image", rng.randbytes(32), count, len(tokens)))
            tokens += [PLACEHOLDER] * count if index % 2 else [rng.randrange(40) for _ in range(count)]
        contents = tuple(MediaContent(each.digest, each.digest) for each in media)
        params = SamplingParams(max_tokens=max_tokens)
        message = Generate(name, pack_tokens(tokens), params, media=tuple(media), contents=contents)
        request = Request(message, b"client", len(tokens) + max_tokens, frozenset())
        self.scheduler.add(request)
        return request

    def check(self) -> None:
        for request in self.scheduler.requests.values():
            for sequence in request.sequences:
                for medium in request.media:
                    ends_inside = medium.start < sequence.num_computed < medium.end
                    cached = sequence.num_computed == sequence.num_cached  # a hit may end inside one
                    assert not ends_inside or cached or sequence not in self.scheduler.running


def test_the_first_prompt_may_take_more_than_its_half_for_a_medium() -> None:
    """Otherwise it would wait for ever, because half of the budget is reserved for later prompts."""
    rig = WholeRig()
    rig.show("a", [4, 10, 20])
    rig.add("b", list(range(14)), max_tokens=2)
    rig.step()
    rig.check()
    rig.show("c", [2, 12, 3], seed=1)
    rig.add("d", list(range(30)), max_tokens=2)
    for _ in range(200):
        if not rig.scheduler.requests:
            break
        rig.step()
        rig.check()
    assert not rig.scheduler.requests


@pytest.mark.parametrize("options", [{"policy": SmallSteps()}, {"max_itl_s": 1e-9}], ids=["policy", "latency"])
def test_a_step_that_is_to_be_short_has_room_for_a_medium(options: dict[str, Any]) -> None:
    rig = WholeRig(**options)
    rig.scheduler.measured(rig.scheduler.rates._replace(prefill_tokens_per_s=1000.0))
    rig.add("a", [1, 2], max_tokens=25)  # answers meanwhile
    rig.step()
    request = rig.show("b", [3, 12, 2])
    for _ in range(12):
        rig.step()
        rig.check()
    assert request.request_id not in rig.scheduler.requests
    assert "a" in rig.scheduler.requests
    rig.drain()


@pytest.mark.parametrize("seed", range(40))
def test_no_step_ends_inside_a_medium(seed: int) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {"max_num_seqs": rng.choice([2, 4]), "depth": rng.choice([1, 2])}
    options |= rng.choice([{}, {"policy": SmallSteps()}, {"num_blocks": 14}, {"num_blocks": 14, "num_host_blocks": 30}])
    options |= rng.choice([{"preemption": "recompute"}, {"preemption": "swap"}])
    rig = WholeRig(**options)
    most = BUDGET - options["max_num_seqs"] + 1
    for index in range(12):
        parts = [rng.randint(0, 4), rng.randint(1, most), rng.randint(1, 6)]
        if rng.random() < 0.3:
            parts += [rng.randint(1, most), rng.randint(1, 3)]
        rig.show(str(index), parts, max_tokens=rng.randint(1, 8), seed=rng.randint(0, 3))
        for _ in range(rng.randint(0, 3)):
            rig.step()
            rig.check()
    for _ in range(600):
        if not rig.scheduler.requests:
            break
        rig.step()
        rig.check()
    rig.drain()


def test_where_blocks_run_out_the_first_prompt_ends_before_a_medium(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt has the slots of the block in which the medium begins, and gets no further ones for the rest of the
    budget."""
    rig, grow = WholeRig(windows=(8,)), KVCacheManager.grow

    def short(self: KVCacheManager, sequence: Sequence, num_tokens: int) -> Growth | None:
        return None if num_tokens > 20 else grow(self, sequence, num_tokens)

    (sequence,) = rig.show("a", [19, 8, 3]).sequences
    rig.step()
    assert sequence.num_computed == BUDGET
    monkeypatch.setattr(KVCacheManager, "grow", short)
    rig.step()
    assert (sequence.num_computed, sequence.num_slots) == (19, 20)
    monkeypatch.undo()
    rig.drain()
