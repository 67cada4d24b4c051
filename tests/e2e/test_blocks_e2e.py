"""Tokens equal transformers' with swaps, recomputing, the host tier, windows, overlapped steps and drafts.

The tests use real processes, in float32; the engine's counters show that these events happened.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.e2e.reference import GREEDY, NUM_TOKENS, TIE, Case, Reference, make_prompts, start, tokens_of
from vllm_lite import SamplingParams
from vllm_lite.protocol.stats import Stats

LENGTHS = [1, 7, 8, 9, 16, 24, 31, 33, 40, 64, 65, 100]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "mistral": {"family": "mistral", "sliding_window": 30},
    "mixed": {
        "family": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 21,
        "num_hidden_layers": 3,
        "max_window_layers": 1,
    },
    "loops": {"family": "llama", "initializer_range": 0.02},
}
"""A window is not a multiple of a block, and much shorter than some prompts. The small weights of "loops" make a model
that soon repeats itself."""
SWAP: dict[str, Any] = {"swap_space": 1e-3, "preemption_mode": "swap"}
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
SUFFIX: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 8}
FIXED: dict[str, Any] = {"async_scheduling": False, "speculative_config": NGRAM, "disable_adaptive_drafts": True}
"""Rows of a model this small cost so much that adaptive drafts are few."""
EVERY_MODEL = pytest.mark.parametrize("model", ["llama", "mistral", "mixed"])
SMALL_POOL = {"llama": 22, "mistral": 16, "mixed": 44}
"""Blocks of 8 that hold the longest of the sequences, and not many together."""


class Truth:
    """Checkpoints, and transformers' continuations of PROMPTS. Each is computed at its first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.references: dict[str, Reference] = {}
        self.known: dict[str, list[Case]] = {}

    def reference(self, model: str) -> Reference:
        if model not in self.references:
            self.references[model] = Reference(make_checkpoint(self.folder / model, **MODELS[model]))
        return self.references[model]

    def cases(self, model: str) -> list[Case]:
        if model not in self.known:
            cases = [self.reference(model).generate(prompt) for prompt in make_prompts(LENGTHS)]
            self.known[model] = [case for case in cases if min(case.margins) > TIE]
            assert len(self.known[model]) >= 10, "choose another seed: too many ties"
        return self.known[model]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return Truth(tmp_path_factory.mktemp("blocks"))


def check(truth: Truth, model: str, *, rounds: int = 1, **settings: Any) -> Stats:
    """Run all prompts at once, several times: every token must be right, and at the end no block is in use."""
    cases = truth.cases(model)
    small: dict[str, Any] = {"block_size": 8, "max_num_batched_tokens": 48}
    with start(truth.reference(model).path, **(small | settings)) as llm:
        for _ in range(rounds):
            outputs = llm.generate([case.prompt for case in cases], GREEDY, use_tqdm=False)
            assert tokens_of(outputs) == [case.tokens for case in cases]
        stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_used_host_blocks) == (0, 0, 0, 0)
    print(f"{model}: {stats}")
    return stats


def models(*pairs: tuple[str, bool]) -> pytest.MarkDecorator:
    names = [f"{model}-{'overlap' if overlap else 'synchronous'}" for model, overlap in pairs]
    return pytest.mark.parametrize(("model", "overlap"), pairs, ids=names)


@models(("llama", True), ("llama", False), ("mistral", True), ("mistral", False), ("mixed", True))
def test_swapped_sequences_continue_with_the_same_tokens(truth, model, overlap):
    stats = check(truth, model, num_gpu_blocks_override=SMALL_POOL[model], async_scheduling=overlap, **SWAP)
    assert stats.swaps > 0
    assert stats.swaps == stats.preemptions


@pytest.mark.parametrize("model", ["llama", "mixed"])
def test_without_a_prefix_cache_swapped_blocks_come_from_the_host(truth, model):
    settings = SWAP | {"enable_prefix_caching": False}
    stats = check(truth, model, num_gpu_blocks_override=SMALL_POOL[model], **settings)
    assert (stats.swaps > 0, stats.demoted_blocks, stats.cached_tokens) == (True, 0, 0)


def test_a_swap_moves_few_blocks_a_step_or_none_at_all(truth):
    stats = check(truth, "llama", num_gpu_blocks_override=22, max_swap_blocks_per_step=5, **SWAP)
    assert 0 < stats.swaps <= stats.preemptions  # which sequences are preempted depends on when requests arrive


