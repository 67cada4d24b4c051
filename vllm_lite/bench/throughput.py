"""`vllm-lite bench throughput`: the same requests one at a time and all at once, through all processes."""

import json
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_lite.client.llm import LLM
from vllm_lite.protocol.params import SamplingParams

RANDOM_MODELS: dict[str, dict[str, Any]] = {
    "random-100m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    },
}
"""Configurations that are served with random weights."""


def run(model: str, num_prompts: int, input_len: int, output_len: int, dtype: str) -> dict[str, Any]:
    """Tokens per second one at a time and all at once. Prompts are random ids without a common prefix."""
    with ExitStack() as stack:
        settings: dict[str, Any] = {"dtype": dtype}
        if model in RANDOM_MODELS:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vl-"))
            Path(folder, "config.json").write_text(json.dumps(RANDOM_MODELS[model]))
            settings |= {"load_format": "dummy"}
        else:
            folder = model
        llm = stack.enter_context(LLM(folder, **settings))
        rng = random.Random(0)
        vocab_size = llm.engine.vocab_size

        def prompts() -> list[list[int]]:
            return [[rng.randrange(5, vocab_size) for _ in range(input_len)] for _ in range(num_prompts)]

        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        llm.generate(prompts()[:4], params, use_tqdm=False)
        start = time.perf_counter()
        for prompt in prompts():
            llm.generate([prompt], params, use_tqdm=False)
        alone_s = time.perf_counter() - start
        start = time.perf_counter()
        llm.generate(prompts(), params, use_tqdm=False)
        together_s = time.perf_counter() - start
    generated = num_prompts * output_len
    return {
        "model": model,
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "alone_tok_s": round(generated / alone_s, 1),
        "together_tok_s": round(generated / together_s, 1),
        "ratio": round(alone_s / together_s, 2),
    }


def table(figures: dict[str, Any]) -> str:
    return (
        f"{figures['model']}: {figures['num_prompts']} prompts of {figures['input_len']} tokens, "
        f"{figures['output_len']} out\n"
        f"one at a time {figures['alone_tok_s']:>10.1f} output tokens/s\n"
        f"all at once   {figures['together_tok_s']:>10.1f} output tokens/s\n"
        f"ratio         {figures['ratio']:>10.2f}"
    )
