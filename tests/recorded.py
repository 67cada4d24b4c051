"""A recorded core with random work of every kind, for the tests of trace, replay and why."""

import random
from itertools import starmap
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from tests.simulated_worker import SimulatedWorker
from vllm_lite.config import EngineConfig
from vllm_lite.engine import core
from vllm_lite.engine.blocks.host_tier import HostTier
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.core import EngineCore, Lives, PoolSizes
from vllm_lite.engine.encoder_cache import EncoderSizes
from vllm_lite.engine.observe.replay import Replay
from vllm_lite.engine.request import Produced, Request
from vllm_lite.engine.scheduling.scheduler import Scheduler
from vllm_lite.errors import RequestError
from vllm_lite.executor.simulated import VirtualClock
from vllm_lite.protocol.api import ForkRequest, Generate, SampleSoFar
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.control import KVGroupInfo, Ready
from vllm_lite.protocol.encoder import MediaContent
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.spans import Media
from vllm_lite.protocol.step import NOT_FINITE, ModelOutput
from vllm_lite.trace import records
from vllm_lite.trace.reader import TraceReader
from vllm_lite.trace.writer import TraceWriter

VOCAB = 50
EOS = (7,)
COUNTED = ("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "swaps")


def snapshot(pool: BlockPool) -> list[tuple[int, int, str | None]]:
    """(id, reference count, hash as hex or None) of every block that is referenced or cached."""
    return [
        (block.block_id, block.ref_count, block.block_hash.hex() if block.block_hash else None)
        for block in pool.blocks
        if block.ref_count or block.block_hash
    ]


class OddPolicy:
    """Serves the latest first, computes little at times, and breaks once it has been asked 40 times."""

    def __init__(self) -> None:
        self.asked = 0

    def order(self, waiting: list[Any], view: Any) -> list[Any]:  # noqa: ARG002
        return sorted(waiting, key=lambda sequence: -sequence.request.arrival)

    def budget(self, view: Any) -> int:
        self.asked += 1
        if self.asked > 40:
            raise RuntimeError("enough")
        return int(view.max_num_batched_tokens) if view.now_s * 10 % 3 < 2 else 1


def media_of(name: str, num_tokens: int) -> tuple[tuple[Media, ...], tuple[MediaContent, ...]]:
    """Media for a prompt of `num_tokens` tokens, chosen from a few by the request's name."""
    rng, media, contents = random.Random(name), list[Media](), dict[bytes, bytes]()
    start = rng.randint(0, 4)
    while rng.random() < 0.7 and start + 1 < num_tokens:
        count = rng.randint(1, min(6, num_tokens - start - 1))
        digest = bytes([rng.randint(0, 2), count]) + bytes(30)
        media.append(Media("image", digest, count, start))
        contents[digest] = bytes(3 * count)
        start += count + rng.randint(0, 3)
    return tuple(media), tuple(MediaContent(*each) for each in contents.items())


class Recorded:
    """An EngineCore over a simulated worker, with a clock that random work advances."""

    def __init__(
        self,
        trace: Path | None,
        num_blocks: int = 20,
        windows: tuple[int | None, ...] = (None,),
        num_host_blocks: int = 0,
        num_state_slots: int = 0,
        num_host_states: int = 0,
        has_media: bool = False,
        life: int = 1,
        launch: str = "",
        **settings: Any,
    ) -> None:
        values = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16, "prefix_hash_seed": "s"} | settings
        config = EngineConfig.check(values | {"record": None if trace is None else str(trace)})
        config = config.resolve(max_position_embeddings=1000, dtype="float32", model_path="m")
        groups = tuple(KVGroupInfo("full" if window is None else "sliding", 1, window) for window in windows)
        ready = Ready(0, 1, num_blocks, 64, groups, 1000, VOCAB, EOS)
        if num_state_slots:
            states = {"num_state_slots": num_state_slots, "num_host_states": num_host_states, "state_bytes": 64}
            ready = msgspec.structs.replace(ready, **states)
        self._has_media = has_media
        if has_media:
            ready = msgspec.structs.replace(ready, placeholders={"image": 1}, media_token_bytes=3)
        self._sizes = (num_blocks, config.block_size, config.max_num_seqs, VOCAB, windows, num_host_blocks)
        self._has_states = num_state_slots > 0
        self.worker = self._new_worker()
        self.clock = VirtualClock(1000.0)
        sizes = PoolSizes(num_blocks, num_host_blocks, 50.0)
        with patch.object(core, "encoder_sizes", lambda *_: EncoderSizes(5, 7, 6)):  # so that there is little room
            self.core = EngineCore(config, ready, self.worker, sizes, Lives(3, life, launch), self.clock)  # type: ignore[arg-type]
        self.ended: dict[str, str] = {}

    def _new_worker(self) -> SimulatedWorker:
        worker = SimulatedWorker(*self._sizes)
        worker.states = {} if self._has_states else None
        worker.reads_media = self._has_media
        return worker

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    def add(self, name: str, prompt: list[int], max_tokens: int = 5, **params: Any) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        media = media_of(name, len(prompt)) if self._has_media else ((), ())
        asked = Generate(name, pack_tokens(prompt), sampling, media=media[0], contents=media[1])
        self.core.add(b"client", asked)

    def loop(self, fail: bool = False) -> bool:
        """Make one pass of the engine's loop. Returns False if no step is in flight."""
        produced = self.core.expire()
        while self.core.begin():
            self.clock.now_s += 0.001
        output = self.worker.poll()
        if output is not None:
            self.clock.now_s += 0.01
            produced += self.core.finish(self._spoilt(output) if fail else output)
        for item in produced:
            self.take(item)
        self.scheduler.check_integrity()
        return output is not None

    def take(self, item: Produced) -> None:
        """A client gets this."""
        if item.reason:
            self.ended[item.request.request_id] = item.reason

    def lose_workers(self, cause: str = "worker 0 died") -> None:
        """The workers die with all they have; until replace_workers() none are there."""
        self.worker.die()
        for item in self.core.lose_workers(cause):
            self.take(item)
        self.scheduler.check_integrity()

    def replace_workers(self) -> None:
        self.worker = self._new_worker()
        self.core.resume(self.worker, self.scheduler.generation + 1, 60.0)  # type: ignore[arg-type]

    def random_death(self, rng: random.Random, rate: float) -> None:
        """Let the workers die at random, or be replaced if they have died."""
        if not self.scheduler.has_workers and rng.random() < 0.5:
            self.clock.now_s += rng.random()
            self.replace_workers()
        elif rng.random() < rate:
            self.lose_workers(f"worker {rng.randint(0, 3)} died")

    def _spoilt(self, output: ModelOutput) -> ModelOutput:
        """The result, with one sequence whose logits were not finite."""
        handles = [sequence.handle for sequence in self.scheduler.in_flight.awaited]
        return msgspec.structs.replace(output, failed=[(handles[0], NOT_FINITE)]) if handles else output

    def drain(self) -> None:
        if not self.scheduler.has_workers:
            self.replace_workers()
        for _ in range(3000):
            if not self.loop() and not self.scheduler.requests:
                return
        raise AssertionError("requests are left that make no progress")

    def random_work(self, rng: random.Random, num_rounds: int = 25, death_rate: float = 0.0) -> None:
        """Arrivals of every kind that share prefixes, forks, aborts, deadlines, failures; some requests are left. The
        workers die in this part of the rounds."""
        longest = min(self.core.max_model_len - 1, 60)
        for index in range(num_rounds):
            if longest >= 1 and rng.random() < 0.7:
                self._random_arrival(rng, f"r{index}", longest)
            if self.scheduler.requests and rng.random() < 0.1:
                samples = rng.choice([(), (), (0,), (1,), (0, 2), (1, 2, 3)])
                self.core.abort(rng.choice(list(self.scheduler.requests)), samples)
            if self.scheduler.requests and rng.random() < 0.1:
                self._send_again(rng, rng.choice(list(self.scheduler.requests.values())))
            names = list(self.scheduler.requests)
            if names and rng.random() < 0.25:
                self._random_fork(rng, rng.choice(names), f"f{index}")
            if rng.random() < 0.05:
                self.core.reset_prefix_cache()
            if names:  # looking changes nothing that replay could find
                self.core.describe(tuple(names))
            self.clock.now_s += rng.random() / 20
            if death_rate:
                self.random_death(rng, death_rate)
            for _ in range(rng.randint(0, 3)):
                self.loop(fail=rng.random() < 0.03)

    def _random_arrival(self, rng: random.Random, name: str, longest: int) -> None:
        prompt = [rng.choice([1, 2])] * rng.randint(1, longest)
        prompt[rng.randrange(len(prompt)) :] = [rng.randrange(VOCAB)] * rng.randint(0, 3)
        prompt = (prompt or [1])[:longest]
        params: dict[str, Any] = {
            "n": rng.choice([1, 1, 1, 2, 4]),
            "use_beam_search": rng.random() < 0.2,
            "early_stopping": rng.random() < 0.5,
            "priority": rng.randint(0, 3),
            "user": rng.choice([None, "a", "b"]),
            "deadline_ms": rng.choice([None, None, 30, 300, 10_000]),
            "ignore_eos": rng.random() < 0.5,
            "cache_salt": rng.choice([None, None, "salt"]),
            "stop_token_ids": rng.sample(range(VOCAB), 2),
            "logprobs": rng.choice([None, None, 2]),
            "prompt_logprobs": rng.choice([None, None, None, 1]),
        }
        max_tokens = rng.randint(1, min(20, self.core.max_model_len - len(prompt)))
        output = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 2))] if rng.random() < 0.1 else []
        if output:
            params |= {"n": 1, "use_beam_search": False}
        if params["use_beam_search"]:
            params["prompt_logprobs"] = None
        media, contents = media_of(name, len(prompt)) if self._has_media else ((), ())
        message = Generate(
            name,
            pack_tokens(prompt),
            SamplingParams(max_tokens=max_tokens, **params),
            len(output),
            pack_tokens(output),
            media=media,
            contents=contents,
        )
        try:
            self.core.add(b"client", message)
        except RequestError:  # more beams than max_num_seqs, or too long with its output
            pass

    def _send_again(self, rng: random.Random, request: Request) -> None:
        """Send a request again, as a client that has lost its connection and the last tokens of each sample."""
        prompt = request.sequences[0].tokens[: request.num_prompt].tobytes()
        samples: tuple[SampleSoFar, ...] = ()
        have = b""
        if request.params.n > 1 and request.beam is None:
            samples = tuple(
                SampleSoFar(
                    index, pack_tokens(self._output_of(request, index)[: max(0, num_output - rng.randint(0, 2))])
                )
                for index, num_output in sorted(request.open_samples())
            )
        elif request.beam is None:
            have = pack_tokens(self._output_of(request, 0))
        contents = tuple(starmap(MediaContent, request.contents.items()))
        sent: dict[str, Any] = {"samples": samples, "media": request.media, "contents": contents}
        message = Generate(request.request_id, prompt, request.params, len(have) // 4, have, **sent)
        self.core.add(rng.choice([b"client", b"another"]), message)

    @staticmethod
    def _output_of(request: Request, index: int) -> list[int]:
        found = [sequence for sequence in request.sequences if sequence.index == index]
        return found[0].tokens[request.num_prompt :].tolist() if found else []

    def _random_fork(self, rng: random.Random, parent: str, child: str) -> None:
        have = (
            self.scheduler.requests[parent].sequences[0].num_output if self.scheduler.requests[parent].sequences else 0
        )
        try:
            params = SamplingParams(
                max_tokens=have + rng.randint(1, 5),
                ignore_eos=True,
                temperature=rng.choice([1.0, 2.0]),  # half of the forks continue with other tokens than their parents
                seed=rng.randint(1, 9),
            )
            self.core.fork(b"client", ForkRequest(parent, child, max(0, have - rng.randint(0, 4)), params))
            if rng.random() < 0.4:  # and many take their places
                self.core.abort(parent)
        except RequestError:  # it has several samples, or there is no room
            pass


def state_of(scheduler: Scheduler, hash_bytes: int = 8) -> object:
    """Everything that later decisions depend on, with hashes cut as in a trace."""

    def short(block_hash: bytes | str | None) -> str:
        text = block_hash.hex() if isinstance(block_hash, bytes) else block_hash or ""
        return text[: 2 * hash_bytes] + "/" + (text[-2:] if text else "")

    host = scheduler.kv.part(KVBlocks).host
    pools = [scheduler.kv.pool] + ([host.pool] if isinstance(host, HostTier) else [])
    return (
        [[(block_id, refs, short(text)) for block_id, refs, text in snapshot(pool)] for pool in pools],
        [[block.block_id for block in pool._free] for pool in pools],
        [
            (
                sequence.request.request_id,
                sequence.index,
                sequence.status,
                sequence.handle,
                sequence.num_computed,
                sequence.num_cached,
                sequence.num_pending,
                sequence.unscored,
                sequence.num_tokens,
                [table.ids for table in sequence.tables],
            )
            for sequence in scheduler.queues.unfinished()
        ],
        (scheduler.step, scheduler.queues.num_arrived, scheduler.rates),
        (scheduler.generation, scheduler.has_workers, len(scheduler.in_flight)),
        [getattr(scheduler.counters, name) for name in COUNTED],
    )


def agrees(trace: Path, recorded: Recorded) -> Replay:
    """Replay `trace`, which `recorded` has written, and check that decisions and final state are the same."""
    recorded.core.close()
    replay = Replay(str(trace)).run()
    assert replay.divergence is None, str(replay.divergence)
    assert not replay.reader.cut_off
    assert state_of(replay.scheduler) == state_of(recorded.scheduler)
    return replay


def rewritten(trace: Path, change: Any) -> tuple[str, int]:
    """A copy of `trace` in which the first record for which `change` returns another one is replaced; and its step."""
    reader, path = TraceReader(str(trace)), str(trace) + ".changed"
    writer = TraceWriter(path)
    writer.write(reader.header)
    step, where = 0, 0
    for record in reader:
        step += isinstance(record, records.Step) and record.digest != b""
        other = change(record, step) if not where else record
        where = where or (step if other is not record else 0)
        writer.write(other)
    writer.close()
    assert where, "nothing was changed"
    return path, where


def replaced(record: records.Record, kind: type, **changes: Any) -> records.Record:
    return msgspec.structs.replace(record, **changes) if isinstance(record, kind) else record
