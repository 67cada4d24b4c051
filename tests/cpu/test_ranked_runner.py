"""ModelRunners of several ranks against the one of a single rank: the same steps give the same answers.

A Driver plays a story for a worker with the whole model, and its messages are kept. Then each rank runs these messages
separately, as workers do; only the communicator connects the ranks.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from tests.cpu.test_graphs import FakeCapture
from tests.deadlines import scaled
from tests.driver import BLOCK, GREEDY, NUM_BLOCKS, WARM, Driver, make_prompt, new_request
from tests.plays import Play
from tests.thread_group import ThreadCommunicator, ThreadGroup
from vllm_lite.attention.backend import AttentionShape
from vllm_lite.attention.select import select_backend
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.program import Program
from vllm_lite.models.registry import Sizes, build
from vllm_lite.models.weights import load_weights
from vllm_lite.parallel.communicator import Communicator
from vllm_lite.parallel.shared_memory import SharedMemoryCommunicator
from vllm_lite.protocol.api import TokenLogprobs
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import LogitRules, Sampling
from vllm_lite.protocol.step import (
    BlockOp,
    Continue,
    Draft,
    Finish,
    Fork,
    ModelOutput,
    Preempt,
    ReplaceBlock,
    Resume,
    SchedulerOutput,
    SetToken,
)
from vllm_lite.runtime.group_memory import create_group_memory
from vllm_lite.runtime.nested_settings import Speculation
from vllm_lite.worker.forward import EagerForward
from vllm_lite.worker.graphs import Capture, CpuCapture, Graph
from vllm_lite.worker.memory.cache_engine import CacheEngine
from vllm_lite.worker.model_runner import ModelRunner, StepLimits
from vllm_lite.worker.progress import Progress
from vllm_lite.worker.sampling.drafter import NgramDrafter
from vllm_lite.worker.step_parts import prompt_scores
from vllm_lite.worker.step_parts.drafts import Drafts
from vllm_lite.worker.step_parts.prompt_scores import PromptScorer
from vllm_lite.worker.step_parts.rules import Rules

CPU = torch.device("cpu")
LIMITS = StepLimits(max_num_seqs=8, max_num_tokens=128, max_model_len=512, block_size=BLOCK)
HOST_BLOCKS = 8
SHARED_BYTES = 1 << 20
TOLERANCE = 1e-3
"""Maximum difference of logprobs: ranks add up the parts of a sum in another order."""

Story = Callable[[Driver], None]
Recorded = list[tuple[SchedulerOutput, ModelOutput]]


def make_runner(checkpoint: Path, communicator: Communicator, capture: Capture | None = None) -> ModelRunner:
    """Make one rank's runner, with loaded weights."""
    spec = load_spec(checkpoint)
    own = spec.per_rank(communicator.shard)
    model = build(spec, "float32", CPU, Sizes(LIMITS.max_model_len, LIMITS.max_num_tokens), None, communicator)
    load_weights(model, checkpoint, progress=lambda _done, _total: None)
    groups = tuple(group.attention for group in own.kv_groups)
    shape = AttentionShape(
        groups=groups, block_size=BLOCK, dtype=torch.float32, device=CPU, max_seq_len=LIMITS.max_model_len
    )
    backend = select_backend(shape)
    cache = CacheEngine(own, BLOCK, NUM_BLOCKS, HOST_BLOCKS, torch.float32, CPU)
    drafter = NgramDrafter(Speculation(prompt_lookup_max=3, prompt_lookup_min=1))
    forward, rules = EagerForward(model, cache.layer_views(), backend, CPU), Rules(communicator)
    parts = [Drafts(drafter, rules), rules, PromptScorer(model)]
    runner = ModelRunner(replace(LIMITS, num_groups=len(groups)), forward, cache, Progress(), parts)
    runner.warm_up()
    if capture is not None:
        runner.capture_graphs(capture, range(1, LIMITS.max_num_seqs + 1))
    return runner