@models(("llama", False), ("mistral", True), ("mixed", True))
def test_preempted_sequences_are_computed_again(truth, model, overlap):
    settings = {"preemption_mode": "recompute", "async_scheduling": overlap}
    stats = check(truth, model, num_gpu_blocks_override=SMALL_POOL[model], **settings)
    assert stats.preemptions > 0
    assert stats.swaps == 0


@EVERY_MODEL
def test_evicted_prefixes_are_kept_on_the_host_and_come_back(truth, model):
    stats = check(truth, model, rounds=2, num_gpu_blocks_override=SMALL_POOL[model], swap_space=1e-3)
    assert stats.demoted_blocks > 0
    assert stats.promoted_blocks > 0


@models(("mistral", False), ("mixed", True))
def test_a_roomy_pool(truth, model, overlap):
    stats = check(truth, model, rounds=2, num_gpu_blocks_override=400, async_scheduling=overlap)
    assert (stats.preemptions, stats.cached_tokens > 0) == (0, True)


def test_a_window_holds_few_blocks(truth):
    """The longest sequence has 131 computed tokens in 17 blocks; 7 of them are within the window and a chunk."""
    longest = truth.cases("mistral")[-1]
    with start(truth.reference("mistral").path, block_size=8, max_num_batched_tokens=16) as llm:
        (output,) = llm.generate(longest.prompt, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == longest.tokens
        assert llm.stats().peak_used_blocks <= 7


# ---- drafts


@EVERY_MODEL
def test_everything_at_once(truth, model):
    stats = check(truth, model, rounds=2, num_gpu_blocks_override=SMALL_POOL[model], speculative_config=NGRAM, **SWAP)
    assert stats.swaps > 0


def repetitive_prompts() -> list[list[int]]:
    (pattern,) = make_prompts([12], seed=1)
    return [(pattern * 5)[: 40 + place] for place in range(4)]


def continued(truth: Truth, params: list[SamplingParams], **settings: Any) -> tuple[list[list[int]], int]:
    """The tokens of all repetitive prompts together, and the number of steps they took."""
    with start(truth.reference("loops").path, **settings) as llm:
        outputs = llm.generate(repetitive_prompts(), params, use_tqdm=False)
        return tokens_of(outputs), llm.stats().steps


def test_drafts_save_steps_and_change_no_greedy_token(truth):
    params = [SamplingParams(temperature=0.0, max_tokens=3 * NUM_TOKENS, ignore_eos=True)] * 4
    plain, steps = continued(truth, params, async_scheduling=False)
    cases = [truth.reference("loops").generate(prompt) for prompt in repetitive_prompts()]
    assert [tokens[:NUM_TOKENS] for tokens in plain] == [case.tokens for case in cases]
    drafted, fewer = continued(truth, params, **FIXED)
    print(f"greedy: {steps} steps without drafts, {fewer} with")
    assert drafted == plain
    assert fewer < 0.75 * steps
    for method in (NGRAM, SUFFIX):
        overlapped, _ = continued(truth, params, speculative_config=method)
        assert overlapped == plain


def test_drafts_save_steps_and_change_no_seeded_token(truth):
    """Cool enough to fall into loops, warm enough to leave them at times."""
    params = [SamplingParams(temperature=0.005, seed=seed, max_tokens=96, ignore_eos=True) for seed in range(4)]
    plain, steps = continued(truth, params, async_scheduling=False)
    drafted, fewer = continued(truth, params, **FIXED)
    print(f"seeded: {steps} steps without drafts, {fewer} with")
    assert drafted == plain
    assert fewer < 0.75 * steps


def test_stops_and_banned_stops_hold_within_drafts(truth):
    """A stop token among accepted drafts ends the request at this token, but not before min_tokens."""
    reference = truth.reference("loops")
    case = reference.generate(repetitive_prompts()[0])
    stop = case.tokens[8]
    outputs = []
    for settings in ({}, {"speculative_config": NGRAM}):
        with start(reference.path, **settings) as llm:
            outputs.append(
                [
                    llm.generate(
                        case.prompt,
                        SamplingParams(
                            temperature=0.0, max_tokens=30, stop_token_ids=[stop], min_tokens=least, ignore_eos=True
                        ),
                        use_tqdm=False,
                    )[0].outputs[0]
                    for least in (0, 10)
                ]
            )
    assert [output.token_ids for output in outputs[0]] == [output.token_ids for output in outputs[1]]
    early, late = outputs[1]
    assert early.token_ids == case.tokens[: case.tokens.index(stop) + 1]
    assert len(late.token_ids) >= 10
    assert stop not in late.token_ids[:9]
