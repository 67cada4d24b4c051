"""Layers that attend to the K and V of others compute the tokens that are sampled and no more: the same tokens."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import VOCAB_SIZE, transformers_model
from tests.families.gemma_like import VARIANTS
from vllm_lite import LLM, SamplingParams
from vllm_lite.client.prompt import TokensPrompt
from vllm_lite.models.gemma4 import Gemma4Layer

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CHUNK = 40


def test_sampled_tokens_alone_pass_the_layers_that_share_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = next(one for one in VARIANTS if one.name == "gemma4-per-layer")
    path = variant.make(tmp_path / "model")
    attend, num_rows = Gemma4Layer.attend, dict[bool, int]()

    def counted(layer, rows, *others) -> None:
        key = layer.attention.has_kv
        num_rows[key] = max(num_rows.get(key, 0), len(rows.hidden))
        attend(layer, rows, *others)

    monkeypatch.setattr(Gemma4Layer, "attend", counted)
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=random).tolist() for length in (1, 7, 50, 90, 33)]
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    settings = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 5, "speculative_config": speculation}
    settings |= {"disable_adaptive_drafts": True, "enforce_eager": True}  # recording calls layers with the largest step
    llm = LLM(str(path), single_process=True, **settings)  # type: ignore[arg-type]
    try:
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        found = [list(output.outputs[0].token_ids) for output in llm.generate(asked, PARAMS, use_tqdm=False)]
        most = dict(num_rows)
        scored = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=1)
        again = [list(output.outputs[0].token_ids) for output in llm.generate(asked, scored, use_tqdm=False)]
    finally:
        llm.close()
    model = transformers_model(path, variant.model, "float32")
    model.generation_config.eos_token_id = None
    wanted, usual = [], {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        for prompt in prompts:
            ids = model.generate(torch.tensor([prompt]), **usual)
            wanted.append(ids[0, len(prompt) :].tolist())
    assert found == again == wanted
    assert most[True] == CHUNK
    assert most[False] <= len(prompts) * (1 + 3)
