"""A chat of an agent on a hybrid model: how much of each prompt an engine finds cached, and when the first token comes.

    python benchmarks/hybrid_chat.py --turns 20 --first 4000 --message 900 --answer 400
    python benchmarks/hybrid_chat.py --write small.gguf        # for llama.cpp, once
    python benchmarks/hybrid_chat.py --engine llama --gguf small.gguf

Every prompt is the one before, what was answered, and a new message, which any cache must leave to compute. At the end
the client replaces its last message by another one. Prompts and messages are the same ids for all engines; answers are
greedy and of the same length, but each engine's own, as each has random weights of its own.

An engine is imported when it is asked for, so each may have an environment of its own. All compute in bfloat16, with
two threads. llama.cpp is called by llama-cpp-python's `Llama`, which keeps what it computed last. vLLM wants the
environment that peers.py sets, and its Qwen3.5 also torchvision, of which no operator is called.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_speed import SHAPES, THREADS, write_gguf

END = 2
LARGE = SHAPES["qwen3.5"]
SMALL = LARGE | {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "layer_types": LARGE["layer_types"][:12],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}


@dataclass(frozen=True)
class Turn:
    """Result of a prompt: seconds to the first token, prompt tokens it did not compute, all tokens."""

    first_s: float
    num_cached: int
    answer: list[int]


Answer = Callable[[list[int], int], Turn]
"""A prompt and how many tokens to generate -> what became of it."""
Held = Callable[[], str]
"""A description of the recurrent states that an engine keeps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["ours", "llama", "vllm"], default="ours")
    parser.add_argument("--shape", choices=["small", *SHAPES], default="small", help="small: a small Qwen3.5")
    parser.add_argument("--write", help="write the GGUF file of the shape")
    parser.add_argument("--gguf", help="the file that llama.cpp runs")
    parser.add_argument("--turns", type=int, default=20, help="two at least")
    parser.add_argument("--first", type=int, default=4000, help="tokens of the first prompt")
    parser.add_argument("--message", type=int, default=900, help="tokens of every further message")
    parser.add_argument("--answer", type=int, default=400, help="tokens of every answer")
    options = parser.parse_args()
    if options.turns < 2:
        parser.error("--turns must be at least 2")
    config = SMALL if options.shape == "small" else SHAPES[options.shape]
    if options.write:
        write_gguf(options.write, config)
        return
    length = options.first + options.turns * (options.message + options.answer + 1) + 64
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        run = {"ours": ours, "llama": llama, "vllm": vllm}[options.engine]
        answer, held = run(folder, length, options.gguf)
        chat(answer, options)
        print(held(), flush=True)


def chat(answer: Answer, options: argparse.Namespace) -> None:
    source = random.Random(0)

    def message(count: int) -> list[int]:
        return [*(source.randrange(3, 32000) for _ in range(count - 1)), END]

    answer(message(64), 8)
    prompt = message(options.first)
    num_prompt = num_cached = num_known = 0
    firsts_s = []
    for number in range(1, options.turns + 1):
        turn = answer(prompt, options.answer)
        if number > 1:
            firsts_s.append(turn.first_s)
            num_prompt += len(prompt)
            num_cached += turn.num_cached
            num_known += len(prompt) - options.message
        report(str(number), prompt, turn)
        known = [*prompt, *turn.answer, END]
        if number < options.turns:
            prompt = [*known, *message(options.message)]
    edited = [*prompt[: -options.message], *message(options.message)]
    report("edited", edited, answer(edited, options.answer))
    print(
        f"from the second on: {100 * num_cached / num_prompt:.1f} % of the prompts' tokens were cached; "
        f"at most {100 * num_known / num_prompt:.1f} % could be; "
        f"the first token came after {1000 * statistics.median(firsts_s):.1f} ms (median)"
    )


def report(name: str, prompt: list[int], turn: Turn) -> None:
    print(
        f"{name:>6} {len(prompt):6} tokens, {turn.num_cached:6} cached, {len(prompt) - turn.num_cached:6} computed, "
        f"{1000 * turn.first_s:8.1f} ms to the first token",
        flush=True,
    )


def ours(folder: str, length: int, _: str | None) -> tuple[Answer, Held]:
    from vllm_lite import LLM, SamplingParams
    from vllm_lite.checkpoint.config_json import load_spec
    from vllm_lite.client.prompt import TokensPrompt

    llm = LLM(folder, load_format="dummy", max_model_len=length, max_num_seqs=4, cpu_threads=THREADS)
    state_bytes = load_spec(folder).state_bytes()

    def answer(prompt: list[int], count: int) -> Turn:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
        first_s = output.metrics.first_token_latency
        return Turn(first_s or 0.0, output.num_cached_tokens or 0, list(output.outputs[0].token_ids))

    def held() -> str:
        return f"{llm.stats().num_cached_states} states of {state_bytes / 2**20:.2f} MiB are kept"

    return answer, held


def llama(_: str, length: int, gguf: str | None) -> tuple[Answer, Held]:
    import llama_cpp as lib

    class Counting(lib.Llama):  # type: ignore[misc]
        """Notes how many tokens it computes, whatever it says that it reuses."""

        num_computed = 0

        def eval(self, tokens: Any) -> None:
            self.num_computed += len(tokens)
            super().eval(tokens)

    size = (length + 255) // 256 * 256
    threads = {"n_threads": THREADS, "n_threads_batch": THREADS}
    llm = Counting(gguf or "", n_ctx=size, n_batch=2048, n_ubatch=512, verbose=False, **threads)

    def answer(prompt: list[int], count: int) -> Turn:
        llm.num_computed = 0
        start_s = time.perf_counter()
        stream = llm.generate(prompt, temp=0.0)
        tokens = [next(stream)]
        first_s, num_cached = time.perf_counter() - start_s, len(prompt) - llm.num_computed
        while len(tokens) < count:
            tokens.append(next(stream))
        return Turn(first_s, num_cached, tokens)

    def held() -> str:
        recurrent_only = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        state_bytes = lib.llama_state_seq_get_size_ext(llm.ctx, 0, recurrent_only)
        return f"one state of {state_bytes / 2**20:.2f} MiB is kept"

    return answer, held


def vllm(folder: str, length: int, _: str | None) -> tuple[Answer, Held]:
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }.items():
        os.environ.setdefault(name, value)  # read when vllm is imported
    import vllm as lib

    limits: dict[str, Any] = {"max_model_len": length, "max_num_seqs": 4, "enable_prefix_caching": True}
    made = lib.LLM(folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, seed=0, **limits)
    engine, names = made.llm_engine, itertools.count()

    def answer(prompt: list[int], count: int) -> Turn:
        params = lib.SamplingParams(temperature=0, ignore_eos=True, max_tokens=count, detokenize=False)
        start_s = time.perf_counter()
        engine.add_request(str(next(names)), {"prompt_token_ids": prompt}, params)
        first_s, output = 0.0, None
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not first_s and output.outputs[0].token_ids:
                    first_s = time.perf_counter() - start_s
        if output is None:
            raise SystemExit("vLLM answered nothing")
        return Turn(first_s, output.num_cached_tokens or 0, list(output.outputs[0].token_ids))

    def held() -> str:
        cache = engine.vllm_config.cache_config
        return f"states are kept at ends of blocks of {cache.mamba_block_size} tokens ({cache.mamba_cache_mode})"

    return answer, held


if __name__ == "__main__":
    main()
