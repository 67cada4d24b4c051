"""Drives a worker with hand-written steps: it plays the engine in tests of the ModelRunner."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from tests.batches import part_of
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.shard import SINGLE
from vllm_lite.config import EngineConfig
from vllm_lite.parallel.communicator import Communicator
from vllm_lite.protocol.codec import pack_tokens, unpack_tokens
from vllm_lite.protocol.control import Start
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.step import (
    Continue,
    Draft,
    Entry,
    Fork,
    ModelOutput,
    NewRequest,
    Resume,
    SchedulerOutput,
)
from vllm_lite.worker.device import Device
from vllm_lite.worker.progress import Progress
from vllm_lite.worker.step_parts.drafts import Drafts
from vllm_lite.worker.step_parts.rules import Rules
from vllm_lite.worker.worker import Worker

GENERATION, NUM_BLOCKS, BLOCK = 3, 40, 16
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)
WARM = Sampling(1.5, 0, 1.0, 0.0, seed=2**63 + 1)


class Driver:
    """Plays the engine for one worker: numbers the steps, and records the tokens of every sequence."""

    def __init__(
        self,
        checkpoint: Path,
        num_host_blocks: int = 0,
        on: Device | None = None,
        communicator: Communicator | None = None,
        **settings: Any,
    ) -> None:
        """`on`: a device made by the test, with fakes for missing hardware. `communicator`: that of one of several
        ranks, whose drivers must make the same steps."""
        shard = SINGLE if communicator is None else communicator.shard
        if shard.world > 1:
            settings |= {"tensor_parallel_size": shard.world, "cpu_threads": 1}
        config = EngineConfig.check(
            {"num_gpu_blocks_override": NUM_BLOCKS, "max_num_batched_tokens": 128, "max_num_seqs": 8} | settings
        )
        spec = load_spec(checkpoint)
        resolved = config.resolve(
            max_position_embeddings=spec.max_position_embeddings,
            dtype="float32" if config.dtype == "auto" else config.dtype,
            model_path=str(checkpoint),
        )
        resolved = msgspec.structs.replace(resolved, num_stages=shard.stage.count)
        self.progress = Progress()
        self.worker = Worker(resolved, shard.stage.index * shard.world + shard.rank, self.progress, on)
        self.ready = self.worker.load(communicator)
        self.started = self.worker.start(Start(GENERATION, NUM_BLOCKS, num_host_blocks))
        while self.worker.record_ahead():  # as a worker does that waits
            pass
        self.step = 0
        self.got: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.computed: dict[int, int] = {}

    @property
    def drafts(self) -> Drafts:
        return part_of(self.worker.runner, Drafts)

    @property
    def rules(self) -> Rules:
        return part_of(self.worker.runner, Rules)

    @property
    def pool(self) -> torch.Tensor:
        return self.worker.runner.cache_engine.pool

    def run(self, *entries: Entry, ops: tuple[tuple[int, int, int], ...] = ()) -> ModelOutput:
        """Run one step. Its tokens belong to the sequences that are caught up, in the order of their entries."""
        self.step += 1
        caught_up = [handle for handle in map(self.follow, entries) if handle is not None]
        output = self.worker.execute(SchedulerOutput(GENERATION, self.step, list(ops), list(entries)))
        assert (output.generation, output.step) == (GENERATION, self.step)
        tokens = unpack_tokens(output.tokens)
        for handle, count in zip(caught_up, output.counts or [1] * len(tokens), strict=True):
            self.lengths[handle] += count
            self.computed[handle] += count - 1
            self.got.setdefault(handle, []).extend(tokens[:count])
            del tokens[:count]
        assert not tokens
        self.worker.runner.batch.check_integrity()
        assert not self.pool[0].any(), "the null block was written"
        return output

    def follow(self, entry: Entry) -> int | None:
        """Update lengths and computed tokens. Returns the handle if its sequence is caught up in this step."""
        if isinstance(entry, Fork):
            self.lengths[entry.child], self.computed[entry.child] = entry.num_tokens, entry.num_computed
        if isinstance(entry, NewRequest):
            self.lengths[entry.handle] = entry.num_prompt_tokens
        if not isinstance(entry, NewRequest | Continue | Resume | Draft):
            return None
        start = entry.num_computed if isinstance(entry, NewRequest | Resume) else self.computed[entry.handle]
        self.computed[entry.handle] = start + (1 if isinstance(entry, Draft) else entry.num_tokens)
        return entry.handle if self.computed[entry.handle] == self.lengths[entry.handle] else None

    def decode(self, *handles: int, count: int) -> None:
        for _ in range(count):
            self.run(*(Continue(handle, 1, []) for handle in handles))


def new_request(handle: int, prompt: list[int], blocks: list[int] | None, **fields: Any) -> NewRequest:
    """The request of a prompt with its blocks; None for a model without KV."""
    values: dict[str, Any] = {
        "num_computed": 0,
        "num_cached": 0,
        "num_tokens": len(prompt),
        "sampling": GREEDY,
    } | fields
    return NewRequest(handle, pack_tokens(prompt), len(prompt), block_ids=[] if blocks is None else [blocks], **values)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng([seed, length]).integers(3, 384, length).tolist()
    return tokens


def expected(oracle: Any, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that transformers continues with, greedily."""
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    output = oracle.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    assert len(set(tokens)) > count // 2, "a sequence that repeats itself proves nothing"
    return tokens
