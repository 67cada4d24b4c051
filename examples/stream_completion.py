"""Stream one completion from a running engine: examples/stream_completion.py ipc:///path/to/socket "A prompt" """

import argparse
import asyncio
import sys
import time

from vllm_lite import AsyncClient, SamplingParams
from vllm_lite.errors import VllmLiteError


async def stream(address: str, prompt: str, params: SamplingParams) -> None:
    async with AsyncClient(address, timeout_s=10) as client:
        print(prompt, end="", flush=True)
        shown = 0
        async for output in client.generate(prompt, params):
            text = output.outputs[0].text
            print(text[shown:], end="", flush=True)
            shown = len(text)
    done, first_s = output.outputs[0], output.metrics.first_token_latency or 0.0
    elapsed_s = time.monotonic() - output.metrics.arrival_time
    print(
        f"\n[{len(done.token_ids)} tokens in {elapsed_s:.2f} s, the first after {first_s:.3f} s; {done.finish_reason}; "
        f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached]"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="what scripts/launch_engine.py prints as address")
    parser.add_argument("prompt", nargs="?", default="One windy day,")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    try:
        params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
        asyncio.run(stream(args.address, args.prompt, params))
    except (VllmLiteError, ValueError) as error:
        sys.exit(f"stream_completion: {error}")
    except KeyboardInterrupt:  # leaving the stream has aborted the request
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
