"""Drafts of hybrid models through whole engines, by MTP heads and by copies in 4 bits: tokens, and how much of each
prompt is found in the cache, are as without."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.e2e.reference import make_prompts, start
from tests.eagle_heads import make_eagle
from tests.families.hybrid import VARIANTS as HYBRIDS
from tests.families.latent import VARIANTS as LATENT
from tests.families.mixtures import VARIANTS as MIXTURES
from tests.families.variant import Variant
from tests.mtp_heads import add_head
from vllm_lite import SamplingParams
from vllm_lite.errors import ConfigError

HEAD: dict[str, Any] = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 3},
    "disable_adaptive_drafts": True,
}
SELF = HEAD | {"speculative_config": {"method": "self", "num_speculative_tokens": 3}}
METHODS = {"mtp": HEAD, "self": SELF}
FEW_BLOCKS: dict[str, Any] = {"num_gpu_blocks_override": 20, "max_num_seqs": 20}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": FEW_BLOCKS | {"preemption_mode": "recompute"},
    "swapped": FEW_BLOCKS | {"preemption_mode": "swap", "swap_space": 0.05},
    "chunks": {"max_num_batched_tokens": 64, "max_num_seqs": 4},
    "two ranks": {"tensor_parallel_size": 2},
}
BY_MODEL: dict[str, Variant] = {each.model: each for each in reversed((*HYBRIDS, *LATENT, *MIXTURES))}
ALLOWED = [5, 6, 7]
"""With three tokens to choose from, every third draft is right by chance."""
PROMPTS = make_prompts((1, 3, 16, 17, 40, 64, 65, 96, 111, 129), seed=5)
PARAMS = [
    SamplingParams(
        temperature=float(place % 2),
        seed=place,
        max_tokens=20,
        ignore_eos=True,
        n=1 + place // 7,
        allowed_token_ids=ALLOWED,
    )
    for place in range(len(PROMPTS))
]


def answers(model: Path, **settings: Any) -> tuple[list[list[list[int]]], Any]:
    with start(model, **settings) as llm:
        found = llm.generate(PROMPTS * 2, PARAMS * 2, use_tqdm=False)
        return [[sample.token_ids for sample in output.outputs] for output in found], llm.stats()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_head(HYBRIDS[0].make(tmp_path_factory.mktemp("hybrid") / "model"))


@pytest.fixture(scope="module")
def expected(hybrid: Path) -> list[list[list[int]]]:
    return answers(hybrid)[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", WAYS)
def test_a_hybrid(hybrid: Path, expected: list[list[list[int]]], way: str, method: str) -> None:
    found, stats = answers(hybrid, **METHODS[method], **WAYS[way])
    assert found == expected
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert (stats.preemptions > 0) == (way in ("recomputed", "swapped"))


@pytest.mark.parametrize(
    "name", ["Glm4MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "NemotronHForCausalLM"]
)
def test_other_families(name: str, tmp_path: Path) -> None:
    model = add_head(BY_MODEL[name].make(tmp_path / "model"))
    found, stats = answers(model, **HEAD)
    assert found == answers(model)[0]
    assert 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize("method", METHODS)
def test_a_chat_of_twenty_turns(hybrid: Path, method: str) -> None:
    """Each prompt is the previous one with its answer and a new message."""

    def chat(**settings: Any) -> tuple[list[list[int]], list[int | None]]:
        params, prompt = SamplingParams(temperature=0.0, max_tokens=7, allowed_token_ids=ALLOWED), [1, 9, 30]
        given, cached = [], []
        with start(hybrid, max_model_len=512, **settings) as llm:
            for turn in range(20):
                (output,) = llm.generate([prompt], params, use_tqdm=False)
                given.append(output.outputs[0].token_ids)
                cached.append(output.num_cached_tokens)
                prompt = [*prompt, *given[-1], *range(40 + turn, 50 + turn)]
        return given, cached

    tokens, cached = chat(**METHODS[method])
    assert (tokens, cached) == chat()
    assert cached[-1]


@pytest.mark.parametrize("way", ["plain", "two ranks"])
def test_a_head_of_eagle(way: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "llama", num_hidden_layers=4)
    head = make_eagle(model, tmp_path / "head", num_tokens=384)
    speculation = HEAD["speculative_config"] | {"method": "eagle3", "model": str(head)}
    found, stats = answers(model, **(HEAD | {"speculative_config": speculation} | WAYS[way]))
    assert found == answers(model)[0]
    assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_checkpoints_without_a_head_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a head that the checkpoint has, and none is known of Qwen3ForCausalLM;"):
        start(make_checkpoint(tmp_path / "qwen3", "qwen3"), **HEAD)
    with pytest.raises(ConfigError, match=r"and this one has none \(mtp.fc.weight is missing\); use method suffix"):
        start(HYBRIDS[0].make(tmp_path / "hybrid"), **HEAD)
