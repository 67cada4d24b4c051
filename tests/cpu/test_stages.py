"""Stages that share out a model's layers, in one process: the same steps give the same answers as one stage."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.batches import part_of
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.cpu.test_model_runner_drafts import Parrot
from tests.cpu.test_ranked_runner import HOST_BLOCKS, STORIES, Recorded, Story, check, make_runner, record
from tests.driver import BLOCK, GREEDY, Driver, make_prompt, new_request
from tests.families.hybrid import VARIANTS as HYBRIDS
from tests.families.mixtures import VARIANTS as MIXTURES
from tests.parity_mask import ParityMask
from tests.thread_group import ThreadCommunicator, on_stages
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.shard import Shard, Stage
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError
from vllm_lite.models.decoder import Decoder
from vllm_lite.models.registry import Sizes, build
from vllm_lite.parallel.communicator import SingleRank
from vllm_lite.parallel.select import connect
from vllm_lite.protocol.params import LogitRules
from vllm_lite.protocol.step import Continue, Draft, Finish, ModelOutput, States
from vllm_lite.worker.memory.cache_engine import CacheEngine
from vllm_lite.worker.sampling.ranked_sampler import StagedSampler
from vllm_lite.worker.sampling.sampler import ROW_PARAMS, Sampled, SampleInputs
from vllm_lite.worker.step_parts.drafts import Drafts
from vllm_lite.worker.worker import Worker

MADE: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3},
    "llama-tied": {"num_hidden_layers": 4, "tie_word_embeddings": True},
    "mistral": {"family": "mistral", "num_hidden_layers": 2, "sliding_window": 13},
    "qwen3-two-groups": {
        "family": "qwen3",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 11,
        "max_window_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
}
OF_FAMILIES = {one.name: one for one in (*MIXTURES, *HYBRIDS)}
MIXTURE, HYBRID, BESIDE = "qwen3-moe", "qwen3.5", "falcon-h1"
"""A model with experts, one in which layers have states or KV, and one in which layers have both."""


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, made = tmp_path_factory.mktemp("stages"), dict[str, Path]()

    def find(name: str) -> Path:
        if name not in made:
            path = root / name
            made[name] = OF_FAMILIES[name].make(path) if name in OF_FAMILIES else make_checkpoint(path, **MADE[name])
        return made[name]

    return find


# ---- whole workers


def on_workers(
    num_stages: int,
    world: int,
    checkpoint: Path,
    recorded: Recorded,
    begin: Callable[[Worker], None] = lambda _worker: None,
) -> list[list[ModelOutput]]:
    """The answers of each rank to the same messages, stage by stage. `begin` may change each worker before."""

    def run(communicator: ThreadCommunicator) -> list[ModelOutput]:
        worker = Driver(checkpoint, HOST_BLOCKS, communicator=communicator).worker
        begin(worker)
        outputs = [worker.execute(step) for step, _ in recorded]
        worker.runner.batch.check_integrity()
        return outputs

    return on_stages(num_stages, world, run)


def chunks_and_drafts(driver: Driver, parrot: Parrot | None = None) -> None:
    """A prompt in chunks beside one that decodes, decoding of both, and drafts of the second."""
    num_groups, has_states = len(driver.ready.groups), driver.ready.num_state_slots > 0
    if parrot is not None:
        driver.drafts.drafter = parrot
    for handle, first in ((0, 1), (1, 20)):
        prompt = [token % VOCAB_SIZE for token in make_prompt(30, seed=handle)]
        tables = [[first + group * 5 + place for place in range(5)] for group in range(num_groups)]
        entry = new_request(handle, prompt, None, num_tokens=5 + 4 * handle)
        states = [States(handle, 0, 1 + handle, [])] if has_states else []
        before = [Continue(other, 25, []) for other in range(handle)]
        driver.run(msgspec.structs.replace(entry, block_ids=tables), *states, *before)
    driver.run(Continue(1, 21, []), Continue(0, 1, []))
    driver.decode(0, 1, count=6)
    for _ in range(4):
        driver.run(Draft(1, 3, []), Continue(0, 1, []))
    driver.run(Finish(0), Continue(1, 1, []))
    assert len(set(driver.got[0])) > 4, "it repeats itself, which proves nothing"


def drafts_that_are_partly_right(checkpoint: Path) -> Callable[[], Parrot]:
    plain = Driver(checkpoint)
    chunks_and_drafts(plain)
    prompt = [token % VOCAB_SIZE for token in make_prompt(30, seed=1)]
    return lambda: Parrot(prompt + plain.got[1] + [0] * 20, wrong=(39, 42))


@pytest.mark.parametrize(
    ("name", "num_stages", "world"),
    [
        ("llama", 2, 1),
        ("llama", 3, 1),
        ("llama-tied", 2, 1),
        ("mistral", 2, 1),
        ("qwen3-two-groups", 2, 1),
        (MIXTURE, 2, 1),
        (HYBRID, 2, 1),
        (BESIDE, 2, 1),
        ("llama", 2, 2),
        (MIXTURE, 2, 2),
        (HYBRID, 2, 2),
    ],
)
def test_workers_on_stages_answer_as_one(
    checkpoint_of: Callable[[str], Path], name: str, num_stages: int, world: int
) -> None:
    """Steps include drafts, some of them right; all ranks of all stages keep the same sequences."""
    checkpoint = checkpoint_of(name)
    make_parrot = drafts_that_are_partly_right(checkpoint)
    recorded = record(checkpoint, lambda driver: chunks_and_drafts(driver, make_parrot()))
    assert any(count > 1 for _, output in recorded for count in output.counts or ()), "drafts prove right"

    def begin(worker: Worker) -> None:
        part_of(worker.runner, Drafts).drafter = make_parrot()

    by_rank = on_workers(num_stages, world, checkpoint, recorded, begin)
    check(recorded, [by_rank[(num_stages - 1) * world]])
    expected = [(want.tokens, want.counts) for _, want in recorded]
    assert [[(got.tokens, got.counts) for got in outputs] for outputs in by_rank] == [expected] * len(by_rank)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_two_stages_answer_as_one(checkpoint_of: Callable[[str], Path], story: Story) -> None:
    """The last stage with all of it; the first keeps the same sequences, and so has the same tokens."""
    recorded = record(checkpoint_of("llama"), story)

    def run(communicator: ThreadCommunicator) -> list[ModelOutput]:
        runner = make_runner(checkpoint_of("llama"), communicator)
        outputs = [runner.execute(step) for step, _ in recorded]
        runner.batch.check_integrity()
        return outputs

    first, last = on_stages(2, 1, run)
    check(recorded, [last])
    assert [(got.tokens, got.counts, got.drafted) for got in first] == [
        (got.tokens, got.counts, got.drafted) for got in last
    ]


@pytest.mark.parametrize("late", [0, 1])
def test_a_grammar_is_there_when_it_is_there_in_all_stages(checkpoint_of: Callable[[str], Path], late: int) -> None:
    ruled = msgspec.structs.replace(GREEDY, rules=LogitRules(repetition_penalty=1.2))

    def run(communicator: ThreadCommunicator) -> list[list[int]]:
        driver = Driver(checkpoint_of("llama"), communicator=communicator)
        coming = Future[ParityMask]()
        if communicator.shard.stage.index != late:
            coming.set_result(ParityMask(VOCAB_SIZE))
        driver.rules.mask_source_of = lambda _: coming
        driver.run(new_request(0, make_prompt(9), [1, 2], sampling=ruled), new_request(1, make_prompt(7), [3]))
        assert 0 not in driver.got or not driver.got[0], "it waits in both"
        if not coming.done():
            coming.set_result(ParityMask(VOCAB_SIZE))
        driver.decode(0, 1, count=4)
        return [driver.got[0], driver.got[1]]

    first, last = on_stages(2, 1, run)
    assert first == last
    assert [len(tokens) for tokens in first] == [4, 5]


def test_a_failure_is_known_in_all_stages() -> None:
    class Failing:
        def sample(self, logits: torch.Tensor, inputs: SampleInputs) -> Sampled:
            assert len(logits) == len(inputs.params)
            return Sampled(np.array([7, 0, 9]), {0: "why", 1: "why"}, None)

    def run(communicator: ThreadCommunicator) -> Sampled:
        inputs = SampleInputs(np.zeros(3, ROW_PARAMS), np.zeros(3, np.int64))
        return StagedSampler(Failing(), communicator).sample(torch.zeros(3, 0), inputs)

    *others, last = on_stages(3, 1, run)
    assert last.failed == {0: "why", 1: "why"}
    for sampled in (*others, last):
        assert (sampled.tokens.tolist(), list(sampled.failed)) == ([7, 0, 9], [0, 1])


# ---- a stage's part


@pytest.mark.parametrize("name", ["llama", "llama-tied", MIXTURE, HYBRID, BESIDE])
def test_a_stage_has_its_layers_alone(checkpoint_of: Callable[[str], Path], name: str) -> None:
    """Stages together ask for all tensors of the checkpoint; a tied head makes two of them ask for one tensor."""
    spec, asked = load_spec(checkpoint_of(name)), list[set[str]]()
    for index in range(2):
        communicator = SingleRank(torch.device("cpu"))
        communicator.shard = Shard(stage=Stage(index, 2))
        model = build(spec, "float32", "cpu", Sizes(64, 16), None, communicator)
        assert isinstance(model, Decoder)
        asked.append({slot.name for group in model.weight_groups() for slot in group.slots})
        own = spec.per_rank(communicator.shard)
        views = CacheEngine(own, BLOCK, 3, 0, torch.float32, torch.device("cpu")).layer_views()
        kept = [layer for layer, view in enumerate(views) if not isinstance(view, torch.Tensor) or view.numel()]
        assert kept == list(model.held)
    whole = build(spec, "float32", "cpu", Sizes(64, 16))
    assert asked[0] & asked[1] == ({"model.embed_tokens.weight"} if spec.tie_word_embeddings else set())
    assert asked[0] | asked[1] == {slot.name for group in whole.weight_groups() for slot in group.slots}
    assert ("model.embed_tokens.weight" in asked[0], "model.norm.weight" in asked[0]) == (True, False)


@pytest.mark.parametrize("name", ["llama", HYBRID])
def test_stages_keep_less_than_the_whole_model_and_count_with_the_largest(
    checkpoint_of: Callable[[str], Path], name: str
) -> None:
    """Bytes of blocks and states are those of the largest stage, so that all stages have room for the same number."""
    checkpoint = checkpoint_of(name)
    whole = Driver(checkpoint).worker
    workers = on_stages(2, 1, lambda communicator: Driver(checkpoint, communicator=communicator).worker)
    assert len({(worker.block_bytes, worker.state_bytes, worker.num_state_slots) for worker in workers}) == 1
    assert sum(worker.own_spec.state_elements for worker in workers) == whole.own_spec.state_elements
    assert 0 < workers[0].block_bytes <= whole.block_bytes
    assert (name == HYBRID) is (0 < workers[0].state_bytes < whole.state_bytes)
    pools = [worker.runner.cache_engine.pool.nbytes for worker in workers]
    assert sum(pools) == whole.runner.cache_engine.pool.nbytes


def test_a_single_stage_cannot_send_or_receive() -> None:
    alone, x = SingleRank(torch.device("cpu")), torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match=r"nothing of \[2, 3\] can be sent to stage 1"):
        alone.send(x, 1)
    with pytest.raises(RuntimeError, match="can come from stage 0"):
        alone.receive(x, 0)


def test_worker_processes_have_one_stage() -> None:
    config = EngineConfig.check({}).resolve(max_position_embeddings=64, dtype="float32", model_path="m")
    with pytest.raises(ConfigError, match="so there is one, got 2"):
        connect(msgspec.structs.replace(config, num_stages=2), 0, None, torch.device("cpu"), 0)