def record(checkpoint: Path, story: Story) -> Recorded:
    """Play the story for one worker. Returns its messages and its answers."""
    driver = Driver(checkpoint, num_host_blocks=HOST_BLOCKS, enforce_eager=True)
    driver.drafts.drafter = NgramDrafter(Speculation(prompt_lookup_max=3, prompt_lookup_min=1))
    recorded: Recorded = []
    execute = driver.worker.execute

    def kept(step: SchedulerOutput) -> ModelOutput:
        output = execute(step)
        recorded.append((step, output))
        return output

    driver.worker.execute = kept  # type: ignore[method-assign]
    story(driver)
    return recorded


def on_ranks(
    checkpoint: Path,
    recorded: Recorded,
    group: ThreadGroup,
    capture: Callable[[], Capture | None] = lambda: None,
    begin: Callable[[ModelRunner, int], None] = lambda _runner, _rank: None,
) -> list[list[ModelOutput]]:
    """Return the answers of each rank to the same messages. `begin` may change each rank's runner before that."""

    def run(communicator: ThreadCommunicator) -> list[ModelOutput]:
        runner = make_runner(checkpoint, communicator, capture())
        begin(runner, communicator.shard.rank)
        outputs = [runner.execute(step) for step, _ in recorded]
        runner.batch.check_integrity()
        return outputs

    return group.run(run)


def check(recorded: Recorded, by_rank: list[list[ModelOutput]]) -> None:
    for rank, outputs in enumerate(by_rank):
        for (step, expected), got in zip(recorded, outputs, strict=True):
            where = f"step {step.step} of rank {rank}"
            assert (got.tokens, got.counts, got.drafted) == (expected.tokens, expected.counts, expected.drafted), where
            assert (got.generation, got.failed) == (expected.generation, expected.failed), where
            if rank > 0:
                assert (got.logprobs, got.prompts or None) == (None, None), where
                continue
            assert_close(got.logprobs, expected.logprobs)
            for (handle, piece), (other, other_piece) in zip(got.prompts or (), expected.prompts or (), strict=True):
                assert (handle, piece.start) == (other, other_piece.start)
                assert_close(list(piece.entries), list(other_piece.entries))


def assert_close(got: list[TokenLogprobs | None] | None, expected: list[TokenLogprobs | None] | None) -> None:
    assert (got is None) is (expected is None)
    for one, other in zip(got or (), expected or (), strict=True):
        assert (one is None) is (other is None)
        if one is not None and other is not None:
            assert (one.rank, [token for token, _ in one.top]) == (other.rank, [token for token, _ in other.top])
            assert [one.logprob, *(value for _, value in one.top)] == pytest.approx(
                [other.logprob, *(value for _, value in other.top)], abs=TOLERANCE
            )


# ---- stories


def everything_that_samples(driver: Driver) -> None:
    """Chunks beside decoding, and sequences of every kind that the sampler knows, alone and together."""
    kinds = {
        0: GREEDY,
        1: WARM,
        2: Sampling(0.8, 20, 0.9, 0.05, 7),
        3: msgspec.structs.replace(WARM, logprobs=3),
        4: msgspec.structs.replace(GREEDY, logprobs=0),
        5: Sampling(0.0, 0, 1.0, 0.0, 0, rules=LogitRules(presence_penalty=1.0, repetition_penalty=1.3)),
        6: Sampling(1.0, 0, 1.0, 0.0, 9, rules=LogitRules(bias=((5, 9.0), (300, 9.0)), bad_words=((5, 300),))),
        7: Sampling(1.2, 0, 1.0, 0.0, 3, logprobs=2, rules=LogitRules(allowed=pack_tokens(range(9, 350, 5)))),
    }
    for handle, sampling in kinds.items():
        blocks = list(range(1 + 4 * handle, 5 + 4 * handle))
        prompt = make_prompt(20 + handle, seed=handle)
        decoding = [Continue(before, 1, []) for before in range(handle)]
        driver.run(new_request(handle, prompt, blocks, num_tokens=11, sampling=sampling), *decoding)
        driver.run(*decoding, Continue(handle, 9 + handle, []))
    driver.decode(*kinds, count=4)
    for handle in kinds:
        driver.decode(*range(handle, 8), count=2)
        driver.run(Finish(handle))


