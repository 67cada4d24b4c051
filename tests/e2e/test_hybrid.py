"""Hybrid models through the whole engine: transformers' tokens, however prompts are cut up, batched, preempted, forked
and found in the prefix cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import VOCAB_SIZE, transformers_model
from tests.families.hybrid import VARIANTS
from tests.families.variant import Variant
from vllm_lite import LLM, SamplingParams
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.client.prompt import TokensPrompt
from vllm_lite.config import GIB
from vllm_lite.protocol.stats import Stats

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SLOTS = 24
END = 2
"""The checkpoints' end token, which templates write after each message."""


class Chats:
    """A checkpoint in an engine and in transformers."""

    def __init__(
        self, variant: Variant, path: Path, *, slots: int = SLOTS, host_states: int = 0, **settings: object
    ) -> None:
        self.path = variant.make(path / variant.name)
        spec = load_spec(self.path)
        self.reference = transformers_model(self.path, spec.architecture, "float32")
        self.reference.generation_config.eos_token_id = None
        space = slots * spec.state_bytes() / GIB
        usual = {"max_model_len": 512, "max_num_batched_tokens": 40, "max_num_seqs": 6, "block_size": 16}
        usual["single_process"] = True  # computes the same
        swap = 2.001 * host_states * spec.state_bytes() / GIB
        self.llm = LLM(str(self.path), state_cache_space=space, swap_space=swap, **(usual | settings))  # type: ignore[arg-type]
        self.params = GREEDY
        self._expected: dict[tuple[int, ...], list[int]] = {}

    def expected(self, prompt: list[int]) -> list[int]:
        """The continuation that a prompt was checked with; the parameters stay as they are then."""
        return self._expected[tuple(prompt)]

    def check_tokens(self, prompt: list[int], tokens: list[int]) -> None:
        """Check that transformers would generate these tokens: each has the largest logit after the tokens before it.
        This takes one forward pass, while generating takes one for each token."""
        assert len(tokens) == self.params.max_tokens
        ids, allowed = torch.tensor([[*prompt, *tokens]]), self.params.allowed_token_ids
        with torch.inference_mode():
            logits = self.reference(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        best = logits.argmax(-1) if allowed is None else torch.tensor(allowed)[logits[:, allowed].argmax(-1)]
        assert tokens == best.tolist()
        assert self._expected.setdefault(tuple(prompt), tokens) == tokens

    def check(self, prompts: list[list[int]]) -> list[int]:
        """Send them all at once. Returns how many tokens of each were cached."""
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], self.params, use_tqdm=False
        )
        for prompt, output in zip(prompts, outputs, strict=True):
            self.check_tokens(prompt, list(output.outputs[0].token_ids))
        return [output.num_cached_tokens or 0 for output in outputs]

    def stats(self) -> Stats:
        return self.llm.stats()


