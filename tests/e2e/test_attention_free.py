"""A model without attention layers is served without a KV cache; its prefix cache has only recurrent states."""

from pathlib import Path

from tests.e2e.reference import Reference, start
from tests.families.hybrid import VARIANTS
from vllm_lite import SamplingParams
from vllm_lite.checkpoint.config_json import load_spec

PROMPT = [5, 6, 7, 8] * 10
BLOCK = 8


def test_a_state_is_found_again_behind_the_beginning_of_a_prompt(tmp_path: Path) -> None:
    path = next(variant for variant in VARIANTS if variant.name == "mamba2").make(tmp_path / "mamba2")
    spec, expected = load_spec(path), Reference(path).generate(PROMPT).tokens[:8]
    assert spec.kv_groups == ()
    assert spec.kv_block_bytes(BLOCK, 4) == 0
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with start(path, max_model_len=128, block_size=BLOCK) as llm:
        first, again = (llm.generate([PROMPT], greedy, use_tqdm=False)[0] for _ in range(2))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids == expected
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, len(PROMPT) - BLOCK)