def preempted_swapped_and_set(driver: Driver) -> None:
    """Recomputed, swapped out and in, resumed from the cache; tokens that the engine chose."""
    prompts = [make_prompt(length, seed=2) for length in (40, 20)]
    driver.run(new_request(0, prompts[0], [1, 2, 3]), new_request(1, prompts[1], [4, 5], sampling=WARM))
    driver.decode(0, 1, count=4)
    host = NUM_BLOCKS
    out = tuple((int(BlockOp.SWAP_OUT), block, host + 2 * block) for block in (1, 2, 3))
    driver.run(Preempt(0), Continue(1, 1, []), new_request(2, make_prompt(45, seed=9), [2, 3, 1]), ops=out)
    driver.run(Continue(1, 1, []), Continue(2, 1, []))
    back = tuple((int(BlockOp.SWAP_IN), host + 2 * block, 10 - block) for block in (1, 2, 3))
    driver.run(Finish(2), Preempt(1), Resume(0, 44, 44, 1, [[9, 8, 7]]), ops=back)
    driver.run(SetToken(0, 77), Continue(0, 1, []))
    driver.run(SetToken(1, 78), Resume(1, 0, 0, 27, [[11, 12]]), Continue(0, 1, [[14]]))
    driver.decode(1, 0, count=3)
    driver.run(new_request(3, prompts[0], [9, 8], num_computed=31, num_cached=32, num_tokens=1), Continue(0, 1, []))
    driver.run(Continue(3, 8, [[13]]), Continue(1, 1, []))


def forked(driver: Driver) -> None:
    """Samples of one prompt, and beams with the candidates of each."""
    prompt = make_prompt(21, seed=3)
    beam = msgspec.structs.replace(GREEDY, logprobs=4)
    driver.run(new_request(0, prompt, [1, 2], num_tokens=20, sampling=beam))
    copy = ((int(BlockOp.COPY), 2, 7),)
    driver.run(Fork(0, 1, beam, 21, 20, 20), ReplaceBlock(1, 0, 1, 7), Continue(0, 1, []), Continue(1, 1, []), ops=copy)
    for child in (2, 3, 4):
        warm = msgspec.structs.replace(WARM, sample=child)
        driver.run(Fork(0, child, warm, 21, 20, 21), Continue(child, 1, []))
    driver.run(SetToken(1, 99), Continue(1, 1, []), Continue(0, 1, []))
    driver.decode(1, 0, count=9)


def drafted(driver: Driver) -> None:
    """N-gram drafts for a prompt that repeats itself, some of which are accepted, beside sequences without drafts."""
    phrase = make_prompt(6, seed=4)
    rules = LogitRules(bias=tuple((token, 30.0) for token in phrase))
    for handle, sampling in enumerate(
        (
            GREEDY,
            msgspec.structs.replace(GREEDY, logprobs=2),
            msgspec.structs.replace(WARM, rules=rules),
            msgspec.structs.replace(GREEDY, rules=rules),
        )
    ):
        driver.run(new_request(handle, phrase * 5, list(range(1 + 5 * handle, 6 + 5 * handle)), sampling=sampling))
    kept = 0
    for _ in range(8):
        output = driver.run(*(Draft(handle, 4, []) for handle in range(3)), Continue(3, 1, []))
        kept += sum(count - 1 for count in output.counts or ())
    assert kept > 0


