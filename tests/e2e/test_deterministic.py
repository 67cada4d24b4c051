"""`--deterministic`: in bfloat16 a request's tokens and logprobs have the same bits, alone and in any schedule.

With one sequence at a time and room for everything nothing is cut, evicted or shared; all other engines are held
against that one.
"""

from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.e2e.reference import NUM_TOKENS, make_prompts, start
from vllm_lite import LLM, SamplingParams
from vllm_lite.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the native library")

PROMPTS = make_prompts((1, 3, 16, 17, 40, 64, 65, 96, 111, 129, 150, 200), seed=5)
LONGEST = 200 + NUM_TOKENS
SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "drafted": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "drafted from answers": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 8}},
    "drafted by itself": {
        "speculative_config": {"method": "self", "num_speculative_tokens": 3},
        "disable_adaptive_drafts": True,
    },
    "preempted": {"num_gpu_blocks_override": LONGEST // 16 + 4, "preemption_mode": "recompute"},
    "swapped": {"num_gpu_blocks_override": LONGEST // 16 + 4, "preemption_mode": "swap", "swap_space": 0.05},
}
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "two ranks": {"tensor_parallel_size": 2},
}


def params_of(place: int) -> SamplingParams:
    """Greedy ones and seeded ones; some score their prompts, for which nothing is taken from the cache."""
    draw: dict[str, Any] = {"temperature": 0.0} if place % 2 else {"temperature": 1.0, "top_p": 0.95, "seed": place}
    scored: dict[str, Any] = {"prompt_logprobs": 2} if place % 4 == 3 else {}
    return SamplingParams(**draw, **scored, logprobs=3, max_tokens=NUM_TOKENS, ignore_eos=True)


def answers(llm: LLM, alone: bool = False) -> list[Any]:
    """All that a request gets, floats as they came. Batched, they come twice: the second time they find prefixes."""
    params = list(map(params_of, range(len(PROMPTS))))
    if alone:
        outputs = [
            llm.generate(prompt, given, use_tqdm=False)[0] for prompt, given in zip(PROMPTS, params, strict=True)
        ]
    else:
        outputs = llm.generate(PROMPTS * 2, params * 2, use_tqdm=False)
    return [
        (list(output.outputs[0].token_ids), output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_request_is_answered_the_same_in_any_schedule(form, tmp_path):
    model = make_checkpoint(tmp_path / "model", "llama", dtype="bfloat16")
    settings = FORMS[form] | {"deterministic": True}
    with start(model, max_num_seqs=1, max_num_batched_tokens=256, enable_prefix_caching=False, **settings) as llm:
        expected = answers(llm, alone=True)
    # One schedule is enough for weight forms that differ only in their products.
    for name in SCHEDULES if form == "bfloat16" else ["preempted"]:
        with start(model, **(settings | SCHEDULES[name])) as llm:
            got = answers(llm)
            stats = llm.stats()
        for place, answer in enumerate(got):
            assert answer == expected[place % len(PROMPTS)], (name, place)
        assert (stats.preemptions > 0) == (name in ("preempted", "swapped")), name
        assert stats.cached_tokens > 0
