"""Part of `gpu_check`: processes of a GPU's engine are killed and replaced, and streams continue.

The demo model serves the same streams undisturbed, while its worker is killed, and while its engine is killed. The
tokens must be the same each time. It runs in float32, so that rounding does not change a token when KV is recomputed.
With `--emulate` everything runs on the CPU.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from gpu_check_parts import parser_of, run_checks

from vllm_lite import AsyncClient, EngineConfig, SamplingParams
from vllm_lite.client.engines import instances
from vllm_lite.client.engines.launch import LaunchedEngine, launch

TIMEOUT_S = 60.0
NUM_STREAMS, TOKENS_BEFORE = 8, 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True, detokenize=False)
Tokens = list[list[int]]


def engine(launched: LaunchedEngine) -> int:
    return launched.pid


def worker(launched: LaunchedEngine) -> int:
    own = [instance for instance in instances.find() if instance.record.address == launched.address]
    return own[0].workers[0].pid


async def serve(address: str, kill: Callable[[], None] | None = None) -> Tokens:
    """Return the tokens of all streams; `kill` is called when each of them has some tokens and none has ended."""
    reached = [asyncio.Event() for _ in range(NUM_STREAMS)]

    async def read(client: AsyncClient, index: int) -> list[int]:
        tokens: list[int] = []
        async for output in client.generate([20 + index, 21, 22, 23], GREEDY):
            tokens = list(output.outputs[0].token_ids)
            if len(tokens) >= TOKENS_BEFORE:
                reached[index].set()
        return tokens

    async with AsyncClient(address) as client:
        streams = [asyncio.ensure_future(read(client, index)) for index in range(NUM_STREAMS)]
        if kill is not None:
            await asyncio.gather(*(event.wait() for event in reached))
            if any(stream.done() for stream in streams):
                raise RuntimeError("a stream had ended before the process was killed")
            kill()
        return await asyncio.gather(*streams)


def tokens_of(launched: LaunchedEngine, victim: Callable[[LaunchedEngine], int] | None = None) -> Tokens:
    kill = None
    if victim is not None:
        pid = victim(launched)

        def kill() -> None:
            os.kill(pid, signal.SIGKILL)

    return asyncio.run(asyncio.wait_for(serve(launched.address, kill), TIMEOUT_S))


CHECKS: dict[str, Callable[[LaunchedEngine], int]] = {"a killed worker": worker, "a killed engine": engine}


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    settings: dict[str, Any] = {"model": "demo", "dtype": "float32", "gpu_memory_utilization": 0.3}
    settings["device"] = "cpu" if arguments.emulate else "cuda"
    with closing(launch(EngineConfig.check(settings | {"log_level": "warning"}))) as launched:
        whole = tokens_of(launched)

        def check(victim: Callable[[LaunchedEngine], int]) -> str | None:
            got = tokens_of(launched, victim)
            return None if got == whole else f"{got} instead of {whole}"

        run_checks({name: partial(check, victim) for name, victim in CHECKS.items()}, arguments.first, lambda: True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
