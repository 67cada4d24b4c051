"""Multi-turn chats over two engines: the share of cached prompt tokens with PrefixRouter and with round robin.

    python benchmarks/prefix_routing.py [--chats 16] [--turns 6] [--cache 1.2]

Each chat sends several prompts, each with the whole conversation so far; chats at different turns are mixed. The KV
caches of both engines together hold all chats `--cache` times. PrefixRouter uses the prompts that it sent, or also KV
events. It also measures the cost of one routing decision.
"""

import argparse
import itertools
import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from vllm_lite.client.engines.data_parallel import DataParallelSession
from vllm_lite.client.engines.launch_engines import launch_engines
from vllm_lite.client.engines.routing import PrefixRouter, RoutingChoice
from vllm_lite.client.streams.stream import Event
from vllm_lite.config import EngineConfig
from vllm_lite.protocol.api import Finished, Generate, Tokens
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.runtime.prefix_hash import PrefixHasher

SYSTEM, QUESTION, ANSWER = 64, 48, 32
"""Tokens of the system prompt, which all chats share, of each question and of each answer."""


class RoundRobin(PrefixRouter[int]):
    """Takes the engines in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = itertools.count()

    def choose(
        self,
        hashes: Sequence[Hashable],  # noqa: ARG002
        loads: Mapping[int, int],
        affinity: str | None = None,  # noqa: ARG002
    ) -> RoutingChoice[int]:
        engines = sorted(loads)
        return RoutingChoice(engines[next(self._turns) % len(engines)], 0)


def ask(session: DataParallelSession, name: str, prompt: list[int]) -> list[int]:
    """Run one turn of a chat to its end. Returns the answer."""
    answer: list[int] = []
    ended: list[Event] = []

    def take(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Tokens | Finished):
                answer.extend(event.token_ids)
            if not isinstance(event, Tokens):
                ended.append(event)

    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    session.submit(Generate(name, pack_tokens(prompt), params), take)
    while not ended:
        time.sleep(0.002)
    return answer


def converse(asked: Callable[[str, list[int]], list[int]], chats: int, turns: int) -> None:
    """Run all chats, four at a time, in a mixed order. `asked` takes a name and a prompt, and returns the answer."""
    rng = random.Random(1)
    system = [rng.randrange(10, 1000) for _ in range(SYSTEM)]
    state = [list(system) for _ in range(chats)]
    with ThreadPoolExecutor(4) as threads:
        for turn in range(turns):
            order = rng.sample(range(chats), chats)
            for chat in order:
                state[chat] += [rng.randrange(10, 1000) for _ in range(QUESTION)]
            names, prompts = [f"{chat}-{turn}" for chat in order], [list(state[chat]) for chat in order]
            for chat, answer in zip(order, threads.map(asked, names, prompts), strict=True):
                state[chat] += answer


def cache_blocks(chats: int, turns: int, times: float = 1.2) -> int:
    """The number of KV blocks of each of two engines whose caches together have room for `times` all chats."""
    whole = SYSTEM + turns * (QUESTION + ANSWER)
    return round(chats * whole // 16 * times / 2)


def run(router: PrefixRouter[int], blocks: int, chats: int, turns: int, *, listens: bool = False) -> dict[str, Any]:
    """Run all chats on two engines with `blocks` KV blocks each. `listens`: the router uses their KV events."""
    config = EngineConfig.load(
        {"data_parallel_size": 2, "num_gpu_blocks_override": blocks, "max_num_seqs": 8, "log_level": "error"}
    )
    launched = launch_engines(config)
    try:
        session = launched.session
        if not isinstance(session, DataParallelSession):
            raise TypeError("two engines have a session of their own")
        for index, member in enumerate(session.members):
            router.add(index, member.welcome.num_blocks)
        session._router = router  # noqa: SLF001
        if session._blocks is not None:  # noqa: SLF001
            session._blocks.router = router if listens else PrefixRouter[int]()  # noqa: SLF001
        began_s = time.monotonic()
        converse(partial(ask, session), chats, turns)
        took_s = time.monotonic() - began_s
        stats = session.stats()
        loads = [member.stats().prompt_tokens for member in session.members]
        return {
            "hit_rate": round(stats.cached_tokens / stats.prompt_tokens, 3),
            "prompt_tokens": loads,
            "seconds": round(took_s, 1),
        }
    finally:
        launched.close()


def cost() -> dict[str, float]:
    """Microseconds of one decision, for prompts of 512 and 8192 tokens, among 2 and 64 engines."""
    found = {}
    for length, count in itertools.product((512, 8192), (2, 64)):
        router, hasher = PrefixRouter[int](), PrefixHasher(16, "bench")
        prompt = memoryview(pack_tokens([number % 1000 for number in range(length)]))
        for engine in range(count):
            router.add(engine, 10_000)
        loads = dict.fromkeys(range(count), 3)
        times = []
        for _ in range(200):
            began_s = time.perf_counter()
            hashes: list[bytes] = []
            hasher.extend(hashes, hasher.root(), prompt, length)
            router.stored(router.choose(hashes, loads).engine, hashes)
            times.append(time.perf_counter() - began_s)
        found[f"{length} tokens, {count} engines"] = round(1e6 * sorted(times)[len(times) // 2], 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--cache", type=float, default=1.2)
    given = parser.parse_args()
    blocks = cache_blocks(given.chats, given.turns, given.cache)
    print("microseconds of a decision:", cost())
    print("round robin:", run(RoundRobin(), blocks, given.chats, given.turns), flush=True)
    for name, listens in (("by what it sent", False), ("by KV events", True)):
        found = run(PrefixRouter[int](), blocks, given.chats, given.turns, listens=listens)
        print(f"PrefixRouter, {name}:", found, flush=True)


if __name__ == "__main__":
    main()
