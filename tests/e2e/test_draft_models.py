"""Draft models through whole engines. One that is the model itself is right in every draft, whatever happens to its KV:
shared prefixes, samples of one prompt, preemption, chunks, ranks. One of another shape changes no token."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.checkpoints import make_checkpoint
from tests.e2e.reference import make_prompts, start
from tests.gguf_files import write, write_gguf
from vllm_lite import SamplingParams
from vllm_lite.checkpoint.draft_model import check_vocabulary
from vllm_lite.errors import ConfigError
from vllm_lite.runtime.nested_settings import Speculation

NUM_TOKENS = 24
PROMPTS = make_prompts((1, 3, 16, 17, 40, 64, 65, 96, 111, 129), seed=5)
PARAMS = [
    SamplingParams(temperature=float(place % 2), seed=place, max_tokens=NUM_TOKENS, ignore_eos=True, n=1 + place // 7)
    for place in range(len(PROMPTS))
]
FEW_BLOCKS: dict[str, Any] = {"num_gpu_blocks_override": 36}
SWAP: dict[str, Any] = {"preemption_mode": "swap", "swap_space": 0.05}
OF_TWIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": FEW_BLOCKS | {"preemption_mode": "recompute"},
    "swapped": FEW_BLOCKS | SWAP,
    "chunks": {"max_num_batched_tokens": 64, "max_num_seqs": 4},
    "two ranks": {"tensor_parallel_size": 2},
    "one step in flight": {"async_scheduling": False},
    "plain torch": {"enforce_eager": True, "attention_backend": "reference"},
}
OTHER: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 32, "head_dim": 8, "num_key_value_heads": 1}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "another shape": ("llama", OTHER | {"num_attention_heads": 2}),
    "windows": ("mistral", {"sliding_window": 24, "seed": 3}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[list[int]]]:
    return answers(model)[0]


def answers(model: Path, **settings: Any) -> tuple[list[list[list[int]]], Any]:
    """The tokens of each prompt's samples, twice: the second time with prefix hits."""
    with start(model, **settings) as llm:
        found = llm.generate(PROMPTS * 2, PARAMS * 2, use_tqdm=False)
        return [[sample.token_ids for sample in output.outputs] for output in found], llm.stats()


def drafting(folder: Path, **more: Any) -> dict[str, Any]:
    speculation = {"model": str(folder), "num_speculative_tokens": 4} | more
    return {"speculative_config": speculation, "disable_adaptive_drafts": True}


@pytest.mark.parametrize("name", OF_TWIN)
def test_a_twin_is_always_right(model: Path, expected: list[list[list[int]]], name: str) -> None:
    found, stats = answers(model, **drafting(model), **OF_TWIN[name])
    assert found == expected
    assert stats.accepted_tokens == stats.draft_tokens > 0
    assert stats.cached_tokens > 0
    assert (stats.preemptions > 0) == (name in ("recomputed", "swapped"))


@pytest.mark.parametrize("shape", SHAPES)
def test_another_model_changes_no_token(
    model: Path, expected: list[list[list[int]]], shape: str, tmp_path: Path
) -> None:
    family, config = SHAPES[shape]
    drafter = make_checkpoint(tmp_path / "drafter", family, **config)
    found, stats = answers(model, **drafting(drafter, quantization="int8"), num_gpu_blocks_override=80, **SWAP)
    assert found == expected
    assert 0 <= stats.accepted_tokens < stats.draft_tokens


def test_a_gguf_file_drafts(model: Path, expected: list[list[list[int]]], tmp_path: Path) -> None:
    found, stats = answers(model, **drafting(write_gguf(tmp_path / "twin.gguf", model)))
    assert found == expected
    assert stats.accepted_tokens == stats.draft_tokens > 0


def test_a_twin_with_windows(tmp_path: Path) -> None:
    """KV of tokens before a window is kept, because the draft model may compute it late."""
    model = make_checkpoint(tmp_path / "model", "mistral", sliding_window=24)
    found, stats = answers(model, **drafting(model), **FEW_BLOCKS, **SWAP)
    assert found == answers(model)[0]
    assert stats.accepted_tokens == stats.draft_tokens > 0


def test_a_model_that_cannot_draft_is_refused(model: Path, tmp_path: Path) -> None:
    larger = make_checkpoint(tmp_path / "larger", vocab_size=400)
    with pytest.raises(ConfigError, match="has a vocabulary of 400 tokens and the model one of 384; a draft model"):
        start(model, **drafting(larger))
    other = make_checkpoint(tmp_path / "other")
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"<unk>"', '"<huh>"'))
    with pytest.raises(
        ConfigError, match="has another vocabulary: 1 tokens differ, the first is 0, '<huh>' and not '<unk>';"
    ):
        start(model, **drafting(other))


def test_vocabularies_are_compared_across_file_formats(model: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other")
    file = other / "tokenizer.json"
    own = write_gguf(tmp_path / "own.gguf", other)
    file.write_text(file.read_text().replace('"<unk>"', '"<huh>"'))
    differing = write_gguf(tmp_path / "differing.gguf", other)
    for tokenizer, drafter in ((model, differing), (own, differing), (differing, model), (own, other)):
        with pytest.raises(ConfigError, match=r"another vocabulary: 1 tokens differ, the first is 0, '<...>' and not"):
            check_vocabulary(Speculation(model=str(drafter)), str(tokenizer))
    for tokenizer, drafter in ((model, own), (own, model), (own, own), (other, differing)):
        check_vocabulary(Speculation(model=str(drafter)), str(tokenizer))


@pytest.mark.parametrize(
    "damage",
    [
        {"added_tokens": [{"id": 0, "content": None}]},
        {"added_tokens": [{"id": "0", "content": "x"}]},
        {"model": {"vocab": {"x": None, "y": 1}}},
        {"model": {"vocab": [[7, 0.0]]}},
        {"model": {"vocab": 7}},
        {"model": None},
    ],
)
def test_damaged_tokenizers_are_left_to_their_readers(damage: dict[str, Any], model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"<unk>": 0}}, **damage}))
    check_vocabulary(Speculation(model=str(tmp_path)), str(model))


def test_names_that_converters_change_are_the_same_tokens(tmp_path: Path) -> None:
    """Spaces, and names that fill a vocabulary up."""
    tokens = ["<unk>", "▁a", "▁▁", "b"]
    folder = tmp_path / "model"
    folder.mkdir()
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))

    def gguf_with(*tokens: str) -> Speculation:
        writer = gguf.GGUFWriter(tmp_path / f"{len(tokens)}.gguf", "llama")
        writer.add_token_list([*tokens])
        write(writer)
        return Speculation(model=str(tmp_path / f"{len(tokens)}.gguf"))

    check_vocabulary(gguf_with("<unk>", "▁a", "  ", "[PAD3]", "[PAD4]"), str(folder))
    with pytest.raises(ConfigError, match="2 tokens differ, the first is 3, 'c' and not 'b'"):
        check_vocabulary(gguf_with("<unk>", "▁a", "  ", "c", "[PAD4]", "b"), str(folder))