def prompts_scored(driver: Driver) -> None:
    """Logprobs of prompts in chunks, which come before and with sampled tokens of others."""
    scored = msgspec.structs.replace(WARM, prompt_logprobs=2)
    driver.run(new_request(0, make_prompt(33, seed=5), [1, 2, 3, 4], num_tokens=20, sampling=scored))
    driver.run(new_request(1, make_prompt(9, seed=6), [5, 6], sampling=GREEDY), Continue(0, 10, []))
    driver.run(Continue(0, 3, []), Continue(1, 1, []))
    driver.decode(1, 0, count=3)


STORIES = [everything_that_samples, preempted_swapped_and_set, forked, drafted, prompts_scored]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
@pytest.mark.parametrize(("world", "shares_memory"), [(2, True), (4, True), (2, False)], ids=["2", "4", "2 copies"])
def test_ranks_answer_as_one(
    tiny_checkpoint: Path, story: Story, world: int, shares_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scores, "LOGITS_AT_ONCE", 5 * 384)  # a prompt is scored in several pieces
    recorded = record(tiny_checkpoint, story)
    check(recorded, on_ranks(tiny_checkpoint, recorded, ThreadGroup(world, shares_memory=shares_memory)))


# ---- replayed steps


def decoding(driver: Driver) -> None:
    """Run a prompt whose second-to-last token is computed in a separate step, before other sequences decode; then
    random steps."""
    prompt, play = make_prompt(4), Play(3, 1)
    for handle in (101, 102, 103):
        driver.run(new_request(handle, prompt[: handle - 100], [handle - 100], sampling=WARM))
    driver.run(new_request(100, prompt, [4], num_tokens=1))
    for _ in range(3):
        driver.run(*(Continue(handle, 1, []) for handle in (100, 101, 102, 103)))
    driver.run(*(Finish(handle) for handle in (100, 101, 102, 103)))
    for _ in range(50):
        driver.run(*play.step())


@pytest.mark.parametrize("shares_memory", [True, False], ids=["one memory", "copies"])
def test_replayed_decode_steps_answer_as_one(tiny_checkpoint: Path, shares_memory: bool) -> None:
    recorded = record(tiny_checkpoint, decoding)
    captures = [FakeCapture(), FakeCapture()]
    group = ThreadGroup(2, shares_memory=shares_memory)
    check(recorded, on_ranks(tiny_checkpoint, recorded, group, iter(captures).__next__))
    assert all(sum(graph.count for graph in capture.graphs) > 10 for capture in captures)


class KeptPrograms(CpuCapture):
    def __init__(self) -> None:
        self.programs: list[Program] = []

    def __call__(self, prepare: Callable[[], None], run: Callable[[], None]) -> Graph:
        graph = super().__call__(prepare, run)
        assert isinstance(graph, Program), "it can be recorded"
        self.programs.append(graph)
        return graph


@pytest.mark.skipif(not cpu.available(), reason="no compiled library")
@pytest.mark.parametrize("world", [2, 4])
def test_decode_steps_over_shared_memory_are_one_native_call(tiny_checkpoint: Path, world: int) -> None:
    recorded = record(tiny_checkpoint, decoding)
    memory = create_group_memory()

    def run(rank: int) -> tuple[list[ModelOutput], list[Program]]:
        communicator = SharedMemoryCommunicator(Shard(rank, world), memory, SHARED_BYTES, scaled(30))
        try:
            capture = KeptPrograms()
            runner = make_runner(tiny_checkpoint, communicator, capture)
            return [runner.execute(step) for step, _ in recorded], capture.programs
        except BaseException:
            communicator.abort()
            raise
        finally:
            communicator.close()

    with ThreadPoolExecutor(world) as pool:
        by_rank = list(pool.map(run, range(world)))
    os.close(memory)
    check(recorded, [outputs for outputs, _ in by_rank])
    for _, programs in by_rank:
        sums = [program.names.count("vllm_lite_all_reduce") for program in programs]
        assert sums
        assert set(sums) == {1 + 2 * 2}, "one of the embedding, two of each layer"
