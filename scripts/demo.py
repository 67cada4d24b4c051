"""The program of `make demo`: starts an engine and a worker, prints two stories token by token, and their cost.

The second prompt has the beginning of the first, so the engine finds most of it in its prefix cache.
"""

import argparse
import asyncio
import shutil
import sys
import time

from vllm_lite import AsyncClient, EngineConfig, RequestOutput, SamplingParams
from vllm_lite.client.engines.launch import LaunchedEngine, launch
from vllm_lite.errors import VllmLiteError
from vllm_lite.protocol.stats import Stats

BEGINNING = (
    "Once upon a time there was a patient cat named Łucja. One windy day, the sky turned dark and a flood began. "
    "The flood howled all night long."
)
PROMPTS = (BEGINNING + " Then", BEGINNING + " Suddenly")
MARGIN = 12
"""Columns at the right edge in which a line may break, because words are printed before their length is known."""


class Page:
    """Prints text as it arrives, each line after a mark, broken between words near the right edge."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._columns = min(shutil.get_terminal_size((100, 24)).columns, 100)
        self._column = 0

    def write(self, text: str) -> None:
        for character in text:
            if self._column == 0:
                print(self._mark, end="")
                self._column = len(self._mark)
            if character == "\n" or (character == " " and self._column > self._columns - MARGIN):
                print()
                self._column = 0
            else:
                print(character, end="")
                self._column += 1
        sys.stdout.flush()

    def end(self) -> None:
        print()
        self._column = 0


async def stream(client: AsyncClient, prompt: str, params: SamplingParams) -> RequestOutput:
    """Print the prompt, and its continuation while it is generated."""
    page = Page("    ")
    page.write(prompt)
    page.end()
    page, shown = Page("  > "), 0
    async for output in client.generate(prompt, params):
        text = output.outputs[0].text
        page.write(text[shown:] if shown else text.lstrip())
        shown = len(text)
    page.end()
    return output


async def tell_all(launched: LaunchedEngine, params: SamplingParams) -> tuple[list[RequestOutput], Stats]:
    outputs = []
    async with AsyncClient(launched.address, tokenizer=launched.config.tokenizer) as client:
        for number, prompt in enumerate(PROMPTS, 1):
            print(f"\n{'First' if number == 1 else 'Second'} prompt")
            outputs.append(await stream(client, prompt, params))
        return outputs, await client.stats()


def print_engine(launched: LaunchedEngine, ready_s: float) -> None:
    engine = launched.engine
    print("vllm_lite: an engine process, a worker process, and this client")
    print(f"  model     {engine.model}, {launched.config.dtype}, {engine.max_model_len} tokens of context")
    print(f"  KV cache  {engine.num_blocks - 1} blocks of {engine.block_size} tokens")
    print(f"  ready     after {ready_s:.1f} s")


def print_figures(outputs: list[RequestOutput], stats: Stats, block_size: int) -> None:
    names = ("prompt", "cached", "output", "KV blocks", "first token", "tokens/s")
    print("\n" + " " * 9 + "".join(f"{name:>13}" for name in names))
    for name, output in zip(("first", "second"), outputs, strict=True):
        num_prompt, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
        times = output.metrics
        first_s = times.first_token_latency or 0.0
        later_s = (times.last_token_time or 0.0) - (times.first_token_time or 0.0)
        figures = (
            str(num_prompt),
            str(output.num_cached_tokens),
            str(num_output),
            str(-(-(num_prompt + num_output) // block_size)),
            f"{1000 * first_s:.1f} ms",
            f"{(num_output - 1) / later_s:.0f}" if later_s else "-",
        )
        print(f"  {name:<7}" + "".join(f"{figure:>13}" for figure in figures))
    second = outputs[1]
    print(
        f"\n  prefix cache  {second.num_cached_tokens} of the second prompt's {len(second.prompt_token_ids)} tokens "
        "were there already"
    )
    print(
        f"  KV blocks     {stats.peak_used_blocks} used at once, {stats.num_cached_blocks} cached for later prompts, "
        f"{stats.num_blocks} in all"
    )


def run(params: SamplingParams) -> None:
    began_s = time.monotonic()
    launched = launch(EngineConfig.load({"cpu_kvcache_space": 0.25, "log_level": "error"}))
    try:
        print_engine(launched, time.monotonic() - began_s)
        outputs, stats = asyncio.run(tell_all(launched, params))
        print_figures(outputs, stats, launched.engine.block_size)
    finally:
        launched.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    try:
        run(SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed))
    except (VllmLiteError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
