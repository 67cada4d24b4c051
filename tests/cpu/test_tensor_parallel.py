"""A model over several ranks gives the logits of one rank and of transformers, however its sizes divide."""

from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.paged import Oracle, Paged
from tests.thread_group import ThreadCommunicator, on_ranks
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.errors import ConfigError, RankLostError
from vllm_lite.kernels import cpu
from vllm_lite.layers.weights import onednn
from vllm_lite.layers.weights.embedding import Embedding
from vllm_lite.layers.weights.linear import Linear
from vllm_lite.layers.weights.weight_slot import WeightSlot

MAX_DIFFERENCE = 3e-4
"""Maximum difference of logits of size 10 in float32; the negative controls change them by over 0.1."""
CPU = torch.device("cpu")
BIASES = {"attention_bias": True, "mlp_bias": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-biases": {"tie_word_embeddings": True, **BIASES},
    # 5 heads of one KV head, and a vocabulary and layers that are not powers of two.
    "llama-odd": {
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "vocab_size": 389,
        "hidden_size": 80,
        "intermediate_size": 120,
    },
    "llama-14-heads": {"num_attention_heads": 14, "head_dim": 8, "hidden_size": 56, "attention_bias": True},
    "mistral": {"family": "mistral", "sliding_window": 13, "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3"},
    "qwen3-mixed": {
        "family": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 11,
        "max_window_layers": 1,
        "attention_bias": True,
    },
}
CASES = [
    *(("llama", world) for world in (2, 4)),
    *(("llama-tied-biases", world) for world in (2, 4)),
    *(("llama-odd", world) for world in (2, 3, 4, 5)),
    *(("llama-14-heads", world) for world in (2, 4)),
    *(("mistral", world) for world in (2, 4)),
    *(("qwen3", world) for world in (2, 4)),
    ("qwen3-mixed", 2),
]
LENGTHS = (150, 9, 33)
"""Lengths of the sequences that `steps` computes."""


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    root = tmp_path_factory.mktemp("ranks")
    return {name: Oracle(make_checkpoint(root / name, **options)) for name, options in VARIANTS.items()}


