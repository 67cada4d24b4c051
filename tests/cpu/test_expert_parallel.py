"""Ranks that share out the experts of a layer: the logits of one rank, wherever the tokens go."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families.mixtures import qwen3
from tests.paged import Oracle, Paged
from tests.thread_group import ThreadCommunicator, ThreadGroup, on_ranks
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.quantization.on_load import Quantization, quantized_bytes
from vllm_lite.checkpoint.shard import Shard, Split
from vllm_lite.checkpoint.tensors.headers import SINGLE_FILE, read_headers
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint, active_bytes, weights_bytes
from vllm_lite.client.engines.launch import resolve
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.layers.moe.experts import SparseMLP
from vllm_lite.models.registry import Model, Sizes, build
from vllm_lite.models.weights import load_weights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, of which the second is dense; 5 experts of 20, 3 for each token; 6 heads with 2 KV heads."""
    return qwen3("mixture", {}, mlp_only_layers=[1]).make(tmp_path_factory.mktemp("experts") / "mixture")


def to_the_first(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint with routers that know no difference: all tokens go to the experts 0, 1 and 2."""
    folder.mkdir()
    tensors = load_file(checkpoint / SINGLE_FILE)
    for name in tensors:
        if name.endswith("mlp.gate.weight"):
            tensors[name].zero_()
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    return folder


def sparse_layers(model: Model) -> list[SparseMLP]:
    return [layer.mlp for layer in model.layers if isinstance(layer.mlp, SparseMLP)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("same_experts", [False, True], ids=["all experts", "those of the first rank"])
def test_ranks_give_the_logits_of_one(checkpoint: Path, tmp_path: Path, *, same_experts: bool) -> None:
    oracle = Oracle(to_the_first(checkpoint, tmp_path / "same") if same_experts else checkpoint)
    alone = Paged(oracle).run(oracle.tokens, 64)
    chosen = {int(expert) for mlp in sparse_layers(oracle.model) for expert in choices(oracle.model, mlp)}
    assert chosen == ({0, 1, 2} if same_experts else {0, 1, 2, 3, 4})

    def on_rank(communicator: ThreadCommunicator) -> tuple[list[Split], torch.Tensor]:
        model = oracle.load(communicator)
        return [mlp.experts.held for mlp in sparse_layers(model)], Paged(oracle, model=model).run(oracle.tokens, 64)

    ranks = on_ranks(2, on_rank, expert_parallel=True)
    assert [held for held, _ in ranks] == [[Split(5, 0, 3)] * 2, [Split(5, 3, 2)] * 2]
    for _, logits in ranks:
        assert (logits - alone).abs().max() < 1e-4
        assert torch.equal(logits.argmax(-1), alone.argmax(-1))


def choices(model: Model, mlp: SparseMLP) -> torch.Tensor:
    """The experts that some hidden states are sent to."""
    rows = model.buffers.rows(64).experts  # type: ignore[attr-defined]
    mlp.router.forward(torch.randn(64, model.spec.hidden_size, generator=torch.Generator().manual_seed(1)), rows)
    experts: torch.Tensor = rows.chosen.experts.flatten()
    return experts


def test_every_rank_checks_the_experts_of_all(checkpoint: Path, tmp_path: Path) -> None:
    path = to_the_first(checkpoint, tmp_path / "less")
    tensors = load_file(path / SINGLE_FILE)
    del tensors["model.layers.2.mlp.experts.4.up_proj.weight"]
    save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})
    spec = load_spec(path)
    for communicator in ThreadGroup(2, expert_parallel=True).communicators:
        model = build(spec, "float32", "cpu", Sizes(64, 8), None, communicator)
        with pytest.raises(ModelError, match=r"1 missing: model\.layers\.2\.mlp\.experts\.4\.up_proj\.weight"):
            load_weights(model, path)


@pytest.mark.parametrize(
    ("changes", "world", "expert_parallel", "says"),
    [
        ({"moe_intermediate_size": 21}, 2, False, "5 experts of 21, .* fit 1; with enable_expert_parallel 1, 2 or 4"),
        ({"num_experts": 3, "num_key_value_heads": 6}, 6, True, "3 experts of 20, .* fit 1, 2 or 3; without .* 1 or 2"),
        ({"num_experts": 6, "num_key_value_heads": 6}, 6, False, " fit 1 or 2; with .* 1, 2, 3 or 6"),
        ({}, 3, True, " fit 1, 2 or 4"),
    ],
)
def test_ranks_need_an_expert_each(
    checkpoint: Path, tmp_path: Path, changes: dict[str, int], world: int, says: str, *, expert_parallel: bool
) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | {"intermediate_size": 60}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=f"^tensor_parallel_size {world} does not fit this model, whose .*{says}$"):
        load_spec(tmp_path).check_tensor_parallel(Shard(0, world, expert_parallel))


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_plan_has_the_bytes_that_each_rank_takes(
    checkpoint: Path, quantization: Quantization | None, *, expert_parallel: bool
) -> None:
    """Slots of packed weights have 4 bytes an element, or one and scales for groups; the router keeps its type."""
    stored = Checkpoint(load_spec(checkpoint), read_headers(checkpoint))
    for communicator in ThreadGroup(2, expert_parallel=expert_parallel).communicators:
        model = build(stored.spec, "float32", "cpu", Sizes(8, 8), quantization, communicator)
        taken = sum(
            quantized_bytes(slot.size, "int8") if part.packed_as == "int8" else 4 * slot.num_elements
            for group in model.weight_groups()
            for part in group.stacks
            for slot in part.slots
            if slot.num_elements
        )
        assert weights_bytes(stored, 4, quantization, communicator.shard) == taken


def test_a_token_reads_the_experts_that_it_is_sent_to(checkpoint: Path) -> None:
    stored = Checkpoint(load_spec(checkpoint), read_headers(checkpoint))
    spec = stored.spec
    idle = 2 * (5 - 3) * 3 * 20 * spec.hidden_size
    assert spec.active_parameters() == spec.num_parameters() - idle
    assert active_bytes(stored, 4) == 4 * (spec.active_parameters() - spec.vocab_size * spec.hidden_size)
    assert spec.active_parameters(num_tokens=100) == spec.num_parameters()


@pytest.mark.parametrize(("world", "why"), [(1, "tensor_parallel_size is 1"), (2, "the model has no experts")])
def test_a_setting_without_effect_is_logged(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, world: int, why: str
) -> None:
    model = str(checkpoint) if world == 1 else "demo"
    resolve(EngineConfig(model=model, device="cpu", tensor_parallel_size=world, enable_expert_parallel=True))
    assert f"enable_expert_parallel changes nothing: {why}" in caplog.text
