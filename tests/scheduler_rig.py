"""A scheduler, its pools and a simulated worker, stepped by hand, for the tests of scheduling."""

from collections.abc import Callable, Sequence
from typing import Any

from tests.simulated_worker import SimulatedWorker, candidates, next_token
from vllm_lite.engine.blocks.disk_tier import DiskTier
from vllm_lite.engine.blocks.groups import make_groups
from vllm_lite.engine.blocks.host_tier import HostTier
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.blocks.part import CachePart
from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.encoder_cache import EncoderCache, EncoderSizes
from vllm_lite.engine.request import Produced, Request
from vllm_lite.engine.scheduling.beam import Beam, BeamSearch
from vllm_lite.engine.scheduling.queues import Options
from vllm_lite.engine.scheduling.scheduler import Scheduler
from vllm_lite.engine.states.slots import StateSlots
from vllm_lite.engine.stored_media import StoredMedia
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.encoder import MediaContent
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.spans import Media
from vllm_lite.protocol.step import BlockOp, SchedulerOutput
from vllm_lite.runtime.prefix_hash import PrefixHasher

VOCAB = 50


class Rig:
    """A scheduler, its pools and a simulated worker, stepped by hand. `depth` steps may be in flight, and their results
    may `come_together`, like those of one message."""

    def __init__(
        self,
        num_blocks: int = 20,
        block_size: int = 4,
        caching: bool = True,
        *,
        windows: Sequence[int | None] = (None,),
        num_host_blocks: int = 0,
        max_swap_blocks: int = 10**9,
        num_state_slots: int = 0,
        num_host_states: int = 0,
        max_moved_states: int = 1,
        blocks_each: int = 0,
        host_tier: type[HostTier] = HostTier,
        more_parts: Sequence[CachePart[Any]] = (),
        disk: bool = False,
        preload: float = 0.0,
        encoder: EncoderSizes | None = None,
        depth: int = 1,
        come_together: bool = False,
        policy: object | None = None,
        **options: int | bool | str,
    ) -> None:
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "adaptive_drafts": False, **options}
        self.decisions: list[tuple[str, dict[str, int | str]]] = []
        self.host = host_tier(num_host_blocks, num_blocks, caching) if num_host_blocks else None
        self.blocks = KVBlocks(
            BlockPool(num_blocks, caching),
            make_groups(windows, block_size),
            block_size,
            host=self.host,
            watermark=0.01,
            max_swap_blocks_per_step=max_swap_blocks,
        )
        self.states: StateSlots | None = None
        parts: list[CachePart[Any]] = [self.blocks]
        if num_state_slots:
            room = {"num_host_states": num_host_states, "max_moves": max_moved_states, "blocks_each": blocks_each}
            self.states = StateSlots(num_state_slots, block_size, caching, **room)
            parts.append(self.states)
        self.encoder = None if encoder is None else EncoderCache(self.blocks.pool, encoder)
        if self.encoder is not None:
            parts.append(self.encoder)
        if disk:
            parts.append(tier := DiskTier(self.blocks, self.states, preload=preload))
            if self.encoder is not None:
                parts.append(StoredMedia(self.encoder, tier, block_size, lambda: self.kv.hasher))
        self.kv = KVCacheManager([*parts, *more_parts], PrefixHasher(block_size, "seed"), self.blocks.counters)
        self.scheduler = Scheduler(self.kv, Options(**options), policy)  # type: ignore[arg-type]
        self.scheduler.on_decision = lambda code, _sequence, numbers: self.decisions.append((code, numbers))
        slots = int(options["max_num_seqs"])
        self._sizes = (num_blocks, block_size, slots, VOCAB, windows, num_host_blocks)
        self.worker = self._new_worker()
        self.max_swap_blocks, self.max_moved_states = max_swap_blocks, max_moved_states
        self.depth, self.come_together = depth, come_together
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.scores: dict[str, list[float]] = {}

    def _new_worker(self) -> SimulatedWorker:
        worker = SimulatedWorker(*self._sizes)
        worker.states = None if self.states is None else {}
        worker.reads_media = self.encoder is not None
        return worker

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 5,
        stop: frozenset[int] = frozenset(),
        deadline_s: float | None = None,
        marks: tuple[int, ...] = (),
        media: tuple[Media, ...] = (),
        **params: object,
    ) -> Request:
        max_len = min(len(prompt) + max_tokens, self.scheduler.max_len)
        contents = tuple(MediaContent(digest, digest) for digest in dict.fromkeys(each.digest for each in media))
        more: dict[str, Any] = {"marks": marks, "media": media, "contents": contents}
        message = Generate(name, pack_tokens(prompt), SamplingParams(max_tokens=max_tokens, **params), **more)  # type: ignore[arg-type]
        request = Request(message, b"client", max_len, stop)
        request.deadline_s = deadline_s
        self.scheduler.add(request)
        return request

    def lose_workers(self) -> None:
        """Let the workers die with all their data; there are none until replace_workers()."""
        self.worker.die()
        assert not self.scheduler.lose_workers("the workers died", 0.0)
        assert not self.scheduler.in_flight
        self.scheduler.check_integrity()
        assert self.kv.pool.num_used == self.kv.pool.num_cached == 0
        assert self.host is None or self.host.pool.num_used == self.host.pool.num_cached == 0

    def replace_workers(self) -> None:
        self.worker = self._new_worker()
        self.scheduler.resume(self.scheduler.generation + 1, 0.0)

    def restart_workers(self) -> None:
        self.lose_workers()
        self.replace_workers()

    def abort(self, name: str) -> None:
        self.scheduler.branching.end_samples(self.scheduler.requests[name], (), "abort")

    def output(self, name: str, index: int = 0) -> list[int]:
        return self.outputs.get((name, index), [])

    def step(self) -> list[Produced]:
        in_flight = self.scheduler.in_flight
        while len(in_flight) < self.depth and (output := self.scheduler.schedule()) is not None:
            ops = [op for op, _, _ in output.block_ops]
            assert ops.count(BlockOp.SWAP_IN) + ops.count(BlockOp.SWAP_OUT) <= self.max_swap_blocks, "a step's stall"
            assert ops.count(BlockOp.STATE_IN) + ops.count(BlockOp.STATE_OUT) <= self.max_moved_states
            self.worker.submit(output)
            assert self.worker.num_scheduled[-1] == self.scheduler.num_scheduled_tokens
            assert self.scheduler.num_scheduled_tokens <= self.scheduler.options.max_num_batched_tokens
        assert in_flight or not self.scheduler.requests, "nothing would wake the engine up"
        produced: list[Produced] = []
        while (result := self.worker.poll()) is not None:
            produced += self.scheduler.update(result)
            self.scheduler.check_integrity()
            if not self.come_together:
                break
        for item in produced:
            self.record(item)
        return produced

    def watch(self, see: Callable[[SchedulerOutput], object]) -> None:
        """Call `see` with each step from here on."""
        schedule = self.scheduler.schedule

        def watched(now_s: float = 0.0) -> SchedulerOutput | None:
            if (step := schedule(now_s)) is not None:
                see(step)
            return step

        self.scheduler.schedule = watched  # type: ignore[method-assign]

    def record(self, item: Produced) -> None:
        sample = item.request.request_id, item.sample
        known = self.outputs.setdefault(sample, [])
        assert item.start == len(known)
        known += item.token_ids
        if item.prompt is not None:
            scores = self.scores.setdefault(item.request.request_id, [])
            assert item.prompt.start == len(scores) + 1, "each score comes once, in order"
            scores += [entry.logprob for entry in item.prompt.entries]
        if item.reason:
            assert sample not in self.reasons, "a second terminal message"
            self.reasons[sample] = item.reason

    def drain(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.requests:
                while self.scheduler.in_flight:
                    self.step()
                assert self.kv.pool.num_used == 0
                assert self.host is None or self.host.pool.num_used == 0
                assert not self.scheduler.waiting
                states = self.states
                assert states is None or states.store.num_held == 0
                assert states is None or states.host is None or states.host.num_pinned == 0
                return
            self.step()
        raise AssertionError("requests are left that make no progress")


def expected(
    prompt: list[int], max_tokens: int, stop: frozenset[int] = frozenset(), sample: int = 0, seed: int = 0
) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, VOCAB, sample, seed))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def expected_beams(prompt: list[int], width: int, max_tokens: int, stop: frozenset[int]) -> list[list[int]]:
    """A complete beam search over plain lists, with all tokens as candidates."""
    search = BeamSearch(SamplingParams(n=width, use_beam_search=True), len(prompt), len(prompt) + max_tokens, stop)
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    while True:
        ranked = [Beam(out, score, candidates([*prompt, *out], VOCAB, VOCAB)) for out, score in beams]
        chosen = search.advance(ranked)
        if chosen is None:
            return [hypothesis.token_ids for hypothesis in search.hypotheses]
        beams = [([*beams[parent][0], token], score) for parent, token, score in chosen]
