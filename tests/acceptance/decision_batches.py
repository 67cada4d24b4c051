"""Decisions in random batches: under `--deterministic`, each probability has the same bits as alone.

    python -m tests.acceptance.decision_batches [COUNT] [MODEL]

Alone: one question in an engine of one row that keeps no prefix. COUNT (1000) times a batch is drawn: one to four
decisions at once, each about one of some states, with some of its questions in any order, beside requests that
generate; in engines that cut prompts into chunks, have few rows, or lose blocks. Before every tenth batch the prefix
cache is emptied. MODEL is a folder or file; without it a tiny one is made, in bfloat16. Prints how many answers were
compared, and exits with 1 if any had other bits.
"""

import asyncio
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.deadlines import scaled
from tests.decisions import QUESTIONS, write_decider
from vllm_lite import LLM, AsyncClient, SamplingParams
from vllm_lite.client.decisions.answers import DecisionOutput

DEADLINE_S = scaled(1800.0)
WORDS = ("the", "fox", "page", "engine", "dog", "once", "a", "fish", "was", "charged", "twice", "urgent")
LENGTHS = (3, 20, 70, 150, 300)
"""Words of the states."""
NUM_ALIKE = 2
"""States of each length, which have a common prefix."""
ENGINES: dict[str, dict[str, Any]] = {
    "usual": {},
    "chunks of 33": {"max_num_batched_tokens": 33},
    "three rows": {"max_num_seqs": 3},
    "few blocks": {"max_num_seqs": 8, "num_gpu_blocks_override": 160},
    "one step in flight": {"async_scheduling": False, "block_size": 8},
}

Bits = tuple[tuple[float, ...], float, bool]


def make_states(draw: random.Random) -> list[str]:
    states = []
    for length in LENGTHS:
        begin = draw.choices(WORDS, k=length)
        states += [" ".join([*begin, *draw.choices(WORDS, k=number)]) for number in range(NUM_ALIKE)]
    return states


def make_questions() -> dict[str, dict[str, Any]]:
    nouls = {f"n{number}": {"type": "noul", "instructions": f"Is it {number}?"} for number in range(12)}
    return {**QUESTIONS, **nouls}


def bits_of(found: DecisionOutput, name: str) -> Bits:
    """All results of a question, with floats unrounded."""
    answer, diagnostics = found.answers[name], found.diagnostics[name]
    return tuple(answer.probabilities.values()), diagnostics.label_mass, diagnostics.argmax_is_label


def alone(model: Path, states: list[str], settings: dict[str, Any]) -> dict[tuple[str, str], Bits]:
    with LLM(model, max_num_seqs=1, enable_prefix_caching=False, **settings) as llm:
        return {
            (state, name): bits_of(llm.decide(state, {name: question}), name)
            for state in states
            for name, question in make_questions().items()
        }


class Batches:
    """Draws batches, and compares their answers with the truth."""

    def __init__(self, truth: dict[tuple[str, str], Bits], states: list[str], seed: int = 1) -> None:
        self._truth = truth
        self._states = states
        self._draw = random.Random(seed)
        self.num_compared = self.num_wrong = self.num_cached = 0

    async def run(self, client: AsyncClient, count: int) -> None:
        for number in range(count):
            if number % 10 == 0:
                await client.reset_prefix_cache()
            decisions = [self._decide(client) for _ in range(self._draw.randint(1, 4))]
            others = [self._generate(client) for _ in range(self._draw.randint(0, 2))]
            await asyncio.gather(*decisions, *others)

    async def _decide(self, client: AsyncClient) -> None:
        state, questions = self._draw.choice(self._states), make_questions()
        names = self._draw.sample(list(questions), self._draw.randint(1, len(questions)))
        found = await client.decide(state, {name: questions[name] for name in names})
        self.num_cached += found.num_cached_tokens
        for name in names:
            self.num_compared += 1
            if bits_of(found, name) != self._truth[state, name]:
                self.num_wrong += 1
                print(f"other bits: {name} of {state[:40]!r}", flush=True)

    async def _generate(self, client: AsyncClient) -> None:
        params = SamplingParams(max_tokens=self._draw.randint(1, 20), seed=self._draw.randrange(1000), ignore_eos=True)
        async for _ in client.generate(self._draw.choice(self._states), params):
            pass


async def run(address: str, batches: Batches, count: int) -> None:
    async with AsyncClient(address) as client:
        await asyncio.wait_for(batches.run(client, count), DEADLINE_S)


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    settings: dict[str, Any] = {"deterministic": True, "dtype": "bfloat16", "max_model_len": 4096, "log_level": "error"}
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) > 2:
            model = Path(sys.argv[2])
        else:
            model = write_decider(Path(folder) / "m", dtype="bfloat16", max_position_embeddings=4096)
        states = make_states(random.Random(0))
        batches = Batches(alone(model, states, settings), states)
        for place, (name, more) in enumerate(ENGINES.items()):
            share = count // len(ENGINES) + (place < count % len(ENGINES))
            before = batches.num_compared
            with LLM(model, **settings, **more) as llm:
                asyncio.run(run(llm.address, batches, share))
                lost = llm.stats().preemptions
            print(f"{name}: {share} batches, {batches.num_compared - before} answers, {lost} preemptions", flush=True)
    compared, wrong, cached = batches.num_compared, batches.num_wrong, batches.num_cached
    print(f"{count} batches: {compared} answers, {wrong} with other bits; {cached} tokens were cached")
    return 1 if wrong or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
