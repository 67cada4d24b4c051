"""Text streams beside a burst of images: the time between tokens alone, and while 20 images are computed.

    python benchmarks/image_burst.py --max-itl-ms 100   # layers of Qwen3-0.6B's size, the tower of Qwen3.5, 448 x 448
    python benchmarks/image_burst.py --depth 6 --images 5 --streams 4

Weights are random. The streams decode throughout; the images come at once, each in a request of its own, and are all
different. Told are median and p99 of the time between tokens of the streams, and when the images had their answers.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

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
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}


def write_config(folder: str, depth: int) -> None:
    vision = VISION | {"depth": depth, "out_hidden_size": TEXT["hidden_size"], "deepstack_visual_indexes": []}
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 5, "dtype": "bfloat16"}
    config |= {"text_config": TEXT | {"rope_parameters": ROPE}, "vision_config": vision}
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
    from vllm_lite import AsyncClient, SamplingParams

    gaps: list[float] = []
    answered: list[float] = []
    greedy = SamplingParams(temperature=0.0, max_tokens=30000, ignore_eos=True)

    async with AsyncClient(address) as client:

        async def stream(seed: int) -> None:
            last_s = 0.0
            ids = [random.Random(seed).randrange(20, 4000) for _ in range(32)]
            async for _ in client.generate({"prompt_token_ids": ids}, greedy):
                now_s = time.perf_counter()
                if last_s:
                    gaps.append(now_s - last_s)
                last_s = now_s

        async def ask(seed: int) -> None:
            start_s = time.perf_counter()
            one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            prompt: Any = picture(options.side, seed)
            async for _ in client.generate(prompt, one):
                pass
            answered.append(time.perf_counter() - start_s)

        streams = [asyncio.create_task(stream(seed)) for seed in range(options.streams)]
        await asyncio.sleep(options.alone_s / 2)
        gaps.clear()
        await asyncio.sleep(options.alone_s)
        alone = list(gaps)
        gaps.clear()
        await asyncio.gather(*(ask(seed) for seed in range(options.images)))
        beside = list(gaps)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    for name, times in (("alone", alone), ("beside", beside)):
        print(f"{name:8} {len(times):6} tokens, median {p(times, 0.5):7.1f} ms, p99 {p(times, 0.99):7.1f} ms")
    ratios = (p(beside, share) / p(alone, share) for share in (0.5, 0.99))
    print("beside : alone {:.2f} at the median, {:.2f} at p99".format(*ratios))
    print(f"answers after {min(answered):.1f} to {max(answered):.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--side", type=int, default=448)
    parser.add_argument("--depth", type=int, default=VISION["depth"], help="layers of the tower")
    parser.add_argument("--max-itl-ms", type=float, help="have streams not held up")
    parser.add_argument("--alone-s", type=float, default=10.0)
    options = parser.parse_args()
    from vllm_lite import LLM

    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, options.depth)
        with LLM(
            folder, load_format="dummy", max_model_len=32768, max_num_seqs=32, max_itl_ms=options.max_itl_ms
        ) as llm:
            asyncio.run(measure(llm.address, options))


if __name__ == "__main__":
    main()
