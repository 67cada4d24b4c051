"""Cost of a decoded token after contexts of different lengths: constant for layers with a state, growing for others.

    python benchmarks/hybrid_context.py --lengths 1024 4096 16384 32768

The model is that of hybrid_chat.py, with dummy weights. Each context extends the previous one, whose state is cached.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from hybrid_chat import LARGE, SMALL

from vllm_lite import LLM, SamplingParams
from vllm_lite.client.prompt import TokensPrompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--tokens", type=int, default=48, help="decoded at each length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="the shape of Qwen3.5-0.8B")
    options = parser.parse_args()
    source = random.Random(0)
    ids = [source.randrange(3, 32000) for _ in range(max(options.lengths))]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LARGE if options.large else SMALL))
        llm = LLM(folder, load_format="dummy", max_model_len=max(options.lengths) + 2 * options.tokens, max_num_seqs=4)
        _seconds(llm, ids[:64], options.tokens)
        lengths, before = sorted(options.lengths), 0
        for length in lengths:
            first_s = _seconds(llm, ids[:length], 1)
            print(
                f"{length:6} tokens: {(length - before) / first_s:6.0f} tokens/s of the {length - before} that were new"
            )
            before = length
        rates: dict[int, list[float]] = {length: [] for length in lengths}
        for _ in range(options.rounds):  # in turns, as memory's speed changes by the minute on a shared host
            for length in lengths:
                one_s = _seconds(llm, ids[:length], 1)
                rates[length].append(
                    (_seconds(llm, ids[:length], options.tokens) - one_s) / (options.tokens - 1) * 1000
                )
        for length, each in rates.items():
            spread = f"({min(each):.2f} to {max(each):.2f})"
            print(f"{length:6} tokens: {statistics.median(each):6.2f} ms {spread} a decoded token")
        llm.close()


def _seconds(llm: LLM, prompt: list[int], count: int) -> float:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    start_s = time.perf_counter()
    llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
