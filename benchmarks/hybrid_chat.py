"""A chat of an agent on a hybrid model: how much of each prompt the prefix cache finds, and when the first token comes.

    python benchmarks/hybrid_chat.py --turns 20 --first 4000 --message 900 --answer 400

The model is a small Qwen3.5 with dummy weights. Every prompt is the one before, what was answered, and a new message;
"new" is the least that any cache must leave to compute.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from vllm_lite import LLM, SamplingParams
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.client.prompt import TokensPrompt

END = 2
SMALL = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "max_position_embeddings": 65536,
    "eos_token_id": END,
    "dtype": "bfloat16",
}
LARGE = SMALL | {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
"""The shape of Qwen3.5-0.8B but for its vocabulary: 0.65 billion parameters."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--first", type=int, default=4000, help="tokens of the first prompt")
    parser.add_argument("--message", type=int, default=900, help="tokens of every further message")
    parser.add_argument("--answer", type=int, default=400, help="tokens of every answer")
    parser.add_argument("--large", action="store_true", help="the shape of Qwen3.5-0.8B")
    options = parser.parse_args()
    source = random.Random(0)

    def message(count: int) -> list[int]:
        return [*(source.randrange(3, 32000) for _ in range(count - 1)), END]

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LARGE if options.large else SMALL))
        length = options.first + options.turns * (options.message + options.answer) + 64
        llm = LLM(folder, load_format="dummy", max_model_len=length, max_num_seqs=4)
        prompt = message(options.first)
        num_prompt = num_cached = num_known = 0
        for turn in range(1, options.turns + 1):
            first_s, cached = _first_token(llm, prompt)
            answer = _answer(llm, prompt, options.answer)
            if turn > 1:
                num_prompt += len(prompt)
                num_cached += cached
                num_known += len(prompt) - options.message
            print(f"{turn:3} {len(prompt):6} tokens, {cached:6} cached, {1000 * first_s:7.1f} ms to the first token")
            prompt = [*prompt, *answer, END, *message(options.message)]
        states = llm.stats().num_cached_states
        print(
            f"from the second on: {100 * num_cached / num_prompt:.1f} % of the prompts' tokens were cached; "
            f"at most {100 * num_known / num_prompt:.1f} % could be; {states} states of "
            f"{load_spec(folder).state_bytes() / 2**20:.2f} MiB are kept"
        )
        llm.close()


def _first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    start_s = time.perf_counter()
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
    return time.perf_counter() - start_s, output.num_cached_tokens or 0


def _answer(llm: LLM, prompt: list[int], count: int) -> list[int]:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
