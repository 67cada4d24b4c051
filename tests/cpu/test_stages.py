"""Stages that share out a model's layers, in one process: the same steps give the same answers as one stage."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.cpu.test_ranked_runner import STORIES, Story, check, make_runner, record
from tests.driver import Driver, make_prompt, new_request
from tests.thread_group import ThreadCommunicator, on_stages
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.fitting import check_stages
from vllm_lite.checkpoint.shard import Shard, Stage
from vllm_lite.errors import ConfigError
from vllm_lite.models.decoder import Decoder
from vllm_lite.models.registry import Sizes, build
from vllm_lite.parallel.communicator import SingleRank
from vllm_lite.protocol.step import Continue, ModelOutput
from vllm_lite.worker.memory.cache_engine import CacheEngine

VARIANTS: dict[str, dict[str, Any]] = {
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


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("stages")
    return {name: make_checkpoint(root / name, **options) for name, options in VARIANTS.items()}


def on(num_stages: int, world: int, checkpoint: Path, recorded: Any) -> list[list[ModelOutput]]:
    def run(communicator: ThreadCommunicator) -> list[ModelOutput]:
        runner = make_runner(checkpoint, communicator)
        outputs = [runner.execute(step) for step, _ in recorded]
        runner.batch.check_integrity()
        return outputs

    return on_stages(num_stages, world, run)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_two_stages_answer_as_one(checkpoints: dict[str, Path], story: Story) -> None:
    """The last stage with all of it; the others keep the same sequences, and so have the same tokens."""
    recorded = record(checkpoints["llama"], story)
    first, last = on(2, 1, checkpoints["llama"], recorded)
    check(recorded, [last])
    assert [(got.tokens, got.counts, got.drafted) for got in first] == [
        (got.tokens, got.counts, got.drafted) for got in last
    ]


@pytest.mark.parametrize(
    ("name", "num_stages", "world"),
    [("llama", 3, 1), ("llama", 2, 2), ("llama-tied", 2, 1), ("mistral", 2, 1), ("qwen3-two-groups", 2, 1)],
)
def test_models_on_stages(checkpoints: dict[str, Path], name: str, num_stages: int, world: int) -> None:
    """Also ranks within stages, a head that is the embedding, and stages that have layers of both KV groups."""
    recorded = [(step, output) for step, output in record(checkpoints[name], chunked(name))]
    by_rank = on(num_stages, world, checkpoints[name], recorded)
    check(recorded, [by_rank[(num_stages - 1) * world]])
    assert [[got.tokens for got in outputs] for outputs in by_rank] == [[want.tokens for _, want in recorded]] * len(
        by_rank
    )


def chunked(name: str) -> Story:
    """A prompt in chunks beside one that decodes, and decoding of both."""

    def story(driver: Driver) -> None:
        num_groups = len(driver.ready.groups)
        tables = [
            [[first + group * 6 + place for place in range(6)] for group in range(num_groups)] for first in (1, 20)
        ]
        for handle, num_tokens in enumerate((5, 9)):
            entry = new_request(handle, make_prompt(30, seed=handle), [], num_tokens=num_tokens)
            entry.block_ids[:] = tables[handle]
            driver.run(entry, *(Continue(before, 25, []) for before in range(handle)))
        driver.run(Continue(1, 21, []), Continue(0, 1, []))
        driver.decode(0, 1, count=12)
        assert len(set(driver.got[0])) > 6, f"{name} repeats itself, which proves nothing"

    return story


def test_a_stage_has_its_layers_alone(checkpoints: dict[str, Path]) -> None:
    """What stages ask for is together all that the checkpoint has; a tied head makes two of them ask for one tensor."""
    for name, twice in (("llama", set()), ("llama-tied", {"model.embed_tokens.weight"})):
        spec, asked = load_spec(checkpoints[name]), list[set[str]]()
        for index in range(2):
            communicator = SingleRank(torch.device("cpu"))
            communicator.shard = Shard(stage=Stage(index, 2))
            model = build(spec, "float32", "cpu", Sizes(64, 16), None, communicator)
            assert isinstance(model, Decoder)
            asked.append({slot.name for group in model.weight_groups() for slot in group.slots})
            views = CacheEngine(
                spec.per_rank(communicator.shard), 4, 3, 0, torch.float32, torch.device("cpu")
            ).layer_views()
            assert [layer for layer, view in enumerate(views) if view.numel()] == list(model.held)
        whole = build(spec, "float32", "cpu", Sizes(64, 16))
        assert asked[0] & asked[1] == twice
        assert asked[0] | asked[1] == {slot.name for group in whole.weight_groups() for slot in group.slots}
        assert {"model.embed_tokens.weight" in asked[0], "model.norm.weight" in asked[1]} == {True}


@pytest.mark.parametrize(
    ("changes", "count", "problem"),
    [
        ({}, 4, "the model's 3 layers cannot be shared out over 4 stages"),
        ({"per_layer_size": 8}, 2, "some need more of others than the residual stream"),
        ({"implementation": "transformers"}, 2, "cannot be shared out over 2 stages"),
    ],
)
def test_models_that_stages_cannot_share(
    checkpoints: dict[str, Path], changes: dict[str, Any], count: int, problem: str
) -> None:
    spec = msgspec.structs.replace(load_spec(checkpoints["llama"]), **changes)
    communicator = SingleRank(torch.device("cpu"))
    communicator.shard = Shard(stage=Stage(0, count))
    with pytest.raises(ConfigError, match=problem):
        build(spec, "float32", "cpu", Sizes(64, 16), None, communicator)
    communicator.shard = Shard()
    check_stages(spec, Stage())


def test_one_stage_has_nobody_to_send_to() -> None:
    alone, x = SingleRank(torch.device("cpu")), torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match=r"nothing of \[2, 3\] can be sent to stage 1"):
        alone.send(x, 1)
    with pytest.raises(RuntimeError, match="can come from stage 0"):
        alone.receive(x, 0)
