"""A chat after a restart: seconds to the first token of its next turn, from memory, from disk and computed anew.

    python benchmarks/kv_disk.py --model FOLDER_OR_GGUF --tokens 7600 --out benchmarks/results/kv-disk-cpu.json
    python benchmarks/kv_disk.py --shape qwen3-0.6b --tokens 4000
    python benchmarks/kv_disk.py --shape hybrid --tokens 20000 --cold-once --rounds 2

One engine computes the chat and answers the next turn from memory. It is stopped, or killed with SIGKILL, and another
engine over the same directory answers that turn; then one without a directory. Turns differ in their last tokens, so
that each computes as many. With `--cold-once` the chat's own prefill counts as cold, which is all of it but for a turn:
a long one takes minutes. `--streams` also measures the time between tokens of that many streams while chats are
written at full speed, beside the same load without a directory. kv_disk_llama.py does the same with llama.cpp's slots.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
from hybrid_chat import SMALL
from kv_chat import Chat, median, report

from vllm_lite import LLM, AsyncClient, EngineConfig, SamplingParams
from vllm_lite.client.engines.launch import launch
from vllm_lite.client.prompt import TokensPrompt

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SHAPES = {"qwen3-0.6b": QWEN3, "hybrid": SMALL}
ONE = SamplingParams(max_tokens=1, temperature=0.0)
WRITTEN_S = 300.0


def open_llm(options: argparse.Namespace, folder: str | None) -> LLM:
    settings: dict[str, Any] = {"device": "cpu", "kv_cache_dir": folder}
    if options.shape:
        settings |= {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": options.tokens + 1024}
    llm = LLM(options.model, **settings)
    llm.generate([TokensPrompt(prompt_token_ids=[7] * 64)], SamplingParams(max_tokens=8), use_tqdm=False)
    return llm


def first_token(llm: LLM, prompt: list[int]) -> dict[str, float]:
    began_s = time.perf_counter()
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], ONE, use_tqdm=False)
    return {"first_s": time.perf_counter() - began_s, "cached": output.num_cached_tokens or 0}


def until_written(llm: LLM) -> float:
    """Wait until all that has ended is on disk. Returns the seconds that took."""
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < WRITTEN_S:
        stats = llm.stats()
        if stats.num_stored_keys and not stats.num_writing_blocks:
            return time.perf_counter() - began_s
        time.sleep(0.02)
    raise RuntimeError(f"the chat is not written after {WRITTEN_S:g} s")


def kill(llm: LLM) -> None:
    """End the engine and its workers as the kernel does when memory runs out."""
    for process in psutil.Process().children(recursive=True):
        process.kill()
    llm.close()


def restarts(options: argparse.Namespace) -> dict[str, Any]:
    chat, found = Chat(options.tokens, options.new), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="kv", dir=options.folder) as parent:
        folder = f"{parent}/kv"
        llm = open_llm(options, folder)
        found["prefill"] = first_token(llm, chat.tokens)
        found["written_s"] = until_written(llm)
        warm = [first_token(llm, chat.turn()) for _ in range(options.rounds)]
        found["warm"] = median(warm)
        until_written(llm)
        disk = llm.stats().disk
        found["bytes"] = 0 if disk is None else disk.num_bytes
        llm.close()
        for name in ("disk", "after kill -9"):
            runs = []
            for _ in range(options.rounds):
                llm = open_llm(options, folder)
                runs.append(first_token(llm, chat.turn()))
                until_written(llm)
                kill(llm) if name != "disk" else llm.close()
            found[name] = median(runs)
        with closing(open_llm(options, folder)) as first, closing(open_llm(options, folder)) as second:
            turn = chat.turn()
            found["first of two engines"] = first_token(first, turn)
            until_written(first)
            time.sleep(2.5)  # the second looks once a second
            found["second of two engines"] = first_token(second, turn)
    if options.cold_once:
        found["cold"] = found["prefill"]
    else:
        with closing(open_llm(options, None)) as llm:
            found["cold"] = first_token(llm, chat.turn())
    found["disk / warm"] = found["disk"]["first_s"] / found["warm"]["first_s"]
    found["disk / cold"] = found["disk"]["first_s"] / found["cold"]["first_s"]
    return found


async def gaps(options: argparse.Namespace, folder: str | None) -> tuple[list[float], int]:
    """Seconds between tokens of streams, while short chats end one after the other and are written; and the bytes of
    memory that the engine and its worker have in the end."""
    settings = {"model": options.model, "device": "cpu", "kv_cache_dir": folder}
    settings |= {"load_format": "dummy", "dtype": "bfloat16"} if options.shape else {}
    found: list[float] = []
    with closing(launch(EngineConfig.check(settings))) as launched:
        async with AsyncClient(launched.address) as client:
            draw = random.Random(0)

            async def stream() -> None:
                last_s = 0.0
                params = SamplingParams(max_tokens=options.stream_tokens, temperature=0.0, ignore_eos=True)
                async for _ in client.generate([draw.randrange(3, 30000) for _ in range(64)], params):
                    now_s = time.perf_counter()
                    if last_s:
                        found.append(now_s - last_s)
                    last_s = now_s

            async def write() -> None:
                for _ in range(options.writes):
                    prompt = [draw.randrange(3, 30000) for _ in range(256)]
                    async for _ in client.generate(prompt, ONE):
                        pass

            await asyncio.gather(*[stream() for _ in range(options.streams)], write())
        memory = sum(process.memory_info().rss for process in psutil.Process().children(recursive=True))
    return found, memory


def streams(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name in ("without", "with"):
            with tempfile.TemporaryDirectory(prefix="kv", dir=options.folder) as parent:
                times, memory = asyncio.run(gaps(options, f"{parent}/kv" if name == "with" else None))
            found.setdefault(f"p99_s {name}", []).append(statistics.quantiles(times, n=100)[98])
            found.setdefault(f"memory_mb {name}", []).append(memory / 1e6)
    return {name: statistics.median(each) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint; or give --shape")
    parser.add_argument("--shape", choices=SHAPES, help="a shape with random weights")
    parser.add_argument("--tokens", type=int, default=4000, help="of the chat")
    parser.add_argument("--new", type=int, default=64, help="tokens of the next turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold-once", action="store_true", help="do not compute all of the chat a second time")
    parser.add_argument("--streams", type=int, default=0, help="measure the time between tokens of so many")
    parser.add_argument("--stream-tokens", type=int, default=300)
    parser.add_argument("--writes", type=int, default=30, help="prompts of 256 tokens that are written meanwhile")
    parser.add_argument("--folder", help="where the directory is made")
    parser.add_argument("--out", help="append to this JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        if options.shape:
            Path(made, "config.json").write_text(json.dumps(SHAPES[options.shape]))
            options.model = made
        found = streams(options) if options.streams else restarts(options)
    about = {"tokens": options.tokens, "new": options.new}
    report(options.shape or Path(options.model).name, found, options.out, **about)


if __name__ == "__main__":
    main()
