"""Every family gives the logits of transformers at every position, however its prompt is split and its blocks are
placed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.paged import Oracle, Paged, check_mixed
from vllm_lite.checkpoint.config_json import ENCODERS, FAMILIES
from vllm_lite.errors import ModelError
from vllm_lite.models.registry import MODELS, Sizes, build
from vllm_lite.protocol.step import BlockOp

MAX_DIFFERENCE = 3e-4
"""Maximum difference of logits of size 10 in float32; a wrong model differs by over 0.1 (see the negative controls)."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-rope3": {"rope_parameters": LLAMA3},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-sharded": {"max_shard_size": "100KB", "num_hidden_layers": 3},
    "llama-heads": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 24},
    "mistral": {"family": "mistral", "sliding_window": None},
    "qwen3": {"family": "qwen3"},
    "qwen3-tied-biases": {"family": "qwen3", "tie_word_embeddings": True, "attention_bias": True},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("variants")
    return {name: make_checkpoint(root / name, **options) for name, options in VARIANTS.items()}


@pytest.fixture(scope="module", params=VARIANTS)
def oracle(request, checkpoints) -> Oracle:
    return Oracle(checkpoints[request.param])


@pytest.fixture(scope="module")
def llama(checkpoints) -> Oracle:
    return Oracle(checkpoints["llama"])


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_logits_match_transformers_whatever_the_chunk(oracle, chunk):
    logits = Paged(oracle).run(oracle.tokens, chunk)
    assert oracle.difference(logits) < MAX_DIFFERENCE
    assert torch.equal(logits.argmax(-1), oracle.logits.argmax(-1))


def test_mixed_batch_of_several_sequences(oracle):
    check_mixed(Paged(oracle, seed=3), oracle, MAX_DIFFERENCE)


def test_hidden_states_of_wanted_tokens_are_those_of_all(oracle, monkeypatch):
    forward = oracle.model.forward

    def compared(batch, *args):
        every = forward(batch, *args).clone()
        last = len(every) - 1
        for wanted in ([last], [last, 0, last // 2], [], list(range(len(every)))):
            few = forward(replace(batch, wanted=torch.tensor(wanted, dtype=torch.int64)), *args)
            assert few.shape == (len(wanted), every.shape[1])
            assert torch.allclose(few, every[wanted], rtol=0, atol=1e-4)
        return every

    monkeypatch.setattr(oracle.model, "forward", compared)
    logits = Paged(oracle).run(oracle.tokens, 64)
    assert oracle.difference(logits) < MAX_DIFFERENCE


def test_a_sequence_moved_to_other_blocks_continues(llama):
    paged = Paged(llama)
    sequence = paged.sequence(llama.tokens)
    paged.step((sequence, 100))
    (blocks,) = sequence.tables
    moved = paged.take(len(blocks))
    paged.cache.execute([(BlockOp.COPY, src, dst) for src, dst in zip(blocks, moved, strict=True)])
    paged.cache.pool[blocks] = torch.nan
    sequence.tables = [moved]
    paged.step((sequence, 50))
    assert llama.difference(torch.cat(sequence.logits)) < MAX_DIFFERENCE


@pytest.mark.parametrize("error", ["corrupt block", "wrong block", "shifted position"])
def test_negative_controls(oracle, error):
    paged = Paged(oracle)
    sequence = paged.sequence(oracle.tokens)
    paged.step((sequence, 100))
    (blocks,) = sequence.tables
    if error == "corrupt block":
        paged.cache.pool[blocks[5]] *= 0.5
    if error == "wrong block":  # to swap two would change nothing: cached keys carry their positions
        blocks[3] = blocks[4]
    paged.step((sequence, 50), shift=1 if error == "shifted position" else 0)
    before, after = sequence.logits
    assert oracle.difference(before) < MAX_DIFFERENCE
    assert oracle.difference(after, first=100) > 0.1


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bfloat16_is_no_further_from_the_truth_than_transformers(checkpoints, name):
    truth, rounded = Oracle(checkpoints[name]), Oracle(checkpoints[name], "bfloat16")
    ours = Paged(rounded).run(rounded.tokens, 1000).float()
    theirs = rounded.logits
    assert (ours - truth.logits).abs().mean() < 1.2 * (theirs - truth.logits).abs().mean()


def test_the_tokens_of_a_prompt_give_many_different_answers(oracle):
    """Otherwise the tests of parity could not detect a wrong context."""
    assert len(oracle.logits.argmax(-1).unique()) > 40


def test_a_position_beyond_the_model_length_is_an_error(llama):
    paged = Paged(llama)
    with pytest.raises(IndexError):
        paged.step((paged.sequence(llama.tokens), 10), shift=250)


def test_more_tokens_than_the_buffers_hold_is_an_error(llama):
    paged = Paged(llama)
    with pytest.raises(ValueError, match="600 tokens exceeds the 512"):
        paged.step((paged.sequence(torch.zeros(600, dtype=torch.int64)), 600))


def test_registry_and_spec_know_the_same_architectures(llama):
    assert MODELS.keys() == FAMILIES.keys() | ENCODERS.keys()
    with pytest.raises(ModelError, match=r"'Other'.*LlamaForCausalLM"):
        build(msgspec.structs.replace(llama.spec, architecture="Other"), "float32", "cpu", Sizes(8, 8))


def test_num_parameters_counts_the_models_weights(oracle):
    groups = build(oracle.spec, "float32", "cpu", Sizes(8, 8)).weight_groups()
    assert oracle.spec.num_parameters() == sum(slot.num_elements for group in groups for slot in group.slots)
