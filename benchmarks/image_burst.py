"""Text streams beside a burst of images: the time between tokens alone, and while 20 images are computed, in turn.

    python benchmarks/image_burst.py                          # as a server computes them, on two cores in three minutes
    python benchmarks/image_burst.py --max-itl-ms 100         # with a goal in milliseconds
    python benchmarks/image_burst.py --depth 27 --images 2    # all layers of the tower

The model is a text model of Qwen3-0.6B's size with a tower of a few of Qwen3-VL's layers, so that many images are
answered in a short time: the share of a step that images take does not depend on the number of layers. Weights are
random. The streams decode all the time; the images arrive at once, each in a request of its own, and all differ.
Printed are the median and p99 of the time between tokens of the streams, and the times at which the images were
answered. A token takes longer the more tokens are before it, so tokens beside images are compared with tokens of new
streams, without images, at the same positions: the median of the ratios over stretches of 64 tokens.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from hashlib import blake2b
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Self

from tower import VISION

TEXT = {
    "model_type": "qwen3_vl_text",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "eos_token_id": 2,
}
BAR = 1.3
"""Maximum of p99 beside images as a multiple of p99 alone."""
WARM = 24
"""Tokens of each stream that are not measured."""
STRETCH = 64
"""Tokens of each stream that are compared at once."""
PATIENCE_S = 300.0
Gaps = list[tuple[float, ...]]
"""For each position in the streams, the times between the tokens before and at it."""
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}


def write_config(folder: str, depth: int, layers: int) -> None:
    vision = VISION | {"depth": depth, "out_hidden_size": TEXT["hidden_size"], "deepstack_visual_indexes": []}
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 5, "dtype": "bfloat16"}
    config |= {"text_config": TEXT | {"rope_parameters": ROPE, "num_hidden_layers": layers}, "vision_config": vision}
    Path(folder, "config.json").write_text(json.dumps(config))


def picture(side: int, seed: int) -> dict[str, Any]:
    from vllm_lite.client.spans import ShownMedia, Text
    from vllm_lite.protocol.spans import Media

    colors = random.Random(seed).randbytes(side * side * 3)
    patches = side // 16
    digest = blake2b(colors, digest_size=32).digest()
    medium = Media("image", digest, (patches // 2) ** 2, grid=(1, patches, patches))
    return {"spans": [Text([7, 8, 9]), ShownMedia(medium, colors), Text([10, 11, 12])]}


def p(times: list[float], share: float) -> float:
    return 1000 * sorted(times)[min(len(times) - 1, int(share * len(times)))]


async def measure(address: str, options: argparse.Namespace) -> None:
    from vllm_lite import AsyncClient

    found: list[tuple[float, float]] = []
    seeds = range(options.rounds * options.images)
    pictures = [picture(options.side, seed) for seed in seeds]  # a server's children make them
    async with AsyncClient(address) as client:
        for _ in range(options.rounds):
            own, pictures = pictures[: options.images], pictures[options.images :]
            async with Streams(client, options.streams) as streams:
                await streams.reach(WARM)
                answered = await asyncio.gather(*(ask(client, each) for each in own))
                beside = streams.gaps()
            async with Streams(client, options.streams) as streams:
                await streams.reach(WARM + len(beside))
                alone = streams.gaps()
            for name, gaps in (("alone", alone), ("beside", beside)):
                times = [*chain.from_iterable(gaps)]
                print(f"{name:8} {len(times):6} tokens, median {p(times, 0.5):7.1f} ms, p99 {p(times, 0.99):7.1f} ms")
            print(f"answers after {min(answered):.1f} to {max(answered):.1f} s", flush=True)
            found += ratios(alone, beside)
    half, slow = (sorted(each) for each in zip(*found, strict=True))
    print(f"beside : alone at the median {median(half):.2f} ({half[0]:.2f} to {half[-1]:.2f} by stretch)")
    print(f"beside : alone at p99 {median(slow):.2f} ({slow[0]:.2f} to {slow[-1]:.2f}); asked: at most {BAR}")


def ratios(alone: Gaps, beside: Gaps) -> list[tuple[float, float]]:
    """Ratios of medians and of p99s, a pair for each stretch of tokens."""
    found = []
    for first in range(0, len(beside), STRETCH):
        own, other = ([*chain.from_iterable(gaps[first : first + STRETCH])] for gaps in (beside, alone))
        found.append((p(own, 0.5) / p(other, 0.5), p(own, 0.99) / p(other, 0.99)))
    return found


async def ask(client: Any, prompt: Any) -> float:
    """Seconds until the answer."""
    from vllm_lite import SamplingParams

    start_s = time.perf_counter()
    async for _ in client.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)):
        pass
    return time.perf_counter() - start_s


class Streams:
    """Streams of text that decode as long as this is entered."""

    def __init__(self, client: Any, count: int) -> None:
        self._client = client
        self._count = count
        self._came_s: list[list[float]] = [[] for _ in range(count)]
        self._has_come = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._stream(seed)) for seed in range(self._count)]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def reach(self, num_tokens: int) -> None:
        """Wait until each stream has `num_tokens` tokens."""
        while min(map(len, self._came_s)) < num_tokens:
            self._has_come.clear()
            await asyncio.wait_for(self._has_come.wait(), PATIENCE_S)

    def gaps(self) -> Gaps:
        """The times between tokens, after the first WARM ones."""
        own = [[after - before for before, after in pairwise(came_s[WARM - 1 :])] for came_s in self._came_s]
        return [*zip(*own, strict=False)]

    async def _stream(self, seed: int) -> None:
        from vllm_lite import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=30000, ignore_eos=True)
        ids = [random.Random(seed).randrange(20, 4000) for _ in range(32)]
        async for _ in self._client.generate({"prompt_token_ids": ids}, params):
            self._came_s[seed].append(time.perf_counter())
            self._has_come.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--side", type=int, default=448)
    parser.add_argument("--depth", type=int, default=2, help="layers of the tower")
    parser.add_argument("--layers", type=int, default=TEXT["num_hidden_layers"], help="layers of the text model")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-itl-ms", type=float, help="a goal for the time between tokens")
    parser.add_argument("--threads", type=int, help="of the engine's worker; as many as there are cores by default")
    options = parser.parse_args()
    from vllm_lite.client.engines.launch import launch
    from vllm_lite.config import EngineConfig

    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, options.depth, options.layers)
        sizes: dict[str, Any] = {"load_format": "dummy", "max_model_len": 32768, "max_num_seqs": 32}
        launched = launch(
            EngineConfig(model=folder, **sizes, max_itl_ms=options.max_itl_ms, cpu_threads=options.threads)
        )
        try:
            asyncio.run(measure(launched.address, options))
        finally:
            launched.close()


if __name__ == "__main__":
    main()
