"""A chat after a restart: seconds to the first token of its next turn, from memory, from disk and computed anew.

    python benchmarks/kv_disk.py --model FOLDER_OR_GGUF --tokens 7600 --out benchmarks/results/kv-disk-cpu.json
    python benchmarks/kv_disk.py --shape qwen3-0.6b --tokens 4000
    python benchmarks/kv_disk.py --shape hybrid --tokens 20000 --cold-once --rounds 2

One engine computes the chat and answers the next turn from memory. It is stopped, or killed with SIGKILL. Then other
engines answer that turn: one with the same directory that loads on demand, one with it that had time to fill its cache
first, and one without a directory. Turns differ in their last tokens, so each engine computes the same number of
tokens. With `--cold-once`, the chat's own prefill counts as the cold time, although it lacks the turn: a long chat
takes minutes. kv_disk_llama.py does the same with llama.cpp's slots. `--streams` measures something else: the time
between tokens of that many streams while chats arrive, are computed and written, by three engines in turn, one with a
directory and two without. For each ratio it prints the range of nine of ten resamplings of the rounds; the ratio of the
two engines without a directory shows the noise of the machine:

    python benchmarks/kv_disk.py --model FOLDER_OR_GGUF --streams 8 --rounds 30
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from contextlib import ExitStack, closing
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
WRITTEN_S, STILL_S = 300.0, 0.5
DRAWS = 400
PRELOAD = EngineConfig().kv_cache_preload


def open_llm(options: argparse.Namespace, folder: str | None, preload: float = 0.0) -> LLM:
    settings: dict[str, Any] = {"device": "cpu", "kv_cache_dir": folder, "kv_cache_preload": preload}
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
    """Wait until all ended requests are on disk. Returns the seconds."""
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < WRITTEN_S:
        stats = llm.stats()
        if stats.num_stored_keys and not stats.num_writing_blocks:
            return time.perf_counter() - began_s
        time.sleep(0.02)
    raise RuntimeError(f"the chat is not written after {WRITTEN_S:g} s")


def until_filled(llm: LLM) -> float:
    """Wait until the engine has finished filling its memory from disk. Returns the seconds up to its last load."""
    began_s = changed_s = time.perf_counter()
    num_bytes = 0
    while (now_s := time.perf_counter()) - began_s < WRITTEN_S:
        disk = llm.stats().disk
        if disk is not None and disk.loaded_bytes != num_bytes:
            num_bytes, changed_s = disk.loaded_bytes, now_s
        elif num_bytes and now_s - changed_s > STILL_S:
            return changed_s - began_s
        time.sleep(0.02)
    raise RuntimeError(f"the cache is not filled after {WRITTEN_S:g} s")


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
        ways = {"disk": 0.0, "after kill -9": 0.0, "filled": PRELOAD, "filled after kill -9": PRELOAD}
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for name, preload in [*ways.items()] * options.rounds:
            llm = open_llm(options, folder, preload)
            filled_s = until_filled(llm) if preload else 0.0
            runs[name].append(first_token(llm, chat.turn()) | ({"filled_s": filled_s} if preload else {}))
            until_written(llm)
            kill(llm) if "kill" in name else llm.close()
        found |= {name: median(each) for name, each in runs.items()}
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
    found["filled / warm"] = found["filled"]["first_s"] / found["warm"]["first_s"]
    found["disk / warm"] = found["disk"]["first_s"] / found["warm"]["first_s"]
    found["disk / cold"] = found["disk"]["first_s"] / found["cold"]["first_s"]
    return found


class Arm:
    """An engine with the directory `folder`, or without one, and the times between its streams' tokens, by round."""

    def __init__(self, options: argparse.Namespace, folder: str | None) -> None:
        settings = {"model": options.model, "device": "cpu", "kv_cache_dir": folder}
        settings |= {"load_format": "dummy", "dtype": "bfloat16"} if options.shape else {}
        self.launched = launch(EngineConfig.check(settings))
        self.rounds: list[list[float]] = []

    def memory_mb(self) -> float:
        """Memory of the engine and its worker."""
        engine = psutil.Process(self.launched.pid)
        return sum(process.memory_info().rss for process in (engine, *engine.children(recursive=True))) / 1e6

    def p(self, percent: int) -> float:
        return percentile([gap for times in self.rounds for gap in times], percent)


async def gaps(options: argparse.Namespace, arm: Arm, number: int) -> list[float]:
    """Seconds between tokens of streams, while short chats end one by one and are written. A round `number` has the
    same prompts for all engines."""
    found: list[float] = []
    async with AsyncClient(arm.launched.address) as client:
        draw = random.Random(number)
        prompts = [[draw.randrange(3, 30000) for _ in range(64)] for _ in range(options.streams)]
        chats = [[draw.randrange(3, 30000) for _ in range(options.write_tokens)] for _ in range(options.writes)]

        async def stream(prompt: list[int]) -> None:
            last_s = 0.0
            params = SamplingParams(max_tokens=options.stream_tokens, temperature=0.0, ignore_eos=True)
            async for _ in client.generate(prompt, params):
                now_s = time.perf_counter()
                if last_s:
                    found.append(now_s - last_s)
                last_s = now_s

        async def write() -> None:
            for chat in chats:
                async for _ in client.generate(chat, ONE):
                    pass

        await asyncio.gather(*[stream(prompt) for prompt in prompts], write())
    return found


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def interval(one: Arm, other: Arm, percent: int) -> list[float]:
    """The ratio one : other of a percentile of all gaps, and the range of nine of ten resamplings of the rounds."""
    draw, count = random.Random(0), len(one.rounds)
    ratios = []
    for _ in range(DRAWS):
        chosen = draw.choices(range(count), k=count)
        pooled = [percentile([gap for number in chosen for gap in arm.rounds[number]], percent) for arm in (one, other)]
        ratios.append(pooled[0] / pooled[1])
    ratios.sort()
    found = one.p(percent) / other.p(percent), ratios[DRAWS // 20], ratios[-1 - DRAWS // 20]
    return [round(each, 4) for each in found]


def streams(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the engines in turn, round by round: one with a directory, and two without, which show how much equal
    engines differ."""
    with ExitStack() as stack:
        parent = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv", dir=options.folder))
        arms = {
            "with": Arm(options, f"{parent}/kv"),
            "without": Arm(options, None),
            "without again": Arm(options, None),
        }
        for arm in arms.values():
            stack.callback(arm.launched.close)
            asyncio.run(gaps(options, arm, -1))
        for number in range(options.rounds):
            for name in random.Random(number).sample(list(arms), len(arms)):
                arms[name].rounds.append(asyncio.run(gaps(options, arms[name], number)))
        found: dict[str, Any] = {}
        for percent in (50, 90, 99):
            found |= {f"p{percent}_s {name}": round(arm.p(percent), 5) for name, arm in arms.items()}
            found[f"p{percent} with / without"] = interval(arms["with"], arms["without"], percent)
            found[f"p{percent} without again / without"] = interval(arms["without again"], arms["without"], percent)
        found |= {f"memory_mb {name}": round(arm.memory_mb()) for name, arm in arms.items()}
        found["written_mb"] = sum(path.stat().st_size for path in Path(parent).rglob("*") if path.is_file()) / 1e6
    return found


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
    parser.add_argument("--writes", type=int, default=30, help="prompts that are written meanwhile")
    parser.add_argument("--write-tokens", type=int, default=256, help="tokens of each")
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
