"""The metric's counts of tokens for each expert are those that the routers chose."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from tests.families.mixtures import qwen3
from tests.paged import Oracle, Paged
from vllm_lite.checkpoint.layer_specs.experts import RoutingSpec
from vllm_lite.client.engines.launch import resolve
from vllm_lite.config import EngineConfig
from vllm_lite.engine.core import sum_of
from vllm_lite.errors import ConfigError
from vllm_lite.kernels.routing import Routing
from vllm_lite.layers.moe.experts import Router, SparseMLP
from vllm_lite.worker.process import _Heartbeat
from vllm_lite.worker.progress import Progress
from vllm_lite.worker.step_parts.expert_load import ExpertLoad


@pytest.fixture(scope="module", params=[(1,), (2,)], ids=["the second layer is dense", "the last layer is dense"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """5 experts, 3 for each token."""
    variant = qwen3("mixture", {}, mlp_only_layers=list(request.param))
    return Oracle(variant.make(tmp_path_factory.mktemp("load") / "mixture"))


def test_choices_of_routers_are_counted(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    model = oracle.load()
    load = ExpertLoad.of(model, 512, torch.device("cpu"))
    assert load is not None
    seen: dict[Router, Counter[int]] = {}
    forward = SparseMLP.forward

    def counted(block: SparseMLP, x: torch.Tensor, rows: object) -> None:
        forward(block, x, rows)  # type: ignore[arg-type]
        assert block.kept is not None
        seen.setdefault(block.router, Counter()).update(block.kept[: len(x)].flatten().tolist())

    monkeypatch.setattr(SparseMLP, "forward", counted)
    paged = Paged(oracle, model=model)
    sequence = paged.sequence(oracle.tokens)
    for num_tokens in (70, 1, 30):
        paged.step((sequence, num_tokens))
        load.count(num_tokens, num_tokens)
    blocks = [layer.mlp for layer in model.layers]  # type: ignore[attr-defined]
    expected = [
        [seen[block.router][expert] for expert in range(5)] if isinstance(block, SparseMLP) else [] for block in blocks
    ]
    assert load.tokens() == expected
    assert [sum(layer) for layer in expected if layer] == [3 * 101] * 2
    assert len(set(map(tuple, expected))) == 3, "layers differ"


def test_layers_after_the_last_attention_count_wanted_tokens_only() -> None:
    layers = {
        index: SimpleNamespace(router=SimpleNamespace(routing=Routing(RoutingSpec(5, 3), None))) for index in (0, 2, 3)
    }
    load = ExpertLoad(layers, (4, 1), 64, torch.device("cpu"))  # type: ignore[arg-type]
    load.count(50, 2)
    assert [sum(layer) for layer in load.tokens()] == [150, 0, 6, 6]


def test_the_last_layer_has_the_wanted_tokens_only(oracle: Oracle) -> None:
    load = ExpertLoad.of(oracle.load(), 64, torch.device("cpu"))
    assert load is not None
    load.count(50, 2)
    load.count(50, 0)
    sums = [sum(layer) for layer in load.tokens()]
    assert sums == ([300, 0, 6] if sums[1] == 0 else [300, 300, 0])


def test_logits_are_the_same_while_it_counts(oracle: Oracle) -> None:
    model = oracle.load()
    before = Paged(oracle, model=model).run(oracle.tokens, 64)
    ExpertLoad.of(model, 512, torch.device("cpu"))
    assert torch.equal(Paged(oracle, model=model).run(oracle.tokens, 64), before)


def test_a_heartbeat_has_counts_that_changed() -> None:
    progress = Progress()
    heart = _Heartbeat.__new__(_Heartbeat)
    heart.progress, heart.said = progress, None
    assert heart.expert_tokens() is None
    counted = [[1, 2], []]
    progress.expert_tokens = lambda: [list(layer) for layer in counted]
    assert heart.expert_tokens() == [[1, 2], []]
    assert heart.expert_tokens() is None
    counted[0][1] += 1
    assert heart.expert_tokens() == [[1, 3], []]


def test_an_engine_adds_the_counts_of_its_groups_of_workers() -> None:
    assert sum_of([], []) == []
    assert sum_of([], [[1], []]) == sum_of([[1], []], []) == [[1], []]
    assert sum_of([[1, 2], []], [[10, 20], []]) == [[11, 22], []]


def test_a_model_without_experts_has_nothing_to_count(caplog: pytest.LogCaptureFixture) -> None:
    resolve(EngineConfig(device="cpu", expert_load_metrics=True))
    assert "expert_load_metrics counts nothing: the model has no experts" in caplog.text


def test_more_series_than_a_scrape_should_have_are_refused(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(oracle.path), device="cpu", expert_load_metrics=True)
    monkeypatch.setattr("vllm_lite.checkpoint.fitting.MAX_COUNTED_EXPERTS", 10)
    resolve(config)
    monkeypatch.setattr("vllm_lite.checkpoint.fitting.MAX_COUNTED_EXPERTS", 9)
    with pytest.raises(ConfigError, match=r"counts at most 9 experts, .* and this model has 10; leave it off"):
        resolve(config)