def words(seed: int, count: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


BY_NAME = {variant.name: variant for variant in VARIANTS}
SERVED = [variant for variant in VARIANTS if variant.name != "nemotron-h"]
"""Nemotron-H is served with experts, which has all that it has without."""


@pytest.fixture(scope="module", params=SERVED, ids=lambda variant: variant.name)
def chats(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chats]:
    made = Chats(request.param, tmp_path_factory.mktemp("hybrid"))
    yield made
    made.llm.close()


def test_turns_of_several_chats_continue_where_they_stopped(chats: Chats) -> None:
    prompts = [words(seed, 20 + 17 * seed) for seed in range(6)]
    assert chats.check(prompts) == [0] * 6
    longer = [[*prompt, *chats.expected(prompt), *words(9, 5)] for prompt in prompts]
    found = chats.check(longer)
    assert [(len(prompt) - 5 - 1) // 16 * 16 for prompt in longer] == found


def test_an_edited_turn_begins_at_the_end_of_the_message_before(chats: Chats) -> None:
    prompt = [*words(20, 70), END, *words(21, 60)]
    chats.check([prompt])
    assert chats.check([[*prompt[:72], *words(22, 40)]]) == [64]


def test_samples_of_a_prompt_share_its_state(chats: Chats) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, n=3)
    prompt = words(30, 77)
    (output,) = chats.llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
    for sample in output.outputs:
        chats.check_tokens(prompt, list(sample.token_ids))
    assert len(output.outputs) == 3


def test_beams_match_transformers(chats: Chats) -> None:
    prompt, params = words(31, 45), SamplingParams(n=3, use_beam_search=True, max_tokens=8, ignore_eos=True)
    (output,) = chats.llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        best = chats.reference.generate(
            ids, num_beams=3, num_return_sequences=3, max_new_tokens=8, do_sample=False, pad_token_id=0
        )
    assert [list(beam.token_ids) for beam in output.outputs] == best[:, len(prompt) :].tolist()


def test_preempted_and_pushed_out_sequences_are_computed_again(tmp_path: Path) -> None:
    """On two ranks that are processes of their own."""
    ranks = {"tensor_parallel_size": 2, "single_process": False}
    chats = Chats(VARIANTS[0], tmp_path, slots=6, num_gpu_blocks_override=24, **ranks)
    try:
        prompts = [words(40 + seed, 60) for seed in range(8)]
        chats.check(prompts)
        chats.check([*prompts[::-1], *prompts])
        stats = chats.stats()
        assert stats.preemptions
        assert stats.evicted_states
    finally:
        chats.llm.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_come_back_from_host_memory(tmp_path: Path, ranks: int) -> None:
    variant = VARIANTS[0] if ranks == 1 else BY_NAME["lfm2"]
    slots = 7 if ranks == 1 else 4  # of a whole model; each of two ranks has room for twice as many of its halves
    room = {"slots": slots, "num_gpu_blocks_override": 28, "preemption_mode": "swap"}
    room["host_states"] = 20 if ranks == 1 else 400  # as many bytes of blocks fit beside them
    chats = Chats(variant, tmp_path, tensor_parallel_size=ranks, **room)  # type: ignore[arg-type]
    try:
        prompts = [words(60 + seed, 60) for seed in range(8)]
        chats.check(prompts)
        longer = [[*prompt, *chats.expected(prompt), *words(9, 5)] for prompt in prompts]
        assert all(chats.check([prompt]) != [0] for prompt in longer)
        stats = chats.stats()
        assert stats.swaps
        assert stats.promoted_states
    finally:
        chats.llm.close()


@pytest.mark.parametrize(
    ("ranks", "variant"),
    [(1, VARIANTS[0]), (2, VARIANTS[0]), (1, BY_NAME["lfm2"]), (1, BY_NAME["falcon-h1"])],
    ids=["one rank", "two ranks", "of convolutions", "beside attention"],
)
def test_drafts_change_no_token_and_states_are_saved_as_without(tmp_path: Path, ranks: int, variant: Variant) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    settings: dict[str, Any] = {"speculative_config": speculation, "disable_adaptive_drafts": True}
    if ranks > 1:
        settings["num_gpu_blocks_override"] = 24  # preempted as well
    chats = Chats(variant, tmp_path, tensor_parallel_size=ranks, **settings)
    # With three likely tokens, every third draft is right by chance.
    chats.params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, allowed_token_ids=[5, 6, 7])
    try:
        prompts = [words(50 + seed, 40 + 9 * seed) for seed in range(5)]
        chats.check(prompts)
        longer = [[*prompt, *chats.expected(prompt), *words(9, 5)] for prompt in prompts]
        found = chats.check(longer)
        if ranks == 1:
            assert [(len(prompt) - 5 - 1) // 16 * 16 for prompt in longer] == found
        stats = chats.stats()
        assert 0 < stats.accepted_tokens < stats.draft_tokens
    finally:
        chats.llm.close()