def steps(paged: Paged, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of all tokens of some sequences: prompts in chunks, beside others that decode, and decoding alone."""
    long, short, late = sequences = [paged.sequence(tokens[:length]) for length in LENGTHS]
    paged.step((long, 64), (short, 5))
    paged.step((long, 7), (short, 1), (late, 30))
    for _ in range(3):
        paged.step((long, 1), (short, 1), (late, 1))
    paged.step((long, 76))
    return torch.cat([torch.cat(sequence.logits) for sequence in sequences])


def by_ranks(oracle: Oracle, world: int, *, shares_memory: bool = True) -> torch.Tensor:
    """Run `steps` on `world` ranks, all of which must see the same bits."""

    def work(communicator: ThreadCommunicator) -> torch.Tensor:
        return steps(Paged(oracle, model=oracle.load(communicator)), oracle.tokens)

    first: torch.Tensor
    first, *others = on_ranks(world, work, shares_memory=shares_memory)
    assert all(torch.equal(first, other) for other in others)
    return first


def of_transformers(oracle: Oracle) -> torch.Tensor:
    return torch.cat([oracle.logits[:length] for length in LENGTHS])


@pytest.mark.parametrize(("name", "world"), CASES)
def test_ranks_give_the_logits_of_one_and_of_transformers(oracles: dict[str, Oracle], name: str, world: int) -> None:
    oracle = oracles[name]
    logits, one = by_ranks(oracle, world), steps(Paged(oracle), oracle.tokens)
    expected = of_transformers(oracle)
    assert (logits - one).abs().max() < MAX_DIFFERENCE
    assert (logits - expected).abs().max() < MAX_DIFFERENCE
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_ranks_that_share_no_memory_exchange_their_columns(oracles: dict[str, Oracle]) -> None:
    logits = by_ranks(oracles["llama-odd"], 3, shares_memory=False)
    assert torch.equal(logits, by_ranks(oracles["llama-odd"], 3))


@pytest.mark.parametrize("name", ["llama-odd", "llama-tied-biases"])
def test_ranks_without_native_kernels(oracles: dict[str, Oracle], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In plain torch, as on a GPU, where oneDNN packs nothing and a tied head has a dense table."""
    monkeypatch.setattr(cpu, "available", lambda: False)
    monkeypatch.setattr(onednn, "pack", lambda _: None)
    difference = by_ranks(oracles[name], 2) - of_transformers(oracles[name])
    assert difference.abs().max() < MAX_DIFFERENCE


def test_a_step_makes_one_call_for_the_embedding_and_two_for_each_layer(oracles: dict[str, Oracle]) -> None:
    oracle = oracles["llama"]

    def work(communicator: ThreadCommunicator) -> dict[str, int]:
        paged = Paged(oracle, model=oracle.load(communicator))
        assert communicator.num_calls == {}, "loading needs no other rank"
        paged.step((paged.sequence(oracle.tokens), 1))
        return communicator.num_calls

    calls = {"all_reduce": 1 + 2 * oracle.spec.num_layers, "barrier": 1}
    assert on_ranks(2, work) == [calls, calls]


def test_logits_are_written_to_own_columns_alone(oracles: dict[str, Oracle]) -> None:
    oracle = oracles["llama-odd"]
    hidden = torch.randn(3, 80, generator=torch.Generator().manual_seed(0))

    def work(communicator: ThreadCommunicator) -> tuple[slice, torch.Tensor]:
        model = oracle.load(communicator)
        out = torch.full((3, 389), torch.nan)
        assert model.logits(hidden, out) is out
        return model.own_columns, out

    expected = oracle.model.logits(hidden)
    end = 0
    for own, out in on_ranks(4, work, shares_memory=False):
        assert own.start == end
        assert torch.allclose(out[:, own], expected[:, own], rtol=0, atol=1e-4)
        assert out[:, : own.start].isnan().all()
        assert out[:, own.stop :].isnan().all()
        end = own.stop
    assert end == 389
    assert oracle.model.own_columns == slice(0, 389)


# ---- other types and forms of weights


def test_bfloat16_is_no_further_from_the_truth_than_one_rank(oracles: dict[str, Oracle]) -> None:
    truth, rounded = oracles["llama"], Oracle(oracles["llama"].path, "bfloat16")
    expected = of_transformers(truth)
    one = (steps(Paged(rounded), rounded.tokens).float() - expected).abs().mean()
    assert (by_ranks(rounded, 4).float() - expected).abs().mean() < 1.2 * one


@pytest.mark.parametrize("name", ["llama-tied-biases", "llama-odd"])
def test_int8_is_no_further_from_the_truth_than_one_rank(oracles: dict[str, Oracle], name: str) -> None:
    """Not equal to one rank: matrices split by inputs have separate, finer scales on each rank."""
    oracle = oracles[name]

    def work(communicator: ThreadCommunicator | None) -> torch.Tensor:
        return steps(Paged(oracle, model=oracle.load(communicator, "int8")), oracle.tokens)

    expected = of_transformers(oracle)
    one = (work(None) - expected).abs().mean()
    first, second = on_ranks(2, work)
    assert torch.equal(first, second)
    assert 0 < (first - expected).abs().mean() < 1.2 * one


# ---- negative controls


class Forgetful(ThreadCommunicator):
    """Rank 1's part of one sum is missing."""

    def all_reduce(self, x: torch.Tensor) -> None:
        if self.shard.rank == 1 and self.num_calls.get("all_reduce", 0) % 5 == 3:
            x.zero_()
        super().all_reduce(x)


def test_control_a_dropped_partial_sum_changes_the_logits(
    oracles: dict[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.thread_group.ThreadCommunicator", Forgetful)
    assert_wrong(oracles["llama"])


def test_control_a_bias_that_every_rank_adds_changes_the_logits(
    oracles: dict[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Linear, "bias_parts", lambda layer: layer.shape.outputs)
    assert_wrong(oracles["llama-tied-biases"])


@pytest.mark.parametrize("name", ["llama", "llama-tied-biases"])
def test_control_other_rows_of_the_vocabulary_change_the_logits(
    oracles: dict[str, Oracle], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = Embedding.slot

    def other(embedding: Embedding, tensor: str) -> WeightSlot:
        right = slot(embedding, tensor)
        return right._replace(start=(right.shape[0] - right.start[0] - right.size[0], 0))

    monkeypatch.setattr(Embedding, "slot", other)
    assert_wrong(oracles[name])


def assert_wrong(oracle: Oracle) -> None:
    expected = of_transformers(oracle)
    logits = by_ranks(oracle, 2)
    assert (logits - expected).abs().max() > 0.1
    assert not torch.equal(logits.argmax(-1), expected.argmax(-1))


# ---- failures


def test_a_token_outside_of_the_vocabulary_is_an_error_on_all_ranks(oracles: dict[str, Oracle]) -> None:
    oracle = oracles["llama-tied-biases"]

    def work(communicator: ThreadCommunicator) -> None:
        embedding, out = oracle.load(communicator).embedding, torch.empty(2, 64)  # type: ignore[attr-defined]
        for wrong in (-1, 384):
            with pytest.raises(IndexError, match=rf"\[0, 384\), got .*{wrong}"):
                embedding.forward(torch.tensor([5, wrong]), out)

    on_ranks(2, work)


def test_a_rank_that_fails_ends_the_others(oracles: dict[str, Oracle]) -> None:
    oracle = oracles["llama"]
    seen = []

    def work(communicator: ThreadCommunicator) -> None:
        paged = Paged(oracle, model=oracle.load(communicator))
        sequence = paged.sequence(oracle.tokens)
        try:  # rank 0 may still be in the first step when rank 1, which has left it, ends the group
            paged.step((sequence, 5))
            if communicator.shard.rank == 1:
                raise ValueError("rank 1 has had enough")
            paged.step((sequence, 5))
        except RankLostError:
            seen.append(communicator.lost_rank())
            raise

    with pytest.raises(ValueError, match="had enough"):
        on_ranks(2, work)
    assert seen == [1]


def test_models_that_ranks_cannot_share_are_refused_before_they_are_built(oracles: dict[str, Oracle]) -> None:
    for name, world, fits in (("llama-odd", 6, "1, 2, 3, 4 or 5"), ("llama-14-heads", 3, "1, 2, 4, 6, 8 or 12")):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size {world} does not fit .* fit {fits}$"):
            on_ranks(world, oracles[name].load)


def test_ranks_have_their_own_heads_and_all_have_the_blocks_of_one_size(oracles: dict[str, Oracle]) -> None:
    spec = oracles["llama-14-heads"].spec
    ranks = [spec.per_rank(shard) for shard in Shard(0, 4).all_ranks]
    assert [rank.layers[0].attention.num_heads for rank in ranks] == [4, 3, 4, 3]
    assert {rank.kv_block_bytes(8, 4) for rank in ranks} == {spec.kv_block_bytes(8, 4, tp=4)}
    assert spec.kv_block_bytes(8, 4, tp=4) == spec.kv_block_bytes(8, 4) // 2
